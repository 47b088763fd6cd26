"""Bad arguments raise ValueError or TypeError with name, value and accepted values, also in compiled code."""

import re
from functools import partial

import pytest
import torch
from harness import BUILTIN, raises

from torch_fused_ops import functional as F

X, PACKED, X3, SEED = torch.zeros(3, 4), torch.zeros(3, 8), torch.zeros(2, 3, 4), torch.tensor([1])
ELSEWHERE = partial(torch.zeros, device="meta")
ops, softmax = torch.ops.fused, torch.ops.fused.scaled_masked_softmax
KNOWN = "accepted: " + ", ".join(BUILTIN)
FLOATING = "accepted: float16, bfloat16, float32, float64"

# Function, arguments, exception, and fragments of the message.
BAD = {
    "activation": (ops.bias_act, (X, None, None, "swish"), ValueError, ["activation='swish'", KNOWN]),
    "activation of glu": (ops.glu, (X, X, None, "Silu"), ValueError, ["activation='Silu'", KNOWN]),
    "activation of bias_glu": (ops.bias_glu, (PACKED, None, None, ""), ValueError, ["activation=''", KNOWN]),
    "bias shape": (ops.bias_act, (X, torch.zeros(3), None, "silu"), ValueError, ["bias has shape (3,); accepted"]),
    "bias of one": (ops.bias_act, (X, torch.zeros(1), None, "silu"), ValueError, ["bias has shape (1,)", "(4,)"]),
    "bias of two axes": (ops.bias_act, (X, X, None, "silu"), ValueError, ["bias has shape (3, 4)", "(4,)"]),
    "scale shape": (ops.bias_act, (X, None, torch.zeros(4), "silu"), ValueError, ["token_scale has shape (4,)"]),
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
    "devices": (ops.bias_act, (X, ELSEWHERE(4), None, "silu"), ValueError, ["bias is on device meta; accepted: cpu"]),
    "devices of glu": (ops.glu, (X, ELSEWHERE(3, 4), None, "silu"), ValueError, ["up is on device meta", "cpu"]),
    "devices, scale": (ops.glu, (X, X, ELSEWHERE(3), "silu"), ValueError, ["token_scale is on device meta", "cpu"]),
    # torch.ops rejects these with messages of its own. The typed functions use our messages.
    "list": (F.bias_gelu, ([1.0, 2.0],), TypeError, ["input=[1.0, 2.0]", "must be a tensor, not list"]),
    "number as bias": (F.bias_act, (X, 0.5), TypeError, ["bias=0.5", "must be a tensor or None, not float"]),
    "string as clamp": (partial(F.swiglu, clamp="7"), (X, X), TypeError, ["clamp='7'", "a number or None, not str"]),
    "None as up_offset": (partial(F.swiglu, up_offset=None), (X, X), TypeError, ["up_offset=None", "a number"]),
    "bool as clamp": (partial(F.swiglu, clamp=True), (X, X), TypeError, ["clamp=True", "a number or None, not bool"]),
    "layout not str": (
        partial(F.bias_glu, activation="silu", layout=2),
        (PACKED,),
        TypeError,
        ["layout=2", "'halves', 'inter"],
    ),
    "activation not str": (partial(F.bias_act, activation=None), (X,), TypeError, ["activation=None", "one of relu"]),
    "approximate": (F.bias_gelu, (X, None, "erf"), ValueError, ["approximate='erf'", "accepted: 'none', 'tanh'"]),
    "approximate not a string": (F.bias_gelu, (X, None, True), TypeError, ["approximate=True", "'none' or 'tanh'"]),
    "p above 1": (ops.dropout_add, (X, None, None, SEED, 1.5), ValueError, ["p=1.5 is", "must be between 0 and 1"]),
    "p below 0": (ops.dropout_add, (X, None, None, SEED, -0.1), ValueError, ["p=-0.1 is not accepted"]),
    "p nan": (ops.dropout_add, (X, None, None, SEED, float("nan")), ValueError, ["p=nan is not accepted"]),
    "seed dtype": (ops.dropout_add, (X, None, None, SEED.int(), 0.5), TypeError, ["seed has dtype torch.int32; acc"]),
    "seed of two": (ops.dropout_add, (X, None, None, SEED.expand(2), 0.5), ValueError, ["seed has shape (2,)", "one"]),
    "no seed": (ops.dropout_add, (X, None, None, SEED[:0], 0.5), ValueError, ["seed has shape (0,)"]),
    "seed elsewhere": (ops.dropout_add, (X, None, None, SEED.to("meta"), 0.5), ValueError, ["seed is on device meta"]),
    "dropout bias": (ops.dropout_add, (X, X[0, :3], None, SEED, 0.5), ValueError, ["bias has shape (3,)", "(4,)"]),
    "residual": (ops.dropout_add, (X, None, X[:1], SEED, 0.5), ValueError, ["residual has shape (1, 4)", "(3, 4)"]),
    "integer x": (ops.dropout_add, (X.long(), None, None, SEED, 0.5), TypeError, ["input has dtype torch.int64"]),
    "no axis of x": (ops.dropout_add, (X[0, 0], None, None, SEED, 0.5), ValueError, ["input has shape ()"]),
    "p not a number": (partial(F.dropout_add, seed=SEED, p="half"), (X,), TypeError, ["p='half'", "must be a number"]),
    "p a bool": (F.bias_dropout_add, (X, None, X, True), TypeError, ["p=True is not accepted"]),
    "p unused": (F.bias_dropout_add, (X, None, X, 1.5, False), ValueError, ["p=1.5 is not accepted"]),
    "additive mask": (
        softmax,
        (X3, torch.zeros(3, 4), None),
        TypeError,
        ["mask has dtype torch.float32; accepted: bool", "`mask < 0`", "isneginf()"],
    ),
    "bytes as mask": (softmax, (X3, X3.byte(), None), TypeError, ["mask has dtype torch.uint8", "`mask != 0`"]),
    "mask shape": (softmax, (X3, X3[0, :, :3] > 0, None), ValueError, ["mask has shape (3, 3)"]),
    "mask axes": (softmax, (X3, X3[None] > 0, None), ValueError, ["mask has shape (1, 2, 3, 4)"]),
    "sink shape": (softmax, (X3, None, torch.zeros(3)), ValueError, ["sink has shape (3,); accepted: (2,)"]),
    "sink axes": (softmax, (X3, None, torch.zeros(2, 1)), ValueError, ["sink has shape (2, 1); accepted: (2,)"]),
    "sink without heads": (softmax, (X, None, torch.zeros(1)), ValueError, ["sink", "shape (3, 4)", "heads"]),
    "sink dtype": (softmax, (X3, None, torch.zeros(2).int()), TypeError, ["sink has dtype torch.int32", "float16, "]),
    "one axis": (softmax, (X[0], None, None), ValueError, ["input has shape (4,)", "two axes"]),
    "scores": (softmax, (X3.long(), None, None), TypeError, ["input has dtype torch.int64; accepted: float16"]),
    "scale": (softmax, (X3, None, None, float("inf")), ValueError, ["scale=inf is not accepted: it must be finite"]),
    "scale nan": (softmax, (X3, None, None, float("nan")), ValueError, ["scale=nan"]),
    "left": (softmax, (X3, None, None, 1.0, False, -2), ValueError, ["window_left=-2", "-1 for no bound"]),
    "right": (softmax, (X3, None, None, 1.0, False, 0, -3), ValueError, ["window_right=-3", "at least 0"]),
    "mask elsewhere": (softmax, (X3, ELSEWHERE(3, 4) > 0, None), ValueError, ["mask is on device meta; accepted: cpu"]),
    "sink elsewhere": (softmax, (X3, None, ELSEWHERE(2)), ValueError, ["sink is on device meta", "where input is"]),
    "scale as sink": (F.scaled_masked_softmax, (X, None, 0.5), TypeError, ["sink=0.5", "a scale goes by name: scale="]),
    "scale string": (partial(F.scaled_masked_softmax, scale="1"), (X3,), TypeError, ["scale='1'", "a number, not str"]),
    "causal 1": (partial(F.scaled_masked_softmax, causal=1), (X3,), TypeError, ["causal=1", "True or False, not int"]),
    "window 1.0": (partial(F.scaled_masked_softmax, window_left=1.0), (X3,), TypeError, ["window_left=1.0", "integer"]),
}


