"""Callbacks for common trainers (``docs/integrations.md``).

A file imports its trainer, and no other file imports it: ``from torch_fused_ops.integrations.transformers import
FusionCallback``.
"""
