"""Every difference between torch versions that this plug-in meets, as a probe for the feature, in one place.

============================  =========================================================================================
feature                       where
============================  =========================================================================================
lists of passes in a slot     torch ≥ 2.13; before, a slot holds one pass
passes told of inference      torch ≥ 2.13 tells a pass whether the graph is one of inference
passes over a schedule        a slot whose name is not public (2.11 to 2.15); torch ≥ 2.13 has a class for what is in it
passes after the cache        torch ≥ 2.13 asks AOTAutograd's cache before it runs pre-grad passes; before, afterwards
eager's rounding              torch ≥ 2.15 has numerics="strict", which implies the older emulate_precision_casts
context-variable config       torch ≥ 2.13: an override is seen in its own context only; before, by the whole process
partitioner's pointwise list  no way in for operators outside aten (2.11 to 2.15): the function that makes it is wrapped
budgets on nodes              torch ≥ 2.13 has region_activation_memory_budget beside the older mark on nodes
the end of a compiled call    nobody is told of it (2.11 to 2.15): read off the stack
loops that were tried         torch ≥ 2.13's scheduler puts back loops that it reordered to see whether two nodes fuse
ConcatKernel and its node     torch 2.11 asserts that the current FX node's first argument is a list, as aten.cat's is
============================  =========================================================================================
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch._guards import CompileContext
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

LISTS_OF_PASSES: bool = hasattr(custom_graph_pass, "get_custom_graph_passes")

# What a pass derives from to be called with ``is_inference``; where it is not, it must do without.
if TYPE_CHECKING:
    from torch_fused_ops.float8_recipes import Scaling

    InferenceAwarePass = custom_graph_pass.CustomInferenceAwareGraphPass
    SchedulerPass = custom_graph_pass.CustomSchedulerPass
else:
    InferenceAwarePass = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)
    SchedulerPass = getattr(custom_graph_pass, "CustomSchedulerPass", object)


def features() -> dict[str, bool]:
    """What was probed on this torch, for reports."""
    import torch._inductor.config as config

    return {
        "lists of passes in a slot": LISTS_OF_PASSES,
        "context-variable config": isinstance(
            vars(config)["_config"]["pre_grad_custom_pass"].user_override, ContextVar
        ),
    }


# ---- pass slots ----------------------------------------------------------------------------------


def after_fusion() -> str | None:
    """The name of the slot for a pass over the schedule, when loops are fused to kernels; None where there is none."""
    import torch._inductor.config as config

    return "_post_fusion_custom_pass" if hasattr(config, "_post_fusion_custom_pass") else None


def is_fused_triton(node: Any) -> bool:
    """Whether what is in a schedule is a Triton kernel of fused loops: no template, no kernels side by side."""
    import torch._inductor.config as config
    from torch._inductor.scheduler import FusedSchedulerNode

    if type(node) is not FusedSchedulerNode or node.is_template():
        return False
    return bool(node.get_device().type == "cuda" and config.cuda_backend == "triton")


def is_one_body(node: Any) -> bool:
    """Whether each loop of a kernel is a turn for each of its elements: one for a row would end the body before it."""
    numel, sums = node.group[1]
    return all(loop.group[1] in {(numel, sums), (numel * sums, 1)} for loop in node.get_nodes())


# ---- memory that results share -------------------------------------------------------------------


def buffers_written_again(scheduler: Any) -> frozenset[str]:
    """The names of buffers that something writes to that did not make them; and of what must keep its memory.

    Who reads them behind that knows them by another name (``Scheduler.mutation_renames``).
    """
    from torch._inductor.virtualized import V

    again = scheduler.mutation_renames.keys() | scheduler.mutation_real_name.keys() | V.graph.never_reuse_buffers
    return frozenset(again.union(scheduler.mutation_real_name.values()))


def buffers_that_stay(scheduler: Any) -> frozenset[str]:
    """The names of buffers whose memory has other names, too, under which it is written or read; and of unaligned ones.

    (What is not aligned as its result is would be spread over threads in another way.)
    """
    from torch._inductor.virtualized import V

    aliased = (alias for buffer in scheduler.name_to_buf.values() for alias in buffer.get_aliases())
    return buffers_written_again(scheduler).union(V.graph.unaligned_buffers, aliased)


def itemsize(name: str) -> int:
    """Bytes of an element of what a kernel reads or writes; 0 of what is no tensor."""
    from torch._inductor.virtualized import V

    buffer = V.graph.try_get_buffer(name)
    dtype = None if buffer is None else cast(Any, buffer).maybe_get_dtype()
    return dtype.itemsize if dtype is not None else 0


def may_be_views() -> bool:
    """Whether results may be made views of what kernels read: not where CUDA graphs, C++ or a plan hold the memory."""
    import torch._inductor.config as config

    return not (config.triton.cudagraphs or config.cpp_wrapper or config.memory_planning or config.triton.multi_kernel)


def concatenation(node: Any) -> Any:
    """The concatenation that a loop's result is a part of; None where it is none."""
    from torch._inductor import ir

    layout = node.get_output_spec()
    if not isinstance(layout, ir.NonOwningLayout) or not isinstance(layout.view, ir.ReinterpretView):
        return None
    whole: Any = cast(Any, layout.view).data.data
    return whole if isinstance(whole, ir.ConcatKernel) and type(whole.get_output_spec()) is ir.FixedLayout else None


