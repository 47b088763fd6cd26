"""MLPs in tiles of tokens (``memory="tiled"``): the linear layers around a proved activation, and itself, for each.

Between the tensor that holds an MLP's tokens and the linear layer that reads its activation each row is computed of one
row. So the tokens are split (``torch_fused_ops.tiles`` says how), what stands between is written once for each tile,
and the results are joined. All that a tile computes but its result is marked ``MUST_RECOMPUTE``, as upstream marks what
a checkpoint's body computes: the partitioner rebuilds it where backward comes to that tile, one after the other.

Left unmarked are the pieces of the input, which cost nothing to keep, being views; and the results: the partitioner
takes what is marked for what costs nothing, and would rebuild the residual stream from it, a GEMM for each tile.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy
from torch.utils.checkpoint import CheckpointPolicy

from torch_fused_ops import tiles
from torch_fused_ops.reasons import Kind, Reason, Rejection

from .gemms import arguments_of, producers
from .graph import CASTS, COPIES, DROPOUTS, FREE, GraphAnalysis, describe, shown
from .rewrite import Edit, dead_calls, insert
from .subgraph import Subgraph, readers
from .symbolic import LINEAR
from .values import check_plain, equal, keeps_rows, value_of

__all__ = ["Tiling", "apart", "fuse", "tiling"]

MAX_CALLS = 64  # an MLP with adapters on three linear layers has 20

Form = Callable[["_Tile", Node], Node]  # writes a call for a tile


@dataclass
class Tiling:
    """An MLP that is to be computed in tiles.

    Attributes:
        tiles: how many; 0 where it is left whole.
        reason: why it is.
    """

    tiles: int = 0
    reason: Reason | None = None
    subgraph: Subgraph = field(default_factory=lambda: Subgraph(None))  # type: ignore[arg-type]
    source: Node | None = None  # what holds the tokens
    last: Node | None = None  # the linear layer that reads the activation
    forms: dict[Node, Form] = field(default_factory=dict)  # what a tile computes, in graph order; ends with ``last``
    dead: set[Node] = field(default_factory=set)


def tiling(analysis: GraphAnalysis, subgraph: Subgraph, asked: int) -> Tiling:
    """How an MLP is computed in tiles, or why it is not.

    Args:
        facts: of the graph.
        subgraph: its activation.
        asked: how many tiles; 0 by rule.
    """
    found = Tiling(subgraph=subgraph)
    try:
        _examine(analysis, found, asked)
    except Rejection as refusal:
        return Tiling(reason=refusal.reason)
    return found


def apart(found: Iterable[Tiling]) -> list[Tiling]:
    """The same, but for those that begin with a linear layer that another one before them ends with."""
    result, taken = [], set[Node]()
    for one in found:
        shared = next((node for node in one.forms if node in taken), None)
        if shared is not None:
            one = Tiling(reason=Reason(Kind.TILE_FORM, f"{shown(shared)} is in the tiles of the MLP before it"))
        taken.update(one.forms)
        result.append(one)
    return result


def _examine(analysis: GraphAnalysis, found: Tiling, asked: int) -> None:
    subgraph = found.subgraph
    found.source, found.last = source, last = _source(analysis, subgraph), _last(analysis, subgraph)
    if subgraph.order is not None:
        raise Rejection(Kind.TILE_FORM, "its tokens do not lie one after the other in memory")
    read = _Reader(analysis, subgraph, source, last)
    found.forms = {node: read.forms[node] for node in sorted(read.forms, key=analysis.index.__getitem__)}
    found.dead = {*read.forms, *read.passed, *dead_calls(subgraph)}
    _check_readers(found)
    _check_regions(analysis, found)
    _check_writes(analysis, found, [source, *read.constants])
    _check_callers(analysis, found, read)
    for node in (source, last, *read.constants):
        check_plain(node)
    tokens = _tokens(source)
    if any(not equal(tokens, _tokens(node)) for node in found.forms):
        raise Rejection(Kind.TILE_FORM, "not every row of its input becomes a row of its result")
    if not isinstance(tokens, int) and (tokens.node.hint is None or not _shape_is_known(found)):
        raise Rejection(Kind.TILE_SIZE, "the number of its tokens is not known when it is compiled")
    count = tokens if isinstance(tokens, int) else tokens.node.hint
    found.tiles = tiles.number(count, asked)
    if found.tiles == 1:
        text = f"{count} tokens are too few for {asked or 'two'} tiles" + ("" if asked else f" of {tiles.TOKENS}")
        raise Rejection(Kind.TILE_FEW, text)


def _tokens(node: Node) -> Any:
    return math.prod(value_of(node).shape[:-1])


def _source(analysis: GraphAnalysis, subgraph: Subgraph) -> Node:
    """What the linear layers in front of the activation read; of adapters' the first."""
    sources = []
    for node in producers(analysis, subgraph.inputs):
        source = arguments_of(analysis, node)[0]
        while keeps_rows(analysis, source):
            source = source.all_input_nodes[0]
        sources.append(source)
    if not sources:
        raise Rejection(Kind.TILE_FORM, "no linear layer stands in front of it")
    return min(sources, key=analysis.index.__getitem__)


