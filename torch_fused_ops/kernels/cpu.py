"""Run pointwise operators eagerly without a compiled kernel: in plain torch, a block of rows at a time.

A formula has about ten elementwise steps. On large tensors each step is a pass over memory with a temporary of the
tensor's size. A block's temporaries are small, and fit a CPU's cache.
"""

from __future__ import annotations

import itertools
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


_GPU_BLOCK = 1 << 24  # elements per block on a GPU: a launch then takes less time than computing its elements


def block(device: torch.device) -> int:
    """Return the elements per block. On a CPU, a call takes 2 µs, as long as 10,000 elements."""
    return _GRAIN * max(4, torch.get_num_threads()) if device.type == "cpu" else _GPU_BLOCK


def kernel(op: PointwiseOperator, signature: Signature, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs ``plain``, an operator or backward operator in plain torch, in blocks of rows."""
    kinds, names = [a.kind for a in signature.arguments], [a.name for a in signature.arguments]
    # The index of the argument that gives each result its dtype.
    likes = [names.index(name) for name in op.tensors] if signature.is_backward else [0]

    def allocate(part: Tensor | None, kind: str, lead: Sequence[int], dtype: Any) -> Tensor | None:
        if part is None:
            return None
        if kind == "per_column":  # hundreds of partial sums: float64, so that their order does not matter
            return torch.zeros_like(part, dtype=torch.float64)
        # Do not return a view: in-place writes fail on a view that a custom autograd function returns.
        return part.new_empty((*lead, *part.shape[1:]), dtype=dtype)

    def blocked(*args: Any) -> Any:
        with activations.spelled_for_derivatives(True):  # these formulas have fewer steps
            return in_blocks(*args)

    def in_blocks(*args: Any) -> Any:
        size = block(args[0].device)
        if args[0].numel() <= _FEWEST_BLOCKS * size:
            outputs = plain(*args)
            if isinstance(outputs, Tensor):  # a registered activation may return its argument
                aliased = torch._C._is_alias_of(outputs, args[0])  # type: ignore[attr-defined]
                return outputs.clone() if aliased else outputs.contiguous()
            return tuple(r if r is None else r.contiguous() for r in outputs)
        # Widened arguments give unrounded results. Copying to outs rounds them; sums are rounded at the end.
        wide = compute_dtype(*(a for a in args if isinstance(a, Tensor)))
        dtypes = [None if args[i] is None else args[i].dtype for i in likes]
        *lead, width = args[0].shape
        rows, step = math.prod(lead), max(1, size // max(width, 1))
        divided = [t is not None and kind in (*DATA, "per_row") for t, kind in zip(args, kinds, strict=False)]
        flat = [t.reshape(rows, *t.shape[len(lead) :]) if d else t for t, d in zip(args, divided, strict=True)]
        outs: list[Any] = []
        for start in range(0, rows, step):
            block_rows = slice(start, start + step)
            parts = (t[block_rows] if d else t for t, d in zip(flat, divided, strict=True))
            widened = (p.to(wide) if isinstance(p, Tensor) and p.dtype in _HALVES else p for p in parts)
            computed = plain(*widened)
            computed = computed if signature.is_backward else (computed,)
            outs = outs or list(map(allocate, computed, signature.results, itertools.repeat(lead), dtypes))
            for out, part, kind in zip(outs, computed, signature.results, strict=True):
                if part is not None and kind == "per_column":
                    out.add_(part)
                elif part is not None:
                    out.view(rows, *part.shape[1:])[block_rows].copy_(part)
        rounded = (o if o is None else o.to(dtype) for o, dtype in zip(outs, dtypes, strict=True))
        return tuple(rounded) if signature.is_backward else outs[0]

    return blocked
