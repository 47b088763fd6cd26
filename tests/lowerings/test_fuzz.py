"""Random programs that contain random patterns of activations: the rewrite must not change their results.

    pytest tests/lowerings/test_fuzz.py            a fixed sample, under half a minute
    pytest -m slow tests/lowerings/test_fuzz.py    3,200 programs, 800 at a memory level

``equivalent`` writes a function in a different way, and ``neighbor`` changes it to a similar function. ``Program``
writes a random function as source text around such expressions. Each statement is executed at once, so that shapes are
known, and statements that raise are dropped. A failing test prints its program.
"""

import math
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from differential import LEVELS, EagerFails, compare, traced
from functions import StraightThrough, Swish
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_fused_ops.lowerings import passes
from torch_fused_ops.lowerings.recognize import rewrite
from torch_fused_ops.policy import FusionPolicy

# ---- expressions -----------------------------------------------------------------------------------------------------

# A variable's name, a constant, or (a function of symbolic.RULES, its arguments …).
Expression: TypeAlias = "str | float | int | tuple[Any, ...] | None"
X: Expression = "x"
C = math.sqrt(2 / math.pi)


def neg(a: Expression) -> Expression:
    return ("neg", a)


def newton(a: Expression) -> Expression:
    """Return NewGELU's inner polynomial."""
    return ("mul", C, ("add", a, ("mul", 0.044715, ("pow", a, 3.0))))


# Equal expressions for each function. ``equivalent`` substitutes them at random, so the recognizer must understand each
# of them anywhere in an expression.
EQUAL: dict[str, list[Callable[..., Expression]]] = {
    "add": [
        lambda a, b: ("add", b, a),
        lambda a, b: ("sub", a, neg(b)),
        lambda a, b: ("rsub", neg(a), b) if not number(a) else ("add", b, a),
    ],
    "sub": [lambda a, b: ("add", a, neg(b)), lambda a, b: neg(("sub", b, a)), lambda a, b: ("add", neg(b), a)],
    "mul": [
        lambda a, b: ("mul", b, a),
        lambda a, b: ("div", a, 1 / b) if number(b) and b else ("mul", b, a),
        lambda a, b: neg(("mul", neg(a), b)),
        lambda a, b: ("mul", ("mul", a, 0.5), ("mul", 2.0, b)),
    ],
    "div": [
        lambda a, b: ("mul", a, 1 / b) if number(b) else ("mul", a, ("reciprocal", b)),
        lambda a, b: ("div", neg(a), neg(b)) if not number(b) else ("mul", 1 / b, a),
    ],
    "neg": [lambda a: ("mul", a, -1.0), lambda a: ("sub", 0.0, a), lambda a: ("rsub", a, 0.0)],
    "pow": [
        lambda a, n: ("mul", a, ("pow", a, n - 1)) if n in (2, 3) else ("pow", a, n),
        lambda a, n: ("mul", ("square", a), a) if n == 3 else ("square", a) if n == 2 else ("pow", a, n),
        lambda a, n: ("pow", a, int(n)) if n == int(n) else ("pow", a, n),
    ],
    "square": [lambda a: ("mul", a, a), lambda a: ("pow", a, 2.0)],
    "reciprocal": [lambda a: ("div", 1.0, a), lambda a: ("pow", a, -1.0)],
    "sigmoid": [
        lambda a: ("div", 1.0, ("add", 1.0, ("exp", neg(a)))),
        lambda a: ("reciprocal", ("add", ("exp", neg(a)), 1.0)),
        lambda a: ("mul", 0.5, ("add", ("tanh", ("mul", a, 0.5)), 1.0)),
        lambda a: ("sub", 1.0, ("sigmoid", neg(a))),
        lambda a: ("div", ("exp", a), ("add", ("exp", a), 1.0)),
    ],
    "tanh": [
        lambda a: ("sub", ("mul", 2.0, ("sigmoid", ("mul", 2.0, a))), 1.0),
        lambda a: neg(("tanh", neg(a))),
        lambda a: ("sub", 1.0, ("mul", 2.0, ("sigmoid", ("mul", -2.0, a)))),
    ],
    "silu": [lambda a: ("mul", a, ("sigmoid", a)), lambda a: ("div", a, ("add", 1.0, ("exp", neg(a))))],
    "exp": [lambda a: ("exp2", ("mul", a, 1 / math.log(2))), lambda a: ("add", ("expm1", a), 1.0)],
    "erf": [lambda a: ("sub", 1.0, ("erfc", a)), lambda a: neg(("erf", neg(a)))],
    "erfc": [lambda a: ("sub", 1.0, ("erf", a)), lambda a: ("add", 1.0, ("erf", neg(a)))],
    "relu": [
        lambda a: ("clamp_min", a, 0.0),
        lambda a: ("clamp", a, 0.0),
        lambda a: ("leaky_relu", a, 0.0),
        lambda a: ("sub", a, ("clamp_max", a, 0.0)),
        lambda a: ("div", ("add", a, ("abs", a)), 2.0),
        lambda a: ("add", a, ("relu", neg(a))),
    ],
    "gelu": [
        lambda a: ("mul", ("mul", 0.5, a), ("add", 1.0, ("erf", ("mul", a, math.sqrt(0.5))))),
        lambda a: ("mul", a, ("mul", 0.5, ("erfc", ("div", a, -math.sqrt(2.0))))),
    ],
    "gelu_tanh": [
        lambda a: ("mul", ("mul", 0.5, a), ("add", 1.0, ("tanh", newton(a)))),
        lambda a: ("mul", a, ("sigmoid", ("mul", 2.0, newton(a)))),
        lambda a: ("div", a, ("add", 1.0, ("exp", ("mul", -2.0, newton(a))))),
    ],
}
ACTIVATIONS: dict[str, Expression] = {
    "relu": ("relu", X),
    "relu2": ("square", ("relu", X)),
    "silu": ("silu", X),
    "gelu": ("gelu", X),
    "gelu_tanh": ("gelu_tanh", X),
    "quick_gelu": ("mul", X, ("sigmoid", ("mul", 1.702, X))),
    "sigmoid": ("sigmoid", X),
    "tanh": ("tanh", X),
}
# Substitutions that change a function.
SWAPS: dict[str, tuple[str, ...]] = {
    "sigmoid": ("tanh", "erf", "hardsigmoid", "exp", "softplus", "relu"),
    "tanh": ("sigmoid", "erf", "hardtanh", "softsign", "tanhshrink"),
    "erf": ("tanh", "sigmoid", "erfc"),
    "relu": ("relu6", "leaky_relu", "elu", "selu", "celu", "softplus", "abs", "hardswish", "hardtanh", "square"),
    "silu": ("mish", "hardswish", "gelu", "gelu_tanh", "sigmoid", "logsigmoid"),
    "gelu": ("gelu_tanh", "silu", "mish"),
    "gelu_tanh": ("gelu", "silu"),
    "exp": ("expm1", "exp2", "square"),
    "add": ("sub", "mul", "maximum"),
    "sub": ("add", "rsub", "minimum"),
    "mul": ("add", "div", "maximum"),
    "div": ("mul",),
    "neg": ("abs", "relu"),
    "square": ("abs", "relu", "exp"),
}
WRONG = (3e-6, 1e-5, 1e-4, 1e-2, 0.3, -2.0)  # relative


