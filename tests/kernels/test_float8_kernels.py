"""The kernels of float8 linear layers compute the formula's bits, and pass arguments that the library accepts.

Triton's interpreter truncates where hardware rounds float32 to float8 (3.6 to 3.9), and has no inline PTX. It runs the
kernels with bit arithmetic instead, as GPUs before sm_90 do, so that bits can be compared. On a GPU the same tests
compare the hardware's conversion. Values are not compared in blocks with scale NaN, where an infinity is 448 or NaN.
"""

import functools
from typing import Any

import pytest
import torch
from harness import raises
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

pytest.importorskip("triton")

import triton
import triton.language as tl
from harness import meta, on_gpu
from kernel_harness import Device, recorded

from torch_fused_ops import virtual_gpu
from torch_fused_ops.families.float8 import formulas as float8
from torch_fused_ops.families.float8 import kernels
from torch_fused_ops.operators import reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BF16 = torch.bfloat16
SLOW = pytest.mark.slow


def numbers(r: int, c: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return numbers of many magnitudes: blocks of zeros, denormals, huge numbers, outliers, infinities and NaN."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(r, c, generator=g) * torch.exp2(torch.randint(-20, 20, (r, c), generator=g).float())
    if r > 8 and c >= 100:
        x[0], x[1], x[2] = 0.0, torch.randn(c, generator=g) * 1e-39, torch.randn(c, generator=g) * 1e38
        x[3, :] = torch.randn(c, generator=g) * 1e-3
        x[3, 5], x[4, 90] = 3e38, 448.0 * 2**-130
        x[5, 7], x[6, 40], x[7, 3] = torch.inf, torch.nan, -torch.inf
    return x.to(dtype)


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Compare (values, scales); values only in blocks whose scale is finite."""
    (values, scales), (e_values, e_scales) = actual, expected
    assert values.dtype == e_values.dtype and values.shape == e_values.shape and values.is_contiguous()
    assert scales.dtype == e_scales.dtype and scales.shape == e_scales.shape and scales.is_contiguous()
    torch.testing.assert_close(scales, e_scales, rtol=0, atol=0, equal_nan=True)
    if not values.numel():
        return
    rows = 1 if scales.shape[1] == values.shape[0] else values.shape[0] // scales.shape[0]
    of_blocks = (e_scales.t() if rows == 1 else e_scales).isfinite()
    compared = of_blocks.repeat_interleave(rows, 0).repeat_interleave(float8.columns_of(values, scales, rows), 1)
    assert torch.equal(values.view(torch.uint8)[compared], e_values.view(torch.uint8)[compared])


@pytest.mark.covering(every=4)
@pytest.mark.parametrize(
    ("shape", "dtype", "columns"),
    [
        ((130, 100), BF16, 128),
        ((9, 130), torch.float32, 128),
        ((1, 1), torch.float16, 128),
        ((0, 5), BF16, 128),
        ((5, 0), BF16, 128),
        pytest.param((131, 257), torch.float64, 128, marks=SLOW),
        pytest.param((257, 384), torch.float16, 128, marks=SLOW),
        ((130, 100), BF16, 32),
        ((33, 160), torch.float32, 32),
        ((5, 0), BF16, 32),
        pytest.param((257, 384), torch.float16, 32, marks=SLOW),
    ],
)
def test_quantize_gives_the_formula_s_bits_of_both_layouts(
    device: Device, shape: tuple[int, int], dtype: torch.dtype, columns: int
) -> None:
    """Quantizing along contiguous rows, along columns, and along both takes one launch each."""
    x = numbers(*shape, dtype)
    launched = ["_quantize"] if x.numel() else []
    for operand in (x, x.t()):
        assert_same(device.run(kernels.quantize, operand, 1, columns), float8.quantize(operand, 1, columns))
        assert device.names == launched
    results = device.run(kernels.quantize_both, x, columns)
    assert len(device.launches) == len(launched)
    assert_same(results[:2], float8.quantize(x, 1, columns))
    assert_same(results[2:], float8.quantize(x.t(), 1, columns))


@pytest.mark.parametrize(("shape", "dtype"), [((11, 130), BF16), ((9, 300), torch.float32)])
def test_rows_have_the_formula_s_bits(
    device: Device, shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contiguous rows that fit registers take one launch. Longer and transposed rows and one block take none."""
    x, (r, c) = numbers(*shape, dtype), shape
    calls = [(x, 1, c, ["_quantize_rows"]), (x.t(), 1, r, []), (x, r, c, [])]
    for operand, rows, columns, names in calls:
        assert_same(device.run(kernels.quantize, operand, rows, columns), float8.quantize(operand, rows, columns))
        assert device.names == names
    monkeypatch.setattr(kernels, "_COLUMNS_AT_ONCE", c - 1)
    assert_same(device.run(kernels.quantize, x, 1, c), float8.quantize(x, 1, c))
    assert device.names == []


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_rows_and_one_block_are_loaded_in_one_pass(device: Device, dtype: torch.dtype) -> None:
    """Finite numbers stay finite. Blocks of other sizes are loaded in plain torch."""
    x = numbers(9, 300)
    for rows, columns in ((1, 300), (9, 300), (1, 128)):
        stored = float8.quantize(x, rows, columns)
        actual = device.run(kernels.dequantize, *stored, rows, dtype)
        assert device.names == (["_dequantize_rows"] if columns == 300 else []) and actual.is_contiguous()
        expected = float8.dequantize(*stored, rows, dtype)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("experts", [1, 2])
def test_transposes_with_known_scales_are_one_launch(device: Device, experts: int) -> None:
    """Scales are a number for each row or for each matrix. Columns that 4 does not divide run plain torch."""
    x = numbers(24, 200).nan_to_num(0.0, 1.0, -1.0).view(experts, -1, 200)
    operand = x.transpose(1, 2)
    for scales in (
        torch.stack([float8.quantize(matrix, *matrix.shape)[1] for matrix in operand]),
        torch.stack([float8.quantize(matrix, 1, matrix.shape[1])[1] for matrix in operand]),
    ):
        arguments = (operand, scales) if experts > 1 else (operand[0], scales[0])
        actual = device.run(kernels.quantize_by, *arguments)
        assert device.names == ["_quantize_turned"] and actual.is_contiguous()
        assert torch.equal(actual.float(), float8.quantize_by(*arguments).float())
    device.run(kernels.quantize_by, x[0, :3].t(), torch.ones(1, 1))
    assert device.names == []


@pytest.mark.parametrize(("shape", "columns"), [((200, 384), 128), ((100, 160), 32)])
def test_requantize_equals_the_reference(device: Device, shape: tuple[int, int], columns: int) -> None:
    x = numbers(*shape).nan_to_num(0.0, 1e6, -1e6)
    x[3, 5], x[40, 2] = 3.35e38, -3.35e38  # rounding to 8 bits exceeds float32's range
    stored = float8.quantize(x, 1, columns)
    (values, scales), (e_values, e_scales) = device.run(kernels.requantize, *stored), reference.requantize(*stored)
    assert len(device.launches) == 1
    assert scales.isfinite().all() and torch.equal(scales, e_scales) and values.is_contiguous()
    assert torch.equal(values.float(), e_values.float())  # not bits: 3.6's interpreter returns 0 for −0


@pytest.mark.parametrize("shape", [(60, 9), pytest.param((257, 384), marks=pytest.mark.slow)])
def test_columns_that_lie_close_are_read_as_rows(device: Device, shape: tuple[int, int]) -> None:
    x = numbers(*shape).t()
    values, scales, values_t, scales_t = device.run(kernels.quantize_both, x)
    assert device.launches[0][1][9:11] == (shape[1], 1), "the strides that the kernel sees"
    assert_same((values, scales), float8.quantize(x, 1))
    assert_same((values_t, scales_t), float8.quantize(x.t(), 1))


def test_blocks_of_128_rows_any_strides(device: Device) -> None:
    w = numbers(128, 200)
    assert_same(device.run(kernels.quantize, w, 128), float8.quantize(w, 128))
    assert_same(device.run(kernels.quantize, w.t()[:128], 128), float8.quantize(w.t()[:128], 128))
    gaps = numbers(20, 400)[::2, ::3]
    assert_same(device.run(kernels.quantize, gaps, 1), float8.quantize(gaps, 1))


def test_wide_offsets_give_the_same(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(40, 150)
    narrow = device.run(kernels.quantize_both, x)
    monkeypatch.setattr(kernels, "INT32_MAX", 0)
    wide = device.run(kernels.quantize_both, x)
    assert device.launches[0][2]["WIDE"]
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.covering(every=3)
@pytest.mark.parametrize(
    ("name", "layout", "dtype", "shape", "scalars", "columns"),
    [
        ("bias_act", None, BF16, (130, 128), ("sigmoid",), 128),
        ("glu", None, BF16, (128, 128), ("silu", 0.0, None), 128),
        ("bias_glu", "swapped", BF16, (3, 256), ("quick_gelu", 1.0, 1.5), 128),
        pytest.param("glu", None, torch.float32, (140, 128), ("sigmoid", 0.5, None), 128, marks=SLOW),
        pytest.param("bias_glu", "halves", torch.float16, (100, 128), ("gelu", 0.0, None), 128, marks=SLOW),
        pytest.param("bias_act", None, torch.float32, (128, 256), ("relu2",), 128, marks=SLOW),
        ("bias_act", None, BF16, (128, 128), ("sigmoid",), 32),
        ("glu", None, BF16, (128, 128), ("silu", 0.0, None), 32),
        pytest.param("bias_glu", "swapped", BF16, (128, 256), ("quick_gelu", 1.0, 1.5), 32, marks=SLOW),
        pytest.param("glu", None, torch.float32, (128, 128), ("sigmoid", 0.5, None), 32, marks=SLOW),
    ],
)
def test_gradients_are_those_of_separate_operators(
    device: Device,
    name: str,
    layout: str | None,
    dtype: torch.dtype,
    shape: tuple[int, int],
    scalars: tuple[Any, ...],
    columns: int,
) -> None:
    r, c = shape
    g = torch.Generator().manual_seed(1)
    data = [torch.randn(r, c * (2 if layout else 1), generator=g).mul(2).to(dtype) for _ in range(2)]
    data = data[: 2 if name == "glu" else 1]
    grad = torch.randn(r, c, generator=g).to(dtype)
    activation, *other_scalars = scalars
    none = (None,) * (1 if name == "glu" else 2)
    arguments = (*data, *none, activation, *([layout] if layout else []), *other_scalars)
    on_device = on_gpu if device.name == "cpu" else functools.partial(getattr, torch.ops.fused)
    gradients = device.run(on_device(f"{name}_backward"), grad, *arguments, (True, name == "glu", False))
    result = device.run(on_device(name), *arguments)

    def fused(grad: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
        scalars = (activation, *([layout] if layout else []), *other_scalars, *([columns] if columns != 128 else []))
        return kernels.launch_of(f"{name}_backward_quantized")(grad, *data, *scalars)  # type: ignore[no-any-return]

    actual = device.run(fused, grad, *data)
    assert device.names == ["_gradients"] and len(actual) == 5 * len(data) + 2
    for i, d in enumerate(gradients[: len(data)]):
        assert_same(actual[5 * i : 5 * i + 2], float8.quantize(d, 1, columns))
        assert_same(actual[5 * i + 2 : 5 * i + 4], float8.quantize(d.t(), 1, columns))
        tiles = torch.nn.functional.pad(d.double(), (0, 0, 0, -r % 128)).view(-1, 128, d.shape[1])
        error = (actual[5 * i + 4].double() - tiles.sum(1)).abs()
        wrong = error > 16 * torch.finfo(torch.float32).eps * tiles.abs().sum(1)
        # The operators compute in another order, so an element can round to its neighbor.
        assert wrong.sum() <= 1 and (error[wrong] <= torch.finfo(dtype).eps * tiles.abs().amax(1)[wrong]).all()
    assert_same(actual[-2:], float8.quantize(result.t(), *((1, 32) if columns == 32 else (128, 128))))


def test_no_rows_no_launch(device: Device) -> None:
    x = torch.empty(0, 128, dtype=BF16)
    actual = device.run(lambda x: kernels.launch_of("bias_act_backward_quantized")(x, x, "silu"), x)
    assert not device.launches and [tuple(t.shape) for t in actual] == [
        (0, 128), (1, 0), (128, 0), (0, 128), (0, 128), (128, 0), (1, 0),
    ]  # fmt: skip


def test_bytes_an_element() -> None:
    """The kernel moves these bytes per element of the result, inputs and results together."""
    x = meta(4096, 8192)
    for name, args, expected in (("bias_act", (x, "silu"), 7.09), ("glu", (x, x, "silu", 0.0, None), 11.19)):
        (launch,) = recorded(kernels.launch_of(f"{name}_backward_quantized"), x, *args)
        assert launch.grid == (32 * 64, 1, 1)
        nbytes = sum(t.numel() * t.element_size() for t in launch.tensors if t is not None) / x.numel()
        assert round(nbytes, 2) == expected


def test_bytes_of_memory_fp8() -> None:
    """Storing and loading an activation's input in eager mode take a launch each and move 3 bytes per element."""
    x = meta(8192, 14336)
    values, scales = meta(8192, 14336, dtype=float8.FP8), meta(1, 8192, dtype=torch.float32)
    for call, *args in ((kernels.quantize, x, 1, 14336), (kernels.dequantize, values, scales, 1, BF16)):
        (launch,) = recorded(call, *args)
        nbytes = sum(t.numel() * t.element_size() for t in launch.tensors if t is not None)
        assert nbytes == x.numel() * (2 + 1) + 8192 * 4


def test_unsupported_arguments_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 128, dtype=BF16)
    of_act, of_packed = (kernels.launch_of(f"{name}_backward_quantized") for name in ("bias_act", "bias_glu"))
    with pytest.raises(ValueError, match=r"layout='interleaved' .* 'halves' or 'swapped'"):
        of_packed(x[:, :64], x, "silu", "interleaved", 0.0, None)
    with pytest.raises(ValueError, match=r"grad has shape \(4, 100\); accepted: columns in multiples of 128"):
        of_act(x[:, :100], x[:, :100], "silu")
    with pytest.raises(ValueError, match=r"grad has shape \(4, 128\); accepted: rows in multiples of 128"):
        of_act(x, x, "silu", 32)
    with pytest.raises(TypeError, match=r"data has dtype torch\.float64"):
        of_act(x, x.double(), "silu")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    wide = torch.ones(16, 256)
    refused = (
        lambda: kernels.quantize(wide, 1),
        lambda: kernels.quantize_both(x),
        lambda: of_act(x, x, "silu"),
        lambda: kernels.requantize(*float8.quantize(wide, 1)),
        lambda: kernels.scaled_mm(*float8.quantize(wide, 1), *float8.quantize(wide, 1), None, 1, BF16),
    )
    for call in refused:
        raises(NotImplementedError, "not accepted on AMD GPUs", call)


class Library:
    """A stub of ``torch.nn.functional.scaled_mm`` with the checks of ATen.

    Most checks are from ScaledBlas.cpp on sm_90. Checks for rows are from RowwiseScaledMM.cu on sm_89 and
    ScaledBlas.cpp on ROCm. Checks for blocks of 32 are from ScaledBlas.cpp on sm_100.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, mat_a: Tensor, mat_b: Tensor, *, scale_a: Tensor, scale_recipe_a: ScalingType, scale_b: Tensor,
        scale_recipe_b: ScalingType, bias: Tensor | None = None, output_dtype: torch.dtype,
        swizzle_a: SwizzleType | None = None, swizzle_b: SwizzleType | None = None,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        (m, k), n = mat_a.shape, mat_b.shape[1]
        assert m and n and k and k % 16 == 0 and n % 16 == 0
        assert mat_a.stride() == (k, 1) and mat_b.stride() == (1, k)  # row-major, column-major
        if scale_recipe_a is ScalingType.BlockWise1x32:
            assert scale_recipe_b is scale_recipe_a and swizzle_a is swizzle_b is SwizzleType.SWIZZLE_32_4_4
            return self.in_tiles(mat_a, mat_b, scale_a, scale_b, bias, output_dtype)
        assert swizzle_a is swizzle_b is None
        assert scale_a.dtype == scale_b.dtype == torch.float32
        if scale_recipe_a in (ScalingType.RowWise, ScalingType.TensorWise):
            return self.in_rows(mat_a, mat_b, scale_a, scale_b, scale_recipe_a, scale_recipe_b, bias, output_dtype)
        assert m % 8 == 0
        assert scale_recipe_a is ScalingType.BlockWise1x128
        assert scale_a.shape == (m, k // 128) and scale_a.stride() == (1, m)
        if scale_recipe_b is ScalingType.BlockWise1x128:
            assert scale_b.shape == (n, k // 128) and scale_b.stride() == (1, n)
            scales, rows = scale_b.t(), 1
        else:
            assert scale_recipe_b is ScalingType.BlockWise128x128
            padded = (k // 128 + 3) // 4 * 4
            assert scale_b.shape == (padded, n // 128) and scale_b.stride() == (1, padded)
            scales, rows = scale_b.t()[:, : k // 128], 128
        assert output_dtype in (BF16, torch.float32)
        assert bias is None or (output_dtype == bias.dtype == BF16 and bias.shape == (n,))
        return float8.product(mat_a, scale_a.t(), mat_b.t(), scales, bias, rows, output_dtype)

    def in_tiles(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, output_dtype: torch.dtype
    ) -> Tensor:
        def wide(values: Tensor, scales: Tensor) -> Tensor:
            """Apply scales from the offsets in cuBLAS's documentation."""
            (rows, columns), tiles = values.shape, -(-values.shape[1] // 128)
            assert scales.dtype == torch.float8_e8m0fnu and scales.is_contiguous()
            assert scales.numel() == -(-rows // 128) * tiles * 512
            row, block = torch.arange(rows)[:, None], torch.arange(columns // 32)[None, :]
            places = (row // 128 * tiles + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            return values.double() * scales.float()[places].double().repeat_interleave(32, 1)

        assert bias is None or (output_dtype == bias.dtype == BF16 and bias.shape == b.shape[1:])
        assert output_dtype in (BF16, torch.float32)
        out = wide(a, scale_a) @ wide(b.t(), scale_b).t()
        return (out if bias is None else out + bias).to(output_dtype)

    def in_rows(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe: ScalingType, recipe_b: ScalingType,
        bias: Tensor | None, output_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        assert recipe is recipe_b
        assert bias is None or (output_dtype == bias.dtype == BF16 and bias.shape == b.shape[1:])
        if recipe is ScalingType.TensorWise:
            assert scale_a.numel() == scale_b.numel() == 1 and output_dtype == torch.float32 and bias is None
        else:
            assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1]) and output_dtype == BF16
            assert scale_a.is_contiguous() and scale_b.is_contiguous() and scale_a.stride(0) == scale_b.stride(1) == 1
        out = (a.double() * scale_a.double()) @ (b.double() * scale_b.double())
        return (out if bias is None else out + bias).to(output_dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("m", "n", "k", "rows", "columns"),
    [
        (16, 128, 128, 128, 128), (5, 256, 640, 128, 128), (7, 20, 384, 1, 128), (1, 16, 1, 1, 128),
        (5, 48, 80, 1, 80), (1, 20, 272, 20, 272), (7, 20, 160, 1, 32), (130, 256, 64, 1, 32), (1, 16, 32, 1, 32),
    ],
)  # fmt: skip
def test_products_hand_over_what_the_library_accepts(
    m: int, n: int, k: int, rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", library)
    a, b = (float8.quantize(torch.randn(size, k), block, columns) for size, block in ((m, 1), (n, rows)))
    for bias in (None, torch.randn(n)):
        got = kernels.scaled_mm(*a, *b, bias, rows, dtype)
        assert got.shape == (m, n) and got.dtype == dtype and got.is_contiguous()
        exact = float8.product(*a, *b, None if bias is None else bias.double(), rows, torch.float64)
        torch.testing.assert_close(got.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0.02 * k**0.5)
    assert library.calls == 2


def test_experts_hand_over_what_the_library_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub has the checks of ATen's GroupedBlas.cpp and ScaledGroupMM.cu."""
    experts, n, k = 3, 48, 80
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)

    def library(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert a.dtype == b.dtype == float8.FP8 and scale_a.dtype == scale_b.dtype == torch.float32
        assert a.is_contiguous() and b.transpose(1, 2).is_contiguous() and b.shape == (experts, k, n)
        assert scale_a.shape == (9,) and scale_a.is_contiguous()
        assert scale_b.shape == (experts, n) and scale_b.stride(1) == 1
        assert offs.dtype == torch.int32 and out_dtype == BF16
        stored = a, scale_a.view(1, 9), b.transpose(1, 2), scale_b.view(experts, 1, n)
        return float8.grouped_product(*stored, offs, out_dtype)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", library)
    x, w = float8.quantize(torch.randn(9, k), 1, k), torch.randn(experts, n, k)
    values, scales = float8.quantize(w.view(-1, k), 1, k)
    largest = scales.view(experts, 1, n).amax(2, keepdim=True)
    for of_w in ((values.view(experts, n, k), scales.view(experts, 1, n)), (float8.quantize_by(w, largest), largest)):
        got = kernels.scaled_grouped_mm(*x, *of_w, ends, BF16)
        assert torch.equal(got, float8.grouped_product(*x, *of_w, ends, BF16))
    monkeypatch.setattr(torch, "_scaled_grouped_mm", None)
    none = float8.quantize(torch.randn(0, k), 1, k)
    assert kernels.scaled_grouped_mm(*none, *of_w, ends, BF16).shape == (0, n)


def test_empty_products_skip_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", None)
    bias = torch.randn(128)
    for m, k in ((0, 128), (3, 0)):
        a, b = float8.quantize(torch.randn(m, k), 1), float8.quantize(torch.randn(128, k), 128)
        assert torch.equal(kernels.scaled_mm(*a, *b, bias, 128, torch.float32), bias.expand(m, 128))
        assert torch.equal(kernels.scaled_mm(*a, *b, None, 128, BF16), torch.zeros(m, 128, dtype=BF16))
    a, b = float8.quantize(torch.randn(0, 64), 1, 32), float8.quantize(torch.randn(128, 64), 1, 32)
    of_a, of_b = float8.tiled(a[1]), float8.tiled(b[1])
    assert kernels.scaled_mm_tiled(a[0], of_a, b[0], of_b, bias, BF16).shape == (0, 128)


@triton.jit
def _round_trip(x, code, back, N: tl.constexpr):
    i = tl.arange(0, N)
    bits = kernels._to_fp8(tl.load(x + i), False)
    tl.store(code + i, bits)
    tl.store(back + i, kernels._from_fp8(bits, False))


def test_arithmetic_on_bits_rounds_as_torch_does() -> None:
    """Without hardware conversion, test every float8 number, midpoints between neighbors, and adjacent numbers."""
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (exact[1:] + exact[:-1]) / 2
    x = torch.cat([exact, between, between.nextafter(torch.tensor(torch.inf)), between.nextafter(torch.tensor(0.0))])
    x = torch.cat([x, torch.rand(1, 2048 - 2 * len(x) - 1).mul(460).clamp_max(448)[0], torch.tensor([448.00003]), x])
    x[-len(exact) :] *= -1
    x = x[:2048].contiguous()
    code, back = torch.empty(2048, dtype=torch.uint8), torch.empty(2048)
    virtual_gpu.interpret(_round_trip, x, code, back, grid=(1,), N=2048)
    expected = x.to(torch.float8_e4m3fn)
    assert torch.equal(code, expected.view(torch.uint8)) and torch.equal(back, expected.float())
