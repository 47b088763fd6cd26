"""Stage 3 for linear layers in float8: ``quantize``, ``quantize_by``, ``dequantize``, ``scaled_mm`` as Inductor IR.

What is quantized along its rows is fused with whatever makes it, an activation or a norm: that is Inductor's own
work, given the formula in aten. What is quantized along its columns is stored transposed, and Inductor reads or
writes that across the rows (pytorch#130015): on GPUs a kernel of ours does it (``kernels/float8.py``).
"""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import fallback_handler, lowerings, make_fallback, register_lowering
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from torch_fused_ops import activations, float8
from torch_fused_ops.declaration import PointwiseOperator
from torch_fused_ops.float8_recipes import BLOCK, MX_BLOCK
from torch_fused_ops.lowerings import operators
from torch_fused_ops.lowerings.epilogues import VIEWS
from torch_fused_ops.lowerings.partition import Graphs
from torch_fused_ops.operators.quantized import QUANTIZED, RESULTS

__all__ = ["merged"]

aten, prims, fused = torch.ops.aten, torch.ops.prims, torch.ops.fused
Box = Any  # ir.TensorBox


class _Lowered(Interpreter):
    """Runs a graph of aten's calls on Inductor's boxes."""

    def run_node(self, n: Node) -> Any:
        value = n.meta.get("val")
        return value.node.expr if isinstance(value, torch.SymInt) else super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in VIEWS and len(args[1]) < len(args[0].get_size()) and not operators.is_on_gpu(args[0]):
            # Blocks are written as blocks. As rows, the index of their scales is a quotient; Inductor's C++ then splits
            # the loop, and where it fused loops of another order with it, that is an assertion (try_loop_split).
            args[0].realize()
        return lowerings.get(target, target)(*args, **kwargs)


class _Like(NamedTuple):
    """What of a box a trace depends on."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _inlined(function: Callable[..., Any], *args: Any) -> Any:
    """``function`` of boxes and of other arguments, as aten's calls, lowered."""
    from torch._inductor import config, ir
    from torch._inductor.virtualized import V

    with V.fake_mode, torch.no_grad():
        given = [ir.ir_node_to_tensor(a) if isinstance(a, ir.TensorBox) else a for a in args]
    tensors = [a for a in given if isinstance(a, torch.Tensor)]
    if all(isinstance(number, int) for tensor in tensors for number in (*tensor.shape, *tensor.stride())):
        likes = (_Like(a.shape, a.stride(), a.dtype, a.device) if isinstance(a, torch.Tensor) else a for a in given)
        traced = _traced(function, tuple(likes), config.fallback_random)
    else:
        traced = _trace(function, given)
    return _Lowered(traced).run(*(a for a in args if isinstance(a, ir.TensorBox)))


