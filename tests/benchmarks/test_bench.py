"""``python -m torch_fused_ops bench``: tiny runs of every benchmark. These tests do not check times."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_fused_ops import FusionPolicy, compile_options
from torch_fused_ops.benchmarks import harness, main, mlp, models, pointwise, variants, ways
from torch_fused_ops.tools.arguments import BENCHMARKS
from torch_fused_ops.tools.cli import main as cli

pytestmark = pytest.mark.usefixtures("only_new_garbage")


def check(result: dict[str, Any], benchmark: str) -> None:
    """Check the results' schema."""
    assert (result["benchmark"], result["schema"]) == (benchmark, harness.SCHEMA)
    assert {"torch", "threads", "python"} <= result["machine"].keys() and {"type", "name"} <= result["device"].keys()
    assert result["seconds"] > 0 and result["not_run"] == []
    known = {way for meaning in variants.MEANINGS if benchmark in meaning.benchmarks for way in meaning.ways}
    for case in result["cases"]:
        assert case["ways"].keys() <= known, "--help has them all"
        assert {"name", "dtype", "facts", "sets", "rounds", "ours", "ways"} <= case.keys()
        for name, way in case["ways"].items():
            assert way["status"] in ("measured", "unavailable"), (case["name"], name, way.get("reason"))
            if way["status"] == "unavailable":
                continue
            low, high = way["ms"]["quartiles"]
            assert 0 < way["ms"]["minimum"] <= low <= way["ms"]["median"] <= high
            if name not in ("copy", "gemms"):
                assert way["error"] <= 0.2
            if name in case["ours"]:
                assert all(r["minimum"] <= r["median"] for r in way["ratio_to"].values())


