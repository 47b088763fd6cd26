"""A model without sites, without fused sites, or with an unmatched pattern: an error under ``strict``, else a warning.

All graphs of the model are judged together."""

import contextlib
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import Net, raises
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import torch_fused_ops as tfo
from torch_fused_ops import functional as FF
from torch_fused_ops.graphs.listing import site_lines
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.nn import FusedMLP

pytestmark = pytest.mark.codegen_is_slow("captured")

STRICT = tfo.FusionPolicy(strict=True)
break_here = torch._dynamo.graph_break


def Body(body: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Return a model that computes body(self, x). The body may use these layers."""
    layers = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "head": nn.Linear(8, 8), "norm": nn.LayerNorm(16)}
    return Net(body, **layers, fused=FusedMLP(8, 16))


def mlp(s: Any, x: Tensor) -> Tensor:
    return s.down(F.gelu(s.up(x)))  # type: ignore[no-any-return]


def normed(s: Any, x: Tensor) -> Tensor:
    return s.down(s.norm(s.up(x)))  # type: ignore[no-any-return]


def broken(*parts: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return a function that calls the parts in sequence, with graph breaks between them."""

    def body(s: Any, x: Tensor) -> Tensor:
        x = parts[0](s, x)
        if len(parts) > 1:
            break_here()
            x = parts[1](s, x)
        if len(parts) > 2:
            break_here()
            x = parts[2](s, x)
        return x

    return body


class Looped(nn.Module):
    """Dynamo does not compile forward's own frame, but each module that forward calls."""

    def __init__(self, *bodies: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Body, bodies))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            break_here()
        return x


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the library's warnings since the previous call."""
    caplog.set_level(logging.WARNING, "torch_fused_ops")

    def said() -> list[str]:
        texts = [record.getMessage() for record in caplog.records if record.name == "torch_fused_ops"]
        caplog.clear()
        return texts

    return said


WITHOUT_COMPLAINT = {
    "an mlp": mlp,
    "an mlp in the first piece": broken(mlp, normed),
    "in the second": broken(normed, mlp),
    "in a checkpoint": lambda s, x: s.head(checkpoint(lambda x: mlp(s, x), s.head(x), use_reentrant=False)),
    "beside a checkpoint without": lambda s, x: mlp(s, checkpoint(lambda x: normed(s, x), x, use_reentrant=False)),
    "an operator of ours": lambda s, x: s.down(FF.bias_gelu(s.up(x))),
    "a module of ours": lambda s, x: s.head(s.fused(s.head(x))),
    "not an mlp": lambda s, x: s.down(F.silu(s.up(x)) * F.softmax(s.up(x), -1).cumsum(-1)),
    "no linear layer": lambda s, x: F.gelu(x) * 2,
    "a head alone": lambda s, x: s.head(F.gelu(x)),
}
WITHOUT_SITE = {
    "a norm between": normed,
    "two linear layers": lambda s, x: s.down(s.up(x)),
    "with a dropout": lambda s, x: F.dropout(normed(s, x), 0.5),
    "in two pieces": broken(normed, normed),
    "cut by the break": broken(lambda s, x: s.up(x), lambda s, x: s.down(F.gelu(x))),
    "in a checkpoint": lambda s, x: checkpoint(lambda x: normed(s, x), x, use_reentrant=False),
}


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("name", WITHOUT_COMPLAINT)
def test_models_with_a_site_are_accepted(name: str, warnings: Callable[[], list[str]]) -> None:
    model = torch.compile(Body(WITHOUT_COMPLAINT[name]), backend="fused", options={"policy": STRICT})
    for rows in (4, 4, 6):  # compiled, run, and compiled anew
        model(torch.randn(rows, 8, requires_grad=True)).sum().backward()
    torch._dynamo.reset()
    torch.compile(Body(WITHOUT_COMPLAINT[name]), backend="fused")(torch.randn(4, 8))
    assert warnings() == []


def test_an_error_has_the_rows_of_explain() -> None:
    sites = tfo.explain(Body(unfused), torch.randn(4, 8)).sites
    with pytest.raises(BackendCompilerFailed) as info:
        torch.compile(Body(unfused), backend="fused", options={"policy": STRICT})(torch.randn(4, 8))
    lines = ("strict=True and these MLPs were not fused as the policy asks:", *site_lines(sites))
    assert str(info.value.inner_exception) == "\n".join(lines)


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("name", WITHOUT_SITE)
def test_linear_layers_and_no_site_are_an_error(name: str) -> None:
    model = torch.compile(Body(WITHOUT_SITE[name]), backend="fused", options={"policy": STRICT})
    with pytest.raises((BackendCompilerFailed, tfo.UnfusedError)) as info:
        model(torch.randn(4, 8))
    error = getattr(info.value, "inner_exception", info.value)
    assert isinstance(error, tfo.UnfusedError) and "no MLP was found between" in str(error)
    unread = tfo.explain(Body(WITHOUT_SITE[name]), torch.randn(4, 8)).unread
    assert str(error).endswith("\n".join(site_lines(unread)))  # as explain prints them
    torch.compile(Body(WITHOUT_SITE[name]), backend="fused")(torch.randn(4, 8))  # without strict


