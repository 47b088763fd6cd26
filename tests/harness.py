"""Models and verbs that test files share: MLPs, a step of training and what it saves, compilation by a policy."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_ops import FusionPolicy, activations

BUILTIN = [name for name in activations.names() if activations.get(name).builtin]
WITHOUT_BIAS = functools.partial(nn.Linear, bias=False)
GELU_TANH = functools.partial(F.gelu, approximate="tanh")


class MLP(nn.Module):
    """down(activation(up(x))); an activation of ``halves`` = 2 halves the features."""

    def __init__(
        self, width: int, hidden: int, activation: Callable[[Tensor], Tensor] = F.gelu, *, halves: int = 1
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden // halves, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """Llama's: down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, hidden: int, linear: Callable[[int, int], nn.Module] = WITHOUT_BIAS) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def saving(call: Callable[[], Any], besides: Iterable[Tensor] = ()) -> tuple[Any, int]:
    """A call's result, and the bytes that autograd saves of it: each memory once, and none of these tensors'."""
    excluded = {t.untyped_storage()._cdata for t in besides}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = call()
    return result, sum(storage.nbytes() for key, storage in storages.items() if key not in excluded)


def saving_step(fn: Callable[..., Tensor], module: nn.Module, x: Tensor, *rest: Tensor) -> tuple[list[Tensor], int]:
    """A step's result and gradients, and the bytes that it saves besides the module's tensors.

    Args:
        fn: the module, or what computes the same with its parameters.
        module: its parameters that require gradients have theirs, behind the input's.
        x: the input.
        rest: further arguments.
    """
    x = x.detach().clone().requires_grad_()
    y, saved = saving(lambda: fn(x, *rest), module.state_dict().values())
    tangent = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    trained = [p for p in module.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, [x, *trained], tangent)], saved


def step(fn: Callable[..., Tensor], module: nn.Module, x: Tensor, *rest: Tensor) -> list[Tensor]:
    """A step's result and gradients."""
    return saving_step(fn, module, x, *rest)[0]


def compiled(module: Callable[..., Any], policy: FusionPolicy, **settings: Any) -> Any:
    """A module compiled with a policy, anew; settings are torch.compile's."""
    torch._dynamo.reset()
    return torch.compile(module, backend="fused", options={"policy": policy}, **settings)
