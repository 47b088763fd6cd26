"""``offload=``: saved tensors that move to the host, on a CPU with emulated copies, and in CUDA code on paper.

The emulated copies happen as late as the program allows: when it waits for them. Until then, their results hold NaN.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from harness import MLP, WITHOUT_BIAS, Stack, SwiGLU, compiled, of_halves, python, raises
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_fused_ops as tfo
from torch_fused_ops import FusionPolicy
from torch_fused_ops.benchmarks import models
from torch_fused_ops.lowerings import compat, offload, passes
from torch_fused_ops.tools.verify import interpreted

if not compat.has_offload_operators():
    pytest.skip("torch has no operators that copy tensors to the host", allow_module_level=True)

ao = torch.ops.ao
WIDTH, HIDDEN, TOKENS = 16, 40, 8


# ---- copies on a CPU -------------------------------------------------------------------------------------------------


PENDING: dict[int, tuple[Tensor, Tensor]] = {}  # copies that have begun, by the result's address: source and result
MOVED: list[tuple[torch.dtype, int]] = []  # dtype and number of elements of each tensor copied to the host


def begin(source: Tensor, result: Tensor) -> Tensor:
    result.untyped_storage().fill_(0xFF)  # NaN in every floating-point dtype
    PENDING[result.data_ptr()] = (source.detach(), result.detach())
    return result


def to_host(tensor: Tensor) -> Tensor:
    MOVED.append((tensor.dtype, tensor.numel()))
    return begin(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))


def to_device(tensor: Tensor, device: torch.device, *layout: Any) -> Tensor:
    return begin(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))


def wait(tensor: Tensor, keepalive: Tensor | None = None, source: Tensor | None = None) -> Tensor:
    copied, result = PENDING.pop(tensor.data_ptr())
    # Two references belong to ``copied`` and to the object that ``untyped_storage`` returns.
    assert torch._C._storage_Use_Count(copied.untyped_storage()._cdata) > 2, "a source was freed during its copy"
    result.copy_(copied)
    return tensor


@functools.cache
def register_emulation() -> Any:
    from torch._functorch._activation_offloading import offload_ops

    offload_ops.offload.register_kernel("cpu")(to_host)
    offload_ops.reload.register_kernel("cpu")(to_device)
    library = torch.library.Library("ao", "IMPL")
    library.impl("wait_tensor", wait, "CPU")
    return library  # the kernel is unregistered with it


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Move every saved tensor of a CPU, however small."""
    register_emulation()
    monkeypatch.setattr(offload, "DEVICES", ("cpu",))
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    MOVED.clear()
    yield
    assert not PENDING, "nothing waits for a copy"


# ---- programs --------------------------------------------------------------------------------------------------------

CONFIG = replace(models.QUICK, width=WIDTH, hidden=HIDDEN, heads=4, kv_heads=2, context=TOKENS)


class Llama(Stack):
    """Two blocks with grouped-query attention."""

    def __init__(self) -> None:
        super().__init__(models.LlamaBlock(CONFIG) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), torch.ones(2)).to(x.dtype)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return x