@pytest.mark.parametrize("has_mlp", [True, False])
def test_separately_compiled_modules_are_judged_together(has_mlp: bool) -> None:
    model = Looped(normed, mlp if has_mlp else normed)
    with contextlib.nullcontext() if has_mlp else pytest.raises(tfo.UnfusedError, match="no MLP was found"):
        torch.compile(model, backend="fused", options={"policy": STRICT})(torch.randn(4, 8))


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ["enable", "enabled", "options"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_every_way_to_compile_raises(way: str, pieces: int) -> None:
    model, x = Body(broken(*[normed] * pieces)), torch.randn(4, 8)
    with pytest.raises((BackendCompilerFailed, tfo.UnfusedError), match="no MLP was found"):
        if way == "enable":
            tfo.enable(STRICT)
            torch.compile(model)(x)
        elif way == "enabled":
            with tfo.enabled(STRICT):
                torch.compile(model)(x)
        else:
            torch.compile(model, options=tfo.compile_options(STRICT))(x)


def test_the_models_error_takes_precedence() -> None:
    fails = Body(broken(normed, lambda s, x: {}["mine"]))
    raises(KeyError, "mine", torch.compile(fails, backend="fused", options={"policy": STRICT}), torch.randn(4, 8))


def test_a_recompiled_part_is_not_judged_alone() -> None:
    # The shape of the second part is constant, so it is compiled once.
    pieces = broken(normed, lambda s, x: mlp(s, x[:2]))
    model = torch.compile(Body(pieces), backend="fused", options={"policy": STRICT})
    for rows in (4, 5, 6):
        model(torch.randn(rows, 8))


def test_exported_graphs_are_judged_at_once() -> None:
    exported = torch.export.export(Body(normed), (torch.randn(4, 8),)).module()
    from torch_fused_ops.lowerings import strict

    raises(tfo.UnfusedError, "no MLP was found between 2 linear layers", strict.check, exported.graph, (), STRICT)


class Layers(nn.Module):
    """A stack of MLPs, nested as in transformers."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        mlps = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": mlp}) for mlp in mlps)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer["mlp"](x))  # type: ignore[operator]
        return x


def unfused(s: Any, x: Tensor) -> Tensor:
    gate = s.up(x)
    return s.down(torch.erf(gate) * gate)  # type: ignore[no-any-return]


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", ["two linear layers", "cut by the break"])
def test_unfused_models_warn_once(name: str, warnings: Callable[[], list[str]]) -> None:
    model = torch.compile(Body(WITHOUT_SITE[name]), backend="fused")
    for rows in (4, 4, 6):
        model(torch.randn(rows, 8))
    (text,) = warnings()
    assert text.startswith("nothing was fused in Net: 0 MLP sites; no MLP was found between ")
    assert "torch_fused_ops.explain(model, *args) lists every site" in text


CUT = broken(normed, normed)


def plain(model: nn.Module) -> None:
    torch.compile(model, backend="eager")(torch.randn(4, 8))


def with_another_policy(model: nn.Module) -> None:
    torch.compile(model, backend="fused", options={"memory": "off"})(torch.randn(4, 8))


def explained(model: nn.Module) -> None:
    assert not tfo.explain(model, torch.randn(4, 8)).sites


def verified(model: nn.Module) -> None:
    tfo.verify(model, torch.randn(4, 8), policy=STRICT)


def strictly_and_reset(model: nn.Module) -> None:
    with pytest.raises(tfo.UnfusedError):
        torch.compile(model, backend="fused", options={"policy": STRICT})(torch.randn(4, 8))
    torch._dynamo.reset()


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("before", [plain, with_another_policy, explained, verified, strictly_and_reset])
def test_earlier_compilations_do_not_hide_errors(before: Callable[[nn.Module], None]) -> None:
    """A class's code was compiled earlier: with another policy or backend, by a tool, or before a reset."""
    before(Body(CUT))
    with pytest.raises(tfo.UnfusedError, match="no MLP was found between 4 linear layers, in 2 graphs"):
        torch.compile(Body(CUT), backend="fused", options={"policy": STRICT})(torch.randn(4, 8))


def test_the_warning_has_the_first_reason(warnings: Callable[[], list[str]]) -> None:
    torch.compile(Body(unfused), options=tfo.compile_options())(torch.randn(4, 8))
    (text,) = warnings()
    assert text.startswith("nothing was fused in Net: 1 MLP site, the first test_strict.py:")


def test_no_warning_for_settings(warnings: Callable[[], list[str]]) -> None:
    for options in ({"memory": "off"}, {"exclude": ("*",)}):
        torch._dynamo.reset()
        model = normed if "memory" in options else mlp
        torch.compile(Body(model), backend="fused", options=options)(torch.randn(4, 8))
    with tfo.enabled():  # for all compilations of the process
        torch.compile(Body(normed))(torch.randn(4, 8))
    assert warnings() == []


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("field", ["memory", "gemm", "exclude"])
def test_unmatched_patterns_warn_at_once(field: str, warnings: Callable[[], list[str]]) -> None:
    patterns = {"memory": {"layers.0.*": "input", "layer.1.*": "fp8"}, "gemm": {"layer.1.*": "bf16"}}
    options = {field: patterns.get(field, ("layer.1.*",))}
    model = torch.compile(Layers(), backend="fused", options=options)
    for rows in (4, 4, 6):
        model(torch.randn(rows, 8))
    (text,) = warnings()
    assert text.startswith("in Layers a part of the policy has no effect: ")
    assert f"{field}='layer.1.*' matches no site's modules; the sites' modules are layers." in text
    assert "did you mean 'layers.1'" in text
    with pytest.raises(BackendCompilerFailed, match=r"strict=True, but in Layers.*: .*matches no site's modules"):
        torch._dynamo.reset()
        torch.compile(Layers(), backend="fused", options={**options, "strict": True})(torch.randn(4, 8))


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(("pattern", "fits"), [("second.*", True), ("third.*", False)])
def test_a_pattern_may_match_a_site_of_a_later_graph(
    pattern: str, fits: bool, warnings: Callable[[], list[str]]
) -> None:
    model = Net(broken(lambda s, x: s.first(x), lambda s, x: s.second(x)), first=Body(mlp), second=Body(mlp))
    for strict in (False, True):
        torch._dynamo.reset()
        options = {"memory": {pattern: "input"}, "strict": strict}
        with pytest.raises(tfo.UnfusedError, match=r"third.\*") if strict and not fits else contextlib.nullcontext():
            torch.compile(model, backend="fused", options=options)(torch.randn(4, 8))
        assert len(warnings()) == (not fits and not strict)


@pytest.mark.parametrize("pattern", ["layers.*.mlp.0", "*.mlp.1", "layers"])
def test_a_pattern_may_match_a_module_of_a_site(pattern: str, warnings: Callable[[], list[str]]) -> None:
    torch.compile(Layers(), backend="fused", options={"memory": {pattern: "input"}})(torch.randn(4, 8))
    assert warnings() == []


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("wrap", ["args", "kwargs", "partial", "closure", "method", "list", "compiled"])
def test_patterns_match_wrapped_models(wrap: str, warnings: Callable[[], list[str]]) -> None:
    model, x = Layers(), torch.randn(4, 8)
    wrapped: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
        "args": (lambda *args: args[0](args[1]), (model, x), {}),
        "kwargs": (lambda **kwargs: kwargs["model"](kwargs["x"]), (), {"model": model, "x": x}),
        "partial": (functools.partial(model), (x,), {}),
        "closure": (lambda x: model(x), (x,), {}),
        "method": (model.forward, (x,), {}),
        "list": (lambda models, x: models[0](x), ([model], x), {}),
        "compiled": (torch.compile(model), (x,), {}),
    }
    function, args, kwargs = wrapped[wrap]
    options = {"memory": {"layers.0.*": "input"}}
    with tfo.record() as report:
        torch.compile(function, backend="fused", options=options)(*args, **kwargs)
    assert [site.module for site in report.sites] == ["layers.0.mlp", "layers.1.mlp"]
    assert warnings() == []


