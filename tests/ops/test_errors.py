"""Bad input: the argument, its value, what is accepted; ValueError or TypeError in eager, the same text compiled."""

import re
from functools import partial

import pytest
import torch

from torch_fused_ops import functional as F

X, PACKED = torch.zeros(3, 4), torch.zeros(3, 8)
ELSEWHERE = partial(torch.zeros, device="meta")
ops = torch.ops.fused
KNOWN = "accepted: relu, relu2, silu, gelu, gelu_tanh, quick_gelu, sigmoid, tanh"
FLOATING = "accepted: float16, bfloat16, float32, float64"

# What is called, with what, the error's class, what its text says.
BAD = {
    "activation": (ops.bias_act, (X, None, None, "swish"), ValueError, ["activation='swish'", KNOWN]),
    "activation of glu": (ops.glu, (X, X, None, "Silu"), ValueError, ["activation='Silu'", KNOWN]),
    "activation of bias_glu": (ops.bias_glu, (PACKED, None, None, ""), ValueError, ["activation=''", KNOWN]),
    "bias shape": (
        ops.bias_act,
        (X, torch.zeros(3), None, "silu"),
        ValueError,
        ["bias has shape (3,); accepted: (4,)"],
    ),
    "bias of one": (ops.bias_act, (X, torch.zeros(1), None, "silu"), ValueError, ["bias has shape (1,)", "(4,)"]),
    "bias of two axes": (ops.bias_act, (X, X, None, "silu"), ValueError, ["bias has shape (3, 4)", "(4,)"]),
    "scale shape": (
        ops.bias_act,
        (X, None, torch.zeros(4), "silu"),
        ValueError,
        ["token_scale has shape (4,); accepted: (3,)"],
    ),
    "scale with last axis": (ops.bias_act, (X, None, X[:, :1], "silu"), ValueError, ["token_scale has shape (3, 1)"]),
    "up shape": (ops.glu, (X, X[:, :2], None, "silu"), ValueError, ["up has shape (3, 2); accepted: (3, 4)"]),
    "up broadcast": (ops.glu, (X, X[:1], None, "silu"), ValueError, ["up has shape (1, 4); accepted: (3, 4)"]),
    "scale of glu": (ops.glu, (X, X, X, "silu"), ValueError, ["token_scale has shape (3, 4); accepted: (3,)"]),
    "no axis": (ops.bias_act, (torch.zeros(()), None, None, "silu"), ValueError, ["input has shape ()", "one axis"]),
    "no axis of glu": (ops.glu, (torch.zeros(()),) * 2 + (None, "silu"), ValueError, ["gate has shape ()"]),
    "odd": (
        ops.bias_glu,
        (torch.zeros(3, 7), None, None, "silu"),
        ValueError,
        ["input", "last axis 7", "an even size"],
    ),
    "packed bias": (ops.bias_glu, (PACKED, torch.zeros(4), None, "silu"), ValueError, ["bias has shape (4,)", "(8,)"]),
    "layout": (ops.bias_glu, (PACKED, None, None, "silu", "packed"), ValueError, ["layout='packed'", "halves, interl"]),
    "clamp 0": (ops.glu, (X, X, None, "silu", 0.0, 0.0), ValueError, ["clamp=0.0", "above 0", "None"]),
    "clamp below 0": (ops.bias_glu, (PACKED, None, None, "silu", "halves", 0.0, -7.0), ValueError, ["clamp=-7.0"]),
    "clamp nan": (ops.glu, (X, X, None, "silu", 0.0, float("nan")), ValueError, ["clamp=nan"]),
    "up_offset": (ops.glu, (X, X, None, "silu", float("inf")), ValueError, ["up_offset=inf", "finite"]),
    "integers": (ops.bias_act, (X.long(), None, None, "silu"), TypeError, ["input has dtype torch.int64", FLOATING]),
    "integer up": (ops.glu, (X, X.int(), None, "silu"), TypeError, ["up has dtype torch.int32", FLOATING]),
    "bool scale": (ops.bias_act, (X, None, X[:, 0] > 0, "silu"), TypeError, ["token_scale has dtype torch.bool"]),
    "complex bias": (ops.bias_act, (X, X[0] + 0j, None, "silu"), TypeError, ["bias has dtype torch.complex64"]),
    "float8": (
        ops.bias_act,
        (X.to(torch.float8_e4m3fn), None, None, "silu"),
        TypeError,
        ["input has dtype torch.float8_e4m3fn", FLOATING],
    ),
    "devices": (
        ops.bias_act,
        (X, ELSEWHERE(4), None, "silu"),
        ValueError,
        ["bias is on device meta; accepted: cpu, where the first tensor is"],
    ),
    "devices of glu": (ops.glu, (X, ELSEWHERE(3, 4), None, "silu"), ValueError, ["up is on device meta", "cpu"]),
    "devices, scale": (ops.glu, (X, X, ELSEWHERE(3), "silu"), ValueError, ["token_scale is on device meta", "cpu"]),
    # What torch.ops refuses by itself, in its own words, has ours in the typed functions.
    "list": (F.silu, ([1.0, 2.0],), TypeError, ["input=[1.0, 2.0]", "must be a tensor, not list"]),
    "None": (F.bias_gelu, (None, X[0]), TypeError, ["input=None", "must be a tensor, not NoneType"]),
    "number as bias": (F.bias_act, (X, 0.5), TypeError, ["bias=0.5", "must be a tensor or None, not float"]),
    "number as up": (F.swiglu, (X, 2), TypeError, ["up=2", "must be a tensor, not int"]),
    "number as scale": (F.swiglu, (X, X, 2), TypeError, ["token_scale=2", "must be a tensor or None, not int"]),
    "string as clamp": (partial(F.swiglu, clamp="7"), (X, X), TypeError, ["clamp='7'", "a number or None, not str"]),
    "None as up_offset": (partial(F.swiglu, up_offset=None), (X, X), TypeError, ["up_offset=None", "a number"]),
    "bool as clamp": (partial(F.swiglu, clamp=True), (X, X), TypeError, ["clamp=True", "a number or None, not bool"]),
    "layout no string": (partial(F.bias_swiglu, layout=0), (PACKED,), TypeError, ["layout=0", "'halves', 'inter"]),
    "activation no string": (partial(F.bias_act, activation=None), (X,), TypeError, ["activation=None", "one of relu"]),
    "approximate": (F.gelu, (X, "erf"), ValueError, ["approximate='erf'", "accepted: 'none', 'tanh'"]),
    "approximate no string": (F.gelu, (X, True), TypeError, ["approximate=True", "'none' or 'tanh'"]),
}


