"""Parts of the library that the environment turns off: ``TORCH_FUSED_OPS_WITHOUT="kernels,buffer_reuse"``.

Turn a part off on a device where it fails or gives wrong results (``docs/troubleshooting.md``).
"""

from __future__ import annotations

import os

NAME = "TORCH_FUSED_OPS_WITHOUT"

PARTS = ("kernels", "compiled_kernels", "float8_kernels", "buffer_reuse", "split_reductions")
"""The parts that can be turned off. "kernels" includes "compiled_kernels" and "float8_kernels"."""


def _parse(text: str) -> tuple[str, ...]:
    names = [name for part in text.split(",") if (name := part.strip())]
    for name in names:
        if name not in PARTS:
            raise ValueError(
                f"the environment variable {NAME}={text!r} is not accepted: {name!r} is not a part that can be turned "
                f"off (accepted, separated by commas: {', '.join(PARTS)})"
            )
    return tuple(part for part in PARTS if part in names)


WITHOUT = _parse(os.environ.get(NAME, ""))


def is_without(part: str) -> bool:
    """True if the environment turns off this part of ``PARTS``."""
    return part in WITHOUT or (part in ("compiled_kernels", "float8_kernels") and "kernels" in WITHOUT)
