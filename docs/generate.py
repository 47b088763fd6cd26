"""Write generated parts of docs/: operators.md from the schemas, command-line.md from the parser, and tables of other
pages from docs/reasons.json and the results in benchmarks/results.

python docs/generate.py           # after a schema, an option or a result has changed
python docs/generate.py --check   # exit status 1 if a page is not up to date
"""

from __future__ import annotations

import csv
import inspect
import io
import itertools
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
NOTE = "<!-- docs/generate.py writes this page. -->\n"

# ---- operators.md ----------------------------------------------------------------------------------------------------

INTRODUCTION = """\
`torch_fused_ops.functional` (`FF` in these pages) has a typed function for each operator and for each common use of it.
`torch.ops.fused.*` are the operators themselves. `torch_fused_ops.ops` is the same object, with types. In eager mode
on a GPU, a call is one kernel forward and one pass backward. On a CPU, Inductor compiles its kernel at the first call
on 131,072 elements or more (from torch 2.13 on). Under `torch.compile` it is an ordinary node.

| | |
|---|---|
| results | new, contiguous, in the first tensor's dtype; arithmetic in float32 (or float64), rounded once |
| inputs | any strides; float16, bfloat16, float32, float64, also mixed; sizes 0 and 1; one device |
| errors | `ValueError` or `TypeError` with the argument, its value and the accepted values |
| gradients | any order, forward mode, `torch.func`; `memory="fp8"` has first derivatives |

```python
import torch
from torch_fused_ops import functional as FF, ops

x, bias = torch.randn(4, 16), torch.randn(16)
FF.bias_gelu(x, bias, approximate="tanh")
ops.bias_act(x, bias, None, "gelu_tanh")  # the same: torch.ops.fused.bias_act
```
"""


def _first_line(fn: Callable[..., object] | None) -> str:
    return (inspect.getdoc(fn) or "").partition("\n")[0].replace("``", "`") if fn else ""


def _schemas() -> list[Any]:
    import torch

    import torch_fused_ops

    packets = [getattr(torch_fused_ops.ops, name) for name in sorted(dir(torch.ops.fused))]
    return [p.default._schema for p in packets if isinstance(p, torch._ops.OpOverloadPacket)]


def operators() -> str:
    """The page: functions and operators, from their signatures, docstrings and schemas."""
    import torch_fused_ops as tfo
    from torch_fused_ops import activations, functional
    from torch_fused_ops.declaration import OPERATORS
    from torch_fused_ops.operators import reference

    schemas = _schemas()
    lines = ["# Operators", "", NOTE, INTRODUCTION, "## Functions", ""]
    lines += ["`(…)` stands for the arguments of `bias_act`, `glu` or `bias_glu`.", ""]
    for name in sorted(n for n in functional.__all__ if callable(getattr(functional, n))):
        fn = getattr(functional, name)
        called = f"{name}.apply" if isinstance(fn, type) else name
        signature = inspect.signature(fn.apply if isinstance(fn, type) else fn)
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        signature = signature.replace(parameters=plain, return_annotation=signature.empty)
        text = re.sub(r" (?:Arguments|Otherwise)\b.*", "", _first_line(fn))
        shared = text != _first_line(fn)  # another row has the arguments
        lines.append(f"* `{called}{'(…)' if shared else signature}`: {text}")
    lines += [
        "",
        "## Operators",
        "",
        "Schemas, as `torch.ops.fused.<name>.default._schema` has them.",
        "",
    ]
    for schema in schemas:
        name = schema.name.removeprefix("fused::")
        if name in OPERATORS:
            lines.append(f"* `{schema}`: {_first_line(getattr(reference, name))}")
    lines += [
        "",
        "`torch.ops.fused` also has derivatives, and the parts of float8 storage and GEMMs.",
    ]
    lines += ["A `_backward` takes the gradient, forward's arguments, and a list of the requested gradients."]
    lines += [
        "",
        "## Activations",
        "",
        f"`{' '.join(activations.names())}`. `torch_fused_ops.register_activation` adds more:",
        "",
        f"> {_first_line(tfo.register_activation)}",
        "",
    ]
    return "\n".join(lines)


