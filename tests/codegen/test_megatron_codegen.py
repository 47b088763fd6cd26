"""The block of ``examples/megatron_block.py``, written against Megatron-LM's calls, as a GPU would run it, on paper."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

spec = importlib.util.spec_from_file_location(
    "megatron_block", Path(__file__).parents[2] / "examples" / "megatron_block.py"
)
assert spec is not None and spec.loader is not None
example = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # Dynamo imports modules by their names
spec.loader.exec_module(example)

SEQUENCE, BATCH, WIDTH, HEADS = 512, 4, 1024, 16


OURS = ("bias_act", "bias_glu", "dropout_add", "scaled_masked_softmax")


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["gelu", "swiglu"])
def test_one_graph_of_generated_kernels(gated: bool) -> None:
    """Nothing of ours stays a call, no mask of a dropout is kept, and machine code comes out of every kernel."""
    with torch.device("meta"):
        block = example.Block(WIDTH, HEADS, gated, 0.1).bfloat16().train()
        x = torch.empty(SEQUENCE, BATCH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.empty(BATCH, 1, 1, SEQUENCE, dtype=torch.bool)
    paper = virtual_gpu.compile_on_paper(block, x, mask)
    for graph in (paper.forward, paper.backward):
        assert "ops.fused" not in graph.code.split("def call(")[-1]
        assert not any("dropout" in name or "softmax" in name for name in graph.extern)
        spilled = {kernel.name for kernel in graph.kernels if virtual_gpu.assemble(kernel).spills}
        assert not [name for name in spilled if any(op in name for op in OURS)]  # layer_norm's may: Triton 3.6
    kept = [t for t in paper.saved if not (t.is_parameter or t.is_graph_input)]
    assert not any(t.dtype == torch.bool for t in kept)
    scores = [t for t in kept if t.shape[-2:] == (SEQUENCE, SEQUENCE)]
    assert len(scores) == 1, "softmax's result alone"
