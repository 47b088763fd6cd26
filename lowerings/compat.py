"""Probes for the features in which torch versions differ. Nothing else in ``lowerings`` knows of versions.

Each probe's docstring or comment names the versions. Without a version, it holds for torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import CodeType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass


class Fault(NamedTuple):
    """A fault of another package that produces wrong numbers."""

    package: str
    first: tuple[int, int]  # first version with the fault
    last: tuple[int, int]  # last tested version, which still has the fault
    report: str  # section of docs/upstream.md, or number of an issue of PyTorch
    effect: str

    @property
    def link(self) -> str:
        """Return the address of the report."""
        if self.report.isdecimal():
            return f"https://github.com/pytorch/pytorch/issues/{self.report}"
        return f"docs/upstream.md#{self.report}"


FAULTS = (
    Fault(
        "torch", (2, 13), (2, 15), "written-inputs", "wrong gradients if forward writes an input that backward reads"
    ),
    Fault("torch", (2, 11), (2, 15), "written-results", "wrong gradients if the caller writes a view of a result"),
    Fault("torch", (2, 13), (2, 15), "donated-buffers", "wrong gradients with retain_graph if code comes from a cache"),
    Fault("torch", (2, 11), (2, 15), "float8-store", "wrong gradients of its own float8 store without use_scaling"),
    Fault("torch", (2, 13), (2, 15), "190758", "dropout has another mask in backward if activation_memory_budget < 1"),
    Fault(
        "torch",
        (2, 10),
        (2, 13),
        "193061",
        "wrong gradients on GPUs that are parts of one tensor (mix_order_reduction)",
    ),
    Fault("torch", (2, 13), (2, 13), "194976", "a clamp whose limit is a Python float that changes uses an old limit"),
    Fault("torch", (2, 13), (2, 14), "197829", "x[1:] = x[:-1].clone() copies over its source"),
    Fault("torch", (2, 13), (2, 14), "198031", "a custom op that writes a clone of x may write x"),
    Fault("triton", (3, 7), (3, 8), "ptxas", "a transposed float8 store writes wrong bytes"),
)


def faults(versions: dict[str, str]) -> list[Fault]:
    """Return the faults of the installed versions. ``versions`` maps packages to versions, or "" if not installed."""
    numbers = {package: tuple(int(n) for n in re.findall(r"\d+", text)[:2]) for package, text in versions.items()}
    return [fault for fault in FAULTS if fault.first <= numbers[fault.package] <= fault.last]


# The class of scheduler passes: torch ≥ 2.13.
if TYPE_CHECKING:
    SchedulerPass = custom_graph_pass.CustomSchedulerPass
else:
    SchedulerPass = getattr(custom_graph_pass, "CustomSchedulerPass", object)


# ---- pass slots ----------------------------------------------------------------------------------


def on_other_streams(loop: Any, name: str) -> bool:
    """Return True if a buffer and a loop are on different streams. Older versions of torch use a single stream."""
    hazard = getattr(loop.scheduler, "has_cross_stream_hazard", None)
    return bool(hazard is not None and hazard(name, loop))


class Passes(tuple[Any, ...], CustomGraphPass):
    """Several passes in a slot. Torch ≥ 2.13 accepts a tuple of passes; before, a slot holds one ``CustomGraphPass``.

    It is callable also for other passes that call the slot's previous value.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        for graph_pass in self:
            graph_pass(graph)

    def uuid(self) -> Any:
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self]
        return None if None in ids else repr(ids)  # a pass without an identity disables the cache

    def __deepcopy__(self, memo: Any) -> Passes:
        return self  # copies of the config must contain this object


def passes_in(slot: Any) -> tuple[Any, ...]:
    """Return the passes that a slot's value holds."""
    if slot is None:
        return ()
    return tuple(slot) if isinstance(slot, (list, tuple)) else (slot,)


TIMING = "pre_grad_pass_timing"
"""Inductor's option for when pre-grad passes run (torch ≥ 2.13). Without it, they run before torch reads AOTAutograd's
cache."""


def has_compiled() -> bool:
    """Return True if Dynamo has compiled anything since its last reset. (A reset does not change its counters.)"""
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(convert_frame, "FRAME_COUNTER", 1 if convert_frame else 0))


def eager_rounding(dtype: torch.dtype | None) -> str:
    """Return the Inductor setting, as text, that requests eager's rounding in a dtype; "" without such a setting."""
    import torch._inductor.config as config

    numerics = getattr(config, "numerics", "")  # torch ≥ 2.15
    if str(numerics).startswith("strict"):
        return f"numerics={numerics!r}"
    rounds = dtype in (torch.bfloat16, torch.float16) and getattr(config, "emulate_precision_casts", False)
    return "emulate_precision_casts=True" if rounds else ""


