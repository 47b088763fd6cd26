"""Softmax's eager GPU kernels without a GPU: arithmetic in Triton's interpreter, and machine code for absent GPUs.

On a machine with a GPU the comparisons also run on the GPU.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from harness import meta
from kernel_harness import GPUS, Device, assemble, recorded, wide

from torch_fused_ops import virtual_gpu
from torch_fused_ops.families.softmax import kernels
from torch_fused_ops.kernels import launching
from torch_fused_ops.operators import reference
from torch_fused_ops.testing import precision
from torch_fused_ops.testing.samples import samples

forward, backward = kernels.scaled_masked_softmax, kernels.scaled_masked_softmax_backward
BOTH = (True, True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of infinities


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    kernels._plan.cache_clear()
    yield
    kernels._plan.cache_clear()


@pytest.fixture(params=["in registers", "read twice"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return True if rows fit in registers. Otherwise lower the limits, so that short rows take several blocks."""
    if request.param == "read twice":
        monkeypatch.setattr(kernels, "_WIDEST_ROW", 1)
        monkeypatch.setattr(kernels, "_LONG_BLOCK", 16)
    return bool(request.param == "in registers")


def check(device: Device, args: tuple[Any, ...], grad: Tensor | None = None, mask: tuple[bool, bool] = BOTH) -> None:
    """Compare forward with the float64 reference, and backward with the reference at the rounded output."""
    x, _, sink, *scalars = args
    y = device.run(forward, *args)
    assert (y.dtype, y.shape, y.is_contiguous()) == (x.dtype, x.shape, True)
    assert device.names == (["_forward"] if x.numel() else [])
    truth = reference.scaled_masked_softmax(*wide(args))
    if truth.numel():
        assert precision.error(y, truth).max() <= precision.LIMITS["forward", y.dtype]
    mask = mask[0], mask[1] and sink is not None
    grad = torch.randn(x.shape, dtype=torch.float64).to(x.dtype) if grad is None else grad
    dtype = None if sink is None else sink.dtype
    dx, d_sink = device.run(backward, grad, y, *scalars, dtype, mask)
    assert device.names == (["_backward"] if x.numel() and any(mask) else [])
    g, y = grad.double(), y.double()
    truths = reference.scaled_masked_softmax_backward(g, y, *scalars, torch.float64, mask)
    computed = reference.compute_dtype(x, sink)
    for actual, expected in zip((dx, d_sink), truths, strict=True):
        assert (actual is None) == (expected is None)
    if dx is not None and truths[0] is not None and dx.numel():
        assert (dx.dtype, dx.is_contiguous()) == (x.dtype, True)
        e = precision.softmax_gradient_error(dx, g, y, truths[0], scalars[0], computed)
        assert e.max() <= precision.LIMITS["gradient", dx.dtype]
    if d_sink is not None and truths[1] is not None:
        assert (d_sink.dtype, d_sink.shape) == (dtype, sink.shape)
        assert precision.softmax_sink_error(d_sink, g, y, truths[1], computed).max() <= 4


@pytest.mark.parametrize(
    "sample",
    [s if s.core else pytest.param(s, marks=pytest.mark.slow) for s in samples("scaled_masked_softmax")],
    ids=str,
)
@pytest.mark.covering(every=4)
def test_samples(device: Device, rows: bool, sample: Any) -> None:
    check(device, tuple(a.detach() if isinstance(a, Tensor) else a for a in sample.args))


WINDOWS = [(True, -1, -1), (False, 9, -1), (False, 20, 3), (True, 5, 7), (False, 0, 0), (False, 90, 90)]


