"""Probes for the features in which torch versions differ. Nothing else in ``lowerings`` knows of versions.

============================  =========================================================================================
feature                       where
============================  =========================================================================================
lists of passes in a slot     torch ≥ 2.13; before, a slot holds one pass
inference-aware passes        torch ≥ 2.13 tells a pass whether the graph is one of inference
passes over a schedule        a slot whose name is not public (2.11 to 2.15); torch ≥ 2.13 has a class for such passes
passes after the cache        torch ≥ 2.13 asks AOTAutograd's cache before it runs pre-grad passes; before, afterwards
eager's rounding              torch ≥ 2.15 has numerics="strict", which implies the older emulate_precision_casts
context-variable config       torch ≥ 2.13: only its own context sees an override; before, the whole process does
partitioner's pointwise list  closed to operators outside aten (2.11 to 2.15): the function that makes it is wrapped
budgets on nodes              torch ≥ 2.13 has region_activation_memory_budget beside the older mark on nodes
the end of a compiled call    has no hook (2.11 to 2.15): read off the stack
loops that were tried         torch ≥ 2.13's scheduler restores loops that it reordered to see whether two nodes fuse
recompiles by call            torch ≥ 2.13 can count them for each call of torch.compile; before, for each code object
ConcatKernel and its node     torch 2.11 asserts that the current FX node's first argument is a list, as aten.cat's is
============================  =========================================================================================
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import CodeType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass


class Fault(NamedTuple):
    """A fault of another package that produces wrong numbers. ``report`` is a section of docs/upstream.md."""

    package: str
    first: tuple[int, int]  # version
    last: tuple[int, int]  # the last version tested, still with the fault
    report: str
    effect: str


FAULTS = (
    Fault(
        "torch", (2, 13), (2, 15), "written-inputs", "wrong gradients if forward writes an input that backward reads"
    ),
    Fault("torch", (2, 11), (2, 15), "written-results", "wrong gradients if the caller writes a view of a result"),
    Fault("torch", (2, 11), (2, 15), "float8-store", "wrong gradients of its own float8 store without use_scaling"),
    Fault("triton", (3, 7), (3, 8), "ptxas", "a transposed float8 store writes wrong bytes"),
)


def faults(versions: dict[str, str]) -> list[Fault]:
    """The faults of the installed versions, by package; "" for a package that is not installed."""
    numbers = {package: tuple(int(n) for n in re.findall(r"\d+", text)[:2]) for package, text in versions.items()}
    return [fault for fault in FAULTS if fault.first <= numbers[fault.package] <= fault.last]


LISTS_OF_PASSES: bool = hasattr(custom_graph_pass, "get_custom_graph_passes")

if TYPE_CHECKING:
    SchedulerPass = custom_graph_pass.CustomSchedulerPass
else:
    SchedulerPass = getattr(custom_graph_pass, "CustomSchedulerPass", object)


def features() -> dict[str, bool]:
    """Results of probes on this torch, for reports."""
    import torch._inductor.config as config

    return {
        "lists of passes in a slot": LISTS_OF_PASSES,
        "context-variable config": isinstance(
            vars(config)["_config"]["pre_grad_custom_pass"].user_override, ContextVar
        ),
    }


# ---- pass slots ----------------------------------------------------------------------------------


def after_fusion() -> str | None:
    """The name of the slot for passes over the schedule once loops are fused to kernels; None where it is missing."""
    import torch._inductor.config as config

    return "_post_fusion_custom_pass" if hasattr(config, "_post_fusion_custom_pass") else None


def on_other_streams(loop: Any, name: str) -> bool:
    """Tell whether a buffer and a loop are on different streams, where torch knows several."""
    hazard = getattr(loop.scheduler, "has_cross_stream_hazard", None)
    return bool(hazard is not None and hazard(name, loop))


class PassChain(CustomGraphPass):
    """Several passes in a slot that holds one."""

    def __init__(self, passes: Sequence[Callable[[torch.fx.Graph], None]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: torch.fx.Graph) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> Any:
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        # A pass without an identity turns the cache off, as it does alone.
        return None if any(i is None for i in ids) else hashlib.sha256(repr(ids).encode()).hexdigest()

    def __deepcopy__(self, memo: Any) -> PassChain:
        return self  # config copies must keep the passes' identity


class PassTuple(tuple[Any, ...]):
    """Several passes in a slot that holds several; callable, for a pass that calls the slot's former value."""

    __slots__ = ()

    def __call__(self, graph: torch.fx.Graph) -> None:
        for graph_pass in self:
            graph_pass(graph)


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
"""Inductor's option for when pre-grad passes run. Without it they always run before AOTAutograd's cache is read."""


