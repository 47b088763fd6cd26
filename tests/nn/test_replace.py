"""replace_mlps: what is found, what is left alone and why, that nothing else changes, and the way back."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_fused_ops.nn import proofs, replace
from torch_fused_ops.nn import replaced as classes
from torch_fused_ops.nn.replace import replace_mlps

LEVELS = ("off", "free", "fp8", "input")
H, N = 16, 24


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An input in the situation that modules are tried in first: no other proof is needed."""
    return torch.randn(*(shape or (2, 3)), H, dtype=dtype).requires_grad_()


class Gated(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor] = F.silu, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(H, N, bias), nn.Linear(H, N, bias)
        self.down_proj = nn.Linear(N, H, bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class UpFirst(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(self.up_proj(x) * (gate * torch.sigmoid(gate)))


class Packed(nn.Module):
    def __init__(self, cut: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.cut = nn.Linear(H, 2 * N), nn.Linear(N, H), cut

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.cut(self.gate_up_proj(x))
        return self.down_proj(F.gelu(gate) * up)


class Conv1D(nn.Module):
    """GPT-2's."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(n_in, n_out) / 8), nn.Parameter(torch.randn(n_out) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view((*x.shape[:-1], -1))


class Plain(nn.Module):
    """Two linears and what is called between."""

    def __init__(self, act: Callable[..., Tensor], first: nn.Module | None = None, second: nn.Module | None = None):
        super().__init__()
        self.up = nn.Linear(H, N) if first is None else first
        self.down = nn.Linear(N, H) if second is None else second
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Bare(nn.Module):
    """No linear modules: parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(H, N) / 4), nn.Parameter(torch.randn(N))
        self.v = nn.Parameter(torch.randn(H, N) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.w + self.b).square() @ self.v.T


class Flat(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


class T5Like(Plain):
    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.act(self.up(x)), 0.25, self.training)
        if h.dtype != self.down.weight.dtype:
            h = h.to(self.down.weight.dtype)
        return F.dropout(self.down(h), 0.5, self.training)


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def sequential(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(H, N), *(middle or (nn.GELU(),)), nn.Linear(N, H))


MLPS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sequential": (sequential, "gelu"),
    "in place": (lambda: sequential(nn.ReLU(inplace=True)), "relu"),
    "no dropout": (lambda: sequential(nn.SiLU(), nn.Dropout(0.0)), "silu"),
    "gated": (Gated, "silu"),
    "gated with biases": (lambda: Gated(F.gelu, bias=True), "gelu"),
    "up first": (UpFirst, "silu"),
    "halves": (lambda: Packed(lambda h: h.chunk(2, -1)), "gelu"),
    "swapped": (lambda: Packed(lambda h: h.chunk(2, -1)[::-1]), "gelu"),
    "interleaved": (lambda: Packed(lambda h: (h[..., ::2], h[..., 1::2])), "gelu"),
    "Conv1D": (lambda: Plain(new_gelu, Conv1D(H, N), Conv1D(N, H)), "gelu_tanh"),
    "by hand": (lambda: Plain(lambda h: h / (1 + torch.exp(-1.702 * h))), "quick_gelu"),
    "parameters": (Bare, "relu2"),
    "flattened": (lambda: Flat(F.silu), "silu"),
    "T5": (lambda: T5Like(F.relu).eval(), "relu"),
}


def step(model: Callable[..., Tensor], x: Tensor, seed: int = 0) -> list[Tensor]:
    """The result, and the gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    torch.manual_seed(seed)
    y = model(x)
    tangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], tangent)]


def close(a: list[Tensor], b: list[Tensor], tolerance: float = 1e-5) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * float(y.abs().max()))


class Operators(TorchDispatchMode):
    """The names of all operators that run inside, and the memory that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        out = func(*args, **(kwargs or {}))
        self.made += [
            (StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes())
            for t in tree_leaves(out)
            if isinstance(t, Tensor)
        ]
        return out

    @property
    def fused(self) -> int:
        return sum(name in ("fused::bias_act", "fused::bias_glu", "aten::threshold") for name in self.names)


def runs_fused(model: nn.Module, x: Tensor) -> bool:
    with Operators() as operators:
        model(x)
    return any(name.startswith("fused::") for name in operators.names)


def state(module: nn.Module) -> list[Any]:
    """All that a module is."""
    return [
        (name, type(m), [(k, v if not isinstance(v, dict) else dict(v)) for k, v in m.__dict__.items()])
        for name, m in module.named_modules()
    ]


@pytest.mark.parametrize("name", MLPS)
def test_replaced_by_meaning(name):
    torch.manual_seed(0)
    make, activation = MLPS[name]
    mlp = make()
    training = mlp.training
    shapes = ((2, 3), (5,), (2, 1, 3)) if name in ("gated", "Conv1D", "flattened") else ((2, 3),)
    inputs = [torch.randn(*shape, H) for shape in shapes]
    expected = [step(mlp, x) for x in inputs]
    before, keys, parameters = state(mlp), list(mlp.state_dict()), list(mlp.parameters())
    report = replace_mlps(mlp)
    (site,) = report.sites
    assert site.activation == activation and site.op in ("fused::bias_act", "fused::bias_glu")
    assert site.reason.startswith("proved from ")
    assert list(mlp.state_dict()) == keys and all(a is b for a, b in zip(parameters, mlp.parameters(), strict=True))
    assert mlp.training == training and isinstance(mlp, type(make()))
    for x, result in zip(inputs, expected, strict=True):
        with Operators() as operators:
            close(step(mlp, x), result)
        assert operators.fused in (1, 2)  # forward, and again in backward
    report.restore()
    assert str(state(mlp)) == str(before)
    assert all(torch.equal(a, b) for a, b in zip(step(mlp, inputs[0]), expected[0], strict=True))
    report.restore()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["gated with biases", "Conv1D"])
