"""Limits: graphs that could take exponential time, constants near float64's limits, tensors past 2**31 elements."""

import itertools
import math
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import cases, meta, on_gpu
from torch import Tensor
from torch.fx import Graph, Node

import torch_fused_ops as tfo
from torch_fused_ops.kernels.compiled import identification
from torch_fused_ops.lowerings import recognize
from torch_fused_ops.lowerings.recognize import prove, symbolic
from torch_fused_ops.lowerings.recognize.symbolic import Ref
from torch_fused_ops.operators.autograd import REGISTERED

# ---- work on large graphs --------------------------------------------------------------------------------------------


class Built:
    """A graph as Dynamo records it, built by hand because capturing is slow. All values have shape (8, 8)."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x, self.w = (self._placed(self.graph.placeholder(name)) for name in "xw")
        self.h = self("matmul", self.x, self.w)

    def _placed(self, node: Node, source: Node | None = None) -> Node:
        value = torch.empty(8, 8, device="meta", requires_grad=True)
        node.meta["example_value"] = value if source is None else source.meta["example_value"]
        return node

    def __call__(self, name: str | Callable[..., Any], *args: Any, inplace: bool = False) -> Node:
        """Add a call of torch's function of this name. An in-place call shares its first argument's memory."""
        target = getattr(torch, name) if isinstance(name, str) else name
        return self._placed(self.graph.call_function(target, args), args[0] if inplace else None)

    def view(self, source: Node, *of: Node) -> Node:
        """Add a view of ``source``. If ``of`` is passed, use ``view_as`` with its shape."""
        name, args = ("view_as", of) if of else ("view", (8, 8))
        return self._placed(self.graph.call_method(name, (source, *args)), source)

    def read(self, *h: Node) -> Graph:
        """Return the graph, with GEMMs at the end that read these values."""
        self.graph.output(tuple(self("matmul", value, self.w) for value in h))
        return self.graph


def chain(step: Callable[[Built, Node], Node], begin: Any = None, end: Any = None) -> Callable[[int], Graph]:
    """Return a function of n that builds a graph: ``begin``, n steps, ``end``."""

    def build(n: int) -> Graph:
        g = Built()
        h = g(begin, g.h) if begin else g.h
        for _ in range(n):
            h = step(g, h)
        return g.read(g(end, h) if end else h)

    return build


def views_above(n: int) -> Graph:
    """Build GELU and n views of its result, each with two paths to the previous view."""
    g = Built()
    h = g(F.gelu, g.h)
    for _ in range(n):
        h = g.view(g.view(h), g.view(h))
    return g.read(h)


def views_below(n: int) -> Graph:
    """Build silu(a)·b, where a and b are n views each of the same tensor. Each has two paths to the previous view."""
    g = Built()
    sides = [g.h, g.h]
    for _ in range(n):
        sides = [g.view(h, h) for h in sides]
    return g.read(g("mul", g(F.silu, sides[0]), sides[1]))


def many_aliases(n: int) -> Graph:
    """Build an in-place activation, and n views of its result."""
    g = Built()
    views = [g("relu_", g.h, inplace=True)]
    for _ in range(n):
        views.append(g.view(views[-1]))
    return g.read(views[-1])


def many_readers(n: int) -> Graph:
    """Build one activation with n GEMMs."""
    g = Built()
    return g.read(*[g(F.gelu, g.h)] * n)


def shared_bodies(n: int) -> Graph:
    """Build nested higher-order operators. Each body calls the next body twice: 2**n calls in all."""
    below: torch.fx.GraphModule | None = None
    for _ in range(n):
        graph = Graph()
        x = graph.placeholder("x")
        outputs = []
        for _ in range(2):
            if below is None:
                outputs.append(graph.call_function(torch.sin, (x,)))
            else:
                body = graph.get_attr("body")
                outputs.append(graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "body", x)))
        graph.output(tuple(outputs))
        below = torch.fx.GraphModule({} if below is None else {"body": below}, graph)
    g = Built()
    called = g.graph.call_function(torch.ops.higher_order.invoke_subgraph, (g.graph.get_attr("body"), "body", g.h))
    g._placed(called)
    g.read(g(F.gelu, g.h))
    return torch.fx.GraphModule({"body": below}, g.graph).graph


# The expected outcome: fused, the beginning of a reason, or None if the graph has no site.
FUSED = "fused"
CALLS = "more than 64 pointwise calls lie between the GEMMs"
GRAPHS: dict[str, tuple[Callable[[int], Graph], str | None]] = {
    "n activations": (chain(lambda g, h: g(F.gelu, h)), CALLS),
    "x·sin(x) of itself": (chain(lambda g, h: g("mul", h, g("sin", h))), CALLS),
    "doubled n times": (chain(lambda g, h: g("add", h, h)), None),  # linear in a GEMM's result
    "a sum of n products": (chain(lambda g, h: g("add", h, g("matmul", g.x, g.w)), end=F.gelu), FUSED),
    "n views that join above": (views_above, FUSED),
    "n views that join below": (views_below, "x^2·sigmoid(x) is not a supported activation"),
    "n calls in place": (chain(lambda g, h: g("relu_", h, inplace=True), begin=F.gelu), CALLS),
    "n aliases of a call in place": (many_aliases, FUSED),
    "n readers": (many_readers, FUSED),
    "n layers": (chain(lambda g, h: g("matmul", g(F.gelu, h), g.w), end=F.gelu), FUSED),
}


class TooMuchWork(Exception):
    pass


def work(run: Callable[[], Any], most: int) -> tuple[int, Any]:
    """Return how many of the recognizer's lines ``run`` executes (the same on every machine), and its result.

    Raises:
        TooMuchWork: if ``run`` executes more than ``most`` lines.
    """
    folder, lines = str(Path(recognize.__file__).parent), 0

    def local(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines > most:
            raise TooMuchWork
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *args: local(frame, *args) if frame.f_code.co_filename.startswith(folder) else None)
    try:
        result = run()
    finally:
        sys.settrace(before)
    return lines, result


def sites(graph: Graph) -> Any:
    recognize.unread(graph)
    return recognize.rewrite(graph, tfo.FusionPolicy(), apply=False)


def has_outcome(sites: Any, expected: str | None) -> bool:
    if expected is None:
        return not sites
    return bool(sites) and all(s.op if expected == FUSED else s.reason.startswith(expected) for s in sites)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", GRAPHS)
def test_work_is_linear_in_the_graph(name: str) -> None:
    """A graph of twice the size takes twice the work: no chain is walked again for each of its nodes."""
    build, expected = GRAPHS[name]
    sites(build(3))  # fills the process's caches
    prove._prove.cache_clear()
    (small, _), (large, result) = (work(lambda: sites(g), most=1_000_000) for g in (build(100), build(200)))  # noqa: B023
    assert has_outcome(result, expected), result
    assert large <= 2.2 * small


@pytest.mark.covering(every=16)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_of_5000_is_read(name: str) -> None:
    """The recognizer does not recurse over a graph's depth or width."""
    build, expected = GRAPHS[name]
    assert has_outcome(sites(build(5000 if name not in ("n layers", "a sum of n products") else 2500)), expected)


