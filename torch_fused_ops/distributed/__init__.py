"""Support for sharded tensors: DTensor rules, tensor parallelism and checkpoints."""

import importlib
from typing import Any

__all__ = ["apply_swiglu_sharded_factory", "load", "save", "sharded_state_dict"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported at the first use, because importing DTensor and torch.distributed.checkpoint is slow.
    return getattr(importlib.import_module(f"{__name__}.checkpoint"), name)