def _trace(function: Callable[..., Any], args: Sequence[Any]) -> GraphModule:
    """``function`` of tensors and of other arguments, as aten's calls on the tensors."""

    def of_tensors(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        return function(*(next(rest) if isinstance(a, torch.Tensor) else a for a in args))

    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    traced: GraphModule = make_fx(of_tensors, decomposition_table=select_decomp_table())(*tensors)
    return traced


@functools.lru_cache(256)
def _traced(function: Callable[..., Any], args: tuple[Any, ...], fallback_random: bool) -> GraphModule:
    """``_trace`` of what has those sizes, once: layers have them in common. The setting is the decompositions' own."""
    from torch._inductor.virtualized import V

    def like(a: Any) -> Any:
        return torch.empty_strided(a.size, a.stride, dtype=a.dtype, device=a.device) if isinstance(a, _Like) else a

    with V.fake_mode, torch.no_grad():
        given = [like(a) for a in args]
    traced = _trace(function, given)
    for node in traced.graph.nodes:
        node.meta.clear()  # it has tensors of the compilation's, and they have all of it
    return traced


def _is_transposed() -> bool:
    """Whether what is being lowered reads a matrix the other way round."""
    from torch._inductor.virtualized import V

    node = V.graph.current_node
    return bool(node.args) and isinstance(node.args[0], Node) and node.args[0].target in TRANSPOSED


_by_kernel = {
    name: fallback_handler(getattr(fused, name).default, add_to_fallback_set=False)
    for name in ("quantize", "quantize_by", "scaled_mm", "scaled_mm_tiled")
}
# By compilation and by the FX node of scales. Both products that read a matrix read its scales.
_tiles: WeakKeyDictionary[Any, dict[Node, Box]] = WeakKeyDictionary()


def _halves(box: Box) -> tuple[Box, Box] | None:
    """The two tensors that lie side by side in a matrix's rows, as gate's and up's gradients do where they are packed.

    Read as one, it would have to be there as a whole: a kernel of its own would read it again.
    """
    from torch._inductor import ir

    rows, columns = box.get_size()
    storage: Any = box.data.unwrap_view() if isinstance(box.data, ir.ReinterpretView) else box.data
    whole: Any = storage.data if isinstance(storage, ir.StorageBox) else None
    parts: Sequence[Any] = whole.inputs if isinstance(whole, ir.ConcatKernel) else ()
    if len(parts) != 2 or box.get_layout().offset != 0 or list(box.get_stride()) != [columns, 1]:
        return None
    sizes = [part.get_size() for part in parts]
    if sizes[0] != sizes[1] or list(whole.get_size()) != [*sizes[0][:-1], columns]:
        return None
    view = lowerings[aten.view.default]
    first, second = (view(ir.TensorBox(ir.StorageBox(part)), [rows, sizes[0][-1]]) for part in parts)
    return first, second


def _quantize(input: Box, rows: int, columns: int = BLOCK) -> Any:
    if operators.is_on_gpu(input) and (rows != 1 or _is_transposed()):
        return _by_kernel["quantize"](input, rows, columns)
    halves = _halves(input) if rows == 1 and columns == input.get_size()[1] else None
    if halves is not None:
        first, second, scales = _inlined(float8.quantize_halves, *halves)
        return operators.pack(first, second, "halves"), scales
    return _inlined(float8.quantize, input, rows, columns)


def _quantize_by(input: Box, scales: Box) -> Box:
    if operators.is_on_gpu(input) and _is_transposed():
        return _by_kernel["quantize_by"](input, scales)
    return _inlined(float8.quantize_by, input, scales)


def _dequantize(values: Box, scales: Box, rows: int, dtype: torch.dtype) -> Box:
    return _inlined(float8.dequantize, values, scales, rows, dtype)


def _tiled(scales: Box, node: Node) -> Box:
    """As the tensor cores read them, by the kernel that quantizes: float32 is then not written at all."""
    from torch._inductor.virtualized import V

    known = _tiles.setdefault(V.graph, {})
    if node not in known:
        known[node] = _inlined(float8.tiled, scales)
    return known[node]


def _scaled_mm(a: Box, a_scales: Box, b: Box, b_scales: Box, bias: Box | None, rows: int, dtype: torch.dtype) -> Box:
    from torch._inductor.virtualized import V

    args = a, a_scales, b, b_scales, bias, rows, dtype
    if not operators.is_on_gpu(a):
        return _inlined(float8.product, *args)
    nodes: Any = V.graph.current_node.args
    values = nodes[0].meta["val"]
    columns = float8.columns_of(values, nodes[1].meta["val"], 1)
    if columns == MX_BLOCK != values.shape[1]:
        of_a, of_b = _tiled(a_scales, nodes[1]), _tiled(b_scales, nodes[3])
        return _by_kernel["scaled_mm_tiled"](a, of_a, b, of_b, bias, dtype)
    return _by_kernel["scaled_mm"](*args)


register_lowering(fused.quantize.default, type_promotion_kind=None)(_quantize)
register_lowering(fused.quantize_by.default, type_promotion_kind=None)(_quantize_by)
register_lowering(fused.dequantize.default, type_promotion_kind=None)(_dequantize)
register_lowering(fused.scaled_mm.default, type_promotion_kind=None)(_scaled_mm)

for _op in (
    fused.quantize_both.default,
    fused.requantize.default,
    fused.scaled_grouped_mm.default,
    fused.scaled_mm_tiled.default,
    *QUANTIZED.values(),
):
    make_fallback(_op, warn=False)


# ---- backward graphs -------------------------------------------------------------------------------------------------

BACKWARD: dict[Any, PointwiseOperator] = {op.backward.overload: op for op in QUANTIZED}
TRANSPOSED = {aten.t.default, aten.permute.default, aten.transpose.int}  # of a matrix


def merged(graphs: Graphs) -> Graphs:
    """A pair of graphs in which what is quantized more than once is so in one pass; without float8 the pair itself.

    Backward does not round twice what it has. On GPUs what is quantized along rows and along columns is one call:
    elsewhere Inductor's code for the single steps does as well.
    """
    from torch._inductor.pattern_matcher import stable_topological_sort  # not earlier: it imports the lowerings

    forward, backward = graphs
    if not backward.graph.find_nodes(op="call_function", target=fused.scaled_mm.default):
        return graphs
    edited = copy.deepcopy(forward.graph), copy.deepcopy(backward.graph)
    _round_once(edited[1])
    for graph in edited:
        for merge in (_merge_gradients, _merge):
            for node in list(graph.nodes):
                if _is_on_gpu(node):
                    merge(graph, node)
            stable_topological_sort(graph)
            graph.eliminate_dead_code()
    return _make_graph_module(forward, edited[0]), _make_graph_module(backward, edited[1])


def _is_on_gpu(node: Node) -> bool:
    values = node.meta.get("val")
    first = next((v for v in (values if isinstance(values, (tuple, list)) else [values]) if v is not None), None)
    return isinstance(first, torch.Tensor) and first.device.type != "cpu"


def _round_once(graph: Graph) -> None:
    """Quantize what a graph has itself, and not what that loads as.

    The input of a linear layer is kept as it was multiplied, or rebuilt. Where it is rebuilt, rounding it in one form
    of blocks and then in the other is work for nothing: both round to the same numbers, but for the smallest.
    """
    for node in graph.find_nodes(op="call_function", target=fused.dequantize.default):
        values, block = node.args[0], _block_of_columns(node)
        uses = _uses(node, *block)
        made: Any = values.args[0] if values.target is operator.getitem else None
        alone = uses.columns and not (uses.rows or uses.sums or uses.others)  # no rounding that somebody asked for
        if alone and isinstance(made, Node) and _is_quantize(made, node.args[2], block[1]):
            source: Any = made.args[0]
            if source.meta["val"].dtype == node.meta["val"].dtype:
                node.replace_all_uses_with(source)


class _Uses(NamedTuple):
    """Where a matrix is quantized along its rows, where along its columns, where its columns are summed."""

    rows: list[Node]
    columns: list[Node]
    sums: list[Node]
    others: list[Node]


def _block_of_columns(dequantized: Node) -> tuple[int, int]:
    """In which a layer's input, loaded, is quantized along its columns: as a weight."""
    values, scales, rows, _ = _seen(dequantized.args)
    narrow = float8.columns_of(values, scales, rows) == MX_BLOCK
    return (1, MX_BLOCK) if narrow else (BLOCK, BLOCK)


def _uses(node: Node, rows_of_columns: int = 1, columns: int = BLOCK) -> _Uses:
    """What reads a matrix, through transpositions; its rows in blocks of (1, columns), its columns in such of more."""
    found = _Uses([], [], [], [])
    for user in node.users:
        of_transposed = list(user.users) if user.target in TRANSPOSED else []
        if _is_quantize(user, 1, columns):
            found.rows.append(user)
        elif of_transposed and all(_is_quantize(u, rows_of_columns, columns) for u in of_transposed):
            found.columns.extend(of_transposed)
        elif user.target is aten.sum.dim_IntList and user.args[1] == [0]:
            found.sums.append(user)
        else:
            found.others.append(user)
    return found


def _is_quantize(node: Node, rows: Any, columns: int = BLOCK) -> bool:
    """In blocks of (rows, columns)."""
    return node.target is fused.quantize.default and (*node.args[1:], BLOCK)[:2] == (rows, columns)


def _seen(args: Sequence[Any]) -> list[Any]:
    """A call's arguments, nodes by their fake values."""
    return [a.meta["val"] if isinstance(a, Node) else a for a in args]


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    """A call with its fake value."""
    node = graph.call_function(target, args)
    with torch.no_grad():
        node.meta["val"] = target(*_seen(args))
    return node


def _replace_pair(graph: Graph, old: Sequence[Node], values: Node, scales: Node) -> None:
    """Let who reads what ``quantize`` gave read these."""
    for node in old:
        for item in list(node.users):
            item.replace_all_uses_with(scales if item.args[1] else values)
            values.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack"))


def _results(graph: Graph, node: Node) -> list[Node]:
    return [_call(graph, operator.getitem, node, i) for i in range(len(node.meta["val"]))]


def _merge(graph: Graph, node: Node) -> None:
    """A matrix's two quantizations, or the one of what was quantized along its rows, in one pass.

    In blocks of 32 Inductor's own, along its rows, also writes scales as products read them: that is left to it, but
    where the columns are summed as well, as it then quantizes in a kernel of its own.
    """
    if not isinstance(node.meta["val"], torch.Tensor) or node.meta["val"].ndim != 2:
        return
    for width in (BLOCK, MX_BLOCK):
        uses = _uses(node, 1, width)
        if not (uses.rows and uses.columns) or (width == MX_BLOCK and not uses.sums):
            continue
        with graph.inserting_after(node):
            both = _call(graph, fused.quantize_both.default, node, width)
        with graph.inserting_after(both):
            parts = _results(graph, both)
        _replace_pair(graph, uses.rows, *parts[:2])
        _replace_pair(graph, uses.columns, *parts[2:])
    if node.target is fused.dequantize.default and node.args[2] == 1:
        columns = _uses(node, *_block_of_columns(node)).columns
        if columns:
            with graph.inserting_after(node):
                again = _call(graph, fused.requantize.default, *node.args[:2])
            with graph.inserting_after(again):
                _replace_pair(graph, columns, *_results(graph, again))


def _matrices(node: Node) -> tuple[list[Node], bool]:
    """A tensor's rows as a matrix, wherever the graph makes one of it, and whether all that reads it reads that."""
    found, other = ([node], False) if node.meta["val"].ndim == 2 else ([], False)
    for user in node.users:
        columns = node.meta["val"].shape[-1]
        if user.target in VIEWS and user.meta["val"].ndim == 2 and user.meta["val"].shape[-1] == columns:
            found.append(user)
        elif node.meta["val"].ndim != 2:
            other = True
    return found, not other


def _is_of_tiles(t: torch.Tensor) -> bool:
    """Whether its rows and columns are known to be multiples of 128: the kernel for blocks of 32 has no other tiles."""
    *rows, columns = t.shape
    return all(isinstance(n, int) for n in t.shape) and math.prod(rows) % BLOCK == 0 and columns % BLOCK == 0


def _merge_gradients(graph: Graph, node: Node) -> None:
    """An activation's gradients and its result, where they are read by products in float8 and by nothing else."""
    op = BACKWARD.get(node.target)
    if op is None:
        return
    given: Any = node.args
    grad, *args, _ = given
    tensors, layout, _ = op.split(tuple(args))
    data, others = tensors[: op.data], tensors[op.data :]
    if layout == "interleaved" or any(other is not None for other in others):
        return
    if "activation" in op.scalars and not activations.get(args[len(tensors)]).builtin:
        return
    items = {user.args[1]: user for user in node.users}
    width = MX_BLOCK if any(_uses(m, 1, MX_BLOCK).columns for i in items for m in _matrices(items[i])[0]) else BLOCK
    if width == MX_BLOCK and not _is_of_tiles(grad.meta["val"]):
        return
    of_gradients = []
    for i in range(op.data):
        matrices, alone = _matrices(items[i]) if i in items else ([], False)
        rows, columns, sums, rest = ([u for m in matrices for u in _uses(m, 1, width)[part]] for part in range(4))
        rest = [u for u in rest if u not in matrices]
        if not (alone and rows and columns) or rest:
            return
        of_gradients.append((rows, columns, sums))
    results = [
        n
        for n in graph.find_nodes(op="call_function", target=op.forward.overload)
        if list(op.complete(n.args)) == list(op.complete(tuple(args)))
    ]
    of_columns = 1 if width == MX_BLOCK else BLOCK
    of_result = [c for n in results for m in _matrices(n)[0] for c in _uses(m, of_columns, width).columns]
    with graph.inserting_before(node):
        flat = [_call(graph, aten.reshape.default, t, [-1, t.meta["val"].shape[-1]]) for t in (grad, *data)]
        made = _call(graph, QUANTIZED[op], *flat, *args[len(tensors) :], width)
        made.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        parts = _results(graph, made)
    for i, (rows, columns, sums) in enumerate(of_gradients):
        values, scales, values_t, scales_t, tiles = parts[RESULTS * i : RESULTS * (i + 1)]
        _replace_pair(graph, rows, values, scales)
        _replace_pair(graph, columns, values_t, scales_t)
        for total in sums:
            with graph.inserting_before(total):
                again = _call(graph, aten.sum.dim_IntList, tiles, *total.args[1:])
                again = _call(graph, prims.convert_element_type.default, again, total.meta["val"].dtype)
            total.replace_all_uses_with(again)
    _replace_pair(graph, of_result, *parts[-2:])
