"""Inductor's code for a described GPU: kernels, bytes moved and tensors saved, on a machine without that GPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from torch_fused_ops.graphs.modules import is_parameter

from . import emulation
from .captured import CapturedGraph, concrete
from .generated import generated_graph, graph_input, is_number, is_tensor, saved_tensor
from .gpus import GPU, H200, by_name
from .results import GeneratedGraph, SavedTensor
from .timeline import PaperCompilation
from .work import nbytes_moved
from .wrapper import mark

GraphPass = Callable[[fx.Graph], object]

# Inductor's settings for GEMMs. Inductor measures templates to choose among them; in deterministic mode it takes the
# first, which needs no device.
GEMM: dict[str, dict[str, Any]] = {
    "library": {},
    "triton": {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "deterministic": True},
}


def compile_on_paper(
    fn: Callable[..., Any],
    *inputs: Any,
    gpu: GPU | str = H200,
    training: bool = True,
    joint_passes: Sequence[GraphPass] = (),
    pre_grad_passes: Sequence[GraphPass] = (),
    memory_budget: float | None = None,
    dynamic: bool = False,
    gemm: str = "library",
    config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> PaperCompilation:
    """Generate the code of `torch.compile(fn, fullgraph=True)` for `gpu`, without having it.

    Dynamo captures `fn` on fake CPU tensors; AOTAutograd traces forward and backward; the joint graph is moved to the
    described GPU; from there Inductor's own passes, partitioner, scheduler and code generator run unchanged. Nothing
    is allocated or executed.

    Args:
        fn: a function or an `nn.Module`, which may close over other modules.
        *inputs: its arguments. Tensors (real, meta or fake, on any device) count by shape, strides, dtype and
            `requires_grad`; so do parameters and buffers.
        gpu: the GPU to generate code for, or its name (``by_name``).
        training: False compiles under `torch.no_grad()`.
        joint_passes: run on the joint FX graph, after `torch._inductor.config.joint_custom_pre_pass`.
        pre_grad_passes: run on the FX graph that Dynamo captured (and on its subgraphs: checkpoint bodies), after
            `torch._inductor.config.pre_grad_custom_pass`. Its `example_value`s are fake CPU tensors.
        memory_budget: `torch._functorch.config.activation_memory_budget` for this compilation.
        dynamic: make sizes symbolic, as `torch.compile(dynamic=True)` does.
        gemm: the implementation of GEMMs: "library", Inductor's default; or "triton", its templates, into which it
            fuses the operators before and after. Only a device can tell the template that max-autotune would choose:
            here it is the first.
        config: settings of `torch._inductor.config` for this compilation.
        **kwargs: keyword arguments of `fn`.

    Returns:
        Generated code, kernels, bytes moved and saved tensors.

    Raises:
        ModuleNotFoundError: when Triton is not installed.
        TypeError: when `fn` is not callable, or a class.
        ValueError: when `memory_budget` is not in [0, 1], or `gemm` or `gpu` is not known.
        torch._dynamo.exc.Unsupported: when `fn` does not capture as one graph.
    """
    if not callable(fn) or isinstance(fn, type):
        got = f"the class {fn.__name__}" if isinstance(fn, type) else type(fn).__name__
        raise TypeError(f"fn: got {got}, expected a function or an nn.Module")
    if gemm not in GEMM:
        raise ValueError(f"gemm: got {gemm!r}, expected one of {', '.join(map(repr, GEMM))}")
    settings = {
        **GEMM[gemm],
        **(config or {}),
        **_append_passes("joint_custom_pre_pass", joint_passes),
        **_append_passes("pre_grad_custom_pass", pre_grad_passes),
    }
    return _Paper(by_name(gpu, "gpu"), memory_budget, settings).compile(fn, inputs, kwargs, training, dynamic)


def compile_graph_on_paper(
    captured: CapturedGraph,
    *,
    gpu: GPU = H200,
    memory_budget: float | None = None,
    config: Mapping[str, Any] | None = None,
) -> PaperCompilation:
    """Generate Inductor's code on `gpu` for a graph that was captured earlier, for any device.

    The same as `compile_on_paper` from the captured graph on. Symbolic sizes have their values at capture.

    Args:
        captured: the result of `set_aside`; it is not changed.
        gpu: the GPU to generate code for.
        memory_budget: `torch._functorch.config.activation_memory_budget` for this compilation.
        config: settings of `torch._inductor.config` for this compilation.

    Returns:
        Generated code, kernels, bytes moved and saved tensors.

    Raises:
        ModuleNotFoundError: when Triton is not installed.
        ValueError: when `memory_budget` is not in [0, 1], or a size depends on data, so that it is not known.
        TypeError: when an input is a tensor subclass, or neither a tensor nor a number.
    """
    return _Paper(gpu, memory_budget, config or {}).compile_graph(captured)


@contextlib.contextmanager
def emulated(gpu: GPU, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Have operators on fake CPU tensors behave as this GPU's: autocast, attention, shape functions.

    Args:
        gpu: the GPU.
        autocast: enter its autocast to this dtype; None: do not.
    """
    with _Paper(gpu, None, {}).patched(), torch.autocast("cuda", autocast, enabled=autocast is not None):
        yield


