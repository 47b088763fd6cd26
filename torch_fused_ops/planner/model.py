"""What is compiled in a model's place: the model with a few of its equal layers, captured, and its MLPs by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torch_fused_ops.capturing import run_captured
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.figures import Capture, layers_of, said, sites_of
from torch_fused_ops.reports.figures import capture as set_aside
from torch_fused_ops.sites import Site

__all__ = ["CapturedModel", "Stack", "captured_model", "stack_of"]


@dataclass(frozen=True)
class Stack:
    """Equal layers, one after the other: ``model.layers``.

    Attributes:
        path: of the list that holds them.
        length: how many there are.
        kept: how many of them were captured.
    """

    path: str
    length: int
    kept: int

    def number(self, path: str) -> int | None:
        """The number of the layer that a module or a tensor is in, by its path; None if it is in none."""
        inside = path.startswith(f"{self.path}.")
        return int(path.removeprefix(f"{self.path}.").partition(".")[0]) if inside else None

    def layer(self, number: int) -> str:
        """A layer's path."""
        return f"{self.path}.{number}"

    @property
    def captured(self) -> Iterator[str]:
        """The paths of the layers that were captured."""
        return map(self.layer, range(self.kept))


def stack_of(path: str, stacks: Sequence[Stack]) -> tuple[Stack, int] | None:
    """The list of equal layers that a path leads into, and the layer's number in it."""
    return next(((stack, i) for stack in stacks if (i := stack.number(path)) is not None), None)


@dataclass(frozen=True)
class CapturedModel:
    """A model's graphs, without most of its equal layers.

    Attributes:
        graphs: in the order in which they run.
        links: (graph, input) that is (an earlier graph, its result).
        units: the layers, in the order in which they are in the captured model: what a memory level is chosen for.
        mlps: the modules of the MLPs that are picked up, by unit.
        stacks: the lists that were shortened.
        layers: the layer that a module of the captured model is in, by its path.
    """

    graphs: tuple[Capture, ...]
    links: Mapping[tuple[int, int], tuple[int, int]]
    units: tuple[str, ...]
    mlps: Mapping[str, tuple[str, ...]]
    stacks: tuple[Stack, ...]
    layers: Mapping[str, str]

    def parameter(self, graph: int, number: int) -> str:
        """The path of the parameter, or of the buffer, that is a graph's input; "" if it is another tensor."""
        captured = self.graphs[graph].graph
        return captured.paths[number] if captured else ""

    def gets_gradient(self, path: str) -> bool:
        """Whether backward reaches a parameter of the whole model, by its path."""
        found = stack_of(path, self.stacks)
        if found is not None:
            stack, number = found
            path = stack.layer(min(number, stack.kept - 1)) + path.removeprefix(stack.layer(number))
        return path in self._reached

    @cached_property
    def _reached(self) -> set[str]:
        """The paths of the captured model's parameters that backward reaches."""
        found: set[str] = set()
        for each in self.graphs:
            if each.graph is None:
                continue
            nodes = each.graph.gm.graph.nodes
            reached = set(each.graph.gm.graph.output_node().all_input_nodes)
            for node in reversed(nodes):
                if node in reached and _needs_gradient(node):
                    reached.update(node.all_input_nodes)
            placeholders = each.graph.gm.graph.find_nodes(op="placeholder")
            found |= {p for node, p in zip(placeholders, each.graph.paths, strict=True) if p and node in reached}
        return found

    def unit_of(self, path: str) -> str:
        """The unit that a module of the whole model is in; "" if it is in none."""
        found = stack_of(path, self.stacks)
        if found is not None:
            return found[0].layer(found[1])
        layer = self.layers.get(path, "")
        return layer if layer in self.units else ""


def _needs_gradient(node: torch.fx.Node) -> bool:
    values = [value for value in tree_leaves(node.meta.get("example_value")) if isinstance(value, Tensor)]
    return not values or any(value.requires_grad for value in values)


class _Captured(BaseException):
    """Leaves Dynamo with the first graph in hand; not an Exception, so that Dynamo lets it through."""


