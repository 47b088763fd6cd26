"""Compile eager kernels: Inductor's C++ or Triton code for a graph of one operator, called without Dynamo.

An operator has a kernel for each combination of device, scalars (an activation, its constants), dtypes, strides and
requested results. It comes from the lowerings that ``torch.compile`` uses, so eager and compiled results are equal.
Inductor's cache on disk stores the kernel.

* **CPUs.** Sizes are symbols. The first large call compiles, and small calls if they repeat. Other calls run the
  formula (``cpu.py``): small calls without a loaded kernel, float64, machines without a C++ compiler.
* **GPUs.** Each first call compiles, since the formula takes some ten launches and passes over memory. Rows are
  symbols. Columns are numbers, so that offsets need no division and loads are vectors; after ``_MOST_WIDTHS`` widths
  they are symbols, too. If every tensor is one contiguous sequence, columns do not matter: a kernel then serves all
  sizes that share their divisor of 16. Nothing is measured on the device: results are equal in every run, and a
  first call does not wait for the device. While a CUDA graph is captured, nothing compiles.

With ``TORCH_FUSED_OPS_WITHOUT=compiled_kernels`` all calls run the formula.

``torch._inductor.aoti_eager`` cannot replace this module: up to torch 2.15 it compiles for static shapes only, and
raises "Only support static shape for now" for other shapes.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.declaration import DATA, Signature
from torch_fused_ops.settings import switches

aten, prims = torch.ops.aten, torch.ops.prims
log = logging.getLogger("torch_fused_ops")

FEWEST = 1 << 17
"""Elements of the smallest call that compiles at once on a CPU."""
REPEATS = 1000  # every 1,000th small call with the same key compiles; a kernel takes a third to a tenth of the time


class Place(NamedTuple):
    """The part of a key that is not among a call's arguments.

    Attributes:
        device: the tensors' device.
        columns: the number of columns; 0 if it is a symbol.
        unit: a divisor of the columns, if they are a symbol.
        block: a divisor of the rows. Sums over the rows have blocks of this size.
        wide: True if 32 bits are not enough for offsets. A kernel for a CPU always has 64 bits.
    """

    device: torch.device
    columns: int = 0
    unit: int = 1
    block: int = 1
    wide: bool = False


_ON_CPU, _ON_CPU_IN_BLOCKS = Place(torch.device("cpu")), Place(torch.device("cpu"), block=4)
# With 64 rows, writing and reading sums of blocks adds 2 % to the traffic of a backward pass in 16 bits.
_GPU_BLOCK = 64
_INT32_MAX = 2**31 - 1

# The keys have scalars, dtypes and layouts, then the operator's name, the number of axes, and the place. The value is
# None if compiling failed.
_KERNELS: dict[tuple[Any, ...], Callable[..., Any] | None] = {}
activations._on_change.append(_KERNELS.clear)  # a name among the scalars may stand for another function
# Per operator: a limit, so that a dropout probability that changes every step does not compile a kernel each time.
_MOST_KERNELS = 64
_MOST_WIDTHS = 8  # kernels that differ only in the number of columns: keys of attention grow with every token
_calls = functools.lru_cache(maxsize=128)(lambda key: itertools.count(1))  # counts a key's calls without a kernel
_lock = threading.Lock()
_failures: dict[str, str] = {}  # device types for which no kernel can be compiled, with the reason


IS_SUPPORTED = torch.__version__ >= (2, 13)  # type: ignore[operator]
"""True from torch 2.13 on. With torch 2.11 a compiled kernel crashed the process; 2.12 is untested."""


def status() -> str:
    """Describe the eager kernels of this process: compiled or not, and why not."""
    if not IS_SUPPORTED or switches.is_without("compiled_kernels"):
        reason = f"turned off by {switches.NAME}" if IS_SUPPORTED else "compiling needs torch 2.13"
        return f"formulas in plain PyTorch: {reason}"
    for device, reason in _failures.items():
        return f"formulas in plain PyTorch on {device}: {reason}"
    loaded = len({*_KERNELS.values()} - {None})
    return (
        f"compiled by Inductor at the first call on a GPU; on a CPU at a call on {FEWEST:,} elements or more, and "
        f"at every {REPEATS:,}th smaller call with the same arguments; {loaded} loaded"
    )


def kernel(signature: Signature, formula: Callable[..., Any], on_gpu: bool = False) -> Callable[..., Any]:
    """Return an operator's kernel. It runs a compiled kernel, or ``formula`` if none is loaded for the call."""
    if not IS_SUPPORTED or switches.is_without("compiled_kernels"):
        return formula
    identify = identification(signature, on_gpu)

    def run(*args: Any) -> Any:
        first = args[0]
        key, tensors = identify(args)
        if key not in _KERNELS and _may_compile(first, tensors, key):
            _load(signature, key, len(args), tensors)
        compiled = _KERNELS.get(key)
        if compiled is None or not first.numel():
            return formula(*args)
        return compiled(tensors)

    return run


