"""What a kernel or a library's call does: bytes read and written, FLOP of matrix products."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def nbytes_moved(node: Any) -> int:
    """The bytes that a node of Inductor's scheduler reads and writes, each buffer once.

    Inductor (`get_read_write_buffer_accesses`) counts all of a buffer for a fused kernel and for a library's call, also
    where they read a slice of it. Here a buffer counts for no more than its accesses together touch.
    """
    accesses: dict[str, int] = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    touched: Counter[str] = Counter()
    for name, nbytes in _touched(node):
        touched[name] += nbytes
    return sum(min(nbytes, touched.get(name, nbytes)) for name, nbytes in accesses.items())


def _touched(node: Any) -> Iterator[tuple[str, int]]:
    """(buffer, bytes of it that an access touches)."""
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    if isinstance(node, ExternKernelSchedulerNode):
        for argument in getattr(node.node, "inputs", ()):
            for operand in argument if isinstance(argument, (list, tuple)) else (argument,):
                yield from _operand(operand)
        return
    deps = [dep for dep in node.read_writes.reads_and_writes() if not isinstance(dep, WeakDep)]
    # The same access, in loops of two fused nodes, has variables of other names.
    for dep in {dep.normalize() if hasattr(dep, "normalize") else dep for dep in deps}:
        yield dep.name, dep.numbytes_hint()


def _operand(operand: Any) -> Iterator[tuple[str, int]]:
    """A buffer that a library's call is given, or a view of one: which may be of a part of it."""
    from torch._inductor.utils import get_dtype_size
    from torch._inductor.virtualized import V

    if operand.maybe_get_size() is not None:  # else it is the several results of another call
        sizes = [V.graph.sizevars.optimization_hint(size, fallback=0) for size in operand.get_size()]
        yield operand.get_name(), math.prod(sizes) * get_dtype_size(operand.get_dtype())


def _grouped_flops(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """Of a matrix product in groups, which torch's counter leaves out: rows or columns go to one group each."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _multiplies_float8(args: Any) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].itemsize == 1


# FLOP/s of large matrix products on an H200: in bfloat16 measured, of 8192³ random numbers; in float8 *assumed*. By the
# data sheet it is twice bfloat16's rate, of which a chip that is out of power there already does not reach all.
BF16_FLOP, FLOAT8_FLOP = 790e12, 1250e12


def flop_of_bf16(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    """FLOP in bfloat16 that take as long as a call's do: fewer than its own where it multiplies float8."""
    flop = flop_of(packet, args, kwargs, result)
    return flop * BF16_FLOP / FLOAT8_FLOP if _multiplies_float8(args) else flop


def flop_of(packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    """FLOP of one call of an operator on tensors, or their like, as torch's own counter has them; 0 of all others."""
    from torch.utils.flop_counter import flop_registry

    count = {torch.ops.aten._grouped_mm: _grouped_flops, **flop_registry}.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))
