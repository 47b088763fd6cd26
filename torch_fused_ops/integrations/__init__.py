"""Callbacks for the trainers that people use (``docs/integrations.md``).

A file imports its trainer, and nothing imports a file: ``from torch_fused_ops.integrations.transformers import
FusionCallback``.
"""
