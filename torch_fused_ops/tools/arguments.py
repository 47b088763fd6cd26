"""The command line: ``python -m torch_fused_ops {info, check, explain, plan, verify, audit, run, bench}``.

``explain``, ``plan``, ``verify`` and ``audit`` call CALLABLE without arguments; it returns ``(model, args)`` or
``(model, args, kwargs)``. MODULE is a module's name or a ``.py`` file. Invalid arguments exit with code 2.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_fused_ops._version import __version__
from torch_fused_ops.benchmarks.variants import MEANINGS
from torch_fused_ops.planner import setup
from torch_fused_ops.policy import ATTENTION, CHECKPOINTS, GEMM, LEVELS, FusionPolicy
from torch_fused_ops.settings.environment import writable

_BENCH_OPTIONS: dict[str, dict[str, Any]] = {
    "device": {"help": "cpu, cuda, cuda:1, …; by default a GPU, if there is one"},
    "quick": {"action": "store_true", "help": "a tiny run, to check that it works"},
    "sizes": {"nargs": "+", "metavar": "SIZE", "default": [], "help": "8192x4096, …; default: its own"},
    "dtypes": {"nargs": "+", "choices": ("bfloat16", "float16", "float32"), "default": [], "help": "default: its own"},
    "only": {"nargs": "+", "metavar": "TEXT", "default": [], "help": "only cases whose names contain all these texts"},
    "skip": {"nargs": "+", "metavar": "TEXT", "default": [], "help": "skip cases whose names contain one of these"},
    "ways": {"nargs": "+", "metavar": "WAY", "default": [], "help": "only these variants (below)"},
    "seconds": {"type": float, "help": "time for each case"},
    "rounds": {"type": int, "default": 1000, "help": "maximum rounds per case (default: 1000)"},
    "limit": {"type": float, "help": "total seconds (GPU: 540); lists the remaining cases"},
    "resume": {"action": "store_true", "help": "keep the results in the file, and measure the missing ones"},
    "threads": {"type": int, "default": 0, "help": "CPU threads (default: torch's choice)"},
    "seed": {"type": int, "default": 0, "help": "for random numbers and the order of variants (default: 0)"},
    "out": {"type": Path, "metavar": "FILE", "help": "results; bench writes NAME_DEVICE.json by default, --quick none"},
}  # fmt: skip
BENCHMARKS = {
    "pointwise": "every operator by itself, forward and backward, and the overhead of a call",
    "mlp": "a training step of GELU and SwiGLU MLPs",
    "model": "a training step of whole models",
}


def _ways(benchmark: str) -> str:
    """Describe a benchmark's variants for its help; "" without variants."""
    variants = [(", ".join(m.ways), m.text) for m in MEANINGS if benchmark in m.benchmarks]
    return "\n".join(["variants:", *(f"  {names}\n      {text}" for names, text in variants)]) if variants else ""


