"""Compare the activation table with mpmath, autograd and its own definitions, and register new rows."""

import functools
import math
import operator

import mpmath
import pytest
import torch
import torch.nn.functional as F
from harness import BUILTIN, raises
from mpmath import mpf
from torch import fx, nn

import torch_fused_ops as tfo
from torch_fused_ops import activations
from torch_fused_ops.nn.config import activation_name
from torch_fused_ops.testing import precision


def sigmoid(x):
    return 1 / (1 + mpmath.exp(-x))


def cubic(x):
    return mpmath.sqrt(8 / mpmath.pi) * (x + mpf("0.044715") * x**3)


def gelu(x, approximate="none"):
    return x * (sigmoid(cubic(x)) if approximate == "tanh" else mpmath.ncdf(x))


# The functions of definitions, with as many digits as mpmath is set to.
MPMATH = {
    F.gelu: gelu,
    F.silu: lambda x, inplace: x * sigmoid(x),
    F.leaky_relu: lambda x, negative_slope, inplace: max(x, decimal(negative_slope) * x),
    F.relu6: lambda x, inplace: min(max(x, mpf(0)), mpf(6)),
    F.hardswish: lambda x, inplace: x * min(max(x + 3, mpf(0)), mpf(6)) / 6,
    F.elu: lambda x, alpha, inplace: x if x > 0 else mpmath.expm1(x),
    F.softplus: lambda x: mpmath.log1p(mpmath.exp(x)),
    F.mish: lambda x, inplace: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x))),
    torch.erf: mpmath.erf,
    torch.exp: mpmath.exp,
    torch.relu: lambda x: max(x, mpf(0)),
    torch.sigmoid: sigmoid,
    torch.square: lambda x: x * x,
    torch.tanh: mpmath.tanh,
    torch.abs: abs,
    **{
        fn: lambda *values, fn=fn: fn(*map(decimal, values))
        for fn in (operator.add, operator.sub, operator.mul, operator.truediv, operator.neg)
    },
}


def decimal(value):
    """Return the decimal constant: 1.702 differs from the nearest float."""
    return mpf(repr(value)) if isinstance(value, float) else value


class InMpmath(fx.Interpreter):
    def call_function(self, target, args, kwargs):
        return MPMATH[target](*args, **kwargs)


def exactly(name):
    """Return an activation's textbook definition for mpmath's numbers."""
    definition = activations.get(name).definition
    return InMpmath(fx.symbolic_trace(lambda x: definition(x))).run


EXACT = {name: exactly(name) for name in BUILTIN}
POINTS = sorted({s * p for s in (-1, 1) for p in (*(2.0**k for k in range(-20, 5)), 0.75, 1.28, 3.0, 6.0, 11.0, 20.0)})


def exact(fn, order):
    """Return fn or its derivative at POINTS, computed with 60 digits and rounded to float64."""
    with mpmath.workdps(60):
        return torch.tensor([float(mpmath.diff(fn, mpf(x), order)) for x in POINTS], dtype=torch.float64)


KINKS = {"relu6": (6.0,), "hardswish": (-3.0, 3.0)}  # at these points the exact derivative does not exist


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BUILTIN)
def test_value_and_derivative_against_mpmath(name, dtype):
    x = torch.tensor(POINTS, dtype=torch.float64)
    act = activations.get(name)
    value = precision.error(act.value(x.to(dtype)), exact(EXACT[name], 0))
    derivative = precision.error(act.derivative(x.to(dtype)), exact(EXACT[name], 1), precision.near_zero(name, x))
    derivative = derivative[[point not in KINKS.get(name, ()) for point in POINTS]]
    assert value.max() <= precision.LIMITS["forward", dtype]
    assert derivative.max() <= precision.LIMITS["gradient", dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BUILTIN)
def test_formulas_can_be_differentiated_where_they_have_kinks_inside(name, dtype):
    """|x| in a tail's formula has no derivative at 0, but the activation has a first and a second derivative."""
    act, points = activations.get(name), (0.0, -0.5, 0.5)
    for fn, order in ((act.value, 1), (act.derivative, 2)):
        for x in points if "relu" not in name and name != "elu" else points[1:]:
            got = torch.func.grad(fn)(torch.tensor(x, dtype=dtype))
            with mpmath.workdps(60):
                truth = float(mpmath.diff(EXACT[name], mpf(x), order))
            assert got.item() == pytest.approx(truth, rel=2e-6, abs=1e-7), (fn, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BUILTIN)
def test_finite_everywhere(name, dtype):
    big = torch.finfo(dtype).max
    x = torch.tensor([-big, -1e30, -1e4, -88.8, -0.0, 0.0, 88.8, 1e4, 1e30, big], dtype=dtype)
    act = activations.get(name)
    assert not act.derivative(x).isnan().any()
    assert not act.value(x).isnan().any()
    assert act.value(torch.full((1,), math.nan, dtype=dtype)).isnan().all()


@pytest.mark.parametrize("name", BUILTIN)
def test_pytorchs_functions_and_modules_are_the_same_function(name):
    act, x = activations.get(name), torch.linspace(-4.0, 4.0, 101, dtype=torch.float64)
    for fn in act.callables:
        applied = fn() if isinstance(fn, type) else fn
        assert activation_name(applied) == name
        torch.testing.assert_close(applied(x), act.value(x), rtol=1e-12, atol=1e-15)


def test_the_forms_of_gelu_have_names_of_their_own():
    assert [activation_name(nn.GELU(approximate)) for approximate in ("none", "tanh")] == ["gelu", "gelu_tanh"]


def test_names_and_get():
    assert {"relu", "gelu", "silu"} < set(BUILTIN) and list(activations.names()[: len(BUILTIN)]) == BUILTIN
    raises(ValueError, r"activation='swish' is not known; accepted: relu", activations.get, "swish")


