"""Tensors that eager mode saves for backward: ReLU's result, which the next linear saves anyway; else arguments."""

import pytest
import torch
import torch.nn.functional as F
from harness import saving

from torch_fused_ops import activations
from torch_fused_ops import functional as FF
from torch_fused_ops.operators.activation import bias_act

fused = torch.ops.fused


def mlp(act, dtype, width=32, ffn=128, tokens=64):
    g = torch.Generator().manual_seed(0)
    w, v = (torch.randn(*s, generator=g).to(dtype).requires_grad_() for s in ((ffn, width), (width, ffn)))
    x = torch.randn(tokens, width, generator=g).to(dtype).requires_grad_()
    b = torch.randn(ffn, generator=g).to(dtype).requires_grad_()
    return (lambda: F.linear(act(F.linear(x, w), b), v)), [x, w, v, b], tokens * ffn * dtype.itemsize


@pytest.mark.parametrize("name", activations.names())
def test_an_activation_whose_gradient_needs_only_the_result_saves_it(name):
    (fn, leaves, size) = mlp(lambda h, b: FF.bias_act(h, b, activation=name), torch.float32)
    _, saved = saving(fn, leaves)
    assert saved == (size if activations.get(name).gradient_from_output else 2 * size)


def test_sum_is_saved_if_the_result_has_less_information():
    """2⁻²⁰⁰ rounds to 0 in bfloat16, but its ReLU has gradient 1."""
    x, b = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True), torch.full((4,), 2.0**-200, dtype=torch.float64)
    assert not bias_act.keeps_result(x, b, None, "relu") and bias_act.keeps_result(x, b.bfloat16(), None, "relu")
    fused.bias_act(x, b, None, "relu").sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert not bias_act.keeps_result(x, None, torch.ones(2), "relu")  # the result is scaled


def test_the_smallest_sums_have_their_gradient():
    tiny = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    x = torch.tensor([[0.0, tiny, -tiny, 1.0, -0.0]], requires_grad=True)
    b = torch.tensor([tiny, -tiny, 0.0, -1.0 + 2**-24, -0.0], requires_grad=True)
    fused.bias_act(x, b, None, "relu").sum().backward()
    assert x.grad.tolist() == [[1, 0, 0, 1, 0]] and b.grad.tolist() == [1, 0, 0, 1, 0]


def test_a_frozen_input_with_a_bias_that_learns():
    x, b = torch.randn(16, 4), torch.randn(4, requires_grad=True)
    fused.bias_act(x, b, None, "relu").sum().backward()
    assert torch.equal(b.grad, (x + b > 0).sum(0).float())


def test_gradient_from_output_is_declared_correctly():
    """f'(f(x)) = f'(x) in every dtype for exactly the activations with ``gradient_from_output``."""
    x = torch.arange(-2000, 3501, dtype=torch.float64) / 500
    for name in activations.names():
        act = activations.get(name)
        results = [act.value(x).to(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
        derivatives = [act.derivative(result.double()) for result in results]
        if act.gradient_from_output:
            assert all(torch.equal(derivative, act.derivative(x)) for derivative in derivatives), name
        else:  # relu6's result rounds to 6, where its derivative is 0
            assert not all(torch.allclose(d, act.derivative(x), rtol=1e-3) for d in derivatives), name


# ---- the same in every run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["bias_act", "glu", "bias_glu"])
def test_two_runs_are_equal_to_the_last_bit(op, dtype):
    """Compare results and all gradients, sums included. Float8 storage is either used or not used in both runs."""
    g = torch.Generator().manual_seed(0)
    n = 512 if op == "bias_glu" else 256
    first = torch.randn(700, n, generator=g).to(dtype).requires_grad_()
    second = torch.randn(*((700, n) if op == "glu" else (n,)), generator=g).to(dtype).requires_grad_()
    scale = torch.randn(700, generator=g).to(dtype).requires_grad_()
    for memory in ("free", "fp8"):
        runs = []
        for _ in range(2):
            out = getattr(FF, op)(first, second, scale, activation="gelu", memory=memory)
            runs.append((out, *torch.autograd.grad(out, (first, second, scale), torch.cos(out.detach()))))
        for a, b in zip(*runs, strict=True):
            assert torch.equal(a, b)