def eager_random() -> str:
    """Return the name of the Inductor setting that requests eager's random numbers; "" without such a setting."""
    import torch._inductor.config as config

    names = ("fallback_random", "align_random_eager")  # the second: torch ≥ 2.13
    return next((name for name in names if getattr(config, name, False)), "")


# ---- config values, process-wide -----------------------------------------------------------------


def slots_lock() -> AbstractContextManager[Any]:
    """Return a re-entrant lock for changes of slots.

    If the config is process-wide (torch < 2.13), a compilation with ``options=`` changes it and restores it afterwards,
    which would undo changes by other threads. The lock is then torch's own lock for compilations.
    """
    import torch._inductor.config as config

    if isinstance(vars(config)["_config"]["pre_grad_custom_pass"].user_override, ContextVar):
        return threading.RLock()
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def update_everywhere(
    module: Any, name: str, update: Callable[[Any], Any], update_context: Callable[[Any], Any] | None = None
) -> None:
    """Replace a config value by ``update(value)``, for compilations in every thread.

    If overrides are context variables (torch ≥ 2.13), other threads see the entry's default instead of this thread's
    override. This function therefore updates both, the override with ``update_context`` if it is not None. Overrides in
    *other* contexts do not change.
    """
    entry = module._config[name]
    override = entry.user_override
    if isinstance(override, ContextVar):
        _update_default(entry, update)
        if not _is_unset(override.get()):
            override.set((update_context or update)(override.get()))
    elif _is_unset(override):
        _update_default(entry, update)
    else:
        entry.user_override = update(override)
    # The module caches its values for cache keys, and a hash of the values.
    if hasattr(module, "_mark_get_dict_dirty"):
        module._mark_get_dict_dirty(name)
    for flag in ("_hash_dirty_var", "_is_dirty"):
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
    """Return the ``torch.autograd.Function`` of a call that Dynamo does not trace (``allow_in_graph``), or None."""
    if getattr(target, "__name__", "") != "trampoline_autograd_apply":
        return None
    function = inspect.getclosurevars(target).nonlocals.get("fn_cls")
    return function if isinstance(function, type) and issubclass(function, torch.autograd.Function) else None


def why_it_ended(graph: torch.fx.Graph) -> Any:
    """Return Dynamo's ``GraphCompileReason`` for the end of a graph; None for bodies and graphs of other origin."""
    return getattr(graph.owning_module, "compile_subgraph_reason", None)


def split_from(graph: torch.fx.Graph) -> torch.fx.GraphModule | None:
    """Return the graph from which DDPOptimizer has split this graph; None for other graphs.

    DDPOptimizer passes each part separately to the backend, so the whole graph is read from the Python stack.
    """
    for frame in _frames() if why_it_ended(graph) is not None else ():
        if frame.f_globals.get("__name__") == "torch._dynamo.backends.distributed" and "split_gm" in frame.f_locals:
            unsplit: torch.fx.GraphModule | None = frame.f_locals.get("gm")
            return unsplit
    return None


def _frames() -> Iterator[FrameType]:
    """Return the frames of the Python stack, innermost first."""
    return (frame for frame, _ in traceback.walk_stack(sys._getframe()))


class CompiledCall(NamedTuple):
    """A call of a compiled function, during which torch compiles a graph.

    Attributes:
        function: identifies the function that ``torch.compile`` returned.
        at_its_end: list of callbacks for the end of the call. Never called on torch versions without such a list.
        is_whole: True if torch compiles the function itself; False for a callee, and for code after a graph break.
        code: the code of the frame that is being compiled.
    """

    function: Any
    at_its_end: list[Callable[[], Any]]
    is_whole: bool
    code: CodeType | None


def compiled_call() -> CompiledCall | None:
    """Return the innermost compiled call, or None. Torch has no hook (2.11 to 2.15), so this reads the Python stack."""
    is_whole, code = False, None
    for frame in _frames():
        module = frame.f_globals.get("__name__")
        if module == "torch._dynamo.eval_frame" and frame.f_code.co_name == "compile_wrapper":
            variables = frame.f_locals
            return CompiledCall(variables.get("self"), variables.get("cleanups", []), is_whole, code)
        if module == "torch._dynamo.convert_frame":
            is_whole = True
            if frame.f_code.co_name == "_compile":
                code = frame.f_locals["code"]
        elif module not in ("torch._dynamo.eval_frame", "torch._dynamo.external_utils", "torch.nn.modules.module"):
            is_whole = False
    return None


