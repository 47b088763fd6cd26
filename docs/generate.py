"""Write what is generated of docs/: operators.md from the schemas, compatibility.md from test runs, and the tables of
recognition.md from the kinds of reasons, of gpu.md from a GPU's results, of plan.md from plans, and of the README,
benchmarks.md, fp8.md and memory.md from figures on paper.

python docs/generate.py           # after a schema has changed, or `pytest --record-compatibility` has run
python docs/generate.py --check   # exit status 1 if a page is not what it would write
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RECORD = DOCS / "compatibility.json"
RESULTS = DOCS.parent / "benchmarks" / "results"
NOTE = "<!-- Written by `python docs/generate.py`; change that, not this page. -->\n"

# ---- compatibility.md ------------------------------------------------------------------------------------------------

ITEMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Versions", "torch's internals listed and probed; without one of them pick-up is off and operators work; a newer "
     "torch is told once", ("anywhere/test_versions.py",)),
    ("Transforms", "`torch.func` and `torch.autograd.functional`, forward mode, double backward, `vmap` over every "
     "argument, compiled too", ("anywhere/test_transforms.py", "ops/test_activation.py", "ops/test_dropout.py",
     "ops/test_softmax.py", "ops/test_fp8.py", "ops/test_viewless.py")),
    ("Autocast", "the dtypes and values of PyTorch's own spelling: eager, compiled, picked up; CPU and CUDA",
     ("anywhere/test_autocast.py",)),
    ("Export", "`torch.export`, decompositions, AOTInductor in Python and C++, `torch.jit.trace`, ONNX",
     ("anywhere/test_export.py",)),
    ("Checkpointing", "`torch.utils.checkpoint`, selective policies, saved-tensor hooks, offloading",
     ("anywhere/test_checkpointing.py", "lowerings/test_composition.py", "nn/test_outer_hooks.py")),
    ("CUDA graphs", "no launch waits for the device; compiled graphs meet Inductor's conditions; replay on a GPU",
     ("anywhere/test_cuda_graphs.py",)),
    ("Distributed training", "DDP with and without split graphs, FSDP2, accumulation, `no_sync`; tensor and expert "
     "parallelism, DTensor, checkpoints", ("distributed/test_data_parallel.py", "distributed/test_tensor_parallel.py",
     "distributed/test_expert_parallel.py", "distributed/test_sharding.py", "distributed/test_checkpoint.py")),
    ("Serialization", "`torch.save`, pickle, copies, compile caches in other processes, fork, spawn, threads",
     ("anywhere/test_serialization.py", "lowerings/test_caches.py")),
    ("Devices", "CPU, CUDA, ROCm, XPU, all others as plain PyTorch; meta and fake tensors; mixtures rejected",
     ("anywhere/test_devices.py",)),
    ("Hostile input", "shapes, strides, dtypes and values of every kind against float64; wrong arguments; tensors "
     "written before backward", ("anywhere/test_hostile.py", "ops/test_errors.py")),
    ("Limits", "beyond 2³¹ elements; graphs too deep or too wide to read", ("anywhere/test_limits.py",)),
    ("Long runs", "a thousand compilations, many calls: nothing grows; training against eager",
     ("anywhere/test_long_runs.py",)),
    ("GPU code", "kernels in Triton's interpreter and as machine code on paper", ("kernels/test_activation_kernels.py",
     "kernels/test_dropout_kernels.py", "kernels/test_softmax_kernels.py", "kernels/test_fp8_kernels.py",
     "codegen/test_figures.py")),
    ("Docs", "every code block of the README and of docs/ runs, with a model where it speaks of one; these tables "
     "are what is generated",
     ("test_docs.py", "test_migrate.py")),
)  # fmt: skip


def compatibility() -> str:
    """The page: each item, its tests, and what became of them on each version."""
    record: dict[str, dict[str, list[int]]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    versions = sorted(record, key=lambda v: [int(n) for n in re.findall(r"\d+", v)])
    lines = [
        "# Works where PyTorch works",
        "",
        NOTE,
        "What `pytest --record-compatibility` has seen (`.ci/versions` runs it in an environment for each version), on",
        "CPUs; files are in `tests/`. Numbers are tests that passed, + those skipped, each with its reason; slow ones",
        "count where they ran.",
        "✗: failures; part: not all of the files were run there.",
        "",
        f"| | what | tests | {' | '.join(versions)} |",
        f"|---|---|---|{'---|' * len(versions)}",
    ]
    for name, what, files in ITEMS:
        cells = []
        for version in versions:
            counts = [record[version].get(file, [0, 0, 0]) for file in files]
            passed, failed, skipped = (sum(column) for column in zip(*counts, strict=True))
            ran = all(any(count) for count in counts)
            text = f"{passed}" + f" + {skipped}" * bool(skipped)
            cells.append(
                f"✗ {failed} failed" if failed else text if ran else "not run" if not passed else f"part: {text}"
            )
        tests = ", ".join(f"`{file}`" for file in files)
        lines.append(f"| {name} | {what} | {tests} | {' | '.join(cells)} |")
    totals = []
    for version in versions:
        passed, failed, skipped = (sum(column) for column in zip(*record[version].values(), strict=True))
        totals.append(f"**{passed}** + {skipped}" + f", ✗ {failed}" * bool(failed))
    lines += [f"| **All tests** | | `tests/` | {' | '.join(totals)} |", ""]
    return "\n".join(lines)


# ---- operators.md ----------------------------------------------------------------------------------------------------

INTRODUCTION = """\
`torch_fused_ops.functional` (`FF` in these pages) has a typed function for each operator and for each common use of it.
`torch.ops.fused.*` are the operators themselves. Both are the same call: one kernel forward and one pass backward on
GPUs in eager mode, ordinary nodes under `torch.compile`.

