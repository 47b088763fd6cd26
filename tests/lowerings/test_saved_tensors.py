"""Backward uses the values that forward computed, even if forward or the caller overwrites them. Memory levels mix.

Without ``partition`` and ``SavedTensors``, these cases compute wrong gradients or raise errors that eager does not.
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
from harness import GELU_TANH, Net, cases, distances, of_halves, raises, saving
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torch_fused_ops as tfo
from torch_fused_ops import FusionPolicy
from torch_fused_ops import functional as FF
from torch_fused_ops.lowerings import memory_levels, partition, passes
from torch_fused_ops.lowerings.saved_tensors import SavedTensors, UnsoundGraphs
from torch_fused_ops.tools.verify import interpreted

LEVELS = ("off", "free", "fp8", "input")
WIDTH, HIDDEN = 16, 64


def mlp(s: Any, x: Tensor) -> Tensor:
    return s.down(F.gelu(s.up(x)))  # type: ignore[no-any-return]


def centered(s: Any, x: Tensor) -> Tensor:
    """Update the running mean, then subtract it."""
    s.state.mul_(0.5).add_(0.5)
    return mlp(s, x - s.state) + s.skip(x)  # type: ignore[no-any-return]


def counted(s: Any, x: Tensor) -> Tensor:
    """Increment a step counter, and scale the input by it."""
    s.state.add_(1.0)
    return mlp(s, x * s.state)


def weighted(s: Any, x: Tensor) -> Tensor:
    """Use a buffer as a weight."""
    s.state.mul_(0.5)
    return mlp(s, F.linear(x, s.state))


def pointwise(s: Any, x: Tensor) -> Tensor:
    """No value is materialized. Plain torch.compile is wrong in this case as well."""
    s.state.mul_(0.5)
    return torch.tanh(x * s.state * s.scale)


def before(s: Any, x: Tensor) -> Tensor:
    """An operator reads the buffer before the update, and saves nothing that depends on it."""
    y = mlp(s, torch.sin(x + s.state))
    s.state.mul_(0.5)
    return y


def viewed(s: Any, x: Tensor) -> Tensor:
    """Forward writes and reads the buffer through views."""
    s.state.view(-1)[:4].mul_(0.5)
    return mlp(s, x * s.state.unsqueeze(0).flip(-1))


def state_alone(s: Any, x: Tensor) -> Tensor:
    """The activation's GEMM reads only a part of the buffer and a frozen weight."""
    h = F.linear(s.state.unbind(0)[1], s.up.weight.detach(), s.up.bias)
    y = s.down(F.gelu(h)) + s.skip(x)
    s.state.mul_(0.5)
    return y  # type: ignore[no-any-return]


def first_weight(s: Any, x: Tensor) -> Tensor:
    """The activation's GEMM reads a buffer as its weight, which no gradient needs. Then forward updates it."""
    y = s.down(F.gelu(F.linear(x.detach(), s.state))) + s.skip(x)
    s.state.mul_(0.5)
    return y  # type: ignore[no-any-return]


def argument(s: Any, x: Tensor) -> Tensor:
    """Overwrite an argument of shape (tokens, 1) that has a gradient. AOTAutograd performs this write after forward."""
    y = mlp(s, torch.tanh(x * s.state * s.scale))
    x.add_(y.mean())
    return y + x


def viewed_sum(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The caller gets a view of a sum with x. PyTorch saves only functions of the sum."""
    h = s.data @ s.up.weight.t() + x
    return s.down(torch.sin(h)), h.mT


WRITTEN = {
    fn.__name__: fn
    for fn in (centered, counted, weighted, state_alone, first_weight, pointwise, before, viewed, argument)
}
STATE_SHAPES: dict[str, tuple[int, ...]] = {
    "counted": (),
    "weighted": (WIDTH, WIDTH),
    "state_alone": (2, 8, WIDTH),
    "first_weight": (HIDDEN, WIDTH),
}


def net(body: Callable[..., Any], **members: Any) -> nn.Module:
    """Return a model with the linear layers of an MLP."""
    return Net(body, up=nn.Linear(WIDTH, HIDDEN), down=nn.Linear(HIDDEN, WIDTH), **members)


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    shape = STATE_SHAPES.get(name, (WIDTH,))
    scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
    state = torch.rand(shape) if shape else torch.ones(())
    linears = {"skip": nn.Linear(WIDTH, WIDTH), "end": nn.Linear(HIDDEN, WIDTH)}
    return net(WRITTEN[name], **linears, scale=scale, state=state)


def step(model: nn.Module, fn: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Run a step on a copy of the model, called through ``fn(model, x)``. Return its gradients and buffers by name."""
    model = copy.deepcopy(model)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).to(next(model.parameters())).requires_grad_()
    input = x.mean(-1, keepdim=True) if getattr(model, "body", None) in (argument, viewed_sum) else x
    (model(input) if fn is None else fn(model, input)).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {**gradients, **dict(model.named_buffers()), "x": x.grad}


