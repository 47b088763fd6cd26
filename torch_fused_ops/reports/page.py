"""A report as one self-contained page: ``page.html``, filled in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torch_fused_ops.reports.text import (
    bare_reason,
    change,
    counted,
    read_by,
    reason_text,
    rows_of,
    size,
    unit_of,
    unread_text,
)

if TYPE_CHECKING:
    import jinja2

    from torch_fused_ops.reports.figures import Cost, Figures, LayerFigures
    from torch_fused_ops.reports.report import Group, Report

__all__ = ["page", "template", "writable"]


def writable(path: str | Path) -> Path:
    """Check that a page can be written to a path.

    Raises:
        ValueError: it is a folder, or its folder does not exist.
    """
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"path={str(path)!r} cannot be written: it must be a file in an existing folder")
    return file


def page(report: Report, groups: Sequence[Group], unread: Sequence[Group]) -> str:
    """Render the report as HTML, with its sites and unread activations in groups. Text from the model is escaped."""
    mlps = [site for site in report.sites if site.is_mlp]
    better = {"−": "good", "+": "bad"}  # less is better for all figures
    filters: dict[str, Callable[..., str]] = {"kind": lambda d: better.get(d[0], "same"), "read_by": read_by}
    filters |= {"reason_text": reason_text, "bare_reason": bare_reason}
    return template("reports/page.html", filters).render(
        report=report,
        figures=report.figures,
        facts=_facts(report),
        mlps=len(mlps),
        mlps_fused=sum(site.op is not None for site in mlps),
        cards=list(_cards(report.figures)) if report.figures else [],
        charts=list(_charts(report.figures)) if report.figures else [],
        totals=rows_of(report.figures) if report.figures else [],
        devices=", ".join(Counter(kind for capture in report._captures for kind in capture.devices)),
        fused=[group for group in groups if group.sites[0].op],
        missed=[group for group in groups if not group.sites[0].op and group.sites[0].is_mlp],
        others=[group for group in groups if not group.sites[0].is_mlp],
        unread=unread_text(unread),
        breaks=counted(report.breaks),
    )


def template(file: str, filters: Mapping[str, Callable[..., Any]] | None = None) -> jinja2.Template:
    """Load a page of this library's, a child of ``reports/base.html``. Its values are escaped."""
    import jinja2  # torch requires it

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("torch_fused_ops", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters or {})
    return environment.get_template(file)


def _facts(report: Report) -> Iterator[str]:
    yield f"{report.graphs} graph{'s' * (report.graphs != 1)}"
    if report.figures:
        yield "training step" if report.figures.training else "inference"
        yield f"estimated for an {report.figures.target}"
    for policy in report.policies:
        gemm = "" if policy.gemm == "bf16" else f", gemm={policy.gemm!r}"
        yield f"FusionPolicy(memory={policy.memory!r}{gemm})"
    yield f"torch {torch.__version__.partition('+')[0]}"


def _cards(figures: Figures) -> Iterator[tuple[str, str, str, str]]:
    """Yield title, before, after, change."""
    before, after = figures.before, figures.after
    of_bytes = [("Bytes moved", before.bytes_moved, after.bytes_moved)]
    if figures.training:
        of_bytes.insert(0, ("Saved for backward", before.saved, after.saved))
    for title, *values in of_bytes:
        first, second = values
        yield title, size(first, max(values)), size(second, max(values)), change(first, second)
    yield "Kernel launches", str(before.kernels), str(after.kernels), change(before.kernels, after.kernels)


class _Bar(NamedTuple):
    name: str
    before: str
    after: str
    before_percent: float
    after_percent: float
    change: str


class _Chart(NamedTuple):
    title: str
    unit: str
    bars: list[_Bar]


def _charts(figures: Figures) -> Iterator[_Chart]:
    if figures.training:
        yield _chart("Saved for backward", figures.layers, lambda cost: cost.saved)
    title = "Bytes moved, forward and backward" if figures.training else "Bytes moved"
    yield _chart(title, figures.layers, lambda cost: cost.bytes_moved)


def _chart(title: str, layers: Sequence[LayerFigures], value: Callable[[Cost], int]) -> _Chart:
    rows = [(layer.name, value(layer.before), value(layer.after)) for layer in layers]
    rows = [row for row in rows if row[1] or row[2]]
    largest = max((max(before, after) for _, before, after in rows), default=0)
    unit, factor = unit_of(largest)

    def text(nbytes: int) -> str:
        return f"{nbytes / factor:.{1 if nbytes / factor < 99.95 else 0}f}"

    return _Chart(
        title,
        unit,
        [
            _Bar(name, text(before), text(after), 100 * before / largest, 100 * after / largest, change(before, after))
            for name, before, after in rows
        ],
    )
