"""What pick-up adds to compile time: 12-layer models, forward and backward, and the recognizer alone as graphs grow.

    python -m torch_fused_ops.benchmarks.laboratory.compile_time [--quick] [--rounds N] [--out FILE]

Every compilation is a process of its own with empty caches, so that what is paid once a process (imports, the
activation table) is counted. A round is one compilation each of plain ``torch.compile`` and of pick-up, in random
order; what counts is the median over rounds of the ratio within a round. CPU seconds vary less than wall seconds on a
shared machine, so both are given. Two kinds of round: ``torch`` leaves the C++ compiler out (kernels are generated, and
do nothing), which is the harder test of 3 %, and ``all`` has it in, CPU seconds included.

Where even that is too coarse, the part that is ours is timed by itself, inside the same compilations: *recognize*,
stage 1, with the import of its modules and the activation table; *remember*, stage 2, without upstream's partitioner
that it calls; *identity*, the hash of our sources for cache keys. Lowering our operators comes in place of lowering
aten's and is in the ratio.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

RESULTS = Path(__file__).parents[1] / "results" / "compile_time.json"
MODELS = ("gpt2", "llama")
WAYS = ("compile", "fused")
KINDS = ("torch", "all")  # without and with the C++ compiler
GROWTH = (12, 25, 50, 100, 200)


def model_of(name: str, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """A small model of transformers, random weights. Compile time hardly depends on the width."""
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=64, n_head=4, vocab_size=128, n_positions=64,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config), {"input_ids": torch.zeros(2, 16, dtype=torch.long)}
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=64, num_attention_heads=4, intermediate_size=192, vocab_size=128,
        use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.zeros(2, 16, dtype=torch.long)}


def cpu_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


class Ours:
    """Processor seconds spent in our own functions, what they call of upstream's taken out."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, label: str, sign: int = 1) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[label] += sign * (time.process_time() - start)

        setattr(owner, name, timed)


def compile_once(name: str, way: str, kind: str, layers: int) -> dict[str, Any]:
    """In this process: compile forward and backward of one model, one way."""
    import torch._inductor.compile_fx  # what both ways import
    from torch._inductor.async_compile import AsyncCompile

    ours = Ours()
    if kind == "torch":
        AsyncCompile.cpp_pybinding = lambda *args, **kwargs: lambda *tensors: None  # type: ignore[method-assign]
    model, inputs = model_of(name, layers)
    if way == "fused":
        from torch_fused_ops.lowerings import partition, passes

        ours.wrap(passes.Recognize, "__call__", "recognize")
        ours.wrap(passes.Partition, "__call__", "remember")
        ours.wrap(partition, "min_cut_rematerialization_partition", "remember", -1)
        passes.source_hash.cache_clear()
        ours.wrap(passes, "source_hash", "identity")
    wall, cpu = time.perf_counter(), cpu_seconds()
    logits = torch.compile(model, backend="fused" if way == "fused" else "inductor")(**inputs).logits
    F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits[..., 0].numel(), dtype=torch.long)).backward()
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    return {"wall": wall, "cpu": cpu, "ours": dict(ours.seconds)}


def in_a_process(name: str, way: str, kind: str, layers: int) -> dict[str, Any]:
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}  # no trial compilations
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, **settings, "TORCHINDUCTOR_CACHE_DIR": cache}
        module = "torch_fused_ops.benchmarks.laboratory.compile_time"  # coverage.py beside a script would be imported
        command = [sys.executable, "-m", module, "--child", name, way, kind, str(layers)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} {way} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, kind: str, layers: int, rounds: int, shuffle: random.Random) -> dict[str, Any]:
    from torch_fused_ops.benchmarks.harness import Summary

    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in shuffle.sample(WAYS, len(WAYS)):
            runs[way].append(in_a_process(name, way, kind, layers))
    pairs = list(zip(runs["fused"], runs["compile"], strict=True))

    def summary(values: list[float]) -> dict[str, Any]:
        return asdict(Summary.of(values * 2 if len(values) == 1 else values))

    parts = sorted({part for run in runs["fused"] for part in run["ours"]})
    ours = [sum(run["ours"].values()) for run in runs["fused"]]
    return {
        "model": name,
        "kind": kind,
        "layers": layers,
        "rounds": rounds,
        "seconds": {way: {t: summary([r[t] for r in runs[way]]) for t in ("wall", "cpu")} for way in WAYS},
        "ratio": {t: summary([a[t] / b[t] for a, b in pairs]) for t in ("wall", "cpu")},
        "ours_seconds": {part: summary([r["ours"].get(part, 0.0) for r in runs["fused"]]) for part in parts},
        "ours_of_compile": summary([mine / plain["cpu"] for mine, (_, plain) in zip(ours, pairs, strict=True)]),
    }