def captured_model(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], kept: int
) -> CapturedModel:
    """Capture a model; where it is a module with lists of equal layers, with no more than ``kept`` of each.

    A model that breaks into several graphs runs once, without those layers; else nothing runs.
    """
    stacks = tuple(_stacks(model, kept)) if isinstance(model, nn.Module) else ()
    if stacks:
        try:
            with _shortened(model, stacks):
                found = _captured(model, args, kwargs, stacks)
            expected = {layer for stack in stacks for layer in stack.captured}
            if expected <= set(found.units):
                return found
        except Exception:  # a model that counts on all of its layers
            torch._dynamo.reset()
    return _captured(model, args, kwargs, ())


# ---- equal layers ----------------------------------------------------------------------------------------------------


def _stacks(model: nn.Module, kept: int) -> Iterator[Stack]:
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > kept and not inside:
            layers = list(module)
            numbered = [name for name, _ in module.named_children()] == [str(i) for i in range(len(layers))]
            if numbered and _are_equal(layers):  # a layer that stands in it twice has one name
                found.append(path)
                yield Stack(path, len(layers), kept)


def _are_equal(layers: Sequence[nn.Module]) -> bool:
    """Whether layers differ in nothing but the values of their parameters, and in their own numbers."""
    first, *others = ([_described(module, path) for path, module in layer.named_modules()] for layer in layers)
    return any(module[2] for module in first) and all(
        len(other) == len(first) and all(_alike(a, b, i) for a, b in zip(first, other, strict=True))
        for i, other in enumerate(others, 1)
    )


def _described(module: nn.Module, path: str) -> tuple[str, type, list[Any], dict[str, Any]]:
    plain = (bool, int, float, str, type(None))
    tensors = [(name, t.shape, t.dtype, t.requires_grad) for name, t in _tensors(module)]
    return path, type(module), tensors, {k: v for k, v in vars(module).items() if isinstance(v, plain)}


def _alike(first: tuple[Any, ...], other: tuple[Any, ...], number: int) -> bool:
    """Whether a module of layer 0 and its like in another layer are equal; ``layer_idx=0`` is like ``layer_idx=5``."""
    (*same, values), (*others, its_values) = first, other
    return (same, values.keys()) == (others, its_values.keys()) and all(
        its_values[name] == value or (type(value), value, its_values[name]) == (int, 0, number)
        for name, value in values.items()
    )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


@contextmanager
def _shortened(model: Any, stacks: Sequence[Stack]) -> Iterator[None]:
    """The model with the first few of its equal layers, for a while."""
    lists = [model.get_submodule(stack.path) for stack in stacks]
    before = [dict(each._modules) for each in lists]
    try:
        for each, stack in zip(lists, stacks, strict=True):
            for name in list(each._modules)[stack.kept :]:
                del each._modules[name]
        yield
    finally:
        for each, modules in zip(lists, before, strict=True):
            each._modules.clear()
            each._modules.update(modules)


# ---- graphs ----------------------------------------------------------------------------------------------------------


def _captured(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], stacks: tuple[Stack, ...]
) -> CapturedModel:
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

    why = "it computes nothing on tensors"
    for whole in (True, False):
        try:
            with torch.enable_grad():
                run_captured(model, args, kwargs, capture, fullgraph=whole, dynamic=False)
            break
        except _Captured:
            break
        except torch._dynamo.exc.Unsupported as error:
            if not whole:
                raise
            why = said(error)
            graphs.clear()
            sites.clear()
    if not graphs:
        raise ValueError(f"model: torch.compile captures no graph of it, as of a graph break inside a loop: {why}")
    model = getattr(model, "_orig_mod", model)
    paths = [path for path, _ in model.named_modules()] if isinstance(model, nn.Module) else []
    paths += [site.module for site in sites if site.module not in paths]
    layers = layers_of(paths)
    layers |= {path: found[0].layer(found[1]) for path in paths if (found := stack_of(path, stacks))}
    mlps: dict[str, list[str]] = {}
    for site in sites:
        if site.op is not None and site.is_mlp:
            modules = mlps.setdefault(layers[site.module], [])
            if site.module not in modules:
                modules.append(site.module)
    members = {layer for stack in stacks for layer in stack.captured}
    units = [unit for unit in dict.fromkeys(layers.values()) if unit in mlps or unit in members]
    return CapturedModel(
        tuple(graphs), links, tuple(units), {unit: tuple(found) for unit, found in mlps.items()}, stacks, layers
    )
