"""``replace_mlps`` finds a model's MLPs as ``explain`` does, and compiles their modules with ``nn.Module.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace as replaced
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_fused_ops import lowerings
from torch_fused_ops.graphs.capture import run_captured
from torch_fused_ops.graphs.listing import listed
from torch_fused_ops.graphs.modules import module_path, source_name, tensor_path
from torch_fused_ops.graphs.reasons import Kind, Reason, excluded
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.policy import (
    FusionPolicy,
    UnfusedError,
    check_not_meant,
    enclosing_modules,
    names_module,
    unmatched,
)
from torch_fused_ops.reports.explain import add_graph
from torch_fused_ops.reports.report import Report

if TYPE_CHECKING:
    from torch.fx import GraphModule


class Replacements(Report):
    """The result of ``replace_mlps``: a ``Report`` with a site for each MLP, and ``restore``.

    Attributes:
        sites: a site for each MLP, with ``op`` if its module was compiled, otherwise with the reason.
        replaced: the compiled modules, by their paths in the model.
    """

    replaced: dict[str, nn.Module]
    _calls: dict[str, Any]

    @property
    def summary(self) -> str:
        """One line that counts the MLPs in compiled modules."""
        fused = sum(site.op is not None for site in self.sites)
        return f"{fused} of {len(self.sites)} MLPs compiled in place"

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
    exclude: Collection[str] = (),
    dropout: bool = True,
    strict: bool = False,
    **kwargs: Any,
) -> Replacements:
    """Compile a model's MLPs in place, and no other modules; ``restore()`` of the returned report undoes it.

    The model runs once while Dynamo captures it, as in ``explain``. Then ``module.compile(backend="fused")`` compiles
    the innermost module around each MLP; a module with several MLPs is compiled once. A module's first call generates
    code, which takes seconds; equal modules share the code through Inductor's cache. Parameters, names, state dicts and
    training flags are unchanged. Copies and pickles of the model are not compiled.

    Args:
        model: a module, in training or evaluation mode.
        *args: example arguments for the model's call.
        memory: as ``FusionPolicy.memory``; a mapping's module patterns match paths in ``model``.
        gemm: linear layers' precision, as ``FusionPolicy.gemm``.
        exclude: MLPs not to fuse, as ``FusionPolicy.exclude``.
        dropout: as ``FusionPolicy.dropout``, for the compiled modules.
        strict: raise if an MLP is not compiled, now or in a later recompilation.
        **kwargs: example keyword arguments for the model's call.

    Returns:
        A printable report with a site for each MLP. If no module was compiled, a warning states the first reason.

    Raises:
        TypeError, ValueError: an argument is not accepted, for example a pattern that matches no module.
        UnfusedError: under ``strict``, an MLP is not fused, or the model has no MLP.
        Exceptions of the model are passed on. After any of these errors the model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} is not accepted: it must be a torch.nn.Module")
    policy = FusionPolicy(memory, dropout, strict, exclude, gemm)  # type: ignore[arg-type]
    modules = {module_path(name): module for name, module in model.named_modules(remove_duplicate=False)}
    check_not_meant("replace_mlps", model, kwargs)
    if not args and not kwargs:
        raise TypeError("replace_mlps needs example inputs, as in replace_mlps(model, x): the model is run once")
    lowerings.require()
    report = Replacements((), 0, title=type(getattr(model, "_orig_mod", model)).__name__)
    run_captured(model, args, kwargs, _Capture(model, modules, policy, report))
    if notes := unmatched(policy, report.sites, modules):
        raise ValueError(notes[0])
    report.sites, report.replaced = _choose(model, modules, policy, report.sites)
    missed = [site for site in report.sites if site.is_missed]
    reasons = [f"{site.source}: {site.reason}" for site in (*report.sites, *report.unread)] or [report.nothing]
    if strict and (missed or not report.sites):
        raise UnfusedError(f"strict=True and these MLPs were not compiled:\n{listed(missed) if missed else reasons[0]}")
    from torch_fused_ops.lowerings import compat

    for module in report.replaced.values():
        inner = policy_within(policy, _paths(modules, module), module)
        compat.compile_in_place(module, backend="fused", options={"policy": inner})
    report._calls = {path: module._compiled_call_impl for path, module in report.replaced.items()}
    inside = {id(inner) for module in report.replaced.values() for inner in module.modules()}
    report.notes = unmatched(policy, report.sites, [path for path, module in modules.items() if id(module) in inside])
    if not report.replaced:
        warnings.warn(f"replace_mlps compiled no module: {reasons[0]}", stacklevel=2)
    return report


