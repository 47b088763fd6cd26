"""Functions that resemble an MLP's activation, and activations that must not be replaced: each is rejected.

If an operator expresses a near miss exactly, the near miss must be fused as this operator (``FUSED``). Every case runs
with and without the rewrite, to compare results, gradients and writes into arguments.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import functions
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from differential import compare, compiled, fits
from functions import first, within
from harness import Net
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.lowerings.recognize import graph

C = math.sqrt(2 / math.pi)
Case = Callable[
    ..., Any
]  # called with results of linear layers h, u (4, 16) and p (4, 32), a weight w (8, 16) and an input m (4, 16)

NO_ACTIVATION = "is not a supported activation$"
NO_GATE = "is not a supported gated activation$"
ANOTHER = "another tensor takes part: "
MASK = "a mask takes part: "
BROADCAST, PARTS = "a broadcast changes the shape", "stands between the activation's parts"
TWO_COMPUTED = "not an MLP: read by a GEMM of two computed tensors"


def unary(act: Callable[[Tensor], Tensor]) -> Case:
    return lambda h, u, p, w, m: F.linear(act(h), w)


def binary(act: Callable[[Tensor, Tensor], Tensor]) -> Case:
    return lambda h, u, p, w, m: F.linear(act(h, u), w)


def packed(act: Callable[[Tensor], Tensor]) -> Case:
    return lambda h, u, p, w, m: F.linear(act(p), w)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def between(write: Callable[[Tensor, Tensor], Any]) -> Case:
    """Compute sigmoid(h)·h, with a write between the two reads of h."""
    return lambda h, u, p, w, m: (lambda s: F.linear(s * first(h, write(h, u)), w))(torch.sigmoid(h))


def then(act: Callable[[Tensor], Tensor], result: Callable[..., Any]) -> Case:
    """Call ``result`` with act(h), h, u and w."""
    return lambda h, u, p, w, m: result(act(h), h, u, w)


def bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


@torch.library.custom_op("near_misses::double_", mutates_args=("t",))
def double_(t: Tensor) -> None:
    t.mul_(2)


@torch._dynamo.allow_in_graph
def double_in_graph(t):
    return t.mul_(2)


# ---- another function ------------------------------------------------------------------------------------------------

KINK = "but with another gradient at the kink or at NaN"  # the first row of each input is at the kink

FUNCTIONS: dict[str, tuple[Case, str]] = {
    # Values of relu with another gradient at 0.
    "(x + |x|)/2": (unary(lambda x: (x + x.abs()) / 2), KINK),
    "gated by maximum": (binary(lambda h, u: torch.maximum(h, torch.zeros_like(h)) * u), KINK),
    # A wrong constant.
    "1.702 off by 2e-6": (unary(lambda x: x * torch.sigmoid(1.702 * (1 + 2e-6) * x)), "like quick_gelu, but has"),
    "1.0001 in NewGELU": (unary(lambda x: 0.5 * x * (1.0001 + torch.tanh(C * (x + 0.044715 * x**3)))), NO_ACTIVATION),
    "erf(x)": (unary(lambda x: 0.5 * x * (1 + torch.erf(x))), r"like gelu, but has 1 for 0\.7071068$"),
    "gelu(-x)": (unary(lambda x: F.gelu(-x)), NO_ACTIVATION),
    "-gelu(-x)": (unary(lambda x: -F.gelu(-x)), NO_ACTIVATION),
    "silu + 1e-7": (unary(lambda x: F.silu(x) + 1e-7), NO_ACTIVATION),
    # Another power, another operand.
    "relu**3": (unary(lambda x: F.relu(x) ** 3), r"^relu\(x\)\^3 is not a supported activation"),
    # Other activations.
    "rrelu in eval mode": (unary(nn.RReLU().eval()), rf"0\.2291667·x.*relu\(x\) {NO_ACTIVATION}"),
    "rrelu in training": (unary(nn.RReLU(0.2, 0.2)), r"random slopes \(rrelu\) in it$"),
    "relu6 by clamp": (unary(lambda x: x.clamp(0, 6)), KINK),
    "relu7": (unary(lambda x: F.hardtanh(x, 0.0, 7.0)), NO_ACTIVATION + "|like relu6"),
    "x*hardsigmoid(x)": (unary(lambda x: x * F.hardsigmoid(x)), KINK),
    "leaky_relu with another slope": (unary(lambda x: F.leaky_relu(x, 0.02)), NO_ACTIVATION + "|like leaky_relu"),
    "leaky_relu by maximum": (unary(lambda x: torch.maximum(x, 0.01 * x)), KINK),
    "elu with another alpha": (unary(lambda x: F.elu(x, 1.001)), "like elu, but has|" + NO_ACTIVATION),
    "softplus with another beta": (unary(lambda x: F.softplus(x, 1.001)), NO_ACTIVATION + "|like softplus"),
    "mish without its factor": (unary(lambda x: torch.tanh(F.softplus(x))), NO_ACTIVATION),
    "bilinear + 1": (binary(lambda h, u: h * u + 1), NO_GATE),
    "relu6 with a limit beyond all data": (unary(lambda x: x.clamp(0, 1e9)), NO_ACTIVATION),
    "where on another sign": (binary(lambda h, u: torch.where(u > 0, h, 0.0)), "cannot be proved|" + NO_GATE),
    "a difference quotient": (
        unary(lambda x: F.silu(x) + 1e6 * (torch.sigmoid(1.0000005 * x) - torch.sigmoid(x))),
        NO_ACTIVATION + "|cannot be proved|large terms cancel",
    ),
    "x/(2+exp(-x))": (unary(lambda x: x / (2 + torch.exp(-x))), NO_ACTIVATION),
    "relu**40": (unary(lambda x: F.relu(x) ** 40), NO_ACTIVATION),
    "x**x": (unary(lambda x: x.abs() ** x), "a power with a variable exponent"),
    "infinite": (unary(lambda x: F.gelu(x) * math.inf), "the constant inf in it"),
    "a rounded division": (unary(lambda x: torch.div(F.relu(x), 1.0, rounding_mode="floor")), "a rounded division"),
    "underflow": (unary(lambda x: F.silu(x * 1e-300 * 1e300)), "large terms cancel"),
    # Gates.
    "sigmoid of the wrong operand": (binary(lambda h, u: h * torch.sigmoid(u) * u + h), NO_GATE),
    "up + 1 outside": (binary(lambda h, u: F.silu(h) * u + 1), NO_GATE),
    "clamps differ": (binary(lambda h, u: F.silu(h.clamp(max=7.0)) * u.clamp(-7.001, 7.001)), NO_GATE),
    "clamp of the gate on both sides": (binary(lambda h, u: F.silu(h.clamp(-7.0, 7.0)) * u.clamp(-7.0, 7.0)), NO_GATE),
    "offset inside the clamp": (binary(lambda h, u: F.silu(h.clamp(max=1.0)) * (u + 1).clamp(-1.0, 1.0)), NO_GATE),
}

# ---- another tensor takes part ---------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Case, str]] = {
    "mask in a GLU": (lambda h, u, p, w, m: F.linear(F.silu(h) * (m > 0) * u, w), MASK + "gt"),
    "where, by rows of a GEMM's result": (
        lambda h, u, p, w, m: F.linear(torch.where(u[:, :1] > 0, F.silu(h), h), w),
        MASK + "gt",
    ),
    "prelu": (lambda h, u, p, w, m: F.linear(F.prelu(h, m[0]), w), ANOTHER + "argument 6"),
    "a divisor": (lambda h, u, p, w, m: F.linear(m / F.silu(h), w), ANOTHER + "argument 6"),
    "a scale of something unknown": (lambda h, u, p, w, m: F.linear(F.tanhshrink(h) * m[0], w), NO_ACTIVATION),
    "a scale that is written": (lambda h, u, p, w, m: F.linear(F.silu(h).mul_(m.detach()), w), ANOTHER + "argument 6"),
    "maximum over the row": (unary(lambda x: F.relu(x) * x.amax(-1, keepdim=True)), "another tensor takes part: amax"),
    "softmax in between": (
        binary(lambda h, u: F.silu(torch.softmax(h, -1)) * F.tanh(u)),
        "combined with the result of silu, which no GEMM with weights has produced",
    ),
    "noise": (unary(lambda x: F.silu(x) * torch.rand_like(x)), "combined with the result of rand_like"),
}

# ---- learned activations ---------------------------------------------------------------------------------------------


def learned(act: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """Return a model in which alpha and beta are parameters of the activation."""
    alpha, beta = torch.full((16,), 1.25, dtype=torch.float64), torch.tensor(1.702, dtype=torch.float64)
    return Net(act, alpha=nn.Parameter(alpha), beta=nn.Parameter(beta))


def xielu(s: Any, x: Tensor) -> Tensor:
    return torch.where(x > 0, F.softplus(s.beta) * x * x + 0.5 * x, (torch.expm1(x) - x) * s.beta + 0.5 * x)


LEARNED: dict[str, tuple[Case, str]] = {
    "xIELU": (unary(learned(xielu)), "a learnable parameter takes part: beta"),
}

# ---- not where a GEMM reads it, or not pointwise ---------------------------------------------------------------------

SHAPES: dict[str, tuple[Case, str]] = {
    "one row of itself": (unary(lambda h: F.silu(h) * h[:1]), BROADCAST),
    "transposed inside": (
        lambda h, u, p, w, m: F.linear(torch.sigmoid(h[:, :4]).t() * h[:, :4], w[:, :4]),
        PARTS + "|order|transpos",
    ),
    "linear attention": (lambda h, u, p, w, m: F.relu(h) @ torch.softmax(u, -1).t(), TWO_COMPUTED),
    "a piece of an activation's result": (packed(lambda p: F.gelu(p).chunk(2, -1)[0] * torch.tanh(p[:, :16])), PARTS),
    "reshaped inside": (unary(lambda x: torch.sigmoid(x).view(2, 2, 16).view(4, 16) * x), PARTS),
    "unequal split": (lambda h, u, p, w, m: F.linear(swiglu(*p.split([31, 1], -1)), m.new_ones(8, 31)), BROADCAST),
    "complex": (
        lambda h, u, p, w, m: torch.view_as_real(torch.tanh(m.cfloat() @ w.t().cfloat()) @ w.cfloat()),
        "torch.complex64: only real floating",
    ),
}

# ---- rounding in between ---------------------------------------------------------------------------------------------

CASTS: dict[str, tuple[Case, str]] = {
    "bf16 sigmoid": (unary(lambda x: x * torch.sigmoid(x.bfloat16()).to(x.dtype)), "it works in torch.bfloat16 on"),
    "type_as the mask": (binary(lambda h, u: F.silu(h).type_as(u.bfloat16()).to(h.dtype) * u), "bfloat16"),
    "integers in the middle": (
        unary(lambda x: F.relu(x).int().to(x.dtype) * F.relu(x)),
        "combined with the result of int, which no GEMM with weights has produced",
    ),
}

# ---- something is switched, detached or hooked in between ------------------------------------------------------------


SWITCHED = "autocast or grad mode is switched between its parts"
NO_DERIVATIVE = "the backward of a custom autograd.Function is not its derivative"

REGIONS: dict[str, tuple[Case, str]] = {
    "a piece cut without gradient": (
        lambda h, u, p, w, m: F.linear(-within(torch.no_grad, torch.split, torch.tanh(p), 16, -1)[0], w),
        "getitem stands between",
    ),
    "product without gradient": (
        binary(lambda h, u: (lambda s: within(torch.no_grad, torch.mul, s, u))(F.silu(h))),
        SWITCHED,
    ),
    "autocast in between": (binary(lambda h, u: (lambda s: within(bf16, torch.mul, s, u))(F.silu(h))), SWITCHED),
    "autocast switched off in between": (
        lambda h, u, p, w, m: within(
            bf16,
            lambda: F.linear(
                torch.sigmoid(h) * within(lambda: torch.autocast("cpu", enabled=False), torch.clone, h), w
            ),
        ),
        SWITCHED,
    ),
    "in place without gradient": (
        unary(lambda x: first(x, within(torch.no_grad, torch.sigmoid_, x))),
        "switched between its parts|in place",
    ),
    "in place without gradient, on what is written with one": (
        binary(
            lambda h, u: (lambda t: within(torch.no_grad, torch.relu_, t.add_(u)))(
                within(torch.no_grad, torch.clone, h)
            )
        ),
        "is in place, but its argument is from a different grad mode",
    ),
    "detached inside": (unary(lambda x: 0.5 * x * (1 + torch.erf(x * 0.7071067811865476).detach())), "detach stands"),
    "clipped gradient": (unary(functions.Clipped.apply), NO_DERIVATIVE),
    "scaled gradient": (unary(functions.Scaled.apply), NO_DERIVATIVE),
    "no gradient for the gate": (binary(functions.Forgets.apply), "gives no gradient for an argument"),
    "gradients exchanged": (binary(functions.Swapped.apply), NO_DERIVATIVE),
    "a function that rounds": (unary(functions.Rounding.apply), "cannot be proved: .* may round"),
}

# ---- written in place, or read elsewhere -----------------------------------------------------------------------------

BEFORE = " into it in place before it is read"

WRITTEN: dict[str, tuple[Case, str]] = {
    "a function that is read, before the second read": (
        between(lambda h, u: h.add_(1)),
        "writes into it in place before it is read|sigmoid\\(x\\) \\+ x·sigmoid\\(x\\) is not a supported activation",
    ),
    "by index": (between(lambda h, u: h.__setitem__((0, 1), 3.0)), "setitem writes" + BEFORE),
    "through as_strided": (between(lambda h, u: h.as_strided((8,), (2,)).mul_(2)), "mul_ writes" + BEFORE),
    "through its data": (between(lambda h, u: h.data.mul_(2)), "(mul_|_get_data_attr) writes" + BEFORE),
    "as out=": (between(lambda h, u: torch.mul(h, 2, out=h)), "mul writes" + BEFORE),
    "as one of several out=": (
        between(lambda h, u: torch.sort(u, dim=-1, out=(h, torch.empty(4, 16, dtype=torch.long)))),
        "sort writes",
    ),
    "in a list": (between(lambda h, u: torch._foreach_mul_([h], 2.0)), "_foreach_mul_ writes"),
    "by a custom operator's packet": (
        between(lambda h, u: torch.ops.near_misses.double_(h)),
        "double_ writes" + BEFORE,
    ),
    "by a custom operator, by keyword": (between(lambda h, u: double_(t=h)), "double_ writes" + BEFORE),
    "by an opaque function": (between(lambda h, u: double_in_graph(h)), "double_in_graph writes"),
    "by aten, by keyword": (
        between(lambda h, u: torch.ops.aten.add_.Tensor(self=h, other=u)),
        "add_.* writes into its input in place|add_.* writes" + BEFORE,
    ),
    "in a checkpointed block": (
        between(lambda h, u: checkpoint(lambda t: t.mul_(2), h, use_reentrant=False)),
        "checkpoint writes",
    ),
    "by numpy": (between(lambda h, u: h.numpy().__setitem__(0, 1.0)), "setitem.* writes"),
    "by a dropout": (between(lambda h, u: F.dropout3d(h[None, None, None], inplace=True)), "dropout3d writes" + BEFORE),
    "by an embedding's renormalization": (
        between(lambda h, u: F.embedding(torch.arange(4), h, max_norm=0.1)),
        "embedding writes",
    ),
    "by running statistics": (
        between(lambda h, u: F.batch_norm(u, h[0], u.var(0), training=True)),
        "batch_norm writes",
    ),
    "in place on a view": (
        lambda h, u, p, w, m: F.linear(h[1:].relu_(), w).sum() + h.sum(),
        "sum reads the tensor afterwards",
    ),
    "in place on an inactive dropout": (
        lambda h, u, p, w, m: F.linear(F.dropout(h, 0.0).relu_(), w).sum() + h.sum(),
        "sum reads the tensor afterwards",
    ),
    "its input, afterwards": (
        then(F.relu, lambda y, h, u, w: first(F.linear(y, w), h.add_(1))),
        "add_ writes into its input",
    ),
    "its result, after the GEMM": (
        then(F.gelu, lambda y, h, u, w: (first(F.linear(y, w), y.mul_(2)), y)),
        "mul_ writes into its result",
    ),
    "a view of its result": (
        then(F.silu, lambda y, h, u, w: F.linear(first(y, y.view(-1)[:3].zero_()), w)),
        "zero_ writes into its result",
    ),
    "the packed tensor": (
        lambda h, u, p, w, m: (lambda g: F.linear(F.silu(g[0]) * first(g[1], p.mul_(2)), w))(p.chunk(2, -1)),
        "mul_ writes into it in place before it is read|mul_ writes into its input",
    ),
    "the other half": (
        lambda h, u, p, w, m: (lambda s: F.linear(s * first(p[:, 16:], p[:, :16].zero_(), p[:, 16:].mul_(2)), w))(
            F.silu(p[:, :16])
        ),
        "writes",
    ),
    "inner value returned": (
        then(torch.sigmoid, lambda y, h, u, w: (F.linear(y * h, w), y)),
        "output also reads the result of sigmoid",
    ),
    "inner view kept": (
        then(F.silu, lambda y, h, u, w: (F.linear(y * u, w), y.view(-1)[:2])),
        "view also reads the result of silu",
    ),
}

# ---- no site: operators between the GEMMs are not pointwise, or Dynamo separates them --------------------------------

NO_SITE: dict[str, Case] = {
    "a mean inside": unary(lambda x: x * torch.sigmoid(x.mean())),
    "a norm by hand": unary(lambda x: (lambda y: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))(F.silu(x))),
    "a complex number in the middle": unary(lambda x: torch.complex(F.relu(x), F.relu(x)).real),
    "saved-tensor hooks": unary(
        lambda x: within(
            lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.float(), lambda t: t.double()), F.silu, x
        )
    ),
    "gate backwards": packed(lambda p: swiglu(p[:, :16].flip(-1), p[:, 16:])),
    "an argument alone": lambda h, u, p, w, m: F.linear(F.silu(m), w),
}

# ---- functions that another operator expresses exactly ---------------------------------------------------------------

FUSED: dict[tuple[str, str], dict[str, Case]] = {
    ("glu", "silu"): {
        "the same autocast entered twice": binary(
            lambda h, u: (lambda s: within(bf16, torch.mul, s, u))(within(bf16, F.silu, h))
        ),
        "overlapping halves": packed(lambda p: swiglu(p[:, :16], p[:, 1:17])),
        "steps of 3 and 2": lambda h, u, p, w, m: F.linear(swiglu(p[:, :16:3], p[:, 1:12:2]), w[:, :6]),
        "rows of two halves": packed(lambda p: swiglu(p[:2, :16], p[2:, :16])),
        "vsplit": packed(lambda p: swiglu(*p[:, :16].vsplit(2))),
        "rows re-partitioned, interleaved": lambda h, u, p, w, m: F.linear(
            swiglu(*p.view(2, 2, 32).reshape(4, 1, 16, 2).unbind(-1)), w
        ),
        "gate and up under no_grad": packed(lambda p: swiglu(*within(torch.no_grad, torch.chunk, p, 2, -1))),
        "a gate viewed as integers": packed(lambda p: swiglu(p[:, :16].view(torch.int64).view(p.dtype), p[:, 16:])),
        "detached gate": binary(lambda h, u: swiglu(h.detach(), u)),
        "a sum as the gate": binary(lambda h, u: F.silu(h + 0.5 * u) * u),
        "an up of its own input": lambda h, u, p, w, m: F.linear(F.silu(h) * (h + w[0]), w),
    },
    ("bias_act", "silu"): {
        "grad switched off and on": unary(lambda x: x * first(torch.sigmoid(x), within(torch.no_grad, torch.sum, x))),
        "Veltkamp's split before": unary(lambda x: (lambda c: F.silu(c - (c - x)))(x * (2.0**40 + 1))),
        "within inference_mode": lambda h, u, p, w, m: within(
            torch.inference_mode, lambda: F.linear(F.silu(m @ w.t() @ w), w)
        ).clone(),
        "terms that cancel on paper only": unary(lambda x: 2 * (2 * (1 + torch.tanh(0.5 * x))) * (0.5 * x * 0.5 * 0.5)),
    },
    ("bias_glu", "silu"): {
        "re-partitioned": lambda h, u, p, w, m: F.linear(swiglu(*p.view(2, 2, 32).view(2, 2, 2, 16).unbind(2)), w),
    },
    ("glu", "sigmoid"): {
        "x·sigmoid(x.detach())": unary(lambda x: x * torch.sigmoid(x.detach())),
        "F.glu of rows": packed(lambda p: F.glu(p[:, :16], 0)),
        "Swish with a learned slope": lambda h, u, p, w, m: F.linear(h * torch.sigmoid(w[0] * h), w),
    },
    ("bias_act", "gelu"): {
        "scaled by an input before": lambda h, u, p, w, m: F.linear(F.gelu(h * m), w),
    },
    ("bias_act", "relu"): {
        "centered before": unary(lambda x: F.relu(x - x.mean(-1, keepdim=True))),
        "in place, read again": lambda h, u, p, w, m: F.linear(F.relu(h, inplace=True), w).sum() + h.sum(),
        "maximum without gradient": unary(lambda x: within(torch.no_grad, torch.maximum, x, torch.zeros_like(x))),
    },
    ("bias_act", "relu2"): {
        "overwritten without gradient": unary(lambda x: within(torch.no_grad, lambda x: F.relu(x).pow_(2), x)),
    },
    ("bias_act", "tanh"): {"a function that saves another activation": unary(functions.LateState.apply)},
}

FAMILIES = {
    "function": FUNCTIONS, "operand": OTHERS, "learned": LEARNED, "shape": SHAPES, "cast": CASTS, "region": REGIONS,
    "write": WRITTEN,
}  # fmt: skip

# Eager cannot differentiate these.
WITHOUT_GRAD = {
    "as out=", "as one of several out=", "by numpy", "by running statistics", "its result, after the GEMM",
    "the packed tensor", "the other half",
}  # fmt: skip


def sites(*cases: Case, dtype: torch.dtype | None = None, grad: bool = True) -> list[Any]:
    """Compare rewritten cases(h, u, p, w, m) with the originals, to ``dtype``'s precision. Return the sites in order.

    All cases are in one graph, each on tensors of its own.
    """

    def model(*args):
        results = []
        for i, case in enumerate(cases):
            x, wh, wu, wp, w, m = args[6 * i : 6 * i + 6]
            results.append(case(F.linear(x, wh), F.linear(x, wu), F.linear(x, wp), w, m))
        return results

    arguments: list[Tensor] = []
    for _ in cases:
        generator = torch.Generator().manual_seed(0)
        shapes = [(4, 8), (16, 8), (16, 8), (32, 8), (8, 16), (4, 16)]
        x, *weights, m = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
        x[0] = 0.0  # h, u and p are also 0 in this row, which is at relu's kink
        arguments += [*(t.requires_grad_(grad) for t in (x, *weights)), m]
    torch._dynamo.reset()
    return compare(model, arguments, dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_near_misses_are_not_fused(family):
    cases = FAMILIES[family]
    for grad in (True, False):
        names = [name for name in cases if (family == "write" and name in WITHOUT_GRAD) != grad]
        case_sites = sites(*(cases[name][0] for name in names), grad=grad)
        for i, (name, site) in enumerate(zip(names, case_sites, strict=True)):
            assert site.op is None, name
            reason = cases[name][1].replace("argument 6", f"argument {6 * i + 6}")
            assert re.search(reason, site.reason), (name, site.reason)
            assert site.kind is not None and fits(site.kind, site.reason), (name, site.kind)


def test_gathered_weights_are_weights():
    """Weights gathered by a router's choice for each token are still weights."""

    def model(x, router, up, down):
        expert = F.linear(x, router).argmax(-1)
        gate, up = torch.bmm(up[expert], x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        return torch.bmm(down[expert], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)

    shapes = (4, 8), (3, 8), (3, 32, 8), (3, 8, 16)
    (site,) = compare(model, [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes])
    assert (site.op, site.activation) == ("fused::bias_glu", "silu")


def test_other_functions_are_not_sites():
    assert sites(*NO_SITE.values()) == []


# A scale of the gate or of the result becomes a multiplication before or after the operator.
SCALED: dict[str, tuple[Case, str]] = {
    "0.51": (unary(lambda x: 0.51 * x * (1 + torch.tanh(C * (x + 0.044715 * x**3)))), "1.02·gelu_tanh(x)"),
    "LeCun's tanh": (unary(lambda x: 1.7159 * torch.tanh(2 / 3 * x)), "1.7159·tanh(0.6666667·x)"),
    "relu of the negative": (unary(lambda x: F.relu(-2.0 * x)), "relu(-2·x)"),
    "by keyword": (unary(lambda x: F.silu(torch.div(input=x, other=2.0))), "silu(0.5·x)"),
    "Falcon-H1's gate": (binary(lambda h, u: u * F.silu(h * 0.7)), "silu(0.7·x)"),
    "both": (binary(lambda h, u: F.silu(h / 2) * u * 3), "3·silu(0.5·x)"),
    "packed, of the gate": (packed(lambda p: swiglu(p[:, :16] * 0.25, p[:, 16:])), "silu(0.25·x)"),
}


def test_scales_become_multiplications():
    cases, functions = zip(*SCALED.values(), strict=True)
    for site, function in zip(sites(*cases), functions, strict=True):
        assert site.op and site.reason.endswith(f", as {function}"), site.reason


# A factor without h and u stays after the operator.
FACTORS: dict[str, tuple[Case, str]] = {
    "mask": (lambda h, u, p, w, m: F.linear(F.gelu(h) * (m > 0), w), "gelu"),
    "an input as the up": (lambda h, u, p, w, m: F.linear(m * F.gelu(h), w), "gelu"),
    "an input as the gate": (lambda h, u, p, w, m: F.linear(F.gelu(m) * F.tanh(h), w), "tanh"),
    "a column of divisors": (lambda h, u, p, w, m: F.linear(torch.sigmoid(h) / (1 + m[:, :1] ** 2), w), "sigmoid"),
    "a scale that is a tensor": (lambda h, u, p, w, m: F.linear(torch.sigmoid(h) * m[0, 0], w), "sigmoid"),
    "layer scale": (unary(learned(lambda s, x: F.gelu(x) * s.alpha)), "gelu"),
    "in front of two GEMMs": (lambda h, u, p, w, m: F.linear(F.silu(h) * m[0], w) + F.linear(F.silu(h), w), "silu"),
    "one of two readers": (lambda h, u, p, w, m: (lambda a: F.linear(a * m[0], w) + F.linear(a, w))(F.silu(h)), "silu"),
    "two factors of one": (
        lambda h, u, p, w, m: (lambda a: F.linear(a * m[0], w) + F.linear(a * m[1], w))(F.silu(h)),
        "silu",
    ),
    "behind a dropout": (lambda h, u, p, w, m: F.linear(F.dropout(F.silu(h), 0.0) * m[0], w), "silu"),
    "masked_fill": (lambda h, u, p, w, m: F.linear(F.gelu(h).masked_fill(m > 0, 0.0), w), "gelu"),
    "where": (lambda h, u, p, w, m: F.linear(torch.where(m[:, :1] > 0, F.silu(h) * u, 1.0), w), "silu"),
    "a mask of computed rows": (
        lambda h, u, p, w, m: F.linear(F.silu(h) * (m.cumsum(0) @ w.t())[:, :1].gt(0), w),
        "silu",
    ),
}


def test_factors_stay_after_the_operator():
    names = [name for name in FACTORS for _ in range(2 if name == "in front of two GEMMs" else 1)]
    reasons = dict.fromkeys(FACTORS, "")
    for name, site in zip(names, sites(*(case for case, _ in FACTORS.values())), strict=True):
        assert site.op and site.activation == FACTORS[name][1] and set(site.users) == {"linear"}, name
        reasons[name] += site.reason
    for name, reason in reasons.items():
        factor = {"a column of divisors": "truediv", "masked_fill": "masked_fill", "where": "where"}.get(name, "mul")
        assert f"; {factor} by another tensor stays behind it" in reason, name


def on_rows(m: Tensor) -> Tensor:
    return m[:, :1] > 0


# A mask before the activation: the operator reads the masked tensor.
MASKED: dict[str, tuple[Case, str]] = {
    "masked_fill": (lambda h, u, p, w, m: F.linear(F.gelu(h.masked_fill(on_rows(m), 0.0)), w), "bias_act"),
    "masked_fill by keywords": (
        lambda h, u, p, w, m: F.linear(F.gelu(torch.masked_fill(h, mask=on_rows(m), value=-1.0)), w),
        "bias_act",
    ),
    "masked_fill in place": (lambda h, u, p, w, m: F.linear(F.silu(h.masked_fill_(on_rows(m), 0.0)), w), "bias_act"),
    "where, of two": (lambda h, u, p, w, m: F.linear(F.silu(torch.where(on_rows(m), h, u)), w), "bias_act"),
    "where, of an input": (lambda h, u, p, w, m: F.linear(F.silu(torch.where(on_rows(m), h, m)), w), "bias_act"),
    "a factor": (lambda h, u, p, w, m: F.linear(F.silu(h * on_rows(m)), w), "bias_act"),
    "packed": (packed(lambda p: swiglu(*p.masked_fill(p.detach()[:, :1] > 0, 0.0).chunk(2, -1))), "bias_glu"),
    "up alone": (lambda h, u, p, w, m: F.linear(swiglu(h, u.masked_fill(on_rows(m), 0.0)), w), "glu"),
    "by rows of a softmax": (
        lambda h, u, p, w, m: F.linear(F.silu(h * torch.softmax(u, -1)[:, :1].gt(0.05).to(h.dtype)), w),
        "bias_act",
    ),
}


def test_masks_before_the_activation_stay() -> None:
    cases, operators = zip(*MASKED.values(), strict=True)
    for site, operator in zip(sites(*cases), operators, strict=True):
        assert site.op == f"fused::{operator}" and "mask" not in site.reason and "stays behind" not in site.reason


# The dtype that the activation is computed in, and is rounded to before it is widened.
WIDENED: dict[str, tuple[Case, torch.dtype]] = {
    "bf16 work": (unary(lambda x: F.gelu(x.bfloat16()).to(x.dtype)), torch.bfloat16),
    "float32 on float64": (unary(lambda x: F.gelu(x.float()).to(x.dtype)), torch.float32),
    "a GLU in half": (binary(lambda h, u: (F.silu(h.half()) * u.half()).to(h.dtype)), torch.float16),
}


@pytest.mark.parametrize("name", WIDENED)
def test_rounding_before_a_wider_cast_is_preserved(name):
    """A GEMM in float32 may follow: bitsandbytes' layers with ``compute_dtype``, in a bfloat16 model."""
    case, dtype = WIDENED[name]
    (site,) = sites(case, dtype=dtype)
    assert site.op and site.activation in ("gelu", "silu")


def test_exact_forms_are_fused():
    expected = [(f"fused::{op}", activation) for (op, activation), cases in FUSED.items() for _ in cases]
    case_sites = sites(*(case for cases in FUSED.values() for case in cases.values()))
    assert [(site.op, site.activation) for site in case_sites] == expected


@pytest.mark.parametrize(
    "clamp",
    [lambda x: x.clamp(min=0), lambda x: torch.clamp_min(x, 0.0) ** 2, lambda x: F.silu(x.clamp(max=math.inf))],
)
def test_clamp_is_relu_without_gradients(clamp):
    """Its gradient at the bound is 1 up to torch 2.13, and 0 in 2.15. At NaN, clamp has 0 and relu has 1."""
    (site,) = sites(unary(clamp))
    assert site.op is None and re.search(f"{KINK}|the constant inf", site.reason)
    (site,) = sites(unary(lambda x: within(torch.no_grad, clamp, x)))
    assert site.op == "fused::bias_act"


# Fused or not, their gradients must be right at exactly 0, the value in padded rows of a layer without bias.
AT_A_KINK: list[Callable[[Tensor], Tensor]] = [
    lambda x: x - x.clamp(max=0),
    lambda x: F.leaky_relu(x, 0.0),
    lambda x: x * x.clamp(min=0),
    lambda x: (x.abs() + x) / 2 * ((x.abs() - x.abs()) / 2) * (x + 0.5),  # a product with a difference of equal terms
]


def test_gradients_at_a_kink():
    sites(*map(unary, AT_A_KINK))


def test_a_view_that_is_written_after_the_graph_read_it():
    """Recorded values include later writes, so autograd must be off when the operator's value is recorded."""

    def case(h, u, p, w, m):
        gate, up = p.chunk(2, -1)
        view = up.detach()
        view.mul_(torch.tanh(gate))
        return F.linear(view, w)

    sites(case)


# Calls on a float64 tensor, with arguments at which they may return it itself.
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to(x.dtype), "type": lambda x: x.type(x.dtype), "type_as": lambda x: x.type_as(x),
    "double": lambda x: x.double(), "contiguous": lambda x: x.contiguous(), "clone": lambda x: x.clone(),
    "dropout": lambda x: F.dropout(x, 0.5, training=False), "dropout at 0": lambda x: F.dropout(x, 0.0),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, False), "positive": lambda x: +x,
    "flatten": lambda x: x.flatten(-1),
    "add_": lambda x: x.add_(torch.ones_like(x[:1])),
    "out=": lambda x: torch.add(x, torch.ones_like(x[:1]), out=x),
    "view": lambda x: x.view(x.shape), "reshape": lambda x: x.reshape(x.shape), "view_as": lambda x: x.view_as(x),
    "unflatten": lambda x: x.unflatten(0, x.shape[:1]), "squeeze": lambda x: x.squeeze(0),
    "ravel": lambda x: x.view(-1).ravel(), "transpose": lambda x: x.transpose(0, 0), "t": lambda x: x[0].t(),
    "movedim": lambda x: x.movedim(0, 0), "permute": lambda x: x.permute(0, 1), "expand": lambda x: x.expand(x.shape),
    "expand_as": lambda x: x.expand_as(x), "getitem": lambda x: x[...], "narrow": lambda x: x.narrow(0, 0, len(x)),
    "detach": lambda x: x.detach(), "chunk": lambda x: x.chunk(1)[0], "mul": lambda x: x * 1.0, "relu": F.relu,
    "index_select": lambda x: x.index_select(0, torch.arange(len(x))), "sub": lambda x: x - 0.0,
}  # fmt: skip
IN_PLACE = {"dropout", "dropout at 0", "alpha_dropout", "add_", "out="}


