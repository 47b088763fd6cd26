"""``replace_mlps``: a model's MLPs compiled in place by ``backend="fused"``, the rest of the model left eager.

``explain``'s way of capturing says which modules hold an MLP. Each gets what ``nn.Module.compile`` would give it, a
``_compiled_call_impl``: Dynamo's guards say when its code holds, and PyTorch leaves it out of copies and pickles.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace as replaced
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_fused_ops import lowerings
from torch_fused_ops.capture import run_captured, throwaway
from torch_fused_ops.policy import FusionPolicy, UnfusedError, check_not_meant, enclosing_modules, names_module
from torch_fused_ops.reasons import Kind, Reason, excluded
from torch_fused_ops.reports.breaks import break_of
from torch_fused_ops.reports.figures import sites_of
from torch_fused_ops.reports.report import Report
from torch_fused_ops.sites import Site
from torch_fused_ops.virtual_gpu.captured import source_name
from torch_fused_ops.virtual_gpu.modules import module_path, tensor_path

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["Replacements", "replace_mlps"]


class Replacements(Report):
    """What ``replace_mlps`` did: a ``Report`` with a site for each MLP, and the way back.

    Attributes:
        sites: an MLP whose module was compiled has ``op``; the reason of any other says why it was not.
        replaced: the compiled modules by their paths in the model.
    """

    def __init__(self, sites: tuple[Site, ...], graphs: int, replaced: dict[str, nn.Module], title: str) -> None:
        super().__init__(sites, graphs)
        self.title, self.replaced = title, replaced
        self._calls = {path: module._compiled_call_impl for path, module in replaced.items()}

    @property
    def summary(self) -> str:
        """One line: the number of MLPs, and of those in compiled modules."""
        fused = sum(site.op is not None for site in self.sites)
        return f"{fused} of {len(self.sites)} MLPs compiled in place"

    def restore(self) -> None:
        """Have every module run its own forward again. A second call does nothing.

        A module that was compiled anew since keeps that.
        """
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
    epilogues: str = "measured",
    strict: bool = False,
    **kwargs: Any,
) -> Replacements:
    """Compile a model's MLPs in place, and nothing else of it; ``report.restore()`` undoes that.

    The model runs once while Dynamo captures it, as in ``explain``. For each MLP that is found, the innermost module
    that holds all of it is compiled with ``backend="fused"``; a module that holds several is compiled once. Code is
    generated in its first call, which takes seconds; modules that are equal share it. Parameters, names, state dicts,
    training flags and hooks are as before. Copies and pickles of the model are not compiled, as PyTorch has it.

    Args:
        model: a module; as it is, in training or evaluation mode.
        *args: what to call it with, once.
        memory: what is kept for backward, as ``FusionPolicy.memory``; module patterns of a mapping fit paths in
            ``model``.
        gemm: what linear layers multiply in, as ``FusionPolicy.gemm``.
        exclude: MLPs to leave alone, as ``FusionPolicy.exclude``.
        dropout, epilogues: as ``FusionPolicy``'s, for what is in the compiled modules.
        strict: raise where an MLP is not compiled, now or in a later recompilation.
        **kwargs: what to call the model with.

    Returns:
        A report: print it. It has a site for each MLP; where nothing is compiled, a warning gives the first reason.

    Raises:
        TypeError, ValueError: an argument is not accepted, a pattern that fits no module of the model included.
        UnfusedError: under ``strict``, an MLP is left alone, or there is none.
        RuntimeError: the compiler is switched off, or there is none for CPUs.
        Whatever the model raises on these arguments. In each case the model is as it was.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} is not accepted: it must be a torch.nn.Module")
    policy = FusionPolicy(memory, dropout, strict, exclude, epilogues, gemm)  # type: ignore[arg-type]
    found = _Found(model, policy)
    _check_patterns(policy, list(found.modules))
    check_not_meant("replace_mlps", model, kwargs)
    if not args and not kwargs:
        raise TypeError("replace_mlps needs example inputs, as in replace_mlps(model, x): the model is run once")
    lowerings.require()
    run_captured(model, args, kwargs, found.capture)
    if not found.graphs:
        raise RuntimeError(
            "replace_mlps compiles modules, and torch.compile captured nothing: it is disabled (TORCH_COMPILE_DISABLE, "
            "TORCHDYNAMO_DISABLE, torch.compiler.set_stance), or the model computes nothing with tensors"
        )
    chosen = found.choose()
    sites = tuple(found.sites)
    missed = [site for site in sites if site.is_missed]
    if strict and (missed or not sites):
        lines = [f"{site.source}: {site.missed}" for site in missed] or [_first_reason(found)]
        raise UnfusedError("strict=True and these MLPs were not compiled:\n" + "\n".join(f"  {one}" for one in lines))
    if any(p.device.type == "cpu" for module in chosen.values() for p in module.parameters()):
        _check_compiler()
    calls, entries = [], dict[Any, Callable[..., Any]]()
    for module in chosen.values():
        own = policy_within(policy, found.paths(module), module)
        entry = entries.setdefault((_shape(module), _settings(module), own), throwaway(_call))
        calls.append(_Compiled(module, own, entry))
    for module, call in zip(chosen.values(), calls, strict=True):
        module._compiled_call_impl = call
    report = Replacements(sites, found.graphs, chosen, type(getattr(model, "_orig_mod", model)).__name__)
    report.unread = tuple(found.unread)
    report.breaks = tuple(one for one in found.breaks if one is not None)
    around = enclosing_modules(path for module in chosen.values() for path in found.paths(module))
    report.notes = tuple(
        f"{name}={pattern!r} names no module that was compiled"
        for name in ("memory", "gemm")
        for pattern in policy.patterns.get(name, ())
        if not names_module(pattern, around)
    )
    if not chosen:
        warnings.warn(f"replace_mlps compiled no module: {_first_reason(found)}", stacklevel=2)
    return report