# ---- torch_fused_ops/ops.pyi -----------------------------------------------------------------------------------------

STUB = """\
# Written by `python docs/generate.py` from the operators' schemas; change that, not this file.

from collections.abc import Sequence

from torch import Tensor
from torch import dtype as ScalarType

"""


def _annotation(schema_type: str) -> str:
    """Translate a schema's type to Python: ``Tensor?``, ``Tensor(a)``, ``bool[3]``."""
    name = re.match(r"\w+", schema_type)[0]  # type: ignore[index]
    return f"Sequence[{name}]" if schema_type.endswith("]") else name + " | None" * schema_type.endswith("?")


def stub() -> str:
    """The signatures of ``torch.ops.fused`` for type checkers, formatted as ruff does."""
    lines = [STUB]
    for schema in _schemas():
        arguments, results = str(schema).partition("(")[2].split(") -> ")
        types = [argument.partition(" ")[0] for argument in arguments.split(", ")]
        lines.append(f"def {schema.name.removeprefix('fused::')}(\n")
        for argument, type_text in zip(schema.arguments, types, strict=True):
            default = f" = {argument.default_value!r}".replace("'", '"') if argument.has_default_value() else ""
            lines.append(f"    {argument.name}: {_annotation(type_text)}{default},\n")
        result_type = ", ".join(_annotation(result) for result in results.strip("()").split(", "))
        lines.append(f") -> {f'tuple[{result_type}]' if ',' in result_type else result_type}: ...\n")
    return "".join(lines)


# ---- recognition.md --------------------------------------------------------------------------------------------------

# Marks around a generated part of a page. The first names the part's source.
BEGIN, END = "<!-- docs/generate.py: {} -->\n", "<!-- end -->\n"
REASONS = BEGIN.format("docs/reasons.json")
PLANS = BEGIN.format("benchmarks/results/plans.json")
ON_PAPER = BEGIN.format("benchmarks/results/on_paper.json")
STEPS = BEGIN.format("benchmarks/results/training_steps.json")
CPU = BEGIN.format("benchmarks/results/pointwise_cpu.json")
FP8_RECIPES = BEGIN.format("benchmarks/results/fp8_recipes.json")
COVERAGE = BEGIN.format("benchmarks/results/coverage.jsonl")
RECIPE_TABLE = BEGIN.format("torch_fused_ops/families/float8/recipes.py")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(*cells: object) -> str:
    return f"| {' | '.join(_cell(str(cell)) for cell in cells)} |"


def recognition() -> str:
    """The page, with a list for each category of reasons."""
    from torch_fused_ops.graphs.reasons import Category, Kind

    reasons = json.loads((DOCS / "reasons.json").read_text(encoding="utf-8"))
    lines = []
    for category in Category:
        heading = reasons["categories"][category.name]
        lines += [f"### {heading['title']}", "", *([heading["introduction"], ""] if heading["introduction"] else [])]
        for kind in Kind:
            if kind.category is category:
                entry = reasons["kinds"][kind.name]
                means = entry["means"] or "; ".join(entry["texts"])  # a report adds the hint itself
                lines.append(f'* <a id="{kind.row.partition("#")[2]}"></a>`{kind.name}`: {means}')
        lines.append("")
    return _between("recognition.md", REASONS, lines)


def _between(page: str, mark: str, lines: list[str], text: str | None = None) -> str:
    """The page (or this text of it), with these lines between its two marks."""
    before, begin, marked = (text or (DOCS / page).read_text()).partition(mark)
    _, end, after = marked.partition(END)
    return "\n".join([before + begin, *lines, end + after])


# ---- plan.md ---------------------------------------------------------------------------------------------------------


