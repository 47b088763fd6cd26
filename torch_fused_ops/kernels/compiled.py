"""Compile eager CPU kernels: Inductor's C++ for a graph of one operator, called without Dynamo.

An operator has a kernel for each combination of scalars (an activation, its constants), dtypes, strides and requested
results; sizes are symbols. The first large call compiles the kernel from the lowerings that ``torch.compile`` uses, so
results are bit-equal to compiled code. Inductor's cache on disk stores the kernel. Small calls compile if they repeat.
Other calls run the formula (``cpu.py``): small calls without a loaded kernel, float64, machines without a C++ compiler,
and all calls with ``TORCH_FUSED_OPS_WITHOUT=cpu_kernels``.

``torch._inductor.aoti_eager`` cannot replace this module: up to torch 2.15 it compiles for static shapes only, and
raises "Only support static shape for now" for other shapes.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.declaration import DATA, Signature
from torch_fused_ops.settings import switches

aten, prims = torch.ops.aten, torch.ops.prims
log = logging.getLogger("torch_fused_ops")

FEWEST = 1 << 17
"""Elements of the smallest call that compiles at once."""
REPEATS = 1000  # small calls of an operator before one compiles; a kernel takes a third to a tenth of a formula's time
KEY_REPEATS = 100  # after REPEATS calls, a kernel compiles at this call with the same key

# The keys have scalars, dtypes and layouts, then the operator's name, the number of axes, and whether four divides the
# rows. The value is None if compiling failed.
_KERNELS: dict[tuple[Any, ...], Callable[..., Any] | None] = {}
activations._on_change.append(_KERNELS.clear)  # a name among the scalars may stand for another function
_MOST_KERNELS = 64  # per operator: a probability that changes with every step must not compile each time
_calls = functools.lru_cache(maxsize=128)(lambda key: itertools.count(1))  # counts a key's calls without a kernel
_lock = threading.Lock()
_failure = ""  # the reason if no kernel can be compiled


IS_SUPPORTED = torch.__version__ >= (2, 13)  # type: ignore[operator]
"""True from torch 2.13 on. With torch 2.11 a compiled kernel crashed the process; 2.12 is untested."""


def status() -> str:
    """Describe the eager CPU kernels of this process: compiled or not, and why not."""
    if not IS_SUPPORTED or switches.is_without("cpu_kernels"):
        reason = f"turned off by {switches.NAME}" if IS_SUPPORTED else "compiling needs torch 2.13"
        return f"formulas in plain PyTorch: {reason}"
    if _failure:
        return f"formulas in plain PyTorch: {_failure}"
    loaded = len({*_KERNELS.values()} - {None})
    return f"compiled by Inductor at a call on {FEWEST:,} elements, or after {REPEATS:,} smaller calls; {loaded} loaded"


def kernel(signature: Signature, formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's CPU kernel. It runs a compiled kernel, or ``formula`` if none is loaded for the call."""
    if not IS_SUPPORTED or switches.is_without("cpu_kernels"):
        return formula
    kinds = [(i, argument.kind) for i, argument in enumerate(signature.arguments) if argument.kind]
    name, is_backward = signature.name, signature.is_backward
    bias = signature.results.index("per_column") if is_backward and "per_column" in signature.results else None

    small_calls = itertools.count()

    def run(*args: Any) -> Any:
        first, tensors = args[0], []
        if first.numel() < FEWEST and next(small_calls) < REPEATS:  # a key would take 3 µs
            return formula(*args)
        by_fours = bias is not None and args[-1][bias] and first.ndim > 1 and first.shape[-2] % 4 == 0
        key = [*args, name, first.ndim, by_fours]
        for i, kind in kinds:
            t = args[i]
            if t is not None:
                if kind in ("mask", "seed") or not t.is_contiguous():
                    t, key[i] = _layout(t, kind)
                else:
                    key[i] = t.dtype
                tensors.append(t)
        if is_backward:
            key[len(args) - 1] = tuple(args[-1])
        identity = tuple(key)
        if identity not in _KERNELS:
            if _failure or (first.numel() < FEWEST and next(_calls(identity)) % KEY_REPEATS):
                return formula(*args)
            if any(t.dtype == torch.float64 for t in tensors):
                return formula(*args)
            _load(signature, identity, len(args), [first.shape[-2] // 4, *tensors] if by_fours else list(tensors))
        compiled = _KERNELS.get(identity)
        if compiled is None or not first.numel():
            return formula(*args)
        return compiled([first.shape[-2] // 4, *tensors] if by_fours else tensors)

    return run


def _layout(t: Tensor, kind: str) -> tuple[Tensor, Any]:
    """Return the tensor or a contiguous copy, and its part of the key: dtype and layout."""
    size, stride = t.shape, t.stride()
    if kind in ("mask", "seed"):
        t = t.contiguous().view(torch.uint8) if kind == "mask" else t.contiguous()
        return t, (t.dtype, *(n == 1 for n in size))
    mergeable = all(stride[i] == size[i + 1] * stride[i + 1] for i in range(t.ndim - 2))
    if kind in DATA and t.ndim > 1 and stride[-1] == 1 and mergeable:  # the columns of a wider matrix
        return t, (t.dtype, "rows")
    return t.contiguous(), t.dtype


def _load(signature: Signature, key: tuple[Any, ...], count: int, inputs: list[Any]) -> None:
    """Compile the kernel for a call with ``count`` arguments and run it on ``inputs``. If this fails, store None."""
    global _failure
    full = (*key[:count], *(a.value for a in signature.arguments[count:]), *key[count:])
    with _lock:
        if full not in _KERNELS and not _failure:
            if sum(signature.name in other[-3:] for other in _KERNELS) >= _MOST_KERNELS:
                return
            log.log(
                logging.DEBUG if _KERNELS else logging.INFO,
                "compiling eager CPU kernels, once for each operator, activation and dtype, in about a second each; "
                "%s=cpu_kernels turns this off",
                switches.NAME,
            )
            try:
                # In a separate thread, without the caller's modes, transforms and autocast.
                with ThreadPoolExecutor(1) as pool:
                    kernel = pool.submit(_build, signature, full).result()
                kernel(inputs)
                _KERNELS[full] = kernel
            except Exception as error:
                reason = f"compiling {signature.name} failed: {type(error).__name__}: {str(error).splitlines()[0]}"
                log.warning("an eager operator runs on CPUs as plain PyTorch, which is slower: %s", reason)
                _KERNELS[full] = None
                _failure = reason if "InvalidCxxCompiler" in reason else ""
        _KERNELS[key] = _KERNELS.get(full)


def _build(signature: Signature, key: tuple[Any, ...]) -> Callable[..., Any]:
    """Compile a kernel with Inductor's caches, or in a fresh cache folder if the caches fail."""
    from torch._inductor.utils import fresh_cache

    try:
        return _compile(signature, key)
    except Exception as error:
        broken = getattr(error, "path", None)  # an ImportError has the path of the library that cannot be loaded
        log.info("compiling %s again, because it failed: %s", signature.name, error)
        with suppress(OSError):
            if broken:
                Path(broken).unlink()
                return _compile(signature, key)
        with TemporaryDirectory() as folder, fresh_cache(dir=folder):
            return _compile(signature, key)


def _example(kind: str, spec: Any, leading: list[Any], columns: Any, packed: Any, row_stride: Any) -> Tensor:
    """Create an example tensor of a kind, with the dtype and layout in ``spec``. Other arguments are symbolic sizes."""
    dtype, *layout = spec if isinstance(spec, tuple) else (spec,)
    width = packed if kind == "packed" or (kind == "per_column" and packed is not None) else columns
    sizes = {"per_row": leading, "per_column": [width], "per_head": leading[-2:-1], "seed": [1] * len(layout)}
    size = sizes.get(kind, [*leading, width])
    if kind == "mask":
        size = [1 if is_one else n for is_one, n in zip(reversed(layout), reversed(size), strict=False)][::-1]
    strides = torch.empty([*leading, row_stride] if "rows" in layout else size).stride()
    return torch.empty_strided(size, strides, dtype=dtype)


def _compile(signature: Signature, key: tuple[Any, ...]) -> Callable[..., Any]:
    """Compile a kernel. It takes the list of a call's tensors and returns the operator's results."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.lowering import lowerings
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if signature.overload not in lowerings:  # Inductor would call the operator, which would call this kernel
        raise RuntimeError(f"Inductor has no lowering of {signature.overload}")
    graph, mode = torch.fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())
    *spec, _, axes, by_fours = key
    # Sizes are symbols. All hints differ, because equal hints would share a symbol.
    hints = (96, 1024, 2048, *range(3, axes + 1), *range(4096, 4096 + len(spec)))
    rows, columns, double, *symbols = (mode.from_tensor(torch.empty(hint)).shape[0] for hint in hints)
    row_strides, outer = symbols[-len(spec) :], symbols[: -len(spec)]
    leading = [*outer, 4 * rows if by_fours else rows][: axes - 1]
    packed = double if any(argument.kind == "packed" for argument in signature.arguments) else None
    examples: list[Any] = [rows] if by_fours else []
    if by_fours:
        graph.placeholder("rows_by_four").meta["val"] = rows
    nodes, fakes = [], []
    with mode:
        for argument, part, row_stride in zip(signature.arguments, spec, row_strides, strict=True):
            node = fake = list(part) if argument.name == "output_mask" else part
            if argument.kind and part is not None:
                fake = _example(argument.kind, part, leading, columns, packed, row_stride)
                node = graph.placeholder(argument.name)
                node.meta["val"] = fake
                examples.append(fake)
                if argument.kind == "mask":  # passed as bytes: C++ vectors load booleans one at a time
                    number = graph.call_function(prims.convert_element_type.default, (node, torch.float32))
                    node, fake = graph.call_function(aten.ne.Scalar, (number, 0)), fake != 0
            nodes.append(node)
            fakes.append(fake)
        results = signature.overload(*fakes)
    call = graph.call_function(signature.overload, tuple(nodes))
    outputs = [call]
    if isinstance(results, tuple):
        outputs = [graph.call_function(operator.getitem, (call, i)) for i, r in enumerate(results) if r is not None]
    graph.output(tuple(outputs))
    settings = {
        "compile_threads": 1,
        "cpp.dynamic_threads": True,  # follow torch.set_num_threads at each call
        "post_grad_custom_post_pass": None,  # a policy's pass, which does not apply to one operator
    }
    with config.patch(settings), torch.no_grad():
        code: Any = compile_fx_inner(torch.fx.GraphModule({}, graph), examples)
    run = code.current_callable
    if not isinstance(results, tuple):
        return lambda tensors: run(tensors)[0]
    places = [None if r is None else sum(other is not None for other in results[:i]) for i, r in enumerate(results)]

    def backward(tensors: list[Tensor]) -> tuple[Tensor | None, ...]:
        gradients = run(tensors)
        return tuple([None if place is None else gradients[place] for place in places])

    return backward
