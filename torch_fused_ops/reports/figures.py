"""Estimate each layer's bytes saved for backward, bytes moved and kernels, before and after fusion.

A captured graph is compiled twice without a device (``torch_fused_ops.virtual_gpu``): as plain ``torch.compile`` would
compile it, and fused and partitioned by a policy. This allocates and runs nothing, and does not affect the process's
own compilations.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.text import aligned, change, size

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from torch_fused_ops.graphs.sites import Site
    from torch_fused_ops.virtual_gpu import GPU, CapturedGraph, PaperCompilation

log = logging.getLogger("torch_fused_ops")
progress = logging.getLogger("torch_fused_ops.reports")

PLAIN, FUSED = "torch.compile", "fused"  # the variants that a report compares
# Names in place of a layer's path. Module paths never contain spaces or parentheses.
INPUTS, WHOLE, OTHER = "(inputs)", "(whole model)", "(other)"


@dataclass(frozen=True)
class Cost:
    """The cost of one part of a program.

    Attributes:
        saved: bytes saved for backward, without parameters and buffers.
        forward_bytes: bytes that kernels in forward (or inference) read and write.
        backward_bytes: bytes that kernels in backward read and write.
        forward_kernels: launches in forward (or inference): generated kernels and library calls (GEMMs).
        backward_kernels: launches in backward.
    """

    saved: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_kernels: int = 0
    backward_kernels: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written, forward and backward."""
        return self.forward_bytes + self.backward_bytes

    @property
    def kernels(self) -> int:
        """Kernels launched, forward and backward."""
        return self.forward_kernels + self.backward_kernels

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))


@dataclass(frozen=True)
class LayerFigures:
    """A layer's costs before and after fusion.

    ``name`` is its path in the model; "(inputs)": the arguments; "(other)": the remainder; "(whole model)": no layers.
    """

    name: str
    before: Cost
    after: Cost