def parts(node: Any) -> set[str]:
    """The names of a concatenation's parts; of any other result none."""
    from torch._inductor import ir

    return {cast(Any, part).get_name() for part in node.inputs} if isinstance(node, ir.ConcatKernel) else set()


def written_at(loop: Any, result: Any) -> tuple[Any, Any] | None:
    """Where in a result a loop writes in a turn: index and the turns' sizes; None where it cannot be told."""
    from torch._inductor.dependencies import MemoryDep

    (output,) = loop.get_outputs()
    start = 0 if output.node is result else output.node.get_output_spec().view.get_layout().offset
    writes = [dep for dep in loop.read_writes.writes if dep.name == output.get_name()]
    if len(writes) != 1 or not isinstance(writes[0], MemoryDep) or writes[0].mode is not None:
        return None
    # Loads and stores of what begins elsewhere than vectors do could be spread over threads in two ways.
    return (writes[0].index + start, writes[0].size) if start % 16 == 0 else None


def read_at(loop: Any, name: str) -> list[tuple[Any, Any]]:
    """Where in a buffer a loop reads in a turn: index and sizes for each time; of what cannot be told Nones."""
    from torch._inductor.dependencies import MemoryDep

    reads = [dep for dep in loop.read_writes.reads if dep.name == name]
    return [(dep.index, dep.size) if isinstance(dep, MemoryDep) else (None, None) for dep in reads]


def same_memory(node: Any, result: Any) -> bool:
    """Whether a result is laid out as a buffer is that is memory of its own, and that the graph may write over."""
    from torch._inductor import ir

    kinds = ir.DonatedBuffer, ir.ComputedBuffer, ir.ExternKernelOut
    layout, other = node.get_output_spec(), result.get_output_spec()
    return (
        isinstance(node, kinds)
        and type(layout) is type(other) is ir.FixedLayout
        and layout.offset == 0
        and (layout.device, layout.dtype) == (other.device, other.dtype)
        and list(layout.size) == list(other.size)
        and list(layout.stride) == list(other.stride)
        and not node.get_inputs_that_alias_output()
        and not node.get_mutation_names()
    )


def make_view(result: Any, node: Any) -> None:
    """Let a result be a view of a buffer: its memory is the buffer's, and in use as long as one of the two is."""
    from torch._inductor import ir

    view = ir.ReinterpretView(data=ir.StorageBox(node), layout=result.get_output_spec())
    result.layout = ir.NonOwningLayout(view)


