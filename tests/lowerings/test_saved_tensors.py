"""Backward computes with forward's values: inputs that forward writes, results that are written, mixed memory levels.

Each of these gave wrong gradients, or an error that eager does not have, before ``partition`` and ``SavedTensors``.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn as nn
import torch.nn.functional as F
from harness import GELU_TANH, Net, of_halves, raises
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torch_fused_ops as tfo
from torch_fused_ops import FusionPolicy
from torch_fused_ops import functional as FF
from torch_fused_ops.lowerings import memory_levels, partition, passes, saved_tensors
from torch_fused_ops.lowerings.saved_tensors import SavedTensors, UnsoundGraphs
from torch_fused_ops.tools.verify import interpreted

LEVELS = ("off", "free", "fp8", "input")
WIDTH, HIDDEN = 16, 64


def mlp(s: Any, x: Tensor) -> Tensor:
    return s.down(F.gelu(s.up(x)))  # type: ignore[no-any-return]


def centered(s: Any, x: Tensor) -> Tensor:
    """The running mean is updated, then subtracted."""
    s.state.mul_(0.5).add_(0.5)
    return mlp(s, x - s.state) + s.skip(x)  # type: ignore[no-any-return]


def counted(s: Any, x: Tensor) -> Tensor:
    """A step counter that scales."""
    s.state.add_(1.0)
    return mlp(s, x * s.state)


def weighted(s: Any, x: Tensor) -> Tensor:
    """A weight that is a buffer."""
    s.state.mul_(0.5)
    return mlp(s, F.linear(x, s.state))


def pointwise(s: Any, x: Tensor) -> Tensor:
    """Nothing is materialized: plain torch.compile is wrong here, too."""
    s.state.mul_(0.5)
    return torch.tanh(x * s.state * s.scale)


def before(s: Any, x: Tensor) -> Tensor:
    """The value before the update is read, by something that keeps nothing of it."""
    y = mlp(s, torch.sin(x + s.state))
    s.state.mul_(0.5)
    return y


def viewed(s: Any, x: Tensor) -> Tensor:
    """It is written, and read, through views."""
    s.state.view(-1)[:4].mul_(0.5)
    return mlp(s, x * s.state.unsqueeze(0).flip(-1))


def state_alone(s: Any, x: Tensor) -> Tensor:
    """The activation's GEMM reads nothing but a part of the buffer and a frozen weight."""
    h = F.linear(s.state.unbind(0)[1], s.up.weight.detach(), s.up.bias)
    y = s.down(F.gelu(h)) + s.skip(x)
    s.state.mul_(0.5)
    return y  # type: ignore[no-any-return]


def argument(s: Any, x: Tensor) -> Tensor:
    """An argument that needs a gradient, (tokens, 1), is written: AOTAutograd does it once forward has run."""
    y = mlp(s, torch.tanh(x * s.state * s.scale))
    x.add_(y.mean())
    return y + x


WRITTEN = {fn.__name__: fn for fn in (centered, counted, weighted, state_alone, pointwise, before, viewed, argument)}
SHAPES: dict[str, tuple[int, ...]] = {  # of the state
    "counted": (),
    "weighted": (WIDTH, WIDTH),
    "state_alone": (2, 8, WIDTH),
}


def net(body: Callable[..., Any], **members: Any) -> nn.Module:
    """A model with the linear layers of an MLP."""
    return Net(body, up=nn.Linear(WIDTH, HIDDEN), down=nn.Linear(HIDDEN, WIDTH), **members)


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    shape = SHAPES.get(name, (WIDTH,))
    scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
    state = torch.rand(shape) if shape else torch.ones(())
    linears = {"skip": nn.Linear(WIDTH, WIDTH), "end": nn.Linear(HIDDEN, WIDTH)}
    return net(WRITTEN[name], **linears, scale=scale, state=state)


