"""``fused::make_viewless``: the same memory under a tensor that is no view, with the identity for a gradient.

CompositeImplicitAutograd: it is ``aten._unsafe_view``, so every transform, mode and compiler knows it already. Eager
calls go one better. ``_unsafe_view`` gives its result a version counter of its own, so a write in place to the result
would go unseen by whatever autograd has saved of the source, and gradients would be silently wrong; ``detach`` shares
memory *and* counter and leaves no base, so there autograd raises, as it does for views. (Compiled code would
need an autograd.Function for that, and graphs that hold one are not kept in AOTAutograd's cache.)

A view keeps its base alive, and with it the base's autograd graph, even after ``tensor.data`` was set to a small
tensor. Pipeline-parallel schedules free activations in that way, so their tensors must not be views. The names and
signatures are Megatron-LM's (``megatron.core.utils``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from torch_fused_ops.operators.autograd import define, library


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


def _make_viewless(input: Tensor) -> Tensor:
    is_eager = (  # no transform, mode, subclass or compiler would record the detach
        not in_transform()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._dispatch_keys(input).has(torch._C.DispatchKey.Python)
        and not torch._is_functional_tensor(input)
    )
    return _Alias.apply(input) if is_eager else in_aten(input)  # type: ignore[no-untyped-call]


def in_aten(input: Tensor) -> Tensor:
    """The operator where a transform, a mode or a compiler reads it."""
    return torch.ops.aten._unsafe_view(input, input.shape)  # type: ignore[no-any-return]


_OP = define("make_viewless", "(Tensor input) -> Tensor", _make_viewless, in_aten)
# Without a rule vmap loops over the examples, and warns of it.
torch.library.register_vmap("fused::make_viewless", lambda _, dims, input: (_OP(input), dims[0]), lib=library)


# ---- Megatron-LM's names --------------------------------------------------------------------------------------------

# Dynamo cannot call requires_grad_() on an intermediate tensor; the result of a tensor that requires a gradient does.
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
    # torch.func transforms do not allow requires_grad_(), and do not need it.
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
    keep_graph requires_grad inp requires  inp is a view                 inp is not a view
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

    So ``result.requires_grad`` is as requested, on every path: a tensor without a gradient has no graph (nor a
    tangent), and a tensor without a graph is a leaf (with its own ``.grad``, not inp's). The caller's tensor is never
    changed. Two exceptions: under ``torch.no_grad()`` nothing with ``keep_graph=True`` requires a
    gradient, as of any function; and inside a ``torch.func`` transform only the differentiated tensors do.

    Under ``torch.compile`` there are no graph breaks. The table's new leaf then requires a gradient and passes none on,
    but is not a leaf and has no ``.grad``, as Dynamo makes none inside a graph. Two limits: a compiled function that
    only makes its argument viewless and returns it gets a view from Inductor; and a new leaf inside a compiled
    ``torch.func.jvp`` or ``vmap`` raises, as any autograd.Function does there.

    The result shares inp's version counter, as views do: autograd raises if backward needs a tensor that either was
    used to write. A result in inp's graph has its own counter under ``torch.func``, forward-mode AD, dispatch modes and
    ``torch.compile``: do not write to it there.

    Args:
        inp: any shape, strides and dtype.
        requires_grad: the result requires a gradient; the dtype must then be floating-point or complex.
        keep_graph: backward continues from the result into inp.

    Returns:
        A tensor with inp's shape, strides and dtype.

    Raises:
        TypeError: inp is not a tensor.
        ValueError: requires_grad is True and inp's dtype has no gradients.

    Megatron-LM's ignores requires_grad if keep_graph is True, and both if inp is not a view. Its result has its own
    version counter, so that writes corrupt gradients silently, and it breaks graphs under ``torch.compile``.
    """
    if isinstance(inp, torch.fx.Proxy):  # record the call: its result depends on the tensor
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
    """Return ``tensor``, or raise AssertionError if it is a view. Checks lists' and tuples' items; ignores others.

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
    """``tensor.data = new_data_tensor``, after checking that this frees the old memory: tensor is not a view.

    Args:
        tensor: not a view. Under ``torch.compile(fullgraph=True)``: an input of the graph.
        new_data_tensor: any shape; tensor's dtype and device.

    Raises:
        AssertionError: tensor is a view.
        TypeError: new_data_tensor is not a tensor.
    """
    if not isinstance(new_data_tensor, Tensor):
        raise TypeError(
            f"new_data_tensor={new_data_tensor!r} is not accepted: it must be a tensor, not "
            f"{type(new_data_tensor).__name__}"
        )
    assert_viewless_tensor(tensor, f"The new data has shape {tuple(new_data_tensor.shape)}.")
    tensor.data = new_data_tensor