class Adapted(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.frozen, self.a, self.b = nn.Linear(width, hidden), nn.Linear(width, 4), nn.Linear(4, hidden)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.b(self.a(x)) * 2.0  # type: ignore[no-any-return]


class Checkpointed(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Returning(MLP):
    """Also returns its pre-activation, or a view of it."""

    view: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Any:
        h = self.up(x * 1.5)
        return self.down(F.gelu(h)), self.view(h)


def returning(view: Callable[[Tensor], Tensor]) -> nn.Module:
    model = Returning(WIDTH, HIDDEN)
    model.view = view  # type: ignore[method-assign]
    return model


def mlps(make: Callable[[int, int], nn.Module]) -> nn.Module:
    return Stack((nn.Sequential(nn.LayerNorm(WIDTH), make(WIDTH, HIDDEN)) for _ in range(2)), residual=True)


class DropsOut(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: Stack(models.GPTBlock(CONFIG) for _ in range(2)),  # packed queries, keys and values
    "Llama": Llama,
    "MLPs": lambda: mlps(MLP),
    "SwiGLU": lambda: mlps(SwiGLU),
    "packed gate and up": lambda: mlps(lambda w, h: MLP(w, 2 * h, of_halves(F.silu), halves=2)),
    "adapters": lambda: mlps(lambda w, h: SwiGLU(w, h, Adapted)),
    "dropout": lambda: mlps(DropsOut),
    "checkpoints": lambda: Stack([*mlps(Checkpointed).layers, *mlps(MLP).layers], residual=True),
    "a result": lambda: returning(lambda h: h),
    "a view of it": lambda: returning(lambda h: h.view(-1)),
    "a slice of it": lambda: returning(lambda h: h[..., :7]),
}
STRICT: dict[str, Any] = {"strict": True}
POLICIES: dict[str, dict[str, Any]] = {
    "off": {"memory": "off"},
    "free": {},
    "fp8": {"memory": "fp8"},
    "input": {"memory": "input"},
    "tiled": {"memory": "tiled:2", "strict": False},  # a hidden layer that the model returns is not tiled
    "input and attention": {"memory": "input", "attention": "input"},
    "fp8 and attention": {"memory": "fp8", "attention": "input"},
}


def loss(result: Any) -> Tensor:
    return sum(t.square().sum() for t in (result if isinstance(result, tuple) else (result,)))  # type: ignore[return-value]


def once(call: Callable[..., Any], x: Tensor) -> None:
    loss(call(x)).backward()


def micro_batches(call: Callable[..., Any], x: Tensor) -> None:
    """Two forwards precede the first backward."""
    first, second = loss(call(x)), loss(call(x * 0.5 + 0.1))
    second.backward()
    first.backward()


def retained(call: Callable[..., Any], x: Tensor) -> None:
    """Backward runs twice, with another forward in between."""
    with torch._functorch.config.patch(donated_buffer=False):
        first = loss(call(x))
        first.backward(retain_graph=True)
        second = loss(call(x * 2 - 0.3))
        first.backward()
        second.backward()


def called_twice(call: Callable[..., Any], x: Tensor) -> None:
    loss(call(call(x))).backward()


def written_between(call: Callable[..., Any], x: Tensor) -> None:
    """The caller overwrites the argument before backward, which needs it only as LayerNorm's saved copy."""
    argument = x * 1.0
    result = loss(call(argument * 1.0))
    with torch.no_grad():
        argument.fill_(torch.nan)
    result.backward()


DRIVERS: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (once, micro_batches, retained, called_twice, written_between)
}


def gradients(model: nn.Module, policy: FusionPolicy, drive: Callable[..., None] = once, **settings: Any) -> list[Any]:
    x = torch.linspace(-2, 2, 2 * TOKENS * WIDTH).view(2, TOKENS, WIDTH).requires_grad_()
    model.zero_grad()
    torch.manual_seed(0)
    drive(compiled(model, policy, **settings), x)
    grads = [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
    return [g.to_local() if hasattr(g, "to_local") else g for g in grads]


def moved_and_equal(model: nn.Module, policy: dict[str, Any], *args: Any, **settings: Any) -> int:
    """Return the number of tensors that offloading moves. Gradients are identical, and finite."""
    expected = gradients(model, FusionPolicy(**STRICT | policy), *args, **settings)
    assert not MOVED
    actual = gradients(model, FusionPolicy(**STRICT | policy, offload=True), *args, **settings)
    assert all(a.isfinite().all() for a in actual)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    return len(MOVED)


# ---- gradients -------------------------------------------------------------------------------------------------------


DEFAULT = {("SwiGLU", "fp8")}


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize(
    ("model", "level"),
    [
        pytest.param(model, level, marks=[pytest.mark.slow] * ((model, level) not in DEFAULT))
        for model in MODELS
        for level, policy in POLICIES.items()
        if model in ("GPT", "Llama") or "attention" not in policy
    ],
)
def test_gradients_do_not_change(model: str, level: str, emulated: None) -> None:
    # Levels have no effect inside checkpoints, which ``strict`` reports.
    assert moved_and_equal(MODELS[model](), POLICIES[level] | ({"strict": False} if model == "checkpoints" else {}))


@pytest.mark.slow
@pytest.mark.parametrize("drive", DRIVERS)
@pytest.mark.parametrize("model", ["Llama", "SwiGLU"])
def test_calls_and_backwards_in_any_order(model: str, drive: str, emulated: None) -> None:
    assert moved_and_equal(MODELS[model](), {}, DRIVERS[drive]) > 3


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Llama", "packed gate and up"])
def test_dynamic_sizes(model: str, emulated: None) -> None:
    assert moved_and_equal(MODELS[model](), {}, dynamic=True) > 3


@pytest.mark.slow
def test_autocast(emulated: None) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert moved_and_equal(MODELS["SwiGLU"](), {"memory": "fp8"}) > 3


@pytest.mark.slow
def test_dtensors(emulated: None) -> None:
    """The linear layers are parallel over one rank. Local tensors move."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        styles = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        plan = {f"layers.{i}.1.{name}": style for i in range(2) for name, style in styles.items()}
        model = parallelize_module(MODELS["SwiGLU"](), init_device_mesh("cpu", (1,)), plan)
        assert moved_and_equal(model, {"strict": False}) > 3
    finally:
        dist.destroy_process_group()


CACHED = """
import torch, test_offload as t
from torch._dynamo.utils import counters

t.register_emulation()
t.offload.DEVICES, t.offload.MIN_BYTES = ("cpu",), 1
torch.manual_seed(1)
gradients = t.gradients(t.MODELS["SwiGLU"](), t.FusionPolicy(offload=True))
print(counters["aot_autograd"]["autograd_cache_hit"], len(t.MOVED), sum(float(g.double().norm()) for g in gradients))
"""


@pytest.mark.slow
def test_cached_code_runs_in_another_process(tmp_path: Path) -> None:
    """Compiled code from AOTAutograd's cache finds the operators, although no graph is edited."""
    path = f"{Path(__file__).parents[1]}:{Path(__file__).parent}"
    first, second = (
        python("-c", CACHED, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), PYTHONPATH=path).split() for _ in range(2)
    )
    assert (first[0], second[0]) == ("0", "1") and first[1:] == second[1:]


PREVENTING: dict[str, Any] = {
    "CUDA graphs": inductor_config.patch({"triton.cudagraphs": True}),
    "C++ wrapper": inductor_config.patch({"cpp_wrapper": True}),
    "compiled autograd": torch._dynamo.config.patch(compiled_autograd=True),
}


@pytest.mark.parametrize("setting", PREVENTING)
def test_settings_that_prevent_offloading(setting: str, emulated: None) -> None:
    """The policy's effect is missing, with a message, and an error under ``strict``."""
    with PREVENTING[setting]:
        (message,) = passes._missing(FusionPolicy(offload={"a": True}))
        assert message == f"offload={(('a', True),)!r} has no effect: {offload.prevented()}" != ""
        if setting == "CUDA graphs":
            assert all(g is not None for g in interpreted_gradients(FusionPolicy(offload=True))) and not MOVED
            raises(
                Exception,
                "strict=True and another setting",
                interpreted_gradients,
                FusionPolicy(offload=True, strict=True),
            )


def interpreted_gradients(policy: FusionPolicy) -> list[Any]:
    """Return the gradients of an MLP whose graphs run call by call."""
    model = MLP(WIDTH, HIDDEN)
    return list(torch.autograd.grad(loss(interpreted(policy)(model, torch.ones(2, WIDTH))), list(model.parameters())))


def test_torch_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "has_offload_operators", lambda: False)
    for use in (tfo.enable, tfo.compile_options, lambda policy: tfo.enabled(policy).__enter__()):
        raises(RuntimeError, "offload=True is not accepted: torch .* has no operators", use, FusionPolicy(offload=True))
    tfo.compile_options(FusionPolicy())