def bad_call(name):
    fn, args, error, fragments = BAD[name]
    if fn is F.bias_act:
        fn = partial(fn, activation="silu")
    return fn, args, error, fragments


@pytest.mark.parametrize("name", BAD)
def test_eager_calls_raise_our_message(name):
    fn, args, error, fragments = bad_call(name)
    said = str(raises(error, "", fn, *args))
    assert all(fragment in said for fragment in fragments), said


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("name", BAD)
def test_compiled_calls_raise_our_message(name):
    """Torch raises its own error, whose message contains our text."""
    fn, args, _, fragments = bad_call(name)
    said = str(raises(Exception, "", torch.compile(lambda: fn(*args), backend="eager", fullgraph=True)))
    assert all(fragment in said.replace("\\'", "'") for fragment in fragments), said


def has_derivatives(name):
    fn, (first, *_), *_ = BAD[name]
    return isinstance(fn, torch._ops.OpOverloadPacket) and first.is_floating_point() and first.dtype.itemsize > 1


@pytest.mark.parametrize("name", filter(has_derivatives, BAD))
def test_transforms_accept_no_more(name):
    """Under transforms the reference runs. It must not broadcast arguments that the operator rejects."""
    fn, (first, *others), error, fragments = bad_call(name)
    attempts = (
        lambda: torch.func.jvp(lambda x: fn(x, *others), (first,), (torch.ones_like(first),)),
        lambda: torch.func.grad(lambda x: fn(x, *others).sum())(first),
        lambda: torch.vmap(lambda x: fn(x, *others))(first.expand(2, *first.shape)),
    )
    for attempt in attempts:
        raises(error, re.escape(fragments[0]), attempt)


