"""MLPs in tiles of tokens (``memory="tiled"``): a proved activation and its linear layers are repeated for each tile.

From an MLP's tokens to the linear layer that reads its activation, each row of a value depends on a single token.
So the tokens are split (``settings/tiles.py``), the calls are written once for each tile, and the results are
concatenated. All values of a tile except its result are marked ``MUST_RECOMPUTE``. The partitioner recomputes them when
backward reaches that tile, one tile after the other.

The pieces of the input stay unmarked: they are views of a contiguous input, so saving them is free. The results also
stay unmarked. The partitioner takes recomputing marked values to be free. It would recompute the residual stream from
marked results, with a GEMM for each tile.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Node, Proxy
from torch.utils.checkpoint import CheckpointPolicy

from torch_fused_ops.graphs.modules import is_parameter
from torch_fused_ops.graphs.reasons import Kind, Rejection
from torch_fused_ops.settings import tiles

from .graph import CASTS, COPIES, DROPOUTS, FREE, GraphAnalysis, label, names_of, reachable, record, write_call
from .rewrite import Edit, insert
from .subgraph import Subgraph, readers
from .symbolic import LINEAR
from .values import arguments_of, check_plain, equal, keeps_rows, producers, value_of


@dataclass
class Tiling:
    """An MLP that is computed in tiles.

    Attributes:
        subgraph: its activation.
        source: the tensor that holds the tokens.
        last: the linear layer that reads the activation.
        count: the number of tiles.
        calls: the calls of a tile, in graph order; ends with ``last``.
        data: maps each argument that varies by tile to the call (or ``source``) of which it is a view.
        linears: input, weight, bias of the linear layers among the calls, and True if the weight is (in, out).
        constants: weights, biases and factors, which are the same for every tile.
        dead: the nodes that the tiles replace.
    """

    subgraph: Subgraph
    source: Node
    last: Node
    count: int = 0
    calls: list[Node] = field(default_factory=list)
    data: dict[Node, Node] = field(default_factory=dict)
    linears: dict[Node, tuple[Node, Node, Node | None, bool]] = field(default_factory=dict)
    constants: list[Node] = field(default_factory=list)
    dead: set[Node] = field(default_factory=set)


def tiling(analysis: GraphAnalysis, subgraph: Subgraph, requested: int, tiled: set[Node]) -> Tiling:
    """Return an MLP's tiles.

    Args:
        analysis: the graph's analysis.
        subgraph: the MLP's activation.
        requested: the number of tiles; 0 chooses it by the number of tokens.
        tiled: the calls in tiles of other MLPs. The calls of this MLP are added.

    Raises:
        Rejection: the MLP cannot be tiled.
    """
    mlp = Tiling(subgraph, _source(analysis, subgraph), _last(analysis, subgraph))
    source, last = mlp.source, mlp.last
    if subgraph.order is not None:
        raise Rejection(Kind.TILE_FORM, "its tokens are not contiguous in memory")
    _read(analysis, mlp)
    for node in mlp.dead - {last}:
        for user in node.users:
            if user not in mlp.dead:
                raise Rejection(Kind.TILE_READER, f"{label(user)} also reads the result of {label(node)}")
    if any(analysis.region[node] != analysis.region[last] for node in mlp.dead):
        raise Rejection(Kind.REGION, "autocast or grad mode is switched between its parts")
    _check_writes(analysis, mlp)
    _check_callers(analysis, mlp)
    for node in (source, last, *mlp.constants):
        check_plain(node)
    tokens = _tokens(source)
    if any(not equal(tokens, _tokens(node)) for node in mlp.calls):
        raise Rejection(Kind.TILE_FORM, "not every row of its input becomes a row of its result")
    leading, shape = value_of(last).shape[:-1], value_of(source).shape[:-1]
    same = len(leading) == len(shape) and all(map(equal, leading, shape))
    shape_is_known = same or len(leading) == 1 or all(isinstance(size, int) for size in leading)
    if not isinstance(tokens, int) and (tokens.node.hint is None or not shape_is_known):
        raise Rejection(Kind.TILE_SIZE, "the number of its tokens is not known when it is compiled")
    count = tokens if isinstance(tokens, int) else tokens.node.hint
    mlp.count = tiles.tile_count(count, requested)
    if mlp.count == 1:
        size = "" if requested else f" of {tiles.MIN_TOKENS}"
        text = f"{count} tokens are too few for {requested or 'two'} tiles" + size
        raise Rejection(Kind.TILE_FEW, text)
    shared = next((node for node in mlp.calls if node in tiled), None)
    if shared is not None:
        raise Rejection(Kind.TILE_FORM, f"{label(shared)} is in the tiles of the MLP before it")
    tiled.update(mlp.calls)
    return mlp


def _tokens(node: Node) -> Any:
    return math.prod(value_of(node).shape[:-1])


def _source(analysis: GraphAnalysis, subgraph: Subgraph) -> Node:
    """Return the tensor that the linear layers before the activation read; with adapters, the first such tensor."""
    sources = []
    for node in producers(analysis, subgraph.inputs):
        source = arguments_of(analysis, node)[0]
        while keeps_rows(analysis, source):
            source = source.all_input_nodes[0]
        sources.append(source)
    return min(sources, key=analysis.index.__getitem__)


def _last(analysis: GraphAnalysis, subgraph: Subgraph) -> Node:
    users = list(readers(analysis, subgraph.output))
    if len(users) != 1:
        raise Rejection(Kind.TILE_READER, f"{len(users)} calls read the hidden layer: {names_of(users)}")
    return users[0]


def _read(analysis: GraphAnalysis, mlp: Tiling) -> None:
    """Read the calls from an MLP's last linear layer back to its tokens."""
    passed = set[Node]()

    def sources(node: Node) -> list[Node]:
        arguments = {argument: _viewed(analysis, mlp, argument, passed) for argument in _data(analysis, mlp, node)}
        mlp.data.update(arguments)
        return [source for source in arguments.values() if source is not mlp.source]

    for node in reachable([mlp.last], sources):
        mlp.calls.append(node)
    mlp.calls.sort(key=analysis.index.__getitem__)
    mlp.dead = {*mlp.calls, *passed, *mlp.subgraph.replaced}