* Results are new and contiguous. Their dtype is that of the first tensor; arithmetic is in float32 (in float64 if an
  argument is), rounded once.
* Any strides; float16, bfloat16, float32 and float64, mixed as you like; sizes 0 and 1. All tensors are on one device.
* Wrong arguments raise `ValueError` or `TypeError`, which name the argument, its value and what is accepted.
* Gradients of any order, forward mode, `torch.func`; `memory="fp8"` has first derivatives (and all by `torch.func`).

```python
import torch
from torch_fused_ops import functional as FF

x, bias = torch.randn(4, 16), torch.randn(16)
FF.bias_gelu(x, bias, approximate="tanh")
torch.ops.fused.bias_act(x, bias, None, "gelu_tanh")  # the same
```
"""


def _first_line(fn: Callable[..., object] | None) -> str:
    return (inspect.getdoc(fn) or "").partition("\n")[0].replace("``", "`").replace("|", "\\|") if fn else ""


def operators() -> str:
    """The page: functions and operators, from their signatures, docstrings and schemas."""
    import torch

    import torch_fused_ops as tfo
    from torch_fused_ops import activations, functional, reference
    from torch_fused_ops.operators import fp8_store

    packets = [getattr(torch.ops.fused, name) for name in sorted(dir(torch.ops.fused))]
    schemas = [p.default._schema for p in packets if isinstance(p, torch._ops.OpOverloadPacket)]
    lines = ["# Operators", "", NOTE, INTRODUCTION, "## Functions", "", "| | computes |", "|---|---|"]
    for name in sorted(n for n in functional.__all__ if callable(getattr(functional, n))):
        fn = getattr(functional, name)
        called = f"{name}.apply" if isinstance(fn, type) else name
        signature = inspect.signature(fn.apply if isinstance(fn, type) else fn)
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        signature = signature.replace(parameters=plain, return_annotation=signature.empty)
        lines.append(f"| `{called}{signature}` | {_first_line(fn)} |")
    lines += [
        "",
        "## Operators",
        "",
        "Schemas, as `torch.ops.fused.<name>.default._schema` has them; tensors come first.",
        "",
    ]
    lines += ["| | computes |", "|---|---|"]
    for schema in schemas:
        name = schema.name.removeprefix("fused::")
        described = getattr(reference, name, None) or getattr(functional, f"{name}_tensor", None)
        formula = _first_line(described or getattr(fp8_store, name, None))
        text = str(schema).replace("|", "\\|")
        lines.append(f"| `{text}` | {formula} |")
    lines += [
        "",
        "## Activations",
        "",
        f"`{' '.join(activations.names())}`, and what `torch_fused_ops.register_activation` adds:",
        "",
        f"> {_first_line(tfo.register_activation)}",
        "",
    ]
    return "\n".join(lines)


# ---- recognition.md --------------------------------------------------------------------------------------------------

BEGIN = "<!-- Written by `python docs/generate.py` from docs/reasons.json; change that, not this. -->\n"
BEGIN_GPU = (
    "<!-- Written by `python docs/generate.py` from benchmarks/laboratory/decisions.py and results; change those. -->\n"
)
BEGIN_PLAN = (
    "<!-- Written by `python docs/generate.py` from benchmarks/results/plans.json; change that, not this. -->\n"
)
BEGIN_ON_PAPER = "<!-- Written by `python docs/generate.py` from benchmarks/results/on_paper.json; change that. -->\n"
BEGIN_WAYS = "<!-- Written by `python docs/generate.py` from torch_fused_ops/bench_ways.py; change that. -->\n"
BEGIN_UPSTREAM = "<!-- Written by `python docs/generate.py` from benchmarks/results/upstream_memory.json. -->\n"
BEGIN_RECIPES = "<!-- Written by `python docs/generate.py` from benchmarks/results/fp8_recipes.json; change that. -->\n"
BEGIN_TABLE = "<!-- Written by `python docs/generate.py` from torch_fused_ops/float8.py; change that. -->\n"
END = "<!-- What follows is written by hand. -->\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def recognition() -> str:
    """The page, with a table for each category of reasons between its two marks."""
    from torch_fused_ops.reasons import Category, Kind

    reasons = json.loads((DOCS / "reasons.json").read_text(encoding="utf-8"))
    lines = []
    for category in Category:
        heading = reasons["categories"][category.name]
        lines += [f"### {heading['title']}", "", *([heading["introduction"], ""] if heading["introduction"] else [])]
        lines += ["| the report says | what it means, and what helps | its kind |", "|---|---|---|"]
        for kind in Kind:
            if kind.category is category:
                entry = reasons["kinds"][kind.name]
                says, means = _cell("; ".join(entry["texts"])), _cell(f"{entry['means']} {kind.hint}".strip())
                anchor = kind.row.partition("#")[2]
                lines.append(f'| {says} | {means} | <a id="{anchor}"></a>`{kind.name}` |')
        lines.append("")
    return _between("recognition.md", BEGIN, lines)


def _between(page: str, mark: str, lines: list[str], text: str | None = None) -> str:
    """The page (or this text of it), with these lines between its two marks."""
    before, begin, rest = (text or (DOCS / page).read_text()).partition(mark)
    _, end, after = rest.partition(END)
    return "\n".join([before + begin, *lines, end + after])


# ---- gpu.md ----------------------------------------------------------------------------------------------------------


def gpu() -> str:
    """The page, with what each part's results decide; "not measured yet" where there are none."""
    from torch_fused_ops.benchmarks.laboratory import decisions
    from torch_fused_ops.benchmarks.laboratory.gpu import PARTS

    lines = []
    for part in PARTS:
        file = RESULTS / f"gpu_{part}.json"
        result = json.loads(file.read_text()) if file.exists() else {"decisions": []}
        if result.get("quick"):
            raise ValueError(f"{file} is of a quick run: its figures mean nothing")
        answers = {d["question"]: d for d in result["decisions"]}
        where = f": {result['device']['name']}, torch {result['machine']['torch']}" if answers else ""
        lines += [f"**{part}**{where}", "", "| question | what follows | answer |", "|---|---|---|"]
        asked = [(d.question, d.follows) for d in decisions.DECISIONS if d.part == part]
        for question, follows in asked or [(decisions.COMPUTES, "what does not is mended before anything is timed")]:
            answer = answers.get(question, {"answer": "not measured yet", "rows": []})
            text = "<br>".join([answer["answer"], *answer["rows"]])
            lines.append(f"| {_cell(question)} | {_cell(follows)} | {_cell(text)} |")
        lines.append("")
    return _between("gpu.md", BEGIN_GPU, lines)


