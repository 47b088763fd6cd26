"""Linear layers of MLPs in float8: ``F.linear`` becomes ``fused::linear_fp8`` if the policy requests it.

An MLP's linear layers produce the activation's inputs, through sums with biases and adapters, or they read the
activation. The activation is a proved subgraph, or an operator of this library that the model calls itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._logging._internal import warning_once
from torch.fx import Node

from torch_fused_ops.declaration import PointwiseOperator
from torch_fused_ops.families.float8.operators import GEMM_DTYPES, GROUPED_GEMM_DTYPES
from torch_fused_ops.families.float8.recipes import RECIPES, Scaling
from torch_fused_ops.families.float8.sharding import multiples
from torch_fused_ops.graphs.gemm_registry import name_of
from torch_fused_ops.graphs.reasons import Kind, Reason, Rejection
from torch_fused_ops.graphs.target import target_device
from torch_fused_ops.operators.activation import CALLS

from .graph import GraphAnalysis, label, statically, tensor, write_call
from .rewrite import Edit
from .subgraph import readers
from .values import arguments_of, check_plain, producers, value_of

log = logging.getLogger("torch_fused_ops")


@dataclass
class Linears:
    """The linear layers of one activation. ``nodes`` become float8; ``rejected`` do not, for the given reasons."""

    recipe: str
    nodes: list[Node] = field(default_factory=list)
    rejected: list[tuple[Node, Reason]] = field(default_factory=list)


def linears(analysis: GraphAnalysis, inputs: Iterable[Node], users: Iterable[Node], recipe: str) -> Linears:
    """Examine the linear layers that produce an activation's inputs or read the activation, in graph order.

    Linear layers that are already in float8 stay.

    Args:
        analysis: the graph's analysis.
        inputs: the inputs of the activation.
        users: the final readers of the activation.
        recipe: a key of ``RECIPES``.
    """
    result = Linears(recipe)
    around = {*producers(analysis, inputs), *filter(analysis.weight_gemm, users)}
    for node in sorted(around, key=analysis.index.__getitem__):
        if name_of(node.target) in ("fused::linear_fp8", "fused::grouped_linear_fp8"):
            continue
        try:
            _check(analysis, node, recipe)
            result.nodes.append(node)
        except Rejection as rejection:
            result.rejected.append((node, rejection.reason))
    return result


@dataclass(frozen=True)
class Called:
    """A call of an activation's operator by the model itself."""

    node: Node
    op: PointwiseOperator
    inputs: list[Node]
    users: list[Node]  # the final readers, through dropouts

    @property
    def activation(self) -> Any:
        """Return the activation's name in the table."""
        place = len(self.op.tensors)
        return self.node.args[place] if len(self.node.args) > place else self.node.kwargs["activation"]


def called(analysis: GraphAnalysis) -> Iterator[Called]:
    """Yield the calls of activations' operators that the model makes, for example through this library's modules."""
    dropouts = {node for node in analysis.calls if name_of(node.target) == "fused::dropout_add"}
    for node in analysis.calls:
        op = CALLS.get(name_of(node.target) or "") if node.op == "call_function" else None
        if op is None:
            continue
        names = list(op.tensors)[: op.num_data]
        arguments = [*node.args[: op.num_data], *(node.kwargs[name] for name in names if name in node.kwargs)]
        users = list(readers(analysis, node, dropouts))
        yield Called(node, op, [a for a in arguments if isinstance(a, Node)], users)


def _check(analysis: GraphAnalysis, node: Node, recipe: str) -> None:
    experts = experts_of(analysis, node)
    if experts is not None:
        for tensor_node in (node, *experts[:2]):
            check_plain(tensor_node)
        check_float8(value_of(experts[1]), value_of(node).dtype, recipe)
        return
    _, weight, bias, transposed = arguments_of(analysis, node)
    for tensor_node in (node, weight, *node.all_input_nodes):
        if not (hasattr(value_of(tensor_node), "device_mesh") and RECIPES[recipe].scaling.takes_shards):
            check_plain(tensor_node)
    value, (n, k) = value_of(node), value_of(weight).shape
    check_float8(value_of(weight), value.dtype, recipe)
    if bias is not None and not statically(value_of(bias).shape == (k if transposed else n,)):
        raise Rejection(Kind.GEMM_FORM, f"{label(node)} is not a linear layer")


