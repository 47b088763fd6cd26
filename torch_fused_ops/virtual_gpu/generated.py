"""Read Inductor's generated code: kernels, launches, external calls, saved tensors, and their modules."""

from __future__ import annotations

import ast
import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from torch_fused_ops.graphs.modules import innermost

from .captured import hint
from .results import GeneratedKernel, GraphInput, Launch, SavedTensor
from .wrapper import marked_lines


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
        paths = [innermost(written)] if written is not None else []
        modules.append(next(filter(None, [*paths, *map(innermost, reversed(list(origins)))]), ""))
    return tuple(filter(None, modules))


def read_code(marked_code: str, scheduled: Sequence[Launch]) -> tuple[tuple[GeneratedKernel, ...], tuple[str, ...]]:
    """Read the kernels and the external calls of a generated module.

    The bytes of a scheduler node belong to the first kernel that is launched after the node's mark.
    """
    sources: dict[str, str] = {}
    launches: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    extern: list[str] = []
    marks = marked_lines(marked_code)
    unclaimed = [launch.bytes_moved for launch in scheduled]
    calls = [node for node in ast.walk(ast.parse(marked_code)) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function = ast.unparse(call.func)
        owner, _, name = function.rpartition(".")
        if function == "async_compile.triton":
            kernel, source = (ast.literal_eval(argument) for argument in call.args[:2])
            sources[kernel] = source
        elif name == "run" and owner in sources:
            launches[owner] += 1
            _, index = marks[bisect.bisect(marks, (call.lineno,)) - 1]
            nbytes[owner] += unclaimed[index]
            unclaimed[index] = 0
        elif owner == "extern_kernels":
            extern.append(name)
        elif function.startswith(("torch.ops.", "aten.")):
            extern.append(function.removeprefix("torch.ops.").removesuffix(".default"))
    kernels = (GeneratedKernel(name, source, nbytes[name], launches[name]) for name, source in sources.items())
    return tuple(kernels), tuple(extern)


def saved_tensor(node: fx.Node, source: fx.Node, origins: Mapping[fx.Node, bool], nbytes: int) -> SavedTensor:
    """Describe a saved value. ``source``: the node whose memory it shares. ``origins``: True for parameters' inputs."""
    value, is_input = node.meta["val"], source.op == "placeholder"
    shape = tuple(hint(size) for size in value.shape)
    is_parameter = is_input and origins.get(source, False)
    is_graph_input = is_input and not is_parameter
    return SavedTensor(node.name, shape, value.dtype, nbytes, is_parameter, is_graph_input, innermost(source))
