"""Run a function with and without the recognizer's rewrite, and compare everything that a user can observe."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import captured
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.lowerings.recognize import rewrite
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.tools.verify import interpreted

LEVELS = ("free", "fp8", "input", "tiled:2")
POLICY = FusionPolicy(dropout=False)  # a fused dropout and F.dropout drop different elements
TOLERANCE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 0.2}
REASONS = json.loads((Path(__file__).parents[2] / "docs" / "reasons.json").read_text(encoding="utf-8"))


class EagerFails(Exception):
    """The function raises without fusion, so it has no result to compare with."""


def fits(kind: Kind, text: str) -> bool:
    """Return True if docs/reasons.json has the text for its kind."""
    forms = (".*".join(map(re.escape, form.split("*")[::2])) for form in REASONS["kinds"][kind.name]["texts"])
    return any(re.fullmatch(form, text, re.DOTALL) for form in forms)


def compiled(fn: Callable[..., Any], way: str, sites: list[Site] | None) -> Callable[..., Any]:
    """Compile a function, with fusion if ``sites`` is a list.

    Args:
        fn: the function.
        way: "eager" runs Dynamo's graph, "aot_eager" runs it through AOTAutograd, and a memory level runs it after all
            of Inductor's passes, without code generation.
        sites: receives the sites of Dynamo's graphs and their subgraphs, except with memory levels.
    """

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for module in list(gm.modules()):
            if sites is not None and isinstance(module, torch.fx.GraphModule):
                before, changes = str(module.graph), rewrite(module.graph, POLICY)
                assert any(site.op for site in changes) or str(module.graph) == before, (
                    "nothing is fused, so the graph must not change"
                )
                sites.extend(site for site in changes if site.activation != "dropout")
                module.graph.lint()
                module.recompile()
        if way == "aot_eager":
            from torch._dynamo.backends.debugging import aot_eager

            return aot_eager(gm, example_inputs)
        return gm.forward

    if way in LEVELS:
        policy = None if sites is None else FusionPolicy(memory=way, dropout=False)
        return functools.partial(interpreted(policy, exact=True), fn)
    return torch.compile(fn, backend=backend, dynamic=False)


def capture(
    fn: Callable[..., Any], *args: Any, policy: FusionPolicy | None = None
) -> tuple[Any, list[Site], list[torch.fx.Graph]]:
    """Rewrite fn's graphs and their subgraphs, and run them eagerly. Return (result, sites, rewritten graphs)."""
    sites: list[Site] = []
    graphs: list[torch.fx.Graph] = []

    def note(gm: torch.fx.GraphModule) -> None:
        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                sites.extend(rewrite(module.graph, policy or FusionPolicy()))
                module.graph.lint()
                module.recompile()
                graphs.append(module.graph)

    result, _ = captured(fn, *args, edit=note)
    return result, sites, graphs


class Recorder(torch.fx.Interpreter):
    """Records example values, as Dynamo does."""

    def run_node(self, n: torch.fx.Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value


def traced(fn: Callable[..., Any], *args: Any) -> torch.fx.Graph:
    """Return fn's graph with recorded values, traced without Dynamo."""
    graph = torch.fx.symbolic_trace(fn).graph
    Recorder(torch.fx.GraphModule({}, graph)).run(*args)
    return graph


def observed(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[list[Any], list[Tensor | None], list[Any]]:
    """Return fn's results, the gradients of its arguments, and the arguments after the call."""
    arguments = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    torch.manual_seed(0)
    results = tree_leaves(fn(*arguments))
    differentiated = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    floating = [t for t in results if isinstance(t, Tensor) and t.requires_grad and t.isfinite().all()]
    gradients: list[Tensor | None] = [None] * len(differentiated)
    if floating and differentiated:
        torch.manual_seed(1)
        # The loss is a random linear function. Squares, for example, would hide wrong gradients of results that are 0.
        loss = sum(
            (t.abs() if t.is_complex() else t).double().mul(torch.randn(t.shape).double()).sum() for t in floating
        )
        gradients = list(torch.autograd.grad(loss, differentiated, allow_unused=True))
    return results, gradients, arguments


def strides(t: Tensor) -> list[int]:
    """Return the strides of axes larger than 1."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def check_equal(expected: Any, actual: Any, place: str, dtype: torch.dtype | None) -> None:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        assert (isinstance(expected, Tensor), expected is None) == (isinstance(actual, Tensor), actual is None), place
        return
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype), (
        f"{place}: {actual.shape} {actual.dtype}, not {expected.shape} {expected.dtype}"
    )
    assert expected.requires_grad == actual.requires_grad, f"{place}: requires_grad is {actual.requires_grad}"
    assert strides(expected) == strides(actual), f"{place}: strides {actual.stride()}, not {expected.stride()}"
    finite = expected.isfinite()
    if not (expected.is_floating_point() or expected.is_complex()) or not finite.any():
        return
    e, a = expected[finite].detach().double(), actual[finite].detach().double()
    size = max(1.0, e.abs().max().item())
    error = (e - a).abs().max().item() / size
    assert error <= TOLERANCE.get(dtype or expected.dtype, 0.0), f"{place}: {error:.3g} apart, relative to {size:.3g}"


def compare(
    fn: Callable[..., Any], args: Sequence[Any], *, way: str = "eager", dtype: torch.dtype | None = None
) -> list[Site]:
    """Assert that fusion changes no result, gradient or write into an argument of fn. Return the sites.

    If compilation without fusion already changes them, fused and unfused compilation are compared.

    Args:
        fn: the function.
        args: its arguments. Gradients are compared if an argument requires them.
        way: the way to compile it, see ``compiled``.
        dtype: the narrowest dtype in fn, for the tolerance. If None, each result's own dtype.

    Raises:
        EagerFails: if fn, or its compilation without fusion, raises.
    """
    try:
        expected = observed(fn, args)
    except Exception as e:
        raise EagerFails from e
    sites: list[Site] = []
    try:
        _equal(expected, observed(compiled(fn, way, sites), args), way, dtype)
    except Exception:
        try:
            expected = observed(compiled(fn, way, None), args)
        except Exception as e:
            raise EagerFails from e
        _equal(expected, observed(compiled(fn, way, []), args), way, dtype)
    return sites


def _equal(expected: Any, actual: Any, way: str, dtype: torch.dtype | None) -> None:
    # If eager mode overflows, as in exp(x)/(1 + exp(x)), gradients are not compared.
    overflows = any(isinstance(t, Tensor) and not t.isfinite().all() for t in expected[0])
    for kind, expected_values, actual_values in zip(("result", "gradient", "argument"), expected, actual, strict=True):
        assert len(expected_values) == len(actual_values), kind
        if kind == "gradient" and overflows:
            continue
        for i, (e, a) in enumerate(zip(expected_values, actual_values, strict=True)):
            if kind == "gradient" and way != "eager" and e is None and a is not None:
                e = torch.zeros_like(a)  # AOTAutograd returns zeros if no gradient flows
            check_equal(e, a, f"{kind} {i}", dtype)