# ---- CUDA code -------------------------------------------------------------------------------------------------------

COPY = re.compile(r"(\w+) = torch\.ops\.ao\.(offload|reload)\.default\((?:reinterpret_tensor\()?(\w+)")
WAIT = re.compile(r"torch\.ops\.ao\.wait_tensor\.default\((\w+), None, (?:reinterpret_tensor\()?(\w+)")


def lines_between(code: str) -> list[list[str]]:
    """Return the lines between each copy and its wait. Check that the wait names the copy's source."""
    lines = code[code.index("def call(") :].splitlines()
    windows = []
    for i, line in enumerate(lines):
        if copy := COPY.search(line):
            result, _, source = copy.groups()
            names = {result, *re.findall(rf"^\s*(\w+) = {result}$", "\n".join(lines[i:]), re.M)}
            waits = ((j, wait) for j in range(i, len(lines)) if (wait := WAIT.search(lines[j])))
            end, wait = next((j, wait) for j, wait in waits if wait[1] in names)
            assert wait[2] == source
            between = lines[i + 1 : end]
            uses = [line for line in lines[i + 1 :] if names.intersection(re.findall(r"\w+", line))]
            assert not any(re.search(r"\.run\(|extern_kernels", line) for line in uses), "only a wait reads its result"
            assert not any(re.search(rf"\bdel {source}\b|= {source};|{source} = ", line) for line in between), source
            windows.append(between)
    return windows


def on_paper(**policy: Any) -> Any:
    virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")
    with torch.device("meta"):
        layers = (nn.Sequential(nn.RMSNorm(64), SwiGLU(64, 128, WITHOUT_BIAS)) for _ in range(3))
        model = Stack(layers, residual=True).bfloat16()
        x = torch.empty(256, 64, dtype=torch.bfloat16, requires_grad=True)
    with tfo.enabled(FusionPolicy(**policy)):
        return virtual_gpu.compile_on_paper(model, x)


def test_gemms_run_between_a_copy_and_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between copy and wait there is a GEMM. The copy's source is not freed or reused."""
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    paper = on_paper(offload=True)
    for kind, graph in paper.graphs.items():
        between = lines_between(graph.code)
        assert len(between) > 6
        assert all(any("extern_kernels.mm(" in line for line in lines) for lines in between), kind
        assert "is assumed to be not aligned" not in graph.code
