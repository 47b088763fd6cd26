"""``TORCH_FUSED_OPS_KERNELS=torch``: operators without this library's kernels, for GPUs that break one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torch_fused_ops.operators.registration import in_torch


def run(code: str, value: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TORCH_FUSED_OPS_KERNELS": value}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)


PROGRAM = """
import sys, torch
from torch_fused_ops import functional
from torch_fused_ops.operators.registration import IN_TORCH, Parts

assert IN_TORCH
assert Parts("cpu", "gpu", "plain", "fake", "vmap").chosen() == ("plain", "plain", "plain", "fake", "vmap")
files = set()
sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
x = torch.randn(6, 8, requires_grad=True)
y = functional.bias_act(x, torch.randn(8, requires_grad=True), activation="silu")
y = functional.swiglu(y, x) + functional.bias_act(x, activation="relu")
y = functional.scaled_masked_softmax(functional.bias_dropout_add(y, None, x, 0.1))
y.square().sum().backward()
torch.ops.fused.glu_fp8(x, x, None, "silu")[0].sum().backward()
sys.setprofile(None)
assert x.grad.isfinite().all()
assert any(name.endswith("formulas.py") for name in files)
print([name for name in files if "torch_fused_ops/kernels/" in name])
"""


@pytest.mark.slow
def test_plain_torch_alone_runs() -> None:
    done = run(PROGRAM, "torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_values() -> None:
    assert (in_torch(""), in_torch("torch")) == (False, True)
    for value in ("triton", "1", "TORCH"):
        with pytest.raises(ValueError, match=rf"TORCH_FUSED_OPS_KERNELS='{value}' is not accepted: it must be 'torch'"):
            in_torch(value)


@pytest.mark.slow
def test_a_bad_value_stops_the_import() -> None:
    done = run("import torch_fused_ops", "cuda")
    assert done.returncode == 1
    assert "TORCH_FUSED_OPS_KERNELS='cuda' is not accepted" in done.stderr