def runs_pre_grad_passes() -> bool:
    """Tell whether Inductor runs pre-grad passes at all, which ``mode="lite"`` (torch ≥ 2.10) turns off."""
    import torch._inductor.config as config

    return bool(getattr(config, "use_pre_grad_passes", True))


def saves_by_source() -> bool:
    """Tell whether Dynamo saves compiled code by a function's source alone, whatever backend compiled it."""
    import torch._dynamo.config as config

    return bool(getattr(config, "caching_precompile", False))


def has_compiled() -> bool:
    """Tell whether Dynamo has compiled anything since it was reset. (Its counters go on counting.)"""
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(convert_frame, "FRAME_COUNTER", 1 if convert_frame else 0))


def eager_rounding(dtype: torch.dtype | None) -> str:
    """Inductor's setting that asks for eager's own rounding in a dtype, as the user writes it; "" where none does."""
    import torch._inductor.config as config

    numerics = getattr(config, "numerics", "")  # torch ≥ 2.15
    if str(numerics).startswith("strict"):
        return f"numerics={numerics!r}"
    rounds = dtype in (torch.bfloat16, torch.float16) and getattr(config, "emulate_precision_casts", False)
    return "emulate_precision_casts=True" if rounds else ""


# ---- config values, process-wide -----------------------------------------------------------------


def slots_lock() -> AbstractContextManager[Any]:
    """A re-entrant lock for changes of slots.

    Where config belongs to the whole process, a compilation with ``options=`` changes it and restores it afterwards,
    which undoes what another thread has set meanwhile. There this is the lock that torch compiles under.
    """
    if features()["context-variable config"]:
        return threading.RLock()
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def update_everywhere(
    module: Any, name: str, update: Callable[[Any], Any], here: Callable[[Any], Any] | None = None
) -> None:
    """Replace a config value by ``update(value)``, for compilations in every thread.

    Where overrides are context variables, other threads do not see an override of this thread: they see the entry's
    default. So both are updated, the override by ``here`` where it is passed. An override in *another* context stays:
    it is that thread's own.
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
    """The ``torch.autograd.Function`` behind a call that Dynamo does not trace (``allow_in_graph``)."""
    if getattr(target, "__name__", "") != "trampoline_autograd_apply":
        return None
    function = inspect.getclosurevars(target).nonlocals.get("fn_cls")
    return function if isinstance(function, type) and issubclass(function, torch.autograd.Function) else None


def why_it_ended(graph: torch.fx.Graph) -> Any:
    """Dynamo's ``GraphCompileReason`` for ending a graph; None for a body's graph, or one that is not Dynamo's."""
    return getattr(graph.owning_module, "compile_subgraph_reason", None)


def split_from(graph: torch.fx.Graph) -> torch.fx.GraphModule | None:
    """The graph that DDPOptimizer has split into this one and others; None if this one is whole, or a body's graph.

    Read off the stack, as DDPOptimizer passes each part to the backend on its own.
    """
    frame: FrameType | None = sys._getframe() if why_it_ended(graph) is not None else None
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._dynamo.backends.distributed" and "split_gm" in frame.f_locals:
            whole: torch.fx.GraphModule | None = frame.f_locals.get("gm")
            return whole
        frame = frame.f_back
    return None


class CompiledCall(NamedTuple):
    """The call of a compiled function that is in progress while something is compiled.

    Attributes:
        function: identifies what ``torch.compile`` returned.
        at_its_end: callbacks for the end of the call, to be appended to; never called where torch has no such list.
        is_whole: the function itself is being compiled, not a function that it calls, nor the code after a break.
        code: of the frame that is being compiled.
    """

    function: Any
    at_its_end: list[Callable[[], Any]]
    is_whole: bool
    code: CodeType | None