@dataclass(frozen=True, repr=False)
class Figures:
    """The costs of running each graph of a report once, with plain ``torch.compile`` and fused. Printable.

    Attributes:
        target: the target device: "NVIDIA H200".
        training: True if a graph has a backward.
        layers: the costs by layer, in the order of the model; their sum is the total. A kernel fused across
            layers counts for the layer with most of its results.
        skipped: the reason for each graph that is missing from the figures.
        notes: parts of the policy that this GPU does not support, for people.
    """

    target: str
    training: bool
    layers: tuple[LayerFigures, ...]
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def before(self) -> Cost:
        """The total with plain ``torch.compile``."""
        return sum((layer.before for layer in self.layers), Cost())

    @property
    def after(self) -> Cost:
        """The total with fusion."""
        return sum((layer.after for layer in self.layers), Cost())

    def __str__(self) -> str:
        rows = [(f"estimated, {self.target}", PLAIN, FUSED, "change"), *rows_of(self)]
        missing = [f"a graph is missing from the figures: {reason}" for reason in dict.fromkeys(self.skipped)]
        return "\n".join([*aligned(rows), *missing, *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def as_dict(self) -> dict[str, Any]:
        """Convert the attributes and the totals ``before`` and ``after`` to plain types, for JSON."""
        return {"before": asdict(self.before), "after": asdict(self.after), **asdict(self)}


@dataclass(frozen=True)
class Capture:
    """A copy of a captured graph before fusion, and its policy. ``graph`` is None if copying failed for ``reason``."""

    graph: CapturedGraph | None
    policy: FusionPolicy
    reason: str = field(default="", compare=False)

    @property
    def devices(self) -> tuple[str, ...]:
        """The device types of the graph's inputs: "cpu", "cuda"."""
        nodes = self.graph.gm.graph.find_nodes(op="placeholder") if self.graph else ()
        values = (node.meta.get("example_value") for node in nodes)
        return tuple(dict.fromkeys(v.device.type for v in values if isinstance(v, torch.Tensor)))


def capture(gm: GraphModule, policy: FusionPolicy, subgraphs: dict[Any, GraphModule] | None = None) -> Capture:
    """Copy a graph to measure it later. Never raises, since this runs inside the user's compilation.

    Args:
        gm: a graph from Dynamo, before fusion.
        policy: its fusion policy.
        subgraphs: for subgraphs that are fused already, copies from before their fusion, by their graph.
    """
    try:
        from torch_fused_ops.virtual_gpu import set_aside

        return Capture(set_aside(gm, subgraphs), policy)
    except Exception as error:
        log.debug("a graph could not be set aside to be measured", exc_info=True)
        return Capture(None, policy, said(error))


def graphs_of(gm: GraphModule) -> Iterator[GraphModule]:
    """Yield the bodies of called higher-order operators (checkpoints, …), then the graph, in Inductor's order."""
    called = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    for name, child in gm.named_children():
        if name in called and isinstance(child, torch.fx.GraphModule):
            yield from graphs_of(child)
    yield gm


def beside_loss(gm: GraphModule) -> list[Node]:
    """List the tensors with a gradient that a graph returns in addition to its loss; [] unless it returns one loss.

    Backward begins with a gradient of zeros for each, of the tensor's size (pytorch#131794).
    """
    values = {node: node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes}
    trained = {node: value for node, value in values.items() if isinstance(value, torch.Tensor) and value.requires_grad}
    beside = [node for node, value in trained.items() if value.dim()]
    return beside if len(beside) == len(trained) - 1 else []


def sites_of(gm: GraphModule, policy: FusionPolicy) -> Iterator[Site]:
    """Yield the sites of a graph from Dynamo, and of its operators' bodies, without editing these graphs."""
    from torch_fused_ops.lowerings import recognize

    for module in graphs_of(gm):
        yield from recognize.rewrite(module.graph, policy, apply=False)


def measure(captures: Sequence[Capture], gpu: GPU) -> Figures:
    """Compile graphs without a device, before and after fusion, and sum their costs. Takes seconds for each graph.

    No other thread may compile meanwhile (``docs/virtual-gpu.md``).

    Args:
        captures: the results of ``capture``.
        gpu: the GPU to generate code for.

    Raises:
        ValueError: no graph was captured, or no graph could be measured. The message has the reason.
    """
    measured: list[tuple[PaperCompilation, PaperCompilation]] = []
    notes: dict[str, None] = {}
    skipped: list[str] = []
    for i, captured in enumerate(captures, 1):
        try:
            progress.info("estimating graph %d of %d: %s", i, len(captures), PLAIN)
            plain, _ = on_paper(captured, gpu, None)
            progress.info("estimating graph %d of %d: %s", i, len(captures), FUSED)
            fused, sites = on_paper(captured, gpu, captured.policy)
            measured.append((plain, fused))
            for reason, n in Counter(site.gemm_reason for site in sites if site.gemm_reason).items():
                notes[f"not all in float8, {n} of {len(sites)} MLPs: {reason}"] = None
        except Exception as error:
            log.debug("a graph could not be measured", exc_info=True)
            skipped.append(said(error))
    if not measured:
        raise ValueError("; ".join(dict.fromkeys(skipped)) or "no graph was captured")
    layers = layers_of(dict.fromkeys(path for pair in measured for paper in pair for path in _paths(paper)))
    if all(layer == OTHER for layer in layers.values()):  # a function, or a plain nn.Sequential
        layers = dict.fromkeys(layers, WHOLE)
    costs = tuple(defaultdict[str, Cost](Cost) for _ in (PLAIN, FUSED))
    for pair in measured:
        for costs_by_layer, paper in zip(costs, pair, strict=True):
            for layer, cost in _costs(paper, layers):
                costs_by_layer[layer] += cost
    before, after = costs
    order = [INPUTS, *dict.fromkeys(layer for layer in layers.values() if layer != OTHER), OTHER]
    figures = [LayerFigures(name, before[name], after[name]) for name in order if name in before or name in after]
    training = any(paper.backward is not None for pair in measured for paper in pair)
    return Figures(gpu.name, training, tuple(figures), tuple(skipped), tuple(notes))


def said(error: Exception) -> str:
    """Shorten an exception to one line, because compilers wrap errors and append pages of advice."""
    lines = str(getattr(error, "inner_exception", error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def on_paper(captured: Capture, gpu: GPU, policy: FusionPolicy | None) -> tuple[PaperCompilation, list[Site]]:
    """Compile a graph without a device: fused by a policy, or as captured if the policy is None.

    Returns:
        The compilation, and the fused sites.
    """
    from torch_fused_ops.lowerings import passes
    from torch_fused_ops.virtual_gpu import compile_graph_on_paper

    graph, sites = fused_graph(captured, gpu, policy)
    slots = passes.options_without_us()
    if policy is not None:  # the pre-grad pass has already run
        options = passes.compile_options(policy)
        slots |= {name: options[name] for name, kind in passes.SLOTS.items() if kind is not passes.PreGradPass}
    paper = compile_graph_on_paper(graph, gpu=gpu, config=slots)
    return paper, [site for site in sites if site.op is not None]


def fused_graph(captured: Capture, gpu: GPU, policy: FusionPolicy | None) -> tuple[CapturedGraph, list[Site]]:
    """Fuse a copy of a captured graph for a GPU. Return the copy and its sites; the original and [] without a policy.

    Raises:
        RuntimeError: the graph could not be copied when it was captured.
    """
    from torch_fused_ops.lowerings.recognize import rewrite
    from torch_fused_ops.virtual_gpu import copy_graph
    from torch_fused_ops.virtual_gpu.emulation import emulating

    graph = captured.graph
    if graph is None:
        raise RuntimeError(captured.reason)
    if policy is None:
        return graph, []
    graph = replace(graph, gm=copy_graph(graph.gm))
    with emulating(gpu), torch.set_grad_enabled(graph.training):
        return graph, [site for module in graphs_of(graph.gm) for site in rewrite(module.graph, policy)]


def _paths(paper: PaperCompilation) -> Iterator[str]:
    """Yield the module paths of a program in order."""
    for graph in paper.graphs.values():
        for launch in graph.launches:
            yield from launch.modules or ("",)
    for tensor in paper.saved:
        yield tensor.module


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


def _costs(paper: PaperCompilation, layers: dict[str, str]) -> Iterator[tuple[str, Cost]]:
    for tensor in paper.saved:
        if not tensor.is_parameter:
            yield INPUTS if tensor.is_graph_input else layers[tensor.module], Cost(saved=tensor.nbytes)
    for kind, graph in paper.graphs.items():
        for launch in graph.launches:
            votes = Counter(layers[path] for path in launch.modules or ("",))
            side = "backward" if kind == "backward" else "forward"
            cost = Cost(**{f"{side}_bytes": launch.bytes_moved, f"{side}_kernels": 1})
            yield votes.most_common(1)[0][0], cost


# ---- tables ----------------------------------------------------------------------------------------------------------


def rows_of(figures: Figures) -> list[tuple[str, str, str, str]]:
    """Format the totals as rows: name, before, after, change."""
    names = {"bytes moved": "forward_bytes", "kernels": "forward_kernels"}
    if figures.training:
        names = {
            "saved for backward": "saved",
            "bytes moved, forward": "forward_bytes",
            "bytes moved, backward": "backward_bytes",
            "kernels, forward": "forward_kernels",
            "kernels, backward": "backward_kernels",
        }
    rows = []
    for name, attribute in names.items():
        before, after = (getattr(side, attribute) for side in (figures.before, figures.after))
        texts = [str(n) if "kernels" in name else size(n, max(before, after)) for n in (before, after)]
        rows.append((name, texts[0], texts[1], change(before, after)))
    return rows
