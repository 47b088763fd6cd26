"""Dropout with bias and residual: ``fused::dropout_add``."""
