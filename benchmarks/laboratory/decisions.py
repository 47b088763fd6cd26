"""What the figures of ``gpu`` decide: for each question the figures that answer it, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_fused_ops.benchmarks import mlp
from torch_fused_ops.benchmarks.harness import DTYPES
from torch_fused_ops.virtual_gpu.roofline import Rates

Cases = Sequence[dict[str, Any]]

OF_COPY = 0.90  # of a copy's bandwidth: below it a kernel's plan is worth changing
BOUND = 0.05  # of a step: what all fusion could gain; below it only the products matter
FP8_FLOP_PER_S = 1.1e15  # from here on products in fp8 pay for their quantization in passes of their own
TWICE = 2.0  # a cost further from its roofline than this is another cost
HOST_US = 10.0  # microseconds that a launch may take more than compiled code's


@dataclass(frozen=True)
class Answer:
    """What follows, and a line for each figure that it follows from."""

    text: str
    rows: list[str]


@dataclass(frozen=True)
class Decision:
    """A question that a part's figures answer.

    Attributes:
        part: of ``gpu``.
        question: in words, with its threshold.
        follows: what is done by the answer.
        answer: of the results of the part's benchmarks, by step; None where nothing was measured that says so.
    """

    part: str
    question: str
    follows: str
    answer: Callable[[dict[str, dict[str, Any]]], Answer | None]


def _ways(cases: Cases) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(case, its ways that were timed)."""
    for case in cases:
        if timed := {name: way for name, way in case["ways"].items() if "ms" in way}:
            yield case, timed


def _cases(results: dict[str, dict[str, Any]], step: str) -> Cases:
    cases: Cases = results.get(step, {}).get("cases", [])
    return cases


def _ms(way: dict[str, Any]) -> float:
    return float(way["ms"]["median"])


# ---- kernels ---------------------------------------------------------------------------------------------------------


def bandwidth(results: dict[str, dict[str, Any]]) -> Answer | None:
    """Eager operators against a copy of as many bytes."""
    found = [
        (_ms(timed["copy"]) / _ms(timed["operators"]), case["name"])
        for step in ("operators", "probe")
        for case, timed in _ways(_cases(results, step))
        if {"operators", "copy"} <= timed.keys()
    ]
    if not found:
        return None
    slow = sorted((f, name) for f, name in found if f < OF_COPY)
    rows = [f"{fraction:.2f} of copy  {name}" for fraction, name in slow]
    if not slow:
        return Answer(f"all {len(found)} reach it; the lowest is {min(found)[0]:.2f} ({min(found)[1]})", [])
    return Answer(f"{len(slow)} of {len(found)} are below: take the best plan of the next table for each", rows)


def plans(results: dict[str, dict[str, Any]]) -> Answer | None:
    """The quickest plan of each kernel that was swept."""
    rows, better = [], 0
    for case, timed in _ways(_cases(results, "probe")):
        swept = {name: way for name, way in timed.items() if "=" in name}
        if "operators" not in timed or not swept:
            continue
        base, best = _ms(timed["operators"]), min(swept, key=lambda name: _ms(swept[name]))
        gain = 1 - _ms(swept[best]) / base
        better += gain > 0.02
        fractions = [_ms(timed["copy"]) / ms for ms in (base, _ms(swept[best]))] if "copy" in timed else []
        of_copy = " → ".join(f"{fraction:.2f}" for fraction in fractions) or "not known"
        rows.append(f"{100 * gain:+5.1f} %, of copy {of_copy}, with {best}:  {case['name']}")
    if not rows:
        return None
    return Answer(f"{better} of {len(rows)} gain more than 2 %: these plans, and no others, are worth changing", rows)


def reductions(results: dict[str, dict[str, Any]]) -> Answer | None:
    """Inductor's own choices for the reductions of backward."""
    rows = []
    for case, timed in _ways(_cases(results, "probe")):
        if "compile" in timed and case["facts"].get("kind") == "reduction":
            base = _ms(timed["compile"])
            others = {name: _ms(way) / base for name, way in timed.items() if name not in ("compile", "copy")}
            text = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(others.items(), key=lambda pair: pair[1]))
            copy = f"{_ms(timed['copy']) / base:.2f} of copy; " if "copy" in timed else ""
            rows.append(f"{case['name']}: {copy}to compile's time: {text}")
    if not rows:
        return None
    return Answer(
        "where ours in one pass (operators) is below 1, compiled code should call it for the bias' gradient", rows
    )


