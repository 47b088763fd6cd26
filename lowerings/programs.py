"""Element functions → Inductor IR: traced once, replayed inside ``Pointwise`` nodes.

Element functions, in ``formulas.py`` and the families, have the operators' arithmetic in plain torch. Each function is
traced to aten on scalars, each aten node goes through Inductor's own lowering, and the resulting ``ops`` calls form a
flat :class:`Program`. :class:`Elementwise` combines programs with a loader for each argument. The resulting node fuses
with its neighbors like any pointwise node, and computes each step of the formula once, even if several steps read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings
from torch._inductor.subgraph_lowering import TracingOpsHandler
from torch._inductor.virtualized import OpsValue, V, ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node, Tracer
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import _disable_current_modes

from torch_fused_ops import activations
from torch_fused_ops.lowerings import cpp_vectors

Box = Any  # ir.TensorBox
Index = Sequence[Any]
Value = Any  # a result of V.ops
Load = Callable[[Index], Value]


class Program(NamedTuple):
    """One result of a traced element function: ``program(loads, index)``, one ``ops`` call for each step.

    It contains only the arguments and steps that its result depends on. If a loop lists an input it does not read,
    Inductor cannot reuse that input's buffer. (One of SwiGLU's two gradients reuses the buffer of ``up``, which the
    other gradient does not read.)
    """

    arguments: tuple[int, ...]
    code: GraphModule  # called with ``ops`` and the arguments

    @classmethod
    def of(cls, steps: Graph, result: int) -> Program:
        """Return the program of a result of traced steps."""
        graph, values = Graph(), dict[Node, Node]()
        results: Any = graph.graph_copy(steps, values)
        graph.output(results[result])
        graph.eliminate_dead_code()
        _, *arguments = graph.find_nodes(op="placeholder")
        read = tuple(i for i, argument in enumerate(arguments) if argument.users)
        for argument in (argument for argument in arguments if not argument.users):
            graph.erase_node(argument)
        return cls(read, GraphModule({}, graph))

    def __call__(self, loads: Sequence[Load], index: Index) -> Value:
        return self.code.forward(ops, *(loads[i](index) for i in self.arguments))


class _Lower(torch.fx.Interpreter):
    """Run a traced element function through Inductor's lowerings. Every value is a scalar, evaluated immediately."""

    def __init__(self, gm: torch.fx.GraphModule, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.device, self.dtype = device, dtype

    def scalar(self, value: Value, dtype: torch.dtype) -> Box:
        return ir.TensorBox.create(
            ir.Pointwise(device=self.device, dtype=dtype, inner_fn=lambda _: OpsValue(value), ranges=[])
        )

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Box:
        box: Box = lowerings[target](*args, **kwargs) if target in lowerings else None
        data = box.data.data if isinstance(box, ir.TensorBox) and isinstance(box.data, ir.StorageBox) else None
        if not isinstance(data, ir.Pointwise):
            raise NotImplementedError(
                f"{target} has no pointwise Inductor lowering: it cannot be part of an activation"
            )
        return self.scalar(box.make_loader()([]).value, box.get_dtype())


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
    tracer = Tracer()
    tracer.graph = steps = Graph()
    recorder = TracingOpsHandler(tracer, len(dtypes))
    with V.set_ops_handler(recorder), preserve_node_meta(False):
        lower = _Lower(gm, device, dtype)
        boxes = lower.run(*(lower.scalar(recorder.placeholder(i), d) for i, d in enumerate(dtypes)))
        recorder.output(*(box.make_loader()([]).value for box in boxes))
    casts = steps.find_nodes(op="call_method", target="to_dtype")
    if device_type == "cpu" and all(d.is_floating_point for d in dtypes) and not casts:
        _fuse_multiply_adds(steps)
        if dtype == torch.float32:
            _vectorize(steps)
    return tuple(Program.of(steps, i) for i in range(len(boxes)))


def _fuse_multiply_adds(steps: Graph) -> None:
    """Replace a·b + c of floats by one ``fma``. Inductor's flags forbid the C++ compiler to combine both operations."""
    for node in steps.find_nodes(op="call_method", target="add"):
        handler, *terms = node.args
        for a, c in (terms, terms[::-1]):
            if isinstance(a, Node) and a.target == "mul" and len(a.users) == 1 and a is not c:
                node.target, node.args = "fma", (handler, *a.args[1:], c)
                break


def _vectorize(steps: Graph) -> None:
    """Replace exp2 and clamping by a number with the faster operations of ``cpp_vectors``."""
    cpp_vectors.install()
    for node in steps.find_nodes(op="call_method"):
        is_clamp = node.target in ("maximum", "minimum") and getattr(node.args[-1], "target", "") == "constant"
        if node.target == "exp2" or is_clamp:
            node.target, node.kwargs = "inline_asm_elementwise", cpp_vectors.keywords(node.target)


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