# ---- what is compiled ------------------------------------------------------------------------------------------------


class _Found:
    """The MLPs that a run of a model is captured with, by the paths of the modules that hold them."""

    def __init__(self, model: nn.Module, policy: FusionPolicy) -> None:
        named = list(model.named_modules(remove_duplicate=False))
        self.policy = policy
        self.modules = {module_path(name): module for name, module in named}  # of a wrapper and its module, the latter
        self.compiled = {
            module_path(name)
            for name, module in named
            if module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)
        }
        self.owners: dict[int, list[str]] = {}
        for tensors in (model.named_parameters, model.named_buffers):
            for name, tensor in tensors(remove_duplicate=False):
                self.owners.setdefault(id(tensor), []).append(module_path(name))
        self.sites: list[Site] = []
        self.unread: list[Site] = []
        self.breaks: list[Any] = []
        self.graphs = 0

    def paths(self, module: nn.Module) -> list[str]:
        """All paths of a module: one that is used twice has two."""
        return [path for path, other in self.modules.items() if other is module]

    def capture(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """A backend for Dynamo: note a graph's MLPs, and run it as it is."""
        from torch_fused_ops.lowerings import recognize

        self.graphs += 1
        places = [
            (tensor_path(source_name(node)), self.owners[id(value)])
            for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
            if id(value) in self.owners
        ]
        # Behind a graph break Dynamo's paths begin at another module than the model: no pattern fits them.
        whole = all(path in paths for path, paths in places)
        policy = self.policy if whole else FusionPolicy(dropout=self.policy.dropout)
        self.sites += [self._placed(site, places) for site in sites_of(gm, policy) if site.is_mlp]
        self.unread += recognize.unread(gm.graph)
        self.breaks.append(break_of(gm))
        return gm.forward

    def _placed(self, site: Site, places: Sequence[tuple[str, list[str]]]) -> Site:
        """The site with its module's path in the model, which the module's parameters give."""
        inside = f"{site.module}." if site.module else ""
        for path, paths in places:
            if path.startswith(inside) and path not in paths:
                within = path.removeprefix(inside)
                for whole in paths:
                    if whole == within or whole.endswith(f".{within}"):
                        return self._moved(site, whole.removesuffix(within).strip("."))
        return site

    def choose(self) -> dict[str, nn.Module]:
        """The modules to compile, by their paths; the sites of the others say why not."""
        if self.graphs > 1:
            self._add_alike()
        chosen: dict[str, nn.Module] = {}
        for i, site in enumerate(self.sites):
            path = site.module
            while path in self.modules and type(self.modules[path]).forward is nn.Module.forward:
                path = path.rpartition(".")[0]  # a ModuleList has no forward
            refusal = self._refusal(path) if site.op is not None else None
            if refusal is not None:
                self.sites[i] = replaced(
                    site, op=None, reason=str(refusal), kind=refusal.kind, excluded_by=refusal.excluded_by
                )
            elif site.op is not None and not any(module is self.modules[path] for module in chosen.values()):
                chosen[path] = self.modules[path]
        inner = {id(one) for module in chosen.values() for one in list(module.modules())[1:]}
        return {path: module for path, module in chosen.items() if id(module) not in inner}

    def _refusal(self, path: str) -> Reason | None:
        if path not in self.modules:
            return Reason(Kind.UNPLACED, "it lies behind a graph break, and its module is not known")
        pattern = self.policy.excluding(enclosing_modules(self.paths(self.modules[path])))
        if pattern is not None:
            return excluded(pattern)
        for other in self.compiled:
            if not other or not path or f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}."):
                return Reason(Kind.COMPILED, f"{other or 'the model'} is compiled already")
        return None

    def _add_alike(self) -> None:
        """Add the sites of modules that are like those with sites: behind a graph break Dynamo captures equal layers
        once."""
        captured: dict[str, list[Site]] = {}
        for site in self.sites:
            captured.setdefault(site.module, []).append(site)
        alike = {_shape(self.modules[path]): sites for path, sites in captured.items() if path in self.modules}
        for path, module in self.modules.items():
            if path not in captured:
                self.sites += [self._moved(site, path) for site in alike.get(_shape(module), ())]

    def _moved(self, site: Site, path: str) -> Site:
        """The site in another module."""
        where = site.source.partition(" in ")[0]
        memory = self.policy.memory_of(enclosing_modules([path])) if site.memory else ""
        return replaced(site, module=path, source=f"{where} in {path}" if path else where, memory=memory)