def compiled_call() -> CompiledCall | None:
    """The innermost compiled call, or None: read off the stack, as torch has no hook for it (2.11 to 2.15)."""
    frame: FrameType | None = sys._getframe()
    is_whole, code = False, None
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == "torch._dynamo.eval_frame" and frame.f_code.co_name == "compile_wrapper":
            here = frame.f_locals
            return CompiledCall(here.get("self"), here.get("cleanups", []), is_whole, code)
        if module == "torch._dynamo.convert_frame":
            is_whole = True
            if frame.f_code.co_name == "_compile":
                code = frame.f_locals["code"]
        elif module not in ("torch._dynamo.eval_frame", "torch._dynamo.external_utils", "torch.nn.modules.module"):
            is_whole = False
        frame = frame.f_back
    return None


def compile_in_place(module: torch.nn.Module, **options: Any) -> None:
    """Call ``module.compile(**options)`` so that Dynamo's limit of eight compilations counts for this module alone.

    Modules of one class share the code of ``forward``: the ninth that differs from the others would stay eager. Older
    versions of torch count by code object. There each module gets its own, into which Dynamo inlines ``forward`` and
    the hooks. Versions before 2.15 compile ``forward`` of torch's own classes, such as ``nn.Sequential``, only if the
    call is wrapped.
    """
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        own = FunctionType(_call_impl.__code__.replace(), globals())
        module._compiled_call_impl = torch.compile(MethodType(own, module), **options)
        return
    is_torchs = type(module).forward.__module__.startswith("torch.nn.")
    with torch._dynamo.config.patch(wrap_top_frame=is_torchs):
        module.compile(**options, isolate_recompiles=True)


def _call_impl(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


# ---- the partitioner -----------------------------------------------------------------------------


_recomputable: set[torch._ops.OpOverloadPacket] = set()


def allow_recomputation(operators: Iterable[torch._ops.OpOverloadPacket]) -> None:
    """Put operators on the partitioner's list of pointwise ones, which it may recompute in backward. Idempotent.

    The list has every aten operator with the pointwise tag and is closed to other namespaces. An operator that is not
    on it is saved wherever backward reads it (a Llama-7B block, bf16, 4×2048 tokens: 901 MiB with ours off the list,
    729 with them on it). So the one function that makes the list is wrapped; its answer for aten stays.
    """
    from torch._functorch import partitioners

    is_wrapped, original = bool(_recomputable), partitioners.pointwise_ops
    _recomputable.update(operators)
    if is_wrapped:
        return

    @functools.wraps(original)
    def with_fused() -> list[torch._ops.OpOverloadPacket]:
        return [*original(), *_recomputable]

    partitioners.pointwise_ops = with_fused  # type: ignore[assignment]


def has_memory_budget(node: torch.fx.Node) -> bool:
    """Tell whether the user has set an activation memory budget for this node, in either of PyTorch's ways."""
    import torch.fx.traceback as traceback

    region = getattr(traceback, "_get_memory_budget_annotation", lambda _: None)
    return "memory_budget" in node.meta or region(node) is not None


def written_afterwards(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The inputs that AOTAutograd writes once forward has run, from its results: those that need a gradient."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    results = graph.output_node().meta.get("desc") or ()
    inputs = {result.mutated_input for result in results if isinstance(result, InputMutationAOTOutput)}
    return [node for node in graph.find_nodes(op="placeholder") if inputs and node.meta.get("desc") in inputs]


def nbytes(t: torch.Tensor) -> int:
    """The bytes of a tensor's elements; symbolic sizes count by their hints."""
    numel: int | torch.SymInt = t.numel()
    hint = numel.node.hint if isinstance(numel, torch.SymInt) else numel
    return int(hint or 0) * t.element_size()


def converts_to_fp8(device: torch.device) -> bool:
    """Tell whether generated code can convert to float8_e4m3fn: Triton from sm_89 on, and on AMD; C++ always can."""
    if device.type != "cuda" or torch.version.hip:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)


# ---- Inductor's IR -------------------------------------------------------------------------------


def keeps_loops_it_tried() -> bool:
    """Tell whether the scheduler leaves a node's loops reordered after it has tried to fuse the node with another.

    The two then score higher than the same node as a GEMM's epilogue, which would have been fused first.
    """
    from torch._inductor import scheduler as theirs

    return not hasattr(theirs, "_LoopMutationTracker")


@contextlib.contextmanager
def concat_node() -> Iterator[None]:
    """Allow ``ir.ConcatKernel.create`` inside the lowering of an operator other than aten.cat."""
    from torch._inductor.virtualized import V

    node = torch.fx.Graph().call_function(torch.ops.aten.cat.default, ([],))
    with V.graph.set_current_node(node):
        yield
