"""A kernel of several loops reuses no buffer that two of them read (docs/upstream.md)."""

import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code


def one_output(a: Tensor, b: Tensor) -> Tensor:
    x, y = a @ b, b @ a
    return x.sin() * y


def two_outputs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x, y = a @ b, b @ a
    return x.sin() * y, x * y.cos()


a = torch.randn(64, 64)
(_, (in_one,)), (_, (in_two,)) = (run_and_get_code(torch.compile(f), a, a) for f in (one_output, two_outputs))
assert "# reuse" in in_one
assert "# reuse" not in in_two, "one kernel computes both results, and no other kernel reads its inputs"
