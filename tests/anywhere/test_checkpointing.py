"""Every operator inside checkpoints, offloading and other saved-tensor hooks: repeated calls, saved bytes."""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from harness import MLP, Ran, saving, selective
from torch import Tensor, nn
from torch.autograd.graph import (
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_fused_ops as tfo
from torch_fused_ops import functional as FF
from torch_fused_ops.nn import FusedMLP

fused = torch.ops.fused
ROWS, WIDTH = 6, 16
Fn = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    """A function of one tensor (ROWS, WIDTH), its operator, and the bytes that it saves in addition to its result."""

    run: Fn
    operator: Any
    saves_bytes: int


H = ROWS * WIDTH * 4
FP8 = ROWS * (WIDTH + 4)
BIAS = torch.linspace(-1, 1, WIDTH).requires_grad_()
SCALE = torch.linspace(0.5, 1, ROWS).requires_grad_()
SEED = torch.tensor([3])
CASES = {
    "bias_act": Case(lambda h: FF.bias_gelu(h, BIAS), fused.bias_act, H),
    "relu": Case(lambda h: FF.bias_act(h, activation="relu"), fused.bias_act, 0),  # it saves its result
    "glu": Case(lambda h: FF.swiglu(h, h.detach(), SCALE), fused.glu, H),
    "bias_glu": Case(lambda h: FF.bias_glu(h, BIAS, activation="gelu", clamp=0.5), fused.bias_glu, H),
    "dropout_add": Case(lambda h: FF.dropout_add(h, BIAS, h, seed=SEED, p=0.5), fused.dropout_add, 0),
    "softmax": Case(lambda h: FF.scaled_masked_softmax(h, scale=0.3, causal=True), fused.scaled_masked_softmax, 0),
    "bias_act fp8": Case(lambda h: FF.bias_gelu(h, BIAS, memory="fp8"), fused.bias_act, FP8),
    "bias and relu": Case(lambda h: FF.bias_act(h, BIAS, activation="relu"), fused.bias_act, 0),
    "relu fp8": Case(lambda h: FF.bias_act(h, activation="relu", memory="fp8"), fused.bias_act, 0),
    "glu fp8": Case(lambda h: FF.swiglu(h, h, memory="fp8"), fused.glu, 2 * FP8),
    "bias_glu fp8": Case(lambda h: FF.bias_glu(h, BIAS, activation="gelu", memory="fp8"), fused.bias_glu, FP8),
}


def between_functions(run: Fn) -> Fn:
    """Return ``run`` between two functions that save their argument: x, and the result of ``run``."""
    return lambda x: run(x.sin()).cos()


def checkpoint_variants(fn: Fn, operator: Any) -> dict[str, Fn]:
    inner: Fn = lambda x: checkpoint(fn, x, use_reentrant=False)  # noqa: E731
    return {
        "none": fn,
        "reentrant": lambda x: checkpoint(fn, x, use_reentrant=True),
        "not reentrant": inner,
        "nested": lambda x: checkpoint(inner, x, use_reentrant=False),
        "reentrant around": lambda x: checkpoint(inner, x, use_reentrant=True),
        "selective": lambda x: checkpoint(fn, x, use_reentrant=False, context_fn=selective(operator.default)),
    }


def gradient(y: Tensor, x: Tensor) -> Tensor:
    """Return the gradient from backward(): reentrant checkpoints do not support autograd.grad."""
    x.grad = None
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad


# Number of calls of the operator in backward. In "nested", the outer one stops when it has the inner one's input.
AGAIN = {"none": 0, "reentrant": 1, "not reentrant": 1, "nested": 1, "reentrant around": 2}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", checkpoint_variants(torch.sin, fused.glu))
def test_checkpoints_repeat_and_save_as_requested(way: str, name: str) -> None:
    case = CASES[name]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(between_functions(case.run)(x).square().sum(), x)
    torch.manual_seed(1)
    with Ran() as ran:
        y = checkpoint_variants(between_functions(case.run), case.operator)[way](x)
        result = y.untyped_storage().nbytes()
        assert ran.counted[case.operator] == 1
        saved = {"none": result + case.saves_bytes, "selective": result}.get(way, 0)
        assert ran.alive(y) == saved
        ran.counted.clear()
        grad = gradient(y, x)
    assert ran.counted[case.operator] == AGAIN.get(way, 0)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_mode_around_only_one_pass(use_reentrant: bool, name: str) -> None:
    """Forward and its repetition may reach the kernel through different code, but save the same tensors."""
    run = between_functions(CASES[name].run)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    gradients = []
    for forward, backward in ((False, False), (False, True), (True, False)):
        torch.manual_seed(1)
        with Ran() if forward else saved_tensors_hooks(lambda t: t, lambda t: t):
            y = checkpoint(run, x, use_reentrant=use_reentrant)
        with Ran() if backward else saved_tensors_hooks(lambda t: t, lambda t: t):
            gradients.append(gradient(y, x))
    torch.testing.assert_close(gradients[1:], gradients[:1] * 2)


@pytest.mark.parametrize("level", ["off", "free", "fp8", "input"])
@pytest.mark.parametrize("way", checkpoint_variants(torch.sin, fused.glu))
def test_fused_mlp(way: str, level: str) -> None:
    mlp = FusedMLP(WIDTH, 64, "silu", gated=True, memory=level, dropout=0.5)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    if way == "selective":  # the checkpoint's policy has precedence over the level
        mlp.memory = "off"
    torch.manual_seed(1)
    expected = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    mlp.memory = level
    torch.manual_seed(1)
    with Ran() as ran:
        y = checkpoint_variants(mlp, fused.bias_glu)[way](x)
        ran.counted.clear()
        if way in ("reentrant", "not reentrant", "nested", "reentrant around"):
            assert ran.alive(y) == 0
        mlp.zero_grad()
        grads = [gradient(y, x), *(p.grad for p in mlp.parameters())]
    if way != "none":  # without a checkpoint, a level may also repeat the operator
        assert ran.counted[fused.bias_glu] >= AGAIN.get(way, 0)
    torch.testing.assert_close(grads, list(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters, reason="torch before 2.15"
)
@pytest.mark.parametrize("level", ["off", "free", "fp8", "input"])
@pytest.mark.parametrize("respects", [True, False, None])
def test_fused_mlp_if_policies_respect_hooks(respects: bool | None, level: str) -> None:
    mlp = FusedMLP(WIDTH, 64, "silu", gated=True)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    mlp.memory = level
    by = functools.partial(create_selective_checkpoint_contexts, [fused.bias_glu.default])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = checkpoint(mlp, x, use_reentrant=False, context_fn=by, respect_saved_tensors_hooks=respects)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()]), expected)


