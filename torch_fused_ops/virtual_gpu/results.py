"""Types for the results of a compilation without a device: code, kernels, launches, bytes moved, saved tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .gpus import GPU


@dataclass(frozen=True)
class GeneratedKernel:
    """One Triton kernel of a generated graph.

    Attributes:
        name: its name in the generated code, "triton_poi_fused_gelu_0".
        source: a Python module: the decorated kernel and its imports. `assemble` and `interpret` take it.
        bytes_moved: bytes read and written by all launches of this kernel in the graph (``work.nbytes_moved``).
        launches: the number of times the graph runs it.
    """

    name: str
    source: str
    bytes_moved: int
    launches: int = 1


@dataclass(frozen=True)
class Launch:
    """One kernel launch or external call.

    Attributes:
        bytes_moved: bytes it reads and writes (``work.nbytes_moved``).
        modules: for each result that it writes, the model path of its module ("layers.0.mlp") if known.
    """

    bytes_moved: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class GraphInput:
    """An argument of a generated graph.

    Attributes:
        shape: sizes; hints for dynamic sizes.
        stride: strides; hints for dynamic strides.
        dtype: element type.
        is_parameter: True for a parameter or a buffer of a module.
        number: a size or another number; None for a tensor.
        name: Dynamo's name for a program's argument: "l_x_", "l_fn_modules_up_parameters_weight_"; "" if unknown.
    """

    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    is_parameter: bool = False
    number: Any = None
    name: str = ""


@dataclass(frozen=True)
class GeneratedGraph:
    """Inductor's generated code for one graph.

    Attributes:
        code: the whole generated Python module.
        kernels: its Triton kernels, in order of definition.
        extern: the external calls, in order: "mm", "addmm", "aten._addmm_activation".
        bytes_moved: bytes read and written by kernels and external calls together.
        graph: the FX graph after the post-grad passes.
        launches: kernel launches and external calls in the scheduler's order.
        inputs: its arguments, in order.
        results: the number of outputs that the caller gets; the remaining outputs are saved for backward.
        scheduled: the scheduler's nodes in the order of the code, including nodes that launch nothing.
        marked_code: the code with a mark before each scheduler node (`wrapper.mark`).
    """

    code: str
    kernels: tuple[GeneratedKernel, ...]
    extern: tuple[str, ...]
    bytes_moved: int
    graph: fx.GraphModule = field(repr=False)
    launches: tuple[Launch, ...] = field(default=(), repr=False)
    inputs: tuple[GraphInput, ...] = field(default=(), repr=False)
    results: int = 0
    scheduled: tuple[Launch, ...] = field(default=(), repr=False)
    marked_code: str = field(default="", repr=False)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that the forward graph saves for the backward graph.

    Attributes:
        name: the node's name in the joint graph.
        shape: sizes; hints for dynamic sizes.
        dtype: element type.
        nbytes: size in bytes.
        is_parameter: True for an `nn.Parameter`, a module's buffer, or a view of either, which stay alive anyway.
        is_graph_input: True for another input of the function, or a view of an input.
        module: model path of the module that computes it; "" if unknown, and for inputs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    is_parameter: bool
    is_graph_input: bool
    module: str = ""


@dataclass(frozen=True)
class CompiledGraphs:
    """The graphs of a function that was compiled without a device, and the tensors they exchange.

    Attributes:
        gpu: the described GPU.
        forward: the forward graph of a training step; None in inference.
        backward: the backward graph of a training step; None in inference.
        inference: the graph if nothing requires a gradient; None in training.
        saved: tensors that forward saves for backward.
        handed: for each input of backward, the number of the forward output it receives; None for a result's gradient.
        tangents: the numbers of forward's results whose gradients are inputs of backward, in backward's order.
    """

    gpu: GPU
    forward: GeneratedGraph | None
    backward: GeneratedGraph | None
    inference: GeneratedGraph | None
    saved: tuple[SavedTensor, ...]
    handed: tuple[int | None, ...] = field(default=(), repr=False)
    tangents: tuple[int, ...] = field(default=(), repr=False)

    @property
    def graphs(self) -> dict[str, GeneratedGraph]:
        """The graphs that are not None, by name."""
        named = {"forward": self.forward, "backward": self.backward, "inference": self.inference}
        return {name: graph for name, graph in named.items() if graph is not None}

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written by all graphs together."""
        return sum(graph.bytes_moved for graph in self.graphs.values())

    @property
    def kernels(self) -> tuple[GeneratedKernel, ...]:
        """The Triton kernels of all graphs."""
        return tuple(kernel for graph in self.graphs.values() for kernel in graph.kernels)

    def saved_bytes(self, *, include_inputs: bool = True, include_parameters: bool = False) -> int:
        """Return the bytes saved for backward.

        Parameters, buffers and their views are excluded, because they stay alive whether saved or not. Inputs are
        included: in a model, a block's input is another block's output, and alive only because it was saved.

        Args:
            include_inputs: count the function's inputs that are neither parameters nor buffers.
            include_parameters: count parameters and buffers.

        Returns:
            The sum of `SavedTensor.nbytes`.
        """
        return sum(
            tensor.nbytes
            for tensor in self.saved
            if (include_parameters or not tensor.is_parameter) and (include_inputs or not tensor.is_graph_input)
        )

    def __str__(self) -> str:
        rows = [("", "bytes moved", "launches")]
        for name, graph in self.graphs.items():
            rows.append((name, _mib(graph.bytes_moved), str(sum(kernel.launches for kernel in graph.kernels))))
            rows += [(f"  {kernel.name}", _mib(kernel.bytes_moved), str(kernel.launches)) for kernel in graph.kernels]
            rows += [(f"  {call}", "", str(count)) for call, count in Counter(graph.extern).items()]
        if self.saved:
            rows.append(("saved for backward", _mib(self.saved_bytes()), ""))
            for tensor in self.saved:
                kind = "parameter" if tensor.is_parameter else "input" if tensor.is_graph_input else "intermediate"
                dtype = str(tensor.dtype).removeprefix("torch.")
                rows.append((f"  {tensor.name} {dtype}{list(tensor.shape)}", _mib(tensor.nbytes), kind))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows]
        return "\n".join([f"compiled for {self.gpu.name} ({self.gpu.arch}), without a device", *lines])


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
