"""The set-up of a training step: the settings of ``plan``, checked without importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch_fused_ops.policy import MEMORY, is_level

# What each setting accepts, by its name in Python.
GPUS = ("A100", "H100", "H200", "B200", "MI300X")
ACCEPTED: Mapping[str, Sequence[object]] = {
    "gpu": GPUS,
    "optimizer": ("adamw", "sgd", "none"),
    "maximum": ("batch", "tokens", None),
}
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("iB", 1024), ("B", 1000))
}


def bytes_of(memory: object) -> int:
    """Parse bytes: "72GiB", "800 MiB", "80GB", or a number.

    Raises:
        ValueError: memory is not such a size, or not above 0.
    """
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    bare = bool(match and not match[2] and size < _UNITS["MiB"])
    if size <= 0 or bare:
        why = "; plan chooses the levels itself" if is_level(memory) else ""
        why = f"; {memory.strip()} without a unit means bytes" if bare and isinstance(memory, str) else why
        units = ", ".join(filter(None, _UNITS))
        accepted = f'it must be a size such as "72GiB", "800MiB" or bytes, with one of {units}'
        raise ValueError(f"memory={memory!r} is not accepted: {accepted}{why}")
    return size


def check(name: str, value: object) -> None:
    """Check one setting of ``plan``.

    Raises:
        ValueError: the value is not accepted; the message lists the accepted values.
    """
    if name == "memory":
        bytes_of(value)
    elif name in ("dp", "accumulate"):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            counted = "GPUs" if name == "dp" else "micro-batches"
            raise ValueError(f"{name}={value!r} is not accepted: it must be a number of {counted}, 1 or more")
    elif name == "levels":
        unknown = [level for level in value if level not in MEMORY] if isinstance(value, (list, tuple)) else [value]
        if value is not None and (unknown or not value):
            raise ValueError(f"levels={value!r} is not accepted: it must list some of {', '.join(MEMORY)}")
    elif name in ACCEPTED:
        known = ACCEPTED[name]
        if (value.upper() if name == "gpu" and isinstance(value, str) else value) not in known:
            accepted = ", ".join(str(one) for one in known if one is not None)
            raise ValueError(f"{name}={value!r} is not known; accepted: {accepted}")
