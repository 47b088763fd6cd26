"""Scripts behind the figures of the pages: a folder of a clone that is not installed.

python -m torch_fused_ops.benchmarks.laboratory.NAME --help

on_paper         estimates for an H200; plans: what ``plan`` says of four models; diagrams: pictures of the pages
compile_time     what fusion adds to compile time
coverage         which MLPs of transformers' architectures are fused
fp8_recipes      float8's recipes beside torchao's; fp8_training, long_training: losses after training
paper_and_devices  times and peaks that others measured, beside those that the virtual GPU predicts
upstream_memory  PyTorch's own ways to keep less for backward
gpu              a GPU that is there for half an hour; probe: its kernels' variants; decisions: what follows;
                 gpu_tests: the plug-in by which pytest survives the loss of the device
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["run_script"]


def run_script(
    main: Callable[[argparse.Namespace], int],
    text: str,
    options: Sequence[str],
    arguments: Sequence[str] | None = None,
    **more: dict[str, Any],
) -> int:
    """Run a script that takes some of the options of ``bench``; returns the exit code.

    Args:
        main: the script.
        text: its docstring.
        options: their names.
        arguments: the command line, by default the program's.
        more: options of its own, as ``add_argument`` takes them.
    """
    from torch_fused_ops.benchmarks.harness import UsageError
    from torch_fused_ops.tools.arguments import add_bench_options

    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_bench_options(parser, options)
    for name, option in more.items():
        parser.add_argument(f"--{name}", **option)
    try:
        return main(parser.parse_args(arguments))
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
