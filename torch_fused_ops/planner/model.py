"""Capture a model: its graphs, its layers, and each layer's MLPs."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_fused_ops.graphs.capture import run_captured, said
from torch_fused_ops.graphs.modules import innermost, is_parameter, source_name, tensor_path
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.planner.setup import OFF, WITH_ATTENTION, SettingError, check
from torch_fused_ops.policy import Attention, Checkpoints, FusionPolicy
from torch_fused_ops.reports.captures import capture as set_aside
from torch_fused_ops.reports.captures import graphs_of, sites_of
from torch_fused_ops.virtual_gpu.captured import CapturedGraph

# Units that are not modules: a loss outside the model, and the parts before and after the layers.
LOSS, EMBEDDING, HEAD = "(loss)", "(embedding)", "(head)"
OTHER = "(other)"  # the layer of calls outside of submodules


@dataclass(frozen=True)
class CapturedModel:
    """A model's captured graphs."""

    graphs: tuple[CapturedGraph, ...]  # in the order in which they run
    links: Mapping[tuple[int, int], tuple[int, int]]  # maps (graph, input) to (earlier graph, result)
    units: tuple[str, ...]  # the layers with MLPs, and all items of module lists, in the model's order
    mlps: Mapping[str, tuple[str, ...]]  # paths of the fused MLPs' modules, by unit
    layers: Mapping[str, str]  # maps each module's path to its layer
    unregistered: Mapping[str, Tensor]  # parameters and buffers that graphs read and the model does not register
    unread: int  # bytes of argument tensors that no graph reads
    # For each graph of a divided model (pieces.py): the layer of all its calls; None if each call names its own layer.
    # () if the model is not divided.
    pieces: tuple[str | None, ...] = ()
    eager: frozenset[int] = frozenset()  # the graphs that are not compiled
    shared: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (graph, input) -> its tensor's name
    retained: frozenset[tuple[int, int]] = frozenset()  # (graph, result)s that the caller holds to the end

    def parameter(self, graph: int, number: int) -> str:
        """Return the path of the parameter or buffer at a graph's input; "" if the input is another tensor."""
        return self.graphs[graph].paths[number]

    def calls(self, *names: str) -> bool:
        """Return True if a graph has a call with a name that contains an element of ``names``."""
        graphs = (gm for graph in self.graphs for gm in graphs_of(graph.gm))
        calls = (str(getattr(node.target, "__name__", node.target)) for gm in graphs for node in gm.graph.nodes)
        return any(name in call for call in calls for name in names)

    @cached_property
    def has_checkpoints(self) -> bool:
        """True if the model calls ``torch.utils.checkpoint``."""
        return self.calls("tag_activation_checkpoint")

    def policy_of(self, levels: Mapping[str, str]) -> FusionPolicy:
        """Return the policy with each unit's level of ``setup.LEVELS`` for its MLPs and its attention.

        Levels take the place of the model's checkpoints, except "off", at which all checkpoints stay.
        """
        chosen = {unit: levels.get(unit, "free") for unit in self.mlps}
        if len(set(chosen.values())) <= 1:
            return self.policy_at(next(iter(chosen.values()), "free"))
        policies = {unit: self.policy_at(level) for unit, level in chosen.items()}
        memory = {module: str(policies[unit].memory) for unit, modules in self.mlps.items() for module in modules}
        attention = {f"{unit}.*": "input" for unit, policy in policies.items() if policy.attention == "input"}
        if not self.has_checkpoints:
            memory = {module: level for module, level in memory.items() if level != "free"}
        return replace(self.policy_at("free"), memory=memory, attention=attention or "off")

    def policy_at(self, level: str) -> FusionPolicy:
        """Return the policy with every unit at one level."""
        attention: Attention = "input" if level.endswith(WITH_ATTENTION) else "off"
        checkpoints: Checkpoints = "replace" if self.has_checkpoints and level != OFF else "keep"
        memory: Any = level.removesuffix(WITH_ATTENTION)
        return FusionPolicy(memory=memory, attention=attention, checkpoints=checkpoints)

    def group_of(self, path: str) -> str:
        """Return a parameter's group outside layers: ``HEAD`` if it is read after the layers, else ``EMBEDDING``.

        Raises:
            SettingError: the parameter is read before and after the layers.
        """
        ends = set()
        passed = False
        for graph in self.graphs:
            paths = dict(zip(graph.gm.graph.find_nodes(op="placeholder"), graph.paths, strict=True))
            for node in graph.gm.graph.nodes:
                passed |= self.unit_of(innermost(node)) != ""
                if node.op != "placeholder" and any(paths.get(x) == path for x in node.all_input_nodes):
                    ends.add(HEAD if passed else EMBEDDING)
        if len(ends) > 1:
            raise SettingError("root", "apart", f"is not accepted: {path} is read before the layers and after them")
        return ends.pop() if ends else EMBEDDING

    def unit_of(self, path: str) -> str:
        """Return the unit of the module at ``path``; "" outside units."""
        layer = self.layers.get(path, "")
        return layer if layer in self.units else ""


