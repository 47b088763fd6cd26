"""Estimates before and after fusion, layer by layer: bytes saved for backward, bytes moved, kernels.

A captured graph is compiled twice without a device (``torch_fused_ops.virtual_gpu``): once as plain ``torch.compile``
would compile it, and once fused and partitioned by a policy. Nothing is allocated or run. The process' own compilations
are not affected.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from torch_fused_ops.policy import MEMORY, FusionPolicy
from torch_fused_ops.reports.text import aligned, change, size

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from torch_fused_ops.graphs.sites import Site
    from torch_fused_ops.virtual_gpu import GPU, CapturedGraph, PaperCompilation

    Variants = dict[str, tuple[PaperCompilation, list[Site]]]  # a graph's compilations and fused sites, by name

log = logging.getLogger("torch_fused_ops")
progress = logging.getLogger("torch_fused_ops.reports")

PLAIN, FUSED = "torch.compile", "fused"  # the two variants that every report compares
KNOB = "torch.compile, budget 0.99"
# Never a module's name: module paths contain no spaces or parentheses.
INPUTS, WHOLE, OTHER = "(inputs)", "(whole model)", "(other)"
BUDGET = 0.99  # of upstream's ``activation_memory_budget``: all pointwise work is recomputed


@dataclass(frozen=True)
class Cost:
    """The cost of a part of a program.

    Attributes:
        saved: bytes saved for backward, without parameters and buffers.
        forward_bytes: bytes that forward's (or inference's) kernels read and write.
        backward_bytes: bytes that backward's read and write.
        forward_kernels: kernels that forward (or inference) launches: generated ones and library calls (GEMMs).
        backward_kernels: kernels that backward launches.
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
    """A layer's costs: ``name`` is its path in the model, "(inputs)" for the arguments, "(other)" for the remainder.

    "(whole model)" is a model without layers.
    """

    name: str
    before: Cost
    after: Cost


@dataclass(frozen=True)
class LevelFigures:
    """A whole program at a memory level (``docs/memory.md``).

    Attributes:
        name: "torch.compile", with or without PyTorch's own ``activation_memory_budget``, "fused", or a level of
            ``FusionPolicy(memory=…)``.
        saved: bytes saved for backward, without parameters and buffers.
        seconds: the least time for FLOP and bytes, and instructions on an H200, one kernel after the other, at this
            GPU's rates (``virtual_gpu.roofline``); None for a GPU without rates.
        peak: the most bytes alive at once in forward and backward, without parameters, with gradients
            (``PaperCompilation.timeline``); None for several graphs, whose timelines are not joined, and for a graph
            with operators that do not run without data.
        note: the MLPs that have another level, and why, for people; "" if there are none.
    """

    name: str
    saved: int
    seconds: float | None
    peak: int | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class Figures:
    """Costs of a report's graphs, each run once, under plain ``torch.compile`` and fused. Printable.

    Attributes:
        target: the target device: "NVIDIA H200".
        training: True if there is a backward.
        layers: the costs by layer, in the order of the model; their sum is the whole. A kernel that is fused across
            layers counts for the layer of most of its results.
        skipped: the reason for each graph that is missing from the figures.
        levels: if requested, the whole under plain ``torch.compile``, fused, under ``torch.compile`` with
            ``activation_memory_budget=0.99`` (the least that PyTorch itself saves), and at every level.
        notes: parts of the policy that this GPU does not support, and its rates that are not measured, for people.
    """

    target: str
    training: bool
    layers: tuple[LayerFigures, ...]
    skipped: tuple[str, ...] = ()
    levels: tuple[LevelFigures, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def before(self) -> Cost:
        """The whole under plain ``torch.compile``."""
        return sum((layer.before for layer in self.layers), Cost())

    @property
    def after(self) -> Cost:
        """The whole, fused."""
        return sum((layer.after for layer in self.layers), Cost())

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (figures_table(self), levels_table(self))))

    def __repr__(self) -> str:
        return str(self)

    def as_dict(self) -> dict[str, Any]:
        """The attributes and the totals ``before`` and ``after``, for JSON."""
        return {"before": asdict(self.before), "after": asdict(self.after), **asdict(self)}


