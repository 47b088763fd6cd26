"""Count the work of a kernel or library call: bytes read and written, FLOP of GEMMs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def nbytes_moved(node: Any) -> int:
    """Return the bytes that a node of Inductor's scheduler reads and writes, each buffer once.

    For a fused kernel or a library call, Inductor (`get_read_write_buffer_accesses`) counts the whole buffer, even if
    only a slice is read. This function counts at most the bytes that all accesses to the buffer touch.
    """
    if node.is_template() and len(node.get_nodes()) == 1:  # Inductor would count at most the result's bytes
        return sum(dict(_touched(node)).values())
    accesses: dict[str, int] = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    touched: Counter[str] = Counter()
    for name, nbytes in _touched(node):
        touched[name] += nbytes
    return sum(min(nbytes, touched.get(name, nbytes)) for name, nbytes in accesses.items())


def _touched(node: Any) -> Iterator[tuple[str, int]]:
    """Yield (buffer, bytes that an access touches)."""
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    if isinstance(node, ExternKernelSchedulerNode):
        for argument in getattr(node.node, "inputs", ()):
            for operand in argument if isinstance(argument, (list, tuple)) else (argument,):
                yield from _operand(operand)
        return
    deps = [dep for dep in node.read_writes.reads_and_writes() if not isinstance(dep, WeakDep)]
    # In loops of two fused nodes, the same access has different variable names.
    for dep in {dep.normalize() if hasattr(dep, "normalize") else dep for dep in deps}:
        yield dep.name, dep.numbytes_hint()


def _operand(operand: Any) -> Iterator[tuple[str, int]]:
    """Yield the bytes of a library call's operand: a buffer, or a view of a buffer."""
    from torch._inductor.utils import get_dtype_size
    from torch._inductor.virtualized import V

    if operand.maybe_get_size() is not None:  # it is None for a tuple of results
        sizes = [V.graph.sizevars.optimization_hint(size, fallback=0) for size in operand.get_size()]
        yield operand.get_name(), math.prod(sizes) * get_dtype_size(operand.get_dtype())


def _grouped_flops(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """Count the FLOP of a grouped GEMM, which torch's counter omits. Each row or column belongs to one group."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


# FLOP/s of large GEMMs on an H200: measured in bfloat16, 8192³ random numbers; *assumed* in float8. By the data sheet
# float8 has twice bfloat16's rate, but the chip's power already limits bfloat16.
BF16_FLOP, FLOAT8_FLOP = 790e12, 1250e12
BYTES_MOVED = 4.3e12  # an H200's measured bytes/s of a large copy


def flop_of_bf16(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the bfloat16 FLOP that take as long as a call's FLOP; fewer if the call multiplies float8."""
    flop = flop_of(packet, args, kwargs, result)
    in_float8 = args and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].itemsize == 1
    return flop * BF16_FLOP / FLOAT8_FLOP if in_float8 else flop


def flop_of(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Count an operator call's FLOP with torch's counter; 0 if the counter does not support the operator.

    For causal attention, only the unmasked pairs of queries and keys count, because kernels skip the masked ones.
    """
    from torch.utils.flop_counter import flop_registry

    count = {torch.ops.aten._grouped_mm: _grouped_flops, **flop_registry}.get(packet)
    if count is None:
        return 0.0
    return float(count(*args, **kwargs, out_val=result)) * _unmasked_share(packet, args, kwargs)


def _unmasked_share(packet: Any, args: Any, kwargs: Any) -> float:
    """Return the unmasked share of query-key pairs with ``is_causal=True``; 1 for other calls."""
    if not packet.__name__.startswith("_scaled_dot_product"):
        return 1.0
    schema = getattr(packet, packet.overloads()[0])._schema
    arguments = {**{a.name: a.default_value for a in schema.arguments}, **kwargs}
    arguments.update((a.name, value) for a, value in zip(schema.arguments, args, strict=False))
    if not arguments.get("is_causal"):
        return 1.0
    queries, keys = arguments["query"].shape[-2], arguments["key"].shape[-2]
    square = min(queries, keys)  # query i reads keys 0 to i
    return float((square * (square + 1) / 2 + (queries - square) * keys) / (queries * keys))


def is_view(func: Any) -> bool:
    """Return True if an operator's schema says that it returns a view of its first argument."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
