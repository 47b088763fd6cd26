"""Float8 GEMMs of experts: operands, gradients, and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import raises
from test_float8 import product_bound
from torch import Tensor

from torch_fused_ops.families.float8.recipes import Block

if not hasattr(F, "grouped_mm"):
    pytest.skip("this torch has no F.grouped_mm", allow_module_level=True)

fused = torch.ops.fused
BF16 = torch.bfloat16
COUNTS = (5, 0, 1, 10)
EXPERTS, IN, OUT = len(COUNTS), 48, 80
ROW = Block(1, None)


def make_case(counts: tuple[int, ...] = COUNTS, transposed: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return input, weight (experts, in, out), ends and the result's gradient. ``transposed``: as a view."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), IN, generator=g) * torch.exp2(torch.randint(-9, 9, (sum(counts), 1), generator=g))
    w = torch.randn(len(counts), OUT, IN, generator=g) * torch.exp2(
        torch.randint(-4, 4, (len(counts), OUT, 1), generator=g)
    )
    weight = w.to(BF16).transpose(1, 2)
    ends = torch.tensor(counts).cumsum(0).int()
    grad = torch.randn(sum(counts), OUT, generator=g).to(BF16)
    return x.to(BF16).requires_grad_(), (weight if transposed else weight.contiguous()).requires_grad_(), ends, grad


@pytest.mark.parametrize("transposed", (True, False))
def test_products_and_gradients_are_within_their_bounds(transposed: bool) -> None:
    x, w, ends, grad = make_case(transposed=transposed)
    y = fused.grouped_linear_fp8(x, w, ends)
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    assert [t.dtype for t in (y, dx, dw)] == [BF16] * 3 and dw.stride() == w.stride()
    start = 0
    for e, end in enumerate(ends.tolist()):
        rows, start = slice(start, end), end
        x_e, g, w_e = x.detach()[rows], grad[rows], w.detach()[e]
        exact = x_e.double() @ w_e.double(), g.double() @ w_e.double().t(), x_e.double().t() @ g.double()
        size = x_e.double().abs() @ w_e.double().abs(), g.double().abs() @ w_e.double().abs().t()
        bounds = product_bound(x_e, w_e.t(), ROW, ROW), product_bound(g, w_e, ROW, Block(None, None))
        for actual, expected, bound, magnitude in zip((y[rows], dx[rows]), exact, bounds, size, strict=False):
            error = (actual.double() - expected).abs()
            assert (error <= bound + 2 * torch.finfo(BF16).eps * magnitude).all()
            assert end == rows.start or error.max() > 1e-3 * expected.abs().max(), "not rounded"
        torch.testing.assert_close(dw[e].double(), exact[2], rtol=0.02, atol=0.02 * float(exact[2].abs().max() + 1))


def test_an_expert_s_scale_is_its_own() -> None:
    _, w, _, _ = make_case()
    rows = w.transpose(1, 2).reshape(EXPERTS * OUT, IN)
    scales = fused.quantize(rows, 1, IN)[1].view(EXPERTS, 1, OUT)
    largest = scales.amax(2, keepdim=True)
    values = fused.quantize_by(w, largest)
    assert values.is_contiguous()
    for e in range(EXPERTS):
        codes, scale = fused.quantize(w[e], IN, OUT)
        assert torch.equal(codes.view(torch.uint8), values[e].view(torch.uint8)) and torch.equal(scale, largest[e])


def test_no_rows() -> None:
    x, w, ends, grad = make_case((0, 0))
    y = fused.grouped_linear_fp8(x, w, ends)
    assert y.shape == (0, OUT)
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    assert dx.shape == x.shape and (dw == 0).all()


@pytest.mark.parametrize(
    "lie",
    [lambda x: x.t().contiguous().t(), lambda x: F.pad(x, (0, 1))[:, :IN], lambda x: x[:1].expand(x.shape)],
    ids=("columns", "odd rows", "one row"),
)
def test_rows_may_lie_anyhow(lie: Callable[[Tensor], Tensor]) -> None:
    x, w, ends, grad = make_case()
    laid = lie(x.detach()).requires_grad_()
    dense = laid.detach().contiguous().requires_grad_()
    of_laid, of_dense = (
        torch.autograd.grad(fused.grouped_linear_fp8(operand, w, ends), (operand, w), grad) for operand in (laid, dense)
    )
    assert all(map(torch.equal, of_laid, of_dense))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, w, e: (x, w[:, :, :72], e), r"weight has shape \(4, 48, 72\); accepted: .* multiples of 16"),
        (lambda x, w, e: (x[:, :32], w, e), r"input has shape \(16, 32\); accepted: \(…, 48\)"),
        (lambda x, w, e: (x, w, e[:3]), r"ends has shape \(3,\); accepted: \(4,\), one for each expert"),
        (lambda x, w, e: (x, w, e.long()), "ends.* torch.int64"),
        (lambda x, w, e: (x.float(), w, e), "input.dtype=torch.float32 is not accepted: it must be torch.bfloat16"),
        (lambda x, w, e: (x, w, e, "fp8"), "recipe='fp8' is not known; accepted: fp8-rowwise"),
    ],
)
def test_errors_name_the_argument(call: Callable[..., Any], message: str) -> None:
    x, w, ends, _ = make_case()
    raises((ValueError, TypeError), message, fused.grouped_linear_fp8, *call(x.detach(), w.detach(), ends))


def test_second_derivatives_raise() -> None:
    x, w, ends, _ = make_case()
    y = fused.grouped_linear_fp8(x, w, ends)
    with pytest.raises(RuntimeError, match="a second derivative through fused::grouped_linear_fp8 is not accepted"):
        torch.autograd.grad(y.float().square().sum(), x, create_graph=True)


def test_opcheck() -> None:
    x, w, ends, _ = make_case()
    stored = fused.quantize(x.detach(), 1, IN)
    rows = w.detach().transpose(1, 2).reshape(EXPERTS * OUT, IN)
    values, scales = fused.quantize(rows, 1, IN)
    args = (*stored, values.view(EXPERTS, OUT, IN), scales.view(EXPERTS, 1, OUT), ends, BF16)
    torch.library.opcheck(fused.scaled_grouped_mm.default, args, test_utils=["test_faketensor"])
    torch.library.opcheck(fused.quantize_by.default, (w.detach(), scales.view(EXPERTS, 1, OUT).amax(2, keepdim=True)))
