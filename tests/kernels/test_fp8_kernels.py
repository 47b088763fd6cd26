"""The Triton kernels that store and load float8 have torch's bits and the reference's numbers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from torch_fused_ops import virtual_gpu
from torch_fused_ops.families.float8 import kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


# ---- the bits --------------------------------------------------------------------------------------------------------


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