def number(e: Expression) -> bool:
    return isinstance(e, (int, float))


def nodes(e: Expression, path: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], Expression]]:
    below = [n for i, a in enumerate(e) if i for n in nodes(a, (*path, i))] if isinstance(e, tuple) else []
    return [(path, e), *below]


def put(e: Expression, path: tuple[int, ...], new: Expression) -> Expression:
    if not path:
        return new
    assert isinstance(e, tuple)
    return (*e[: path[0]], put(e[path[0]], path[1:], new), *e[path[0] + 1 :])


def substitute(e: Expression, variables: dict[str, Expression]) -> Expression:
    if isinstance(e, tuple):
        return (e[0], *(substitute(a, variables) for a in e[1:]))
    return variables.get(e, e) if isinstance(e, str) else e


def equivalent(r: random.Random, e: Expression, steps: int, size: int = 60) -> Expression:
    """Return an expression equal to e."""
    for _ in range(steps):
        known = [(path, node) for path, node in nodes(e) if isinstance(node, tuple) and node[0] in EQUAL]
        if known:
            path, node = r.choice(known)
            new = put(e, path, r.choice(EQUAL[node[0]])(*node[1:]))
            e = new if len(nodes(new)) <= size else e
    return e


def neighbor(r: random.Random, e: Expression) -> Expression:
    """Return an expression that resembles e. It rarely equals e, if the rest of e undoes the swap."""
    path, node = r.choice(nodes(e))
    if number(node):
        return put(e, path, node * (1 + r.choice(WRONG)))
    if isinstance(node, str):
        substitutes = [neg(node), ("mul", node, 1 + r.choice(WRONG)), ("add", node, r.choice(WRONG[2:])), "y"]
        return put(e, path, r.choice(substitutes))
    if isinstance(node, tuple):
        if node[0] in SWAPS and r.randrange(3):
            name = r.choice(SWAPS[node[0]])
            return put(e, path, (name, *node[1:], *((0.01,) if name == "leaky_relu" else ())))
        return put(e, path, r.choice([("mul", node, 1 + r.choice(WRONG)), ("sub", 1.0, node), node[1], ("relu", node)]))
    return e


# ---- source text -----------------------------------------------------------------------------------------------------


def listed(text: str) -> list[str]:
    return [item.strip() for line in text.strip().splitlines() for item in line.split(" | ")]


def spelled(text: str) -> dict[str, list[str]]:
    """Parse lines "name: text | text …", which may continue in indented lines."""
    lines = re.sub(r"\n {4}", " | ", text.strip()).splitlines()
    return {name: listed(texts) for name, texts in (line.split(": ", 1) for line in lines)}


