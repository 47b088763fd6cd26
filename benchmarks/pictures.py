"""Pictures of results, drawn from their JSON: ratios of every case, a roofline. Needs matplotlib (extra ``bench``)."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS, THEIRS, LINE = "#2563eb", "#c3c9d1", "#6b7280"
BLUES = (OURS, "#0ea5e9", "#7c3aed", "#0f766e", "#db2777")
BASE = "compile"
MARKS = "osD^vPX*<>ph"


def draw(result: dict[str, Any], out: Path) -> list[Path]:
    """Ratios beside ``out`` (``.png``), and a roofline (``_roofline.png``); returns what was written.

    Raises:
        ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    cases = [c for c in result["cases"] if any("ms" in way for way in c["ways"].values())]
    if not cases:
        return []
    written = []
    for suffix, picture in (("", ratios), ("_roofline", roofline)):
        figure = picture(result, cases)
        path = out.with_name(f"{out.stem}{suffix}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100, bbox_inches="tight", metadata={"Software": None})
        written.append(path)
    return written


def ratios(result: dict[str, Any], cases: list[dict[str, Any]]) -> Any:
    """A line a case: each way's time to torch.compile's (the first way's, where that was not run).

    Ours are the medians of the ratios within rounds, with their 95 % intervals; of the others, the medians' ratios.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 0.42 * len(cases) + 1.6))
    ax = figure.subplots()
    known = list(dict.fromkeys(name for case in cases for name in case["ways"]))
    ours = [name for name in known if any(name in case["ours"] for case in cases)]
    for number, name in enumerate((*(n for n in known if n not in ours), *ours)):
        xs, ys, spread = [], [], []
        for y, case in enumerate(cases):
            timed = {n: way for n, way in case["ways"].items() if "ms" in way}
            base = BASE if BASE in timed else next(iter(timed))
            if name not in timed or name == base:
                continue
            ratio = timed[name].get("ratio_to", {}).get(base)
            median = ratio["median"] if ratio else timed[name]["ms"]["median"] / timed[base]["ms"]["median"]
            xs.append(median)
            ys.append(y + 0.5 * (number / len(known) - 0.5))
            spread.append([abs(end - median) for end in ratio["interval"]] if ratio else [0.0, 0.0])
        if xs:
            shade = BLUES[ours.index(name) % len(BLUES)] if name in ours else LINE
            ax.errorbar(xs, ys, xerr=list(zip(*spread, strict=True)), fmt=MARKS[number % len(MARKS)], color=shade,
                        markersize=5, linewidth=1, label=name)  # fmt: skip
    ax.axvline(1, color="black", linewidth=1)
    ax.set_yticks(range(len(cases)), [case["name"] for case in cases], fontsize=9)
    ax.invert_yaxis()
    ax.grid(axis="x", color=THEIRS, linewidth=0.5)
    ax.set_xlabel(f"time to that of {BASE}: left is faster", fontsize=9)
    ax.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.55 / (0.42 * len(cases))))
    ax.set_title(f"{result['benchmark']}, {result['device']['name']}", fontsize=10)
    return figure


def roofline(result: dict[str, Any], cases: list[dict[str, Any]]) -> Any:
    """Where there are matrix products: FLOP a second over FLOP a byte. Else bytes a second over bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5))
    ax = figure.subplots()
    copy = result["ceilings"]["copy_bytes_per_s"]
    products = [c for c in cases if c["work"]["flops"]]
    for mark, name in zip(MARKS * 2, dict.fromkeys(n for c in cases for n in c["ways"]), strict=False):
        points = []
        for case in products or cases:
            if "ms" not in case["ways"].get(name, {}):
                continue
            seconds = 1e-3 * case["ways"][name]["ms"]["median"]
            flops, nbytes = case["work"]["flops"], case["work"]["bytes"]
            points.append((flops / nbytes, flops / seconds) if products else (nbytes, nbytes / seconds))
        if points:
            ours = any(name in c["ours"] for c in cases)
            xs, ys = zip(*points, strict=True)
            ax.scatter(xs, ys, marker=mark, label=name, color=OURS if ours else LINE, alpha=0.8, s=22)
    if products:
        peaks = result["ceilings"]["matmul_flop_per_s"]
        used = {c["dtype"] for c in products} & peaks.keys() or peaks.keys()
        low, high = ax.get_xlim()
        for dtype in sorted(used):
            line = [max(low, 0.1), peaks[dtype] / copy, max(high, 2 * peaks[dtype] / copy)]
            ax.plot(line, [min(peaks[dtype], x * copy) for x in line], color=LINE, linewidth=1)
            ax.text(line[-1], peaks[dtype], f" {dtype}", fontsize=7, va="center")
        ax.set_xlabel("FLOP a byte (matrix products; the least bytes)")
        ax.set_ylabel("FLOP a second")
    else:
        ax.axhline(copy, color=LINE, linewidth=1)
        ax.text(ax.get_xlim()[0], copy, " a large copy", fontsize=7, va="bottom")
        ax.set_xlabel("bytes read and written, at least")
        ax.set_ylabel("bytes a second")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.legend(fontsize=7, ncols=2)
    ax.set_title(f"{result['benchmark']}: {result['device']['name']}, against its own copy and products", fontsize=9)
    return figure


