"""A report as one self-contained page: ``page.html``, filled in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_fused_ops.reports import text

if TYPE_CHECKING:
    import jinja2

    from torch_fused_ops.reports.report import Group, Report


def page(report: Report, groups: Sequence[Group], unread: Sequence[Group]) -> str:
    """Render the report as HTML, with its sites and unread activations in groups. Text from the model is escaped."""
    mlps = [site for site in report.sites if site.is_mlp]
    return template("reports/page.html", vars(text)).render(
        report=report,
        figures=report.figures,
        mlps=len(mlps),
        mlps_fused=sum(site.op is not None for site in mlps),
        totals=text.rows_of(report.figures) if report.figures else [],
        torch_version=torch.__version__.partition("+")[0],
        devices=", ".join(dict.fromkeys(kind for capture in report._captures for kind in capture.devices)),
        fused=[group for group in groups if group.sites[0].op],
        missed=[group for group in groups if not group.sites[0].op and group.sites[0].is_mlp],
        others=[group for group in groups if not group.sites[0].is_mlp],
        unread=text.unread_text(unread),
        breaks=list(Counter(report.breaks).items()),
    )


def template(file: str, functions: Mapping[str, Any]) -> jinja2.Template:
    """Load a page of this library's, a child of ``reports/base.html``. Its values are escaped.

    Args:
        file: its path in this package.
        functions: those that the page calls, by name.
    """
    import jinja2  # torch requires it

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("torch_fused_ops", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(functions)
    return environment.get_template(file)
