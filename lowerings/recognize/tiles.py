"""MLPs in tiles of tokens (``memory="tiled"``): a proved activation and the linear layers around it, for each tile.

Between the tensor that holds an MLP's tokens and the linear layer that reads its activation, each row depends on one
row. So the tokens are split (``settings/tiles.py``), the calls between are written once for each tile, and the results
are joined. All values of a tile but its result are marked ``MUST_RECOMPUTE``, as PyTorch marks the values of a
checkpoint's body: the partitioner recomputes them where backward comes to that tile, one tile after the other.

The pieces of the input stay unmarked: they are views, and cost nothing to save. So do the results: the partitioner
takes marked values for free, and would recompute the residual stream from them, with a GEMM for each tile.
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

from torch_fused_ops.graphs.reasons import Kind, Reason, Rejection
from torch_fused_ops.settings import tiles

from .graph import CASTS, COPIES, DROPOUTS, FREE, GraphAnalysis, describe, shown
from .rewrite import Edit, dead_calls, insert
from .subgraph import Subgraph, readers
from .symbolic import LINEAR
from .values import arguments_of, check_plain, equal, keeps_rows, producers, value_of

__all__ = ["Tiling", "apart", "fuse", "tiling"]

MAX_CALLS = 64  # an MLP with adapters on three linear layers has 20

Form = Callable[["_Tile", Node], Node]  # writes a call for a tile


@dataclass
class Tiling:
    """An MLP that is to be computed in tiles.

    Attributes:
        tiles: their number; 0 where it stays whole.
        reason: against tiles, where it stays whole.
    """

    tiles: int = 0
    reason: Reason | None = None
    subgraph: Subgraph = field(default_factory=lambda: Subgraph(None))  # type: ignore[arg-type]
    source: Node | None = None  # the tensor that holds the tokens
    last: Node | None = None  # the linear layer that reads the activation
    forms: dict[Node, Form] = field(default_factory=dict)  # the calls of a tile, in graph order; ends with ``last``
    dead: set[Node] = field(default_factory=set)


def tiling(analysis: GraphAnalysis, subgraph: Subgraph, asked: int) -> Tiling:
    """Return an MLP's tiles, or the reason against them.

    Args:
        analysis: of the graph.
        subgraph: its activation.
        asked: the number of tiles; 0 by rule.
    """
    result = Tiling(subgraph=subgraph)
    try:
        _examine(analysis, result, asked)
    except Rejection as rejection:
        return Tiling(reason=rejection.reason)
    return result


def apart(tilings: Iterable[Tiling]) -> list[Tiling]:
    """Reject the tiles of MLPs that share a linear layer with the tiles of an MLP before them."""
    result, taken = [], set[Node]()
    for mlp in tilings:
        shared = next((node for node in mlp.forms if node in taken), None)
        if shared is not None:
            mlp = Tiling(reason=Reason(Kind.TILE_FORM, f"{shown(shared)} is in the tiles of the MLP before it"))
        taken.update(mlp.forms)
        result.append(mlp)
    return result


def _examine(analysis: GraphAnalysis, mlp: Tiling, asked: int) -> None:
    subgraph = mlp.subgraph
    mlp.source, mlp.last = source, last = _source(analysis, subgraph), _last(analysis, subgraph)
    if subgraph.order is not None:
        raise Rejection(Kind.TILE_FORM, "its tokens are not contiguous in memory")
    read = _Reader(analysis, subgraph, source, last)
    mlp.forms = {node: read.forms[node] for node in sorted(read.forms, key=analysis.index.__getitem__)}
    mlp.dead = {*read.forms, *read.passed, *dead_calls(subgraph)}
    _check_readers(mlp)
    if any(analysis.region[node] != analysis.region[last] for node in mlp.dead):
        raise Rejection(Kind.REGION, "autocast or grad mode is switched between its parts")
    _check_writes(analysis, mlp, [source, *read.constants])
    _check_callers(analysis, mlp, read)
    for node in (source, last, *read.constants):
        check_plain(node)
    tokens = _tokens(source)
    if any(not equal(tokens, _tokens(node)) for node in mlp.forms):
        raise Rejection(Kind.TILE_FORM, "not every row of its input becomes a row of its result")
    if not isinstance(tokens, int) and (tokens.node.hint is None or not _shape_is_known(mlp)):
        raise Rejection(Kind.TILE_SIZE, "the number of its tokens is not known when it is compiled")
    count = tokens if isinstance(tokens, int) else tokens.node.hint
    mlp.tiles = tiles.number(count, asked)
    if mlp.tiles == 1:
        text = f"{count} tokens are too few for {asked or 'two'} tiles" + ("" if asked else f" of {tiles.TOKENS}")
        raise Rejection(Kind.TILE_FEW, text)


def _tokens(node: Node) -> Any:
    return math.prod(value_of(node).shape[:-1])


def _source(analysis: GraphAnalysis, subgraph: Subgraph) -> Node:
    """The tensor that the linear layers in front of the activation read; with adapters the first."""
    sources = []
    for node in producers(analysis, subgraph.inputs):
        source = arguments_of(analysis, node)[0]
        while keeps_rows(analysis, source):
            source = source.all_input_nodes[0]
        sources.append(source)
    if not sources:
        raise Rejection(Kind.TILE_FORM, "no linear layer comes before it")
    return min(sources, key=analysis.index.__getitem__)


def _last(analysis: GraphAnalysis, subgraph: Subgraph) -> Node:
    users = list(readers(analysis, subgraph.output))
    if len(users) != 1:
        names = ", ".join(dict.fromkeys(map(shown, users)))
        raise Rejection(Kind.TILE_READER, f"{len(users)} calls read the hidden layer: {names}")
    return users[0]


class _Reader:
    """The calls between an MLP's tokens and its last linear layer.

    Attributes:
        forms: the calls that a tile makes, each with the function that writes it.
        passed: the views and copies between, which it does not need.
        constants: weights, biases and factors, which every tile reads as they are.
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
        """Return the function that writes a call for a tile, and the nodes that it needs."""
        analysis, call = self.analysis, self.analysis.calls[node]
        if node is self.subgraph.output:
            inputs = [self.subgraph.packed[0]] if self.subgraph.packed else self.subgraph.inputs
            return partial(_activation, self.subgraph, self.data), inputs
        if analysis.weight_gemm(node):
            input, weight, bias, transposed = arguments_of(analysis, node)
            self.constants += [weight] if bias is None else [weight, bias]
            return partial(_linear, self.data(input), weight, bias, transposed), [input]
        if call.name in DROPOUTS:
            raise Rejection(Kind.TILE_DROPOUT, "an active dropout stands inside")
        is_sum = call.name in LINEAR and not call.inplace
        if analysis.state[node] == FREE or not (is_sum or call.name in CASTS):
            raise Rejection(Kind.TILE_FORM, f"{shown(node)} stands between its input and its result")
        data = [a for a in node.all_input_nodes if analysis.state[a] != FREE or a is self.source]
        for vector in set(node.all_input_nodes) - set(data):
            if value_of(vector).ndim > 1:
                text = f"{shown(node)} combines it with {shown(vector)}, which is not a vector"
                raise Rejection(Kind.TILE_FORM, text)
            self.constants.append(vector)
        return partial(_copy, {a: self.data(a) for a in data}), data