# Patterns of each function. {0} must be a tensor if its method is called, or if torch requires a tensor.
SPELLINGS = spelled(
    """
add: {0} + {1} | torch.add({0}, {1}) | {0}.add({1}) | torch.add({0}, {1}, alpha=1) | torch.add(input={0}, other={1})
sub: {0} - {1} | torch.sub({0}, {1}) | {0}.sub({1}) | torch.subtract({0}, {1})
rsub: {1} - {0} | torch.rsub({0}, {1}) | {0}.__rsub__({1})
mul: {0} * {1} | torch.mul({0}, {1}) | {0}.mul({1}) | torch.multiply({0}, {1}) | torch.mul(other={1}, input={0})
div: {0} / {1} | torch.div({0}, {1}) | {0}.div({1}) | torch.true_divide({0}, {1}) | torch.div({0}, other={1})
neg: -{0} | torch.neg({0}) | {0}.neg() | torch.negative({0})
pow: {0} ** {1} | torch.pow({0}, {1}) | {0}.pow({1})
square: torch.square({0}) | {0}.square() | {0} ** 2 | {0}.pow(2)
reciprocal: torch.reciprocal({0}) | 1 / {0} | {0}.reciprocal() | {0} ** -1
exp: torch.exp({0}) | {0}.exp()
exp2: torch.exp2({0}) | torch.special.exp2({0}) | 2.0 ** {0}
expm1: torch.expm1({0}) | {0}.expm1()
sigmoid: torch.sigmoid({0}) | {0}.sigmoid() | F.sigmoid({0}) | torch.special.expit({0}) | Sigmoid({0})
    torch.ops.aten.sigmoid.default({0})
tanh: torch.tanh({0}) | {0}.tanh() | F.tanh({0}) | Tanh({0}) | torch.ops.aten.tanh({0})
erf: torch.erf({0}) | {0}.erf() | torch.special.erf({0})
erfc: torch.erfc({0}) | {0}.erfc()
relu: F.relu({0}) | torch.relu({0}) | {0}.relu() | ReLU({0}) | torch.ops.aten.relu.default({0})
    torch.where({0} > 0, {0}, 0.0) | {0} * ({0} > 0) | torch.maximum({0}, torch.zeros_like({0}))
    torch.max({0}, torch.zeros_like({0})) | torch.where({0} < 0, 0.0, {0})
    torch.where({0} >= 0, {0}, torch.zeros_like({0})) | {0}.masked_fill({0} < 0, 0.0) | ({0} > 0).to({0}.dtype) * {0}
    F.threshold({0}, 0.0, 0.0)
abs: torch.abs({0}) | {0}.abs() | abs({0})
maximum: torch.maximum({0}, {1})
minimum: torch.minimum({0}, {1})
clamp: torch.clamp({0}, min={1}) | {0}.clamp({1}) | {0}.clip(min={1}) | torch.clamp({0}, {1}, None)
clamp_min: torch.clamp_min({0}, {1}) | {0}.clamp_min({1})
clamp_max: torch.clamp_max({0}, {1}) | {0}.clamp(max={1})
silu: F.silu({0}) | SiLU({0}) | torch.ops.aten.silu.default({0}) | Swish.apply({0})
gelu: F.gelu({0}) | F.gelu({0}, approximate='none') | GELU({0}) | torch._C._nn.gelu({0})
gelu_tanh: F.gelu({0}, approximate='tanh') | GELUTanh({0})
leaky_relu: F.leaky_relu({0}, {1}) | F.leaky_relu({0}, negative_slope={1})
softplus: F.softplus({0}) | torch.log1p(torch.exp({0}))
logsigmoid: F.logsigmoid({0})
mish: F.mish({0})
softsign: F.softsign({0})
tanhshrink: F.tanhshrink({0})
relu6: F.relu6({0}) | {0}.clamp(0, 6)
hardtanh: F.hardtanh({0}) | {0}.clamp(-1.0, 1.0)
hardsigmoid: F.hardsigmoid({0})
hardswish: F.hardswish({0})
elu: F.elu({0})
celu: F.celu({0}, 1.3)
selu: F.selu({0})
"""
)


@torch.library.custom_op("fuzz::scale_", mutates_args=("t",))
def scale_(t: Tensor, by: float) -> None:
    t.mul_(by)


GLOBALS: dict[str, Any] = {
    **{"torch": torch, "F": F, "nn": nn, "operator": __import__("operator"), "math": math},
    **{"Swish": Swish, "StraightThrough": StraightThrough, "scale_": scale_},
    **{"Sigmoid": nn.Sigmoid(), "Tanh": nn.Tanh(), "ReLU": nn.ReLU(), "SiLU": nn.SiLU(), "GELU": nn.GELU()},
    **{"GELUTanh": nn.GELU(approximate="tanh")},
    "Dropout": nn.Dropout(0.5).eval(),
}

# ---- programs --------------------------------------------------------------------------------------------------------

