"""``fused::dropout_add`` in eager mode: the generator, the mask, the operator, the Python function."""

import itertools
import math
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from harness import Calls

from torch_fused_ops import functional
from torch_fused_ops.families.dropout import formulas
from torch_fused_ops.operators import reference

fused = torch.ops.fused
CPU = torch.device("cpu")
SEED = torch.tensor([-3141592653589793238])


def mask(shape, seed, p):
    return fused.dropout_add(torch.ones(shape), None, None, seed, p) != 0


# ---- the generator ---------------------------------------------------------------------------------------------------


def int32(word):
    return torch.tensor(word - 2**32 if word >= 2**31 else word, dtype=torch.int32)


# Random123's test vectors (kat_vectors, philox4x32 10): (counter, key) → words.
RANDOM123 = {
    ((0,) * 4, (0,) * 2): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)): (
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ),
}  # fmt: skip


def philox_in_integers(counter, key):
    """Compute Philox4x32-10 as the paper defines it."""
    (c0, c1, c2, c3), (k0, k1), word = counter, key, 0xFFFFFFFF
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & word, (a >> 32) ^ c3 ^ k1, a & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c0, c1, c2, c3


def test_known_answers():
    for (counter, key), answer in RANDOM123.items():
        assert philox_in_integers(counter, key) == answer
    words = formulas.philox(int32(0), int32(0), torch.tensor(0))
    assert [int(w) & 0xFFFFFFFF for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("counter", [0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 12345, 2**62 - 1])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32, -(2**63), 0x299F31D0A4093822])
def test_the_generator_is_philox(counter, seed):
    low, high = counter & 0xFFFFFFFF, counter >> 32
    expected = philox_in_integers((low, high, 0, 0), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    words = formulas.philox(int32(low), int32(high), torch.tensor(seed))
    assert tuple(int(w) & 0xFFFFFFFF for w in words) == expected


def test_the_mask_is_the_generators_words():
    """Element 4k + j has word j of counter k, and is not dropped if the word is at least p·2³²."""
    p, keep = 0.3, mask((5, 7), SEED, 0.3).flatten().tolist()
    seed = int(SEED)
    for i, k in enumerate(keep):
        words = philox_in_integers((i // 4, 0, 0, 0), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
        assert k == (words[i % 4] >= round(p * 2**32))


@pytest.mark.parametrize("shape", [(40, 1000), (3, 50001), (7, 13), (100001,)])
def test_cpu_mask_does_not_depend_on_blocks(shape, monkeypatch):
    monkeypatch.setattr(formulas, "_COUNTERS_PER_BLOCK", 1000)
    x, r, b = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1:])
    for tensors in ((x, b, r), (x, None, None)):
        torch.testing.assert_close(fused.dropout_add(*tensors, SEED, 0.3), reference.dropout_add(*tensors, SEED, 0.3))
    args = (r, SEED, 0.3, torch.float32, torch.float32, [True, True])
    actual, expected = (module.dropout_add_backward(*args) for module in (fused, reference))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-3)


def test_the_mask_does_not_depend_on_dtype_or_strides():
    x = torch.ones(12, 20)
    keep = mask((12, 20), SEED, 0.4)
    for t in (x.double(), x.bfloat16(), x.half(), x.t().contiguous().t(), x[:1].expand(12, 20), x.repeat(1, 2)[:, ::2]):
        assert torch.equal(fused.dropout_add(t, None, None, SEED, 0.4) != 0, keep)
    assert torch.equal(fused.dropout_add(x.view(240), None, None, SEED, 0.4).view(12, 20) != 0, keep)
    for seed in (SEED.view(()), SEED.view(1, 1)):
        assert torch.equal(mask((12, 20), seed, 0.4), keep)


# ---- statistics ------------------------------------------------------------------------------------------------------
#
# Seeds are fixed, so these tests are deterministic. A perfect generator's statistic exceeds a bound in any of a test's
# cases with probability at most 1e-6: by Bonferroni these are about five-sigma bounds.


def sigmas(cases):
    """Return z with P(|N(0, 1)| > z) ≤ 1e-6 / cases."""
    return NormalDist().inv_cdf(1 - 0.5e-6 / cases)


RATES = [(p, n) for p in (0.01, 0.1, 0.5, 0.9, 0.999) for n in (1000, 65537, 1 << 20)]


@pytest.mark.parametrize(("p", "n"), RATES)
def test_rate(p, n):
    dropped = n - int(mask((n,), torch.tensor([20231]), p).sum())
    assert abs(dropped - n * p) <= sigmas(len(RATES)) * math.sqrt(n * p * (1 - p)) + 1  # + 1: binomial, not normal


# ---- shard_seed ------------------------------------------------------------------------------------------------------