def test_dtypes(name, dtype):
    torch.manual_seed(0)
    mlp, x = MLPS[name][0]().to(dtype), some(dtype=dtype)
    exact = step(copy.deepcopy(mlp).double(), x.double())
    replace_mlps(mlp)
    assert runs_fused(mlp, x)
    close([t.double() for t in step(mlp, x)], exact, 0.02 if dtype == torch.bfloat16 else 1e-12)


@pytest.mark.parametrize("name, packed", [("sequential", 1), ("gated with biases", 2)])
def test_what_is_kept(name, packed):
    rows = 40
    x = some(8, 5)
    a, h = rows * N * 4, rows * N * 4 * packed
    products, recomputed = (6, 1) if name == "sequential" else (9, 2)
    expected = {"off": h + a, "free": h, "fp8": h // 4 + rows * 4, "input": 0}
    for level, nbytes in expected.items():
        mlp = MLPS[name][0]()
        replace_mlps(mlp, memory=level)
        mlp(x)  # proves
        others = {t.untyped_storage()._cdata for t in (x, *mlp.parameters())}
        with Operators() as operators:
            y = mlp(x)
            others.add(y.untyped_storage()._cdata)
            alive = {ref.cdata: n for ref, n in operators.made if not ref.expired() and ref.cdata not in others}
            y.sum().backward()
        assert sum(alive.values()) == nbytes, level
        gemms = sum(name in ("aten::mm", "aten::addmm") for name in operators.names)
        assert gemms == products + recomputed * (level == "input"), level


def test_training_goes_on():
    """An optimizer made before, steps before, between and after: as without."""
    torch.manual_seed(0)
    models = [nn.Sequential(Gated(), nn.LayerNorm(H), sequential())]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in models]
    x = torch.randn(32, H)
    report = None
    for i in range(6):
        if i == 2:
            report = replace_mlps(models[0])
            assert report.summary == "2 of 2 MLPs replaced"
        if i == 4:
            report.restore()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) - x.flip(-1)).square().mean().backward()
            optimizer.step()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.every(3)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["relu", "silu"])
def test_dropouts(level, name):
    torch.manual_seed(0)
    mlp = T5Like(getattr(F, name), nn.Linear(H, 256), nn.Linear(256, 256, bias=False))
    with torch.no_grad():
        mlp.down.weight.copy_(torch.eye(256))
    whole = mlp.eval()(x := torch.randn(300, H))
    replace_mlps(mlp.train(), memory=level)
    y, *grads = step(mlp, x)
    with Operators() as operators:
        mlp(x)
    assert "fused::dropout_add" in operators.names and "aten::bernoulli_" not in operators.names
    there, was = y != 0, whole != 0
    assert abs(there.sum() / was.sum() - 0.75 * 0.5) < 0.01
    torch.testing.assert_close(y[there], (whole / 0.75 / 0.5)[there])
    tangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    mask = torch.where(was, there, False).float() / 0.75 / 0.5
    h = mlp.up(x).detach().requires_grad_()
    expected = torch.autograd.grad(mlp.act(h), h, mask * tangent)[0]
    alive = was if name == "relu" else torch.ones_like(was)
    result = torch.autograd.grad(mlp.up(x.requires_grad_()), x, expected * alive)[0]
    close([grads[0]], [result], 0.1 if level == "fp8" else 1e-4)
    mlp.eval()
    torch.testing.assert_close(mlp(x), whole)


# ---- what stays alone ------------------------------------------------------------------------------------------------


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


def adapted() -> nn.Module:
    """An adapter on all three."""
    mlp = Gated()
    for name, layer in list(mlp.named_children()):
        setattr(mlp, name, Lora(layer))
    return mlp


