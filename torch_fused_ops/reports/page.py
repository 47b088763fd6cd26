"""Render reports and plans as self-contained pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


def template(file: str, functions: Mapping[str, Any]) -> jinja2.Template:
    """Load an HTML template of this package, which extends ``reports/base.html``. Values are escaped.

    Args:
        file: the template's path in this package.
        functions: functions that the template calls, by name.
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