class _Capture:
    """A Dynamo backend that runs each graph unchanged and reports the graph's MLPs when it runs.

    After a graph break, module paths in a graph begin at a module inside the model, and equal layers share a graph.
    Each run's parameters identify the layer.
    """

    def __init__(
        self, model: nn.Module, modules: Mapping[str, nn.Module], policy: FusionPolicy, report: Report
    ) -> None:
        self.modules, self.policy, self.report = modules, policy, report
        self.owners: dict[int, set[str]] = {}
        for tensors in (model.named_parameters, model.named_buffers):
            for name, tensor in tensors(remove_duplicate=False):
                self.owners.setdefault(id(tensor), set()).add(f".{module_path(name)}")

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        names = [f".{tensor_path(source_name(node))}" for node in gm.graph.find_nodes(op="placeholder")]
        seen: set[str | None] = set()

        def run(*inputs: Any) -> Any:
            owned = [
                (name, self.owners[id(value)])
                for name, value in zip(names, inputs, strict=True)
                if id(value) in self.owners
            ]
            starts = [{path.removesuffix(name) for path in paths if path.endswith(name)} for name, paths in owned]
            start = min(set.intersection(*starts), default=None) if starts else None
            if start not in seen:
                seen.add(start)
                self.add(gm, None if start is None else start.strip("."))
            return gm.forward(*inputs)

        return run

    def add(self, gm: GraphModule, start: str | None) -> None:
        """Report a graph's MLPs. The graph's paths begin at the module ``start``, which is None if unknown."""
        policy, before = self.policy, self.report.sites
        if start is None:
            policy = FusionPolicy(dropout=policy.dropout)
        elif start:
            policy = policy_within(policy, [start], self.modules[start])
        add_graph(self.report, gm, policy)
        sites = [site for site in self.report.sites[len(before) :] if site.is_mlp]
        self.report.sites = (*before, *(_in_module(site, start) for site in sites))


def _in_module(site: Site, start: str | None) -> Site:
    """Return a graph's site with its path in the whole model. The graph's paths begin at the module ``start``."""
    if start is None:
        return site.refused(Reason(Kind.UNPLACED, "it comes after a graph break, and its module is not known"))
    path = f"{start}.{site.module}".strip(".")
    where = site.source.partition(" in ")[0]
    return replaced(site, module=path, source=f"{where} in {path}" if path else where)


def _choose(
    model: nn.Module, modules: Mapping[str, nn.Module], policy: FusionPolicy, sites: tuple[Site, ...]
) -> tuple[tuple[Site, ...], dict[str, nn.Module]]:
    """Return (sites, modules to compile by path). Sites outside these modules have a reason."""
    compiled = [
        module_path(name)
        for name, module in model.named_modules(remove_duplicate=False)
        if module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)
    ]
    chosen, judged = dict[str, nn.Module](), list[Site]()
    for site in sites:
        path = site.module
        if path not in modules:  # it has a reason already: its module is not known
            judged.append(site)
            continue
        while path and type(modules[path]).forward is nn.Module.forward:
            path = path.rpartition(".")[0]  # a container such as ModuleList has no forward
        for other in compiled:
            if not other or not path or f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}."):
                site = site.refused(Reason(Kind.COMPILED, f"{other or 'the model'} is compiled already"))
        pattern = policy.excluding(enclosing_modules(_paths(modules, modules[path])))
        judged.append(site.refused(excluded(pattern) if pattern else None))
        if judged[-1].op is not None and not any(module is modules[path] for module in chosen.values()):
            chosen[path] = modules[path]
    inner = {id(m) for module in chosen.values() for m in list(module.modules())[1:]}
    return tuple(judged), {path: module for path, module in chosen.items() if id(module) not in inner}


def _paths(modules: Mapping[str, nn.Module], module: nn.Module) -> list[str]:
    """Return all paths of a module. A module that the model contains twice has two paths."""
    return [path for path, other in modules.items() if other is module]


def policy_within(policy: FusionPolicy, paths: Collection[str], module: nn.Module) -> FusionPolicy:
    """Translate a policy for the graph of one module, whose paths begin at that module.

    Args:
        policy: a policy whose patterns match paths in the model.
        paths: the module's paths in the model.
        module: the module.
    """
    around = enclosing_modules(paths)
    inner = {name: [f"{path}.{name}".strip(".") for path in paths] for name, _ in module.named_modules() if name}

    def within(pattern: str) -> Iterator[str]:
        if names_module(pattern, around):
            yield "*"
        else:
            yield from (name for name, full_paths in inner.items() if names_module(pattern, full_paths))

    def translate(value: Any) -> Any:
        if isinstance(value, str):
            return value
        levels: dict[str, str] = {}
        for pattern, level in value:
            for name in within(pattern):
                levels.setdefault(name, level)
        return levels["*"] if next(iter(levels), "") == "*" else levels

    exclude = tuple(name for pattern in policy.exclude for name in within(pattern))
    return replaced(policy, memory=translate(policy.memory), gemm=translate(policy.gemm), exclude=exclude)
