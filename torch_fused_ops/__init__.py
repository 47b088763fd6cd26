"""Fused MLP operators for PyTorch, transparent to ``torch.compile``.

Use them in one of three ways: ``torch.compile(model, backend="fused")``; ``enable()``, then plain
``torch.compile(model)``; or calls of the operators: ``torch.ops.fused.*``, the typed ``torch_fused_ops.ops.*``, or
the Python functions of ``torch_fused_ops.functional``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

# `python -m torch_fused_ops` imports this file first, while sys.argv still begins with "-m".
if sys.argv[:1] == ["-m"] and (_module := sys.orig_argv[-len(sys.argv)]).split(".")[0] == __name__:
    # Torch takes 2 s to import; --help, --version and usage errors do not need it.
    if _module == __name__:
        from torch_fused_ops.settings import environment
        from torch_fused_ops.tools.arguments import parse

        _arguments = parse(sys.argv[1:])
        if _arguments.command == "run":  # run() replaces this process
            environment.run(_arguments)
    # Hide torch's warning: this package does not need NumPy, and `info` reports a missing NumPy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")

from torch_fused_ops.settings import environment  # first, so that an invalid setting stops the import

# isort: split
from torch_fused_ops import functional
from torch_fused_ops._version import __version__
from torch_fused_ops.activations import register_activation
from torch_fused_ops.graphs.gemm_registry import register_gemm
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.operators.decompositions import decompositions
from torch_fused_ops.policy import FIELDS, FusionPolicy, UnfusedError, not_known, policy_given

__all__ = [
    "FusionPolicy",
    "Plan",
    "Report",
    "Site",
    "UnfusedError",
    "Verification",
    "__version__",
    "compile_options",
    "decompositions",
    "disable",
    "enable",
    "enabled",
    "explain",
    "functional",
    "plan",
    "read_snapshot",
    "record",
    "register_activation",
    "register_gemm",
    "verify",
]


if environment.REPORT:
    from torch_fused_ops.reports.recording import report_at_exit

    report_at_exit(Path(environment.REPORT))

_PARTS = {
    **{name: name for name in ("distributed", "lowerings", "megatron", "nn", "ops", "slapo", "testing", "virtual_gpu")},
    "reference": "operators.reference",
}
# Names and modules of the planner, the reports and verify, which compiling does not need.
_TOOLS = {
    **dict.fromkeys(("Plan", "plan"), "planner.plan"),
    **dict.fromkeys(("Verification", "verify"), "tools.verify"),
    **{
        "read_snapshot": "reports.snapshot",
        "Report": "reports.report",
        "explain": "reports.explain",
        "record": "reports.recording",
    },
}


def __dir__() -> list[str]:
    return [*__all__, *_PARTS]


if TYPE_CHECKING:
    from typing_extensions import Unpack

    from torch_fused_ops import distributed, lowerings, megatron, nn, ops, slapo, testing, virtual_gpu
    from torch_fused_ops.operators import reference
    from torch_fused_ops.planner.plan import Plan, plan
    from torch_fused_ops.policy import PolicyFields
    from torch_fused_ops.reports.explain import explain
    from torch_fused_ops.reports.recording import record
    from torch_fused_ops.reports.report import Report
    from torch_fused_ops.reports.snapshot import read_snapshot
    from torch_fused_ops.tools.verify import Verification, verify

    __all__ += ["distributed", "lowerings", "megatron", "nn", "ops", "reference", "slapo", "testing", "virtual_gpu"]
else:  # type checkers must not see __getattr__: they would accept any name

    def __getattr__(name: str) -> Any:
        """Import a subpackage or a tool on first use: ``import torch_fused_ops as tfo; tfo.nn.FusedMLP``."""
        if name in _PARTS:
            return importlib.import_module(f"{__name__}.{_PARTS[name]}")
        if name in _TOOLS:
            return globals().setdefault(name, getattr(importlib.import_module(f"{__name__}.{_TOOLS[name]}"), name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Importing Inductor takes 1.7 s, so the next four functions import it when they are called.


def _load_passes() -> Any:
    from torch_fused_ops import lowerings

    return lowerings.load_passes()


def enable(policy: FusionPolicy | None = None, **fields: Unpack[PolicyFields]) -> None:
    """Fuse MLPs in plain ``torch.compile(model)``, in every thread of this process. Idempotent.

    Passes that are already in Inductor's slots stay and run first. A second call replaces the policy.

    Args:
        policy: the policy; None means ``FusionPolicy()``.
        fields: instead of a policy, its fields: ``enable(memory="fp8")`` is ``enable(FusionPolicy(memory="fp8"))``.
    """
    _load_passes().enable(policy_given("enable", policy, fields))


def disable() -> None:
    """Undo ``enable``: remove our passes, and only ours, from Inductor's slots. Idempotent."""
    _load_passes().disable()


def enabled(policy: FusionPolicy | None = None, **fields: Unpack[PolicyFields]) -> AbstractContextManager[None]:
    """``with enabled():`` acts as ``enable``, for compilations in the block and in this thread (or context) only."""
    block: AbstractContextManager[None] = _load_passes().enabled(policy_given("enabled", policy, fields))
    return block


def compile_options(
    policy: FusionPolicy | None = None, options: dict[str, Any] | None = None, **fields: Unpack[PolicyFields]
) -> dict[str, Any]:
    """Return options for ``torch.compile(model, options=…)`` or AOTInductor's ``inductor_configs`` that add our passes.

    Args:
        policy: the policy; None means ``FusionPolicy()``.
        options: your own Inductor options. Passes in them, or else in Inductor's current config, run before our passes.
        fields: instead of a policy, its fields.

    Raises:
        TypeError: a field does not belong to FusionPolicy. Inductor's options must be passed in ``options``.
    """
    if inductor := {name: value for name, value in fields.items() if name not in FIELDS}:
        raise TypeError(
            f"compile_options: FusionPolicy's {not_known(next(iter(inductor)), FIELDS)}; merge Inductor's own options "
            f"in a dictionary: compile_options(options={inductor!r})"
        )
    result: dict[str, Any] = _load_passes().compile_options(policy_given("compile_options", policy, fields), options)
    return result


# Maps modules of torch that are slow to import (DTensor 0.4 s, Triton's FLOP formulas 0.2 to 0.5 s) to our modules
# that register with them right after their first import.
_WHEN_LOADED = {
    "torch._inductor.lowering": "torch_fused_ops.lowerings",
    "torch.distributed.tensor": "torch_fused_ops.distributed.sharding",
    "torch.utils.flop_counter": "torch_fused_ops.families.float8.flop_formulas",
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """When torch's module in ``_WHEN_LOADED`` has been imported, calls ``register()`` of our module."""

    def __init__(self, pending: dict[str, str]) -> None:
        self.pending = pending

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        our_module = self.pending.pop(name, None)
        if our_module is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(our_module).register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterImport({n: module for n, module in _WHEN_LOADED.items() if n not in sys.modules}))
for _name, _module_name in _WHEN_LOADED.items():
    if _name in sys.modules:
        importlib.import_module(_module_name).register()