class Int8(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 127, (n_out, n_in), dtype=torch.int8))
        self.scale = nn.Parameter(torch.ones(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scale


class Extra(Plain):
    def forward(self, x: Tensor) -> Any:
        h = self.act(self.up(x))
        return self.down(h), h


class WithNumber(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), 3


class Counting(Plain):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Remembering(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class Listing(Plain):
    def __init__(self, act: Any) -> None:
        super().__init__(act)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return super().forward(x)


class CountingElsewhere(Plain):
    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return super().forward(x)


class ByWeight(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.up.weight.alone else self.down(self.up(x))


def by_weight() -> nn.Module:
    mlp = ByWeight(F.gelu)
    mlp.up.weight.alone = True
    return mlp


class Helped(Plain):
    """It calls a method of an object that only its forward has."""

    def __init__(self) -> None:
        class Helper:
            def act(self, h: Tensor) -> Tensor:
                return F.gelu(h)

        super().__init__(lambda h: Helper().act(h))


class DataDependent(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return super().forward(x)
        return self.down(self.up(x))


class BySize(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[0] < 5 else self.down(torch.tanh(self.up(x)))


class Residual(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scaled(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Moved(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1))


class Summed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(0, keepdim=True)


class Frozen(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.up(x)
        return self.down(self.act(h))


class Written(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Noisy(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class OtherUp(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x.flip(-1)))


class PutInPlace(Plain):
    def __init__(self, act: Any) -> None:
        super().__init__(act)
        own = super().forward
        self.forward = lambda x: own(x) + 1


def with_hook(kind: str, at: str) -> nn.Module:
    mlp = nn.Sequential(Plain(nn.GELU()))
    hooks: dict[str, Any] = {
        "register_forward_hook": lambda *_: None,
        "register_forward_pre_hook": lambda *_: None,
        "register_full_backward_hook": lambda *_: None,
    }
    getattr(mlp[0].get_submodule(at), kind)(hooks[kind])
    return mlp


def normed() -> nn.Module:
    return Plain(F.gelu, nn.utils.parametrizations.weight_norm(nn.Linear(H, N)))


def compiled_inside() -> nn.Module:
    mlp = Plain(F.gelu)
    mlp.up.compile(backend="eager")
    return mlp


def compiled() -> nn.Module:
    mlp = Plain(F.gelu)
    mlp.compile(backend="eager")
    return mlp


ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook": (
        lambda: with_hook("register_forward_hook", "up"),
        "up: Linear has a hook, which a fused forward would not",
    ),
    "pre-hook": (lambda: with_hook("register_forward_pre_hook", "act"), "act: GELU has a hook"),
    "backward hook": (lambda: with_hook("register_full_backward_hook", "down"), "down: Linear has a hook"),
    "parametrized": (normed, "weight is computed"),
    "quantised": (
        lambda: Plain(F.gelu, Int8(H, N), Int8(N, H)),
        "at its end stands mul, where a linear layer was looked",
    ),
    "LoRA": (
        lambda: Plain(F.gelu, Lora(nn.Linear(H, N)), Lora(nn.Linear(N, H))),
        "its activation stands between up.base, up.b and down.base, down.a, in a module that does more",
    ),
    "LoRA in front": (
        lambda: Plain(F.gelu, Lora(nn.Linear(H, N))),
        "in a module that does more: in front of its activation stands mul, where a linear layer was looked for",
    ),
    "LoRA on gate, up and down": (adapted, "between gate_proj.base, up_proj.base, gate_proj.b, up_proj.b and down"),
    "mish": (lambda: Plain(F.mish), "is no activation of the table"),
    "nearly": (lambda: Plain(lambda h: h * torch.sigmoid(1.7 * h)), "but has 1.7 for 1.702"),
    "kink": (lambda: Plain(lambda h: h.clamp(min=0)), ""),
    "extra output": (lambda: Extra(F.gelu), "it gives 2 tensors"),
    "a number beside": (lambda: WithNumber(F.gelu), "it gives something else than one tensor"),
    "counting": (lambda: Counting(F.gelu), "its forward changes the module's attributes"),
    "remembering": (lambda: Remembering(F.gelu), "its forward changes the module's attributes"),
    "listing": (lambda: Listing(F.gelu), "its forward changes the module's attributes"),
    "counting elsewhere": (
        lambda: CountingElsewhere(F.gelu),
        "it cannot be captured in one graph: Failed to trace builtin operator"  # what it calls to count
        if torch.__version__.startswith("2.11.")
        else "its forward reads what it changes, or what cannot be watched: ",
    ),
    "by a weight's attribute": (by_weight, "what cannot be watched: getattr failed on source self._modules['up']"),
    "helped": (Helped, "what cannot be watched: act ("),
    "data-dependent": (lambda: DataDependent(F.gelu), "it cannot be captured in one graph: Data-dependent"),
    "by size": (lambda: BySize(F.gelu), "its forward depends on its input's sizes"),
    "residual": (lambda: Residual(F.gelu), "at its end stands add, where a linear layer was looked for: F.linear,"),
    "scaled": (lambda: Scaled(F.gelu), "at its end stands mul, where a linear layer was looked for"),
    "moved": (lambda: Moved(F.gelu), "does not read its input, but transpose"),
    "summed": (lambda: Summed(F.gelu), "at its end stands sum, where a linear layer was looked for"),
    "frozen": (lambda: Frozen(F.gelu), ""),
    "written": (lambda: Written(F.gelu).requires_grad_(False), "does not read its input, but mul_"),
    "noisy": (lambda: Noisy(F.gelu), "does not read its input, but add"),
    "other up": (OtherUp, "does not read its input, but flip"),
    "put in place": (lambda: PutInPlace(F.gelu), "the forward of PutInPlace was put in its place"),
    "compiled": (compiled, "it is compiled already"),
    "compiled inside": (compiled_inside, "up in it is compiled already"),
    "compiled model": (lambda: torch.compile(Plain(F.gelu)), "it is compiled already"),
    "inner dropout": (lambda: sequential(nn.Dropout(0.5), nn.GELU()), "an active dropout stands"),
}


MORE = (
    "nearly",
    "a number beside",
    "remembering",
    "by a weight's attribute",
    "helped",
    "scaled",
    "moved",
    "summed",
    "frozen",
    "written",
    "noisy",
)


def some_slow(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", some_slow(ALONE, MORE))
def test_left_alone(name):
    if name == "kink" and torch.clamp(torch.zeros((), requires_grad=True), min=0).grad_fn is not None:
        z = torch.zeros((), requires_grad=True)
        if torch.autograd.grad(z.clamp(min=0), z)[0] == 0:
            pytest.skip("this torch's clamp has relu's gradient at 0")
    make, words = ALONE[name]
    model = make()
    before = str(state(model))
    report = replace_mlps(model)
    assert not report.replaced and str(state(model)) == before
    assert [site.op for site in report.sites] == [None] and words in report.sites[0].reason, report
    assert "0 of 1 MLPs replaced" in str(report)


def test_what_is_no_mlp_is_not_listed():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out(F.scaled_dot_product_attention(q, k, v))

    model = nn.ModuleDict(
        {
            "attention": Attention(),
            "conv": nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3)),
            "embedding": nn.Embedding(9, H),
            "two": nn.Sequential(nn.Linear(H, N), nn.Linear(N, H)),
        }
    )
    report = replace_mlps(model)
    assert not report.sites and "No module of the model" in str(report)


def test_embeddings_with_positions_are_no_mlp():
    class Embeddings(nn.Module):
        """BERT's: two tables of indices, and no matrix."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm, self.dropout = nn.Embedding(9, H), nn.LayerNorm(H), nn.Dropout(0.1)
            self.register_buffer("position_ids", torch.arange(8)[None])
            self.register_buffer("token_type_ids", torch.zeros(1, 8, dtype=torch.int64))

        def forward(self, ids: Tensor, more: Tensor) -> Tensor:
            return self.dropout(self.norm(self.words(ids)))

    report = replace_mlps(nn.Sequential(Embeddings(), Plain(F.gelu)))
    assert list(report.replaced) == ["1"] and len(report.sites) == 1 and not report.notes


class Experts(nn.Module):
    """Mixtral's (gate and up packed), or three stacks; or attention's projections, which are none."""

    def __init__(self, *shapes: tuple[int, int], count: int = 4) -> None:
        super().__init__()
        self.weights = [f"w{i}" for i in range(len(shapes))]
        for name, shape in zip(self.weights, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.randn(count, *shape)))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return x * self.w0.sum()


UP, DOWN = (N, H), (H, N)


@pytest.mark.parametrize("shapes", [((2 * N, H), DOWN), ((H, 2 * N), UP), (UP, DOWN, UP), (UP, DOWN)])
def test_experts_are_named(shapes):
    model = nn.ModuleDict({"block": nn.ModuleList([nn.Linear(H, H), nn.Linear(H, 4)]), "experts": Experts(*shapes)})
    for exclude, reason in (
        ((), "its weights are stacked, as a mixture's experts are: nn.GroupedMLP"),
        (("experts",), "exc"),
    ):
        (site,) = replace_mlps(model, exclude=exclude).sites
        assert site.module == "experts" and reason in site.reason and site.is_mlp


@pytest.mark.parametrize("shapes", [(UP, UP, UP), (UP,), (UP, (H, 5)), (UP, DOWN) * 2])
def test_other_stacks_are_not_named(shapes):
    assert not replace_mlps(nn.ModuleList([Experts(*shapes), Experts(UP, DOWN, count=1)])).sites


def test_weights_as_dtensors_say_when_to_call():
    class AsDTensor(nn.Parameter):
        device_mesh = None

    model = Plain(F.gelu)
    model.up.weight = AsDTensor(model.up.weight.detach())
    (site,) = replace_mlps(model).sites
    assert "its weights are DTensors: call replace_mlps before fully_shard" in site.reason


def test_other_inputs_are_named_or_given():
    class Routed(Plain):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.routed, self.plain, self.unused = Routed(F.gelu), Plain(F.gelu), Plain(F.gelu)

        def forward(self, x: Tensor) -> Tensor:
            return self.routed(self.plain(x), scale=x[..., :1])

    model, x = Model(), torch.randn(3, 4, H)
    report = replace_mlps(model)
    assert set(report.replaced) == {"plain", "unused"}
    assert "not looked at, for want of inputs to call them with: Routed" in str(report)
    report.restore()
    expected = step(lambda x: model(x), x)
    report = replace_mlps(model, x)
    reasons = {site.module: site.reason for site in report.sites}
    assert set(report.replaced) == {"plain"}
    assert "2 arguments" in reasons["routed"] and reasons["unused"] == "it was not called with these inputs"
    assert runs_fused(model, x)
    close(step(lambda x: model(x), x), expected)


# ---- what comes later ------------------------------------------------------------------------------------------------


def replaced(model: nn.Module | None = None, **kwargs: Any) -> nn.Module:
    model = Plain(nn.GELU()) if model is None else model
    assert replace_mlps(model, **kwargs).replaced
    return model


def test_later_hooks_wrappers_and_attributes_count():
    x = some()
    mlp = replaced(nn.Sequential(nn.Linear(H, N), nn.GELU(), nn.Dropout(0.5), nn.Linear(N, H)))
    own = copy.deepcopy(mlp.eval())
    expected = own(x)
    calls = []
    hook = mlp[1].register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(mlp(x), expected)
    assert calls == [1] and not runs_fused(mlp, x)
    hook.remove()
    assert runs_fused(mlp, x)
    base, mlp[0] = mlp[0], Lora(mlp[0])
    torch.testing.assert_close(mlp(x), mlp[3](F.gelu(mlp[0](x))))
    mlp[0] = base
    mlp[1] = nn.SiLU()
    torch.testing.assert_close(mlp(x), mlp[3](F.silu(mlp[0](x))))
    assert runs_fused(mlp, x)
    mlp[1] = nn.Mish()
    torch.testing.assert_close(mlp(x), mlp[3](F.mish(mlp[0](x))))
    assert not runs_fused(mlp, x)
    mlp[1] = nn.GELU()
    mlp.train()
    mlp[2].p = 0.0
    torch.testing.assert_close(mlp(x), expected)
    mlp[2].p = 1.0
    torch.testing.assert_close(mlp(x), mlp[3].bias.expand(2, 3, H))
    mlp.eval()
    mlp.double()
    torch.testing.assert_close(mlp(x.double()), expected.double(), atol=1e-5, rtol=1e-5)
    mlp.float()[3].weight.data.zero_()
    torch.testing.assert_close(mlp(x), mlp[3].bias.expand(2, 3, H))


KIND = "gelu"
ACTS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}
of: Any = classes.original_of


def gelu(*_: Any, kind: str = "gelu") -> str:
    return kind


def relu(*_: Any) -> str:
    return "relu"


RELU = property(relu)


class Config:
    kind = "gelu"

    def __init__(self, inner: Any = None) -> None:
        self.inner, self.kinds, self.p = inner, {"up": "gelu"}, 0.0

    def method(self) -> str:
        return "gelu"


class Reading(Plain):
    """Its activation's name is read elsewhere."""

    KIND = "gelu"

    def __init__(self) -> None:
        super().__init__(F.dropout)
        self.config, self.kinds, self.partial = Config(Config()), {"gelu"}, functools.partial(gelu, kind="gelu")
        self.part, self.elsewhere = nn.Module(), [nn.Identity()]
        self.part.config = Config()

    @property
    def read(self) -> str:
        return self.config.kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.elsewhere[0](ACTS[self.kind()](self.up(x)))
        return self.down(self.act(h, self.config.p, self.training))


def reading(kind: Callable[[Any], str]) -> nn.Module:
    return type("Kind", (Reading,), {"kind": kind})()


def closed(kind: str) -> Callable[[Any], str]:
    return lambda self: kind


READ: dict[str, tuple[Callable[[Any], str], Callable[[Any, pytest.MonkeyPatch], None]]] = {
    "configuration": (lambda s: s.config.kind, lambda m, patch: patch.setattr(m.config, "kind", "relu")),
    "its class": (lambda s: s.config.kind, lambda m, patch: patch.setattr(Config, "kind", "relu")),
    "its method": (lambda s: s.config.method(), lambda m, patch: patch.setattr(Config, "method", relu)),
    "its dict": (lambda s: s.config.kinds["up"], lambda m, patch: patch.setitem(m.config.kinds, "up", "relu")),
    "inner one": (lambda s: s.config.inner.kind, lambda m, patch: patch.setattr(m.config.inner, "kind", "relu")),
    "submodule's": (lambda s: s.part.config.kind, lambda m, patch: patch.setattr(m.part.config, "kind", "relu")),
    "not there yet": (
        lambda s: getattr(s.config, "other", "gelu"),
        lambda m, patch: patch.setattr(m.config, "other", "relu", raising=False),
    ),
    "property": (lambda s: s.read, lambda m, patch: patch.setattr(m.config, "kind", "relu")),
    "property itself": (lambda s: s.read, lambda m, patch: patch.setattr(Reading, "read", RELU)),
    "class": (lambda s: s.KIND, lambda m, patch: patch.setattr(Reading, "KIND", "relu")),
    "in front of it": (lambda s: s.KIND, lambda m, patch: patch.setattr(of(m), "KIND", "relu")),
    "method": (lambda s: "gelu", lambda m, patch: patch.setattr(of(m), "kind", relu)),
    "method's code": (lambda s: "gelu", lambda m, patch: patch.setattr(of(m).kind, "__code__", relu.__code__)),
    "default": (lambda s: gelu(), lambda m, patch: patch.setitem(gelu.__kwdefaults__, "kind", "relu")),
    "global": (lambda s: KIND, lambda m, patch: patch.setitem(globals(), "KIND", "relu")),
    "table": (lambda s: "gelu", lambda m, patch: patch.setitem(ACTS, "gelu", F.relu)),
    "function": (lambda s: gelu(), lambda m, patch: patch.setitem(globals(), "gelu", relu)),
    "closure": (closed("gelu"), lambda m, patch: patch.setattr(of(m).kind.__closure__[0], "cell_contents", "relu")),
    "partial": (lambda s: s.partial(), lambda m, patch: patch.setitem(m.partial.keywords, "kind", "relu")),
}
READ_SLOW = (
    "its dict",
    "inner one",
    "property",
    "property itself",
    "in front of it",
    "method's code",
    "table",
    "function",
)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", some_slow(READ, READ_SLOW))
def test_state_that_a_forward_reads(name, monkeypatch):
    kind, change = READ[name]
    mlp, x = reading(kind), some()
    before, changed = mlp(x), mlp.down(F.relu(mlp.up(x)))
    replaced(mlp)
    for _ in range(2):  # the second time, both are known
        torch.testing.assert_close(mlp(x), before)
        with monkeypatch.context() as patch:
            change(mlp, patch)
            torch.testing.assert_close(mlp(x), changed)
            assert runs_fused(mlp, x)
        assert runs_fused(mlp, x)
    assert mlp._fused.proofs == 1


def test_state_of_other_kinds():
    x = some()
    mlp = replaced(reading(lambda s: "gelu" if "gelu" in s.kinds else "relu"))
    before, changed = mlp(x), mlp.down(F.relu(mlp.up(x)))
    mlp.kinds.clear()
    torch.testing.assert_close(mlp(x), changed)
    mlp.kinds.add("gelu")
    mlp.config.p = 1.0
    torch.testing.assert_close(mlp(x), mlp.down.bias.expand_as(x))
    torch.testing.assert_close(mlp.eval()(x), before)
    hook = mlp.elsewhere[0].register_forward_hook(lambda module, args, y: -y)
    torch.testing.assert_close(mlp(x), mlp.down(-F.gelu(mlp.up(x))))
    hook.remove()
    assert runs_fused(mlp, x)
    mlp = replaced(reading(lambda s: s.KIND))
    torch.testing.assert_close(mlp(x), mlp.down(F.gelu(mlp.up(x))))
    type(mlp).KIND = "relu"  # not of the class that was captured: there is no telling what that changes
    torch.testing.assert_close(mlp(x), mlp.down(F.relu(mlp.up(x))))
    assert not runs_fused(mlp, x)
    del type(mlp).KIND
    assert runs_fused(mlp, x)


def test_modules_share_what_is_known_of_their_state():
    first = reading(lambda s: s.config.kind)
    model = nn.Sequential(first, copy.copy(first), first.down)
    model[1]._modules = {**first._modules, "up": nn.Linear(H, N), "down": nn.Linear(N, H)}
    replaced(model[:2])
    assert model[0]._fused.recipes.made == 1
    first.config.kind = "relu"
    for mlp in model[:2]:
        torch.testing.assert_close(mlp(x := some()), mlp.down(F.relu(mlp.up(x))))
        assert runs_fused(mlp, x)
    assert model[0]._fused.recipes.made == 2


def test_what_changes_around_a_forward_is_no_new_state():
    mlp, x = replaced(reading(lambda s: s.config.kind)), some()
    mlp(x)

    def proofs() -> int:
        for reentrant in (True, False) * 2:
            torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=reentrant).sum().backward()
        with torch.autograd.graph.save_on_cpu():
            mlp(x).sum().backward()
        return mlp._fused.proofs

    assert proofs() == proofs() and runs_fused(mlp, x)
    torch.compiler.reset()  # Dynamo forgets, and is asked again
    for _ in range(2):
        assert runs_fused(mlp, x)


def test_what_is_watched_keeps_no_weights(only_new_garbage):
    mlp, x = replaced(), some()
    mlp(x)
    weight = weakref.ref(mlp.up.weight)
    mlp.up = nn.Linear(H, N)
    gc.collect()
    assert weight() is None and runs_fused(mlp, x)


def test_an_attribute_that_always_changes_costs_no_proof_each(monkeypatch):
    monkeypatch.setattr(proofs, "MAX_PROOFS", 2)
    mlp, x = replaced(), some()
    fused = []
    for mlp.step in range(4):
        fused.append(runs_fused(mlp, x))
    assert fused == [True, True, False, False]
    del mlp.step
    assert runs_fused(mlp, x)


def test_hooks_on_the_module_itself_are_called():
    mlp, x, calls = Plain(F.gelu), some(), []
    mlp.register_forward_hook(lambda *_: calls.append("after"))
    replaced(mlp)
    mlp.register_forward_pre_hook(lambda *_: calls.append("before"))
    assert not calls and runs_fused(mlp, x) and calls == ["before", "after"]


def test_copies_pickles_and_names():
    x = some()
    mlp = replaced(nn.Sequential(MLPS["sequential"][0](), Gated()))
    assert repr(mlp) == repr(nn.Sequential(MLPS["sequential"][0](), Gated())) and type(mlp[1]).__name__ == "Gated"
    expected = mlp(x)
    other = copy.deepcopy(mlp)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert not other(x).any() and torch.equal(mlp(x), expected)
    buffer = io.BytesIO()
    torch.save(mlp, buffer)
    buffer.seek(0)
    for twin in (torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(mlp)), copy.copy(mlp)):
        assert torch.equal(twin(x), expected) and runs_fused(twin, x)


def test_called_by_keyword():
    mlp, x = replaced(), some()
    with Operators() as operators:
        y = mlp(x=x)
    assert torch.equal(y, mlp(x)) and operators.fused == 1
    with pytest.raises(TypeError, match="unexpected keyword"):
        mlp(z=x)
    with pytest.raises(TypeError):
        mlp()
    with pytest.raises(RuntimeError):
        mlp(torch.randn(3, H + 1))
    assert mlp(torch.empty(0, H)).shape == (0, H)


@pytest.mark.codegen_is_slow
def test_composes():
    torch._dynamo.reset()
    mlp = Gated().double()
    x = torch.randn(3, H, dtype=torch.float64)
    expected = step(mlp, x)
    per_example = torch.func.vmap(torch.func.grad(lambda x: mlp(x).sum()))(x)
    replaced(mlp)
    close(step(mlp, x), expected, 1e-12)
    assert torch.autograd.gradgradcheck(mlp, (x[:1].clone().requires_grad_(),))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda x: mlp(x).sum()))(x), per_example)
    torch.testing.assert_close(torch.func.jvp(mlp, (x,), (x,)), torch.func.jvp(copy.deepcopy(mlp), (x,), (x,)))
    again = lambda x: torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=False)  # noqa: E731
    close(step(again, x), expected[:2], 1e-12)
    compiled = torch.compile(lambda x: mlp(x), backend="aot_eager", fullgraph=True)
    close(step(compiled, x), expected[:2], 1e-12)
    assert torch.export.export(mlp, (x,)).graph_signature


