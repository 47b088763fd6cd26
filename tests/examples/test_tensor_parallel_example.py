"""The tensor-parallel example runs as its docstring says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mlp", "swiglu"],
        ["--mlp", "gelu"],
        ["--mlp", "swiglu", "--compile"],
    ],
)
@pytest.mark.slow  # of the examples, megatron_block.py runs by default
def test_it_trains_saves_and_loads(arguments: list[str], tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    ran = subprocess.run(
        [*launch, *arguments, "--steps", "3", "--layers", "1", "--batch", "2"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    apart = re.search(r"losses +differ by (\S+) at most", ran.stdout)
    assert apart and float(apart[1]) < 1e-4
    assert "saved     by 2, loaded by 1, bit for bit" in ran.stdout
