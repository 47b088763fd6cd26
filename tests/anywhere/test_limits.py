"""At the limits: graphs that take long to read, constants at the end of float64, tensors past 2**31 elements."""

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
from harness import interpreting, kernel_of, meta
from torch import Tensor
from torch.fx import Graph, Node

import torch_fused_ops as tfo
from torch_fused_ops.lowerings import recognize
from torch_fused_ops.lowerings.recognize import prove, symbolic
from torch_fused_ops.lowerings.recognize.symbolic import Ref

# ---- graphs that could take for ever ---------------------------------------------------------------------------------


class Built:
    """A graph as Dynamo would record it, all of whose values are (8, 8); built by hand, since capturing is slow."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x, self.w = (self._placed(self.graph.placeholder(name)) for name in "xw")
        self.h = self("matmul", self.x, self.w)

    def _placed(self, node: Node, source: Node | None = None) -> Node:
        value = torch.empty(8, 8, device="meta", requires_grad=True)
        node.meta["example_value"] = value if source is None else source.meta["example_value"]
        return node

    def __call__(self, name: str | Callable[..., Any], *args: Any, inplace: bool = False) -> Node:
        """A call of torch's function of this name; one that works in place shares its first argument's memory."""
        target = getattr(torch, name) if isinstance(name, str) else name
        return self._placed(self.graph.call_function(target, args), args[0] if inplace else None)

    def view(self, source: Node, *of: Node) -> Node:
        """A view of source; shaped as another tensor, whose values do not matter."""
        name, args = ("view_as", of) if of else ("view", (8, 8))
        return self._placed(self.graph.call_method(name, (source, *args)), source)

    def read(self, *h: Node) -> Graph:
        """The graph, closed by GEMMs that read these values."""
        self.graph.output(tuple(self("matmul", one, self.w) for one in h))
        return self.graph


def chain(step: Callable[[Built, Node], Node], begin: Any = None, end: Any = None) -> Callable[[int], Graph]:
    """Graphs of n steps, behind a function and before another."""

    def build(n: int) -> Graph:
        g = Built()
        h = g(begin, g.h) if begin else g.h
        for _ in range(n):
            h = step(g, h)
        return g.read(g(end, h) if end else h)

    return build


def views_above(n: int, rejoined: bool = False) -> Graph:
    """GELU's result through n views; each shaped as another view of the one before, if they are to join again."""
    g = Built()
    h = g(F.gelu, g.h)
    for _ in range(n):
        h = g.view(g.view(h), g.view(h)) if rejoined else g.view(h)
    return g.read(h)


def views_below(n: int, rejoined: bool = False) -> Graph:
    """silu(a)·b, where both are the same tensor through n views of its own."""
    g = Built()
    sides = [g.h, g.h]
    for _ in range(n):
        sides = [g.view(h, h) if rejoined else g.view(h) for h in sides]
    return g.read(g("mul", g(F.silu, sides[0]), sides[1]))


def many_aliases(n: int) -> Graph:
    """An activation in place, and n views of its result."""
    g = Built()
    views = [g("relu_", g.h, inplace=True)]
    for _ in range(n):
        views.append(g.view(views[-1]))
    return g.read(views[-1])


def wide(n: int) -> Graph:
    """One activation, n GEMMs."""
    g = Built()
    return g.read(*[g(F.gelu, g.h)] * n)


def shared_bodies(n: int) -> Graph:
    """Higher-order operators whose body calls the next one twice: 2**n calls for who follows each."""
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


