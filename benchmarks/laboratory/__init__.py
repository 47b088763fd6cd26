"""Scripts behind the figures of the pages: a folder of a clone that is not installed.

python -m torch_fused_ops.benchmarks.laboratory.NAME --help

on_paper           estimates of six blocks for an H200
plans              ``plan`` of four models
coverage           which MLPs of transformers' architectures are fused
fp8_recipes        float8 recipes beside torchao's
training           losses after training, by memory level and recipe
paper_and_devices  times and peaks that others measured, beside the virtual GPU's
training_steps     peaks of training steps that others measured, beside ``plan``
gpu                all measurements of a GPU in three commands; gpu_tests is its pytest plug-in
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
