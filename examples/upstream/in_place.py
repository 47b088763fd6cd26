"""A kernel of several loops does not reuse a buffer that two of them read (docs/upstream.md).

A kernel with two results from the same inputs allocates both, as in backward of a gated MLP. Inductor's
``decide_inplace_update`` reuses an input only if one loop is its last user, and counts other loops of the same kernel
as users.

Remedy: count the loops of a fused kernel as one user if all read the input at one index and none waits for a reduction
(``lowerings/buffer_reuse.py``). A SwiGLU MLP, 65,536 tokens, 4096 → 14336, needs a peak of 6512 MiB. Plain takes 7792,
and a budget of 0.99 takes 11776.
"""

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
