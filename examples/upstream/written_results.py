"""Backward recomputes from results that the caller has modified (docs/upstream.md).

A model returns hidden states, flattened or in parts, and its caller modifies them in place. Backward recomputes from
the result. The saved tensor is a view of it with its own version counter, so nothing is checked.

Remedy: ``lowerings/partition.py`` recomputes from a result or an argument only if backward also reads that tensor, or
views of it. Otherwise it marks values ``MUST_SAVE`` and repeats the cut.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def model(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x @ up
    return F.relu(hidden).square() @ down, hidden.view(-1)


def gradients(fn: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    x, up, down = (torch.linspace(-1, 1, n * m).view(n, m).sin().requires_grad_() for n, m in ((8, 4), (4, 6), (6, 4)))
    y, hidden = fn(x, up, down)
    with torch.no_grad():
        hidden.add_(1.0)  # eager mode allows it: autograd has saved relu's result
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(y.sum(), (x, up, down))])


def off(backend: str) -> float:
    torch._dynamo.reset()
    expected = gradients(model)
    return float((gradients(torch.compile(model, backend=backend)) - expected).norm() / expected.norm())


assert off("inductor") > 0.1  # "aot_eager_decomp_partition" has the same partitioner
assert off("fused") < 1e-5
