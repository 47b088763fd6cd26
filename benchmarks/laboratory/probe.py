"""What a GPU does with our kernels, and could do with others.

    python -m torch_fused_ops.benchmarks.laboratory.probe --help

    kernel      hand-written kernels beside a copy of the same bytes: as they are (*operators*), and with other block
                sizes, warps and steps: such a way is named by the constants that it changes, in the kernels' modules
    reduction   backward of a bias and an activation: Inductor's own reductions, and its options
    product     an MLP's matrix products in bfloat16, and in fp8 by every recipe
    launch      what a call costs the host: eager PyTorch's, ours, Triton's, and compiled code's bare launch

On a CPU hand-written kernels run in Triton's interpreter, tiny: that shows that they run.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_fused_ops.benchmarks import main as bench
from torch_fused_ops.benchmarks import pointwise
from torch_fused_ops.benchmarks.harness import DTYPES, Case, Device, Plan, Trial, Unavailable, sets_of
from torch_fused_ops.benchmarks.laboratory import run_script
from torch_fused_ops.tools.arguments import TIMED

SHAPE = "ROWSxCOLUMNS of hand-written kernels and reductions"
SIZES = [(8192, 8192), (8192, 14336)]
SMALL = (8, 64)  # in the interpreter
SOFTMAX_COLUMNS = (1024, 4096, 16384)
PRODUCTS = [  # rows, contracted, columns: forward, the input's gradient and the weight's, of a Llama 3 8B MLP
    (8192, 4096, 14336), (8192, 14336, 4096), (14336, 8192, 4096), (8192, 8192, 8192),
]  # fmt: skip
SMALL_PRODUCTS = [(128, 256, 128)]
LOOSE_FP8 = 0.08  # e4m3 has 3 bits: 2.6 % of an operand in the 2-norm, √2 of that in a product
FP8_LARGEST = 448.0

Knobs = dict[str, float]


@dataclass(frozen=True)
class Probe:
    """A case of the probe: its kind, its name, and what makes it."""

    kind: str
    name: str
    make: Callable[[Probe, Device, Plan], Case]


# ---- hand-written kernels --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A call of hand-written kernels.

    Attributes:
        name: of what it computes.
        module: of kernels, whose constants make the plan.
        call: of the module and the tensors.
        shapes: of the tensors, for rows and columns; an int is a seed.
        truth: the first result, of the same tensors in float64.
        plans: what to try beside the plan as it is.
        width: columns, where the size's are not meant.
    """

    name: str
    module: str
    call: Callable[..., Any]
    shapes: Callable[[int, int], Sequence[tuple[int, ...] | int]]
    truth: Callable[..., Tensor]
    plans: Sequence[Knobs]
    width: int = 0
    loose: float = 0.0


def _tile(loads: int, warps: int, **more: float) -> Knobs:
    return {"_LOAD_BYTES": loads, "_WARPS": warps, "_THREADS": 32 * warps, **more}


TILES = [_tile(loads, warps) for loads, warps in ((16, 8), (32, 4), (32, 8), (64, 4), (8, 4), (16, 2))]
SUMS: list[Knobs] = [
    *(_tile(16, 4, _MOST_STEPS=steps, _ENOUGH_PROGRAMS=enough)
      for steps, enough in ((16, 1024), (32, 1024), (128, 512), (256, 256))),
    *(_tile(loads, warps) for loads, warps in ((32, 4), (32, 8), (16, 8), (8, 4))),
]  # fmt: skip
SOFTMAX: list[Knobs] = [
    *(  # type: ignore[list-item]  # numbers that are all integers
        {"_NUMBERS": numbers, "_MOST_WARPS": warps, "_WIDEST_ROW": 64 * warps * numbers}
        for numbers, warps in ((16, 8), (32, 8), (32, 16), (8, 16), (64, 8))
    ),
    {"_LEAST_TILE": 2048},
    {"_LEAST_TILE": 4096},
    {"_LONG_BLOCK": 2048},
    {"_LONG_BLOCK": 8192},
]


