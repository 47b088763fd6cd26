"""The levels below "free": tensors that ``memory="fp8"`` and ``"input"`` save and recompute, and their limits."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import harness
import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn as nn
import torch.nn.functional as F
from functions import autograd_function
from harness import GEMMS, MLP, Stack, distances, normal, raises, saved_by, saving, selective, step_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torch_fused_ops import FusionPolicy, activations
from torch_fused_ops import functional as FF
from torch_fused_ops.lowerings import memory_levels, passes
from torch_fused_ops.operators import reference
from torch_fused_ops.tools.verify import interpreted

LEVELS = ("fp8", "input")
pytestmark = pytest.mark.codegen_is_slow


def compiled(fn: Callable[..., Any], level: Any, strict: bool = True, **kwargs: Any) -> Callable[..., Any]:
    return harness.compiled(fn, FusionPolicy(memory=level, strict=strict), fullgraph=True, **kwargs)  # type: ignore[no-any-return]


def max_distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the largest relative distance of two tensors, in the 2-norm."""
    return max(distances(a, b))


def gelu(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w, b), approximate="tanh"), v)


def swiglu(x: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w)) * F.linear(x, u), v)


def packed(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    up, gate = F.linear(x, w, b).chunk(2, -1)
    return F.linear(F.gelu(gate) * up, v)


def tensors(name: str, dtype: torch.dtype = torch.float32, tokens: tuple[int, ...] = (3, 17)) -> list[Tensor]:
    shapes = {
        "gelu": [(96, 32), (96,), (32, 96)],
        "swiglu": [(96, 32), (96, 32), (32, 96)],
        "packed": [(192, 32), (192,), (32, 96)],
    }[name]
    x = (normal(*tokens, 32, dtype=dtype).detach() * 6).requires_grad_()
    return [x, *(normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))]


FUNCTIONS: dict[str, Callable[..., Tensor]] = {"gelu": gelu, "swiglu": swiglu, "packed": packed}


# ---- saved tensors and gradients -------------------------------------------------------------------------------------


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_input_gives_identical_gradients(name: str, dtype: torch.dtype) -> None:
    inputs = tensors(name, dtype)
    free, free_saved = step_of(compiled(FUNCTIONS[name], "free"), inputs)
    actual, saved = step_of(compiled(FUNCTIONS[name], "input"), inputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, free, strict=True))
    hidden = 3 * 17 * 96
    assert any(t.numel() >= hidden for t in free_saved)
    weights = {t.untyped_storage()._cdata for t in inputs}  # a weight may be saved transposed
    activations_saved = [t for t in saved if t.untyped_storage()._cdata not in weights]
    assert not any(t.numel() >= hidden and t.shape[-1] >= 96 for t in activations_saved)


def biased(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w) + b, approximate="tanh"), v)


EAGER_ROUNDING = {"numerics": "strict"} if hasattr(inductor_config, "numerics") else {"emulate_precision_casts": True}


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("gelu", "free"),
        *((name, "fp8") for name in ("swiglu", "packed", "biased")),
        ("swiglu", "input"),
        ("packed", "tiled:2"),
    ],
)
def test_levels_save_less_where_a_setting_requires_eagers_rounding(name: str, level: str) -> None:
    """Activations are not fused. The levels apply to the model's own calls, whose rounding stays."""
    fn, inputs = FUNCTIONS.get(name, biased), tensors(name.replace("biased", "gelu"), torch.bfloat16)
    with inductor_config.patch(EAGER_ROUNDING):
        expected, _ = step_of(torch.compile(fn), inputs)
        actual, saved = step_of(compiled(fn, level), inputs)
    exact = 1 if level == "fp8" else len(actual)
    assert all(torch.equal(a, b) for a, b in zip(actual[:exact], expected, strict=False))
    assert (max_distance(actual, expected) < 0.05) and all(t.isfinite().all() for t in actual)
    weights = {t.untyped_storage()._cdata for t in inputs}
    hidden = [t for t in saved if t.untyped_storage()._cdata not in weights and t.numel() >= 3 * 17 * 96]
    dtypes = {t.dtype for t in hidden if t.shape[-1] >= 96}
    assert dtypes == {"free": {torch.bfloat16}, "fp8": {torch.float8_e4m3fn}}.get(level, set())


