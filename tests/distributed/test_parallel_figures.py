"""Check the table of docs/distributed.md. ``test_tensor_parallel.py`` compares its arithmetic with measurements."""

import re
from pathlib import Path

from mlp_figures import mlp_figures

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def test_the_table_of_the_page() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) MiB \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert [int(tp) for tp, *_ in rows] == [1, 2, 4, 8]
    for tp, weights, cells in rows:
        *numbers, first, second = cells.split(" | ")
        for sequence in (False, True):
            figures = [
                mlp_figures(8192, 28672, 8192, int(tp), gated=True, memory=memory, sequence_parallel=sequence)
                for memory in ("off", "free", "fp8", "input")
            ]
            counted = [figures[0].weights, *(f.saved for f in figures), figures[0].sent]
            assert [round(n / 2**20) for n in counted] == [int(n) for n in (weights, *numbers)]
            assert ["×".join(map(str, gemm)) for gemm in figures[1].gemms[:2]] == [first, second]
