"""A factor for each row behind the product that reads an activation, taken in front of it: s·(a·W) = (s·a)·W.

A mixture of experts multiplies each row of its experts' results with a router's weight, and so does a gate on a shared
expert. For that weight's gradient autograd keeps the product's result. In front of the product (SonicMoE,
arXiv:2512.14080) the factor is the fused operator's ``token_scale``, whose gradient is a sum over what backward
computes there anyway: nothing of the product's result is kept, nor read again.

What is moved is a rounding: a·W is rounded in both forms, a before, s·a now. So it is done where it keeps less alone:
the factor and the activation need gradients, and the policy leaves the choice of what is kept to pick-up. And s·a must
not overflow where s·(a·W) does not: float16 has too few exponents, and so has what is narrower than the result.

Behind the last group of a grouped product rows are undefined, in its result and in its input's gradient. There a model
that takes no gradient from such a row would get one for its factor: it is made 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_fused_ops.reasons import Rejection

from .graph import CASTS, COPIES, GraphAnalysis, describe, shown, statically, tensor
from .rewrite import Edit, dead_calls, insert
from .subgraph import Subgraph
from .values import check_plain, equal, keeps_rows, value_of

__all__ = ["RowScale", "find", "fuse"]

_EXPONENTS = 128  # of float32 and bfloat16; float16 has 16


@dataclass(frozen=True)
class RowScale:
    """A factor of a product's rows.

    Attributes:
        subgraph: the activation that the product reads.
        chain: the calls from the activation to the factor's own, without these: the product, and what only arranges
            rows or casts them.
        product: the one of them that is a matrix product.
        factor: a number for each row, of shape (…, 1).
        last: the multiplication.
    """

    subgraph: Subgraph
    chain: tuple[Node, ...]
    product: Node
    factor: Node
    last: Node

    def __str__(self) -> str:
        return f"{shown(self.last)} by a number for each row is taken in front of {shown(self.product)}"


def find(analysis: GraphAnalysis, subgraph: Subgraph) -> RowScale | None:
    """The factor behind the product that reads a proved activation; None where there is none that can be moved.

    The activation needs a gradient: else the operator would keep, for the factor's, what nothing else keeps.
    """
    if subgraph.order is not None:
        return None
    node, chain, product = subgraph.output, list[Node](), None
    while len(node.users) == 1:
        (user,) = node.users
        factor = _factor(analysis, user, node) if product is not None else None
        if product is not None and factor is not None:
            found = RowScale(subgraph, tuple(chain), product, factor, user)
            return found if _is_sound(analysis, found) else None
        if product is None and _is_product(analysis, user, node):
            product = user
        elif not _keeps_rows(analysis, user):
            return None
        chain.append(user)
        node = user
    return None


def _is_product(analysis: GraphAnalysis, node: Node, rows: Node) -> bool:
    """Whether each row of a call's result is that row of ``rows`` times a matrix, and nothing is added."""
    call, value, result = analysis.calls[node], tensor(rows), tensor(node)
    given = [argument for argument in call.args if argument is not None]
    named = {name for name, argument in call.kwargs.items() if argument is not None}
    if value is None or result is None or len(given) != 2 or given[0] is not rows or value.ndim != result.ndim:
        return False
    if call.name == "grouped_mm":  # what else is ragged has other rows
        ragged = isinstance(given[1], Node) and (value.ndim, value_of(given[1]).ndim) == (2, 3)
        known = named == ({"offs"} if ragged else set())
    else:
        known = call.name in ("linear", "matmul", "mm", "bmm") and not named
    return known and all(map(equal, value.shape[:-1], result.shape[:-1]))


def _keeps_rows(analysis: GraphAnalysis, node: Node) -> bool:
    call = analysis.calls[node]
    return not call.inplace and (keeps_rows(analysis, node) or call.name in CASTS or call.name in COPIES)


