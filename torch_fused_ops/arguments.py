"""The command line: ``python -m torch_fused_ops {info, check, explain, plan, verify, run, bench}``.

    info                            versions, devices and what is active
    check [--device D] [--quick]    opcheck and precision of every operator on a device; exit code 1 if anything fails
    explain MODULE:CALLABLE         which MLP sites of a model are fused, why the others are not, what it saves
    plan MODULE:CALLABLE            whether a step of training fits into a GPU's memory, and at which memory levels
    verify MODULE:CALLABLE          a model's step of training, eager, compiled and fused; exit code 1 if it differs
    run SCRIPT [ARGUMENT ...]       a program as it is, with pick-up in every torch.compile
    bench NAME                      measure this library beside PyTorch's own ways
    --version                       this library's version

``explain``, ``plan`` and ``verify`` call CALLABLE without arguments; it returns ``(model, args)`` or
``(model, args, kwargs)``. MODULE is a module's name or a ``.py`` file. Exit code 2 for arguments that make no sense.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_fused_ops._version import __version__
from torch_fused_ops.bench_ways import MEANINGS
from torch_fused_ops.policy import GEMM, LEVELS, is_level

__all__ = ["BENCHMARKS", "TIMED", "add_bench_options", "parser"]

_BENCH_OPTIONS: dict[str, dict[str, Any]] = {
    "device": {"help": "cpu, cuda, cuda:1, …; a GPU by default where there is one"},
    "quick": {"action": "store_true", "help": "the least, tiny: does it run at all?"},
    "sizes": {"nargs": "+", "metavar": "SIZE", "default": [], "help": "8192x4096, …; its own else"},
    "dtypes": {"nargs": "+", "choices": ("bfloat16", "float16", "float32"), "default": [], "help": "its own else"},
    "only": {"nargs": "+", "metavar": "TEXT", "default": [], "help": "only cases whose names hold all of these texts"},
    "skip": {"nargs": "+", "metavar": "TEXT", "default": [], "help": "without those whose names hold one of these"},
    "ways": {"nargs": "+", "metavar": "WAY", "default": [], "help": "only these ways (below)"},
    "seconds": {"type": float, "help": "of timing a case"},
    "rounds": {"type": int, "default": 1000, "help": "at most so many a case (default: 1000)"},
    "limit": {"type": float, "help": "seconds of it all (GPU: 540); what is left then is listed"},
    "resume": {"action": "store_true", "help": "keep what --out holds and measure the rest"},
    "threads": {"type": int, "default": 0, "help": "CPU threads (default: torch's own choice)"},
    "seed": {"type": int, "default": 0, "help": "of random numbers, and of the order of ways (default: 0)"},
    "out": {"type": Path, "metavar": "FILE", "help": "results (CPU: in benchmarks/results; quick: none), or a folder"},
    "draw": {"type": Path, "metavar": "FILE", "help": "measure nothing: draw the pictures of these results"},
    "largest": {"action": "store_true", "help": "the largest batch that fits, for each way, too"},
}  # fmt: skip
TIMED = tuple(option for option in _BENCH_OPTIONS if option != "largest")
# What each is, and which options it takes.
BENCHMARKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pointwise": ("every operator by itself, forward and backward, and what a call costs", TIMED),
    "mlp": ("a training step of GELU and SwiGLU MLPs", TIMED),
    "model": ("a training step of whole models", (*TIMED, "largest")),
    "inference": ("MLPs without gradients, decoding included", TIMED),
}  # fmt: skip


def add_bench_options(parser: argparse.ArgumentParser, options: Sequence[str]) -> None:
    """Add options of ``bench``, by name; the scripts of benchmarks/laboratory take some of them, too."""
    for option in options:
        parser.add_argument(f"--{option}", **_BENCH_OPTIONS[option])


def _ways(benchmark: str) -> str:
    """The ways that a benchmark has, a line each."""
    found = [(", ".join(m.ways), re.sub(r"`| \(\[.*?\)\)", "", m.text)) for m in MEANINGS if benchmark in m.benchmarks]
    return "\n".join(["ways:", *(f"  {names}\n      {text}" for names, text in found)]) if found else ""


def _level(text: str) -> str:
    if not is_level(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not known; accepted: {LEVELS}")
    return text


def _add_spec(parser: argparse.ArgumentParser) -> None:
    """The argument that says which model."""
    parser.add_argument(
        "spec",
        metavar="MODULE:CALLABLE",
        help="CALLABLE() returns (model, args) or (model, args, kwargs); MODULE is a module's name or a .py file",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which model, and by which policy it is picked up."""
    _add_spec(parser)
    _add_policy(parser)


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        type=_level,
        default="free",
        metavar="LEVEL",
        help=f"FusionPolicy's memory: {LEVELS}; free by default",
    )
    parser.add_argument("--gemm", choices=GEMM, default="bf16", help="FusionPolicy's gemm; bf16 by default")
    parser.add_argument(
        "--exclude", metavar="PATTERN", action="append", default=[], help="FusionPolicy's exclude; may be repeated"
    )


