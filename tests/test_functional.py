"""The typed functions equal their formulas, compile to one graph, and are documented."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from harness import GELU_TANH as gelu_tanh
from harness import quick_gelu as quick

from torch_fused_ops import functional as tf
from torch_fused_ops.testing.samples import OPERATORS, samples

B, S = torch.linspace(-1, 1, 8), torch.tensor([0.5, -1.0, 2.0])
X, Y = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.linspace(-3, 3, 24).reshape(3, 8)
GATE, UP = X.chunk(2, -1)


# Values that float8 represents exactly.
INTEGERS, EYE = torch.arange(-8.0, 8.0).repeat(4, 8), torch.eye(128)

FORMULAS = [  # (name, args, kwargs, formula in PyTorch)
    ("bias_gelu", (X, B), {}, lambda: F.gelu(X + B)),
    ("bias_gelu", (X, B, "tanh"), {}, lambda: gelu_tanh(X + B)),
    ("bias_gelu", (X,), {"approximate": "none", "token_scale": S}, lambda: F.gelu(X) * S[:, None]),
    ("geglu", (X, Y), {}, lambda: F.gelu(X) * Y),
    ("geglu", (X, Y), {"approximate": "tanh"}, lambda: gelu_tanh(X) * Y),
    ("bias_swiglu", (X,), {"layout": "interleaved"}, lambda: F.silu(X[:, ::2]) * X[:, 1::2]),
    ("bias_geglu", (X,), {}, lambda: F.gelu(GATE) * UP),
    ("bias_geglu", (X,), {"approximate": "tanh"}, lambda: gelu_tanh(GATE) * UP),
    ("swiglu", (X, Y, S), {}, lambda: F.silu(X) * Y * S[:, None]),
    ("swiglu", (X, Y), {"up_offset": 1, "clamp": 2}, lambda: F.silu(X.clamp(max=2)) * (Y.clamp(-2, 2) + 1)),
    ("bias_glu", (X, B, S), {"activation": "silu"}, lambda: F.silu((X + B)[:, :4]) * (X + B)[:, 4:] * S[:, None]),
    ("bias_glu", (X,), {"activation": "silu", "layout": "interleaved"}, lambda: F.silu(X[:, ::2]) * X[:, 1::2]),
    (
        "bias_glu",
        (X,),
        {"activation": "quick_gelu", "up_offset": 1.0, "clamp": 0.5},
        lambda: quick(GATE.clamp(max=0.5)) * (UP.clamp(-0.5, 0.5) + 1),
    ),
    ("bias_act", (X, B), {"activation": "tanh"}, lambda: torch.tanh(X + B)),
    ("glu", (X, Y), {"activation": "sigmoid"}, lambda: torch.sigmoid(X) * Y),
    ("bias_glu", (X,), {"activation": "sigmoid", "layout": "halves"}, lambda: torch.sigmoid(GATE) * UP),
    ("dropout_add", (X, B, X), {"seed": torch.tensor([3]), "p": 0.0}, lambda: X + B + X),
    ("bias_dropout_add", (X, B, X, 0.5, False), {}, lambda: X + B + X),
    ("linear_fp8", (INTEGERS, EYE, INTEGERS[0]), {}, lambda: F.linear(INTEGERS, EYE, INTEGERS[0])),
    ("scaled_masked_softmax", (X,), {"scale": 0.5}, lambda: torch.softmax(0.5 * X, -1)),
]


VIEWLESS = {"MakeViewlessTensor", "make_viewless_tensor"}
# Without a formula, or for only one dtype: tests/ops/test_viewless.py, test_dropout.py
ELSEWHERE = {*VIEWLESS, "shard_seed"}
COMPUTING = [name for name in tf.__all__ if name not in ELSEWHERE]


def test_every_function_has_a_formula_here():
    assert {name for name, *_ in FORMULAS} == set(COMPUTING)


@pytest.mark.parametrize(("name", "args", "kwargs", "formula"), FORMULAS)
def test_formula(name, args, kwargs, formula):
    out = getattr(tf, name)(*args, **kwargs)
    torch.testing.assert_close(out, formula(), rtol=1e-5, atol=1e-6)
    assert out.dtype == torch.float32 and out.is_contiguous()


@pytest.mark.covering(every=4)
@pytest.mark.parametrize(("name", "args", "kwargs", "formula"), FORMULAS)
def test_compiles_to_one_graph_with_gradients(name, args, kwargs, formula):
    fn = getattr(tf, name)
    leaves = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    out = torch.compile(lambda *a: fn(*a, **kwargs), backend="aot_eager", fullgraph=True)(*leaves)
    torch.testing.assert_close(out.detach(), fn(*args, **kwargs), rtol=0, atol=0)
    tensors = [a for a in leaves if isinstance(a, torch.Tensor)]
    expected = torch.autograd.grad(fn(*leaves, **kwargs).sum(), tensors)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), tensors), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", COMPUTING)
def test_documented_and_annotated(name):
    fn = getattr(tf, name)
    signature = inspect.signature(fn)
    assert fn.__doc__ and "``" in fn.__doc__.splitlines()[0]
    assert signature.return_annotation == "Tensor"
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def test_generic_functions_call_the_operators():
    for op in OPERATORS:
        for sample in samples(op, core=True):
            names = [a.name for a in sample.overload._schema.arguments]
            assert torch.equal(getattr(tf, op)(**dict(zip(names, sample.args, strict=False))), sample()), sample


def test_ten_batch_sizes_compile_twice():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, b: tf.bias_glu(x, b, activation="silu", clamp=7.0), backend=counter, fullgraph=True
    )
    for rows in range(2, 12):
        x = torch.randn(rows, 8)
        assert torch.equal(compiled(x, B), tf.bias_glu(x, B, activation="silu", clamp=7.0))
    assert counter.frame_count <= 2  # one graph for the first size, one for all others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_reject_tensors_without_axes(dtype):
    x, only = torch.tensor(1.0, dtype=dtype), [True, False, False]
    with pytest.raises(ValueError, match=r"grad has shape \(\); accepted: at least one axis"):
        torch.ops.fused.bias_act_backward(x, x, None, None, "gelu", only)
    with pytest.raises(ValueError, match=r"input has shape \(\); accepted: at least one axis"):
        tf.bias_gelu(x)
    with pytest.raises(ValueError, match=r"grad has shape \(\); accepted: at least one axis"):
        torch.ops.fused.glu_backward(x, x, x, None, "silu", 0.0, None, only)
