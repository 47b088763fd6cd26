"""The words of reports on sites and figures, and their plain text."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch_fused_ops.graphs.reasons import CAN_BE_ADDED, NOT_AN_MLP

if TYPE_CHECKING:
    from torch_fused_ops.graphs.reasons import Kind
    from torch_fused_ops.graphs.sites import Site
    from torch_fused_ops.reports.breaks import Break
    from torch_fused_ops.reports.figures import Figures
    from torch_fused_ops.reports.report import Group

WIDTH = 120
PLAIN, FUSED = "torch.compile", "fused"  # the two variants that every report compares
KNOB = "torch.compile, budget 0.99"


def read_by(site: Site) -> str:
    """The functions that read the value, without repeats: "linear ×2"."""
    return ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in Counter(site.users).items())


def _explained(*parts: str | Kind) -> Iterator[str]:
    """Indented lines of a reason, or of a kind's hint."""
    for part in parts:
        line = part if isinstance(part, str) else f"→ {part.advice}"
        yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ")


def breaks_text(breaks: Sequence[Break]) -> str:
    """The places and the reasons of graph breaks; "" if there are none."""
    lines: list[str] = []
    for graph_break, times in Counter(breaks).items():
        where = f"{graph_break.source or 'somewhere in the model'}{f' ×{times}' if times > 1 else ''}"
        lines.append(f"{where}: {graph_break.code}" if graph_break.code else where)
        lines += _explained(graph_break.reason, graph_break.kind)
    return "\n".join(lines)


def unread_lines(groups: Sequence[Group]) -> list[str]:
    """Lines on the activations that are not sites: their places and hints."""
    lines: list[str] = []
    for text, group in unread_text(groups):
        lines += [f"{text} ({group.source})", *_explained(*group.sites[0].refusals)]
    return lines


def unread_text(groups: Sequence[Group]) -> list[tuple[str, Group]]:
    """Texts on the activations that are not sites: "gelu is not a site: no GEMM reads it, but layer_norm"."""
    return [
        (f"{', '.join(dict.fromkeys(g.sites[0].spelling))} is not a site: {bare_reason(g.sites[0])}", g) for g in groups
    ]


def reason_text(site: Site) -> str:
    """The reason as shown: without the part that the hint repeats, and never beginning like a list's item (a minus)."""
    reason = site.reason.removesuffix(CAN_BE_ADDED)
    reason = f"the value {reason}" if reason.startswith(("-", "−", "*", "+")) else reason
    if site.gemm:
        reason += "; its linear layers are in float8" + (", except " if site.gemm_reason else "")
    elif site.gemm_reason:
        reason += "; its linear layers are not in float8: "
    reason += site.gemm_reason
    if site.memory not in ("", "free"):
        reason += f"; memory={site.memory!r}"
    if site.tiles_reason:
        return f"{reason}; not tiled: {site.tiles_reason}"
    return f"{reason}; in {site.tiles} tiles" if site.tiles else reason


def bare_reason(site: Site) -> str:
    """The reason as shown under a heading that says that it is not an MLP."""
    return reason_text(site).removeprefix(NOT_AN_MLP)


def sites_table(groups: Sequence[Group]) -> str:
    """A row for each group: its operator, place and reason."""
    header = ("operator", "activation", "source", "read by", "reason")
    rows = [header]
    for group in groups:
        site = group.sites[0]
        said = "\n".join((reason_text(site), *(f"→ {kind.advice}" for kind in site.refusals)))
        rows.append((site.op or "-", site.activation or "-", group.source, read_by(site), said))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    indent = sum(widths) + 2 * len(widths)
    lines = []
    for row in rows:
        first = "".join(f"{cell:<{width}}  " for cell, width in zip(row[:4], widths, strict=True))
        for part in row[4].split("\n"):
            wrapped = textwrap.wrap(part, max(50, WIDTH - indent), break_long_words=False, break_on_hyphens=False)
            for line in wrapped or [""]:
                lines.append(first + line)
                first = " " * indent
    lines.insert(1, "  ".join("-" * w for w in (*widths, len(header[4]))))
    return "\n".join(lines)


def unit_of(nbytes: float) -> tuple[str, int]:
    """The unit for a number of bytes, and its size in bytes."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next(((unit, n) for unit, n in units if abs(nbytes) >= n), ("B", 1))


def size(nbytes: float, scale: float | None = None) -> str:
    """Format bytes in the unit of ``scale`` (by default of themselves): "576.0 MiB"."""
    scale = nbytes if scale is None else scale
    unit, factor = unit_of(scale)
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


def rows_of(figures: Figures) -> list[tuple[str, str, str, str]]:
    """The totals as text: name, before, after, change."""
    names = {"bytes moved": "forward_bytes", "kernels": "forward_kernels"}
    if figures.training:
        names = {
            "saved for backward": "saved",
            "bytes moved, forward": "forward_bytes",
            "bytes moved, backward": "backward_bytes",
            "kernels, forward": "forward_kernels",
            "kernels, backward": "backward_kernels",
        }
    rows = []
    for name, attribute in names.items():
        before, after = (getattr(side, attribute) for side in (figures.before, figures.after))
        texts = [str(n) if "kernels" in name else size(n, max(before, after)) for n in (before, after)]
        rows.append((name, texts[0], texts[1], change(before, after)))
    seconds = {level.name: level.seconds for level in figures.levels}
    a, b = seconds.get(PLAIN), seconds.get(FUSED)
    if a is not None and b is not None:
        rows.append(("time, at least", f"{1e3 * a:.3f} ms", f"{1e3 * b:.3f} ms", change(a, b)))
    return rows


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table: a heading, a rule, and rows with right-aligned figures."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join((row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))))
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines


def figures_table(figures: Figures) -> str:
    """The totals, before and after."""
    rows = [(f"estimated, {figures.target}", PLAIN, FUSED, "change"), *rows_of(figures)]
    lines = aligned(rows)
    lines += [f"a graph is missing from the figures: {reason}" for reason in dict.fromkeys(figures.skipped)]
    lines += figures.notes
    return "\n".join(lines)


def levels_table(figures: Figures) -> str:
    """Table of memory levels beside plain torch.compile: bytes saved for backward, peak, least time; "" if none."""
    if not figures.training or not figures.levels:
        return ""
    base = figures.levels[0]
    peaks = all(level.peak is not None for level in figures.levels)
    heads = ("peak", "change") if peaks else ()
    rows: list[tuple[str, ...]] = [("memory level", "saved for backward", "change", *heads, "at least", "change")]
    for level in (level for level in figures.levels if level.name != FUSED):
        times = ("not known", "")
        if level.seconds is not None and base.seconds is not None:
            times = (f"{1e3 * level.seconds:.3f} ms", change(base.seconds, level.seconds))
        peak = level.peak, base.peak
        most = (size(peak[0], peak[1]), change(peak[1], peak[0])) if peaks and peak[0] and peak[1] else ()
        rows.append((level.name, size(level.saved, base.saved), change(base.saved, level.saved), *most, *times))
    lines = aligned(rows)
    if base.seconds is None:
        text = f"not known: there are no rates of {figures.target}"
    else:
        text = "the time for FLOP, bytes and (on an H200) instructions at this GPU's rates, a lower bound"
    lines.append(f"at least: {text}")
    lines += [f"{level.name}: {level.note}" for level in figures.levels if level.note]
    return "\n".join(lines)