PRODUCERS = """
F.linear({x}, {w}, {b}) | F.linear({x}, {w}) | {x} @ {w}.t() | torch.matmul({x}, {w}.t()) + {b} | {x} @ {w}.mT
torch.einsum('...k,nk->...n', {x}, {w}) | torch.mm({x}, {w}.t()) | torch.addmm({b}, {x}, {w}.t())
torch.addmm({b}, {x}, {w}.t(), beta=0.5, alpha=2.0) | {b}.addmm({x}, {w}.t()) | {x}.matmul({w}.t()).add_({b})
torch.bmm({x}, {w}.t().expand({x}.shape[0], -1, -1)) | {x}.bmm({w}.t().repeat({x}.shape[0], 1, 1))
torch.baddbmm({b}, {x}, {w}.t().expand({x}.shape[0], -1, -1)) | F.linear({x}, {w}) + F.linear({x}, {w}) * 0.5
torch.inner({x}, {w}) | torch.tensordot({x}, {w}, ([-1], [1])) | ({w} @ {x}.mT).mT | F.linear(input={x}, weight={w})
torch.matmul(input={x}, other={w}.t()) | torch.ops.aten.linear.default({x}, {w}, {b}) | operator.matmul({x}, {w}.t())
F.conv1d({x}.mT, {w}.unsqueeze(-1), {b}).mT | F.conv1d({x}.unsqueeze(-1), {w}.unsqueeze(-1)).squeeze(-1)
torch.mv({w}, {x}) | {w} @ {x} | F.linear({x}, {w}).to(torch.float64) | torch.stack([{x} @ {w}.t()])[0]
"""
CONSUMERS = """
F.linear({y}, {d}) | {y} @ {d}.t() | torch.matmul({y}, {d}.t()) | torch.einsum('...n,kn->...k', {y}, {d})
torch.mm({y}, {d}.t()) | torch.addmm(torch.ones(1, dtype={y}.dtype), {y}, {d}.t()) | {d} @ {y}.mT
F.linear(input={y}, weight={d}) | torch.bmm({y}, {d}.t().expand({y}.shape[0], -1, -1))
F.linear({y}, {d}) + F.linear({y}, {d}) | {y} @ {y}.mT | F.linear({y}.view({y}.shape), {d})
F.linear(F.dropout({y}, 0.5, training=False), {d}) | F.linear({y}.clone(), {d}) | F.linear({y}, {d}) + {y}.sum()
F.linear({y}.to({d}.dtype), {d}) | {y} @ {d}.t() + {y}.mean() | torch.inner({y}, {d}) | F.linear({y}[:1], {d})
F.linear({y}.reshape(-1, {y}.shape[-1]), {d}) | {y}.addmm({y} @ {y}.mT, {y}) | {y} + 0.5
F.linear(F.dropout({y}, 0.5), {d}) | F.linear({y}, {d}) * {y}.detach().mean() | F.linear({y}.contiguous(), {d})
F.linear({y} + {m}, {d}) | F.linear({y} * {m}, {d}) | F.linear(F.layer_norm({y}, {y}.shape[-1:]), {d})
"""
CUTS = """
{h}.chunk(2, -1) | torch.chunk({h}, 2, dim=-1) | {h}.split({n}, -1) | torch.split({h}, [{n}, {n}], dim=-1)
torch.tensor_split({h}, 2, -1) | ({h}[..., :{n}], {h}[..., {n}:]) | ({h}[..., ::2], {h}[..., 1::2])
{h}.unflatten(-1, (2, {n})).unbind(-2) | {h}.unflatten(-1, ({n}, 2)).unbind(-1)
{h}.view(*{h}.shape[:-1], {n}, 2).unbind(-1) | {h}.view(*{h}.shape[:-1], 2, {n}).unbind(-2)
{h}.reshape(*{h}.shape[:-1], 2, {n}).unbind(-2) | {h}.view(*{h}.shape[:-1][::-1], 2, {n}).unbind(-2)
{h}.view(-1, 2, {n}).unbind(1) | {h}.view(-1, {n}, 2).unbind(2) | ({h}.narrow(-1, 0, {n}), {h}.narrow(-1, {n}, {n}))
({h}[..., {n}:], {h}[..., :{n}]) | ({h}[..., 1::2], {h}[..., ::2]) | ({h}[..., :{n}], {h}[..., 1:{n} + 1])
{h}.flip(-1).chunk(2, -1) | {h}.roll(1, -1).chunk(2, -1) | {h}.chunk(2, 0) | ({h}[..., -{n}:], {h}[..., :-{n}])
({h}[..., :{n}], {h}[..., {n}:].flip(-1)) | {h}.contiguous().chunk(2, -1)
({h}.view(*{h}.shape[:-1], 2, {n})[..., 0, :], {h}.view(*{h}.shape[:-1], 2, {n})[..., 1, :])
({h}.view(-1, {n}, 2).select(2, 0), {h}.view(-1, {n}, 2).select(-1, 1)) | ({h}.chunk(2, -1)[0], {h}.chunk(2, -1)[1])
({h}.view(-1, 2, {n})[:, 1], {h}.view(-1, 2, {n})[:, 0]) | {h}.view(2, -1, {n}).unbind(0)
{h}.transpose(0, -1).chunk(2, -1) | ({h}[..., 0:{n}:1], {h}[..., {n}:2 * {n}]) | ({h}[..., :-1:2], {h}[..., 1::2])
torch.split({h}, [1, 2 * {n} - 1], -1) | ({h}[..., :{n}].contiguous(), {h}[..., {n}:].clone())
{h}.unfold(-1, {n}, {n}).unbind(-2) | ({h}[..., :{n}], {h}[..., :{n}])
{h}.hsplit(2) | torch.hsplit({h}, [{n}]) | {h}.vsplit(2) | torch.dsplit({h}, 2)
"""
MOVES = """
{v}.view({v}.shape) | {v}.reshape({v}.shape) | {v}.view_as({v}) | {v}.contiguous() | {v}.clone() | {v}.detach()
{v}.unsqueeze(0) | {v}.unsqueeze(0).squeeze(0) | {v}.squeeze() | {v}.transpose(0, -1)
{v}.transpose(0, -1).transpose(-1, 0) | {v}.mT | {v}.mT.contiguous() | {v}.mT.clone().mT | {v}.flatten()
{v}.reshape(-1, {v}.shape[-1]) | {v}.swapdims(0, -1) | {v}.expand(2, *{v}.shape) | {v}[:1].expand({v}.shape)
{v}[..., :1] | {v}[:1] | {v}.narrow(-1, 0, 1).expand({v}.shape) | {v}.flip(-1) | {v}.roll(1, 0) | {v}.flip(0).flip(0)
{v}.select(0, 0) | {v}.movedim(0, -1) | {v}.float().double() | {v}.bfloat16().to({v}.dtype) | {v}.double()
{v}.to({v}.dtype) | {v}.type_as({v}) | {v}.half().float() | {v}.float() | F.dropout({v}, 0.0)
F.dropout({v}, 0.5, False) | F.dropout({v}, p=0.5, training=False) | Dropout({v}) | {v} + {m} | {v} * {m} | {v} * {s}
{v} + {s} | {v}.as_strided({v}.shape, {v}.stride(), {v}.storage_offset()) | torch.softmax({v}, -1) | {v} * ({v} > 0)
{v} - {v}.mean() | {v} * torch.rsqrt({v}.pow(2).mean(-1, keepdim=True) + 1e-6) | {v}.masked_fill({v} < -1, 0.0)
{v} * 1.0 | {v}.view(torch.int64).view({v}.dtype) | torch.where({v} > 0.1, {v}, 0.0) | StraightThrough.apply({v})
torch.sin({v}) | torch.zeros_like({v}) | torch.ones_like({v}) | {v} + torch.zeros_like({v})
{v} * torch.ones_like({v}) | torch.ones_like({v}, dtype=torch.float32) | {v}.requires_grad_() | {v}.data
{v}.view(-1).view({v}.shape) | {v}.swapaxes(0, -1) | {v}.view(*{v}.shape[::-1]) | {v}.T
"""
WRITES = """
{v}.add_(1.0) | {v}.mul_(0.5) | {v}.zero_() | {v}[..., 0] = 1.0 | {v}[0] += 1 | {v}.view(-1).neg_()
{v}.copy_({v} * 2) | torch.add({v}, 1.0, out={v}) | {v}.clamp_(-1, 1) | F.relu({v}, inplace=True)
{v}.unsqueeze(0).mul_(1.5) | {v}.fill_(0.3) | {v}.as_strided((1,), (1,), {v}.storage_offset()).add_(1)
{v}.mT.mul_(1.25) | {v}.detach().add_(0.5) | {v}.data.mul_(0.5) | {v}.chunk(2, -1)[1].mul_(2.0)
{v}.masked_fill_({v} > 0, 0.5) | {v} *= 1.1 | {v}[{v} > 1] = 0.0 | {v}.addcmul_({v}, {v})
F.dropout({v}, 0.5, True, True) | {v}.sigmoid_() | {v}.select(-1, 0).neg_() | torch._foreach_mul_([{v}], 0.75)
scale_({v}, 0.5) | torch.ops.fuzz.scale_({v}, 0.5) | torch.ops.fuzz.scale_(t={v}, by=0.5)
torch.ops.aten.mul_.Tensor(self={v}, other={v})
torch.utils.checkpoint.checkpoint(lambda t: t.mul_(2.0), {v}, use_reentrant=False) | torch.relu_(input={v})
{v}.flatten().mul_(1.5) | {v}.reshape(-1)[:1].add_(1)
torch.sort({v} * 2, dim=-1, out=({v}, torch.empty_like({v}, dtype=torch.long)))
"""
READS = """
{v}.sum() | {v}.mean(-1) | {v}.view(-1)[0] | {v}.clone() | {v} * 2 | torch.softmax({v}, -1) | {v} | {v}.detach()
{v}.max() | {v}.mT
"""
BLOCKS = """
torch.no_grad() | torch.enable_grad() | torch.inference_mode()
torch.autocast('cpu', torch.bfloat16) | torch.set_grad_enabled(True)
"""