def generate_behind_a_barrier(generate: Callable[..., None], has_views: bool, *args: Any) -> None:
    """Generate a loop's code, its stores behind a barrier where the kernel writes over what it reads.

    Inductor writes the same barrier itself, in front of what is stored once for many loads (triton#1615).

    Args:
        generate: ``SchedulerNode.codegen`` of the loop.
        has_views: whether some of the kernel's results are views of what it reads.
        args: ``generate``'s.
    """
    from torch._inductor.virtualized import V

    barrier, kernel = "tl.debug_barrier()", cast(Any, V.kernel)
    writes_over_inputs = has_views or kernel.args.inplace_buffers
    if writes_over_inputs and len(kernel.active_range_trees()) > 1 and barrier not in kernel.stores.getvalue():
        kernel.stores.writeline(barrier)
    generate(*args)


def is_output(node: Any) -> bool:
    """Whether a buffer's user is the graph, which returns it."""
    from torch._inductor.scheduler import OutputNode

    return isinstance(node, OutputNode)


def on_other_streams(loop: Any, name: str) -> bool:
    """Whether a buffer and a loop are on different streams, where torch knows several."""
    hazard = getattr(loop.scheduler, "has_cross_stream_hazard", None)
    return bool(hazard is not None and hazard(name, loop))


class PassChain(CustomGraphPass):
    """Several passes in a slot that holds one."""

    def __init__(self, passes: Sequence[Callable[[torch.fx.Graph], None]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: torch.fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        ids = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.passes]
        # A pass without an identity turns the cache off, as it does alone.
        return None if any(i is None for i in ids) else hashlib.sha256(repr(ids).encode()).hexdigest()

    def __deepcopy__(self, memo: Any) -> PassChain:
        return self  # config copies must keep the passes' identity


class PassTuple(tuple[Any, ...]):
    """Several passes in a slot that holds several; also one pass, for whoever calls what stood in the slot before."""

    __slots__ = ()

    def __call__(self, graph: torch.fx.Graph) -> None:
        for one in self:
            one(graph)


def passes_in(slot: Any) -> tuple[Any, ...]:
    """The passes that a slot's value holds."""
    if slot is None:
        return ()
    if isinstance(slot, PassChain):
        return slot.passes
    return tuple(slot) if isinstance(slot, (list, tuple)) else (slot,)


def slot_of(passes: Sequence[Any]) -> Any:
    """A slot's value that holds ``passes``. A tuple: the config module deep-copies lists and single objects."""
    if not passes:
        return None
    if LISTS_OF_PASSES:
        return PassTuple(passes)
    return passes[0] if len(passes) == 1 else PassChain(passes)


TIMING = "pre_grad_pass_timing"
"""Inductor's option for when pre-grad passes run. Without it they run before AOTAutograd's cache is asked, always."""


def runs_pre_grad_passes() -> bool:
    """Whether Inductor runs pre-grad passes at all, which ``mode="lite"`` (torch ≥ 2.10) turns off."""
    import torch._inductor.config as config

    return bool(getattr(config, "use_pre_grad_passes", True))


def saves_by_source() -> bool:
    """Whether Dynamo saves what it compiles, and answers for a function's source whatever backend it is compiled by."""
    import torch._dynamo.config as config

    return bool(getattr(config, "caching_precompile", False))


def has_compiled() -> bool:
    """Whether Dynamo has compiled anything since it was reset. (Its counters go on counting.)"""
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(convert_frame, "FRAME_COUNTER", 1 if convert_frame else 0))


def eager_rounding(dtype: torch.dtype | None) -> str:
    """Inductor's setting that asks for eager's own rounding in a dtype, as it is written; "" where none does."""
    import torch._inductor.config as config

    numerics = getattr(config, "numerics", "")  # torch ≥ 2.15
    if str(numerics).startswith("strict"):
        return f"numerics={numerics!r}"
    rounds = dtype in (torch.bfloat16, torch.float16) and getattr(config, "emulate_precision_casts", False)
    return "emulate_precision_casts=True" if rounds else ""


# ---- config values, process-wide -----------------------------------------------------------------


