"""Reports for people: which MLP sites of a model are fused, as what, and why the others are not."""

from __future__ import annotations

import copy
import html
import json
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_fused_ops.policy import FusionPolicy, policy_or_default

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["Report", "Site", "explain"]

NOT_AN_MLP = "not an MLP: "
EXCLUDED = "the policy excludes "


@dataclass(frozen=True)
class Site:
    """A place where a GEMM reads a nonlinear pointwise function of what GEMMs produced.

    Attributes:
        op: the operator that it became, e.g. ``"fused::glu"``; None where it was left alone.
        activation: the activation's name in the table, where it was proved to be one.
        source: ``"file.py:line in module.path"``.
        reason: what was proved, and from which functions; or why it was left alone. Begins with ``"not an MLP: "``
            where the place is of another kind (a gate in attention, for example), which no policy counts as a miss.
        users: the functions that read the value.
        module: the path, in the model, of the innermost module that holds the activation and the GEMM: the MLP.
        location: where the activation is called, ``"/full/path/file.py:line"``; "" if the graph does not record it.
        code: the text of that line.
    """

    op: str | None
    activation: str | None
    source: str
    reason: str
    users: tuple[str, ...]
    module: str = ""
    location: str = ""
    code: str = ""

    @property
    def is_mlp(self) -> bool:
        """Whether the site counts: fused, or an MLP's that was left alone."""
        return not self.reason.startswith(NOT_AN_MLP)


class Report:
    """What ``explain`` found: ``sites``, ``graphs`` (how many Dynamo captured); printable, and convertible."""

    def __init__(self, sites: tuple[Site, ...], graphs: int = 1) -> None:
        self.sites = sites
        self.graphs = graphs

    @property
    def summary(self) -> str:
        """One line: how many sites, how many fused, how many are no MLPs."""
        mlps = [s for s in self.sites if s.is_mlp]
        fused = sum(s.op is not None for s in mlps)
        others = len(self.sites) - len(mlps)
        graphs = f"{self.graphs} graph{'s' * (self.graphs != 1)}"
        return f"{fused} of {len(mlps)} MLP sites fused" + f", {others} not MLPs" * bool(others) + f" ({graphs})"

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        if not self.sites:
            return f"{self.summary}\n{self._nothing()}"
        header = ("operator", "activation", "source", "read by", "reason")
        rows = [header, *map(_cells, self.sites)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4])) for row in rows]
        lines.insert(1, "  ".join("-" * w for w in (*widths, len(header[4]))))
        return "\n".join([*lines, "", self.summary])

    def _nothing(self) -> str:
        """What to look at where there are no sites."""
        hint = (
            "A site is a matrix product that reads a pointwise function of matrix products, through views, casts and\n"
            "dropout. There is none: between the products stands something else (a norm, a convolution, an operator\n"
            "that is already fused), or nothing nonlinear."
        )
        if self.graphs > 1:
            hint += (
                f"\nThe model was captured in {self.graphs} graphs: a site does not reach across a graph break "
                "(TORCH_LOGS=graph_breaks shows where they are)."
            )
        return hint

    def to_json(self) -> str:
        """The report as JSON text: ``{"summary", "graphs", "sites": [{op, activation, source, reason, users}, …]}``."""
        report = {"summary": self.summary, "graphs": self.graphs, "sites": [asdict(site) for site in self.sites]}
        return json.dumps(report, indent=2, ensure_ascii=False)

    def to_html(self, path: str | Path) -> None:
        """Write the report to ``path`` as one self-contained page."""
        rows = "\n".join(
            f'<tr class="{_class(site)}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(site)) + "</tr>"
            for site in self.sites
        )
        reasons = Counter(site.reason for site in self.sites if site.op is None)
        missed = "\n".join(f"<li>{n} × {html.escape(reason)}</li>" for reason, n in reasons.most_common())
        fused = sum(site.op is not None for site in self.sites)
        share = 100 * fused / max(1, sum(site.is_mlp for site in self.sites))
        page = _PAGE.format(
            summary=html.escape(self.summary),
            share=f"{share:.1f}",
            rows=rows,
            missed=f"<h2>Left alone</h2>\n<ul>\n{missed}\n</ul>" if missed else "",
        )
        Path(path).write_text(page, encoding="utf-8")


