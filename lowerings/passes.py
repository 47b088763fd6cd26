"""The passes in Inductor's slots: their registration, their policies, and their part of cache keys.

There are four slots: ``pre_grad_custom_pass`` (the pre-grad pass: recognition), ``custom_partitioner_fn`` (the
partitioner: memory levels, merged float8 calls), ``post_grad_custom_post_pass`` (the post-grad pass: sums over rows)
and ``_post_fusion_custom_pass`` (the scheduler pass: buffer reuse).
Two kinds of object stand in them. A *fixed* one carries its policy: ``compile_options`` and ``backend="fused"`` put
it into one compilation's options. The *ambient* one asks which policy is in force in its context: ``enable`` and
``enabled`` put it into the process-wide slots; where no policy is in force it does what upstream does.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch._inductor.config as inductor_config
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

from torch_fused_ops import activations
from torch_fused_ops._version import __version__
from torch_fused_ops.graphs import fusion_events, gemm_registry
from torch_fused_ops.graphs.capture import captured_graphs
from torch_fused_ops.graphs.listing import listed
from torch_fused_ops.graphs.modules import module_stack
from torch_fused_ops.lowerings import (
    buffer_reuse,
    compat,
    memory_levels,
    partition,
    saved_tensors,
    split_reductions,
)
from torch_fused_ops.policy import FusionPolicy, UnfusedError, enclosing_modules, policy_or_default
from torch_fused_ops.settings import environment, switches

log = logging.getLogger("torch_fused_ops")

# ---- identity ------------------------------------------------------------------------------------


@cache
def source_hash() -> str:
    """A hash of every source file of the package, lowerings included: what an upgrade changes."""
    digest = hashlib.sha256()
    for root in (Path(activations.__file__).parent, Path(__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def identity() -> str:
    """Our version, our sources, the activation table, the registered GEMMs and what is off, for every compile key."""
    tables = (activations.table_hash(), gemm_registry.registered_hash())
    parts = ("torch_fused_ops", __version__, source_hash(), *tables, *switches.WITHOUT)
    return "-".join(filter(None, parts))


_tag = ""


def tag_caches() -> None:
    """Append our identity to ``torch.compiler.config.cache_key_tag``.

    Inductor's and AOTAutograd's cache keys hold neither lowerings nor autograd formulas of custom operators: without
    the tag a process started after an upgrade is served the *old* code, forward and backward.
    """
    import torch.compiler.config as compiler_config

    def update(tag: str) -> str:
        global _tag
        new = f"|{identity()}"
        return tag.replace(_tag, new) if _tag and _tag in tag else tag + new

    compat.update_everywhere(compiler_config, "cache_key_tag", update)
    global _tag
    _tag = f"|{identity()}"
    for tables in (activations, gemm_registry):
        if tag_caches not in tables._on_change:
            tables._on_change.append(tag_caches)
    if _import_recognizer not in activations._on_change:
        activations._on_change.append(_import_recognizer)


def _import_recognizer() -> None:
    """Have ``register_activation`` warn of functions that the recognizer cannot read.

    The recognizer reads the table at each change from its import on, this change included: its import takes 0.5 s.
    """
    import torch_fused_ops.lowerings.recognize  # noqa: F401


# ---- whose policy --------------------------------------------------------------------------------

_everywhere: FusionPolicy | None = None
_here: ContextVar[FusionPolicy | None] = ContextVar("torch_fused_ops_policy", default=None)
_lock = compat.slots_lock()


def active_policy() -> FusionPolicy | None:
    """The policy that plain ``torch.compile`` follows in this context: ``enabled``'s, else ``enable``'s, else None."""
    return _here.get() or _everywhere


# ---- the passes ----------------------------------------------------------------------------------


class Pass:
    """A pass in one of Inductor's slots. If ``policy`` is None, it follows the policy active in its context."""

    name = ""
    shares = False  # True if the slot can hold several passes. Otherwise a pass that is already there stays

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
        return f"{self.name}|{identity()}|{self.policy_now()!r}|{_decided_before()}"

    def join(self, slot: Any) -> Any:
        """Append this pass to the slot's passes. Return the slot unchanged if it cannot take another pass."""
        passes = compat.passes_in(slot)
        if self in passes or (passes and not self.shares):
            return slot
        return compat.slot_of((*passes, self)) if self.shares else self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pass) and type(self) is type(other) and self.policy == other.policy

    def __hash__(self) -> int:
        return hash((type(self), self.policy))

    def __deepcopy__(self, memo: Any) -> Pass:
        return self  # config copies must keep the identity

    def __repr__(self) -> str:
        return f"<torch_fused_ops: {self.name}, {self.policy or 'the policy in force'}>"