def slots_lock() -> AbstractContextManager[Any]:
    """What to hold while slots change, re-entrant.

    Where config is the whole process's, a compilation with ``options=`` changes it for its time and restores it
    afterwards, undoing what another thread has set meanwhile: there it is the lock that torch compiles under.
    """
    if features()["context-variable config"]:
        return threading.RLock()
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def update_everywhere(
    module: Any, name: str, update: Callable[[Any], Any], here: Callable[[Any], Any] | None = None
) -> None:
    """Replace a config value by ``update(value)``, for compilations in every thread.

    Where overrides are context variables, an override made in this thread is invisible in others: the entry's default
    is what all of them see, so both are updated (the override by ``here``, if given). An override in *another*
    context stays as it is: it is that thread's own.
    """
    entry = module._config[name]
    override = entry.user_override
    if isinstance(override, ContextVar):
        _update_default(entry, update)
        if not _is_unset(override.get()):
            override.set((here or update)(override.get()))
    elif _is_unset(override):
        _update_default(entry, update)
    else:
        entry.user_override = update(override)
    if hasattr(module, "_mark_get_dict_dirty"):  # the module caches its values for cache keys,
        module._mark_get_dict_dirty(name)
    for flag in ("_hash_dirty_var", "_is_dirty"):  # and a hash of them
        if isinstance(dirty := vars(module).get(flag), ContextVar):
            dirty.set(True)
        elif isinstance(dirty, bool):
            object.__setattr__(module, flag, True)


def _update_default(entry: Any, update: Callable[[Any], Any]) -> None:
    name = "default" if _is_unset(entry.env_value_default) else "env_value_default"
    setattr(entry, name, update(getattr(entry, name)))


def _is_unset(value: Any) -> bool:
    from torch.utils import _config_module

    return value is _config_module._UNSET_SENTINEL


# ---- Dynamo's graphs ------------------------------------------------------------------------------


def traced_function(target: Any) -> type[torch.autograd.Function] | None:
    """The ``torch.autograd.Function`` that a call is of, where Dynamo does not look into it (``allow_in_graph``)."""
    if getattr(target, "__name__", "") != "trampoline_autograd_apply":
        return None
    function = inspect.getclosurevars(target).nonlocals.get("fn_cls")
    return function if isinstance(function, type) and issubclass(function, torch.autograd.Function) else None


def why_it_ended(graph: torch.fx.Graph) -> Any:
    """Why Dynamo ended a graph, its ``GraphCompileReason``; None for a body's graph, or where it is not Dynamo's."""
    return getattr(graph.owning_module, "compile_subgraph_reason", None)


class CompiledCall(NamedTuple):
    """The call of a compiled function that is going on, and in which something is compiled now.

    Attributes:
        function: identifies what ``torch.compile`` returned.
        at_its_end: what is called when the call ends; a list, to be added to. It is no more than a list that nobody
            reads where torch has none.
        is_whole: whether what is compiled now is the function itself, not one that it calls, nor what follows a break.
        is_first: whether that code was not compiled before in this process.
    """

    function: Any
    at_its_end: list[Callable[[], Any]]
    is_whole: bool
    is_first: bool


def compiled_call() -> CompiledCall | None:
    """The innermost one, None where there is none: read off the stack, as torch tells nobody (2.11 to 2.15)."""
    compilation = CompileContext.try_get()
    compiled = compilation.compile_id if compilation is not None else None
    frame: FrameType | None = sys._getframe()
    is_whole = False
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == "torch._dynamo.eval_frame" and frame.f_code.co_name == "compile_wrapper":
            here = frame.f_locals
            is_first = compiled is not None and compiled.frame_compile_id == 0
            return CompiledCall(here.get("self"), here.get("cleanups", []), is_whole, is_first)
        if module == "torch._dynamo.convert_frame":
            is_whole = True
        elif module not in ("torch._dynamo.eval_frame", "torch._dynamo.external_utils", "torch.nn.modules.module"):
            is_whole = False
        frame = frame.f_back
    return None


# ---- the partitioner -----------------------------------------------------------------------------


