"""FLOP of our GEMMs, as torch's counter and the virtual GPU's roofline count them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from torch_fused_ops import functional
from torch_fused_ops.families.float8 import flop_formulas
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.virtual_gpu import work

M, N, K = 256, 128, 384
BF16 = torch.bfloat16
fused = torch.ops.fused


def counted(fn: Callable[[], Tensor]) -> tuple[int, int]:
    """Return the FLOP of forward, and of forward plus backward."""
    with FlopCounterMode(display=False) as counter:
        y = fn()
        forward = counter.get_total_flops()
        y.sum().backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layer_is_three_products(recipe: str) -> None:
    x, w = torch.randn(M, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
    product = 2 * M * N * K
    assert counted(lambda: functional.linear_fp8(x, w, recipe=recipe)) == (product, 3 * product)
    exact = counted(lambda: F.linear(x, w))
    assert exact == (product, 3 * product)


def test_experts() -> None:
    """All rows count, each with one expert's weight. Torch's counter may omit the weight's gradient, a torch GEMM."""
    x, ends = torch.randn(M, K, dtype=BF16, requires_grad=True), torch.tensor([100, 100, M]).int()
    w = torch.randn(3, K, N, dtype=BF16, requires_grad=True)
    product = 2 * M * N * K
    of_torch = product if torch.ops.aten._grouped_mm in flop_registry else 0
    assert counted(lambda: fused.grouped_linear_fp8(x, w, ends)) == (product, 2 * product + of_torch)


def test_float8_counts_less_in_times() -> None:
    a, b = (torch.empty(size, K, dtype=torch.float8_e4m3fn, device="meta") for size in (M, N))
    scales = [torch.empty(1, size, device="meta") for size in (M, N)]
    args, out = (a, scales[0], b, scales[1], None, 1, BF16), torch.empty(M, N, dtype=BF16, device="meta")
    assert work.flop_of(fused.scaled_mm, args, {}, out) == 2 * M * N * K
    as_long = work.flop_of_bf16(fused.scaled_mm, args, {}, out) / work.BF16_FLOP
    assert as_long == pytest.approx(2 * M * N * K / work.FLOAT8_FLOP)
    tiles = [torch.empty(size * 4, dtype=torch.uint8, device="meta") for size in (M, N)]
    assert work.flop_of(fused.scaled_mm_tiled, (a, tiles[0], b, tiles[1], None, BF16), {}, out) == 2 * M * N * K
    wide = torch.empty(M, K, device="meta"), torch.empty(K, N, device="meta")
    assert work.flop_of_bf16(torch.ops.aten.mm, wide, {}, out) == 2 * M * N * K


def test_handing_over_again_changes_nothing() -> None:
    before = dict(flop_registry)
    flop_formulas.register()
    assert flop_registry == before and fused.scaled_grouped_mm in before