def identification(signature: Signature, on_gpu: bool) -> Callable[[tuple[Any, ...]], tuple[Any, list[Tensor]]]:
    """Return a function of an operator's arguments. It returns the key and the tensors to call the kernel with."""
    kinds = [(i, argument.kind) for i, argument in enumerate(signature.arguments) if argument.kind]
    name, is_backward = signature.name, signature.is_backward
    bias = signature.results.index("per_column") if is_backward and "per_column" in signature.results else None

    def identify(args: tuple[Any, ...]) -> tuple[Any, list[Tensor]]:
        first, tensors = args[0], []
        key = [*args, name, first.ndim, _ON_CPU]
        for i, kind in kinds:
            t = args[i]
            if t is not None:
                if kind in ("mask", "seed") or not t.is_contiguous():
                    t, key[i] = _layout(t, kind, on_gpu)
                else:
                    key[i] = t.dtype
                tensors.append(t)
        if is_backward:
            key[len(args) - 1] = tuple(args[-1])
        sums = bias is not None and args[-1][bias] and first.ndim > 1
        if on_gpu:
            specs = [(kind, key[i]) for i, kind in kinds if args[i] is not None]
            key[-1] = _place_on_gpu(first, specs, tensors, sums)
        elif sums and first.shape[-2] % _ON_CPU_IN_BLOCKS.block == 0:
            key[-1] = _ON_CPU_IN_BLOCKS
        return tuple(key), tensors

    return identify


def _may_compile(first: Tensor, tensors: Sequence[Tensor], key: tuple[Any, ...]) -> bool:
    device = first.device.type
    if device in _failures or not first.numel():
        return False
    if device != "cpu":
        return not (device == "cuda" and torch.cuda.is_current_stream_capturing())
    if first.numel() < FEWEST and next(_calls(key)) % REPEATS:
        return False
    return all(t.dtype != torch.float64 for t in tensors)


def _layout(t: Tensor, kind: str, on_gpu: bool) -> tuple[Tensor, Any]:
    """Return the tensor or a contiguous copy, and its part of the key: dtype and layout.

    The layout of columns of a wider matrix is "rows" and the stride of rows, which is a symbol on CPUs.
    """
    size, stride = t.shape, t.stride()
    if kind in ("mask", "seed"):
        t = t.contiguous()
        # As bytes for CPUs: C++ vectors load booleans one at a time.
        t = t.view(torch.uint8) if kind == "mask" and not on_gpu else t
        return t, (t.dtype, *(n == 1 for n in size))
    mergeable = all(stride[i] == size[i + 1] * stride[i + 1] for i in range(t.ndim - 2))
    if kind in DATA and t.ndim > 1 and stride[-1] == 1 and mergeable:
        return t, (t.dtype, "rows", stride[-2] if on_gpu else 0)
    return t.contiguous(), t.dtype


def _place_on_gpu(first: Tensor, specs: Sequence[tuple[str, Any]], tensors: Sequence[Tensor], sums: bool) -> Place:
    """Return the place of a call on a GPU, by the kinds of its tensors and their parts of the key."""
    columns = first.shape[-1] // 2 if specs[0][0] == "packed" else first.shape[-1]
    is_sequence, reach = not sums, 0
    for (kind, spec), t in zip(specs, tensors, strict=True):
        is_sequence &= kind == "seed" or (kind == "data" and not isinstance(spec, tuple))
        in_rows = isinstance(spec, tuple) and spec[1] == "rows"
        extent = t.numel() // max(t.shape[-1], 1) * spec[2] if in_rows else t.numel()
        reach = max(reach, extent)
    wide = reach > _INT32_MAX
    if is_sequence:
        return Place(first.device, 0, math.gcd(columns, 16), 1, wide)
    block = _GPU_BLOCK if sums and first.shape[-2] % _GPU_BLOCK == 0 else 1
    return Place(first.device, columns, 1, block, wide)