def dropped_twice(x: Tensor) -> Tensor:
    y = FF.bias_dropout_add(x.sin(), None, None, 0.5)
    return FF.bias_dropout_add(y * y, None, None, 0.25)


@pytest.mark.parametrize(
    ("backend", "use_reentrant"),
    [
        (None, True),
        (None, False),
        pytest.param("inductor", True, marks=pytest.mark.slow),
        pytest.param("inductor", False, marks=pytest.mark.slow),
    ],
)
def test_recomputation_drops_the_same_elements(backend: str | None, use_reentrant: bool) -> None:
    """Forward's dropped elements are zero in the result, and backward's dropped elements in the gradient."""

    def compiled(fn: Fn) -> Fn:
        return fn if backend is None else torch.compile(fn, backend=backend, fullgraph=True)

    if use_reentrant:  # around the compiled function, because Dynamo cannot capture reentrant checkpoints
        repeated = compiled(dropped_twice)
        call: Fn = lambda x: checkpoint(repeated, x, use_reentrant=True)  # noqa: E731
    else:
        call = compiled(lambda x: checkpoint(dropped_twice, x, use_reentrant=False))
    x = torch.linspace(0.1, 1.4, 512).view(8, 64).requires_grad_()
    masks = []
    for _ in range(2):
        y = call(x)
        torch.randint(0, 9, (3,))  # the generator advances between forward and backward
        x.grad = None
        y.sum().backward()
        grad = x.grad
        assert grad is not None and torch.equal(grad != 0, y != 0)
        torch.testing.assert_close(grad, torch.where(y != 0, 2 * x.sin() * x.cos() * 4 / 0.75, 0.0), rtol=1e-4, atol=0)
        masks.append(y != 0)
    assert 0.25 < masks[0].float().mean() < 0.5 and not torch.equal(*masks)


