"""Random training steps whose caller modifies a tensor between forward and backward: eager's gradient, or an error.

    pytest tests/lowerings/test_caller_writes.py            a fixed sample
    .ci/slow writes                                         about an hour of programs, with generated code

Interpreted graphs return views that share their base's version counter; tensors that generated code returns do not. So
``separate_versions`` gives each tensor that an interpreted graph returns its own counter.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import Net, distances, saving
from torch import Tensor

from torch_fused_ops import FusionPolicy
from torch_fused_ops.lowerings import passes
from torch_fused_ops.lowerings.saved_tensors import SavedTensors
from torch_fused_ops.tools import verify

ROWS, WIDTH, HIDDEN = 8, 16, 64
POLICIES = {
    "off": FusionPolicy(memory="off"),
    "free": FusionPolicy(),
    "fp8": FusionPolicy(memory="fp8"),
    "input": FusionPolicy(memory="input", attention="input"),
    "tiled": FusionPolicy(memory="tiled:2", attention="input"),
}
# A caller must not modify weights, nor parameters and buffers that pointwise ops read (docs/memory.md).
PROMISED = {"w", "wt", "wp", "wh", "we", "mask", "scale", "shift", "d", "dv"}
SHAPES = {
    **{"x": (ROWS, WIDTH), "data": (ROWS, WIDTH), "w": (HIDDEN, WIDTH), "wt": (WIDTH, HIDDEN), "mask": (HIDDEN, WIDTH)},
    **{"wp": (2, HIDDEN, WIDTH), "wh": (HIDDEN * WIDTH, WIDTH), "we": (WIDTH, WIDTH), "b": (HIDDEN,)},
    **{
        "bp": (3 * HIDDEN,),
        "b2": (1, HIDDEN),
        "scale": (HIDDEN,),
        "shift": (WIDTH,),
        "d": (WIDTH, HIDDEN),
        "dv": (WIDTH, WIDTH),
    },
}
INPUTS = ["x", "x", "x", "data", "F.linear(x, we)", "torch.tanh(x)", "(x + shift)", "x.flip(0)"]
WEIGHTS = ["w", "w", "w", "wt.t()", "wp[1]", "wp.unbind(0)[0]", "(w * mask)", "F.linear(x[0], wh).view(64, 16)", "mask"]
BIASES = ["b", "b", "bp.split(64)[1]", "bp[128:]", "b2[0]", "(b * 2)"]
PRODUCERS = [
    *["F.linear({x}, {w}, {b})"] * 2,
    *["F.linear({x}, {w})", "({w} @ {x}.mT).mT", "{x} @ {w}.t() + {b}", "torch.addmm(b2, {x}, {w}.t())"],
    *["torch.baddbmm(b2, {x}[None], {w}.t()[None])[0]", "F.linear({x}[None], {w}, {b})[0]"],
]
MIDDLES = ["{h}", "{h}", "{h}", "{h} * scale", "{h} + b2", "{h}.double()", "{h}.reshape(-1).view({h}.shape)"]
ACTIVATIONS = ["F.gelu({h})", "F.silu({h})", "torch.tanh({h})", "F.relu({h})", "F.relu({h}).square()", "torch.sin({h})"]
GATED = [
    "F.silu({h}) * {g}",
    "F.gelu({g}) * {h}",
    "(lambda p: F.silu(p[..., :64]) * p[..., 64:])(torch.cat([{h}, {g}], -1))",
]
RESULTS = ["{v}", "{v}.flatten()", "{v}[..., 1:5]", "{v}.mT", "{v}[1:]"]
VIEWS = [*RESULTS, "{v}.detach()"]  # plain torch.compile fails if a step returns a detached result and a view of it
ATTENTION = (
    "(lambda q, k, v: F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(-1, 64))"
    "(*(t.unflatten(-1, (2, 32)).transpose(0, 1) for t in ({h}, {g}, {h})))"
)


class Program:
    """A random model as source text, with its tensors.

    Attributes:
        source: the body of its forward.
        tensors: the tensors that it uses, by name.
        kinds: "argument", "parameter", "frozen" or "buffer", by name.
    """

    def __init__(self, r: random.Random) -> None:
        self.r = r
        lines, values = [], list[str]()
        for i in range(r.choice([1, 1, 2])):
            producer = r.choice(PRODUCERS)
            for name in (f"h{i}", f"g{i}"):
                text = r.choice([producer, r.choice(PRODUCERS)])
                fields = {"x": r.choice(INPUTS), "w": r.choice(WEIGHTS), "b": r.choice(BIASES)}
                lines.append(f"{name} = {text.format(**fields)}")
            lines.append(f"m{i} = {r.choice(MIDDLES).format(h=f'h{i}')}")
            form = r.choice([*ACTIVATIONS, *GATED, ATTENTION])
            lines.append(f"a{i} = {form.format(h=f'm{i}', g=f'g{i}')}.to(x.dtype)")
            lines.append(f"y{i} = F.linear(a{i}, d)" + r.choice(["", " + x", " @ dv"]))
            values += [f"h{i}", f"g{i}", f"a{i}"]
        if lines[0].startswith("h0") and "g0" not in lines[3]:
            lines.pop(1)
            values.remove("g0")
        results = [r.choice(RESULTS).format(v=r.choice(values)) for _ in range(r.choice([0, 1, 1, 2]))]
        total = " + ".join(line.split()[0] for line in lines if line.startswith("y"))
        body = "\n    ".join([*lines, f"return ({', '.join([total, *results])},)"])
        names = [n for n in SHAPES if re.search(rf"\b{n}\b", body)]
        self.kinds = {n: r.choice(["argument", "parameter", "parameter", "frozen", "buffer"]) for n in names}
        self.kinds |= {n: kind for n, kind in {"x": "argument", "d": "parameter"}.items() if n in names}
        self.leaf = r.choice(["data", "leaf", "computed"])  # x: without a gradient, a leaf, or computed from one
        generator = torch.Generator().manual_seed(r.randrange(1 << 16))
        self.tensors = {n: torch.randn(SHAPES[n], generator=generator, dtype=torch.float64) / 4 for n in names}
        attributes = [n for n in names if self.kinds[n] != "argument"]
        arguments = [n for n in names if self.kinds[n] == "argument" and n != "x"]
        prologue = [f"{n} = s.{n}" for n in attributes]
        self.source = "\n    ".join([f"def body({', '.join(['s', 'x', *arguments])}):", *prologue, body])
        space: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source, __file__, "exec"), space)
        members = {n: self._member(n) for n in attributes}
        self.model, self.arguments = Net(space["body"], **members), arguments

    def _member(self, name: str) -> Tensor:
        kind, tensor = self.kinds[name], self.tensors[name].clone()
        return tensor if kind == "buffer" else nn.Parameter(tensor, requires_grad=kind == "parameter")

    def step(self, fn: Callable[..., Any], write: tuple[str, str] | None) -> dict[str, Tensor] | Exception:
        """Return the gradients of a step through ``fn(model, *args)``, or the error that backward raises.

        Args:
            fn: calls the model.
            write: the tensor that the caller modifies before backward, and the view through which it does.
        """
        model = self.model
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if hasattr(model, name):
                    getattr(model, name).copy_(tensor)
        model.zero_grad()
        leaves = {
            n: self.tensors[n].clone().requires_grad_(n != "x" or self.leaf != "data") for n in ("x", *self.arguments)
        }
        values = {n: t * 1.0 if n == "x" and self.leaf == "computed" else t for n, t in leaves.items()}
        results = fn(model, *values.values())
        if write is not None:
            name, view = write
            target = results[int(name[1:])] if name.startswith("r") else values.get(name, getattr(model, name, None))
            with torch.no_grad():
                eval(view.format(v="t"), {"t": target}).mul_(3.0).add_(0.5)
        # Plain torch.compile fails if one of several views of a result has no gradient, so each gets one.
        unused = sum(0.0 * t.sum() for t in results[1:] if t.requires_grad)
        try:
            (results[0].square().sum() + unused).backward()
        except RuntimeError as error:
            assert "inplace operation" in str(error), self.source
            return error
        gradients = {n: t.grad for n, t in (*leaves.items(), *model.named_parameters())}
        return {n: t for n, t in gradients.items() if t is not None}

    def writes(self) -> list[tuple[str, str]]:
        """Return the writes to try: each tensor that the caller has, through a random view."""
        with torch.no_grad():
            count = len(self.model(*(self.tensors[n] for n in ("x", *self.arguments))))
        return [(n, self.r.choice(VIEWS)) for n in (*self.tensors, *(f"r{i}" for i in range(1, count)))]


def separate_versions(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """Run the final graph call by call. Each tensor that it returns has its own version counter, except its inputs."""

    def call(arguments: list[Any]) -> Any:
        inputs = list(arguments)
        arguments.clear()
        input_ids = {id(t) for t in inputs}
        results = gm.forward(*inputs)
        separate = {id(t): t.data for t in results if isinstance(t, Tensor) and id(t) not in input_ids}
        return [separate.get(id(t), t) for t in results]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def error_of(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> float:
    zeros = {n: torch.zeros_like(t) for n, t in {**expected, **actual}.items()}
    pairs = [(actual.get(n, zero) + 1.0, expected.get(n, zero) + 1.0) for n, zero in zeros.items()]
    return max(distances((a for a, _ in pairs), (e for _, e in pairs)))


def check_saved_bytes(program: Program, fn: Callable[..., Any]) -> None:
    """Assert that ``SavedTensors.cost`` counts the storages that a step saves."""
    pairs: list[SavedTensors] = []
    divide = passes.Partitioner.__call__

    def recorded(self: Any, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        graphs = divide(self, gm, joint_inputs, **kwargs)
        static = kwargs["static_lifetime_input_indices"]
        pairs.append(SavedTensors(graphs[0].graph, graphs[1].graph, kwargs["num_fwd_outputs"], static))
        return graphs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes.Partitioner, "__call__", recorded)
        arguments = [program.tensors[n].clone().requires_grad_() for n in ("x", *program.arguments)]
        _, size = saving(lambda: fn(program.model, *arguments), program.model.state_dict().values())
    assert size == sum(pair.cost(pair.saved()) for pair in pairs), program.source


def check_program(program: Program, level: str, counts: Counter[str], generated: bool) -> None:
    """Compare a program's gradients with eager mode, for each write."""
    torch._dynamo.reset()
    fused = verify.interpreted(POLICIES[level], exact=True, compiled=generated)
    plain = verify.interpreted(None, compiled=generated)
    check_saved_bytes(program, fused)
    for write in (None, *program.writes()):
        try:
            expected = program.step(lambda model, *args: model(*args), write)
        except RuntimeError:  # this view cannot be written
            continue
        counts["eager raises"] += isinstance(expected, Exception)
        if isinstance(expected, Exception):
            continue
        actual = program.step(fused, write)
        place = f"{level}, {write}, x: {program.leaf}, {program.kinds}\n{program.source}"
        if isinstance(actual, Exception):
            # PyTorch saves biases that tiles add. Backward may repeat pointwise ops that read a bias.
            is_read = {name for name in ("b", "bp", "b2") if re.search(rf"\+ {name}\b|\({name} \*", program.source)}
            names = PROMISED | ({"b", "bp", "b2"} if level == "tiled" else is_read)
            promised = write is not None and write[0] in names and program.kinds[write[0]] != "argument"
            assert promised or isinstance(program.step(plain, write), Exception), f"{actual}\n{place}"
            counts["fused raises"] += 1
        elif error_of(expected, actual) < 1e-5:
            counts["equal"] += 1
        else:  # autograd does not notice writes through views of results that PyTorch saves (docs/upstream.md)
            by_plain = program.step(plain, write)
            is_wrong = not isinstance(by_plain, Exception) and error_of(expected, by_plain) > 1e-5
            assert is_wrong and write is not None, f"{error_of(expected, actual)}\n{place}"
            counts["plain is wrong, too"] += 1


@pytest.mark.parametrize(
    ("part", "seconds"), [(0, 0), *(pytest.param(n, 600, marks=pytest.mark.slow) for n in range(1, 7))]
)
def test_gradients_are_eagers_or_raise(part: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_call_by_call", separate_versions)
    counts: Counter[str] = Counter()
    r, end = random.Random(part), time.monotonic() + seconds
    for i in range(10**9 if seconds else 8):
        check_program(Program(r), list(POLICIES)[i % len(POLICIES)], counts, generated=bool(seconds))
        if seconds and time.monotonic() > end:
            break
    assert counts["equal"] > 2 * counts["fused raises"] > 0 and counts["eager raises"], counts
