"""Observers of the fusion pass: the ``record`` blocks that are open in this thread (or context)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from torch_fused_ops.policy import FusionPolicy

if TYPE_CHECKING:
    from torch.fx import Graph

    from torch_fused_ops.graphs.listing import AttentionSite
    from torch_fused_ops.graphs.sites import Site

log = logging.getLogger("torch_fused_ops")


class Observer(Protocol):
    """Callbacks of the pre-grad pass, in the thread that compiles."""

    def before(self, graph: Graph, policy: FusionPolicy) -> None:
        """Called before the fusion pass runs on a graph."""

    def tell(self, graph: Graph, sites: Sequence[Site]) -> None:
        """Called with the sites that the fusion pass has found in a graph."""

    def attention(self, sites: Sequence[AttentionSite]) -> None:
        """Called with the attention of a joint graph for which the policy requests a level."""

    def failed(self, reason: str) -> None:
        """Called if the fusion pass has failed on a graph and left it unchanged."""


process_wide: list[Observer] = []  # called in every thread, except inside ``unobserved``
_observers: ContextVar[Sequence[Observer]] = ContextVar("torch_fused_ops_observers", default=process_wide)
_unobserved: ContextVar[bool] = ContextVar("torch_fused_ops_unobserved", default=False)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Also call this observer inside the block."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


@contextmanager
def unobserved() -> Iterator[None]:
    """Mark compilations inside the block as internal: only observers that are added inside the block are called."""
    tokens = _observers.set(()), _unobserved.set(True)
    try:
        yield
    finally:
        _observers.reset(tokens[0])
        _unobserved.reset(tokens[1])


def is_unobserved() -> bool:
    """Return True inside ``unobserved``."""
    return _unobserved.get()


def before(graph: Graph, policy: FusionPolicy) -> None:
    """Tell the observers that the fusion pass is about to run on a graph. Never raises."""
    for observer in _observers.get():
        try:
            observer.before(graph, policy)
        except Exception:
            log.warning("record: a graph could not be noted", exc_info=True)


def observers() -> Sequence[Observer]:
    """Return the observers to call now."""
    return _observers.get()