# What each ends in: fused, or the beginning of its reason; None where there is no site.
FUSED = "fused"
CALLS = "more than 64 pointwise calls lie between the GEMMs"
GRAPHS: dict[str, tuple[Callable[[int], Graph], str | None]] = {
    "a subgraph of n functions": (chain(lambda g, h: g("sin", h)), CALLS),
    "a subgraph of activations": (chain(lambda g, h: g(F.gelu, h)), CALLS),
    "n times where": (chain(lambda g, h: g("where", g("gt", h, 0), h, g("sin", h))), CALLS),
    "x·sin(x) of itself": (chain(lambda g, h: g("mul", h, g("sin", h))), CALLS),
    "doubled n times": (chain(lambda g, h: g("add", h, h)), None),  # linear in a GEMM's result
    "a sum of n products": (chain(lambda g, h: g("add", h, g("matmul", g.x, g.w)), end=F.gelu), FUSED),
    "n views above": (views_above, FUSED),
    "n views that join above": (lambda n: views_above(n, True), FUSED),
    "n views below": (views_below, "x^2·sigmoid(x) is not a supported activation"),
    "n views that join below": (lambda n: views_below(n, True), "x^2·sigmoid(x) is not a supported activation"),
    "n calls in place": (chain(lambda g, h: g("relu_", h, inplace=True), begin=F.gelu), CALLS),
    "n aliases of a call in place": (many_aliases, FUSED),
    "n readers": (wide, FUSED),
    "n layers": (chain(lambda g, h: g("matmul", g(F.gelu, h), g.w), end=F.gelu), FUSED),
}


class TooMuchWork(Exception):
    pass


def work(run: Callable[[], Any], most: int) -> tuple[int, Any]:
    """How many lines of the recognizer are executed, and what it returns: exact, and the same on every machine.

    Raises:
        TooMuchWork: more than ``most``.
    """
    folder, lines = str(Path(recognize.__file__).parent), 0

    def local(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines > most:
            raise TooMuchWork
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *rest: local(frame, *rest) if frame.f_code.co_filename.startswith(folder) else None)
    try:
        result = run()
    finally:
        sys.settrace(before)
    return lines, result


def sites(graph: Graph) -> Any:
    recognize.unread(graph)
    return recognize.rewrite(graph, tfo.FusionPolicy(), apply=False)


def ends_in(found: Any, wanted: str | None) -> bool:
    if wanted is None:
        return not found
    return bool(found) and all(s.op if wanted == FUSED else s.reason.startswith(wanted) for s in found)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", GRAPHS)
def test_work_is_linear_in_the_graph(name: str) -> None:
    """Twice as large a graph, twice as much work: no chain is walked for each of its nodes, no join doubles it."""
    build, wanted = GRAPHS[name]
    sites(build(3))  # what is worked out once a process
    prove._prove.cache_clear()
    (small, _), (large, found) = (work(lambda: sites(g), most=1_000_000) for g in (build(100), build(200)))  # noqa: B023
    assert ends_in(found, wanted), found
    assert large <= 2.2 * small


@pytest.mark.covering(every=16)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_of_5000_is_read(name: str) -> None:
    """No recursion over a graph's depth, none over its width."""
    build, wanted = GRAPHS[name]
    assert ends_in(sites(build(5000 if name not in ("n layers", "a sum of n products") else 2500)), wanted)


def test_bodies_that_share_bodies_are_read_once() -> None:
    (small, _), (large, found) = (work(lambda: sites(g), 1_000_000) for g in (shared_bodies(20), shared_bodies(40)))  # noqa: B023
    assert ends_in(found, FUSED) and large <= 2.2 * small