class Program:
    """A random function's source, and arguments for it.

    Attributes:
        lines: its statements.
        blocks: (first, last, context manager) of the ``with`` blocks, outermost first.
        outputs: the names that it returns.
        arguments: names and tensors.
    """

    def __init__(self, r: random.Random, activation: str) -> None:
        self.r, self.activation = r, activation
        self.lines: list[str] = []
        self.outputs: list[str] = []
        self.count = 0
        lead = tuple(r.choice([1, 2, 2, 3]) for _ in range(r.choice([0, 1, 1, 1, 1, 2, 2])))
        k, n = r.choice([1, 2, 4]), r.choice([1, 2, 3, 4])
        self.n = n
        self.dtype = r.choice([torch.float64] * 6 + [torch.float32, torch.bfloat16])
        shapes = {
            **{"x": (*lead, k), "x2": (*lead, k), "w": (n, k), "w2": (n, k), "wp": (2 * n, k), "b": (n,)},
            **{"bp": (2 * n,), "d": (k, n), "m": (*lead, n), "s": (n,)},
        }
        generator = torch.Generator().manual_seed(r.randrange(1 << 16))
        large = r.choice([1.0, 1.0, 3.0])
        self.arguments = {
            name: (torch.randn(shape, dtype=torch.float64, generator=generator) * (large if name == "x" else 1.0))
            .to(self.dtype)
            .requires_grad_(bool(r.randrange(4)))
            for name, shape in shapes.items()
        }
        if not r.randrange(4):  # exactly at the kinks
            with torch.no_grad():
                for name in ("x", "x2"):
                    self.arguments[name][:1] = 0.0
        clones = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in self.arguments.items()}
        self.env: dict[str, Any] = {**GLOBALS, **clones}
        for _ in range(r.choice([1, 1, 2])):
            self._mlp()
        while not self.returned():
            self._mlp()
        self.blocks: list[tuple[int, int, str]] = []
        if not r.randrange(4):
            first = r.randrange(len(self.lines))
            block = r.choice(listed(BLOCKS)[: None if self.dtype == torch.float32 else 3])
            self.blocks.append((first, min(len(self.lines) - 1, first + r.randrange(4)), block))

    # Statements

    def _runs(self, line: str) -> bool:
        """Append the statement if it runs."""
        line = line.replace("{n}", str(self.n)).replace("{m}", "m").replace("{s}", "s")
        saved = {k: v for k, v in self.env.items() if k not in GLOBALS}
        try:
            exec(line, self.env)
            for k, v in self.env.items():
                if k not in saved and k not in GLOBALS and k != "__builtins__" and v.numel() > 500:
                    raise ValueError("large")
        except Exception:
            for k in set(self.env) - set(saved) - set(GLOBALS) - {"__builtins__"}:
                del self.env[k]
            self.env.update(saved)
            return False
        self.lines.append(line)
        return True

    def _new(self, prefix: str = "t") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def _let(self, texts: list[str], prefix: str = "t", tries: int = 6, **names: str) -> str | None:
        """Assign one of the texts to a new variable. Return the variable's name, or None if no text runs."""
        for _ in range(tries):
            name, text = self._new(prefix), self.r.choice(texts)
            for key, value in names.items():
                text = text.replace(f"{{{key}}}", value)
            if self._runs(f"{name} = {text}"):
                return name
        return None

    def _tensors(self) -> list[str]:
        return [k for k, v in self.env.items() if isinstance(v, Tensor) and k not in self.arguments]

    def _disturb(self, names: list[str | None], chance: int) -> None:
        """With a probability of ``chance`` percent, write or read one of the variables."""
        r = self.r
        while r.randrange(100) < chance:
            v = r.choice([n for n in (*names, *self._tensors()) if n])
            if r.randrange(3):
                if self._runs(r.choice(listed(WRITES)).replace("{v}", v)):
                    return
            elif (read := self._let(listed(READS), "r", v=v)) is not None:
                self.outputs.append(read)

    def _move(self, v: str, chance: int) -> str:
        while self.r.randrange(100) < chance:
            v = self._let(listed(MOVES), "v", v=v) or v
        return v

    def _value(self, e: Expression, names: dict[str, str], chance: int, assigned: dict[Expression, str]) -> str:
        """Return the expression as text. Its parts may become earlier statements, with other statements in between."""
        r = self.r
        if isinstance(e, str):
            return self._move(names[e], chance // 3)
        if not isinstance(e, tuple):
            return repr(e) if not number(e) or e >= 0 else f"({e!r})"
        if e in assigned and r.randrange(3):
            return assigned[e]
        args = [self._value(a, names, chance, assigned) for a in e[1:]]
        if not any(character.isalpha() and character != "e" for a in args for character in a):
            arithmetic = e[0] in ("add", "sub", "mul", "div", "neg", "pow")
            return "(" + SPELLINGS[e[0]][0].format(*args) + ")" if arithmetic else "1.0"
        texts = SPELLINGS[e[0]]
        text = r.choice(texts).format(*args)
        if r.randrange(2):
            return f"({text})"
        name = self._new()
        for spelling in (text, *(t.format(*args) for t in texts)):
            if self._runs(f"{name} = {spelling}"):
                break
        else:
            return f"({text})"
        if r.randrange(3):
            assigned[e] = name
        self._disturb([name, *names.values()], chance)
        return self._move(name, chance // 4)

    # A producer, a cut, an activation, a consumer

    def _mlp(self) -> None:
        r = self.r
        chance = r.choice([0, 0, 0, 0, 12, 25])  # percent of unrelated statements
        known = [t for t in self._tensors() if self.env[t].shape == self.env["x"].shape]
        x = r.choice(["x", "x", *known])
        kind = r.choice(["one", "two", "packed", "packed"])
        names: list[str | None]
        if kind == "packed":
            h = self._let(listed(PRODUCERS), "h", x=x, w="wp", b="bp")
            if h is None:
                return
            h = self._move(h, chance)
            self._disturb([h], chance)
            g, u = self._new("g"), self._new("u")
            cuts = listed(CUTS)[: 12 if not chance else None]
            if not any(self._runs(f"{g}, {u} = " + r.choice(cuts).replace("{h}", h)) for _ in range(6)):
                return
            names = [g, u]
        else:
            g = self._let(listed(PRODUCERS)[: 9 if not chance else None], "h", x=x, w="w", b="b")
            if g is None:
                return
            names = [g, self._let(listed(PRODUCERS), "h", x=r.choice([x, "x2"]), w="w2", b="b") if kind == "two" else g]
        names = [self._move(v, chance) if v else g for v in names]
        if not r.randrange(8):
            names.reverse()
        self._disturb(names, chance)
        variables = {"x": names[0], "y": names[1]}
        e = self._expression(kind != "one")
        y = self._new("y")
        text = self._value(e, variables, chance, {})  # type: ignore[arg-type]
        if kind == "packed" and not r.randrange(12):
            text = r.choice(["F.glu({h}, -1)", "F.glu({h})", "F.glu({h}, dim=0)"]).replace("{h}", h)
        if not self._runs(f"{y} = {text}"):
            return
        y = self._move(y, chance)
        self._disturb([y, *names], chance)
        for _ in range(r.choice([1, 1, 1, 2])):
            z = self._let(listed(CONSUMERS)[: 4 if not chance else None], "z", y=y, d="d")
            if z is not None:
                self.outputs.append(z)
        self._disturb([y, *names], chance)

    def _expression(self, gated: bool) -> Expression:
        r = self.r
        e = ACTIVATIONS[self.activation or r.choice(sorted(ACTIVATIONS))]
        self.activation = ""  # the next activation is random
        up: Expression = "y"
        if gated and not r.randrange(8):  # clamps of gpt-oss
            limit = r.choice([1.0, 0.5, 7.0])
            e = substitute(e, {"x": ("clamp_max", "x", limit)})
            up = ("clamp_max", ("clamp_min", "y", -limit), limit * r.choice([1, 1, 1, 1.01]))
        if gated:
            up = r.choice([up, up, up, ("add", up, 1.0), ("add", up, 0.5), ("square", up)])
            products = [("mul", e, up), ("mul", up, e)]
            e = r.choice(products) if r.randrange(10) else (r.choice(["add", "div", "sub"]), e, up)
        e = equivalent(r, e, r.choice([0, 1, 3, 6]), 40)
        return e if r.randrange(4) else neighbor(r, e)

    # As a function

    def returned(self) -> list[str]:
        return [o for o in dict.fromkeys(self.outputs) if isinstance(self.env.get(o), Tensor)]

    def source(self) -> str:
        text = [f"def f({', '.join(self.arguments)}):"]
        for i, line in enumerate(self.lines):
            for first, last, block in self.blocks:
                if i == first:
                    text.append(f"    with {block}:")
                if first <= i <= last:
                    line = f"    {line}"
            text.append(f"    {line}")
        return "\n".join([*text, f"    return ({', '.join(self.returned())},)"])

    def narrowest(self) -> torch.dtype:
        """Return the narrowest dtype in which the program computes a value."""
        values = [v.dtype for v in self.env.values() if isinstance(v, Tensor) and v.is_floating_point()]
        if any("autocast" in block for *_, block in self.blocks):
            values.append(torch.bfloat16)
        text = "".join(self.lines)
        words = {"bfloat16": torch.bfloat16, "half": torch.float16, "float()": torch.float32}
        values += [dtype for word, dtype in words.items() if word in text]
        return min(values, key=lambda d: (d.itemsize, d == torch.float16))


def function(source: str) -> Callable[..., Any]:
    space = dict(GLOBALS)
    exec(compile(source, __file__, "exec"), space)  # torch 2.11 wraps functions without a file
    return space["f"]  # type: ignore[no-any-return]


def fuzzed(r: random.Random, counts: Counter[str], way: str = "eager") -> None:
    """Compare one program with eager, and count its properties."""
    done = counts["programs"] + counts["raises"]
    p = Program(r, sorted(ACTIVATIONS)[done % len(ACTIVATIONS)])
    source = p.source()
    if way != "eager" and any(text in source for text in NOT_AOT):
        way = "eager"
    try:
        sites = compare(function(source), list(p.arguments.values()), way=way, dtype=p.narrowest())
    except EagerFails:
        counts["raises"] += 1
        return
    except Exception as e:
        e.add_note(f"{way}, {p.dtype}, { ({k: tuple(t.shape) for k, t in p.arguments.items()}) }\n{source}")
        raise
    counts["programs"] += 1
    counts["fused"] += any(site.op is not None for site in sites)
    counts["left alone"] += any(site.op is None for site in sites)
    counts.update(kind for site in sites if site.op for kind in (site.op, str(site.activation)))
    if done % 50 == 0:
        torch._dynamo.reset()  # otherwise compiled code stays in memory


# Under AOTAutograd, active dropout draws different numbers, and inference mode inside a graph fails (2.13).
NOT_AOT = ("0.5)", "0.5, True", "inference_mode")


# ---- tests -----------------------------------------------------------------------------------------------------------


def run_on_randoms(examples: int, part: int = 100) -> Callable[[Callable[[random.Random], None]], None]:
    """Call a function with ``examples`` random generators, which depend only on ``part``."""
    quietly = settings(
        max_examples=examples, database=None, deadline=None,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    def run(fn: Callable[[random.Random], None]) -> None:
        test = quietly(given(st.randoms(use_true_random=False, note_method_calls=False))(fn))
        seed(part)(test)()

    return run


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_share(counts: Counter[str], share: float) -> None:
    assert counts["fused"] >= share * counts["programs"] > 0, counts
    assert counts["left alone"] >= share * counts["programs"], counts
    assert counts["raises"] <= 0.3 * counts["programs"], counts


def test_programs():
    counts: Counter[str] = Counter()

    @run_on_randoms(40, 104)
    def _(r):
        fuzzed(r, counts, ("eager", "eager", "aot_eager")[counts["programs"] % 3])

    check_share(counts, 0.25)
    kinds = {"fused::bias_act", "fused::glu", "fused::bias_glu", *ACTIVATIONS}
    assert kinds <= counts.keys(), (kinds - counts.keys(), counts)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("part", "programs"), [(0, 2), *(pytest.param(n, 100, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_programs_at_a_memory_level(monkeypatch, part, programs, level):
    """A program's training step equals eager mode. If a pass fails, the test fails."""
    monkeypatch.setattr(passes, "_guarded", lambda stage, policy, run: run())
    counts: Counter[str] = Counter()

    @run_on_randoms(programs, part)
    def _(r):
        fuzzed(r, counts, level)

    assert counts["raises"] <= 0.4 * programs, counts


@pytest.mark.slow
@pytest.mark.parametrize("part", range(24))
def test_many_programs(part):
    counts: Counter[str] = Counter()

    @run_on_randoms(100, part)
    def _(r):
        fuzzed(r, counts, "aot_eager" if part % 6 == 5 else "eager")

    check_share(counts, 0.2)


# Calls that return their argument itself, a view of it, or a new tensor; and activations, most of them in place.
PASSED_ON = listed(
    """
{v}.double() | {v}.to({v}.dtype) | {v}.type_as(x) | {v}.contiguous() | +{v} | {v}.flatten(-1) | Dropout({v})
F.dropout({v}, 0.0) | {v}.requires_grad_() | nn.Identity()({v}) | {v}.add_(b) | torch.add({v}, b, out={v})
{v}.expand_as({v}) | {v}.reshape({v}.shape) | {v}.view(-1, 3)[:] | {v}.detach() | {v}.detach_() | {v}.clone()
{v}.float() | {v} * 1.0 | {v}.mul_(0.5) | {v}.unsqueeze(0).squeeze(0) | {v}.data
"""
)
ACTIVATED = listed(
    "{v}.relu_() | F.silu({v}, inplace=True) | {v}.sigmoid_() | torch.tanh_({v}) | F.relu({v}, True) | F.gelu({v})"
)


def passed_on(r: random.Random) -> str:
    """Return an MLP's source, with calls of ``PASSED_ON`` before the activation. Half of the calls are in no_grad."""
    lines = ["v0 = F.linear(x, w, b)"]
    for i, texts in enumerate((*[PASSED_ON] * r.choice([1, 1, 2, 3]), ACTIVATED)):
        block = r.choice(["", "with torch.no_grad(): "])
        lines.append(f"{block}v{i + 1} = {r.choice(texts).replace('{v}', f'v{i}')}")
    results = [f"F.linear(v{len(lines) - 1}.to(d.dtype), d)", f"v{r.randrange(len(lines))} * 2"]
    return "\n    ".join(["def f(x, w, b, d):", *lines, f"return {', '.join(results[: r.choice([1, 1, 2])])},"])


@pytest.mark.parametrize(
    ("part", "programs"), [(0, 24), *(pytest.param(n, 300, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_tensors_that_calls_pass_on(part, programs):
    """A call may return its argument itself. The argument's gradient then ignores the grad mode of the call."""
    counts: Counter[str] = Counter()
    shapes = (4, 2), (3, 2), (3,), (2, 3)
    arguments = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    @run_on_randoms(programs, part)
    def _(r):
        source, way = passed_on(r), r.choice(["eager", "eager", "aot_eager"])
        torch._dynamo.reset()
        try:
            sites = compare(function(source), arguments, way=way, dtype=torch.float32)
        except EagerFails:
            counts["raises"] += 1
            return
        except Exception as e:
            e.add_note(f"{way}\n{source}")
            raise
        counts["programs"] += 1
        counts["fused" if any(site.op for site in sites) else "left alone"] += 1

    check_share(counts, 0.2)


def written(e: Expression) -> str:
    """Return the expression as text, with the first pattern of each function."""
    if isinstance(e, tuple):
        return SPELLINGS[e[0]][0].format(*(f"({written(a)})" for a in e[1:]))
    return str(e)


def test_equivalent_expressions_are_proved():
    """Successive factors of 2 and 1/2 may look like large terms that cancel, which a proof does not accept."""
    x, w, d = torch.randn(2, 3), torch.randn(4, 3), torch.randn(3, 4)
    counts: Counter[str] = Counter()

    @run_on_randoms(80)
    def _(r):
        name = r.choice(sorted(ACTIVATIONS))
        text = written(equivalent(r, ACTIVATIONS[name], r.choice([1, 2, 4, 8])))
        act = eval(f"lambda x: {text}", GLOBALS)
        (site,) = rewrite(traced(lambda x, w, d: F.linear(act(F.linear(x, w)), d), x, w, d), FusionPolicy())
        is_cautious = "large terms cancel" in site.reason
        assert is_cautious or site.activation == name, (text, site.reason)
        counts["cautious" if is_cautious else name] += 1

    assert counts.keys() >= ACTIVATIONS.keys() and counts["cautious"] <= 8, counts
