"""``TORCH_FUSED_OPS_WITHOUT`` turns off kernels or other parts, for devices on which a part fails."""

from __future__ import annotations

import pytest
import torch._inductor.config as inductor_config
from harness import python, raises

import torch_fused_ops as tfo
from torch_fused_ops.lowerings import buffer_reuse, passes, split_reductions
from torch_fused_ops.settings import switches

PROGRAM = """
import re, sys, torch
from torch_fused_ops import functional
from torch_fused_ops.settings import switches
from torch_fused_ops.operators.autograd import REGISTERED
from torch_fused_ops.operators.registration import with_kernels

assert switches.is_without("kernels") and switches.is_without("float8_kernels")
made = with_kernels(None, "plain", "fake", None, "formula")
assert (made.on_cpu, made.on_gpu) == ("plain", "plain")
assert REGISTERED["quantize"].on_gpu is REGISTERED["quantize"].plain
files = set()
sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
x = torch.randn(6, 8, requires_grad=True)
y = functional.bias_act(x, torch.randn(8, requires_grad=True), activation="silu")
y = functional.swiglu(y, x) + functional.bias_act(x, activation="relu")
y = functional.scaled_masked_softmax(functional.bias_dropout_add(y, None, x, 0.1))
y.square().sum().backward()
torch.ops.fused.glu(torch.ops.fused.keep_fp8(x), x, None, "silu").sum().backward()
sys.setprofile(None)
assert x.grad.isfinite().all()
assert any(name.endswith("formulas.py") for name in files)
print([name for name in files if re.search(r"torch_fused_ops/(kernels/|families/.*/kernels)", name)])
"""


@pytest.mark.slow
def test_plain_torch_alone_runs() -> None:
    assert python("-c", PROGRAM, TORCH_FUSED_OPS_WITHOUT="kernels") == "[]\n"


def test_values() -> None:
    parse = switches._parse
    assert parse("") == () and parse(" split_reductions, kernels,") == ("kernels", "split_reductions")
    for value in ("torch", "kernels,kernel", "all"):
        message = str(raises(ValueError, "", parse, value))
        assert f"TORCH_FUSED_OPS_WITHOUT={value!r} is not accepted: {value.split(',')[-1]!r} is not" in message
        assert all(part in message for part in switches.PARTS)


@pytest.mark.parametrize(
    ("part", "setting"), [("buffer_reuse", "inplace_buffers"), ("split_reductions", "split_reductions")]
)
def test_parts_of_compiled_code_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, part: str, setting: str) -> None:
    """The variable and Inductor's setting both turn a part off."""
    calls: list[str] = []
    monkeypatch.setattr(buffer_reuse, "allow_reuse", lambda nodes: calls.append("buffer_reuse"))
    monkeypatch.setattr(split_reductions, "rewrite", lambda graph: calls.append("split_reductions"))

    def ran() -> list[str]:
        calls.clear()
        passes.PostGradPass(tfo.FusionPolicy())(None)
        passes.SchedulerPass(tfo.FusionPolicy())([])
        return list(calls)

    parts = ["split_reductions", "buffer_reuse"]
    others = [name for name in parts if name != part]
    assert ran() == parts
    with inductor_config.patch({setting: False}):
        assert ran() == others
    before = passes.identity()
    monkeypatch.setattr(switches, "WITHOUT", (part,))
    assert ran() == others and passes.identity() == f"{before}-{part}"