def on_paper(result: dict[str, Any]) -> Any:
    """``bench on-paper``'s: instructions an element of every operator, and what blocks keep for backward."""
    from matplotlib.figure import Figure

    panels = (("forward", "plain", "ours-off"), ("backward", "plain", "ours-off"), ("backward", "budget", "ours-free"))
    titles = ("forward", "backward", "backward and the value again")
    operators, blocks = result["operators"], result["blocks"]
    figure = Figure(figsize=(15, 0.26 * max(len(operators), 4 * len(blocks) * 0.8, 4) + 1.4))
    axes = figure.subplots(1, 4, width_ratios=(1, 1, 1, 1.1))
    names = [row["name"] for row in operators]
    for i, (ax, (phase, theirs, ours), title) in enumerate(zip(axes, panels, titles, strict=False)):
        for way, colour, shift in ((theirs, THEIRS, -0.2), (ours, OURS, 0.2)):
            values = [row["ways"][way][phase]["instructions"] for row in operators]
            ax.barh([y + shift for y in range(len(names))], values, height=0.4, color=colour, label=way)
        ax.set_yticks(range(len(names)), names if i == 0 else [""] * len(names), fontsize=7)
        ax.set_title(title, fontsize=8)
        ax.margins(y=0.01)
        ax.legend(fontsize=7)
        ax.invert_yaxis()
    rows = [(row["name"], way, f["saved_bytes"] / 2**20) for row in blocks for way, f in row["ways"].items()]
    ax = axes[-1]
    relative = [mib / max(m for n, w, m in rows if n == name and w == "plain") for name, _, mib in rows]
    ax.barh(range(len(rows)), relative, color=[OURS if way.startswith("ours") else THEIRS for _, way, _ in rows])
    for y, (_, _, mib) in enumerate(rows):
        ax.text(0.01, y, f"{mib:.0f} MiB", va="center", fontsize=6)
    labels = [f"{name}  {way}" if way == "plain" else way for name, way, _ in rows]
    ax.set_yticks(range(len(rows)), labels, fontsize=6)
    ax.yaxis.tick_right()
    ax.set_title("kept for backward, plain torch.compile = 1", fontsize=8)
    ax.invert_yaxis()
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    ax.margins(y=0.01)
    what = "instructions for each element of the result, and bytes kept"
    figure.suptitle(f"{result['gpu']} ({result['arch']}) on paper, {versions}: {what}", fontsize=9)
    figure.tight_layout()
    return figure


def levels(name: str, case: dict[str, Any]) -> Any:
    """Of ``plans``: a step's peak at each memory level, and its least time over that with upstream's choice.

    What the figures do not tell apart stands in one bar.
    """
    from matplotlib.figure import Figure

    plan, (batch, length) = case["plans"][0], case["tokens"]
    bars: dict[tuple[int, float], list[str]] = {}
    for row in plan["levels"]:
        figures = round(row["peak"] / 2**30), round(row["seconds"] / plan["off_seconds"] - 1, 3)
        bars.setdefault(figures, []).append(row["level"])
    rows = sorted(bars, reverse=True)
    theirs = {"off": "PyTorch's own choice", "checkpoint": "checkpoint every layer"}
    figure = Figure(figsize=(7.5, 0.42 * len(rows) + 1.1), layout="constrained")
    ax = figure.subplots()
    names = [theirs.get(bars[bar][0], "memory=" + " or ".join(f'"{one}"' for one in sorted(bars[bar]))) for bar in rows]
    ax.barh(names, [peak for peak, _ in rows], color=[THEIRS if bars[bar][0] in theirs else OURS for bar in rows])
    for label, (peak, cost) in zip(names, rows, strict=True):
        text = f"{peak:.0f} GiB" + f", step {100 * cost:+.1f} %".replace("-", "−") * bool(cost)
        ax.annotate(text, (peak, label), (5, 0), textcoords="offset points", va="center", fontsize=11)
    ax.set_xlim(0, 1.35 * max(peak for peak, _ in rows))
    ax.invert_yaxis()
    ax.tick_params(labelsize=11)
    ax.set_xlabel("peak memory, GiB; least time of the step")
    title = f"a training step of {name}, {batch} × {length:,} tokens, {plan['gpu']}, on paper"
    figure.suptitle(title, fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    return figure
