"""Fused operators → Inductor IR: the formulas' element functions, traced once, replayed inside ``Pointwise`` nodes.

An operator never reaches generated code as a call. Its arithmetic is the text of ``formulas.py``: the element
function is traced to aten on scalars, each aten node goes through Inductor's own lowering, and the ``ops`` calls that
come out are kept as a flat :class:`Program`. A lowering is then a loader for each argument around that program, so it
fuses with its neighbors as any pointwise node does, and the formula costs each of its steps once however often a
value is used.
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
from torch_fused_ops.declaration import DATA, PointwiseOperator, elementwise
from torch_fused_ops.lowerings import compat
from torch_fused_ops.lowerings.partition import VIEWS

Box = Any  # ir.TensorBox
Index = Sequence[Any]
Value = Any  # what V.ops returns
Load = Callable[[Index], Value]

aten = torch.ops.aten

ROWS = "fused_rows_of_a_block"  # in a node's meta: the rows of the blocks that its loops go over (split_reductions.py)
# On a CPU, where a bias's gradient is wanted. SiLU, relu2 and SwiGLU, 1024², take 0.6 to 1.0 of plain's time, with 2
# rows 0.85 to 1.3, with 8 0.9 to 1.4.
_FEW_ROWS = 4

# ---- programs: element functions as Inductor ops -------------------------------------------------------------------


class _Slot(int):
    """The number of a value of an element function: of an argument, or of a step's result."""


class _Step(NamedTuple):
    slot: _Slot
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def read(self) -> list[_Slot]:
        return [a for a in (*self.args, *self.kwargs.values()) if isinstance(a, _Slot)]


class Program(NamedTuple):
    """One result of a traced element function: ``program(loads, index)``, one ``ops`` call for each step.

    It has the arguments and the steps that its result is made of, and no others: a loop that is said to read what its
    code does not need keeps Inductor from writing another result over that (of SwiGLU's two gradients one takes the
    place of ``up``, which the other does not read).
    """

    arguments: tuple[int, ...]
    steps: tuple[_Step, ...]
    result: _Slot

    @classmethod
    def of(cls, result: _Slot, steps: Sequence[_Step]) -> Program:
        needed, kept = {result}, []
        for step in reversed(steps):
            if step.slot in needed:
                needed.update(step.read())
                kept.append(step)
        return cls(tuple(sorted(needed - {step.slot for step in kept})), tuple(reversed(kept)), result)

    def __call__(self, loads: Sequence[Load], index: Index) -> Value:
        env = {slot: loads[slot](index) for slot in self.arguments}

        def read(a: Any) -> Any:
            return env[a] if isinstance(a, _Slot) else a

        for step in self.steps:
            function = getattr(ops, step.name)
            env[step.slot] = function(*map(read, step.args), **{k: read(v) for k, v in step.kwargs.items()})
        return env[self.result]


class _Recorder(DefaultHandler):
    def __init__(self, arguments: int) -> None:
        self.arguments = arguments
        self.steps: list[_Step] = []

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Slot:
        slot = _Slot(self.arguments + len(self.steps))
        self.steps.append(_Step(slot, name, args, kwargs))
        return slot