def mlp_of(w: Tensor, v: Tensor) -> Fn:
    return lambda x: F.gelu(x @ w) @ v


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize(
    ("way", "backend"),
    [
        ("not reentrant", "fused"),
        ("selective", "fused"),
        *(pytest.param(way, "fused", marks=pytest.mark.slow) for way in ("none", "nested")),
        *(pytest.param(way, "inductor", marks=pytest.mark.slow) for way in ("none", "not reentrant", "selective")),
    ],
)
def test_bytes_saved_by_compiled_checkpoints(way: str, backend: str) -> None:
    """The model has PyTorch's functions (backend "fused") or calls a fused operator (backend "inductor")."""
    w, v = torch.randn(WIDTH, 64) / 4, (torch.randn(64, WIDTH) / 8).requires_grad_()
    spelled, called = mlp_of(w, v), lambda x: FF.bias_gelu(x @ w) @ v
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    fn = checkpoint_variants(spelled if backend == "fused" else called, fused.bias_act)[way]
    options = {"policy": tfo.FusionPolicy(strict=True, memory="off")} if backend == "fused" else None
    compiled = torch.compile(fn, backend=backend, fullgraph=True, options=options)
    y, nbytes = saving(lambda: compiled(x), (x, w, v))
    middle = ROWS * 64 * 4
    # "none" saves the activation's input, and its result, which v's gradient reads.
    assert nbytes == {"none": 2 * middle, "not reentrant": 0, "nested": 0}.get(way, middle)
    expected = torch.autograd.grad(spelled(x).square().sum(), [x, v])
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), [x, v]), expected, rtol=1e-4, atol=1e-4)


class Block(nn.Module):
    """A transformer's layer: attention and an MLP, each behind a norm and in front of a dropout and a residual sum."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp, self.p = MLP(WIDTH, 64), p
        self.inner: Callable[[Fn, Tensor], Tensor] = lambda fn, x: fn(x)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (2, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norms[0](x)), self.p)
        return x + F.dropout(self.inner(self.mlp, self.norms[1](x)), self.p)


def plainly(fn: Fn, x: Tensor, **settings: Any) -> Tensor:
    return checkpoint(fn, x, use_reentrant=False, **settings)  # type: ignore[no-any-return]


def saves_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The usual selective policy: save the results of attention."""
    saves = "attention" in str(operator)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


class Stack(nn.Module):
    """Two layers. ``around`` calls each layer."""

    def __init__(self, around: Callable[[Fn, Tensor], Tensor] = lambda fn, x: fn(x), p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(p) for _ in range(2))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.around(layer, x)
        return x


def inside(model: Stack) -> Stack:
    """Add a checkpoint around each MLP."""
    for layer in model.layers:
        layer.inner = plainly
    return model


