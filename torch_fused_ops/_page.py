"""A report as one self-contained page: no network, no scripts, light and dark."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from torch_fused_ops.figures import Cost, Figures, LayerFigures
from torch_fused_ops.report import (
    Group,
    Report,
    bare_reason,
    change,
    grouped,
    read_by,
    reason_text,
    rows_of,
    size,
    unit_of,
    unread_text,
)

__all__ = ["page"]


def page(report: Report) -> str:
    """The report as HTML text. Everything that comes from the model is escaped."""
    groups = grouped(report.sites)
    fused = [group for group in groups if group.sites[0].op]
    missed = [group for group in groups if not group.sites[0].op and group.sites[0].is_mlp]
    others = [group for group in groups if not group.sites[0].is_mlp]
    unread = grouped(report.unread)
    body = [
        _header(report),
        _cards(report),
        "".join(f'<p class="note">{_text(note)}</p>' for note in report.notes),
        "" if report.sites else f'<p class="note empty">{_text(report.nothing)}</p>',
        _layers(report.figures) if report.figures else "",
        _totals(report.figures) if report.figures else "",
        _section("Fused", _count(fused), _fused_table(fused)) if fused else "",
        _section("Left alone", _count(missed), _refusals(missed)) if missed else "",
        _section("Not MLPs", _count(others), _others_table(others), "muted") if others else "",
        _section("Elsewhere", "", _unread_list(unread), "muted") if unread else "",
        _footer(report),
    ]
    title = f"{report.title}: {report.summary}" if report.title else report.summary
    head = f"{_META}<title>{_text(title)}</title>\n<style>\n{_STYLE}</style>"
    content = "\n".join(filter(None, body))
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{content}\n</body>\n</html>\n'


def _text(text: object) -> str:
    return html.escape(str(text))


def _count(groups: Iterable[Group]) -> str:
    n = sum(len(group.sites) for group in groups)
    return f"{n} site{'s' * (n != 1)}"


def _section(title: str, count: str, content: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{title} <span class="count">{count}</span></h2>{content}</section>'


# ---- the top ---------------------------------------------------------------------------------------------------------


def _header(report: Report) -> str:
    facts = [f"{report.graphs} graph{'s' * (report.graphs != 1)}"]
    if report.figures:
        facts.append("training step" if report.figures.training else "inference")
        facts.append(f"figures on paper, for an {report.figures.target}")
    policies = dict.fromkeys(capture.policy for capture in report._captures)
    facts += [f"FusionPolicy(memory={policy.memory!r})" for policy in policies]
    facts.append(f"torch {torch.__version__.partition('+')[0]}")
    chips = "".join(f"<li>{_text(fact)}</li>" for fact in facts)
    return (
        f'<header><p class="eyebrow">torch_fused_ops report</p><h1>{_text(report.title or "What was fused")}</h1>'
        f'<ul class="facts">{chips}</ul></header>'
    )


def _cards(report: Report) -> str:
    mlps = [site for site in report.sites if site.is_mlp]
    fused = sum(site.op is not None for site in mlps)
    share = 100 * fused / len(mlps) if mlps else 0
    small = (
        f"{len(mlps) - fused} left alone" if fused < len(mlps) else "none left alone" if mlps else "no MLP was found"
    )
    meter = f'<div class="meter"><i style="width:{share:.1f}%"></i></div>' if mlps else ""
    cards = [
        f'<div class="card"><h3>MLPs fused</h3><p class="big">{fused}<span class="of"> of {len(mlps)}</span></p>'
        f'{meter}<p class="small">{small}</p></div>'
    ]
    if report.figures:
        before, after = report.figures.before, report.figures.after
        if report.figures.training:
            cards.append(_card("Saved for backward", before.saved, after.saved, True))
        cards.append(_card("Bytes moved", before.bytes_moved, after.bytes_moved, True))
        cards.append(_card("Kernel launches", before.kernels, after.kernels, False))
    elif report.graphs:
        why = (
            f"They could not be worked out: {report.figures_missing}"
            if report.figures_missing
            else "They were not asked for: report.measure() works them out, in seconds and without a GPU."
        )
        cards.append(
            f'<div class="card wide"><h3>Memory, traffic and kernels</h3><p class="small">{_text(why)}</p></div>'
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _kind(difference: str) -> str:
    """Less is better, of everything that is counted here."""
    return {"−": "good", "+": "bad"}.get(difference[0], "same")


def _card(title: str, before: int, after: int, is_bytes: bool) -> str:
    difference = change(before, after)
    kind = _kind(difference)
    values = [size(v, max(before, after)) if is_bytes else str(v) for v in (before, after)]
    number = difference.removesuffix(" %")
    big = f'{number}<span class="of"> %</span>' if number != difference else number
    return (
        f'<div class="card {kind}"><h3>{title}</h3><p class="big">{big}</p>'
        f'<p class="small">{values[0]} <span class="arrow">→</span> <b>{values[1]}</b></p></div>'
    )


# ---- figures ---------------------------------------------------------------------------------------------------------


def _layers(figures: Figures) -> str:
    charts = []
    if figures.training:
        charts.append(_chart("Saved for backward", figures.layers, lambda cost: cost.saved))
    moved = "Bytes moved, forward and backward" if figures.training else "Bytes moved"
    charts.append(_chart(moved, figures.layers, lambda cost: cost.bytes_moved))
    legend = (
        '<p class="legend"><span><i class="key before"></i>torch.compile</span>'
        '<span><i class="key after"></i>with torch_fused_ops</span></p>'
    )
    return (
        f"<section><h2>Layer by layer</h2>{legend}"
        f'<div class="charts{" single" * (len(charts) == 1)}">{"".join(charts)}</div></section>'
    )


def _chart(title: str, layers: Sequence[LayerFigures], value: Callable[[Cost], int]) -> str:
    rows = [(layer.name, value(layer.before), value(layer.after)) for layer in layers]
    rows = [row for row in rows if row[1] or row[2]]
    largest = max((max(before, after) for _, before, after in rows), default=0)
    unit, factor = unit_of(largest)
    bars = []
    for name, before, after in rows:
        texts = [f"{v / factor:.1f}" if v / factor < 99.95 else f"{v / factor:.0f}" for v in (before, after)]
        label = f"{name}: {texts[0]} {unit} before, {texts[1]} {unit} after ({change(before, after)})"
        numbers = (
            f"<b>{texts[1]}</b>"
            if texts[0] == texts[1]
            else f'{texts[0]} <span class="arrow">→</span> <b>{texts[1]}</b>'
        )
        bars.append(
            f'<li title="{_text(label)}"><span class="name">{_text(name)}</span>'
            f'<span class="track"><i class="before" style="width:{100 * before / largest:.2f}%"></i>'
            f'<i class="after" style="width:{100 * after / largest:.2f}%"></i></span>'
            f'<span class="value">{numbers}</span></li>'
        )
    return f'<div class="chart"><h3>{title}, {unit}</h3><ol>{"".join(bars)}</ol></div>'


def _totals(figures: Figures) -> str:
    rows = []
    for name, before, after, difference in rows_of(figures):
        kind = _kind(difference)
        rows.append(f'<tr><th>{name}</th><td>{before}</td><td>{after}</td><td class="{kind}">{difference}</td></tr>')
    head = "<tr><th></th><th>torch.compile</th><th>torch_fused_ops</th><th>change</th></tr>"
    skipped = "".join(
        f'<p class="note">A graph is missing from the figures: {_text(reason)}</p>'
        for reason in dict.fromkeys(figures.skipped)
    )
    return (
        f'<section><h2>In total</h2>{skipped}<div class="scroll"><table class="numbers"><thead>{head}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


# ---- sites -----------------------------------------------------------------------------------------------------------


def _where(group: Group) -> str:
    site = group.sites[0]
    times = f' <span class="times">×{len(group.sites)}</span>' if len(group.sites) > 1 else ""
    module = f'<span class="module">{_text(group.modules)}</span>{times}<br>' if group.modules else times
    return f'{module}<span class="file" title="{_text(site.location)}">{_text(group.where)}</span>'


def _fused_table(groups: Sequence[Group]) -> str:
    rows = []
    for group in groups:
        site = group.sites[0]
        code = f"<code>{_text(site.code)}</code>" if site.code else ""
        rows.append(
            f'<tr><td class="mono">{_where(group)}</td><td class="mono op">{_text(site.op)}<br>'
            f'<span class="activation">{_text(site.activation)}</span></td>'
            f'<td class="mono">{_text(read_by(site))}</td><td>{_text(reason_text(site))}{code}</td></tr>'
        )
    head = "<tr><th>where</th><th>became</th><th>read by</th><th>proof</th></tr>"
    return f'<div class="scroll"><table class="sites"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _refusals(groups: Sequence[Group]) -> str:
    cards = []
    for group in groups:
        site = group.sites[0]
        n = len(group.sites)
        times = f'<span class="times">{n} times</span>' if n > 1 else ""
        module = f'in <span class="module">{_text(group.modules)}</span>' if group.modules else ""
        code = f"<pre>{_text(site.code)}</pre>" if site.code else ""
        hint = f'<p class="hint">{_text(site.hint)}</p>' if site.hint else ""
        cards.append(
            f'<article><p class="place"><span class="file" title="{_text(site.location)}">{_text(group.where)}</span> '
            f'{module} {times}</p>{code}<p class="reason">{_text(reason_text(site))}</p>{hint}</article>'
        )
    return f'<div class="refusals">{"".join(cards)}</div>'


def _others_table(groups: Sequence[Group]) -> str:
    """What is no MLP: by reason, with where it stands."""
    rows = []
    for group in groups:
        reason = bare_reason(group.sites[0])
        rows.append(f'<tr><td class="mono">{_where(group)}</td><td>{_text(reason)}</td></tr>')
    lead = "Other places where a matrix product reads something nonlinear. They count neither as fused nor as missed."
    return f'<p>{lead}</p><div class="scroll"><table class="sites"><tbody>{"".join(rows)}</tbody></table></div>'


def _unread_list(groups: Sequence[Group]) -> str:
    """Activations that do not stand between two GEMMs."""
    rows = [
        f'<tr><td class="mono">{_where(group)}</td><td>{_text(text)}</td></tr>' for text, group in unread_text(groups)
    ]
    lead = "Activations that do not stand between two matrix products. There is nothing to fuse them with here."
    return f'<p>{lead}</p><div class="scroll"><table class="sites"><tbody>{"".join(rows)}</tbody></table></div>'


def _footer(report: Report) -> str:
    lines = [
        "A site is a matrix product that reads a pointwise function of what matrix products produced. It is fused only "
        "if that function is proved equal to an activation of the table."
    ]
    if report.figures:
        kinds = Counter(kind for capture in report._captures for kind in capture.devices)
        there = ", ".join(kinds) or "cpu"
        lines.append(
            "Memory, traffic and kernels are counted on paper: the code that Inductor generates for an "
            f"{report.figures.target}, from the graphs as they were captured (inputs on: {there}), with and without "
            "pick-up; nothing was run. Saved for backward: without parameters and buffers. Bytes moved: each buffer "
            "that a kernel or a library call reads or writes, once. Kernel launches: generated kernels and library "
            "calls. A kernel that is fused across layers counts for the layer that most of its results belong to. "
            "Several graphs are added up, each run once."
        )
    return "<footer>" + "".join(f"<p>{_text(line)}</p>" for line in lines) + "</footer>"


_META = """<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
"""

_STYLE = """:root {
  --page: #fcfcfd; --card: #ffffff; --ink: #16202c; --soft: #5b6878; --line: #e3e8ee; --code: #f3f5f8;
  --before: #cbd5df; --after: #0d7f6c; --good: #0b7261; --bad: #b4530a; --warn: #fff6ea; --warn-line: #f0c890;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e1319; --card: #161d26; --ink: #e4e9ef; --soft: #95a3b3; --line: #273240; --code: #1b2430;
    --before: #435164; --after: #35c9ab; --good: #46d3b6; --bad: #f0a35e; --warn: #231c12; --warn-line: #6b4c22;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem 3rem; max-width: 70rem; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
h1, h2, h3, p, ul, ol { margin: 0; padding: 0; }
ul, ol { list-style: none; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; letter-spacing: -.01em; margin-bottom: .8rem; }
h3 { font-size: .84rem; font-weight: 600; color: var(--soft); }
section { margin-top: 2.75rem; }
.mono, .module, .file, .name, pre, code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.eyebrow { font-size: .8rem; font-weight: 600; color: var(--after); letter-spacing: .02em; margin-bottom: .35rem; }
.facts { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin-top: .55rem; color: var(--soft); font-size: .9rem; }
.count { font-size: .84rem; font-weight: 400; color: var(--soft); margin-left: .35rem; letter-spacing: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr)); gap: .9rem; margin-top: 1.6rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .7rem; padding: 1rem 1.15rem 1.05rem; }
.card.wide { grid-column: span 2; }
.big {
  font-size: 2.15rem; font-weight: 650; line-height: 1.2; letter-spacing: -.03em; margin: .25rem 0 .2rem;
  font-variant-numeric: tabular-nums;
}
.of { font-size: 1.15rem; font-weight: 500; letter-spacing: 0; color: var(--soft); }
.good .big, td.good { color: var(--good); } .bad .big, td.bad { color: var(--bad); }
.same .big, td.same { color: var(--soft); }
.good .of, .bad .of { color: inherit; }
.small { font-size: .86rem; color: var(--soft); font-variant-numeric: tabular-nums; }
.small b { color: var(--ink); font-weight: 600; white-space: nowrap; }
.arrow { color: var(--soft); }
.meter { height: .4rem; border-radius: .2rem; background: var(--before); overflow: hidden; margin: .45rem 0 .45rem; }
.meter i { display: block; height: 100%; background: var(--after); }
.note {
  background: var(--warn); border: 1px solid var(--warn-line); border-radius: .7rem; padding: .8rem 1.1rem;
  margin-top: 1rem; font-size: .92rem; overflow-wrap: anywhere;
}
.empty { white-space: pre-line; padding: 1.2rem 1.3rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; font-size: .86rem; color: var(--soft); }
.charts { margin-top: .9rem; }
.key { display: inline-block; width: 1.5rem; height: .7rem; border-radius: .2rem; margin-right: .45rem; }
.key.before, .track .before { background: var(--before); }
.key.after, .track .after { background: var(--after); }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 2rem 3rem; }
.charts.single { grid-template-columns: 1fr; }
.chart h3 { margin-bottom: .55rem; }
.chart li {
  display: grid; grid-template-columns: minmax(5.5rem, 34%) 1fr 7rem; gap: 0 .8rem; align-items: center;
  min-height: 1.75rem; border-top: 1px solid var(--line);
}
.chart li:last-child { border-bottom: 1px solid var(--line); }
.name, .value { font-size: .78rem; white-space: nowrap; }
.name { overflow: hidden; text-overflow: ellipsis; direction: rtl; text-align: left; } /* cut off in front */
.name::before { content: "\\200e"; }
.track { position: relative; height: 1rem; }
.track i { position: absolute; left: 0; border-radius: .2rem; min-width: 1px; }
.track .before { top: 0; height: 1rem; } .track .after { top: .3rem; height: .4rem; }
.value { text-align: right; color: var(--soft); font-variant-numeric: tabular-nums; }
.value b { color: var(--ink); font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .55rem 1.2rem .55rem 0; border-top: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--soft); font-weight: 600; font-size: .82rem; border-top: 0; white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 1px solid var(--line); }
td.mono { font-size: .82rem; white-space: nowrap; }
.numbers { max-width: 44rem; font-variant-numeric: tabular-nums; }
.numbers td, .numbers thead th { text-align: right; white-space: nowrap; }
.numbers th:first-child { text-align: left; font-weight: 500; }
.file { color: var(--soft); font-size: .82rem; } .module { font-weight: 600; font-size: .84rem; }
.times { color: var(--after); font-weight: 600; font-size: .84rem; }
.activation { color: var(--after); }
td code { display: block; color: var(--soft); font-size: .78rem; margin-top: .2rem; overflow-wrap: anywhere; }
.numbers tr > :last-child { padding-right: 0; }
.sites td:last-child { min-width: 15rem; padding-right: 0; overflow-wrap: anywhere; }
.refusals { display: grid; gap: .9rem; }
article {
  background: var(--card); border: 1px solid var(--line); border-left: .25rem solid var(--bad); border-radius: .5rem;
  padding: .9rem 1.15rem 1rem; min-width: 0;
}
article .times { color: var(--bad); }
.place { font-size: .9rem; color: var(--soft); overflow-wrap: anywhere; } .place .module { color: var(--ink); }
pre {
  margin: .55rem 0 .6rem; padding: .55rem .8rem; background: var(--code); border-radius: .4rem; font-size: .84rem;
  overflow-x: auto;
}
.reason { overflow-wrap: anywhere; }
.hint { margin-top: .4rem; color: var(--soft); font-size: .9rem; overflow-wrap: anywhere; }
.muted { color: var(--soft); } .muted .module { font-weight: 500; } .muted p { font-size: .9rem; margin-bottom: .7rem; }
footer { margin-top: 3.2rem; padding-top: 1rem; border-top: 1px solid var(--line); }
footer p { color: var(--soft); font-size: .84rem; }
footer p + p { margin-top: .5rem; }
@media (max-width: 52rem) { .charts { grid-template-columns: 1fr; } }
@media (max-width: 36rem) {
  body { padding-top: 1.5rem; }
  h1 { font-size: 1.6rem; }
  .cards { grid-template-columns: 1fr 1fr; gap: .7rem; } .card { padding: .8rem .9rem; }
  .big { font-size: 1.6rem; } .of { font-size: 1rem; }
  .chart li { grid-template-columns: 1fr auto; padding: .4rem 0; }
  .numbers { font-size: .8rem; } .numbers th, .numbers td { padding-right: .5rem; }
  .numbers thead th { white-space: normal; font-size: .74rem; vertical-align: bottom; }
  .sites thead { display: none; } .sites tbody, .sites tr, .sites td { display: block; border: 0; padding: 0; }
  .sites tr { border-top: 1px solid var(--line); padding: .6rem 0 .7rem; }
  .sites tbody tr:last-child > * { border: 0; } .sites td + td { margin-top: .35rem; }
  .track { grid-row: 2; grid-column: 1 / -1; margin-top: .2rem; }
}
@media print { body { max-width: none; } article, .card, li { break-inside: avoid; } }
"""
