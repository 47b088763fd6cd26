"""Linear layers in float8; ``recipes`` needs no torch."""
