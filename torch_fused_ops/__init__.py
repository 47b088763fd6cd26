"""Fused MLP operators for PyTorch that ``torch.compile`` sees through.

Three ways in: ``torch.compile(model, backend="fused")``; ``enable()`` and then plain ``torch.compile(model)``; the
operators themselves, ``torch.ops.fused.*``, typed in ``torch_fused_ops.functional``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

from torch_fused_ops import functional
from torch_fused_ops.activations import register_activation
from torch_fused_ops.explain import Report, Site, explain
from torch_fused_ops.ops import activation as _activation_operators  # noqa: F401 - registers torch.ops.fused.*
from torch_fused_ops.policy import FusionPolicy, UnfusedError
from torch_fused_ops.recording import record

__all__ = [
    "FusionPolicy",
    "Report",
    "Site",
    "UnfusedError",
    "__version__",
    "compile_options",
    "disable",
    "enable",
    "enabled",
    "explain",
    "functional",
    "record",
    "register_activation",
]


# Importing Inductor costs 1.7 s, which `import torch_fused_ops` must not: these four fetch it when they are called.


def enable(policy: FusionPolicy | None = None) -> None:
    """Let plain ``torch.compile(model)`` pick MLPs up, in every thread of this process. Idempotent.

    Passes that others put into Inductor's slots stay there and run first. Calling it again changes the policy.
    """
    from torch_fused_ops.lowerings import passes

    passes.enable(policy)


def disable() -> None:
    """Undo ``enable``: take our passes, and only ours, out of Inductor's slots. Idempotent."""
    from torch_fused_ops.lowerings import passes

    passes.disable()


def enabled(policy: FusionPolicy | None = None) -> AbstractContextManager[None]:
    """``with enabled():`` the same, for compilations that happen inside the block, in this thread (or context) only."""
    from torch_fused_ops.lowerings import passes

    return passes.enabled(policy)


def compile_options(policy: FusionPolicy | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Options for ``torch.compile(model, options=…)`` (or AOTInductor's ``inductor_configs``) that add our passes.

    Args:
        policy: by default ``FusionPolicy()``.
        options: your own Inductor options, kept; passes in them, or else those in Inductor's config now, run before
            ours.
    """
    from torch_fused_ops.lowerings import passes

    return passes.compile_options(policy, options)


class _WhenInductorLoads(importlib.abc.MetaPathFinder):
    """Registers the lowerings right after ``torch._inductor.lowering`` is first imported, by whomever."""

    target = "torch._inductor.lowering"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.target:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from torch_fused_ops.lowerings import register

            register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _WhenInductorLoads.target in sys.modules:
    from torch_fused_ops.lowerings import register as _register

    _register()
else:
    sys.meta_path.insert(0, _WhenInductorLoads())
