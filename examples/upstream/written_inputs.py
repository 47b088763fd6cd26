"""Backward reads inputs that forward has modified (docs/upstream.md).

A module's forward updates a buffer and uses it, such as a running mean. The partitioner treats the updated value as
recomputable from the input, and saves the input. Backward then reads the buffer after ``copy_``, and applies the update
twice. Forward writes before it saves, so the version check cannot notice.

Remedy: ``lowerings/partition.py`` reads each such input through one ``aten.clone``, marked ``MUST_SAVE``, if backward
depends on it, and removes unsaved clones. Pull request 197039 marks and saves each of the input's readers instead.
"""

import copy
from collections.abc import Callable

import torch
import torch._functorch.config
from torch import Tensor


class Model(torch.nn.Module):
    buffer: Tensor

    def __init__(self, update: Callable[[Tensor], object], use: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.update, self.use = update, use
        self.w = torch.nn.Parameter(torch.linspace(0.1, 0.9, 16))
        self.register_buffer("buffer", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.update(self.buffer)
        return self.use(x, self.buffer, self.w)


def gradients(model: Model, backend: str | None = None) -> Tensor:
    model = copy.deepcopy(model)
    x = torch.linspace(-1, 1, 128).view(8, 16).requires_grad_()
    y = (torch.compile(model, backend=backend) if backend else model)(x)
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(y.sum(), (x, model.w))])


def off(model: Model, backend: str = "inductor", budget: float = 1) -> float:
    torch._dynamo.reset()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        compiled, expected = gradients(model, backend), gradients(model)
    return float((compiled - expected).norm() / expected.norm())


# A scale is updated.
pointwise = Model(lambda b: b.mul_(0.5), lambda x, b, w: torch.tanh(x * b * w))
# A running mean is updated before a linear layer. Another linear layer reads x, so x is saved.
linear = Model(
    lambda b: b.mul_(0.5).add_(0.5), lambda x, b, w: torch.sin((x - b) @ torch.outer(w, w)) + x @ torch.outer(w, w)
)

assert off(pointwise) > 0.1  # at every budget
assert off(linear) < 1e-5 and off(linear, budget=0.99) > 0.01  # wrong at any budget below 1
assert off(pointwise, "aot_eager") > 0.1  # the same partitioner; gradients are right without it
assert off(pointwise, "fused") < 1e-5 and off(linear, "fused") < 1e-5