def test_the_compilers_pick_up_still_reads_it():
    from torch_fused_ops.reports.explain import explain

    torch._dynamo.reset()
    (site,) = explain(replaced(), torch.randn(3, H)).sites
    assert site.op == "fused::bias_act"


@pytest.mark.parametrize("level", LEVELS)
def test_autocast(level):
    mlp, x = Gated(), some()
    with torch.autocast("cpu", torch.bfloat16):
        expected = mlp(x)
        replaced(mlp, memory=level)
        y = mlp(x)
        assert y.grad_fn is not None and runs_fused(mlp, x)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.01)  # it rounds fewer times
    y.float().sum().backward()
    assert mlp.gate_proj.weight.grad.dtype == torch.float32


def test_frozen_weights():
    mlp, x = Gated(bias=True), some()
    mlp.gate_proj.requires_grad_(False)
    mlp.down_proj.weight.requires_grad_(False)
    mlp(x).sum().backward()
    expected = {name: p.grad for name, p in mlp.named_parameters()}
    mlp.zero_grad()
    replaced(mlp)(x).sum().backward()
    for name, p in mlp.named_parameters():
        assert (p.grad is None) == (expected[name] is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[name])


def test_shared_parameters_and_a_module_used_twice():
    torch.manual_seed(0)
    mlp = Gated()
    mlp.up_proj.weight = mlp.gate_proj.weight
    tied = nn.Sequential(mlp, nn.LayerNorm(H), mlp, Gated())
    tied[3].down_proj.weight = mlp.down_proj.weight
    x = some()
    expected = step(tied, x)
    report = replace_mlps(tied)
    assert set(report.replaced) == {"0", "3"}
    close(step(tied, x), expected)
    report.restore()
    assert not runs_fused(tied, x)


