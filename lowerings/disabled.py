"""What ``passes`` is where pick-up is off (``internals``): nothing is picked up, and ``strict`` says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch_fused_ops import lowerings
from torch_fused_ops.policy import FusionPolicy, UnfusedError, policy_or_default


def _unless_strict(policy: FusionPolicy | None) -> None:
    if policy_or_default(policy).strict:
        raise UnfusedError(lowerings.off())


def active_policy() -> FusionPolicy | None:
    """None is in force."""
    return None


def enable(policy: FusionPolicy | None = None) -> None:
    """Nothing."""
    _unless_strict(policy)


def disable() -> None:
    """Nothing."""


@contextmanager
def enabled(policy: FusionPolicy | None = None) -> Iterator[None]:
    """Nothing."""
    _unless_strict(policy)
    yield


def compile_options(policy: FusionPolicy | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The options as they are."""
    _unless_strict(policy)
    return dict(options or {})
