"""Define ``torch.vmap``: call the operator if the batch axis can become a leading axis, otherwise its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.utils._pytree import tree_map_only

from torch_fused_ops.declaration import Signature

_LEADING = ("data", "packed", "per_row", "scores")  # kinds of tensors that accept an extra leading axis
_SHARED = ("per_column", "per_head", "mask")  # kinds of tensors that all examples may share


def kernel(op: torch._ops.OpOverload, signature: Signature, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel for batched tensors. Its arguments look like one example.

    The kernel runs plain torch if vectors (``_SHARED``) are batched or their gradients are requested, and if there are
    other kinds of tensors: float8 operators need matrices, and examples with equal seeds must have equal random masks.
    """
    kinds = [argument.kind for argument in signature.arguments]
    other_kinds = {*kinds, *signature.results}.difference(("", *_LEADING, *_SHARED))
    vectors = [i for i, kind in enumerate(kinds) if kind in _SHARED]
    sums = [i for i, kind in enumerate(signature.results) if kind in _SHARED]

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        """Return (outputs, out_dims) for vectors that are not batched."""
        operands = list(args)
        for i, (t, axis, kind) in enumerate(zip(args, in_dims, kinds, strict=False)):
            if kind in _LEADING and t is not None:
                operands[i] = t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
        outputs = op(*operands)
        return outputs, tree_map_only(Tensor, lambda _: 0, outputs)

    def batched(*args: Any) -> Any:
        vectors_differ = any(args[i] is not None and is_batchedtensor(args[i]) for i in vectors)
        needs_sums = signature.is_backward and any(args[-1][i] for i in sums)
        if other_kinds or vectors_differ or needs_sums:
            return plain(*args)
        interpreter: Any = retrieve_current_functorch_interpreter()  # as torch.library.register_vmap calls a rule
        return custom_function_call_vmap_helper(interpreter, rule, op, *args)

    return batched