def call(name):
    fn, args, error, fragments = BAD[name]
    if fn is F.bias_act:
        fn = partial(fn, activation="silu")
    return fn, args, error, fragments


@pytest.mark.parametrize("name", BAD)
def test_eager(name):
    fn, args, error, fragments = call(name)
    with pytest.raises(error) as caught:
        fn(*args)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_compiled(name):
    """torch wraps the error into one of its own; our text is inside."""
    fn, args, _, fragments = call(name)
    torch.compiler.reset()
    with pytest.raises(Exception) as caught:
        torch.compile(lambda: fn(*args), backend="eager", fullgraph=True)()
    text = str(caught.value).replace("\\'", "'")
    for fragment in fragments:
        assert fragment in text


def has_derivatives(name):
    fn, (first, *_), *_ = BAD[name]
    return isinstance(fn, torch._ops.OpOverloadPacket) and first.is_floating_point() and first.dtype.itemsize > 1


@pytest.mark.parametrize("name", filter(has_derivatives, BAD))
def test_under_transforms(name):
    """Where the reference stands in for the operator, it must not accept more by broadcasting."""
    fn, (first, *rest), error, fragments = call(name)
    attempts = (
        lambda: torch.func.jvp(lambda x: fn(x, *rest), (first,), (torch.ones_like(first),)),
        lambda: torch.func.grad(lambda x: fn(x, *rest).sum())(first),
        lambda: torch.vmap(lambda x: fn(x, *rest))(first.expand(2, *first.shape)),
    )
    for attempt in attempts:
        with pytest.raises(error, match=re.escape(fragments[0])):
            attempt()


def test_each_example_s_bias_is_checked_under_vmap():
    with pytest.raises(ValueError, match=r"bias has shape \(1,\); accepted: \(4,\)"):
        torch.vmap(lambda x, b: ops.bias_act(x, b, None, "silu"))(torch.zeros(2, 3, 4), torch.zeros(2, 1))
