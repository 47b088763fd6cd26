"""The virtual GPU is a package of its own: nothing of this library in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torch_fused_ops import virtual_gpu


def test_it_is_whole_without_the_rest_of_the_library(tmp_path: Path) -> None:
    """Copied elsewhere, under another name. (Imports inside functions: tests/test_layers.py.)"""
    shutil.copytree(Path(virtual_gpu.__file__).parent, tmp_path / "on_its_own")
    program = """
import sys, on_its_own
print(on_its_own.by_name("h200").arch)
print([name for name in sys.modules if name.startswith("torch_fused_ops") and name != "torch_fused_ops_autoload"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["sm_90", "[]"], done.stderr[-3000:]


@pytest.mark.slow
def test_a_compiler_that_is_imported_while_kernels_are_interpreted_is_whole() -> None:
    """As it is imported it copies min and max of the language, which the interpreter has replaced for a while."""
    program = """
from torch_fused_ops.virtual_gpu import interpreter
with interpreter._interpreting():
    import triton.compiler.code_generator as compiler
from triton.language import core
print(compiler.CodeGenerator.builtin_namespace["min"] in (core.minimum, getattr(core, "builtin_min", None)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr[-3000:]