class _Compiled(BaseException):
    """Leaves Dynamo once everything is known; not an Exception, so that Dynamo lets it through."""


@dataclass
class _Passes:
    """Graph passes that run one after the other in one of Inductor's slots."""

    passes: tuple[GraphPass, ...]

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> str:
        """A key: nothing is cached here, but without a key Inductor warns that it cannot cache."""
        return f"without a device {id(self)}"


def _append_passes(slot: str, passes: Sequence[GraphPass]) -> dict[str, Any]:
    """A config patch that runs `passes` after those in `slot`: one pass, a list (from torch 2.13 on) or None."""
    from torch._inductor import config

    value = getattr(config, slot)
    before = tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)
    return {slot: _Passes(before + tuple(passes))} if passes else {}


class _Paper:
    """One compilation without a device."""

    def __init__(self, gpu: GPU, memory_budget: float | None, config: Mapping[str, Any]) -> None:
        if memory_budget is not None and not 0 <= memory_budget <= 1:
            raise ValueError(f"memory_budget: got {memory_budget}, expected a number from 0 to 1")
        self.gpu = gpu
        self.inductor_config = {
            # measured on a device, which is missing
            "shape_padding": False,
            **config,
            # no cache is read or written: `generate` replaces the one of graphs
            "fx_graph_cache": False,
            "autotune_local_cache": False,
            "autotune_remote_cache": False,
        }
        self.functorch_config: dict[str, Any] = {
            "enable_autograd_cache": False,
            "force_non_lazy_backward_lowering": True,
            # A checkpoint's random state would be a generator of the device's, which there is not. Without this it is a
            # tensor on the CPU.
            "graphsafe_rng_functionalization": False,
        }
        if memory_budget is not None:
            self.functorch_config["activation_memory_budget"] = memory_budget
        self.graphs: dict[str, GeneratedGraph] = {}
        self.saved: tuple[SavedTensor, ...] = ()
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self.arguments: list[tuple[bool, str]] = []  # of the program: a parameter or buffer or not, and its name
        self.saved_outputs: dict[str, int] = {}  # by the name of backward's input, the number of forward's output
        self.results = 0
        self.handed: tuple[int | None, ...] = ()
        self.tangents: tuple[int, ...] = ()

    def compile(
        self, fn: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any], training: bool, dynamic: bool
    ) -> PaperCompilation:
        # A new frame each time: Dynamo's caches and its memory of sizes are per frame.
        def on_paper(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        on_paper.__code__ = on_paper.__code__.replace(co_name=f"on_paper_{id(self)}")
        compiled = torch.compile(on_paper, backend=self.backend, fullgraph=True, dynamic=dynamic)
        with self.patched(), torch.set_grad_enabled(training), contextlib.suppress(_Compiled):
            compiled(*inputs, **kwargs)
        if not self.graphs:
            raise ValueError(f"fn: {fn!r} has no tensor operations to compile")
        return self.result()

    def compile_graph(self, captured: CapturedGraph) -> PaperCompilation:
        from torch._guards import TracingContext, tracing
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode = FakeTensorMode(shape_env=ShapeEnv())
        with self.patched(), torch.set_grad_enabled(captured.training):
            gm, inputs, parameters = concrete(captured, mode)
            self.arguments = [(parameter, "") for parameter in parameters]
            autocast = torch.autocast("cuda", captured.autocast, enabled=captured.autocast is not None)
            with autocast, tracing(TracingContext(mode)):
                self.compile_fx(gm, inputs)
        return self.result()

    def result(self) -> PaperCompilation:
        forward, backward, inference = (self.graphs.get(kind) for kind in ("forward", "backward", "inference"))
        return PaperCompilation(self.gpu, forward, backward, inference, self.saved, self.handed, self.tangents)

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        import torch._dynamo.config as dynamo_config
        import torch._functorch.config as functorch_config
        import torch._inductor.compile_fx as compile_fx
        import torch._inductor.config as inductor_config
        from torch._inductor.fx_passes import joint_graph, post_grad
        from torch._subclasses.fake_tensor import FakeTensorMode

        _register_patterns()
        pgo: dict[str, Any] = {"automatic_dynamic_local_pgo": False, "automatic_dynamic_remote_pgo": False}
        with (
            emulation.emulating(self.gpu),
            inductor_config.patch(self.inductor_config),
            functorch_config.patch(self.functorch_config),
            dynamo_config.patch(**pgo),
            emulation.cuda_autocast(),
            emulation.cuda_attention(),
            emulation.cuda_rules(),
            emulation.guardless_tensors(),
            emulation.constants_folded_on_cpu(),
            mock.patch.object(joint_graph, "lazy_init", lambda *args, **kwargs: None),
            mock.patch.object(post_grad, "lazy_init", lambda *args, **kwargs: None),
            emulation.patched_method(FakeTensorMode, "from_tensor", self.from_tensor),
            emulation.patched_method(compile_fx, "_recursive_joint_graph_passes", self.joint_graph_passes),
            emulation.patched_method(compile_fx, "partition_fn", self.partition),
        ):
            yield

    def from_tensor(self, original: Callable[..., Any], mode: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Make fake tensors on the CPU, whatever the tensor's own device is.

        A CPU build of torch cannot run autograd on fake CUDA tensors: it has no device guard, and aborts.
        """
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        if isinstance(tensor, FakeTensor):
            is_ready = tensor.fake_mode is mode
        else:  # torch takes other subclasses apart and calls this for their parts
            is_ready = tensor.device.type == "cpu" or type(tensor) not in (Tensor, nn.Parameter)
        if is_ready:
            return original(mode, tensor, *args, **kwargs)
        if id(tensor) not in self.stand_ins:
            with FakeTensorMode():
                stand_in = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad
                )
                if isinstance(tensor, nn.Parameter):
                    stand_in = nn.Parameter(stand_in, tensor.requires_grad)
            self.stand_ins[id(tensor)] = (stand_in, tensor)  # the tensor too: while it lives no other gets its id
        return original(mode, self.stand_ins[id(tensor)][0], *args, **kwargs)

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Dynamo's backend: `compile_fx`, with code generation in place of compilation."""
        from torch._guards import TracingContext

        # Dynamo gives its backend a fresh fake mode, since tracing may have changed the tensors of its own.
        tracing_context: Any = TracingContext
        context = tracing_context.get()

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            symbolic = context.tensor_to_context.get(value)
            if symbolic is None:
                return context.fake_mode.from_tensor(value, static_shapes=True)
            return context.fake_mode.from_tensor(value, symbolic_context=symbolic, source=symbolic.tensor_source)

        self.arguments = [(is_parameter(node), node.name) for node in gm.graph.find_nodes(op="placeholder")]
        self.compile_fx(gm, [fake(value) for value in example_inputs])
        raise _Compiled

    def compile_fx(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        from torch._inductor.compile_fx import compile_fx

        compile_fx(gm, inputs, inner_compile=self.generate, decompositions=emulation.decompositions())

    def joint_graph_passes(self, original: Callable[..., Any], gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Inductor's joint passes, on the graph moved to the GPU."""
        emulation.move_graph(gm)
        # a keyword for graphs, a positional argument for bodies
        bound = inspect.signature(original).bind(gm, *args, **kwargs)
        bound.arguments["input_device"] = torch.device("cuda", 0)
        return original(*bound.args, **bound.kwargs)

    def partition(self, original: Callable[..., Any], gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        forward, backward = original(gm, joint_inputs, **kwargs)
        self.results = kwargs["num_fwd_outputs"]
        outputs = forward.graph.output_node().args[0][self.results :]
        parameters = (parameter for parameter, _ in self.arguments)
        origins = dict(zip(forward.graph.find_nodes(op="placeholder"), parameters, strict=False))
        self.saved = tuple(saved_tensor(node, origins) for node in outputs if is_tensor(node, "cuda"))
        # AOTAutograd passes saved values by position; forward's sizes, which come last, first. Names may differ.
        numbers = sorted(range(len(outputs)), key=lambda i: not is_number(outputs[i]))
        inputs = (node.name for node in backward.graph.find_nodes(op="placeholder"))
        self.saved_outputs = {name: self.results + i for name, i in zip(inputs, numbers, strict=False)}
        return forward, backward

    def generate(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Inductor's inner compilation, as far as the code: post-grad passes, lowering, scheduling, code."""
        from torch._guards import TracingContext
        from torch._inductor import compile_fx
        from torch._inductor.debug import DebugContext
        from torch._inductor.fx_passes.post_grad import view_to_reshape
        from torch._inductor.graph import GraphLowering
        from torch._inductor.virtualized import V

        is_backward, is_inference = kwargs.get("is_backward", False), kwargs.get("is_inference", False)
        if is_backward:
            placeholders = gm.graph.find_nodes(op="placeholder")
            self.handed = tuple(self.saved_outputs.get(node.name) for node in placeholders)
            self.tangents = _differentiable_results()
        scheduled: list[tuple[Any, int]] = []
        inputs = tree_map(functools.partial(emulation.on_gpu, V.fake_mode), list(example_inputs))
        kernel_nodes: dict[str, list[str]] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(V.set_debug_handler(DebugContext()))
            view_to_reshape(gm)
            with torch.no_grad():
                compile_fx.fake_tensor_prop(gm, inputs)
            compile_fx._recursive_record_original_output_strides(gm)
            compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)
            graph = GraphLowering(
                gm,
                example_inputs=inputs,
                shape_env=V.fake_mode.shape_env,
                is_inference=is_inference,
                is_backward=is_backward,
            )
            graph.freeze_runtime_asserts()
            stack.enter_context(V.set_graph_handler(graph))
            stack.enter_context(V.set_extern_kernel_nodes([]))
            stack.enter_context(_noted_nodes(kernel_nodes, scheduled))
            graph.run(*inputs)
            context = TracingContext.try_get()
            if context is not None and context.output_strides is not None:
                context.output_strides += [_stride(output) for output in graph.graph_outputs]
            generated: Any = graph.codegen()[0]
            code: str = getattr(generated, "value", generated)
            bytes_of = {node: nbytes_moved(node) for node in graph.scheduler.nodes}
        kind = "inference" if is_inference else "backward" if is_backward else "forward"
        described = itertools.chain([] if is_backward else self.arguments, itertools.repeat((False, "")))
        arguments = [graph_input(value, *argument) for value, argument in zip(inputs, described, strict=False)]
        outputs: Any = gm.graph.output_node().args[0]
        results = self.results if kind == "forward" else len(outputs)
        self.graphs[kind] = generated_graph(code, gm, bytes_of, kernel_nodes, scheduled, arguments, results)

        def not_compiled(*args: Any) -> Any:
            raise RuntimeError("compiled without a device: there is nothing to run")

        not_compiled._boxed_call = True  # type: ignore[attr-defined]
        return not_compiled


@functools.cache
def _register_patterns() -> None:
    """Let Inductor register its patterns as it would for the CPU, by passing it a graph that does nothing.

    Inductor does so once a process, on first use, and traces them on the target device. A second registration, with
    other arguments, would find duplicates.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph, post_grad

    slots = (
        "joint_custom_pre_pass",
        "joint_custom_post_pass",
        "post_grad_custom_pre_pass",
        "post_grad_custom_post_pass",
    )
    graph = fx.Graph()
    graph.output(())
    nothing = fx.GraphModule(nn.Module(), graph)
    with config.patch(dict.fromkeys(slots)):
        joint_graph.joint_graph_passes(nothing, torch.device("cpu"))
        post_grad.post_grad_passes(nothing, is_inference=False)


@contextlib.contextmanager
def _noted_nodes(kernel_nodes: dict[str, list[str]], scheduled: list[tuple[Any, int]]) -> Iterator[None]:
    """Note the scheduler's nodes while their code is generated.

    Args:
        kernel_nodes: gets the names of each Triton kernel's nodes, one list for all launches.
        scheduled: gets the nodes in the order of their code, which marks them, with the bytes that they move.
    """
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    def define_kernel(original: Callable[..., str], self: Any, source: str, nodes: Any, *args: Any) -> str:
        name = original(self, source, nodes, *args)
        names = kernel_nodes.setdefault(name, [])
        names += [node.get_name() for node in nodes if hasattr(node, "get_name")]
        return name

    def enter_context(original: Callable[..., None], self: Any, node: Any) -> None:
        original(self, node)
        V.graph.wrapper_code.writeline(mark(len(scheduled)))
        scheduled.append((node, nbytes_moved(node)))

    with (
        emulation.patched_method(TritonScheduling, "define_kernel", define_kernel),
        emulation.patched_method(Scheduler, "enter_context", enter_context),
    ):
        yield


def _differentiable_results() -> tuple[int, ...]:
    """The numbers of forward's results whose gradients are backward's inputs, in its order; () if unknown."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    meta = getattr(context, "fw_metadata", None)
    if meta is None:
        return ()
    first = meta.num_mutated_inp_runtime_indices
    return tuple(first + i for i, info in enumerate(meta.output_info) if info.requires_grad)


def _stride(output: Any) -> tuple[int, ...] | None:
    """The strides of a lowered output, by which AOTAutograd lays out backward's inputs."""
    if not hasattr(output, "has_tensor_output") or not output.has_tensor_output():
        return None
    strides = output.get_layout().stride
    if any(getattr(stride, "free_symbols", ()) for stride in strides):
        return None
    return tuple(int(stride) for stride in strides)