SiLU = autograd_function(
    lambda h: (h * torch.sigmoid(h), h),
    lambda grad, h: grad * torch.sigmoid(h) * (1 + h * (1 - torch.sigmoid(h))),
)


def by_autograd_function(x: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return F.linear(SiLU.apply(F.linear(x, w)) * F.linear(x, u), v)


@pytest.mark.parametrize(
    "options", [{"memory": "off"}, {"memory": "input", "gemm": "fp8"}, {"memory": "input"}], ids=str
)
def test_strict_counts_what_eagers_rounding_prevents(options: dict[str, str]) -> None:
    """A level does not apply to an autograd function: tracing does not copy marks into its body."""
    fn = by_autograd_function if options == {"memory": "input"} else swiglu
    step = torch.compile(fn, backend="fused", options={**options, "strict": True})
    with inductor_config.patch(EAGER_ROUNDING):
        raises(Exception, "UnfusedError: strict=True and these MLPs were not", step, *tensors("swiglu", torch.bfloat16))


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda h, pad: h.masked_fill(pad, 0.0),
    "in place": lambda h, pad: h.masked_fill_(pad, 1.0),
    "where": lambda h, pad: torch.where(pad, 0.0, h),
}


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("level", ["off", "free", "fp8", "input", "tiled:2"])
def test_masked_rows_do_not_affect_results(level: str, mask: str) -> None:
    """Rows that no expert owns, and padding, may contain NaN or infinity."""

    def padded(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, pad: Tensor) -> Tensor:
        up, gate = MASKS[mask](F.linear(x, w, b), pad).chunk(2, -1)
        return F.linear(F.sigmoid(gate) * up, v, c)  # sigmoid(0) is not 0

    x, w, b, v = tensors("packed", torch.float64)
    pad = torch.arange(17)[:, None] % 4 == 3
    with torch.no_grad():
        x[:, 3], x[:, 7] = torch.nan, torch.inf
    inputs = [x, w, b, v, normal(32, dtype=torch.float64), pad]
    expected, _ = step_of(padded, inputs)
    with memory_levels.without_fp8_rounding():
        got, saved = step_of(compiled(padded, level, strict=level != "tiled:2"), inputs)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert got[0].isfinite().all() and got[3].isfinite().all() and got[5].isfinite().all()
    of_hidden = [t.numel() // (3 * 17 * 96) for t in saved if t.numel() % (3 * 17 * 96) == 0]
    assert sum(of_hidden) == {"off": 3, "free": 2, "fp8": 2}.get(level, 0)


@pytest.mark.parametrize("level", ["input", "tiled:2"])
def test_caller_may_modify_a_bias_before_backward(level: str) -> None:
    """The caller may do so at "free" as well, where backward does not read the bias."""
    model, x = MLP(32, 96), normal(64, 32)
    expected = torch.autograd.grad(model(x).square().sum(), (x, *model.parameters()))
    result = compiled(model, level)(x)
    with torch.no_grad():
        model.up.bias.add_(1.0)
    actual = torch.autograd.grad(result.square().sum(), (x, *model.parameters()))
    assert max_distance(actual, expected) < 1e-6


def test_fp8_gradients_are_exact_at_the_rounded_input() -> None:
    """Forward is exact. Backward computes the exact derivative and activation of the rounded pre-activation."""
    x, w, b, v = inputs = tensors("gelu")
    got, saved = step_of(compiled(gelu, "fp8"), inputs)
    assert [t.dtype for t in saved].count(torch.float8_e4m3fn) == 1
    act = activations.get("gelu_tanh")
    with torch.no_grad():
        h = F.linear(x, w, b)
        rounded = reference.load_fp8(*reference.store_fp8(h), torch.float32)
        assert 0 < max_distance([rounded], [h]) < 0.04
        y = F.linear(act.value(h), v)
        grad = normal(*y.shape, seed=1)  # the same as in ``step_of``
        dh = (grad @ v) * act.derivative(rounded)
        flat = dh.flatten(0, 1)
        dv = grad.flatten(0, 1).T @ act.value(rounded).flatten(0, 1)
        expected = [y, dh @ w, flat.T @ x.flatten(0, 1), flat.sum(0), dv]
    assert max_distance(got, expected) < 1e-5


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_fp8_gradients_are_close(name: str, dtype: torch.dtype) -> None:
    inputs = tensors(name, dtype)
    free, _ = step_of(compiled(FUNCTIONS[name], "free"), inputs)
    fp8, saved = step_of(compiled(FUNCTIONS[name], "fp8"), inputs)
    assert torch.equal(fp8[0], free[0]), "forward does not change"
    assert 1e-4 < max_distance(fp8[1:], free[1:]) < 0.06
    stored = [t for t in saved if t.dtype == torch.float8_e4m3fn]
    assert sum(t.numel() for t in stored) == 3 * 17 * (96 if name == "gelu" else 192)
    assert not any(t.dtype == dtype and t.shape[-1] == stored[0].shape[-1] and t.ndim == 3 for t in saved)


@pytest.mark.covering(1)
@pytest.mark.parametrize("level", ["off", "free", *LEVELS, "tiled:2"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_zero_rows_are_accepted(name: str, level: str) -> None:
    """An expert without tokens has zero rows."""
    inputs = tensors(name, tokens=(0,))
    got, _ = step_of(compiled(FUNCTIONS[name], level), inputs)
    assert [t.shape for t in got] == [(0, 32), *(t.shape for t in inputs)]
    assert not any(t.any() for t in got)


@pytest.mark.parametrize("memory", ["free", "fp8"])
def test_direct_calls_accept_zero_rows(memory: str) -> None:
    torch._dynamo.reset()
    call = torch.compile(lambda x: FF.bias_gelu(x, memory=memory), backend="aot_eager")
    x = torch.empty(0, 96, requires_grad=True)
    assert [t.shape for t in step_of(call, [x])[0]] == [(0, 96), (0, 96)]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_sizes_may_be_symbolic(level: str) -> None:
    fn = compiled(gelu, level, dynamic=True)
    for tokens in ((3, 17), (5, 4), (2, 1)):
        inputs = tensors("gelu", tokens=tokens)
        assert max_distance(step_of(fn, inputs)[0], step_of(gelu, inputs)[0]) < (0.06 if level == "fp8" else 1e-5)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("level", LEVELS)
def test_under_autocast(level: str) -> None:
    def model(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return gelu(*inputs)

    inputs = tensors("gelu")
    got, saved = step_of(compiled(model, level), inputs)
    assert max_distance(got, step_of(compiled(model, "free"), inputs)[0]) < (0.06 if level == "fp8" else 1e-9)
    assert any(t.dtype == torch.float8_e4m3fn for t in saved) == (level == "fp8")


def test_frozen_weights_save_the_smaller_tensor() -> None:
    """Nothing else saves the input of the first GEMM, whose weight is frozen. The level saves this input if smaller."""
    for shape, smaller in (((96, 32), True), ((16, 32), False)):
        x = normal(3, 17, 32)
        w, v = normal(*shape).detach(), normal(32, shape[0])

        def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
            return F.linear(F.gelu(F.linear(x * 1.5, w)), v)

        free, _ = step_of(compiled(mlp, "free"), [x, w, v])
        actual, saved = step_of(compiled(mlp, "input"), [x, w, v])
        assert all(torch.equal(a, b) for a, b in zip(actual, free, strict=True))
        hidden = [t for t in saved if t.shape[-1] == shape[0] and t.numel() == 51 * shape[0]]
        assert bool(hidden) != smaller


def test_an_adapted_layer_is_recomputed() -> None:
    def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w) + 2 * F.linear(F.linear(x, a), b)), v)

    inputs = [normal(3, 17, 32), normal(96, 32).detach(), normal(4, 32), normal(96, 4), normal(32, 96)]
    free, _ = step_of(compiled(lora, "free"), inputs)
    actual, saved = step_of(compiled(lora, "input"), inputs)
    assert max_distance(actual, free) < 1e-6
    assert not any(t.numel() == 51 * 96 for t in saved)


def test_free_saves_the_softmax_before_attentions_second_gemm() -> None:
    """Backward recomputes the input of the activation's GEMM. Scores are saved, as under plain torch.compile."""

    def attend(x: Tensor, bias: Tensor, w: Tensor, v: Tensor) -> Tensor:
        scores = torch.softmax((x @ x.mT + bias).float(), -1).to(x.dtype)
        y = scores @ x
        return y + F.linear(F.gelu(F.linear(y, w)), v)

    inputs = [normal(3, 17, 32), normal(17, 17), normal(96, 32), normal(32, 96)]
    inputs = [t.detach().bfloat16().requires_grad_() for t in inputs]
    saved = {level: [t.numel() for t in step_of(compiled(attend, level), inputs)[1]] for level in ("off", "free")}
    assert [sizes.count(3 * 17 * 17) for sizes in saved.values()] == [2, 2], "the first GEMM's result and scores"
    assert [sizes.count(3 * 17 * 96) for sizes in saved.values()] == [2, 1], "the activation's input and result"


# ---- recomputation across a GEMM, at "free" --------------------------------------------------------------------------


def adapted(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute a frozen layer, and an adapter that reads the activation through a pointwise operator."""
    h = F.gelu(F.linear(x, w))
    return F.linear(h, v) + F.linear(F.linear(h * s, a), b)


def dropped(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = F.gelu(F.linear(x, w))
    return F.linear(h, v) + F.linear(F.linear(F.dropout(h, 0.5), a), b)


def routed(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Gather tokens for experts after the router's GEMM, which reads these tokens as well."""
    h = (x * s[: x.shape[-1]]).flatten(0, 1)
    token = torch.arange(2 * h.shape[0]) % h.shape[0]
    weights = F.linear(h, a[:, : x.shape[-1]])[token].mean(-1, keepdim=True)
    y = F.linear(F.gelu(F.linear(h[token], w)), v) * weights
    return torch.zeros_like(h).index_add(0, token, y) @ b[: x.shape[-1], :1]


def adapter_inputs(tokens: tuple[int, ...], frozen: bool) -> list[Tensor]:
    x, w, v, s, a, b = (
        normal(*shape, dtype=torch.float64, seed=i)
        for i, shape in enumerate([(*tokens, 32), (96, 32), (32, 96), (96,), (4, 96), (32, 4)])
    )
    return [x, *(t.detach() if frozen else t for t in (w, v, s)), a, b]


@inductor_config.patch(force_disable_caches=True)  # cache keys do not contain the replaced function
@pytest.mark.parametrize(
    ("fn", "tokens", "frozen", "size"),
    [
        pytest.param(adapted, (51,), True, 51 * 96, marks=pytest.mark.slow),
        (adapted, (3, 17), True, 51 * 96),
        pytest.param(dropped, (3, 17), True, 51 * 96, marks=pytest.mark.slow),
        (routed, (3, 17), False, 2 * 51 * 32),
    ],
)
def test_linear_inputs_are_recomputed_across_a_gemm(
    monkeypatch: pytest.MonkeyPatch, fn: Any, tokens: tuple[int, ...], frozen: bool, size: int
) -> None:
    inputs = adapter_inputs(tokens, frozen)
    steps = []
    for edit in (memory_levels.recompute_linear_inputs, lambda graphs, *_: graphs):
        monkeypatch.setattr(memory_levels, "recompute_linear_inputs", edit)
        torch.manual_seed(0)
        steps.append(step_of(compiled(fn, "free", strict=False), inputs))
    (fused, saved), (original, saved_before) = steps
    assert all(torch.equal(a, b) for a, b in zip(fused, original, strict=True))
    counts = [sum(t.numel() == size and t.shape[-1] != 1 for t in tensors) for tensors in (saved, saved_before)]
    assert counts[0] == counts[1] - (len(tokens) > 1), "PyTorch itself recomputes two-dimensional tokens"
    if fn is not dropped:
        assert max_distance(fused, step_of(fn, inputs)[0]) < 1e-12
    if fn is adapted:
        assert any(t.numel() == 51 * 4 for t in saved), "no GEMM is recomputed"


@torch.library.custom_op(
    "memory_levels::noisy", mutates_args=(), tags=(torch.Tag.pointwise, torch.Tag.nondeterministic_seeded)
)
def noisy(t: Tensor) -> Tensor:
    return t + torch.rand_like(t)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, grad: grad)


def test_random_values_are_not_recomputed() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = F.gelu(F.linear(x, w))
        return F.linear(h, v) + F.linear(F.linear(noisy(h), a), b)

    _, saved = step_of(compiled(fn, "free"), adapter_inputs((3, 17), True))
    assert sum(t.numel() == 51 * 96 for t in saved) == 2, "the pre-activation and the random result"


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("level", LEVELS)
def test_lower_levels_apply_after_free(level: str) -> None:
    inputs = [t.detach().float().requires_grad_(t.requires_grad) for t in adapter_inputs((3, 17), True)]

    def of_sine(x: Tensor, *weights: Tensor) -> Tensor:  # the frozen weight's input, sin(x), is saved
        return adapted(x.sin(), *weights)

    got, saved = step_of(compiled(of_sine, level, strict=False), inputs)
    hidden = [t.dtype for t in saved if t.numel() == 51 * 96]
    assert hidden == ([torch.float8_e4m3fn] if level == "fp8" else [])
    assert max_distance(got, step_of(of_sine, inputs)[0]) < (1e-6 if level == "input" else 0.1)


def also_returned(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = F.gelu(F.linear(x, w))
    scaled = h * s
    y = F.linear(h, v) + F.linear(F.linear(scaled, a), b)
    return torch.cat([y, scaled], -1)


def also_read(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = F.gelu(F.linear(x, w))
    scaled = h * s
    return F.linear(h, v) + F.linear(F.linear(scaled, a), b) + scaled.softmax(-1)[..., :32]


def checkpointed(fn: Callable[..., Tensor], *must_save: Any) -> Callable[..., Tensor]:
    """Return the function in a checkpoint whose policy saves the results of these operators."""

    context = {"context_fn": selective(*must_save)} if must_save else {}
    return lambda *inputs: checkpoint(fn, *inputs, use_reentrant=False, **context)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fn", "least"), [(also_returned, 0), (also_read, 0), (checkpointed(adapted, torch.ops.aten.mul.Tensor), 1)]
)
def test_values_with_other_readers_are_correct_at_free(fn: Any, least: int) -> None:
    """The adapter's input is also a result, has another reader, or is saved by selective checkpointing."""
    inputs = adapter_inputs((3, 17), True)
    got, saved = step_of(compiled(fn, "free", strict=False), inputs)
    assert max_distance(got, step_of(fn, inputs)[0]) < 1e-12
    assert sum(t.numel() == 51 * 96 for t in saved) >= least


# ---- operators that request a level ----------------------------------------------------------------------------------


FP8_CALLS: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda x, w, b, v: F.linear(FF.bias_gelu(F.linear(x, w), b, "tanh", memory="fp8"), v),
    "swiglu": lambda x, w, u, v: F.linear(FF.swiglu(F.linear(x, w), F.linear(x, u), memory="fp8"), v),
    "packed": lambda x, w, b, v: F.linear(
        FF.bias_glu(F.linear(x, w), b, activation="gelu", layout="swapped", memory="fp8"), v
    ),
}


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("name", FP8_CALLS)
def test_operators_that_request_fp8_recompute_their_result(name: str) -> None:
    """Backward also recomputes the result, for the second weight's gradient. Plain torch.compile saves the result."""
    inputs = tensors(name)
    eager, _ = step_of(FP8_CALLS[name], inputs)
    fused, saved = step_of(compiled(FP8_CALLS[name], "free"), inputs)
    torch._dynamo.reset()
    plain, plain_saved = step_of(torch.compile(FP8_CALLS[name], fullgraph=True), inputs)
    assert max_distance(plain, eager) < 2e-3, "an element on a boundary may round the other way"
    assert max_distance(fused[:-1], eager[:-1]) < 2e-3 and 1e-4 < max_distance(fused[-1:], eager[-1:]) < 0.06
    stored = 51 * (96 if name == "gelu" else 192)
    for saved_tensors, results in ((saved, 0), (plain_saved, 1)):
        assert sum(t.numel() for t in saved_tensors if t.dtype == torch.float8_e4m3fn) == stored
        assert sum(t.numel() == 51 * 96 and t.dtype == torch.float32 for t in saved_tensors) == results


# ---- rejections ------------------------------------------------------------------------------------------------------


@inductor_config.patch(force_disable_caches=True)
def test_fp8_rejects_tensors_with_other_readers(caplog: pytest.LogCaptureFixture) -> None:
    """The derivative of sin also reads the pre-activation, and would see the rounding."""

    def with_second_reader(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        h = F.linear(x, w, b)
        return F.linear(F.gelu(h), v) + h.sin().sum(-1, keepdim=True)

    inputs = tensors("gelu")
    caplog.set_level(logging.INFO, "torch_fused_ops")
    fp8, saved = step_of(compiled(with_second_reader, "fp8", strict=False), inputs)
    assert max_distance(fp8, step_of(with_second_reader, inputs)[0]) < 1e-5
    assert not any(t.dtype == torch.float8_e4m3fn for t in saved)
    assert "has no effect: backward also reads it in aten.cos.default" in caplog.text


@pytest.mark.parametrize("level", LEVELS)
def test_results_are_not_saved_twice(level: str) -> None:
    """The pre-activation is a result, so it stays in memory anyway."""

    def with_result(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = F.linear(x, w, b)
        return F.linear(F.gelu(h), v), h

    inputs = tensors("gelu")
    (out, h), saved = saved_by(lambda: compiled(with_result, level)(*inputs))
    got = torch.autograd.grad([out, h], inputs, [torch.ones_like(out), torch.ones_like(h)])
    assert not any(t.dtype == torch.float8_e4m3fn for t in saved)
    out, h = with_result(*inputs)
    expected = torch.autograd.grad([out, h], inputs, [torch.ones_like(out), torch.ones_like(h)])
    assert max_distance(got, expected) < 1e-5


def test_arguments_are_not_saved_twice() -> None:
    v = normal(32, 96)
    _, saved = step_of(compiled(lambda x: F.linear(FF.bias_gelu(x, None), v), "fp8"), [normal(51, 96)])
    assert not any(t.dtype == torch.float8_e4m3fn for t in saved)


def test_float64_stays_exact() -> None:
    inputs = tensors("gelu", torch.float64)
    fp8, saved = step_of(compiled(gelu, "fp8"), inputs)
    assert max_distance(fp8, step_of(gelu, inputs)[0]) < 1e-12
    assert not any(t.dtype == torch.float8_e4m3fn for t in saved)


@pytest.mark.parametrize(("first_limit", "eager_rounding"), [(None, False), (5.0, False), (5.0, True)])
def test_fp8_rejects_tight_clamps(first_limit: float | None, eager_rounding: bool) -> None:
    """Rounding would move many values across the clamp, where their gradient is 0. Any reader's clamp counts."""

    def glu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        return F.silu(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1)

    def clamped(clamp: float, x: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        gate, up = F.linear(x, w), F.linear(x, u)
        first = F.linear(glu(gate, up, first_limit), v) if first_limit else 0
        return first + F.linear(glu(gate, up, clamp), v)

    def both(*inputs: Tensor) -> Tensor:
        return torch.stack([clamped(2, *inputs), clamped(2.5, *(t * 1.5 for t in inputs))])

    with inductor_config.patch(EAGER_ROUNDING if eager_rounding else {}):
        saved = step_of(compiled(both, "fp8"), tensors("swiglu", torch.bfloat16))[1]
    dtypes = [t.dtype for t in saved if t.numel() == 51 * 96]
    assert [dtypes.count(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)] == [2, 2] and len(dtypes) == 4


@pytest.mark.covering(1)
@pytest.mark.parametrize("level", LEVELS[::-1])
@pytest.mark.parametrize("must_save", [(), GEMMS], ids=["full", "selective"])
def test_checkpointed_regions_stay_checkpointed(must_save: tuple[Any, ...], level: str) -> None:
    """Results that selective checkpointing saves stay saved."""
    inputs = tensors("gelu")
    got, saved = step_of(compiled(checkpointed(gelu, *must_save), level, strict=False), inputs)
    assert max_distance(got, step_of(gelu, inputs)[0]) < 1e-5
    assert [t.dtype for t in saved if t.numel() == 51 * 96] == ([torch.float32] if must_save else [])


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("level", LEVELS)
def test_inference_does_not_change(level: str) -> None:
    inputs = tensors("gelu")
    with torch.no_grad():
        assert torch.equal(compiled(gelu, level)(*inputs), compiled(gelu, "free")(*inputs))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("level", LEVELS)
def test_the_users_budget_has_precedence(level: str) -> None:
    inputs = tensors("gelu")
    with torch._functorch.config.patch(activation_memory_budget=0.99):
        got, saved = step_of(compiled(gelu, level), inputs)
    assert max_distance(got, step_of(gelu, inputs)[0]) < 1e-5
    assert not any(t.dtype == torch.float8_e4m3fn for t in saved)


@pytest.mark.parametrize("fallback_random", [False, True])
def test_dropout_has_one_mask_under_the_users_budget(fallback_random: bool) -> None:
    """PyTorch's own partitioner draws another mask in backward (pytorch#190758)."""
    x, w = torch.eye(32), normal(32, 64)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(F.dropout(torch.sin(x @ w), 0.5))

    with (
        torch._functorch.config.patch(activation_memory_budget=0.5),
        inductor_config.patch(fallback_random=fallback_random),
    ):
        y = compiled(fn, "free", strict=False)(x, w)
        (gradient,) = torch.autograd.grad(y.sum(), w)
    assert torch.equal(y != 0, gradient != 0) and 0.3 < (y == 0).float().mean() < 0.7


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("level", LEVELS)
@inductor_config.patch(force_disable_caches=True)
def test_after_a_failure_free_applies(
    level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pass fails after it has replaced the first of two tensors."""
    calls = []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError(f"on purpose: {level}")
        return original(*args)

    name = {"fp8": "_save_fp8", "input": "_replace"}[level]
    original = getattr(memory_levels, name)
    monkeypatch.setattr(memory_levels, name, fail)
    monkeypatch.setattr(passes, "_logged", set())  # a failure is logged once per process
    inputs = tensors("swiglu")
    got, saved = step_of(compiled(swiglu, level, strict=False), inputs)
    assert len(calls) == 2 and f"on purpose: {level}" in caplog.text
    assert not any(t.dtype == torch.float8_e4m3fn for t in saved)
    assert all(torch.equal(a, b) for a, b in zip(got, step_of(compiled(swiglu, "free"), inputs)[0], strict=True))
    calls.clear()
    raises(Exception, "on purpose", step_of, compiled(swiglu, level, strict=True), inputs)


# ---- by module -------------------------------------------------------------------------------------------------------


def test_patterns_select_levels() -> None:
    model, x = Stack((MLP(32, 96, nn.GELU()) for _ in range(3)), residual=True), normal(4, 32)
    _, saved = step_of(compiled(model, {"layers.0": "fp8", "layers.[12].activation": "input"}), [x])
    hidden = [t for t in saved if t.shape == (4, 96)]
    assert [t.dtype for t in hidden] == [torch.float8_e4m3fn]
    _, saved = step_of(compiled(model, {"layers.1.*": "input", "*": "fp8"}), [x])
    assert [t.dtype for t in saved if t.shape == (4, 96)] == [torch.float8_e4m3fn] * 2


def test_policies_with_levels_compare_and_hash() -> None:
    policy, same = (FusionPolicy(memory={"a": "fp8", "b.*": "input"}) for _ in range(2))
    assert policy == same and hash(policy) == hash(same) and policy != FusionPolicy(memory={"b.*": "input", "a": "fp8"})
    assert eval(repr(policy), {"FusionPolicy": FusionPolicy}) == policy
    assert policy.memory_of({"", "a", "a.act"}) == "fp8" and policy.memory_of({"", "b"}) == "input"
    assert policy.memory_of({"", "c"}) == "free"


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("level", LEVELS)
def test_a_scaled_gate_saves_no_more(level: str) -> None:
    """The scale is between the GEMM and the operator, and is recomputed with the operator."""

    def scaled(x: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.silu(0.7 * F.linear(x, w)) * F.linear(x, u), v)

    inputs = tensors("swiglu")
    got, saved = step_of(compiled(scaled, level), inputs)
    of_inputs = {t.untyped_storage()._cdata for t in inputs}
    # gate and up, with a scale for each row; at "input" copies of the weights that backward multiplies by
    stored = 2 * 51 * (96 + 4) if level == "fp8" else sum(t.nbytes for t in inputs[1:3]) if level == "input" else 0
    assert sum(t.nbytes for t in saved if t.untyped_storage()._cdata not in of_inputs) == stored
    assert max_distance(got, step_of(scaled, inputs)[0]) < (0.1 if level == "fp8" else 1e-5)


def test_a_trainable_scale_before_the_activation_saves_no_more() -> None:
    """Backward recomputes the scaled tensor from the GEMM's result, which the scale's gradient reads as well."""

    def scaled(x: Tensor, w: Tensor, scale: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w) * scale), v)

    inputs = [normal(8, 16), normal(64, 16), normal(64), normal(16, 64)]
    saved = {}
    for level in (None, "off", "free"):
        fn = interpreted(None if level is None else FusionPolicy(memory=level))
        saved[level] = saving(lambda fn=fn: fn(scaled, *inputs), inputs)[1] // (8 * 64 * 4)
    assert saved == {None: 2, "off": 2, "free": 1}, "hidden tensors"
