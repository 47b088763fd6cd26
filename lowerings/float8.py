"""Lowerings of linear layers in float8: quantization and scaled GEMMs, as Inductor IR or as calls of kernels.

Quantization along rows is lowered as aten calls, which Inductor fuses with the kernel before it, such as an activation
or a norm. A tensor quantized along its columns is stored transposed. Inductor would read or write it across the rows
(pytorch#130015), so on GPUs a kernel quantizes along columns and in blocks of several rows
(``families/float8/kernels.py``).
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import fallback_handler, lowerings, make_fallback, register_lowering
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from torch_fused_ops.declaration import PointwiseOperator
from torch_fused_ops.families.float8 import formulas as float8
from torch_fused_ops.families.float8.quantized import ACTIVATIONS, QUANTIZED, RESULTS
from torch_fused_ops.families.float8.recipes import BLOCK, MX_BLOCK
from torch_fused_ops.graphs.modules import insert_call
from torch_fused_ops.lowerings import operators, partition, programs
from torch_fused_ops.lowerings.partition import VIEWS, Graphs

aten, prims, fused = torch.ops.aten, torch.ops.prims, torch.ops.fused
Box = Any  # ir.TensorBox


# ---- values saved for backward ---------------------------------------------------------------------------------------


def _mark(graph: Graph, backward: Collection[Node], results: Collection[Node]) -> list[Node]:
    """Move each ``requantize`` call that only backward reads to backward, so that its argument is saved.

    Saving the form quantized along the tokens would take equal memory, or more if a recomputed GEMM needs both forms.

    Returns:
        The calls that compute the scales with which backward quantizes weights, as values to save: a scale takes 4
        bytes. The partitioner would recompute them in a pass over the weight, because backward has the weight anyway.
        [] under a memory budget.
    """
    for node in graph.find_nodes(op="call_function", target=fused.requantize.default):
        dependents = partition.with_dependents([node])
        if dependents.isdisjoint(results):
            for dependent in dependents.difference(backward):
                dependent.meta["partitioner_tag"] = "must_be_in_backward"
    scales = dict[Node, None]()
    for node in graph.find_nodes(op="call_function", target=fused.quantize_by.default):
        source = node.args[1]
        while isinstance(source, Node) and source.args and source.target is not fused.quantize.default:
            source = source.args[0]
        if isinstance(source, Node) and source.op == "call_function" and "recompute" not in source.meta:
            scales[source] = None
    return [] if partition.budgeted(graph) else list(scales)


partition.RECOMPUTABLE += ["quantize", "dequantize", "requantize"]
partition.LINEAR |= {fused.scaled_mm, fused.scaled_grouped_mm}
partition.SAVE_HOOKS.append(_mark)


class _Lowered(Interpreter):
    """Run a graph of aten calls on Inductor's boxes."""

    def run_node(self, n: Node) -> Any:
        value = n.meta.get("val")
        return value.node.expr if isinstance(value, torch.SymInt) else super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in VIEWS and len(args[1]) < len(args[0].get_size()) and not programs.is_on_gpu(args[0]):
            # Keep loops over blocks. In a loop over rows, the index of a block's scale is a quotient. Inductor's C++
            # backend then splits the loop, and an assertion fails if loops of different order were fused
            # (try_loop_split).
            args[0].realize()
        return lowerings.get(target, target)(*args, **kwargs)


_traces: dict[tuple[Any, ...], GraphModule] = {}  # only for static sizes; the key is everything a trace depends on
_MOST_TRACES = 256


