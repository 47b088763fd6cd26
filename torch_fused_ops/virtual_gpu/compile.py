"""Generate Inductor's code for a described GPU on a machine without it: kernels, bytes moved, tensors saved."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from torch_fused_ops.declaration import Signature
from torch_fused_ops.graphs.modules import is_parameter
from torch_fused_ops.kernels.compiled import OperatorGraph

from . import emulation
from .captured import CapturedGraph, concrete
from .generated import graph_input, modules_of, read_code, saved_tensor
from .gpus import GPU, H200, by_name
from .results import GeneratedGraph, Launch, SavedTensor
from .timeline import PaperCompilation
from .work import nbytes_moved
from .wrapper import mark


def compile_on_paper(
    fn: Callable[..., Any],
    *inputs: Any,
    gpu: GPU | str = H200,
    training: bool = True,
    memory_budget: float | None = None,
    config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> PaperCompilation:
    """Generate the code of `torch.compile(fn, fullgraph=True)` for a GPU that need not be present.

    Dynamo captures `fn` on fake CPU tensors, and AOTAutograd traces forward and backward. The joint graph is moved to
    the described GPU; from then on Inductor's passes, partitioner, scheduler and code generator run unchanged. Nothing
    is allocated or executed.

    Args:
        fn: a function or an `nn.Module`. A function may use modules from its closure.
        *inputs: its arguments. Tensors may be real, meta or fake, on any device. Only their shapes, strides,
            dtypes and `requires_grad` matter, as for parameters and buffers.
        gpu: the GPU to generate code for, or its name (``by_name``).
        training: False compiles under `torch.no_grad()`.
        memory_budget: `torch._functorch.config.activation_memory_budget` for this compilation.
        config: settings of `torch._inductor.config` for this compilation, such as passes: `joint_custom_pre_pass`.
            Measuring needs a device; `"deterministic": True` makes Inductor take its first GEMM template instead.
        **kwargs: keyword arguments of `fn`.

    Returns:
        Generated code, kernels, bytes moved and saved tensors.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        TypeError: `fn` is not callable, or is a class.
        ValueError: `memory_budget` is not in [0, 1], or `gpu` is not known.
        torch._dynamo.exc.Unsupported: Dynamo does not capture `fn` as one graph.
    """
    if not callable(fn) or isinstance(fn, type):
        got = f"the class {fn.__name__}" if isinstance(fn, type) else type(fn).__name__
        raise TypeError(f"fn: got {got}, expected a function or an nn.Module")
    return _Paper(by_name(gpu, "gpu"), memory_budget, config or {}).compile(fn, inputs, kwargs, training)


def compile_graph_on_paper(
    captured: CapturedGraph,
    *,
    gpu: GPU = H200,
    config: Mapping[str, Any] | None = None,
) -> PaperCompilation:
    """Generate Inductor's code on `gpu` for a graph that was captured earlier for any device.

    The compilation continues as in `compile_on_paper`. Symbolic sizes have their values at capture.

    Args:
        captured: the result of `set_aside`; not changed.
        gpu: the GPU to generate code for.
        config: settings of `torch._inductor.config` for this compilation.

    Returns:
        Generated code, kernels, bytes moved and saved tensors.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        ValueError: a size depends on data.
        TypeError: an input is a tensor subclass, or neither a tensor nor a number.
    """
    return _Paper(gpu, None, config or {}).compile_graph(captured)


def compile_operator_on_paper(name: str, *args: Any, gpu: GPU | str = H200) -> PaperCompilation:
    """Generate the kernels that run a call of `torch.ops.fused.<name>` in eager mode on a GPU that need not be present.

    Args:
        name: an operator or a backward operator, such as "glu_backward".
        *args: its arguments. Tensors are on "meta".
        gpu: the GPU to generate code for, or its name (``by_name``).

    Returns:
        Generated code, kernels and bytes moved. The number of rows is a symbol; bytes are for 8192 rows.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        ValueError: `gpu` is not known.
    """
    from torch_fused_ops.kernels.compiled import identification, with_defaults
    from torch_fused_ops.operators.autograd import REGISTERED

    signature = REGISTERED[name].signature
    key, _ = identification(signature, on_gpu=True)(args)
    return operator_on_paper(signature, with_defaults(signature, key, len(args)), by_name(gpu, "gpu"))[1]


def operator_on_paper(signature: Signature, key: tuple[Any, ...], gpu: GPU) -> tuple[OperatorGraph, PaperCompilation]:
    """Generate the eager kernels for a key of `kernels/compiled.py`."""
    from torch._guards import detect_fake_mode
    from torch._inductor.virtualized import V

    from torch_fused_ops.kernels import compiled
    from torch_fused_ops.lowerings.choices import EagerChoices

    paper = _Paper(gpu, None, compiled.SETTINGS)
    with paper.patched(), torch.no_grad():
        place = key[-1]._replace(device=torch.device("cuda", 0))
        graph = compiled.operator_graph(signature, (*key[:-1], place))
        choices = V.set_choices_handler(EagerChoices(graph.sums_block))
        with V.set_fake_mode(detect_fake_mode(graph.examples)), choices:
            paper.generate(graph.module, graph.examples, is_inference=True)
    return graph, paper.result()


@contextlib.contextmanager
def emulated(gpu: GPU, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Give operators on fake CPU tensors this GPU's behavior: autocast, attention, shape functions.

    Args:
        gpu: the GPU.
        autocast: enter the GPU's autocast to this dtype; None: do not enter autocast.
    """
    with _Paper(gpu, None, {}).patched(), torch.autocast("cuda", autocast, enabled=autocast is not None):
        yield


