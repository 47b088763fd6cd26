"""What fusing changes, in figures: bytes saved for backward, bytes moved and kernels, before and after, layer by layer.

A captured graph is compiled twice on paper (``torch_fused_ops.virtual_gpu``): once as it was captured, as plain
``torch.compile`` would, and once rewritten and partitioned by a policy. Nothing is allocated or run, and the process'
own compilations are not touched.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_fused_ops.policy import MEMORY, FusionPolicy
from torch_fused_ops.reports.text import KNOB, PICKED_UP, PLAIN, figures_table, levels_table

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from torch_fused_ops.sites import Site
    from torch_fused_ops.virtual_gpu import GPU, CapturedGraph, PaperCompilation
    from torch_fused_ops.virtual_gpu.roofline import Work

__all__ = [
    "Capture",
    "Cost",
    "Figures",
    "LayerFigures",
    "LevelFigures",
    "OnPaper",
    "capture",
    "graphs_of",
    "layers_of",
    "measure",
    "on_paper",
    "said",
    "sites_of",
]

log = logging.getLogger("torch_fused_ops")
progress = logging.getLogger("torch_fused_ops.reports")

# No module is called so: their paths have no spaces and parentheses.
INPUTS, WHOLE, OTHER = "(inputs)", "(whole model)", "(other)"
BUDGET = 0.99  # of upstream's ``activation_memory_budget``: all that is pointwise is rebuilt


@dataclass(frozen=True)
class Cost:
    """What a part of a program costs.

    Attributes:
        saved: bytes kept from forward for backward, without parameters and buffers.
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
    """A layer's costs: ``name`` is its path in the model; "(inputs)": what it was called with, "(other)": the rest.

    Where the model has no layers, "(whole model)" is all of it.
    """

    name: str
    before: Cost
    after: Cost


@dataclass(frozen=True)
class LevelFigures:
    """A whole program at a memory level (``docs/memory.md``).

    Attributes:
        name: "torch.compile", with or without PyTorch's own ``activation_memory_budget``, "with pick-up", or a level of
            ``FusionPolicy(memory=…)``.
        saved: bytes kept from forward for backward, without parameters and buffers.
        seconds: the least time that FLOP, bytes and instructions take, one kernel after the other, at the rates that
            this GPU was measured to reach (``virtual_gpu.roofline``); None for a GPU that nobody has measured.
        peak: the most bytes alive at once in forward and backward, without parameters, with gradients
            (``PaperCompilation.timeline``); None of several graphs, whose curves are not joined here, and of one with
            operators that do not run without data.
        note: for people: which MLPs have another level there, and why; "" where none has.
    """

    name: str
    saved: int
    seconds: float | None
    peak: int | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class Figures:
    """Costs of the graphs of a report, each run once: under plain ``torch.compile`` and with pick-up. Printable.

    Attributes:
        target: the GPU that code was generated for, on paper: "NVIDIA H200".
        training: whether there is a backward.
        layers: by layer, in the order of the model; they add up to the whole. A kernel that is fused across layers
            counts for the one that most of its results belong to.
        skipped: why graphs are missing from the figures, a reason for each.
        levels: if asked for, the whole under plain ``torch.compile``, with pick-up, under ``torch.compile`` with
            ``activation_memory_budget=0.99``, the least that PyTorch itself keeps, and at every level.
        notes: for people: what this GPU does not do of what the policy asks, and which of its rates nobody measured.
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
        """The whole with pick-up."""
        return sum((layer.after for layer in self.layers), Cost())

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (figures_table(self), levels_table(self))))

    def __repr__(self) -> str:
        return str(self)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the attributes, and the totals ``before`` and ``after``."""
        return {"before": asdict(self.before), "after": asdict(self.after), **asdict(self)}


