"""Declared operators work everywhere: the operator in CONTRIBUTING.md, and one on packed data.

They run in a separate process, since operators cannot be unregistered.
"""

import re
import textwrap
from pathlib import Path

import pytest
from harness import python, raises

from torch_fused_ops.declaration import OPERATORS, PointwiseOperator, above_zero_or_none, finite, one_of

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"

PACKED = """
def gated(gate, up, gain):
    return torch.sin(gate) * up * gain

def gated_grads(grad, gate, up, gain):
    return grad * torch.cos(gate) * up * gain, grad * torch.sin(gate) * gain

sine_glu = PointwiseOperator(
    "sine_glu",
    "sin(gate) · up · gain of the packed input + bias.",
    tensors={"input": "packed", "bias": "per_column?"},
    scalars={"layout": 'str="halves"', "gain": "float=1.0"},
    value=gated,
    grads=gated_grads,
)
register_pointwise(sine_glu)
"""

TRIED = """
import torch_fused_ops as tfo
from torch_fused_ops import lowerings

lowerings.require()  # an operator more turns nothing off
from torch_fused_ops import reference, formulas

def close(a, b):
    torch.testing.assert_close(a, b)

F = torch.ops.fused
tensors = "Tensor input, Tensor? bias, Tensor? row_scale"
schemas = {
    "bias_square": f"({tensors}, float factor=1.) -> Tensor",
    "bias_square_backward": f"(Tensor grad, {tensors}, float factor, bool[3] output_mask) "
    "-> (Tensor?, Tensor?, Tensor?)",
}
for name, schema in schemas.items():
    assert str(getattr(F, name).default._schema) == f"fused::{name}{schema}", getattr(F, name).default._schema

def leaf(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)

def square(x, b, s, factor=1.0):
    y = factor * (x if b is None else x + b) ** 2
    return y if s is None else y * s.unsqueeze(-1)

def glu(x, b, layout="halves", gain=1.0):
    gate, up = formulas.unpack(x if b is None else x + b, layout)
    return torch.sin(gate) * up * gain

calls = [
    (F.bias_square, square, (leaf(3, 5), leaf(5), leaf(3), 1.5)),
    (F.bias_square, square, (leaf(2, 3, 5), None, leaf(2, 3))),
    (F.bias_square, square, (leaf(4, 3).t(), leaf(4), None, -2.0)),
    (F.sine_glu, glu, (leaf(3, 8), leaf(8), "interleaved", 0.5)),
    (F.sine_glu, glu, (leaf(8, 2, 6).transpose(0, 1), None, "swapped")),
]
for op, truth, args in calls:
    given = [a for a in args if isinstance(a, torch.Tensor)]
    def at(*ts, of=op, args=args):
        ts = iter(ts)
        return of(*(next(ts) if isinstance(a, torch.Tensor) else a for a in args))
    close(at(*given), at(*given, of=truth))
    assert torch.autograd.gradcheck(at, given) and torch.autograd.gradgradcheck(at, given)
    torch.library.opcheck(op.default, args)
    close(torch.func.vmap(at)(*(torch.stack((t, 2 * t)) for t in given))[1], at(*(2 * t for t in given)))
    both = tuple(given), tuple(given)
    close(torch.func.jvp(at, *both)[1], torch.func.jvp(lambda *t: at(*t, of=truth), *both)[1])
    close(getattr(reference, op.default.name().removeprefix("fused::"))(*args), at(*given))
    found = tfo.decompositions()[op.default](*args)
    close(found, at(*given))

# stored in float8: the gradients at what was stored
x, b = leaf(4, 16), leaf(16)
y = F.bias_square(F.keep_fp8(x), b, None, 1.5)
close(y, F.bias_square(x, b, None, 1.5))
loaded = formulas.load_fp8(*formulas.store_fp8(x.detach()), torch.float64).requires_grad_()
close(torch.autograd.grad(y.sum(), (x, b)), torch.autograd.grad(square(loaded, b, None, 1.5).sum(), (loaded, b)))

for error, args, text in (
    (TypeError, (None, leaf(5), None), "input=None is not accepted"),
    (TypeError, (leaf(3, 5).int(), None, None), "input has dtype torch.int32; accepted: float16"),
    (ValueError, (leaf(3, 5), leaf(4), None), "bias has shape (4,); accepted: (5,), input's last axis"),
    (ValueError, (leaf(3, 5), None, leaf(5)), "row_scale has shape (5,); accepted: (3,), input's shape without"),
    (ValueError, (leaf(3, 5), None, None, float("inf")), "factor=inf is not accepted: it must be finite"),
):
    try:
        F.bias_square(*args)
    except error as e:
        assert text in str(e), e
    else:
        raise AssertionError(text)

# under the compiler it is an ordinary node; the memory tables know it; DTensor has its rules
from torch._inductor.utils import run_and_get_code
from torch_fused_ops.lowerings import memory_levels, partition, saved_tensors
from torch_fused_ops.distributed import sharding

x, b, s = leaf(6, 8), leaf(8), leaf(6)
scalars = {"cpp.simdlen": 1}  # without vector instructions gcc takes a sixth of the time
fn = torch.compile(lambda x, b, s: F.bias_square(torch.tanh(x), b, s, 1.5) * 2, options=scalars)
result, codes = run_and_get_code(lambda: torch.autograd.grad(fn(x, b, s).sum(), (x, b, s)))
close(result, torch.autograd.grad((square(torch.tanh(x), b, s, 1.5) * 2).sum(), (x, b, s)))
assert codes and not any("fused.bias_square" in code for code in codes)
assert saved_tensors.DATA[F.bias_square_backward.default] == (1,) and F.bias_square.default in memory_levels.OPERATOR
assert "bias_square" in partition.RECOMPUTABLE and set(schemas) <= set(sharding.rules())

# `python -m torch_fused_ops check` has it, and its samples
from torch_fused_ops.testing import precision, samples

assert {"bias_square", "sine_glu"} < set(samples.OPERATORS)
for sample in samples.samples("bias_square", core=True):
    errors = precision.measure(sample)
    assert all(error <= precision.LIMITS[kind] for kind, error in errors.items()), (str(sample), errors)
for op in ("sine_glu",):
    assert len([sample() for make in (samples.samples, samples.backward_samples) for sample in make(op, core=True)]) > 9
print("everything")
"""