@pytest.mark.covering(every=5)
@pytest.mark.parametrize(("causal", "left", "right"), WINDOWS)
@pytest.mark.parametrize("shape", [(2, 20, 20), (1, 12, 50), (1, 50, 12)], ids=str)
def test_windows_over_several_blocks(
    device: Device, shape: tuple[int, ...], causal: bool, left: int, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks before and after the window are not read, and their results are zeros."""
    monkeypatch.setattr(kernels, "_WIDEST_ROW", 1)
    monkeypatch.setattr(kernels, "_LONG_BLOCK", 8)
    x, sink = torch.randn(shape), torch.randn(shape[0])
    mask = torch.rand(shape[-2:]) < 0.3
    check(device, (x, mask, sink, 0.3, causal, left, right))
    monkeypatch.setattr(kernels, "_LEAST_TILE", 32)  # a program with four rows uses the bounds of all of them
    kernels._plan.cache_clear()
    check(device, (x, None, sink, -2.0, causal, left, right))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, -0.3, 0.0, 40.0])
def test_large_scores(device: Device, rows: bool, dtype: torch.dtype, scale: float) -> None:
    """Scaling scores before subtracting their large offset would lose differences. Scales have both signs."""
    x = (torch.linspace(-40, 40, 50, dtype=torch.float64).repeat(2, 3, 1) + 200).to(dtype)
    sink = torch.tensor([200 * abs(scale), -5.0], dtype=torch.float32)
    check(device, (x, None, sink, scale, False, -1, -1))
    check(device, (x.roll(7, -1), None, None, scale, True, -1, -1))


def test_lowest_scores_with_a_sink_give_zero(device: Device, rows: bool) -> None:
    """Masks produce such scores. Their product with log₂e overflows float32."""
    x, sink = torch.full((2, 3, 40), torch.finfo(torch.float32).min), torch.tensor([0.5, -3.0])
    y = device.run(forward, x, None, sink, 1.0, False, -1, -1)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.covering(2)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("sink", [False, True])
def test_special_values_equal_the_reference(device: Device, rows: bool, value: float, scale: float, sink: bool) -> None:
    x = torch.randn(2, 3, 40)
    x[0, 1, ::7] = value
    x[1, 0] = value
    s = torch.tensor([0.5, value if sink else 1.0]) if sink else None
    args = (x, None, s, scale, False, 50, -1)
    y, truth = device.run(forward, *args), reference.scaled_masked_softmax(*args)
    torch.testing.assert_close(y, truth, equal_nan=True)
    g = torch.randn(2, 3, 40)
    actual = device.run(backward, g, y, *args[3:], None, (True, False))[0]
    expected = reference.scaled_masked_softmax_backward(g, truth, *args[3:], None, (True, False))[0]
    torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["transposed", "heads inside", "expanded", "every other"])
def test_strides(device: Device, rows: bool, kind: str) -> None:
    """Input, mask and gradient may have any strides; outer axes without a common stride are copied."""
    make = {
        "transposed": lambda: torch.randn(2, 3, 20, 10).mT,
        "heads inside": lambda: torch.randn(2, 10, 3, 20).transpose(1, 2),
        "expanded": lambda: torch.randn(2, 1, 10, 1).expand(2, 3, 10, 20),
        "every other": lambda: torch.randn(2, 3, 20, 41)[:, :, ::2, 1::2].narrow(2, 0, 10),
    }[kind]
    sink = torch.randn(6)[::2]
    check(device, (make(), make() > 0.5, sink, 0.3, True, -1, -1), make())
    deep = torch.randn(2, 3, 4, 2, 5).permute(2, 0, 1, 3, 4)
    mask = torch.rand(4, 1, 3, 1, 5) < 0.3
    check(device, (deep, mask, None, 0.3, False, -1, -1))


def test_wide_offsets_give_the_same(device: Device, rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test 64-bit offsets, and rows that overflow into the grid's third axis."""
    monkeypatch.setattr(kernels, "INT32_MAX", 0)
    monkeypatch.setattr(launching, "GRID_LIMIT", 3)
    check(device, (torch.randn(2, 3, 150, 20), torch.rand(2, 1, 1, 20) < 0.3, torch.randn(3), 0.3, True, 7, -1))
    assert all(constants["WIDE"] for _, _, constants in device.launches)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", list(itertools.product([False, True], repeat=2)))
def test_output_masks(device: Device, rows: bool, mask: tuple[bool, bool]) -> None:
    check(device, (torch.randn(2, 2, 5, 20), None, torch.randn(2), 0.3, True, -1, -1), mask=mask)


def test_sink_gradients_are_deterministic_and_rounded_once(device: Device) -> None:
    """5000 rows per head with terms of one sign would show the rounding of a float32 sum."""
    y, g = torch.full((2500, 2, 2, 4), 0.2), torch.ones(2500, 2, 2, 4)
    _, first = device.run(backward, g, y, 1.0, False, -1, -1, torch.float32, (False, True))
    _, second = device.run(backward, g, y, 1.0, False, -1, -1, torch.float32, (False, True))
    assert torch.equal(first, second)
    term = (y[0, 0, 0].sum() - 1) * (y * g)[0, 0, 0].sum()
    assert ((first.double() - 5000 * term.double()).abs() <= 2 * torch.finfo(torch.float32).eps * 800).all()


def test_broadcast_masks_are_not_expanded(device: Device) -> None:
    """A mask (b, 1, 1, sk) is neither copied nor expanded: its strides along heads and queries are 0."""
    x, mask = torch.randn(2, 3, 5, 8), torch.rand(2, 1, 1, 8) < 0.3
    device.run(forward, x, mask, None)
    _, launched, constants = device.launches[0]
    arguments = dict(zip(kernels._forward.arg_names, launched, strict=False))
    strides = [arguments[f"mask_{a}"] for a in ("outer", "head", "row", "column")]
    assert [constants["UNIT"] * n for n in strides[:3]] == [8, 0, 0]
    assert strides[3] == 1
    if device.name == "cpu":
        assert arguments["mask"].data_ptr() == mask.data_ptr()


def calls(dtype: torch.dtype, sk: int) -> dict[str, tuple[Any, ...]]:
    """Return a call of every kind."""
    x, mask = meta(4, 16, 512, sk, dtype=dtype), meta(4, 1, 512, sk, dtype=torch.bool)
    sink, strided = meta(16, dtype=torch.float32), meta(4, 512, 16, sk, dtype=dtype).transpose(1, 2)
    return {
        "plain": (forward, x, None, None, 0.1),
        "causal": (forward, x, None, None, 0.1, True),
        "window": (forward, x, None, sink, 0.1, False, 64, 64),
        "mask": (forward, x, mask, sink, -0.1),
        "heads inside": (forward, strided, mask, None, 0.1, True),
        "backward": (backward, x, x, 0.1, False, -1, -1, None, (True, False)),
        "causal backward": (backward, x, x, 0.1, True, -1, -1, torch.float32, BOTH),
    }


@pytest.mark.covering(every=4)
@pytest.mark.parametrize(
    ("call", "sk", "most"),
    [
        ("plain", 64, 25),
        ("plain", 2048, 19),
        ("causal", 1000, 32),  # 16 does not divide 1000
        ("causal", 2048, 23),
        ("mask", 2048, 29),
        ("plain", 8192, 20),
        ("backward", 64, 26),
        ("backward", 2048, 27),
        ("causal backward", 2048, 32),
    ],
)
def test_instructions_per_element_are_bounded(call: str, sk: int, most: float) -> None:
    """Loads and stores of the large tensors have 16 bytes, even in causal kernels, and no register spills."""
    code, *_ = assemble(virtual_gpu.H100, *calls(torch.bfloat16, sk)[call])
    *_, constants = recorded(*calls(torch.bfloat16, sk)[call])[0]
    elements = constants["BLOCK_M"] * constants["BLOCK_N"] / (32 * constants["num_warps"])
    loads = [i for i in code.instructions if i.startswith(("LDG", "STG"))]
    assert sum(i.endswith(".128") for i in loads) >= (3 if "backward" in call else 2) * elements / 8
    assert sum(not i.endswith(".128") for i in loads) <= 1, "a sink, or the row's part of its gradient"
    assert len(code.instructions) / elements <= most
    assert code.spills == 0
    assert code.registers <= 40


# Windows over long rows use all registers that such a large block allows per thread, and 8 bytes of stack.
SPILLING = {
    (virtual_gpu.A100, torch.bfloat16, 65536, "window"),
    (virtual_gpu.B200, torch.float64, 8192, "window"),
}


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name.replace(" ", "_"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_no_kernel_spills(gpu: virtual_gpu.GPU, dtype: torch.dtype) -> None:
    spilling = []
    for sk in (16, 64, 100, 1000, 4096, 8192, 16384, 65536):
        for name, call in calls(dtype, sk).items():
            allowed = 8 if (gpu, dtype, sk, name) in SPILLING else 0
            spilling += [(name, sk, c.spills) for c in assemble(gpu, *call) if c.spills > allowed]
            atomic = [i for c in assemble(gpu, *call) for i in c.instructions if i.lower().startswith(("atom", "red."))]
            assert not atomic
    assert not spilling