def test_shared_bodies_are_read_once() -> None:
    (small, _), (large, result) = (work(lambda: sites(g), 1_000_000) for g in (shared_bodies(20), shared_bodies(40)))  # noqa: B023
    assert has_outcome(result, FUSED) and large <= 2.2 * small


# Each step doubles the length of the expression's text, or its number of terms.
STEPS: dict[str, Callable[[Built, Node], Node]] = {
    "x·sin(x)": lambda g, h: g("mul", h, g("sin", h)),
    "(x + 1)(x + 2)": lambda g, h: g("mul", g("add", h, 1), g("add", h, 2)),
    "x + x·sigmoid(x)": lambda g, h: g("add", h, g("mul", h, g("sigmoid", h))),
    "max(x, x² - 1)": lambda g, h: g("maximum", h, g("sub", g("mul", h, h), 1)),
    "1/(1 + x)": lambda g, h: g("reciprocal", g("add", h, 1)),
    "clamps": lambda g, h: g("clamp", g("mul", h, 1.25), -3.0, 3.0),
}


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("gated", [False, True])
def test_doubling_expressions_are_rejected(name: str, gated: bool) -> None:
    unfused = ()
    for n in range(1, 65):
        g = Built()
        h, up = g.h, g("matmul", g.x, g.w)
        for _ in range(n):
            h = STEPS[name](g, h)
        if len(g.graph.nodes) > 60:
            break
        graph = g.read(g("mul", h, up) if gated else g("cos", h))
        if n % 4 == 0 or n == 1:
            _, unfused = work(lambda: sites(graph), 3_000_000)  # noqa: B023
            assert len(unfused) == 1 and unfused[0].op is None and 0 < len(unfused[0].reason) < 400
    assert unfused


def test_a_long_custom_function_is_rejected() -> None:
    """A custom autograd.Function is one call in the graph, but each of its steps counts."""
    steps = tuple(("sin", (Ref("value", i - 1) if i else Ref("operand", 0),), ()) for i in range(5000))
    verdict = prove.prove(steps, Ref("value", 4999), 1)
    assert verdict.activation is None
    assert str(verdict.reason) == f"cannot be proved: more than {symbolic.MAX_STEPS} calls"