def returned(x: Tensor) -> Tensor:
    """Mark a result of the model in the captured graph: the calls after it compute the loss."""
    return x.view_as(x)


class _Captured(BaseException):
    """Stops Dynamo at the first graph. It is not an Exception, because Dynamo would catch it."""


def _storages(values: Any) -> dict[int, int]:
    """Map each storage's identity to its bytes, for tensors in nested values and in the leaves' attributes."""
    leaves = [leaf if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", ()) for leaf in tree_leaves(values)]
    storages = [leaf.untyped_storage() for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def weights_as(model: Callable[..., Any], dtype: torch.dtype | None) -> contextlib.AbstractContextManager[None]:
    """Inside the block, replace floating-point parameters by uninitialized ones of ``dtype`` unless it is None."""
    if dtype is None or not isinstance(model, nn.Module):
        return contextlib.nullcontext()
    floats = ((name, p) for name, p in model.named_parameters() if p.is_floating_point())
    weights: dict[str, Tensor] = {
        name: nn.Parameter(torch.empty_like(p, dtype=dtype), p.requires_grad) for name, p in floats
    }
    return _reparametrize_module(model, weights, tie_weights=True)


def loss_of(loss: Any) -> tuple[Callable[[Any], Tensor] | None, str]:
    """Return the function for ``plan``'s argument ``loss``, and "eager" or "compiled"; (None, "") without a loss.

    Raises:
        SettingError: loss is neither callable nor an accepted word.
    """
    if not callable(loss):
        check("loss", loss)
        return (None, "") if loss is None else (cross_entropy, loss)
    original = getattr(loss, "_orig_mod", getattr(loss, "_torchdynamo_orig_callable", loss))
    return original, "eager" if original is loss else "compiled"


def cross_entropy(result: Any) -> Tensor:
    """Compute the mean cross entropy of float32 logits. ``result`` is the logits, or has an attribute ``logits``."""
    logits = getattr(result, "logits", result)
    rows = logits.flatten(0, -2).float()
    targets = torch.zeros(rows.shape[0], dtype=torch.long, device=rows.device)
    return F.cross_entropy(rows, targets)


def captured_model(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None = None,
) -> CapturedModel:
    """Capture a model. It runs only if Dynamo breaks it into several graphs.

    Args:
        model: a module or a function.
        args: its arguments.
        kwargs: its keyword arguments.
        loss: called with the model's result; None if the model returns its loss.

    Raises:
        ValueError: Dynamo captures no graph, a graph runs several times, a graph or the caller reads a tensor that is
            computed outside of graphs, the model reads the value of a meta tensor, or a table has too few rows.
    """
    policy = FusionPolicy()
    sites: list[Site] = []
    graphs: list[CapturedGraph] = []
    links: dict[tuple[int, int], tuple[int, int]] = {}
    earlier: list[tuple[Any, tuple[int, int]]] = []  # references results, for comparison by identity
    known: dict[int, int] = {}
    names: dict[int, str] = {}
    unregistered: dict[str, Tensor] = {}
    read: set[int] = set()  # storages of graphs' inputs
    left_out: list[str] = []
    not_copied: list[str] = []
    torch._dynamo.allow_in_graph(returned)

    def with_loss(*args: Any, **kwargs: Any) -> Tensor:
        assert loss is not None
        result = model(*args, **kwargs)
        marked = returned(result) if isinstance(result, Tensor) else tree_map_only(Tensor, returned, result)
        return loss(marked)

    called = model if loss is None else with_loss
    if isinstance(model, nn.Module):
        names = {id(x): name for name, x in (*model.named_parameters(), *model.named_buffers())}

    def path_of(node: torch.fx.Node, x: Any) -> str:
        """Return a parameter's path, else "". Unregistered parameters have Dynamo's path: from the captured module."""
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
            graphs.append(replace(captured.graph, paths=tuple(map(path_of, placeholders, example_inputs))))
        else:
            not_copied.append(captured.reason)
        sites.extend(sites_of(gm, policy))
        if fullgraph:
            raise _Captured
        number, runs = len(graphs) - 1, itertools.count(1)
        lives = [is_parameter(node) or source_name(node).startswith("G[") for node in placeholders]

        def run(*inputs: Any) -> Any:
            if next(runs) == 2:
                left_out.append(f"graph {number + 1} runs several times")
            computed = [x for x, lives_anyway in zip(inputs, lives, strict=True) if not lives_anyway]
            if not _storages(computed).keys() <= known.keys():
                left_out.append(f"graph {number + 1} reads a tensor computed outside graphs")
            links.update({(number, i): source for i, x in enumerate(inputs) for y, source in earlier if x is y})
            results = gm.forward(*inputs)
            known.update(_storages(results))
            earlier.extend((result, (number, i)) for i, result in enumerate(results) if isinstance(result, Tensor))
            return results

        return run

    why = "it computes nothing on tensors"
    for fullgraph in (True, False):
        try:
            with torch.enable_grad():
                result = run_captured(called, args, kwargs, capture, fullgraph=fullgraph, dynamic=False)
            if not fullgraph and not _storages(result).keys() <= known.keys():
                left_out.append("it returns a tensor computed outside graphs")
            break
        except _Captured:
            break
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
            if not fullgraph:
                raise
            line = re.search(r"Caused by: (.*?)\s+#", str(error))  # of a branch that depends on a tensor's value
            why = line[1] if line else said(error)
            known = _storages((args, kwargs))
            if isinstance(model, nn.Module):
                known |= _storages([list(vars(module).values()) for module in model.modules()])
        except RuntimeError as error:
            if fullgraph or not any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
                raise
            stopped = f"model: the graph breaks at: {why}; the code after it cannot run on meta tensors: {said(error)}"
            raise ValueError(f"{stopped}. Pass real tensors") from error
    if not_copied:
        raise ValueError(not_copied[0])
    if not graphs:
        raise ValueError(f"model: torch.compile captures no graph of it, as with a graph break inside a loop: {why}")
    if left_out:
        raise ValueError(f"model: torch.compile does not capture all of it: {'; '.join(left_out)}: {why}")
    for graph in graphs:
        _check_positions(graph)
    paths = [path for path, _ in model.named_modules()] if isinstance(model, nn.Module) else []
    paths += [site.module for site in sites if site.module not in paths]
    layers = layers_of(paths)
    mlps: dict[str, tuple[str, ...]] = {}
    for module in dict.fromkeys(site.module for site in sites if site.op is not None and site.is_mlp):
        mlps[layers[module]] = (*mlps.get(layers[module], ()), module)
    units = [unit for unit in dict.fromkeys(layers.values()) if unit in mlps or unit.rpartition(".")[2].isdigit()]
    unread = sum(nbytes for key, nbytes in _storages((args, kwargs)).items() if key not in read)
    return CapturedModel(tuple(graphs), links, tuple(units), mlps, layers, unregistered, unread)


_SAME_VALUES = ("contiguous", "expand", "flatten", "int", "long", "repeat", "reshape", "to", "unsqueeze", "view")


def _check_positions(graph: CapturedGraph) -> None:
    """Raise a ValueError if an embedding of consecutive positions has too few rows: a GPU would fail in its kernel."""
    paths = dict(zip(graph.gm.graph.find_nodes(op="placeholder"), graph.paths, strict=True))
    for node in graph.gm.graph.find_nodes(op="call_function", target=F.embedding):
        arguments: dict[str, Any] = {**dict(zip(("input", "weight"), node.args, strict=False)), **node.kwargs}
        positions, table = arguments["input"], arguments["weight"]
        while positions.op == "call_method" and positions.target in _SAME_VALUES:
            positions = positions.args[0]
        consecutive = positions.target is torch.arange and len(positions.args) < 3
        ends = [end for end in positions.args if isinstance(end, int)] if consecutive else []
        value = table.meta.get("example_value")
        rows = value.shape[0] if isinstance(value, Tensor) else 0
        if 0 < rows < max(ends, default=0):
            name = paths.get(table) or table.name
            raise ValueError(f"model: {name} has {rows} rows, and the model reads positions up to {max(ends) - 1}")


def layers_of(paths: Iterable[str]) -> dict[str, str]:
    """Map each module to its layer.

    A layer is an item of a module list: ``model.layers.0.mlp.up`` is in ``model.layers.0``. Outside of lists, the
    first two names are the layer: ``encoder.norm.weight`` is in ``encoder.norm``. A single operator in an
    ``nn.Sequential`` (``mlp.0``) is not a layer: it is in ``mlp``.
    """
    paths = list(paths)
    inner = {path.rsplit(".", i)[0] for path in paths for i in range(1, path.count(".") + 1)}
    layers = {}
    for path in paths:
        names = path.split(".")
        number = next((i for i, name in enumerate(names) if name.isdigit()), len(names))
        item = ".".join(names[: number + 1])
        in_list = number < len(names) and item in inner
        layers[path] = (item if in_list else ".".join(names[:number][:2])) or OTHER
    return layers
