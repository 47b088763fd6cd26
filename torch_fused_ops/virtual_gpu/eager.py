"""Run a captured graph in eager mode for the live-bytes timeline of a step.

Operators run on fake tensors with the emulated GPU's rules for autocast and attention, and autograd saves the same
tensors as on a device. Fake tensors have sizes but no data. The timeline counts their storages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from .captured import CapturedGraph, concrete
from .compile import emulated
from .generated import graph_input
from .gpus import GPU
from .results import GraphInput, Launch
from .timeline import Memory
from .work import is_view


class EagerGraph:
    """A captured graph to run in eager mode on a described GPU."""

    def __init__(self, captured: CapturedGraph, gpu: GPU) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.captured, self.gpu = captured, gpu
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        with emulated(gpu):
            self.gm, self.examples, parameters = concrete(captured, self.mode)
        self.inputs: tuple[GraphInput, ...] = tuple(map(graph_input, self.examples, parameters))

    def run_forward(self, memory: Memory, inputs: list[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        """Run the graph (``timeline.Part``). Results are meta tensors."""
        starts: dict[int, tuple[Any, GraphInput]] = {}  # differentiable result -> its gradient edge and description
        gradients: dict[int, Tensor] = {}  # input -> its gradient
        with self._running(memory, "forward"):
            entered = [self._as_fake_input(gradients, i, x) for i, x in enumerate(inputs)]
            inputs.clear()
            results = list(tree_leaves(Checkpointing(self.gm).boxed_run(entered)))
            for i, result in enumerate(results):
                if isinstance(result, Tensor) and result.requires_grad:
                    edge = torch.autograd.graph.get_gradient_edge(result)
                    starts[i] = edge, graph_input(result, is_parameter=False)
            memory.finish()
        return [_on_meta(result) for result in results], (starts, gradients)

    def run_backward(self, memory: Memory, state: tuple[Any, ...], tangents: dict[int, Any]) -> list[Any]:
        """Run backward (``timeline.Part``). Gradients are meta tensors."""
        starts, gradients = state
        with self._running(memory, "backward"):
            edges, fakes = [], []
            for i, (edge, spec) in starts.items():
                tangent = tangents.pop(i) if i in tangents else memory.new(spec, counted=True)
                if tangent is not None:
                    edges.append(edge)
                    fakes.append(self._fake(tangent))
            tangent = edge = None
            starts.clear()
            if edges:
                torch.autograd.backward(edges, fakes)
            edges.clear()
            fakes.clear()
            memory.finish()
        return [_on_meta(gradients.pop(i, None)) for i in range(len(self.inputs))]

    @contextlib.contextmanager
    def _running(self, memory: Memory, kind: str) -> Iterator[None]:
        memory.begin(kind, ())
        grad = torch.set_grad_enabled(self.captured.training)
        with _disable_current_modes(), emulated(self.gpu, self.captured.autocast), self.mode, _Operators(memory), grad:
            yield

    def _fake(self, tensor: Tensor) -> Tensor:
        from torch._subclasses.fake_tensor import FakeTensor

        with _disable_current_modes(), torch.no_grad():
            return FakeTensor(self.mode, tensor, torch.device("cpu"))

    def _as_fake_input(self, gradients: dict[int, Tensor], number: int, value: Any) -> Any:
        """Convert an input to a fake tensor whose gradient goes to ``gradients``. Autograd does not hold the input."""
        if not isinstance(value, Tensor):
            return value
        fake = self._fake(value)
        if not (self.captured.training and self.examples[number].requires_grad):
            return fake
        with _disable_current_modes(), self.mode:
            anchor = torch.empty(0, requires_grad=True)
            return _Enter.apply(anchor, fake, gradients, number)  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, gradients: dict[int, Tensor], number: int) -> Tensor:
        ctx.gradients, ctx.number = gradients, number
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.gradients[ctx.number] = gradient
        return (None,) * 4


class Checkpointing(fx.Interpreter):
    """Interpreter that runs checkpoints as eager mode does. Dynamo's checkpoint operator only tags nodes."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "__name__", "") != "tag_activation_checkpoint":
            return super().call_function(target, args, kwargs)
        from torch.utils.checkpoint import checkpoint, noop_context_fn

        body, *inputs = args

        def run(*inputs: Any) -> Any:  # a new interpreter, because an interpreter references its result
            return Checkpointing(body).run(*inputs)

        context_fn = body.meta.get("_checkpoint_context_fn", noop_context_fn)
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)


def _on_meta(fake: Any) -> Any:
    """Make a meta tensor that shares a fake tensor's storage."""
    if not isinstance(fake, Tensor):
        return fake
    with _disable_current_modes(), torch.no_grad():
        meta = torch.empty(0, dtype=fake.dtype, device="meta")
        return meta.set_(fake.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())


class _Operators(TorchDispatchMode):
    """Count the storages that operators allocate, and record each operator as a call of the step."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        memory, kwargs = self.memory, kwargs or {}
        memory.finish()  # tensors that only the previous operator still read have been freed
        result = func(*args, **kwargs)
        values = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        for value in values:
            memory.add(value)
        if not is_view(func) and values:
            tensors = [*values, *(value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))]
            nbytes = sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)
            memory.launch = Launch(nbytes, ())
            memory.ran(func, args, kwargs, result)
        return result
