"""Format bytes, changes and tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def size(nbytes: float, scale: float | None = None) -> str:
    """Format bytes as "576.0 MiB". The unit suits ``scale``, or the bytes if ``scale`` is None."""
    scale = nbytes if scale is None else scale
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    unit, factor = next(((unit, n) for unit, n in units if abs(scale) >= n), ("B", 1))
    digits = 0 if factor == 1 else 2 if abs(scale) < 10 * factor else 1
    return f"{nbytes / factor:.{digits}f} {unit}"


def change(before: float, after: float) -> str:
    """Format a figure's change: "−36.2 %", "+1.0 %", "≈ 0 %" or "same"."""
    if before == after:
        return "same"
    if not before:
        return "new"
    percent = 100 * (after / before - 1)
    if abs(percent) < 0.05:
        return "≈ 0 %"
    return f"{'−' if percent < 0 else '+'}{abs(percent):.1f} %"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Format a table as lines: a heading, a rule, and rows with right-aligned figures."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join((row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))))
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines
