"""Slapo's names: values, gradients, and each upstream defect compared with our behavior."""

import pytest
import torch
from harness import GELU_TANH as gelu_tanh

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


def test_bias_dropout():
    x, bias = torch.ones(512, 8), torch.ones(8)
    out = slapo.bias_dropout(x, bias, 0.25)
    assert out.unique().tolist() == [0.0, pytest.approx(2 / 0.75)]
    assert torch.equal(slapo.bias_dropout(x, bias, 0.25, training=False), x + bias)
    assert torch.equal(slapo.bias_dropout(x, bias, p=0.0), x + bias)
    slapo.bias_dropout(x, bias, 0.25, True, inplace=True)
    assert torch.equal(x, torch.ones(512, 8))