def max_relative_error(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> float:
    assert expected.keys() == actual.keys()
    return max(distances((actual[name].detach() for name in expected), (t.detach() for t in expected.values())))


def gradient_error(model: nn.Module, fn: Callable[..., Any]) -> float:
    """Return the largest relative error of a step through ``fn``, compared with eager."""
    return max_relative_error(step(model), step(model, fn))


# Backward recomputes most at "input", the level of the default cases.
@pytest.mark.parametrize(
    ("name", "level"),
    cases(
        WRITTEN,
        LEVELS,
        default=lambda name, level: (
            level == "input" or name == "weighted" or (level == "free" and name in ("argument", "before"))
        ),
    ),
)
def test_forward_may_overwrite_inputs(name: str, level: str) -> None:
    model = model_of(name).double()
    if name == "counted":
        model.state = model.state.float()  # torch 2.13 loses writes to a float64 tensor with one element
    policy = FusionPolicy(memory=level, strict=True)
    assert gradient_error(model, interpreted(policy, exact=True)) < 1e-12


def test_overwritten_buffers_are_not_used_to_recompute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An adapter after a frozen GEMM reads the activation plus a buffer. Backward would recompute this sum."""

    def adapted(s: Any, x: Tensor) -> Tensor:
        h = F.gelu(s.up(x.view(2, 4, WIDTH)))
        y = F.linear(h, s.down.weight.detach()) + s.mix(s.end(h + s.state))
        s.state.mul_(0.5)
        return y.flatten(0, 1)

    monkeypatch.setattr(passes, "_logged", set())
    linears = {"end": nn.Linear(HIDDEN, 4), "mix": nn.Linear(4, WIDTH)}
    model = net(adapted, **linears, state=torch.rand(HIDDEN))
    assert gradient_error(model, interpreted(FusionPolicy())) < 1e-5
    assert "left the graph as it was" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["centered", "pointwise"])
def test_generated_code_may_overwrite_inputs(name: str) -> None:
    """Kernels that write an input run after kernels that read its old value."""
    model = model_of(name)
    compiled = torch.compile(lambda model, x: model(x), backend="fused")
    assert gradient_error(model, compiled) < 1e-5


@pytest.mark.parametrize("budget", [0.99, 0.5, 0.0])
def test_gradients_are_right_under_the_users_budget(budget: float) -> None:
    """At a budget of 0, PyTorch saves only inputs and ignores MUST_SAVE."""
    model = model_of("centered").double()
    with torch._functorch.config.patch(activation_memory_budget=budget):
        assert gradient_error(model, interpreted(FusionPolicy(strict=True))) < 1e-12


def graphs_of(model: nn.Module, level: str = "free") -> partition.Graphs:
    """Return the graphs of a step after the partitioner. The loss is computed from the model's first result."""
    graphs: list[partition.Graphs] = []

    def fused(model: nn.Module, x: Tensor) -> Any:
        result = interpreted(FusionPolicy(memory=level))(model, x)
        return result[0] if isinstance(result, tuple) else result

    with pytest.MonkeyPatch.context() as patch:
        divide = passes.Partitioner.__call__
        patch.setattr(passes.Partitioner, "__call__", lambda *a, **k: graphs.append(divide(*a, **k)) or graphs[-1])  # type: ignore[func-returns-value]
        step(model, fused)
    return graphs[-1]


def test_unneeded_buffers_are_not_copied() -> None:
    forward, _ = graphs_of(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)))
    assert not forward.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


def test_a_buffers_copy_or_a_value_computed_from_it_is_saved() -> None:
    """A value computed from the buffer is saved instead of the buffer's copy, unless the value is larger."""
    forward, _ = graphs_of(model_of("weighted"))
    saved = forward.graph.output_node().args[0][1:]  # type: ignore[index]
    sizes = [tuple(node.meta["val"].shape) for node in saved if node.op == "call_function"]
    assert sizes.count((WIDTH, WIDTH)) == 1


# ---- values that the caller modifies ---------------------------------------------------------------------------------