def _inlined(function: Callable[..., Any], *args: Any) -> Any:
    """Lower ``function(*args)`` as aten calls; some arguments are boxes. Layers of the same size share a trace."""
    from torch._inductor import config, ir
    from torch._inductor.virtualized import V

    boxes = [a for a in args if isinstance(a, ir.TensorBox)]

    def of_tensors(*tensors: torch.Tensor) -> Any:
        remaining = iter(tensors)
        return function(*(next(remaining) if isinstance(a, ir.TensorBox) else a for a in args))

    with V.fake_mode, torch.no_grad():
        tensors = [ir.ir_node_to_tensor(box) for box in boxes]
        sizes = [number for t in tensors for number in (t.ndim, *t.shape, *t.stride())]
        known = all(isinstance(number, int) for number in sizes)
        constants = ("box" if isinstance(a, ir.TensorBox) else a for a in args)
        types = ((t.dtype, t.device) for t in tensors)
        key = (function, config.fallback_random, *constants, *types, *sizes) if known else ()
        if (traced := _traces.get(key)) is None:
            traced = make_fx(of_tensors, decomposition_table=select_decomp_table())(*tensors)
    if known and key not in _traces:
        for node in traced.graph.nodes:
            node.meta.clear()  # otherwise tensors in the metadata would hold the compilation in memory
        if len(_traces) >= _MOST_TRACES:
            _traces.clear()
        _traces[key] = traced
    return _Lowered(traced).run(*boxes)


def _is_transposed() -> bool:
    """Return True if the current node reads a transposed matrix."""
    from torch._inductor.virtualized import V

    node = V.graph.current_node
    return bool(node.args) and isinstance(node.args[0], Node) and node.args[0].target in TRANSPOSED


_by_kernel = {
    name: fallback_handler(getattr(fused, name).default, add_to_fallback_set=False)
    for name in ("quantize", "quantize_by", "requantize", "scaled_mm", "scaled_mm_tiled")
}
# Scales in the tensor cores' layout, by compilation and FX node. All GEMMs that read a matrix share its scales.
_tiles: WeakKeyDictionary[Any, dict[Node, Box]] = WeakKeyDictionary()


def _halves(box: Box) -> tuple[Box, Box] | None:
    """Return the two tensors whose rows a matrix concatenates, such as packed gradients of gate and up.

    Return None for other matrices. To read both as one matrix, another kernel would first have to write it to memory.
    """
    from torch._inductor import ir

    rows, columns = box.get_size()
    storage: Any = box.data.unwrap_view() if isinstance(box.data, ir.ReinterpretView) else box.data
    joined: Any = storage.data if isinstance(storage, ir.StorageBox) else None
    parts: Sequence[Any] = joined.inputs if isinstance(joined, ir.ConcatKernel) else ()
    if len(parts) != 2 or box.get_layout().offset != 0 or list(box.get_stride()) != [columns, 1]:
        return None
    sizes = [part.get_size() for part in parts]
    if sizes[0] != sizes[1] or list(joined.get_size()) != [*sizes[0][:-1], columns]:
        return None
    view = lowerings[aten.view.default]
    first, second = (view(ir.TensorBox(ir.StorageBox(part)), [rows, sizes[0][-1]]) for part in parts)
    return first, second


def _quantize(input: Box, rows: int, columns: int = BLOCK) -> Any:
    if programs.is_on_gpu(input) and (rows != 1 or _is_transposed()):
        return _by_kernel["quantize"](input, rows, columns)
    halves = _halves(input) if rows == 1 and columns == input.get_size()[1] else None
    if halves is not None:
        first, second, scales = _inlined(float8.quantize_halves, *halves)
        return operators.pack(first, second, "halves"), scales
    return _inlined(float8.quantize, input, rows, columns)


def _quantize_by(input: Box, scales: Box) -> Box:
    if programs.is_on_gpu(input) and _is_transposed():
        return _by_kernel["quantize_by"](input, scales)
    return _inlined(float8.quantize_by, input, scales)


def _dequantize(values: Box, scales: Box, rows: int, dtype: torch.dtype) -> Box:
    return _inlined(float8.dequantize, values, scales, rows, dtype)


def _requantize(values: Box, scales: Box) -> Any:
    by_kernel = programs.is_on_gpu(values)
    return _by_kernel["requantize"](values, scales) if by_kernel else _inlined(float8.requantize, values, scales)


def _tiled(scales: Box, node: Node) -> Box:
    """Return scales in the tensor cores' layout. A generated quantization writes them directly."""
    from torch._inductor.virtualized import V

    known = _tiles.setdefault(V.graph, {})
    if node not in known:
        known[node] = _inlined(float8.tiled, scales)
    return known[node]


