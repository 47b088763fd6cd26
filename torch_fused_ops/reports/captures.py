"""Copy captured graphs, to fuse, partition or compile the copies later without a device.

This allocates and runs nothing, and does not affect the process's own compilations.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from torch_fused_ops.graphs.capture import said
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.text import size

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from torch_fused_ops.graphs.sites import Site
    from torch_fused_ops.virtual_gpu import GPU, CapturedGraph, PaperCompilation

log = logging.getLogger("torch_fused_ops")


@dataclass(frozen=True)
class Capture:
    """A copy of a captured graph before fusion, and its policy. ``graph`` is None if copying failed for ``reason``."""

    graph: CapturedGraph | None
    policy: FusionPolicy
    reason: str = field(default="", compare=False)


def capture(gm: GraphModule, policy: FusionPolicy) -> Capture:
    """Copy a graph from Dynamo before its fusion. Never raises: a report lists sites even if copying fails."""
    try:
        from torch_fused_ops.virtual_gpu import set_aside

        return Capture(set_aside(gm), policy)
    except Exception as error:
        log.debug("a graph could not be set aside", exc_info=True)
        return Capture(None, policy, said(error))


def graphs_of(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield the bodies of called higher-order operators (checkpoints, …), then the graph, in Inductor's order."""
    called = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    for name, child in gm.named_children():
        if name in called and isinstance(child, torch.fx.GraphModule):
            yield from graphs_of(child)
    yield gm


def beside_loss(gm: GraphModule) -> list[str]:
    """Return a note on tensors with a gradient that a graph returns in addition to its loss.

    Return [] if the graph has no such results, or does not return exactly one number with a gradient.
    Backward begins with a gradient of zeros for each, of the tensor's size (pytorch#131794).
    """
    values = [node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes]
    trained = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    beside = [value for value in trained if value.dim()]
    if not beside or len(beside) != len(trained) - 1:
        return []
    nbytes, advice = size(sum(value.nbytes for value in beside)), "return only the loss, or detach the other results"
    return [f"{nbytes} are returned beside the loss, and backward allocates gradients of zeros as large: {advice}"]


def sites_of(gm: GraphModule, policy: FusionPolicy) -> Iterator[Site]:
    """Yield the sites of a graph from Dynamo, and of its operators' bodies, without editing these graphs."""
    from torch_fused_ops.lowerings import checkpoints, recognize

    modules = tuple(graphs_of(gm))
    inside = {inner for caller in modules for body in checkpoints.bodies(caller) for inner in graphs_of(body)}
    for module in modules:
        sites = recognize.rewrite(module.graph, policy, apply=False)
        kind = Kind.IN_CHECKPOINT if module in inside else checkpoints.around_call()
        yield from (checkpoints.without_effect(site, kind, policy) for site in sites)


def on_paper(captured: Capture, gpu: GPU, policy: FusionPolicy) -> PaperCompilation:
    """Fuse a captured graph by a policy, and compile it without a device."""
    from torch_fused_ops.lowerings import passes
    from torch_fused_ops.virtual_gpu import compile_graph_on_paper

    graph, options = fused_graph(captured, gpu, policy), passes.compile_options(policy)
    later = [name for name, kind in passes.SLOTS.items() if kind is not passes.PreGradPass]  # which has already run
    slots = passes.options_without_us() | {name: options[name] for name in later}
    return compile_graph_on_paper(graph, gpu=gpu, config=slots)


def fused_graph(captured: Capture, gpu: GPU, policy: FusionPolicy) -> CapturedGraph:
    """Fuse a copy of a captured graph for a GPU.

    Raises:
        RuntimeError: the graph could not be copied when it was captured.
    """
    from torch_fused_ops.lowerings.recognize import rewrite
    from torch_fused_ops.virtual_gpu import copy_graph
    from torch_fused_ops.virtual_gpu.emulation import emulating

    graph = captured.graph
    if graph is None:
        raise RuntimeError(captured.reason)
    graph = replace(graph, gm=copy_graph(graph.gm))
    with emulating(gpu), torch.set_grad_enabled(graph.training):
        for module in graphs_of(graph.gm):
            rewrite(module.graph, policy)
    return graph
