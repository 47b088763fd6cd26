"""Inductor's code for a described GPU: kernels, bytes moved and tensors saved, on a machine without that GPU."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from . import standing_in
from .gpus import GPU, H200, described
from .modules import module_path

GraphPass = Callable[[fx.Graph], object]

# What computes matrix products, as settings of Inductor. It chooses among templates by measuring them; in deterministic
# mode it takes the first instead, which needs no device.
GEMM: dict[str, dict[str, Any]] = {
    "library": {},
    "triton": {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "deterministic": True},
}


@dataclass(frozen=True)
class GeneratedKernel:
    """One Triton kernel of a generated graph.

    Attributes:
        name: as in the generated code, "triton_poi_fused_gelu_0".
        source: a Python module: the decorated kernel and its imports. `assemble` and `interpret` take it.
        bytes_moved: bytes read and written by all launches of this kernel in the graph, as Inductor counts them.
        launches: how often the graph runs it.
    """

    name: str
    source: str
    bytes_moved: int
    launches: int = 1


@dataclass(frozen=True)
class Launch:
    """One run of a kernel, or one call that leaves the generated code.

    Attributes:
        bytes_moved: bytes it reads and writes, as Inductor counts them.
        modules: for each result that it writes, the path in the model of the module it comes from ("layers.0.mlp"),
            where that is known.
    """

    bytes_moved: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class GeneratedGraph:
    """What Inductor generated for one graph.

    Attributes:
        code: the whole generated Python module.
        kernels: its Triton kernels, in order of definition.
        extern: the calls that leave the generated code, in order: "mm", "addmm", "aten._addmm_activation".
        bytes_moved: bytes read and written by kernels and external calls together.
        graph: the FX graph after the post-grad passes.
        launches: kernels and external calls, as scheduled.
    """

    code: str
    kernels: tuple[GeneratedKernel, ...]
    extern: tuple[str, ...]
    bytes_moved: int
    graph: fx.GraphModule = field(repr=False)
    launches: tuple[Launch, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that the forward graph keeps for the backward graph.

    Attributes:
        name: the node's name in the joint graph.
        shape: sizes; a dynamic size is given by its hint.
        dtype: element type.
        nbytes: size in bytes.
        is_parameter: it is an `nn.Parameter` or a module's buffer, or a view of one: it lives anyway.
        is_graph_input: it is another input of the function, or a view of one.
        module: path in the model of the module that computes it; "" where that is not known, as for inputs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    is_parameter: bool
    is_graph_input: bool
    module: str = ""


@dataclass(frozen=True)
class PaperCompilation:
    """The result of `compile_on_paper`.

    Attributes:
        gpu: the described GPU.
        forward: the forward graph of a training step; None in inference.
        backward: the backward graph of a training step; None in inference.
        inference: the graph where nothing needs a gradient; None in training.
        saved: tensors kept from forward for backward.
    """

    gpu: GPU
    forward: GeneratedGraph | None
    backward: GeneratedGraph | None
    inference: GeneratedGraph | None
    saved: tuple[SavedTensor, ...]

    @property
    def graphs(self) -> dict[str, GeneratedGraph]:
        """The graphs that exist, by name."""
        named = {"forward": self.forward, "backward": self.backward, "inference": self.inference}
        return {name: graph for name, graph in named.items() if graph is not None}

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written by all graphs together."""
        return sum(graph.bytes_moved for graph in self.graphs.values())

    @property
    def kernels(self) -> tuple[GeneratedKernel, ...]:
        """The Triton kernels of all graphs."""
        return tuple(kernel for graph in self.graphs.values() for kernel in graph.kernels)

    def saved_bytes(self, *, include_inputs: bool = True, include_parameters: bool = False) -> int:
        """Bytes kept from forward for backward.

        Parameters and buffers (and views of them) are left out, since they live whether saved or not. Inputs are
        counted: in a model the input of one block is the output of another, alive only because it was saved.

        Args:
            include_inputs: count the function's own inputs, where they are neither parameters nor buffers.
            include_parameters: count parameters and buffers too.

        Returns:
            The sum of `SavedTensor.nbytes`.
        """
        return sum(
            tensor.nbytes
            for tensor in self.saved
            if (include_parameters or not tensor.is_parameter) and (include_inputs or not tensor.is_graph_input)
        )

    def __str__(self) -> str:
        rows = [("", "bytes moved", "launches")]
        for name, graph in self.graphs.items():
            rows.append((name, _mib(graph.bytes_moved), str(sum(kernel.launches for kernel in graph.kernels))))
            rows += [(f"  {kernel.name}", _mib(kernel.bytes_moved), str(kernel.launches)) for kernel in graph.kernels]
            rows += [(f"  {call}", "", str(count)) for call, count in Counter(graph.extern).items()]
        if self.saved:
            rows.append(("saved for backward", _mib(self.saved_bytes()), ""))
            for tensor in self.saved:
                kind = "parameter" if tensor.is_parameter else "input" if tensor.is_graph_input else "intermediate"
                dtype = str(tensor.dtype).removeprefix("torch.")
                rows.append((f"  {tensor.name} {dtype}{list(tensor.shape)}", _mib(tensor.nbytes), kind))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows]
        return "\n".join([f"on paper: {self.gpu.name} ({self.gpu.arch})", *lines])


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def compile_on_paper(
    fn: Callable[..., Any],
    *inputs: Any,
    gpu: GPU = H200,
    training: bool = True,
    joint_passes: Sequence[GraphPass] = (),
    pre_grad_passes: Sequence[GraphPass] = (),
    memory_budget: float | None = None,
    dynamic: bool = False,
    gemm: str = "library",
    config: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> PaperCompilation:
    """What `torch.compile(fn, fullgraph=True)` generates on `gpu`, without having it.

    Dynamo captures `fn` on fake CPU tensors; AOTAutograd traces forward and backward; the joint graph is moved to the
    described GPU; from there Inductor's own passes, partitioner, scheduler and code generator run unchanged. Nothing
    is allocated or executed.

    Args:
        fn: a function or an `nn.Module`, which may close over other modules.
        *inputs: its arguments. Of tensors (real, meta or fake, on any device) shape, strides, dtype and
            `requires_grad` are used; so are those of parameters and buffers.
        gpu: the GPU to generate code for.
        training: False compiles under `torch.no_grad()`.
        joint_passes: run on the joint FX graph, after `torch._inductor.config.joint_custom_pre_pass`.
        pre_grad_passes: run on the FX graph that Dynamo captured (and on its subgraphs: checkpoint bodies), after
            `torch._inductor.config.pre_grad_custom_pass`. Its `example_value`s are fake CPU tensors.
        memory_budget: `torch._functorch.config.activation_memory_budget` for this compilation.
        dynamic: make sizes symbolic, as `torch.compile(dynamic=True)` does.
        gemm: what computes matrix products: "library", Inductor's default; or "triton", its templates, into which it
            fuses what comes before and after. Which template max-autotune would choose, only a device can say: here it
            is the first.
        config: settings of `torch._inductor.config` for this compilation.
        **kwargs: keyword arguments of `fn`.

    Returns:
        Generated code, kernels, bytes moved and saved tensors.

    Raises:
        ModuleNotFoundError: when Triton is not installed.
        TypeError: when `fn` is not callable.
        ValueError: when `memory_budget` is not in [0, 1], or `gemm` is not known.
        torch._dynamo.exc.Unsupported: when `fn` does not capture as one graph.
    """
    if not callable(fn):
        raise TypeError(f"fn: got {type(fn).__name__}, expected a function or an nn.Module")
    if memory_budget is not None and not 0 <= memory_budget <= 1:
        raise ValueError(f"memory_budget: got {memory_budget}, expected a number from 0 to 1")
    if gemm not in GEMM:
        raise ValueError(f"gemm: got {gemm!r}, expected one of {', '.join(map(repr, GEMM))}")
    return _Paper(gpu, joint_passes, pre_grad_passes, memory_budget, {**GEMM[gemm], **(config or {})}).compile(
        fn, inputs, kwargs, training, dynamic
    )


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that Dynamo captured, set aside by `set_aside` to be compiled on paper later.

    Attributes:
        gm: a copy of the graph and of its subgraphs, with their recorded values.
        parameters: for each placeholder, whether it is a parameter or a buffer of a module.
        training: whether grad mode was on.
        autocast: the dtype of the autocast that was on around it for its device; None where none was.
    """

    gm: fx.GraphModule
    parameters: tuple[bool, ...]
    training: bool
    autocast: torch.dtype | None


def set_aside(gm: fx.GraphModule, subgraphs: Mapping[fx.Graph, fx.GraphModule] | None = None) -> CapturedGraph:
    """Copy a graph as Dynamo hands it to its backend, or as a pre-grad pass finds it; cheap, and `gm` stays as it is.

    Args:
        gm: the graph.
        subgraphs: copies to take for subgraphs (checkpoint bodies) instead of what they are now, by their graph:
            Inductor runs its passes on them before it runs them on the graph that calls them.

    Returns:
        What `compile_graph_on_paper` takes. It keeps no real tensor alive, but for constants inside the graph.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in placeholders]
    device = next((v.device.type for v in values if isinstance(v, Tensor)), "cpu")
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    parameters = tuple(map(_is_parameter, placeholders))
    return CapturedGraph(copy_graph(gm, subgraphs), parameters, torch.is_grad_enabled(), autocast)


