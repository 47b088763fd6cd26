"""The commands of ``python -m torch_fused_ops``; ``arguments.py`` defines their arguments."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import torch_fused_ops as tfo
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.planner.setup import Setup
from torch_fused_ops.settings import environment
from torch_fused_ops.settings.environment import version_of
from torch_fused_ops.tools.arguments import PLAN, parser
from torch_fused_ops.virtual_gpu import gpus


class _UsageError(Exception):
    """Invalid arguments; the message says why."""


@contextlib.contextmanager
def _usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Report exceptions of these kinds as invalid arguments."""
    try:
        yield
    except kinds as e:
        raise _UsageError(str(e)) from None


def _works() -> Iterator[tuple[str, str]]:
    """Yield each feature that needs more than torch, and "yes" or the missing requirement."""
    from torch_fused_ops.lowerings.recognize.gemms import no_scaled_products

    candidates = [name for name in torch._inductor.config.cpp.cxx if name]  # CXX, else g++
    compiler = next(filter(shutil.which, candidates), None)
    missing = f"no C++ compiler was found ({', '.join(candidates)}): install g++, or set CXX"
    yield "torch.compile on CPUs", f"yes, with {compiler}" if compiler else missing
    gpu, triton = torch.cuda.is_available(), version_of("triton")
    yield "torch.compile on GPUs", ("yes" if triton else "Triton is missing") if gpu else "no GPU is visible"
    device = torch.device("cuda" if gpu else "cpu")
    slow = "" if gpu else ", in the model's dtype: correct, but slower than bf16"
    for recipe, (scaling, _) in RECIPES.items():
        without = no_scaled_products(device, scaling)
        yield f'float8 GEMMs, gemm="{recipe}"', f"not on {without}" if without else f"yes{slow}"
    yield "estimated figures, plan", "yes" if triton else "pip install triton numpy"


