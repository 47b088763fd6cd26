"""``replace_mlps`` finds a model's MLPs by ``explain``, and compiles their modules with ``nn.Module.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_fused_ops.graphs.modules import module_path
from torch_fused_ops.policy import FusionPolicy, enclosing_modules, names_module
from torch_fused_ops.reports.explain import explain

if TYPE_CHECKING:
    from torch_fused_ops.graphs.sites import Site


class Replacements:
    """The modules that ``replace_mlps`` compiled.

    Attributes:
        replaced: the compiled modules, by their paths in the model.
    """

    def __init__(self, replaced: dict[str, nn.Module]) -> None:
        self.replaced = replaced
        self._calls = {path: module._compiled_call_impl for path, module in replaced.items()}

    def restore(self) -> None:
        """Undo the compilation, except for modules that were compiled again later. A second call has no effect."""
        for path, module in self.replaced.items():
            if module._compiled_call_impl is self._calls[path]:
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
    module around each fused MLP, unless it is in or around a compiled module. A module's first call generates code,
    which takes seconds; equal modules share the code through Inductor's cache. Parameters, names, state dicts and
    training flags are unchanged. Copies and pickles of the model are not compiled.

    After a graph break, ``explain`` sees only the end of an MLP's path, or its line. All modules whose paths end so, or
    whose forward has this line, are compiled.

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
        TypeError, ValueError: an argument is not accepted, for example a pattern that matches no compiled module.
        Exceptions of the model are passed on. After any of these errors the model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} is not accepted: it must be a torch.nn.Module")
    policy = FusionPolicy(memory=memory, gemm=gemm)  # type: ignore[arg-type]
    report = explain(model, *args, **kwargs)
    modules = {module_path(name): module for name, module in model.named_modules(remove_duplicate=False)}
    mlps = [site for site in report.sites if site.is_mlp and site.op is not None]
    chosen = _choose(model, modules, [path for site in mlps for path in _paths(modules, site, report.graphs == 1)])
    if not chosen:
        warnings.warn("replace_mlps compiled no module; torch_fused_ops.explain has the reasons", stacklevel=2)
        return Replacements({})
    around = {
        path: enclosing_modules(other for other, same in modules.items() if same is module)
        for path, module in chosen.items()
    }
    for name, patterns in policy.patterns.items():
        for pattern in patterns:
            if not any(names_module(pattern, paths) for paths in around.values()):
                raise ValueError(f"{name}={pattern!r} matches none of the compiled modules: {', '.join(chosen)}")
    from torch_fused_ops.lowerings import compat

    for path, module in chosen.items():
        inside = FusionPolicy(memory=policy.memory_of(around[path]), gemm=policy.gemm_of(around[path]))  # type: ignore[arg-type]
        compat.compile_in_place(module, backend="fused", options={"policy": inside})
    return Replacements(chosen)


def _paths(modules: Mapping[str, nn.Module], site: Site, is_whole: bool) -> list[str]:
    """Return the paths of a site's module. Unless the graph ``is_whole``, its own path may lack the first parts."""
    end = site.module
    if is_whole or (end and end in modules):
        return [end]
    if end:
        return [path for path in modules if path.endswith(f".{end}")]
    return [path for path, module in modules.items() if _has_line(module, site.location)] or [end]


def _has_line(module: nn.Module, location: str) -> bool:
    """Return True if ``location``, "file:line", is in the module's forward."""
    code = getattr(type(module).forward, "__code__", None)
    lines = {f"{code.co_filename}:{line}" for *_, line in code.co_lines()} if code else ()
    return location in lines


def _choose(model: nn.Module, modules: Mapping[str, nn.Module], mlps: list[str]) -> dict[str, nn.Module]:
    """Return the modules to compile by path: the innermost ones around MLPs that are not in or around compiled ones."""
    is_compiled = {
        module
        for module in model.modules()
        if module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)
    }
    inside = {inner for module in is_compiled for inner in module.modules()}
    chosen: dict[str, nn.Module] = {}
    for path in mlps:
        while path and type(modules[path]).forward is nn.Module.forward:
            path = path.rpartition(".")[0]  # a container such as ModuleList has no forward
        module = modules[path]
        if module not in {*inside, *chosen.values()} and is_compiled.isdisjoint(module.modules()):
            chosen[path] = module
    nested = {inner for module in chosen.values() for inner in [*module.modules()][1:]}
    return {path: module for path, module in chosen.items() if module not in nested}
