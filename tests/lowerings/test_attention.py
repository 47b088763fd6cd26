"""``attention="input"``: which saved tensors backward recomputes, that gradients stay the same, and when it refuses."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import compiled, distances, kept_by, normal, raises
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torch_fused_ops import FusionPolicy

pytestmark = pytest.mark.codegen_is_slow

WIDTH, HEADS, KEYS, SIZE, TOKENS = 32, 4, 2, 8, 12  # model width, query heads, key heads, head size, tokens
BOTH = FusionPolicy(memory="input", attention="input", strict=True)
MLP_ONLY = FusionPolicy(memory="input", strict=True)


def heads(t: Tensor, count: int) -> Tensor:
    return t.unflatten(-1, (count, -1)).transpose(1, 2)


def rotated(t: Tensor) -> Tensor:
    """Rotary position embedding."""
    angles = torch.arange(t.shape[-2], dtype=t.dtype)[:, None] * torch.linspace(1, 0.1, SIZE, dtype=t.dtype)
    halves = t.chunk(2, -1)
    return t * angles.cos() + torch.cat([-halves[1], halves[0]], -1) * angles.sin()


class Attention(nn.Module):
    """Separate projections with as many key heads as query heads. Subclasses change one thing each."""

    keys = HEADS

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.k, self.v = (nn.Linear(WIDTH, self.keys * SIZE, bias=bias) for _ in range(2))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = heads(self.q(x), HEADS), heads(self.k(x), self.keys), heads(self.v(x), self.keys)
        return rotated(q), rotated(k), v

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.core(*self.projected(x)).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class GroupedQuery(Attention):
    keys = KEYS

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().core(q, *(t.repeat_interleave(HEADS // KEYS, 1) for t in (k, v)))


class Masked(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril().triu(-3)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


class WrittenOut(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * SIZE**-0.5, -1) @ v


class Packed(Attention):
    """One linear layer for queries, keys and values, with biases, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        del self.q, self.k, self.v

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(heads(t, HEADS) for t in self.qkv(x).chunk(3, -1))  # type: ignore[return-value]


class Normed(Attention):
    """Norms of queries and keys, as in Qwen3."""

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (heads(f(x), HEADS) for f in (self.q, self.k, self.v))
        return rotated(F.rms_norm(q, (SIZE,))), rotated(F.rms_norm(k, (SIZE,))), v


class Latent(Attention):
    """Keys and values from a small latent tensor, as in DeepSeek's MLA."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, 2 * WIDTH, bias=False)
        del self.k, self.v

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.up(F.rms_norm(self.down(x), (8,))).chunk(2, -1)
        return rotated(heads(self.q(x), HEADS)), heads(k, HEADS), heads(v, HEADS)


class Adapted(Attention):
    """Frozen projections with adapters, as LoRA has on queries and values."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = (nn.ModuleList(nn.Linear(*s, bias=False) for _ in "qv") for s in ((WIDTH, 4), (4, WIDTH)))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, v = (f(x) + 2 * b(a(x)) for f, a, b in zip((self.q, self.v), self.a, self.b, strict=True))
        return heads(q, HEADS), heads(self.k(x), HEADS), heads(v, HEADS)


class Gated(Attention):
    """A gate on the result, and the keys' weight shared with the values."""

    def __init__(self) -> None:
        super().__init__()
        del self.v

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.gate = x
        return heads(self.q(x), HEADS), heads(self.k(x), HEADS), heads(self.k(x * 0.5), HEADS)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().core(q, k, v) * heads(self.gate, HEADS).sigmoid()


class Cross(Attention):
    """Keys and values from another sequence, which the block computes first."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        memory = torch.tanh(self.encoder(x.flip(1)))
        return heads(self.q(x), HEADS), heads(self.k(memory), HEADS), heads(self.v(memory), HEADS)


class Block(nn.Module):
    """A transformer's block, with a SwiGLU MLP."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(F.rms_norm(x, (WIDTH,)))
        h = F.rms_norm(x, (WIDTH,))
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


KINDS = (GroupedQuery, Masked, WrittenOut, Packed, Normed, Latent, Adapted, Gated, Cross, Attention)


def model_of(kind: Callable[[], nn.Module], blocks: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind()) for _ in range(blocks))).double()


def step(model: nn.Module, call: Callable[..., Any], x: Tensor) -> tuple[list[Tensor], int, list[Tensor]]:
    """Return (the result and all gradients, bytes saved for backward besides parameters, the saved tensors)."""
    out, kept = kept_by(lambda: call(x))
    requested = [x, *(p for p in model.parameters() if p.requires_grad)]
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {t.untyped_storage().data_ptr(): t for t in kept}
    size = sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in parameters)
    return [out.detach(), *torch.autograd.grad(out, requested, torch.ones_like(out))], size, kept