def fp8_products(results: dict[str, dict[str, Any]]) -> Answer | None:
    """FLOP a second of each recipe."""
    rows, best = [], 0.0
    for case, timed in _ways(_cases(results, "probe")):
        if case["facts"].get("kind") != "product":
            continue
        rates = {name: case["work"]["flops"] / (1e-3 * _ms(way)) for name, way in timed.items()}
        best = max([best, *(rate for name, rate in rates.items() if name.startswith("fp8"))])
        rows.append(f"{case['name']}: " + ", ".join(f"{name} {rate / 1e15:.2f}" for name, rate in rates.items()))
    if not rows:
        return None
    verdict = (
        "fp8 products pay" if best >= FP8_FLOP_PER_S else "fp8 products do not pay for a quantization of their own"
    )
    return Answer(f"{verdict}: the best is {best / 1e15:.2f} PFLOP/s (in each row PFLOP/s)", rows)


def launches(results: dict[str, dict[str, Any]]) -> Answer | None:
    """The host's time for a call."""
    rows, more = [], []
    for case, timed in _ways(_cases(results, "probe")):
        if case["facts"].get("kind") != "launch":
            continue
        host = {name: 1e3 * float(way["host_ms"]["median"]) for name, way in timed.items()}
        if {"operators", "compiled[grid]"} <= host.keys():
            more.append(host["operators"] - host["compiled[grid]"])
        rows.append(f"{case['name']}: " + ", ".join(f"{name} {us:.1f}" for name, us in host.items()))
    if not more:
        return Answer("not measured", rows) if rows else None
    verdict = "a launch cache pays" if max(more) > HOST_US else "launches are as cheap as they get"
    return Answer(
        f"{verdict}: an operator takes up to {max(more):.0f} µs more than its bare launches (µs a call)", rows
    )


# ---- steps -----------------------------------------------------------------------------------------------------------


def lowering(results: dict[str, dict[str, Any]]) -> Answer | None:
    """fused-off against compile: the same bytes and FLOP."""
    rows, wrong, count = [], 0, 0
    for case, timed in _ways(_cases(results, "mlp")):
        ratio = timed.get("fused-off", {}).get("ratio_to", {}).get("compile")
        if ratio:
            count += 1
            wrong += ratio["interval"][0] > 1.0
            rows.append(
                f"{ratio['median']:.3f} ({ratio['interval'][0]:.3f} … {ratio['interval'][1]:.3f})  {case['name']}"
            )
    if not rows:
        return None
    verdict = f"a lowering is wrong in {wrong} of {count}" if wrong else f"no lowering costs time in {count} cases"
    return Answer(f"{verdict} (an interval above 1.00 is wrong)", rows)


def levels(results: dict[str, dict[str, Any]]) -> Answer | None:
    """What keeping less costs, beside what its roofline says."""
    rows, wrong, count = [], 0, 0
    result = results.get("mlp", {})
    for case, timed in _ways(result.get("cases", [])):
        facts, rates = case["facts"], result["ceilings"]["matmul_flop_per_s"]
        if "fused-off" not in timed or case["dtype"] not in rates:
            continue
        reached = Rates(rates[case["dtype"]], result["ceilings"]["copy_bytes_per_s"])
        size = mlp.Size(facts["tokens"], facts["width"], facts["hidden"])
        floor = {
            w: reached.seconds(mlp.works(facts["mlp"], size, DTYPES[case["dtype"]], w, True))
            for w in timed
            if w in mlp.ROOFLINES
        }
        for way in ("fused-free", "fused-fp8", "fused-input"):
            if way in timed:
                cost, expected = _ms(timed[way]) - _ms(timed["fused-off"]), 1e3 * (floor[way] - floor["fused-off"])
                count += 1
                wrong += cost > TWICE * expected
                saved = timed["fused-off"].get("saved_bytes", 0) - timed[way].get("saved_bytes", 0)
                costs = f"{cost:+.3f} ms, by roofline {expected:+.3f}"
                rows.append(f"{case['name']}, {way}: {costs}; {saved / 2**20:.0f} MiB less kept")
    if not rows:
        return None
    return Answer(
        f"{wrong} of {count} cost more than twice their roofline (free: 2 bytes an element of the hidden tensor)", rows
    )