def _shape_is_known(mlp: Tiling) -> bool:
    """True where the result's leading sizes are numbers, or its tokens' own."""
    assert mlp.source is not None and mlp.last is not None
    leading, source = value_of(mlp.last).shape[:-1], value_of(mlp.source).shape[:-1]
    same = len(leading) == len(source) and all(map(equal, leading, source))
    return same or len(leading) == 1 or all(isinstance(size, int) for size in leading)


def _check_readers(mlp: Tiling) -> None:
    for node in mlp.dead:
        for user in node.users if node is not mlp.last else ():
            if user not in mlp.dead:
                raise Rejection(Kind.TILE_READER, f"{shown(user)} also reads the result of {shown(node)}")


def _check_writes(analysis: GraphAnalysis, mlp: Tiling, sources: Iterable[Node]) -> None:
    """Reject in-place writes in front of the last linear layer, where tiles read."""
    assert mlp.last is not None
    first, last = min(map(analysis.index.__getitem__, mlp.dead)), analysis.index[mlp.last]
    for node in (*sources, *mlp.dead):
        for writer in analysis.writes.get(analysis.storage(node), ()):
            if first <= analysis.index[writer] <= last and writer not in mlp.subgraph.calls:
                raise Rejection(Kind.WRITTEN, f"{shown(writer)} writes into it in place before it is read")