def plan() -> str:
    """The page, with each model's peak and time at each level, and the levels chosen for each limit."""
    from torch_fused_ops.planner.pieces import CHECKPOINTS
    from torch_fused_ops.planner.setup import LEVELS
    from torch_fused_ops.reports.text import size

    every = json.loads((RESULTS / "plans.json").read_text())
    cases = {name: case for name, case in every.items() if name != MOVED}
    plans = [case["plans"][0] for case in cases.values()]
    levels = [level for level in (*LEVELS, *CHECKPOINTS) if any(_at_level(plan, level) for plan in plans)]
    columns = [
        [f"{case['tokens'][0]} × {case['tokens'][1]}", first["gpu"].removeprefix("NVIDIA ")]
        + [size(first["parameters"]), size(first["optimizer_state"])]
        + [_peak_and_time(_at_level(first, level), first["off_seconds"]) for level in levels]
        for case, first in zip(cases.values(), plans, strict=True)
    ]
    names = ["tokens", "GPU", "parameters", "optimizer state", *levels]
    lines = [f"| | {' | '.join(cases)} |", f"|---|{'---|' * len(cases)}"]
    lines += [f"| {' | '.join(cells)} |" for cells in zip(names, *columns, strict=True)]
    lines += ["", "| | limit | | peak with the optimizer's step | time | levels chosen |", "|---|---|---|---|---|---|"]
    for name, case in every.items():
        limits = list(zip(case["limits"], case["plans"], strict=True))
        unfit = [limit for limit, planned in limits if not planned["fits"]]
        for limit, planned in limits:
            if limit in unfit[:-1]:  # one such row is enough
                continue
            verdict = "fits" if planned["fits"] else f"{size(planned['missing'])} missing"
            cells = [name, limit, verdict, size(planned["peak_bytes"])]
            cells += [_change(planned["seconds"] / planned["off_seconds"]), _runs(planned["choices"])]
            lines.append(f"| {' | '.join(cells)} |")
    return _between("plan.md", PLANS, [*lines, ""])


def _at_level(plan: dict[str, Any], level: str) -> dict[str, Any] | None:
    return next((row for row in plan["levels"] if row["level"] == level), None)


def _peak_and_time(row: dict[str, Any] | None, off: float) -> str:
    from torch_fused_ops.planner.report import duration
    from torch_fused_ops.reports.text import size

    if row is None:
        return ""
    time = duration(row["seconds"]) if row["level"] == "off" else _change(row["seconds"] / off)
    return f"{size(row['peak'])}; {time}"


def _largest(largest: dict[str, Any]) -> list[str]:
    """The largest batch or sequence at each level."""
    from torch_fused_ops.planner.setup import LEVELS
    from torch_fused_ops.reports.text import size

    dimension = largest["dimension"]
    off = next(row["size"] for row in largest["rows"] if row["level"] == "off")
    heads = f"{dimension}, at most", "÷ off", "peak", f"{dimension} a second, at most"
    lines = [f"| {largest['capacity']}, every MLP at | {' | '.join(heads)} |", "|---|---|---|---|---|"]
    for row in sorted(largest["rows"], key=lambda row: LEVELS.index(row["level"])):
        rate = f"{row['size'] / row['seconds']:,.0f}" if row["size"] else ""
        lines.append(f"| {row['level']} | {row['size']} | {row['size'] / off:.2f} | {size(row['peak'])} | {rate} |")
    if largest["stopped"]:
        lines += ["", f"With more the model does not run: {dimension} {largest['stopped']}."]
    return lines


def _runs(choices: dict[str, str]) -> str:
    """Levels of MLPs in their order: "free ×12, input ×4"."""
    runs = [(level, len(list(run))) for level, run in itertools.groupby(choices.values())]
    return ", ".join(f"{level} ×{count}" for level, count in runs) or "none to choose"


# ---- README.md -------------------------------------------------------------------------------------------------------

