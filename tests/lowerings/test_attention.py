"""``attention="input"``: recomputed tensors, exact gradients, and the reasons for which a tensor stays saved."""

import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import Net, cases, distances, nbytes, normal, raises, saved_by
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import torch_fused_ops as tfo
from torch_fused_ops import FusionPolicy
from torch_fused_ops.benchmarks import models
from torch_fused_ops.lowerings import attention
from torch_fused_ops.tools.verify import interpreted

WIDTH, HEADS, KEYS, SIZE, TOKENS = 32, 4, 2, 8, 12  # model width, query heads, key heads, head size, tokens
BOTH = FusionPolicy(memory="input", attention="input", strict=True)
MLP_ONLY = FusionPolicy(memory="input", strict=True)


def heads(t: Tensor, count: int) -> Tensor:
    return t.unflatten(-1, (count, -1)).transpose(1, 2)


def rotated(t: Tensor) -> Tensor:
    """Apply rotary position embedding."""
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
        return heads(self.q(x), HEADS), heads(self.k(x), self.keys), heads(self.v(x), self.keys)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.core(*self.projected(x)).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Rotary(Attention):
    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().projected(x)
        return rotated(q), rotated(k), v


class GroupedQuery(Rotary):
    keys = KEYS

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().core(q, *(t.repeat_interleave(HEADS // KEYS, 1) for t in (k, v)))


class Masked(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril().triu(-3)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


class Flex(Attention):
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - (i - j).abs())  # type: ignore[return-value]


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


class Tied(Attention):
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
    """Keys and values from an encoder's result, as in encoder–decoder models."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        memory = torch.tanh(self.encoder(x.flip(1)))
        return heads(self.q(x), HEADS), heads(self.k(memory), HEADS), heads(self.v(memory), HEADS)


class Block(nn.Module):
    """A transformer block with a SwiGLU MLP."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(F.rms_norm(x, (WIDTH,)))
        h = F.rms_norm(x, (WIDTH,))
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


# Each kind saves the block's input and attention's result. Latent also saves its latent tensor, Cross the encoder's
# result, and WrittenOut the softmax.
SAVED_TENSORS = dict.fromkeys((GroupedQuery, Masked, Flex, Packed, Normed, Adapted, Tied, Attention), 2)
SAVED_TENSORS |= dict.fromkeys((Latent, Cross, WrittenOut), 3)
# By default, a model has three blocks. It does not save residual sums between them.
KINDS = [(GroupedQuery, WrittenOut, Packed), (Flex,), *((kind,) for kind in SAVED_TENSORS if kind is not Flex)]


def model_of(*kinds: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind()) for kind in kinds)).double()


def fused(model: Callable[..., Any], policy: FusionPolicy = BOTH, compiled: bool = False) -> Callable[..., Any]:
    """Return the model as a function of its arguments, compiled with a policy."""
    torch._dynamo.reset()
    return functools.partial(interpreted(policy, compiled=compiled), model)


def step(model: nn.Module, call: Callable[..., Any], x: Tensor) -> tuple[list[Tensor], int, list[Tensor]]:
    """Return (the result and all gradients, bytes saved for backward without parameters, the saved tensors)."""
    out, saved = saved_by(lambda: call(x))
    requested = [x, *(p for p in model.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(out, requested, torch.ones_like(out))
    return [out.detach(), *gradients], nbytes(saved, model.parameters()), saved


def inputs() -> Tensor:
    return normal(2, TOKENS, WIDTH, dtype=torch.float64)


@functools.cache
def saved_bytes(policy: FusionPolicy, blocks: int = 1) -> int:
    """Return the bytes that plain attention saves."""
    model = model_of(*[Attention] * blocks)
    return step(model, fused(model, policy), inputs())[1]


@pytest.mark.parametrize(
    ("kinds", "compiled"),
    cases(KINDS, (False, True), default=lambda kinds, compiled: kinds in KINDS[:2] and not compiled),
)
def test_gradients_are_exact_and_only_inputs_are_saved(
    kinds: tuple[type[Attention], ...], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Flex in kinds:  # PyTorch rejects its backward on CPUs, which lack a kernel. Interpreted graphs do not need it.
        if compiled:
            pytest.skip("FlexAttention has no backward kernel for CPUs")
        monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    model, x = model_of(*kinds), inputs()
    actual, _, saved = step(model, fused(model, compiled=compiled), x)
    assert max(distances(actual, step(model, model, x)[0])) < 1e-14
    large = [tuple(t.shape) for t in saved if t.numel() >= 2 * TOKENS * SIZE and not isinstance(t, nn.Parameter)]
    assert len(large) == sum(SAVED_TENSORS[kind] for kind in kinds), large


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_repeated_keys_are_saved_once_at_free(dynamic: bool) -> None:
    """With dynamic sizes, the recomputation also reads sizes, which backward has."""
    torch.manual_seed(0)
    model, x = GroupedQuery().double(), inputs()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    actual, _, saved = step(model, fused(model, FusionPolicy()), x)
    assert max(distances(actual, step(model, model, x)[0])) < 1e-14
    assert sum(t.numel() == x.numel() // 2 for t in saved) == 2, "keys and values"
    assert sum(t.numel() == x.numel() and t.ndim > 3 for t in saved) == 2, "queries and the result"


@pytest.mark.covering(every=5)
@pytest.mark.parametrize("fields", [{}, {"memory": "off"}, {"memory": "fp8"}, {"memory": "tiled:2"}, {"gemm": "fp8"}])
def test_other_levels_and_float8_gemms_combine_with_it(fields: dict[str, Any]) -> None:
    model, x = model_of(Attention).float(), inputs().detach().float().requires_grad_()
    policies = (FusionPolicy(**fields, attention=level, strict=not fields.get("gemm")) for level in ("off", "input"))
    (expected, all_bytes, _), (actual, fewer_bytes, _) = (step(model, fused(model, policy), x) for policy in policies)
    assert max(distances(actual, expected)) < 1e-6
    assert fewer_bytes < all_bytes


# ---- patterns ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_patterns_select_modules() -> None:
    patterns = ({"0.*": "off"}, {"0.*": "input"}, {"1.attention": "off", "*": "input"})
    none, first, same = (saved_bytes(FusionPolicy(memory="input", attention=p, strict=True), 2) for p in patterns)
    assert none > first == same


def test_one_projection_can_be_selected() -> None:
    policy = FusionPolicy(memory="input", attention={"*.o": "input"}, strict=True)
    assert saved_bytes(MLP_ONLY) - saved_bytes(policy) == inputs().nbytes


def test_excluded_modules_do_not_change() -> None:
    policy = FusionPolicy(memory="input", attention="input", exclude=("*attention",))
    assert saved_bytes(policy) == saved_bytes(MLP_ONLY)


# ---- soundness ---------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    """Attention reads the graph's argument. With frozen projections, recomputation needs a copy of it."""

    def __init__(self, frozen: bool = False, kind: type[Attention] = Rotary) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = kind().double()
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
        for layer in (self.attention.q, self.attention.k, self.attention.v):
            layer.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x) * self.scale


def overwritten(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return a step's gradients. Before backward its caller overwrites the argument through ``.data``."""
    x = inputs().detach()
    out = call(x)
    x.data.zero_()
    return list(torch.autograd.grad(out.sum(), [p for p in model.parameters() if p.requires_grad]))


def test_the_caller_may_overwrite_the_input_of_frozen_projections() -> None:
    model = Bare(frozen=True)
    expected = overwritten(model, model)
    assert max(distances(overwritten(model, fused(model, FusionPolicy(attention="input"))), expected)) < 1e-14


def test_strict_raises_if_an_attention_cannot_be_recomputed() -> None:
    mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
    model = nn.Sequential(Attention(), mlp).double()
    model[0].requires_grad_(False)  # so nothing saves the argument, and a copy of it is as large as the queries
    policy = FusionPolicy(attention={"0.q": "input"}, strict=True)
    text = r"strict=True and attention='input' has no effect on 0: .*its inputs take"
    raises(Exception, text, step, model, fused(model, policy), inputs())


class Updated(Bare):
    """Forward overwrites a buffer after the projections have read it."""

    def __init__(self, frozen: bool) -> None:
        super().__init__(frozen)
        self.register_buffer("state", torch.rand(2, TOKENS, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x + self.state)
        self.state.mul_(0.5)
        return y


@pytest.mark.parametrize("frozen", [False, True])
def test_forward_may_overwrite_the_input_of_projections(frozen: bool) -> None:
    model, x = Updated(frozen), inputs()
    original = copy.deepcopy(model)
    expected, *_ = step(original, original, x)
    actual, *_ = step(model, fused(model, FusionPolicy(memory="input", attention="input")), x)
    assert max(distances(actual, expected)) < 1e-14


class Returned(Bare):
    """The model also returns the keys, as for a cache."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.attention.projected(torch.tanh(x))
        return self.attention.o(self.attention.core(q, k, v).transpose(1, 2).flatten(2)) * self.scale, k


def test_returned_keys_stay_saved_and_queries_are_recomputed() -> None:
    model, x = Returned(), inputs()
    requested = [x, *model.parameters()]
    results = []
    for call in (model, fused(model, FusionPolicy(attention="input"))):
        (out, _), saved = saved_by(lambda call=call: call(x))
        results.append((torch.autograd.grad(out.sum(), requested), saved))
    (expected, _), (actual, saved) = results
    assert max(distances(actual, expected)) < 1e-14
    assert sum(t.ndim == 4 and t.numel() == x.numel() for t in saved) == 2, "the keys, and attention's result"


def test_returned_keys_that_heads_share_are_recomputed() -> None:
    """At "free" backward reads copies of keys and values, since the caller may write the returned keys."""
    model, x = Returned(kind=GroupedQuery), inputs()
    requested = [x, *model.parameters()]
    call = fused(model, FusionPolicy(attention="input", strict=True))
    (out, keys), saved = saved_by(lambda: call(x))
    keys.data.zero_()
    expected = torch.autograd.grad(model(x)[0].sum(), requested)
    assert max(distances(torch.autograd.grad(out.sum(), requested), expected)) < 1e-14
    assert sum(t.ndim == 4 for t in saved) == 1, "attention's result"


class Dropped(Attention):
    """Dropout inside attention and after the projection."""

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, F.dropout(v, 0.5), is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3)


def test_random_numbers_are_not_drawn_again() -> None:
    model, x = model_of(Dropped), inputs()
    results = []
    for call in (model, fused(model)):
        torch.manual_seed(3)
        results.append(step(model, call, x))
    (expected, _, _), (actual, _, saved) = results
    assert max(distances(actual, expected)) < 1e-14
    kinds = [t.dtype for t in saved if t.shape == (2, HEADS, TOKENS, SIZE)]
    assert kinds.count(torch.bool) == 1 and len(kinds) == 3, "a mask, the dropped values and attention's result"


@pytest.mark.slow
def test_under_autocast() -> None:
    model, x = model_of(Attention).float(), inputs().detach().float().requires_grad_()

    def call(policy: FusionPolicy) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return step(model, fused(model, policy), x)[0]

    assert max(distances(call(BOTH), call(MLP_ONLY))) < 1e-6


def test_a_checkpoint_around_the_model_saves_nothing_more() -> None:
    model, x = model_of(Attention), inputs()
    whole = Net(lambda s, x: checkpoint(s.model, x, use_reentrant=False), model=model)
    actual, size, _ = step(model, fused(whole, FusionPolicy(memory="input", attention="input")), x)
    assert max(distances(actual, step(model, model, x)[0])) < 1e-14
    assert size - x.nbytes in (0, torch.get_rng_state().nbytes), "before torch 2.15, the state of the generator"


def test_hooks_see_the_same_values() -> None:
    """A forward hook scales the queries. Saved-tensor hooks copy every tensor."""
    model, x = model_of(Attention), inputs()
    model[0].attention.q.register_forward_hook(lambda module, args, out: 2 * out)  # type: ignore[union-attr]
    expected, *_ = step(model, model, x)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        actual, *_ = step(model, fused(model), x)
    assert max(distances(actual, expected)) < 1e-14


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist = pytest.importorskip("torch.distributed")
    importlib.import_module("torch.distributed.tensor")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_parameters_may_be_dtensors(mesh: Any) -> None:
    """The local shards are larger than the activations, and in memory anyway."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x = model_of(Rotary), inputs()
    expected, expected_bytes, _ = step(model, fused(model), x)
    plan = dict.fromkeys(("0.attention.q", "0.attention.k", "0.attention.v", "0.gate", "0.up"), ColwiseParallel())
    plan |= dict.fromkeys(("0.attention.o", "0.down"), RowwiseParallel())
    parallelize_module(model, mesh, plan)
    actual, _, saved = step(model, fused(model), x)
    assert max(distances((full(t) for t in actual), expected)) < 1e-14
    assert nbytes(saved, map(full, model.parameters())) == expected_bytes


def full(t: Any) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[no-any-return]


def test_the_caller_may_overwrite_dtensors(mesh: Any) -> None:
    """Nothing else saves the input of the frozen weight. A DTensor has two inputs in the graph, and a parameter one."""
    from torch.distributed.tensor import DTensor, Replicate

    def body(s: Any, x: Any, y: Any) -> Tensor:
        x, y = x.to_local(), y.to_local()
        return x + s.down(F.gelu(s.up(y)))  # type: ignore[no-any-return]

    model = Net(body, up=nn.Linear(WIDTH, 3 * WIDTH), down=nn.Linear(3 * WIDTH, WIDTH)).double()
    model.up.weight.requires_grad_(False)  # type: ignore[union-attr]
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = []
    for call in (model, functools.partial(interpreted(MLP_ONLY), model)):
        x, y = (DTensor.from_local(inputs().detach().clone(), mesh, [Replicate()]) for _ in range(2))
        out = call(x, y)
        y.to_local().data.zero_()
        gradients.append(torch.autograd.grad(out.sum(), parameters))
    assert max(distances(*gradients)) < 1e-14


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in SAVED_TENSORS if kind is not Flex])
def test_sizes_may_be_symbolic(kind: type[Attention], compiled: bool) -> None:
    model = model_of(kind)
    fn = fused(model, compiled=compiled)
    for tokens in (7, 12, 5):
        x = normal(3, tokens, WIDTH, dtype=torch.float64)
        assert max(distances(step(model, fn, x)[0], step(model, model, x)[0])) < 1e-14


# ---- reports -----------------------------------------------------------------------------------------------------


def mixtral() -> tuple[nn.Module, list[Tensor]]:
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

    config = transformers.MixtralConfig(attn_implementation="sdpa", experts_implementation="grouped_mm")
    block = MixtralDecoderLayer(config, layer_idx=0)
    run = Net(lambda s, x, cos, sin: s.block(x, position_embeddings=(cos, sin)), block=block)
    return run, [torch.empty(2, 4096, 4096, requires_grad=True), *(torch.empty(1, 4096, 128) for _ in range(2))]


def gpt(width: int, heads: int, *tokens: int) -> tuple[nn.Module, list[Tensor]]:
    config = models.Config(1, width, 4 * width, heads, tokens[1], 0)
    return models.GPTBlock(config), [torch.empty(*tokens, width, requires_grad=True)]


# Blocks of published models, and the MiB that each block saves for backward.
BLOCKS: dict[str, tuple[Callable[[], tuple[nn.Module, list[Tensor]]], int]] = {
    "Llama-3-8B, 2 × 4096 tokens": (
        lambda: (
            models.LlamaBlock(models.LLAMA),
            [torch.empty(2, 4096, 4096, requires_grad=True), *(torch.empty(4096, 64) for _ in range(2))],
        ),
        131,
    ),
    "GPT-2, 16 × 1024 tokens": (lambda: gpt(768, 12, 16, 1024), 49),
    "ViT-L, 64 × 197 tokens": (lambda: gpt(1024, 16, 64, 197), 50),
    "Mixtral-8x7B, 2 × 4096 tokens": (mixtral, 132),
}
OF_BLOCKS = [pytest.param(n, marks=() if n.startswith("Llama") else pytest.mark.slow) for n in BLOCKS]


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_bytes_that_a_block_saves_on_paper(name: str) -> None:
    pytest.importorskip("triton", reason="the virtual GPU needs Triton")
    make, expected = BLOCKS[name]
    with torch.device("meta"):
        block, args = make()
        block, args = block.bfloat16(), [t.detach().bfloat16().requires_grad_(t.requires_grad) for t in args]
    saved = tfo.explain(block, *args, policy=BOTH).saved
    assert not saved.skipped and round(saved.nbytes / 2**20) in (expected - 1, expected), str(saved)


def test_attention_that_does_not_change_has_a_reason() -> None:
    pytest.importorskip("triton", reason="the virtual GPU needs Triton")
    report = tfo.explain(Bare(frozen=True), inputs(), policy=FusionPolicy(attention={"attention.q": "input"}))
    advice = [row.advice for row in report.saved.rows]
    assert sum("the policy does not apply" in text and "its inputs take" in text for text in advice) > 0, advice
    (site,) = report.attention
    assert site.nbytes == 0 and "its inputs take" in site.reason and site.reason in str(report)


def test_explain_lists_attention() -> None:
    pytest.importorskip("triton", reason="the virtual GPU needs Triton")
    model, x = model_of(Rotary, Rotary), inputs()
    report = tfo.explain(model, x, policy=BOTH)
    (site,) = report.attention
    saves = 2 * (saved_bytes(MLP_ONLY) - saved_bytes(BOTH))
    assert (site.module, site.count, site.nbytes, site.reason) == ("0,1.attention", 2, saves, "")
    assert 'attention="input": ' in str(report) and "less saved by 0,1.attention ×2" in str(report)
    assert not tfo.explain(model, x, policy=MLP_ONLY).attention


@pytest.mark.parametrize("source", ["computed", "transposed", "saved"])
def test_heads_share_a_computed_mask_in_backward(source: str) -> None:
    """A saved mask is in memory. The strides of a mask that is not contiguous are the compiler's choice."""
    graph, meta = torch.fx.Graph(), functools.partial(torch.empty, device="meta")
    saved = graph.placeholder("mask")
    saved.meta["val"] = meta(1, 1, 16, 16)
    mask = saved if source == "saved" else graph.call_function(torch.ops.aten.neg.default, (saved,))
    mask.meta["val"] = saved.meta["val"].mT if source == "transposed" else saved.meta["val"]
    expanded = graph.call_function(torch.ops.aten.expand.default, (mask, [1, 4, 16, 16]))
    expanded.meta["val"] = mask.meta["val"].expand(1, 4, 16, 16)
    gradient = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    node = graph.call_function(gradient, (saved, saved, saved, saved, expanded, saved, saved, saved, saved, 0.0, []))
    attention.share_masks(graph)
    if source == "computed":
        view = node.args[4]
        assert view.target is torch.ops.aten.as_strided.default  # type: ignore[union-attr]
        assert view.args == (mask, [1, 4, 16, 16], [256, 0, 16, 1], 0)  # type: ignore[union-attr]
    else:
        assert node.args[4] is expanded
