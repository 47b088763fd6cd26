"""CUDA graphs: our operators never wait for the device, and captured graphs replay bit for bit on a GPU."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from harness import GELU_TANH, Net
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_fused_ops import FusionPolicy, compile_options
from torch_fused_ops import functional as FF
from torch_fused_ops.kernels.compiled import identification
from torch_fused_ops.operators.autograd import REGISTERED
from torch_fused_ops.testing.samples import OPERATORS, backward_samples, samples

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")


class Waits(TorchDispatchMode):
    """Fails if an operator makes the host wait: reads a number, copies to another device, or counts elements."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
        assert devices <= {"meta"}, f"{func}: {devices}"
        assert torch.Tag.data_dependent_output not in func.tags and torch.Tag.dynamic_output_shape not in func.tags, (
            func
        )
        return out


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("backward", [False, True])
def test_no_launch_waits_for_the_device(op: str, backward: bool) -> None:
    """Choosing a kernel does not read a tensor's elements. The kernel's generated code only launches."""
    calls = 0
    for sample in (backward_samples if backward else samples)(op):
        args = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") if isinstance(t, Tensor) else t
            for t in sample.args
        ]
        with Waits():
            identification(REGISTERED[sample.op].signature, on_gpu=True)(tuple(args))
        calls += 1
    assert calls > 10


def dropped(s: Any, x: Tensor) -> Tensor:
    h = F.dropout(GELU_TANH(s.up(x)), 0.1, s.training)
    return x + F.dropout(s.down(h), 0.1, s.training)


def operators(s: Any, x: Tensor) -> Tensor:
    y = FF.swiglu(*FF.bias_dropout_add(x, None, x, 0.1, training=s.training).chunk(2, -1))
    return FF.scaled_masked_softmax(y.unflatten(-1, (4, -1)).transpose(0, 1).unsqueeze(0), scale=0.5)


@pytest.mark.covering(every=12)
@pytest.mark.parametrize("memory", ["free", "fp8", "input"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("body", [dropped, operators])
def test_compiled_graphs_can_be_captured(body: Callable[..., Tensor], training: bool, memory: str) -> None:
    """Graphs meet Inductor's conditions for "reduce-overhead": one device, only operators that allow capture."""
    from torch._inductor import cudagraph_utils
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    if body is operators and memory != "free":
        pytest.skip("the graph has no linear layer")
    graphs: list[GraphLowering] = []
    codegen = GraphLowering.codegen

    def recording_codegen(self: GraphLowering) -> Any:
        graphs.append(self)
        return codegen(self)

    x = torch.empty(512, 256, dtype=torch.bfloat16, device="meta", requires_grad=training)
    with torch.device("meta"):
        model = Net(body, up=nn.Linear(256, 1024), down=nn.Linear(1024, 256)).to(torch.bfloat16).train(training)
    with mock.patch.object(GraphLowering, "codegen", recording_codegen):
        virtual_gpu.compile_on_paper(
            model, x, training=training, config=compile_options(FusionPolicy(memory=memory, strict=True))
        )
    assert len(graphs) == 1 + training
    for graph in graphs:
        assert graph.disable_cudagraphs_reason is None
        assert cudagraph_utils.check_multiple_devices_or_any_cpu_nodes(graph.device_node_mapping) is None
        assert graph.device_types == {"cuda"}
        assert not graph.mutated_inputs
        assert get_first_incompatible_cudagraph_node(graph.module) is None


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("op", OPERATORS)
def test_captured_operators_replay_to_the_same_bits(op: str) -> None:
    for sample in samples(op, "cuda", core=True):
        expected = sample()
        sample()  # compiled
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            sample()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sample()
        for out in tree_leaves(captured):
            if isinstance(out, Tensor):
                out.detach().zero_()
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(tree_leaves(captured), tree_leaves(expected), strict=True):
            if isinstance(a, Tensor):
                torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=0, equal_nan=True)
