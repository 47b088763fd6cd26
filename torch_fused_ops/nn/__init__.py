"""Modules (Megatron core's MLP and experts, and a plain MLP), and ``replace_mlps`` for existing models."""

from torch_fused_ops.nn.config import MLPConfig
from torch_fused_ops.nn.experts import (
    GroupedLinearBuilder,
    GroupedLinearInterface,
    GroupedMLP,
    GroupedMLPSubmodules,
    Permuted,
    permute,
    unpermute,
)
from torch_fused_ops.nn.fused_mlp import FusedMLP
from torch_fused_ops.nn.linear import (
    ColumnParallelLinear,
    GroupedColumnParallelLinear,
    GroupedRowParallelLinear,
    RowParallelLinear,
)
from torch_fused_ops.nn.mlp import (
    MLP,
    LinearFc1Builder,
    LinearFc1Interface,
    LinearFc2Builder,
    LinearFc2Interface,
    MLPSubmodules,
    TEActivationFunctionBuilder,
    TEActivationFunctionInterface,
)
from torch_fused_ops.nn.replace import Replacements, replace_mlps

__all__ = [
    "MLP",
    "ColumnParallelLinear",
    "FusedMLP",
    "GroupedColumnParallelLinear",
    "GroupedLinearBuilder",
    "GroupedLinearInterface",
    "GroupedMLP",
    "GroupedMLPSubmodules",
    "GroupedRowParallelLinear",
    "LinearFc1Builder",
    "LinearFc1Interface",
    "LinearFc2Builder",
    "LinearFc2Interface",
    "MLPConfig",
    "MLPSubmodules",
    "Permuted",
    "Replacements",
    "RowParallelLinear",
    "TEActivationFunctionBuilder",
    "TEActivationFunctionInterface",
    "permute",
    "replace_mlps",
    "unpermute",
]