def test_calls_that_may_return_their_argument_are_in_the_table():
    x = torch.ones(4, 16, dtype=torch.float64)
    for name, call in SAME.items():
        assert (call(x) is x) == (name in graph.ITSELF | IN_PLACE), name


def test_an_argument_that_a_call_returns_keeps_its_gradient():
    """In no_grad, ``h.double().relu_()`` changes h's values, not its gradient. One graph has a site per call."""
    calls = [call for name, call in SAME.items() if name in graph.ITSELF | IN_PLACE]

    def without_grad(calls):
        return lambda h, u, p, w, m: [
            F.linear(within(torch.no_grad, lambda t, call=call: F.relu_(call(t)), h + u), w.to(call(m).dtype))
            for call in calls
        ]

    kinds = [site.kind for site in sites(without_grad(calls))]
    assert kinds == [Kind.IN_PLACE_REGION] * len(calls)
    of_new_tensors = sites(without_grad([Tensor.float, Tensor.clone, Tensor.detach]), dtype=torch.float32)
    assert [site.op for site in of_new_tensors] == ["fused::bias_act"] * 3


def silu_mlp(x, w1, w2):
    return F.linear(F.silu(F.linear(x, w1)), w2)


HOOKS: dict[str, Case] = {
    "on the input": unary(lambda x: first(F.silu(x), x.register_hook(lambda g: g * 0.5))),
    "on the gate": binary(lambda h, u: (lambda s: first(s, s.register_hook(lambda g: g * 0.5)) * u)(F.silu(h))),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_preserved(name):
    """Except "on the input", the site is missing or rejected, by Dynamo's version."""
    hooked_sites = sites(HOOKS[name])
    assert all(site.op is None for site in hooked_sites) or name == "on the input"


class Spy(torch.Tensor):
    """Doubles the result of silu."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is F.silu else result


def test_arithmetic_of_subclasses_is_preserved():
    x, w1, w2 = torch.randn(4, 8).as_subclass(Spy), torch.randn(16, 8), torch.randn(8, 16)
    recorded: list[Any] = []
    y = compiled(silu_mlp, "eager", recorded)(x, w1, w2)
    (site,) = recorded
    assert site.op and site.reason.endswith("as 2·silu(x)")
    expected = silu_mlp(x, w1, w2)  # Dynamo's graph in torch 2.11 doubles twice
    torch.testing.assert_close(y.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
