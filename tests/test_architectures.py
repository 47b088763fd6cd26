"""The commands on tiny architectures of transformers, in float32 and bf16, with checkpoints and without."""

from __future__ import annotations

import functools
import itertools
import sys
import types

import pytest
import torch
from architectures import ARCHITECTURES, made

from torch_fused_ops.planner import search
from torch_fused_ops.planner.model import captured_model
from torch_fused_ops.planner.static_memory import resident_tensors
from torch_fused_ops.planner.step import segmented_step
from torch_fused_ops.policy import MEMORY, FusionPolicy
from torch_fused_ops.tools.cli import main
from torch_fused_ops.virtual_gpu import H100

pytest.importorskip("triton")
COMMANDS = {
    "plan": ("plan", "--capacity", "1GiB", "--gpu", "A100"),  # without counting instructions, which takes longest
    "plan on meta": ("plan", "--capacity", "1GiB", "--gpu", "A100", "--meta"),
    "explain": ("explain", "--train", "--saved"),
    "verify": ("verify",),
}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plans_train_the_parameters_that_get_gradients(name: str, checkpointing: bool) -> None:
    model, args, kwargs = made(name, checkpointing=checkpointing)
    torch._dynamo.reset()
    captured = captured_model(model, args, kwargs)
    parts = segmented_step(captured, H100, FusionPolicy(memory="off"))
    planned = resident_tensors(model, captured.unit_of, gets_gradient=parts.trained.__contains__)
    model(*args, **kwargs).loss.backward()
    gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {tensor.name for tensor in planned if tensor.trained} == gradients


WAYS = list(itertools.product(("float32", "bfloat16"), ("plain", "checkpointed")))
LEVELS = [level for level in MEMORY if level not in ("off", "free")]
# Each architecture with each command, and in each dtype with and without checkpoints; each command in each way.
CASES = [(name, n, *WAYS[(i + j) % 4]) for i, name in enumerate(ARCHITECTURES) for j, n in enumerate(COMMANDS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command", "dtype", "checkpoints"), CASES)
def test_commands(
    name: str,
    command: str,
    dtype: str,
    checkpoints: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = types.ModuleType("their_module")
    making = functools.partial(made, name, getattr(torch, dtype), checkpoints == "checkpointed")
    module.make_model = making  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_module", module)
    # To save compilations, each plan has two levels. Plans of several architectures have each level.
    levels = ("free", LEVELS[[*ARCHITECTURES].index(name) % len(LEVELS)])
    monkeypatch.setattr(search, "DEFAULT", levels)
    torch._dynamo.reset()
    first, *options = COMMANDS[command]
    code = main([first, "their_module:make_model", *options])
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    assert "a graph is missing" not in said.out
