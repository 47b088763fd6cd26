"""The command line: ``python -m torch_fused_ops {info, check, explain, plan, verify, run, bench}``.

    info                            versions, devices and what is active
    check [--device D] [--quick]    opcheck and precision of every operator on a device; exit code 1 if anything fails
    explain MODULE:CALLABLE         which MLP sites of a model are fused, why the others are not, what it saves
    plan MODULE:CALLABLE            whether a step of training fits into a GPU's memory, and at which memory levels
    verify MODULE:CALLABLE          a model's step of training, eager, compiled and fused; exit code 1 if it differs
    run SCRIPT [ARGUMENT ...]       a program as it is, with pick-up in every torch.compile
    bench NAME                      measure this library beside PyTorch's own ways, or count on paper
    --version                       this library's version

``explain``, ``plan`` and ``verify`` call CALLABLE without arguments; it returns ``(model, args)`` or
``(model, args, kwargs)``. MODULE is a module's name or a ``.py`` file. Exit code 2 for arguments that make no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import platform
import re
import runpy
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import torch_fused_ops as tfo
from torch_fused_ops import environment
from torch_fused_ops.policy import GEMM, LEVELS, is_level

__all__ = ["main"]


class _UsageError(Exception):
    """What the user gave cannot be used; the message says why."""


# ---- info ------------------------------------------------------------------------------------------------------------


def _devices() -> list[str]:
    cpu = f"cpu: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    cuda = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        cpu,
        *(f"cuda:{i}: {p.name}, {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB" for i, p in enumerate(cuda)),
    ]


def _version(package: str) -> str:
    return getattr(importlib.import_module(package), "__version__", "?") if importlib.util.find_spec(package) else ""


def _works() -> Iterator[tuple[str, str]]:
    """(what, "yes" or what is missing) of everything that needs more than torch."""
    from torch_fused_ops.lowerings import compat

    asked = os.environ.get("CXX")
    compiler = next(filter(shutil.which, [asked] if asked else ["g++", "clang++"]), None)
    missing = "no C++ compiler was found: install g++ or clang++, or set CXX"
    yield "torch.compile on CPUs", f"yes, with {compiler}" if compiler else missing
    gpu, triton = torch.cuda.is_available(), _version("triton")
    yield "torch.compile on GPUs", ("yes" if triton else "Triton is missing") if gpu else "no GPU is seen"
    device = torch.device("cuda" if gpu else "cpu")
    slow = "" if gpu else ", multiplied in the model's dtype: right, and slower than without"
    without = compat.no_block_scaling(device)
    yield 'products in float8, gemm="fp8"', f"none on {without}" if without else f"yes{slow}"
    yield "figures on paper, plan", "yes" if triton else 'pip install "torch-fused-ops[triton]"'
    yield "pictures of benchmarks", "yes" if _version("matplotlib") else 'pip install "torch-fused-ops[bench]"'


def _info(arguments: argparse.Namespace) -> int:
    import torch._dynamo
    import torch._inductor.lowering as inductor

    from torch_fused_ops import activations, lowerings

    passes = lowerings.pick_up()
    if lowerings.off():
        print(lowerings.off())
        return 1
    from torch_fused_ops.lowerings import compat
    from torch_fused_ops.operators.registration import IN_TORCH

    forward = [n for n in dir(torch.ops.fused) if isinstance(getattr(torch.ops.fused, n), torch._ops.OpOverloadPacket)]
    overloads = [getattr(torch.ops.fused, n).default for n in forward]
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    traced = [op for op in overloads if not op.has_kernel_for_dispatch_key(composite)]  # the others' parts are aten's
    lowered = [op for op in traced if op in inductor.lowerings]
    backend = "found" if "fused" in torch._dynamo.list_backends() else "not found: install with `pip install -e .`"
    policy = passes.active_policy()
    sections: list[tuple[str, list[str]]] = [
        ("torch_fused_ops", [f"{tfo.__version__} in {Path(tfo.__file__).parent}"]),
        ("python", [f"{platform.python_version()} on {platform.platform()}"]),
        ("torch", [f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, HIP {torch.version.hip or 'none'}"]),
        *((package, [_version(package) or "not installed"]) for package in ("triton", "numpy")),
        ("devices", _devices()),
        ("operators", [", ".join(f"fused::{n}" for n in forward if "_backward" not in n)]),
        ("eager kernels", ["plain torch (TORCH_FUSED_OPS_KERNELS=torch)" if IN_TORCH else "this library's"]),
        ("activations", [", ".join(activations.names())]),
        ("lowerings", [f"{len(lowered)} of {len(traced)} operators, backward ones included"]),
        ("backend 'fused'", [backend]),
        ("policy", [repr(policy) if policy else "none in force: plain torch.compile picks nothing up before enable()"]),
        ("works here", [f"{what}: {how}" for what, how in _works()]),
        ("torch features", [f"{name}: {'yes' if there else 'no'}" for name, there in compat.features().items()]),
        ("identity", [passes.identity()]),
    ]
    for title, lines in sections:
        for i, text in enumerate(lines):
            print(f"{title if i == 0 else '':<18}{text}")
    return 0


# ---- check -----------------------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    from torch_fused_ops.testing import check as runner

    try:
        torch.zeros(1, device=arguments.device)
    except (RuntimeError, AssertionError) as e:
        raise _UsageError(f"--device {arguments.device} cannot be used: {str(e).splitlines()[0]}") from None
    start = time.perf_counter()
    print(f"opcheck and precision on {arguments.device}, largest errors against float64\n\n{runner.line()}", flush=True)
    rows = runner.check(
        arguments.device, quick=arguments.quick, progress=lambda row: print(runner.row_line(row), flush=True)
    )
    failures = [f for row in rows for f in row.failures]
    calls, opchecks = sum(row.samples for row in rows), sum(row.opchecks for row in rows)
    verdict = f"{len(failures)} failures" if failures else "all passed"
    print(f"\n{calls} samples, {opchecks} opchecks, {time.perf_counter() - start:.0f} s: {verdict}")
    for failure in failures:
        print(f"  {failure}")
    return 1 if failures else 0


# ---- explain ---------------------------------------------------------------------------------------------------------


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            raise _UsageError(f"module {name!r} cannot be imported: {e}") from None
    path = Path(name)
    if not path.is_file():
        raise _UsageError(f"{name} is no file")
    sys.path.insert(0, str(path.parent.resolve()))  # as `python file.py` does: its neighbours can be imported
    return importlib.import_module(path.stem)


def _load(spec: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    name, colon, attribute = spec.rpartition(":")
    if not (name and colon and attribute):
        raise _UsageError(f"{spec!r} is not of the form module:callable, e.g. mypackage.models:example")
    module = _module(name)
    try:
        make = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise _UsageError(f"{name} has no {attribute!r}") from None
    accepted = "it must return (model, args) or (model, args, kwargs)"
    if not callable(make):
        raise _UsageError(f"{spec} is a {type(make).__name__}, not callable; {accepted}")
    if isinstance(make, torch.nn.Module):
        raise _UsageError(f"{spec} is a model; it must be a function that returns (model, args)")
    made = make()
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3) or not callable(made[0]):
        raise _UsageError(f"{spec} returned a {type(made).__name__}; {accepted}")
    model, args, kwargs = (*made, {})[:3]
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise _UsageError(f"{spec}: args is a {type(args).__name__}, kwargs a {type(kwargs).__name__}; {accepted}")
    return model, tuple(args), kwargs


def _check_writable(arguments: argparse.Namespace, *options: str) -> None:
    for option in options:
        file = getattr(arguments, option)
        if file and (Path(file).is_dir() or not os.access(Path(file).parent, os.W_OK)):
            raise _UsageError(f"--{option} {file} cannot be written: it must be a file in a folder that is there")


def _explain(arguments: argparse.Namespace) -> int:
    _check_writable(arguments, "json", "html")
    model, args, kwargs = _load(arguments.spec)
    if isinstance(model, torch.nn.Module):
        model.train(arguments.train)
    policy = tfo.FusionPolicy(memory=arguments.memory, gemm=arguments.gemm, exclude=arguments.exclude)
    with torch.set_grad_enabled(arguments.train):
        report = tfo.explain(model, *args, policy=policy, **kwargs)
    if arguments.levels and not arguments.train:
        raise _UsageError("--levels needs --train: without a backward nothing is kept")
    if arguments.figures is not None or arguments.levels:
        try:
            report.measure(arguments.figures or "H200", levels=arguments.levels)
        except ValueError as e:
            raise _UsageError(f"--figures {arguments.figures}: {e}") from None
    print(report)
    if arguments.json:
        Path(arguments.json).write_text(report.to_json(), encoding="utf-8")
    if arguments.html:
        report.to_html(arguments.html)
    return 0


# ---- plan ------------------------------------------------------------------------------------------------------------


def _plan(arguments: argparse.Namespace) -> int:
    _check_writable(arguments, "json", "html")
    settings = {
        name: getattr(arguments, name) for name in ("memory", "gpu", "optimizer", "lossless", "maximum", "dp", "tp")
    }
    with torch.device("meta") if arguments.meta else contextlib.nullcontext():
        model, args, kwargs = _load(arguments.spec)
    if isinstance(model, torch.nn.Module):
        model.train()
    try:
        with _progress("torch_fused_ops.planner"):
            found = tfo.plan(model, *args, **settings, **kwargs)
            if arguments.recompile:
                peak = found.recompiled_peak_bytes()
    except ValueError as e:
        raise _UsageError(str(e)) from None
    print(found)
    if arguments.recompile:
        print(f"the whole model compiled with this policy: a peak of {peak} bytes, {found.step_peak} above")
    if arguments.json:
        Path(arguments.json).write_text(found.to_json(), encoding="utf-8")
    if arguments.html:
        found.to_html(arguments.html)
    return 0 if found.fits else 1


@contextlib.contextmanager
def _progress(name: str, seconds: float = 5.0) -> Iterator[None]:
    """What a logger says from now on, on standard error, once so many seconds have passed."""
    logger, handler, start = logging.getLogger(name), logging.StreamHandler(sys.stderr), time.time()
    handler.addFilter(lambda record: record.created - start > seconds)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


# ---- verify ----------------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    _check_writable(arguments, "json")
    policy = tfo.FusionPolicy(memory=arguments.memory, gemm=arguments.gemm, exclude=arguments.exclude)
    try:
        model, args, kwargs = _load(arguments.spec)
        if isinstance(model, torch.nn.Module):
            model.train(not arguments.eval)
        found = tfo.verify(model, *args, policy=policy, compiled=arguments.compiled, **kwargs)
    except _UsageError:
        raise
    except Exception as error:  # the model's own; exit code 1 is for one that runs and differs
        traceback.print_exc()
        raise _UsageError(f"{arguments.spec} cannot be run in eager mode: {error}") from None
    print(found)
    if arguments.json:
        Path(arguments.json).write_text(found.to_json(), encoding="utf-8")
    return 0 if found.ok else 1


# ---- run -------------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    """Becomes the program: its name, arguments, folder and exit code. Processes that it starts do as it does."""
    _check_writable(arguments, "report")
    name, *rest = arguments.program or [""]
    script = Path(name)
    if not arguments.module and not script.is_file():
        raise _UsageError(f"{name or 'SCRIPT'} is no file: it must be a Python program, or -m and a module's name")
    fields = [f"memory={arguments.memory}", f"gemm={arguments.gemm}", f"strict={arguments.strict}".lower()]
    text = ",".join((*fields, *(f"exclude={pattern}" for pattern in arguments.exclude)))
    environment.ask_for(text)
    sys.argv = [name, *rest]
    if arguments.module:
        program = functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(script.parent.resolve())
        program = functools.partial(runpy.run_path, name, run_name="__main__")
    if not arguments.report or os.environ.get("RANK", "0") != "0":
        program()
        return 0
    with tfo.record() as report:
        try:
            program()
        finally:
            _write(report, Path(arguments.report))
    return 0


def _write(report: tfo.Report, file: Path) -> None:
    if file.suffix == ".html":
        report.to_html(file)
    else:
        file.write_text(report.to_json() if file.suffix == ".json" else f"{report}\n", encoding="utf-8")


# ---- bench -----------------------------------------------------------------------------------------------------------

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
    "part": {"metavar": "PART", "help": "correctness, kernels or steps"},
}  # fmt: skip
_TIMED = tuple(option for option in _BENCH_OPTIONS if option not in ("largest", "part"))
# What each is, and which options it takes.
BENCHMARKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pointwise": ("every operator by itself, forward and backward, and what a call costs", _TIMED),
    "mlp": ("a training step of GELU and SwiGLU MLPs", _TIMED),
    "model": ("a training step of whole models", (*_TIMED, "largest")),
    "inference": ("MLPs without gradients, decoding included", _TIMED),
    "probe": ("our eager kernels at every block size and number of warps; float8 products; launches", _TIMED),
    "on-paper": ("every operator and six blocks, counted for an absent H200", ("only", "quick", "out", "draw")),
    "gpu": ("a GPU's first half hour, a part of it", ("part", "out", "device", "quick", "limit")),
}  # fmt: skip


def _ways(benchmark: str) -> str:
    """The ways that a benchmark has, a line each."""
    from torch_fused_ops.benchmarks.ways import MEANINGS

    found = [(", ".join(m.ways), re.sub(r"`| \(\[.*?\)\)", "", m.text)) for m in MEANINGS if benchmark in m.benchmarks]
    return "\n".join(["ways:", *(f"  {names}\n      {text}" for names, text in found)]) if found else ""


def _bench(arguments: argparse.Namespace) -> int:
    from torch_fused_ops.benchmarks import harness
    from torch_fused_ops.benchmarks.main import bench

    try:
        return bench(arguments)
    except harness.UsageError as e:
        raise _UsageError(str(e)) from None


# ---- arguments -------------------------------------------------------------------------------------------------------


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m torch_fused_ops", description="Fused MLP operators for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torch_fused_ops {tfo.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="versions, devices and what is active")
    info.set_defaults(run=_info)
    check = commands.add_parser("check", help="opcheck and precision of every operator on a device")
    check.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, …")
    check.add_argument("--quick", action="store_true", help="fewer samples")
    check.set_defaults(run=_check)
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
    explain.set_defaults(run=_explain)
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
    plan.add_argument("--recompile", action="store_true", help="compile the whole model, too; seconds for each layer")
    plan.add_argument("--json", metavar="FILE", help="write the plan as JSON too")
    plan.add_argument("--html", metavar="FILE", help="write the plan as a page too, with the curve of a step")
    plan.set_defaults(run=_plan)
    verify = commands.add_parser("verify", help="compare a training step of a model, eager, compiled and fused")
    _add_model(verify)
    verify.add_argument("--eval", action="store_true", help="in evaluation mode; by default in training mode")
    verify.add_argument(
        "--compiled", action="store_true", help="compile; by default the compilers' graphs are run call by call"
    )
    verify.add_argument("--json", metavar="FILE", help="write all that was compared as JSON too")
    verify.set_defaults(run=_verify)
    run = commands.add_parser(
        "run", help="a Python program as it is, with pick-up in every torch.compile of it", usage=f"{_RUN} SCRIPT ..."
    )
    _add_policy(run)
    run.add_argument("--strict", action="store_true", help="an MLP that is left alone is an error")
    run.add_argument("--report", metavar="FILE", help="what was fused (rank 0), at the end: .json, .html, or text")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]")
    run.set_defaults(run=_run)
    bench = commands.add_parser("bench", help="measure this library beside PyTorch's own ways, or count on paper")
    names = bench.add_subparsers(required=True, metavar="NAME", dest="benchmark")
    for name, (text, options) in BENCHMARKS.items():
        one = names.add_parser(
            name, help=text, description=text, epilog=_ways(name), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for option in options:
            one.add_argument(f"--{option}", **_BENCH_OPTIONS[option])
        one.set_defaults(run=_bench)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except _UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return code
