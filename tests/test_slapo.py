"""Slapo's names: values, gradients, and each upstream defect beside what is done here."""

import pytest
import torch
import torch.nn.functional as F
from harness import GELU_TANH as gelu_tanh
from harness import raises
from torch import nn

from torch_fused_ops import slapo


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_functions():
    x, bias = randn(3, 2, 8).transpose(0, 1).requires_grad_(), randn(8, seed=1).requires_grad_()
    for fn in (slapo.BiasGeLUFunction.apply, slapo.bias_new_gelu):
        got, expected = fn(x, bias), gelu_tanh(x + bias)
        close(got, expected)
        close(*(torch.autograd.grad(o.sin().sum(), (x, bias)) for o in (got, expected)))
    close(slapo.new_gelu(x), gelu_tanh(x))
    close(slapo.BiasGeLUFunction.bias_gelu(bias, x), gelu_tanh(x + bias))
    g = randn(2, 3, 8, seed=2)
    close(slapo.BiasGeLUFunction.bias_gelu_back(g, bias, x), torch.autograd.grad(gelu_tanh(x + bias), x, g)[0])


def test_bias_dropout():
    x, bias = torch.ones(512, 8), torch.ones(8)
    out = slapo.bias_dropout(x, bias, 0.25)
    assert out.unique().tolist() == [0.0, pytest.approx(2 / 0.75)]
    assert torch.equal(slapo.bias_dropout(x, bias, 0.25, training=False), x + bias)
    assert torch.equal(slapo.bias_dropout(x, bias, p=0.0), x + bias)
    slapo.bias_dropout(x, bias, 0.25, True, inplace=True)
    assert torch.equal(x, torch.ones(512, 8))


@pytest.mark.parametrize(
    ("act", "plain"), [("gelu", gelu_tanh), ("gelu_new", gelu_tanh), ("gelu_erf", F.gelu), ("relu", F.relu)]
)
def test_linear_with_act(act, plain):
    module, x = slapo.LinearWithAct(6, 8, act_fn=act, sync_fn=lambda x: 2 * x), randn(3, 6)
    close(module(x), plain(2 * F.linear(x, module.weight) + module.bias))
    assert f"act_fn={act}" in repr(module)


def test_linear_with_sync_func():
    def double(x):
        return 2 * x

    x = randn(3, 6)
    for bias in (True, False):
        module = slapo.LinearWithSyncFunc(6, 8, bias, sync_fn=double)
        close(module(x), 2 * F.linear(x, module.weight) + (module.bias if bias else 0))
        assert "sync_fn=double" in repr(module)
    plain = slapo.LinearWithSyncFunc(6, 8, dtype=torch.float64)
    close(plain(x.double()), F.linear(x.double(), plain.weight, plain.bias))


def test_dropout_ends_with_training():
    """Upstream binds ``training`` when the module is made, so eval() changes nothing."""
    module, x = slapo.LinearWithDropout(6, 8, p=0.5), randn(64, 6)
    assert 0.3 < (module(x) == 0).float().mean() < 0.7
    module.eval()
    close(module(x), F.linear(x, module.weight, module.bias))


def test_fused_mlp_uses_the_activation_it_is_told():
    """Upstream hands orig_act to its linear layer as ``bias``, and computes GELU whatever it says."""
    x = randn(3, 4, 6)
    for act, plain in (("relu", F.relu), ("gelu", gelu_tanh), ("gelu_erf", F.gelu)):
        mlp = slapo.FusedMLP(6, 24, act, 0.1).eval()
        close(mlp(x), mlp.fc_out(plain(F.linear(x, mlp.fc_in.weight, mlp.fc_in.bias))))
        reference = nn.ModuleDict({"fc_in": nn.Linear(6, 24), "fc_out": nn.Linear(24, 6)})
        mlp.load_state_dict(reference.state_dict())  # upstream's keys


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", *(pytest.param(b, marks=pytest.mark.slow) for b in ("inductor", "fused"))]
)
def test_fused_mlp_compiles_whole(backend):
    mlp, x = slapo.FusedMLP(6, 24, "gelu", 0.0), randn(3, 4, 6).requires_grad_()
    mlp.fc_in.weight.requires_grad_(False)
    wanted = [x, *(p for p in mlp.parameters() if p.requires_grad)]
    got, expected = torch.compile(mlp, backend=backend, fullgraph=True)(x), mlp(x)
    close(got, expected)
    close(*(torch.autograd.grad(o.sin().sum(), wanted) for o in (got, expected)))


def test_mixed_dtypes():
    x, bias = randn(3, 8).bfloat16(), randn(8, seed=1)
    for training in (True, False):
        assert slapo.bias_dropout(x, bias, 0.5, training).dtype == torch.bfloat16
    assert slapo.bias_new_gelu(x, bias).dtype == torch.bfloat16


def test_errors():
    for cls in (slapo.LinearWithAct, slapo.LinearWithDropout):
        raises(ValueError, f"bias=False is not accepted by {cls.__name__}", cls, 6, 8, bias=False)
    with pytest.raises(NotImplementedError, match=r"act_fn='mish' is not known; accepted: .*gelu_new"):
        slapo.LinearWithAct(6, 8, act_fn="mish")


def test_documented():
    assert all(getattr(slapo, name).__doc__ for name in slapo.__all__)