class BeforeCaches(Pass):
    """The slot ``pre_grad_pass_timing``: run the pre-grad pass before torch looks into AOTAutograd's cache.

    The pre-grad pass adds the patterns' decisions to the cache keys (``_note_decisions``), so the keys come after it.
    """

    def join(self, slot: Any) -> Any:
        """Early, unless somebody has chosen."""
        return "early" if slot == "default" else slot


class PreGradPass(Pass, CustomGraphPass):
    """Recognition: one of the passes in ``pre_grad_custom_pass``."""

    name, shares = "pre-grad pass", True

    def uuid(self) -> str | None:
        """None where a key that is made before this pass has run would lack what patterns decide.

        Torch then runs the pass first, or says that it must.
        """
        policy = self.policy_now()
        by_patterns = policy is not None and any(policy.patterns.values())
        return None if by_patterns and compat.TIMING in SLOTS else super().uuid()

    def __call__(self, graph: torch.fx.Graph) -> None:
        global _graphs
        policy = self.policy_to_run()
        if policy is not None:
            check_keys()
            _graphs += 1
            _guarded(self, policy, functools.partial(self.run, graph, policy))
            if any(policy.patterns.values()) or any(map(memory_levels.asked, graph.nodes)):
                _note_decisions(graph, policy)

    def run(self, graph: torch.fx.Graph, policy: FusionPolicy) -> None:
        from torch_fused_ops.lowerings import strict  # not earlier: it imports the operators
        from torch_fused_ops.lowerings.recognize import rewrite

        fusion_events.before(graph, policy)
        has_patterns = any(policy.patterns.values())
        modules = {path for node in graph.nodes for path in module_stack(node)} if has_patterns else ()
        handed_over = isinstance(inductor_config.custom_partitioner_fn, Partitioner) and policy.memory != "off"
        if handed_over and not partition.budgeted(graph):
            memory_levels.unmark(graph)
        sites = rewrite(graph, policy)
        fusion_events.tell(graph, sites)
        fusion_events.trace("sites", lambda: {"policy": repr(policy), "sites": [asdict(site) for site in sites]})
        for site in sites:
            log.info("%s: %s", site.source, site.op or f"not fused: {site.reason}")
        missed = [site for site in sites if site.is_missed]
        if policy.strict and missed:
            raise UnfusedError(f"strict=True and these MLPs were not fused as the policy asks:\n{listed(missed)}")
        strict.check(graph, sites, policy, modules, explicit=self.policy is not None)
        if torch.cuda.is_initialized():
            environment.remind()


_decided: WeakKeyDictionary[TracingContext, str] = WeakKeyDictionary()  # by compilation, forward and backward


def _decided_before() -> str:
    context = TracingContext.try_get()
    return "" if context is None else _decided.get(context, "")


def _note_decisions(graph: torch.fx.Graph, policy: FusionPolicy) -> None:
    """Put what is decided for each node of a graph into the keys that are made from here on.

    That is what the policy's patterns say of its path, and the memory level that it asks for: no key of torch's has
    paths, or what else is noted on a node.
    """
    context = TracingContext.try_get()
    if context is not None:  # a caller of Inductor's own has no cache
        decide = functools.cache(lambda *paths: policy.decisions(enclosing_modules(paths)))
        decisions = [(decide(*module_stack(node)), memory_levels.asked(node)) for node in graph.nodes]
        noted = repr((_decided_before(), decisions))  # with what bodies of higher-order operators have
        _decided[context] = hashlib.sha256(noted.encode()).hexdigest()


