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

__all__ = ["NAME", "POLICY", "REPORT", "REPORT_NAME", "run"]

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
# Popped, so that child processes do not write to the same file. Other ranks would, too.
REPORT = os.environ.pop(REPORT_NAME, "") if os.environ.get("RANK", "0") == "0" else ""


def run(arguments: argparse.Namespace) -> NoReturn:
    """Replace this process by ``python SCRIPT ...``, with the policy and the report's file in its environment.

    ``os.execv`` of the same interpreter, so Python itself sets up the script. The new process writes the report.
    """
    error = arguments.command_parser.error
    if not arguments.program:
        error("SCRIPT is missing: give the path of a Python program, or -m and a module's name")
    name = arguments.program[0]
    if not arguments.module and not Path(name).exists():
        error(f"SCRIPT {name!r} does not exist: give the path of a Python program, or -m and a module's name")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        error("TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set: `import torch` then loads no plug-in, this one included")
    fields = [f"memory={arguments.memory}", f"gemm={arguments.gemm}", f"strict={arguments.strict}".lower()]
    text = ",".join((*fields, *(f"exclude={pattern}" for pattern in arguments.exclude)))
    try:
        FusionPolicy.parse(text)
    except ValueError as e:
        error(str(e))
    settings = {NAME: text}
    if arguments.report and os.environ.get("RANK", "0") == "0":
        file = Path(arguments.report).resolve()  # the program may change its folder
        if file.is_dir() or not os.access(file.parent, os.W_OK):
            error(f"--report {arguments.report} cannot be written: it must be a file in an existing folder")
        settings[REPORT_NAME] = str(file)
    os.environ.update(settings)
    flags = [*subprocess._args_from_interpreter_flags(), *(["-m"] if arguments.module else [])]  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *flags, *arguments.program])