# ---- the call itself -------------------------------------------------------------------------------------------------


def test_exclude_and_again():
    model = nn.ModuleDict({"encoder": Plain(F.gelu), "decoder": Plain(F.gelu)})
    report = replace_mlps(model, exclude=("encoder.*",))
    assert list(report.replaced) == ["decoder"] and report.sites[0].reason == "the policy excludes 'encoder.*'"
    second = replace_mlps(model)
    assert [site.reason for site in second.sites if site.module == "decoder"] == ["it is replaced already"]
    second.restore()
    assert list(second.replaced) == ["encoder"] and runs_fused(model["decoder"], some())
    report.restore()
    assert type(model["decoder"]) is Plain


def test_memory_by_module():
    shared = Plain(F.gelu)
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([Gated(), Gated(), shared]), "tied": shared, "head": nn.Linear(H, 4)}
    )
    memory = {"layers.0": "input", "tied": "fp8", "layers.1.*": "fp8", "head": "input"}
    report = replace_mlps(model, memory=memory)
    levels = {path: module._fused.memory for path, module in report.replaced.items()}
    assert levels == {"layers.0": "input", "layers.1": "fp8", "layers.2": "fp8"}
    assert report.sites[0].reason == "proved from silu, mul; memory='input'"
    assert report.notes == ("memory='head' names no module that was replaced",)
    assert copy.deepcopy(model)["layers"][0]._fused.memory == "input"
    report.restore()
    replace_mlps(model, memory={"layers.1": "fp8"})
    assert [layer._fused.memory for layer in model["layers"]] == ["free", "fp8", "free"]


