"""Modules (Megatron core's MLP, and a plain MLP), and ``replace_mlps`` for existing models."""

from torch_fused_ops.nn.config import MLPConfig
from torch_fused_ops.nn.fused_mlp import FusedMLP
from torch_fused_ops.nn.linear import ColumnParallelLinear, RowParallelLinear
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
    "LinearFc1Builder",
    "LinearFc1Interface",
    "LinearFc2Builder",
    "LinearFc2Interface",
    "MLPConfig",
    "MLPSubmodules",
    "Replacements",
    "RowParallelLinear",
    "TEActivationFunctionBuilder",
    "TEActivationFunctionInterface",
    "replace_mlps",
]