def bound(results: dict[str, dict[str, Any]]) -> Answer | None:
    """compile − gemms: no fusion gains more."""
    found = [
        (1 - _ms(timed["gemms"]) / _ms(timed["compile"]), case["name"])
        for case, timed in _ways(_cases(results, "mlp"))
        if {"gemms", "compile"} <= timed.keys()
    ]
    if not found:
        return None
    above = sum(fraction > BOUND for fraction, _ in found)
    text = (
        f"{above} of {len(found)} are above: there fusion has something to gain; in the others only the products matter"
    )
    return Answer(text, [f"{100 * fraction:.1f} %  {name}" for fraction, name in sorted(found, reverse=True)])


def models(results: dict[str, dict[str, Any]]) -> Answer | None:
    """A whole model's step."""
    rows = []
    for case, timed in _ways(_cases(results, "model")):
        ratio = timed.get("fused-free", {}).get("ratio_to", {}).get("compile")
        if ratio:
            less = 1 - timed["fused-free"]["saved_bytes"] / timed["compile"]["saved_bytes"]
            rows.append(f"{ratio['median']:.3f} of compile's time, {100 * less:.0f} % less kept  {case['name']}")
    return Answer("time paid for memory, in a whole model", rows) if rows else None


# ---- all -------------------------------------------------------------------------------------------------------------

COMPUTES = "Does everything compute what it should on this device?"

DECISIONS: Sequence[Decision] = (
    Decision("kernels", f"Do eager operators reach {OF_COPY:.2f} of a copy that moves as many bytes?",
             "a kernel that does not takes the best plan of the next question", bandwidth),
    Decision("kernels", "Which plan is quickest for each hand-written kernel?",
             "its constants become the kernel's, where they gain more than 2 %", plans),
    Decision("kernels", "Is Inductor's reduction for a bias' gradient the right one?",
             "where ours in one pass takes less, compiled code calls it", reductions),
    Decision("kernels", f"Do products in fp8 reach {FP8_FLOP_PER_S / 1e15:g} PFLOP/s?",
             "from there on fp8 products pay for a quantization of their own", fp8_products),
    Decision("kernels", f"Does the host take more than {HOST_US:g} µs beyond the bare launches of an eager call?",
             "then a cache of compiled launches pays", launches),
    Decision("steps", "Is fused-off as quick as torch.compile, whose bytes and FLOP it has?",
             "where it is slower a lowering is wrong", lowering),
    Decision("steps", "Does each memory level cost what its bytes and FLOP say?",
             "what costs more than twice as much is not that level's kernel alone: look at the generated code", levels),
    Decision("steps", f"Could any fusion gain more than {100 * BOUND:g} % of a step (compile − gemms)?",
             "where not, only the products are worth work", bound),
    Decision("steps", "What does a whole model's step pay, and keep?",
             "the figures that README and docs may state", models),
)  # fmt: skip


def failures(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of "correctness": what failed, by file or step."""
    rows = [f"{step['name']}: {step['status']}" for step in steps if step["status"] != "passed"]
    for step in steps:
        files: dict[str, int] = {}
        for failure in step.get("tests", {}).get("failures", ()):
            name = failure["test"].partition("[")[0]
            files[name] = files.get(name, 0) + 1
        rows += [f"{count} × {name}" for name, count in sorted(files.items(), key=lambda pair: -pair[1])]
    text = "some does not: these first" if rows else "all that ran does"
    return {"question": COMPUTES, "answer": text, "rows": rows}


def of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The decisions of a part's JSON so far; a question that nothing answers yet says so."""
    if result["part"] == "correctness":
        return [failures(result["steps"])]
    results = {step["name"]: step["result"] for step in result["steps"] if step.get("result")}
    found = []
    for decision in DECISIONS:
        if decision.part == result["part"]:
            answer = decision.answer(results) or Answer("not measured", [])
            found.append({"question": decision.question, "answer": answer.text, "rows": answer.rows})
    return found