def _last(analysis: GraphAnalysis, subgraph: Subgraph) -> Node:
    reading = list(readers(analysis, subgraph.output))
    if len(reading) != 1:
        names = ", ".join(dict.fromkeys(map(shown, reading)))
        raise Rejection(Kind.TILE_READER, f"{len(reading)} calls read the hidden layer: {names}")
    return reading[0]


class _Reader:
    """What stands between an MLP's tokens and its last linear layer, call by call.

    Attributes:
        forms: the calls that a tile makes, and how.
        passed: the views and copies between, which it does not need.
        constants: weights, biases and factors: what every tile reads as it is.
    """

    def __init__(self, analysis: GraphAnalysis, subgraph: Subgraph, source: Node, last: Node) -> None:
        self.analysis, self.subgraph, self.source = analysis, subgraph, source
        self.forms: dict[Node, Form] = {}
        self.passed: set[Node] = set()
        self.constants: list[Node] = []
        pending = [last]
        while pending:
            node = self.data(pending.pop())
            if node is source or node in self.forms:
                continue
            if len(self.forms) == MAX_CALLS:
                raise Rejection(Kind.TILE_FORM, f"more than {MAX_CALLS} calls stand between its input and its result")
            self.forms[node], sources = self.read(node)
            pending.extend(sources)

    def data(self, node: Node) -> Node:
        """The node that a tile has in place of this one: without views that keep rows, copies and idle dropouts."""
        while node is not self.source and node is not self.subgraph.output:
            call = self.analysis.calls[node]
            idle = call.name in COPIES or (call.name in DROPOUTS and not call.dropout_is_active())
            if call.inplace or not (idle or keeps_rows(self.analysis, node)):
                break
            self.passed.add(node)
            node = node.all_input_nodes[0]
        return node

    def read(self, node: Node) -> tuple[Form, Sequence[Node]]:
        """How a tile makes a call, and what it needs for that."""
        analysis, call = self.analysis, self.analysis.calls[node]
        if node is self.subgraph.output:
            operands = [self.subgraph.packed[0]] if self.subgraph.packed else self.subgraph.inputs
            return partial(_activation, self.subgraph, self.data), operands
        if analysis.weight_gemm(node):
            input, weight, bias, transposed = arguments_of(analysis, node)
            self.constants += [one for one in (weight, bias) if one is not None]
            return partial(_linear, self.data(input), weight, bias, transposed), [input]
        if call.name in DROPOUTS:
            raise Rejection(Kind.TILE_DROPOUT, "an active dropout stands inside")
        is_sum = call.name in LINEAR and not call.inplace
        if analysis.state[node] == FREE or not (is_sum or call.name in CASTS):
            raise Rejection(Kind.TILE_FORM, f"{shown(node)} stands between its input and its result")
        data = [one for one in node.all_input_nodes if analysis.state[one] != FREE or one is self.source]
        for one in set(node.all_input_nodes) - set(data):
            if value_of(one).ndim > 1:
                raise Rejection(Kind.TILE_FORM, f"{shown(node)} combines it with {shown(one)}, which is not a vector")
            self.constants.append(one)
        return partial(_copy, {one: self.data(one) for one in data}), data


def _shape_is_known(found: Tiling) -> bool:
    """Whether the result's leading sizes are numbers, or its tokens' own."""
    assert found.source is not None and found.last is not None
    leading, source = value_of(found.last).shape[:-1], value_of(found.source).shape[:-1]
    same = len(leading) == len(source) and all(map(equal, leading, source))
    return same or len(leading) == 1 or all(isinstance(size, int) for size in leading)


def _check_readers(found: Tiling) -> None:
    for node in found.dead:
        for user in node.users if node is not found.last else ():
            if user not in found.dead:
                raise Rejection(Kind.TILE_READER, f"{shown(user)} reads the result of {shown(node)}, too")


def _check_regions(analysis: GraphAnalysis, found: Tiling) -> None:
    assert found.last is not None
    if any(analysis.region[node] != analysis.region[found.last] for node in found.dead):
        raise Rejection(Kind.REGION, "autocast or grad mode is switched between its parts")


def _check_writes(analysis: GraphAnalysis, found: Tiling, given: Iterable[Node]) -> None:
    """What a tile reads it reads where the last linear layer stood."""
    assert found.last is not None
    first, last = min(map(analysis.index.__getitem__, found.dead)), analysis.index[found.last]
    for node in (*given, *found.dead):
        for writer in analysis.writes.get(analysis.storage(node), ()):
            if first <= analysis.index[writer] <= last and writer not in found.subgraph.calls:
                raise Rejection(Kind.WRITTEN, f"{shown(writer)} writes into it in place before it is read")


