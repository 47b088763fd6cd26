"""Saved-tensor hooks (of checkpoints, offloaders, users) around an MLP that has a memory level."""

import functools
import itertools

import pytest
import torch
from harness import Net, output
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from torch_fused_ops.nn import MLP, FusedMLP, MLPConfig

ROWS, WIDTH, FFN = 64, 8, 128
LEVELS = ("off", "free", "fp8", "input")

MODULES = {
    "FusedMLP": lambda memory: FusedMLP(WIDTH, FFN, memory=memory),
    "gated": lambda memory: FusedMLP(WIDTH, FFN, "silu", gated=True, memory=memory),
    "relu": lambda memory: FusedMLP(WIDTH, FFN, "relu", memory=memory),
    "MLP": lambda memory: Net(
        lambda s, x: output(s.mlp, x), mlp=MLP(MLPConfig(WIDTH, ffn_hidden_size=FFN, memory=memory))
    ),
}


def gradients(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), [x, *module.parameters()]))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("case", itertools.product(MODULES, LEVELS), ids=str)
def test_two_modules_in_one_checkpoint_have_right_gradients(case: tuple[str, str]) -> None:
    name, memory = case
    module, x = MODULES[name](memory), torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = gradients(module, x, module(module(x)))
    y = checkpoint(lambda x: module(module(x)), x, use_reentrant=False)
    torch.testing.assert_close(gradients(module, x, y), expected, rtol=1e-5, atol=1e-5)


def test_hooks_get_float8() -> None:
    """Hooks around a module, here ``save_on_cpu``, get the tensors that "fp8" saves instead of h."""
    module, x = FusedMLP(WIDTH, FFN, memory="fp8"), torch.randn(ROWS, WIDTH, requires_grad=True)
    expected, seen = gradients(module, x, module(x)), list[tuple[torch.dtype, torch.Size]]()
    around = save_on_cpu()
    pack = around.pack_hook
    note = functools.wraps(pack)(lambda t: seen.append((t.dtype, t.shape)) or pack(t))
    with saved_tensors_hooks(note, around.unpack_hook):
        y = module(x)
    assert (torch.float8_e4m3fn, (ROWS, FFN)) in seen and (torch.float32, (ROWS, FFN)) not in seen
    for a, b in zip(gradients(module, x, y), expected, strict=True):
        assert torch.equal(a, b)
