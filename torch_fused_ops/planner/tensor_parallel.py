"""A captured model as one GPU of a tensor-parallel group runs it: its graph, with smaller tensors.

The split is that of Megatron and ``parallelize_module``. The GEMMs before an MLP's activation and before attention are
column-parallel, the GEMM after it is row-parallel, and its result is summed over the group, in place. Norms, residuals,
embeddings and the head are whole on every GPU.

No result is scaled. The graph from Dynamo gets the smaller parameters, and the calls between the GEMMs are run again on
tensors without data. Numbers of heads or features in these calls (views, splits, expansions) are divided if the shapes
then fit: between the GEMMs each tensor has exactly one dimension of a ``tp``-th of its former size (at attention the
heads), and after them all shapes are the former ones. If no choice of numbers fits, the GEMMs stay whole. The smaller
graph is compiled like any other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from torch_fused_ops.planner.model import CapturedModel
from torch_fused_ops.virtual_gpu.captured import copy_graph

__all__ = ["Split", "split"]

ATTENTION = F.scaled_dot_product_attention
# The order for a number at several places in a call: unchanged first; the last place first; the last but one first.
STRATEGIES = (None, -1, -2)


@dataclass(frozen=True)
class Split:
    """The split parts of a model.

    Attributes:
        tp: the number of GPUs.
        dimensions: the split dimension of each split parameter of the captured model.
        summed: bytes of results, and of their inputs' gradients, that the group sums.
    """

    tp: int
    dimensions: Mapping[str, int]
    summed: int

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one GPU's part of a parameter."""
        dimension = self.dimensions.get(name)
        return tuple(size // self.tp if i == dimension else size for i, size in enumerate(shape))

    @property
    def sent(self) -> int:
        """Bytes that a GPU sends in a step, as rings send them: 2 (tp - 1)/tp of what is summed."""
        return 2 * self.summed * (self.tp - 1) // self.tp


@dataclass(frozen=True)
class _Gemm:
    """A GEMM with a weight: x @ weight, plus a bias."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    out: int  # the weight's dimension of output features

    @property
    def features(self) -> int:
        """The number of output features."""
        return int(_value(self.weight).shape[self.out])


@dataclass(frozen=True)
class _Block:
    """Column-parallel GEMMs, a row-parallel one, and the calls between them, in order."""

    module: str
    columns: tuple[_Gemm, ...]
    row: _Gemm
    between: tuple[fx.Node, ...]

    @property
    def attention(self) -> list[fx.Node]:
        return [node for node in self.between if node.target is ATTENTION]


def split(captured: CapturedModel, tp: int) -> tuple[CapturedModel, Split]:
    """Return the model of one of ``tp`` GPUs, and its split.

    Raises:
        ValueError: tp does not divide an MLP's hidden features or an attention's heads; or nothing can be split.
    """
    graphs, dimensions, summed = [], {}, 0
    for captured_graph in captured.graphs:
        if captured_graph.graph is None:
            graphs.append(captured_graph)
            continue
        gm = copy_graph(captured_graph.graph.gm)
        paths = dict(zip(gm.graph.find_nodes(op="placeholder"), captured_graph.graph.paths, strict=True))
        for block in _blocks(gm.graph, paths, captured):
            _check(block, tp)
            if _shrunk(block, tp):
                for gemm, dimension in [*((c, c.out) for c in block.columns), (block.row, 1 - block.row.out)]:
                    dimensions[paths[gemm.weight]] = dimension
                    if gemm.bias is not None and gemm is not block.row:
                        dimensions[paths[gemm.bias]] = 0
                inputs = {column.x for column in block.columns}
                tensors = [block.row.node, *(x for x in inputs if _value(x).requires_grad)]
                summed += sum(_value(node).nbytes for node in tensors)
        gm.recompile()
        graphs.append(replace(captured_graph, graph=replace(captured_graph.graph, gm=gm)))
    if not dimensions:
        raise ValueError(
            f"tp={tp} is not accepted: there is nothing to split: no fused MLP between two linear layers, and no "
            "attention by torch.nn.functional.scaled_dot_product_attention whose shapes follow its heads"
        )
    return replace(captured, graphs=tuple(graphs)), Split(tp, dimensions, summed)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _blocks(graph: fx.Graph, paths: Mapping[fx.Node, str], captured: CapturedModel) -> Iterator[_Block]:
    """The fused MLPs and the attentions of a graph; a GEMM is in one of them at most."""
    gemms = {node: gemm for node in graph.nodes if (gemm := _gemm(node, paths)) is not None}
    mlps = {module for modules in captured.mlps.values() for module in modules}
    order = {node: i for i, node in enumerate(graph.nodes)}
    taken: set[fx.Node] = set()
    for row in gemms.values():
        block = _block(row, gemms, paths, order)
        if block is None or taken & {gemm.node for gemm in (*block.columns, row)}:
            continue
        weights = [paths[gemm.weight] for gemm in (*block.columns, row)]
        if block.attention or any(all(not m or weight.startswith(f"{m}.") for weight in weights) for m in mlps):
            taken |= {gemm.node for gemm in (*block.columns, row)}
            yield block


def _gemm(node: fx.Node, paths: Mapping[fx.Node, str]) -> _Gemm | None:
    """The GEMM of a linear layer, or of a Conv1D, with a weight that no other op reads."""
    values = [*node.args, *node.kwargs.values()]
    if node.op != "call_function" or not all(isinstance(value, fx.Node) or value is None for value in values):
        return None
    if node.target not in (F.linear, torch.addmm):
        return None
    order = ("input", "weight", "bias") if node.target is F.linear else ("bias", "input", "weight")
    named: dict[str, Any] = dict(zip(order, node.args, strict=False), **node.kwargs)
    x, weight, bias = named.get("input"), named.get("weight"), named.get("bias")
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    parameters = [weight] if bias is None else [weight, bias]
    if any(not paths.get(parameter) or len(parameter.users) > 1 for parameter in parameters):
        return None
    return _Gemm(node, x, weight, bias, 0 if node.target is F.linear else 1)


def _block(
    row: _Gemm, gemms: Mapping[fx.Node, _Gemm], paths: Mapping[fx.Node, str], order: Mapping[fx.Node, int]
) -> _Block | None:
    """The GEMMs that produce a GEMM's input, and the calls between, if no other op reads these."""
    columns: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    left = [row.x]
    while left:
        node = left.pop()
        if node in gemms:
            columns.add(node)
        elif node not in seen:
            seen.add(node)
            left += node.all_input_nodes
    depends: set[fx.Node] = set(columns)
    between = []
    for node in sorted(seen, key=order.__getitem__):
        if depends & set(node.all_input_nodes):
            depends.add(node)
            between.append(node)
    readers = {user for node in depends for user in node.users} - depends - {row.node}
    if not columns or not between or any(user.op != "output" for user in readers):
        return None
    module = _common([paths[gemms[node].weight] for node in columns] + [paths[row.weight]])
    return _Block(module, tuple(gemms[node] for node in sorted(columns, key=order.__getitem__)), row, tuple(between))


def _common(paths: Sequence[str]) -> str:
    """The innermost module around all of these."""
    names = [path.split(".")[:-1] for path in paths]
    shared = [names_at[0] for names_at in zip(*names, strict=False) if len(set(names_at)) == 1]
    return ".".join(shared) if all(names_at[: len(shared)] == shared for names_at in names) else ""


def _check(block: _Block, tp: int) -> None:
    """Check that ``tp`` divides the features and the heads."""
    for node in block.attention:
        size = int(_value(node.args[0]).shape[-1])
        heads = [int(_value(tensor).shape[-3]) for tensor in node.args[:3]]
        heads += [c.features // size for c in block.columns if c.features % size == 0]
        for count in heads:
            if count % tp:
                raise ValueError(f"tp={tp} is not accepted: it does not divide the {count} heads of {block.module}")
    for column in block.columns:
        if column.features % tp:
            raise ValueError(
                f"tp={tp} is not accepted: it does not divide the {column.features} features between the linear "
                f"layers of {block.module}"
            )


# ---- smaller ---------------------------------------------------------------------------------------------------------


def _value(node: Any) -> Any:
    return node.meta["example_value"]


def _shrunk(block: _Block, tp: int) -> bool:
    """Give a block of a graph its smaller parameters; do not change it if its shapes do not fit."""
    for strategy in STRATEGIES:
        try:
            changes = _smaller(block, tp, strategy)
        except Exception:  # the operator's own error for a wrong shape
            changes = None
        if changes is not None:
            for node, (args, kwargs, value) in changes.items():
                node.args, node.kwargs, node.meta["example_value"] = args, kwargs, value
            return True
    return False


def _smaller(block: _Block, tp: int, strategy: int | None) -> dict[fx.Node, tuple[Any, Any, Any]] | None:
    """New arguments and values of a block's nodes; None if its shapes do not fit."""
    changes: dict[fx.Node, tuple[Any, Any, Any]] = {}
    mode = _value(block.row.weight).fake_mode
    sizes = _sizes(block)

    def value(node: Any) -> Any:
        return changes[node][2] if node in changes else _value(node)

    def run(node: fx.Node, args: Any, kwargs: Any) -> Any:
        args, kwargs = fx.node.map_arg((args, kwargs), value)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op != "call_function" or isinstance(node.target, str):
            raise NotImplementedError(node.op)
        return node.target(*args, **kwargs)

    def part(node: fx.Node, dimension: int) -> None:
        old = _value(node)
        shape = [size // tp if i == dimension else size for i, size in enumerate(old.shape)]
        changes[node] = (
            node.args,
            node.kwargs,
            torch.empty(shape, dtype=old.dtype, device=old.device, requires_grad=old.requires_grad),
        )

    with mode, torch.enable_grad():
        for column in block.columns:
            part(column.weight, column.out)
            if column.bias is not None:
                part(column.bias, 0)
        part(block.row.weight, 1 - block.row.out)
        for column in block.columns:
            node = column.node
            changes[node] = (node.args, node.kwargs, run(node, node.args, node.kwargs))
        for node in block.between:
            for args, kwargs in _variants(node, sizes, tp, strategy):
                try:
                    result = run(node, args, kwargs)
                except Exception:
                    continue
                if _is_part(_value(node), result, tp):
                    changes[node] = (args, kwargs, tree_map(lambda new, old: _as(new, old), result, _value(node)))
                    break
            else:
                return None
        if any(_parted(_value(tensor), value(tensor)) != -3 for node in block.attention for tensor in node.args[:3]):
            return None
        result = run(block.row.node, block.row.node.args, block.row.node.kwargs)
    columns = [_parted(_value(column.node), value(column.node)) for column in block.columns]
    same: bool = result.shape == _value(block.row.node).shape
    return changes if same and {*columns, _parted(_value(block.row.x), value(block.row.x))} == {-1} else None


def _as(new: Any, old: Any) -> Any:
    """Convert to the recorded dtype: autocast, which is off here, gave other dtypes."""
    return new.to(old.dtype) if isinstance(new, Tensor) and new.dtype != old.dtype else new


def _sizes(block: _Block) -> set[int]:
    """The numbers of heads and features, in total and of single GEMMs."""
    sizes = {column.features for column in block.columns}
    for node in block.attention:
        for tensor in node.args[:3]:
            heads, size = (int(_value(tensor).shape[i]) for i in (-3, -1))
            sizes |= {heads, heads * size}
        sizes |= {column.features // size for column in block.columns}
    return sizes


def _variants(node: fx.Node, sizes: set[int], tp: int, strategy: int | None) -> Iterator[tuple[Any, Any]]:
    """Yield a call's arguments unchanged, with one number divided, and with all, in the strategy's order."""
    leaves, spec = tree_flatten((node.args, node.kwargs))
    places = [i for i, x in enumerate(leaves) if type(x) is int and x in sizes and x % tp == 0]
    if node.target is operator.getitem:
        places = []

    def divided(which: Sequence[int]) -> tuple[Any, Any]:
        args, kwargs = tree_unflatten([x // tp if i in which else x for i, x in enumerate(leaves)], spec)
        return args, kwargs

    candidates = [divided([place]) for place in reversed(places)]
    if strategy is None:
        yield node.args, node.kwargs
    elif strategy == -2:
        candidates = candidates[1:] + candidates[:1]
    yield from candidates
    if len(places) > 1:
        yield divided(places)
    if strategy is not None:
        yield node.args, node.kwargs


def _parted(old: Any, new: Any) -> int | None:
    """The dimension, counted from the end, in which two tensors differ; None if it is not exactly one."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old.dim() != new.dim():
        return None
    differ = [i - old.dim() for i, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)) if a != b]
    return differ[0] if len(differ) == 1 else None


def _is_part(old: Any, new: Any, tp: int) -> bool:
    """True if a value, or each of several, differs in one dimension only, and has a ``tp``-th of it."""
    if isinstance(old, (tuple, list)):
        alike = isinstance(new, (tuple, list)) and len(old) == len(new)
        return alike and all(_is_part(a, b, tp) for a, b in zip(old, new, strict=True))
    dimension = _parted(old, new)
    return dimension is not None and old.shape[dimension] == tp * new.shape[dimension]