# ---- plan.md ---------------------------------------------------------------------------------------------------------


def plan() -> str:
    """The page, with what each model comes to at each level, and what is chosen for each limit."""
    from torch_fused_ops.planner.report import duration
    from torch_fused_ops.reports.text import size

    lines = []
    for name, case in json.loads((RESULTS / "plans.json").read_text()).items():
        first = case["plans"][0]
        batch, length = case["tokens"]
        fixed = f"parameters {size(first['parameters'])}, optimizer state {size(first['optimizer_state'])}"
        lines += [f"**{name}**, {batch} × {length} tokens, {first['gpu']}: {fixed}", ""]
        lines += ["| every MLP at | peak of forward and backward | least time | |", "|---|---|---|---|"]
        for row in first["levels"]:
            time = f"{duration(row['seconds'])} | {100 * (row['seconds'] / first['off_seconds'] - 1):+.1f} %"
            lines.append(f"| {row['level']} | {size(row['peak'])} | {time} |".replace("-", "−"))
        lines += [
            "",
            "| limit | | peak, the optimizer's step included | least time | levels chosen |",
            "|---|---|---|---|---|",
        ]
        for limit, each in zip(case["limits"], case["plans"], strict=True):
            verdict = "fits" if each["fits"] else f"{size(each['missing'])} missing"
            cost = f"{100 * (each['seconds'] / each['off_seconds'] - 1):+.1f} %".replace("-", "−")
            lines.append(f"| {limit} | {verdict} | {size(each['peak_bytes'])} | {cost} | {_runs(each['choices'])} |")
        lines.append("")
        if case.get("largest"):
            lines += [*_largest(case["largest"]), ""]
    return _between("plan.md", BEGIN_PLAN, lines)


