"""Scripts behind the pages' figures, in a clone only.

python -m torch_fused_ops.benchmarks.laboratory.NAME --help

on_paper           estimates of six blocks for an H200
plans              ``plan`` of four models
coverage           fused MLPs in the architectures of transformers
fp8_recipes        float8 recipes of this library and of torchao
training           losses after training, by memory level and recipe
paper_and_devices  published times and peaks, and the virtual GPU's estimates
training_steps     published peaks of training steps, and ``plan``'s estimates
offload            the link's bandwidth, and steps with and without ``offload``
gpu                all measurements of a GPU in four commands; gpu_tests is its pytest plug-in
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["run_script"]


def run_script(main: Callable[[argparse.Namespace], int], text: str | None, **options: dict[str, Any]) -> int:
    """Run a script with these options of the command line. ``text`` is its docstring. Return the exit code."""
    from torch_fused_ops.benchmarks.harness import UsageError

    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, option in options.items():
        parser.add_argument(f"--{name}", **option)
    try:
        return main(parser.parse_args())
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