MOVED = "Llama-3-8B, 50 GB/s to the host"  # the plan with saved tensors on the host
SAVES = {
    "off": "as plain `torch.compile`",
    "free": "all except the activation's result",
    "fp8": "the same, the activation's inputs in 8 bits",
    "input": "only the MLP's input",
    "input+attention": "the same, and of attention only its input and result",
    "checkpoint": "only the layer's input",
    "checkpoint, attention saved": "the layer's input and attention's result",
}


def _change(ratio: float) -> str:
    """A ratio of times as a change: "+0.4 %"."""
    return f"{100 * (ratio - 1):+.1f} %".replace("-0.0", "+0.0").replace("-", "−")


def readme() -> str:
    """The page, with a plan's peaks, and bytes that PyTorch's memory budget saves."""
    from torch_fused_ops.planner.setup import FRAGMENTATION

    every = json.loads((RESULTS / "plans.json").read_text())
    plan = every["Llama-3-8B, 8 GPUs"]["plans"][0]

    def line(name: str, saves: str, peak: float, reserved: float, seconds: float, off: float) -> str:
        without = reserved * (1 + FRAGMENTATION[False]) / (1 + FRAGMENTATION[True])
        sizes = " | ".join(f"{nbytes / 2**30:.0f} GiB" for nbytes in (peak, reserved, without))
        return f"| {name} | {saves} | {sizes} | {_change(seconds / off)} |"

    lines = [
        "| every MLP at | saved for each MLP | peak | reserved, expandable segments | reserved without | time |",
        "|---|---|---|---|---|---|",
    ]
    for row in plan["levels"]:
        if row["level"] in SAVES:
            name = {
                "free": '`"free"`, the default',
                "input+attention": '`"input"`, with `attention="input"`',
                "checkpoint": "a checkpoint around each layer",
                "checkpoint, attention saved": "a selective checkpoint",
            }.get(row["level"], f'`"{row["level"]}"`')
            peak = max(row["peak"], plan["optimizer_peak"])
            figures = peak, row["reserved"], row["seconds"], plan["off_seconds"]
            lines.append(line(name, SAVES[row["level"]], *figures))
    ((moved,), (batch, length)) = every[MOVED]["plans"], every[MOVED]["tokens"]
    copies = moved["offloaded"]
    name = f"one H200, {batch} × {length:,} tokens, [offload](docs/offload.md), not run on a GPU"
    saves = f'`"fp8"`; {copies["nbytes"] / 2**30:.0f} GiB on the host, {copies["bandwidth"] / 1e9:g} GB/s'
    lines.append(line(name, saves, *(moved[key] for key in ("peak_bytes", "reserved_bytes", "seconds", "off_seconds"))))
    page = _between("../README.md", PLANS, [*lines, ""])
    return _between("../README.md", ON_PAPER, [*_budget(), ""], page)


def _budget() -> list[str]:
    """Three cases in which the levels and PyTorch's memory budget differ."""
    ways = ("plain", "budget", "ours-free", "ours-fp8")
    blocks = {block["name"]: block["ways"] for block in json.loads((RESULTS / "on_paper.json").read_text())["blocks"]}
    saved = [f"{_saved(blocks['GELU MLP 8192 4096→16384'][way])} MiB" for way in ways]
    text = (DOCS / "memory.md").read_text(encoding="utf-8").partition('## `"tiled"`')[2]
    peaks = [int(n) for n in re.findall(r"^\| [^|]+ \| \d+ \| (\d+) \| \d+ \|", text, re.M)[:4]]
    t5 = blocks["T5 v1.1 XL block 16×512"]
    times = [f", {_change(_seconds(t5[way]) / _seconds(t5['plain']))}" if way != "plain" else "" for way in ways]
    t5_cells = [f"{int(_saved(t5[way])):,} MiB{time}" for way, time in zip(ways, times, strict=True)]
    rows = [
        ("saved by a GELU MLP, 8,192 tokens, 4096 → 16384", *saved),
        ("peak of a SwiGLU MLP without weights, 65,536 tokens, 4096 → 14336", *(f"{peak:,} MiB" for peak in peaks)),
        ("saved by a T5 v1.1 XL block, whose attention the budget recomputes; its time", *t5_cells),
    ]
    head = ['| | plain `torch.compile` | budget 0.99 | `"free"` | `"fp8"` |', "|---|---|---|---|---|"]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows)]