def _of(name: str, *scalars: Any) -> Callable[..., Any]:
    return lambda module, *tensors: module.launch_of(name)(*tensors, *scalars)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gradient(fn: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> Tensor:
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(fn(*leaves), leaves, grad)[0]


def _softmax_backward(module: types.ModuleType, grad: Tensor, output: Tensor) -> Any:
    return module.scaled_masked_softmax_backward(grad, output, 0.125, False, -1, -1, None, [True, False])


def _dropout_truth(x: Tensor, bias: Tensor, residual: Tensor, seed: Tensor) -> Tensor:
    from torch_fused_ops.operators import reference

    return reference.dropout_add(x, bias, residual, seed, 0.1)


def _dropout_gradient(grad: Tensor, seed: Tensor) -> Tensor:
    from torch_fused_ops.operators import reference

    return reference.dropout_add(grad, None, None, seed, 0.1)


SUBJECTS = [
    Subject("gelu_tanh forward", "activation", _of("bias_act", None, None, "gelu_tanh"), lambda r, c: [(r, c)], _gelu,
            TILES),
    Subject("gelu_tanh bias backward", "activation",
            lambda m, g, x, b: m.launch_of("bias_act_backward")(g, x, b, None, "gelu_tanh", [True, True, False]),
            lambda r, c: [(r, c), (r, c), (c,)], lambda g, x, b: _gradient(lambda x, b: _gelu(x + b), g, x, b), SUMS),
    Subject("swiglu forward", "activation", _of("glu", None, "silu", 0.0, None), lambda r, c: [(r, c)] * 2,
            lambda a, b: F.silu(a) * b, TILES),
    Subject("swiglu backward", "activation",
            lambda m, g, a, b: m.launch_of("glu_backward")(g, a, b, None, "silu", 0.0, None, [True, True, False]),
            lambda r, c: [(r, c)] * 3, lambda g, a, b: _gradient(lambda a, b: F.silu(a) * b, g, a, b), TILES),
    Subject("dropout forward", "dropout", lambda m, x, b, r, s: m.dropout_add(x, b, r, s, 0.1),
            lambda r, c: [(r, c), (c,), (r, c), 7], _dropout_truth, TILES),
    Subject("dropout bias backward", "dropout",
            lambda m, g, s: m.dropout_add_backward(g, s, 0.1, g.dtype, g.dtype, [True, True]), lambda r, c: [(r, c), 7],
            _dropout_gradient, SUMS),
    *(Subject(f"softmax forward, rows of {width}", "softmax",
              lambda m, x: m.scaled_masked_softmax(x, None, None, 0.125), lambda r, c: [(r, c)],
              lambda x: torch.softmax(0.125 * x, -1), SOFTMAX, width) for width in SOFTMAX_COLUMNS),
    *(Subject(f"softmax backward, rows of {width}", "softmax", _softmax_backward, lambda r, c: [(r, c)] * 2,
              lambda g, y: 0.125 * y * (g - (g * y).sum(-1, keepdim=True)), SOFTMAX, width)
      for width in SOFTMAX_COLUMNS),
]  # fmt: skip


def kernels(name: str) -> types.ModuleType:
    """A module of kernels; Unavailable without Triton."""
    try:
        path = f"families.{name}.kernels" if name in ("dropout", "softmax", "float8") else f"kernels.{name}"
        return importlib.import_module(f"torch_fused_ops.{path}")
    except ImportError as error:
        raise Unavailable(str(error)) from None


@contextlib.contextmanager
def planned(knobs: Knobs) -> Iterator[None]:
    """Plans are made with these constants; AttributeError for one that the kernels do not have."""
    modules = [kernels(name) for name in ("activation", "softmax", "launching")]

    def forget() -> None:
        for module in modules:
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()

    with contextlib.ExitStack() as stack:
        for name, value in knobs.items():
            owners = [module for module in modules if hasattr(module, name)]
            if not owners:
                raise AttributeError(f"no module of kernels has {name} any more")
            for module in owners:
                stack.enter_context(mock.patch.object(module, name, value))
        forget()
        stack.callback(forget)
        yield


Launch = Any  # launching.Launch


def recorded(call: Callable[[], Any]) -> tuple[list[Launch], list[Tensor]]:
    """The launches that a call makes, none carried out, and the tensors that it returns."""
    with kernels("launching").recorded() as found:
        results = call()
    return found, [t for t in tree_leaves(results) if isinstance(t, Tensor)]


def launcher(device: Device) -> Callable[[Launch], None]:
    """What carries a launch out: Triton, or its interpreter on a CPU."""

    def launched(one: Launch) -> None:
        where = next(t.device for t in one.tensors if t is not None)
        kernels("launching").launch(one.kernel, one.grid, where, one.tensors, one.integers, one.constants)

    def interpreted(one: Launch) -> None:
        from torch_fused_ops.virtual_gpu import interpret

        interpret(one.kernel, *one.tensors, *one.integers, grid=one.grid, **one.constants)

    return interpreted if device.where.type == "cpu" else launched


def _drawn(shapes: Sequence[tuple[int, ...] | int], dtype: torch.dtype, device: Device, seed: int) -> list[Tensor]:
    generator = torch.Generator(device=device.where).manual_seed(seed)
    return [
        torch.tensor([s], device=device.where)
        if isinstance(s, int)
        else torch.randn(s, generator=generator, device=device.where).to(dtype)
        for s in shapes
    ]


def _doubled(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def distinct(subject: Subject, tensors: Sequence[Tensor]) -> list[Knobs]:
    """The subject's plans that launch something else than the plan as it is, and than those before them."""
    module, found = kernels(subject.module), []
    seen: set[str] = set()
    as_it_is: Knobs = {}
    for knobs in (as_it_is, *subject.plans):
        with planned(knobs):
            launches, _ = recorded(lambda: subject.call(module, *tensors))
        # Constants decide the code; numbers among the arguments (steps, rows of partial sums) what it goes through.
        plan = str([(one.grid, one.constants, one.integers) for one in launches])
        if plan not in seen and knobs:
            found.append(knobs)
        seen.add(plan)
    return found


def kernel_case(
    subject: Subject, rows: int, columns: int, dtype: torch.dtype, probe: Probe, device: Device, plan: Plan
) -> Case:
    """A call as it is, with other plans, and a copy of its bytes."""
    shapes = subject.shapes(rows, columns)
    first = _drawn(shapes, dtype, device, plan.seed)
    module = kernels(subject.module)
    _, results = recorded(lambda: subject.call(module, *first))
    nbytes = sum(t.numel() * t.element_size() for t in (*first, *results))
    sets = sets_of(device, nbytes, most=8)
    inputs = [first, *(_drawn(shapes, dtype, device, plan.seed + i) for i in range(1, sets))]
    launch = launcher(device)

    def way(knobs: Knobs) -> Trial:
        with planned(knobs):
            ready = [recorded(lambda given=given: subject.call(module, *given)) for given in inputs]  # type: ignore[misc]
        for _, outputs in ready:
            for t in outputs:
                if t.is_floating_point() and t.element_size() > 1:
                    t.fill_(float("nan"))

        def run(i: int) -> list[Tensor]:
            launches, outputs = ready[i]
            for one in launches:
                launch(one)
            return outputs[:1]

        return Trial(run, lambda i: i)

    made: dict[str, Callable[[], Trial]] = {"operators": lambda: way({})}
    made["copy"] = lambda: pointwise._copy(nbytes, sets, device)
    plans = distinct(subject, first)
    for knobs in plans[:2] if plan.quick else plans:
        made[plan_name(knobs)] = functools.partial(way, knobs)
    return Case(
        probe.name,
        {"kind": probe.kind, "subject": subject.name, "rows": rows, "columns": columns},
        made,
        lambda: [subject.truth(*_doubled(first))],
        sets,
        dtype,
        ours=("operators", *(name for name in made if "=" in name)),
        unchecked=("copy",),
        bytes=nbytes,
    )


def plan_name(knobs: Knobs) -> str:
    """ "load_bytes=32 warps=8": what follows from others is left out."""
    shown = {name: value for name, value in knobs.items() if name not in ("_THREADS", "_WIDEST_ROW")}
    return " ".join(f"{name.strip('_').lower()}={value:g}" for name, value in shown.items())


# ---- reductions ------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "not split": {"split_reductions": False},
    "coordinate descent": {"coordinate_descent_tuning": True},
    "max-autotune": {"max_autotune_pointwise": True},
    "cooperative": {"triton.cooperative_reductions": True},
    "mixed order": {"triton.mix_order_reduction": True},
    "multi-kernel": {"triton.multi_kernel": 1},
}
REDUCTION = pointwise.Operator("bias_act", "gelu_tanh", bias=True)


@contextlib.contextmanager
def configurations() -> Iterator[dict[str, list[tuple[str, float]]]]:
    """Milliseconds of every configuration of a kernel among which Inductor chooses meanwhile, by the kernel's name."""
    found: dict[str, list[tuple[str, float]]] = {}
    try:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        benchmark = CachingAutotuner.benchmark_all_configs
    except (ImportError, AttributeError):  # another torch's inside: its choice is then not seen
        yield found
        return

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        timings = benchmark(self, *args, **kwargs)
        with contextlib.suppress(Exception):
            rows = [(" ".join(str(each.config).split()), float(ms)) for each, ms in timings.items()]
            found[str(self.fn.__name__)] = sorted(rows, key=lambda row: row[1])
        return timings

    with mock.patch.object(CachingAutotuner, "benchmark_all_configs", noting):
        yield found


def reduction_case(rows: int, columns: int, dtype: torch.dtype, probe: Probe, device: Device, plan: Plan) -> Case:
    """Backward of a bias and GELU, the bias' gradient with it."""
    base = pointwise.case("backward", REDUCTION, rows, columns, dtype, device, plan)
    facts: dict[str, Any] = {"kind": probe.kind, "rows": rows, "columns": columns, "configurations": {}}
    plain = base.ways["compile"]

    def optioned(options: dict[str, Any]) -> Trial:
        with mock.patch.object(pointwise, "compiled", lambda fn: torch.compile(fn, dynamic=False, options=options)):
            return base.ways["compile"]()

    def seen() -> Trial:
        trial = plain()
        with configurations() as found:
            trial.run(trial.prepare(0))  # compiles
            facts["configurations"] = found
        return trial

    made: dict[str, Callable[[], Trial]] = {
        "compile": seen,
        "operators": base.ways["operators"],
        "copy": base.ways["copy"],
    }
    for name, options in list(OPTIONS.items())[: 1 if plan.quick else None]:
        made[name] = functools.partial(optioned, options)
    return Case(
        probe.name,
        facts,
        made,
        base.truth,
        base.sets,
        dtype,
        ours=("operators",),
        unchecked=("copy",),
        bytes=base.bytes,
    )


# ---- matrix products -------------------------------------------------------------------------------------------------


def stored(t: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """In e4m3 with a float32 scale for each block of ``rows`` × ``columns``; the scales as a matrix of blocks."""
    height, width = t.shape
    blocks = t.float().view(height // rows, rows, width // columns, columns)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / FP8_LARGEST
    return (blocks / scale[:, None, :, None]).view(height, width).to(torch.float8_e4m3fn), scale


def scaled(a: Tensor, b: Tensor, recipe: str) -> Callable[[], Tensor]:
    """a @ b.T in fp8: "tensor" and "row" by ``torch._scaled_mm``, blocks by ``torch.nn.functional.scaled_mm``."""
    fast = recipe.endswith(" fast")
    name = recipe.removesuffix(" fast")
    contracted = a.shape[1]
    if name in ("tensor", "row"):
        sizes = [(t.shape[0] if name == "tensor" else 1, contracted) for t in (a, b)]
        (qa, sa), (qb, sb) = (stored(t, *size) for t, size in zip((a, b), sizes, strict=True))
        scales = (sa, sb.t()) if name == "row" else (sa.reshape(()), sb.reshape(()))
        return lambda: torch._scaled_mm(qa, qb.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    if not hasattr(F, "scaled_mm"):
        raise Unavailable("this torch has no torch.nn.functional.scaled_mm")
    kinds = F.ScalingType
    of_b = {"1x128·128x128": 128, "1x128·1x128": 1}[name]
    (qa, sa), (qb, sb) = stored(a, 1, 128), stored(b, of_b, 128)
    recipes = kinds.BlockWise1x128, kinds.BlockWise128x128 if of_b == 128 else kinds.BlockWise1x128
    # cuBLASLt wants the scales with the outer axis dense: [M, K/128] with strides (1, M); those of 128×128 blocks as
    # [K/128, N/128] with strides (1, K/128, padded to a multiple of 4).
    outer_a = sa.t().contiguous().t()
    if of_b == 128:
        padded = sb.new_zeros((sb.shape[0], -(-sb.shape[1] // 4) * 4))
        padded[:, : sb.shape[1]] = sb
        outer_b = padded.t()
    else:
        outer_b = sb.t().contiguous().t()
    return lambda: F.scaled_mm(qa, qb.t(), outer_a, recipes[0], outer_b, recipes[1], output_dtype=torch.bfloat16)


RECIPES = ("tensor", "tensor fast", "row", "row fast", "1x128·128x128", "1x128·1x128")


def product_case(rows: int, contracted: int, columns: int, probe: Probe, device: Device, plan: Plan) -> Case:
    """A matrix product, of operands whose rows and blocks differ in size, so that a scale in a wrong place shows."""
    a, b = _drawn([(rows, contracted), (columns, contracted)], torch.float32, device, plan.seed)
    for t in (a, b):
        blocks = t.view(t.shape[0], -1, 128)
        blocks *= torch.exp2(torch.arange(blocks.shape[0], device=t.device) % 3)[:, None, None]
        blocks *= torch.exp2(torch.arange(blocks.shape[1], device=t.device) % 2)[None, :, None]
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)

    def of(product: Callable[[], Tensor]) -> Trial:
        return Trial(lambda _: [product()], lambda i: i)

    made: dict[str, Callable[[], Trial]] = {"bf16": lambda: of(lambda: a @ b.t())}
    for recipe in RECIPES:
        made[f"fp8 {recipe}"] = lambda recipe=recipe: of(scaled(a, b, recipe))  # type: ignore[misc]
    return Case(
        probe.name,
        {"kind": probe.kind, "rows": rows, "contracted": contracted, "columns": columns},
        made,
        lambda: [a.double() @ b.double().t()],
        1,
        torch.bfloat16,
        ours=tuple(name for name in made if name != "bf16"),
        loose={name: LOOSE_FP8 for name in made if name != "bf16"},
        flops=2.0 * rows * contracted * columns,
        bytes=2.0 * (rows * contracted + columns * contracted + rows * columns),
    )


# ---- launches --------------------------------------------------------------------------------------------------------


def bare(launches: Sequence[Launch], compiled: bool) -> Callable[[], None]:
    """The launches of a call by Triton's ``kernel[grid]``, or by what it compiled for them."""
    ready: list[Callable[[], Any]] = []
    for one in launches:
        launch = functools.partial(one.kernel[one.grid], *one.tensors, *one.integers, **one.constants)
        if not compiled:
            ready.append(launch)
            continue
        named = {**one.arguments, **one.constants}
        ready.append(functools.partial(launch()[one.grid], *(named[name] for name in one.kernel.arg_names)))

    def run() -> None:
        for each in ready:
            each()

    return run


LAUNCHES: list[tuple[str, str, Callable[..., Any], Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = [
    ("gelu_tanh forward", "activation", _of("bias_act", None, None, "gelu_tanh"),
     lambda x: torch.ops.fused.bias_act(x, None, None, "gelu_tanh"), _gelu, [SMALL]),
    ("swiglu forward", "activation", _of("glu", None, "silu", 0.0, None),
     lambda a, b: torch.ops.fused.glu(a, b, None, "silu"), lambda a, b: F.silu(a) * b, [SMALL] * 2),
    ("gelu_tanh bias backward", "activation",
     lambda m, g, x, b: m.launch_of("bias_act_backward")(g, x, b, None, "gelu_tanh", [True, True, False]),
     lambda g, x, b: torch.ops.fused.bias_act_backward(g, x, b, None, "gelu_tanh", [True, True, False])[0],
     lambda g, x, b: torch.ops.aten.gelu_backward(g, x + b, approximate="tanh"), [SMALL, SMALL, SMALL[1:]]),
    ("softmax forward", "softmax", lambda m, x: m.scaled_masked_softmax(x, None, None, 0.125),
     lambda x: torch.ops.fused.scaled_masked_softmax(x, None, None, 0.125, False, -1, -1),
     lambda x: torch.softmax(0.125 * x, -1), [SMALL]),
]  # fmt: skip


def launch_case(
    module: str, call: Any, ours: Any, eager: Any, shapes: Any, probe: Probe, device: Device, plan: Plan
) -> Case:
    """Many calls on tensors so small that the host is all there is."""
    tensors = _drawn(shapes, torch.bfloat16, device, plan.seed)
    calls = 10 if plan.quick else pointwise.CALLS

    def many(fn: Callable[[], Any]) -> Trial:
        def run(_: int) -> list[Tensor]:
            with torch.no_grad():
                for _ in range(calls):
                    out = fn()
            return [out] if isinstance(out, Tensor) else []

        return Trial(run, lambda i: i)

    def raw(compiled: bool) -> Trial:
        if device.where.type == "cpu":
            raise Unavailable("nothing is launched on a CPU")
        launches, _ = recorded(lambda: call(kernels(module), *tensors))
        return many(bare(launches, compiled))

    made: dict[str, Callable[[], Trial]] = {
        "eager": lambda: many(lambda: eager(*tensors)),
        "operators": lambda: many(lambda: ours(*tensors)),
        "kernel[grid]": lambda: raw(False),
        "compiled[grid]": lambda: raw(True),
    }
    return Case(
        probe.name,
        {"kind": probe.kind},
        made,
        lambda: [eager(*_doubled(tensors))],
        1,
        torch.bfloat16,
        ours=("operators",),
        unchecked=("kernel[grid]", "compiled[grid]"),
        bytes=sum(t.numel() * 2.0 for t in tensors),
        calls=calls,
    )


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def grid(device: Device, quick: bool, sizes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> list[tuple[Probe]]:
    """The most telling first: products in fp8, each kernel at the first size, reductions, launches, other sizes."""
    dtype = DTYPES[dtypes[0]] if dtypes else torch.bfloat16
    small = device.where.type == "cpu" or quick
    chosen = [(s[0], s[1]) for s in sizes] or ([SMALL] if small else SIZES)

    def of_kernels(rows: int, columns: int) -> Iterator[Probe]:
        for subject in SUBJECTS:
            width = subject.width and not small
            r, c = (rows * columns // subject.width, subject.width) if width else (rows, columns)
            if subject.width and (rows, columns) != chosen[0]:
                continue
            if small and subject.width > SOFTMAX_COLUMNS[0]:  # the same there
                continue
            name = f"{subject.name} {r}×{c}"
            yield Probe("kernel", name, functools.partial(kernel_case, subject, r, c, dtype))

    found = [
        Probe("product", f"product {m}×{k}·{k}×{n}", functools.partial(product_case, m, k, n))
        for m, k, n in (SMALL_PRODUCTS if small else PRODUCTS)
    ]
    found += of_kernels(*chosen[0])
    found += [
        Probe("reduction", f"{REDUCTION} backward {r}×{c}", functools.partial(reduction_case, r, c, dtype))
        for r, c in (chosen if small else [*chosen, (8192, 4096)])
    ]
    found += [
        Probe("launch", f"launch of {name}", functools.partial(launch_case, module, call, ours, eager, shapes))
        for name, module, call, ours, eager, shapes in LAUNCHES
    ]
    for rows, columns in chosen[1:]:
        found += of_kernels(rows, columns)
    return [(probe,) for probe in found]


def name_of(probe: Probe) -> str:
    return probe.name


def case(probe: Probe, device: Device, plan: Plan) -> Case:
    """A probe's case."""
    return probe.make(probe, device, plan)


def main(arguments: Namespace) -> int:
    """Measure, as ``bench`` does."""
    arguments.benchmark = "probe"
    return bench.bench(arguments, bench.Benchmark(grid, name_of, case, (), SHAPE, (2,), {"cuda": 0.4, "cpu": 0.1}))


if __name__ == "__main__":
    sys.exit(run_script(main, __doc__, TIMED))
