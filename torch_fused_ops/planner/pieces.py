"""Divide a captured model into pieces, each of which is compiled separately or runs in eager mode.

If ``torch.compile`` is applied to each layer, the embedding, the last norm, the head and the loss run in eager mode.
A loss outside of the compiled model is a separate piece. Equal layers are equal pieces, which are compiled once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torch_fused_ops.graphs.modules import innermost
from torch_fused_ops.planner.model import LOSS, OTHER, CapturedModel, returned
from torch_fused_ops.virtual_gpu import GPU, CapturedGraph
from torch_fused_ops.virtual_gpu.compile import emulated
from torch_fused_ops.virtual_gpu.eager import Checkpointing, EagerGraph

_AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
_STATE = (*_AUTOCAST, torch._C._set_grad_enabled)


class _Key(NamedTuple):
    """A node's key. Neighboring nodes with equal keys form one piece."""

    unit: str
    autocast: torch.dtype | None
    training: bool


class _Values(Checkpointing):
    """Runs a graph on fake tensors, and records each node's value."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["example_value"] = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), value)
        return value


def divided(
    captured: CapturedModel, gpu: GPU, compiled: str, loss: str = "eager", keep_logits: bool = False
) -> CapturedModel:
    """Divide a captured model into pieces, except a whole compiled model with its loss.

    Args:
        captured: the model.
        gpu: the target device. Its rules for autocast and attention determine the values between pieces.
        compiled: "model": everything before the loss is one piece. "layers": each layer is a compiled piece. "none":
            each layer is a piece in eager mode.
        loss: "eager" or "compiled" if the model was captured with a loss, which is then a separate piece; else "".
        keep_logits: True if the caller references the loss's inputs until the step ends.
    """
    if compiled == "model" and not loss:
        return captured
    pieces: list[CapturedGraph] = []
    units: list[str | None] = []
    links: dict[tuple[int, int], tuple[int, int]] = {}
    shared: dict[tuple[int, int], str] = {}
    eager: set[int] = set()
    results: dict[tuple[int, int], tuple[int, int]] = {}  # maps (graph, result) to (piece, result)
    retained: set[tuple[int, int]] = set()
    for i, source in enumerate(captured.graphs):
        program = EagerGraph(source, gpu)
        graph = program.gm
        with emulated(gpu, source.autocast), torch.set_grad_enabled(source.training), program.mode:
            _Values(graph).run(*program.examples)
        groups = _groups(captured, source, graph, as_one_piece=compiled == "model")
        written_by: dict[fx.Node, tuple[int, int]] = {}
        numbers = {node: j for j, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
        output = graph.graph.output_node()
        for (unit, autocast, training), nodes in groups:
            gm, read, written = _piece(graph, nodes)
            number = len(pieces)
            outside = compiled == "none" or (compiled == "layers" and unit not in captured.units)
            is_eager = loss == "eager" if unit == LOSS else outside
            if is_eager:
                eager.add(number)
            inputs = [numbers.get(x) for x in read]
            paths = tuple("" if j is None else source.paths[j] for j in inputs)
            lives = tuple(j is not None and program.inputs[j].is_parameter for j in inputs)
            pieces.append(CapturedGraph(gm, lives, training, autocast, paths))
            units.append(None if compiled == "model" and unit != LOSS else unit)
            for j, (x, original) in enumerate(zip(read, inputs, strict=True)):
                if original is None:
                    links[number, j] = written_by[x]
                    if unit == LOSS and keep_logits:
                        retained.add(written_by[x])
                elif (i, original) in captured.links:
                    links[number, j] = results[captured.links[i, original]]
                else:
                    shared[number, j] = f"{i}.{original}"
            written_by |= {x: (number, r) for r, x in enumerate(written)}
        for r, x in enumerate(output.args[0]):  # type: ignore[arg-type]
            if isinstance(x, fx.Node) and x in written_by:
                results[i, r] = written_by[x]
    return replace(
        captured, graphs=tuple(pieces), links=links, pieces=tuple(units), eager=frozenset(eager), shared=shared,
        retained=frozenset(retained),
    )  # fmt: skip


def _groups(
    captured: CapturedModel, graph: CapturedGraph, gm: fx.GraphModule, as_one_piece: bool
) -> list[tuple[_Key, list[fx.Node]]]:
    """List each piece's key and nodes, in execution order."""
    pieces: list[tuple[_Key, list[fx.Node]]] = []
    entered: dict[fx.Node, torch.dtype | None] = {}
    training, is_loss = graph.training, False
    place: dict[fx.Node, list[fx.Node]] = {}
    for node in list(gm.graph.nodes):
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is returned:
            is_loss = True
            node.replace_all_uses_with(node.args[0])
            continue
        if node.target in _STATE and (is_loss or not as_one_piece):
            if node.target is _AUTOCAST[0]:
                entered[node] = (node.args[1] or torch.get_autocast_dtype("cuda")) if node.args[2] else None
            elif node.target is _AUTOCAST[1]:
                entered.pop(node.args[0], None)
            else:
                training = node.args[0]
            continue
        autocast = list(entered.values())[-1] if entered else graph.autocast
        unit = LOSS if is_loss else "" if as_one_piece else _unit_of(captured, gm, node)
        key = _Key(unit, autocast, training)
        sources = [
            x for x in node.all_input_nodes if not isinstance(x.meta.get("example_value"), Tensor) and x in place
        ]
        if sources and not isinstance(sources[0].meta.get("example_value"), (int, float)):
            nodes = place[sources[0]]  # a tuple's item joins the tuple's piece
        else:
            if not pieces or pieces[-1][0] != key:
                pieces.append((key, []))
            nodes = pieces[-1][1]
        nodes.append(node)
        place[node] = nodes
    return pieces


