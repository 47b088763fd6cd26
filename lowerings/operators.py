"""Fused operators → Inductor IR: the formulas' element functions, traced once, replayed inside ``Pointwise`` nodes.

Generated code never calls a fused operator. Its arithmetic comes from ``formulas.py``: the element function is traced
to aten on scalars, each aten node goes through Inductor's own lowering, and the resulting ``ops`` calls form a flat
:class:`Program`. A lowering combines this program with a loader for each argument. The resulting node fuses
with its neighbors like any pointwise node, and computes each step of the formula once, even if several steps read it.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings, register_lowering, to_dtype
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import OpsValue, V, ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.functions import FloorDiv

from torch_fused_ops import activations
from torch_fused_ops.declaration import DATA, PointwiseOperator, pointwise_operators
from torch_fused_ops.lowerings import compat, cpp_vectors
from torch_fused_ops.lowerings.partition import VIEWS

Box = Any  # ir.TensorBox
Index = Sequence[Any]
Value = Any  # a result of V.ops
Load = Callable[[Index], Value]

aten = torch.ops.aten

ROWS_PER_BLOCK_KEY = "fused_rows_of_a_block"  # key of a node's meta: rows per block of its loops (split_reductions.py)
# For calls on a CPU with a bias gradient. SiLU, relu2 and SwiGLU, 1024², take 0.6 to 1.0 times the time without
# fusion; with 2 rows 0.85 to 1.3 times, with 8 rows 0.9 to 1.4 times.
_CPU_ROWS_PER_BLOCK = 4

# ---- programs: element functions as Inductor ops -------------------------------------------------------------------


class _ValueId(int):
    """The number of a value in an element function: an argument or a step's result."""


class _Step(NamedTuple):
    value_id: _ValueId
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def read(self) -> list[_ValueId]:
        return [a for a in (*self.args, *self.kwargs.values()) if isinstance(a, _ValueId)]


class Program(NamedTuple):
    """One result of a traced element function: ``program(loads, index)``, one ``ops`` call for each step.

    It contains only the arguments and steps that its result depends on. If a loop lists an input it does not read,
    Inductor cannot reuse that input's buffer. (One of SwiGLU's two gradients reuses the buffer of ``up``, which the
    other gradient does not read.)
    """

    arguments: tuple[int, ...]
    steps: tuple[_Step, ...]
    result: _ValueId

    @classmethod
    def of(cls, result: _ValueId, steps: Sequence[_Step]) -> Program:
        needed, needed_steps = {result}, []
        for step in reversed(steps):
            if step.value_id in needed:
                needed.update(step.read())
                needed_steps.append(step)
        return cls(
            tuple(sorted(needed - {step.value_id for step in needed_steps})), tuple(reversed(needed_steps)), result
        )

    def __call__(self, loads: Sequence[Load], index: Index) -> Value:
        env = {value_id: loads[value_id](index) for value_id in self.arguments}

        def read(a: Any) -> Any:
            return env[a] if isinstance(a, _ValueId) else a

        for step in self.steps:
            function = getattr(ops, step.name)
            env[step.value_id] = function(*map(read, step.args), **{k: read(v) for k, v in step.kwargs.items()})
        return env[self.result]


class _Recorder(DefaultHandler):
    def __init__(self, arguments: int) -> None:
        self.arguments = arguments
        self.steps: list[_Step] = []

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _ValueId:
        value_id = _ValueId(self.arguments + len(self.steps))
        self.steps.append(_Step(value_id, name, args, kwargs))
        return value_id