_recomputable: set[torch._ops.OpOverloadPacket] = set()


def allow_recomputation(operators: Iterable[torch._ops.OpOverloadPacket]) -> None:
    """Put operators on the partitioner's list of pointwise ones, which it may rebuild in backward. Idempotent.

    The list is every aten operator with the pointwise tag; other namespaces have no way in, and an operator that is
    not on it is kept wherever backward reads it (a Llama-7B block, bf16, 4×2048 tokens: 901 MiB with ours off the
    list, 729 with them on it). So the one function that makes the list is wrapped; its answer for aten stays as it
    is.
    """
    from torch._functorch import partitioners

    _recomputable.update(operators)
    original = partitioners.pointwise_ops
    if getattr(original, "_with_fused", False):
        return

    @functools.wraps(original)
    def with_fused() -> list[torch._ops.OpOverloadPacket]:
        return [*original(), *_recomputable]

    with_fused._with_fused = True  # type: ignore[attr-defined]
    partitioners.pointwise_ops = with_fused  # type: ignore[assignment]


def has_memory_budget(node: torch.fx.Node) -> bool:
    """Whether the user has set an activation memory budget for this node, by either of upstream's ways."""
    import torch.fx.traceback as traceback

    region = getattr(traceback, "_get_memory_budget_annotation", lambda _: None)
    return "memory_budget" in node.meta or region(node) is not None


def written_afterwards(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The inputs that AOTAutograd writes once forward has run, from results of it: those that need a gradient."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    results = graph.output_node().meta.get("desc") or ()
    inputs = {one.mutated_input for one in results if isinstance(one, InputMutationAOTOutput)}
    return [node for node in graph.find_nodes(op="placeholder") if inputs and node.meta.get("desc") in inputs]


def nbytes(t: torch.Tensor) -> int:
    """The bytes of a tensor's elements; where sizes are symbolic, for the sizes that were seen."""
    numel: int | torch.SymInt = t.numel()
    hint = numel.node.hint if isinstance(numel, torch.SymInt) else numel
    return int(hint or 0) * t.element_size()


def converts_to_fp8(device: torch.device) -> bool:
    """Whether Triton can make float8_e4m3fn on this device: from sm_89 on; on AMD it is computed; C++ always can."""
    if device.type != "cuda" or torch.version.hip:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)


def no_scaled_products(device: torch.device, scaling: Scaling, grouped: bool = False) -> str:
    """What to call a device that cannot multiply float8 with these scales; "" where it can.

    On CPUs the numbers are read back and multiplied in the model's dtype; on "meta" there are none. ``grouped``: a
    mixture's experts. On ROCm those need a build of torch with FBGEMM.
    """
    if device.type in ("cpu", "meta"):
        return ""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        arch: str = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return "" if arch in scaling.amd and not grouped else f"ROCm, {arch}"
    capability = torch.cuda.get_device_capability(device)
    version = tuple(map(int, (torch.version.cuda or "99").split(".")[:2]))
    if capability not in (scaling.grouped if grouped else scaling.sm):
        return f"sm_{capability[0]}{capability[1]}"
    if version < scaling.cuda or not hasattr(torch.ops.aten, "_scaled_mm_v2"):
        return f"CUDA {torch.version.cuda}"
    return ""


# ---- Inductor's IR -------------------------------------------------------------------------------


def keeps_loops_it_tried() -> bool:
    """Whether the scheduler leaves a node's loops as it has reordered them to see whether it fuses with another.

    The two then have a higher score than the same node as a GEMM's epilogue, whose turn would have come first.
    """
    from torch._inductor import scheduler as theirs

    return not hasattr(theirs, "_LoopMutationTracker")


@contextlib.contextmanager
def concat_node() -> Iterator[None]:
    """Let ``ir.ConcatKernel.create`` run inside the lowering of an operator that is not aten.cat."""
    from torch._inductor.virtualized import V

    node = torch.fx.Graph().call_function(torch.ops.aten.cat.default, ([],))
    with V.graph.set_current_node(node):
        yield