def _scaled_mm(a: Box, a_scales: Box, b: Box, b_scales: Box, bias: Box | None, rows: int, dtype: torch.dtype) -> Box:
    from torch._inductor.virtualized import V

    args = a, a_scales, b, b_scales, bias, rows, dtype
    if not programs.is_on_gpu(a):
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
register_lowering(fused.requantize.default, type_promotion_kind=None)(_requantize)
register_lowering(fused.scaled_mm.default, type_promotion_kind=None)(_scaled_mm)

for _op in (
    fused.quantize_both.default,
    fused.scaled_grouped_mm.default,
    fused.scaled_mm_tiled.default,
    *QUANTIZED.values(),
):
    make_fallback(_op, warn=False)


# ---- backward graphs -------------------------------------------------------------------------------------------------

BACKWARD: dict[Any, PointwiseOperator] = {op.backward.overload: op for op in QUANTIZED}
TRANSPOSED = {aten.t.default, aten.permute.default, aten.transpose.int}  # calls on matrices


def merged(graphs: Graphs) -> Graphs:
    """Merge quantizations of the same tensor into one pass. Return the same graphs if backward has no ``scaled_mm``.

    In backward, also avoid rounding twice. On GPUs, quantizations along rows and along columns become one call. On
    CPUs, Inductor's code for separate calls is as fast as for one call.
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
    """Return True if the first tensor in a node's value is on a GPU."""
    tensors = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return bool(tensors) and tensors[0].device.type != "cpu"


def _round_once(graph: Graph) -> None:
    """If a graph recomputes a linear layer's input, quantize this input instead of its quantized copy.

    A linear layer's quantized input is saved, or recomputed from the exact input. If it is recomputed, quantizing the
    exact input gives the same numbers as quantizing the copy, except for the smallest numbers.
    """
    for node in graph.find_nodes(op="call_function", target=fused.requantize.default):
        values, scales = (a.meta["val"] for a in node.all_input_nodes)
        columns, producer = float8.columns_of(values, scales, 1), node.args[0]
        if producer.target is operator.getitem and _is_quantize(producer.args[0], 1, columns):
            with graph.inserting_before(node):
                transpose = insert_call(graph, aten.permute.default, producer.args[0].args[0], [1, 0])
                block = float8.block_of_columns(columns)
                node.replace_all_uses_with(insert_call(graph, fused.quantize.default, transpose, *block))


class _Uses(NamedTuple):
    """Readers of matrices: quantizations along their rows and along their columns, sums of columns, and others."""

    rows: list[Node]
    columns: list[Node]
    sums: list[Node]
    other_readers: list[Node]


def _uses(matrices: Iterable[Node], rows_of_columns: int, columns: int) -> _Uses:
    """Sort readers of matrices and their transposes, whose blocks are (1, columns) and (rows_of_columns, columns)."""
    uses = _Uses([], [], [], [])
    for user in itertools.chain.from_iterable(matrix.users for matrix in matrices):
        of_transposed = list(user.users) if user.target in TRANSPOSED else []
        if _is_quantize(user, 1, columns):
            uses.rows.append(user)
        elif of_transposed and all(_is_quantize(u, rows_of_columns, columns) for u in of_transposed):
            uses.columns.extend(of_transposed)
        elif user.target is aten.sum.dim_IntList and user.args[1] == [0]:
            uses.sums.append(user)
        else:
            uses.other_readers.append(user)
    return uses


def _is_quantize(node: Node, rows: Any, columns: int = BLOCK) -> bool:
    """Return True if a node quantizes in blocks of (rows, columns)."""
    return node.target is fused.quantize.default and (*node.args[1:], BLOCK)[:2] == (rows, columns)


def _replace_pair(old: Sequence[Node], values: Node, scales: Node) -> None:
    """Redirect users of ``quantize`` calls to these values and scales."""
    for node in old:
        for item in list(node.users):
            item.replace_all_uses_with(scales if item.args[1] else values)
            values.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack"))


def _results(graph: Graph, node: Node) -> list[Node]:
    return [insert_call(graph, operator.getitem, node, i) for i in range(len(node.meta["val"]))]


