"""Running a function with and without the recognizer's rewrite, and comparing everything that a user can see of it."""

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
POLICY = FusionPolicy(dropout=False)  # a dropout that is picked up drops other elements
TOLERANCE = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 0.2}
REASONS = json.loads((Path(__file__).parents[2] / "docs" / "reasons.json").read_text(encoding="utf-8"))


class EagerFails(Exception):
    """The function itself raises: there is nothing to compare with."""


def fits(kind: Kind, text: str) -> bool:
    """Whether a text is what docs/recognition.md has for its kind; behind where it is, in a module that does more."""
    forms = (".*".join(map(re.escape, form.split("*")[::2])) for form in REASONS["kinds"][kind.name]["texts"])
    return any(re.fullmatch(f"(its activation stands between .*: )?{form}", text, re.DOTALL) for form in forms)


def compiled(fn: Callable[..., Any], way: str, sites: list[Site] | None) -> Callable[..., Any]:
    """fn compiled, with pick-up if ``sites`` is a list.

    Args:
        fn: the function.
        way: "eager" runs Dynamo's graph as it is, "aot_eager" through AOTAutograd; a memory level runs it
            after all of Inductor's passes, without code.
        sites: gets what was found in Dynamo's graphs and their subgraphs; nothing with memory levels.
    """

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for module in list(gm.modules()):
            if sites is not None and isinstance(module, torch.fx.GraphModule):
                before, changes = str(module.graph), rewrite(module.graph, POLICY)
                assert any(site.op for site in changes) or str(module.graph) == before, "left alone is left as it was"
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
    """(result, sites, rewritten graphs): fn's graphs by Dynamo, subgraphs included, rewritten and then run eagerly."""
    sites: list[Site] = []
    graphs: list[torch.fx.Graph] = []

    def note(gm: torch.fx.GraphModule) -> None:
        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                sites.extend(rewrite(module.graph, policy or FusionPolicy()))
                module.graph.lint()
                module.recompile()
                graphs.append(module.graph)

    result, _ = captured(fn, *args, each=note)
    return result, sites, graphs


class Recorder(torch.fx.Interpreter):
    """Records example values, as Dynamo does."""

    def run_node(self, n: torch.fx.Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value


def traced(fn: Callable[..., Any], *args: Any) -> torch.fx.Graph:
    """fn's graph with recorded values, without Dynamo."""
    graph = torch.fx.symbolic_trace(fn).graph
    Recorder(torch.fx.GraphModule({}, graph)).run(*args)
    return graph


def observed(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[list[Any], list[Tensor | None], list[Any]]:
    """fn's results, the gradients of its arguments, and the arguments as they are afterwards."""
    given = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    torch.manual_seed(0)
    results = tree_leaves(fn(*given))
    wanting = [a for a in given if isinstance(a, Tensor) and a.requires_grad]
    floating = [t for t in results if isinstance(t, Tensor) and t.requires_grad and t.isfinite().all()]
    gradients: list[Tensor | None] = [None] * len(wanting)
    if floating and wanting:
        torch.manual_seed(1)
        # a random linear function: one whose gradient depends on the results would hide what happens where they are 0
        loss = sum(
            (t.abs() if t.is_complex() else t).double().mul(torch.randn(t.shape).double()).sum() for t in floating
        )
        gradients = list(torch.autograd.grad(loss, wanting, allow_unused=True))
    return results, gradients, given


def strides(t: Tensor) -> list[int]:
    """The strides that say where elements lie: not those of axes of size 1."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def same(wanted: Any, got: Any, what: str, dtype: torch.dtype | None) -> None:
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        assert isinstance(wanted, Tensor) == isinstance(got, Tensor) and (wanted is None) == (got is None), what
        return
    assert (wanted.shape, wanted.dtype) == (got.shape, got.dtype), f"{what}: {got.shape} {got.dtype} for {wanted.shape}"
    assert wanted.requires_grad == got.requires_grad, f"{what}: requires_grad is {got.requires_grad}"
    assert strides(wanted) == strides(got), f"{what}: strides {got.stride()} for {wanted.stride()}"
    finite = wanted.isfinite()
    if not (wanted.is_floating_point() or wanted.is_complex()) or not finite.any():
        return
    w, g = wanted[finite].detach().double(), got[finite].detach().double()
    size = max(1.0, w.abs().max().item())
    apart = (w - g).abs().max().item() / size
    assert apart <= TOLERANCE.get(dtype or wanted.dtype, 0.0), f"{what}: {apart:.3g} apart, relative to {size:.3g}"


def compare(
    fn: Callable[..., Any], args: Sequence[Any], *, way: str = "eager", dtype: torch.dtype | None = None
) -> list[Site]:
    """Assert that fn with pick-up gives fn's results, gradients and writes into arguments; the sites that were found.

    What compiling itself changes is not held against pick-up: then it must give what compiling without it gives.

    Args:
        fn: the function.
        args: its arguments; those that require grad are differentiated by.
        way: how it is compiled, see ``compiled``.
        dtype: the narrowest that fn computes in, for the tolerance; by default each result's own.

    Raises:
        EagerFails: fn, or compiling it without pick-up, raises.
    """
    try:
        wanted = observed(fn, args)
    except Exception as e:
        raise EagerFails from e
    sites: list[Site] = []
    try:
        _equal(wanted, observed(compiled(fn, way, sites), args), way, dtype)
    except Exception:
        try:
            wanted = observed(compiled(fn, way, None), args)
        except Exception as e:
            raise EagerFails from e
        _equal(wanted, observed(compiled(fn, way, []), args), way, dtype)
    return sites


def _equal(wanted: Any, got: Any, way: str, dtype: torch.dtype | None) -> None:
    overflows = any(isinstance(t, Tensor) and not t.isfinite().all() for t in wanted[0])  # exp(x)/(1 + exp(x)) in eager
    for kind, many, others in zip(("result", "gradient", "argument"), wanted, got, strict=True):
        assert len(many) == len(others), kind
        if kind == "gradient" and overflows:
            continue
        for i, (w, g) in enumerate(zip(many, others, strict=True)):
            if kind == "gradient" and way != "eager" and w is None and g is not None:
                w = torch.zeros_like(g)  # AOTAutograd gives zeros where nothing flows
            same(w, g, f"{kind} {i}", dtype)
