"""Tests of the precision contract on every half-precision value and sample, and of the measure, runner and samples."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from harness import raises
from torch.utils._pytree import tree_leaves

from torch_fused_ops import activations
from torch_fused_ops.testing import precision
from torch_fused_ops.testing.check import Row, run_opcheck
from torch_fused_ops.testing.samples import OPERATORS, Sample, backward_samples, samples


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", activations.names())
def test_every_value(name, dtype):
    for (kind, _), e in precision.sweep(name, dtype).items():
        assert e <= precision.LIMITS[kind, dtype], kind
    x = precision.every_value(dtype)
    x = x[x.abs() < 2.0**60][None].requires_grad_()  # relu2's square is finite
    up = torch.sin(x.detach()).requires_grad_()
    for op, args in ("bias_act", (x, None, None, name)), ("glu", (x, up, None, name, 0.0, None)):
        for (kind, _), e in precision.measure(Sample(op, "random gradients", args)).items():
            assert e <= precision.LIMITS[kind, dtype], (op, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", activations.names())
def test_float32_everywhere(name):
    """Test every 251st float32, tails and subnormals included; all 2**32 values take an hour."""
    act = activations.get(name)
    for start in range(-(2**31), 2**31, 1 << 28):
        bits = torch.arange(start, start + (1 << 28), 251, dtype=torch.int64).to(torch.int32)
        x = bits.view(torch.float32)
        x = x[x.isfinite()]
        wide = x.double()
        value, derivative = act.value(x), act.derivative(x)
        assert precision.error(value, act.value(wide)).max() <= 1e-5
        near = precision.near_zero(name, wide)
        assert precision.error(derivative, act.derivative(wide), near).max() <= 1e-5


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", activations.names())
def test_gated_tails_below_the_floor(name, dtype):
    """If its exponential overflows, a tiny activation multiplied by a large ``up`` gives an accurate result."""
    least, largest = math.log(torch.finfo(torch.float32 if dtype != torch.float64 else dtype).smallest_normal), 1e10
    gate = torch.linspace(1.1 * least, 0.4 * least, 2001).to(dtype)[None].requires_grad_()
    up = torch.full_like(gate, largest).requires_grad_()
    for (kind, _), e in precision.measure(Sample("glu", "tails", (gate, up, None, name, 0.0, None))).items():
        assert e <= precision.LIMITS[kind, dtype], kind


# The zero of each activation's derivative, where terms of 0.22 cancel, and PyTorch's function for the activation.
ZEROS = {
    "silu": (-1.278464542761074, F.silu),
    "gelu": (-0.7517915246935645, F.gelu),
    "gelu_tanh": (-0.7524614220710162, lambda x: F.gelu(x, approximate="tanh")),
    "quick_gelu": (-0.7511542549712541, lambda x: x * torch.sigmoid(1.702 * x)),
    "hardswish": (-1.5, F.hardswish),
    "mish": (-1.1924312145, F.mish),
}


@pytest.mark.parametrize("name", activations.names())
def test_float32_gradients_near_zeros_of_the_derivative(name):
    """Compare thousands of float32 numbers around each zero, for each implementation."""
    derivative = activations.get(name).derivative
    x = torch.linspace(-30, 30, 60001, dtype=torch.float64) + 3e-5
    change = x[:-1][derivative(x[:-1]) * derivative(x[1:]) < 0]
    assert len(change) == (name in ZEROS)
    if name not in ZEROS:
        return
    zero, in_torch = ZEROS[name]
    assert abs(change.item() - zero) < 2e-3
    x = (torch.tensor(zero).view(torch.int32) + torch.arange(-4096, 4097, dtype=torch.int32)).view(torch.float32)
    truth, ones, only = derivative(x.double()), torch.ones_like(x), [True, False, False]
    assert truth.min() < 0 < truth.max() and truth.abs().max() < 1e-3

    def by_operator(x):
        return torch.ops.fused.bias_act_backward(torch.ones_like(x), x, None, None, name, only)[0]

    ways = {
        "reference": derivative(x),
        "many at once": by_operator(x),
        "gated": torch.ops.fused.glu_backward(ones, x, 0 * x, None, name, 1.0, None, only)[0],
    }
    leaf = x.clone().requires_grad_()
    (torch_grad,) = torch.autograd.grad(in_torch(leaf).sum(), leaf)
    worst = (torch_grad.double() - truth).abs().max()
    for way, got in ways.items():
        difference = (got.double() - truth).abs()
        assert difference.max() <= precision.LIMITS["gradient", torch.float32] * precision.NEAR_ZERO, way
        assert precision.error(got, truth, precision.near_zero(name, x.double())).max() <= 1e-5, way
        assert difference.max() <= worst + 2**-25, way  # 2 ulps of a term of 0.22
    # PyTorch does not meet a relative bound either. The zero of hardswish's derivative is a float32.
    assert name == "hardswish" or ((torch_grad.double() - truth) / truth).abs().max() > 0.1


def test_contract_states_the_measured_bound():
    """testing/precision.py and docs/numerics.md state the bound near derivatives' zeros that tests use."""
    contract = precision.__doc__ or ""
    numerics = (Path(__file__).parents[1] / "docs" / "numerics.md").read_text(encoding="utf-8")
    relative = precision.LIMITS["gradient", torch.float32]
    bound = f"{relative * precision.NEAR_ZERO:.1e}".replace("e-0", "e-")
    assert f"max(|f'|, 1/{1 / precision.NEAR_ZERO:.0f})" in contract and bound in contract
    assert bound in numerics


