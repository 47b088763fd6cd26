"""A captured model: its graphs, its layers, and its MLPs by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_fused_ops.capturing import run_captured
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.figures import Capture, layers_of, sites_of
from torch_fused_ops.reports.figures import capture as set_aside
from torch_fused_ops.sites import Site

__all__ = ["CapturedModel", "captured_model"]


@dataclass(frozen=True)
class CapturedModel:
    """A model's graphs.

    Attributes:
        graphs: in the order in which they run.
        links: (graph, input) that is (an earlier graph, its result).
        units: the layers, in the order in which they are in the model: those with MLPs, and all in lists of modules.
        mlps: the modules of the MLPs that are picked up, by unit.
        layers: the layer that a module is in, by its path.
    """

    graphs: tuple[Capture, ...]
    links: Mapping[tuple[int, int], tuple[int, int]]
    units: tuple[str, ...]
    mlps: Mapping[str, tuple[str, ...]]
    layers: Mapping[str, str]

    def parameter(self, graph: int, number: int) -> str:
        """The path of the parameter, or of the buffer, that is a graph's input; "" if it is another tensor."""
        captured = self.graphs[graph].graph
        return captured.paths[number] if captured else ""

    def unit_of(self, path: str) -> str:
        """The unit that a module is in; "" if it is in none."""
        layer = self.layers.get(path, "")
        return layer if layer in self.units else ""


class _Captured(BaseException):
    """Leaves Dynamo with the first graph in hand; not an Exception, so that Dynamo lets it through."""


def captured_model(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> CapturedModel:
    """Capture a model. One that breaks into several graphs runs once; else nothing runs."""
    policy = FusionPolicy()
    sites: list[Site] = []
    graphs: list[Capture] = []
    links: dict[tuple[int, int], tuple[int, int]] = {}
    made: list[tuple[Any, tuple[int, int]]] = []  # results, kept alive: they are known by identity

    def capture(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(set_aside(gm, policy))
        sites.extend(sites_of(gm, policy))
        if whole:
            raise _Captured
        number = len(graphs) - 1

        def run(*inputs: Any) -> Any:
            links.update({(number, i): of for i, x in enumerate(inputs) for y, of in made if x is y})
            results = gm.forward(*inputs)
            made.extend((result, (number, i)) for i, result in enumerate(results) if isinstance(result, Tensor))
            return results

        return run

    for whole in (True, False):
        try:
            with torch.enable_grad():
                run_captured(model, args, kwargs, capture, fullgraph=whole, dynamic=False)
            break
        except _Captured:
            break
        except torch._dynamo.exc.Unsupported:
            if not whole:
                raise
            graphs.clear()
            sites.clear()
    model = getattr(model, "_orig_mod", model)
    paths = [path for path, _ in model.named_modules()] if isinstance(model, nn.Module) else []
    paths += [site.module for site in sites if site.module not in paths]
    layers = layers_of(paths)
    mlps: dict[str, list[str]] = {}
    for site in sites:
        if site.op is not None and site.is_mlp:
            modules = mlps.setdefault(layers[site.module], [])
            if site.module not in modules:
                modules.append(site.module)
    units = [unit for unit in dict.fromkeys(layers.values()) if unit in mlps or unit.rpartition(".")[2].isdigit()]
    return CapturedModel(
        tuple(graphs), links, tuple(units), {unit: tuple(modules) for unit, modules in mlps.items()}, layers
    )
