"""The audit of programs has no findings. Audits convert to text and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import test_hand_written as kernels
import triton
from harness import meta
from torch import nn

import torch_fused_ops as tfo
from torch_fused_ops import virtual_gpu


def test_audits_convert_to_text_and_json() -> None:
    x = meta(4096)
    grid = lambda arguments: (4096 // arguments["B"],)  # noqa: E731
    audit = virtual_gpu.audit(kernels.shifted, x, x, 4096, grid=grid, SHIFT=-1, B=512, gpu=virtual_gpu.H100)
    text, data = str(audit), json.loads(audit.to_json())
    assert text.startswith("1 kernel in 1 configuration for NVIDIA H100 80GB HBM3: 1 finding\n")
    assert "race: shifted (4 warps)" in text
    assert data["ok"] is False and set(data["findings"][0]) == {"kernel", "configuration", "kind", "where", "evidence"}
    with pytest.raises(ValueError, match="grid=64 is not accepted: it must be a tuple"):
        virtual_gpu.audit(kernels.shifted, x, x, 4096, grid=64, SHIFT=-1, B=512)
    with pytest.raises(TypeError, match="got int"):
        virtual_gpu.audit(3, grid=(1,))


def test_autotuned_kernels_are_audited_in_every_configuration() -> None:
    configs = [triton.Config({"B": 64}), triton.Config({"B": 1024}, num_warps=8)]
    tuned = triton.autotune(configs, key=[])(kernels.has_copies)
    grid = lambda arguments: (4096 // arguments["B"],)  # noqa: E731
    audit = virtual_gpu.audit(tuned, *(meta(n, dtype=torch.float32) for n in (4096, 64)), grid=grid)
    assert audit.configurations == 2
    assert [f.configuration for f in audit.findings if f.kind == "race"] == ["B 64, 4 warps"]


# ---- programs --------------------------------------------------------------------------------------------------------


def _mlp(activation: nn.Module, bias: bool) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 512, bias), activation, nn.Linear(512, 128, bias)).bfloat16()
    return model, meta(256, 128, requires_grad=True)


PROGRAMS: dict[str, tuple[Callable[[], tuple[Any, Tensor]], dict[str, Any] | None]] = {
    "plain": (lambda: _mlp(nn.GELU(approximate="tanh"), False), None),
    "fused": (lambda: _mlp(nn.GELU(approximate="tanh"), True), {}),
    "fp8": (lambda: _mlp(nn.SiLU(), False), {"memory": "fp8"}),
}


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_generated_programs_have_no_findings(name: str) -> None:
    make, policy = PROGRAMS[name]
    model, x = make()
    config = None if policy is None else tfo.compile_options(policy=tfo.FusionPolicy(**policy))
    paper = virtual_gpu.compile_on_paper(model, x, gpu=virtual_gpu.H100, config=config)
    audit = virtual_gpu.audit(paper)
    assert audit.ok and not audit.notes, str(audit)
    assert audit.kernels >= 2 and audit.configurations > audit.kernels