_RUN = "python -m torch_fused_ops run [--memory M] [--gemm G] [--exclude PATTERN] [--strict] [--report FILE] [-m]"


class _Parser(argparse.ArgumentParser):
    """Of options that are not known it says which are meant, with the usage of the command that they were given to."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = found.command_parser._option_string_actions
            near = [difflib.get_close_matches(one.partition("=")[0], known, 1) for one in unknown]
            meant = ", ".join(name for names in near for name in names)
            hint = f"; did you mean {meant}?" if meant else ""
            found.command_parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        if not (found.command and getattr(found, "benchmark", True)):  # a command's name is missing
            found.command_parser.print_help(sys.stderr)
            sys.exit(2)
        return found


def parser() -> argparse.ArgumentParser:
    """What ``python -m torch_fused_ops`` takes; ``command`` is the command, ``benchmark`` the benchmark's name."""
    whole = _Parser("python -m torch_fused_ops", description="Fused MLP operators for PyTorch.")
    whole.add_argument("--version", action="version", version=f"torch_fused_ops {__version__}")
    commands = whole.add_subparsers(metavar="COMMAND", dest="command")
    commands.add_parser("info", help="versions, devices and what is active")
    check = commands.add_parser("check", help="opcheck and precision of every operator on a device")
    check.add_argument("--device", help="cpu, cuda, cuda:1, …; a GPU by default where there is one")
    check.add_argument("--quick", action="store_true", help="fewer samples")
    explain = commands.add_parser("explain", help="which MLPs of a model are fused, and why the others are not")
    _add_model(explain)
    explain.add_argument("--train", action="store_true", help="in training mode, with gradients; by default neither")
    explain.add_argument(
        "--figures",
        metavar="GPU",
        nargs="?",
        const="H200",
        help="memory, bytes moved and kernels before and after, on paper, for a GPU (H200 by default); seconds a layer",
    )
    explain.add_argument(
        "--levels",
        action="store_true",
        help="with --train: what memory levels keep, their peaks and costs, on paper",
    )
    explain.add_argument("--json", metavar="FILE", help="write the report as JSON too")
    explain.add_argument("--html", metavar="FILE", help="write the report as a page too")
    plan = commands.add_parser("plan", help="whether a step of training fits into a GPU's memory; exit code 1 if not")
    _add_spec(plan)
    plan.add_argument("--memory", required=True, help='what may be used: "72GiB", "800MiB" or bytes')
    plan.add_argument("--gpu", default="H200", help="A100, H100, H200 (default), B200 or MI300X")
    plan.add_argument("--optimizer", default="adamw", help="adamw (default), sgd or none")
    plan.add_argument("--lossless", action="store_true", help="without levels that round gradients")
    plan.add_argument(
        "--max",
        dest="maximum",
        metavar="WHAT",
        help="batch or tokens: the largest that fits at each level, too; minutes",
    )
    plan.add_argument(
        "--dp", type=int, default=1, help="GPUs over which FSDP2 shards layers; bytes and batch are then one GPU's"
    )
    plan.add_argument("--tp", type=int, default=1, help="GPUs that share MLPs' features and attention's heads")
    plan.add_argument("--meta", action="store_true", help="make the model on the meta device: sizes, and no data")
    plan.add_argument("--json", metavar="FILE", help="write the plan as JSON too")
    plan.add_argument("--html", metavar="FILE", help="write the plan as a page too, with the curve of a step")
    verify = commands.add_parser("verify", help="compare a training step of a model, eager, compiled and fused")
    _add_model(verify)
    verify.add_argument("--eval", action="store_true", help="in evaluation mode; by default in training mode")
    verify.add_argument(
        "--compiled", action="store_true", help="compile; by default the compilers' graphs are run call by call"
    )
    verify.add_argument("--json", metavar="FILE", help="write all that was compared as JSON too")
    run = commands.add_parser(
        "run", help="a Python program as it is, with pick-up in every torch.compile of it", usage=f"{_RUN} SCRIPT ..."
    )
    _add_policy(run)
    run.add_argument("--strict", action="store_true", help="an MLP that is left alone is an error")
    run.add_argument("--report", metavar="FILE", help="what was fused (rank 0), at the end: .json, .html, or text")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]")
    bench = commands.add_parser("bench", help="measure this library beside PyTorch's own ways")
    names = bench.add_subparsers(metavar="NAME", dest="benchmark")
    for name, (text, options) in BENCHMARKS.items():
        one = names.add_parser(
            name, help=text, description=text, epilog=_ways(name), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_bench_options(one, options)
    for command in (whole, *commands.choices.values(), *names.choices.values()):
        command.set_defaults(command_parser=command)
    return whole
