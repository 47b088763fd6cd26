"""State of our modules for Megatron core's ``dist_checkpointing``, made by Megatron's functions, under Megatron's keys.

Megatron's layers call each module's ``sharded_state_dict`` with ``metadata["dp_cp_group"]`` and expect Megatron's own
``ShardedTensor``. Megatron's optimizers split a parameter's state in the same way and find it by the parameter object.
So an entry's ``data`` is the parameter.

Megatron is imported on first use. The checkpoints equal the checkpoints of Megatron core's ``MLP`` (0.16, and its main
branch of August 2026).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch_fused_ops.distributed.checkpoint import Offsets


def is_megatron_call(metadata: dict[str, Any] | None) -> bool:
    """Return True if one of Megatron's layers made the call: it passes ``dp_cp_group``."""
    return "dp_cp_group" in (metadata or {})


def check_linears(module: nn.Module) -> None:
    """Raise ValueError for a linear of Megatron: ``torch.distributed.checkpoint`` does not support its tensors."""
    for name, child in module.named_children():
        is_ours = hasattr(child, "shard_specs")  # this module cannot import ``nn``
        if not is_ours and hasattr(child, "sharded_state_dict"):
            raise ValueError(
                f"metadata without dp_cp_group is not accepted with {name} of type {type(child).__name__}, a linear of "
                "Megatron: dp_cp_group must be the process group that holds the same parameters"
            )


def linear_state(linear: Any, prefix: str, offsets: Offsets, metadata: Any) -> dict[str, Any]:
    """Return the state of a ``ParallelLinear`` as Megatron's ``ColumnParallelLinear`` would.

    It has an ``_extra_state``, in which TransformerEngine stores its fp8 state; ours is None.
    """
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    state = dict(linear.named_parameters(recurse=False))
    for name, parameter in state.items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{prefix}{name} is a DTensor, which Megatron's checkpoints do not support: use distributed.save"
            )
    axes = {name: linear.shard_specs[name].axis for name in state if linear.shard_specs[name].axis is not None}
    group = None if linear.parallel is None else linear.parallel.group
    sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        {**state, "_extra_state": None}, prefix, axes, offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
    )
    return sharded


def functions() -> tuple[Callable[..., dict[str, Any]], Callable[..., Any]]:
    """Return Megatron's functions for a child's state, and for splitting an entry of a packed [gate; up] parameter."""
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
    from megatron.core.transformer.utils import sharded_state_dict_default

    return sharded_state_dict_default, apply_swiglu_sharded_factory
