"""The ways to run a function that are compared: PyTorch's own, and ours."""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from torch_fused_ops.benchmarks.variants import AUTOTUNE, TORCHAO
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.policy import GEMM, MEMORY, FusionPolicy

from . import models
from .harness import Trial, Unavailable, saved_bytes

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

        policy = FusionPolicy(memory=memory, strict=True, **more)  # type: ignore[arg-type]
        options: dict[str, Any] = {"policy": policy}
        options.update(inductor.list_mode_options(mode))
        return torch.compile(fresh(fn), backend="fused", options=options, **settings)

    return compiled


# torchao's recipes, as it calls them.


def by_torchao(module: nn.Module, recipe: str) -> nn.Module:
    """A copy of a module, with the same parameters, whose MLPs' linear layers multiply by a recipe of torchao's.

    Args:
        module: holds MLPs of ``models``, or is one.
        recipe: of ``TORCHAO``.

    Raises:
        Unavailable: torchao cannot be imported, or a layer's sizes are no multiples of 16, which its products need.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as e:
        raise Unavailable(f"torchao cannot be imported: {e}") from None
    layers = mlp_layers(module)
    need_multiples(layers, 16)
    copied = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    return convert_to_float8_training(
        copied,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda _, name: name in layers,
    )


def mlp_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the MLPs in a module, by their paths: what ``gemm=`` is about."""
    return {
        f"{path}.{name}".lstrip("."): layer
        for path, mlp in module.named_modules()
        if isinstance(mlp, (models.GELUMLP, models.SwiGLUMLP))
        for name, layer in mlp.named_children()
        if isinstance(layer, nn.Linear)
    }


def need_multiples(layers: Mapping[str, nn.Linear], of: int) -> None:
    """Unavailable where a layer's sizes are no multiples of a number."""
    for name, layer in layers.items():
        sizes = tuple(layer.weight.shape)
        if any(size % of for size in sizes):
            raise Unavailable(f"float8 needs multiples of {of}: the weight of {name} is {sizes}")


def float8(recipe: str) -> Callable[..., Function]:
    """``backend="fused"`` with products by a recipe of ours; Unavailable where sizes or the device have none."""

    def compiled(fn: nn.Module, **settings: Any) -> Function:
        from torch_fused_ops.lowerings.recognize.gemms import no_scaled_products

        layers, scaling = mlp_layers(fn), RECIPES[recipe].scaling
        need_multiples(layers, scaling.multiple)
        for device in {layer.weight.device for layer in layers.values()}:
            if without := no_scaled_products(device, scaling):
                raise Unavailable(f"no products in float8 with a scale for each {scaling.noun} on {without}")
        return ours("free", gemm=recipe)(fn, **settings)

    return compiled


def torchao(recipe: str) -> Callable[..., Function]:
    """``torch.compile`` of a copy whose MLPs' linear layers are torchao's (``by_torchao``)."""

    def compiled(fn: nn.Module, **settings: Any) -> Function:
        return torch.compile(fresh(by_torchao(fn, recipe)), **settings)

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
    **{f"gemm-{recipe}": float8(recipe) for recipe in GEMM if recipe != "bf16"},
    **{f"torchao-{recipe.replace('_', '-')}": torchao(recipe) for recipe in TORCHAO},
}
FLOAT8 = tuple(name for name in COMPILED if name.startswith(("gemm-", "torchao-")))  # only where they are named
TRAINING = tuple(name for name in COMPILED if not name.endswith("autotune") and name not in FLOAT8)
INFERENCE = ("eager", "compile", "fused-free")  # nothing is kept for backward: budgets and memory= change nothing
TUNED = ("autotune", "fused-autotune")
OURS = (
    "fused-free",
    *(name for name in COMPILED if name.startswith(("fused-", "gemm-")) and name != "fused-free"),
    "operators",
)
# What is kept in 8 bits is rebuilt to a few per cent. Of products in float8 each operand is off by 2.6 % in the 2-norm
# (e4m3; gradients in e5m2, torchao's tensorwise, by 5 %). Measured on CPUs, of MLPs and of models with 1 to 12 layers:
# 0.092 at most, and 0.129 tensorwise; it grows little with depth.
LOOSE = {"fused-fp8": 0.15, **dict.fromkeys(FLOAT8, 0.12), "torchao-tensorwise": 0.16}


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
