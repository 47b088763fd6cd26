"""The GEMM of a linear layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fused_ops import functional
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.policy import check_known


def linear(gemm: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x · weightᵀ + bias in the precision ``gemm``. Under autocast, x and weight are cast to its dtype."""
    if gemm == "bf16":
        return F.linear(x, weight, bias)
    x, weight = under_autocast(x, weight)
    return functional.linear_fp8(x, weight, bias, recipe=gemm)


def check_gemm(gemm: object, **sizes: int) -> None:
    """Raise ValueError if the recipe is unknown, or does not support one of the sizes."""
    check_known("gemm", gemm)
    multiple = RECIPES[str(gemm)].scaling.multiple if gemm in RECIPES else 1
    for name, size in sizes.items():
        if size % multiple:
            raise ValueError(f"{name}={size} is not accepted with gemm={gemm!r}: it must be a multiple of {multiple}")


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast casts a GEMM's inputs: to its dtype, except float64."""
    kind = tensors[0].device.type
    available = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)  # torch 2.11's Dynamo cannot trace it
    if not available or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