def _saved(figures: dict[str, Any]) -> str:
    return f"{figures['saved_bytes'] / 2**20:.0f}"


def _seconds(figures: dict[str, Any]) -> float:
    return float(sum(figures[phase]["floor_us"] for phase in ("forward", "backward")))


# ---- benchmarks.md ---------------------------------------------------------------------------------------------------


def _on_a_cpu() -> list[str]:
    """A row for each operator: minima divided by PyTorch's, in float32 and bfloat16, as ranges over the sizes."""
    times: dict[str, dict[tuple[Any, ...], float]] = {}
    for case in json.loads((RESULTS / "pointwise_cpu.json").read_text())["cases"]:
        facts = case["facts"]
        for way, result in case["ways"].items():
            if "ms" in result:
                key = facts["kind"], way, case["dtype"], facts["tokens"], facts["width"]
                times.setdefault(facts["operator"], {})[key] = result["ms"]["minimum"]

    def cell(row: dict[tuple[Any, ...], float], kind: str, ours: str, plain: str) -> str:
        ranges = []
        for dtype in ("float32", "bfloat16"):
            sizes = [key[3:] for key in row if key[:3] == (kind, ours, dtype) and (kind, plain, *key[2:]) in row]
            ratios = sorted(f"{row[(kind, ours, dtype, *s)] / row[(kind, plain, dtype, *s)]:.2f}" for s in sizes)
            ranges += ["–".join(dict.fromkeys([ratios[0], ratios[-1]]))] if ratios else []
        return ", ".join(ranges)

    compiled, eager = ("fused", "compile"), ("operators", "eager")
    lines = ["| float32, bfloat16 | compiled, both | eager, forward | eager, backward | eager, both |"]
    lines.append("|---|---|---|---|---|")
    for name, row in times.items():
        cells = [cell(row, "both", *compiled), *(cell(row, kind, *eager) for kind in ("forward", "backward", "both"))]
        lines.append(_row(name, *cells))
    calls = [(n, *(cell(row, k, *eager) for k in ("call", "call with gradients"))) for n, row in times.items()]
    if any(forward for _, forward, _ in calls):
        lines += ["", "| eager, 512 elements | forward | both |", "|---|---|---|", *(_row(*call) for call in calls)]
    return [*lines, ""]


def benchmarks() -> str:
    """The page, with the times on a CPU."""
    return _between("benchmarks.md", CPU, _on_a_cpu())


# ---- fp8.md ----------------------------------------------------------------------------------------------------------


def fp8() -> str:
    """The page, with our recipes and torchao's recipes."""
    result = json.loads((RESULTS / "fp8_recipes.json").read_text())
    page = _between("fp8.md", FP8_RECIPES, _kernels_and_bytes(result))
    return _between("fp8.md", RECIPE_TABLE, _recipes(), page)


def _kernels_and_bytes(result: dict[str, Any]) -> list[str]:
    """Every recipe, then experts. The page says why the tables have no times."""
    columns = ("kernels", "forward, MiB", "backward, MiB", "saved, MiB")
    lines = [_row("MLP, for an H200", "", *columns), "|---|---|---|---|---|---|"]
    for case in result["cases"]:
        for way, figures in case["ways"].items():
            name = f"{case['mlp']}, {case['hidden']}" if way == "plain" else ""
            lines.append(_row(name, _policy(way), *_counted(figures)))
    lines += ["", _row("experts, 8 × 14336", *columns), "|---|---|---|---|---|"]
    return [*lines, *(_row(_policy(way), *_counted(f)) for way, f in result["experts"]["ways"].items()), ""]


def _policy(way: str) -> str:
    return way if way == "plain" or "torchao" in way else f'`gemm="{way}"`'