@pytest.mark.slow
def test_a_declared_operator_gets_everything() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (declared,) = (block for block in blocks if "register_pointwise" in block)
    script = "import torch\ntorch.manual_seed(0)\n" + declared + PACKED + TRIED
    assert python("-c", script).split() == ["everything"]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"tensors": {"bias": "per_column?", "input": "data"}}, "data must come first"),
        ({"tensors": {"input": "packed", "other": "data"}}, "data must come first, and packed data alone"),
        ({"tensors": {"input": "packed"}}, "packed data has a layout"),
        ({"scalars": {"gain": "float", "activation": "str"}}, "the activation comes first"),
        ({"rules": (finite("offset"),)}, "name no scalars"),
        ({"name": "bias_act"}, "is declared already"),
    ],
)
def test_wrong_declarations_say_what_is_wrong(changed: dict[str, object], text: str) -> None:
    before = dict(OPERATORS)
    fields: dict[str, object] = {"name": "wrong", "doc": "", "tensors": {"input": "data"}, "scalars": {}}
    with pytest.raises(ValueError, match=re.escape(text)):
        PointwiseOperator(**{**fields, "value": lambda x: x, "grads": lambda g, x: (g,), **changed})  # type: ignore[arg-type]
    assert before == OPERATORS


def test_rules_name_the_argument_its_value_and_what_is_accepted() -> None:
    for rule, value, text in (
        (finite("gain"), float("nan"), "gain=nan is not accepted: it must be finite"),
        (above_zero_or_none("clamp"), -1.0, "clamp=-1.0 is not accepted: it must be above 0, or None for no"),
        (one_of("layout", ("a", "b")), "c", "layout='c' is not known; accepted: a, b"),
    ):
        raises(ValueError, re.escape(textwrap.dedent(text)), rule.check, value)