class _Compiled(BaseException):
    """Raised to leave Dynamo after generating code; a BaseException, because Dynamo catches Exceptions."""


class _Paper:
    """One compilation without a device."""

    def __init__(self, gpu: GPU, memory_budget: float | None, config: Mapping[str, Any]) -> None:
        if memory_budget is not None and not 0 <= memory_budget <= 1:
            raise ValueError(f"memory_budget: got {memory_budget}, expected a number from 0 to 1")
        self.gpu = gpu
        self.inductor_config = {
            "shape_padding": False,  # Inductor chooses padding by measuring on a device
            "compile_threads": 1,  # otherwise, other processes would compile the kernels to machine code
            **config,
            # `generate` replaces the function behind the graph cache
            "fx_graph_cache": False,
            "autotune_local_cache": False,
            "autotune_remote_cache": False,
        }
        self.functorch_config: dict[str, Any] = {
            "enable_autograd_cache": False,
            "force_non_lazy_backward_lowering": True,
            # If True, a checkpoint's random state is a CUDA generator, which needs a device. If False, it is a CPU
            # tensor.
            "graphsafe_rng_functionalization": False,
        }
        if memory_budget is not None:
            self.functorch_config["activation_memory_budget"] = memory_budget
        self.graphs: dict[str, GeneratedGraph] = {}
        self.saved: tuple[SavedTensor, ...] = ()
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self.arguments: list[tuple[bool, str]] = []  # per argument: True for a parameter or buffer, and the name
        self.saved_outputs: dict[str, int] = {}  # name of backward's input -> number of forward's output
        self.results = 0
        self.handed: tuple[int | None, ...] = ()
        self.tangents: tuple[int, ...] = ()

    def compile(
        self, fn: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any], training: bool
    ) -> PaperCompilation:
        # A new code object each time: Dynamo's caches and its record of sizes are per code object.
        def on_paper(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        on_paper.__code__ = on_paper.__code__.replace(co_name=f"on_paper_{id(self)}")
        compiled = torch.compile(on_paper, backend=self.backend, fullgraph=True, dynamic=False)
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
            emulation.patterns_traced_on_cpu(),
            mock.patch.object(joint_graph, "lazy_init", lambda *args, **kwargs: None),
            mock.patch.object(post_grad, "lazy_init", lambda *args, **kwargs: None),
            emulation.patched_method(FakeTensorMode, "from_tensor", self.from_tensor),
            emulation.patched_method(compile_fx, "_recursive_joint_graph_passes", self.joint_graph_passes),
            emulation.patched_method(compile_fx, "partition_fn", self.partition),
        ):
            yield

    def from_tensor(self, original: Callable[..., Any], mode: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Make fake tensors on the CPU, whatever the tensor's device is.

        A CPU build of torch aborts in autograd on fake CUDA tensors, because it has no device guard.
        """
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        if isinstance(tensor, FakeTensor):
            is_ready = tensor.fake_mode is mode
        else:  # torch unwraps other subclasses and calls this for their inner tensors
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
            self.stand_ins[id(tensor)] = (stand_in, tensor)  # a reference to the tensor keeps its id unique
        return original(mode, self.stand_ins[id(tensor)][0], *args, **kwargs)

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Dynamo's backend: run `compile_fx` with `generate` as its inner compilation."""
        from torch._guards import TracingContext

        # Dynamo creates a new fake mode for its backend, since tracing may have changed the tensors of the old one.
        tracing_context: Any = TracingContext
        context = tracing_context.get()

        def fake(value: Any) -> Any:
            return context.fake_mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value

        self.arguments = [(is_parameter(node), node.name) for node in gm.graph.find_nodes(op="placeholder")]
        self.compile_fx(gm, [fake(value) for value in example_inputs])
        raise _Compiled

    def compile_fx(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        from torch._inductor.compile_fx import compile_fx

        compile_fx(gm, inputs, inner_compile=self.generate, decompositions=emulation.decompositions())

    def joint_graph_passes(self, original: Callable[..., Any], gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Move the joint graph to the GPU, and run Inductor's joint passes."""
        emulation.move_graph(gm)
        # Inductor passes `input_device` by keyword for graphs, by position for subgraphs.
        bound = inspect.signature(original).bind(gm, *args, **kwargs)
        bound.arguments["input_device"] = torch.device("cuda", 0)
        return original(*bound.args, **bound.kwargs)

    def partition(self, original: Callable[..., Any], gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        from torch_fused_ops.lowerings.partition import base
        from torch_fused_ops.lowerings.saved_tensors import storage_shares

        forward, backward = original(gm, joint_inputs, **kwargs)
        self.results = kwargs["num_fwd_outputs"]
        outputs = forward.graph.output_node().args[0][self.results :]
        parameters = (parameter for parameter, _ in self.arguments)
        origins = dict(zip(forward.graph.find_nodes(op="placeholder"), parameters, strict=False))
        values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in outputs]
        on_gpu = [isinstance(value, Tensor) and value.device.type == "cuda" for value in values]
        shares = storage_shares(itertools.compress(outputs, on_gpu))
        self.saved = tuple(saved_tensor(node, base(node), origins, nbytes) for node, nbytes in shares.items())
        # AOTAutograd passes saved values by position, and moves sizes, forward's last outputs, to the front.
        numeric = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
        numbers = sorted(range(len(outputs)), key=lambda i: not isinstance(values[i], numeric))
        inputs = (node.name for node in backward.graph.find_nodes(op="placeholder"))
        self.saved_outputs = {name: self.results + i for name, i in zip(inputs, numbers, strict=False)}
        return forward, backward

    def generate(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Run Inductor's inner compilation up to code generation: post-grad passes, lowering, scheduling, code."""
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
        scheduled: list[Launch] = []
        inputs = [
            value if emulation.is_host_copy(node) else emulation.moved("cuda", value)
            for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
        ]
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
            stack.enter_context(_marked_nodes(scheduled))
            graph.run(*inputs)
            context = TracingContext.try_get()
            if context is not None and context.output_strides is not None:
                context.output_strides += [_stride(output) for output in graph.graph_outputs]
            generated: Any = graph.codegen()[0]
            code: str = getattr(generated, "value", generated)
        kind = "inference" if is_inference else "backward" if is_backward else "forward"
        described = itertools.chain([] if is_backward else self.arguments, itertools.repeat((False, "")))
        arguments = [graph_input(value, *argument) for value, argument in zip(inputs, described, strict=False)]
        outputs: Any = gm.graph.output_node().args[0]
        results = self.results if kind == "forward" else len(outputs)
        self.graphs[kind] = GeneratedGraph(
            code, *read_code(code, scheduled), gm, tuple(arguments), results, tuple(scheduled)
        )

        def not_compiled(*args: Any) -> Any:
            raise RuntimeError("compiled without a device: there is nothing to run")

        not_compiled._boxed_call = True  # type: ignore[attr-defined]
        return not_compiled


@functools.cache
def _register_patterns() -> None:
    """Make Inductor register its patterns for the CPU, by running its passes on an empty graph.

    Inductor registers them once per process, on first use, and traces them on the target device. Registering them again
    for another device would fail on duplicates.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph, post_grad

    slots = [f"{graph}_custom_{when}_pass" for graph in ("joint", "post_grad") for when in ("pre", "post")]
    graph = fx.Graph()
    graph.output(())
    nothing = fx.GraphModule(nn.Module(), graph)
    with config.patch(dict.fromkeys(slots)):
        joint_graph.joint_graph_passes(nothing, torch.device("cpu"))
        post_grad.post_grad_passes(nothing, is_inference=False)


@contextlib.contextmanager
def _marked_nodes(scheduled: list[Launch]) -> Iterator[None]:
    """Insert a mark before each scheduler node's code, and append the node's description to ``scheduled``."""
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    def enter_context(original: Callable[..., None], self: Any, node: Any) -> None:
        original(self, node)
        V.graph.wrapper_code.writeline(mark(len(scheduled)))
        scheduled.append(Launch(nbytes_moved(node), modules_of(node)))

    with emulation.patched_method(Scheduler, "enter_context", enter_context):
        yield


def _differentiable_results() -> tuple[int, ...]:
    """Return the numbers of forward's results whose gradients backward reads, in its input order; () if unknown."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    meta = getattr(context, "fw_metadata", None)
    if meta is None:
        return ()
    first = meta.num_mutated_inp_runtime_indices
    return tuple(first + i for i, info in enumerate(meta.output_info) if info.requires_grad)


def _stride(output: Any) -> tuple[int, ...] | None:
    """Return a lowered output's strides, which AOTAutograd gives to backward's input; None if they are unknown."""
    if not hasattr(output, "has_tensor_output") or not output.has_tensor_output():
        return None
    strides = output.get_layout().stride
    if any(getattr(stride, "free_symbols", ()) for stride in strides):
        return None
    return tuple(int(stride) for stride in strides)