def growth(name: str, sizes: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """The recognizer alone, dry, on graphs captured from models without storage: the fastest of several runs."""
    from torch_fused_ops import FusionPolicy
    from torch_fused_ops.lowerings.recognize import rewrite

    rows: list[dict[str, Any]] = []
    for layers in sizes:
        with torch.device("meta"):
            model, inputs = model_of(name, layers)
        graphs: list[torch.fx.Graph] = []

        def backend(gm: torch.fx.GraphModule, inputs: Any, graphs: list[torch.fx.Graph] = graphs) -> Any:
            graphs.append(gm.graph)
            return gm.forward

        torch._dynamo.reset()
        torch.compile(model, backend=backend)(**{key: value.to("meta") for key, value in inputs.items()})
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            sites = [site for graph in graphs for site in rewrite(graph, FusionPolicy(), apply=False)]
            seconds.append(time.perf_counter() - start)
        nodes = sum(len(graph.nodes) for graph in graphs)
        rows.append(
            {
                "model": name,
                "layers": layers,
                "nodes": nodes,
                "fused_sites": sum(site.op is not None for site in sites),
                "milliseconds": 1e3 * min(seconds),
                "microseconds_per_node": 1e6 * min(seconds) / nodes,
            }
        )
        print("{model:<6} {layers:>4} layers {nodes:>6} nodes {fused_sites:>4} fused {milliseconds:>8.1f} ms "
              "{microseconds_per_node:>6.1f} µs a node".format(**rows[-1]), flush=True)  # fmt: skip
    return rows


def show(case: dict[str, Any]) -> str:
    def cell(time: str) -> str:
        ratio = case["ratio"][time]
        plain, fused = (case["seconds"][way][time]["median"] for way in WAYS)
        low, high = ratio["interval"]
        return f"{time} {plain:.1f} → {fused:.1f} s, ratio {ratio['median']:.3f} ({low:.3f} … {high:.3f})"

    parts = ", ".join(f"{part} {1e3 * s['median']:.0f} ms" for part, s in case["ours_seconds"].items())
    share = 100 * case["ours_of_compile"]["median"]
    head = f"{case['model']:<6} {case['kind']:<6}"
    return f"{head} {cell('wall')}; {cell('cpu')}\n{'':13} ours {share:.2f} % of plain's processor time: {parts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="two layers, one round: does it run at all?")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7, help="compilations of each way (default: 7)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.child:
        name, way, kind, layers = args.child
        print(json.dumps(compile_once(name, way, kind, int(layers))))
        return
    if args.quick:
        args.layers, args.rounds = 2, 1

    import transformers

    from torch_fused_ops.benchmarks.harness import machine

    about, shuffle = {**machine(), "transformers": transformers.__version__}, random.Random(args.seed)
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    rows = [row for name in args.models for row in growth(name, GROWTH[:2] if args.quick else GROWTH, 5)]
    cases: list[dict[str, Any]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for kind, name in itertools.product(args.kinds, args.models):
        cases.append(measure(name, kind, args.layers, args.rounds, shuffle))
        print(show(cases[-1]), flush=True)
        result = {
            "benchmark": "compile_time",
            "machine": {**about, "load_at_end": round(os.getloadavg()[0], 2)},
            "quick": args.quick,
            "cases": cases,
            "recognizer_growth": rows,
        }
        args.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    middle = statistics.median(case["ratio"]["cpu"]["median"] for case in cases)
    print(f"\nCPU seconds of pick-up to plain: {middle:.3f} (median of {len(cases)} cases)\n{args.out}")


if __name__ == "__main__":
    main()
