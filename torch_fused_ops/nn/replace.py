"""``replace_mlps`` finds a model's MLPs by ``explain``, and compiles their modules with ``nn.Module.compile``."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_fused_ops.graphs.modules import module_path
from torch_fused_ops.policy import FusionPolicy, enclosing_modules, unmatched
from torch_fused_ops.reports.explain import explain


@dataclass(frozen=True)
class Replacements:
    """The modules that ``replace_mlps`` compiled.

    Attributes:
        replaced: the compiled modules, by their paths in the model.
    """

    replaced: dict[str, nn.Module]

    def restore(self) -> None:
        """Undo the compilation. A second call has no effect."""
        for module in self.replaced.values():
            module.__dict__.pop("_compiled_call_impl", None)


def replace_mlps(
    model: nn.Module,
    *args: Any,
    memory: str | Mapping[str, str] = "free",
    gemm: str | Mapping[str, str] = "bf16",
    **kwargs: Any,
) -> Replacements:
    """Compile a model's MLPs in place, and no other modules; ``restore()`` of the result undoes it.

    ``explain`` runs the model once and lists its MLPs. Then ``module.compile(backend="fused")`` compiles the innermost
    module around each fused MLP, unless that module is compiled already. A module's first call generates code, which
    takes seconds; equal modules share the code through Inductor's cache. Parameters, names, state dicts and training
    flags are unchanged. Copies and pickles of the model are not compiled.

    After a graph break, ``explain`` sees only the end of an MLP's path. All modules whose paths end so are compiled. If
    the break hides the whole path, the MLP is not compiled, and there is a warning.

    Args:
        model: a module, in training or evaluation mode.
        *args: example arguments for the model's call.
        memory: as ``FusionPolicy.memory``. In a mapping, the first pattern that matches a compiled module or one around
            it counts.
        gemm: linear layers' precision, as ``FusionPolicy.gemm``, with patterns as in ``memory``.
        **kwargs: example keyword arguments for the model's call.

    Returns:
        A handle with the compiled modules by path. If no module was compiled, there is a warning.

    Raises:
        TypeError, ValueError: an argument is not accepted, for example a pattern that matches no MLP's module.
        Exceptions of the model are passed on. After any of these errors the model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} is not accepted: it must be a torch.nn.Module")
    policy = FusionPolicy(memory=memory, gemm=gemm)  # type: ignore[arg-type]
    modules = {module_path(name): module for name, module in model.named_modules(remove_duplicate=False)}
    report = explain(model, *args, **kwargs)
    sites = [site for site in report.sites if site.is_mlp and site.op is not None]
    places = [_paths(modules, site.module, report.graphs == 1) for site in sites]
    chosen: dict[str, nn.Module] = {}
    for path in itertools.chain(*places):
        while path and type(modules[path]).forward is nn.Module.forward:
            path = path.rpartition(".")[0]  # a container such as ModuleList has no forward
        if modules[path]._compiled_call_impl is None and modules[path] not in chosen.values():
            chosen[path] = modules[path]
    hidden = [site.location for site, paths in zip(sites, places, strict=True) if not paths]
    if hidden:
        warnings.warn(
            f"replace_mlps does not compile the MLPs at {', '.join(hidden)}: a graph break hides their paths",
            stacklevel=2,
        )
    elif not chosen:
        warnings.warn("replace_mlps compiled no module; torch_fused_ops.explain has the reasons", stacklevel=2)
    if chosen and (notes := unmatched(policy, sites)):
        raise ValueError(notes[0])
    from torch_fused_ops.lowerings import compat

    for path, module in chosen.items():
        around = enclosing_modules([path])
        inside = FusionPolicy(memory=policy.memory_of(around), gemm=policy.gemm_of(around))  # type: ignore[arg-type]
        compat.compile_in_place(module, backend="fused", options={"policy": inside})
    return Replacements(chosen)


def _paths(modules: Mapping[str, nn.Module], end: str, is_whole: bool) -> list[str]:
    """Return the paths of a site's module. Unless the graph ``is_whole``, its own path may lack the first parts."""
    if is_whole:
        return [end]
    return [path for path in modules if end and f".{path}".endswith(f".{end}")]