def inputs() -> Tensor:
    return normal(2, TOKENS, WIDTH, dtype=torch.float64)


# Each kind saves the block's input and attention's result. Latent also saves its latent tensor, Cross the other
# sequence, and WrittenOut the softmax.
@pytest.mark.parametrize("kind", [*KINDS[:4], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[4:])])
def test_gradients_are_exact_and_only_inputs_are_saved(kind: type[Attention]) -> None:
    model, x = model_of(kind), inputs()
    got, _, kept = step(model, compiled(model, BOTH), x)
    assert max(distances(got, step(model, model, x)[0])) < 1e-13
    large = [tuple(t.shape) for t in kept if t.numel() >= 2 * TOKENS * SIZE and not isinstance(t, nn.Parameter)]
    assert len(large) == (3 if kind in (Latent, Cross, WrittenOut) else 2), large


def test_repeated_keys_are_saved_once_at_free() -> None:
    model, x = model_of(GroupedQuery), inputs()
    expected, *_ = step(model, model, x)
    got, _, kept = step(model, compiled(model, FusionPolicy(memory="free", strict=True)), x)
    assert max(distances(got, expected)) < 1e-13
    sizes = [t.numel() for t in kept if t.ndim > 3]
    assert sizes.count(x.numel() // 2) == 2, "keys and values"
    assert sizes.count(x.numel()) == 2, "queries and the result"


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("memory", ["off", "fp8", "tiled:2"])
def test_every_memory_level_combines_with_it(memory: str) -> None:
    model, x = model_of(Attention).float(), inputs().detach().float().requires_grad_()
    (expected, without, _), (got, less, _) = (
        step(model, compiled(model, FusionPolicy(memory=memory, attention=level, strict=True)), x)
        for level in ("off", "input")
    )
    assert max(distances(got, expected)) < 1e-6
    assert less < without


# ---- patterns ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_patterns_select_modules() -> None:
    model, x = model_of(Attention, 2), inputs()
    sizes = []
    for patterns in ({"0.*": "off"}, {"0.*": "input"}, {"1.attention": "off", "*": "input"}):
        policy = FusionPolicy(memory="input", attention=patterns, strict=True)
        sizes.append(step(model, compiled(model, policy), x)[1])
    none, first, same = sizes
    assert none > first == same


def test_one_projection_can_be_selected() -> None:
    model, x = model_of(Attention), inputs()
    _, without, _ = step(model, compiled(model, MLP_ONLY), x)
    policy = FusionPolicy(memory="input", attention={"*.o": "input"}, strict=True)
    _, less, _ = step(model, compiled(model, policy), x)
    assert without - less == x.nbytes


def test_a_pattern_that_matches_nothing_raises_under_strict() -> None:
    model, x = model_of(Attention), inputs()
    policy = FusionPolicy(attention={"decoder.*": "input"}, strict=True)
    raises(Exception, r"attention='decoder.\*' matches no", step, model, compiled(model, policy), x)


def test_excluded_modules_are_left() -> None:
    model, x = model_of(Attention), inputs()
    policies = (FusionPolicy(exclude=("*attention",)), FusionPolicy(exclude=("*attention",), attention="input"))
    first, second = (step(model, compiled(model, policy), x)[1] for policy in policies)
    assert first == second


# ---- soundness ---------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    """Attention on the graph's own argument: with frozen projections only the argument could be saved for them."""

    def __init__(self, kind: type[Attention] = Attention) -> None:
        super().__init__()
        self.attention = kind()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) * self.scale  # type: ignore[no-any-return]


