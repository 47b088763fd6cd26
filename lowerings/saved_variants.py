"""List the tensors that a policy saves for backward, their readers, and the settings that avoid saving them.

The partitioner runs once for each setting, on copies of one joint graph. The copies' nodes have the same names. A
setting removes a saved tensor if the tensor is missing from the setting's list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

from torch_fused_ops.graphs.listing import AttentionSite, SavedRow
from torch_fused_ops.graphs.modules import module_path
from torch_fused_ops.lowerings import attention, compat, memory_levels, partition
from torch_fused_ops.lowerings.passes import Partitioner
from torch_fused_ops.lowerings.saved_tensors import SAME_ELEMENTS, SavedTensors, saved_by
from torch_fused_ops.policy import MEMORY, FusionPolicy

BUDGET = 0.99  # value of PyTorch's ``activation_memory_budget`` that recomputes all pointwise work
UPSTREAM = f"torch._functorch.config.activation_memory_budget={BUDGET}"


class Partitioned(BaseException):
    """Ends a compilation after its joint graph is partitioned. PyTorch would catch a subclass of Exception."""


class Variants(Partitioner):
    """Partition a joint graph under a policy and under each setting that saves fewer bytes, then raise ``Partitioned``.

    Attributes:
        rows: a row for each tensor that the policy saves for backward.
        totals: the bytes saved for backward under each setting; the key "" is the policy itself.
    """

    def __init__(self, policy: FusionPolicy) -> None:
        super().__init__(policy)
        self.settings = dict(_settings(policy))
        self.rows: list[SavedRow] = []
        self.totals: dict[str, int] = {}

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        outputs = kwargs["num_fwd_outputs"]
        static = compat.static_inputs(gm.graph, kwargs.get("static_lifetime_input_indices") or ())

        def divided(divide: Callable[..., partition.Graphs]) -> partition.Graphs:
            return divide(GraphModule(gm, _copy(gm.graph)), joint_inputs, **kwargs)

        def budgeted(*args: Any, **kwargs: Any) -> partition.Graphs:
            return partition.upstream(*args, budget=BUDGET, **kwargs)

        graphs = {name: divided(Partitioner(policy)) for name, policy in self.settings.items()}
        graphs[UPSTREAM] = divided(budgeted)
        pair = SavedTensors(graphs[""][0].graph, graphs[""][1].graph, outputs, static)
        nodes = {s: {n.name: n for n in saved_by(forward.graph, outputs, static)} for s, (forward, _) in graphs.items()}
        self.totals = {name: sum(map(_nbytes, saved.values())) for name, saved in nodes.items()}
        for name, node in nodes[""].items():
            value, source = node.meta["val"], partition.base(node)
            removed = tuple(s for s in nodes if name not in nodes[s])
            reasons = {s: memory_levels.rejection_reason(nodes[s][name]) for s in nodes if s not in removed}
            self.rows.append(
                SavedRow(
                    "(inputs)" if source.op == "placeholder" else _module(source),
                    tuple(map(int, value.shape)),
                    str(value.dtype).removeprefix("torch."),
                    _nbytes(node),
                    tuple(dict.fromkeys((_kind(pair, node, r), _module(r)) for r in _readers(pair, node))),
                    removed,
                    tuple((s or "the policy", str(r)) for s, r in reasons.items() if r and (not s or r != reasons[""])),
                )
            )
        raise Partitioned


class AttentionSites(Partitioner):
    """Partition a joint graph under a policy, list the attention in it, then raise ``Partitioned``."""

    def __init__(self, policy: FusionPolicy) -> None:
        super().__init__(policy)
        self.sites: list[AttentionSite] = []

    def on_edit(self, edit: memory_levels.Edit, nbytes: int, reason: str) -> None:
        if edit.is_site:
            self.sites.append(AttentionSite(edit.place, nbytes, reason))

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        super().__call__(gm, joint_inputs, **kwargs)
        raise Partitioned


def _settings(policy: FusionPolicy) -> Iterator[tuple[str, FusionPolicy]]:
    """Yield the policy itself as "", then policies that save fewer bytes, named by the fields that differ."""
    yield "", policy
    memory = policy.memory.partition(":")[0] if isinstance(policy.memory, str) else "off"
    for level in MEMORY[MEMORY.index(memory) + 1 : MEMORY.index("tiled")]:
        yield f'memory="{level}"', replace(policy, memory=level)  # type: ignore[arg-type]
    if policy.attention != "input":
        yield 'attention="input"', replace(policy, attention="input")


def _copy(graph: Graph) -> Graph:
    """Copy a joint graph. (deepcopy would also copy its input specification, which logs a FutureWarning.)"""
    copied = Graph()
    values, _ = copied.graph_copy(graph, {}, return_output_node=True)  # type: ignore[misc]
    copied.output(values).meta = dict(graph.output_node().meta)
    return copied


def _nbytes(node: Node) -> int:
    return compat.nbytes(node.meta["val"])


def _module(node: Node) -> str:
    """Return the path of the innermost module that a node of forward or backward comes from."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return module_path(list(stack.values())[-1][0]) if stack else ""


def _readers(pair: SavedTensors, node: Node) -> Iterator[Node]:
    """Yield the calls in backward that need a saved tensor: gradients and GEMMs, through views and recomputed calls."""
    pending, seen = [pair.in_backward[node]], set[Node]()
    while pending:
        for user in pending.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if user in pair.gradients or partition.is_gemm(user):
                yield user
            else:
                pending.append(user)


def _kind(pair: SavedTensors, node: Node, reader: Node) -> str:
    """Return the part of backward that a reader of a saved tensor belongs to."""
    if attention.is_fused(reader):
        return "attention"
    if partition.is_gemm(reader) and reader not in pair.gradients:
        return "recomputed GEMM"
    if partition.is_linear(reader):
        return "input gradient" if _is_weight(node) else "weight gradient"
    namespace, _, name = str(getattr(reader.target, "overloadpacket", reader.target)).rpartition(".")
    return "gradient" if namespace in ("aten", "prims") and partition.op_types().is_fusible(reader) else name


def _is_weight(node: Node) -> bool:
    """Return True if a linear layer of forward reads a tensor as its weight, through views."""
    return any(
        _is_weight(user) if user.target in SAME_ELEMENTS else memory_levels.operand_role(user, node) == "weight"
        for user in node.users
    )
