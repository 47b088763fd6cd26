"""Operator families other than activations, one folder each: dropout, softmax, and float8 linear layers."""

from importlib import import_module

_OPERATORS = ("dropout.operators", "softmax.operators", "float8.operators", "float8.quantized")


def register() -> None:
    """Register the operators of every family."""
    for module in _OPERATORS:
        import_module(f"{__name__}.{module}")
