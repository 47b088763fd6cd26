"""Float8 linear layers: stored values, GEMMs, gradients, and errors."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Calls, raises, saved_by
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_fused_ops import functional as FF
from torch_fused_ops.families.float8 import formulas as float8
from torch_fused_ops.families.float8.recipes import BLOCK, MX_BLOCK, RECIPES, Block
from torch_fused_ops.operators import reference

fused = torch.ops.fused
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BLOCKS = (Block(1, BLOCK), Block(BLOCK, BLOCK), Block(1, None), Block(None, None), Block(1, MX_BLOCK))


def scale_of_each(x: Tensor, block: Block) -> Tensor:
    """Return the scale of each element in quantize's result."""
    rows, columns = block.sizes_in(x.shape)
    scales = float8.quantize(x, rows, columns)[1]
    scales = scales.t() if rows == 1 else scales
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:, : x.shape[1]]


def wide_matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers of many magnitudes. Each element is scaled by 2⁻¹⁵ to 2¹³, by its row and column."""
    spread = torch.exp2(torch.randint(-8, 8, (rows, 1)) + torch.randint(-7, 7, (1, columns)))
    return (torch.randn(rows, columns) * spread).to(dtype)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_values_are_off_by_at_most_half_a_step(block: Block, dtype: torch.dtype) -> None:
    x = wide_matrix(256, 384, dtype)
    rows, columns = block.sizes_in(x.shape)
    values, scales = fused.quantize(x, rows, columns)
    loaded = fused.dequantize(values, scales, rows, torch.float64)
    exact, scale = x.to(torch.float32).double(), scale_of_each(x, block).double()
    assert ((loaded - exact).abs() <= (2**-4 * exact.abs()).maximum(2**-10 * scale)).all()
    assert torch.equal(scale.log2(), scale.log2().round())
    # The scale is the smallest power of two for which no element exceeds 448.
    largest = exact.abs().reshape(256 // rows, rows, 384 // columns, columns).amax((1, 3))
    block_scales = (scales.t() if rows == 1 else scales).double()
    assert (largest <= 448 * block_scales).all() and (largest > 224 * block_scales).all()


@pytest.mark.parametrize("width", (MX_BLOCK, BLOCK, 272))  # blocks, which are rows, and a row of another width
def test_blocks_of_zeros_denormals_infinities_and_nans(width: int) -> None:
    rows = torch.zeros(7, width)
    rows[1] = 1e-40
    rows[2, 3], rows[3, 3], rows[4, 3], rows[5, 3], rows[6, 3] = math.inf, -math.inf, math.nan, 3e38, 448.0
    loaded = fused.dequantize(*fused.quantize(rows, 1, width), 1, torch.float64)
    assert (loaded[0] == 0).all()
    assert (loaded[1] - rows[1].double()).abs().max() <= 2.0**-136  # 2⁻¹⁰ of the least scale
    assert loaded[2:5].isnan().all()
    assert loaded[5, 3] == pytest.approx(3e38, rel=2**-4) and (loaded[5, 4:] == 0).all()
    assert loaded[6, 3] == 448
    assert fused.quantize(rows[6:], 1, width)[1].item() == 1


@pytest.mark.parametrize("block", (BLOCK, MX_BLOCK))
@pytest.mark.parametrize("shape", ((0, 128), (1, 1), (3, 0), (5, 200), (1, 128)))
def test_columns_are_filled_with_zeros(shape: tuple[int, int], block: int) -> None:
    x = torch.randn(shape)
    values, scales = fused.quantize(x, 1, block)
    width = -(-shape[1] // block) * block
    assert values.shape == (shape[0], width) and scales.shape == (width // block, shape[0])
    assert (values.float()[:, shape[1] :] == 0).all()
    assert values.is_contiguous() and scales.is_contiguous()


def test_any_strides_are_read() -> None:
    x = torch.randn(256, 384)
    for view in (x.t(), x[::2, 1:], x[:, :1].expand(256, 256), x.t()[:BLOCK]):
        for block in BLOCKS:
            sizes = block.sizes_in(view.shape)
            for a, b in zip(fused.quantize(view, *sizes), fused.quantize(view.contiguous(), *sizes), strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) and a.is_contiguous()


def test_blocks_of_32_are_requantised_in_these() -> None:
    x = wide_matrix(70, 160)
    values, scales = fused.requantize(*fused.quantize(x, 1, MX_BLOCK))
    once = fused.dequantize(*fused.quantize(x, 1, MX_BLOCK), 1, torch.float32)
    for actual, expected in zip((values, scales), fused.quantize(once.t(), 1, MX_BLOCK), strict=True):
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert values.shape == (160, 96) and scales.shape == (3, 160)


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.wgrad])
@pytest.mark.parametrize(
    ("dtype", "element"), [(torch.float16, 64000.0), (torch.bfloat16, 3.35e38), (torch.float32, 3.35e38)]
)
def test_values_beyond_the_largest_number_load_as_that_number(dtype: torch.dtype, element: float, recipe: str) -> None:
    """Float8 rounds up one element of a linear layer's input. The weight's gradient is finite and right."""
    x = torch.randn(BLOCK, BLOCK)
    x[3, 5] = element
    x, weight = x.to(dtype), (torch.randn(BLOCK, BLOCK) * 1e-4).to(dtype).requires_grad_()
    gradient = (torch.randn(BLOCK, BLOCK) * 1e-3).to(dtype)
    FF.linear_fp8(x, weight, recipe=recipe).backward(gradient)
    expected = gradient.double().t() @ x.double()
    assert weight.grad is not None and weight.grad.isfinite().all()
    assert (weight.grad.double() - expected)[:, 5].norm() < 0.08 * expected[:, 5].norm()
    for values, scales, rows in ((*fused.quantize(x, 1), 1), (*fused.requantize(*fused.quantize(x, 1)), BLOCK)):
        assert scales.isfinite().all() and fused.dequantize(values, scales, rows, dtype).isfinite().all()


@settings(max_examples=30, deadline=None)
@given(st.integers(-100, 100), st.integers(0, 2**31))
def test_requantizing_in_other_blocks_changes_only_the_smallest_numbers(exponent: int, seed: int) -> None:
    """Scales are powers of two, so e4m3 numbers do not change unless they become subnormal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BLOCK, BLOCK, generator=generator) * 2.0**exponent
    once = fused.dequantize(*fused.quantize(x, 1), 1, torch.float32)
    values, scales = fused.requantize(*fused.quantize(x, 1))
    twice = fused.dequantize(values, scales, BLOCK, torch.float32).t()
    small = once.abs() < 2**-6 * scales.item()
    assert torch.equal(once[~small], twice[~small])
    assert ((once - twice)[small].abs() <= 2**-10 * scales.item()).all()


@pytest.mark.parametrize("shape", ((1, 32), (130, 160), (256, 512), (5, 0), (0, 64)))
def test_scales_of_blocks_of_32_lie_in_tiles(shape: tuple[int, int]) -> None:
    """Scales have cuBLAS's "1D Block Scaling Factors Layout": 8 bits each, in tiles of 128 rows and 4 blocks."""
    x = wide_matrix(*shape)
    if x.numel():
        x[0, 0], x[-1, -1] = math.nan, 0.0
    scales = fused.quantize(x, 1, MX_BLOCK)[1]
    (rows, columns), tiles = shape, -(-shape[1] // (4 * MX_BLOCK))
    actual = float8.tiled(scales)
    assert actual.dtype == torch.uint8 and actual.numel() == -(-rows // 128) * tiles * 512
    e8m0, filled = actual.view(torch.float8_e8m0fnu).float(), set()
    for row in range(rows):
        for block in range(columns // MX_BLOCK):
            inside = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            place = (row // 128 * tiles + block // 4) * 512 + inside
            filled.add(place)
            torch.testing.assert_close(e8m0[place], scales[block, row], rtol=0, atol=0, equal_nan=True)
    assert len(filled) == scales.numel() and not any(actual[i] for i in range(actual.numel()) if i not in filled)


@pytest.mark.parametrize(("shape", "calls"), [((256, 512), 2), ((130, 512), 3)])
def test_tiles_take_few_launches_in_eager_mode(shape: tuple[int, int], calls: int) -> None:
    """The launches are a shift, a narrowing copy, and padding if rows or blocks do not fill tiles."""
    scales = fused.quantize(torch.randn(shape), 1, MX_BLOCK)[1]
    with Calls() as seen:
        float8.tiled(scales)
    aten = torch.ops.aten
    views = {aten.t.default, aten.view.default, aten.view.dtype, aten.permute.default, aten.detach.default}
    assert len([func for func, *_ in seen.made if func not in views]) == calls


def test_a_scale_that_is_known_gives_the_same_values() -> None:
    """A common scale is the largest of the rows' scales; callers may pass larger scales and NaN."""
    x = wide_matrix(48, 80)
    values, scales = fused.quantize(x, 1, 80)
    in_one_block, scale = fused.quantize(x, 48, 80)
    assert torch.equal(scale, scales.amax(1, keepdim=True))
    for known, expected in ((scales, values), (scale, in_one_block)):
        for operand in (x, x.t().contiguous().t()):
            actual = fused.quantize_by(operand, known)
            assert actual.is_contiguous() and torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert fused.dequantize(fused.quantize_by(x, scale * math.nan), scale * math.nan, 48, torch.float32).isnan().all()


def product_bound(a: Tensor, b: Tensor, a_block: Block, b_block: Block) -> Tensor:
    """Return the error bound of a · bᵀ. Each stored number's error is at most 2⁻⁴, or 2⁻¹⁰ of its scale."""

    def error(x: Tensor, block: Block) -> Tensor:
        return (2**-4 * x.abs()).maximum(2**-10 * scale_of_each(x, block).double())

    x, y = a.double(), b.double()
    ex, ey = error(x, a_block), error(y, b_block)
    return x.abs() @ ey.t() + ex @ y.abs().t() + ex @ ey.t()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_products_are_within_their_bound(block: Block, dtype: torch.dtype) -> None:
    a, b = torch.randn(70, 256), torch.randn(128, 256) / 16
    b[3, 5] = 100.0  # an outlier
    bias = torch.randn(128, dtype=dtype)
    of_a, (rows, columns) = Block(1, block.columns), block.sizes_in(b.shape)
    stored = fused.quantize(a, *of_a.sizes_in(a.shape)), fused.quantize(b, rows, columns)
    out = fused.scaled_mm(*stored[0], *stored[1], bias, rows, dtype)
    exact = a.double() @ b.double().t() + bias.double()
    rounding = 2 * torch.finfo(dtype).eps * (a.double().abs() @ b.double().abs().t() + bias.double().abs())
    assert out.dtype == dtype
    assert ((out.double() - exact).abs() <= product_bound(a, b, of_a, block) + rounding).all()


@pytest.mark.parametrize("tokens", (0, 1, 3, 128, 200))
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_within_the_bounds_of_their_products(tokens: int, recipe: str) -> None:
    scaling, wgrad = RECIPES[recipe]
    n, k = (128 + scaling.multiple, 256 + scaling.multiple)
    x = torch.randn(tokens, k, requires_grad=True)
    w, b = (torch.randn(n, k) / 16).requires_grad_(), torch.randn(n, requires_grad=True)
    grad = torch.randn(tokens, n)
    y = FF.linear_fp8(x, w, b, recipe=recipe)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), grad)
    wide = [t.detach().double() for t in (x, w, b)]
    g, (xd, wd, bd) = grad.double(), wide
    bounds = [
        product_bound(x.detach(), w.detach(), scaling.data, scaling.weight),
        product_bound(grad, w.detach().t(), scaling.data, scaling.weight_t),
    ]
    assert ((y.double() - xd @ wd.t() - bd).abs() <= bounds[0] + 1e-4).all()
    assert ((dx.double() - g @ wd).abs() <= bounds[1] + 1e-4).all()
    exact = g.t() @ xd
    if wgrad:  # x was rounded for the first GEMM, and is rounded again
        filled = -tokens % (scaling.data.columns or 1)
        padded = torch.nn.functional.pad(x.detach().t(), (0, filled))
        of_grad = torch.nn.functional.pad(grad.t(), (0, filled))
        bound = product_bound(of_grad, padded, scaling.data, scaling.weight) * 2
    else:
        bound = torch.zeros_like(exact)
    assert ((dw.double() - exact).abs() <= bound + 1e-4).all()
    torch.testing.assert_close(db, grad.sum(0))


def test_leading_axes_dtypes_and_what_needs_no_gradient() -> None:
    x = torch.randn(2, 3, 128, dtype=torch.bfloat16)
    w = torch.randn(256, 128, requires_grad=True)
    y = FF.linear_fp8(x, w, dtype=torch.bfloat16)
    assert y.shape == (2, 3, 256) and y.dtype == torch.bfloat16 and y.is_contiguous()
    y.sum().backward()
    assert w.grad is not None and w.grad.dtype == torch.float32
    frozen = FF.linear_fp8(x.requires_grad_(), w.detach())
    frozen.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def test_saved_input_has_one_byte_per_element() -> None:
    x, w = torch.randn(256, 128, requires_grad=True), torch.randn(384, 128, requires_grad=True)
    saved: dict[str, int] = {}
    for recipe in RECIPES:
        _, tensors = saved_by(lambda recipe=recipe: FF.linear_fp8(x, w, recipe=recipe))
        saved[recipe] = sum(t.nbytes for t in tensors if t.data_ptr() != w.data_ptr())
    unquantized = 256 * 128 * 4
    assert saved == {
        **{"fp8": 256 * 128 + 256 * 4, "fp8-wgrad-bf16": unquantized, "fp8-rowwise": unquantized + 4},
        **{"mxfp8": 256 * 128 + 256 * 4 * 4, "mxfp8-wgrad-bf16": unquantized},
    }


RESULTS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("bias_act", lambda a: (a,), ("gelu",)),
    ("glu", lambda a: (a, a.flip(0)), ("silu", 1.0, 3.0)),
    ("bias_glu", lambda a: (torch.cat([a, a.flip(0)], 1),), ("silu", "swapped", 0.0, None)),
]


@pytest.mark.parametrize("columns", (BLOCK, MX_BLOCK))
@pytest.mark.parametrize("name, make, scalars", RESULTS)
def test_the_operators_of_one_pass_are_those_of_several(
    name: str, make: Any, scalars: tuple[Any, ...], columns: int
) -> None:
    grad, data = torch.randn(200, 256).bfloat16(), make(torch.randn(200, 256).bfloat16())
    actual = list(getattr(fused, f"{name}_backward_quantized")(grad, *data, *scalars, columns))
    absent = (None,) * {"bias_act": 2, "glu": 1, "bias_glu": 2}[name]
    mask = [True] * len(data) + [False] * len(absent)
    gradients = getattr(reference, f"{name}_backward")(grad, *data, *absent, *scalars, mask)
    result = getattr(reference, name)(*data, *absent, *scalars)
    expected = []
    for g in gradients[: len(data)]:
        sums = torch.stack([part.float().sum(0) for part in g.split(BLOCK)])
        expected += [*fused.quantize(g, 1, columns), *fused.quantize(g.t(), 1, columns), sums]
        for a, b in zip(fused.quantize_both(g, columns), expected[-5:-1], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    expected += fused.quantize(result.t(), *((1, columns) if columns == MX_BLOCK else (columns, columns)))
    for a, b in zip(actual, expected, strict=True):
        if a.dtype == float8.FP8:
            a, b = a.float(), b.float()
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-2 if a.shape == expected[4].shape else 0)  # summation order


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, w: FF.linear_fp8(x, w[:100]), r"weight has shape \(100, 128\); accepted: two axes, multiples of"),
        (lambda x, w: FF.linear_fp8(x[:, :64], w), r"input has shape \(4, 64\); accepted: \(…, 128\)"),
        (lambda x, w: FF.linear_fp8(x, w[:, :100]), r"input has shape \(4, 128\); accepted: \(…, 100\)"),
        (lambda x, w: FF.linear_fp8(x, w, w[0, :3]), r"bias has shape \(3,\); accepted: \(256,\)"),
        (lambda x, w: FF.linear_fp8(x.double(), w), r"input.dtype=torch.float64 is not accepted"),
        (lambda x, w: FF.linear_fp8(x, w, recipe="int8"), "recipe='int8' is not known; accepted: fp8, fp8-wgrad"),
        (lambda x, w: FF.linear_fp8(x[:, :100], w[:, :100], recipe="fp8-rowwise"), r"weight has shape \(256, 100\)"),
        (lambda x, w: fused.linear_fp8(x, w, None, None, "int8"), "recipe='int8' is not known"),
        (lambda x, w: FF.linear_fp8(x, w, dtype=torch.float64), "dtype=torch.float64 is not accepted"),
        (lambda x, w: FF.linear_fp8(x[:, :48], w[:, :48], recipe="mxfp8"), r"weight has shape \(256, 48\); accepted"),
    ],
)
def test_errors_name_the_argument(call: Callable[..., Any], message: str) -> None:
    raises((ValueError, TypeError), message, call, torch.randn(4, 128), torch.randn(256, 128))