def copy_graph(gm: fx.GraphModule, subgraphs: Mapping[fx.Graph, fx.GraphModule] | None = None) -> fx.GraphModule:
    """A graph and its subgraphs with nodes of their own; attributes and recorded values are shared.

    Args:
        gm: the graph.
        subgraphs: as for `set_aside`.
    """
    graph = copy.deepcopy(gm.graph)  # nodes and the dictionaries of what they record, not the values in them
    copied = fx.GraphModule(gm, graph, type(gm).__name__)
    # What AOTAutograd reads to know which inputs are parameters, and live anyway.
    copied.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        new.meta.pop("grapharg", None)  # holds the real input
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, (subgraphs or {}).get(child.graph) or copy_graph(child, subgraphs))
    return copied


def compile_graph_on_paper(
    captured: CapturedGraph, *, gpu: GPU = H200, config: Mapping[str, Any] | None = None
) -> PaperCompilation:
    """What Inductor generates on `gpu` for a graph that was captured earlier, for whichever device.

    The same as `compile_on_paper` from the captured graph on. Sizes that were symbolic are those it was captured with.

    Args:
        captured: what `set_aside` returned; it stays as it is.
        gpu: the GPU to generate code for.
        config: settings of `torch._inductor.config` for this compilation.

    Returns:
        Generated code, kernels, bytes moved and saved tensors.

    Raises:
        ModuleNotFoundError: when Triton is not installed.
        ValueError: when a size depends on data, so that it is not known.
        TypeError: when an input is a tensor subclass, or neither a tensor nor a number.
    """
    return _Paper(gpu, (), (), None, config or {}).compile_graph(captured)


