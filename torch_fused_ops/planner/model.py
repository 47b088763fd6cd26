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
from torch_fused_ops.graphs.modules import is_parameter, source_name, tensor_path
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
    unregistered: Mapping[str, Tensor]  # parameters and buffers that graphs read and the model does not register
    unread: int  # bytes of argument tensors that no graph reads

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


def _storages(values: Any) -> dict[int, int]:
    """The bytes of each storage, by identity, of the tensors in nested values and in the leaves' attributes."""
    leaves = [leaf if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", ()) for leaf in tree_leaves(values)]
    storages = [leaf.untyped_storage() for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


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
    known: dict[int, int] = {}
    names: dict[int, str] = {}
    unregistered: dict[str, Tensor] = {}
    read: dict[int, int] = {}  # storages
    left_out: list[str] = []
    if isinstance(model, nn.Module):
        names = {id(x): name for name, x in (*model.named_parameters(), *model.named_buffers())}

    def path_of(node: torch.fx.Node, x: Any) -> str:
        """The path of a graph's parameter. Dynamo's path begins at the module whose forward is captured."""
        if id(x) not in names and is_parameter(node):
            path = tensor_path(source_name(node))
            path = node.name if path in ("", *names.values()) else path
            names[id(x)], unregistered[path] = path, x
        return names.get(id(x), "")

    def capture(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        captured = set_aside(gm, policy)
        placeholders = gm.graph.find_nodes(op="placeholder")
        read.update(_storages(example_inputs))
        if captured.graph is not None:
            paths = tuple(map(path_of, placeholders, example_inputs))
            captured = replace(captured, graph=replace(captured.graph, paths=paths))
        graphs.append(captured)
        sites.extend(sites_of(gm, policy))
        if whole:
            raise _Captured
        number, runs = len(graphs) - 1, itertools.count(1)
        lives = [is_parameter(node) or source_name(node).startswith("G[") for node in placeholders]

        def run(*inputs: Any) -> Any:
            if next(runs) == 2:
                left_out.append(f"graph {number + 1} runs several times")
            computed = [x for x, lives_anyway in zip(inputs, lives, strict=True) if not lives_anyway]
            if not _storages(computed).keys() <= known.keys():
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
            if not whole and not _storages(result).keys() <= known.keys():
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
            read.clear()
            known = _storages((args, kwargs))
            if isinstance(model, nn.Module):
                known |= _storages([list(vars(module).values()) for module in model.modules()])
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
    of_mlps = {unit: tuple(modules) for unit, modules in mlps.items()}
    arguments = {key: nbytes for key, nbytes in _storages((args, kwargs)).items() if key not in read}
    unread = sum(arguments.values())
    return CapturedModel(tuple(graphs), links, tuple(units), of_mlps, layers, unregistered, unread)
