"""Read recorded values of nodes, check that operators accept these values, and read the arguments of GEMMs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from torch_fused_ops.graphs.reasons import Kind, Rejection
from torch_fused_ops.lowerings import compat

from .graph import AFFINE, RESHAPES, GraphAnalysis, label, reachable, statically, tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor)


def value_of(node: Node) -> torch.Tensor:
    """Return the node's recorded value.

    Raises:
        Rejection: no value is recorded, or the value is not a tensor.
    """
    value = tensor(node)
    if value is None:
        raise Rejection(Kind.UNRECORDED, f"the graph does not record the shape and dtype of {label(node)}")
    return value


def check_plain(node: Node) -> None:
    """Reject a node whose value operators do not accept.

    Raises:
        Rejection: the value is a tensor subclass or a transform's wrapper, or its dtype is not real and floating.
    """
    value = value_of(node)
    if type(value) not in _PLAIN:  # subclasses may define other arithmetic
        text = f"{label(node)} returns a {type(value).__name__}: tensor subclasses are not fused"
        raise Rejection(Kind.SUBCLASS, text)
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise Rejection(Kind.TRANSFORM, "it is computed under a torch.func transform (vmap, grad, …)")
    if value.dtype not in FLOATING:
        raise Rejection(Kind.DTYPE, f"{label(node)} returns {value.dtype}: only real floating tensors are fused")


def check_rounding(node: Node) -> None:
    """Reject a node if Inductor must round as eager does, after each call. A fused operator rounds once.

    Raises:
        Rejection: a setting of Inductor requires eager's rounding.
    """
    setting = compat.eager_rounding(value_of(node).dtype)
    if setting:
        raise Rejection(Kind.EAGER_ROUNDING, f"inductor's {setting} requires eager's rounding")


def equal(a: Any, b: Any) -> bool:
    """Return True if two sizes are equal for all values of their symbols."""
    return statically(a == b)


def same_shape(a: Node, b: Node) -> bool:
    """Return True if two nodes' values have the same shape."""
    x, y = value_of(a), value_of(b)
    return x.ndim == y.ndim and all(map(equal, x.shape, y.shape))


def is_contiguous(value: torch.Tensor, order: Sequence[int] | None = None) -> bool:
    """Return True if the elements are dense, in row-major order of these axes, from the slowest to the fastest."""
    expected: Any = 1
    for axis in reversed(range(value.ndim) if order is None else order):
        if not statically(value.shape[axis] == 1):
            if not statically(value.stride(axis) == expected):
                return False
            expected = expected * value.shape[axis]
    return True


def keeps_rows(analysis: GraphAnalysis, node: Node) -> bool:
    """Return True if a view only changes the leading axes: the rows and their order in memory stay the same.

    Return False for calls that select rows, even if they select each row once, and for calls without a gradient:
    ``detach``, and views as another dtype.
    """
    if analysis.calls[node].name not in RESHAPES or not node.all_input_nodes:
        return False
    value, source = tensor(node), tensor(node.all_input_nodes[0])
    return (
        value is not None
        and source is not None
        and value.dtype == source.dtype
        and bool(value.ndim and source.ndim)
        and equal(value.shape[-1], source.shape[-1])
        and equal(value.numel(), source.numel())
        and is_contiguous(value)
        and is_contiguous(source)
    )


def producers(analysis: GraphAnalysis, inputs: Iterable[Node]) -> Iterator[Node]:
    """Yield the GEMMs with weights that produce the inputs, through views, sums and pointwise autograd functions."""

    def sources(node: Node) -> Iterable[Node]:
        passed = not analysis.weight_gemm(node) and (analysis.state[node] == AFFINE or analysis.custom(node))
        return map(analysis.origin, analysis.sources(node)) if passed else ()

    return filter(analysis.weight_gemm, reachable(map(analysis.origin, inputs), sources))


def arguments_of(analysis: GraphAnalysis, node: Node) -> tuple[Node, Node, Node | None, bool]:
    """Return the (input, weight, bias) of a linear layer, and True if its weight is (in, out).

    Raises:
        Rejection: the node is not a linear layer.
    """
    call = analysis.calls[node]
    names, order, transposed = _LINEARS.get(call.name, ((), (), False))
    arguments: dict[str, Any] = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    input, weight, bias = (arguments.pop(names[i], None) if i is not None else None for i in order or (None,) * 3)
    if isinstance(input, Node) and isinstance(weight, Node) and isinstance(bias, Node | None) and not arguments:
        value, matrix = tensor(weight), value_of(input).ndim == 2 or call.name in ("linear", "matmul")
        if value is not None and value.ndim == 2 and not analysis.follows_gemm[weight] and matrix:
            return input, weight, bias, transposed
    raise Rejection(Kind.GEMM_FORM, f"{label(node)} is not a linear layer")


# For a GEMM's name: its arguments, the positions of input, weight and bias, and True if the weight is (in, out).
_LINEARS: dict[str, tuple[tuple[str, ...], tuple[int | None, ...], bool]] = {
    "linear": (("input", "weight", "bias"), (0, 1, 2), False),
    "addmm": (("input", "mat1", "mat2"), (1, 2, 0), True),
    "mm": (("input", "mat2"), (0, 1, None), True),
    "matmul": (("input", "other"), (0, 1, None), True),
}
