"""How ``memory="tiled"`` cuts an MLP's tokens into tiles: how many there are, and how long each is.

A tile's hidden layer is computed again when backward comes to it, so of the whole only a tile's is ever in memory. Each
tile reads all weights, and adds to all of their gradients: short ones are bound by that, not by their products. So a
tile has 8192 tokens or more (ALST, arXiv:2506.13996, has as many tiles as the hidden size fits into the tokens, and
axolotl went from that to tiles of 32768, for 3.2 times the speed), and there are 16 at most: beyond, what is whole in
any case (the MLP's input, its gradient, the result's, the weights') is most of what is left.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["asked", "lengths", "number"]

TOKENS = 8192  # of a tile, at least
MOST = 16
ROWS = 128  # of a GEMM's block: lengths that are known are multiples

LIMIT = 9999  # tiles that can be asked for, as there are four digits
_LEVEL = re.compile(r"tiled(?::([1-9]\d{0,3}))?")


def asked(level: str) -> int | None:
    """How many tiles a memory level asks for: "tiled:16" 16, "tiled" 0 (by rule); None for any other text."""
    found = _LEVEL.fullmatch(level)
    if found is None or found[1] == "1":
        return None
    return int(found[1] or 0)


def number(tokens: int, asked: int) -> int:
    """How many tiles so many tokens make: as asked, or by rule; 1 where there are no more tokens than tiles."""
    tiles = asked or min(tokens // TOKENS, MOST)
    return tiles if 1 < tiles < tokens else 1


def lengths(tokens: Any, tiles: int) -> tuple[Any, Any]:
    """How long each tile is but the last, and the last: a quarter longer, or a little more.

    Backward takes the last one first. There are no gradients of weights and of the input then, so there is room: at the
    peak of a SwiGLU MLP (65536×4096→14336, bf16, eight tiles) 2697 MiB are alive on paper, 2720 with equal tiles, 2674
    with a last one half longer.

    Args:
        tokens: a number, or a symbol for one (then there are floor divisions in the results).
        tiles: two or more.
    """
    each = 4 * tokens // (4 * tiles + 1)
    if isinstance(each, int) and each >= 8 * ROWS:
        each -= each % ROWS
    return each, tokens - (tiles - 1) * each