def _merge(graph: Graph, node: Node) -> None:
    """Merge a matrix's two quantizations into one pass.

    For blocks of 32, Inductor's own quantization along rows also writes scales in the GEMMs' layout. It stays, unless
    the columns are also summed. Inductor would then quantize in a separate kernel.
    """
    if not isinstance(node.meta["val"], torch.Tensor) or node.meta["val"].ndim != 2:
        return
    for width in (BLOCK, MX_BLOCK):
        uses = _uses([node], 1, width)
        if not (uses.rows and uses.columns) or (width == MX_BLOCK and not uses.sums):
            continue
        with graph.inserting_after(node):
            quantized = insert_call(graph, fused.quantize_both.default, node, width)
        with graph.inserting_after(quantized):
            parts = _results(graph, quantized)
        _replace_pair(uses.rows, *parts[:2])
        _replace_pair(uses.columns, *parts[2:])


def _matrices(node: Node) -> list[Node]:
    """Return a tensor's two-axis views with the same last axis. A tensor with two axes is its own view."""
    shape = node.meta["val"].shape
    matrices = [node] if len(shape) == 2 else []
    for user in node.users:
        if user.target in VIEWS and user.meta["val"].ndim == 2 and user.meta["val"].shape[-1] == shape[-1]:
            matrices.append(user)
    return matrices


def _merge_gradients(graph: Graph, node: Node) -> None:
    """Quantize an activation's gradients and result in one call, if only quantizations and sums read the gradients."""
    op = BACKWARD.get(node.target)
    if op is None:
        return
    call_args: Any = node.args
    grad, *args, _ = call_args
    tensors, layout, _ = op.split(tuple(args))
    data = tensors[: op.num_data]
    if layout == "interleaved" or any(other is not None for other in tensors[op.num_data :]):
        return
    if "activation" in op.scalars and args[len(tensors)] not in ACTIVATIONS:
        return
    items = {user.args[1]: user for user in node.users}
    is_mx = any(_uses(_matrices(item), 1, MX_BLOCK).columns for item in items.values())
    width, rows_of_columns = (MX_BLOCK, 1) if is_mx else (BLOCK, BLOCK)
    *rows, columns = shape = grad.meta["val"].shape
    in_tiles = all(isinstance(n, int) for n in shape) and math.prod(rows) % BLOCK == 0 and columns % BLOCK == 0
    if is_mx and not in_tiles:  # the kernel for MX blocks supports only whole tiles
        return
    of_gradients = []
    for i in range(op.num_data):
        matrices = _matrices(items[i]) if i in items else []
        uses = _uses(matrices, 1, width)
        if not (uses.rows and uses.columns):
            return
        item_readers = items[i].users if items[i] not in matrices else ()
        if any(reader not in matrices for reader in (*uses.other_readers, *item_readers)):
            return
        of_gradients.append(uses)
    results = [
        n
        for n in graph.find_nodes(op="call_function", target=op.forward.overload)
        if list(op.with_defaults(n.args)) == list(op.with_defaults(tuple(args)))
    ]
    of_results = [_uses(_matrices(result), rows_of_columns, width).columns for result in results]
    with graph.inserting_before(node):
        flat = [insert_call(graph, aten.reshape.default, t, [-1, t.meta["val"].shape[-1]]) for t in (grad, *data)]
        fused_call = insert_call(graph, QUANTIZED[op], *flat, *args[len(tensors) :], width)
        fused_call.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        parts = _results(graph, fused_call)
    for i, uses in enumerate(of_gradients):
        values, scales, values_t, scales_t, tiles = parts[RESULTS * i : RESULTS * (i + 1)]
        _replace_pair(uses.rows, values, scales)
        _replace_pair(uses.columns, values_t, scales_t)
        for total in uses.sums:
            with graph.inserting_before(total):
                summed = insert_call(graph, aten.sum.dim_IntList, tiles, *total.args[1:])
                summed = insert_call(graph, prims.convert_element_type.default, summed, total.meta["val"].dtype)
            total.replace_all_uses_with(summed)
    _replace_pair(list(itertools.chain(*of_results)), *parts[-2:])
