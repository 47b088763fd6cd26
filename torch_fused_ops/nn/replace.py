"""``replace_mlps`` finds a model's MLPs as ``explain`` does, and compiles their modules with ``nn.Module.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_fused_ops import lowerings
from torch_fused_ops.graphs.capture import run_captured
from torch_fused_ops.graphs.modules import module_path, source_name, tensor_path
from torch_fused_ops.policy import FusionPolicy, enclosing_modules, names_module
from torch_fused_ops.reports.captures import sites_of

if TYPE_CHECKING:
    from torch.fx import GraphModule


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

    The model runs once while Dynamo captures it, as in ``explain``, which has the reason for each unfused MLP. Then
    ``module.compile(backend="fused")`` compiles the innermost module around each MLP, unless it is in or around a
    compiled module. A module's first call generates code, which takes seconds; equal modules share the code through
    Inductor's cache. Parameters, names, state dicts and training flags are unchanged. Copies and pickles of the model
    are not compiled.

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
    lowerings.require()
    modules = {module_path(name): module for name, module in model.named_modules(remove_duplicate=False)}
    capture = _Capture(model)
    run_captured(model, args, kwargs, capture)
    compiled = [
        module_path(name)  # an OptimizedModule and the module in it have the same path
        for name, module in model.named_modules(remove_duplicate=False)
        if module._compiled_call_impl is not None or isinstance(module, torch._dynamo.OptimizedModule)
    ]
    chosen = _choose(modules, compiled, capture.mlps)
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


class _Capture:
    """A Dynamo backend that runs each graph unchanged and notes the modules of the graph's MLPs when it runs.

    After a graph break, module paths in a graph begin at a module inside the model, and equal layers share a graph.
    Each run's parameters identify the layer.

    Attributes:
        mlps: paths of the innermost modules around fused MLPs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mlps: list[str] = []
        self.owners: dict[int, set[str]] = {}  # paths of each parameter and buffer, by its id
        for tensors in (model.named_parameters, model.named_buffers):
            for name, tensor in tensors(remove_duplicate=False):
                self.owners.setdefault(id(tensor), set()).add(f".{module_path(name)}")

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        names = [f".{tensor_path(source_name(node))}" for node in gm.graph.find_nodes(op="placeholder")]
        mlps = [site.module for site in sites_of(gm, FusionPolicy()) if site.is_mlp and site.op is not None]

        def run(*inputs: Any) -> Any:
            owned = [
                (name, self.owners[id(value)])
                for name, value in zip(names, inputs, strict=True)
                if id(value) in self.owners
            ]
            starts = [{path.removesuffix(name) for path in paths if path.endswith(name)} for name, paths in owned]
            if starts and (common := set.intersection(*starts)):
                self.mlps += [f"{min(common)}.{path}".strip(".") for path in mlps]
            return gm.forward(*inputs)

        return run


def _choose(modules: Mapping[str, nn.Module], compiled: Iterable[str], mlps: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules to compile by path: the innermost ones around MLPs that are not in or around compiled ones."""
    chosen: dict[str, nn.Module] = {}
    for path in filter(modules.__contains__, mlps):
        while path and type(modules[path]).forward is nn.Module.forward:
            path = path.rpartition(".")[0]  # a container such as ModuleList has no forward
        if any(not other or not path or _is_inside(path, other) or _is_inside(other, path) for other in compiled):
            continue
        if not any(module is modules[path] for module in chosen.values()):
            chosen[path] = modules[path]
    inner = {id(m) for module in chosen.values() for m in list(module.modules())[1:]}
    return {path: module for path, module in chosen.items() if id(module) not in inner}


def _is_inside(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.")
