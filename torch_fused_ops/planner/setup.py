"""Check the settings of ``plan`` without importing torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A layer's levels, the plainest first: the memory level of its MLPs. "+attention" adds "input" for its attention.
WITH_ATTENTION = "+attention"
OFF = "off"  # a level that is never mixed with other levels
LEVELS = ("off", "free", "fp8", "free+attention", "fp8+attention", "input", "input+attention", "tiled")
# Accepted values of each setting, by its name in Python.
GPUS = ("A100", "H100", "H200", "B200", "GB200", "GB300", "MI300X", "A10G", "L40S", "RTX5090", "RTXPRO6000")
ACCEPTED: Mapping[str, Sequence[object]] = {
    "gpu": GPUS,
    "optimizer": ("adamw", "adamw-fused", "sgd", "none"),
    "maximum": ("batch", "tokens", None),
    "loss": ("eager", "compiled", None),
    "parallel": ("fsdp2", "ddp"),
    "root": ("with", "apart"),
    "reshard": ("always", "not-last", "never"),
    "master_weights": ("float32", None),
    "compiled": ("model", "layers", "none"),
}
# The share of its pools' sizes that PyTorch reserves in addition, by ``expandable_segments``. With True, this covers
# 33 of 33 published steps; with False, 13 of 14 (docs/paper-and-devices.md).
FRAGMENTATION = {True: 0.08, False: 0.20}
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("iB", 1024), ("B", 1000))
}


class SettingError(ValueError):
    """A setting of ``plan`` is not accepted. The message names the argument; the command line names its option."""

    def __init__(self, name: str, value: object, problem: str) -> None:
        super().__init__(f"{name}={value!r} {problem}")
        self.name, self.value, self.problem = name, value, problem


@dataclass(frozen=True)
class Setup:
    """How a model is trained. ``plan`` documents each setting."""

    optimizer: str = "adamw"
    dp: int = 1
    parallel: str = "fsdp2"
    mixed_precision: bool = False
    root: str = "with"
    reshard: str = "always"
    master_weights: str | None = None
    accumulate: int = 1
    compiled: str = "model"
    expandable_segments: bool = False
    offload_bandwidth: float | None = None
    host_memory: str | int | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            check(name, getattr(self, name))
        fsdp_settings = (("mixed_precision", True), ("root", "apart"), ("reshard", "not-last"), ("reshard", "never"))
        for name, value in fsdp_settings:
            if getattr(self, name) == value and not self.sharded:
                problem = "is not accepted: it is a setting of FSDP2, for more than one GPU"
                raise SettingError(name, value, problem)
        if self.mixed_precision and self.master_weights:
            problem = "is not accepted with mixed precision, whose shards are float32"
            raise SettingError("master_weights", self.master_weights, problem)
        if self.offload_bandwidth and self.compiled == "none":
            raise SettingError("offload_bandwidth", self.offload_bandwidth, "is not accepted: nothing is compiled")
        if self.host_memory is not None and not self.offload_bandwidth:
            raise SettingError("host_memory", self.host_memory, "is not accepted: nothing moves without a bandwidth")

    @property
    def sharded(self) -> bool:
        """True if FSDP2 shards the model."""
        return self.dp > 1 and self.parallel != "ddp"

    def available(self, limit: int) -> int:
        """Return the bytes of a limit that pools may take; the remainder is for fragmentation."""
        return int(limit / (1 + FRAGMENTATION[self.expandable_segments]))

    def reserved(self, nbytes: int) -> int:
        """Return about how many bytes PyTorch reserves if its pools hold ``nbytes``."""
        return math.ceil(nbytes * (1 + FRAGMENTATION[self.expandable_segments]))


def bytes_of(capacity: object, name: str = "capacity") -> int:
    """Parse bytes: "72GiB", "800 MiB", "80GB", or a number. ``name`` is the setting's name in messages.

    Raises:
        SettingError: capacity is neither such a text nor a number of bytes above 0.
    """
    if isinstance(capacity, int) and not isinstance(capacity, bool) and capacity > 0:
        return capacity
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", capacity) if isinstance(capacity, str) else None
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    bare = bool(match and not match[2] and size < _UNITS["MiB"])
    if size <= 0 or bare:
        why = f"; {str(capacity).strip()} without a unit means bytes" if bare else ""
        units = ", ".join(filter(None, _UNITS))
        accepted = f'it must be a size such as "72GiB", "800MiB" or bytes, with one of {units}'
        raise SettingError(name, capacity, f"is not accepted: {accepted}{why}")
    return size


def check(name: str, value: object) -> None:
    """Check one setting of ``plan``.

    Raises:
        SettingError: the value is not accepted; the message lists the accepted values.
    """
    if name == "capacity" or (name == "host_memory" and value is not None):
        bytes_of(value, name)
    elif name == "offload_bandwidth" and value is not None:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise SettingError(name, value, "is not accepted: it must be a number of GB/s, such as 50 for PCIe 5")
    elif name in ("dp", "accumulate"):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            counted = "GPUs" if name == "dp" else "micro-batches"
            raise SettingError(name, value, f"is not accepted: it must be a number of {counted}, 1 or more")
    elif name == "levels":
        unknown = [level for level in value if level not in LEVELS] if isinstance(value, (list, tuple)) else [value]
        if value is not None and (unknown or not value):
            raise SettingError(name, value, f"is not accepted: it must list some of {', '.join(LEVELS)}")
    elif name in ACCEPTED:
        known = ACCEPTED[name]
        spelled = value.upper().replace(" ", "") if name == "gpu" and isinstance(value, str) else value
        if spelled not in known:
            accepted = ", ".join(str(value) for value in known if value is not None)
            raise SettingError(name, value, f"is not known; accepted: {accepted}")