@pytest.mark.parametrize("op", OPERATORS)
def test_every_sample(op):
    for sample in samples(op):
        for (kind, dtype), e in precision.measure(sample).items():
            assert e <= precision.LIMITS[kind, dtype], (str(sample), kind)


@pytest.mark.parametrize("op", OPERATORS)
def test_no_result_shares_memory(op):
    """A result shares memory neither with an argument nor with another result (one row's input and bias gradients)."""
    for sample in (*samples(op, core=True), *backward_samples(op, core=True)):
        results = [t for t in tree_leaves(sample()) if t is not None]
        owners = [t.untyped_storage()._cdata for t in (*results, *filter(torch.is_tensor, sample.args))]
        assert len({*owners[: len(results)]}) == len(results), str(sample)
        assert not {*owners[: len(results)]} & {*owners[len(results) :]}, str(sample)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errors_are_in_ulps(dtype):
    eps = torch.finfo(dtype).eps
    truth = torch.tensor([1.0, 1.0, 1.0 + 0.4 * eps, -1.0, 1.0, 0.0, math.nan, math.inf, 1e300], dtype=torch.float64)
    got = torch.tensor(
        [1.0, 1 + eps, 1 + eps, -1 - 3 * eps, 1 - eps / 2, -0.0, math.nan, math.inf, math.inf], dtype=dtype
    )
    assert precision.error(got, truth).tolist() == [0, 1, 1, 3, 1, 0, 0, 0, 0]


def test_float32_errors_are_relative():
    truth = torch.tensor([2.0, 1e-20, 1e-40, 0.0, math.nan], dtype=torch.float64)
    got = torch.tensor([2.0002, 1.1e-20, 0.0, 0.0, math.nan])
    assert precision.error(got, truth).tolist() == pytest.approx([1e-4, 0.1, 0, 0, 0], rel=1e-3)
    assert precision.error(got, truth, torch.full((5,), 20.0)).tolist() == pytest.approx(
        [1e-5, 0, 0, 0, 0], rel=1e-3, abs=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("got", "truth"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (-math.inf, math.inf)])
def test_unexpected_infinities_and_nan_are_errors(dtype, got, truth):
    e = precision.error(torch.tensor([got], dtype=dtype), torch.tensor([truth], dtype=torch.float64))
    assert e.item() > 1000


def test_only_values_below_the_floor_may_become_zero():
    for dtype, floor in precision.FLOORS.items():
        below = torch.tensor([0.9 * floor], dtype=torch.float64)
        assert precision.error(torch.zeros(1, dtype=dtype), below).item() == 0
        above = 1000 * below if floor else torch.tensor([2.0**-24], dtype=torch.float64)  # float16's smallest number
        assert precision.error(torch.zeros(1, dtype=dtype), above).item() > 0.5


def test_near_zero_only_near_zeros_of_the_derivative():
    x = torch.tensor([-6.0, -3.0, -0.76, -0.75, 0.0, 3.0], dtype=torch.float64)
    assert precision.near_zero("gelu", x).tolist() == [0, 0, 1 / 32, 1 / 32, 0, 0]
    assert not precision.near_zero("tanh", x).any()