def _viewed(analysis: GraphAnalysis, mlp: Tiling, node: Node, passed: set[Node]) -> Node:
    """Return the node behind views of whole rows, copies and inactive dropouts. Add these calls to ``passed``."""
    while node is not mlp.source and node is not mlp.subgraph.output:
        call = analysis.calls[node]
        is_identity = call.name in COPIES or (call.name in DROPOUTS and not call.dropout_is_active())
        if call.inplace or not (is_identity or keeps_rows(analysis, node)):
            break
        passed.add(node)
        node = node.all_input_nodes[0]
    return node


def _data(analysis: GraphAnalysis, mlp: Tiling, node: Node) -> Sequence[Node]:
    """Return a call's arguments that vary by tile; record the others."""
    call, subgraph = analysis.calls[node], mlp.subgraph
    if node is subgraph.output:
        return [subgraph.packed[0]] if subgraph.packed else subgraph.inputs
    if analysis.weight_gemm(node):
        mlp.linears[node] = input, weight, bias, _ = arguments_of(analysis, node)
        mlp.constants += [weight] if bias is None else [weight, bias]
        return [input]
    if call.name in DROPOUTS:
        raise Rejection(Kind.TILE_DROPOUT, "it contains an active dropout")
    combines = call.name in LINEAR and not call.inplace
    if analysis.state[node] == FREE or not (combines or call.name in CASTS):
        raise Rejection(Kind.TILE_FORM, f"{label(node)} separates its input from its result")
    data = [a for a in node.all_input_nodes if analysis.state[a] != FREE or a is mlp.source]
    for other in node.all_input_nodes:
        if other in data:
            continue
        if value_of(other).ndim > 1:
            text = f"{label(node)} combines it with {label(other)}, which is not a vector"
            raise Rejection(Kind.TILE_FORM, text)
        mlp.constants.append(other)
    return data


def _check_writes(analysis: GraphAnalysis, mlp: Tiling) -> None:
    """Reject in-place writes before the last linear layer, because the tiles are computed in its place."""
    first = min(mlp.dead, key=analysis.index.__getitem__)
    for node in (mlp.source, *mlp.constants, *mlp.dead):
        for writer in analysis.writers(node, first, mlp.last):
            if writer not in mlp.subgraph.calls:
                raise Rejection(Kind.WRITTEN, f"{label(writer)} writes into it in place before it is read")


