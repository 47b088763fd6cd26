"""The pass objects in Inductor's slots: how they get there, whose policy they follow, and what they add to cache keys.

There are two slots: ``pre_grad_custom_pass`` (stage 1, recognise) and ``joint_custom_pre_pass`` (stage 2, remember). Two
kinds of pass stand in them. A *fixed* pass carries its policy: ``compile_options`` and ``backend="fused"`` put it into one
compilation's options. The *ambient* pass asks which policy is in force in its context: ``enable`` and ``enabled`` put it
into the process-wide slots; where no policy is in force it does nothing.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import torch_fused_ops
from torch_fused_ops import activations
from torch_fused_ops.lowerings import compat, memory
from torch_fused_ops.policy import FusionPolicy

log = logging.getLogger("torch_fused_ops")

# ---- identity ------------------------------------------------------------------------------------------------------------


@cache
def source_hash() -> str:
    """A hash of every source file of the package, lowerings included: what an upgrade changes."""
    digest = hashlib.sha256()
    for root in (Path(torch_fused_ops.__file__).parent, Path(__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def identity() -> str:
    """Our version, our sources and the activation table, as they enter every compile key."""
    return f"torch_fused_ops-{torch_fused_ops.__version__}-{source_hash()}-{activations.table_hash()}"


_tag = ""


def tag_caches() -> None:
    """Append our identity to ``torch.compiler.config.cache_key_tag``.

    Inductor's and AOTAutograd's cache keys hold neither lowerings nor autograd formulas of custom operators: without the
    tag a process started after an upgrade is served the *old* code, forward and backward.
    """
    import torch.compiler.config as compiler_config

    def update(tag: str) -> str:
        global _tag
        new = f"|{identity()}"
        return tag.replace(_tag, new) if _tag and _tag in tag else tag + new

    compat.update_everywhere(compiler_config, "cache_key_tag", update)
    global _tag
    _tag = f"|{identity()}"
    if tag_caches not in activations._on_change:
        activations._on_change.append(tag_caches)


# ---- whose policy ----------------------------------------------------------------------------------------------------------

_everywhere: FusionPolicy | None = None
_here: ContextVar[FusionPolicy | None] = ContextVar("torch_fused_ops_policy", default=None)
_lock = threading.RLock()


def active_policy() -> FusionPolicy | None:
    """The policy that plain ``torch.compile`` follows in this context: ``enabled``'s, else ``enable``'s, else None."""
    return _here.get() or _everywhere


# ---- the passes ------------------------------------------------------------------------------------------------------------


class _Pass(CustomGraphPass):  # type: ignore[misc]
    """A stage as Inductor sees it. ``policy`` None: follow the context's."""

    stage = ""

    def __init__(self, policy: FusionPolicy | None = None) -> None:
        self.policy = policy

    def __call__(self, graph: torch.fx.Graph) -> None:
        policy = self.policy or active_policy()
        if policy is not None:
            _guarded(self.stage, self.run, graph, policy)

    def run(self, graph: torch.fx.Graph, policy: FusionPolicy) -> None:
        raise NotImplementedError

    def uuid(self) -> str:
        return f"{self.stage}|{identity()}|{self.policy or active_policy()!r}"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.policy == other.policy  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self.policy))

    def __deepcopy__(self, memo: Any) -> _Pass:
        return self

    def __repr__(self) -> str:
        return f"<torch_fused_ops {self.stage} pass, {self.policy or 'the policy in force'}>"


class RecognisePass(_Pass):
    """Stage 1, in ``pre_grad_custom_pass``."""

    stage = "recognise"

    def run(self, graph: torch.fx.Graph, policy: FusionPolicy) -> None:
        from torch_fused_ops.lowerings.recognise import rewrite

        sites = rewrite(graph, policy)
        for site in sites:
            log.info("%s: %s", site.source, site.op or f"left alone: {site.reason}")
        missed = [s for s in sites if s.op is None and not s.reason.startswith("not an MLP")]
        if policy.strict and missed:
            raise UnfusedError(
                "strict=True and these MLP sites were not fused:\n"
                + "\n".join(f"  {s.source}: {s.reason}" for s in missed)
            )