def _of_any_width(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of the kernel for all numbers of columns with the same divisor of 16."""
    parts = ((*part[:2], 0) if isinstance(part, tuple) and part[1:2] == ("rows",) else part for part in key[:-1])
    place = key[-1]
    return *parts, place._replace(columns=0, unit=math.gcd(place.columns, 16))


def with_defaults(signature: Signature, key: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Return a key of a call with ``count`` arguments, with the defaults of the other arguments."""
    return (*key[:count], *(a.value for a in signature.arguments[count:]), *key[count:])


def _load(signature: Signature, key: tuple[Any, ...], count: int, tensors: list[Tensor]) -> None:
    """Compile the kernel for a call with ``count`` arguments and run it on ``tensors``. If this fails, store None."""
    full = with_defaults(signature, key, count)
    device = key[-1].device.type
    with _lock:
        if full not in _KERNELS and key[-1].columns:
            wider = _of_any_width(full)
            of_one_width = (k for k in _KERNELS if k[-1].columns)
            widths = {k[-1].columns for k in of_one_width if _of_any_width(k)[:-1] == wider[:-1]}
            full = wider if len(widths) >= _MOST_WIDTHS else full
        if full not in _KERNELS and device not in _failures:
            if sum(signature.name == other[-3] for other in _KERNELS) >= _MOST_KERNELS:
                return
            log.log(
                logging.DEBUG if _KERNELS else logging.INFO,
                "compiling eager kernels, once for each operator, activation and dtype, in about a second each; "
                "%s=compiled_kernels turns this off",
                switches.NAME,
            )
            try:
                # In a separate thread, without the caller's modes, transforms and autocast.
                with ThreadPoolExecutor(1) as pool:
                    kernel = pool.submit(_compile, signature, full).result()
                with suppress(torch.OutOfMemoryError):  # the caller's next call raises it
                    kernel(list(tensors))  # generated code empties its argument
                _KERNELS[full] = kernel
            except Exception as error:
                reason = f"compiling {signature.name} failed: {type(error).__name__}: {str(error).splitlines()[0]}"
                log.warning("an eager operator runs on %s as plain PyTorch, which is slower: %s", device, reason)
                _KERNELS[full] = None
                if any(name in reason for name in ("InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton")):
                    _failures[device] = reason
        _KERNELS[key] = _KERNELS.get(full)


class OperatorGraph(NamedTuple):
    """A graph of one operator, to be compiled.

    Attributes:
        module: the graph. Its placeholders are symbols, then the call's tensors.
        examples: the placeholders' fake values.
        symbols: functions that compute the symbols from the call's first tensor.
        sums_block: the number of rows in a block of sums over rows; None without such sums.
    """

    module: torch.fx.GraphModule
    examples: list[Any]
    symbols: tuple[Callable[[Tensor], int], ...]
    sums_block: int | None


def _example(
    kind: str, spec: Any, leading: list[Any], columns: Any, packed: Any, row_stride: Any, device: torch.device
) -> Tensor:
    """Create an example tensor of a kind, with the dtype and layout in ``spec``. Other arguments may be symbols."""
    dtype, *layout = spec if isinstance(spec, tuple) else (spec,)
    width = packed if kind == "packed" or (kind == "per_column" and packed is not None) else columns
    sizes = {"per_row": leading, "per_column": [width], "per_head": leading[-2:-1], "seed": [1] * len(layout)}
    size = sizes.get(kind, [*leading, width])
    if kind == "mask":
        size = [1 if is_one else n for is_one, n in zip(reversed(layout), reversed(size), strict=False)][::-1]
    allocated = [*leading, layout[1] or row_stride] if "rows" in layout else size
    return torch.empty_strided(size, torch.empty(allocated).stride(), dtype=dtype, device=device)


def operator_graph(signature: Signature, key: tuple[Any, ...]) -> OperatorGraph:
    """Return the graph for a key with all arguments. The hints of its symbols do not depend on the first call."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    from torch_fused_ops.lowerings.operators import ROWS_PER_BLOCK_KEY

    *spec, _, axes, place = key
    on_gpu = place.device.type != "cpu"
    shape_env, numbers = ShapeEnv(duck_shape=False), itertools.count()
    graph, mode = torch.fx.Graph(), FakeTensorMode(shape_env=shape_env)

    def symbol(hint: int) -> Any:
        source = ConstantSource(f"size_{next(numbers)}")
        created = shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        return shape_env.create_symintnode(created, hint=hint, source=source)

    rows_hint = 8192 if on_gpu else 96
    if place.wide:  # Inductor takes 64 bits if the hints' products need them
        strides = [part[2] for part in spec if isinstance(part, tuple) and part[1:2] == ("rows",)]
        rows_hint = _INT32_MAX // max(place.columns or 1024, *strides, 1) + 2 * place.block
    rows = symbol(rows_hint // place.block)
    columns = place.columns or place.unit * symbol(1024)
    leading = [*map(symbol, range(3, axes + 1)), place.block * rows][: axes - 1]
    is_packed = any(argument.kind == "packed" for argument in signature.arguments)
    packed = None
    if is_packed:
        packed = 2 * columns if on_gpu else symbol(2048)
    symbols: list[tuple[Any, Callable[[Tensor], int]]] = []
    if place.block > 1:
        symbols.append((rows, lambda t: t.shape[-2] // place.block))
    if place.unit > 1:
        divisor = place.unit * (2 if signature.arguments[0].kind == "packed" else 1)
        symbols.append((columns // place.unit, lambda t: t.shape[-1] // divisor))
    examples: list[Any] = [value for value, _ in symbols]
    for i, value in enumerate(examples):
        graph.placeholder(f"size_{i}").meta["val"] = value
    nodes, fakes = [], []
    with mode:
        for argument, part in zip(signature.arguments, spec, strict=True):
            node = fake = list(part) if argument.name == "output_mask" else part
            if argument.kind and part is not None:
                row_stride = symbol(4096)
                fake = _example(argument.kind, part, leading, columns, packed, row_stride, place.device)
                node = graph.placeholder(argument.name)
                node.meta["val"] = fake
                examples.append(fake)
                if fake.dtype == torch.uint8:  # a mask on a CPU
                    number = graph.call_function(prims.convert_element_type.default, (node, torch.float32))
                    node, fake = graph.call_function(aten.ne.Scalar, (number, 0)), fake != 0
            nodes.append(node)
            fakes.append(fake)
        results = signature.overload(*fakes)
    call = graph.call_function(signature.overload, tuple(nodes))
    if on_gpu and place.block > 1:
        call.meta[ROWS_PER_BLOCK_KEY] = place.block
    outputs: list[Any] = [call]
    if signature.is_backward:
        getitem = functools.partial(graph.call_function, operator.getitem)
        outputs = [None if result is None else getitem((call, i)) for i, result in enumerate(results)]
    graph.output(tuple(outputs))
    module = torch.fx.GraphModule({}, graph)
    sums = any(kind == "per_column" and out is not None for kind, out in zip(signature.results, outputs, strict=True))
    block = place.block if sums and place.columns else None
    return OperatorGraph(module, examples, tuple(of for _, of in symbols), block)


SETTINGS = {
    "compile_threads": 1,
    "cpp.dynamic_threads": True,  # follow torch.set_num_threads at each call
    "post_grad_custom_post_pass": None,  # a policy's pass, which does not apply to one operator
    # On a GPU do not measure: a first call would wait for the device, and sums would differ between runs.
    "coordinate_descent_tuning": False,
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "triton.autotune_pointwise": False,
    "triton.cudagraphs": False,
    "triton.mix_order_reduction": False,  # its number of splits depends on the device
}
"""Inductor's settings for eager kernels."""


def _compile(signature: Signature, key: tuple[Any, ...]) -> Callable[..., Any]:
    """Compile a kernel. It takes the list of a call's tensors and returns the operator's results."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    from torch_fused_ops.lowerings.choices import EagerChoices

    if signature.overload not in lowerings:  # Inductor would call the operator, which would call this kernel
        raise RuntimeError(f"Inductor has no lowering of {signature.overload}")
    graph = operator_graph(signature, key)
    with config.patch(SETTINGS), V.set_choices_handler(EagerChoices(graph.sums_block)), torch.no_grad():
        code: Any = compile_fx_inner(graph.module, graph.examples)
    run, symbols = code.current_callable, graph.symbols

    def with_symbols(tensors: list[Tensor]) -> Any:
        return code.current_callable([*(of(tensors[0]) for of in symbols), *tensors])

    run = with_symbols if symbols else run
    if signature.is_backward:
        return lambda tensors: tuple(run(tensors))
    return lambda tensors: run(tensors)[0]
