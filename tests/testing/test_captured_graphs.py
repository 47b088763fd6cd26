"""Graphs from a compiler pass or a Dynamo backend compile on paper as if the virtual GPU had captured them."""

from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.nn as nn
from harness import MLP, Net, Stack, raises
from torch import Tensor
from torch.utils.checkpoint import checkpoint

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")
pytest.importorskip("triton")


def block() -> nn.Module:
    """Make a block with a buffer."""
    return Net(
        lambda s, x: x + s.mlp(s.norm(x)) * s.scale, norm=nn.LayerNorm(64), mlp=MLP(64, 256), scale=torch.ones(64)
    )


def captured(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Any:
    _, graphs = harness.captured(fn, *args, edit=virtual_gpu.set_aside, dynamic=dynamic, fullgraph=True)
    torch._dynamo.reset()
    return graphs[-1]


def measured(paper: Any) -> Any:
    counts = {name: (len(g.kernels), g.extern, g.bytes_moved) for name, g in paper.graphs.items()}
    return paper.saved_bytes(), paper.saved_bytes(include_inputs=False, include_parameters=True), counts


BLOCK, BLOCKS = block(), Stack(block() for _ in range(2))


def twice(x: Tensor) -> Tensor:
    first, second = BLOCKS.layers
    return checkpoint(second, checkpoint(first, x, use_reentrant=False), use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [BLOCK, BLOCKS, twice], ids=["block", "blocks", "checkpointed"])
def test_captured_graphs_compile_as_on_paper(fn: Callable[..., Any], dynamic: bool) -> None:
    x = torch.randn(32, 64, requires_grad=True)
    graph = captured(fn, x, dynamic=dynamic)
    paper = virtual_gpu.compile_graph_on_paper(graph)
    assert measured(paper) == measured(virtual_gpu.compile_on_paper(fn, x))
    assert measured(virtual_gpu.compile_graph_on_paper(graph)) == measured(paper), "compiling does not change the graph"


def test_cpu_autocast_and_devices_become_the_gpus() -> None:
    linear = nn.Linear(64, 64)

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x)
        return y + torch.arange(64, device="cpu")

    with torch.no_grad():
        paper = virtual_gpu.compile_graph_on_paper(captured(fn, torch.randn(32, 64)))
    assert paper.inference is not None
    products = [n for n in paper.inference.graph.graph.nodes if "mm" in str(n.target)]
    assert [n.meta["val"].dtype for n in products] == [torch.bfloat16]
    assert {n.meta["val"].device.type for n in products} == {"cuda"}


@pytest.mark.slow
def test_graphs_from_a_gpu_and_the_cpu_compile_alike() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = BLOCK(x)
        return (y.to("cpu") + torch.zeros(64, device="cpu") + torch.ones(64, device=torch.device("cpu"))).cpu()

    graph = captured(fn, torch.randn(32, 64, requires_grad=True))
    expected = measured(virtual_gpu.compile_graph_on_paper(graph))

    def on_gpu(value: Any) -> Any:
        if value == "cpu":
            return "cuda:0"
        return torch.device("cuda", 0) if value == torch.device("cpu") else value

    renamed = 0
    for node in graph.gm.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["example_value"]
            with FakeTensorMode():
                new = torch.empty(value.shape, dtype=value.dtype, device="cuda", requires_grad=value.requires_grad)
            node.meta["example_value"] = new
        args = torch.fx.node.map_aggregate(node.args, on_gpu), torch.fx.node.map_aggregate(node.kwargs, on_gpu)
        if node.op == "call_method" and node.target == "cpu":
            node.target = "cuda"
        renamed += args != (node.args, node.kwargs) or node.target == "cuda"
        node.args, node.kwargs = args
    assert renamed >= 4 and "cuda" in str(graph.gm.graph)
    assert measured(virtual_gpu.compile_graph_on_paper(graph)) == expected


def test_sizes_that_depend_on_data_raise() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = captured(lambda x: x[x > 0] * 2, torch.randn(8))
    (placeholder,) = graph.gm.graph.find_nodes(op="placeholder")
    values = (n.meta["example_value"] for n in graph.gm.graph.nodes if n.op != "placeholder")
    dynamic = next(v for v in values if v.dim() == 1 and not isinstance(v.shape[0], int))
    placeholder.meta["example_value"] = dynamic
    raises(ValueError, "depends on data", virtual_gpu.compile_graph_on_paper, graph)


def test_tensor_subclasses_and_objects_raise() -> None:
    graph = captured(lambda x: x + 1, torch.randn(8))
    (placeholder,) = graph.gm.graph.find_nodes(op="placeholder")
    placeholder.meta["example_value"] = torch.nested.nested_tensor([torch.randn(2)], layout=torch.jagged)
    raises(TypeError, "NestedTensor, expected a plain tensor", virtual_gpu.compile_graph_on_paper, graph)
    placeholder.meta["example_value"] = object()
    raises(TypeError, "got object, expected a tensor or a number", virtual_gpu.compile_graph_on_paper, graph)