def test_derivatives_do_not_recurse_over_depth() -> None:
    """Differentiate 400 nested logs: three recursive calls per level would exceed Python's limit."""
    algebra = symbolic.Algebra()
    x = p = algebra.variable("x")
    for _ in range(400):
        p = algebra.log(p)
    ((factors, coefficient),) = algebra.derivative(p, x).items()
    assert (len(factors), coefficient) == (400, 1.0)  # 1/x · 1/log(x) · …
    assert algebra.names(p) == 401
    s = algebra.sigmoid(x)
    expected = algebra.mul(algebra.mul(s, algebra.sub(1.0, s)), 0.5)
    assert algebra.same(algebra.derivative(algebra.mul(s, 0.5), x), expected)


def test_algebra_has_a_limit_of_steps() -> None:
    algebra = symbolic.Algebra()
    p = algebra.add(algebra.variable("x"), 1.0)
    with pytest.raises(symbolic.Unprovable, match=f"more than {symbolic.MAX_WORK} steps of algebra"):
        for i in itertools.count(2):
            p = algebra.add(p, algebra.sigmoid(algebra.mul(algebra.variable("x"), float(i))))
            p = algebra.sub(p, algebra.sigmoid(algebra.mul(algebra.variable("x"), float(i))))
    algebra = symbolic.Algebra()
    x = algebra.variable("x")
    steps = [
        ("gelu", (Ref("operand", 0),), (("approximate", "tanh"),)),
        ("mul", (Ref("value", 0), Ref("operand", 1)), ()),
    ]
    symbolic.evaluate(algebra, steps, [x, algebra.variable("y")])
    assert algebra.work < symbolic.MAX_WORK / 100, "an activation is far from the limit"


# Constants and results beyond float64's range. Each gives a reason instead of a Python error.
CONSTANTS = {
    "a product past the range": lambda g: g("relu", g("mul", g("mul", g.h, 1e200), 1e200)),
    "a quotient past the range": lambda g: g("sigmoid", g("div", g("div", g.h, 1e-200), 1e-200)),
    "a product below it": lambda g: g("relu", g("mul", g("mul", g.h, 1e-200), 1e-200)),
    "infinity": lambda g: g("relu", g("mul", g.h, math.inf)),
    "a power past it": lambda g: g("sin", g("add", g.h, g("pow", 1e300, g("mul", g.h, 0.0)))),
    "a ratio of coefficients below it": lambda g: g(
        "reciprocal", g("add", g("mul", g("exp", g.h), 1e-300), g("mul", g("exp", g("neg", g.h)), 1e300))
    ),
    "a large exponent": lambda g: g("pow", g.h, 1e308),
    "the log of 0": lambda g: g("add", g("sin", g.h), g("log", g("mul", g.h, 0.0))),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_beyond_float64_are_rejected(name: str) -> None:
    g = Built()
    (site,) = sites(g.read(CONSTANTS[name](g)))
    assert site.op is None and site.reason
    assert ("everywhere" in site.reason) == (name == "a product below it")  # the product is 0


# ---- tensors past 2**31 elements -------------------------------------------------------------------------------------

BF16, INT32_MAX = torch.bfloat16, 2**31 - 1
EVERYTHING = (True, True, True)


def every_kernel(rows: int, n: int, view: Callable[[int, int], Tensor]) -> dict[str, tuple[Any, ...]]:
    """Return arguments for each operator's kernels, forward and backward. ``view`` returns their data."""
    pytest.importorskip("triton")
    x, packed, bias, packed_bias, scale = view(rows, n), view(rows, 2 * n), meta(n), meta(2 * n), meta(rows)
    seed = meta(1, dtype=torch.int64)
    scalars_of_glu = ("silu", "interleaved", 0.0, None)
    hidden = view(rows, n).to(torch.bool).unsqueeze(0) if view is meta else meta(1, rows, n, dtype=torch.bool)
    scalars, mask = (1.0, True, -1, -1), (True, True)
    return {
        "bias_act": (x, bias, scale, "gelu"),
        "bias_act_backward": (x, x, bias, scale, "gelu", EVERYTHING),
        "glu": (x, x, scale, "silu"),
        "glu_backward": (x, x, x, scale, "silu", 0.0, None, EVERYTHING),
        "bias_glu": (packed, packed_bias, scale, *scalars_of_glu),
        "bias_glu_backward": (x, packed, packed_bias, scale, *scalars_of_glu, EVERYTHING),
        "dropout_add": (x, bias, x, seed, 0.1),
        "dropout_add_backward": (x, seed, 0.1, BF16, BF16, mask),
        "scaled_masked_softmax": (x.unsqueeze(0), hidden, meta(1), *scalars),
        "scaled_masked_softmax_backward": (x.unsqueeze(0), x.unsqueeze(0), *scalars, BF16, mask),
    }


def largest_offset(t: Tensor) -> int:
    """Return the tensor's largest element offset."""
    return sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))


