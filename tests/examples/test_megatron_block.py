"""The block written against Megatron-LM's calls trains eager and compiled, alike."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "megatron_block.py"
ROW = re.compile(r"^(eager|compiled), dropout (0\.\d) +([\d.]+) +([\d.]+) +([\d.]+) MiB$", re.M)


@pytest.mark.slow
@pytest.mark.parametrize(("mlp", "backend"), [("swiglu", "aot_eager"), ("gelu", "fused"), ("swiglu", "fused")])
def test_megatron_block(mlp: str, backend: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--mlp", mlp, "--backend", backend, "--layers", "1", "--steps", "3"],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    rows = {(name, p): (float(a), float(b), float(kept)) for name, p, a, b, kept in ROW.findall(ran.stdout)}
    assert len(rows) == 4, ran.stdout
    apart = re.search(r"at most (\S+) apart", ran.stdout)
    assert apart and float(apart[1]) < 1e-4
    for (name, p), (first, last, kept) in rows.items():
        assert last < first and kept > 0
        assert abs(kept - rows[name, "0.0"][2]) < 0.01  # no mask is kept for dropout
        if (name, backend) == ("compiled", "fused"):
            assert kept < rows["eager", p][2]
