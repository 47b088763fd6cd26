"""Long runs: caches do not grow with the number of compilations, calls or shapes, and training losses agree."""

import functools
import gc
import importlib
import json
import pkgutil
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from harness import MLP, without_code
from torch import Tensor

import torch_fused_ops as tfo
from torch_fused_ops import functional
from torch_fused_ops.benchmarks import harness
from torch_fused_ops.benchmarks.laboratory import training
from torch_fused_ops.lowerings import compat, passes

SLOTS = ("pre_grad_custom_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass")
SLOTS += ("post_grad_custom_post_pass", "custom_partitioner_fn")


@functools.cache
def modules() -> tuple[ModuleType, ...]:
    """Import every module of the package that can be imported on this machine."""
    results = [tfo]
    for info in pkgutil.walk_packages(tfo.__path__[:1], "torch_fused_ops.", onerror=lambda name: None):
        if not info.name.endswith("__main__"):
            try:
                results.append(importlib.import_module(info.name))
            except ImportError:  # the module needs an extra
                continue
    # A clone has these two packages outside of the package's folder.
    for name in ("lowerings", "lowerings.recognize"):
        module = importlib.import_module(f"torch_fused_ops.{name}")
        results += [
            importlib.import_module(f"{module.__name__}.{i.name}") for i in pkgutil.iter_modules(module.__path__)
        ]
    return tuple(dict.fromkeys(results))


def caches() -> dict[str, int]:
    """Return the size of every cache, registry and list in the package's modules."""
    sizes = {}
    for module in modules():
        for name, value in vars(module).items():
            if getattr(value, "__module__", module.__name__) != module.__name__:
                continue  # imported from elsewhere
            if hasattr(value, "cache_info"):
                sizes[f"{module.__name__}.{name}"] = value.cache_info().currsize
            elif isinstance(value, (dict, list, set)) and not name.startswith("__"):
                sizes[f"{module.__name__}.{name}"] = len(value)
    return sizes


def state() -> dict[str, Any]:
    """Count everything that the package holds or registers with Python and torch."""
    return {
        **caches(),
        **{slot: len(compat.passes_in(getattr(inductor_config, slot))) for slot in SLOTS},
        "threads": threading.active_count(),
        "users": passes._users,
        "joined": len(passes._joined),
        "tag": torch.compiler.config.cache_key_tag,
        "excepthook": sys.excepthook,
        "trace": sys.gettrace(),
        "hooks": len(gc.callbacks),
    }


def grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that are larger or different. Entries may shrink, since threads of other tests may end."""
    changes = {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}
    return {key: (old, new) for key, (old, new) in changes.items() if not isinstance(new, int) or new > (old or 0)}


def cycle(i: int, backend: Any) -> None:
    """Enable fusion in one of three ways, compile, run a training step, and disable fusion."""
    torch._dynamo.reset()
    model, x = MLP(4, 8), torch.randn(3, 4)
    policy = tfo.FusionPolicy(memory=("free", "fp8", "input", "off")[i % 4])
    compiled = torch.compile(model, backend=backend)
    if i % 3 == 0:
        tfo.enable(policy)
        compiled(x).sum().backward()
        tfo.disable()
    elif i % 3 == 1:
        with tfo.enabled(policy):
            compiled(x).sum().backward()
    else:
        with tfo.enabled(policy), tfo.record() as report:
            compiled(x).sum().backward()
        assert [site.op for site in report.sites] == ["fused::bias_act"]
    assert model.up.weight.grad is not None


def settled() -> None:
    torch._dynamo.reset()
    for _ in range(3):
        gc.collect()


def objects() -> Counter[str]:
    """Count live objects whose classes belong to the package or to FX graphs."""
    graphs = (torch.fx.Node, torch.fx.GraphModule, MLP)
    kinds = map(type, gc.get_objects())
    run_cycles = [t for t in kinds if issubclass(t, graphs) or str(t.__module__).startswith("torch_fused_ops")]
    return Counter(t.__qualname__ for t in run_cycles)


def plain_cycle() -> None:
    torch._dynamo.reset()
    torch.compile(MLP(4, 8), backend=without_code)(torch.randn(3, 4)).sum().backward()


def blocks(cycles: Iterable[Callable[[], None]]) -> int:
    """Return the number of memory blocks that Python has allocated during these calls and not freed."""
    settled()
    before = sys.getallocatedblocks()
    for run in cycles:
        run()
    settled()
    return sys.getallocatedblocks() - before


@pytest.mark.slow
def test_1000_compilations_do_not_leak() -> None:
    """No object, cache entry, pass or thread is left. Only Dynamo's memory grows.

    In 1,000 compilations, memory grew by 465 blocks per compilation with fusion, and by 461 without fusion.
    """
    rounds = [range(start, start + 200) for start in range(0, 1000, 200)]

    def run_cycles(numbers: range) -> int:
        return blocks(functools.partial(cycle, i, without_code) for i in numbers)

    run_cycles(range(24)), blocks([plain_cycle] * 24)  # objects that are created once
    before, alive = state(), objects()
    results = [(run_cycles(numbers), blocks([plain_cycle] * len(numbers))) for numbers in rounds]
    assert not grown(before, state())
    assert not objects() - alive
    more = [(with_us - without) / 200 for with_us, without in results]
    assert max(more) < 16, results  # a graph has hundreds


@pytest.mark.slow
def test_inductor_compilations_do_not_leak() -> None:
    counts = []
    for _ in range(2):
        for i in range(12):
            cycle(i, "inductor")
        settled()
        counts.append((state(), objects()))
    assert not grown(counts[0][0], counts[1][0]) and counts[0][1] == counts[1][1]


@pytest.mark.slow
@pytest.mark.codegen_is_slow
def test_a_compiled_model_can_be_freed() -> None:
    """Caches with functions as keys do not prevent users' functions and models from being freed."""

    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return F.silu(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(x)
            return grad * (s * (1 + x * (1 - s)))  # type: ignore[no-any-return]

    model = MLP(4, 8, Custom.apply)
    with tfo.enabled():
        torch.compile(model, backend=without_code)(torch.randn(3, 4)).sum().backward()
    gone = weakref.ref(model), weakref.ref(model.up.weight)
    del model
    settled()
    assert [run() for run in gone] == [None, None]


# Caches without a maximal size, and the reason why their size is limited.
UNBOUNDED = {
    "torch_fused_ops.distributed.sharding.register": "no argument",
    "torch_fused_ops.distributed.sharding.rules": "no argument",
    "torch_fused_ops.families.float8.flop_formulas.register": "no argument",
    "torch_fused_ops.families.float8.kernels.launch_of": "the declared operators",
    "torch_fused_ops.lowerings.compat.has_offload_operators": "no argument",
    "torch_fused_ops.lowerings.operators._elements": "the declared operators",
    "torch_fused_ops.lowerings.passes.source_hash": "no argument",
    "torch_fused_ops.lowerings.recognize.graph._torch_functions": "no argument",
    "torch_fused_ops.virtual_gpu.interpreter._libdevice_functions": "no argument",
    "torch_fused_ops.virtual_gpu.compile._register_patterns": "no argument",
    "torch_fused_ops.virtual_gpu.kernels._load": "kernels that were assembled on paper, each a file anyway",
}


def test_every_cache_is_bounded_or_known() -> None:
    unbounded = {
        f"{module.__name__}.{name}"
        for module in modules()
        for name, value in vars(module).items()
        if hasattr(value, "cache_parameters")
        and getattr(value, "__module__", "") == module.__name__
        and value.cache_parameters()["maxsize"] is None
        and not module.__name__.startswith("torch_fused_ops.benchmarks")  # programs, which end
    }
    assert unbounded <= UNBOUNDED.keys(), unbounded - UNBOUNDED.keys()


@pytest.mark.parametrize("calls", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_eager_calls_with_new_shapes_do_not_leak(calls: int, only_new_garbage: None) -> None:
    def run(numbers: range) -> None:
        for n in numbers:
            x = torch.ones(1 + n % 97, 1 + n // 97, requires_grad=True)
            out = functional.bias_act(x, x[0], activation="gelu") + functional.swiglu(x, x, clamp=1.0 + n)
            out = functional.bias_dropout_add(out, None, x, 1 / (2 + n))
            functional.scaled_masked_softmax(out, scale=float(n)).sum().backward()

    run(range(50))
    before, alive = state(), len(gc.get_objects())
    run(range(50, 50 + calls))
    gc.collect()
    assert not grown(before, state())
    assert len(gc.get_objects()) - alive < 20


@pytest.mark.parametrize(
    ("study", "page"), [("rounding", ""), ("memory", "memory.md"), ("gemm", "fp8.md"), ("rowwise", "fp8.md")]
)
def test_tables_of_losses_match_the_measurements(study: str, page: str) -> None:
    """The tables on the pages match the measured curves and their statistics."""
    kind, docs = training.STUDIES[study], Path(__file__).parents[2] / "docs"
    result = harness.read(harness.RESULTS / f"{kind.out}.json", kind.out)
    assert result["steps"] == kind.steps and result["models"] == {
        name: vars(config) for name, (_, config) in kind.models.items()
    }
    for name, curves in result["curves"].items():
        lengths = {way: [len(row) for row in rows] for way, rows in curves.items()}
        assert lengths == dict.fromkeys(kind.ways, [kind.steps] * kind.seeds)
        assert to_twelve_digits(training.summary(kind, curves)) == to_twelve_digits(result["summary"][name])
    if study == "rounding":
        assert all(training.agrees(result["summary"]["GELU"], way) for way in ("compile", "fused"))
        return
    text = (docs / page).read_text(encoding="utf-8")
    rows = training.table(result).splitlines()
    assert len(rows) == len(kind.pairs) * len(kind.models) and all(row in text for row in rows)
    if study == "rowwise":
        bounds = [
            row["interval_95"] for results in result["summary"].values() for row in results["differences"].values()
        ]
        assert all(-0.015 < low < 0 < high < 0.015 for low, high in bounds)
        return
    if study == "gemm":  # figures in the page's text
        bounds = [
            row["interval_95"] for results in result["summary"].values() for row in results["differences"].values()
        ]
        assert all(-0.02 < low < 0 < high < 0.02 for low, high in bounds)
        late = {way: [training.final(row, 200) for row in rows] for way, rows in result["curves"]["GELU"].items()}
        results = training.differences(late, "fp8", "plain")
        low, high = results["interval_95"]
        assert f"{results['mean']:+.4f} ({low:+.4f} to {high:+.4f})".replace("-", "−") in text
        assert round(result["summary"]["GELU"]["between_seeds"] / results["mean"]) == 14


def to_twelve_digits(value: Any) -> Any:
    """Round the numbers of JSON data: Python's statistics differ in the last digit between 3.10 and 3.11."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.12g}"))
