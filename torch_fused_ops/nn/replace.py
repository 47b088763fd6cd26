"""``replace_mlps``: compile a model's MLPs in place with ``backend="fused"``, and nothing else of it.

A capture as in ``explain`` finds the modules that hold an MLP. Each gets a ``_compiled_call_impl``, as from
``nn.Module.compile``: Dynamo's guards check its code, and PyTorch leaves it out of copies and pickles.
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
from torch_fused_ops.graphs.capture import run_captured, throwaway
from torch_fused_ops.graphs.modules import module_path, source_name, tensor_path
from torch_fused_ops.graphs.reasons import Kind, Reason, excluded
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.policy import FusionPolicy, UnfusedError, check_not_meant, enclosing_modules, names_module
from torch_fused_ops.reports.breaks import break_of
from torch_fused_ops.reports.figures import sites_of
from torch_fused_ops.reports.report import Report

if TYPE_CHECKING:
    from torch.fx import GraphModule


class Replacements(Report):
    """The result of ``replace_mlps``: a ``Report`` with a site for each MLP, and ``restore``.

    Attributes:
        sites: an MLP whose module was compiled has ``op``; any other has the reason.
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
        """Undo the compilation, except of modules that were compiled again since. A second call has no effect."""
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
    """Compile a model's MLPs in place, and nothing else of it; ``report.restore()`` undoes it.

    The model runs once while Dynamo captures it, as in ``explain``. The innermost module around each MLP is compiled
    with ``backend="fused"``; a module with several MLPs is compiled once. Its first call generates code, which takes
    seconds; equal modules share it. Parameters, names, state dicts, training flags and hooks are unchanged. Copies and
    pickles of the model are not compiled, as with ``nn.Module.compile``.

    Args:
        model: a module, in training or evaluation mode.
        *args: arguments of the one call.
        memory: as ``FusionPolicy.memory``; a mapping's module patterns match paths in ``model``.
        gemm: linear layers' precision, as ``FusionPolicy.gemm``.
        exclude: MLPs not to fuse, as ``FusionPolicy.exclude``.
        dropout: as ``FusionPolicy``'s, in the compiled modules.
        strict: raise where an MLP is not compiled, now or in a later recompilation.
        **kwargs: keyword arguments of the one call.

    Returns:
        A report to print, with a site for each MLP. If nothing is compiled, a warning has the first reason.

    Raises:
        TypeError, ValueError: an argument is not accepted, including a pattern that matches no module.
        UnfusedError: under ``strict``, an MLP is not fused, or there is none.
        RuntimeError: the compiler is switched off, or there is none for CPUs.
        The model's own errors. In each case the model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} is not accepted: it must be a torch.nn.Module")
    policy = FusionPolicy(memory, dropout, strict, exclude, gemm)  # type: ignore[arg-type]
    capture = _Capture(model, policy)
    paths = list(capture.modules)
    for name, pattern in ((name, pattern) for name, patterns in policy.patterns.items() for pattern in patterns):
        if not names_module(pattern, paths):
            near = difflib.get_close_matches(pattern.removesuffix(".*"), paths)
            close = f", as {' or '.join(map(repr, near))} would" if near else ""
            raise ValueError(f"{name}={pattern!r} is not accepted: it must match a module of the model{close}")
    check_not_meant("replace_mlps", model, kwargs)
    if not args and not kwargs:
        raise TypeError("replace_mlps needs example inputs, as in replace_mlps(model, x): the model is run once")
    lowerings.require()
    run_captured(model, args, kwargs, capture.graph)
    if not capture.graphs:
        raise RuntimeError(
            "replace_mlps compiles modules, and torch.compile captured nothing: it is disabled (TORCH_COMPILE_DISABLE, "
            "TORCHDYNAMO_DISABLE, torch.compiler.set_stance), or the model computes nothing with tensors"
        )
    chosen = capture.choose()
    sites = tuple(capture.sites)
    missed = [site for site in sites if site.is_missed]
    if strict and (missed or not sites):
        lines = [f"{site.source}: {site.missed}" for site in missed] or [_first_reason(capture)]
        raise UnfusedError("strict=True and these MLPs were not compiled:\n" + "\n".join(f"  {line}" for line in lines))
    if any(p.device.type == "cpu" for module in chosen.values() for p in module.parameters()):
        _check_compiler()
    calls, entries = [], dict[Any, Callable[..., Any]]()
    for module in chosen.values():
        inner = policy_within(policy, capture.paths(module), module)
        entry = entries.setdefault((_shape(module), _settings(module), inner), throwaway(_call))
        calls.append(_Compiled(module, inner, entry))
    for module, call in zip(chosen.values(), calls, strict=True):
        module._compiled_call_impl = call
    report = Replacements(sites, capture.graphs, chosen, type(getattr(model, "_orig_mod", model)).__name__)
    report.unread = tuple(capture.unread)
    report.breaks = tuple(b for b in capture.breaks if b is not None)
    around = enclosing_modules(path for module in chosen.values() for path in capture.paths(module))
    report.notes = tuple(
        f"{name}={pattern!r} names no module that was compiled"
        for name in ("memory", "gemm")
        for pattern in policy.patterns.get(name, ())
        if not names_module(pattern, around)
    )
    if not chosen:
        warnings.warn(f"replace_mlps compiled no module: {_first_reason(capture)}", stacklevel=2)
    return report


# ---- captured modules ------------------------------------------------------------------------------------------------


class _Capture:
    """The MLPs in the captured graphs of a model's run, by the paths of their modules."""

    def __init__(self, model: nn.Module, policy: FusionPolicy) -> None:
        named = list(model.named_modules(remove_duplicate=False))
        self.policy = policy
        self.modules = {module_path(name): module for name, module in named}  # a wrapper's module, not the wrapper
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
        """All paths of a module: a module used twice has two."""
        return [path for path, other in self.modules.items() if other is module]

    def graph(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """A backend for Dynamo: collect a graph's MLPs, and run it unchanged."""
        from torch_fused_ops.lowerings import recognize

        self.graphs += 1
        places = [
            (tensor_path(source_name(node)), self.owners[id(value)])
            for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
            if id(value) in self.owners
        ]
        # Behind a graph break Dynamo's paths begin at another module than the model: no pattern matches them.
        whole = all(path in paths for path, paths in places)
        policy = self.policy if whole else FusionPolicy(dropout=self.policy.dropout)
        self.sites += [self._placed(site, places) for site in sites_of(gm, policy) if site.is_mlp]
        self.unread += recognize.unread(gm.graph)
        self.breaks.append(break_of(gm))
        return gm.forward

    def _placed(self, site: Site, places: Sequence[tuple[str, list[str]]]) -> Site:
        """Find the site's module path in the model by the module's parameters."""
        inside = f"{site.module}." if site.module else ""
        for path, paths in places:
            if path.startswith(inside) and path not in paths:
                within = path.removeprefix(inside)
                for whole in paths:
                    if whole == within or whole.endswith(f".{within}"):
                        return self._in_module(site, whole.removesuffix(within).strip("."))
        return site

    def choose(self) -> dict[str, nn.Module]:
        """Choose the modules to compile, by their paths; the other sites get their reasons."""
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
        inner = {id(m) for module in chosen.values() for m in list(module.modules())[1:]}
        return {path: module for path, module in chosen.items() if id(module) not in inner}

    def _refusal(self, path: str) -> Reason | None:
        if path not in self.modules:
            return Reason(Kind.UNPLACED, "it comes after a graph break, and its module is not known")
        pattern = self.policy.excluding(enclosing_modules(self.paths(self.modules[path])))
        if pattern is not None:
            return excluded(pattern)
        for other in self.compiled:
            if not other or not path or f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}."):
                return Reason(Kind.COMPILED, f"{other or 'the model'} is compiled already")
        return None

    def _add_alike(self) -> None:
        """Add the sites of equal modules: behind a graph break Dynamo captures equal layers once."""
        captured: dict[str, list[Site]] = {}
        for site in self.sites:
            captured.setdefault(site.module, []).append(site)
        alike = {_shape(self.modules[path]): sites for path, sites in captured.items() if path in self.modules}
        for path, module in self.modules.items():
            if path not in captured:
                self.sites += [self._in_module(site, path) for site in alike.get(_shape(module), ())]

    def _in_module(self, site: Site, path: str) -> Site:
        """Copy the site into another module."""
        where = site.source.partition(" in ")[0]
        memory = self.policy.memory_of(enclosing_modules([path])) if site.memory else ""
        return replaced(site, module=path, source=f"{where} in {path}" if path else where, memory=memory)


