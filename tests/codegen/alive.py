"""What is alive, and what is moved, while the generated code of a training step runs: run without data.

The generated ``call`` runs as it is, on buffers that have a size and nothing else, so Python's own lifetimes settle
what is alive: ``del``, reuse, views, tuples. Kernels do nothing; library products read and write what they are handed,
a slice as a slice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from torch_fused_ops.virtual_gpu import GeneratedGraph, PaperCompilation


@dataclass
class Memory:
    """Bytes alive now and at the peak, and bytes read and written."""

    now: int = 0
    peak: int = 0
    moved: int = 0


class _Block:
    """Memory that is alive while somebody refers to it."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.memory, self.nbytes = memory, nbytes
        memory.now += nbytes
        memory.peak = max(memory.peak, memory.now)

    def __del__(self) -> None:
        self.memory.now -= self.nbytes


class _Buffer:
    """A tensor's place in memory; a view has its base's block."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, block: _Block) -> None:
        self.nbytes, self.dtype, self.block = math.prod(shape) * dtype.itemsize, dtype, block


class _Kernel:
    run = staticmethod(lambda *args, **kwargs: None)


class _Products:
    """``extern_kernels``: all that it has writes ``out``."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __getattr__(self, name: str) -> Any:
        def product(*args: Any, out: _Buffer, **kwargs: Any) -> None:
            self.memory.moved += sum(one.nbytes for one in (*args, out) if isinstance(one, _Buffer))

        return product


def alive(paper: PaperCompilation, model: nn.Module) -> Memory:
    """A training step of a model with one result, on static shapes: without parameters, and what is there before.

    What is kept for backward is alive, and so is the result's gradient.
    """
    assert paper.forward is not None and paper.backward is not None
    memory = Memory()
    parameters = {tuple(p.shape) for p in model.parameters()}

    def buffer(value: torch.Tensor) -> _Buffer:
        nbytes = 0 if tuple(value.shape) in parameters else value.numel() * value.element_size()
        return _Buffer(value.shape, value.dtype, _Block(memory, nbytes))

    forward, backward = (graph.graph.graph.find_nodes(op="placeholder") for graph in (paper.forward, paper.backward))
    kept = _call(paper.forward, memory, [buffer(node.meta["val"]) for node in forward])[1:]
    tangents = [buffer(node.meta["val"]) for node in backward[len(kept) :]]
    args = [*kept, *tangents]
    del kept, tangents
    _call(paper.backward, memory, args)
    memory.moved += sum(kernel.bytes_moved for kernel in paper.kernels)
    return memory


def _call(graph: GeneratedGraph, memory: Memory, args: list[_Buffer]) -> tuple[_Buffer, ...]:
    cuda = SimpleNamespace(_DeviceGuard=lambda index: nullcontext(), set_device=lambda index: None)
    names: dict[str, Any] = {
        "torch": SimpleNamespace(
            cuda=cuda, **{str(d).removeprefix("torch."): d for d in (torch.bfloat16, torch.float32)}
        ),
        "assert_size_stride": lambda *args: None,
        "assert_size_stride_grouped": lambda *args: None,  # torch 2.15's
        "get_raw_stream": lambda index: 0,
        "extern_kernels": _Products(memory),
        "empty_strided_cuda": lambda size, stride, dtype: _Buffer(
            size, dtype, _Block(memory, math.prod(size) * dtype.itemsize)
        ),
        "reinterpret_tensor": lambda b, size, stride, offset: _Buffer(size, b.dtype, b.block),
        **dict.fromkeys((kernel.name for kernel in graph.kernels), _Kernel),
    }
    found = re.search(r"^( *)def call\((?:self, )?args\):\n((?:\1 +.*\n| *\n)+)", graph.code, re.M)
    assert found is not None
    exec("def call(args):\n" + re.sub(rf"^{found[1]}", "", found[2], flags=re.M), names)
    return names["call"](args)  # type: ignore[no-any-return]
