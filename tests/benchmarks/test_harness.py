"""The benchmarks' harness: statistics, variants that fail, and GPU timing on an emulated ``torch.cuda``."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import raises
from stand_in import stand_in
from torch import Tensor

from torch_fused_ops.benchmarks import harness
from torch_fused_ops.benchmarks.harness import Case, Device, Plan, Trial, Unavailable, UsageError

pytestmark = pytest.mark.usefixtures("only_new_garbage")


def test_summary_has_quartiles() -> None:
    assert harness.summary([3.0]) == {"minimum": 3.0, "median": 3.0, "quartiles": (3.0, 3.0)}
    assert harness.summary([2.0, 1.0, 4.0, 3.0, 5.0]) == {"minimum": 1.0, "median": 3.0, "quartiles": (2.0, 4.0)}


def test_relative_error_is_the_largest() -> None:
    truth = [torch.tensor([3.0, 4.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]
    assert harness.relative_error([torch.tensor([3.0, 4.5]), torch.zeros(2)], truth) == pytest.approx(0.1)
    assert harness.relative_error([torch.tensor([3.0, math.nan]), torch.zeros(2)], truth) == math.inf
    raises(ValueError, "shape", harness.relative_error, [torch.zeros(3), torch.zeros(2)], truth)


def test_saved_bytes_exclude_parameters() -> None:
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    assert harness.saved_bytes(lambda: (x @ w).tanh(), [w]) == 2 * 8 * 4 * 4  # x, and tanh's result
    assert harness.saved_bytes(lambda: (x @ w).tanh(), [w, x]) == 8 * 4 * 4


def test_numbers_reject_other_text() -> None:
    assert harness.numbers("8192x4096", (2, 3), "") == (8192, 4096)
    for invalid in ("8192", "8x0", "axb", "1x2x3x4"):
        raises(UsageError, "not accepted: it must be a size", harness.numbers, invalid, (2, 3), "a size")


TRUTH = torch.arange(4.0, dtype=torch.float64)


def trial(value: Callable[[], Tensor]) -> Callable[[], Trial]:
    return lambda: Trial(lambda state: [value()], lambda i: i)


def refuses() -> Trial:
    raise Unavailable("it is not installed")


def fails() -> Tensor:
    raise RuntimeError("out of luck\nand more")


def a_case(**ways: Callable[[], Trial]) -> Case:
    return Case("a case", {}, ways, lambda: [TRUTH], 2, torch.float32, ours=("mine",), unchecked=("other",))


@pytest.mark.slow
@pytest.mark.parametrize("device", [Device(), stand_in()], ids=["cpu", "gpu"])
def test_every_variant_is_reported(device: Device) -> None:
    result = harness.measure(
        a_case(
            mine=trial(lambda: TRUTH.float()),
            eager=trial(lambda: TRUTH.float() * 1.00001),
            wrong=trial(lambda: TRUTH.float() + 1),
            nan=trial(lambda: TRUTH.float() * math.nan),
            missing=refuses,
            broken=trial(fails),
            other=trial(lambda: TRUTH.float() + 5),
        ),
        device,
        Plan(0.05, quick=True, rounds=4),
    )
    status = {name: way["status"] for name, way in result["ways"].items()}
    assert status == {
        "mine": "measured", "eager": "measured", "wrong": "wrong", "nan": "wrong", "missing": "unavailable",
        "broken": "failed", "other": "measured",
    }  # fmt: skip
    assert result["ways"]["missing"]["reason"] == "it is not installed"
    assert result["ways"]["broken"]["reason"] == "RuntimeError: out of luck"
    assert "relative error" in result["ways"]["wrong"]["reason"]
    assert set(result["ways"]["mine"]["ratio_to"]) == {"eager", "other"} and "ratio_to" not in result["ways"]["eager"]
    assert result["rounds"] >= 2
    assert result["ways"]["mine"]["peak_bytes"] == (None if device.type == "cpu" else 250)
    text = harness.table(result)
    for said in ("it is not installed", "out of luck", "mine / this", "wrong: ", "failed: "):
        assert said in text


def test_unwritten_results_are_wrong() -> None:
    """Each check fills memory with NaN first, so a variant that leaves elements unwritten is wrong."""
    big = torch.ones(1 << 16, dtype=torch.float64)

    def lazy() -> Tensor:
        out = torch.empty(1 << 16)
        out[:10] = 1.0
        return out

    harness.poison([big], torch.float32)
    case = Case("lazy", {}, {"lazy": trial(lazy)}, lambda: [big], 1, torch.float32, ours=())
    assert harness.measure(case, Device(), Plan(0.01, quick=True))["ways"]["lazy"]["status"] == "wrong"


class Fragile(Device):
    """A device that fails after an illegal address until the process ends."""

    gone = False

    def synchronize(self) -> None:
        if self.gone:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.slow
def test_resume_skips_the_case_that_lost_the_device(tmp_path: Path) -> None:
    device, out, tried = Fragile(), tmp_path / "results.json", []

    def breaks() -> Tensor:
        tried.append("breaks")
        device.gone = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    def fine() -> Case:
        tried.append("fine")
        return a_case(mine=trial(lambda: TRUTH.float()))

    makers = [fine, lambda: a_case(mine=trial(breaks)), fine]
    names = ["a case", "second", "third"]
    arguments = "some", makers, names, device, Plan(0.01, quick=True), out
    raises(RuntimeError, "illegal memory access", harness.run, *arguments)
    before = harness.read(out, "some")
    assert before["running"] == "second" and len(before["cases"]) == 1
    device.gone = False  # another process
    after = harness.run(*arguments, before=before)
    assert tried == ["fine", "breaks", "fine"] and after["running"] is None and len(after["cases"]) == 3
    assert after["cases"][1]["ways"]["(all)"]["status"] == "lost"
    before["device"]["name"] = "another"
    raises(UsageError, "another device", harness.run, *arguments, before=before)


def test_a_time_limit_lists_the_remaining_cases(tmp_path: Path) -> None:
    plan = Plan(0.01, limit=1e-6, quick=True)
    out = tmp_path / "results.json"
    make = lambda: a_case(mine=trial(lambda: TRUTH.float()))  # noqa: E731
    result = harness.run("some", [make, make], ["one", "two"], Device(), plan, out)
    assert result["not_run"] == ["one", "two"] and json.loads(out.read_text()) == result


def test_other_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    raises(UsageError, "cannot be read", harness.read, path, "mlp")
    path.write_text('{"benchmark": "mlp", "schema": 0}')
    raises(UsageError, "holds no results", harness.read, path, "mlp")


def test_rotating_inputs_exceed_the_cache() -> None:
    gpu = stand_in()
    assert gpu.cache_bytes == 4 << 12
    for nbytes in (1, 1000, 1 << 14, 1 << 20):
        sets = harness.sets_of(gpu, nbytes)
        assert sets == 32 or sets * nbytes > gpu.cache_bytes
    assert harness.sets_of(Device(), 1) == 1