def _save_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the result of ``scaled_dot_product_attention`` in a selective checkpoint."""
    saves = "_scaled_dot_product_" in str(op) and "backward" not in str(op)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


# The kinds of checkpoints around each layer, by their rows' names: ``context_fn``; None for PyTorch's default.
CHECKPOINTS: dict[str, Callable[[], Any] | None] = {
    "checkpoint": None,
    "checkpoint, attention saved": functools.partial(create_selective_checkpoint_contexts, _save_attention),
}


@contextlib.contextmanager
def checkpointed(model: Any, units: Iterable[str], context_fn: Callable[[], Any] | None) -> Iterator[None]:
    """Inside the block, PyTorch's ``checkpoint_wrapper`` wraps each unit of a model. ``context_fn`` is its argument."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    settings: dict[str, Any] = {"context_fn": context_fn} if context_fn else {}
    with contextlib.ExitStack() as stack:
        for unit in units:
            parent, _, name = unit.rpartition(".")
            children = model.get_submodule(parent)._modules
            stack.enter_context(mock.patch.dict(children, {name: checkpoint_wrapper(children[name], **settings)}))
        yield


def _unit_of(captured: CapturedModel, gm: fx.GraphModule, node: fx.Node) -> str:
    """Return a node's layer. For a checkpoint, return the layer of most nodes in its body.

    The model itself contains the calls of all submodules. It is not a layer, even if its forward contains an MLP.
    """
    unit = captured.unit_of(innermost(node)).replace(OTHER, "")
    bodies = [getattr(gm, str(x.target), None) for x in node.all_input_nodes if x.op == "get_attr"]
    inner = [
        captured.unit_of(innermost(n))
        for body in bodies if isinstance(body, fx.GraphModule) for n in body.graph.nodes if n.op.startswith("call")
    ]  # fmt: skip
    return max(dict.fromkeys(inner), key=inner.count) if inner and not unit else unit


def _piece(root: fx.GraphModule, nodes: list[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """Copy nodes to a new graph. Return it with the other nodes that they read, and the nodes that others read.

    The first are the graph's inputs, and the second its results.
    """
    inner = set(nodes)
    inputs = (x for node in nodes for x in node.all_input_nodes if x not in inner and x.op != "get_attr")
    read, written = list(dict.fromkeys(inputs)), [x for x in nodes if not inner.issuperset(x.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for x in read:
        copies[x] = graph.placeholder(x.name)
        copies[x].meta |= {key: x.meta[key] for key in ("example_value", "tensor_dict") if key in x.meta}
        copies[x]._dynamo_source = getattr(x, "_dynamo_source", None)
    for node in nodes:
        for x in node.all_input_nodes:
            if x.op == "get_attr" and x not in copies:
                copies[x] = graph.node_copy(x)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[x] for x in written))
    piece = fx.GraphModule(root, graph)
    piece.meta = dict(root.meta)  # as in ``copy_graph``: AOTAutograd then knows the parameters, which need no copies
    piece._param_name_to_source = root._param_name_to_source
    return piece, read, written


def signature(gm: fx.GraphModule) -> tuple[Any, ...]:
    """Return a key that is equal for graphs with the same calls on tensors of the same sizes."""
    numbers: dict[fx.Node, int] = {}

    def leaf_key(value: Any) -> Any:
        if isinstance(value, fx.Node):
            body = getattr(gm, str(value.target), None) if value.op == "get_attr" else None
            return signature(body) if isinstance(body, fx.GraphModule) else ("node", numbers[value])
        return value

    rows = []
    for node in gm.graph.nodes:
        numbers[node] = len(numbers)
        value = node.meta.get("example_value")
        sizes = (value.shape, value.stride(), value.dtype, value.requires_grad) if isinstance(value, Tensor) else ()
        target = node.target if node.op != "placeholder" and node.op != "get_attr" else ""
        arguments = fx.node.map_aggregate((node.args, node.kwargs), leaf_key)
        rows.append((node.op, str(target), id(target) if callable(target) else 0, repr(arguments), sizes))
    return (*rows, repr(gm.meta.get("_checkpoint_context_fn")))