@dataclass(frozen=True)
class Capture:
    """A copy of a captured graph before fusion, and its policy; ``reason`` says why a copy is missing."""

    graph: CapturedGraph | None
    policy: FusionPolicy
    reason: str = field(default="", compare=False)

    @property
    def devices(self) -> tuple[str, ...]:
        """The types of the devices that the graph's inputs are on: "cpu", "cuda"."""
        nodes = self.graph.gm.graph.find_nodes(op="placeholder") if self.graph else ()
        values = (node.meta.get("example_value") for node in nodes)
        return tuple(dict.fromkeys(v.device.type for v in values if isinstance(v, torch.Tensor)))


def capture(gm: GraphModule, policy: FusionPolicy, subgraphs: dict[Any, GraphModule] | None = None) -> Capture:
    """Copy a graph to measure it later. Never raises, since this runs inside the user's compilation.

    Args:
        gm: a graph from Dynamo, before fusion.
        policy: its fusion policy.
        subgraphs: earlier copies of subgraphs that are fused already, by their graph.
    """
    try:
        from torch_fused_ops.virtual_gpu import set_aside

        return Capture(set_aside(gm, subgraphs), policy)
    except Exception as error:
        log.debug("a graph could not be set aside to be measured", exc_info=True)
        return Capture(None, policy, said(error))


def graphs_of(gm: GraphModule) -> Iterator[GraphModule]:
    """The graph and those of the higher-order operators it calls (checkpoint bodies, …), as Inductor visits them."""
    called = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    for name, child in gm.named_children():
        if name in called and isinstance(child, torch.fx.GraphModule):
            yield from graphs_of(child)
    yield gm


def sites_of(gm: GraphModule, policy: FusionPolicy) -> Iterator[Site]:
    """List the sites of a graph from Dynamo and of the graphs that its operators call, without editing them."""
    from torch_fused_ops.lowerings import recognize

    for module in graphs_of(gm):
        yield from recognize.rewrite(module.graph, policy, apply=False)


def measure(captures: Sequence[Capture], gpu: GPU, levels: bool = False) -> Figures:
    """Compile graphs without a device, before and after fusion, and sum their costs; takes seconds for each.

    No other thread may compile meanwhile (``docs/virtual-gpu.md``).

    Args:
        captures: the results of ``capture``.
        gpu: the GPU to generate code for.
        levels: compile at every memory level, too, and assemble the generated code to count its instructions.

    Raises:
        ValueError: there is no graph, or none could be measured. The message says why.
    """
    measured: list[Variants] = []
    levels_of_graphs: list[dict[str, LevelFigures]] = []
    skipped: list[str] = []

    def compiled(
        name: str, policy: FusionPolicy | None, budget: float | None = None
    ) -> tuple[PaperCompilation, list[Site]]:
        progress.info("estimating: graph %d of %d, %s", len(measured) + len(skipped) + 1, len(captures), name)
        return on_paper(captured, gpu, policy, budget)

    for captured in captures:
        try:
            variants = {PLAIN: compiled(PLAIN, None), FUSED: (fused := compiled(FUSED, captured.policy))}
            if levels and fused[0].backward is not None:
                variants[KNOB] = compiled(KNOB, None, BUDGET)
                for memory in MEMORY:
                    policy = replace(captured.policy, memory=memory)  # type: ignore[arg-type]
                    same = policy == captured.policy
                    variants[memory] = fused if same else compiled(f'memory="{memory}"', policy)
            if levels:
                progress.info("assembling the generated code")  # it takes half of the time
                levels_of_graphs.append(_level_figures(variants))
            measured.append(variants)
        except Exception as error:
            log.debug("a graph could not be measured", exc_info=True)
            skipped.append(said(error))
    if not measured:
        raise ValueError("; ".join(dict.fromkeys(skipped)) or "no graph was captured")
    papers = [(name, variants[name][0]) for variants in measured for name in (PLAIN, FUSED)]
    layers = layers_of(dict.fromkeys(path for _, paper in papers for path in _paths(paper)))
    if all(layer == OTHER for layer in layers.values()):  # a function, or a plain nn.Sequential
        layers = dict.fromkeys(layers, WHOLE)
    costs = {name: defaultdict[str, Cost](Cost) for name in (PLAIN, FUSED)}
    for name, paper in papers:
        for layer, cost in _costs(paper, layers):
            costs[name][layer] += cost
    order = [INPUTS, *dict.fromkeys(layer for layer in layers.values() if layer != OTHER), OTHER]
    figures = [LayerFigures(n, costs[PLAIN][n], costs[FUSED][n]) for n in order if any(n in c for c in costs.values())]
    training = any(paper.backward is not None for _, paper in papers)
    notes = dict.fromkeys(note for variants in measured for note in _notes(*variants[FUSED]))
    return Figures(gpu.name, training, tuple(figures), tuple(skipped), _together(levels_of_graphs), tuple(notes))