def _largest(found: dict[str, Any]) -> list[str]:
    """The largest batch or sequence at each level."""
    from torch_fused_ops.policy import MEMORY
    from torch_fused_ops.reports.text import size

    what = found["dimension"]
    off = next(row["size"] for row in found["rows"] if row["level"] == "off")
    lines = [f"| {found['memory']}, every MLP at | {what}, at most | beside off | peak | {what} a second, at most |"]
    lines.append("|---|---|---|---|---|")
    for row in sorted(found["rows"], key=lambda row: MEMORY.index(row["level"])):
        rate = f"{row['size'] / row['seconds']:,.0f}" if row["size"] else ""
        lines.append(f"| {row['level']} | {row['size']} | {row['size'] / off:.2f} | {size(row['peak'])} | {rate} |")
    if found["stopped"]:
        lines += ["", f"With more the model does not run: {what} {found['stopped']}."]
    return lines


def _runs(choices: dict[str, str]) -> str:
    """Levels of MLPs in their order: "free ×12, input ×4"."""
    runs = [(level, len(list(run))) for level, run in itertools.groupby(choices.values())]
    return ", ".join(f"{level} ×{count}" for level, count in runs) or "none to choose"


# ---- README.md -------------------------------------------------------------------------------------------------------

WAYS = {
    "plain": "plain",
    "budget": "budget 0.99",
    "ours-free": '`"free"`, the default',
    "ours-fp8": '`"fp8"`',
    "ours-input": '`"input"`',
}


def readme() -> str:
    """The page, with what blocks keep and what their steps take at least."""
    blocks = json.loads((RESULTS / "on_paper.json").read_text())["blocks"]
    lines = [f"| kept, MiB; step | {' | '.join(WAYS.values())} |", f"|---|{'---|' * len(WAYS)}"]
    for block in blocks:
        figures = [block["ways"][way] for way in WAYS]
        times = [sum(figure[phase]["floor_us"] for phase in ("forward", "backward")) for figure in figures]
        cells = [
            f"{figure['saved_bytes'] / 2**20:.0f}" + f"; {100 * (time / times[0] - 1):+.1f} %" * (way != "plain")
            for way, figure, time in zip(WAYS, figures, times, strict=True)
        ]
        name = block["name"].replace("GELU MLP", "GELU (tanh) MLP")
        lines.append(f"| {name} | {' | '.join(cells)} |".replace("-0.0", "+0.0").replace("; -", "; −"))
    return _between("../README.md", BEGIN_ON_PAPER, [*lines, ""])


