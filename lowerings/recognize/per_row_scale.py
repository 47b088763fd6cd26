"""Move a per-row scale through the GEMM that reads an activation: s·(a·W) = (s·a)·W.

A mixture of experts multiplies each row of its experts' results by a router weight, or a shared expert's results by
a gate. For the gradient of this factor, autograd saves the GEMM's result. If the factor is moved before the GEMM
(SonicMoE, arXiv:2512.14080), it is the fused operator's ``token_scale``. Its gradient is then a sum over values that
backward computes anyway, and the GEMM's result is neither saved nor read again.

The move changes the rounded values: s·a is rounded instead of a. So the scale is moved only if this saves memory: the
factor and the activation need gradients, and the policy leaves the choice to the fusion pass. Also s·a must not
overflow if s·(a·W) does not: the dtypes must have the range of bfloat16 and of the result. float16 does not.

In the result of a grouped GEMM and in its input's gradient, the rows after the last group are undefined. They must not
contribute to the factor's gradient, so the factor is set to 0 in these rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from torch_fused_ops.graphs.reasons import Rejection

from .graph import CASTS, COPIES, GraphAnalysis, label, statically, tensor, write_call
from .rewrite import Edit, insert
from .subgraph import Subgraph
from .values import check_plain, equal, keeps_rows, value_of

_EXPONENTS = 128  # largest exponent of float32 and bfloat16; float16 has 16


@dataclass(frozen=True)
class RowScale:
    """A multiplication of a GEMM's result by a number for each row.

    Attributes:
        subgraph: the activation that the GEMM reads.
        chain: the calls between the activation and the multiplication: the GEMM, views of rows and casts.
        gemm: the GEMM among them.
        factor: a number for each row, of shape (…, 1).
        last: the multiplication.
    """

    subgraph: Subgraph
    chain: tuple[Node, ...]
    gemm: Node
    factor: Node
    last: Node

    def __str__(self) -> str:
        return f"{label(self.last)} by a number for each row is moved in front of {label(self.gemm)}"


def find(analysis: GraphAnalysis, subgraph: Subgraph, in_float8: Collection[Node]) -> RowScale | None:
    """Return the factor after the GEMM that reads a proved activation; None if no factor can be moved.

    The activation must need a gradient. Otherwise the operator would save its input only for the factor's gradient. The
    GEMM must not be ``in_float8``: such a GEMM is replaced.
    """
    if subgraph.order is not None:
        return None
    node, chain, gemm = subgraph.output, list[Node](), None
    while len(node.users) == 1:
        (user,) = node.users
        factor = _factor(analysis, user, node) if gemm is not None else None
        if gemm is not None and factor is not None:
            scale = RowScale(subgraph, tuple(chain), gemm, factor, user)
            return scale if _is_sound(analysis, scale) else None
        if gemm is None and user not in in_float8 and _multiplies(analysis, user, node):
            gemm = user
        elif analysis.calls[user].inplace or not (
            keeps_rows(analysis, user) or analysis.calls[user].name in CASTS | COPIES
        ):
            return None
        chain.append(user)
        node = user
    return None


def _multiplies(analysis: GraphAnalysis, node: Node, rows: Node) -> bool:
    """Return True if each row of a call's result is the same row of ``rows`` times a matrix, without a bias."""
    call, value, result = analysis.calls[node], tensor(rows), tensor(node)
    args = [argument for argument in call.args if argument is not None]
    named = {name for name, argument in call.kwargs.items() if argument is not None}
    if value is None or result is None or len(args) != 2 or args[0] is not rows or value.ndim != result.ndim:
        return False
    if call.name == "grouped_mm":  # the only case of ragged arguments in which rows correspond
        ragged = isinstance(args[1], Node) and (value.ndim, value_of(args[1]).ndim) == (2, 3)
        known = named == ({"offs"} if ragged else set())
    else:
        known = call.name in ("linear", "matmul", "mm", "bmm") and not named
    return known and all(map(equal, value.shape[:-1], result.shape[:-1]))


def _factor(analysis: GraphAnalysis, node: Node, rows: Node) -> Node | None:
    """Return the factor that a call multiplies ``rows`` by, if it is a number for each row and needs a gradient."""
    call = analysis.calls[node]
    if call.name != "mul" or call.inplace or call.kwargs or len(call.args) != 2:
        return None
    factor = call.args[1] if call.args[0] is rows else call.args[0]
    value, data = tensor(factor) if isinstance(factor, Node) else None, value_of(rows)
    if not isinstance(factor, Node) or factor is rows or value is None or value.ndim != data.ndim:
        return None
    shape = statically(value.shape[-1] == 1) and all(map(equal, value.shape[:-1], data.shape[:-1]))
    return factor if shape and value.requires_grad and value.device == data.device else None


def _is_sound(analysis: GraphAnalysis, scale: RowScale) -> bool:
    """Return True if all calls may be moved to the place of the multiplication."""
    subgraph, calls = scale.subgraph, (*scale.subgraph.calls, *scale.chain, scale.last)
    try:
        for node in (*scale.chain, scale.last, scale.factor):
            check_plain(node)
    except Rejection:
        return False
    exponents = [
        math.frexp(torch.finfo(value_of(node).dtype).max)[1] for node in (subgraph.output, *scale.chain, scale.last)
    ]
    if min(exponents) < max(exponents[-1], _EXPONENTS):
        return False
    device = value_of(subgraph.output).device
    if any(analysis.region[node] != analysis.region[scale.last] or value_of(node).device != device for node in calls):
        return False
    read = {source for node in (*calls, *subgraph.bypassed) for source in node.all_input_nodes}
    first = min(calls, key=analysis.index.__getitem__)
    return not any(w not in subgraph.calls for node in read for w in analysis.writers(node, first, scale.last))


# ---- the edit --------------------------------------------------------------------------------------------------------


def fuse(scale: RowScale) -> Edit:
    """Return the edit that replaces the activation by an operator with the factor, followed by the GEMM."""
    return scale.last, partial(_insert, scale), {*scale.subgraph.replaced, *scale.chain, scale.last}


def _insert(scale: RowScale) -> Node:
    subgraph, last, factor, ends = scale.subgraph, scale.last, scale.factor, scale.gemm.kwargs.get("offs")
    add = partial(write_call, last)

    def size(node: Node, axis: int) -> Any:
        known = value_of(node).shape[axis]
        return known if isinstance(known, int) else add(torch.ops.aten.sym_size.int, node, axis)

    if isinstance(ends, Node):
        rows = add(torch.arange, size(factor, 0), device=value_of(factor).device)
        inside = add(torch.lt, rows, add(torch.select, ends, 0, -1))
        factor = add(torch.where, add(torch.unsqueeze, inside, 1), factor, 0.0)
    leading = value_of(subgraph.output).shape[:-1]
    sizes = [size(subgraph.inputs[0], axis) for axis in range(len(leading))]
    factor = add(torch.reshape, factor, sizes, make=lambda: value_of(scale.factor).new_empty(leading))
    copies = {subgraph.output: insert(subgraph, token_scale=factor)}
    for node in scale.chain:
        copies[node] = last.graph.node_copy(node, lambda node: copies.get(node, node))
    result, dtype = copies[scale.chain[-1]], value_of(last).dtype
    return result if value_of(result).dtype == dtype else add(torch.ops.aten.to.dtype, result, dtype)
