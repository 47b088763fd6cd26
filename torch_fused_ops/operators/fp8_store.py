"""Implement ``memory="fp8"`` for one call: mark the operator's data, and save marked data in float8.

The request takes four forms, because no form exists everywhere:

1. The keyword ``memory="fp8"`` of ``functional``. The operators' schemas have no such argument.
2. A call of ``fused::keep_fp8``, in graphs and in compilers' cache keys. To autograd and tracers it is ``view_as``.
3. An attribute of that call's result, for the operator that reads it. This operator saves its data with
   ``formulas.store_fp8``, and backward loads the data with ``load_fp8``.
4. With our partitioner instead of 3: metadata of the operator's node, a memory level like a policy's. The pre-grad pass
   writes it (``memory_levels.move_fp8_marks_to_meta``). The partitioner then also recomputes the operator's result.

In eager mode storing and loading are separate passes. On GPUs each is one kernel, from the float8 linear layers
(``KERNELS``). Their scales are powers of two, so loaded values are exact in the data's dtype. In bfloat16 GELU then
moves 7 bytes an element forward and 9 backward (4 and 6 at ``memory="free"``), SwiGLU 12 and 16 (6 and 10). Compiled,
GELU moves 5 and 5, SwiGLU 8 and 8. The tags and ``fused::with_saved`` steer the partitioner: without them it saves
bfloat16 (2 bytes instead of 1 for GELU, 4 instead of 2 for SwiGLU), and rounds to float8 only in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from torch_fused_ops.declaration import PointwiseOperator
from torch_fused_ops.formulas import compute_dtype, load_fp8, store_fp8
from torch_fused_ops.operators.autograd import SavePolicy, library

KERNELS: dict[str, Callable[..., Any]] = {}
"""Maps "store" and "load" to one-pass GPU versions of ``store_fp8`` and ``load_fp8``; set by ``families/float8``."""

_MARK = "_torch_fused_ops_keep_fp8"


def keep_fp8(input: Tensor) -> Tensor:
    """Return a marked alias of input. An operator whose first argument has the mark saves its data in float8."""
    marked = input.view_as(input)
    setattr(marked, _MARK, True)
    return marked


def with_saved(result: Tensor, saved: Sequence[Tensor]) -> Tensor:
    """Return a copy of result that depends on ``saved``. Otherwise partitioners would compute ``saved`` in backward."""
    return result.clone()


for _schema in ("keep_fp8(Tensor(a) input) -> Tensor(a)", "with_saved(Tensor result, Tensor[] saved) -> Tensor"):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
library.impl("keep_fp8", keep_fp8, "CompositeImplicitAutograd")
library.impl("with_saved", with_saved, "CompositeExplicitAutograd")
KEEP_FP8, WITH_SAVED = torch.ops.fused.keep_fp8.default, torch.ops.fused.with_saved.default


def _has_kernels(t: Tensor) -> bool:
    """Return True if ``KERNELS`` can store or load this tensor: it is on a GPU, and neither traced nor a shard."""
    return t.is_cuda and type(t) in (Tensor, torch.nn.Parameter) and t.shape[-1] > 0


def store(x: Tensor, halves: bool = False) -> tuple[Tensor, Tensor]:
    """Store x as ``store_fp8`` does, on GPUs in one pass."""
    result: tuple[Tensor, Tensor] = KERNELS["store"](x) if _has_kernels(x) else store_fp8(x, halves)
    return result


def load(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Load ``store``'s result in ``dtype``, on GPUs in one pass."""
    result: Tensor = (KERNELS["load"] if _has_kernels(stored) else load_fp8)(stored, scale, dtype)
    return result


def is_marked(data: Tensor) -> bool:
    """Return True if an operator's first argument has the mark."""
    return hasattr(data, _MARK)


@contextmanager
def _tagged(tag: str, value: Any) -> Iterator[None]:
    """Tag the nodes traced inside the block, for the compiler's partitioner. A checkpoint's tags have precedence."""
    meta = traceback.current_meta if traceback.has_preserved_node_meta() else {}
    before = dict(meta)
    if not isinstance(meta.get(tag), CheckpointPolicy):
        meta[tag] = value
    try:
        yield
    finally:
        meta.clear()
        meta.update(before)


def policy(op: PointwiseOperator) -> SavePolicy:
    """Save the data in float8 with a scale per row, and the other arguments unchanged."""
    count, data = len(op.tensors), op.num_data

    def saved(args: tuple[Any, ...], _: Tensor) -> tuple[tuple[Tensor | None, ...], Any]:
        tensors, traced = args[:count], traceback.has_preserved_node_meta()
        with _tagged("recompute", CheckpointPolicy.MUST_SAVE):
            halves = traced and op.reads_halves(args)
            stored = [part for t in tensors[:data] for part in store(t, halves)]
        wide = compute_dtype(*tensors)  # eager: load without rounding to t.dtype
        dtypes = [t.dtype if traced or _has_kernels(t) else wide for t in tensors[:data]]
        return (*stored, *tensors[data:]), (dtypes, args[count:])

    def arguments(tensors: tuple[Tensor | None, ...], values: Any, _: tuple[bool, ...]) -> Any:
        if torch.is_grad_enabled():  # backward with create_graph=True: a second derivative would silently be 0
            raise RuntimeError(
                f"a second derivative through {op.forward.overload.name()} with memory='fp8' is not accepted: it saves "
                "arguments in float8, and rounding has no derivative. With create_graph=True use memory='free', or "
                "torch.func"
            )
        dtypes, scalars = values
        stored: Any = zip(tensors[: 2 * data : 2], tensors[1 : 2 * data : 2], dtypes, strict=True)
        with _tagged("partitioner_tag", "must_be_in_backward"):  # else forward may load, and save loaded data
            loaded = [load(codes, scale, dtype) for codes, scale, dtype in stored]
        return *loaded, *tensors[2 * data : data + count], *scalars

    def result(out: Tensor, tensors: tuple[Tensor | None, ...]) -> Tensor:
        if traceback.has_preserved_node_meta():
            return WITH_SAVED(out, [t for t in tensors if t is not None])  # type: ignore[no-any-return]
        return out

    return SavePolicy(saved, arguments, result)
