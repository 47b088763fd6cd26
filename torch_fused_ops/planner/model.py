"""A captured model: its graphs, its layers, and its MLPs by layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torch_fused_ops.graphs.capture import run_captured
from torch_fused_ops.graphs.modules import is_parameter, source_name
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.figures import Capture, layers_of, said, sites_of
from torch_fused_ops.reports.figures import capture as set_aside


@dataclass(frozen=True)
class CapturedModel:
    """A model's graphs."""

    graphs: tuple[Capture, ...]  # in the order in which they run
    links: Mapping[tuple[int, int], tuple[int, int]]  # (graph, input) that is (an earlier graph, its result)
    units: tuple[str, ...]  # the layers in the order of the model: those with MLPs, and all in lists of modules
    mlps: Mapping[str, tuple[str, ...]]  # the modules of the fused MLPs, by unit
    layers: Mapping[str, str]  # the layer of a module, by its path

    def parameter(self, graph: int, number: int) -> str:
        """The path of the parameter, or of the buffer, that is a graph's input; "" if it is another tensor."""
        captured = self.graphs[graph].graph
        return captured.paths[number] if captured else ""

    def unit_of(self, path: str) -> str:
        """The unit of a module; "" if it is in none."""
        layer = self.layers.get(path, "")
        return layer if layer in self.units else ""


class _Captured(BaseException):
    """Stop Dynamo at the first graph; not an Exception, since Dynamo would catch it."""


def _storages(values: Any) -> set[int]:
    """The storages of the tensors in nested values and in the attributes of what is in these, by identity."""
    leaves = [leaf if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", ()) for leaf in tree_leaves(values)]
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor)}


def captured_model(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> CapturedModel:
    """Capture a model without running it, unless it breaks into several graphs.

    Raises:
        ValueError: the graphs are not all of it: there is none, one runs several times, or what runs between them
            allocates what a graph reads or the model returns.
    """
    policy = FusionPolicy()
    sites: list[Site] = []
    graphs: list[Capture] = []
    links: dict[tuple[int, int], tuple[int, int]] = {}
    earlier: list[tuple[Any, tuple[int, int]]] = []  # results, kept alive: identity identifies them
    known: set[int] = set()
    names: dict[int, str] = {}
    left_out: list[str] = []

    def capture(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(set_aside(gm, policy))
        sites.extend(sites_of(gm, policy))
        if whole:
            raise _Captured
        number, runs = len(graphs) - 1, itertools.count(1)
        placeholders = gm.graph.find_nodes(op="placeholder")
        lives = [is_parameter(node) or source_name(node).startswith("G[") for node in placeholders]

        def run(*inputs: Any) -> Any:
            if next(runs) == 2:
                left_out.append(f"graph {number + 1} runs several times")
            captured = graphs[number]
            if captured.graph is not None:  # paths begin at the module whose forward this is a graph of
                paths = (names.get(id(x), path) for x, path in zip(inputs, captured.graph.paths, strict=True))
                graphs[number] = replace(captured, graph=replace(captured.graph, paths=tuple(paths)))
            computed = [x for x, lives_anyway in zip(inputs, lives, strict=True) if not lives_anyway]
            if not _storages(computed) <= known:
                left_out.append(f"something in front of graph {number + 1} is in no graph")
            links.update({(number, i): of for i, x in enumerate(inputs) for y, of in earlier if x is y})
            results = gm.forward(*inputs)
            known.update(_storages(results))
            earlier.extend((result, (number, i)) for i, result in enumerate(results) if isinstance(result, Tensor))
            return results

        return run

    why = "it computes nothing on tensors"
    for whole in (True, False):
        try:
            with torch.enable_grad():
                result = run_captured(model, args, kwargs, capture, fullgraph=whole, dynamic=False)
            if not whole and not _storages(result) <= known:
                left_out.append("something behind the last graph is in no graph")
            break
        except _Captured:
            break
        except torch._dynamo.exc.Unsupported as error:
            if not whole:
                raise
            why = said(error)
            graphs.clear()
            sites.clear()
            known = _storages((args, kwargs))
            if isinstance(model, nn.Module):
                known |= _storages([list(vars(module).values()) for module in model.modules()])
                names = {id(x): name for name, x in (*model.named_parameters(), *model.named_buffers())}
    if not graphs:
        raise ValueError(f"model: torch.compile captures no graph of it, as with a graph break inside a loop: {why}")
    if left_out:
        raise ValueError(f"model: torch.compile does not capture all of it: {'; '.join(left_out)}: {why}")
    paths = [path for path, _ in model.named_modules()] if isinstance(model, nn.Module) else []
    paths += [site.module for site in sites if site.module not in paths]
    layers = layers_of(paths)
    mlps: dict[str, dict[str, None]] = {}
    for site in sites:
        if site.op is not None and site.is_mlp:
            mlps.setdefault(layers[site.module], {})[site.module] = None
    units = [unit for unit in dict.fromkeys(layers.values()) if unit in mlps or unit.rpartition(".")[2].isdigit()]
    return CapturedModel(
        tuple(graphs), links, tuple(units), {unit: tuple(modules) for unit, modules in mlps.items()}, layers
    )