def splitmix64(z):
    word = 2**64 - 1
    z = (z + 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    return z ^ (z >> 31)


def test_shard_seed_is_splitmix64():
    # The first outputs of the published generator for seed 0 are 0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, …
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    for seed in (0, 1, -1, 2**62, -(2**63)):
        actual = functional.shard_seed(torch.tensor([seed]), 0)
        assert int(actual) % 2**64 == splitmix64(seed % 2**64)
    assert int(functional.shard_seed(torch.tensor([0]), 1)) % 2**64 == 0x6E789E6AA1B965F4
    seed = torch.tensor([5])
    assert functional.shard_seed(seed) is seed
    assert torch.equal(functional.shard_seed(seed, 1, 2), functional.shard_seed(functional.shard_seed(seed, 1), 2))
    assert torch.equal(functional.shard_seed(seed, torch.tensor(3)), functional.shard_seed(seed, 3))
    grid = {int(functional.shard_seed(seed, i, j)) for i in range(16) for j in range(16)}
    assert len(grid) == 256


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_special_values_equal_torchs(value, p):
    """As in F.dropout, NaN stays NaN, and a dropped infinity becomes NaN."""
    x = torch.full((64,), value)
    actual, expected = fused.dropout_add(x, None, None, SEED, p), F.dropout(x, p)
    assert {str(v) for v in actual.unique().tolist()} == {str(v) for v in expected.unique().tolist()}


def test_results_are_rounded_once():
    x, b, r = (torch.randn(64, 64).bfloat16() for _ in range(3))
    # float32 rounds this sum only slightly.
    exact = r.double() + (x.double() + b[0].double()) * mask((64, 64), SEED, 0.5) * 2
    assert torch.equal(fused.dropout_add(x, b[0], r, SEED, 0.5), exact.float().bfloat16())


def test_generator_is_unused_for_p_0_and_1():
    x, r = torch.randn(3, 5), torch.randn(3, 5)
    for p in (0.0, 1.0, 1e-12, 1 - 2.0**-40):
        assert formulas.mask_at(*formulas.row_major(x.shape, CPU), SEED, p) is None
    assert torch.equal(fused.dropout_add(x, None, r, SEED, 0.0), x + r)
    assert torch.equal(fused.dropout_add(x, None, r, SEED, 1.0), r)
    assert torch.equal(fused.dropout_add(x, None, None, SEED, 1.0), F.dropout(x, 1.0))


# ---- derivatives -----------------------------------------------------------------------------------------------------


def tensors_for(has=(True, True, True), shape=(2, 6), batch=((), (), ())):
    g = torch.Generator().manual_seed(3)
    shapes = shape, shape[-1:], shape
    return [
        torch.randn(*b, *s, generator=g, dtype=torch.float64) if h else None
        for h, s, b in zip(has, shapes, batch, strict=True)
    ]


def operator(p=0.5, seed=SEED):
    return lambda *tensors: fused.dropout_add(*tensors, seed, p)


@pytest.mark.slow
@pytest.mark.parametrize("has", [(True, True, True), (True, False, False), (True, False, True), (True, True, False)])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_gradcheck(has, p):
    tensors = [None if t is None else t.requires_grad_() for t in tensors_for(has)]
    assert torch.autograd.gradcheck(
        operator(p), tensors, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    # The operator is linear in its tensors, so the sine gives the second derivative.
    curved = lambda *t: operator(p)(*t).sin()  # noqa: E731
    assert torch.autograd.gradgradcheck(curved, tensors, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("has", list(itertools.product((True, False), repeat=3))[:-1])
def test_frozen_arguments_cost_nothing(has):
    tensors = [t.requires_grad_(h) for t, h in zip(tensors_for(), has, strict=True)]
    with Calls() as calls:
        operator()(*tensors).sum().backward()
    masks = [tuple(args[-1]) for args in calls.arguments_of(fused.dropout_add_backward.default)]
    assert masks == ([has[:2]] if any(has[:2]) else [])  # the residual's gradient is the incoming gradient
    assert tuple(t.grad is not None for t in tensors) == has


# ---- the Python front ------------------------------------------------------------------------------------------------


def test_bias_dropout_add():
    x, b, r = torch.randn(64, 32), torch.randn(32), torch.randn(64, 32)
    torch.manual_seed(0)
    first, second = (functional.bias_dropout_add(x, b, r, 0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(functional.bias_dropout_add(x, b, r, 0.5), first)
    keep = (first - r).abs() > 1e-6
    torch.testing.assert_close(first, r + (x + b) * keep * 2)
    state = torch.get_rng_state()
    for actual, expected in (
        (functional.bias_dropout_add(x, b, r, 0.5, training=False), x + b + r),
        (functional.bias_dropout_add(x, b, r, 0.0), x + b + r),
        (functional.bias_dropout_add(x, None, r, 0.0), x + r),
        (functional.bias_dropout_add(x, b, None, 0.5, False), x + b),
        (functional.bias_dropout_add(x.bfloat16(), None, r, 0, False), x.bfloat16() + r),
        (functional.bias_dropout_add(x, None, r.bfloat16(), 0, False), (x + r.bfloat16()).bfloat16()),
    ):
        assert torch.equal(actual, expected)
    assert functional.bias_dropout_add(x, None, None, 0.5, False) is x
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"
