"""Settings in the environment: ``TORCH_FUSED_OPS`` and ``TORCH_FUSED_OPS_REPORT``.

``TORCH_FUSED_OPS="memory=fp8,gemm=fp8"`` is ``enable(FusionPolicy(...))`` without editing the script
(``docs/integrations.md``). ``torch_fused_ops_autoload.py`` reads it when torch is imported. The policy takes effect
when Inductor is imported, since importing Inductor early would cost 1.7 s. ``TORCH_FUSED_OPS_REPORT`` names a file; the
process writes its report there at exit. ``python -m torch_fused_ops run`` sets both.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from torch_fused_ops.policy import BOOLS, FusionPolicy

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
