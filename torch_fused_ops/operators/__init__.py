"""The operators: their declarations (``declaration.py``) and everything derived from these."""

from torch_fused_ops.operators import activation, viewless

__all__ = ["activation", "viewless"]