def _factor(analysis: GraphAnalysis, node: Node, rows: Node) -> Node | None:
    """What a call multiplies ``rows`` with, if it is a number for each row that needs a gradient."""
    call = analysis.calls[node]
    if call.name != "mul" or call.inplace or call.kwargs or len(call.args) != 2:
        return None
    factor = call.args[1] if call.args[0] is rows else call.args[0]
    value, of = tensor(factor) if isinstance(factor, Node) else None, value_of(rows)
    if not isinstance(factor, Node) or factor is rows or value is None or value.ndim != of.ndim:
        return None
    shape = statically(value.shape[-1] == 1) and all(map(equal, value.shape[:-1], of.shape[:-1]))
    return factor if shape and value.requires_grad and value.device == of.device else None


def _is_sound(analysis: GraphAnalysis, found: RowScale) -> bool:
    """Whether all that is moved may be computed where the multiplication stands."""
    subgraph, moved = found.subgraph, (*found.subgraph.calls, *found.chain, found.last)
    try:
        for node in (*found.chain, found.last, found.factor):
            check_plain(node)
    except Rejection:
        return False
    exponents = [
        math.frexp(torch.finfo(value_of(node).dtype).max)[1] for node in (subgraph.output, *found.chain, found.last)
    ]
    if min(exponents) < max(exponents[-1], _EXPONENTS):
        return False
    device = value_of(subgraph.output).device
    if any(analysis.region[node] != analysis.region[found.last] or value_of(node).device != device for node in moved):
        return False
    read = {source for node in (*moved, *dead_calls(subgraph)) for source in node.all_input_nodes}
    first, last = min(map(analysis.index.__getitem__, moved)), analysis.index[found.last]
    writers = (w for node in read for w in analysis.writes.get(analysis.storage(node), ()))
    return not any(first <= analysis.index[w] <= last and w not in subgraph.calls for w in writers)


# ---- the edit --------------------------------------------------------------------------------------------------------


def fuse(graph: Graph, found: RowScale) -> Edit:
    """The edit that makes the activation an operator with the factor, and leaves the product alone behind it."""
    return found.last, partial(_insert, graph, found), {*dead_calls(found.subgraph), *found.chain, found.last}


def _insert(graph: Graph, found: RowScale, new: list[Node]) -> Node:
    subgraph, last = found.subgraph, found.last
    root, factor = subgraph.output, value_of(found.factor)

    def call(target: Any, args: tuple[Any, ...], make: Callable[[], Any], **kwargs: Any) -> Node:
        node = graph.call_function(target, args, kwargs)
        new.append(node)
        describe(node, last, make)
        return node

    def size(node: Node, axis: int) -> Any:
        known = value_of(node).shape[axis]
        return known if isinstance(known, int) else call(torch.ops.aten.sym_size.int, (node, axis), lambda: known)

    with graph.inserting_before(last):
        scale = found.factor
        ends = found.product.kwargs.get("offs")
        if isinstance(ends, Node):
            known, device = value_of(ends), factor.device
            end = call(torch.select, (ends, 0, -1), lambda: known.select(0, -1))
            count = factor.shape[0]
            rows = call(torch.arange, (size(scale, 0),), lambda: torch.arange(count, device=device), device=device)
            inside = call(torch.lt, (rows, end), lambda: torch.empty(count, dtype=torch.bool, device=device))
            inside = call(torch.unsqueeze, (inside, 1), lambda: torch.empty(count, 1, dtype=torch.bool, device=device))
            scale = call(torch.where, (inside, scale, 0.0), lambda: torch.empty_like(factor))
        leading = value_of(root).shape[:-1]
        sizes = [size(subgraph.inputs[0], axis) for axis in range(len(leading))]
        scale = call(torch.reshape, (scale, sizes), lambda: factor.new_empty(leading))
        made = {root: insert(graph, subgraph, new, at=last, token_scale=scale)}
        for node in found.chain:
            made[node] = graph.node_copy(node, lambda one: made.get(one, one))
            new.append(made[node])
        result, dtype = made[found.chain[-1]], value_of(last).dtype
        if value_of(result).dtype != dtype:
            shape = value_of(last).shape
            result = call(
                torch.ops.aten.to.dtype, (result, dtype), lambda: value_of(result).new_empty(shape, dtype=dtype)
            )
    return result