def test_exclude_by_any_path_of_a_shared_module():
    mlp = Plain(F.gelu)
    report = replace_mlps(nn.ModuleDict({"encoder": mlp, "decoder": mlp}), exclude=("decoder.*",))
    assert not report.replaced and report.sites[0].reason == "the policy excludes 'decoder.*'"


def test_report():
    report = replace_mlps(nn.Sequential(Gated(), Gated(), Plain(F.mish)))
    text = str(report)
    assert text in (Path(__file__).parents[2] / "docs" / "modules.md").read_text()
    assert "fused::bias_glu  silu" in text and "Gated in 0,1 ×2" in text and "2 of 3 MLPs replaced" in text
    assert "register_activation" in text and '"summary": "2 of 3 MLPs replaced"' in report.to_json()


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"model": F.gelu}, TypeError, "must be a torch.nn.Module"),
        ({"memory": "least"}, ValueError, "memory='least' is not known; accepted: off, free, fp8, input"),
        ({"memory": {"up": "off"}}, ValueError, "'off' is for all of a model, not for a part of it"),
        ({"exclude": "encoder"}, TypeError, "exclude='encoder' is not accepted"),
        (
            {"exclude": ("u",)},
            ValueError,
            "exclude='u' is not accepted: it must fit a module of the model, as 'up' would",
        ),
        (
            {"exclude": ("decoder.*",)},
            ValueError,
            "exclude='decoder.*' is not accepted: it must fit a module of the model",
        ),
        (
            {"memory": {"dwn": "fp8"}},
            ValueError,
            "memory='dwn' is not accepted: it must fit a module of the model, as 'd",
        ),
        ({"memory": {"[0": "fp8"}}, ValueError, "'[0' has a [ without its ]"),
    ],
)
def test_errors(arguments, error, words):
    with pytest.raises(error) as caught:
        replace_mlps(**{"model": Plain(F.gelu), **arguments})
    assert words in str(caught.value)


