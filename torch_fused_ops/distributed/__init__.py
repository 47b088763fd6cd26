"""Support for sharded tensors: DTensor rules, tensor parallelism and checkpoints."""

import importlib
from typing import Any

# Imported on first use: importing DTensor and torch.distributed.checkpoint is slow.
_WHERE = {
    "apply_swiglu_sharded_factory": "checkpoint",
    "load": "checkpoint",
    "save": "checkpoint",
    "sharded_state_dict": "checkpoint",
}

__all__ = ["apply_swiglu_sharded_factory", "load", "save", "sharded_state_dict"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
