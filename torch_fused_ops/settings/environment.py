"""Settings in the environment: ``TORCH_FUSED_OPS`` and ``TORCH_FUSED_OPS_REPORT``.

``TORCH_FUSED_OPS="memory=fp8,gemm=fp8"`` is ``enable(FusionPolicy(...))`` without editing the script
(``docs/integrations.md``). ``torch_fused_ops_autoload.py`` reads it when torch is imported. The policy takes effect
when Inductor is imported, since importing Inductor early would cost 1.7 s. ``TORCH_FUSED_OPS_REPORT`` names a file; the
process writes its report there at exit. ``python -m torch_fused_ops run`` sets both.

A file beside Inductor's caches lists the GPUs on which ``check`` has passed, one line each.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from torch_fused_ops._version import __version__
from torch_fused_ops.policy import BOOLS, FusionPolicy

log = logging.getLogger("torch_fused_ops")

NAME, REPORT_NAME = "TORCH_FUSED_OPS", "TORCH_FUSED_OPS_REPORT"


def _policy() -> FusionPolicy | None:
    text = os.environ.get(NAME, "").strip()
    if not text or BOOLS.get(text.lower()) is False:
        return None
    try:
        return FusionPolicy.parse(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the environment variable {NAME}={text!r} is not accepted: {error}") from None


POLICY = _policy()
# Popped, so that child processes do not write to the same file. Only rank 0 writes it.
REPORT = os.environ.pop(REPORT_NAME, "") if os.environ.get("RANK", "0") == "0" else ""


def writable(argument: str, file: str | Path) -> Path:
    """Check that a file can be written.

    Raises:
        ValueError: the path is a folder, or its folder does not exist. The message begins with ``argument``.
    """
    path = Path(file)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{argument} cannot be written: it must be a file in an existing folder")
    return path


def run(arguments: argparse.Namespace) -> NoReturn:
    """Replace this process by ``python SCRIPT ...``, with the policy and the report's file in its environment.

    ``os.execve`` of the same interpreter, so Python itself sets up the script. The new process writes the report.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        arguments.error("TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set: `import torch` loads no plug-in, this one included")
    environ = {**os.environ, NAME: arguments.policy}
    if arguments.report and os.environ.get("RANK", "0") == "0":
        environ[REPORT_NAME] = str(Path(arguments.report).resolve())  # the program may change its folder
    flags = [*subprocess._args_from_interpreter_flags(), *(["-m"] if arguments.module else [])]  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    program = [sys.executable, *flags, arguments.script, *arguments.program_arguments]
    os.execve(sys.executable, program, environ)


# ---- checked GPUs ----------------------------------------------------------------------------------------------------


def version_of(package: str) -> str:
    """Return a package's version, or "" if it is not installed."""
    return getattr(importlib.import_module(package), "__version__", "?") if find_spec(package) else ""


def _file() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "torch_fused_ops_checked.txt"


def _described(device: str | None = None) -> str:
    """Return a GPU's name with all versions that its kernels depend on."""
    import torch

    versions = f"torch {torch.__version__}, Triton {version_of('triton')}, torch_fused_ops {__version__}"
    driver: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return f"{torch.cuda.get_device_name(device)}, driver {driver}, {versions}"


def checked_gpus() -> list[str]:
    """Return the GPUs on which ``check`` has passed, each with the versions it ran with."""
    return _file().read_text(encoding="utf-8").splitlines() if _file().exists() else []


def note_checked(device: str) -> None:
    """Add a GPU on which ``check`` has passed."""
    if (gpu := _described(device)) not in checked_gpus():
        with _file().open("a", encoding="utf-8") as file:
            print(gpu, file=file)


@cache
def remind() -> None:
    """Log the command that checks the current GPU, once and on a machine's first rank, if it has not passed there."""
    try:
        gpu, gpus = _described(), checked_gpus()
    except Exception:  # a reminder is not worth a failed compilation
        return
    if gpu not in gpus and os.environ.get("LOCAL_RANK", "0") == "0":
        log.warning(
            "not checked yet on %s: `python -m torch_fused_ops check` runs every operator's checks on your device, in "
            "minutes; afterwards this warning no longer appears",
            gpu,
        )
