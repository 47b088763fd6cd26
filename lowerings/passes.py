"""The passes in Inductor's slots: registration, policies, and cache keys.

====================  ==============================  ========================================
stage                 slot in Inductor's config       work
====================  ==============================  ========================================
pre-grad pass         ``pre_grad_custom_pass``        recognize MLPs
partitioner           ``custom_partitioner_fn``       apply memory levels, offload, merge float8 calls
post-grad pass        ``post_grad_custom_post_pass``  split sums over rows
scheduler pass        ``_post_fusion_custom_pass``    let kernels reuse buffers, fix the order of copies
====================  ==============================  ========================================

A pass with a fixed policy is part of one compilation's options (``compile_options``, ``backend="fused"``). A pass
without a policy is in the process-wide slots (``enable``, ``enabled``), and follows the policy active in its context.
Without an active policy, it has no effect.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.fx import Node

from torch_fused_ops import activations
from torch_fused_ops._version import __version__
from torch_fused_ops.graphs import fusion_events, gemm_registry
from torch_fused_ops.graphs.capture import captured_graphs
from torch_fused_ops.graphs.listing import AttentionSite, site_lines
from torch_fused_ops.graphs.modules import module_stack
from torch_fused_ops.graphs.reasons import Kind, Reason, Rejection
from torch_fused_ops.lowerings import (
    attention,
    buffer_reuse,
    checkpoints,
    compat,
    memory_levels,
    offload,
    partition,
    saved_tensors,
    split_reductions,
)
from torch_fused_ops.policy import FusionPolicy, UnfusedError, enclosing_modules, policy_or_default
from torch_fused_ops.settings import switches

log = logging.getLogger("torch_fused_ops")

# ---- identity ------------------------------------------------------------------------------------


@cache
def source_hash() -> str:
    """Return a hash of the package's source files, including lowerings. Every upgrade changes it."""
    digest = hashlib.sha256()
    for root in (Path(activations.__file__).parent, Path(__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def identity() -> str:
    """Return the text to add to every compile key: version, sources, registered activations and GEMMs, switches."""
    tables = (activations.table_hash(), gemm_registry.registered_hash())
    parts = ("torch_fused_ops", __version__, source_hash(), *tables, *switches.WITHOUT)
    return "-".join(filter(None, parts))


_tag = ""


def tag_caches() -> None:
    """Append ``identity()`` to ``torch.compiler.config.cache_key_tag``.

    Cache keys of Inductor and AOTAutograd contain neither lowerings nor autograd formulas of custom operators. Without
    the tag, a process that starts after an upgrade would get the *old* code from the cache, forward and backward.
    """
    import torch.compiler.config as compiler_config

    global _tag
    old, _tag = _tag, f"|{identity()}"

    def update(tag: str) -> str:
        return tag.replace(old, _tag) if old and old in tag else tag + _tag

    compat.update_everywhere(compiler_config, "cache_key_tag", update)
    for tables in (activations, gemm_registry):
        if tag_caches not in tables._on_change:
            tables._on_change.append(tag_caches)
    if _import_recognizer not in activations._on_change:
        activations._on_change.append(_import_recognizer)


def _import_recognizer() -> None:
    """Import the recognizer, so that ``register_activation`` warns about functions that it cannot read.

    Once imported, the recognizer reads the activation table after each change. Its import takes 0.5 s.
    """
    import torch_fused_ops.lowerings.recognize  # noqa: F401


# ---- active policy -------------------------------------------------------------------------------

_process_policy: FusionPolicy | None = None
_context_policy: ContextVar[FusionPolicy | None] = ContextVar("torch_fused_ops_policy", default=None)
_lock = compat.slots_lock()


def active_policy() -> FusionPolicy | None:
    """Return the policy for plain ``torch.compile`` in this context, set by ``enabled`` or else ``enable``, or None."""
    return _context_policy.get() or _process_policy


# ---- the passes ----------------------------------------------------------------------------------


class Pass:
    """A pass in one of Inductor's slots. If ``policy`` is None, it follows the policy active in its context."""

    name = ""
    allows_several = False  # True if the slot can hold several passes; otherwise an earlier pass stays in it

    def __init__(self, policy: FusionPolicy | None = None) -> None:
        self.policy = policy

    def policy_now(self) -> FusionPolicy | None:
        return self.policy or active_policy()

    def policy_to_run(self) -> FusionPolicy | None:
        """Return the policy for a pass that is about to run.

        If another setting disables part of it, raise under ``strict``, otherwise warn once.
        """
        policy = self.policy_now()
        for missing in _missing(policy) if policy is not None else ():
            if policy is not None and policy.strict:
                raise UnfusedError(f"strict=True and another setting disables a part: {missing}")
            if missing not in _logged:
                _logged.add(missing)
                log.warning(missing)
        return policy

    def uuid(self) -> str | None:
        # Inductor's key lacks donated_buffer, although its code then may overwrite saved tensors (docs/upstream.md).
        donated = functorch_config.donated_buffer
        return f"{self.name}|{identity()}|{self.policy_now()!r}|{_decision_hash()}|{donated}"

    def join(self, slot: Any) -> Any:
        """Append this pass to the slot's passes. Return the slot unchanged if it cannot take another pass."""
        passes = compat.passes_in(slot)
        if self in passes or (passes and not self.allows_several):
            return slot
        return compat.Passes((*passes, self)) if self.allows_several else self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pass) and type(self) is type(other) and self.policy == other.policy

    def __hash__(self) -> int:
        return hash((type(self), self.policy))

    def __deepcopy__(self, memo: Any) -> Pass:
        return self  # copies of the config must contain this object

    def __repr__(self) -> str:
        return f"<torch_fused_ops: {self.name}, {self.policy or 'the active policy'}>"


class PreGradTiming(Pass):
    """Sets the option ``pre_grad_pass_timing``: run the pre-grad pass before torch reads AOTAutograd's cache.

    The pre-grad pass adds the patterns' decisions to the cache keys (``_record_decisions``), so it must run first.
    """

    def join(self, slot: Any) -> Any:
        """Return "early", unless the user has chosen a value."""
        return "early" if slot == "default" else slot


class PreGradPass(Pass, CustomGraphPass):
    """Recognize MLPs and replace their activations by fused operators."""

    name, allows_several = "pre-grad pass", True

    def uuid(self) -> str | None:
        """Return None if a cache key computed before this pass runs would miss the patterns' decisions.

        Torch then runs the pass first, or raises an error.
        """
        policy = self.policy_now()
        by_patterns = policy is not None and any(policy.patterns.values())
        return None if by_patterns and compat.TIMING in SLOTS else super().uuid()

    def __call__(self, graph: torch.fx.Graph) -> None:
        global _graphs
        policy = self.policy_to_run()
        if policy is not None:
            reject_unsupported(policy)
            _graphs += 1
            _guarded(self, policy, functools.partial(self.run, graph, policy))
            if any(policy.patterns.values()) or any(map(memory_levels.requested_level, graph.nodes)):
                _record_decisions(graph, policy)

    def run(self, graph: torch.fx.Graph, policy: FusionPolicy) -> None:
        from torch_fused_ops.lowerings import strict  # not earlier: it imports the operators
        from torch_fused_ops.lowerings.recognize import rewrite

        fusion_events.before(graph, policy)
        has_patterns = any(policy.patterns.values())
        modules = {path for node in graph.nodes for path in module_stack(node)} if has_patterns else ()
        handed_over = isinstance(inductor_config.custom_partitioner_fn, Partitioner) and policy.memory != "off"
        if handed_over and not partition.budgeted(graph):
            memory_levels.move_fp8_marks_to_meta(graph)
        sites = rewrite(graph, policy)
        checkpoint = checkpoints.around_pass()
        sites = tuple(checkpoints.without_effect(site, checkpoint, policy) for site in sites)
        for observer in fusion_events.observers():
            observer.tell(graph, sites)
        for site in sites:
            level = f"; {site.level}. {site.memory_kind.hint}" if site.memory_kind is not None else ""
            log.info("%s: %s%s", site.source, site.op or f"not fused: {site.reason}", level)
        missed = [site for site in sites if site.is_missed]
        if policy.strict and missed:
            lines = ("strict=True and these MLPs were not fused as the policy asks:", *site_lines(missed))
            raise UnfusedError("\n".join(lines))
        strict.check(
            graph,
            sites,
            policy,
            modules,
            explicit=self.policy is not None,
            in_checkpoint=checkpoint is Kind.IN_CHECKPOINT,
        )


# By compilation of a forward and its backward.
_decision_hashes: WeakKeyDictionary[TracingContext, str] = WeakKeyDictionary()


def _decision_hash() -> str:
    context = TracingContext.try_get()
    return "" if context is None else _decision_hashes.get(context, "")


def _record_decisions(graph: torch.fx.Graph, policy: FusionPolicy) -> None:
    """Add the decisions for each node to every cache key computed after this point.

    A decision depends on the node's module path, by the policy's patterns, and on the memory level that the node
    requests. Torch's cache keys contain neither paths nor other metadata of nodes.
    """
    context = TracingContext.try_get()
    if context is not None:  # without a context Inductor uses no cache
        decide = functools.cache(lambda *paths: policy.decisions(enclosing_modules(paths)))
        decisions = [(decide(*module_stack(node)), memory_levels.requested_level(node)) for node in graph.nodes]
        text = repr((_decision_hash(), decisions))  # includes earlier graphs: bodies of higher-order operators
        _decision_hashes[context] = hashlib.sha256(text.encode()).hexdigest()


class Partitioner(Pass, CustomPartitionerFn):
    """Partition the joint graph, apply the policy's memory levels, and merge float8 calls."""

    name = "partitioner"

    def on_attention(self, policy: FusionPolicy, sites: Sequence[AttentionSite]) -> None:
        """Called with the attention of a joint graph for which the policy requests a level. Reports override it."""
        from torch_fused_ops.lowerings import strict  # not earlier: it imports the operators

        for observer in fusion_events.observers():
            observer.attention(sites)
        strict.add_attention(policy, sites)

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        policy = self.policy_to_run()
        if policy is None:
            return partition.partition_like_pytorch(gm, joint_inputs, **kwargs)
        has_precedence = not partition.budgeted(gm.graph)  # otherwise the user's budget has precedence
        free = has_precedence and policy.memory != "off"
        has_attention = has_precedence and policy.attention != "off"
        is_below_free = policy.memory != "free" or any(map(memory_levels.requested_level, gm.graph.nodes))
        offloads = has_precedence and policy.offload is not False
        attention_sites, outer = list[AttentionSite](), checkpoints.around_call()

        def on_attention(module: str, linears: Collection[Node], nbytes: int, reason: Reason | None) -> None:
            place = module or "the model"
            text = "" if reason is None else f"{reason}. {reason.kind.hint}"
            if reason is not None and policy.strict:
                raise UnfusedError(f"strict=True and attention='input' has no effect on {place}: {text}")
            if outer is not None:
                nbytes, reason = 0, Reason(outer, "it is inside a checkpoint")
                text = f"{reason}. {outer.hint}"
            modules = tuple(sorted(enclosing_modules(path for n in linears for path in module_stack(n))))
            kind = None if reason is None else reason.kind
            attention_sites.append(AttentionSite(place, nbytes, text, 1, modules, len(linears), kind))

        outputs = kwargs["num_fwd_outputs"]
        static = compat.static_inputs(gm.graph, kwargs.get("static_lifetime_input_indices") or ())
        kwargs["static_lifetime_input_indices"] = static

        def run_min_cut() -> partition.Graphs:
            if has_precedence:
                checkpoints.drop(gm.graph, policy)
                rejection = Rejection(Kind.IN_CHECKPOINT, "it is inside a checkpoint")
                for module, linears in checkpoints.attention_inside(gm.graph, policy).items():
                    log.info("%s: attention='input' has no effect: %s", module or "the model", rejection)
                    on_attention(module, linears, 0, rejection.reason)
            graphs = partition.partition(gm, joint_inputs, free=free, **kwargs)
            saved_tensors.SavedTensors(graphs[0].graph, graphs[1].graph, outputs, static).check()
            return graphs

        from torch_fused_ops.lowerings.float8 import merged  # not earlier: it imports the lowerings

        graphs = _guarded(self, policy, run_min_cut)
        if graphs is None:  # recompute only values that PyTorch would recompute
            return partition.partition_like_pytorch(gm, joint_inputs, budget=1, **kwargs)
        edits: list[Callable[[partition.Graphs], partition.Graphs]] = []
        if free:
            edits.append(lambda graphs: memory_levels.recompute_linear_inputs(graphs, outputs, static))
        if (free and is_below_free) or has_attention or offloads:
            edits.append(lambda graphs: memory_levels.apply_levels(graphs, policy, outputs, static, on_attention))
        for edit in (*edits, merged):
            graphs = _guarded(self, policy, functools.partial(edit, graphs)) or graphs
        if has_attention:
            self.on_attention(policy, attention_sites)
        return graphs


class PostGradPass(Pass, CustomGraphPass):
    """Split sums over rows into sums of blocks. Attention's heads share their mask in backward."""

    name, allows_several = "post-grad pass", True

    def __call__(self, graph: torch.fx.Graph) -> None:
        policy = self.policy_to_run()
        if policy is None:
            return
        _guarded(self, policy, functools.partial(attention.share_masks, graph))
        if inductor_config.split_reductions and not switches.is_without("split_reductions"):
            _guarded(self, policy, functools.partial(split_reductions.rewrite, graph))


class SchedulerPass(Pass, compat.SchedulerPass):
    """Let kernels write results over inputs that nothing reads later."""

    name = "scheduler pass"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        policy = self.policy_to_run()
        if policy is not None and inductor_config.inplace_buffers and not switches.is_without("buffer_reuse"):
            _guarded(self, policy, functools.partial(buffer_reuse.allow_reuse, nodes))
        if policy is not None and policy.offload is not False:
            _guarded(self, policy, functools.partial(offload.keep_order, nodes))
        return nodes


SLOTS: dict[str, type[Pass]] = {
    **({compat.TIMING: PreGradTiming} if hasattr(inductor_config, compat.TIMING) else {}),
    "pre_grad_custom_pass": PreGradPass,
    "custom_partitioner_fn": Partitioner,
    "post_grad_custom_post_pass": PostGradPass,
    "_post_fusion_custom_pass": SchedulerPass,
}


def _missing(policy: FusionPolicy) -> Iterator[str]:
    """Yield a message for each part of this policy that other settings of the compilation disable."""
    if not inductor_config.use_pre_grad_passes:
        yield (
            "no MLP is looked for: use_pre_grad_passes=False, which mode='lite' sets, turns Inductor's pre-grad passes "
            "off. Compile in another mode."
        )
    if policy.offload is not False and offload.prevented():
        yield f"offload={policy.offload!r} has no effect: {offload.prevented()}"
    requested = [name for name in ("memory", "attention", "offload") if getattr(policy, name) not in ("off", False)]
    effects = [("custom_partitioner_fn", f"{name}={getattr(policy, name)!r} has no effect") for name in requested]
    in_scheduler = {"memory": "no kernel reuses a buffer", "offload": "no copy overlaps a GEMM"}
    effects += [("_post_fusion_custom_pass", in_scheduler[name]) for name in requested if name in in_scheduler]
    for slot, effect in effects:
        current = getattr(inductor_config, slot)
        if current is not None and not isinstance(current, Pass):
            yield f"{effect}: {slot} is {current!r}, and this slot holds only one pass"


_graphs = 0  # number of graphs that the pre-grad pass has processed
_logged: set[str] = set()


def _guarded(graph_pass: Pass, policy: FusionPolicy, run: Callable[[], Any]) -> Any:
    """Return the result of ``run``. If it fails, raise under ``strict``, otherwise log it once and return None."""
    try:
        return run()
    except Exception as error:
        if policy.strict:
            raise
        reason = f"{graph_pass.name}: {type(error).__name__}: {error}"
        for observer in fusion_events.observers():
            observer.failed(reason)
        if reason not in _logged:
            _logged.add(reason)
            log.warning("a pass failed and left the graph as it was (%s). Please report it.", reason, exc_info=True)
        return None


# ---- slots ---------------------------------------------------------------------------------------

_users = 0  # number of open enabled() blocks, plus one after enable()
_joined: list[tuple[Any, Any]] = []  # (previous value, our value) per slot, so that leaving restores the same object


def _update_slots(delta: int) -> None:
    """Change the number of users by ``delta``, and put the passes into the slots or take them out.

    Every new user updates the slots, because other code may have set a slot. An override of a slot in this context gets
    a pass only while a policy is active in this context.
    """
    global _users
    with _lock:
        _users += delta
        is_active = active_policy() is not None
        for name, kind in SLOTS.items():
            update_process, update_context = (
                functools.partial(_update, kind(), needed) for needed in (_users > 0, is_active)
            )
            compat.update_everywhere(inductor_config, name, update_process, update_context)
        if _users == 0:
            _joined.clear()  # do not restore slots that other code has set since


def _update(graph_pass: Pass, join: bool, slot: Any) -> Any:
    if join:
        joined = graph_pass.join(slot)
        if joined is not slot:
            _joined.append((slot, joined))
        return joined
    for before, joined in reversed(_joined):
        if joined is slot:
            _joined.remove((before, joined))
            return before
    return _without(slot, graph_pass.__eq__)


def _without(slot: Any, left_out: Callable[[Any], bool]) -> Any:
    """Return the slot's value without the passes for which ``left_out`` is true."""
    passes = compat.passes_in(slot)
    remaining = [graph_pass for graph_pass in passes if not left_out(graph_pass)]
    if len(remaining) == len(passes):
        return slot
    return compat.Passes(remaining) if remaining else None


# ---- public --------------------------------------------------------------------------------------


def reject_unsupported(policy: FusionPolicy | None = None) -> None:
    """Reject ``caching_precompile``, whose cache ignores the policy, and offloading if torch does not support it.

    Raises:
        RuntimeError: ``caching_precompile`` is set, so that Dynamo saves compiled code by the function's source only;
            or this torch has no operators that copy tensors to the host.
    """
    # Importing the operators is also necessary for code that comes from a cache.
    if policy is not None and policy.offload is not False and not compat.has_offload_operators():
        raise RuntimeError(
            f"offload={policy.offload!r} is not accepted: torch {torch.__version__} has no operators that copy tensors "
            "to the host during forward; torch 2.13 and later have them"
        )
    if torch._dynamo.config.caching_precompile:
        raise RuntimeError(
            "torch._dynamo.config.caching_precompile=True is not accepted: it saves compiled code by the function's "
            "source, and serves it under any policy and backend. Set it to False; Inductor's and AOTAutograd's caches "
            "hold the policy in their keys"
        )


def enable(policy: FusionPolicy | None = None) -> None:
    """Let plain ``torch.compile(model)`` fuse MLPs, in every thread of this process. Idempotent.

    Other passes in Inductor's slots stay there and run first. A second call changes the policy.
    """
    global _process_policy
    policy = policy_or_default(policy)
    reject_unsupported(policy)
    if _process_policy is None:
        _warn_already_compiled()
    with _lock:
        is_new, _process_policy = _process_policy is None, policy
        _update_slots(int(is_new))


def _warn_already_compiled() -> None:
    """Warn once that graphs compiled before ``enable()`` do not change, unless a graph is being compiled now."""
    graphs = captured_graphs() - _graphs if compat.has_compiled() else 0
    if graphs > 0 and torch._guards.CompileContext.try_get() is None and "before" not in _logged:
        _logged.add("before")
        log.warning(
            "enable() comes after torch.compile has compiled %d %s without it: compiled code does not change. Call "
            "enable() first, or torch.compiler.reset() now.",
            graphs,
            "graph" if graphs == 1 else "graphs",
        )


def disable() -> None:
    """Undo ``enable``: remove its passes from Inductor's slots. Other passes stay. Idempotent."""
    global _process_policy
    with _lock:
        if _process_policy is not None:
            _process_policy = None
            _update_slots(-1)


@contextmanager
def enabled(policy: FusionPolicy | None = None) -> Iterator[None]:
    """Let plain ``torch.compile(model)`` fuse MLPs inside this block, in this thread (or async context) only."""
    policy = policy_or_default(policy)
    reject_unsupported(policy)
    token = _context_policy.set(policy)
    _update_slots(+1)
    try:
        yield
    finally:
        _context_policy.reset(token)
        _update_slots(-1)


def compile_options(policy: FusionPolicy | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return options for ``torch.compile(model, options=…)`` (or AOTInductor's ``inductor_configs``) with fusion.

    Args:
        policy: the fusion policy, by default ``FusionPolicy()``.
        options: your own Inductor options, which stay. Passes in them run before the fusion passes. For a
            slot that is not among them, the passes in Inductor's config run before the fusion pass.
    """
    if not isinstance(options, (dict, type(None))):
        raise TypeError(f"options={options!r} is not accepted: it must be a dict of Inductor options, or None")
    policy, result = policy_or_default(policy), {**options_without_us(), **(options or {})}
    reject_unsupported(policy)
    for name, kind in SLOTS.items():
        result[name] = kind(policy).join(_without(result[name], _is_ours))
    return result


def options_without_us() -> dict[str, Any]:
    """Return options that compile without the fusion passes at any policy. Other passes in the slots stay."""
    return {name: _without(getattr(inductor_config, name), _is_ours) for name in SLOTS}


def _is_ours(graph_pass: Any) -> bool:
    return isinstance(graph_pass, Pass)