def far_rows(rows: int, n: int) -> Tensor:
    """Return a tensor with few elements, whose rows are far from each other in memory."""
    return torch.empty(0, dtype=BF16, device="meta").as_strided((rows, n), (2**31 // (rows - 1) + n, 1))


SIZES = {
    "small": (False, lambda: every_kernel(64, 256, meta)),
    "2**30 elements": (False, lambda: every_kernel(2**18, 2**11, meta)),
    "tall": (True, lambda: every_kernel(2**22, 2**10, meta)),
    "wide": (True, lambda: every_kernel(2**14, 2**18, meta)),
    "rows far apart": (True, lambda: every_kernel(64, 256, far_rows)),
}


@pytest.mark.parametrize("size", SIZES)
def test_large_offsets_have_64_bits(size: str) -> None:
    """Kernels of every family use 64-bit offsets if strides are large, even for few elements."""
    from torch_fused_ops.virtual_gpu import compile_operator_on_paper

    wide, calls = SIZES[size]
    for name, args in calls().items():
        key, tensors = identification(REGISTERED[name].signature, on_gpu=True)(args)
        copied = size == "rows far apart" and "softmax" in name
        assert key[-1].wide == any(largest_offset(t) > INT32_MAX for t in tensors) == (wide and not copied), name
    kernel, *_ = compile_operator_on_paper("bias_act", *calls()["bias_act"]).inference.kernels
    assert ("tl.program_id(0).to(tl.int64)" in kernel.source) == wide


@pytest.fixture(scope="module")
def reserved_memory() -> Tensor:
    """Return a bfloat16 tensor of 3·2**30 + 64 elements in reserved memory, of which only touched pages are used."""
    if sys.platform != "linux" or sys.maxsize < 2**33:
        pytest.skip("needs memory that is reserved and not held")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE; Python 3.13 names it
    try:
        return torch.frombuffer(mmap.mmap(-1, 2 * (3 * 2**30 + 64), flags=flags), dtype=BF16)
    except (OSError, OverflowError) as e:
        pytest.skip(f"no address space: {e}")


# Operators, and functions that return their arguments for a tensor and a contiguous copy.
FAR_CALLS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "bias_act": lambda x, c: (x, c[0], c[:, 0], "gelu"),
    "bias_act_backward": lambda x, c: (x, x, c[0], c[:, 0], "gelu", EVERYTHING),
    "glu": lambda x, c: (x, x, None, "silu", 0.0, None),
    "bias_glu": lambda x, c: (x, c[0], None, *PACKED),
    "bias_glu_backward": lambda x, c: (c[:, :4], x, c[0], None, *PACKED, (True, True, False)),
    "dropout_add": lambda x, c: (x, c[0], x, torch.tensor([3]), 0.5),
    "dropout_add_backward": lambda x, c: (x, torch.tensor([3]), 0.5, BF16, BF16, (True, True)),
    "scaled_masked_softmax": lambda x, c: (x, x.bool(), None, 0.5, True, -1, -1),
    "scaled_masked_softmax_backward": lambda x, c: (x, c, 0.5, False, -1, -1, None, (True, False)),
}
PACKED = ("silu", "halves", 1.0, 7.0)
FAR_STRIDES = {"rows": (2**30, 1), "columns": (7, 2**28 + 5)}


@pytest.mark.parametrize(
    ("strides", "name"), cases(FAR_STRIDES, FAR_CALLS, default=lambda strides, name: name == "bias_act_backward")
)
def test_elements_past_2_to_the_31_are_right(strides: str, name: str, reserved_memory: Tensor) -> None:
    """In Triton's interpreter, kernels' results equal those for contiguous tensors."""
    pytest.importorskip("triton")
    far = reserved_memory.as_strided((4, 8), FAR_STRIDES[strides])
    far.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
    contiguous = far.contiguous()
    assert largest_offset(far) > INT32_MAX or strides == "columns"
    results = (tensors(on_gpu(name)(*FAR_CALLS[name](x, contiguous))) for x in (far, contiguous))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def tensors(result: Any) -> list[Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
