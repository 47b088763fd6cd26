"""The operators: what each of them is (``declaration.py``), and what follows from that.

This is the one list of the families, each of which registers itself as it is imported.
"""

from torch_fused_ops.operators import activation, dropout, float8, quantized, softmax, viewless

__all__ = ["activation", "dropout", "float8", "quantized", "softmax", "viewless"]
