"""Element functions → Inductor IR: traced once, replayed inside ``Pointwise`` nodes.

Element functions, in ``formulas.py`` and the families, have the operators' arithmetic in plain torch. Each function is
traced to aten on scalars, each aten node goes through Inductor's own lowering, and the resulting ``ops`` calls form a
flat :class:`Program`. :class:`Elementwise` combines programs with a loader for each argument. The resulting node fuses
with its neighbors like any pointwise node, and computes each step of the formula once, even if several steps read it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.virtualized import OpsValue, V, ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._python_dispatch import _disable_current_modes

from torch_fused_ops import activations
from torch_fused_ops.lowerings import cpp_vectors

Box = Any  # ir.TensorBox
Index = Sequence[Any]
Value = Any  # a result of V.ops
Load = Callable[[Index], Value]


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
def programs_of(
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


activations._on_change.append(programs_of.cache_clear)  # an activation's name among the scalars may mean a new function


class Elementwise:
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
        self.loads: list[Load] = [widening_load(b, to_index, self.dtype) for b, to_index in loads if b is not None]
        self.loads += [mask.make_loader() for mask in masks if mask is not None]

    def node(
        self, element: Callable[..., Any], *scalars: Any, dtype: torch.dtype | None = None, result: int = 0
    ) -> Box:
        """Return a Pointwise for result number ``result``, in ``dtype``, by default the dtype it computes in."""
        program = programs_of(element, self.present, scalars, self.dtype, self.device.type)[result]
        target = dtype or self.dtype

        def inner(index: Index) -> Value:
            value = program(self.loads, index)
            return value if target == self.dtype else ops.to_dtype(value, target)

        return ir.Pointwise.create(device=self.device, dtype=target, inner_fn=inner, ranges=self.ranges)


def widening_load(box: Box, to_index: Callable[[Index], Index], dtype: torch.dtype) -> Load:
    load, box_dtype = box.make_loader(), box.get_dtype()
    if box_dtype == dtype:
        return lambda index: load(to_index(index))
    return lambda index: ops.to_dtype(load(to_index(index)), dtype)


def is_on_gpu(box: Box) -> bool:
    """Return True if a box is not on the CPU."""
    return bool(box.get_device().type != "cpu")


def element_index(index: Index) -> Index:
    return index


def column(index: Index) -> Index:
    return index[-1:]


def row(index: Index) -> Index:
    return index[:-1]
