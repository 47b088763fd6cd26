"""Run pointwise operators eagerly without a kernel: in plain torch, a block of rows at a time.

A formula has about ten elementwise steps. On large tensors each step is a pass over memory with a temporary of the
tensor's size. On blocks that fit the cache, only arguments and results are large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.declaration import DATA, PointwiseOperator, Signature
from torch_fused_ops.formulas import compute_dtype

_HALVES = (torch.float16, torch.bfloat16)

_GRAIN = 32768  # elements below which PyTorch does not divide an elementwise call among threads
_FEWEST_BLOCKS = 4  # up to this number, whole temporaries cost less than copying results of blocks


def block() -> int:
    """Return the elements per block: a grain per thread, at least 4 grains. A call takes 2 µs, like 10,000 elements."""
    return _GRAIN * max(4, torch.get_num_threads())


def in_blocks(
    compute: Callable[..., Sequence[Tensor | None]],
    args: Sequence[Any],
    kinds: Sequence[str],
    results: Sequence[str],
    dtypes: Sequence[torch.dtype | None],
) -> tuple[Tensor | None, ...]:
    """Call ``compute(*args)`` for a block of rows at a time.

    Args:
        compute: computes any number of rows; called with the blocks in order.
        args: the arguments; the first is data.
        kinds: the arguments' kinds, as in a declaration. Data and per-row tensors are divided, others are shared.
        results: the results' kinds. Per-column results are summed over the blocks.
        dtypes: dtypes to which results are rounded; None leaves them unchanged.
    """
    *lead, width = args[0].shape
    rows, step = math.prod(lead), max(1, block() // max(width, 1))
    divided = [t is not None and kind in (*DATA, "per_row") for t, kind in zip(args, kinds, strict=False)]
    flat = [t.reshape(rows, *t.shape[len(lead) :]) if d else t for t, d in zip(args, divided, strict=True)]

    def allocate(part: Tensor | None, kind: str, dtype: torch.dtype | None) -> Tensor | None:
        if part is None:
            return None
        if kind == "per_column":  # hundreds of partial sums: float64, so that their order does not matter
            return torch.zeros_like(part, dtype=torch.float64)
        # Do not return a view: in-place writes fail on a view that a custom autograd function returns.
        return part.new_empty((*lead, *part.shape[1:]), dtype=dtype)

    outs: list[Any] = []
    for start in range(0, max(rows, 1), step):
        block_rows = slice(start, start + step)
        parts = compute(*(t[block_rows] if d else t for t, d in zip(flat, divided, strict=True)))
        outs = outs or list(map(allocate, parts, results, dtypes))
        for out, part, kind in zip(outs, parts, results, strict=True):
            if part is not None:
                out.add_(part) if kind == "per_column" else out.view(rows, *part.shape[1:])[block_rows].copy_(part)
    return tuple(
        None if out is None else out.to(dtype) if kind == "per_column" else out
        for out, kind, dtype in zip(outs, results, dtypes, strict=True)
    )


def kernel(op: PointwiseOperator, signature: Signature, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs ``plain``, an operator or backward operator in plain torch, in blocks."""
    kinds, names = [a.kind for a in signature.arguments], [a.name for a in signature.arguments]
    # The index of the argument that gives each result its dtype.
    likes = [names.index(name) for name in op.tensors] if signature.is_backward else [0]

    @activations.spelled_for_derivatives(True)  # these formulas have fewer steps
    def blocked(*args: Any) -> Any:
        if args[0].numel() <= _FEWEST_BLOCKS * block():
            outputs = plain(*args)
            if isinstance(outputs, Tensor):  # a registered activation may return its argument
                aliased = torch._C._is_alias_of(outputs, args[0])  # type: ignore[attr-defined]
                return outputs.clone() if aliased else outputs.contiguous()
            return tuple(r if r is None else r.contiguous() for r in outputs)
        wide = compute_dtype(*(a for a in args if isinstance(a, Tensor)))

        def compute(*parts: Any) -> Any:
            # Widened arguments give unrounded results. Copying to outs rounds them; sums are rounded at the end.
            widened = (p.to(wide) if isinstance(p, Tensor) and p.dtype in _HALVES else p for p in parts)
            computed = plain(*widened)
            return computed if isinstance(computed, tuple) else (computed,)

        dtypes = [None if args[i] is None else args[i].dtype for i in likes]
        outs = in_blocks(compute, args, kinds, signature.results, dtypes)
        return outs if signature.is_backward else outs[0]

    return blocked