class Attention(nn.Module):
    """Attention as ``kind`` says: fused, of another formula, or with a graph break after the queries."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.q, self.o, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)[:, None]
        if self.kind == "broken":
            break_here()
        if self.kind == "sigmoid":
            return self.o((torch.sigmoid(q @ q.mT) @ q)[:, 0])  # type: ignore[no-any-return]
        return self.o(F.scaled_dot_product_attention(q, q, q)[:, 0])  # type: ignore[no-any-return]


def attends(kind: str, around: Callable[..., Any] = lambda fn, x: fn(x)) -> nn.Module:
    """Return a model with attention and an MLP. ``around`` calls both."""

    def body(s: Any, x: Tensor) -> Tensor:
        return around(lambda x: mlp(s, x + s.attn(x)), x)  # type: ignore[no-any-return]

    return Net(body, up=nn.Linear(8, 16), down=nn.Linear(16, 8), attn=Attention(kind))


WITHOUT_ATTENTION = {
    "sigmoid": ("input", "attention='input' has no effect: no attention was found"),
    "softmax": (
        {"attention": "input"},
        "attention={'attention': 'input'} has no effect: no attention matches its patterns",
    ),
    "broken": ({"*": "input"}, "attention='input' has no effect on"),
}


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("kind", WITHOUT_ATTENTION)
def test_a_level_of_attention_without_effect(kind: str) -> None:
    attention, message = WITHOUT_ATTENTION[kind]
    x = torch.randn(2, 4, 8)
    with pytest.raises((BackendCompilerFailed, tfo.UnfusedError), match=re.escape(message)):
        torch.compile(attends(kind), backend="fused", options={"attention": attention, "strict": True})(x)


@pytest.mark.codegen_is_slow
def test_attention_alone_is_not_nothing(warnings: Callable[[], list[str]]) -> None:
    options = {"attention": {"attn": "input"}, "strict": True}
    model = Net(lambda s, x: x + s.attn(x), attn=Attention("softmax"))
    with tfo.record() as report:
        torch.compile(model, backend="fused", options=options)(torch.randn(2, 4, 8))
    (site,) = report.attention
    assert (site.module, site.linears, site.kind) == ("attn", 2, None) and site.nbytes > 0
    torch._dynamo.reset()
    cut = Net(lambda s, x: normed(s, x + s.attn(x)), attn=Attention("softmax"), **dict(Body(mlp).named_children()))
    with pytest.raises(tfo.UnfusedError, match="no MLP was found between 2 linear layers"):
        torch.compile(cut, backend="fused", options=options)(torch.randn(2, 4, 8))
    assert warnings() == []


LEVELS_IN_CHECKPOINTS = {"memory": "fp8", "attention": "input"}


@pytest.mark.codegen_is_slow
def test_a_level_inside_a_checkpoint_is_named(warnings: Callable[[], list[str]]) -> None:
    model, x = attends("softmax", functools.partial(checkpoint, use_reentrant=False)), torch.randn(2, 4, 8)
    policy = tfo.FusionPolicy(**LEVELS_IN_CHECKPOINTS)  # type: ignore[arg-type]
    with tfo.record() as recorded:
        torch.compile(model, backend="fused", options={"policy": policy})(x)
    for report in (recorded, tfo.explain(model, x, policy=policy)):
        assert report.sites[0].memory_kind is report.attention[0].kind is Kind.IN_CHECKPOINT
        assert "1 of these in checkpoints, where the memory level has no effect" in report.summary
        assert str(report).count('checkpoints="replace" would apply it') == 2
    text = "\n".join(warnings())
    assert "inside a checkpoint, so memory='fp8' has no effect" in text and "attention='input' has no effect on" in text
    for setting in LEVELS_IN_CHECKPOINTS.items():
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed, match=r'has no\s+effect(.|\n)*checkpoints="replace"'):
            torch.compile(model, backend="fused", options=dict((setting, ("strict", True))))(x)
    torch._dynamo.reset()
    replacing = {**LEVELS_IN_CHECKPOINTS, "checkpoints": "replace", "strict": True}
    with tfo.record() as report:
        torch.compile(model, backend="fused", options=replacing)(x)
    assert report.sites[0].memory_kind is report.attention[0].kind is None


def test_no_checkpoint_to_replace(warnings: Callable[[], list[str]]) -> None:
    """A checkpoint that calls the compiled function is not in its graph."""
    options = {"memory": "fp8", "checkpoints": "replace"}
    compiled, x = torch.compile(Body(mlp), backend="fused", options=options), torch.randn(4, 8, requires_grad=True)
    with tfo.record() as report:
        checkpoint(compiled, x, use_reentrant=False)
    assert report.sites[0].memory_kind is Kind.OUTER_CHECKPOINT
    assert any("checkpoints='replace' has no effect: no graph has a checkpoint" in text for text in warnings())
    with torch.no_grad():
        torch.compile(Body(mlp), backend="fused", options={**options, "strict": True})(x)