def test_second_derivatives_and_transforms_raise() -> None:
    x, w = torch.randn(4, 128, requires_grad=True), torch.randn(128, 128, requires_grad=True)
    with pytest.raises(RuntimeError, match="a second derivative through fused::linear_fp8 is not accepted"):
        torch.autograd.grad(FF.linear_fp8(x, w).square().sum(), x, create_graph=True)
    raises(RuntimeError, "functorch transforms", torch.func.grad(lambda x: FF.linear_fp8(x, w).sum()), x)


def in_tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = fused.quantize(x, 1, MX_BLOCK)
    return values, float8.tiled(scales)


def test_products_by_tiled_scales_are_the_same() -> None:
    a, b, bias = wide_matrix(70, 160), wide_matrix(130, 160), torch.randn(130)
    a[3, 5] = math.nan
    expected = fused.scaled_mm(*fused.quantize(a, 1, MX_BLOCK), *fused.quantize(b, 1, MX_BLOCK), bias, 1, torch.float32)
    actual = fused.scaled_mm_tiled(*in_tiles(a), *in_tiles(b), bias, torch.float32)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert actual[3].isnan().all() and actual[4:].isfinite().all()


@pytest.mark.covering(every=3)
@pytest.mark.parametrize(
    "call",
    [
        ("quantize", lambda x: (x, 1)),
        ("quantize", lambda x: (x.t(), BLOCK)),
        ("quantize_both", lambda x: (x,)),
        pytest.param(("quantize_both", lambda x: (x, MX_BLOCK)), marks=pytest.mark.slow),
        pytest.param(("glu_backward_quantized", lambda x: (x, x, x, "silu", 0.0, None)), marks=pytest.mark.slow),
        ("glu_backward_quantized", lambda x: (x, x, x, "silu", 0.0, None, MX_BLOCK)),
        ("quantize", lambda x: (x, 1, 256)),
        ("quantize_by", lambda x: (x.t(), fused.quantize(x, *x.shape)[1])),
        ("linear_fp8", lambda x: (x, x.flip(1), None, None, "fp8")),
        ("linear_fp8", lambda x: (x, x.flip(1), None, None, "fp8-rowwise")),
        ("quantize", lambda x: (x.t(), 1, MX_BLOCK)),
        ("scaled_mm_tiled", lambda x: (*in_tiles(x), *in_tiles(x[:70]), None, torch.float32)),
    ],
)
def test_opcheck(call: tuple[str, Callable[[Tensor], tuple[Any, ...]]]) -> None:
    name, arguments = call
    args = arguments(torch.randn(128, 256))
    utils = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name in ("linear_fp8", "scaled_mm_tiled"):
        del utils[0]  # it multiplies float8 on the CPU to compare the inner operators' arguments
    torch.library.opcheck(getattr(fused, name).default, args, test_utils=utils)


def test_tensors_on_meta_have_no_data() -> None:
    x = torch.empty(1 << 20, 1 << 20, device="meta", dtype=torch.bfloat16)  # more than a machine's memory
    values, scales, *_ = fused.quantize_both(x)
    assert values.is_meta and scales.is_meta and values.shape == x.shape


def test_vmap_is_one_call_for_each() -> None:
    x = torch.randn(3, 128, 256)
    values, scales = torch.func.vmap(lambda x: fused.quantize(x, BLOCK))(x)
    for i in range(3):
        assert torch.equal(values[i].view(torch.uint8), fused.quantize(x[i], BLOCK)[0].view(torch.uint8))
        assert torch.equal(scales[i], fused.quantize(x[i], BLOCK)[1])
