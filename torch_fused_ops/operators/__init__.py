"""The operators: what each of them is (``declaration.py``), and what follows from that."""

from torch_fused_ops.operators import activation, viewless

__all__ = ["activation", "viewless"]