_SPEC: dict[str, Any] = {
    "metavar": "MODULE:CALLABLE",
    "help": "CALLABLE() returns (model, args) or (model, args, kwargs); MODULE is a module's name or a .py file",
}
_POLICY: dict[str, dict[str, Any]] = {
    "--memory": {
        "default": "free", "metavar": "LEVEL",
        "help": f"{LEVELS}; or PATTERN=LEVEL,… for some MLPs: '*.layers.[0-3].*=input,*=fp8'; free by default",
    },
    "--gemm": {
        "default": "bf16", "metavar": "RECIPE",
        "help": f"{', '.join(GEMM)}; or PATTERN=RECIPE,…; bf16 by default",
    },
    "--attention": {
        "default": "off", "metavar": "LEVEL",
        "help": f"{', '.join(ATTENTION)}; or PATTERN=LEVEL,…; off by default",
    },
    "--checkpoints": {
        "default": "keep", "metavar": "|".join(CHECKPOINTS),
        "help": "replace: levels take the place of checkpoints; or PATTERN=replace,… for some modules",
    },
    "--offload": {
        "default": "false", "metavar": "true|false",
        "help": "true: saved tensors move to the host's memory; or PATTERN=true,… for some modules",
    },
    "--exclude": {"metavar": "PATTERN", "action": "append", "default": [], "help": "MLPs not to fuse; may be repeated"},
}  # fmt: skip
_FLAG = {"action": "store_true"}
_PLAN: dict[str, dict[str, Any]] = {
    "--capacity": {"help": 'the memory limit: "72GiB", "800MiB" or bytes (required)'},
    "--gpu": {"default": "H200", "help": f"{', '.join(setup.GPUS)}; H200 by default"},
    "--optimizer": {"default": "adamw", "help": "adamw (default), adamw-fused, sgd or none"},
    "--levels": {
        "type": lambda text: tuple(text.split(",")), "metavar": "LEVEL,…",
        "help": "the levels to choose among: free,input,input+attention; by default all",
    },
    "--max": {"dest": "maximum", "metavar": "WHAT", "help": "batch or tokens: find the largest; takes minutes"},
    "--loss": {"help": "of a model that returns logits: eager or compiled, the cross entropy of a float32 copy"},
    "--keep-logits": {**_FLAG, "help": "the training loop holds the logits to the end of the step"},
    "--dp": {"type": int, "default": 1, "help": "GPUs over which FSDP2 shards the layers; figures are per GPU"},
    "--parallel": {"default": "fsdp2", "help": "with --dp: fsdp2 (default) or ddp"},
    "--mixed-precision": {**_FLAG, "help": "FSDP2 gathers in bf16, reduces in float32; shards and state are float32"},
    "--root": {"default": "with", "help": "apart: embedding, and norm with head, are separate FSDP2 groups"},
    "--reshard": {"default": "always", "help": "FSDP2 frees after forward: always, not-last or never"},
    "--master-weights": {"help": "float32: float32 weights and state under bf16 autocast (Trainer's bf16=True)"},
    "--accumulate": {"type": int, "default": 1, "help": "micro-batches for each step of the optimizer"},
    "--compile": {"dest": "compiled", "default": "model", "help": "the compiled part: model (default), layers or none"},
    "--expandable-segments": {**_FLAG, "help": "the allocator's setting: PyTorch reserves less"},
    "--offload-bandwidth": {"type": float, "metavar": "GB/s", "help": "move saved tensors to the host at this rate"},
    "--host-memory": {"metavar": "SIZE", "help": "pinned host memory for each rank; by default unlimited"},
}  # fmt: skip
PLAN = {settings.get("dest", option[2:].replace("-", "_")): option for option, settings in _PLAN.items()}
_FILES = {
    "--json": {"metavar": "FILE", "help": "also write the result as JSON"},
    "--html": {"metavar": "FILE", "help": "also write the result as a page"},
}
# Descriptions and arguments of the other commands.
_COMMANDS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "info": ("print versions, devices and active settings", {}),
    "check": ("check every operator on a device: opcheck and precision", {
        "--device": _BENCH_OPTIONS["device"],
        "--quick": {**_FLAG, "help": "fewer samples"},
    }),
    "explain": ("list a model's MLPs, fused or not, with reasons; or explain a memory snapshot", {
        "spec": {**_SPEC, "nargs": "?"},
        **_POLICY,
        "--train": {**_FLAG, "help": "training mode with gradients; by default evaluation mode without"},
        "--saved": {**_FLAG, "help": "--train, and list tensors saved for backward with settings that remove them"},
        "--snapshot": {"metavar": "FILE", "help": "explain this memory snapshot of PyTorch's; with or without a model"},
        "--plan": {"metavar": "FILE", "help": "with --snapshot: compare with a file of plan --json or plan --snapshot"},
        **_FILES,
    }),
    "plan": ("fit a training step into a GPU's memory; exit code 1 if it does not fit", {
        "spec": _SPEC,
        **_PLAN,
        "--meta": {**_FLAG, "help": "create the model on the meta device, without data"},
        "--snapshot": {"metavar": "FILE", "help": "also write the planned step as a memory snapshot of PyTorch's"},
        **_FILES,
    }),
    "verify": ("compare a training step of a model in eager mode, compiled and fused", {
        "spec": _SPEC,
        **_POLICY,
        "--eval": {**_FLAG, "help": "evaluation mode; by default training mode"},
        "--compiled": {**_FLAG, "help": "generate code; by default the compiled graphs are run call by call"},
        "--json": _FILES["--json"],
    }),
    "audit": ("look for races and other faults in a model's GPU kernels; exit code 1 if there are any", {
        "spec": _SPEC,
        **_POLICY,
        "--plain": {**_FLAG, "help": "the kernels of plain torch.compile, without fusion"},
        "--eval": {**_FLAG, "help": "evaluation mode; by default forward and backward"},
        "--gpu": {"default": "H100", "help": "as for plan; H100 by default"},
        "--json": _FILES["--json"],
    }),
    "run": ("run a Python program with fusion in every torch.compile", {
        **_POLICY,
        "--strict": {**_FLAG, "help": "raise an error if an MLP is not fused"},
        "--report": {"metavar": "FILE", "help": "write a report (of rank 0) at exit: .json, .html, or text"},
        "-m": {**_FLAG, "dest": "module", "help": "SCRIPT is a module's name"},
        "script": {"metavar": "SCRIPT"},
        "program_arguments": {"nargs": argparse.REMAINDER, "metavar": "ARGUMENT"},
    }),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m torch_fused_ops``. It sets ``command``, and ``benchmark`` for ``bench``."""
    main = argparse.ArgumentParser("python -m torch_fused_ops", description="Fused MLP operators for PyTorch.")
    main.add_argument("--version", action="version", version=f"torch_fused_ops {__version__}")
    commands = main.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (text, options) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        command.set_defaults(error=command.error)
        for option, settings in options.items():
            command.add_argument(option, **settings)
    bench = commands.add_parser("bench", help="benchmark this library against PyTorch")
    names = bench.add_subparsers(metavar="NAME", dest="benchmark", required=True)
    formatter = argparse.RawDescriptionHelpFormatter
    for name, text in BENCHMARKS.items():
        benchmark = names.add_parser(name, help=text, description=text, epilog=_ways(name), formatter_class=formatter)
        for option, settings in _BENCH_OPTIONS.items():
            benchmark.add_argument(f"--{option}", **settings)
    return main


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the arguments of ``python -m torch_fused_ops``, by default the process's.

    Invalid arguments exit with code 2. The namespace has the policy as text in ``policy``, for ``FusionPolicy.parse``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for i, word in enumerate(words[:-1]):  # argparse reads "-5GiB" as an option
        if words[0] == "plan" and word == "--capacity" and re.match(r"-\.?\d", words[i + 1]):
            words[i : i + 2] = [f"{word}={words[i + 1]}"]
    arguments = parser().parse_args(words)
    try:
        if arguments.command == "explain" and not (arguments.spec or arguments.snapshot):
            raise ValueError("MODULE:CALLABLE is missing; only --snapshot FILE works without a model")
        if arguments.command == "plan":
            for name in PLAN:
                if name != "capacity":
                    setup.check(name, getattr(arguments, name))
            setup.Setup(**{name: getattr(arguments, name) for name in setup.Setup.__dataclass_fields__})
            if arguments.capacity is None:  # not argparse's ``required``, which would hide other mistakes
                raise ValueError("the following arguments are required: --capacity")
            setup.check("capacity", arguments.capacity)
        elif hasattr(arguments, "gemm"):
            names = ("memory", "gemm", "attention", "checkpoints", "offload", "strict")
            fields = [name for name in names if hasattr(arguments, name)]
            pairs = [f"{name}={getattr(arguments, name)}" for name in fields]
            arguments.policy = ",".join((*pairs, *(f"exclude={pattern}" for pattern in arguments.exclude)))
            FusionPolicy.parse(arguments.policy)
        for option in ("json", "html", "report", *(("snapshot",) if arguments.command == "plan" else ())):
            if file := getattr(arguments, option, None):
                writable(f"--{option} {file}", file)
    except (TypeError, ValueError) as error:
        arguments.error(described(error))
    return arguments


def described(error: Exception) -> str:
    """Return the message of an error, with the option's name for a setting of ``plan``."""
    if not isinstance(error, setup.SettingError):
        return str(error)
    values = ",".join(map(str, error.value)) if isinstance(error.value, tuple) else error.value
    return f"{PLAN[error.name]}{'' if values is True else f' {values}'} {error.problem}"
