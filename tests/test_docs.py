"""Pages: every Python block runs, generated pages are up to date, every message is explained, every link works."""

import ast
import dataclasses
import importlib
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import python

import torch_fused_ops
from torch_fused_ops import FusionPolicy

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Names that a page's blocks use and the reader defines.
GIVEN = {
    "migrate.md": """
        from types import SimpleNamespace
        layer = SimpleNamespace(submodules=SimpleNamespace())
        ModuleSpec, groups = SimpleNamespace, None
    """,
    "README.md": """
        import torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.mlp = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))

            def forward(self, x):
                return self.mlp(x).sum()

        model, input_ids = Model(), torch.randn(4, 16)
    """,
    "distributed.md": """
        import tempfile
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group, folder, model = dist.group.WORLD, tempfile.mkdtemp(), torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        torch.set_default_device("meta")  # the MLP of a 70B model
    """,
    "fp8.md": """
        import torch
        import torch_fused_ops as tfo

        class TheirLinear(torch.autograd.Function):
            pass
    """,
    "modules.md": """
        import torch
        from torch import nn

        class Llama(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate_proj, self.up_proj = (nn.Linear(4096, 11008, bias=False) for _ in range(2))
                self.down_proj = nn.Linear(11008, 4096, bias=False)

        torch.set_default_dtype(torch.bfloat16)
        llama_mlp = Llama()
        input_ids = torch.randn(2, 8)
        acts = nn.GELU(), nn.GELU(), nn.Mish()
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), act, nn.Linear(16, 8)) for act in acts))
    """,
    "out-of-memory.md": """
        from types import SimpleNamespace
        from typing import Any
        Trainer: Any = lambda *args, **settings: SimpleNamespace(train=lambda: None)
        model: Any = SimpleNamespace(forward=lambda *args, **kwargs: None)
        TrainingArguments = Trainer
    """,
}
# A line to run before a block, by page and block.
BEFORE = {
    "distributed.md": {1: "import torch; torch.set_default_device('cpu')"},
    "largest-batch.md": {1: "exec('with torch.device(\"meta\"): make_model()')"},
}
TORCH = {"verify.md": "2.13"}  # this version printed the page's figures
MARK = "---- the block ends ----"


def blocks(page: Path) -> list[tuple[int, str, str | None]]:
    """Return (line, code, printed text or None) of each block that is marked as Python.

    One line of text may separate the code from its output. The page on reports has a test of its own.
    """
    text = page.read_text(encoding="utf-8")
    pattern = r"^```python\n(.*?)^```(?:\n+(?:[^\n]+:\n+)?```(?:text)?\n(.*?)^```)?"
    return [(text[: m.start(1)].count("\n"), m[1], m[2]) for m in re.finditer(pattern, text, re.M | re.S)]


def write_program(page: Path, folder: Path) -> Path:
    """Write a page's blocks as a program with the same line numbers, which imports the page's ``GIVEN`` names."""
    name = page.stem.replace("-", "_")
    (folder / f"given_{name}.py").write_text("# mypy: ignore-errors\n" + textwrap.dedent(GIVEN.get(page.name, "")))
    lines = [""] * (page.read_text(encoding="utf-8").count("\n") + 1)
    for i, (line, code, _) in enumerate(blocks(page)):
        lines[line : line + code.count("\n")] = code.splitlines()
        lines[line + code.count("\n")] = f"print({MARK!r})"
        lines[line - 1] = BEFORE.get(page.name, {}).get(i, "")
    lines[0] = f"from given_{name} import *"
    (script := folder / f"{name}.py").write_text("\n".join(lines))
    return script


def test_pages_have_at_least_15_blocks() -> None:
    assert sum(len(blocks(page)) for page in PAGES) >= 15


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=() if p.name == "README.md" else pytest.mark.slow) for p in PAGES if blocks(p)],
    ids=lambda page: page.name,
)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    """A page's blocks run in one process and print the page's text. A traceback has the page's line numbers."""
    script = write_program(page, tmp_path)
    if page.name in ("modules.md", "out-of-memory.md", "largest-batch.md"):
        pytest.importorskip("transformers")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    outputs = python(script, cwd=tmp_path, PYTHONPATH=path).split(f"{MARK}\n")
    for (line, _, expected), printed in zip(blocks(page), outputs, strict=False):
        if expected is not None and torch.__version__.startswith(TORCH.get(page.name, "")):
            assert comparable(printed, line) == comparable(expected), f"{page.name}:{line}"