class Partitioner(Pass, CustomPartitionerFn):
    """Partitioning, memory levels and merged float8 calls: ``custom_partitioner_fn``."""

    name = "partitioner"

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        policy = self.policy_to_run()
        if policy is None:
            return partition.upstream(gm, joint_inputs, **kwargs)
        decides = not partition.budgeted(gm.graph)  # otherwise the user's budget does
        free = policy.memory != "off" and decides
        less = free and (policy.memory != "free" or any(map(memory_levels.asked, gm.graph.nodes)))
        less = less or (decides and policy.attention != "off")
        handed = {
            "outputs": kwargs["num_fwd_outputs"],
            "static_inputs": kwargs.get("static_lifetime_input_indices") or (),
        }

        def divide() -> partition.Graphs:
            graphs = partition.partition(gm, joint_inputs, free=free, **kwargs)
            saved_tensors.check(graphs, **handed)
            return graphs

        from torch_fused_ops.lowerings.float8 import merged  # not earlier: it imports the lowerings

        graphs = _guarded(self, policy, divide)
        if graphs is None:  # nothing is rebuilt then that upstream would not rebuild
            return partition.upstream(gm, joint_inputs, budget=1, **kwargs)
        if free:
            graphs = _guarded(self, policy, functools.partial(memory_levels.rebuild, graphs, **handed)) or graphs
        if less:
            graphs = (
                _guarded(self, policy, functools.partial(memory_levels.keep_less, graphs, policy, **handed)) or graphs
            )
        graphs = _guarded(self, policy, functools.partial(merged, graphs)) or graphs
        fusion_events.trace("saved", functools.partial(_described, graphs[0].graph, **handed))
        return graphs


def _described(forward: torch.fx.Graph, outputs: int, static_inputs: Sequence[int]) -> dict[str, Any]:
    """The tensors that a forward graph saves for backward, besides parameters and buffers, for the structured trace."""
    inputs = forward.find_nodes(op="placeholder")
    static = {inputs[i] for i in static_inputs}
    results: list[Any] = list(forward.output_node().args[0])  # type: ignore[arg-type]
    saved: list[dict[str, Any]] = [
        {
            "node": node.name,
            "module": next(reversed(module_stack(node)), ""),
            "dtype": str(value.dtype),
            "shape": list(map(str, value.shape)),
            "bytes": compat.nbytes(value),
        }
        for node in results[outputs:]
        if isinstance(node, torch.fx.Node) and node not in static
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    ]
    return {"bytes": sum(tensor["bytes"] for tensor in saved), "tensors": saved}


class PostGradPass(Pass, CustomGraphPass):
    """Sums over rows: one of the passes in ``post_grad_custom_post_pass``."""

    name, shares = "post-grad pass", True

    def __call__(self, graph: torch.fx.Graph) -> None:
        policy = self.policy_to_run()
        if policy is not None and inductor_config.split_reductions and not switches.is_without("split_reductions"):
            _guarded(self, policy, functools.partial(split_reductions.rewrite, graph))


class SchedulerPass(Pass, compat.SchedulerPass):
    """Buffer reuse: ``_post_fusion_custom_pass``."""

    name = "scheduler pass"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        policy = self.policy_to_run()
        if policy is not None and inductor_config.inplace_buffers and not switches.is_without("buffer_reuse"):
            _guarded(self, policy, functools.partial(buffer_reuse.allow, nodes))
        return nodes


SLOTS: dict[str, type[Pass]] = {
    **({compat.TIMING: BeforeCaches} if hasattr(inductor_config, compat.TIMING) else {}),
    "pre_grad_custom_pass": PreGradPass,
    "custom_partitioner_fn": Partitioner,
    "post_grad_custom_post_pass": PostGradPass,
    **({slot: SchedulerPass} if (slot := compat.after_fusion()) else {}),
}


def _missing(policy: FusionPolicy) -> Iterator[str]:
    """Describe the parts of this policy that other settings of the current compilation turn off."""
    if not compat.runs_pre_grad_passes():
        yield (
            "no MLP is looked for: use_pre_grad_passes=False, which mode='lite' sets, turns Inductor's pre-grad passes "
            "off. Compile in another mode."
        )
    effects: dict[type[Pass], str] = {
        Partitioner: f"memory={policy.memory!r} has no effect",
        SchedulerPass: "no kernel reuses a buffer",
    }
    for name, kind in SLOTS.items():
        there = getattr(inductor_config, name)
        if kind in effects and there is not None and not isinstance(there, Pass) and policy.memory != "off":
            yield f"{effects[kind]}: {name} is {there!r}, and that slot of Inductor's holds one"


_graphs = 0  # number of graphs that the pre-grad pass ran on
_logged: set[str] = set()


def _guarded(graph_pass: Pass, policy: FusionPolicy, run: Callable[[], Any]) -> Any:
    """The result of ``run``; None if it fails, which is logged once."""
    try:
        return run()
    except Exception as error:
        if policy.strict:
            raise
        reason = f"{graph_pass.name}: {type(error).__name__}: {error}"
        fusion_events.failed(reason)
        if reason not in _logged:
            _logged.add(reason)
            log.warning("a pass failed and left the graph as it was (%s). Please report it.", reason, exc_info=True)
        return None