def test_a_failure_leaves_the_model_as_it_was(monkeypatch):
    model = nn.Sequential(Gated(), Plain(F.gelu))
    before = str(state(model))
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|size"):
        replace_mlps(model, torch.randn(3, H + 1))
    assert str(state(model)) == before
    own = classes.class_of

    def fails(original: type[nn.Module]) -> type[nn.Module]:
        if original is Gated:
            raise RuntimeError("no more classes")
        return own(original)

    monkeypatch.setattr(replace, "class_of", fails)
    with pytest.raises(RuntimeError, match="no more classes"):
        replace_mlps(model)
    assert str(state(model)) == before


def test_restore_is_all_or_nothing():
    model = nn.Sequential(Gated(), Plain(F.gelu))
    report = replace_mlps(model)
    ours = type(model[1])
    model[1].__class__ = type("FSDPPlain", (ours,), {})
    with pytest.raises(RuntimeError, match="1 cannot be put back"):
        report.restore()
    assert isinstance(model[0], classes.Replaced)
    model[1].__class__ = ours
    report.restore()
    assert type(model[0]) is Gated and type(model[1]) is Plain


def test_random_numbers_and_buffers_stay():
    model, x = nn.Sequential(nn.BatchNorm1d(H), sequential(nn.GELU(), nn.Dropout(0.5))), torch.randn(4, H)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    replace_mlps(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mlp", some_slow(("gelu", "swiglu"), ("gelu",)))
def test_quickstart(mlp, monkeypatch):
    path = Path(__file__).parents[2] / "examples" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart_replaced", path)
    quickstart = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "quickstart_replaced", quickstart)
    spec.loader.exec_module(quickstart)
    torch.manual_seed(0)
    model = quickstart.GPT(quickstart.Config(layers=1, width=32, heads=2, context=16, mlp=mlp))
    check_model(model, 1, torch.randint(0, 256, (2, 16)), torch.randint(0, 256, (2, 16)))