class _Lower(torch.fx.Interpreter):
    """Run a traced element function through Inductor's lowerings. Every value is a scalar, evaluated immediately."""

    def __init__(self, gm: torch.fx.GraphModule, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.device, self.dtype = device, dtype

    def scalar(self, value: _ValueId, dtype: torch.dtype) -> Box:
        return ir.TensorBox.create(
            ir.Pointwise(device=self.device, dtype=dtype, inner_fn=lambda _: OpsValue(value), ranges=[])
        )

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Box:
        box = lowerings[target](*args, **kwargs) if target in lowerings else None
        if not isinstance(box, ir.TensorBox) or not isinstance(_data(box), ir.Pointwise):
            raise NotImplementedError(
                f"{target} has no pointwise Inductor lowering: it cannot be part of an activation"
            )
        return self.scalar(_evaluate(box), box.get_dtype())


def _data(box: Box) -> Any:
    data = box
    while isinstance(data, (ir.TensorBox, ir.StorageBox)):
        data = data.data
    return data


def _evaluate(box: Box) -> _ValueId:
    value_id: _ValueId = box.make_loader()([]).value
    return value_id


@functools.lru_cache(maxsize=1024)  # bounded because users' scalars are among the keys
def _programs(
    element: Callable[..., Any],
    present: tuple[bool | torch.dtype, ...],
    scalars: tuple[Any, ...],
    dtype: torch.dtype,
    device_type: str,
) -> tuple[Program, ...]:
    """Return a program for each result of ``element``.

    Args:
        element: an element function. It is called with a scalar or None for each tensor, and then with ``scalars``.
        present: for each tensor its dtype. True means ``dtype``, and False means that the tensor is None.
        scalars: the arguments of ``element`` after the tensors.
        dtype: the dtype to compute in.
        device_type: "cpu", "cuda", …
    """
    device, dtypes = torch.device(device_type), [dtype if g is True else g for g in present if g]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        result = element(*(next(remaining) if g else None for g in present), *scalars)
        return result if isinstance(result, tuple) else (result,)

    # The surrounding compilation, with its modes and autocast, must not influence this trace.
    with _disable_current_modes(), disable_proxy_modes_tracing(), torch.no_grad(), FakeTensorMode():
        examples = [torch.empty((), dtype=d, device=device) for d in dtypes]
        gm = make_fx(call, decomposition_table=select_decomp_table())(*examples)
    gm.graph.eliminate_dead_code()
    recorder = _Recorder(len(dtypes))
    with V.set_ops_handler(recorder):
        lower = _Lower(gm, device, dtype)
        boxes = lower.run(*(lower.scalar(_ValueId(i), d) for i, d in enumerate(dtypes)))
        results = [_evaluate(b) for b in boxes]
    floating = all(d.is_floating_point for d in dtypes) and not any(s.name == "to_dtype" for s in recorder.steps)
    steps = recorder.steps
    if device_type == "cpu" and floating:
        steps = _fused_multiply_adds(steps, results)
        steps = _vectorized(steps) if dtype == torch.float32 else steps
    return tuple(Program.of(result, steps) for result in results)


def _fused_multiply_adds(steps: Sequence[_Step], results: Sequence[_ValueId]) -> list[_Step]:
    """Replace a·b + c of floats by one ``fma``. Inductor's flags forbid the C++ compiler to combine both operations."""
    uses = Counter([*results, *(value_id for step in steps for value_id in step.read())])
    products = {step.value_id: step.args for step in steps if step.name == "mul" and uses[step.value_id] == 1}

    def fused(step: _Step) -> _Step:
        for a, c in (step.args, step.args[::-1]) if step.name == "add" else ():
            if isinstance(a, _ValueId) and a in products:
                return _Step(step.value_id, "fma", (*products[a], c), {})
        return step

    return list(map(fused, steps))


def _vectorized(steps: list[_Step]) -> list[_Step]:
    """Replace exp2 and clamping by a number with the faster operations of ``cpp_vectors``."""
    cpp_vectors.install()
    numbers = {step.value_id for step in steps if step.name == "constant"}

    def replaced(step: _Step) -> _Step:
        if step.name == "exp2" or (step.name in ("maximum", "minimum") and step.args[1] in numbers):
            return step._replace(name="inline_asm_elementwise", kwargs=cpp_vectors.keywords(step.name))
        return step

    return list(map(replaced, steps))


activations._on_change.append(_programs.cache_clear)  # an activation's name among the scalars may mean a new function


# ---- boxes -----------------------------------------------------------------------------------------------------------


class _Elementwise:
    """Loaders and ranges for element functions of the same arguments. ``node`` creates pointwise nodes from them.

    ``masks`` hold booleans or bytes. They come after the other arguments and are not converted.
    """

    def __init__(
        self,
        ranges: Sequence[Any],
        *loads: tuple[Box | None, Callable[[Index], Index]],
        masks: Sequence[Box | None] = (),
    ) -> None:
        self.ranges = list(ranges)
        boxes = [b for b, _ in loads]
        double = any(b is not None and b.get_dtype() == torch.float64 for b in boxes)
        self.dtype = torch.float64 if double else torch.float32
        self.device = next(b for b in boxes if b is not None).get_device()
        self.present: tuple[bool | torch.dtype, ...] = (
            *(b is not None for b in boxes),
            *(False if mask is None else mask.get_dtype() for mask in masks),
        )
        self.loads: list[Load] = [_widening_load(b, to_index, self.dtype) for b, to_index in loads if b is not None]
        self.loads += [mask.make_loader() for mask in masks if mask is not None]

    def node(
        self, element: Callable[..., Any], *scalars: Any, dtype: torch.dtype | None = None, result: int = 0
    ) -> Box:
        """Return a Pointwise for result number ``result``, in ``dtype``, by default the dtype it computes in."""
        program = _programs(element, self.present, scalars, self.dtype, self.device.type)[result]
        target = dtype or self.dtype

        def inner(index: Index) -> Value:
            value = program(self.loads, index)
            return value if target == self.dtype else ops.to_dtype(value, target)

        return ir.Pointwise.create(device=self.device, dtype=target, inner_fn=inner, ranges=self.ranges)


def _widening_load(box: Box, to_index: Callable[[Index], Index], dtype: torch.dtype) -> Load:
    load, box_dtype = box.make_loader(), box.get_dtype()
    if box_dtype == dtype:
        return lambda index: load(to_index(index))
    return lambda index: ops.to_dtype(load(to_index(index)), dtype)


def is_on_gpu(box: Box) -> bool:
    """Return True if a box is not on the CPU."""
    return bool(box.get_device().type != "cpu")


def _element_index(index: Index) -> Index:
    return index


def _column(index: Index) -> Index:
    return index[-1:]


def _row(index: Index) -> Index:
    return index[:-1]


def _packed(layout: str, n: Any, up: int) -> Callable[[Index], Index]:
    if layout == "interleaved":
        return lambda index: [*index[:-1], 2 * index[-1] + up]
    half = 1 - up if layout == "swapped" else up
    return lambda index: [*index[:-1], index[-1] + half * n]


def pack(gate: Box, up: Box, layout: str) -> Box:
    """Concatenate two (…, n) boxes to (…, 2n), in memory: a masked pointwise node would compute each half twice."""
    size = list(gate.get_size())
    with compat.concat_node():
        if layout != "interleaved":
            halves = [up, gate] if layout == "swapped" else [gate, up]
            return ir.TensorBox(ir.ConcatKernel.create(halves, len(size) - 1))
        pair = [lowerings[aten.unsqueeze.default](b, -1) for b in (gate, up)]
        stacked = ir.TensorBox(ir.ConcatKernel.create(pair, len(size)))
    return lowerings[aten.view.default](stacked, [*size[:-1], 2 * size[-1]])


def _before_sums(requested: Sequence[bool], *boxes: Box | None) -> None:
    """Realize results before the sums over them, if any sum is requested.

    A sum's cast to its dtype ends the loop over the summed values. Later results would need their own loop, which
    reads all inputs again (SiLU with a bias gradient: 748 instructions in the kernel's text, 462 with one loop).
    """
    for box in boxes:
        if any(requested) and box is not None:
            box.realize()


def _rows_of_a_block() -> int | None:
    """Return the rows per block of the current node; None if its loops do not go over blocks."""
    rows: int | None = V.graph.current_node.meta.get(ROWS_PER_BLOCK_KEY)
    return rows


def rows_in_blocks(box: Box) -> Box:
    """View a box (…, n) as (blocks, rows per block, n) if the current node's loops go over blocks."""
    block, (*rows, n) = _rows_of_a_block(), box.get_size()
    return box if block is None else lowerings[aten.view.default](box, [FloorDiv(sympy_product(rows), block), block, n])


def _leaves_blocks(node: torch.fx.Node) -> bool:
    """Return True if a node without blocks reads a result of this node, which has blocks."""
    through = (*VIEWS, operator.getitem)
    return any(
        _leaves_blocks(user) if user.target in through else ROWS_PER_BLOCK_KEY not in user.meta for user in node.users
    )


def _sum_rows(box: Box, dtype: torch.dtype) -> Box:
    if _rows_of_a_block() is not None:
        box = lowerings[aten.sum.dim_IntList](box, [1])
        box.realize()  # otherwise the next sum would inline this sum of a few rows, which has no loop
    axes = list(range(len(box.get_size()) - 1))
    return to_dtype(lowerings[aten.sum.dim_IntList](box, axes) if axes else box, dtype)


def _is_row_by_row(box: Box, layout: str | None) -> bool:
    # In the interleaved layout, gate and up of a row are not contiguous.
    return _rows_of_a_block() is not None and not is_on_gpu(box) and layout != "interleaved"


def _row_by_row(*boxes: Box, sums: bool = False) -> Box:
    """Concatenate boxes of (blocks, rows, n) along n, or sum along n, with a loop over (blocks, n) for each row.

    The sum of a block's few rows has the same loops, so Inductor fuses all of them and computes each value once.
    """
    blocks, count, n = boxes[0].get_size()
    rows = [lowerings[aten.select.int](box, 1, row) for row in range(count) for box in boxes]
    rows = [lowerings[aten.sum.dim_IntList](row, [1]) for row in rows] if sums else rows
    with compat.concat_node():
        written = ir.ConcatKernel.create([lowerings[aten.unsqueeze.default](row, 1) for row in rows], 1)
    return lowerings[aten.view.default](ir.TensorBox(written), [blocks, count, 1 if sums else len(boxes) * n])


# ---- the lowerings of a declared operator ----------------------------------------------------------------------------


class _Elements(NamedTuple):
    """A declared operator's formula on scalars, in the order in which its tensors are loaded (``_loads``)."""

    value: Callable[..., Tensor]
    grads: Callable[..., tuple[Tensor, ...]]
    scale_grad: Callable[..., Tensor]


@functools.cache  # the programs' cache has these functions as keys
def _elements(op: PointwiseOperator) -> _Elements:
    data = 2 if op.is_packed else op.num_data
    biases = 0 if op.bias_index is None else data if op.is_packed else 1
    count = data + biases

    def biased(values: Sequence[Any]) -> list[Any]:
        x = list(values[:data])
        for i, bias in enumerate(values[data:count]):
            x[i] = x[i] if bias is None else x[i] + bias
        return x

    def value(*values: Any) -> Tensor:
        return op.value(*biased(values), *values[count:])

    def grads(grad: Tensor, *values: Any) -> tuple[Tensor, ...]:
        return op.grads(grad, *biased(values), *values[count:])

    def scale_grad(grad: Tensor, *values: Any) -> Tensor:
        return grad * op.value(*biased(values), None, *values[count + 1 :])

    return _Elements(value, grads, scale_grad)


def _loads(
    op: PointwiseOperator, tensors: Sequence[Any], layout: str | None
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Return the ranges (…, n) and the loads: data, biases, scale. Packed data and biases have two loads each."""
    *rows, n = tensors[0].get_size()
    to_index: list[Callable[[Index], Index]] = [_element_index]
    data: list[tuple[Any, Callable[[Index], Index]]] = [(t, _element_index) for t in tensors[: op.num_data]]
    if layout is not None:
        n = V.graph.sizevars.simplify(FloorDiv(n, 2))
        to_index = [_packed(layout, n, up) for up in (0, 1)]
        data = [(tensors[0], a) for a in to_index]
    biases = []
    if op.bias_index is not None:
        biases = [(tensors[op.bias_index], lambda index, a=a: _column(a(index))) for a in to_index]
    scales = [] if op.scale_index is None else [(tensors[op.scale_index], _row)]
    return [*rows, n], [*data, *biases, *scales]


def over_blocks(lowering: Callable[..., Any], arguments: Sequence[str], results: Sequence[str]) -> Callable[..., Any]:
    """Wrap a lowering to split the rows of arguments and results into blocks if its node has ``ROWS_PER_BLOCK_KEY``.

    ``arguments`` and ``results`` are the kinds of the tensors.
    """

    def viewed(box: Any, kind: str, rows: Sequence[Any]) -> Any:
        if not isinstance(box, ir.TensorBox) or kind not in (*DATA, "per_row"):
            return box
        return lowerings[aten.view.default](box, [*rows, *([] if kind == "per_row" else box.get_size()[-1:])])

    def in_blocks(*args: Any, **keywords: Any) -> Any:
        block = _rows_of_a_block()
        if block is None:
            return lowering(*args, **keywords)
        rows, kinds = args[0].get_size()[:-1], [*arguments, *("" for _ in args)]
        blocks = [FloorDiv(sympy_product(rows), block), block]
        lowered = lowering(*(viewed(a, kind, blocks) for a, kind in zip(args, kinds, strict=False)), **keywords)
        boxes = lowered if isinstance(lowered, tuple) else (lowered,)
        for box in filter(None, boxes) if _leaves_blocks(V.graph.current_node) else ():
            box.realize()  # a GEMM would copy nested views of an unrealized box
        views = tuple(viewed(box, kind, rows) for box, kind in zip(boxes, results, strict=True))
        return views if isinstance(lowered, tuple) else views[0]

    return in_blocks


def _over_few_rows(op: PointwiseOperator, data: int, in_blocks: Callable[..., Any]) -> Callable[..., Any]:
    """On a CPU, split the rows into small blocks if a backward call on the same data computes a bias gradient."""

    def run(first: Box, *args: Any) -> Any:
        node, bias = cast(Any, (V.graph.current_node, op.bias_index))
        users = [] if bias is None or is_on_gpu(first) or node.kwargs else node.args[data].users
        calls = [user.args for user in users if user.target is op.signatures[1].overload and not user.kwargs]
        summed = any(call_args[1 + bias] is not None and call_args[-1][bias] for call_args in calls)
        if summed and V.graph.sizevars.statically_known_multiple_of(
            sympy_product(first.get_size()[:-1]), _CPU_ROWS_PER_BLOCK
        ):
            node.meta[ROWS_PER_BLOCK_KEY] = _CPU_ROWS_PER_BLOCK
        return in_blocks(first, *args)

    return run


def _forward(op: PointwiseOperator) -> Callable[..., Box]:
    def lowering(*args: Any) -> Box:
        tensors, layout, scalars = op.split(args)
        ranges, loads = _loads(op, tensors, layout)
        value = _Elementwise(ranges, *loads).node(_elements(op).value, *scalars, dtype=tensors[0].get_dtype())
        return _row_by_row(value) if _is_row_by_row(value, layout) else value

    return _over_few_rows(op, 0, over_blocks(lowering, op.kinds, ["data"]))


def _backward(op: PointwiseOperator) -> Callable[..., tuple[Box | None, ...]]:
    def lowering(grad: Box, *args: Any) -> tuple[Box | None, ...]:
        tensors, layout, scalars = op.split(args[:-1])
        mask, elements = args[-1], _elements(op)
        ranges, loads = _loads(op, tensors, layout)
        e = _Elementwise(ranges, (grad, _element_index), *loads)

        bias = tensors[op.bias_index] if op.bias_index is not None and mask[op.bias_index] else None
        sums_on_cpu = bias is not None and not is_on_gpu(grad)
        row_by_row = _is_row_by_row(grad, layout)
        realized: list[Box] = []

        def unrounded(i: int) -> list[Box]:
            results = [i] if layout is None else [0, 1]
            return realized or [e.node(elements.grads, *scalars, result=result) for result in results]

        def joined(boxes: Sequence[Box]) -> Box:
            return boxes[0] if layout is None else pack(boxes[0], boxes[1], layout)

        if sums_on_cpu and not row_by_row:
            realized = unrounded(0)
            for box in realized:
                box.realize()  # sums over rows have their own loop, which would recompute the box
        d_tensors: list[Box | None] = [None] * len(tensors)
        for i, t in enumerate(tensors[: op.num_data]):
            if mask[i]:
                grads = [to_dtype(box, t.get_dtype()) for box in unrounded(i)]
                d_tensors[i] = _row_by_row(*grads[:: -1 if layout == "swapped" else 1]) if row_by_row else joined(grads)
        if layout is None:
            _before_sums(mask[op.num_data :], *d_tensors[: op.num_data])
        if op.bias_index is not None and bias is not None:
            d_tensors[op.bias_index] = joined([_sum_rows(box, bias.get_dtype()) for box in unrounded(0)])
        if op.scale_index is not None and mask[op.scale_index] and (scale := tensors[op.scale_index]) is not None:
            terms = e.node(elements.scale_grad, *scalars)
            sums = _row_by_row(terms, sums=True) if row_by_row else lowerings[aten.sum.dim_IntList](terms, [-1])
            d_tensors[op.scale_index] = to_dtype(sums, scale.get_dtype())
        return tuple(d_tensors)

    return _over_few_rows(op, 1, over_blocks(lowering, ["data", *op.kinds], op.kinds))


def register_lowerings(op: PointwiseOperator) -> None:
    """Register the lowerings of a declared operator and of its backward operator."""
    for signature, make in zip(op.signatures, (_forward, _backward), strict=True):
        # type_promotion_kind=None: the arguments' dtypes differ by design, and promotion would load wider values.
        register_lowering(signature.overload, type_promotion_kind=None)(make(op))


for _operator in pointwise_operators():
    register_lowerings(_operator)
register_lowering(torch.ops.fused.with_saved.default, type_promotion_kind=None)(lambda result, saved: result)
