"""Return aliases that are not views, under Megatron-LM's names (``megatron.core.utils``).

A view references its base, and thereby the base's autograd graph, even after ``tensor.data`` was set to a small tensor.
Pipeline-parallel schedules free activations in this way, so their tensors must not be views.

Under transforms, modes and compilers an alias is ``aten._unsafe_view``, which they support. Eager calls use ``detach``
instead. ``_unsafe_view`` gives its result a separate version counter, so autograd would not notice that an in-place
write to the result changes tensors saved from the source, and gradients would be silently wrong. ``detach`` shares
memory *and* counter without a base, so autograd raises, as it does for views. (Compiled code would need an
autograd.Function to do this, and AOTAutograd does not cache graphs that contain one.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def in_transform() -> bool:
    """Return True under a torch.func transform or forward-mode AD."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _alias_in_graph(input: Tensor) -> Tensor:
    """Return an alias whose gradient is input's gradient."""
    is_eager = (  # no transform, mode, subclass or compiler would record the detach
        not torch.compiler.is_dynamo_compiling()
        and not in_transform()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._dispatch_keys(input).has(torch._C.DispatchKey.Python)
        and not torch._is_functional_tensor(input)
    )
    if is_eager:
        return _Alias.apply(input)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.aten._unsafe_view(input, input.shape)  # type: ignore[no-any-return]


def _alias(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    if not requires_grad:
        return inp.detach()
    out = _alias_in_graph(inp) if keep_graph else inp.detach()
    if out.requires_grad or (keep_graph and not torch.is_grad_enabled()):
        return out
    # Dynamo creates no leaves inside a graph. torch.func transforms do not allow requires_grad_(), and do not need it.
    is_traced = torch.compiler.is_dynamo_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    return out if is_traced else out.requires_grad_()


def _check(inp: Any, requires_grad: bool) -> None:
    if not isinstance(inp, Tensor):
        raise TypeError(f"inp={inp!r} is not accepted: it must be a tensor, not {type(inp).__name__}")
    if requires_grad and not (inp.is_floating_point() or inp.is_complex()):
        raise ValueError(
            f"requires_grad={requires_grad!r} is not accepted where inp has dtype {inp.dtype}; accepted: False, or "
            "floating-point and complex dtypes"
        )


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """Return a tensor with ``inp``'s memory and ``_base is None``; the gradient is the identity.

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

    So ``result.requires_grad`` always equals the argument: a tensor without a gradient has no graph (nor a tangent),
    and a tensor without a graph is a leaf (with a separate ``.grad``). The caller's tensor never changes.
    Two exceptions: under ``torch.no_grad()`` a result with ``keep_graph=True`` never requires a gradient, and inside a
    ``torch.func`` transform only the differentiated tensors do.

    ``torch.compile`` does not break the graph. Dynamo creates no leaves inside a graph, so compiled, a new leaf is cut
    off instead, and does not require a gradient. A compiled function that only makes its argument viewless and returns
    it gets a view from Inductor.

    The result shares inp's version counter, as views do: autograd raises if backward needs a tensor that was modified
    through inp or the result. Under ``torch.func``, forward-mode AD, dispatch modes and ``torch.compile``, a result in
    inp's graph has a separate counter: do not write to such a result.

    Args:
        inp: any shape, strides and dtype.
        requires_grad: the result requires a gradient; the dtype must then be floating-point or complex.
        keep_graph: backward continues from the result into inp.

    Returns:
        A tensor with inp's shape, strides and dtype.

    Raises:
        TypeError: inp is not a tensor.
        ValueError: requires_grad is True and inp's dtype has no gradients.
    """
    if isinstance(inp, torch.fx.Proxy):  # record the call: its result depends on the tensor
        return inp.tracer.create_proxy("call_function", make_viewless_tensor, (inp, requires_grad, keep_graph), {})
    _check(inp, requires_grad)
    same = bool(requires_grad) == inp.requires_grad and (keep_graph or inp.is_leaf)
    without_tangent = torch.compiler.is_dynamo_compiling() or not in_transform()
    if same and inp._base is None and (requires_grad or without_tangent):
        return inp
    return _alias(inp, requires_grad, keep_graph)


class MakeViewlessTensor:
    """Calls ``make_viewless_tensor(inp, requires_grad, keep_graph=True)``, but never returns inp itself."""

    @staticmethod
    def apply(inp: Tensor, requires_grad: bool) -> Tensor:
        """Return a viewless alias of inp, in inp's graph: see ``make_viewless_tensor``."""
        _check(inp, requires_grad)
        return _alias(inp, requires_grad, keep_graph=True)