@dataclass(frozen=True)
class Capture:
    """A captured graph as it was before pick-up, the policy it was picked up with, and if it has no copy, why not."""

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
    """Set a graph aside to be measured later. Never raises: this runs inside the user's compilation.

    Args:
        gm: a graph from Dynamo, not rewritten yet.
        policy: what it is picked up with.
        subgraphs: copies of subgraphs that *were* rewritten, made before that, by their graph.
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
    """What pick-up would find in a graph from Dynamo, and in those of the operators it calls; nothing is edited."""
    from torch_fused_ops.lowerings import recognize

    for module in graphs_of(gm):
        yield from recognize.rewrite(module.graph, policy, apply=False)


def measure(captures: Sequence[Capture], gpu: GPU, levels: bool = False) -> Figures:
    """Compile graphs on paper, before and after, and add up what they cost; seconds for each.

    No other thread may compile in the meantime (``docs/virtual-gpu.md``).

    Args:
        captures: what ``capture`` set aside.
        gpu: the GPU to generate code for.
        levels: compile at every memory level, too, and assemble what is generated, for its instructions.

    Raises:
        ValueError: there is no graph, or none could be measured; the message says why.
    """
    pairs: list[tuple[PaperCompilation, PaperCompilation]] = []
    skipped: list[str] = []
    whole: list[dict[str, LevelFigures]] = []
    said_of_all: list[str] = []

    def compiled(name: str, policy: FusionPolicy | None, budget: float | None = None) -> OnPaper:
        progress.info("compiling on paper: graph %d of %d, %s", len(pairs) + len(skipped) + 1, len(captures), name)
        return on_paper(each, gpu, policy, budget)

    for each in captures:
        try:
            plain, picked_up = compiled(PLAIN, None), compiled(PICKED_UP, each.policy)
            pair = plain.paper, picked_up.paper
            said_of_all += _notes(picked_up)
            if levels:  # machine code takes as long as all the rest
                named = dict(zip((PLAIN, PICKED_UP), pair, strict=True))
                notes = {}
                if pair[1].backward is not None:
                    named[KNOB] = compiled(KNOB, None, BUDGET).paper
                    for memory in MEMORY:
                        policy = replace(each.policy, memory=memory)  # type: ignore[arg-type]
                        one = picked_up if policy == each.policy else compiled(f'memory="{memory}"', policy)
                        named[memory], notes[memory] = one.paper, _untiled(one.sites)
                progress.info("assembling what was generated")
                works = _works(named)
                whole.append({n: _level(n, paper, works.get(n), notes.get(n, "")) for n, paper in named.items()})
            pairs.append(pair)
        except Exception as error:
            log.debug("a graph could not be measured", exc_info=True)
            skipped.append(said(error))
    if not pairs:
        raise ValueError("; ".join(dict.fromkeys(skipped)) or "no graph was captured")
    costs: list[dict[str, Cost]] = []
    paths = dict.fromkeys(path for pair in pairs for paper in pair for path in _paths(paper))
    layers = layers_of(paths)
    for side in zip(*pairs, strict=True):
        costs.append({})
        for paper in side:
            for name, cost in _costs(paper, layers):
                costs[-1][name] = costs[-1].get(name, Cost()) + cost
    before, after = costs
    if all(layer == OTHER for layer in layers.values()):  # a function, or a plain nn.Sequential
        before, after = ({WHOLE if n == OTHER else n: cost for n, cost in side.items()} for side in (before, after))
    order = [INPUTS, WHOLE, *dict.fromkeys(layers[path] for path in paths if layers[path] != OTHER), OTHER]
    found = [LayerFigures(n, before.get(n, Cost()), after.get(n, Cost())) for n in order if n in before or n in after]
    training = any(paper.backward is not None for pair in pairs for paper in pair)
    return Figures(
        gpu.name, training, tuple(found), tuple(skipped), _together(whole), tuple(dict.fromkeys(said_of_all))
    )


def said(error: Exception) -> str:
    """An exception in one line: compilers append pages of advice."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _untiled(sites: Sequence[Site]) -> str:
    """The MLPs that a policy asks to be in tiles, and that are not."""
    reasons = Counter(site.tiles_reason for site in sites if site.tiles_reason)
    return "; ".join(f'{n} of {len(sites)} MLPs as "input": {reason}' for reason, n in reasons.items())


def _notes(picked_up: OnPaper) -> Iterator[str]:
    """What is to be said of a graph's figures with pick-up."""
    from torch_fused_ops.virtual_gpu import roofline, work

    sites, graphs = picked_up.sites, picked_up.paper.graphs.values()
    for reason, n in Counter(site.gemm_reason for site in sites if site.gemm_reason).items():
        yield f"not all in float8, {n} of {len(sites)} MLPs: {reason}"
    if any(roofline.flops(graph) > roofline.flops(graph, work.flop_of_bf16) for graph in graphs):
        rates = f"{work.FLOAT8_FLOP / work.BF16_FLOP:.2f} times bfloat16's rate"
        yield f"products in float8 are taken to reach {rates}, which nobody has measured here"


