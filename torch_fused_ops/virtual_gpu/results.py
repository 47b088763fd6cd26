"""Types for the results of a compilation without a device: code, kernels, launches, bytes moved, saved tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .wrapper import unmarked


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
        shape: sizes.
        stride: strides.
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
        marked_code: the generated Python module with a mark before each scheduler node (`wrapper.mark`).
        kernels: its Triton kernels, in order of definition.
        extern: the external calls, in order: "mm", "addmm", "aten._addmm_activation".
        graph: the FX graph after the post-grad passes.
        inputs: its arguments, in order.
        results: the number of outputs that the caller gets; the remaining outputs are saved for backward.
        scheduled: the scheduler's nodes in the order of the code, including nodes that launch nothing.
    """

    marked_code: str = field(repr=False)
    kernels: tuple[GeneratedKernel, ...]
    extern: tuple[str, ...]
    graph: fx.GraphModule = field(repr=False)
    inputs: tuple[GraphInput, ...] = field(default=(), repr=False)
    results: int = 0
    scheduled: tuple[Launch, ...] = field(default=(), repr=False)

    @functools.cached_property
    def code(self) -> str:
        """The whole generated Python module."""
        return unmarked(self.marked_code)

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written by kernels and external calls together."""
        return sum(launch.bytes_moved for launch in self.scheduled)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that the forward graph saves for the backward graph.

    Attributes:
        name: the node's name in the joint graph.
        shape: sizes.
        dtype: element type.
        nbytes: size in bytes.
        is_parameter: True for an `nn.Parameter`, a module's buffer, or a view of either, which stay alive anyway.
        is_graph_input: True for another input of the function, or a view of an input.
        module: the path of the innermost module that computes its memory; "" if unknown.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    is_parameter: bool
    is_graph_input: bool
    module: str = ""