def _first_reason(capture: _Capture) -> str:
    for site in (*capture.sites, *capture.unread):
        return f"{site.source}: {site.reason}"
    return "no matrix product in the model reads an activation of matrix products (docs/recognition.md)"


def _check_compiler() -> None:
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except RuntimeError as error:
        raise RuntimeError(
            "replace_mlps compiles modules, and for CPUs no C++ compiler was found: install g++, or set CXX"
        ) from error


def policy_within(policy: FusionPolicy, paths: Collection[str], module: nn.Module) -> FusionPolicy:
    """Translate a policy for the graph of one module, whose paths begin at that module.

    Args:
        policy: its patterns match paths in the model.
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


# ---- compiled calls --------------------------------------------------------------------------------------------------


def _call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """The compiled function. Dynamo skips ``_call_impl``'s frame, which ``nn.Module.compile`` compiles, and with it the
    forward of torch's own classes, such as ``nn.Sequential``."""
    return module._call_impl(*args, **kwargs)


class _Compiled:
    """A module's compiled call.

    Args:
        module: the module.
        policy: its policy, whose patterns begin at the module.
        entry: the function to compile, with a code object that equal modules share. Dynamo stores at most eight
            compilations with a code object: different layers must not share that limit.
    """

    def __init__(self, module: nn.Module, policy: FusionPolicy, entry: Callable[..., Any]) -> None:
        self.module, self.policy = module, policy
        self._compile(entry)

    def _compile(self, entry: Callable[..., Any]) -> None:
        self.hooks = _hooks(self.module)
        options: dict[str, Any] = {"policy": self.policy}
        self.call = torch.compile(MethodType(entry, self.module), backend="fused", options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _hooks(self.module) != self.hooks:  # Dynamo traces hooks without guards on them
            self._compile(throwaway(_call))
        return self.call(*args, **kwargs)


def _hooks(module: nn.Module) -> list[Any]:
    """The ids of the hooks of a module and its children."""
    ids = [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks, *module._backward_pre_hooks]
    for child in module._modules.values():
        if child is not None:
            ids += _hooks(child)
    return ids


def _shape(module: nn.Module) -> Any:
    """The classes of a module and its children, and the parameters: equal for equal layers."""
    tensors = tuple((name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in module.named_parameters())
    return tuple((name, type(child)) for name, child in module.named_modules()), tensors


def _settings(module: nn.Module) -> Any:
    """The plain attributes of a module and its children, such as a layer's number, which Dynamo may specialize on."""
    plain = (bool, int, float, str)
    return tuple(
        (key, type(value), value)
        for child in module.modules()
        for key, value in vars(child).items()
        if isinstance(value, plain)
    )