class MemoryPass(_Pass):
    """Stage 2, in ``joint_custom_pre_pass``."""

    stage = "remember"

    def run(self, graph: torch.fx.Graph, policy: FusionPolicy) -> None:
        if policy.memory == "free":
            memory.set_budget(graph)


SLOTS: dict[str, type[_Pass]] = {"pre_grad_custom_pass": RecognisePass, "joint_custom_pre_pass": MemoryPass}


class UnfusedError(RuntimeError):
    """Under ``strict=True``: an MLP site was left unfused, or a pass failed."""


_logged: set[str] = set()


def _guarded(stage: str, run: Callable[..., None], graph: torch.fx.Graph, policy: FusionPolicy) -> None:
    try:
        run(graph, policy)
    except Exception as error:
        if policy.strict:
            raise
        reason = f"{stage}: {type(error).__name__}: {error}"
        if reason not in _logged:
            _logged.add(reason)
            log.warning("a pass failed and left the graph as it was (%s). Please report it.", reason, exc_info=True)


# ---- into and out of the slots -----------------------------------------------------------------------------------------------


def _ours(one: Any) -> bool:
    return isinstance(one, _Pass)


_users = 0  # enable() and open enabled() blocks


def _hold(delta: int) -> None:
    """Count who needs the ambient passes; install them with the first, take them out with the last."""
    global _users
    with _lock:
        before, _users = _users, _users + delta
        if (before == 0) == (_users == 0):
            return
        for name, kind in SLOTS.items():
            ambient = kind()

            def update(slot: Any, ambient: _Pass = ambient, add: bool = _users > 0) -> Any:
                if add:
                    return _combined(slot, ambient)
                return _without(slot, ambient)

            compat.update_everywhere(inductor_config, name, update)


_combinations: list[tuple[Any, Any]] = []  # (what stood there, what we put there): to restore the very object


def _combined(slot: Any, ambient: _Pass) -> Any:
    passes = compat.passes_in(slot)
    if ambient in passes:
        return slot
    combined = compat.slot_of((*passes, ambient))
    _combinations.append((slot, combined))
    return combined


def _without(slot: Any, ambient: _Pass) -> Any:
    for before, combined in reversed(_combinations):
        if combined is slot:
            _combinations.remove((before, combined))
            return before
    passes = compat.passes_in(slot)
    if ambient not in passes:
        return slot
    return compat.slot_of([one for one in passes if one != ambient])


# ---- public ------------------------------------------------------------------------------------------------------------------


def _checked(policy: FusionPolicy | None) -> FusionPolicy:
    if policy is None:
        return FusionPolicy()
    if not isinstance(policy, FusionPolicy):
        raise TypeError(f"policy={policy!r} is not accepted: it must be a FusionPolicy or None")
    return policy


def enable(policy: FusionPolicy | None = None) -> None:
    """Let plain ``torch.compile(model)`` pick MLPs up, in every thread of this process. Idempotent.

    Passes that others put into Inductor's slots stay there and run first. Calling it again changes the policy.
    """
    global _everywhere
    policy = _checked(policy)
    with _lock:
        if _everywhere is None:
            _hold(+1)
        _everywhere = policy


def disable() -> None:
    """Undo ``enable``: take our passes, and only ours, out of Inductor's slots. Idempotent."""
    global _everywhere
    with _lock:
        if _everywhere is not None:
            _everywhere = None
            _hold(-1)


@contextmanager
def enabled(policy: FusionPolicy | None = None) -> Iterator[None]:
    """The same for the compilations that happen inside the block, in this thread (or async context) only."""
    token = _here.set(_checked(policy))
    _hold(+1)
    try:
        yield
    finally:
        _hold(-1)
        _here.reset(token)


def compile_options(policy: FusionPolicy | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Options for ``torch.compile(model, options=…)`` (or AOTInductor's ``inductor_configs``) that add our passes.

    Args:
        policy: by default ``FusionPolicy()``.
        options: your own Inductor options, kept; passes in them, or else those in Inductor's config now, run before ours.
    """
    policy, result = _checked(policy), dict(options or {})
    for name, kind in SLOTS.items():
        before = result.get(name, getattr(inductor_config, name))
        kept = [one for one in compat.passes_in(before) if not _ours(one)]
        result[name] = compat.slot_of([*kept, kind(policy)])
    return result
