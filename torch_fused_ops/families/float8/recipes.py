"""Define linear layers' float8 recipes (``docs/fp8.md``): blocks of the operands, GEMMs in float8, accepted devices.

Checks, reasons and docs read this table, without importing torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BLOCK = 128
MX_BLOCK = 32


class Block(NamedTuple):
    """The shape of a block, whose elements share a scale. None means the whole axis."""

    rows: int | None
    columns: int | None

    def sizes_in(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the block's (rows, columns) in a matrix of this shape."""
        rows, columns = shape
        return self.rows or rows, self.columns or columns


class Scaling(NamedTuple):
    """The blocks of a GEMM's operands, and its requirements. A block extends along the axis that the GEMM sums over.

    Attributes:
        noun: the block's name in messages.
        data: block of a layer's input, and of gradients.
        weight: block of a weight (out, in), in forward.
        weight_t: block of the weight's transpose, for the input's gradient.
        multiple: a weight's sizes must be multiples of it.
        sm: NVIDIA compute capabilities that have such GEMMs.
        cuda: the oldest CUDA version.
        amd: AMD architectures that have such GEMMs.
        grouped: NVIDIA compute capabilities that have such grouped GEMMs, for a mixture's experts.
    """

    noun: str
    data: Block
    weight: Block
    weight_t: Block
    multiple: int
    sm: tuple[tuple[int, int], ...]
    cuda: tuple[int, int]
    amd: tuple[str, ...] = ()
    grouped: tuple[tuple[int, int], ...] = ()

    @property
    def takes_shards(self) -> bool:
        """True if shards of a matrix can be quantized separately, because blocks are smaller than a row."""
        return self.data.columns is not None


# The recipe of DeepSeek-V3 (arXiv 2412.19437, section 3.3), ``Float8BlockScaling`` in TransformerEngine. cuBLASLt has
# the GEMMs.
BLOCKS = Scaling(
    noun="block of 128",
    data=Block(1, BLOCK),
    weight=Block(BLOCK, BLOCK),
    weight_t=Block(BLOCK, BLOCK),
    multiple=BLOCK,
    sm=((9, 0),),
    cuda=(12, 9),
)
# torchao's rowwise_with_gw_hp: a weight's transpose has one scale, the largest of forward's scales, so that backward
# reads the weight once. CUTLASS, cuBLASLt and hipBLASLt have the GEMMs (ATen's RowwiseScaledMM.cu, ScaledBlas.cpp).
ROWS = Scaling(
    noun="row",
    data=Block(1, None),
    weight=Block(1, None),
    weight_t=Block(None, None),
    multiple=16,
    sm=((8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)),
    cuda=(12, 0),
    amd=("gfx950",),
    grouped=((9, 0),),  # by CUTLASS (ATen's ScaledGroupMM.cu)
)
# The Open Compute Project's MXFP8 (Microscaling Formats, version 1.0). A scale's 8 bits are the exponent of a power of
# two in float32. cuBLASLt has the GEMMs (ATen's ScaledBlas.cpp, CUDABlas.cpp).
MX = Scaling(
    noun="block of 32",
    data=Block(1, MX_BLOCK),
    weight=Block(1, MX_BLOCK),
    weight_t=Block(1, MX_BLOCK),
    multiple=MX_BLOCK,
    sm=((10, 0), (10, 3)),
    cuda=(12, 8),
)


class Recipe(NamedTuple):
    """The float8 GEMMs of a linear layer: for the result, the input gradient, and if ``wgrad`` the weight gradient."""

    scaling: Scaling
    wgrad: bool


RECIPES = {
    "fp8": Recipe(BLOCKS, wgrad=True),
    "fp8-wgrad-bf16": Recipe(BLOCKS, wgrad=False),
    "fp8-rowwise": Recipe(ROWS, wgrad=False),
    "mxfp8": Recipe(MX, wgrad=True),
    "mxfp8-wgrad-bf16": Recipe(MX, wgrad=False),
}
