"""Read Inductor's generated code: kernels, launches, external calls, saved tensors, and their modules."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_fused_ops.graphs.modules import innermost, module_path

from .captured import hint
from .results import GeneratedGraph, GeneratedKernel, GraphInput, Launch, SavedTensor
from .work import is_view
from .wrapper import unmarked


def generated_graph(
    marked_code: str,
    gm: fx.GraphModule,
    bytes_of: Mapping[Any, int],
    kernel_nodes: Mapping[str, Sequence[str]],
    scheduled: Sequence[tuple[Any, int]],
    inputs: Sequence[GraphInput],
    results: int,
) -> GeneratedGraph:
    code = unmarked(marked_code)
    kernel_of = {node: kernel for kernel, nodes in kernel_nodes.items() for node in nodes}
    kernel_bytes: Counter[str] = Counter()
    for node, nbytes in bytes_of.items():
        names = [node.get_name(), *(inner.get_name() for inner in node.get_nodes())]
        kernel = next((kernel_of[name] for name in names if name in kernel_of), None)
        if kernel is not None:
            kernel_bytes[kernel] += nbytes
    sources, launches, extern = _read_code(code)
    kernels = tuple(
        GeneratedKernel(name, source, kernel_bytes[name], launches[name]) for name, source in sources.items()
    )
    in_order = tuple(Launch(nbytes, modules_of(node)) for node, nbytes in scheduled)
    return GeneratedGraph(
        code, kernels, extern, sum(bytes_of.values()), gm, tuple(inputs), results, in_order, marked_code
    )


def graph_input(value: Any, is_parameter: bool, name: str = "") -> GraphInput:
    """Describe the graph argument for a value that the graph was traced with."""
    if not isinstance(value, Tensor):
        return GraphInput(number=hint(value), name=name)
    shape, stride = (tuple(map(hint, sizes)) for sizes in (value.shape, value.stride()))
    return GraphInput(shape, stride, value.dtype, is_parameter, name=name)


def modules_of(node: Any) -> tuple[str, ...]:
    """Return the modules whose results a scheduler node writes, one entry per buffer.

    Intermediate values do not count, because a mask that a kernel recomputes has many operations.
    """
    modules = []
    for inner in node.get_nodes():
        written = getattr(inner.node, "origin_node", None)
        origins = getattr(inner.node, "origins", ())
        paths = [_module_of(written)] if written is not None else []
        modules.append(next(filter(None, [*paths, *map(_module_of, reversed(list(origins)))]), ""))
    return tuple(filter(None, modules))


def _module_of(node: fx.Node) -> str:
    """Return the model path of the innermost module that a forward or backward node comes from; "" if unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return module_path(list(stack.values())[-1][0]) if stack else ""


def _read_code(code: str) -> tuple[dict[str, str], Counter[str], tuple[str, ...]]:
    """Read kernel sources by name, launch counts by name, and external calls from a generated module."""
    sources: dict[str, str] = {}
    launches: Counter[str] = Counter()
    extern: list[str] = []
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function = ast.unparse(call.func)
        owner, _, name = function.rpartition(".")
        if function == "async_compile.triton":
            kernel, source = (ast.literal_eval(argument) for argument in call.args[:2])
            sources[kernel] = source
        elif name == "run" and owner in sources:
            launches[owner] += 1
        elif owner == "extern_kernels":
            extern.append(name)
        elif function.startswith(("torch.ops.", "aten.")):
            extern.append(function.removeprefix("torch.ops.").removesuffix(".default"))
    return sources, launches, tuple(extern)


def saved_tensor(node: fx.Node, origins: Mapping[fx.Node, bool], nbytes: int) -> SavedTensor:
    root = node
    while root.all_input_nodes:
        source = root.all_input_nodes[0]
        call: Any = source.target if root.target is operator.getitem else root.target  # getitem selects a result
        if not isinstance(call, torch._ops.OpOverload) or not is_view(call):
            break
        root = source
    value = node.meta["val"]
    shape = tuple(hint(size) for size in value.shape)
    is_input = root.op == "placeholder"
    is_parameter = is_input and origins.get(root, False)
    return SavedTensor(
        node.name,
        shape,
        value.dtype,
        nbytes,
        is_parameter,
        is_input and not is_parameter,
        innermost(root),
    )


def is_number(node: Any) -> bool:
    """Return True if a node is a size or another number."""
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), symbolic)


def is_tensor(node: Any, device: str) -> bool:
    """Return True if a node is a tensor on a device of this type."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.device.type == device