# As many calls as a subgraph may have, each of which makes the expression's text or its terms twice as long.
STEPS: dict[str, Callable[[Built, Node], Node]] = {
    "x·sin(x)": lambda g, h: g("mul", h, g("sin", h)),
    "sin + cos": lambda g, h: g("add", g("sin", h), g("cos", h)),
    "x·exp(x)": lambda g, h: g("mul", h, g("exp", h)),
    "(x + 1)(x + 2)": lambda g, h: g("mul", g("add", h, 1), g("add", h, 2)),
    "x + x·sigmoid(x)": lambda g, h: g("add", h, g("mul", h, g("sigmoid", h))),
    "max(x, x² - 1)": lambda g, h: g("maximum", h, g("sub", g("mul", h, h), 1)),
    "mish": lambda g, h: g(F.mish, h),
    "exp(x) + x·exp(-x)": lambda g, h: g("add", g("exp", h), g("mul", h, g("exp", g("neg", h)))),
    "x²": lambda g, h: g("mul", h, h),
    "1/(1 + x)": lambda g, h: g("reciprocal", g("add", h, 1)),
    "clamps": lambda g, h: g("clamp", g("mul", h, 1.25), -3.0, 3.0),
}


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("gated", [False, True])
def test_expressions_that_double_are_refused(name: str, gated: bool) -> None:
    found = ()
    for n in range(1, 65):
        g = Built()
        h, up = g.h, g("matmul", g.x, g.w)
        for _ in range(n):
            h = STEPS[name](g, h)
        if len(g.graph.nodes) > 60:
            break
        graph = g.read(g("mul", h, up) if gated else g("cos", h))
        if n % 4 == 0 or n == 1:
            _, found = work(lambda: sites(graph), 3_000_000)  # noqa: B023
            assert len(found) == 1 and found[0].op is None and 0 < len(found[0].reason) < 400
    assert found


def test_a_long_custom_function_is_refused() -> None:
    """A custom autograd.Function is one call, whatever is in it."""
    steps = tuple(("sin", (Ref("value", i - 1) if i else Ref("operand", 0),), ()) for i in range(5000))
    verdict = prove.prove(steps, Ref("value", 4999), 1)
    assert verdict.activation is None
    assert str(verdict.reason) == f"cannot be proved: more than {symbolic.MAX_STEPS} calls"


def test_a_derivative_is_not_as_deep_as_its_function() -> None:
    """Of log(log(… x)), 400 levels: a recursion of three calls for each would be past Python's limit."""
    algebra = symbolic.Algebra()
    x = p = algebra.variable("x")
    for _ in range(400):
        p = algebra.log(p)
    ((factors, coefficient),) = algebra.derivative(p, x).items()
    assert (len(factors), coefficient) == (400, 1.0)  # 1/x · 1/log(x) · …
    assert algebra.names(p) == 401
    s = algebra.sigmoid(x)
    wanted = algebra.mul(algebra.mul(s, algebra.sub(1.0, s)), 0.5)
    assert algebra.same(algebra.derivative(algebra.mul(s, 0.5), x), wanted)


def test_algebra_is_cut_off_where_it_takes_long() -> None:
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