def tanh_exp(x):
    return x * torch.tanh(torch.exp(x))


def softsign_slope(x):
    return 1 / (1 + x.abs()) ** 2


def test_register_derives_the_derivative():
    before = activations.table_hash()
    tfo.register_activation("tanh_exp", tanh_exp)
    assert "tanh_exp" in activations.names() and activations.table_hash() != before
    x = torch.linspace(-4, 4, 17, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(tanh_exp(x).sum(), x)
    torch.testing.assert_close(activations.get("tanh_exp").derivative(x.detach()), expected)
    assert not activations.get("tanh_exp").builtin


def test_registered_works_in_the_operators():
    tfo.register_activation("tanh_exp", tanh_exp)
    tfo.register_activation("softsign", F.softsign, softsign_slope)
    x, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,)))
    for name, fn in (("tanh_exp", tanh_exp), ("softsign", F.softsign)):
        op = functools.partial(torch.ops.fused.bias_act, token_scale=None, activation=name)
        torch.testing.assert_close(op(x, b), fn(x + b))
        assert torch.autograd.gradcheck(op, (x, b), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(op, (x, b))
        torch.library.opcheck(torch.ops.fused.bias_act.default, (x.float().detach().requires_grad_(), None, None, name))


def test_register_again():
    tfo.register_activation("tanh_exp", tanh_exp)
    row = activations.get("tanh_exp")
    tfo.register_activation("tanh_exp", lambda x: x * torch.tanh(torch.exp(x)))  # the same computation
    assert activations.get("tanh_exp") is row
    for name, fn in (("tanh_exp", F.softsign), ("gelu", F.gelu), ("relu", torch.relu)):
        raises(ValueError, f"name='{name}' is taken", tfo.register_activation, name, fn)


@pytest.mark.slow
def test_register_in_place_of_another():
    """Registering again, as a notebook cell does, changes nothing; other functions need ``replace=True``."""
    tfo.register_activation("celled", lambda x: x * torch.tanh(x), lambda x: torch.tanh(x) + x / torch.cosh(x) ** 2)
    tfo.register_activation("celled", lambda x: x * torch.tanh(x), lambda x: torch.tanh(x) + x / torch.cosh(x) ** 2)
    raises(ValueError, "replace=True replaces it, or choose another name", tfo.register_activation, "celled", tanh_exp)
    before, x, w = activations.table_hash(), torch.randn(4, 8), torch.nn.Parameter(torch.randn(8, 8))

    def spelled(fn):
        torch._dynamo.reset()
        (site,) = tfo.explain(lambda x, w: fn(x @ w) @ w, x, w).sites
        return site.activation

    def compiled(x):
        torch._dynamo.reset()
        return torch.compile(lambda x: torch.ops.fused.bias_act(x, None, None, "celled"), fullgraph=True)(x)

    assert (spelled(lambda x: x * torch.tanh(x)), spelled(tanh_exp)) == ("celled", None)
    torch.testing.assert_close(compiled(x), x * torch.tanh(x))
    tfo.register_activation("celled", tanh_exp, replace=True)
    assert activations.table_hash() != before
    assert (spelled(lambda x: x * torch.tanh(x)), spelled(tanh_exp)) == (None, "celled")
    torch.testing.assert_close(compiled(x), tanh_exp(x))
    y = x.clone().requires_grad_()
    torch.ops.fused.bias_act(y, None, None, "celled").sum().backward()
    torch.testing.assert_close(y.grad, torch.func.grad(lambda x: tanh_exp(x).sum())(x))
    with pytest.raises(ValueError, match="name='gelu' is taken by a built-in activation; choose another name"):
        tfo.register_activation("gelu", tanh_exp, replace=True)
    raises(TypeError, "replace='yes'", tfo.register_activation, "celled", tanh_exp, replace="yes")


def test_register_notifies(monkeypatch):
    calls = []
    monkeypatch.setattr(activations, "_on_change", [lambda: calls.append(activations.names()[-1])])
    tfo.register_activation("tanh_exp", tanh_exp)
    tfo.register_activation("tanh_exp", tanh_exp)
    assert calls == ["tanh_exp"]


@pytest.mark.parametrize(
    ("name", "fn", "derivative", "error", "message"),
    [
        ("not a name", tanh_exp, None, ValueError, "name='not a name' is not accepted"),
        (7, tanh_exp, None, ValueError, "name=7 is not accepted"),
        ("new", 7, None, TypeError, "fn=7 is not callable"),
        ("new", tanh_exp, "no", TypeError, "derivative='no' is not callable"),
        ("new", lambda x: x.sum(), None, ValueError, r"fn is not accepted: for torch.float32 \(12,\) it gave .*\(\)"),
        ("new", lambda x: x.double(), None, ValueError, "fn is not accepted: .* keep shape and dtype"),
        ("new", lambda x: None, None, ValueError, "fn is not accepted: .* it gave None"),
        ("new", lambda x: x.softmax(-1), None, ValueError, "fn is not accepted: it is not elementwise"),
        ("new", tanh_exp, lambda x: x.mean(), ValueError, "derivative is not accepted"),
        (
            "new",
            torch.relu,
            lambda x: x.clamp_(0, 1),
            ValueError,
            "derivative is not accepted: it writes to",
        ),
    ],
)
def test_register_refuses(name, fn, derivative, error, message):
    before = dict(activations._TABLE)
    raises(error, message, tfo.register_activation, name, fn, derivative)
    assert before == activations._TABLE


def test_a_wrong_derivative_is_refused():
    with pytest.raises(ValueError, match=r"derivative is not accepted: at x = -2.9 it gives"):
        activations.register_activation("sine_wrong", torch.sin, lambda x: x)