def returns_preactivation(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    def body(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = s.up(x)
        return s.down(activation(h)), h

    return net(body)


def returns_parts(parts: Callable[[Tensor], Sequence[Tensor]]) -> nn.Module:
    """Return a model that returns views of a 3-D pre-activation. PyTorch's list of view operators lacks some."""

    def body(s: Any, x: Tensor) -> tuple[Tensor, ...]:
        h = s.up(x.view(2, 4, WIDTH))
        return s.down(torch.tanh(h)), *parts(h)

    return net(body)


def frozen(first: nn.Module, result: Callable[[Tensor], Tensor] = lambda h: h) -> nn.Module:
    """Return a model whose first GEMM is frozen. PyTorch saves the pre-activation, but not the GEMM's input."""

    def body(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = s.first(x)
        return s.down(GELU_TANH(s.up(h))), result(h)

    model: Any = net(body, first=first)
    model.up.weight.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def frozen_part() -> nn.Module:
    """Return a model in which the recomputed GEMM reads a part of a result."""

    def body(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = s.first(x.view(2, 4, WIDTH))
        return s.down(GELU_TANH(s.up(h.unbind(0)[1]))), h

    model: Any = net(body, first=nn.Linear(WIDTH, WIDTH))
    model.up.weight.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def multiples(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch saves three products. Saving the result instead would need a third of their bytes."""
    h = s.up(x)
    return s.down(h * 2.0) + s.down(h * 3.0).sin() + s.down(h * 0.5).cos(), h


def writing(select: Callable[[Tensor, Any], Sequence[Tensor]], fn: Any = None) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return a step whose caller modifies its argument or the model's results between forward and backward."""

    def written(model: nn.Module, x: Tensor) -> Tensor:
        x = x * 1.0
        y, *others = model(x) if fn is None else fn(model, x)
        with torch.no_grad():
            for tensor in select(x, others):
                tensor += 1.0
        return y  # type: ignore[no-any-return]

    return written


def model_results(x: Tensor, others: Sequence[Tensor]) -> Sequence[Tensor]:
    """Select the model's results for ``writing``."""
    return others


# PyTorch saves the activation's result (or nothing), so the caller may modify the activation's input.
WRITABLE: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: returns_preactivation(torch.tanh),
    "sigmoid": lambda: returns_preactivation(torch.sigmoid),
    "tanh and a cast": lambda: returns_preactivation(lambda h: h.tanh().float()),
    "relu": lambda: returns_preactivation(F.relu),
    "view": lambda: returns_preactivation(lambda h: F.relu(h.view(-1)).view(h.shape)),
    "whole": lambda: returns_parts(lambda h: [h]),
    "split": lambda: returns_parts(lambda h: h.split([32, HIDDEN - 32], -1)),
    "unbind": lambda: returns_parts(lambda h: h.unbind(0)),
    "diagonal": lambda: returns_parts(lambda h: [h.diagonal(dim1=-2, dim2=-1)]),
    "frozen": lambda: frozen(nn.Linear(WIDTH, WIDTH)),
    "frozen, a view": lambda: frozen(nn.Linear(WIDTH, WIDTH), lambda h: h.view(-1)),  # no version check for the view
    "frozen, a part": frozen_part,
    "multiples": lambda: net(multiples),
}


def side_by_side() -> nn.Module:
    """Return a model of all models in ``WRITABLE``, which share only their argument."""

    def body(s: Any, x: Tensor) -> tuple[Tensor, ...]:
        results = [part(x) for part in s.parts]
        return torch.cat([y.flatten() for y, *_ in results]), *(t for _, *others in results for t in others)

    return Net(body, parts=nn.ModuleList(make() for make in WRITABLE.values()))


@pytest.mark.parametrize(
    ("writes", "level"),
    cases(
        ["results", "argument"], ["free", "off", "fp8", "input", "tiled:2"],
        default=lambda writes, level: level in ("free", "input"),
    ),
)  # fmt: skip
def test_caller_may_modify_unsaved_tensors(writes: str, level: str) -> None:
    model = frozen(nn.Identity()) if writes == "argument" else side_by_side()
    select = (lambda x, others: [x]) if writes == "argument" else model_results
    fused = interpreted(FusionPolicy(memory=level), exact=True)
    assert max_relative_error(step(model, writing(select)), step(model, writing(select, fused))) < 1e-5


def cross_attention(s: Any, x: Tensor) -> Tensor:
    """Its three GEMMs read parts of one bias, by split and getitem."""
    return s.attend(s.e(x)[None], x[None], x[None], need_weights=False)[0][0]  # type: ignore[no-any-return]


def refilled(s: Any, x: Tensor) -> Tensor:
    """The data of a frozen layer is a buffer."""
    return s.down(F.gelu(s.frozen(s.data)) * s.scale) + x  # type: ignore[no-any-return]


def experts(s: Any, x: Tensor) -> Tensor:
    """The biases of batched GEMMs have three axes."""
    return torch.bmm(F.gelu(torch.baddbmm(s.b3, x.view(2, 4, WIDTH), s.w3)), s.v3).flatten(0, 1)


# For each model, the tensor that its caller modifies. Eager mode and plain torch.compile compute the right gradients.
COPIED: dict[Callable[..., Any], Callable[[Any], Tensor]] = {
    cross_attention: lambda s: s.attend.in_proj_bias,
    refilled: lambda s: s.data,
    experts: lambda s: s.b3,
}


@pytest.mark.parametrize("generated", [False, pytest.param(True, marks=pytest.mark.slow, id="generated")])
@pytest.mark.parametrize("body", COPIED)
def test_caller_may_modify_what_recomputations_copy(body: Callable[..., Any], generated: bool) -> None:
    torch.manual_seed(0)
    linears = {"e": nn.Linear(WIDTH, WIDTH), "frozen": nn.Linear(WIDTH, HIDDEN).requires_grad_(False)}
    shapes = {"scale": (HIDDEN,), "b3": (2, 1, HIDDEN), "w3": (2, WIDTH, HIDDEN), "v3": (2, HIDDEN, WIDTH)}
    members = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    model = net(body, **linears, **members, attend=attend, data=torch.randn(8, WIDTH))

    def written(model: Any, x: Tensor, fn: Any = None) -> Tensor:
        y = model(x) if fn is None else fn(model, x)
        with torch.no_grad():
            COPIED[body](model).mul_(3.0)
        return y  # type: ignore[no-any-return]

    policy = FusionPolicy(memory="input", attention="input" if body is cross_attention else "off", strict=True)
    fused = interpreted(policy, compiled=generated)
    assert max_relative_error(step(model, written), step(model, lambda m, x: written(m, x, fused))) < 1e-5


def test_a_weight_may_be_the_first_operand() -> None:
    """The frozen layer is computed as (W @ x.T).T. Its weight is a parameter, so no copy of it is saved."""

    def transposed(s: Any, x: Tensor) -> Tensor:
        h = (s.first.weight @ torch.tanh(x.detach()).t()).t()
        return s.down(F.gelu(h + s.shift)) + x  # type: ignore[no-any-return]

    first, shift = nn.Linear(WIDTH, HIDDEN).requires_grad_(False), nn.Parameter(torch.ones(HIDDEN))
    model = net(transposed, first=first, shift=shift)
    forward, _ = graphs_of(model, "input")
    saved = forward.graph.output_node().args[0][1:]  # type: ignore[index]
    assert sum(n.meta["val"].shape == (HIDDEN, WIDTH) and n.op == "call_function" for n in saved) == 0
    assert not any(n.meta["val"].numel() == 8 * HIDDEN for n in saved)


def test_a_saved_copy_is_not_recomputed_from_itself() -> None:
    """A copy of a transposed result is saved. Its source has the same value, and backward has no other node for it."""

    def transposed(s: Any, x: Tensor) -> Tensor:
        return s.down(F.gelu(s.up(s.mix(x).t().contiguous())))  # type: ignore[no-any-return]

    model = Net(transposed, mix=nn.Linear(WIDTH, 8), up=nn.Linear(8, HIDDEN), down=nn.Linear(HIDDEN, WIDTH))
    assert gradient_error(model, interpreted(FusionPolicy(strict=True))) < 1e-5


def test_parts_are_saved_as_copies() -> None:
    """Backward needs the queries only, a third of a packed GEMM's result."""

    def packed(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.qkv(x).split(WIDTH, -1)
        return s.o(torch.sin(q)) + k.detach() + v.detach()  # type: ignore[no-any-return]

    model, x = Net(packed, qkv=nn.Linear(WIDTH, 3 * WIDTH), o=nn.Linear(WIDTH, WIDTH)), torch.randn(8, WIDTH)
    _, size = saving(lambda: interpreted(FusionPolicy())(model, x), [x, *model.parameters()])
    assert size == 8 * WIDTH * 4
    _, size = saving(lambda: interpreted(FusionPolicy(memory="off"))(model, x), [x, *model.parameters()])
    assert size == 2 * 8 * WIDTH * 4, "PyTorch saves sin(q) and cos(q)"


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
def test_caller_may_modify_views_of_results(
    activation: str, view: str, shape: tuple[int, ...], level: str | None
) -> None:
    """Autograd saves relu's result. PyTorch's min-cut saves the pre-activation, a view without a version check."""

    def squared(s: Any, x: Tensor) -> Any:
        x = x.view(shape)
        h = s.up(x)
        y = s.down(RELU2[activation](h)) + torch.sin(s.mix(torch.cat([h, x], -1)))
        return y, VIEWS[view](h)

    model = net(squared, mix=nn.Linear(WIDTH + HIDDEN, WIDTH))
    fused = interpreted(None if level is None else FusionPolicy(memory=level), exact=True)
    error = max_relative_error(step(model, writing(model_results)), step(model, writing(model_results, fused)))
    assert error < 1e-5 if level else error > 0.01


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("level", LEVELS)
def test_buffers_may_be_read_in_parts_and_overwritten(level: str) -> None:
    def parts(s: Any, x: Tensor) -> Tensor:
        y = mlp(s, torch.tanh(x + s.states.split([WIDTH, WIDTH])[0]))
        s.states.mul_(0.25)
        return y

    model, fused = net(parts, states=torch.rand(2 * WIDTH)), interpreted(FusionPolicy(memory=level), exact=True)
    assert gradient_error(model, fused) < 1e-5


class Stashes(torch.autograd.Function):
    """Stores tensors as attributes of its ctx: PyTorch does not check whether the caller modifies them."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, scale: Tensor) -> Tensor:
        ctx.h, ctx.scale = h, scale
        return h * scale + h.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.scale + grad * ctx.h.cos(), (grad * ctx.h).sum(0)


@pytest.mark.parametrize("level", ["input", "fp8"])
def test_unchecked_tensors_are_saved_last(level: str) -> None:
    def stashed(s: Any, x: Tensor) -> Tensor:
        h = s.up(torch.tanh(x))
        return s.down(F.gelu(h)) + Stashes.apply(h, s.scale)[..., :WIDTH]  # type: ignore[no-any-return,no-untyped-call]

    model = net(stashed, scale=nn.Parameter(torch.rand(HIDDEN)))
    forward, _ = graphs_of(model, level)
    assert gradient_error(model, interpreted(FusionPolicy(memory=level, strict=True), exact=True)) < 1e-5
    saved = [n for n in forward.graph.output_node().args[0][1:] if isinstance(n.meta["val"], Tensor)]  # type: ignore[index,union-attr]
    marks = [bool(node.meta.get("saved_tensor_with_no_vc_check")) for node in saved]
    assert any(marks) and marks == sorted(marks)


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("level", LEVELS)
def test_caller_may_modify_arguments(level: str) -> None:
    """PyTorch saves the product and a row of the argument, whose version generated code does not check."""

    def written(model: nn.Module, x: Tensor, fn: Any = None) -> Tensor:
        column = x[:, :1] * 1.0
        y = model(column) if fn is None else fn(model, column)
        with torch.no_grad():
            column += 1.0
        return y  # type: ignore[no-any-return]

    fused = interpreted(FusionPolicy(memory=level), exact=True)

    def body(s: Any, x: Tensor) -> Tensor:
        return s.up(x * s.row) + (x[0] * s.row).sin().sum()  # type: ignore[no-any-return]

    model = Net(body, up=nn.Linear(WIDTH, HIDDEN), row=torch.rand(WIDTH))
    assert max_relative_error(step(model, written), step(model, lambda model, x: written(model, x, fused))) < 1e-5


@pytest.mark.parametrize("level", ["off", "free"])
def test_caller_may_modify_arguments_that_pytorch_does_not_save(level: str) -> None:
    fused, model = interpreted(FusionPolicy(memory=level), exact=True), net(viewed_sum, data=torch.randn(8, WIDTH))
    expected, actual = (step(model, writing(lambda x, others: [x], fn)) for fn in (None, fused))
    assert max_relative_error(expected, actual) < 1e-5


def test_backward_reads_values_through_its_own_views() -> None:
    """The activation's input follows from the first product, through more calls than Python can nest."""
    graph, aten = torch.fx.Graph(), torch.ops.aten
    x, w, tangent = map(graph.placeholder, ("primals_1", "primals_2", "tangents_1"))
    h = product = graph.call_function(aten.mm.default, (x, w))
    for _ in range(2000):
        h = graph.call_function(aten.add.Tensor, (h, 1.0))
    result = graph.call_function(torch.ops.fused.bias_act.default, (h, None, None, "gelu"))
    transposed = graph.call_function(aten.permute.default, (product, [1, 0]))
    gradient = graph.call_function(aten.mm.default, (transposed, tangent))
    graph.output((result, gradient))
    read, in_memory = partition._read_by_backward(graph, 1)
    assert product in read and product in in_memory and transposed not in read
    assert partition._inputs_of_activations(graph, {transposed, gradient}) == []
    assert partition._inputs_of_activations(graph, set()) == [h]


def packed_tanh(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = s.up(x)
    return F.linear(torch.tanh(h[..., :32]) * h[..., 32:], s.down.weight[:, :32]), h


@pytest.mark.parametrize(
    "model",
    [returns_preactivation(F.gelu), returns_preactivation(F.silu), net(packed_tanh)],
    ids=["gelu", "silu", "tanh"],
)
def test_preactivations_that_pytorch_saves_are_fused(model: nn.Module) -> None:
    """The pre-activation is saved only once. If the caller modifies it, eager mode raises as well."""
    (site,) = tfo.explain(model, torch.randn(8, WIDTH)).sites
    assert site.op


def test_a_returned_preactivation_is_rejected() -> None:
    (site,) = tfo.explain(returns_preactivation(torch.tanh), torch.randn(8, WIDTH)).sites
    assert site.op is None and "a result of the graph" in site.reason
    with torch.no_grad():
        (site,) = tfo.explain(returns_preactivation(torch.tanh), torch.randn(8, WIDTH)).sites
    assert site.op, "without gradients nothing is saved"


def test_only_the_result_is_saved_if_pytorch_saves_it() -> None:
    """Backward recomputes the norm's result from the norm's input, which plain torch.compile and eager save as well."""

    def normalized(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        stream = s.first(x)
        return mlp(s, s.norm(stream)), stream

    forward, _ = graphs_of(net(normalized, first=nn.Linear(WIDTH, WIDTH), norm=nn.LayerNorm(WIDTH)))
    saved = forward.graph.output_node().args[0][2:]  # type: ignore[index]
    assert [n.meta["val"].shape for n in saved if n.op == "call_function"].count((8, WIDTH)) == 1


# ---- mixed levels ----------------------------------------------------------------------------------------------------


def half(out: int, up: nn.Module) -> nn.Module:
    """Return a packed GLU, followed by a linear layer."""
    glu = of_halves(F.silu)
    return Net(lambda s, x: s.d(glu(s.up(x))), up=up, d=nn.Linear(HIDDEN // 2, out))


def chain() -> nn.Module:
    """Return a model in which each part's linear layer computes the input of the next part's activation."""
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
def test_levels_can_be_mixed(levels: dict[str, str]) -> None:
    """An inlined operator adds names that backward uses for other values."""
    model = chain().double()
    policy = FusionPolicy(memory=levels, strict=True)
    assert gradient_error(model, interpreted(policy, exact=True)) < 1e-12


def test_recomputation_does_not_read_rounded_values() -> None:
    """``b``'s gradients are exact: its pre-activation is not recomputed from ``a``'s rounded pre-activation."""
    model = chain()
    expected, actual = (
        step(model),
        step(model, interpreted(FusionPolicy(memory={"a": "fp8", "b": "input"}, strict=True))),
    )
    exact = [name for name in expected if name.startswith(("b", "c"))]
    assert max_relative_error({n: expected[n] for n in exact}, {n: actual[n] for n in exact}) < 1e-5
    assert 1e-3 < max_relative_error({"a": expected["a.d.weight"]}, {"a": actual["a.d.weight"]}) < 0.1


def test_recomputed_values_are_not_rounded_later() -> None:
    """Backward recomputes ``b``'s pre-activation from the activation of h, although ``c`` would round h."""

    def body(s: Any, x: Tensor) -> Tensor:
        h = s.up(x)
        activated = FF.bias_gelu(h, None)
        return s.down(activated) + s.b(x, activated) + s.c(h)  # type: ignore[no-any-return]

    def part(fn: Callable[..., Tensor]) -> nn.Module:
        return Net(fn, up=nn.Linear(WIDTH, HIDDEN), end=nn.Linear(HIDDEN, WIDTH))

    b = part(lambda s, x, a: s.end(FF.bias_gelu(s.up(x) + a, None)))
    c = part(lambda s, h: s.end(FF.bias_act(h, activation="silu")))
    model = net(body, b=b, c=c)
    policy = FusionPolicy(memory={"b": "input", "c": "fp8"}, strict=True)
    expected, actual = step(model), step(model, interpreted(policy))
    assert max_relative_error({"b": expected["b.end.weight"]}, {"b": actual["b.end.weight"]}) < 1e-5


READERS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a list": lambda model, h, x: model.other(torch.cat([h, x], -1)).sin(),
    "a keyword": lambda model, h, x: model.wide(torch.addcmul(h, tensor1=h, tensor2=h)).sin(),
    "a result's": lambda model, h, x: model.other(torch.cat([F.gelu(h), x], -1)).sin(),
    "an operator's": lambda model, h, x: model.other(torch.cat([FF.bias_gelu(h, None), x], -1)).sin(),
    "a gradient": lambda model, h, x: (h * model.scale)[..., :WIDTH],
}


@pytest.mark.parametrize("reader", READERS)
def test_other_readers_do_not_see_fp8_rounding(reader: str) -> None:
    """A checkpoint recomputes its GEMM from the pre-activation, which must therefore be exact."""

    def shared(s: Any, x: Tensor) -> Tensor:
        h = s.up(x)
        other = checkpoint(lambda h, x: READERS[reader](s, h, x), h, x, use_reentrant=False)
        return s.down(F.gelu(h)) + other  # type: ignore[no-any-return]

    linears = {"other": nn.Linear(HIDDEN + WIDTH, WIDTH), "wide": nn.Linear(HIDDEN, WIDTH)}
    model = net(shared, **linears, scale=nn.Parameter(torch.rand(HIDDEN)))
    assert gradient_error(model, interpreted(FusionPolicy(memory="fp8", strict=True))) < 1e-5


# ---- the invariant ---------------------------------------------------------------------------------------------------


def saved_tensors_of(model: nn.Module) -> SavedTensors:
    forward, backward = graphs_of(model)
    return SavedTensors(forward.graph, backward.graph, 1)


def test_unsound_graphs_are_rejected() -> None:
    """Each case is a fault that a wrong edit could introduce."""
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
    saved_tensors_of(model).check()

    pair = saved_tensors_of(model)  # two saved tensors are swapped
    second, *others = pair.saved()
    first = next(n for n in others if n.meta["val"].shape != second.meta["val"].shape)
    swapped = [{first: second, second: first}.get(n, n) for n in pair.returned()]
    pair.output_node.args = (tuple(swapped),)
    raises(UnsoundGraphs, "is another value", pair.check)
    raises(UnsoundGraphs, "is another value", SavedTensors, pair.forward, pair.backward, 1)

    pair = saved_tensors_of(model)  # a tensor is no longer saved
    pair.output_node.args = (tuple(pair.returned()[:-1]),)
    raises(UnsoundGraphs, "does not save", pair.check)

    pair = saved_tensors_of(model)  # more tensors are saved than backward has inputs, or a tensor is saved twice
    results = pair.returned()
    others = [n for n in pair.forward.nodes if n not in results and isinstance(n.meta.get("val"), Tensor)]
    for saved, text in (([*results, *others[:2]], "values are saved"), ([*results[:-1], results[-2]], "twice")):
        pair.output_node.args = (tuple(saved),)
        raises(UnsoundGraphs, text, SavedTensors, pair.forward, pair.backward, 1)

    pair = saved_tensors_of(model)  # an input of backward has a different dtype
    placeholder = pair.in_backward[pair.saved()[0]]
    placeholder.meta["val"] = placeholder.meta["val"].double()
    raises(UnsoundGraphs, "is torch.float32 .*, backward's .* torch.float64", pair.check)

    def recomputed_activation(pair: SavedTensors) -> torch.fx.Node:
        return next(n for n in pair.in_backward.values() if n.target is torch.ops.fused.bias_act.default)

    pair = saved_tensors_of(model)  # backward recomputes a different function
    recomputed_activation(pair).update_arg(3, "relu")
    raises(UnsoundGraphs, "is not forward's", pair.check)
    pair = saved_tensors_of(model)
    recomputed_activation(pair).target = torch.ops.fused.bias_act_backward.default
    raises(UnsoundGraphs, "is not forward's", pair.check)

    pair = saved_tensors_of(model)  # forward may use a name of backward for another value
    last = pair.forward.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)[-1]
    next(n for n in pair.gradients if n.target is torch.ops.aten.mm.default)._rename(last.name)
    SavedTensors(pair.forward, pair.backward, 1).check()


def test_a_copy_and_its_source_change_together() -> None:
    """If a saved copy is rounded, backward no longer has the exact value that it copies."""
    pair = saved_tensors_of(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)))
    hidden = next(n for n in pair.saved() if n.target is torch.ops.aten.addmm.default)
    pair.replace_in_backward(hidden, *pair.save_instead(hidden, [pair.copied(hidden)]))
    pair.check()
    (copied,) = (n for n in pair.saved() if n.target is torch.ops.aten.clone.default)
    pair.replace_in_backward(copied, *pair.save_instead(copied, [pair.copied(copied)]), rounded=True)
    assert pair.in_backward.keys().isdisjoint({hidden, copied})


def trace_pair(
    forward: Callable[..., Any], backward: Callable[..., Any], *shapes: Sequence[tuple[int, ...]]
) -> SavedTensors:
    """Trace two functions to graphs. Forward returns one result."""
    graphs = (
        make_fx(fn, tracing_mode="fake")(*map(torch.ones, arguments))
        for fn, arguments in zip((forward, backward), shapes, strict=True)
    )
    return SavedTensors(*(gm.graph for gm in graphs), 1)


torch.library.define("saved_tensors::times_sine", "(Tensor grad, *, Tensor at) -> Tensor")
torch.library.register_fake("saved_tensors::times_sine", lambda grad, *, at: torch.empty_like(grad))


def test_keyword_arguments_are_read() -> None:
    """A custom operator's gradient reads the tensor by keyword, so that "fp8" must not round it."""
    times_sine = torch.ops.saved_tensors.times_sine
    pair = trace_pair(lambda x: ((h := x * 2).cos(), h), lambda h, grad: times_sine(grad, at=h), [(3,)], [(3,), (3,)])
    reader = pair.reader_of_rounding(pair.in_backward[pair.saved()[0]])
    assert reader is not None and reader.target is torch.ops.saved_tensors.times_sine.default


def saving_instead(select: Callable[[Tensor, Tensor], Tensor]) -> SavedTensors:
    """Return graphs after an edit: instead of a computed value, forward saves a tensor selected from (x, weight)."""

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (h := x * weight).sin(), h, select(x, weight)

    gm = make_fx(forward, tracing_mode="fake")(torch.ones(3), torch.ones(3))
    y, h, selected = gm.graph.output_node().args[0]  # type: ignore[misc]
    gm.graph.output_node().args = ((y, h),)
    backward = make_fx(lambda h, grad: grad * h.cos(), tracing_mode="fake")(torch.ones(3), torch.ones(3))
    pair = SavedTensors(gm.graph, backward.graph, 1, static_inputs=(1,))
    pair.replace_in_backward(h, *pair.save_instead(h, [selected]))  # type: ignore[arg-type,list-item]
    return pair


def test_edits_do_not_save_memory_that_autograd_does_not_check() -> None:
    saving_instead(lambda x, weight: weight).check()
    saving_instead(lambda x, weight: weight.t().clone()).check()
    for select in (lambda x, weight: x, lambda x, weight: x.t(), lambda x, weight: weight.t()):
        raises(UnsoundGraphs, "without a copy, but the caller may modify", saving_instead(select).check)


@pytest.mark.parametrize("reads", [True, False])
def test_saved_views_of_overwritten_inputs_are_rejected(reads: bool) -> None:
    """A saved view of an input that forward overwrites is a fault only if backward reads the view."""

    def forward(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        part = state.view(-1)
        y = part * x
        state.view(-1).copy_(y)
        return y, part

    pair = trace_pair(forward, lambda part, grad: grad * part if reads else grad * 2, [(2, 3), (6,)], [(6,), (6,)])
    if reads:
        raises(UnsoundGraphs, "but forward has overwritten state_1", pair.check)
    else:
        pair.check()


def test_readers_of_rounded_values_are_rejected() -> None:
    pair = trace_pair(lambda x: ((h := x * 2).sin(), h), lambda h, grad: grad * h.cos(), [(3,)], [(3,), (3,)])
    (h,) = pair.saved()
    (low,) = pair.save_instead(h, [pair.copied(pair.forward.find_nodes(op="placeholder")[0])])
    with pair.backward.inserting_after(low):
        loaded = pair.backward.call_function(torch.ops.aten.mul.Tensor, (low, 2.0))
    pair.replace_in_backward(h, loaded, rounded=True)
    raises(UnsoundGraphs, "cos reads mul_tensor, which is rounded", pair.check)


def test_saved_overwritten_inputs_are_rejected() -> None:
    forward, backward = graphs_of(model_of("centered"))
    copied = forward.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    for node in copied:  # PyTorch would save the input itself
        node.replace_all_uses_with(node.args[0])
    written = partition.overwritten_inputs(forward.graph)
    assert len(written) == 1
    (source,) = written
    saved = forward.graph.output_node().args[0]
    placeholder = backward.graph.find_nodes(op="placeholder")[0]
    if source not in saved:  # a value computed from the input, and not larger, was saved instead
        at = next(i for i, n in enumerate(saved) if i and n.name == placeholder.name)  # type: ignore[union-attr]
        forward.graph.output_node().update_arg(0, (*saved[:at], source, *saved[at + 1 :]))
    with pytest.raises(UnsoundGraphs):
        SavedTensors(forward.graph, backward.graph, 1).check()


@pytest.mark.parametrize("strict", [False, True])
@inductor_config.patch(force_disable_caches=True)
def test_unsound_edits_fail_the_pass(
    strict: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure leaves the graphs unchanged and logs one line. Under ``strict`` it raises an exception."""

    def swap_placeholder(pair: SavedTensors, node: torch.fx.Node, recomputation: Any) -> None:
        placeholder = pair.in_backward[node]
        other = next(n for n in pair.backward.find_nodes(op="placeholder") if n is not placeholder)
        pair.in_backward[node] = other

    monkeypatch.setattr(memory_levels, "_replace", swap_placeholder)
    passes._logged.clear()
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)).double()
    fused = interpreted(FusionPolicy(memory="input", strict=strict))
    if strict:
        raises(Exception, "another value", step, model, fused)
        return
    caplog.set_level(logging.WARNING, "torch_fused_ops")
    assert gradient_error(model, fused) < 1e-12
    assert caplog.text.count("left the graph as it was") == 1