# ---- benchmarks.md ---------------------------------------------------------------------------------------------------


def benchmarks() -> str:
    """The page, with the ways that are compared, and with what ours loses on paper."""
    from torch_fused_ops import bench_ways
    from torch_fused_ops.benchmarks.laboratory import on_paper

    table = [
        f"| {', '.join(f'`{way}`' for way in m.ways)} | {', '.join(m.benchmarks)} | {m.text} |"
        for m in bench_ways.MEANINGS
    ]
    page = _between("benchmarks.md", BEGIN_WAYS, ["| way | of | |", "|---|---|---|", *table, ""])

    rows: dict[str, dict[str, list[str]]] = {}
    for loss in on_paper.losses(json.loads((RESULTS / "on_paper.json").read_text())):
        cells = rows.setdefault(f"{loss.name}, {loss.phase}", {ours: [] for _, ours in on_paper.COMPARED})
        cells[loss.ours].append(f"{loss.figure} {loss.values}")
    heads = [" → ".join(pair) for pair in on_paper.COMPARED]
    lines = [f"| | {' | '.join(heads)} |", "|---|---|---|"]
    for name, cells in rows.items():
        lines.append(f"| {name} | {' | '.join('; '.join(found) for found in cells.values())} |")
    return _between("benchmarks.md", BEGIN_ON_PAPER, [*lines, ""], page)


# ---- fp8.md ----------------------------------------------------------------------------------------------------------


def fp8() -> str:
    """The page, with our recipes, and torchao's beside them."""
    from torch_fused_ops.benchmarks.laboratory import fp8_recipes

    result = json.loads((RESULTS / "fp8_recipes.json").read_text())
    page = _between("fp8.md", BEGIN_RECIPES, fp8_recipes.tables(result))
    return _between("fp8.md", BEGIN_TABLE, _recipes(), page)


def _recipes() -> list[str]:
    from torch_fused_ops.float8_recipes import RECIPES, Block

    def block(b: Block) -> str:
        return {(1, None): "row", (None, None): "tensor"}.get(b, f"{b.rows} × {b.columns}")

    heads = ("`gemm=`", "a scale for each, of input and gradient", "of a weight", "of its transpose",
             "weight's gradient", "kept of a layer's input", "sizes", "NVIDIA", "AMD", "experts")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines.append(f'| `"bf16"`, the default {"| – " * 3}| the model\'s dtype | as it is | any | any | any | any |')
    for name, (scaling, wgrad) in RECIPES.items():
        sm = ", ".join(f"sm_{major}{minor}" for major, minor in scaling.sm)
        cuda = ".".join(map(str, scaling.cuda))
        cells = [f'`"{name}"`', *map(block, (scaling.data, scaling.weight, scaling.weight_t))]
        cells += ["float8", "1 byte an element"] if wgrad else ["the model's dtype", "as it is"]
        cells += [f"multiples of {scaling.multiple}", f"{sm}; CUDA {cuda}", ", ".join(scaling.amd) or "none"]
        cells += [", ".join(f"sm_{major}{minor}" for major, minor in scaling.grouped) or "none"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


# ---- memory.md -------------------------------------------------------------------------------------------------------


def memory() -> str:
    """The page, with PyTorch's own ways beside ours."""
    from torch_fused_ops.benchmarks.laboratory import upstream_memory

    result = json.loads((RESULTS / "upstream_memory.json").read_text())
    return _between("memory.md", BEGIN_UPSTREAM, upstream_memory.tables(result))


PAGES: dict[str, Callable[[], str]] = {
    "../README.md": readme,
    "benchmarks.md": benchmarks,
    "fp8.md": fp8,
    "memory.md": memory,
    "operators.md": operators,
    "compatibility.md": compatibility,
    "recognition.md": recognition,
    "gpu.md": gpu,
    "plan.md": plan,
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
