"""memory="tiled" in eager mode: FusedMLP and MLP compute and keep what they do with "input", by tiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Calls, Net, output, raises, saving, step
from torch import Tensor, nn

from torch_fused_ops import nn as fnn

HIDDEN, FFN, ROWS = 8, 16, (2, 25)


def megatron(memory: str, **config: Any) -> nn.Module:
    return fnn.MLP(fnn.MLPConfig(HIDDEN, FFN, memory=memory, params_dtype=torch.double, **config))


MODULES: dict[str, Callable[[str], nn.Module]] = {
    "gelu": lambda memory: fnn.FusedMLP(HIDDEN, FFN, memory=memory, dtype=torch.double),
    "relu": lambda memory: fnn.FusedMLP(HIDDEN, FFN, "relu", memory=memory, dtype=torch.double),
    "swiglu": lambda memory: fnn.FusedMLP(HIDDEN, FFN, "silu", gated=True, memory=memory, dtype=torch.double),
    "megatron": lambda memory: Net(
        lambda s, x: output(s.mlp, x), mlp=megatron(memory, gated_linear_unit=True, activation_func=F.silu)
    ),
}


def figures(module: nn.Module, x: Tensor) -> tuple[int, int]:
    """Of a step: the most elements that any operator's result has, and how many matrix products there are."""
    with Calls() as calls:
        step(module, module, x)
    products = [func for func, *_ in calls.made if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)]
    return max(result.numel() for *_, result in calls.made if isinstance(result, Tensor)), len(products)


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    one, two = MODULES[name]("tiled:3"), MODULES[name]("off")
    two.load_state_dict(one.state_dict())
    return one, two


@pytest.mark.parametrize("name", MODULES)
def test_a_step_is_the_plain_one(name: str) -> None:
    tiled, plain = pair(name)
    x = torch.randn(*ROWS, HIDDEN, dtype=torch.double)
    wanted = step(plain, plain, x)
    for one in (x, x.mT.contiguous().mT):
        torch.testing.assert_close(step(tiled, tiled, one), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODULES)
def test_the_hidden_layer_is_never_whole(name: str) -> None:
    tiled, plain = pair(name)
    x = torch.randn(600, HIDDEN, dtype=torch.double)
    (in_tiles, products), (whole, fewer) = figures(tiled, x), figures(plain, x)
    assert in_tiles < 600 * FFN <= whole and products > fewer


@pytest.mark.parametrize("name", MODULES)
def test_its_input_is_all_that_is_kept(name: str) -> None:
    tiled, _ = pair(name)
    x = torch.randn(600, HIDDEN, dtype=torch.double, requires_grad=True)
    assert saving(lambda: tiled(x), tiled.parameters())[1] == x.numel() * 8


@pytest.mark.parametrize("name", MODULES)
def test_hooks_of_a_parameter_run_once(name: str) -> None:
    tiled, _ = pair(name)
    calls: list[Tensor] = []
    for p in tiled.parameters():
        p.register_post_accumulate_grad_hook(calls.append)
    tiled(torch.randn(50, HIDDEN, dtype=torch.double)).sum().backward()
    assert len(calls) == len(list(tiled.parameters()))


@pytest.mark.parametrize("where", ("fc1", "fc2"))
def test_a_linear_layer_with_a_hook_runs_once(where: str) -> None:
    module = fnn.FusedMLP(HIDDEN, FFN, memory="tiled:3", dtype=torch.double)
    calls: list[Any] = []
    getattr(module, where).register_forward_hook(lambda *args: calls.append(args))
    step(module, module, torch.randn(50, HIDDEN, dtype=torch.double))
    assert len(calls) == 1


def test_delayed_gradients_and_token_scales_go_with_all_tokens() -> None:
    x, scale = torch.randn(50, HIDDEN, dtype=torch.double), torch.rand(50, dtype=torch.double)
    results = []
    for memory in ("tiled:3", "off"):
        torch.manual_seed(0)
        module = megatron(memory, delay_wgrad_compute=True)
        y, _ = module(x.requires_grad_(), per_token_scale=scale)
        y.sum().backward()
        module.backward_dw()
        results.append([y.detach(), *(p.grad for p in module.parameters() if p.grad is not None)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_float8_products_in_tiles() -> None:
    """Blocks of float8 are of a row each: tiles change where those of weights' gradients begin."""
    one, two = (fnn.FusedMLP(128, 128, memory=m, gemm="fp8") for m in ("tiled:2", "input"))
    two.load_state_dict(one.state_dict())
    x = torch.randn(512, 128)
    for a, b in zip(step(one, one, x), step(two, two, x), strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-3


@pytest.mark.parametrize("make", (lambda m: fnn.FusedMLP(8, 8, memory=m), megatron))
def test_what_is_no_level(make: Callable[[str], nn.Module]) -> None:
    raises(ValueError, "memory='tiled:1' is not known; accepted: off, free, fp8, input, tiled", make, "tiled:1")
    words, offloading = "memory='tiled:4': there is nothing to offload", {"cpu_offloading_activations": True}
    raises(ValueError, words, megatron, "tiled:4", cpu_offloading=True, **offloading)
