"""Viewless tensors: another tensor over the same memory that holds no reference to what it was a view of.

A view keeps its base alive, and with it the base's autograd graph, even after ``tensor.data`` was set to something
small. Pipeline-parallel schedules free activations in that way, so what they hand on must be no view. The names and
signatures are Megatron-LM's (``megatron.core.utils``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.operators.viewless import in_transform  # which registers torch.ops.fused.make_viewless

__all__ = [
    "MakeViewlessTensor",
    "assert_viewless_tensor",
    "make_viewless_tensor",
    "safely_set_viewless_tensor_data",
]

# Under Dynamo a tensor made inside cannot be told to require a gradient. It does if it comes from one that does.
_ANCHOR = torch.zeros((), device="cpu", requires_grad=True)


class _Leaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def _alias(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    if not requires_grad:
        return inp.detach()
    out: Tensor = torch.ops.fused.make_viewless(inp) if keep_graph else inp.detach()
    if out.requires_grad or (keep_graph and not torch.is_grad_enabled()):
        return out
    if torch.compiler.is_dynamo_compiling():
        return _Leaf.apply(out, _ANCHOR)  # type: ignore[no-any-return, no-untyped-call]
    # Inside torch.func transforms no tensor can be told to; what they differentiate does not depend on it.
    return out if torch._C._functorch.peek_interpreter_stack() is not None else out.requires_grad_()


def _check(inp: Any, requires_grad: bool) -> None:
    if not isinstance(inp, Tensor):
        raise TypeError(f"inp={inp!r} is not accepted: it must be a tensor, not {type(inp).__name__}")
    if requires_grad and not (inp.is_floating_point() or inp.is_complex()):
        raise ValueError(
            f"requires_grad={requires_grad!r} is not accepted where inp has dtype {inp.dtype}; accepted: False, or "
            "floating-point and complex dtypes"
        )


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """``inp`` over the same memory, with ``_base is None``; the gradient is the identity.

    ========== ============= ============= ============================= =======================================
    keep_graph requires_grad inp requires  inp is a view                 inp is none
    ========== ============= ============= ============================= =======================================
    True       True          yes           in inp's graph                inp itself
    True       True          no            a new leaf                    a new leaf
    True       False         yes           cut off                       cut off
    True       False         no            without a graph               inp itself
    False      True          yes           a new leaf                    a new leaf; inp itself if that is a leaf
    False      True          no            a new leaf                    a new leaf
    False      False         yes           cut off                       cut off
    False      False         no            without a graph               inp itself
    ========== ============= ============= ============================= =======================================

    So ``result.requires_grad`` is what was asked for, on every path: what requires no gradient has no graph to keep
    (nor a tangent), and what has no graph is a leaf (whose gradient arrives in its own ``.grad``, not inp's). The
    caller's tensor is never changed. Two exceptions: under ``torch.no_grad()`` nothing with ``keep_graph=True``
    requires a gradient, as of any function; and inside a ``torch.func`` transform only what it differentiates does.

    Under ``torch.compile`` there are no graph breaks; what the table calls a new leaf requires a gradient and passes
    none on, but is no leaf and has no ``.grad``, as Dynamo makes none inside a graph. What it cannot do: a compiled
    function that returns its own argument, made viewless and nothing else, gets it from Inductor as a view after all;
    and a new leaf inside a compiled ``torch.func.jvp`` or ``vmap`` raises, as any autograd.Function does there.

    The result shares inp's version counter, as views do: a write in place to either makes autograd raise where
    backward needs what was there before. Where the result is in inp's graph, this does not hold under ``torch.func``,
    forward-mode AD, dispatch modes and ``torch.compile``: there the counter is its own, so do not write to it.

    Args:
        inp: any shape, strides and dtype.
        requires_grad: whether the result requires a gradient; True asks for a floating-point or complex dtype.
        keep_graph: whether backward goes on from the result into inp.

    Returns:
        A tensor with inp's shape, strides and dtype.

    Raises:
        TypeError: inp is no tensor.
        ValueError: requires_grad is True and inp's dtype has no gradients.

    Megatron-LM's ignores requires_grad where keep_graph is True and both where inp is no view, has a version counter
    of its own, so that writes corrupt gradients silently, and breaks graphs under ``torch.compile``.
    """
    if isinstance(inp, torch.fx.Proxy):  # a call in its graph: what is to be done depends on the tensor
        return inp.tracer.create_proxy("call_function", make_viewless_tensor, (inp, requires_grad, keep_graph), {})
    _check(inp, requires_grad)
    same = bool(requires_grad) == inp.requires_grad and (keep_graph or inp.is_leaf)
    if same and inp._base is None and (requires_grad or torch.compiler.is_dynamo_compiling() or not in_transform()):
        return inp
    return _alias(inp, requires_grad, keep_graph)


class MakeViewlessTensor:
    """``make_viewless_tensor(inp, requires_grad, keep_graph=True)`` that never returns inp itself."""

    @staticmethod
    def apply(inp: Tensor, requires_grad: bool) -> Tensor:
        """A viewless alias of inp, in its graph: see ``make_viewless_tensor``."""
        _check(inp, requires_grad)
        return _alias(inp, requires_grad, keep_graph=True)


def assert_viewless_tensor(tensor: Any, extra_msg: str | None = None) -> Any:
    """``tensor`` as it is, or AssertionError if it is a view. Lists and tuples are looked into; anything else passes.

    Args:
        tensor: a tensor, a list or tuple of them, or anything else.
        extra_msg: added to the message.

    Raises:
        AssertionError: a tensor has a base. Setting its ``.data`` would free nothing: the base keeps its memory.
    """
    if isinstance(tensor, (list, tuple)):
        for t in tensor:
            assert_viewless_tensor(t, extra_msg)
    elif isinstance(tensor, Tensor) and tensor._base is not None:
        more = "" if extra_msg is None else f" {extra_msg}"
        raise AssertionError(
            f"tensor is a view of a tensor of shape {tuple(tensor._base.shape)}, which it keeps alive; accepted: "
            f"tensors whose _base is None, as make_viewless_tensor returns them.{more}"
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """``tensor.data = new_data_tensor``, after making sure that this frees the old memory: that tensor is no view.

    Args:
        tensor: no view. Under ``torch.compile(fullgraph=True)``: one from outside the graph.
        new_data_tensor: any shape; tensor's dtype and device.

    Raises:
        AssertionError: tensor is a view.
        TypeError: new_data_tensor is no tensor.
    """
    if not isinstance(new_data_tensor, Tensor):
        raise TypeError(
            f"new_data_tensor={new_data_tensor!r} is not accepted: it must be a tensor, not "
            f"{type(new_data_tensor).__name__}"
        )
    assert_viewless_tensor(tensor, f"The new data has shape {tuple(new_data_tensor.shape)}.")
    tensor.data = new_data_tensor