def wrapped(model: Stack) -> Stack:
    """Wrap layers as Accelerate, FSDP and torchtitan do."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, saves_attention)
STACKS: dict[str, Callable[[float], Stack]] = {
    "each layer": lambda p: Stack(plainly, p),
    "settings": lambda p: Stack(functools.partial(plainly, preserve_rng_state=False, determinism_check="none"), p),
    "nested": lambda p: Stack(lambda fn, x: plainly(lambda x: plainly(fn, x), x), p),
    "each MLP": lambda p: inside(Stack(p=p)),
    "each layer and MLP": lambda p: inside(Stack(plainly, p)),
    "both layers": lambda p: Stack(p=p),
    "wrappers": lambda p: wrapped(Stack(p=p)),
    "selective": lambda p: Stack(functools.partial(plainly, context_fn=SELECTIVE), p),
}


def trained(model: Fn, parameters: Sequence[Tensor], policy: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return a compiled step's result and gradients, and the bytes that it saves."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fused", fullgraph=True, options=policy)
    x = torch.linspace(-1, 1, 2 * ROWS * WIDTH).view(2, ROWS, WIDTH).requires_grad_()
    torch.manual_seed(1)
    y, nbytes = saving(lambda: compiled(x), (x, *parameters))
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])], nbytes


@functools.cache
def without_checkpoints(p: float, way: str, **policy: Any) -> tuple[list[Tensor], int, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Stack(p=p)
    return *trained(model, tuple(model.parameters()), policy), model.state_dict()


BOTH = {"memory": "input", "attention": "input"}


@pytest.mark.codegen_is_slow
@pytest.mark.covering(every=24)
@pytest.mark.parametrize("level", [BOTH, {"memory": "fp8"}, {"memory": "off", "attention": "input"}])
@pytest.mark.parametrize("way", STACKS)
def test_layers_save_as_without_checkpoints(way: str, level: dict[str, str], request: pytest.FixtureRequest) -> None:
    """Dropouts inside have one mask in forward and backward."""
    p = 0.0 if "MLP" in way else 0.5  # another checkpoint's border between linear layer and dropout changes the mask
    expected, nbytes, state = without_checkpoints(p, request.node.callspec.params["inductor_code"], **level)
    model = STACKS[way](p)
    model.load_state_dict(state)
    fn: Fn = (lambda x: plainly(model, x)) if way == "both layers" else model
    grads, saved = trained(fn, tuple(model.parameters()), {**level, "checkpoints": "replace"})
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-6)
    assert saved == nbytes


@pytest.mark.codegen_is_slow
def test_neighbors_of_replaced_checkpoints() -> None:
    """The layer before a dropped checkpoint saves its result, as it does before another checkpoint."""
    model = nn.Sequential(*(MLP(WIDTH, 64) for _ in range(2)))
    parameters = tuple(model.parameters())
    exact, all_saved = trained(model, parameters, {})
    saved = {}

    def layers(x: Tensor) -> Tensor:
        return plainly(model[1], plainly(model[0], x))

    for pattern in ("none", "0", "1"):
        grads, saved[pattern] = trained(layers, parameters, {"checkpoints": {pattern: "replace"}})
        torch.testing.assert_close(grads, exact, rtol=1e-5, atol=1e-6)
    assert saved["0"] + saved["1"] == saved["none"] + all_saved
    assert saved["none"] < saved["0"] < all_saved


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["*.mlp", "*.q", "*.norms.1"])
def test_a_part_of_a_layer_replaces_its_checkpoint(pattern: str) -> None:
    expected, _, state = without_checkpoints(0.5, "generated", **BOTH)
    model = STACKS["each layer"](0.5)
    model.load_state_dict(state)
    grads, _ = trained(model, tuple(model.parameters()), {**BOTH, "checkpoints": {pattern: "replace"}})
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.codegen_is_slow
def test_results_that_a_policy_must_save_stay_saved() -> None:
    mlp, x = MLP(WIDTH, 64), torch.randn(ROWS, WIDTH, requires_grad=True)
    fn = checkpoint_variants(mlp, fused.bias_act)["selective"]
    options = {"memory": "input", "checkpoints": "replace"}
    compiled = torch.compile(fn, backend="fused", fullgraph=True, options=options)
    _, nbytes = saving(lambda: compiled(x), (x, *mlp.parameters()))
    assert nbytes >= ROWS * 64 * 4


@pytest.mark.parametrize("name", [*CASES, "FusedMLP free", "FusedMLP fp8", "FusedMLP input"])
def test_user_hooks_see_every_saved_tensor(name: str) -> None:
    """Every saved tensor goes through hooks that convert it to bytes and back, and through ``save_on_cpu``."""
    run = FusedMLP(WIDTH, 64, memory=name.split()[1]) if name not in CASES else CASES[name].run
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(between_functions(run)(x).square().sum(), x)
    packed: list[int] = []

    def pack(t: Tensor) -> tuple[bytes, torch.dtype, torch.Size]:
        packed.append(t.nbytes)
        flat = t.detach().contiguous().view(-1).view(torch.uint8)
        return bytes(flat.tolist()), t.dtype, t.shape

    def unpack(saved: tuple[bytes, torch.dtype, torch.Size]) -> Tensor:
        data, dtype, shape = saved
        return torch.tensor(list(data), dtype=torch.uint8).view(dtype).view(shape)

    for hooks in (saved_tensors_hooks(pack, unpack), save_on_cpu()):
        torch.manual_seed(1)
        with hooks:
            y = between_functions(run)(x)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], expected)
    saved = {"FusedMLP free": ROWS * 64 * 4, "FusedMLP fp8": ROWS * 68, "FusedMLP input": 0}
    assert sum(packed) >= H + y.nbytes + (saved[name] if name in saved else CASES[name].saves_bytes)


@pytest.mark.parametrize("name", [*CASES, "FusedMLP free", "FusedMLP fp8", "FusedMLP input"])
def test_disabled_hooks_are_accepted(name: str) -> None:
    """Without hooks, a memory level saves the same tensors as "off", and results do not change."""
    run = FusedMLP(WIDTH, 64, memory=name.split()[1]) if name not in CASES else CASES[name].run
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with disable_saved_tensors_hooks("not here"):
        torch.manual_seed(1)
        y = between_functions(run)(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
    torch.manual_seed(1)
    expected = between_functions(run)(x)
    torch.testing.assert_close(y, expected)
    rtol = 0.5 if "FusedMLP fp8" in name else 1e-5
    torch.testing.assert_close(grad, torch.autograd.grad(expected.square().sum(), x)[0], rtol=rtol, atol=rtol / 5)