class _Lower(torch.fx.Interpreter):
    """Runs a traced element function through Inductor's lowerings, every value a scalar evaluated at once."""

    def __init__(self, gm: torch.fx.GraphModule, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.device, self.dtype = device, dtype

    def scalar(self, value: _Slot, dtype: torch.dtype) -> Box:
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


def _evaluate(box: Box) -> _Slot:
    slot: _Slot = box.make_loader()([]).value
    return slot


@functools.lru_cache(maxsize=1024)  # bounded, as users' scalars are among the keys
def _programs(
    element: Callable[..., Any],
    given: tuple[bool | torch.dtype, ...],
    scalars: tuple[Any, ...],
    dtype: torch.dtype,
    device_type: str,
) -> tuple[Program, ...]:
    """Its results, for ``element`` called with a scalar where ``given`` says so, None elsewhere, and then ``scalars``.

    The scalars are of ``dtype`` but where ``given`` names another.
    """
    device, dtypes = torch.device(device_type), [dtype if g is True else g for g in given if g]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        result = element(*(next(rest) if g else None for g in given), *scalars)
        return result if isinstance(result, tuple) else (result,)

    # Nothing of the compilation around us may see or shape this trace: not its modes, not its autocast.
    with _disable_current_modes(), disable_proxy_modes_tracing(), torch.no_grad(), FakeTensorMode():
        examples = [torch.empty((), dtype=d, device=device) for d in dtypes]
        gm = make_fx(call, decomposition_table=select_decomp_table())(*examples)
    gm.graph.eliminate_dead_code()
    recorder = _Recorder(len(dtypes))
    with V.set_ops_handler(recorder):
        lower = _Lower(gm, device, dtype)
        boxes = lower.run(*(lower.scalar(_Slot(i), d) for i, d in enumerate(dtypes)))
        results = [_evaluate(b) for b in boxes]
    floating = all(d.is_floating_point for d in dtypes) and not any(s.name == "to_dtype" for s in recorder.steps)
    steps = recorder.steps
    if device_type == "cpu" and floating:
        steps = _fused_multiply_adds(steps, results)
    return tuple(Program.of(result, steps) for result in results)


def _fused_multiply_adds(steps: Sequence[_Step], results: Sequence[_Slot]) -> list[_Step]:
    """a·b + c in one instruction, of floats: Inductor forbids the C++ compiler to see that by itself."""
    uses = Counter([*results, *(slot for step in steps for slot in step.read())])
    products = {step.slot: step.args for step in steps if step.name == "mul" and uses[step.slot] == 1}

    def fused(step: _Step) -> _Step:
        for a, c in (step.args, step.args[::-1]) if step.name == "add" else ():
            if isinstance(a, _Slot) and a in products:
                return _Step(step.slot, "fma", (*products[a], c), {})
        return step

    return list(map(fused, steps))


activations._on_change.append(_programs.cache_clear)  # a name among the scalars may stand for another function


# ---- boxes -----------------------------------------------------------------------------------------------------------


class _Elementwise:
    """One element function over given arguments, ready to become nodes: the loaders, the ranges and the program.

    ``masks``: of booleans or bytes, which come after the other arguments and stay as they are.
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
        self.given: tuple[bool | torch.dtype, ...] = (
            *(b is not None for b in boxes),
            *(False if mask is None else mask.get_dtype() for mask in masks),
        )
        self.loads: list[Load] = [_widening_load(b, at, self.dtype) for b, at in loads if b is not None]
        self.loads += [mask.make_loader() for mask in masks if mask is not None]

    def node(
        self, element: Callable[..., Any], *scalars: Any, dtype: torch.dtype | None = None, result: int = 0
    ) -> Box:
        """A Pointwise of result number ``result``, rounded to ``dtype`` (by default left in the computing dtype)."""
        program = _programs(element, self.given, scalars, self.dtype, self.device.type)[result]
        target = dtype or self.dtype

        def inner(index: Index) -> Value:
            value = program(self.loads, index)
            return value if target == self.dtype else ops.to_dtype(value, target)

        return ir.Pointwise.create(device=self.device, dtype=target, inner_fn=inner, ranges=self.ranges)


def _widening_load(box: Box, at: Callable[[Index], Index], dtype: torch.dtype) -> Load:
    load, own = box.make_loader(), box.get_dtype()
    if own == dtype:
        return lambda index: load(at(index))
    return lambda index: ops.to_dtype(load(at(index)), dtype)


def is_on_gpu(box: Box) -> bool:
    """True if a box is not on the CPU."""
    return bool(box.get_device().type != "cpu")


def _here(index: Index) -> Index:
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
    """(…, n) twice → (…, 2n). Concatenated storage, not a masked pointwise: that would compute each half twice."""
    size = list(gate.get_size())
    with compat.concat_node():
        if layout != "interleaved":
            halves = [up, gate] if layout == "swapped" else [gate, up]
            return ir.TensorBox(ir.ConcatKernel.create(halves, len(size) - 1))
        pair = [lowerings[aten.unsqueeze.default](b, -1) for b in (gate, up)]
        both = ir.TensorBox(ir.ConcatKernel.create(pair, len(size)))
    return lowerings[aten.view.default](both, [*size[:-1], 2 * size[-1]])


def _before_sums(wanted: Sequence[bool], *boxes: Box | None) -> None:
    """Have results computed before the sums.

    A sum's cast to its dtype closes the loop over what is summed; results that come after it would read everything once
    more, in a loop of their own (SiLU with a bias gradient: 748 instructions in the kernel's text, 462 in one loop).
    """
    for box in boxes:
        if any(wanted) and box is not None:
            box.realize()


def _rows_of_a_block() -> int | None:
    """The rows of a block of the node that is being lowered; None where its loops do not go over blocks."""
    rows: int | None = V.graph.current_node.meta.get(ROWS)
    return rows


def _leaves_blocks(node: torch.fx.Node) -> bool:
    """Tell whether a result of a node in blocks is read by one that is not."""
    through = (*VIEWS, operator.getitem)
    return any(_leaves_blocks(user) if user.target in through else ROWS not in user.meta for user in node.users)


def _sum_rows(box: Box, dtype: torch.dtype) -> Box:
    if _rows_of_a_block() is not None:
        box = lowerings[aten.sum.dim_IntList](box, [1])
        box.realize()  # a few rows are added without a loop, which the next sum would take in
    axes = list(range(len(box.get_size()) - 1))
    return to_dtype(lowerings[aten.sum.dim_IntList](box, axes) if axes else box, dtype)


def _is_row_by_row(box: Box, layout: str | None) -> bool:
    return _rows_of_a_block() is not None and not is_on_gpu(box) and layout != "interleaved"  # there it is no one piece


def _row_by_row(*boxes: Box, sums: bool = False) -> Box:
    """Boxes of (blocks, rows, n) side by side, or the sums of their rows, by loops over (blocks, n).

    The sum of a block's few rows is additions with such loops, too: Inductor fuses all, and computes every value once.
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


@functools.cache  # the functions are keys of the cache of programs
def _elements(op: PointwiseOperator) -> _Elements:
    data = 2 if op.is_packed else op.data
    biases = 0 if op.bias is None else data if op.is_packed else 1
    count = data + biases

    def biased(given: Sequence[Any]) -> list[Any]:
        x = list(given[:data])
        for i, bias in enumerate(given[data:count]):
            x[i] = x[i] if bias is None else x[i] + bias
        return x

    def value(*given: Any) -> Tensor:
        return op.value(*biased(given), *given[count:])

    def grads(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
        return op.grads(grad, *biased(given), *given[count:])

    def scale_grad(grad: Tensor, *given: Any) -> Tensor:
        return grad * op.value(*biased(given), None, *given[count + 1 :])

    return _Elements(value, grads, scale_grad)


def _loads(
    op: PointwiseOperator, tensors: Sequence[Any], layout: str | None
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """The ranges (…, n), and the loads: the data, packed data in two; the biases, likewise; the scale."""
    *rows, n = tensors[0].get_size()
    at: list[Callable[[Index], Index]] = [_here]
    data: list[tuple[Any, Callable[[Index], Index]]] = [(t, _here) for t in tensors[: op.data]]
    if layout is not None:
        n = V.graph.sizevars.simplify(FloorDiv(n, 2))
        at = [_packed(layout, n, up) for up in (0, 1)]
        data = [(tensors[0], a) for a in at]
    biases = [] if op.bias is None else [(tensors[op.bias], lambda index, a=a: _column(a(index))) for a in at]
    scales = [] if op.scale is None else [(tensors[op.scale], _row)]
    return [*rows, n], [*data, *biases, *scales]


def over_blocks(lowering: Callable[..., Any], arguments: Sequence[str], results: Sequence[str]) -> Callable[..., Any]:
    """A lowering on its arguments with their rows in blocks, where its node asks for them; the kinds of both."""

    def viewed(box: Any, kind: str, rows: Sequence[Any]) -> Any:
        if not isinstance(box, ir.TensorBox) or kind not in (*DATA, "per_row"):
            return box
        return lowerings[aten.view.default](box, [*rows, *([] if kind == "per_row" else box.get_size()[-1:])])

    def lower(*args: Any, **keywords: Any) -> Any:
        block = _rows_of_a_block()
        if block is None:
            return lowering(*args, **keywords)
        rows, kinds = args[0].get_size()[:-1], [*arguments, *("" for _ in args)]
        blocks = [FloorDiv(sympy_product(rows), block), block]
        found = lowering(*(viewed(a, kind, blocks) for a, kind in zip(args, kinds, strict=False)), **keywords)
        one = not isinstance(found, tuple)
        for box in ([found] if one else filter(None, found)) if _leaves_blocks(V.graph.current_node) else ():
            box.realize()  # the view of a view of what is no buffer would be copied for a GEMM
        given = [viewed(box, kind, rows) for box, kind in zip([found] if one else found, results, strict=True)]
        return given[0] if one else tuple(given)

    return lower


def _over_few_rows(op: PointwiseOperator, data: int, in_blocks: Callable[..., Any]) -> Callable[..., Any]:
    """On a CPU, have calls on data of which a bias's gradient is wanted go over blocks of a few rows."""

    def lower(first: Box, *args: Any) -> Any:
        node, bias = cast(Any, (V.graph.current_node, op.bias))
        users = [] if bias is None or is_on_gpu(first) or node.kwargs else node.args[data].users
        calls = [user.args for user in users if user.target is op.signatures[1].overload and not user.kwargs]
        summed = any(given[1 + bias] is not None and given[-1][bias] for given in calls)
        if summed and V.graph.sizevars.statically_known_multiple_of(sympy_product(first.get_size()[:-1]), _FEW_ROWS):
            node.meta[ROWS] = _FEW_ROWS
        return in_blocks(first, *args)

    return lower


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
        e = _Elementwise(ranges, (grad, _here), *loads)

        bias = tensors[op.bias] if op.bias is not None and mask[op.bias] else None
        sums_on_cpu = bias is not None and not is_on_gpu(grad)
        row_by_row = _is_row_by_row(grad, layout)
        kept: list[Box] = []

        def unrounded(i: int) -> list[Box]:
            results = [i] if layout is None else [0, 1]
            return kept or [e.node(elements.grads, *scalars, result=result) for result in results]

        def joined(boxes: Sequence[Box]) -> Box:
            return boxes[0] if layout is None else pack(boxes[0], boxes[1], layout)

        if sums_on_cpu and not row_by_row:
            kept = unrounded(0)
            for box in kept:
                box.realize()  # sums over rows have a loop of their own, which would compute it again
        found: list[Box | None] = [None] * len(tensors)
        for i, t in enumerate(tensors[: op.data]):
            if mask[i]:
                grads = [to_dtype(box, t.get_dtype()) for box in unrounded(i)]
                found[i] = _row_by_row(*grads[:: -1 if layout == "swapped" else 1]) if row_by_row else joined(grads)
        if layout is None:
            _before_sums(mask[op.data :], *found[: op.data])
        if op.bias is not None and bias is not None:
            found[op.bias] = joined([_sum_rows(box, bias.get_dtype()) for box in unrounded(0)])
        if op.scale is not None and mask[op.scale] and (scale := tensors[op.scale]) is not None:
            terms = e.node(elements.scale_grad, *scalars)
            sums = _row_by_row(terms, sums=True) if row_by_row else lowerings[aten.sum.dim_IntList](terms, [-1])
            found[op.scale] = to_dtype(sums, scale.get_dtype())
        return tuple(found)

    return _over_few_rows(op, 1, over_blocks(lowering, ["data", *op.kinds], op.kinds))


def lower(op: PointwiseOperator) -> None:
    """Register the lowerings of a declared operator and of its backward operator."""
    for signature, make in zip(op.signatures, (_forward, _backward), strict=True):
        # type_promotion_kind=None: the arguments' dtypes differ by design; promotion would widen what is loaded.
        register_lowering(signature.overload, type_promotion_kind=None)(make(op))


for _operator in elementwise():
    lower(_operator)
register_lowering(torch.ops.fused.with_saved.default, type_promotion_kind=None)(lambda result, saved: result)
