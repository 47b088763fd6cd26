"""The eager GPU kernels of ``fused::dropout_add`` without a GPU, tested as in test_activation_kernels.py."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from harness import meta
from kernel_harness import GPUS, Device, assemble, assert_close, recorded, wide

from torch_fused_ops import virtual_gpu
from torch_fused_ops.families.dropout import formulas, kernels
from torch_fused_ops.families.dropout.kernels import _factor, _philox
from torch_fused_ops.operators import reference
from torch_fused_ops.testing.samples import samples

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of words that wrap

SEED = torch.tensor([-3141592653589793238])
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def check(device: Device, x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: Tensor) -> None:
    """Compare forward and backward with the float64 reference. Masks are exact."""
    args = x, bias, residual, seed, p
    actual, expected = device.run(kernels.dropout_add, *args), reference.dropout_add(*wide(args))
    assert actual.dtype == (x if residual is None else residual).dtype and actual.is_contiguous()
    assert device.names == (["_forward"] if x.numel() else [])
    terms = reference.dropout_add(*(None if t is None else t.double().abs() for t in args[:3]), seed, p)
    double = reference.compute_dtype(x, bias, residual) == torch.float64
    assert_close(actual, expected, absolute=(1e-15 if double else 2e-7) * terms)  # terms may cancel
    grad = torch.randn(x.shape, dtype=torch.float64).to(actual.dtype)
    bias_dtype = None if bias is None else bias.dtype
    for mask in ((True, bias is not None), (False, True), (True, False)):
        if mask[1] and bias is None:
            continue
        actual = device.run(kernels.dropout_add_backward, grad, seed, p, x.dtype, bias_dtype, mask)
        wide_bias = None if bias is None else torch.float64
        truth = reference.dropout_add_backward(grad.double(), seed, p, torch.float64, wide_bias, mask)
        assert device.names.count("_backward") == (1 if x.numel() else 0) and len(device.launches) <= 2
        assert [g is not None for g in actual] == list(mask)
        if mask[0]:
            assert actual[0].dtype == x.dtype
            assert_close(actual[0], truth[0], gradient=True)
        if bias is not None and mask[1]:
            assert actual[1].dtype == bias.dtype and actual[1].shape == bias.shape
            assert_close(actual[1], truth[1], gradient=True, absolute=3e-5 * max(1.0, x.shape[0] ** 0.5))


@pytest.mark.covering(every=3)
@pytest.mark.parametrize(
    "sample",
    [s if s.core else pytest.param(s, marks=pytest.mark.slow) for s in samples("dropout_add")],
    ids=str,
)
def test_samples(device: Device, sample: Any) -> None:
    x, bias, residual, seed, p = (a.detach() if isinstance(a, Tensor) else a for a in sample.args)
    check(device, x, bias, residual, p, seed)


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("shape", [(6, 100), (2, 1030), (70, 17), (130, 4), (2, 3, 5, 36)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_mask_does_not_depend_on_tiles(device: Device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The mask does not depend on strides, nor on whether four neighbors share a row."""
    x, b, r = torch.ones(shape, dtype=dtype), torch.zeros(shape[-1], dtype=dtype), torch.zeros(shape, dtype=dtype)
    keep = reference.dropout_add(x, None, None, SEED, 0.5) != 0
    strided = torch.ones((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]
    transposed = torch.ones((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).mT
    expanded = x[:1].expand(shape)
    for args in (
        (x, None, None),
        (x, b, None),
        (x, None, r),
        (strided, None, None),
        (transposed, b, r),
        (expanded, b, r),
    ):
        assert torch.equal(device.run(kernels.dropout_add, *args, SEED, 0.5) != 0, keep)
    for grad in (x, strided, transposed, expanded):
        for mask in ((True, True), (True, False)):
            d_input, _ = device.run(kernels.dropout_add_backward, grad, SEED, 0.5, dtype, dtype, mask)
            assert torch.equal(d_input != 0, keep)
        _, d_bias = device.run(kernels.dropout_add_backward, grad, SEED, 0.5, dtype, torch.float32, (False, True))
        assert torch.equal(d_bias, 2.0 * keep.flatten(0, -2).sum(0))


@triton.jit
def _words(counters, seed, actual, expected, N: tl.constexpr):
    c = tl.load(counters + tl.arange(0, N))[None, :]
    low, high = c.to(tl.uint32), (c >> 32).to(tl.uint32)
    key = tl.load(seed).to(tl.uint64, bitcast=True)
    a0, a1, a2, a3 = _philox(low, high, key)
    b0, b1, b2, b3 = tl.philox(key, low, high, low * 0, low * 0)
    index = tl.arange(0, N)[None, :]
    tl.store(actual + index, a0)
    tl.store(actual + N + index, a1)
    tl.store(actual + 2 * N + index, a2)
    tl.store(actual + 3 * N + index, a3)
    tl.store(expected + index, b0)
    tl.store(expected + N + index, b1)
    tl.store(expected + 2 * N + index, b2)
    tl.store(expected + 3 * N + index, b3)


@triton.jit
def _factor_at(row, columns, n, seed, out, FOURS: tl.constexpr, N: tl.constexpr):
    r = tl.load(row + tl.arange(0, 1))
    c = tl.load(columns + tl.arange(0, N))
    factor = _factor(seed, r, c, n, 2**31, 2.0, FOURS, tl.float32)
    tl.store(out + tl.arange(0, N)[None, :], factor)


def test_the_generator_is_tritons() -> None:
    """The kernel's generator equals tl.philox for counters on both sides of 2³²."""
    counters = torch.tensor([0, 1, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 77])
    for number in (0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822):
        seed, out = torch.tensor([number]), torch.zeros(4, 8, dtype=torch.int32)
        tritons = torch.zeros_like(out)
        virtual_gpu.interpret(_words, counters, seed, out, tritons, grid=(1,), N=8)
        words = formulas.philox(counters, counters >> 32, seed)
        assert torch.equal(out, tritons) and torch.equal(out, torch.stack(words).to(torch.int32))


def test_mask_past_2_to_the_33() -> None:
    """For indices of more than 33 bits, counters have a nonzero upper word."""
    columns = 2**20
    for fours, rows in itertools.product((True, False), (2**14, 2**14 + 5)):
        n = columns if fours else columns + 1
        r, c, out = torch.tensor([rows]), torch.arange(64), torch.zeros(64)
        virtual_gpu.interpret(_factor_at, r, c, n, SEED, out, grid=(1,), FOURS=fours, N=64)
        index = rows * n + c
        expected = 2.0 * formulas.mask_at(index >> 2, index, SEED, 0.5)
        assert torch.equal(out, expected) and out.unique().numel() == 2


SHAPE = (8192, 4096)


def calls() -> dict[str, tuple[Any, tuple[Any, ...], float]]:
    """Return by name: operator, arguments, and the limit of instructions per element on sm_90 in bf16."""
    x, b, s, bf16 = meta(*SHAPE), meta(SHAPE[1]), meta(1, dtype=torch.int64), torch.bfloat16
    return {
        "input": (kernels.dropout_add, (x, None, None, s, 0.1), 23),
        "residual": (kernels.dropout_add, (x, None, x, s, 0.1), 28),
        "bias, residual": (kernels.dropout_add, (x, b, x, s, 0.1), 32),
        "backward": (kernels.dropout_add_backward, (x, s, 0.1, bf16, None, (True, False)), 23),
        "backward, bias": (kernels.dropout_add_backward, (x, s, 0.1, bf16, bf16, (True, True)), 36),
    }


@pytest.mark.covering(every=4)
@pytest.mark.parametrize(
    "gpu", [g if g.arch == "sm_90" else pytest.param(g, marks=pytest.mark.slow) for g in GPUS], ids=lambda gpu: gpu.arch
)
@pytest.mark.parametrize("name", calls())
def test_no_spills_and_the_generators_calls_are_shared(gpu: virtual_gpu.GPU, name: str) -> None:
    operator, args, limit = calls()[name]
    code = assemble(gpu, operator, *args)[0]
    assert code.spills == 0 and code.registers <= 128
    if gpu.arch == "sm_90":
        (kernel, *_, constants), *_ = recorded(operator, *args)
        elements = constants["BLOCK_M"] * constants["BLOCK_N"] / 128
        assert len(code.instructions) / elements <= limit, kernel.__name__


def test_generator_is_not_compiled_for_p_0_and_1() -> None:
    for p in (0.0, 1.0):
        x, seed = meta(*SHAPE), meta(1, dtype=torch.int64)
        (code,) = assemble(virtual_gpu.H100, kernels.dropout_add, x, None, x, seed, p)
        assert not any(name.startswith("IMAD.WIDE.U32") for name in code.instructions)