def _counted(figures: dict[str, Any]) -> list[str]:
    """The counts of kernels and bytes."""
    if "unavailable" in figures:
        return ["unavailable"] * 4
    sides = [figures[side] for side in ("forward", "backward")]
    mib = [nbytes / 2**20 for nbytes in (*(side["bytes"] for side in sides), figures["saved_bytes"])]
    return [" + ".join(str(side["kernels"]) for side in sides), *(f"{size:.0f}" for size in mib)]


def _recipes() -> list[str]:
    from torch_fused_ops.families.float8.recipes import RECIPES, Block

    def block(b: Block) -> str:
        return {(1, None): "row", (None, None): "tensor"}.get(b, f"{b.rows} × {b.columns}")

    heads = ("`gemm=`", "block of input and gradient", "of weight", "of transposed weight", "weight gradient",
             "saved input", "in and out features", "NVIDIA", "AMD", "experts")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines.append(
        f"| `\"bf16\"`, the default {'| – ' * 3}| the model's dtype | the model's dtype | any | any | any | any |"
    )
    for name, (scaling, wgrad) in RECIPES.items():
        sm = ", ".join(f"sm_{major}{minor}" for major, minor in scaling.sm)
        cuda = ".".join(map(str, scaling.cuda))
        cells = [f'`"{name}"`', *map(block, (scaling.data, scaling.weight, scaling.weight_t))]
        cells += ["float8", "float8"] if wgrad else ["the model's dtype", "the model's dtype"]
        cells += [f"multiples of {scaling.multiple}", f"{sm}; CUDA {cuda}", ", ".join(scaling.amd) or "none"]
        cells += [", ".join(f"sm_{major}{minor}" for major, minor in scaling.grouped) or "none"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


# ---- memory.md -------------------------------------------------------------------------------------------------------


WAYS = {
    "plain": "plain",
    "budget": "budget 0.99",
    "ours-free": '`"free"`, the default',
    "ours-fp8": '`"fp8"`',
    "ours-input": '`"input"`',
    "ours-input+attention": '`"input"`, `attention="input"`',
}


def memory() -> str:
    """The page, with blocks at each level."""
    lines = [f"| saved, MiB; step | {' | '.join(WAYS.values())} |", f"|---|{'---|' * len(WAYS)}"]
    for block in json.loads((RESULTS / "on_paper.json").read_text())["blocks"]:
        figures = [block["ways"][way] for way in WAYS]
        plain = _seconds(figures[0])
        cells = [_saved(each) + f"; {_change(_seconds(each) / plain)}" * (each is not figures[0]) for each in figures]
        lines.append(f"| {block['name'].replace('GELU MLP', 'GELU (tanh) MLP')} | {' | '.join(cells)} |")
    return _between("memory.md", ON_PAPER, [*lines, ""])


# ---- paper-and-devices.md --------------------------------------------------------------------------------------------


def paper_and_devices() -> str:
    """The page, with published peaks of training steps beside planned ones."""
    with open(RESULTS / "training_steps.csv", encoding="utf-8") as file:
        published = {row["id"]: row for row in csv.DictReader(file)}
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    ratios: dict[str, list[float]] = {}
    for row in json.loads((RESULTS / "training_steps.json").read_text()):
        setup, expandable = published[row["id"]], row["expandable_segments"] == "yes"
        figure = "reserved" if row["what"] == "max reserved" else "allocated"
        segments = ", expandable segments" if expandable else ", without expandable segments"
        summarized = f"max {figure}{segments}" if figure == "reserved" else "max allocated or active"
        ratios.setdefault(summarized, []).append(row["predicted"] / row["measured"])
        key = setup["source"], f"{setup['gpus']}×{setup['device']}, {setup['model']}"
        pairs = groups.setdefault(key, {"reserved": [], "allocated": []})[figure]
        pairs.append(f"{row['predicted']:.2f}/{row['measured']:.2f}")
    lines = ["| published figure | rows | within 5 % | median ratio | range |", "|---|---|---|---|---|"]
    for name, values in sorted(ratios.items()):
        within, median = sum(abs(ratio - 1) <= 0.05 for ratio in values), statistics.median(values)
        lines.append(f"| {name} | {len(values)} | {within} | {median:.3f} | {min(values):.2f} to {max(values):.2f} |")
    lines += ["", "Planned/published GiB of each row:", ""]
    lines += ["| source | GPUs, model | max reserved | max allocated or active |", "|---|---|---|---|"]
    for key, figures in groups.items():
        lines.append(f"| {' | '.join([*key, *map(', '.join, figures.values())])} |")
    return _between("paper-and-devices.md", STEPS, [*lines, ""])


# ---- largest-batch.md ------------------------------------------------------------------------------------------------


def largest_batch() -> str:
    """The page, with the largest batch of GPT-2 at each level."""
    case = json.loads((RESULTS / "plans.json").read_text())["GPT-2"]
    return _between("largest-batch.md", PLANS, [*_largest(case["largest"]), ""])


# ---- coverage.md -----------------------------------------------------------------------------------------------------


def _captured() -> list[dict[str, Any]]:
    results = [json.loads(line) for line in (RESULTS / "coverage.jsonl").read_text(encoding="utf-8").splitlines()]
    return sorted(results, key=lambda result: result["architecture"])


def coverage() -> str:
    """The page, with the sites of all architectures."""
    from torch_fused_ops.benchmarks.laboratory.coverage import MODES, OUTCOMES, outcome, sites_of

    results = _captured()
    built = [result for result in results if "modes" in result]
    counts = {mode: Counter(outcome(s) for r in built for s in sites_of(r, mode)) for mode in MODES}
    total = sum(counts.values(), Counter())
    outcomes = [set(map(outcome, sites_of(result))) for result in built]
    share = {
        name: f"{100 * n['fused'] / (n['fused'] + n['not fused']):.1f} %" for name, n in [*counts.items(), ("", total)]
    }
    architectures: dict[str, dict[str, int]] = {}
    for result in built:
        for site in sites_of(result):
            if outcome(site) == "not fused":
                by_name = architectures.setdefault(site["reason"], {})
                by_name[result["architecture"]] = by_name.get(result["architecture"], 0) + 1
    versions = results[0]["versions"]
    lines = [
        "| | |",
        "|---|---|",
        _row(f"architectures in transformers {versions['transformers']}", len(results)),
        _row(f"built and run with torch {versions['torch']}, without downloads or more packages", len(built)),
        _row("with MLP sites", sum(map(bool, outcomes))),
        _row("with all MLP sites fused", sum(bool(each) and "not fused" not in each for each in outcomes)),
        _row("MLP sites, in training and evaluation together", total["fused"] + total["not fused"]),
        _row("fused", f"**{total['fused']}, {share['']}**"),
        _row("not an MLP, such as a gate on attention's output", total["not an MLP"]),
        "",
        _row("mode", *OUTCOMES, "fused, of the MLP sites"),
        "|---|---|---|---|---|",
        *(_row(mode, *(counts[mode][o] for o in OUTCOMES), share[mode]) for mode in MODES),
        "",
        "## Not fused",
        "",
        "[Reasons](recognition.md) explains each.",
        "",
        _row("sites", "architectures", "reason"),
        "|---|---|---|",
    ]
    for reason, names in sorted(architectures.items(), key=lambda item: -sum(item[1].values())):
        lines.append(_row(sum(names.values()), ", ".join(names), reason))
    return _between("coverage.md", COVERAGE, [*lines, ""])


def coverage_rows() -> str:
    """A row for each architecture: its fused sites and the reasons for the others, or the first error."""
    from torch_fused_ops.benchmarks.laboratory.coverage import MODES, outcome, sites_of

    rows = [["architecture", *MODES, "fused as, or reason"]]
    for result in _captured():
        if "error" in result:
            rows.append([result["architecture"], "", "", f"not built: {result['error'].split(' | ')[0][:120]}"])
            continue
        fused = []
        for mode in MODES:
            counts, error = Counter(map(outcome, sites_of(result, mode))), result["modes"][mode].get("error")
            fused.append(
                error.split(":")[0] if error else f"{counts['fused']} of {counts['fused'] + counts['not fused']}"
            )
        sites = sorted(sites_of(result), key=lambda site: not site["op"])
        texts = (f"`{s['op'].removeprefix('fused::')}` {s['activation']}" if s["op"] else s["reason"] for s in sites)
        rows.append([result["architecture"], *fused, "; ".join(dict.fromkeys(texts))])
    csv.writer(text := io.StringIO(), lineterminator="\n").writerows(rows)
    return text.getvalue()


# ---- command-line.md -------------------------------------------------------------------------------------------------

COMMAND_LINE = """\
```
python -m torch_fused_ops COMMAND …
```

`explain`, `plan`, `verify` and `audit` take `MODULE:CALLABLE`. They call it without arguments, and it returns
`(model, args)` or `(model, args, kwargs)`. MODULE is a module's name or a `.py` file. `--help` and mistakes answer at
once, without importing torch.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | `plan`: it does not fit. `verify`, `check`: something differs. `audit`: a finding. `info`: fusion is off |
| 2 | invalid arguments, or a model that cannot be run |
"""


def command_line() -> str:
    """The page: each command with its options, from the parser."""
    import argparse

    from torch_fused_ops.tools.arguments import parser

    lines = ["# Command line", "", NOTE, COMMAND_LINE]

    def rows(command: argparse.ArgumentParser, known: Container[str] = ()) -> list[str]:
        options = []
        for action in command._actions:
            if action.help and "-h" not in action.option_strings and not isinstance(action, argparse._SubParsersAction):
                value = action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper()
                option = " ".join([*action.option_strings, str(value) * (action.nargs != 0)]).strip()
                row = f"* `{option}`: {action.help}"
                options += [row] if row not in known else []
        return options

    def commands(command: argparse.ArgumentParser) -> dict[str, tuple[str, argparse.ArgumentParser]]:
        actions = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
        texts = {choice.dest: choice.help or "" for action in actions for choice in action._choices_actions}
        return {name: (texts[name], choice) for action in actions for name, choice in action.choices.items()}

    every = [row for _, command in commands(parser()).values() for row in rows(command)]
    shared = list(dict.fromkeys(row for row in every if every.count(row) > 1))
    scope = "`explain`, `verify`, `audit` and `run` accept a policy. All but `run` accept MODULE:CALLABLE and `--json`."
    lines += ["## Shared options", "", scope, "", *shared, ""]
    for name, (text, command) in commands(parser()).items():
        lines += [f"## {name}", "", f"{text[:1].upper()}{text[1:]}.", ""]
        benchmarks = [f"* `{name} {nested}`: {help}" for nested, (help, _) in commands(command).items()]
        lines += [f"`{name} NAME --help` lists the options.", ""] if benchmarks else []
        listed = [*benchmarks, *rows(command, shared)]
        lines += [*listed, ""] if listed else []
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "benchmarks.md": benchmarks,
    "fp8.md": fp8,
    "memory.md": memory,
    "paper-and-devices.md": paper_and_devices,
    "largest-batch.md": largest_batch,
    "command-line.md": command_line,
    "coverage.md": coverage,
    "coverage-architectures.csv": coverage_rows,
    "operators.md": operators,
    "recognition.md": recognition,
    "plan.md": plan,
    "../README.md": readme,
    "../torch_fused_ops/ops.pyi": stub,
}


def main() -> int:
    """Write the pages, or compare them."""
    stale = [name for name, page in PAGES.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != page()]
    if "--check" in sys.argv:
        print("\n".join(f"docs/{name} is not what docs/generate.py writes" for name in stale))
        return bool(stale)
    for name in stale:
        (DOCS / name).write_text(PAGES[name]())
        print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