def said(error: Exception) -> str:
    """Shorten an exception to one line: compilers wrap errors, and append pages of advice."""
    lines = str(getattr(error, "inner_exception", error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _notes(paper: PaperCompilation, sites: Sequence[Site]) -> Iterator[str]:
    """The remarks on a fused graph's figures."""
    from torch_fused_ops.virtual_gpu import roofline, work

    for reason, n in Counter(site.gemm_reason for site in sites if site.gemm_reason).items():
        yield f"not all in float8, {n} of {len(sites)} MLPs: {reason}"
    if any(roofline.flops(graph) > roofline.flops(graph, work.flop_of_bf16) for graph in paper.graphs.values()):
        rates = f"{work.FLOAT8_FLOP / work.BF16_FLOP:.2f} times bfloat16's rate"
        yield f"float8 GEMMs are assumed to reach {rates}; that is not measured"


def _level_figures(variants: Variants) -> dict[str, LevelFigures]:
    """The figures of a graph's variants by name; with times if their GPU has rates, instructions if measured."""
    from torch_fused_ops.virtual_gpu import roofline

    papers = [paper for paper, _ in variants.values()]
    rates = roofline.estimated_rates(papers[0].gpu)
    measured = roofline.rates_of(papers[0].gpu) is not None
    if measured:
        roofline.prepare(graph for paper in papers for graph in paper.graphs.values())
    figures = {}
    for name, (paper, sites) in variants.items():
        seconds: float | None = None
        peak: int | None = None
        if rates:
            seconds = rates.seconds(w for graph in paper.graphs.values() for w in roofline.works_of(graph, measured))
        with contextlib.suppress(ValueError):
            peak = paper.peak_bytes()
        untiled = Counter(site.tiles_reason for site in sites if site.tiles_reason and name in MEMORY)
        note = "; ".join(f'{n} of {len(sites)} MLPs as "input": {reason}' for reason, n in untiled.items())
        figures[name] = LevelFigures(name, paper.saved_bytes(), seconds, peak, note)
    return figures


def _together(graphs: Sequence[dict[str, LevelFigures]]) -> tuple[LevelFigures, ...]:
    """Sum over graphs, for the levels that all of them have."""
    sums = []
    for name in graphs[0] if graphs else ():
        alike = [graph[name] for graph in graphs if name in graph]
        if len(alike) == len(graphs):
            seconds = [level.seconds for level in alike if level.seconds is not None]
            saved = sum(level.saved for level in alike)
            peak = alike[0].peak if len(alike) == 1 else None
            note = "; ".join(dict.fromkeys(level.note for level in alike if level.note))
            sums.append(LevelFigures(name, saved, sum(seconds) if len(seconds) == len(alike) else None, peak, note))
    return tuple(sums)


def on_paper(
    captured: Capture, gpu: GPU, policy: FusionPolicy | None, memory_budget: float | None = None
) -> tuple[PaperCompilation, list[Site]]:
    """Compile a graph without a device: fused by a policy, or as captured, with PyTorch's memory budget if given.

    Returns:
        The compilation, and the fused sites.
    """
    from torch_fused_ops.lowerings import passes
    from torch_fused_ops.virtual_gpu import compile_graph_on_paper

    graph, sites = fused_graph(captured, gpu, policy)
    slots = passes.options_without_us()
    if policy is not None:  # with all of our passes but the pre-grad pass, which has run
        ours = passes.compile_options(policy)
        slots |= {name: ours[name] for name, kind in passes.SLOTS.items() if kind is not passes.PreGradPass}
    paper = compile_graph_on_paper(graph, gpu=gpu, config=slots, memory_budget=memory_budget)
    return paper, [site for site in sites if site.op is not None]


def fused_graph(captured: Capture, gpu: GPU, policy: FusionPolicy | None) -> tuple[CapturedGraph, list[Site]]:
    """Return a copy of a captured graph, fused by a policy for a GPU, and its sites; if None, the graph as captured.

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
    """The module paths in a program, in its order."""
    for graph in paper.graphs.values():
        for launch in graph.launches:
            yield from launch.modules or ("",)
    for tensor in paper.saved:
        yield tensor.module


def layers_of(paths: Iterable[str]) -> dict[str, str]:
    """Map each module to its layer.

    A layer is an item of a list of modules: ``model.layers.0.mlp.up`` is in ``model.layers.0``. Outside of lists the
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
    """The totals as text: name, before, after, change."""
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
    seconds = {level.name: level.seconds for level in figures.levels}
    a, b = seconds.get(PLAIN), seconds.get(FUSED)
    if a is not None and b is not None:
        rows.append(("time, at least", f"{1e3 * a:.3f} ms", f"{1e3 * b:.3f} ms", change(a, b)))
    return rows


def figures_table(figures: Figures) -> str:
    """The totals, before and after."""
    rows = [(f"estimated, {figures.target}", PLAIN, FUSED, "change"), *rows_of(figures)]
    lines = aligned(rows)
    lines += [f"a graph is missing from the figures: {reason}" for reason in dict.fromkeys(figures.skipped)]
    lines += figures.notes
    return "\n".join(lines)


def levels_table(figures: Figures) -> str:
    """Table of memory levels beside plain torch.compile: bytes saved for backward, peak, least time; "" if none."""
    if not figures.training or not figures.levels:
        return ""
    base = figures.levels[0]
    peaks = all(level.peak is not None for level in figures.levels)
    heads = ("peak", "change") if peaks else ()
    rows: list[tuple[str, ...]] = [("memory level", "saved for backward", "change", *heads, "at least", "change")]
    for level in (level for level in figures.levels if level.name != FUSED):
        times = ("not known", "")
        if level.seconds is not None and base.seconds is not None:
            times = (f"{1e3 * level.seconds:.3f} ms", change(base.seconds, level.seconds))
        peak = level.peak, base.peak
        most = (size(peak[0], peak[1]), change(peak[1], peak[0])) if peaks and peak[0] and peak[1] else ()
        rows.append((level.name, size(level.saved, base.saved), change(base.saved, level.saved), *most, *times))
    lines = aligned(rows)
    if base.seconds is None:
        text = f"not known: there are no rates of {figures.target}"
    else:
        text = "the time for FLOP, bytes and (on an H200) instructions at this GPU's rates, a lower bound"
    lines.append(f"at least: {text}")
    lines += [f"{level.name}: {level.note}" for level in figures.levels if level.note]
    return "\n".join(lines)
