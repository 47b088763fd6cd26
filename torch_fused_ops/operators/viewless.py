"""``fused::make_viewless``: the same memory under a tensor that is no view, with the identity for a gradient.

CompositeImplicitAutograd: it is ``aten._unsafe_view``, so every transform, mode and compiler knows it already. Eager
calls go one better. ``_unsafe_view`` gives its result a version counter of its own, so a write in place to the result
would go unseen by whatever autograd has saved of the source, and gradients would be silently wrong; ``detach`` shares
memory *and* counter and leaves no base, so there autograd raises, as it does for views. (Compiled code would
need an autograd.Function for that, and graphs that hold one are not kept in AOTAutograd's cache.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from torch_fused_ops.operators.autograd import define, library

__all__ = ["in_aten", "in_transform"]


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def in_transform() -> bool:
    """True under a torch.func transform or forward-mode AD."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _is_eager(input: Tensor) -> bool:
    """True if no transform, mode, subclass or compiler would record the detach."""
    return (
        not in_transform()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._dispatch_keys(input).has(torch._C.DispatchKey.Python)
        and not torch._is_functional_tensor(input)
    )


def _make_viewless(input: Tensor) -> Tensor:
    if _is_eager(input):
        return _Alias.apply(input)  # type: ignore[no-any-return, no-untyped-call]
    return in_aten(input)


def in_aten(input: Tensor) -> Tensor:
    """The operator where a transform, a mode or a compiler reads it."""
    return torch.ops.aten._unsafe_view(input, input.shape)  # type: ignore[no-any-return]


_OP = define("make_viewless", "(Tensor input) -> Tensor", {"CompositeImplicitAutograd": _make_viewless})
# Without a rule vmap loops over the examples, and warns of it.
torch.library.register_vmap("fused::make_viewless", lambda _, dims, input: (_OP(input), dims[0]), lib=library)