# ---- into and out of the slots -------------------------------------------------------------------

_users = 0  # enable() and open enabled() blocks
_joined: list[tuple[Any, Any]] = []  # (what stood in a slot, what we put there): leaving restores the very object


def _hold(delta: int) -> None:
    """Count who needs the ambient passes, and put them where they are needed: with each newcomer, since others may
    have set a slot meanwhile. A slot's override in this context needs them only while a policy is in force here.
    """
    global _users
    with _lock:
        _users += delta
        here = active_policy() is not None
        for name, kind in SLOTS.items():
            everywhere, own = (functools.partial(_update, kind(), needed) for needed in (_users > 0, here))
            compat.update_everywhere(inductor_config, name, everywhere, own)
        if _users == 0:
            _joined.clear()  # what others have replaced since is nobody's to restore


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
    """The slot's value without some of its passes."""
    passes = compat.passes_in(slot)
    others = [graph_pass for graph_pass in passes if not left_out(graph_pass)]
    return slot if len(others) == len(passes) else compat.slot_of(others)


# ---- public --------------------------------------------------------------------------------------


def check_keys() -> None:
    """Refuse what would serve code that was compiled under another policy.

    Raises:
        RuntimeError: Dynamo saves what it compiles by the function's source alone.
    """
    if compat.saves_by_source():
        raise RuntimeError(
            "torch._dynamo.config.caching_precompile=True is not accepted: it saves compiled code by the function's "
            "source, and serves it under any policy and backend. Set it to False; Inductor's and AOTAutograd's caches "
            "hold the policy in their keys"
        )


def enable(policy: FusionPolicy | None = None) -> None:
    """Let plain ``torch.compile(model)`` fuse MLPs, in every thread of this process. Idempotent.

    Passes that others put into Inductor's slots stay there and run first. Calling it again changes the policy.
    """
    global _everywhere
    policy = policy_or_default(policy)
    check_keys()
    if _everywhere is None:
        _say_what_came_before()
    with _lock:
        newcomer, _everywhere = _everywhere is None, policy
        _hold(int(newcomer))


def _say_what_came_before() -> None:
    """Once: that what is compiled already stays as it is. (A graph that is being compiled now is counted already.)"""
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
    """Undo ``enable``: take our passes, and only ours, out of Inductor's slots. Idempotent."""
    global _everywhere
    with _lock:
        if _everywhere is not None:
            _everywhere = None
            _hold(-1)


class enabled(ContextDecorator):
    """The same for the compilations that happen inside the block, in this thread (or async context) only.

    A block may be entered again once it is left. Blocks may be nested, each with an ``enabled()`` of its own.
    """

    def __init__(self, policy: FusionPolicy | None = None) -> None:
        self.policy = policy_or_default(policy)
        self._token: Token[FusionPolicy | None] | None = None

    def _recreate_cm(self) -> enabled:  # a decorated function may call itself
        return enabled(self.policy)

    def __enter__(self) -> None:
        if self._token is not None:
            raise RuntimeError("this enabled() block is open already: nested, and in each thread, call enabled() anew")
        check_keys()
        self._token = _here.set(self.policy)
        _hold(+1)

    def __exit__(self, *_: object) -> None:
        token, self._token = self._token, None
        assert token is not None
        _here.reset(token)
        _hold(-1)


def compile_options(policy: FusionPolicy | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Options for ``torch.compile(model, options=…)`` (or AOTInductor's ``inductor_configs``) that add our passes.

    Args:
        policy: by default ``FusionPolicy()``.
        options: your own Inductor options, kept; passes in them, or else those in Inductor's config now, run before
            ours.
    """
    if not isinstance(options, (dict, type(None))):
        raise TypeError(f"options={options!r} is not accepted: it must be a dict of Inductor options, or None")
    check_keys()
    policy, result = policy_or_default(policy), {**options_without_us(), **(options or {})}
    for name, kind in SLOTS.items():
        result[name] = kind(policy).join(_without(result[name], _is_ours))
    return result


def options_without_us() -> dict[str, Any]:
    """Options that compile without the fusion passes, whatever the policy; other passes in the slots stay."""
    return {name: _without(getattr(inductor_config, name), _is_ours) for name in SLOTS}


def _is_ours(graph_pass: Any) -> bool:
    return isinstance(graph_pass, Pass)
