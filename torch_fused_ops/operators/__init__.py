"""Turn declarations (``declaration.py``) into operators: checks, fake kernels, gradients, batching, plain torch."""

from torch_fused_ops.operators import activation

__all__ = ["activation"]
