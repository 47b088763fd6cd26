"""Callbacks for the trainers that people use (``docs/integrations.md``). A file imports its trainer; nothing imports a file
unless it is used: ``from torch_fused_ops.integrations.transformers import FusionCallback``."""
