"""Number and lengths of the tiles into which ``memory="tiled"`` splits an MLP's tokens.

Backward recomputes a tile's hidden layer, so only one tile's hidden layer is in memory at a time. Each tile reads all
weights and adds to all of their gradients; this traffic, not the GEMMs, limits short tiles. So a tile has at least 8192
tokens (ALST, arXiv:2506.13996, uses tokens / hidden size tiles; axolotl changed that to tiles of 32768 tokens, for 3.2
times the speed). There are at most 16 tiles: the tensors that stay whole (the MLP's input and result, and all
gradients) are then most of the memory.
"""

from __future__ import annotations

import re
from typing import Any

MIN_TOKENS = 8192  # per tile
MAX_TILES = 16
GEMM_ROWS = 128  # rows of a GEMM's block; static lengths are multiples of it

LIMIT = 9999  # most tiles that can be requested: four digits
_LEVEL = re.compile(r"tiled(?::([1-9]\d{0,3}))?")


def requested_tiles(level: str) -> int | None:
    """Return the tile count of a memory level: 16 for "tiled:16", 0 (by rule) for "tiled", None for other levels."""
    match = _LEVEL.fullmatch(level)
    if match is None or match[1] == "1":
        return None
    return int(match[1] or 0)


def tile_count(tokens: int, requested: int) -> int:
    """Return the requested number of tiles; by rule if it is 0, and 1 if there are fewer tokens than tiles."""
    tiles = requested or min(tokens // MIN_TOKENS, MAX_TILES)
    return tiles if 1 < tiles < tokens else 1


def lengths(tokens: Any, tiles: int) -> tuple[Any, Any]:
    """Return the length of all tiles except the last, and the last tile's length, which is about a quarter longer.

    Backward begins with the last tile, before the gradients of weights and input exist, so a longer one fits. The
    estimated peak of a SwiGLU MLP (65536×4096→14336, bf16, eight tiles) is 2697 MiB; with equal tiles it is 2720, and
    with a last tile that is 1.5 times as long it is 2674.

    Args:
        tokens: a number, or a symbol (the results then contain floor divisions).
        tiles: two or more.
    """
    length = 4 * tokens // (4 * tiles + 1)
    if isinstance(length, int) and length >= 8 * GEMM_ROWS:
        length -= length % GEMM_ROWS
    return length, tokens - (tiles - 1) * length
