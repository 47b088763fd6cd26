"""``Report``: a model's MLP sites, fused or not, with reasons."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_fused_ops.graphs import listing
from torch_fused_ops.graphs.fusion_events import unobserved
from torch_fused_ops.graphs.listing import AttentionSite, merged_attention, merged_sites, site_lines
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.graphs.sites import DROPOUT, Site
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.breaks import Break, break_lines
from torch_fused_ops.reports.captures import Capture
from torch_fused_ops.reports.page import template
from torch_fused_ops.reports.saved import Saved, saved
from torch_fused_ops.reports.text import size
from torch_fused_ops.settings.environment import writable

NOTHING_CAPTURED = "Dynamo captured no graph of the model"


def not_sites(unread: Iterable[Site], sites: Iterable[Site]) -> tuple[Site, ...]:
    """Remove the activations of MLPs that DDPOptimizer has split, because these MLPs are listed as sites."""
    cut = {(site.source, site.spelling) for site in sites if site.kind is Kind.DDP_BUCKET}
    return tuple(site for site in unread if (site.source, site.spelling) not in cut)


@dataclass(repr=False, eq=False)
class Report:
    """The result of ``explain`` or ``record``, printable and convertible.

    Attributes:
        sites: every site, in graph order.
        unread: activations that are not sites, because they are not between two GEMMs, or a boundary such as a
            checkpoint separates them from a GEMM.
        graphs: the number of graphs that Dynamo captured; for ``record``, only graphs compiled with fusion.
        recompilations: the number of recompilations for other sizes, which do not add sites.
        breaks: the graph breaks that end these graphs, in order, including repeats.
        policies: the graphs' different fusion policies: one, unless a ``record`` block saw several.
        title: the name of the model or function.
        notes: further remarks, one sentence each.
    """

    sites: tuple[Site, ...]
    graphs: int = 1
    unread: tuple[Site, ...] = ()
    recompilations: int = 0
    breaks: tuple[Break, ...] = ()
    policies: tuple[FusionPolicy, ...] = ()
    title: str = ""
    notes: tuple[str, ...] = ()
    _captures: list[Capture] = field(default_factory=list)  # only in ``explain``'s reports
    _is_recorded: bool = False  # True for a ``record`` block
    _attention: dict[str, AttentionSite] = field(default_factory=dict)  # by module, only in ``record``'s reports

    @property
    def summary(self) -> str:
        """One line: the numbers of fused MLPs, of MLPs without the requested float8, and of other sites; the notes."""
        mlps = [s for s in self.sites if s.is_mlp]
        fused = [s for s in mlps if s.op is not None]
        dropouts = [s for s in self.sites if s.activation == DROPOUT]
        other_sites = len(self.sites) - len(mlps) - len(dropouts)
        graphs = f"{self.graphs} graph{'s' * (self.graphs != 1)}"
        if self.recompilations:
            graphs += f", recompiled {self.recompilations} time{'s' * (self.recompilations != 1)}"
        unmasked = sum(s.op is not None for s in dropouts)
        parts = [f"{len(fused)} of {len(mlps)} MLP sites fused"] if mlps or not unmasked else []
        if without := sum(s.gemm_kind is not None and not s.gemm for s in fused):
            parts.append(f"{without} of these without float8 GEMMs")
        if partly := sum(s.gemm_kind is not None and bool(s.gemm) for s in fused):
            parts.append(f"{partly} of these with float8 in some GEMMs only")
        if kept := sum(s.memory_kind is not None for s in fused):
            parts.append(f"{kept} of these in checkpoints, where the memory level has no effect")
        if rounded := sum(s.has_only_level for s in mlps):
            parts.append(f"{rounded} at memory levels in eager's rounding")
        if dropouts:
            parts.append(f"{unmasked} of {len(dropouts)} dropouts{'' if mlps or not unmasked else ' fused'}")
        if other_sites:
            parts.append(f"{other_sites} not MLPs")
        return "; note: ".join((f"{', '.join(parts)} ({graphs})", *self.notes))

    @functools.cached_property
    def saved(self) -> Saved:
        """The tensors that the graphs save for backward under their policy, one by one; computed at first access.

        The graphs are partitioned for an H200, but not compiled. This takes seconds, and needs Triton, but not a GPU.
        No other thread may compile meanwhile.

        Raises:
            ValueError: ``record`` made the report, and keeps no graphs.
        """
        from torch_fused_ops.virtual_gpu import H200

        if self._is_recorded:
            raise ValueError("record keeps no graphs: read torch_fused_ops.explain(model, *args).saved")
        with unobserved():
            return saved(self._captures, H200)

    @property
    def attention(self) -> tuple[AttentionSite, ...]:
        """The attention calls for which the policy requests a level, with the level's effect; computed like ``saved``.

        Empty at ``attention="off"``, or if no graph has a backward. ``record`` lists the calls whose graphs this
        process has compiled: code from a compile cache is not listed.
        """
        return tuple(merged_attention(self._attention.values())) if self._is_recorded else self._partitioned.attention

    @functools.cached_property
    def _partitioned(self) -> Saved:
        from torch_fused_ops.virtual_gpu import H200

        listed: Saved | None = vars(self).get("saved")
        if listed is not None:
            return listed
        with unobserved():
            return saved([c for c in self._captures if c.policy.attention != "off"], H200, compare=False)

    def __repr__(self) -> str:
        parts = [*site_lines(self.sites), "", self.summary] if self.sites else [self.summary]
        if all(site.op is None and site.activation == DROPOUT for site in self.sites):
            parts.append(self.nothing)
        parts += site_lines(self.unread)
        parts += [f'attention="input": {size(site.nbytes)} less saved by {site.text}' for site in self.attention]
        if self.breaks:
            parts += [f"note: {self.broken}:", *break_lines(self.breaks)]
        if "saved" in vars(self):
            parts += ["", str(self.saved)]
        return "\n".join(parts)

    @property
    def broken(self) -> str:
        """A sentence on the number of captured graphs."""
        if not self.graphs:
            return NOTHING_CAPTURED
        graphs = f"{self.graphs} graph{'s' * (self.graphs != 1)}"
        return f"the model was captured in {graphs}: a site does not reach across a graph break"

    @property
    def nothing(self) -> str:
        """Advice for a report without sites."""
        if not self.graphs and self._is_recorded:
            return (
                'No model was compiled with fusion here. Use torch.compile(model, backend="fused"), or call\n'
                "torch_fused_ops.enable() first. A model is compiled at its first call, which a block must contain.\n"
                "transformers' Trainer calls torch.compile with torch_compile=True."
            )
        if not self.graphs:
            return (
                f"{NOTHING_CAPTURED}: its forward is disabled (torch.compiler.disable, a stance,\n"
                "TORCH_COMPILE_DISABLE), is skipped by Dynamo, breaks in a loop, or computes nothing with tensors."
            )
        return (
            "A site is a GEMM that reads a pointwise function of GEMMs' results, through views, casts and dropout.\n"
            "There is none: another op (a norm, a convolution, an operator that is already fused), an opaque function\n"
            "or a graph break lies between the GEMMs, or nothing nonlinear."
        )

    def to_json(self) -> str:
        """Convert the report to JSON.

        ``{"title", "summary", "graphs", "recompilations", "breaks", "sites": [{op, activation, …}, …], "unread",
        "notes", "attention", "saved"}``. Entries have the attributes of ``Site`` (``kind`` by name), ``Break`` and
        ``AttentionSite``. "saved" has the attributes of ``Saved``, and is null unless computed.
        """
        names = ("title", "summary", "graphs", "recompilations", "breaks", "sites", "unread", "notes", "attention")
        report = {name: getattr(self, name) for name in names} | {"saved": vars(self).get("saved")}
        plain: dict[type, Any] = {Kind: lambda v: v.name, Saved: lambda v: {"nbytes": v.nbytes, **asdict(v)}}
        return json.dumps(report, indent=2, ensure_ascii=False, default=lambda v: plain.get(type(v), asdict)(v))

    def to_html(self, path: str | Path) -> Path:
        """Write the report to ``path`` as one self-contained page, and return the path.

        Raises:
            ValueError: path cannot be written.
        """
        path = writable(f"path={str(path)!r}", path)
        sites, mlps = merged_sites(self.sites), [site for site in self.sites if site.is_mlp]
        page = template("reports/page.html", vars(listing)).render(
            report=self,
            mlps=len(mlps),
            saved=vars(self).get("saved"),
            mlps_fused=sum(site.op is not None for site in mlps),
            torch_version=torch.__version__.partition("+")[0],
            fused=[site for site in sites if site.op],
            missed=[site for site in sites if not site.op and site.is_mlp],
            others=[site for site in sites if not site.is_mlp],
            unread=merged_sites(self.unread),
            breaks=list(Counter(self.breaks).items()),
        )
        path.write_text(page, encoding="utf-8")
        return path
