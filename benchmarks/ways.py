"""Variants of a function, compiled by PyTorch or by this library."""

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
    """Copy a function with its code object. Dynamo has a cache per code object, so variants do not share a cache."""
    if not isinstance(fn, types.FunctionType):
        return fresh(lambda *args: fn(*args))
    copied = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copied.__kwdefaults__ = fn.__kwdefaults__
    return copied


def budgeted(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile with PyTorch's memory budget. As a backend, the setting affects only this compilation."""
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(activation_memory_budget=0.99):
        compiled: Any = compile_fx(gm, inputs)
    return compiled


def ours(memory: str, mode: str = "default", **fields: Any) -> Callable[..., Function]:
    """Return a compiler: ``backend="fused"`` in a mode of torch.compile, with the given policy fields.

    The policy is strict, so that nothing falls back to plain torch.compile.
    """

    def compiled(fn: Function, **settings: Any) -> Function:
        import torch._inductor as inductor

        policy = FusionPolicy(memory=memory, strict=True, **fields)  # type: ignore[arg-type]
        options: dict[str, Any] = {"policy": policy}
        options.update(inductor.list_mode_options(mode))
        return torch.compile(fresh(fn), backend="fused", options=options, **settings)

    return compiled


def by_torchao(module: nn.Module, recipe: str) -> nn.Module:
    """Copy a module with its MLPs' linear layers as torchao's float8 layers. The copy shares the parameters.

    Args:
        module: an MLP of ``models``, or a module with such MLPs.
        recipe: one of ``TORCHAO``.

    Raises:
        Unavailable: torchao cannot be imported, or a layer's sizes are not multiples of 16, which its GEMMs need.
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
    """Return the linear layers of a module's MLPs by path. These are the layers that ``gemm=`` applies to."""
    return {
        f"{path}.{name}".lstrip("."): layer
        for path, mlp in module.named_modules()
        if isinstance(mlp, (models.GELUMLP, models.SwiGLUMLP))
        for name, layer in mlp.named_children()
        if isinstance(layer, nn.Linear)
    }


def need_multiples(layers: Mapping[str, nn.Linear], multiple: int) -> None:
    """Raise Unavailable if a layer's sizes are not multiples of a number."""
    for name, layer in layers.items():
        sizes = tuple(layer.weight.shape)
        if any(size % multiple for size in sizes):
            raise Unavailable(f"float8 needs multiples of {multiple}: the weight of {name} is {sizes}")


def float8(recipe: str) -> Callable[..., Function]:
    """Return a compiler with a float8 recipe. It raises Unavailable if sizes or the device exclude the recipe."""

    def compiled(fn: nn.Module, **settings: Any) -> Function:
        from torch_fused_ops.lowerings.recognize.gemms import no_scaled_products

        layers, scaling = mlp_layers(fn), RECIPES[recipe].scaling
        need_multiples(layers, scaling.multiple)
        for device in {layer.weight.device for layer in layers.values()}:
            if without := no_scaled_products(device, scaling):
                raise Unavailable(f"no float8 GEMMs with a scale for each {scaling.noun} on {without}")
        return ours("free", gemm=recipe)(fn, **settings)

    return compiled


def torchao(recipe: str) -> Callable[..., Function]:
    """Return ``torch.compile`` of a module converted by torchao (``by_torchao``)."""

    def compiled(fn: nn.Module, **settings: Any) -> Function:
        return torch.compile(fresh(by_torchao(fn, recipe)), **settings)

    return compiled


# Eager PyTorch comes first: its error sets the tolerance. The most important follow: a time limit drops the last ones.
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
FLOAT8 = tuple(name for name in COMPILED if name.startswith(("gemm-", "torchao-")))
NAMED_ONLY = ("autotune", "fused-autotune", *FLOAT8)
OURS = (
    "fused-free",
    *(name for name in COMPILED if name.startswith(("fused-", "gemm-")) and name != "fused-free"),
)
# 8-bit storage has errors of a few per cent. A float8 GEMM's operand has an error of 2.6 % in the 2-norm (e4m3; in
# torchao's tensorwise recipe, e5m2 gradients have 5 %). On CPUs, MLPs and models with 1 to 12 layers had errors of at
# most 0.092, and 0.129 with tensorwise. The error grows little with depth.
LOOSE = {"fused-fp8": 0.15, **dict.fromkeys(FLOAT8, 0.12), "torchao-tensorwise": 0.16}


def training(
    way: str,
    module: nn.Module,
    sets: Sequence[Sequence[Tensor]],
    tangents: Sequence[Tensor | None],
    **settings: Any,
) -> Callable[[], Trial]:
    """Return a function that compiles a module's training step: forward, and backward to inputs and parameters.

    Args:
        way: a name of ``COMPILED``.
        module: called with an input set; returns a tensor.
        sets: the input sets.
        tangents: for each set, the output's gradient; None for a loss.
        settings: passed to torch.compile.
    """

    def make() -> Trial:
        compiled = COMPILED[way](module, **settings)
        parameters = list(module.parameters())
        leaves = [[*(t for t in inputs if t.requires_grad), *parameters] for inputs in sets]

        def run(i: int) -> list[Tensor]:
            out = compiled(*sets[i])
            return [out.detach(), *torch.autograd.grad(out, leaves[i], tangents[i])]

        return Trial(run, lambda i: i, lambda: saved_bytes(lambda: compiled(*sets[0]), parameters))

    return make