def test_bias_of_each_example_is_checked_under_vmap():
    with pytest.raises(ValueError, match=r"bias has shape \(1,\); accepted: \(4,\)"):
        torch.vmap(lambda x, b: ops.bias_act(x, b, None, "silu"))(torch.zeros(2, 3, 4), torch.zeros(2, 1))


# Calls with valid arguments.
TYPED = {
    "bias_act": (partial(F.bias_act, activation="silu"), {"input": X, "bias": X[0], "token_scale": X[:, 0]}),
    "glu": (partial(F.glu, activation="silu"), {"gate": X, "up": X, "token_scale": X[:, 0]}),
    "bias_glu": (partial(F.bias_glu, activation="silu"), {"input": PACKED, "bias": PACKED[0], "token_scale": X[:, 0]}),
    "dropout_add": (
        partial(F.dropout_add, p=0.5),
        {"input": X, "bias": X[0], "residual": X, "seed": torch.tensor([1])},
    ),
    "bias_dropout_add": (partial(F.bias_dropout_add, p=0.5), {"x": X, "bias": X[0], "residual": X}),
    "scaled_masked_softmax": (F.scaled_masked_softmax, {"input": X.expand(2, 3, 4), "mask": X > 0, "sink": X[:2, 0]}),
}
SCALARS = {
    "bias_act": ("silu",),
    "glu": ("silu",),
    "bias_glu": ("silu",),
    "dropout_add": (0.5,),
    "scaled_masked_softmax": (),
}


def by_position(name, **tensors):
    return getattr(ops, name)(*tensors.values(), *SCALARS[name])


OPERATORS = {f"torch.ops.{name}": (partial(by_position, name), TYPED[name][1]) for name in SCALARS}
CALLS = TYPED | OPERATORS

OTHER_DTYPES = {
    "integers": lambda t: t.int(),
    "complex numbers": lambda t: t + 0j,
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
}
LAYOUTS = {
    "COO": lambda t: t.to_sparse(),
    "CSR": lambda t: torch.zeros(3, 4).to_sparse_csr(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
    "oneDNN": lambda t: t.float().to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([torch.zeros(4), torch.zeros(2)]),
    "jagged": lambda t: torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(1, 4)], layout=torch.jagged),
}
NOT_TENSORS = {
    "a number": lambda t: 1.5,
    "a string": lambda t: "x",
    "a list": lambda t: t.tolist(),
    "an array": lambda t: t.numpy(),
    "a class": lambda t: torch.nn.Parameter,
}
WRONG_KINDS = OTHER_DTYPES | LAYOUTS | NOT_TENSORS | {"bools": lambda t: t.bool(), "None": lambda t: None}
WRONG = [
    (name, argument, kind)
    for name, (_, arguments) in CALLS.items()
    for argument in arguments
    for kind in WRONG_KINDS
    if (kind, argument) != ("bools", "mask") and (kind != "None" or argument in ("input", "gate", "up", "x", "seed"))
]


def with_wrong_argument(name, argument, kind):
    """Return a call and its arguments, with one argument of a wrong kind."""
    fn, arguments = CALLS[name]
    return fn, {**arguments, argument: WRONG_KINDS[kind](arguments[argument])}


@pytest.mark.covering(2, "argument", "kind")
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns that some layouts are in beta
@pytest.mark.parametrize(("name", "argument", "kind"), WRONG)
def test_errors_name_arguments_that_are_not_dense_floating_tensors(name, argument, kind):
    fn, arguments = with_wrong_argument(name, argument, kind)
    # torch.ops checks types itself, and its messages also name the argument.
    by_torch = name.startswith("torch.ops") and kind in NOT_TENSORS
    text = str(raises(RuntimeError if by_torch else (TypeError, ValueError), "", fn, **arguments))
    if by_torch:
        assert f"argument '{argument}'" in text
    else:
        names = ("x", "input") if argument == "x" else (argument,)  # the operator's name for x is input
        assert text.startswith(names) and "accepted" in text, text
        assert kind not in NOT_TENSORS or "it must be a tensor" in text, text


@pytest.mark.parametrize("training", ["no", 1, None, torch.tensor(True)])
def test_bias_dropout_add_takes_training_as_true_or_false(training):
    with pytest.raises(TypeError, match=r"training=.* is not accepted: it must be True or False"):
        F.bias_dropout_add(X, None, X, 0.5, training)
    compiled = torch.compile(F.bias_dropout_add, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X, None, X, 0.5, False), X + X)
