"""Pictures of results, drawn from their JSON: ratios of every case, a roofline. Needs matplotlib (extra ``bench``)."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS, THEIRS, LINE = "#2563eb", "#c3c9d1", "#6b7280"
BLUES = (OURS, "#0ea5e9", "#7c3aed", "#0f766e", "#db2777")
BASE = "compile"
FEW_ROUNDS = 50  # the ratios of a case with fewer are noise, and not drawn
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

    cases = [case for case in cases if case["rounds"] >= FEW_ROUNDS] or cases
    figure = Figure(figsize=(8.5, 0.6 * len(cases) + 1.6))
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
    ax.set_yticks(range(len(cases)), [case["name"] for case in cases], fontsize=11)
    ax.invert_yaxis()
    ax.grid(axis="x", color=THEIRS, linewidth=0.5)
    ax.set_xlabel("time ÷ torch.compile's: left is faster", fontsize=11)
    ax.legend(fontsize=10, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.6 / (0.6 * len(cases))))
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