def step(model: nn.Module, fn: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """The gradients and the buffers of a step on a copy, called through ``fn(model, x)``."""
    model = copy.deepcopy(model)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(next(model.parameters())).requires_grad_()
    given = x.mean(-1, keepdim=True) if getattr(model, "body", None) is argument else x
    (model(given) if fn is None else fn(model, given)).square().sum().backward()
    seen = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {**seen, **dict(model.named_buffers()), "x": x.grad}


def apart(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    assert wanted.keys() == got.keys()
    return max(
        float((w - g).detach().norm() / w.detach().norm()) for w, g in zip(wanted.values(), got.values(), strict=True)
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", WRITTEN)
def test_inputs_that_forward_writes(name: str, level: str) -> None:
    model = model_of(name).double()
    if name == "counted":
        model.state = model.state.float()  # torch 2.13 forgets what is written into a single float64 number
    policy = FusionPolicy(memory=level, strict=True)
    assert apart(step(model), step(model, interpreted(policy, exact=True))) < 1e-12


def test_a_buffer_that_forward_writes_is_not_read_to_rebuild(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind a frozen GEMM an adapter reads the activation plus a buffer: backward would rebuild the sum."""

    def adapted(s: Any, x: Tensor) -> Tensor:
        h = F.gelu(s.up(x.view(2, 4, WIDTH)))
        y = F.linear(h, s.down.weight.detach()) + s.mix(s.end(h + s.state))
        s.state.mul_(0.5)
        return y.flatten(0, 1)

    monkeypatch.setattr(passes, "_logged", set())
    linears = {"end": nn.Linear(HIDDEN, 4), "mix": nn.Linear(4, WIDTH)}
    model = net(adapted, **linears, state=torch.rand(HIDDEN))
    assert apart(step(model), step(model, interpreted(FusionPolicy()))) < 1e-5
    assert "left the graph as it was" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["centered", "pointwise"])
def test_inputs_that_forward_writes_in_generated_code(name: str) -> None:
    """Kernels that read an input and kernels that write it keep their order."""
    model = model_of(name)
    compiled = torch.compile(lambda model, x: model(x), backend="fused")
    assert apart(step(model), step(model, compiled)) < 1e-5


@pytest.mark.parametrize("budget", [0.99, 0.5, 0.0])
def test_under_a_budget_of_the_users(budget: float) -> None:
    """Upstream keeps nothing but inputs for a budget of 0, not even what must be kept."""
    model = model_of("centered").double()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        assert apart(step(model), step(model, interpreted(FusionPolicy(strict=True)))) < 1e-12


@pytest.mark.parametrize("name", ["pointwise", "counted"])
def test_plain_is_wrong(name: str) -> None:
    """Why "off" is edited, too. If this fails, upstream has mended it: docs/upstream.md says what."""
    model = model_of(name)
    assert apart(step(model), step(model, interpreted(None))) > 0.1


def graphs_of(model: nn.Module, level: str = "free") -> partition.Graphs:
    """Graphs of a step after the partitioner; of several results of the model the first is trained on."""
    found: list[partition.Graphs] = []

    def fused(model: nn.Module, x: Tensor) -> Any:
        result = interpreted(FusionPolicy(memory=level))(model, x)
        return result[0] if isinstance(result, tuple) else result

    with pytest.MonkeyPatch.context() as patch:
        divide = passes.Partitioner.__call__
        patch.setattr(passes.Partitioner, "__call__", lambda *a, **k: found.append(divide(*a, **k)) or found[-1])  # type: ignore[func-returns-value]
        step(model, fused)
    return found[-1]


def test_a_buffer_that_backward_does_not_need_costs_nothing() -> None:
    forward, _ = graphs_of(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)))
    assert not forward.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


def test_a_value_made_of_it_is_kept_where_it_is_no_larger() -> None:
    """Not the buffer's copy besides."""
    forward, _ = graphs_of(model_of("weighted"))
    kept = forward.graph.output_node().args[0][1:]  # type: ignore[index]
    sizes = [tuple(node.meta["val"].shape) for node in kept if node.op == "call_function"]
    assert sizes.count((WIDTH, WIDTH)) == 1


# ---- what the caller writes ------------------------------------------------------------------------------------------


def hands_out(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    def body(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = s.up(x)
        return s.down(activation(h)), h

    return net(body)


def hands_out_parts(parts: Callable[[Tensor], Sequence[Tensor]]) -> nn.Module:
    """Of three dimensions: what is kept of them is a view then; and not every view is on upstream's list."""

    def body(s: Any, x: Tensor) -> tuple[Tensor, ...]:
        h = s.up(x.view(2, 4, WIDTH))
        return s.down(torch.tanh(h)), *parts(h)

    return net(body)


def frozen(first: nn.Module, result: Callable[[Tensor], Tensor] = lambda h: h) -> nn.Module:
    """PyTorch keeps its pre-activation alone: no weight's gradient needs what the first product reads."""

    def body(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = s.first(x)
        return s.down(GELU_TANH(s.up(h))), result(h)

    model: Any = net(body, first=first)
    model.up.weight.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def frozen_part() -> nn.Module:
    """The GEMM that would be computed again reads a part of a result."""

    def body(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = s.first(x.view(2, 4, WIDTH))
        return s.down(GELU_TANH(s.up(h.unbind(0)[1]))), h

    model: Any = net(body, first=nn.Linear(WIDTH, WIDTH))
    model.up.weight.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def multiples(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Three products that PyTorch keeps are three times as large as the result, which is not kept in their place."""
    h = s.up(x)
    return s.down(h * 2.0) + s.down(h * 3.0).sin() + s.down(h * 0.5).cos(), h


def writing(what: Callable[[Tensor, Any], Sequence[Tensor]], fn: Any = None) -> Callable[[nn.Module, Tensor], Tensor]:
    """A step that writes, between forward and backward, what it has: of its argument and the model's results."""

    def written(model: nn.Module, x: Tensor) -> Tensor:
        x = x * 1.0
        y, *others = model(x) if fn is None else fn(model, x)
        with torch.no_grad():
            for one in what(x, others):
                one += 1.0
        return y  # type: ignore[no-any-return]

    return written


def given(x: Tensor, others: Sequence[Tensor]) -> Sequence[Tensor]:
    """What ``writing`` is to write: the model's results."""
    return others


# What PyTorch keeps is their result (or nothing): the caller may write what they read. "argument": that is written.
WRITABLE: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: hands_out(torch.tanh),
    "sigmoid": lambda: hands_out(torch.sigmoid),
    "tanh and a cast": lambda: hands_out(lambda h: h.tanh().float()),
    "relu": lambda: hands_out(F.relu),
    "view": lambda: hands_out(lambda h: F.relu(h.view(-1)).view(h.shape)),
    "whole": lambda: hands_out_parts(lambda h: [h]),
    "split": lambda: hands_out_parts(lambda h: h.split([32, HIDDEN - 32], -1)),
    "unbind": lambda: hands_out_parts(lambda h: h.unbind(0)),
    "diagonal": lambda: hands_out_parts(lambda h: [h.diagonal(dim1=-2, dim2=-1)]),
    "frozen": lambda: frozen(nn.Linear(WIDTH, WIDTH)),
    "frozen, a view": lambda: frozen(nn.Linear(WIDTH, WIDTH), lambda h: h.view(-1)),  # no version check sees a write
    "frozen, a part": frozen_part,
    "argument": lambda: frozen(nn.Identity()),
    "multiples": lambda: net(multiples),
}


@pytest.mark.parametrize("level", ["free", "off", "fp8", "input", "tiled:2"])
@pytest.mark.parametrize("name", WRITABLE)
def test_what_is_not_kept_may_be_written(name: str, level: str) -> None:
    model, what = WRITABLE[name](), (lambda x, others: [x]) if name == "argument" else given
    fused = interpreted(FusionPolicy(memory=level), exact=True)
    assert apart(step(model, writing(what)), step(model, writing(what, fused))) < 1e-5


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda h: h.view(-1),
    "part": lambda h: h[..., 3:7],
    "transposed": lambda h: h.mT,
}
RELU2: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda h: F.relu(h).square(),
    "product": lambda h: F.relu(h) * F.relu(h),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("level", [None, *LEVELS, "tiled:2"])
@pytest.mark.parametrize("shape", [(8, WIDTH), (2, 4, WIDTH)], ids=["two axes", "three axes"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("activation", RELU2)
def test_views_of_results_may_be_written(activation: str, view: str, shape: tuple[int, ...], level: str | None) -> None:
    """Autograd keeps relu's result, PyTorch's cut the pre-activation: a view, over which no version check stands."""

    def seen(s: Any, x: Tensor) -> Any:
        x = x.view(shape)
        h = s.up(x)
        y = s.down(RELU2[activation](h)) + torch.sin(s.mix(torch.cat([h, x], -1)))
        return y, VIEWS[view](h)

    model = net(seen, mix=nn.Linear(WIDTH + HIDDEN, WIDTH))
    fused = interpreted(None if level is None else FusionPolicy(memory=level), exact=True)
    off = apart(step(model, writing(given)), step(model, writing(given, fused)))
    assert off < 1e-5 if level else off > 0.01


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("level", LEVELS)
def test_buffers_that_are_read_by_parts_and_written(level: str) -> None:
    def parts(s: Any, x: Tensor) -> Tensor:
        y = mlp(s, torch.tanh(x + s.both.split([WIDTH, WIDTH])[0]))
        s.both.mul_(0.25)
        return y

    model, fused = net(parts, both=torch.rand(2 * WIDTH)), interpreted(FusionPolicy(memory=level), exact=True)
    assert apart(step(model), step(model, fused)) < 1e-5


class Stashes(torch.autograd.Function):
    """Keeps tensors on its ctx itself: PyTorch does not check whether they have been written."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, scale: Tensor) -> Tensor:
        ctx.h, ctx.scale = h, scale
        return h * scale + h.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.scale + grad * ctx.h.cos(), (grad * ctx.h).sum(0)


@pytest.mark.parametrize("level", ["input", "fp8"])
def test_what_is_checked_stays_what_is_checked(level: str) -> None:
    def stashed(s: Any, x: Tensor) -> Tensor:
        h = s.up(torch.tanh(x))
        return s.down(F.gelu(h)) + Stashes.apply(h, s.scale)[..., :WIDTH]  # type: ignore[no-any-return,no-untyped-call]

    model = net(stashed, scale=nn.Parameter(torch.rand(HIDDEN)))
    forward, _ = graphs_of(model, level)
    assert apart(step(model), step(model, interpreted(FusionPolicy(memory=level, strict=True), exact=True))) < 1e-5
    kept = [n for n in forward.graph.output_node().args[0][1:] if isinstance(n.meta["val"], Tensor)]  # type: ignore[index,union-attr]
    marks = [bool(node.meta.get("saved_tensor_with_no_vc_check")) for node in kept]
    assert any(marks) and marks == sorted(marks)


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("level", LEVELS)
def test_arguments_may_be_written(level: str) -> None:
    """PyTorch keeps the product, as it keeps nothing else of a tensor times a number."""

    def written(model: nn.Module, x: Tensor, fn: Any = None) -> Tensor:
        column = x[:, :1] * 1.0
        y = model(column) if fn is None else fn(model, column)
        with torch.no_grad():
            column += 1.0
        return y  # type: ignore[no-any-return]

    fused = interpreted(FusionPolicy(memory=level), exact=True)
    model = Net(lambda s, x: s.up(x * s.row), up=nn.Linear(WIDTH, HIDDEN), row=torch.rand(WIDTH))
    assert apart(step(model, written), step(model, lambda model, x: written(model, x, fused))) < 1e-5


def packed(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = s.up(x)
    return F.linear(torch.tanh(h[..., :32]) * h[..., 32:], s.down.weight[:, :32]), h


@pytest.mark.parametrize("model", [hands_out(F.gelu), hands_out(F.silu), net(packed)], ids=["gelu", "silu", "tanh"])
def test_what_pytorch_keeps_is_fused_all_the_same(model: nn.Module) -> None:
    """Eager raises, too, where its caller writes it; and the pre-activation is not kept twice."""
    (site,) = tfo.explain(model, torch.randn(8, WIDTH)).sites
    assert site.op


def test_the_reason() -> None:
    (site,) = tfo.explain(hands_out(torch.tanh), torch.randn(8, WIDTH)).sites
    assert site.op is None and "a result of the graph" in site.reason
    with torch.no_grad():
        (site,) = tfo.explain(hands_out(torch.tanh), torch.randn(8, WIDTH)).sites
    assert site.op, "nothing is kept"


def test_a_result_that_upstream_keeps_is_kept_alone() -> None:
    """The normalized stream is rebuilt from it, as plain and eager keep the stream, too."""

    def normalized(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        stream = s.first(x)
        return mlp(s, s.norm(stream)), stream

    forward, _ = graphs_of(net(normalized, first=nn.Linear(WIDTH, WIDTH), norm=nn.LayerNorm(WIDTH)))
    kept = forward.graph.output_node().args[0][2:]  # type: ignore[index]
    assert [n.meta["val"].shape for n in kept if n.op == "call_function"].count((8, WIDTH)) == 1


# ---- mixed levels ----------------------------------------------------------------------------------------------------


def half(out: int, up: nn.Module) -> nn.Module:
    """A packed GLU and the linear layer behind it."""
    glu = of_halves(F.silu)
    return Net(lambda s, x: s.d(glu(s.up(x))), up=up, d=nn.Linear(HIDDEN // 2, out))


def chain() -> nn.Module:
    """Each one's linear layer gives what the next one's activation reads."""
    a, b, c = half(HIDDEN, nn.Linear(WIDTH, HIDDEN)), half(HIDDEN, nn.Identity()), half(WIDTH, nn.Identity())
    return Net(lambda s, x: s.c(s.b(s.a(x))), a=a, b=b, c=c)


MIXTURES = [
    {"a": "fp8", "b": "input"},
    {"a": "input", "b": "fp8"},
    {"a": "fp8", "b": "input", "c": "fp8"},
    {"a": "fp8", "c": "input"},
    {"b": "fp8", "c": "input"},
]


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("levels", MIXTURES, ids=str)
def test_mixed_levels(levels: dict[str, str]) -> None:
    """An inlined operator brings names that backward has for other values."""
    model = chain().double()
    policy = FusionPolicy(memory=levels, strict=True)
    assert apart(step(model), step(model, interpreted(policy, exact=True))) < 1e-12


def test_what_is_computed_again_is_not_made_of_what_is_rounded() -> None:
    """``b`` asks for exact gradients: its pre-activation is not computed again from ``a``'s rounded one."""
    model = chain()
    wanted, got = step(model), step(model, interpreted(FusionPolicy(memory={"a": "fp8", "b": "input"}, strict=True)))
    exact = [name for name in wanted if name.startswith(("b", "c"))]
    assert apart({n: wanted[n] for n in exact}, {n: got[n] for n in exact}) < 1e-5
    assert 1e-3 < apart({"a": wanted["a.d.weight"]}, {"a": got["a.d.weight"]}) < 0.1


def test_what_is_computed_again_is_not_rounded_later() -> None:
    """``b``'s pre-activation is computed again from an activation of what ``c`` would round."""

    def body(s: Any, x: Tensor) -> Tensor:
        h = s.up(x)
        activated = FF.bias_gelu(h, None)
        return s.down(activated) + s.b(x, activated) + s.c(h)  # type: ignore[no-any-return]

    def part(fn: Callable[..., Tensor]) -> nn.Module:
        return Net(fn, up=nn.Linear(WIDTH, HIDDEN), end=nn.Linear(HIDDEN, WIDTH))

    b, c = part(lambda s, x, a: s.end(FF.bias_gelu(s.up(x) + a, None))), part(lambda s, h: s.end(FF.silu(h)))
    model = net(body, b=b, c=c)
    policy = FusionPolicy(memory={"b": "input", "c": "fp8"}, strict=True)
    wanted, got = step(model), step(model, interpreted(policy))
    assert apart({"b": wanted["b.end.weight"]}, {"b": got["b.end.weight"]}) < 1e-5


READERS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a list": lambda model, h, x: model.other(torch.cat([h, x], -1)).sin(),
    "a keyword": lambda model, h, x: model.wide(torch.addcmul(h, tensor1=h, tensor2=h)).sin(),
    "a result's": lambda model, h, x: model.other(torch.cat([F.gelu(h), x], -1)).sin(),
    "an operator's": lambda model, h, x: model.other(torch.cat([FF.bias_gelu(h, None), x], -1)).sin(),
    "a gradient": lambda model, h, x: (h * model.scale)[..., :WIDTH],
}


@pytest.mark.parametrize("reader", READERS)
def test_fp8_is_seen_by_nothing_else(reader: str) -> None:
    """A checkpoint computes its GEMM again from what it reads: it has to be exact."""

    def shared(s: Any, x: Tensor) -> Tensor:
        h = s.up(x)
        read = checkpoint(lambda h, x: READERS[reader](s, h, x), h, x, use_reentrant=False)
        return s.down(F.gelu(h)) + read  # type: ignore[no-any-return]

    linears = {"other": nn.Linear(HIDDEN + WIDTH, WIDTH), "wide": nn.Linear(HIDDEN, WIDTH)}
    model = net(shared, **linears, scale=nn.Parameter(torch.rand(HIDDEN)))
    assert apart(step(model), step(model, interpreted(FusionPolicy(memory="fp8", strict=True)))) < 1e-5


# ---- the invariant ---------------------------------------------------------------------------------------------------


def both_of(model: nn.Module) -> SavedTensors:
    forward, backward = graphs_of(model)
    return SavedTensors(forward.graph, backward.graph, 1)


def test_graphs_are_found_unsound() -> None:
    """Each kind of fault that an edit could make."""
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
    both_of(model).check()

    both = both_of(model)  # two of what is kept change places
    second, *others = both.saved()
    first = next(n for n in others if n.meta["val"].shape != second.meta["val"].shape)
    swapped = [{first: second, second: first}.get(n, n) for n in both.returned()]
    both.output.args = (tuple(swapped),)
    raises(UnsoundGraphs, "is another value", both.check)
    raises(UnsoundGraphs, "is another value", SavedTensors, both.forward, both.backward, 1)

    both = both_of(model)  # something is kept no longer
    both.output.args = (tuple(both.returned()[:-1]),)
    raises(UnsoundGraphs, "does not save", both.check)

    both = both_of(model)  # more is kept than backward has inputs, or one value twice
    results = both.returned()
    others = [n for n in both.forward.nodes if n not in results and isinstance(n.meta.get("val"), Tensor)]
    for saved in ([*results, *others[:2]], [*results[:-1], results[-2]]):
        both.output.args = (tuple(saved),)
        raises(UnsoundGraphs, "values are saved", SavedTensors, both.forward, both.backward, 1)

    both = both_of(model)  # an input of backward is of another dtype
    placeholder = both.in_backward[both.saved()[0]]
    placeholder.meta["val"] = placeholder.meta["val"].double()
    raises(UnsoundGraphs, "is torch.float32 .*, backward's .* torch.float64", both.check)

    def rebuilt(both: SavedTensors) -> torch.fx.Node:
        return next(n for n in both.in_backward.values() if n.target is torch.ops.fused.bias_act.default)

    both = both_of(model)  # backward rebuilds another function
    rebuilt(both).update_arg(3, "relu")
    raises(UnsoundGraphs, "is not forward's", both.check)
    both = both_of(model)
    rebuilt(both).target = torch.ops.fused.bias_act_backward.default
    raises(UnsoundGraphs, "is not forward's", both.check)

    both = both_of(model)  # a name that forward has for another value means nothing
    last = both.forward.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)[-1]
    next(n for n in both.gradients if n.target is torch.ops.aten.mm.default)._rename(last.name)
    SavedTensors(both.forward, both.backward, 1).check()


def pair(forward: Callable[..., Any], backward: Callable[..., Any], *shapes: Sequence[tuple[int, ...]]) -> SavedTensors:
    """Two graphs by hand; forward returns one result."""
    graphs = (
        make_fx(fn, tracing_mode="fake")(*map(torch.ones, each))
        for fn, each in zip((forward, backward), shapes, strict=True)
    )
    return SavedTensors(*(gm.graph for gm in graphs), 1)


@pytest.mark.parametrize("reads", [True, False])
def test_a_view_of_an_input_that_is_written_is_found_out(reads: bool) -> None:
    """If backward reads it."""

    def forward(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        part = state.view(-1)
        y = part * x
        state.view(-1).copy_(y)
        return y, part

    both = pair(forward, lambda part, grad: grad * part if reads else grad * 2, [(2, 3), (6,)], [(6,), (6,)])
    if reads:
        raises(UnsoundGraphs, "but forward writes state_1", both.check)
    else:
        both.check()


def test_a_reader_of_rounding_is_found_out() -> None:
    both = pair(lambda x: ((h := x * 2).sin(), h), lambda h, grad: grad * h.cos(), [(3,)], [(3,), (3,)])
    (h,) = both.saved()
    (low,) = both.save_instead(h, [both.forward.find_nodes(op="placeholder")[0]])
    with both.backward.inserting_after(low):
        loaded = both.backward.call_function(torch.ops.aten.mul.Tensor, (low, 2.0))
    both.replace_in_backward(h, loaded, rounded=True)
    raises(UnsoundGraphs, "cos reads mul_tensor, which is rounded", both.check)


def test_an_input_that_is_written_is_found_out() -> None:
    forward, backward = graphs_of(model_of("centered"))
    copied = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    for node in copied:  # what upstream would keep
        node.replace_all_uses_with(node.args[0])
    written = partition.overwritten_inputs(forward.graph)
    assert len(written) == 1
    (source,) = written
    kept = forward.graph.output_node().args[0]
    placeholder = backward.graph.find_nodes(op="placeholder")[0]
    if source not in kept:  # a value made of it was smaller, or as small
        at = next(i for i, n in enumerate(kept) if i and n.name == placeholder.name)  # type: ignore[union-attr]
        forward.graph.output_node().update_arg(0, (*kept[:at], source, *kept[at + 1 :]))
    with pytest.raises(UnsoundGraphs):
        saved_tensors.check((forward, backward), 1)


@pytest.mark.parametrize("strict", [False, True])
@inductor_config.patch(force_disable_caches=True)
def test_unsound_edits_are_failures_of_the_pass(
    strict: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs as they were, one line, an exception under strict."""

    def wrong(both: SavedTensors, node: torch.fx.Node, recomputation: Any) -> None:
        placeholder = both.in_backward[node]
        other = next(n for n in both.backward.find_nodes(op="placeholder") if n is not placeholder)
        both.in_backward[node] = other

    monkeypatch.setattr(memory_levels, "_replace", wrong)
    passes._logged.clear()
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).double()
    fused = interpreted(FusionPolicy(memory="input", strict=strict))
    if strict:
        raises(Exception, "another value", step, model, fused)
        return
    caplog.set_level(logging.WARNING, "torch_fused_ops")
    assert apart(step(model), step(model, fused)) < 1e-12
    assert caplog.text.count("left the graph as it was") == 1