def experts_of(analysis: GraphAnalysis, node: Node) -> tuple[Node, Node, Node] | None:
    """Return a grouped GEMM's input, weight (experts, in, out), and ends of the experts' rows; None for other calls."""
    call = analysis.calls[node]
    if call.name != "grouped_mm":
        return None
    names = ("input", "weight", "offs")
    arguments: dict[str, Any] = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    input, weight, ends = (arguments.pop(name, None) for name in names)
    if not all(isinstance(a, Node) for a in (input, weight, ends)) or any(a is not None for a in arguments.values()):
        return None
    value = tensor(weight)
    if value is None or value.ndim != 3 or value_of(input).ndim != 2 or analysis.follows_gemm[weight]:
        return None
    return input, weight, ends


def check_float8(weight: Tensor, dtype: torch.dtype, recipe: str) -> None:
    """Reject a linear layer that cannot be in float8.

    Args:
        weight: its weight, (in, out) or (out, in); with a leading axis for experts.
        dtype: the dtype of its result.
        recipe: a key of ``RECIPES``.

    Raises:
        Rejection: the recipe does not support the layer.
    """
    scaling, grouped = RECIPES[recipe].scaling, weight.ndim == 3
    if grouped and not scaling.grouped:
        text = f"grouped float8 GEMMs have a scale for each row, not for each {scaling.noun}"
        raise Rejection(Kind.GEMM_EXPERTS, text)
    if dtype not in (GROUPED_GEMM_DTYPES if grouped else GEMM_DTYPES):
        raise Rejection(Kind.GEMM_DTYPE, f"its dtype is {str(dtype).removeprefix('torch.')}")
    sizes, multiple_of = multiples(weight, scaling.multiple)
    if not all(statically(size % multiple == 0) and statically(size > 0) for size, multiple in sizes):
        *_, n, k = weight.shape
        raise Rejection(Kind.GEMM_SIZE, f"its weight is ({n}, {k}): not multiples of {multiple_of}")
    device = no_scaled_products(target_device(weight.device), scaling, grouped)
    if device:
        gemms = "grouped float8 GEMMs" if grouped else "float8 GEMMs"
        text = f"this device ({device}) does not support {gemms} with a scale for each {scaling.noun}"
        raise Rejection(Kind.GEMM_DEVICE, text)


def no_scaled_products(device: torch.device, scaling: Scaling, grouped: bool = False) -> str:
    """Return the name, for messages, of a device that cannot multiply float8 with these scales; "" if it can.

    CPUs dequantize the numbers and multiply in the model's dtype; "meta" has no numbers. ``grouped``: True for the
    GEMMs of experts, which on ROCm need a build of torch with FBGEMM.
    """
    if device.type in ("cpu", "meta"):
        return ""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        arch: str = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return "" if arch in scaling.amd and not grouped else f"ROCm, {arch}"
    capability = torch.cuda.get_device_capability(device)
    version = tuple(map(int, (torch.version.cuda or "99").split(".")[:2]))
    if capability not in (scaling.grouped if grouped else scaling.sm):
        return f"sm_{capability[0]}{capability[1]}"
    if version < scaling.cuda or not hasattr(torch.ops.aten, "_scaled_mm_v2"):
        return f"CUDA {torch.version.cuda}"
    return ""


def fuse(analysis: GraphAnalysis, recipes: dict[Node, str]) -> list[Edit]:
    """Return the edits that replace linear layers by ``fused::linear_fp8``, each with its recipe."""
    if any(target_device(value_of(node).device).type == "cpu" for node in recipes):
        warning_once(
            log,
            "float8 GEMMs on a CPU are correct, but slower than GEMMs in the model's dtype: the float8 numbers are "
            "converted to it first (docs/fp8.md)",
        )
    return [(node, partial(_insert, analysis, node, recipe), {node}) for node, recipe in recipes.items()]


def _insert(analysis: GraphAnalysis, node: Node, recipe: str) -> Node:
    experts = experts_of(analysis, node)
    if experts is not None:
        return write_call(node, torch.ops.fused.grouped_linear_fp8.default, *experts, recipe)
    input, weight, bias, transposed = arguments_of(analysis, node)
    if transposed:
        weight = write_call(node, torch.ops.aten.t.default, weight)
    return write_call(node, torch.ops.fused.linear_fp8.default, input, weight, bias, value_of(node).dtype, recipe)