def _check_callers(analysis: GraphAnalysis, mlp: Tiling, read: _Reader) -> None:
    """Reject a caller's tensor that PyTorch does not save too, for a weight's gradient: the caller may modify it.

    Under autocast PyTorch saves a copy in another dtype.
    """
    assert mlp.source is not None and mlp.last is not None
    graph = mlp.source.graph
    theirs = [*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes]
    if not value_of(mlp.last).requires_grad or analysis.storage(mlp.source) not in map(analysis.storage, theirs):
        return
    for node in mlp.forms:
        if analysis.weight_gemm(node):
            input, weight, *_ = arguments_of(analysis, node)
            is_saved = value_of(node).dtype == value_of(mlp.source).dtype and value_of(weight).requires_grad
            if is_saved and read.data(input) is mlp.source:
                return
    text = f"the caller may modify its input, {shown(mlp.source)}, before backward needs it"
    raise Rejection(Kind.TILE_CALLERS, text)


# ---- the edit --------------------------------------------------------------------------------------------------------


def fuse(graph: Graph, tilings: Iterable[Tiling]) -> list[Edit]:
    """The edits that replace each MLP by its tiles."""
    return [(mlp.last, partial(_insert, graph, mlp), mlp.dead) for mlp in tilings if mlp.last is not None]


class _Tile:
    """The calls that have been written for one tile."""

    def __init__(self, graph: Graph, tokens: Any, at: Node, new: list[Node]) -> None:
        self.graph, self.tokens, self.at, self.new = graph, tokens, at, new
        self.copies: dict[Node, Node] = {}  # by the node that it is a tile of

    def call(self, target: Any, args: tuple[Any, ...], like: Node, **kwargs: Any) -> Node:
        """Write a call whose result is like that of ``like``, for this tile's tokens."""
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
        original = weight
        weight = tile.graph.call_function(torch.ops.aten.t.default, (original,))
        tile.new.append(weight)
        describe(weight, node, lambda: value_of(original).t())
    return tile.call(torch.nn.functional.linear, (tile.copies[input], weight, bias), node)


def _copy(data: dict[Node, Node], tile: _Tile, node: Node) -> Node:
    place: Callable[[Node], Any] = lambda a: tile.copies[data[a]] if a in data else a  # noqa: E731
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), place)
    return tile.call(node.target, args, node, **kwargs)


def _activation(subgraph: Subgraph, data: Callable[[Node], Node], tile: _Tile, node: Node) -> Node:
    return insert(tile.graph, subgraph, tile.new, lambda node: tile.copies[data(node)], tile.at)


def _insert(graph: Graph, mlp: Tiling, new: list[Node]) -> Node:
    source, last = mlp.source, mlp.last
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
        length, last_length = tiles.lengths(tokens, mlp.tiles)
        sizes: list[Any] = [length] * (mlp.tiles - 1) + [last_length]
        lengths: list[Any] = sizes
        if not isinstance(tokens, int):  # the same, as calls
            whole = size(rows, 0)
            length, last_length = tiles.lengths(Proxy(whole), mlp.tiles)
            known, start = {whole: tokens}, len(new)
            while new[-1].next is not last:
                new.append(new[-1].next)
            for node in new[start:]:
                known[node] = node.target(*(known.get(a, a) for a in node.args))
                describe(node, source, partial(known.get, node))
            lengths = [length.node] * (mlp.tiles - 1) + [last_length.node]
        pieces = call(torch.split, (rows, lengths), source, lambda: tuple(value.new_empty((n, width)) for n in sizes))
        results = []
        for i, length in enumerate(sizes):
            tile = _Tile(graph, length, last, new)
            tile.copies[source] = call(operator.getitem, (pieces, i), source, partial(value.new_empty, (length, width)))
            start = len(new)
            for node, form in mlp.forms.items():
                tile.copies[node] = form(tile, node)
            results.append(tile.copies[last])
            for node in new[start:]:
                if node is not results[-1]:
                    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        joined = call(torch.cat, (results,), last, lambda: result.new_empty((tokens, result.shape[-1])))
        if result.ndim == 2:
            return joined
        leading = [n if isinstance(n, int) else size(source, i) for i, n in enumerate(result.shape[:-1])]
        return call(torch.unflatten, (joined, 0, leading), last, lambda: result.new_empty(result.shape))