def _works(named: Mapping[str, PaperCompilation]) -> dict[str, list[Work]]:
    """The work of each program, where it is known how fast its GPU does that."""
    from torch_fused_ops.virtual_gpu import roofline

    measured = {name: paper for name, paper in named.items() if roofline.rates_of(paper.gpu)}
    roofline.prepare(graph for paper in measured.values() for graph in paper.graphs.values())
    return {
        n: [w for graph in paper.graphs.values() for w in roofline.works_of(graph)] for n, paper in measured.items()
    }


def _level(name: str, paper: PaperCompilation, works: list[Work] | None, note: str) -> LevelFigures:
    from torch_fused_ops.virtual_gpu import roofline

    rates = roofline.rates_of(paper.gpu)
    try:
        peak = paper.peak_bytes()
    except ValueError:
        peak = None
    return LevelFigures(
        name, paper.saved_bytes(), rates.seconds(works) if rates and works is not None else None, peak, note
    )


def _together(graphs: Sequence[dict[str, LevelFigures]]) -> tuple[LevelFigures, ...]:
    """The sums over graphs, at the levels that all of them have."""
    found = []
    for name in graphs[0] if graphs else ():
        if all(name in graph for graph in graphs):
            each = [graph[name] for graph in graphs]
            seconds = [level.seconds for level in each if level.seconds is not None]
            saved = sum(level.saved for level in each)
            peak = each[0].peak if len(each) == 1 else None
            note = "; ".join(dict.fromkeys(level.note for level in each if level.note))
            found.append(LevelFigures(name, saved, sum(seconds) if len(seconds) == len(each) else None, peak, note))
    return tuple(found)


class OnPaper(NamedTuple):
    """A graph on paper, and the sites that are fused in it."""

    paper: PaperCompilation
    sites: Sequence[Site] = ()


def on_paper(each: Capture, gpu: GPU, policy: FusionPolicy | None, memory_budget: float | None = None) -> OnPaper:
    """A graph on paper: with a policy, picked up; else as it was captured, with PyTorch's memory budget if given."""
    from torch_fused_ops.lowerings.recognize import rewrite
    from torch_fused_ops.virtual_gpu import compile_graph_on_paper, copy_graph
    from torch_fused_ops.virtual_gpu.emulation import standing_for

    if each.graph is None:
        raise RuntimeError(each.reason)
    if policy is None:
        return OnPaper(compile_graph_on_paper(each.graph, gpu=gpu, config=_slots(None), memory_budget=memory_budget))
    rewritten = replace(each.graph, gm=copy_graph(each.graph.gm))
    with standing_for(gpu), torch.set_grad_enabled(each.graph.training):
        sites = [site for module in graphs_of(rewritten.gm) for site in rewrite(module.graph, policy)]
    paper = compile_graph_on_paper(rewritten, gpu=gpu, config=_slots(policy))
    return OnPaper(paper, [site for site in sites if site.op is not None])


def _slots(policy: FusionPolicy | None) -> dict[str, Any]:
    """Inductor's slots as they are now, without our stages; with those that follow stage 1 for a policy, if given."""
    import torch._inductor.config as config

    from torch_fused_ops.lowerings.passes import SLOTS, Recognize

    found = {}
    for name, kind in SLOTS.items():
        others = kind.others(getattr(config, name))
        found[name] = others if policy is None or kind is Recognize else kind.join(others, kind(policy))
    return found


def _paths(paper: PaperCompilation) -> Iterator[str]:
    """The module paths that occur, in the order of the program."""
    for graph in paper.graphs.values():
        for launch in graph.launches:
            yield from launch.modules or ("",)
    for tensor in paper.saved:
        yield tensor.module


def layers_of(paths: Iterable[str]) -> dict[str, str]:
    """The layer that each module belongs to.

    A layer is what stands in a list of modules: ``model.layers.0.mlp.up`` is in ``model.layers.0``. Where it stands in
    none, two names are kept: ``encoder.norm.weight`` is in ``encoder.norm``. A single operator in an ``nn.Sequential``
    (``mlp.0``) is no layer: it is in ``mlp``.
    """
    paths = list(paths)
    inner = {path.rsplit(".", i)[0] for path in paths for i in range(1, path.count(".") + 1)}
    return {path: _layer(path.split("."), inner) or OTHER for path in paths}


def _layer(names: list[str], inner: set[str]) -> str:
    for i, name in enumerate(names):
        if name.isdigit():
            layer = ".".join(names[: i + 1])
            return layer if layer in inner else ".".join(names[:i][:2])
    return ".".join(names[:2])


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
