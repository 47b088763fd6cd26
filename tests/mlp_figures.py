"""Compute by hand the bytes that a tensor-parallel MLP saves and sends on each rank, and its GEMMs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class MLPFigures(NamedTuple):
    """One training step of an MLP, on one of its ranks.

    Attributes:
        weights: bytes of the rank's shards.
        saved: bytes saved for backward, excluding weights.
        collectives: (name, bytes of the whole tensor), forward, then backward.
        sent: bytes that a rank sends with ring algorithms: (p-1)/p of a tensor, twice that for an all-reduce.
        gemms: sizes (m, k, n): two forward, one recomputed with memory="input", four backward.
    """

    weights: int
    saved: int
    collectives: tuple[tuple[str, int], ...]
    sent: int
    gemms: tuple[tuple[int, int, int], ...]


def mlp_figures(
    hidden_size: int,
    ffn_hidden_size: int,
    tokens: int,
    tp: int = 1,
    *,
    gated: bool = False,
    memory: str = "free",
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> MLPFigures:
    """Return the figures of ``nn.MLP`` without biases on ``tp`` ranks. The activation's backward needs its input."""
    size, wide, narrow = dtype.itemsize, (2 if gated else 1) * ffn_hidden_size // tp, ffn_hidden_size // tp
    x = tokens * hidden_size * size  # on every rank: the first weight's gradient needs all tokens
    between = {
        "off": tokens * (wide + narrow) * size,
        "free": tokens * wide * size,
        "fp8": tokens * (wide + 4),  # a float32 scale for each row
        "input": 0,
    }
    if tp == 1:
        collectives: tuple[tuple[str, int], ...] = ()
    elif sequence_parallel:
        collectives = (("all_gather", x), ("reduce_scatter", x)) * 2
    else:
        collectives = (("all_reduce", x),) * 2
    sent = sum(n * (2 if name == "all_reduce" else 1) for name, n in collectives)
    first = (tokens, hidden_size, wide)
    gemms = [first, (tokens, narrow, hidden_size)]
    gemms += [first] if memory == "input" else []
    gemms += [(tokens, hidden_size, narrow), (hidden_size, tokens, narrow)]
    gemms += [(tokens, wide, hidden_size), (wide, tokens, hidden_size)]
    weights = hidden_size * (wide + narrow) * size
    return MLPFigures(weights, x + between[memory], collectives, sent * (tp - 1) // tp, tuple(gemms))