def _first_reason(found: _Found) -> str:
    for site in (*found.sites, *found.unread):
        return f"{site.source}: {site.reason}"
    return "no matrix product in the model reads an activation of matrix products (docs/recognition.md)"


def _check_patterns(policy: FusionPolicy, paths: Sequence[str]) -> None:
    for name, patterns in policy.patterns.items():
        for pattern in patterns:
            if not names_module(pattern, paths):
                near = difflib.get_close_matches(pattern.removesuffix(".*"), paths)
                close = f", as {' or '.join(map(repr, near))} would" if near else ""
                raise ValueError(f"{name}={pattern!r} is not accepted: it must fit a module of the model{close}")


def _check_compiler() -> None:
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except RuntimeError as error:
        raise RuntimeError(
            "replace_mlps compiles modules, and for CPUs no C++ compiler was found: install g++, or set CXX"
        ) from error


def policy_within(policy: FusionPolicy, paths: Collection[str], module: nn.Module) -> FusionPolicy:
    """A policy as it reads in a graph of one module alone, whose paths begin at that module.

    Args:
        policy: its patterns fit paths in the model.
        paths: the module's, in the model.
        module: the module.
    """
    around = enclosing_modules(paths)
    inner = {name: [f"{path}.{name}".strip(".") for path in paths] for name, _ in module.named_modules() if name}

    def within(pattern: str) -> Iterator[str]:
        if names_module(pattern, around):
            yield "*"
        else:
            yield from (name for name, whole in inner.items() if names_module(pattern, whole))

    def of(value: Any) -> Any:
        if isinstance(value, str):
            return value
        levels: dict[str, str] = {}
        for pattern, level in value:
            for name in within(pattern):
                levels.setdefault(name, level)
        return levels["*"] if next(iter(levels), "") == "*" else levels

    exclude = tuple(name for pattern in policy.exclude for name in within(pattern))
    return replaced(policy, memory=of(policy.memory), gemm=of(policy.gemm), exclude=exclude)


# ---- how it is compiled ----------------------------------------------------------------------------------------------


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """What is compiled. ``nn.Module.compile`` compiles ``_call_impl`` itself, whose frame Dynamo skips: with it the
    forward of a class of torch's own, such as ``nn.Sequential``, which then runs eagerly."""
    return module._call_impl(*args, **kwargs)


class _Compiled:
    """A module's compiled call.

    Args:
        module: the module.
        policy: its policy, whose patterns begin at the module.
        entry: the function to compile, with a code object that equal modules share. Dynamo keeps what it compiles with
            the code object, eight times at most: layers that differ must not count against one another.
    """

    def __init__(self, module: nn.Module, policy: FusionPolicy, entry: Callable[..., Any]) -> None:
        self.module, self.policy = module, policy
        self._compile(entry)

    def _compile(self, entry: Callable[..., Any]) -> None:
        self.hooks = _hooks(self.module)
        options: dict[str, Any] = {"policy": self.policy}
        self.call = torch.compile(MethodType(entry, self.module), backend="fused", options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _hooks(self.module) != self.hooks:  # Dynamo traces hooks, and has no guards on them
            self._compile(throwaway(_call))
        return self.call(*args, **kwargs)


def _hooks(module: nn.Module) -> list[Any]:
    """What identifies the hooks of a module and of all in it."""
    own = [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks, *module._backward_pre_hooks]
    for child in module._modules.values():
        if child is not None:
            own += _hooks(child)
    return own


def _shape(module: nn.Module) -> Any:
    """The classes of a module and of all in it, and the parameters: equal for layers of one kind."""
    tensors = tuple((name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in module.named_parameters())
    return tuple((name, type(one)) for name, one in module.named_modules()), tensors


def _settings(module: nn.Module) -> Any:
    """The plain attributes of a module and of all in it, such as a layer's number, which Dynamo may specialize on."""
    plain = (bool, int, float, str)
    return tuple(
        (key, type(value), value)
        for one in module.modules()
        for key, value in vars(one).items()
        if isinstance(value, plain)
    )