def _info(arguments: argparse.Namespace) -> int:
    import torch._dynamo
    import torch._inductor.lowering as inductor

    from torch_fused_ops import activations, lowerings
    from torch_fused_ops.kernels import compiled
    from torch_fused_ops.settings import switches

    passes = lowerings.load_passes()
    if lowerings.off():
        print(lowerings.off())
        return 1
    from torch_fused_ops.lowerings import compat

    forward = [n for n in dir(torch.ops.fused) if isinstance(getattr(torch.ops.fused, n), torch._ops.OpOverloadPacket)]
    overloads = [getattr(torch.ops.fused, n).default for n in forward]
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    traced = [op for op in overloads if not op.has_kernel_for_dispatch_key(composite)]  # the rest decompose to aten
    lowered = [op for op in traced if op in inductor.lowerings]
    backend = "found" if "fused" in torch._dynamo.list_backends() else "not found: install with `pip install -e .`"
    policy = passes.active_policy()
    devices = [f"cpu: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        devices.append(f"cuda:{i}: {p.name}, {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    faults = compat.faults({package: version_of(package) for package in ("torch", "triton")})
    sections: list[tuple[str, list[str]]] = [
        ("torch_fused_ops", [f"{tfo.__version__} in {Path(tfo.__file__).parent}"]),
        ("python", [f"{platform.python_version()} on {platform.platform()}"]),
        ("torch", [f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, HIP {torch.version.hip or 'none'}"]),
        *((package, [version_of(package) or "not installed"]) for package in ("triton", "numpy")),
        ("devices", devices),
        ("checked", environment.checked_gpus() or ["no GPU yet: python -m torch_fused_ops check"]),
        ("operators", [", ".join(f"fused::{n}" for n in forward if "_backward" not in n)]),
        ("turned off", [", ".join(switches.WITHOUT) or f"nothing; {switches.NAME} takes {', '.join(switches.PARTS)}"]),
        ("eager on CPUs", [compiled.status()]),
        ("activations", [", ".join(activations.names())]),
        ("lowerings", [f"{len(lowered)} of {len(traced)} operators, backward ones included"]),
        ("backend 'fused'", [backend]),
        ("policy", [repr(policy) if policy else "none: plain torch.compile fuses no MLPs before enable()"]),
        ("works here", [f"{feature}: {status}" for feature, status in _works()]),
        ("torch features", [f"{name}: {'yes' if present else 'no'}" for name, present in compat.features().items()]),
        (
            "upstream faults",
            [f"{f.package}: {f.effect} ({f.link})" for f in faults] or ["none known"],
        ),
        ("identity", [passes.identity()]),
    ]
    for title, lines in sections:
        for i, text in enumerate(lines):
            print(f"{title if i == 0 else '':<18}{text}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from torch_fused_ops.kernels import compiled
    from torch_fused_ops.testing import check as runner

    gpus = (device for device in ("cuda", "xpu") if getattr(torch, device).is_available())
    device = arguments.device or next(gpus, "cpu")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise _UsageError(f"--device {device} cannot be used: {str(e).splitlines()[0]}") from None
    if device == "cpu" and not arguments.quick:
        compiled.FEWEST = 1 << 15  # sweeps over a dtype's values then run compiled kernels
    start = time.perf_counter()
    print(f"opcheck and precision on {device}, largest errors against float64\n\n{runner.line()}", flush=True)
    rows = runner.check(device, quick=arguments.quick, progress=lambda row: print(runner.row_line(row), flush=True))
    failures = [f for row in rows for f in row.failures]
    calls, opchecks = sum(row.samples for row in rows), sum(row.opchecks for row in rows)
    verdict = f"{len(failures)} failures" if failures else "all passed"
    print(f"\n{calls} samples, {opchecks} opchecks, {time.perf_counter() - start:.0f} s: {verdict}")
    for failure in failures:
        print(f"  {failure}")
    if device == "cpu":
        print(f"eager kernels: {compiled.status()}")
    if device.startswith("cuda") and not failures:
        environment.note_checked(device)
    return 1 if failures else 0


def _load(arguments: argparse.Namespace, training: bool) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Load the model, in training or evaluation mode, and its arguments."""
    spec: str = arguments.spec
    name, colon, attribute = spec.rpartition(":")
    if not (name and colon and attribute):
        raise _UsageError(f"{spec!r} is not of the form module:callable, e.g. mypackage.models:example")
    folder, path = os.getcwd(), Path(name)
    if path.suffix == ".py":  # like `python file.py`: it can import modules from its folder
        if not path.is_file():
            raise _UsageError(f"{name!r} does not exist: give a module's name or the path of a .py file")
        folder = str(path.parent.resolve())
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(path.stem if path.suffix == ".py" else name)
    except ModuleNotFoundError as e:
        raise _UsageError(f"module {name!r} cannot be imported: {e}") from None
    try:
        make = functools.reduce(getattr, attribute.split("."), module)
    except AttributeError:
        raise _UsageError(f"{name} has no {attribute!r}") from None
    accepted = "it must return (model, args) or (model, args, kwargs), args a tuple such as (x,)"
    if not callable(make):
        raise _UsageError(f"{spec} is a {type(make).__name__}, not callable; {accepted}")
    if isinstance(make, torch.nn.Module):
        raise _UsageError(f"{spec} is a model; it must be a function that returns (model, args)")
    example = make()
    if not isinstance(example, (tuple, list)) or len(example) not in (2, 3) or not callable(example[0]):
        raise _UsageError(f"{spec} returned a {type(example).__name__}; {accepted}")
    model, args, kwargs = (*example, {})[:3]
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise _UsageError(f"{spec}: args is a {type(args).__name__}, kwargs a {type(kwargs).__name__}; {accepted}")
    if isinstance(model, torch.nn.Module):
        model.train(training)
    return model, tuple(args), kwargs


def _policy(arguments: argparse.Namespace) -> tfo.FusionPolicy:
    with _usage_errors(ValueError):
        policy = tfo.FusionPolicy.parse(
            f"memory={arguments.memory},gemm={arguments.gemm},attention={arguments.attention}"
        )
        return dataclasses.replace(policy, exclude=arguments.exclude)


def _explain(arguments: argparse.Namespace) -> tuple[tfo.Report, bool]:
    if arguments.saved and not arguments.train:
        raise _UsageError("--saved needs --train: without a backward nothing is saved")
    if arguments.saved:  # report missing Triton before slow work
        gpus.import_triton()
    model, args, kwargs = _load(arguments, training=arguments.train)
    with torch.set_grad_enabled(arguments.train):
        report = tfo.explain(model, *args, policy=_policy(arguments), **kwargs)
    if arguments.saved:
        report.saved  # noqa: B018, computed here
    return report, True


def _plan(arguments: argparse.Namespace) -> tuple[tfo.Plan, bool]:
    settings = {name: getattr(arguments, name) for name in PLAN}
    with _usage_errors(ValueError):
        Setup(**{name: settings[name] for name in Setup.__dataclass_fields__})
    with torch.device("meta") if arguments.meta else contextlib.nullcontext():
        model, args, kwargs = _load(arguments, training=True)
    with _usage_errors(ValueError), _progress("torch_fused_ops.planner"):
        plan = tfo.plan(model, *args, **settings, **kwargs)
    return plan, plan.fits


def _verify(arguments: argparse.Namespace) -> tuple[tfo.Verification, bool]:
    policy = _policy(arguments)
    model, args, kwargs = _load(arguments, training=not arguments.eval)
    with _progress("torch_fused_ops.verify"):
        verification = tfo.verify(model, *args, policy=policy, compiled=arguments.compiled, **kwargs)
    return verification, verification.ok


def _audit(arguments: argparse.Namespace) -> tuple[Any, bool]:
    from torch_fused_ops import virtual_gpu

    gpus.import_triton()
    training = not arguments.eval
    model, args, kwargs = _load(arguments, training)
    config = None if arguments.plain else tfo.compile_options(policy=_policy(arguments))
    with _usage_errors(ValueError, torch._dynamo.exc.Unsupported):
        gpu = gpus.by_name(arguments.gpu, "--gpu")
        with torch.set_grad_enabled(training):
            paper = virtual_gpu.compile_on_paper(model, *args, gpu=gpu, training=training, config=config, **kwargs)
        audit = virtual_gpu.audit(paper)
    return audit, audit.ok


@contextlib.contextmanager
def _progress(name: str) -> Iterator[None]:
    """Print a logger's INFO records on standard error."""
    logger, handler = logging.getLogger(name), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("... %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _bench(arguments: argparse.Namespace) -> int:
    from torch_fused_ops.benchmarks import harness
    from torch_fused_ops.benchmarks.main import bench

    with _usage_errors(harness.UsageError):
        return bench(arguments)


# _COMMANDS return an exit code. _RESULTS return a result to print, and True to exit with code 0, or False for 1.
_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "info": _info, "check": _check, "run": environment.run, "bench": _bench
}  # fmt: skip
_RESULTS: dict[str, Callable[[argparse.Namespace], tuple[Any, bool]]] = {
    "explain": _explain, "plan": _plan, "verify": _verify, "audit": _audit
}  # fmt: skip


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command in _COMMANDS:
        return _COMMANDS[arguments.command](arguments)
    files = {option: file for option in ("json", "html") if (file := getattr(arguments, option, None))}
    with _usage_errors(ValueError):
        for option, file in files.items():
            environment.writable(f"--{option} {file}", file)
    result, ok = _RESULTS[arguments.command](arguments)
    print(result)
    if "json" in files:
        Path(files["json"]).write_text(result.to_json(), encoding="utf-8")
    if "html" in files:
        result.to_html(files["html"])
    return 0 if ok else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return _run(arguments)
    except Exception as e:
        message = str(e)
        if not isinstance(e, _UsageError) and getattr(e, "name", "") != "triton":
            if not hasattr(arguments, "spec"):
                raise
            traceback.print_exc()  # an error in the model; exit code 1 means that a command has findings
            message = f"{arguments.spec} cannot be run: {type(e).__name__}: {message.partition(chr(10))[0]}"
        print(f"error: {message}", file=sys.stderr)
        return 2
