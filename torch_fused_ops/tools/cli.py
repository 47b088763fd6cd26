"""The commands of ``python -m torch_fused_ops``; ``arguments.py`` defines their arguments."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import pkgutil
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
from torch_fused_ops.graphs.capture import said
from torch_fused_ops.settings import environment
from torch_fused_ops.tools.arguments import PLAN, described, parse
from torch_fused_ops.virtual_gpu import gpus


class _UsageError(Exception):
    """Invalid arguments; the message says why."""


@contextlib.contextmanager
def _usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Report exceptions of these kinds as invalid arguments."""
    try:
        yield
    except kinds as e:
        raise _UsageError(described(e)) from None


def _version_of(package: str) -> str:
    """Return a package's version, or "" if it is not installed."""
    is_installed = importlib.util.find_spec(package) is not None
    return getattr(importlib.import_module(package), "__version__", "?") if is_installed else ""


def _works() -> Iterator[tuple[str, str]]:
    """Yield each feature that needs more than torch, and "yes" or the missing requirement."""
    from torch_fused_ops.lowerings import compat
    from torch_fused_ops.lowerings.recognize.gemms import no_scaled_products

    candidates = [name for name in torch._inductor.config.cpp.cxx if name]  # CXX, else g++
    compiler = next(filter(shutil.which, candidates), None)
    missing = f"no C++ compiler was found ({', '.join(candidates)}): install g++, or set CXX"
    yield "torch.compile on CPUs", f"yes, with {compiler}" if compiler else missing
    gpu, triton = torch.cuda.is_available(), _version_of("triton")
    tested = "yes; python -m torch_fused_ops check tests this GPU" if triton else "Triton is missing"
    yield "torch.compile on GPUs", tested if gpu else "no GPU is visible"
    device = torch.device("cuda" if gpu else "cpu")
    slow = "" if gpu else ", in the model's dtype: correct, but slower than bf16"
    for recipe, (scaling, _) in RECIPES.items():
        without = no_scaled_products(device, scaling)
        yield f'float8 GEMMs, gemm="{recipe}"', f"not on {without}" if without else f"yes{slow}"
    yield "offload", "yes; not run on a GPU yet" if compat.has_offload_operators() else "needs torch 2.13"
    yield "estimated figures, plan", "yes" if triton else "pip install triton numpy"