def comparable(text: str, before: int = 0) -> str:
    """Remove rounding errors such as 5.4e-08, which differ between processors. Subtract ``before`` from lines."""
    text = re.sub(r"\d\.\de[+-]\d\d", "", text)
    return re.sub(r"\bline (\d+)", lambda number: f"line {int(number[1]) - before}", text)


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("generate")


def test_generated_pages_are_current(
    generate: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 0, capsys.readouterr().out


@pytest.mark.slow
def test_the_report_example_is_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    program, expected = re.findall(r"```(?:python)?\n(.*?)```", page.partition("## An example")[2], re.S)[:2]
    (tmp_path / "mlps.py").write_text(program, encoding="utf-8")
    assert python("mlps.py", cwd=tmp_path) == expected


def test_hand_written_figures_match_results() -> None:
    """Figures outside of generated tables match the results. test_migrate.py checks GELU's tail."""
    from torch_fused_ops.benchmarks.laboratory import coverage

    results = ROOT / "benchmarks" / "results"
    readme, questions = (" ".join((ROOT / p).read_text().split()) for p in ("README.md", "docs/is-it-for-me.md"))
    ratios: dict[str, list[float]] = {}
    for case in json.loads((results / "mlp_cpu.json").read_text())["cases"]:
        if case["facts"]["width"] <= 512:  # larger cases have at most ten rounds
            ratio = case["ways"]["fused-free"]["ratio_to"]["compile"]["median"]
            ratios.setdefault(case["facts"]["mlp"], []).append(ratio)
    steps = [f"{min(values):.2f} to {max(values):.2f}" for values in (ratios["gelu_tanh"], ratios["swiglu"])]
    built = [result for result in coverage.load(results / "coverage.jsonl") if "modes" in result]
    outcomes = [coverage.outcome(site) for result in built for site in coverage.sites_of(result)]
    share = 100 * outcomes.count("fused") / (outcomes.count("fused") + outcomes.count("not fused"))
    assert all(step in readme for step in steps), steps
    for page in (readme, questions):
        assert f"{len(built)}" in page and f"{share:.1f} %" in page
    trained = json.loads((results / "long_training.json").read_text())["summary"]["GELU"]["differences"]
    differences = [f"{trained[f'{way} − eager']['root_mean_square']:.5f}" for way in ("nudged", "compile", "fused")]
    assert f"| root mean square difference from eager | {' | '.join(differences)} |" in questions


def test_the_page_on_memory_states_the_roofline() -> None:
    from torch_fused_ops.benchmarks import mlp
    from torch_fused_ops.virtual_gpu import H100, roofline

    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+GLU|GELU) (\d+) → (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    rates = roofline.H200_RATES
    assert len(rows) == 6
    assert f"{rates.flop / 1e12:g} TFLOP/s" in text and f"{rates.nbytes / 1e12:g} TB/s" in text
    narrow, all_works = [], []
    shares: dict[str, set[str]] = {}
    for name, width, hidden, *stated in rows:
        size, kind = mlp.Size(8192, int(width), int(hidden)), "swiglu" if name == "SwiGLU" else "gelu_tanh"
        ways = ("compile", "fused-free", "fused-fp8", "fused-input")
        works = {way: mlp.works(kind, size, torch.bfloat16, way) for way in ways}
        all_works.append(works)
        plain, *fused = map(rates.seconds, works.values())
        gemms = sum(work.flop for work in works["compile"]) / rates.flop
        shares.setdefault(width, set()).add(f"{100 * gemms / plain:.0f}")
        assert stated == [f"{step / plain:.3f}" for step in fused], name
        narrow += [fused[0] / plain - 1] if size.width <= 2048 else []
    assert shares == {"1024": {"86", "87"}, "2048": {"93"}, "4096": {"96"}}
    assert "86 to 87 % of plain's step at width 1024, 93 % at 2048 and 96 % at 4096" in text
    assert f"costs {100 * min(narrow):.0f} to {100 * max(narrow):.1f} % of an MLP's step" in text
    h100 = dataclasses.replace(roofline.estimated_rates(H100), launch=0.0)  # as for the H200
    costs = [h100.seconds(works["fused-free"]) / h100.seconds(works["compile"]) - 1 for works in all_works]
    assert f"default costs {100 * min(costs):.1f} to {100 * max(costs):.1f} %" in text


def test_the_page_on_policies_has_every_field() -> None:
    table = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", table, re.M)
    assert rows == [(f.name, repr(f.default).replace("'", '"')) for f in dataclasses.fields(FusionPolicy)]


# Only these errors need an explanation on the page. Errors that name an argument list accepted values, recognition.md
# and reports explain rejections, and other errors are for users of the command line, or internal.
WITH_A_CURE = {
    "RuntimeError",
    "ImportError",
    "NotImplementedError",
    "UnfusedError",
    "AssertionError",
    "FileNotFoundError",
}
WARNINGS = {"warnings.warn", "log.warning"}
LAST_NAMES = {name.rpartition(".")[2] for name in WITH_A_CURE | WARNINGS}
INSIDE = {
    "torch_fused_ops/testing/check.py",  # output of `python -m torch_fused_ops check`
    "torch_fused_ops/reports/captures.py",  # the compiler's message, passed on
}


def messages() -> Iterator[tuple[str, list[str]]]:
    """Yield (place, fixed parts) of each message that troubleshooting.md must explain."""
    for path in sorted([*(ROOT / "torch_fused_ops").rglob("*.py"), *(ROOT / "lowerings").rglob("*.py")]):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else node
            if not isinstance(call, ast.Call) or not call.args or name in INSIDE:
                continue
            if getattr(call.func, "attr", getattr(call.func, "id", None)) not in LAST_NAMES:
                continue
            kind = ast.unparse(call.func)  # takes 50 µs
            if kind not in (WITH_A_CURE if call is not node else WARNINGS):
                continue
            fixed = [
                c.value for c in ast.walk(call.args[0]) if isinstance(c, ast.Constant) and isinstance(c.value, str)
            ]
            parts = [_words(part) for text in fixed for part in re.split(r"%[rs]|\n", text)]
            if any(parts):
                yield f"{name}:{node.lineno}", [part for part in parts if part.count(" ") >= 2]


def _words(text: str) -> str:
    """Remove quotes, line ends, and punctuation at both ends."""
    return " ".join(re.sub(r"[`'\">]", "", text).split()).strip(" .,:;()")


def test_every_warning_and_error_is_in_troubleshooting() -> None:
    page = _words((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    places = list(messages())
    assert len(places) >= 15
    ends = lambda part: (" ".join(part.split()[:5]), " ".join(part.split()[-5:]))  # noqa: E731
    missing = [
        f"{place}: {parts}" for place, parts in places if not any(e in page for part in parts for e in ends(part))
    ]
    assert not missing, "\n".join(missing)


def test_links_are_valid() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), (page.name, target)
        for path in re.findall(r"`((?:docs|tests|benchmarks|examples|lowerings|torch_fused_ops)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), (page.name, path)


def test_every_page_is_in_the_sites_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"[\w/-]+\.md", nav)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert sorted(listed) == sorted([*pages, "index.md", "contributing.md", "changelog.md"])


def test_the_python_api_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = {name for name in torch_fused_ops.__all__ if not name.startswith("__")}
    assert names == set(re.findall(r"^::: torch_fused_ops\.(\w+)$", page, re.M)) - {"distributed"}


@pytest.mark.slow
def test_the_site_is_built(tmp_path: Path) -> None:
    """Broken links and anchors are errors (with --quiet mkdocs would not count its warnings)."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    python("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path, cwd=ROOT)
    assert "levels.png" in (tmp_path / "index.html").read_text(encoding="utf-8")


if __name__ == "__main__":  # .ci/types calls it
    (samples := Path(sys.argv[1])).mkdir()
    for page in filter(blocks, PAGES):
        write_program(page, samples)