def _check_callers(analysis: GraphAnalysis, found: Tiling, read: _Reader) -> None:
    """What a tile is made of again may be the caller's where PyTorch keeps it, too: for a weight's gradient.

    Under autocast PyTorch keeps a copy in another dtype.
    """
    assert found.source is not None and found.last is not None
    graph = found.source.graph
    theirs = [*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes]
    if not value_of(found.last).requires_grad or analysis.storage(found.source) not in map(analysis.storage, theirs):
        return
    for node in found.forms:
        if analysis.weight_gemm(node):
            input, weight, *_ = arguments_of(analysis, node)
            is_kept = value_of(node).dtype == value_of(found.source).dtype and value_of(weight).requires_grad
            if is_kept and read.data(input) is found.source:
                return
    text = f"the caller may modify its input, {shown(found.source)}, before backward needs it"
    raise Rejection(Kind.TILE_CALLERS, text)


# ---- the edit --------------------------------------------------------------------------------------------------------


def fuse(graph: Graph, found: Iterable[Tiling]) -> list[Edit]:
    """The edits that make each MLP one of tiles."""
    return [(one.last, partial(_insert, graph, one), one.dead) for one in found if one.last is not None]


class _Tile:
    """What has been written for one tile."""

    def __init__(self, graph: Graph, tokens: Any, at: Node, new: list[Node]) -> None:
        self.graph, self.tokens, self.at, self.new = graph, tokens, at, new
        self.made: dict[Node, Node] = {}  # by the node that it is a tile of

    def call(self, target: Any, args: tuple[Any, ...], like: Node, **kwargs: Any) -> Node:
        """A call that gives what ``like`` gives, of this tile's tokens."""
        if isinstance(target, str):
            node = self.graph.call_method(target, args, kwargs)
        else:
            node = self.graph.call_function(target, args, kwargs)
        self.new.append(node)
        value = value_of(like)
        describe(node, like, lambda: value.new_empty((self.tokens, value.shape[-1])))
        return node


def _linear(input: Node, weight: Node, bias: Node | None, transposed: bool, tile: _Tile, node: Node) -> Node:
    if transposed:
        given = weight
        weight = tile.graph.call_function(torch.ops.aten.t.default, (given,))
        tile.new.append(weight)
        describe(weight, node, lambda: value_of(given).t())
    return tile.call(torch.nn.functional.linear, (tile.made[input], weight, bias), node)


def _copy(data: dict[Node, Node], tile: _Tile, node: Node) -> Node:
    place: Callable[[Node], Any] = lambda one: tile.made[data[one]] if one in data else one  # noqa: E731
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), place)
    return tile.call(node.target, args, node, **kwargs)


def _activation(subgraph: Subgraph, data: Callable[[Node], Node], tile: _Tile, node: Node) -> Node:
    return insert(tile.graph, subgraph, tile.new, lambda operand: tile.made[data(operand)], tile.at)


def _insert(graph: Graph, found: Tiling, new: list[Node]) -> Node:
    source, last = found.source, found.last
    assert source is not None and last is not None
    value, result = value_of(source), value_of(last)

    def call(target: Any, args: tuple[Any, ...], like: Node, make: Callable[[], Any]) -> Node:
        node = graph.call_function(target, args)
        new.append(node)
        describe(node, like, make)
        return node

    def size(node: Node, axis: int) -> Node:
        known = value_of(node).shape[axis]
        return call(torch.ops.aten.sym_size.int, (node, axis), source, lambda: known)

    with graph.inserting_before(last):
        rows = source
        if value.ndim != 2:
            rows = call(torch.flatten, (source, 0, -2), source, lambda: value.flatten(0, -2))
        tokens, width = value_of(rows).shape
        each, rest = tiles.lengths(tokens, found.tiles)
        sizes: list[Any] = [each] * (found.tiles - 1) + [rest]
        given: list[Any] = sizes
        if not isinstance(tokens, int):  # the same, as calls
            whole = size(rows, 0)
            one, left = tiles.lengths(Proxy(whole), found.tiles)
            known, start = {whole: tokens}, len(new)
            while new[-1].next is not last:
                new.append(new[-1].next)
            for node in new[start:]:
                known[node] = node.target(*(known.get(a, a) for a in node.args))
                describe(node, source, partial(known.get, node))
            given = [one.node] * (found.tiles - 1) + [left.node]
        pieces = call(torch.split, (rows, given), source, lambda: tuple(value.new_empty((n, width)) for n in sizes))
        results = []
        for i, length in enumerate(sizes):
            tile = _Tile(graph, length, last, new)
            tile.made[source] = call(operator.getitem, (pieces, i), source, partial(value.new_empty, (length, width)))
            start = len(new)
            for node, form in found.forms.items():
                tile.made[node] = form(tile, node)
            results.append(tile.made[last])
            for node in new[start:]:
                if node is not results[-1]:
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        joined = call(torch.cat, (results,), last, lambda: result.new_empty((tokens, result.shape[-1])))
        if result.ndim == 2:
            return joined
        leading = [n if isinstance(n, int) else size(source, i) for i, n in enumerate(result.shape[:-1])]
        return call(torch.unflatten, (joined, 0, leading), last, lambda: result.new_empty(result.shape))
