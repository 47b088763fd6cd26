"""The ways to run a function that are compared: PyTorch's own, and ours."""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from torch_fused_ops.policy import MEMORY, FusionPolicy

from .harness import Trial, saved_bytes

AUTOTUNE = "max-autotune-no-cudagraphs"
Function = Callable[..., Any]


def fresh(fn: Function) -> Function:
    """The same function with a code object of its own: Dynamo's cache, which is one per code object, is then its own
    too, and a call of one way does not look through what the others compiled."""
    if not isinstance(fn, types.FunctionType):
        return fresh(lambda *args: fn(*args))
    copied = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copied.__kwdefaults__ = fn.__kwdefaults__
    return copied


def budgeted(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Inductor under upstream's memory budget: a backend, so that the setting holds for this compilation alone."""
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(activation_memory_budget=0.99):
        compiled: Any = compile_fx(gm, inputs)
    return compiled


def ours(memory: str, mode: str = "default", **more: Any) -> Callable[..., Function]:
    """``backend="fused"`` in a mode of torch.compile; strict, so that it is never plain torch.compile.

    ``more``: of the policy.
    """

    def compiled(fn: Function, **settings: Any) -> Function:
        import torch._inductor as inductor

        options: dict[str, Any] = {"policy": FusionPolicy(memory=memory, strict=True, **more)}
        options.update(inductor.list_mode_options(mode))
        return torch.compile(fresh(fn), backend="fused", options=options, **settings)

    return compiled


# Eager PyTorch first, whose error says what is to be expected; then what matters most: a time limit cuts the last.
COMPILED: dict[str, Callable[..., Function]] = {
    "eager": lambda fn, **settings: fn,
    "compile": lambda fn, **settings: torch.compile(fresh(fn), **settings),
    "fused-free": ours("free"),
    "budget": lambda fn, **settings: torch.compile(fresh(fn), backend=budgeted, **settings),
    "fused-off": ours("off"),
    **{f"fused-{memory}": ours(memory) for memory in MEMORY if memory not in ("free", "off", "tiled")},
    "autotune": lambda fn, **settings: torch.compile(fresh(fn), mode=AUTOTUNE, **settings),
    "fused-autotune": ours("free", AUTOTUNE),
    "fused-library": ours("free", epilogues="library"),
}
TRAINING = tuple(name for name in COMPILED if not name.endswith(("autotune", "library")))
INFERENCE = ("eager", "compile", "fused-free")  # nothing is kept for backward: budgets and memory= change nothing
LIBRARY = ("fused-library",)  # cuBLASLt's epilogues, unmeasured: on GPUs
TUNED = ("autotune", "fused-autotune")
OURS = ("fused-free", *(name for name in COMPILED if name.startswith("fused-") and name != "fused-free"), "operators")
LOOSE = {"fused-fp8": 0.15}  # what is kept in 8 bits is rebuilt to a few per cent


def inference(way: str, fn: Function, sets: Sequence[Sequence[Tensor]], **settings: Any) -> Callable[[], Trial]:
    """A way of calling ``fn`` without gradients."""

    def make() -> Trial:
        compiled = COMPILED[way](fn, **settings)

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            with torch.no_grad():
                return [compiled(*inputs)]

        return Trial(run, lambda i: sets[i])

    return make


def training(
    way: str | Function,
    fn: Function,
    sets: Sequence[Sequence[Tensor]],
    tangents: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    **settings: Any,
) -> Callable[[], Trial]:
    """A way of a training step of ``fn``: forward, and backward to all floating-point inputs and the parameters.

    Args:
        way: a name of ``COMPILED``, or what makes something callable of ``fn``.
        fn: of an input set; returns a tensor.
        sets: the inputs. Those that are also in ``parameters`` do not count as saved.
        tangents: the gradient that comes in, for each set; None for a loss.
        parameters: what lives anyway; gradients are taken of them too.
        settings: for torch.compile.
    """

    def make() -> Trial:
        compiled = (COMPILED[way] if isinstance(way, str) else way)(fn, **settings)
        known = {id(p) for p in parameters}
        wanted = [
            [
                *(t for t in inputs if t.requires_grad and id(t) not in known),
                *(p for p in parameters if p.requires_grad),
            ]
            for inputs in sets
        ]

        def run(i: int) -> list[Tensor]:
            out = compiled(*sets[i])
            return [out.detach(), *torch.autograd.grad(out, wanted[i], tangents[i])]

        return Trial(run, lambda i: i, lambda: saved_bytes(lambda: compiled(*sets[0]), parameters))

    return make


def truth(
    fn: Function, inputs: Sequence[Tensor], tangent: Tensor | None, parameters: Sequence[Tensor]
) -> Callable[[], list[Tensor]]:
    """The results of ``training`` in float64, of a function whose parameters are among its inputs."""

    def compute() -> list[Tensor]:
        doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
        known = {id(p) for p in parameters}
        pairs = list(zip(inputs, doubles, strict=True))
        wanted = [d for t, d in pairs if t.requires_grad and id(t) not in known]
        wanted += [d for p in parameters for t, d in pairs if t is p and t.requires_grad]
        out = fn(*doubles)
        return [out.detach(), *torch.autograd.grad(out, wanted, None if tangent is None else tangent.double())]

    return compute
