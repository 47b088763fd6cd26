"""A second process is never served another version's code, and is served its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The program is "upgraded" by editing one formula in a copy of the package: relu becomes twice relu, both ways.
PROGRAM = """
import sys, torch
import torch_fused_ops as tfo
from torch._dynamo.utils import counters
kind = sys.argv[1]
x = torch.ones(8, requires_grad=True)
if kind == "operator":      # called directly: no pass is involved, only the lowering and the derivative
    y = torch.compile(lambda x: torch.ops.fused.bias_act(x, None, None, "relu") + 1)(x) - 1
else:                       # picked up
    w = torch.eye(8)
    f = lambda x: torch.relu(x.view(1, 8) @ w) @ w
    policy = tfo.FusionPolicy(memory=sys.argv[2])
    y = torch.compile(f, options=tfo.compile_options(policy))(x)
y.sum().backward()
hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
print(y.flatten()[0].item(), x.grad[0].item(), "hit" if hits else "miss")
"""

ROOT = Path(__file__).parents[2]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the installed package that can be edited."""
    import shutil

    import torch_fused_ops
    import torch_fused_ops.lowerings as lowerings

    target = tmp_path / "site" / "torch_fused_ops"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(torch_fused_ops.__file__).parent, target, ignore=ignore)
    if not (target / "lowerings").exists():
        shutil.copytree(Path(lowerings.__file__).parent, target / "lowerings", ignore=ignore)
    return target


def run(package: Path, cache: Path, *arguments: str) -> tuple[float, float, str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(package.parent),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # -I would drop PYTHONPATH; the copy must come before an editable install's finder, which PYTHONPATH does.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, env=environment, cwd=cache.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    value, grad, hit = done.stdout.split()[-3:]
    return float(value), float(grad), hit


def upgrade(package: Path) -> None:
    """relu := 2·relu, value and derivative."""
    path = package / "activations.py"
    text = path.read_text()
    for old, new in (
        ('"relu",\n            torch.relu,', '"relu",\n            lambda x: 2.0 * torch.relu(x),'),
        ("torch.where(x <= 0, 0.0, grad)", "torch.where(x <= 0, 0.0, 2.0 * grad)"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)


@pytest.mark.slow
def test_an_upgrade_is_not_served_the_old_code(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run(package, cache, "operator") == (1.0, 1.0, "miss")
    assert run(package, cache, "operator") == (1.0, 1.0, "hit")
    upgrade(package)
    assert run(package, cache, "operator") == (2.0, 2.0, "miss")


@pytest.mark.slow
def test_policies_do_not_share_entries(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run(package, cache, "picked-up", "free") == (1.0, 1.0, "miss")
    assert run(package, cache, "picked-up", "free") == (1.0, 1.0, "hit")
    assert run(package, cache, "picked-up", "off") == (1.0, 1.0, "miss")