def _info(arguments: argparse.Namespace) -> int:
    import torch._dynamo

    from torch_fused_ops import lowerings
    from torch_fused_ops.kernels import compiled
    from torch_fused_ops.settings import switches

    passes = lowerings.load_passes()
    if lowerings.off():
        print(lowerings.off())
        return 1
    from torch_fused_ops.lowerings import compat

    backend = "found" if "fused" in torch._dynamo.list_backends() else "not found: install with `pip install -e .`"
    policy = passes.active_policy()
    faults = compat.faults({package: _version_of(package) for package in ("torch", "triton")})
    devices = [f"cpu: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"]
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        devices.append(f"cuda:{i}: {p.name}, {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    sections: list[tuple[str, list[str]]] = [
        ("torch_fused_ops", [f"{tfo.__version__} in {Path(tfo.__file__).parent}"]),
        ("python", [f"{platform.python_version()} on {platform.platform()}"]),
        ("torch", [f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, HIP {torch.version.hip or 'none'}"]),
        *((package, [_version_of(package) or "not installed"]) for package in ("triton", "numpy")),
        ("devices", devices),
        ("turned off", [", ".join(switches.WITHOUT) or f"nothing; {switches.NAME} takes {', '.join(switches.PARTS)}"]),
        ("eager kernels", [compiled.status()]),
        ("backend 'fused'", [backend]),
        ("policy", [repr(policy) if policy else "none: plain torch.compile fuses no MLPs before enable()"]),
        ("upstream faults", [f"{f.package}: {f.effect} ({f.link})" for f in faults] or ["none known"]),
        ("works here", [f"{feature}: {status}" for feature, status in _works()]),
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
    print(f"eager kernels: {compiled.status()}")
    return 1 if failures else 0


def _load(arguments: argparse.Namespace, training: bool) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Load the model, in training or evaluation mode, and its arguments."""
    spec: str = arguments.spec
    name, _, attribute = spec.rpartition(":")
    if not (name and attribute):
        raise _UsageError(f"{spec!r} is not of the form module:callable, e.g. mypackage.models:example")
    folder, path = os.getcwd(), Path(name)
    if path.suffix == ".py":  # like `python file.py`: it can import modules from its folder
        folder, name = str(path.parent.resolve()), path.stem
    sys.path.insert(0, folder)
    with _usage_errors(ImportError):
        make = pkgutil.resolve_name(f"{name}:{attribute}")
    is_function = callable(make) and not isinstance(make, torch.nn.Module)
    match make() if is_function else make:
        case (model, (tuple() | list()) as args, *rest) if is_function and callable(model) and len(rest) <= 1:
            kwargs: dict[str, Any] = rest[0] if rest else {}
        case _:
            accepted = "(model, args) or (model, args, kwargs), args a tuple such as (x,)"
            raise _UsageError(f"{spec} is not accepted: it must be a function that returns {accepted}")
    if isinstance(model, torch.nn.Module):
        model.train(training)
    return model, tuple(args), kwargs


def _output(arguments: argparse.Namespace, result: Any, ok: bool = True) -> int:
    """Print a result, and write it to the requested files. Return the exit code."""
    print(result)
    if arguments.json:
        Path(arguments.json).write_text(result.to_json(), encoding="utf-8")
    if getattr(arguments, "html", None):
        result.to_html(arguments.html)
    return 0 if ok else 1


def _explain(arguments: argparse.Namespace) -> int:
    listed: dict[str, Any] = {}
    if arguments.spec:
        if arguments.saved or arguments.snapshot:  # report missing Triton before slow work
            gpus.import_triton()
        training = arguments.train or arguments.saved or arguments.snapshot is not None
        model, args, kwargs = _load(arguments, training)
        with torch.set_grad_enabled(training):
            report = tfo.explain(model, *args, policy=tfo.FusionPolicy.parse(arguments.policy), **kwargs)
        if arguments.saved or arguments.snapshot:
            parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
            listed = {"saved": report.saved, "parameters": [p.nbytes for p in parameters]}
        if not arguments.snapshot:
            return _output(arguments, report)
    with _usage_errors(ValueError), _progress("torch_fused_ops.snapshot"):
        plan = Path(arguments.plan) if arguments.plan else None
        return _output(arguments, tfo.read_snapshot(arguments.snapshot, plan=plan, **listed))


def _plan(arguments: argparse.Namespace) -> int:
    with torch.device("meta") if arguments.meta else contextlib.nullcontext():
        model, args, kwargs = _load(arguments, training=True)
    settings = {name: getattr(arguments, name) for name in PLAN}
    with _usage_errors(ValueError), _progress("torch_fused_ops.planner"):
        plan = tfo.plan(model, *args, **settings, **kwargs)
        if arguments.snapshot:
            plan.to_snapshot(arguments.snapshot)
    return _output(arguments, plan, plan.fits)


def _verify(arguments: argparse.Namespace) -> int:
    model, args, kwargs = _load(arguments, training=not arguments.eval)
    policy = tfo.FusionPolicy.parse(arguments.policy)
    with _progress("torch_fused_ops.verify"):
        verification = tfo.verify(model, *args, policy=policy, compiled=arguments.compiled, **kwargs)
    return _output(arguments, verification, verification.ok)


def _audit(arguments: argparse.Namespace) -> int:
    from torch_fused_ops import virtual_gpu

    gpus.import_triton()
    training = not arguments.eval
    model, args, kwargs = _load(arguments, training)
    policy = tfo.FusionPolicy.parse(arguments.policy)
    config = None if arguments.plain else tfo.compile_options(policy=policy)
    with _usage_errors(ValueError, torch._dynamo.exc.Unsupported):
        gpu = gpus.by_name(arguments.gpu, "--gpu")
        with torch.set_grad_enabled(training):
            paper = virtual_gpu.compile_on_paper(model, *args, gpu=gpu, training=training, config=config, **kwargs)
        audit = virtual_gpu.audit(paper)
    return _output(arguments, audit, audit.ok)


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


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "info": _info, "check": _check, "run": environment.run, "bench": _bench,
    "explain": _explain, "plan": _plan, "verify": _verify, "audit": _audit,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    arguments = parse(argv)
    try:
        return _COMMANDS[arguments.command](arguments)
    except Exception as e:
        message = str(e)
        if not isinstance(e, _UsageError) and getattr(e, "name", "") != "triton":
            if not hasattr(arguments, "spec"):
                raise
            traceback.print_exc()  # an error in the model; exit code 1 means that a command has findings
            message = f"{arguments.spec} cannot be run: {said(e)}"
        print(f"error: {message}", file=sys.stderr)
        return 2