def test_sums_count_after_one_rounding():
    truth, absolute = torch.tensor([1.001], dtype=torch.float64), torch.tensor([8.0], dtype=torch.float64)
    assert precision.sum_error(truth.bfloat16(), truth, absolute, torch.float32).item() == 0
    off = truth + 3 * 8 * torch.finfo(torch.float32).eps
    assert precision.sum_error(off.float(), truth, absolute, torch.float32).item() == pytest.approx(3, abs=0.2)
    assert precision.sum_error(torch.tensor([math.nan]), truth, absolute, torch.float32).item() == math.inf


def test_every_value_is_every_value():
    for dtype in (torch.bfloat16, torch.float16):
        x = precision.every_value(dtype)
        assert len(x) == 65534 and len(set(x.view(torch.int16).tolist())) == 65534


def test_runner_rejects_torchs_gelu():
    """PyTorch's own GELU in the operator's place does not pass."""
    x = precision.every_value(torch.bfloat16)
    row = Row("bias_act gelu", torch.bfloat16)
    e = precision.error(F.gelu(x), activations.get("gelu").value(x.double()))
    row.note("sweep", {("forward", torch.bfloat16): float(e.max())})
    assert not row.passed and "forward error" in row.failures[0] and "allowed 1 ulp" in row.failures[0]


def test_run_opcheck_returns_the_failure():
    with torch.library._scoped_library("tfo_test", "FRAGMENT") as library:
        library.define("liar(Tensor x) -> Tensor")
        library.impl("liar", lambda x: x.clone(), "CPU")
        library.impl("liar", lambda x: x.new_empty(x.shape[0] + 1), "Meta")
        liar = Sample("liar", "a fake kernel of another shape", (torch.zeros(3),))
        with mock.patch.object(Sample, "overload", property(lambda self: torch.ops.tfo_test.liar.default)):
            assert "liar[a fake kernel of another shape]: opcheck: " in (run_opcheck(liar) or "")


@pytest.mark.parametrize("op", OPERATORS)
def test_samples_are_named_once_and_always_the_same(op):
    first, second = list(samples(op)), list(samples(op))
    assert len({s.name for s in first}) == len(first) > 40
    for a, b in zip(first, second, strict=True):
        assert a.scalars == b.scalars
        for t, u in zip(a.tensors, b.tensors, strict=True):
            assert t is None or (torch.equal(t, u) and t.stride() == u.stride())
    few = {s.name for s in samples(op, core=True)}
    assert 20 <= len(few) < len(first)


def test_samples_refuse_an_unknown_operator():
    raises(ValueError, "op='bias_gelu' is not known; accepted: bias_act, glu, bias_glu", next, samples("bias_gelu"))


def test_truth_is_computed_from_the_rounded_sum():
    """0.9477 - 0.4463 - 0.5 = 0.0014. The float32 sum loses 2e-5, which does not count as the operator's error."""
    x = torch.tensor([[-1.0, 0.9477]]), torch.tensor([0.0, -0.4463])
    sample = Sample("bias_glu", "cancels", (*x, None, "silu", "halves", -0.5, None))
    wide = [t.double() for t in x]
    exact = torch.ops.fused.bias_glu(*wide, *sample.args[2:])
    assert precision.error(sample(), exact).max() > 1e-5
    assert precision.measure(sample)["forward", torch.float32] < 1e-6


def test_floor_grows_with_large_factors():
    """gelu(-14) is 1e-43 and may be 0, so a result 1e38 times larger may be off by 1e38 times the floor."""
    args = torch.tensor([[-14.0]], dtype=torch.bfloat16), None, torch.tensor([1e38])
    sample = Sample("bias_act", "subnormal", (*args, "gelu"))
    (near,) = precision.near_of(sample)
    floor = 1e38 * 2.0**-118
    assert near.item() == pytest.approx(floor / 1e-5)
    truth = activations.get("gelu").value(torch.tensor([[-14.0]], dtype=torch.float64)) * 1e38
    assert precision.error((truth * 1.02).bfloat16(), truth).max() > 1
    for value in (truth * 1.02, truth * 0.0, truth - 0.9 * floor):
        assert precision.error(value.bfloat16(), truth, near).max() == 0
    assert precision.error((truth - 1.1 * floor).bfloat16(), truth, near).max() > 1
    assert precision.measure(sample)["forward", torch.bfloat16] <= 1