# Constants that a graph may hold, and that float64 does not: each a reason, none an error of Python's.
CONSTANTS = {
    "a product past the range": lambda g: g("relu", g("mul", g("mul", g.h, 1e200), 1e200)),
    "a quotient past the range": lambda g: g("sigmoid", g("div", g("div", g.h, 1e-200), 1e-200)),
    "a product below it": lambda g: g("relu", g("mul", g("mul", g.h, 1e-200), 1e-200)),
    "an integer past it": lambda g: g("relu", g("mul", g.h, 10**400)),
    "infinity": lambda g: g("relu", g("mul", g.h, math.inf)),
    "NaN": lambda g: g("relu", g("add", g.h, math.nan)),
    "a power past it": lambda g: g("sin", g("add", g.h, g("pow", 1e300, g("mul", g.h, 0.0)))),
    "exp of a large one": lambda g: g("sin", g("exp", g("add", g.h, 1e4))),
    "a ratio of coefficients below it": lambda g: g(
        "reciprocal", g("add", g("mul", g("exp", g.h), 1e-300), g("mul", g("exp", g("neg", g.h)), 1e300))
    ),
    "a large exponent": lambda g: g("pow", g.h, 1e308),
    "the log of 0": lambda g: g("add", g("sin", g.h), g("log", g("mul", g.h, 0.0))),
    "the square root of -1": lambda g: g("add", g("sin", g.h), g("sqrt", g("sub", g("mul", g.h, 0.0), 1.0))),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_at_the_end_of_float64_are_refused(name: str) -> None:
    g = Built()
    (site,) = sites(g.read(CONSTANTS[name](g)))
    assert site.op is None and site.reason
    assert ("everywhere" in site.reason) == (name == "a product below it")  # it is 0


# ---- tensors past 2**31 elements -------------------------------------------------------------------------------------

BF16, INT32_MAX = torch.bfloat16, 2**31 - 1
EVERYTHING = (True, True, True)


def every_kernel(rows: int, n: int, view: Callable[[int, int], Tensor]) -> dict[str, tuple[Any, ...]]:
    """A call of each family's kernels, forward and backward, whose data are ``view``'s."""
    pytest.importorskip("triton")
    x, packed, bias, packed_bias, scale = view(rows, n), view(rows, 2 * n), meta(n), meta(2 * n), meta(rows)
    seed = meta(1, dtype=torch.int64)
    rest = ("silu", "interleaved", 0.0, None)
    hidden = view(rows, n).to(torch.bool).unsqueeze(0) if view is meta else meta(1, rows, n, dtype=torch.bool)
    scalars, mask = (1.0, True, -1, -1), (True, True)
    return {
        "bias_act": (x, bias, scale, "gelu"),
        "bias_act_backward": (x, x, bias, scale, "gelu", EVERYTHING),
        "glu": (x, x, scale, "silu"),
        "glu_backward": (x, x, x, scale, "silu", 0.0, None, EVERYTHING),
        "bias_glu": (packed, packed_bias, scale, *rest),
        "bias_glu_backward": (x, packed, packed_bias, scale, *rest, EVERYTHING),
        "dropout_add": (x, bias, x, seed, 0.1),
        "dropout_add_backward": (x, seed, 0.1, BF16, BF16, mask),
        "scaled_masked_softmax": (x.unsqueeze(0), hidden, meta(1), *scalars),
        "scaled_masked_softmax_backward": (x.unsqueeze(0), x.unsqueeze(0), *scalars, BF16, mask),
    }


def launches(operator: str, args: tuple[Any, ...]) -> list[Any]:
    """What a call would launch."""
    from torch_fused_ops.kernels import launching

    with launching.recorded() as found:
        kernel_of(operator)(*args)
    return found


def reach(t: Tensor) -> int:
    """The largest offset, in elements, at which the tensor has one."""
    return sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))


