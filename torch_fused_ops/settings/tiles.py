"""The number and the lengths of the tiles into which ``memory="tiled"`` cuts an MLP's tokens.

Backward recomputes a tile's hidden layer, so only one tile's hidden layer is in memory at a time. Each tile reads all
weights and adds to all of their gradients; this traffic, not the GEMMs, limits short tiles. So a tile has at least 8192
tokens (ALST, arXiv:2506.13996, uses tokens / hidden size tiles; axolotl changed that to tiles of 32768 tokens, for 3.2
times the speed). There are at most 16 tiles: the tensors that stay whole (the MLP's input and result, and all
gradients) are then most of the memory.
"""

from __future__ import annotations

import re
from typing import Any

TOKENS = 8192  # the least in a tile
MOST = 16
ROWS = 128  # of a GEMM's block: static lengths are multiples

LIMIT = 9999  # the most tiles that can be requested: four digits
_LEVEL = re.compile(r"tiled(?::([1-9]\d{0,3}))?")


def asked(level: str) -> int | None:
    """The number of tiles that a memory level requests: "tiled:16" 16, "tiled" 0 (by rule); None for other levels."""
    match = _LEVEL.fullmatch(level)
    if match is None or match[1] == "1":
        return None
    return int(match[1] or 0)


def number(tokens: int, asked: int) -> int:
    """The number of tiles: as requested, or by rule; 1 if there are fewer tokens than tiles."""
    tiles = asked or min(tokens // TOKENS, MOST)
    return tiles if 1 < tiles < tokens else 1


def lengths(tokens: Any, tiles: int) -> tuple[Any, Any]:
    """The length of every tile but the last, and that of the last, which is about a quarter longer.

    Backward begins with the last tile, before the gradients of weights and input exist, so a longer one fits. The
    estimated peak of a SwiGLU MLP (65536×4096→14336, bf16, eight tiles) is 2697 MiB; with equal tiles it is 2720, with
    a last tile half as long again 2674.

    Args:
        tokens: a number, or a symbol (the results then contain floor divisions).
        tiles: two or more.
    """
    length = 4 * tokens // (4 * tiles + 1)
    if isinstance(length, int) and length >= 8 * ROWS:
        length -= length % ROWS
    return length, tokens - (tiles - 1) * length
