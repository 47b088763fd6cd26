"""Replacements for the functions of ``passes`` while fusion is off. They fuse nothing, and raise under ``strict``."""

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
    """Return None: no policy is active."""
    return None


def enable(policy: FusionPolicy | None = None) -> None:
    """Do nothing. Raise if the policy is strict."""
    _unless_strict(policy)


def disable() -> None:
    """Do nothing."""


@contextmanager
def enabled(policy: FusionPolicy | None = None) -> Iterator[None]:
    """Do nothing. Raise if the policy is strict."""
    _unless_strict(policy)
    yield


def compile_options(policy: FusionPolicy | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the options unchanged. Raise if the policy is strict."""
    _unless_strict(policy)
    return dict(options or {})