def _check_callers(analysis: GraphAnalysis, mlp: Tiling) -> None:
    """Reject MLPs that read values that callers may modify, unless PyTorch saves these values.

    Callers may modify arguments and results of the graph. The partitioner may recompute other weights from these, if
    no gradient needs the weights. PyTorch saves a GEMM's operand for the other operand's gradient; under autocast, a
    copy in another dtype instead. Biases are copied (``memory_levels._save_copies_of_biases``).
    """
    graph = mlp.source.graph
    inputs, results = graph.find_nodes(op="placeholder"), graph.output_node().all_input_nodes
    saved, biases = set[Node](), {bias for _, _, bias, _ in mlp.linears.values()}
    for node, (input, weight, *_) in mlp.linears.items():
        for operand, other in ((input, weight), (weight, input)):
            if value_of(other).requires_grad and value_of(node).dtype == value_of(operand).dtype:
                saved.add(mlp.data.get(operand, operand))
    caller_owned = set(map(analysis.storage, (*inputs, *results)))
    parameters = {analysis.storage(n) for n in (*graph.find_nodes(op="get_attr"), *filter(is_parameter, inputs))}
    for node in (mlp.source, *mlp.constants):
        storage, is_saved = analysis.storage(node), node in saved
        if node is mlp.source:
            is_safe = is_saved or storage not in caller_owned
        else:  # autograd does not check the version of a saved view
            is_checked = node.op == "placeholder" or storage not in caller_owned
            is_safe = storage in parameters or node in biases or (is_saved and is_checked)
        if not is_safe:
            text = f"the caller may modify {label(node)} before backward needs it"
            raise Rejection(Kind.TILE_CALLERS, text)


# ---- the edit --------------------------------------------------------------------------------------------------------


def fuse(mlp: Tiling) -> Edit:
    """Return the edit that replaces an MLP by its tiles."""
    return mlp.last, partial(_insert, mlp), mlp.dead


def _insert(mlp: Tiling) -> Node:
    source, last, result = mlp.source, mlp.last, value_of(mlp.last)
    add = partial(write_call, source)

    def size(node: Node, axis: int) -> Node:
        return add(torch.ops.aten.sym_size.int, node, axis)

    rows = source if value_of(source).ndim == 2 else add(torch.flatten, source, 0, -2)
    tokens = value_of(rows).shape[0]
    length, last_length = tiles.lengths(tokens, mlp.count)
    sizes: list[Any] = [length] * (mlp.count - 1) + [last_length]
    lengths = sizes
    if not isinstance(tokens, int):  # the sizes as calls in the graph
        before = last.prev
        length, last_length = tiles.lengths(Proxy(size(rows, 0)), mlp.count)
        while (before := before.next) is not last:
            record(before, source)
        lengths = [length.node] * (mlp.count - 1) + [last_length.node]
    pieces = add(torch.split, rows, lengths)
    results = [_written(mlp, add(operator.getitem, pieces, i), size_of_tile) for i, size_of_tile in enumerate(sizes)]
    joined = write_call(last, torch.cat, results)
    if result.ndim == 2:
        return joined
    leading = [n if isinstance(n, int) else size(source, i) for i, n in enumerate(result.shape[:-1])]
    return write_call(last, torch.unflatten, joined, 0, leading)


def _written(mlp: Tiling, piece: Node, tokens: Any) -> Node:
    """Write a tile's calls on its rows; return its result. Backward recomputes all values except the result.

    Args:
        mlp: the MLP.
        piece: the tile's rows of the source.
        tokens: the number of these rows.
    """
    copies, before = {mlp.source: piece}, mlp.last.prev

    def place(argument: Node) -> Node:
        return copies[mlp.data[argument]] if argument in mlp.data else argument

    for node in mlp.calls:
        like = value_of(node)
        make = partial(like.new_empty, (tokens, like.shape[-1]))
        if node is mlp.subgraph.output:
            copies[node] = insert(mlp.subgraph, place)
        elif node in mlp.linears:
            input, weight, bias, transposed = mlp.linears[node]
            weight = write_call(node, torch.ops.aten.t.default, weight) if transposed else weight
            copies[node] = write_call(node, torch.nn.functional.linear, place(input), weight, bias, make=make)
        else:
            copies[node] = node.graph.node_copy(node, place)
            record(copies[node], node, make)
    while (before := before.next) is not copies[mlp.last]:
        before.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return copies[mlp.last]
