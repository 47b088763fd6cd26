"""The ways in which a linear layer is in float8 (``docs/fp8.md``): names, and whether its weight's gradient is."""

__all__ = ["RECIPES"]

RECIPES = {"fp8": True, "fp8-wgrad-bf16": False}