class _Compiled(BaseException):
    """Leaves Dynamo once everything is known; not an Exception, so that Dynamo lets it through."""


@dataclass
class _Passes:
    """Graph passes run one after the other in one of Inductor's slots, in front of which others may already stand."""

    passes: tuple[GraphPass, ...]

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> str:
        """Nothing compiled on paper is cached; without a key Inductor warns that it cannot cache."""
        return f"on paper {id(self)}"


def _append_passes(slot: str, passes: Sequence[GraphPass]) -> dict[str, Any]:
    """A config patch that runs `passes` after what `slot` holds: one pass, a list (from torch 2.13 on) or None."""
    from torch._inductor import config

    held = getattr(config, slot)
    before = tuple(held) if isinstance(held, (list, tuple)) else () if held is None else (held,)
    return {slot: _Passes(before + tuple(passes))} if passes else {}


class _Paper:
    """One compilation on paper."""

    def __init__(
        self,
        gpu: GPU,
        joint_passes: Sequence[GraphPass],
        pre_grad_passes: Sequence[GraphPass],
        memory_budget: float | None,
        config: Mapping[str, Any],
    ) -> None:
        self.gpu = gpu
        self.inductor_config = {
            # measured on a device, which there is not
            "shape_padding": False,
            **config,
            **_append_passes("joint_custom_pre_pass", joint_passes),
            **_append_passes("pre_grad_custom_pass", pre_grad_passes),
            # no cache is read or written: `generate` stands in for the one that keeps graphs
            "fx_graph_cache": False,
            "autotune_local_cache": False,
            "autotune_remote_cache": False,
        }
        self.functorch_config: dict[str, Any] = {
            "enable_autograd_cache": False,
            "force_non_lazy_backward_lowering": True,
        }
        if memory_budget is not None:
            self.functorch_config["activation_memory_budget"] = memory_budget
        self.graphs: dict[str, GeneratedGraph] = {}
        self.saved: tuple[SavedTensor, ...] = ()
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self.parameters: list[bool] = []

    def compile(
        self, fn: Callable[..., Any], inputs: Sequence[Any], kwargs: Mapping[str, Any], training: bool, dynamic: bool
    ) -> PaperCompilation:
        # A frame of our own, a new one each time: Dynamo's caches and its memory of sizes go by frame.
        def on_paper(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        on_paper.__code__ = on_paper.__code__.replace(co_name=f"on_paper_{id(self)}")
        compiled = torch.compile(on_paper, backend=self.backend, fullgraph=True, dynamic=dynamic)
        with self.patched(), torch.set_grad_enabled(training), contextlib.suppress(_Compiled):
            compiled(*inputs, **kwargs)
        if not self.graphs:
            raise ValueError(f"fn: {fn!r} computes nothing on tensors that a graph could hold")
        return self.result()

    def compile_graph(self, captured: CapturedGraph) -> PaperCompilation:
        from torch._guards import TracingContext, tracing
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode = FakeTensorMode(shape_env=ShapeEnv())
        with self.patched(), torch.set_grad_enabled(captured.training):
            gm, inputs, self.parameters = _concrete(captured, mode)
            autocast = torch.autocast("cuda", captured.autocast, enabled=captured.autocast is not None)
            with autocast, tracing(TracingContext(mode)):
                self.compile_fx(gm, inputs)
        return self.result()

    def result(self) -> PaperCompilation:
        forward, backward, inference = (self.graphs.get(kind) for kind in ("forward", "backward", "inference"))
        return PaperCompilation(self.gpu, forward, backward, inference, self.saved)

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        import torch._dynamo.config as dynamo_config
        import torch._functorch.config as functorch_config
        import torch._inductor.compile_fx as compile_fx
        import torch._inductor.config as inductor_config
        from torch._inductor.fx_passes import joint_graph, post_grad
        from torch._subclasses.fake_tensor import FakeTensorMode

        _register_patterns()
        with contextlib.ExitStack() as stack:
            stack.enter_context(described(self.gpu))
            stack.enter_context(inductor_config.patch(self.inductor_config))
            stack.enter_context(functorch_config.patch(self.functorch_config))
            stack.enter_context(
                dynamo_config.patch(automatic_dynamic_local_pgo=False, automatic_dynamic_remote_pgo=False)
            )
            stack.enter_context(standing_in.cuda_autocast())
            stack.enter_context(standing_in.guardless_tensors())
            stack.enter_context(standing_in.constants_folded_on_cpu())
            for module in (joint_graph, post_grad):
                stack.enter_context(mock.patch.object(module, "lazy_init", lambda *args, **kwargs: None))
            stack.enter_context(self.wrap(FakeTensorMode, "from_tensor", self.from_tensor))
            stack.enter_context(self.wrap(compile_fx, "_recursive_joint_graph_passes", self.joint_graph_passes))
            stack.enter_context(self.wrap(compile_fx, "partition_fn", self.partition))
            yield

    @staticmethod
    def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Any:
        """Patch `owner.name` with `wrapper`, called with the original first."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        return mock.patch.object(owner, name, wrapped)

    def from_tensor(self, original: Callable[..., Any], mode: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Fake tensors are made on the CPU, whatever the tensor's own device is.

        A CPU build of torch cannot run autograd on fake CUDA tensors: it has no device guard, and aborts.
        """
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        if isinstance(tensor, FakeTensor):
            is_ready = tensor.fake_mode is mode
        else:  # other subclasses are taken apart by torch, and come back in pieces
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
            self.stand_ins[id(tensor)] = (stand_in, tensor)  # the tensor too: it keeps its id from being given away
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

        self.parameters = [_is_parameter(node) for node in gm.graph.find_nodes(op="placeholder")]
        self.compile_fx(gm, [fake(value) for value in example_inputs])
        raise _Compiled

    def compile_fx(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        from torch._inductor.compile_fx import compile_fx

        compile_fx(gm, inputs, inner_compile=self.generate, decompositions=standing_in.decompositions())

    def joint_graph_passes(self, original: Callable[..., Any], gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Inductor's joint passes, on the graph moved to the GPU."""
        _move_graph(gm)
        kwargs["input_device"] = torch.device("cuda", 0)
        return original(gm, *args, **kwargs)

    def partition(self, original: Callable[..., Any], gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        forward, backward = original(gm, joint_inputs, **kwargs)
        outputs = forward.graph.output_node().args[0][kwargs["num_fwd_outputs"] :]
        origins = dict(zip(forward.graph.find_nodes(op="placeholder"), self.parameters, strict=False))
        self.saved = tuple(_saved_tensor(node, origins) for node in outputs if _is_tensor(node))
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
        inputs = tree_map(functools.partial(_on_gpu, V.fake_mode), list(example_inputs))
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
            stack.enter_context(_recorded_kernels(kernel_nodes))
            graph.run(*inputs)
            context = TracingContext.try_get()
            if context is not None and context.output_strides is not None:
                context.output_strides += [_stride(output) for output in graph.graph_outputs]
            generated: Any = graph.codegen()[0]
            code: str = getattr(generated, "value", generated)
            moved = {node: node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes}
        kind = "inference" if is_inference else "backward" if is_backward else "forward"
        self.graphs[kind] = _generated_graph(code, gm, moved, kernel_nodes)

        def not_compiled(*args: Any) -> Any:
            raise RuntimeError("compiled on paper: there is nothing to run")

        not_compiled._boxed_call = True  # type: ignore[attr-defined]
        return not_compiled


def _concrete(captured: CapturedGraph, mode: Any) -> tuple[fx.GraphModule, list[Any], list[bool]]:
    """A copy of the graph to trace on fake CPU tensors of fixed sizes, those tensors, and which of them live anyway."""
    gm = copy_graph(captured.gm)
    lives_anyway = dict(zip(gm.graph.find_nodes(op="placeholder"), captured.parameters, strict=True))
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            _fix_sizes(module.graph, keep_inputs=module is not gm)
            _name_cpu(module.graph)
            module.recompile()
    nodes = gm.graph.find_nodes(op="placeholder")
    return gm, [_fake_on_cpu(node, mode) for node in nodes], [lives_anyway[node] for node in nodes]


def _fix_sizes(graph: fx.Graph, *, keep_inputs: bool) -> None:
    """Put numbers in place of nodes that compute sizes (or, where Dynamo made them inputs, other numbers)."""
    numbers: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and value.node.hint is not None:
            numbers[node] = value.node.hint
        node.args, node.kwargs = (fx.node.map_arg(a, lambda n: numbers.get(n, n)) for a in (node.args, node.kwargs))
    for node in reversed(numbers):
        if not (keep_inputs and node.op == "placeholder"):
            graph.erase_node(node)


def _fake_on_cpu(node: fx.Node, mode: Any) -> Any:
    """The like of a placeholder's recorded value: fake, on the CPU, its sizes fixed."""
    from torch._subclasses.fake_tensor import FakeTensor

    name, value = node.name, node.meta.get("example_value")
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, Tensor):
        raise TypeError(f"input {name}: got {type(value).__name__}, expected a tensor or a number")
    if type(value) not in (Tensor, nn.Parameter, FakeTensor) and not (
        isinstance(value, nn.Parameter) and isinstance(value, FakeTensor)
    ):
        raise TypeError(f"input {name}: got a {type(value).__name__}, expected a plain tensor")
    shape, stride = ([_hint(size) for size in sizes] for sizes in (value.shape, value.stride()))
    with mode:
        return torch.empty_strided(shape, stride, dtype=value.dtype, device="cpu", requires_grad=value.requires_grad)


def _name_cpu(graph: fx.Graph) -> None:
    """Name the CPU wherever a graph names a GPU, and the GPU's autocast wherever it enters the CPU's."""
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            device, dtype, *rest = node.args
            node.args = ("cuda", dtype or torch.get_autocast_dtype(device), *rest)
        elif node.op == "call_method" and node.target == "cuda":
            node.target, node.args, node.kwargs = "cpu", node.args[:1], {}
        else:
            node.args, node.kwargs = (fx.node.map_aggregate(a, _cpu_for_gpu) for a in (node.args, node.kwargs))


def _cpu_for_gpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?", value) else value


@functools.cache
def _register_patterns() -> None:
    """Let Inductor register its patterns as it would for the CPU, by passing it a graph that does nothing.

    It does so once a process, on first use, and traces them on the device it compiles for. A second time with other
    arguments it would find duplicates.
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
def _recorded_kernels(kernel_nodes: dict[str, list[str]]) -> Iterator[None]:
    """Note which scheduler nodes each Triton kernel holds: kernel name to names of nodes, one list for all launches."""
    from torch._inductor.codegen.triton import TritonScheduling

    def define_kernel(original: Callable[..., str], self: Any, source: str, nodes: Any, *args: Any) -> str:
        name = original(self, source, nodes, *args)
        names = kernel_nodes.setdefault(name, [])
        names += [node.get_name() for node in nodes if hasattr(node, "get_name")]
        return name

    with _Paper.wrap(TritonScheduling, "define_kernel", define_kernel):
        yield


def _generated_graph(
    code: str, gm: fx.GraphModule, moved: Mapping[Any, int], kernel_nodes: Mapping[str, Sequence[str]]
) -> GeneratedGraph:
    kernel_of = {node: kernel for kernel, nodes in kernel_nodes.items() for node in nodes}
    kernel_bytes: Counter[str] = Counter()
    for node, nbytes in moved.items():
        names = [node.get_name(), *(inner.get_name() for inner in node.get_nodes())]
        kernel = next((kernel_of[name] for name in names if name in kernel_of), None)
        if kernel is not None:
            kernel_bytes[kernel] += nbytes
    sources, launches, extern = _read_code(code)
    kernels = tuple(
        GeneratedKernel(name, source, kernel_bytes[name], launches[name]) for name, source in sources.items()
    )
    launched = tuple(Launch(nbytes, _modules(node)) for node, nbytes in moved.items() if _is_launched(node))
    return GeneratedGraph(code, kernels, extern, sum(moved.values()), gm, launched)


def _is_launched(node: Any) -> bool:
    """Whether something runs for a scheduler node: not for one that only names a part of another's result."""
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import NopKernelSchedulerNode

    return not isinstance(node, NopKernelSchedulerNode) and not isinstance(node.node, MultiOutput)


def _modules(node: Any) -> tuple[str, ...]:
    """The modules whose results a scheduler node writes, one entry for each buffer.

    What is computed on the way does not count: a mask that is rebuilt inside a kernel has many operations.
    """
    found = []
    for inner in node.get_nodes():
        written = getattr(inner.node, "origin_node", None)
        origins = getattr(inner.node, "origins", ())
        paths = [_module_of(written)] if written is not None else []
        found.append(next(filter(None, [*paths, *map(_module_of, reversed(list(origins)))]), ""))
    return tuple(filter(None, found))


def _module_of(node: fx.Node) -> str:
    """The path in the model of the innermost module that a node comes from, in backward too; "" if it is not known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return module_path(list(stack.values())[-1][0]) if stack else ""


def _read_code(code: str) -> tuple[dict[str, str], Counter[str], tuple[str, ...]]:
    """Sources of kernels by name, launches by name, and external calls, from Inductor's generated module."""
    sources: dict[str, str] = {}
    launches: Counter[str] = Counter()
    extern: list[str] = []
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function = ast.unparse(call.func)
        owner, _, name = function.rpartition(".")
        if function == "async_compile.triton":
            kernel, source = (ast.literal_eval(argument) for argument in call.args[:2])
            sources[kernel] = source
        elif name == "run" and owner in sources:
            launches[owner] += 1
        elif owner == "extern_kernels":
            extern.append(name)
        elif function.startswith(("torch.ops.", "aten.")):
            extern.append(function.removeprefix("torch.ops.").removesuffix(".default"))
    return sources, launches, tuple(extern)


def _is_parameter(node: fx.Node) -> bool:
    """Whether a placeholder of Dynamo's graph is a parameter or a buffer of a module."""
    if isinstance(node.meta.get("example_value"), nn.Parameter):
        return True
    source = getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return "._buffers[" in (name() if callable(name) else name)


def _is_view(node: fx.Node) -> bool:
    """Whether `node` is a view of its first argument, by its operator's schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _saved_tensor(node: fx.Node, origins: Mapping[fx.Node, bool]) -> SavedTensor:
    root = node
    while root.op == "call_function" and _is_view(root):
        root = root.all_input_nodes[0]
    value = node.meta["val"]
    shape = tuple(_hint(size) for size in value.shape)
    numel = functools.reduce(operator.mul, shape, 1)
    is_input = root.op == "placeholder"
    is_parameter = is_input and origins.get(root, False)
    return SavedTensor(
        node.name,
        shape,
        value.dtype,
        numel * value.element_size(),
        is_parameter,
        is_input and not is_parameter,
        "" if is_input else _module_of(root),
    )


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def _hint(size: Any) -> Any:
    """A size or another number, or what a dynamic one was when it was captured."""
    if isinstance(size, (int, float)):
        return size
    if size.node.hint is None:
        raise ValueError(f"the size {size} depends on data: it is not known before the model runs")
    return size.node.hint


def _stride(output: Any) -> tuple[int, ...] | None:
    """The strides of a lowered output, as AOTAutograd wants them to lay out what backward reads."""
    if not hasattr(output, "has_tensor_output") or not output.has_tensor_output():
        return None
    strides = output.get_layout().stride
    if any(getattr(stride, "free_symbols", ()) for stride in strides):
        return None
    return tuple(int(stride) for stride in strides)


def _on_gpu(mode: Any, value: Any) -> Any:
    """A fake CPU tensor's like on the GPU; anything else as it is."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def _move_graph(gm: fx.GraphModule) -> None:
    """Move a traced graph from the CPU to the GPU: its inputs, the devices it names, and the values it recorded."""
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    gpu = torch.device("cuda", 0)

    def moved(value: Any) -> Any:
        return gpu if isinstance(value, torch.device) and value.type == "cpu" else value

    standing_in.replace_cpu_nodes(gm.graph)
    inputs = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = tree_map(functools.partial(_on_gpu, V.fake_mode), node.meta.get("val"))
            inputs.append(node.meta["val"])
        node.args, node.kwargs = fx.node.map_aggregate(node.args, moved), fx.node.map_aggregate(node.kwargs, moved)
        node.meta.pop("tensor_meta", None)
    gm.recompile()
    with torch.no_grad():
        FakeTensorProp(gm, mode=V.fake_mode).propagate_dont_convert_inputs(*inputs)