@pytest.mark.covering(every=4)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize(
    ("arguments", "cases", "compared"),
    [
        (
            ["pointwise", "--dtypes", "float32", "--only", "glu silu both"],
            1,
            {"operators", "eager", "compile", "fused"},
        ),
        (["mlp", "--dtypes", "bfloat16", "--only", "swiglu"], 1, {"compile", "fused-free", "gemms"}),
        (["model", "--ways", "compile", "fused-free", "eager", "--only", "gpt"], 1, {"compile", "fused-free"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_benchmarks_run_end_to_end(
    arguments: list[str], cases: int, compared: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    assert cli(["bench", *arguments, "--quick", "--device", "cpu", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    check(result, arguments[0])
    assert len(result["cases"]) == cases and compared <= result["cases"][0]["ways"].keys()
    printed = capsys.readouterr().out
    assert "figures mean nothing" in printed and result["cases"][0]["name"] in printed
    if arguments[0] in ("mlp", "model"):
        saved = {n: w["saved_bytes"] for n, w in result["cases"][0]["ways"].items() if n in compared - {"gemms"}}
        assert saved["fused-free"] < saved["compile"]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]  # a run writes one file only


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["mlp", "--device", "toaster"], "--device toaster cannot be used"),
        (["mlp", "--device", "meta"], "--device meta cannot be timed"),
        (["mlp", "--device", "cpu", "--sizes", "8x"], "--sizes 8x is not accepted: it must be TOKENSxWIDTH"),
        (["model", "--device", "cpu", "--sizes", "1x100000"], "takes sequences of 128 tokens"),
        (["mlp", "--device", "cpu", "--only", "nonsense"], "--only nonsense leaves no case; there are: gelu_tanh"),
        (["mlp", "--device", "cpu", "--ways", "nonsense"], "--ways nonsense not known; accepted: eager, compile"),
        (["mlp", "--device", "cpu", "--seconds", "0"], "--seconds 0 is not accepted: it must be above 0"),
        (["mlp", "--device", "cpu", "--quick", "--resume"], "--resume needs the file to go on with"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_rejected(command: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", *command]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error


def test_existing_results_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[Path | None] = []
    monkeypatch.setattr(harness, "run", lambda *args: written.append(args[5]))
    monkeypatch.chdir(tmp_path)
    bench = ["bench", "mlp", "--device", "cpu"]
    assert cli(bench) == cli([*bench, "--quick"]) == 0 and written == [Path("mlp_cpu.json"), None]
    Path("mlp_cpu.json").write_text("an earlier run's")
    assert cli(bench) == 2
    said = capsys.readouterr().err
    assert said == "error: mlp_cpu.json exists: --resume continues it, --out mlp_cpu.json replaces it\n"
    assert cli([*bench, "--out", "mlp_cpu.json"]) == 0 and written[2:] == [Path("mlp_cpu.json")]


def test_the_command_line_names_every_benchmark() -> None:
    assert set(BENCHMARKS) == set(main.BENCHMARKS)


@pytest.mark.parametrize("operator", pointwise.OPERATORS, ids=str)
def test_fused_operators_compute_the_plain_function(operator: pointwise.Operator) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [s for s in operator.shapes(5, 8) if s is not None]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    plain, fused_result = operator.plain(*tensors), operator.fused(*tensors)
    assert plain.shape == (5, 8)
    torch.testing.assert_close(plain, fused_result)
    tangent = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    pair = [torch.autograd.grad(out, tensors, tangent) for out in (plain, fused_result)]
    torch.testing.assert_close(*pair)


@pytest.mark.parametrize("operator", [*pointwise.OTHERS, pointwise.Softmax(masked=True)], ids=str)
@pytest.mark.parametrize("kind", ["forward", "backward", "both"])
def test_other_operators_match_float64(operator: pointwise.AnyOperator, kind: str) -> None:
    case = pointwise.case(kind, operator, 16, 32, torch.float32, harness.Device(), harness.Plan(1.0, quick=True))
    truth = case.truth()
    for way in ("eager", "operators"):
        if way not in case.unchecked:
            trial = case.ways[way]()
            error = harness.relative_error([t.detach() for t in trial.run(trial.prepare(0))], truth)
            assert error <= case.loose.get(way, 1e-4), way


@pytest.mark.codegen_is_slow
def test_each_memory_level_saves_less_than_the_previous() -> None:
    """Each level's variant saves fewer bytes than the previous one."""
    case = mlp.case("swiglu", mlp.Size(64, 16, 64), torch.float32, harness.Device(), harness.Plan(1.0))
    saved = []
    for way in ("fused-off", "fused-free", "fused-fp8", "fused-input"):
        trial = case.ways[way]()
        assert trial.saved is not None
        saved.append(trial.saved())
    assert saved == sorted(set(saved), reverse=True) and saved[-1] == 64 * 16 * 4


def test_unavailable_float8_variants_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = models.SwiGLUMLP(64, 200)
    with pytest.raises(harness.Unavailable, match=r"multiples of 128: the weight of gate is \(200, 64\)"):
        ways.COMPILED["gemm-fp8"](narrow)
    with pytest.raises(harness.Unavailable, match=r"multiples of 16: the weight of gate is \(200, 64\)"):
        ways.COMPILED["gemm-fp8-rowwise"](narrow)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(harness.Unavailable, match="torchao cannot be imported"):
        ways.COMPILED["torchao-rowwise"](narrow)


@pytest.mark.covering(every=3)
@pytest.mark.parametrize(
    "way", ["compile", "fused-free", "fused-fp8", pytest.param("fused-input", marks=pytest.mark.slow)]
)
def test_the_roofline_counts_the_generated_code(way: str) -> None:
    virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu")
    pytest.importorskip("triton")

    size = mlp.Size(2048, 4096, 8192)
    with torch.device("meta"):
        layers = models.SwiGLUMLP(size.width, size.hidden).bfloat16()
        x = torch.empty(size.tokens, size.width, dtype=torch.bfloat16, requires_grad=True)
    policy = FusionPolicy(memory=way.removeprefix("fused-"), strict=True) if way != "compile" else None
    paper = virtual_gpu.compile_on_paper(layers, x, config=compile_options(policy) if policy else {})
    works = mlp.works("swiglu", size, torch.bfloat16, way)
    assert sum(w.flop for w in works) == sum(call.flop for call in paper.timeline().events)
    # fp8's scales are not counted: 4 bytes a row
    assert sum(w.nbytes for w in works) == pytest.approx(sum(k.bytes_moved for k in paper.kernels), rel=1e-3)


def test_variants_do_not_share_caches() -> None:
    fn = pointwise.compiled
    copies = [ways.fresh(fn) for _ in range(2)]
    assert len({id(f.__code__) for f in (fn, *copies)}) == 3
    assert [ways.fresh(torch.nn.Identity())(3)] == [3]


def test_models_have_the_published_sizes() -> None:
    counted = {}
    for name, make, config in (("gpt2", models.GPT, models.GPT2), ("llama", models.Llama, models.LLAMA)):
        with torch.device("meta"):
            counted[name] = sum(p.numel() for p in make(config).parameters())
    assert counted["gpt2"] == 124_439_808  # as in GPT-2
    assert counted["llama"] == 4 * 218_112_000 + 2 * 128256 * 4096 + 4096  # four of Llama 3 8B's 32 layers
