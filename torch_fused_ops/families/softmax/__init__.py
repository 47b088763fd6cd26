"""Attention's softmax: ``fused::scaled_masked_softmax``."""
