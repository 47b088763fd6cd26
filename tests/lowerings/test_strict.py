"""``strict`` where there are linear layers and no site at all: an error, of a whole model and not of a piece of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import torch_fused_ops as tfo
from torch_fused_ops import functional as FF
from torch_fused_ops.nn import FusedMLP

pytestmark = [pytest.mark.codegen_is_slow, pytest.mark.usefixtures("fresh_compiler")]

STRICT = tfo.FusionPolicy(strict=True)
break_here = torch._dynamo.graph_break


class Body(nn.Module):
    """x → body(self, x), with linear layers to use."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.norm, self.fused = nn.LayerNorm(16), FusedMLP(8, 16)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def mlp(s: Any, x: Tensor) -> Tensor:
    return s.down(F.gelu(s.up(x)))  # type: ignore[no-any-return]


def normed(s: Any, x: Tensor) -> Tensor:
    return s.down(s.norm(s.up(x)))  # type: ignore[no-any-return]


def broken(*parts: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """The parts, with a graph break between each two."""

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
    """Dynamo leaves its frame alone: each module that it calls is compiled by itself."""

    def __init__(self, *bodies: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Body, bodies))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            break_here()
        return x


FOUND = {
    "an mlp": mlp,
    "an mlp in the first piece": broken(mlp, normed),
    "in the second": broken(normed, mlp),
    "in the last": broken(normed, normed, mlp),
    "in a checkpoint": lambda s, x: s.head(checkpoint(lambda x: mlp(s, x), s.head(x), use_reentrant=False)),
    "beside a checkpoint without": lambda s, x: mlp(s, checkpoint(lambda x: normed(s, x), x, use_reentrant=False)),
    "an operator of ours": lambda s, x: s.down(FF.bias_gelu(s.up(x))),
    "a module of ours": lambda s, x: s.head(s.fused(s.head(x))),
    "what is no mlp": lambda s, x: s.down(F.silu(s.up(x)) * F.softmax(s.up(x), -1).cumsum(-1)),
    "no linear layer": lambda s, x: F.gelu(x) * 2,
    "a head alone": lambda s, x: s.head(F.gelu(x)),
    "a head behind a break": broken(lambda s, x: F.gelu(x), lambda s, x: s.head(x)),
}
NOTHING = {
    "a norm between": normed,
    "two linear layers": lambda s, x: s.down(s.up(x)),
    "with a dropout": lambda s, x: F.dropout(normed(s, x), 0.5),
    "in two pieces": broken(normed, normed),
    "cut by the break": broken(lambda s, x: s.up(x), lambda s, x: s.down(F.gelu(x))),
    "in a checkpoint": lambda s, x: checkpoint(lambda x: normed(s, x), x, use_reentrant=False),
}


@pytest.mark.every(6)
@pytest.mark.parametrize("name", FOUND)
def test_a_piece_without_a_site_is_no_error(name: str) -> None:
    model = torch.compile(Body(FOUND[name]), backend="fused", options={"policy": STRICT})
    for rows in (4, 4, 6):  # compiled, run, and compiled anew
        model(torch.randn(rows, 8, requires_grad=True)).sum().backward()


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NOTHING)
def test_linear_layers_and_no_site_are_an_error(name: str) -> None:
    model = torch.compile(Body(NOTHING[name]), backend="fused", options={"policy": STRICT})
    with pytest.raises((BackendCompilerFailed, tfo.UnfusedError)) as info:
        model(torch.randn(4, 8))
    error = getattr(info.value, "inner_exception", info.value)
    assert isinstance(error, tfo.UnfusedError) and "no MLP was found between" in str(error)
    torch.compile(Body(NOTHING[name]), backend="fused")(torch.randn(4, 8))  # without strict


@pytest.mark.parametrize("found", [True, False])
def test_modules_that_are_compiled_by_themselves_are_judged_together(found: bool) -> None:
    model = Looped(normed, mlp if found else normed)
    with contextlib.nullcontext() if found else pytest.raises(tfo.UnfusedError, match="no MLP was found"):
        torch.compile(model, backend="fused", options={"policy": STRICT})(torch.randn(4, 8))


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ["enable", "enabled", "options"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_however_it_is_compiled(way: str, pieces: int) -> None:
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


def test_the_models_own_error_is_the_one_that_is_raised() -> None:
    def fails(s: Any, x: Tensor) -> Tensor:
        x = normed(s, x)
        break_here()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        torch.compile(Body(fails), backend="fused", options={"policy": STRICT})(torch.randn(4, 8))


def test_inside_of_a_handler_it_is_said_too() -> None:
    try:
        raise KeyError
    except KeyError:
        with pytest.raises(tfo.UnfusedError):
            torch.compile(Body(broken(normed, normed)), backend="fused", options={"policy": STRICT})(torch.randn(4, 8))


def test_a_part_that_is_compiled_anew_does_not_speak_for_the_rest() -> None:
    def pieces(s: Any, x: Tensor) -> Tensor:
        x = normed(s, x)
        break_here()
        return mlp(s, x[:2])  # of one shape: it is compiled once

    model = torch.compile(Body(pieces), backend="fused", options={"policy": STRICT})
    for rows in (4, 5, 6):
        model(torch.randn(rows, 8))


def test_exported_graphs_are_whole() -> None:
    exported = torch.export.export(Body(normed), (torch.randn(4, 8),)).module()
    from torch_fused_ops.lowerings import strict

    with pytest.raises(tfo.UnfusedError, match="no MLP was found between 2 linear layers"):
        strict.check(exported.graph, ())  # type: ignore[arg-type]
