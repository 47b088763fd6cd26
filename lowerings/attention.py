"""Find attention by data flow: the linear layers that feed, and that read, a GEMM of two activations.

Module and operator names do not matter. The core of attention is PyTorch's ``scaled_dot_product_attention``,
FlexAttention, or two batched GEMMs of computed tensors with a softmax between them. Queries, keys and values come from
linear layers through views, casts, rotary embeddings and norms. The result goes to a linear layer through views and
factors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_fused_ops.graphs.modules import module_stack
from torch_fused_ops.lowerings.partition import base, is_gemm, is_linear, is_pointwise, op_types
from torch_fused_ops.lowerings.saved_tensors import readers

aten, prims, fused = torch.ops.aten, torch.ops.prims, torch.ops.fused

# Calls that identify a softmax after PyTorch's decompositions.
_SOFTMAX = {aten.exp.default, aten._softmax.default, fused.scaled_masked_softmax.default}
# Calls, other than views, that may lie between a core and the linear layer that reads its result.
_PASSED = {aten.clone.default, prims.convert_element_type.default, aten.mul.Tensor}
_MAX_VALUES = 128  # values between linear layers and a core: norms, rotary embeddings and masks need about 60


@dataclass(frozen=True)
class Attention:
    """The linear layers of one attention, and the values that they produce.

    Attributes:
        linears: the calls that produce queries, keys and values, and the calls that read attention's result.
        values: all values from the linear layers to the core, and the projected result with its residual sum.
    """

    linears: tuple[Node, ...]
    values: frozenset[Node]

    @property
    def module(self) -> str:
        """Return the path of the innermost module that contains all linear layers."""
        stacks = [module_stack(linear) for linear in self.linears]
        common = takewhile(lambda paths: len(set(paths)) == 1, zip(*stacks, strict=False))
        return next(reversed([paths[0] for paths in common]), "")


def find(graph: Graph) -> Iterator[Attention]:
    """Yield every attention with a linear layer, in the order of the forward graph."""
    for node in graph.nodes:
        if not (is_attention_op(node) or (is_gemm(node) and not is_linear(node))):
            continue
        before, between = _sources(node)
        if not (is_attention_op(node) or _has_scores(between)):
            continue
        after = dict.fromkeys(_projections(node))
        if before or after:
            linears = (*before, *after)
            yield Attention(linears, frozenset(_values(linears, between)))


def share_masks(graph: Graph) -> None:
    """Let attention's backward read a mask that all heads share from memory, without a copy for each head.

    A checkpoint recomputes the mask in backward. Inductor then copies it for each head, although the kernel accepts a
    stride of 0: ``sdpa_constraint`` (torch/_inductor/lowering.py, torch 2.13 and 2.15) excepts forward's mask only.
    """
    for node in graph.find_nodes(
        op="call_function", target=aten._scaled_dot_product_efficient_attention_backward.default
    ):
        mask: Any = node.args[4]
        if mask is None or mask.target is not aten.expand.default:
            continue
        source, view = base(mask), mask.meta["val"]
        if source.op != "placeholder" and source.meta["val"].is_contiguous() and view.stride(-1) == 1:
            with graph.inserting_before(node):
                layout = (list(view.shape), list(view.stride()), view.storage_offset())
                strided = graph.call_function(aten.as_strided.default, (source, *layout))
            strided.meta = dict(mask.meta)
            node.update_arg(4, strided)


def is_attention_op(node: Node) -> bool:
    """Return True for PyTorch's attention operators and FlexAttention, forward and backward."""
    name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")
    return node.op == "call_function" and name.startswith(("_scaled_dot_product", "flex_attention"))


def _has_scores(between: Iterable[Node]) -> bool:
    """Return True if these values contain a softmax and another GEMM of two computed tensors."""
    nodes = set(between)
    gemms = (n for n in nodes if is_gemm(n) and all(base(s).op == "call_function" for s in n.all_input_nodes))
    return any(n.target in _SOFTMAX for n in nodes) and next(gemms, None) is not None


def _sources(core: Node) -> tuple[list[Node], list[Node]]:
    """Return the linear layers that produce a core's operands, and the values between them and the core.

    The search stops at any tensor that a linear layer reads. If a query has no projection, the search does not continue
    up the residual stream.
    """
    linears: dict[Node, None] = {}
    between: dict[Node, None] = {}
    pending = list(core.all_input_nodes)
    while pending and len(between) < _MAX_VALUES:
        node = pending.pop()
        if node.op != "call_function" or node in between or any(map(is_linear, readers(node))):
            continue
        if is_linear(node):
            linears[node] = None
        else:
            between[node] = None
            pending += node.all_input_nodes
    return list(linears), list(between)


def _values(linears: Iterable[Node], between: Iterable[Node]) -> set[Node]:
    """Return the results of these linear layers, and the values of ``between`` that depend on them (a mask does not).

    Views are included, as well as pointwise calls that read a linear layer's result: a bias, a dropout, a residual.
    """
    types, remaining, values, pending = op_types(), set(between), set[Node](), list(linears)
    while pending:
        node = pending.pop()
        values.add(node)
        near = node in remaining or is_linear(node) or types.is_view(node)
        new = [u for u in node.users if u in remaining or (near and (types.is_view(u) or _is_pointwise(u)))]
        pending += [u for u in new if u not in values]
    return values


def _projections(core: Node) -> Iterator[Node]:
    """Yield the linear layers that read a core's result, through views, casts and factors."""
    for user in core.users:
        is_first_result = user.target is operator.getitem and user.args[1] == 0
        if is_linear(user):
            yield user
        elif is_first_result or user.target in _PASSED or op_types().is_view(user):
            yield from _projections(user)


def _is_pointwise(node: Node) -> bool:
    return is_pointwise(node) or node.target is fused.dropout_add.default