def graphs_in_pre_grad_passes() -> Iterator[torch.fx.GraphModule]:
    """Yield the graph whose pre-grad passes run, its caller, the caller's caller, … from the Python stack.

    Inductor runs the passes on the bodies of higher-order operators first, without their caller (2.11 to 2.15).
    """
    for frame in _frames():
        if frame.f_code.co_name == "_recursive_pre_grad_passes":
            yield frame.f_locals["gm"]


def is_called_from(module: str) -> bool:
    """Return True if a function of this module is on the Python stack."""
    return any(frame.f_globals.get("__name__") == module for frame in _frames())


def compile_in_place(module: torch.nn.Module, **options: Any) -> None:
    """Call ``module.compile(**options)`` with a separate limit of eight compilations for this module.

    Modules of one class share the code of ``forward``, so the ninth variant would stay eager. Torch < 2.13 counts
    compilations per code object. For it, each module gets its own code object, into which Dynamo inlines
    ``forward`` and the hooks. Versions before 2.15 compile ``forward`` of torch's own classes, such as
    ``nn.Sequential``, only if the call is wrapped.
    """
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        call = FunctionType(_call_impl.__code__.replace(), globals())
        module._compiled_call_impl = torch.compile(MethodType(call, module), **options)
        return
    is_in_torch = type(module).forward.__module__.startswith("torch.nn.")
    with torch._dynamo.config.patch(wrap_top_frame=is_in_torch):
        module.compile(**options, isolate_recompiles=True)


def _call_impl(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


# ---- the partitioner -----------------------------------------------------------------------------


_recomputable: set[torch._ops.OpOverloadPacket] = set()


def allow_recomputation(operators: Iterable[torch._ops.OpOverloadPacket]) -> None:
    """Add operators to the partitioner's list of pointwise operators, which backward may recompute. Idempotent.

    The list has every aten operator with the pointwise tag, and no operator of other namespaces. The partitioner saves
    the result of an operator that is not on the list if backward reads it (a Llama-7B block, bf16, 4×2048 tokens: 901
    MiB without the fused operators on the list, 729 with them). This wraps the function that returns the list.
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
    """Return True if the user has set an activation memory budget for this node.

    PyTorch has two APIs: a mark in the node's metadata, and region_activation_memory_budget (torch ≥ 2.13).
    """
    region = getattr(torch.fx.traceback, "_get_memory_budget_annotation", lambda _: None)
    return "memory_budget" in node.meta or region(node) is not None


def written_afterwards(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the inputs to which AOTAutograd copies results after forward has run: inputs with a gradient."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    results = graph.output_node().meta.get("desc") or ()
    inputs = {result.mutated_input for result in results if isinstance(result, InputMutationAOTOutput)}
    return [node for node in graph.find_nodes(op="placeholder") if inputs and node.meta.get("desc") in inputs]


def static_inputs(graph: torch.fx.Graph, arguments: Iterable[int]) -> list[int]:
    """Return the positions of parameters and buffers among a joint graph's inputs.

    AOTAutograd counts arguments. A tensor subclass is one argument with several inputs: a DTensor's local tensor and
    its mesh. Without tensor subclasses, the positions are ``arguments``.
    """
    positions, static, argument, previous = list[int](), set(arguments), -1, None
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        owner = node.meta.get("desc")
        while hasattr(owner, "base"):
            owner = owner.base
        argument += owner is None or owner != previous
        previous = owner
        if argument in static and isinstance(node.meta.get("val"), torch.Tensor):
            positions.append(i)
    return positions


def converts_to_fp8(device: torch.device) -> bool:
    """Return True if generated code can convert to float8_e4m3fn: Triton from sm_89 on and on AMD, C++ always."""
    if device.type != "cuda" or torch.version.hip:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def has_offload_operators() -> bool:
    """Import PyTorch's operators ``ao::offload``, ``ao::reload`` and ``ao::wait_tensor``. False before torch 2.13."""
    try:
        importlib.import_module("torch._functorch._activation_offloading.offload_ops")
    except ImportError:
        return False
    return True


# ---- Inductor's IR -------------------------------------------------------------------------------


def keeps_loops_it_tried() -> bool:
    """Return True if the scheduler leaves a node's loops reordered after an attempt to fuse it with another node.

    This pair then gets a higher score than the pair of node and GEMM, which would otherwise be fused first.
    """
    from torch._inductor import scheduler

    return not hasattr(scheduler, "_LoopMutationTracker")


@contextlib.contextmanager
def concat_node() -> Iterator[None]:
    """Allow ``ir.ConcatKernel.create`` inside the lowering of an operator other than aten.cat.

    Torch 2.11 asserts that the first argument of the current FX node is a list.
    """
    from torch._inductor.virtualized import V

    node = torch.fx.Graph().call_function(torch.ops.aten.cat.default, ([],))
    with V.graph.set_current_node(node):
        yield
