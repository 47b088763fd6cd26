"""List the tensors that a policy saves for backward, their readers, and the settings that avoid saving them.

The partitioner runs once for each setting, on copies of one joint graph. The copies' nodes have the same names. A
setting removes a saved tensor if the tensor is missing from the setting's list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from torch_fused_ops.graphs.listing import AttentionSite, SavedRow
from torch_fused_ops.graphs.modules import innermost
from torch_fused_ops.lowerings import attention, compat, memory_levels, offload, partition
from torch_fused_ops.lowerings.passes import Partitioner
from torch_fused_ops.lowerings.saved_tensors import SavedTensors, storage_shares, views_and_readers
from torch_fused_ops.policy import MEMORY, FusionPolicy

BUDGET = 0.99  # value of PyTorch's ``activation_memory_budget`` that recomputes all pointwise work
UPSTREAM = f"torch._functorch.config.activation_memory_budget={BUDGET}"


class Partitioned(BaseException):
    """Ends a compilation after its joint graph is partitioned. PyTorch would catch a subclass of Exception."""


class Variants(Partitioner):
    """Partition a joint graph under a policy and by each setting that saves fewer bytes, then raise ``Partitioned``.

    Args:
        policy: the policy.
        compare: False to partition under the policy only.

    Attributes:
        rows: a row for each tensor that the policy saves for backward.
        totals: the bytes saved for backward by each setting; the key "" is the policy itself.
        attention: the attention calls for which the policy requests a level.
    """

    def __init__(self, policy: FusionPolicy, *, compare: bool) -> None:
        super().__init__(policy)
        self.settings = dict(_settings(policy)) if compare else {}
        self.rows: list[SavedRow] = []
        self.totals: dict[str, int] = {}
        self.attention: list[AttentionSite] = []

    def on_attention(self, policy: FusionPolicy, sites: Sequence[AttentionSite]) -> None:
        self.attention += sites

    def __call__(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        outputs = kwargs["num_fwd_outputs"]
        static = compat.static_inputs(gm.graph, kwargs.get("static_lifetime_input_indices") or ())
        graphs = {
            name: partitioner(GraphModule(gm, _copy(gm.graph)), joint_inputs, **kwargs)
            for name, partitioner in {"": super().__call__, **self.settings}.items()
        }
        pair = SavedTensors(graphs[""][0].graph, graphs[""][1].graph, outputs, static)
        nodes = {name: _saved(pair, forward.graph) for name, (forward, _) in graphs.items()}
        for setting, saved in nodes.items():
            self.totals[setting] = pair.cost(node for node in saved.values() if offload.MOVED not in node.meta)
        shares = storage_shares(nodes[""].values())
        for name, node in nodes[""].items():
            value, source = node.meta["val"], partition.base(node)
            removed = tuple(s for s in nodes if name not in nodes[s])
            reasons = {s: nodes[s][name].meta.get(memory_levels.REJECTED) for s in nodes if s not in removed}
            new_reasons = [(s, r) for s, r in reasons.items() if r and (not s or r != reasons[""])]
            readers = dict.fromkeys((_kind(pair, node, r), innermost(r)) for r in _readers(pair, node))
            self.rows.append(
                SavedRow(
                    "(inputs)" if source.op == "placeholder" else innermost(source),
                    tuple(map(int, value.shape)),
                    str(value.dtype).removeprefix("torch."),
                    shares[node],
                    tuple(readers),
                    removed,
                    tuple((s or "the policy", str(r)) for s, r in new_reasons),
                    moves=offload.MOVED in node.meta,
                    stays=str(node.meta.get(offload.STAYS, "")),
                )
            )
        raise Partitioned


def _settings(policy: FusionPolicy) -> Iterator[tuple[str, Callable[..., partition.Graphs]]]:
    """Yield the settings that save fewer bytes than the policy, by their names, each with its partitioner."""
    memory = policy.memory.partition(":")[0] if isinstance(policy.memory, str) else "off"
    for level in MEMORY[MEMORY.index(memory) + 1 : MEMORY.index("tiled")]:
        yield f'memory="{level}"', Partitioner(replace(policy, memory=level))  # type: ignore[arg-type]
    if policy.attention != "input":
        yield 'attention="input"', Partitioner(replace(policy, attention="input"))
    yield UPSTREAM, functools.partial(partition.partition_like_pytorch, budget=BUDGET)


def _copy(graph: Graph) -> Graph:
    """Copy a joint graph. (deepcopy would also copy its input specification, which logs a FutureWarning.)"""
    copied = Graph()
    values, _ = copied.graph_copy(graph, {}, return_output_node=True)  # type: ignore[misc]
    copied.output(values).meta = dict(graph.output_node().meta)
    return copied


def _saved(pair: SavedTensors, forward: Graph) -> dict[str, Node]:
    """Return the tensors that a forward graph saves, by name, except parameters, buffers and their views."""
    results: Any = forward.output_node().args[0]
    saved = [n for n in results[pair.num_outputs :] if isinstance(n, Node) and isinstance(n.meta.get("val"), Tensor)]
    static = {n.name for n in pair.static}
    # A host copy has the name of the tensor that it replaces.
    return {n.meta.get(offload.MOVED, n.name): n for n in saved if partition.base(n).name not in static}


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
    if attention.is_attention_op(reader):
        return "attention"
    if partition.is_gemm(reader) and reader not in pair.gradients:
        return "recomputed GEMM"
    if partition.is_linear(reader):
        roles = {memory_levels.operand_role(user, view) for view, user in views_and_readers(node)}
        return "input gradient" if "weight" in roles else "weight gradient"
    namespace, _, name = str(getattr(reader.target, "overloadpacket", reader.target)).rpartition(".")
    return "gradient" if namespace in ("aten", "prims") and partition.op_types().is_fusible(reader) else name