def _cells(site: Site) -> tuple[str, str, str, str, str]:
    users = ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in Counter(site.users).items())
    return (site.op or "-", site.activation or "-", site.source, users, site.reason)


def _class(site: Site) -> str:
    return "fused" if site.op else "missed" if site.is_mlp else "other"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>torch_fused_ops report</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2.5rem auto; max-width: 76rem; padding: 0 1rem; color: #1d2733; }}
.bar {{ height: .7rem; border-radius: .35rem; background: #e6b8a8; overflow: hidden; }}
.bar div {{ height: 100%; background: #2a7f62; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; margin-top: 1.5rem; font-size: .9rem; }}
th, td {{ text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #dde3e8; vertical-align: top; }}
td:nth-child(-n+4) {{ font-family: ui-monospace, monospace; font-size: .85rem; white-space: nowrap; }}
.fused td:first-child {{ color: #2a7f62; }} .missed td {{ background: #fbeee9; }} .other td {{ color: #7b8794; }}
</style>
</head>
<body>
<h1>What was fused</h1>
<p>{summary}</p>
<div class="bar"><div style="width: {share}%"></div></div>
<div class="scroll">
<table>
<thead><tr><th>operator</th><th>activation</th><th>source</th><th>read by</th><th>reason</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
{missed}
</body>
</html>
"""


def explain(model: Callable[..., Any], *args: Any, policy: FusionPolicy | None = None, **kwargs: Any) -> Report:
    """Say what pick-up would do to a model: every MLP site, fused or not, and why.

    The model runs once, eagerly, on the arguments, while Dynamo captures its graphs (several where it breaks them).
    Nothing is compiled; parameters, buffers and random number generators are afterwards as they were.

    Args:
        model: a module or a function; as it is, in training or evaluation mode.
        *args: what to call it with.
        policy: what pick-up may do; ``FusionPolicy()`` by default.
        **kwargs: what to call it with.

    Returns:
        A ``Report``: print it, or read its ``sites``.

    Raises:
        TypeError: model is not callable, or policy is no FusionPolicy.
        Whatever the model raises on these arguments.
    """
    if not callable(model):
        raise TypeError(f"model={model!r} is not callable: it must be a module or a function")
    policy = policy_or_default(policy)
    from torch_fused_ops.lowerings import recognise

    sites: list[Site] = []
    graphs = 0

    def capture(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        for module in _graphs(gm):
            sites.extend(recognise.rewrite(module.graph, policy, apply=False))
        return gm.forward

    model = getattr(model, "_orig_mod", model)
    with _unchanged(model), torch._dynamo.config.patch(recompile_limit=64):
        torch.compile(_throwaway(_call), backend=capture)(model, *args, **kwargs)
    return Report(tuple(sites), graphs)


def _call(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _throwaway(fn: Any) -> Callable[..., Any]:
    """fn with a code object of its own. Dynamo keeps what it captures on the code object, and eight captures are its
    limit: on the model's own code they would count against the user's compilations."""
    return types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__)


def _graphs(gm: GraphModule) -> Iterator[GraphModule]:
    """The graph and those of the higher-order operators it calls (checkpoint bodies, …), as Inductor visits them."""
    called = {node.target for node in gm.graph.find_nodes(op="get_attr")}
    for name, child in gm.named_children():
        if name in called and isinstance(child, torch.fx.GraphModule):
            yield from _graphs(child)
    yield gm


@contextmanager
def _unchanged(model: Callable[..., Any]) -> Iterator[None]:
    """Put back what a run changes: buffers (batch statistics, caches), random generators, Dynamo's record of sizes.

    Without the last, sizes that were seen here would make a later compilation with others dynamic from the start.
    """
    from torch._dynamo import pgo

    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    before = [buffer.detach().clone() for buffer in buffers]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    seen = pgo.get_code_state()
    seen_before = copy.deepcopy(seen)
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            seen.clear()
            seen.update(seen_before)
            with torch.no_grad():
                for buffer, old in zip(buffers, before, strict=True):
                    if not torch.equal(buffer, old):
                        buffer.copy_(old)
