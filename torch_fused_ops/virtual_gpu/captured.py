"""Copy graphs that Dynamo captured, and fix their devices and sizes, to compile them without a device."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from torch_fused_ops.graphs.modules import is_parameter, source_name, tensor_path


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that Dynamo captured, set aside by `set_aside` to be compiled without a device later.

    Attributes:
        gm: a copy of the graph and its subgraphs, with their recorded values.
        parameters: for each placeholder, True if it is a parameter or a buffer of a module.
        paths: for each placeholder, its path in the model, "layers.0.up.weight"; "" unless it is a parameter or buffer.
        training: True if grad mode was on.
        autocast: the dtype of the enclosing autocast region for the graph's device; None outside of such regions.
    """

    gm: fx.GraphModule
    parameters: tuple[bool, ...]
    training: bool
    autocast: torch.dtype | None
    paths: tuple[str, ...] = ()

    @property
    def needs_gradients(self) -> bool:
        """True if the graph has a backward: grad mode was on, and an input requires a gradient."""
        values = (node.meta.get("example_value") for node in self.gm.graph.find_nodes(op="placeholder"))
        return self.training and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def set_aside(gm: fx.GraphModule) -> CapturedGraph:
    """Copy a graph that Dynamo passes to its backend. Cheap; `gm` is not changed.

    Returns:
        The argument of `compile_graph_on_paper`. The only real tensors it references are constants inside the graph.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in placeholders]
    device = next((v.device.type for v in values if isinstance(v, Tensor)), "cpu")
    device = "cuda" if device == "meta" else device  # a model on "meta" is planned for a GPU
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    parameters = tuple(map(is_parameter, placeholders))
    paths = tuple(tensor_path(source_name(node)) if is_parameter(node) else "" for node in placeholders)
    return CapturedGraph(copy_graph(gm), parameters, torch.is_grad_enabled(), autocast, paths)


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph and its subgraphs. The copies share attributes and recorded values."""
    graph = copy.deepcopy(gm.graph)  # copies nodes and their dictionaries, but not the recorded values
    copied = fx.GraphModule(gm, graph, type(gm).__name__)
    # AOTAutograd finds parameters, which stay alive anyway, by `_param_name_to_source`.
    copied.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        new.meta.pop("grapharg", None)  # holds the real input
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, copy_graph(child))
    return copied


def concrete(captured: CapturedGraph, mode: Any) -> tuple[fx.GraphModule, list[Any], list[bool]]:
    """Copy a graph for tracing. Return the copy, fake CPU tensors of fixed sizes, and flags for parameters."""
    gm = copy_graph(captured.gm)
    is_parameter_of = dict(zip(gm.graph.find_nodes(op="placeholder"), captured.parameters, strict=True))
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            _fix_sizes(module.graph, keep_inputs=module is not gm)
            _name_cpu(module.graph)
            module.recompile()
    nodes = gm.graph.find_nodes(op="placeholder")
    return gm, [_fake_on_cpu(node, mode) for node in nodes], [is_parameter_of[node] for node in nodes]


def _fix_sizes(graph: fx.Graph, *, keep_inputs: bool) -> None:
    """Replace nodes that compute sizes, and numbers that Dynamo made inputs, by their values."""
    numbers: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and value.node.hint is not None:
            numbers[node] = value.node.hint
        node.args, node.kwargs = (fx.node.map_arg(a, lambda n: numbers.get(n, n)) for a in (node.args, node.kwargs))
    for node in reversed(numbers):
        if not (keep_inputs and node.op == "placeholder"):
            graph.erase_node(node)


def _fake_on_cpu(node: fx.Node, mode: Any) -> Any:
    """Make a fake CPU tensor of fixed sizes like a placeholder's recorded value."""
    from torch._subclasses.fake_tensor import FakeTensor

    name, value = node.name, node.meta.get("example_value")
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, Tensor):
        raise TypeError(f"input {name}: got {type(value).__name__}, expected a tensor or a number")
    if type(value) not in (Tensor, nn.Parameter, FakeTensor) and not (
        isinstance(value, nn.Parameter) and isinstance(value, FakeTensor)
    ):
        raise TypeError(f"input {name}: got a {type(value).__name__}, expected a plain tensor")
    shape, stride = ([hint(size) for size in sizes] for sizes in (value.shape, value.stride()))
    with mode:
        return torch.empty_strided(shape, stride, dtype=value.dtype, device="cpu", requires_grad=value.requires_grad)


def _name_cpu(graph: fx.Graph) -> None:
    """Replace GPU and meta devices in a graph by the CPU, and CPU autocast by GPU autocast."""
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            device, dtype, *flags = node.args
            node.args = ("cuda", dtype or torch.get_autocast_dtype(device), *flags)
        elif node.op == "call_method" and node.target == "cuda":
            node.target, node.args, node.kwargs = "cpu", node.args[:1], {}
        else:
            node.args, node.kwargs = (fx.node.map_aggregate(a, _cpu_for_gpu) for a in (node.args, node.kwargs))


def _cpu_for_gpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type in ("cuda", "meta") else value
    return "cpu" if isinstance(value, str) and re.fullmatch(r"cuda(:\d+)?|meta", value) else value


def hint(size: Any) -> Any:
    """Return a size or another number; for a dynamic number, its value at capture."""
    if isinstance(size, (int, float)):
        return size
    if size.node.hint is None:
        raise ValueError(f"the size {size} depends on data, so it is unknown before the model runs")
    return size.node.hint