def overwritten(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Gradients of a step whose caller overwrites the argument, through ``.data``, before backward."""
    x = inputs().detach()
    out = call(x)
    x.data.zero_()
    return list(torch.autograd.grad(out.sum(), [p for p in model.parameters() if p.requires_grad]))


def test_the_caller_may_overwrite_what_frozen_projections_read() -> None:
    torch.manual_seed(0)
    model = Bare().double()
    model.attention.q.requires_grad_(False)
    model.attention.k.requires_grad_(False)
    model.attention.v.requires_grad_(False)
    expected = overwritten(model, model)
    assert max(distances(overwritten(model, compiled(model, FusionPolicy(attention="input"))), expected)) < 1e-13


def test_strict_raises_if_an_attention_cannot_be_recomputed() -> None:
    mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    model = nn.Sequential(Attention(), mlp).double()
    model[0].requires_grad_(False)  # so nothing saves the argument, which the caller may modify
    policy = FusionPolicy(attention={"0.[qkv]": "input"}, strict=True)
    text = r"strict=True and attention='input' has no effect on 0: .*the caller may modify"
    raises(Exception, text, step, model, compiled(model, policy), inputs())


class Updated(nn.Module):
    """Forward writes what the projections read, after they have read it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.register_buffer("state", torch.rand(2, TOKENS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x + self.state)
        self.state.mul_(0.5)
        return y  # type: ignore[no-any-return]


@pytest.mark.parametrize("frozen", [False, True])
def test_forward_may_write_what_the_projections_read(frozen: bool) -> None:
    torch.manual_seed(0)
    model = Updated().double()
    if frozen:
        for layer in (model.attention.q, model.attention.k, model.attention.v):
            layer.requires_grad_(False)
    x = inputs()
    twin = copy.deepcopy(model)
    expected, *_ = step(twin, twin, x)
    got, *_ = step(model, compiled(model, FusionPolicy(memory="input", attention="input")), x)
    assert max(distances(got, expected)) < 1e-13


class Returned(Bare):
    """The keys are a result, as in a cache."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.attention.projected(torch.tanh(x))
        return self.attention.o(self.attention.core(q, k, v).transpose(1, 2).flatten(2)) * self.scale, k


def test_returned_keys_stay_saved_and_queries_are_recomputed() -> None:
    torch.manual_seed(0)
    model, x = Returned().double(), inputs()
    requested = [x, *model.parameters()]
    results = []
    for call in (model, compiled(model, FusionPolicy(attention="input"))):
        (out, _), kept = kept_by(lambda call=call: call(x))
        results.append((torch.autograd.grad(out.sum(), requested), kept))
    (expected, _), (got, kept) = results
    assert max(distances(got, expected)) < 1e-13
    assert sum(t.ndim == 4 and t.numel() == x.numel() for t in kept) == 2, "the keys, and attention's result"


class Dropped(Attention):
    """Dropout inside attention, and behind the projection."""

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, F.dropout(v, 0.5), is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3)


def test_random_numbers_are_not_drawn_again() -> None:
    model, x = model_of(Dropped), inputs()
    results = []
    for policy in (MLP_ONLY, BOTH):
        torch.manual_seed(3)
        results.append(step(model, compiled(model, policy), x))
    (expected, without, _), (got, less, _) = results
    assert max(distances(got, expected)) < 1e-13
    assert less < without


@pytest.mark.slow
def test_under_autocast() -> None:
    model, x = model_of(Attention).float(), inputs().detach().float().requires_grad_()

    def call(policy: FusionPolicy) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            fn = compiled(model, policy)
            return step(model, fn, x)[0]

    assert max(distances(call(BOTH), call(MLP_ONLY))) < 1e-6


def test_inside_a_checkpoint_nothing_is_left_to_save() -> None:
    model, x = model_of(Attention), inputs()

    def call(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)  # type: ignore[return-value]

    expected, *_ = step(model, model, x)
    got, *_ = step(model, compiled(call, FusionPolicy(memory="input", attention="input")), x)
    assert max(distances(got, expected)) < 1e-13


@pytest.mark.slow
def test_two_micro_batches_and_a_retained_graph() -> None:
    model, x = model_of(GroupedQuery), inputs()
    call = compiled(model, BOTH)
    parameters = list(model.parameters())

    def gradients(fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
        first, second = fn(x), fn(x * 0.5)
        again = torch.autograd.grad(first.sum(), parameters, retain_graph=True)
        both = (torch.autograd.grad(y.sum(), parameters) for y in (first, second))
        return [a + b + c for a, b, c in zip(again, *both, strict=True)]

    assert max(distances(gradients(call), gradients(model))) < 1e-13


@pytest.mark.slow
def test_two_policies_do_not_share_a_cache() -> None:
    model, x = model_of(Attention), inputs()
    sizes = [step(model, compiled(model, policy), x)[1] for policy in (MLP_ONLY, BOTH, MLP_ONLY)]
    assert sizes[0] == sizes[2] > sizes[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_may_be_symbolic(kind: type[Attention]) -> None:
    model = model_of(kind)
    fn = compiled(model, BOTH, dynamic=True)
    for tokens in (7, 12, 5):
        x = normal(3, tokens, WIDTH, dtype=torch.float64)
        assert max(distances(step(model, fn, x)[0], step(model, model, x)[0])) < 1e-12