def far_rows(rows: int, n: int) -> Tensor:
    """Few elements, far apart: rows of a large tensor, as ``x[:, ::2**20]`` of an expanded one would have them."""
    return torch.empty(0, dtype=BF16, device="meta").as_strided((rows, n), (2**31 // (rows - 1) + n, 1))


def far_columns(rows: int, n: int) -> Tensor:
    return torch.empty(0, dtype=BF16, device="meta").as_strided((rows, n), (1, 2**31 // (n - 1) + rows))


NEAR = {"small": lambda: every_kernel(64, 256, meta), "2**30 elements": lambda: every_kernel(2**18, 2**11, meta)}
FAR = {
    "tall": lambda: every_kernel(2**22, 2**10, meta),
    "wide": lambda: every_kernel(2**14, 2**18, meta),
    "rows far apart": lambda: every_kernel(64, 256, far_rows),
    "columns far apart": lambda: every_kernel(64, 256, far_columns),
}


@pytest.mark.parametrize("size", FAR)
def test_kernels_count_in_64_bits_where_they_must(size: str) -> None:
    """Every family, float8 and dropout among them. Strides alone are enough, however few elements there are."""
    for name, call in FAR[size]().items():
        for kernel, grid, given, _, constants in launches(name, call):
            far = any(reach(t) > INT32_MAX for t in given if t is not None)
            # What adds up partial sums reads these alone, which are short.
            assert constants.get("WIDE", False) or not far, (name, kernel)
            assert grid[0] <= INT32_MAX and max(grid[1:]) <= 65535, (name, grid)
        assert launches(name, call)[0].constants["WIDE"], name


@pytest.mark.parametrize("size", NEAR)
def test_kernels_count_in_32_bits_where_they_can(size: str) -> None:
    for name, call in NEAR[size]().items():
        assert not any(constants.get("WIDE") for *_, constants in launches(name, call)), name


def test_operators_on_paper_past_2_to_the_31() -> None:
    x, up, seed = meta(2**21, 2**11), meta(2**21, 2**11, dtype=torch.float32), meta(1, dtype=torch.int64)
    ops = torch.ops.fused
    for out, shape in (
        (ops.bias_act(x.requires_grad_(), meta(2**11), meta(2**21), "gelu"), x.shape),
        (ops.glu(x, up, None, "silu"), x.shape),
        (ops.bias_glu(x, None, None, "silu", "swapped"), (2**21, 2**10)),
        (ops.dropout_add(x, None, up, seed, 0.5), x.shape),
        (ops.scaled_masked_softmax(x, None, None), x.shape),
        (tfo.functional.gelu(x, memory="fp8"), x.shape),
    ):
        assert out.shape == shape and out.is_contiguous()
        (grad,) = torch.autograd.grad(out, x, torch.ones((), device="meta", dtype=out.dtype).expand(out.shape))
        assert grad.shape == x.shape and grad.is_contiguous() and grad.dtype == BF16


@pytest.fixture(scope="module")
def ocean() -> Tensor:
    """A bfloat16 tensor of 3·2**30 + 64 elements, of which memory holds what is touched."""
    if sys.platform != "linux" or sys.maxsize < 2**33:
        pytest.skip("needs memory that is reserved and not held")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    try:
        return torch.frombuffer(mmap.mmap(-1, 2 * (3 * 2**30 + 64), flags=flags), dtype=BF16)
    except (OSError, OverflowError) as e:
        pytest.skip(f"no address space: {e}")


@pytest.mark.parametrize("strides", [(2**30, 1), (7, 2**28 + 5)], ids=["rows", "columns"])
@pytest.mark.parametrize("way", ["operators", "kernels"])
def test_elements_past_2_to_the_31_are_found(way: str, strides: tuple[int, int], ocean: Tensor) -> None:
    """The numbers are right: by the CPU's operators, and by the GPU's kernels in the interpreter."""
    far = ocean.as_strided((4, 8), strides)
    far.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
    near, seed, packed = far.contiguous(), torch.tensor([3]), ("silu", "halves", 1.0, 7.0)
    assert reach(far) > INT32_MAX or strides[0] == 7
    calls: list[tuple[str, Callable[[Tensor], tuple[Any, ...]]]] = [
        ("bias_act", lambda x: (x, near[0], near[:, 0], "gelu")),
        ("bias_act_backward", lambda x: (x, x, near[0], near[:, 0], "gelu", EVERYTHING)),
        ("glu", lambda x: (x, x, None, "silu", 0.0, None)),
        ("bias_glu", lambda x: (x, near[0], None, *packed)),
        ("bias_glu_backward", lambda x: (near[:, :4], x, near[0], None, *packed, (True, True, False))),
        ("dropout_add", lambda x: (x, near[0], x, seed, 0.5)),
        ("dropout_add_backward", lambda x: (x, seed, 0.5, BF16, BF16, (True, True))),
        ("scaled_masked_softmax", lambda x: (x, x.bool(), None, 0.5, True, -1, -1)),
        ("scaled_masked_softmax_backward", lambda x: (x, near, 0.5, False, -1, -1, None, (True, False))),
    ]
    for name, args in calls:
        for got, wanted in zip(*(tensors(by(way, name)(*args(x))) for x in (far, near)), strict=True):
            assert torch.equal(got, wanted), name


def by(way: str, name: str) -> Callable[..., Any]:
    if way == "operators":
        return getattr(torch.ops.fused, name)  # type: ignore[no-any-return]
    pytest.importorskip("triton")
    return interpreting()(kernel_of(name))  # type: ignore[no-any-return]


def tensors(result: Any) -> list[Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
