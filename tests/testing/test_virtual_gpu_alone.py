"""Triton's language as the virtual GPU leaves it, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
