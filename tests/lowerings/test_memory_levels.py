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
from harness import GEMMS, MLP, Stack, distances, kept_by, normal, raises, selective, step_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torch_fused_ops import FusionPolicy, activations
from torch_fused_ops import functional as FF
from torch_fused_ops.lowerings import memory_levels, passes
from torch_fused_ops.operators import reference

LEVELS = ("fp8", "input")
pytestmark = pytest.mark.codegen_is_slow


def compiled(fn: Callable[..., Any], level: Any, strict: bool = True, **kwargs: Any) -> Callable[..., Any]:
    return harness.compiled(fn, FusionPolicy(memory=level, strict=strict), fullgraph=True, **kwargs)  # type: ignore[no-any-return]


def apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest relative distance, in the 2-norm."""
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


# ---- what is kept, and what it gives ---------------------------------------------------------------------------------


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_input_gives_the_very_same_gradients(name: str, dtype: torch.dtype) -> None:
    inputs = tensors(name, dtype)
    free, kept_free = step_of(compiled(FUNCTIONS[name], "free"), inputs)
    less, kept = step_of(compiled(FUNCTIONS[name], "input"), inputs)
    assert all(torch.equal(a, b) for a, b in zip(less, free, strict=True))
    hidden = 3 * 17 * 96
    assert any(t.numel() >= hidden for t in kept_free)
    assert not any(t.numel() >= hidden and t.shape[-1] >= 96 for t in kept if t.shape != inputs[1].shape), (
        "nothing of the hidden layer is kept"
    )


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked_fill": lambda h, pad: h.masked_fill(pad, 0.0),
    "in place": lambda h, pad: h.masked_fill_(pad, 1.0),
    "where": lambda h, pad: torch.where(pad, 0.0, h),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("level", ["off", "free", "fp8", "input", "tiled:2"])
def test_what_masked_rows_held_counts_nowhere(level: str, mask: str) -> None:
    """Rows of a mixture's experts that no expert owns, or padding: they may hold NaN, or be infinite."""

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
        got, kept = step_of(compiled(padded, level, strict=level != "tiled:2"), inputs)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert got[0].isfinite().all() and got[3].isfinite().all() and got[5].isfinite().all()
    of_hidden = [t.numel() // (3 * 17 * 96) for t in kept if t.numel() % (3 * 17 * 96) == 0]
    assert sum(of_hidden) == {"off": 3, "free": 2, "fp8": 2}.get(level, 0)


@pytest.mark.parametrize("level", ["input", "tiled:2"])
def test_caller_may_modify_a_bias_before_backward(level: str) -> None:
    """As at "free", where backward does not read the bias."""
    model, x = MLP(32, 96), normal(64, 32)

    def gradients(step: Callable[..., Tensor]) -> list[Tensor]:
        result = step(x)
        with torch.no_grad():
            model.up.bias.add_(1.0)
        grads = torch.autograd.grad(result.square().sum(), (x, *model.parameters()))
        with torch.no_grad():
            model.up.bias.sub_(1.0)
        return list(grads)

    expected = gradients(model)
    assert apart(gradients(compiled(model, level)), expected) < 1e-6


def test_fp8_is_the_gradient_at_what_was_kept() -> None:
    """Forward is exact; backward is the true derivative, and the true activation, of the rounded pre-activation."""
    x, w, b, v = inputs = tensors("gelu")
    got, kept = step_of(compiled(gelu, "fp8"), inputs)
    assert [t.dtype for t in kept].count(torch.float8_e4m3fn) == 1
    act = activations.get("gelu_tanh")
    with torch.no_grad():
        h = F.linear(x, w, b)
        rounded = reference.load_fp8(*reference.store_fp8(h), torch.float32)
        assert 0 < apart([rounded], [h]) < 0.04
        y = F.linear(act.value(h), v)
        grad = normal(*y.shape, seed=1)  # as ``step_of``'s
        dh = (grad @ v) * act.derivative(rounded)
        flat = dh.flatten(0, 1)
        dv = grad.flatten(0, 1).T @ act.value(rounded).flatten(0, 1)
        wanted = [y, dh @ w, flat.T @ x.flatten(0, 1), flat.sum(0), dv]
    assert apart(got, wanted) < 1e-5


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_fp8_is_near(name: str, dtype: torch.dtype) -> None:
    inputs = tensors(name, dtype)
    free, _ = step_of(compiled(FUNCTIONS[name], "free"), inputs)
    low, kept = step_of(compiled(FUNCTIONS[name], "fp8"), inputs)
    assert torch.equal(low[0], free[0]), "forward is not changed"
    assert 1e-4 < apart(low[1:], free[1:]) < 0.06
    stored = [t for t in kept if t.dtype == torch.float8_e4m3fn]
    assert sum(t.numel() for t in stored) == 3 * 17 * (96 if name == "gelu" else 192)
    assert not any(t.dtype == dtype and t.shape[-1] == stored[0].shape[-1] and t.ndim == 3 for t in kept)


@pytest.mark.parametrize("level", ["off", "free", *LEVELS, "tiled:2"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_there_may_be_no_rows(name: str, level: str) -> None:
    """As for an expert without tokens."""
    inputs = tensors(name, tokens=(0,))
    got, _ = step_of(compiled(FUNCTIONS[name], level), inputs)
    assert [t.shape for t in got] == [(0, 32), *(t.shape for t in inputs)]
    assert not any(t.any() for t in got)


@pytest.mark.parametrize("memory", ["free", "fp8"])
def test_a_direct_call_may_have_no_rows(memory: str) -> None:
    torch._dynamo.reset()
    call = torch.compile(lambda x: FF.gelu(x, memory=memory), backend="aot_eager")
    x = torch.empty(0, 96, requires_grad=True)
    assert [t.shape for t in step_of(call, [x])[0]] == [(0, 96), (0, 96)]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_sizes_may_be_symbolic(level: str) -> None:
    fn = compiled(gelu, level, dynamic=True)
    for tokens in ((3, 17), (5, 4), (2, 1)):
        inputs = tensors("gelu", tokens=tokens)
        assert apart(step_of(fn, inputs)[0], step_of(gelu, inputs)[0]) < (0.06 if level == "fp8" else 1e-5)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("level", LEVELS)
def test_under_autocast(level: str) -> None:
    def model(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return gelu(*inputs)

    inputs = tensors("gelu")
    got, kept = step_of(compiled(model, level), inputs)
    assert apart(got, step_of(compiled(model, "free"), inputs)[0]) < (0.06 if level == "fp8" else 1e-9)
    assert any(t.dtype == torch.float8_e4m3fn for t in kept) == (level == "fp8")


def test_rows_of_zeros_and_of_extremes() -> None:
    """A row's scale is its own: rows of zeros, of 1e-30 and of 1e30 do not spoil each other."""
    x, w, b, v = tensors("gelu")
    with torch.no_grad():
        b.zero_()
        x[0, 0], x[0, 1] = 0, x[0, 1] * 1e-30
        x[0, 2] *= 1e18
    inputs = [x, w, b, v]
    (_, low, *_), (_, free, *_) = (step_of(compiled(gelu, level), inputs)[0] for level in ("fp8", "free"))
    assert low.isfinite().all()
    for row in range(4):
        assert apart([low[0, row]], [free[0, row]]) < 0.1


def test_frozen_weights_keep_the_smaller_of_two() -> None:
    """The first weight needs no gradient: its GEMM's input is not kept yet, and is kept instead where it is less."""
    for shape, smaller in (((96, 32), True), ((16, 32), False)):
        x = normal(3, 17, 32)
        w, v = normal(*shape).detach(), normal(32, shape[0])

        def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
            return F.linear(F.gelu(F.linear(x * 1.5, w)), v)

        free, _ = step_of(compiled(mlp, "free"), [x, w, v])
        less, kept = step_of(compiled(mlp, "input"), [x, w, v])
        assert all(torch.equal(a, b) for a, b in zip(less, free, strict=True))
        hidden = [t for t in kept if t.shape[-1] == shape[0] and t.numel() == 51 * shape[0]]
        assert bool(hidden) != smaller


def test_an_adapted_layer_is_summed_again() -> None:
    def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w) + 2 * F.linear(F.linear(x, a), b)), v)

    inputs = [normal(3, 17, 32), normal(96, 32).detach(), normal(4, 32), normal(96, 4), normal(32, 96)]
    free, _ = step_of(compiled(lora, "free"), inputs)
    less, kept = step_of(compiled(lora, "input"), inputs)
    assert apart(less, free) < 1e-6
    assert not any(t.numel() == 51 * 96 for t in kept)


def test_free_keeps_the_softmax_in_front_of_attentions_product() -> None:
    """What the activation's GEMM reads is rebuilt; scores are kept, as plain torch.compile keeps them."""

    def attend(x: Tensor, bias: Tensor, w: Tensor, v: Tensor) -> Tensor:
        scores = torch.softmax((x @ x.mT + bias).float(), -1).to(x.dtype)
        y = scores @ x
        return y + F.linear(F.gelu(F.linear(y, w)), v)

    inputs = [normal(3, 17, 32), normal(17, 17), normal(96, 32), normal(32, 96)]
    inputs = [t.detach().bfloat16().requires_grad_() for t in inputs]
    kept = {level: [t.numel() for t in step_of(compiled(attend, level), inputs)[1]] for level in ("off", "free")}
    assert [sizes.count(3 * 17 * 17) for sizes in kept.values()] == [2, 2], "products and scores"
    assert [sizes.count(3 * 17 * 96) for sizes in kept.values()] == [2, 1], "on both sides of the activation"


# ---- what a product stands between, at "free" ------------------------------------------------------------------------


def adapted(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A frozen layer, and an adapter that reads the activation by way of pointwise work."""
    h = F.gelu(F.linear(x, w))
    return F.linear(h, v) + F.linear(F.linear(h * s, a), b)


def dropped(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = F.gelu(F.linear(x, w))
    return F.linear(h, v) + F.linear(F.linear(F.dropout(h, 0.5), a), b)


def routed(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Experts' tokens, gathered behind the router's product, which reads them, too."""
    h = (x * s[: x.shape[-1]]).flatten(0, 1)
    token = torch.arange(2 * h.shape[0]) % h.shape[0]
    weights = F.linear(h, a[:, : x.shape[-1]])[token].mean(-1, keepdim=True)
    y = F.linear(F.gelu(F.linear(h[token], w)), v) * weights
    return torch.zeros_like(h).index_add(0, token, y) @ b[: x.shape[-1], :1]


def behind_a_product(tokens: tuple[int, ...], frozen: bool) -> list[Tensor]:
    x, w, v, s, a, b = (
        normal(*shape, dtype=torch.float64, seed=i)
        for i, shape in enumerate([(*tokens, 32), (96, 32), (32, 96), (96,), (4, 96), (32, 4)])
    )
    return [x, *(t.detach() if frozen else t for t in (w, v, s)), a, b]


@inductor_config.patch(force_disable_caches=True)  # they do not know that a function of ours was replaced
@pytest.mark.parametrize(
    ("fn", "tokens", "frozen", "size"),
    [
        (adapted, (51,), True, 51 * 96),
        (adapted, (3, 17), True, 51 * 96),
        (dropped, (3, 17), True, 51 * 96),
        (routed, (3, 17), False, 2 * 51 * 32),
    ],
)
def test_what_a_product_reads_is_rebuilt_behind_another(
    monkeypatch: pytest.MonkeyPatch, fn: Any, tokens: tuple[int, ...], frozen: bool, size: int
) -> None:
    inputs = behind_a_product(tokens, frozen)
    steps = []
    for edit in (memory_levels.recompute_linear_inputs, lambda graphs, **_: graphs):
        monkeypatch.setattr(memory_levels, "recompute_linear_inputs", edit)
        torch.manual_seed(0)
        steps.append(step_of(compiled(fn, "free", strict=False), inputs))
    (ours, kept), (theirs, more) = steps
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    of_size = [sum(t.numel() == size and t.shape[-1] != 1 for t in each) for each in (kept, more)]
    assert of_size[0] == of_size[1] - (len(tokens) > 1), "with tokens in two dimensions upstream rebuilds it itself"
    if fn is not dropped:
        assert apart(ours, step_of(fn, inputs)[0]) < 1e-12
    if fn is adapted:
        assert any(t.numel() == 51 * 4 for t in kept), "no product is computed again"


@torch.library.custom_op(
    "memory_levels::noisy", mutates_args=(), tags=(torch.Tag.pointwise, torch.Tag.nondeterministic_seeded)
)
def noisy(t: Tensor) -> Tensor:
    return t + torch.rand_like(t)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, grad: grad)


def test_what_draws_is_not_rebuilt() -> None:
    """It would draw other numbers."""

    def fn(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
        h = F.gelu(F.linear(x, w))
        return F.linear(h, v) + F.linear(F.linear(noisy(h), a), b)

    _, kept = step_of(compiled(fn, "free"), behind_a_product((3, 17), True))
    assert sum(t.numel() == 51 * 96 for t in kept) == 2, "the pre-activation and what was drawn"


@pytest.mark.parametrize("level", LEVELS)
def test_the_levels_below_take_what_is_left(level: str) -> None:
    inputs = [t.detach().float().requires_grad_(t.requires_grad) for t in behind_a_product((3, 17), True)]

    def inside(x: Tensor, *rest: Tensor) -> Tensor:  # x is the graph's own: with its weight frozen only that is kept
        return adapted(x.sin(), *rest)

    got, kept = step_of(compiled(inside, level, strict=False), inputs)
    hidden = [t.dtype for t in kept if t.numel() == 51 * 96]
    assert hidden == ([torch.float8_e4m3fn] if level == "fp8" else [])
    assert apart(got, step_of(inside, inputs)[0]) < (1e-6 if level == "input" else 0.1)


def also_returned(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = F.gelu(F.linear(x, w))
    scaled = h * s
    y = F.linear(h, v) + F.linear(F.linear(scaled, a), b)
    return torch.cat([y, scaled], -1)


def also_read(x: Tensor, w: Tensor, v: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    h = F.gelu(F.linear(x, w))
    scaled = h * s
    return F.linear(h, v) + F.linear(F.linear(scaled, a), b) + scaled.softmax(-1)[..., :32]


def checkpointed(fn: Callable[..., Tensor], *keeps: Any) -> Callable[..., Tensor]:
    """The function in a checkpoint whose policy keeps what these operators compute."""

    context = {"context_fn": selective(*keeps)} if keeps else {}
    return lambda *inputs: checkpoint(fn, *inputs, use_reentrant=False, **context)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fn", "there"), [(also_returned, 0), (also_read, 0), (checkpointed(adapted, torch.ops.aten.mul.Tensor), 1)]
)
def test_what_is_left_as_it_is_at_free(fn: Any, there: int) -> None:
    """What something else reads, what selective checkpointing keeps; and what is a result is right all the same."""
    inputs = behind_a_product((3, 17), True)
    got, kept = step_of(compiled(fn, "free", strict=False), inputs)
    assert apart(got, step_of(fn, inputs)[0]) < 1e-12
    assert sum(t.numel() == 51 * 96 for t in kept) >= there


# ---- operators that ask for it themselves ----------------------------------------------------------------------------


ASKING: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda x, w, b, v: F.linear(FF.bias_gelu(F.linear(x, w), b, "tanh", memory="fp8"), v),
    "swiglu": lambda x, w, u, v: F.linear(FF.swiglu(F.linear(x, w), F.linear(x, u), memory="fp8"), v),
    "packed": lambda x, w, b, v: F.linear(FF.bias_geglu(F.linear(x, w), b, layout="swapped", memory="fp8"), v),
}


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("name", ASKING)
def test_operators_that_ask_for_fp8_are_treated_as_the_policy_does(name: str) -> None:
    """Their result is rebuilt, too, for the second weight's gradient; without our passes it is kept as well."""
    inputs = tensors(name)
    eager, _ = step_of(ASKING[name], inputs)
    ours, kept = step_of(compiled(ASKING[name], "free"), inputs)
    torch._dynamo.reset()
    plain, kept_plain = step_of(torch.compile(ASKING[name], fullgraph=True), inputs)
    assert apart(plain, eager) < 2e-3, "an element on a boundary may round the other way"
    assert apart(ours[:-1], eager[:-1]) < 2e-3 and 1e-4 < apart(ours[-1:], eager[-1:]) < 0.06
    stored = 51 * (96 if name == "gelu" else 192)
    for tensors_kept, results in ((kept, 0), (kept_plain, 1)):
        assert sum(t.numel() for t in tensors_kept if t.dtype == torch.float8_e4m3fn) == stored
        assert sum(t.numel() == 51 * 96 and t.dtype == torch.float32 for t in tensors_kept) == results


# ---- where it refuses ------------------------------------------------------------------------------------------------


@inductor_config.patch(force_disable_caches=True)
def test_fp8_refuses_what_backward_reads_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    """sin's derivative reads the pre-activation too: it would see the rounding."""

    def two(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        h = F.linear(x, w, b)
        return F.linear(F.gelu(h), v) + h.sin().sum(-1, keepdim=True)

    inputs = tensors("gelu")
    caplog.set_level(logging.INFO, "torch_fused_ops")
    low, kept = step_of(compiled(two, "fp8", strict=False), inputs)
    assert apart(low, step_of(two, inputs)[0]) < 1e-5
    assert not any(t.dtype == torch.float8_e4m3fn for t in kept)
    assert "has no effect: backward also reads it in aten.cos.default" in caplog.text


@pytest.mark.parametrize("level", LEVELS)
def test_what_the_user_has_is_not_kept_twice(level: str) -> None:
    """The pre-activation is a result: it is alive anyway."""

    def both(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = F.linear(x, w, b)
        return F.linear(F.gelu(h), v), h

    inputs = tensors("gelu")
    (out, h), kept = kept_by(lambda: compiled(both, level)(*inputs))
    got = torch.autograd.grad([out, h], inputs, [torch.ones_like(out), torch.ones_like(h)])
    assert not any(t.dtype == torch.float8_e4m3fn for t in kept)
    out, h = both(*inputs)
    wanted = torch.autograd.grad([out, h], inputs, [torch.ones_like(out), torch.ones_like(h)])
    assert apart(got, wanted) < 1e-5


def test_an_argument_is_not_kept_twice() -> None:
    """It is alive anyway."""
    v = normal(32, 96)
    _, kept = step_of(compiled(lambda x: F.linear(FF.bias_gelu(x, None), v), "fp8"), [normal(51, 96)])
    assert not any(t.dtype == torch.float8_e4m3fn for t in kept)


def test_float64_stays_exact() -> None:
    inputs = tensors("gelu", torch.float64)
    low, kept = step_of(compiled(gelu, "fp8"), inputs)
    assert apart(low, step_of(gelu, inputs)[0]) < 1e-12
    assert not any(t.dtype == torch.float8_e4m3fn for t in kept)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("keeps", [(), GEMMS], ids=["all of it", "selective"])
def test_checkpointed_regions_stay_checkpointed(keeps: tuple[Any, ...], level: str) -> None:
    """What selective checkpointing keeps is kept."""
    inputs = tensors("gelu")
    got, kept = step_of(compiled(checkpointed(gelu, *keeps), level), inputs)
    assert apart(got, step_of(gelu, inputs)[0]) < 1e-5
    assert [t.dtype for t in kept if t.numel() == 51 * 96] == ([torch.float32] if keeps else [])


@pytest.mark.parametrize("level", LEVELS)
def test_inference_is_not_touched(level: str) -> None:
    inputs = tensors("gelu")
    with torch.no_grad():
        assert torch.equal(compiled(gelu, level)(*inputs), compiled(gelu, "free")(*inputs))


@pytest.mark.parametrize("level", LEVELS)
def test_a_budget_of_the_users_wins(level: str) -> None:
    inputs = tensors("gelu")
    with torch._functorch.config.patch(activation_memory_budget=0.99):
        got, kept = step_of(compiled(gelu, level), inputs)
    assert apart(got, step_of(gelu, inputs)[0]) < 1e-5
    assert not any(t.dtype == torch.float8_e4m3fn for t in kept)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("level", LEVELS)
@inductor_config.patch(force_disable_caches=True)
def test_a_failure_leaves_free(level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Half way through, with one tensor of two already replaced."""
    calls = []

    def fails(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError(f"on purpose: {level}")
        original(*args)

    name = {"fp8": "_save_one_fp8", "input": "_replace"}[level]
    original = getattr(memory_levels, name)
    monkeypatch.setattr(memory_levels, name, fails)
    monkeypatch.setattr(passes, "_logged", set())  # it is logged once a process
    inputs = tensors("swiglu")
    got, kept = step_of(compiled(swiglu, level, strict=False), inputs)
    assert len(calls) == 2 and f"on purpose: {level}" in caplog.text
    assert not any(t.dtype == torch.float8_e4m3fn for t in kept)
    assert all(torch.equal(a, b) for a, b in zip(got, step_of(compiled(swiglu, "free"), inputs)[0], strict=True))
    calls.clear()
    raises(Exception, "on purpose", step_of, compiled(swiglu, level, strict=True), inputs)


# ---- by module -------------------------------------------------------------------------------------------------------


def test_a_level_for_each_module() -> None:
    model, x = Stack((MLP(32, 96, nn.GELU()) for _ in range(3)), residual=True), normal(4, 32)
    _, kept = step_of(compiled(model, {"layers.0": "fp8", "layers.[12].activation": "input"}), [x])
    hidden = [t for t in kept if t.shape == (4, 96)]
    assert [t.dtype for t in hidden] == [torch.float8_e4m3fn]
    _, kept = step_of(compiled(model, {"layers.1.*": "input", "*": "fp8"}), [x])
    assert [t.dtype for t in kept if t.shape == (4, 96)] == [torch.float8_e4m3fn] * 2
    raises(Exception, "memory='nothing' matches no site's modules", step_of, compiled(model, {"nothing": "input"}), [x])
    _, kept = step_of(compiled(model, {"nothing": "input"}, strict=False), [x])
    assert [t.dtype for t in kept if t.shape == (4, 96)] == [torch.float32] * 3


def test_policies_with_levels_compare_and_hash() -> None:
    one, two = (FusionPolicy(memory={"a": "fp8", "b.*": "input"}) for _ in range(2))
    assert one == two and hash(one) == hash(two) and one != FusionPolicy(memory={"b.*": "input", "a": "fp8"})
    assert eval(repr(one), {"FusionPolicy": FusionPolicy}) == one
    assert one.memory_of({"", "a", "a.act"}) == "fp8" and one.memory_of({"", "b"}) == "input"
    assert one.memory_of({"", "c"}) == "free"


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("level", LEVELS)
def test_a_scaled_gate_keeps_as_little(level: str) -> None:
    """The scale stands between the GEMM and the operator, and is computed again with it."""

    def scaled(x: Tensor, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.silu(0.7 * F.linear(x, w)) * F.linear(x, u), v)

    inputs = tensors("swiglu")
    got, kept = step_of(compiled(scaled, level), inputs)
    assert sum(t.nbytes for t in kept) == sum(t.nbytes for t in step_of(compiled(swiglu, level), inputs)[1])
    assert apart(got, step_of(scaled, inputs)[0]) < (0.1 if level == "fp8" else 1e-5)