def check_model(model: nn.Module, mlps: int, *ids: Tensor) -> None:
    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        out = model(*ids)
        out = out if isinstance(out, Tensor) else out[0]
        model.zero_grad()
        (out * torch.randn_like(out)).sum().backward()
        return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    model.eval()
    expected, keys = gradients(), list(model.state_dict())
    for args in ((), ids):
        report = replace_mlps(model, *args)
        assert len(report.replaced) == mlps, report
        assert list(model.state_dict()) == keys
        with Operators() as operators:
            results = gradients()
        assert operators.fused in (mlps, 2 * mlps)
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()) + 1e-5)
        report.restore()
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
    assert len(replace_mlps(model.train()).replaced) == mlps


def tiny(name: str) -> tuple[nn.Module, int]:
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    common |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    common["intermediate_size"] = 48
    gpt2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    gpt2 |= {"bos_token_id": 1, "eos_token_id": 2}
    t5 = {"d_model": 32, "d_ff": 48, "num_layers": 1, "num_heads": 2, "d_kv": 16, "vocab_size": 64}
    makes: dict[str, tuple[str, dict[str, Any], int]] = {
        "gpt2": ("GPT2", gpt2, 1),
        "llama": ("Llama", common, 1),
        "t5": ("T5", t5, 1),
        "t5 gated": ("T5", {**t5, "feed_forward_proj": "gated-gelu"}, 1),
        "bert": ("Bert", common, 0),
        "phi": ("Phi", common, 1),
        "phi3": ("Phi3", common, 1),
        "gemma": ("Gemma", {**common, "head_dim": 16, "num_key_value_heads": 2}, 1),
        "qwen2": ("Qwen2", {**common, "num_key_value_heads": 2}, 1),
        "mistral": ("Mistral", {**common, "num_key_value_heads": 2}, 1),
        "neox": ("GPTNeoX", common, 1),
        "opt": ("OPT", {**common, "ffn_dim": 48, "word_embed_proj_dim": 32}, 0),
    }
    kind, arguments, mlps = makes[name]
    config = getattr(transformers, f"{kind}Config")(**arguments)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}EncoderModel" if kind == "T5" else f"{kind}Model")(config), mlps


MODELS = ("gpt2", "llama", "bert", "t5", "t5 gated", "phi", "gemma", "phi3", "qwen2", "mistral", "neox", "opt")


@pytest.mark.every(2)
@pytest.mark.parametrize("name", some_slow(MODELS, MODELS[2:]))
def test_transformers(name):
    model, mlps = tiny(name)
    check_model(model, mlps, torch.randint(3, 64, (2, 9)))


@pytest.mark.slow
def test_an_mlp_in_two_modules_says_so():
    model, _ = tiny("bert")
    (site,) = replace_mlps(model).sites
    assert site.module == "encoder.layer.0"
    assert (
        "its activation stands between intermediate.dense and output.dense, in a module that does more" in site.reason
    )
