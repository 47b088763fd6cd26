"""The ways in which a linear layer is in float8 (``docs/fp8.md``): how operands are divided into blocks, which products
are in float8, and on which devices. Checks, reasons and docs read this table, without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BLOCK = 128
MX_BLOCK = 32


class Block(NamedTuple):
    """The elements that share a scale; None: an axis as long as it is."""

    rows: int | None
    columns: int | None

    def of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Its sizes in a matrix of this shape."""
        rows, columns = shape
        return self.rows or rows, self.columns or columns


class Scaling(NamedTuple):
    """The blocks of a GEMM's operands, each along the axis that the GEMM sums over.

    Attributes:
        noun: what has a scale, in messages.
        data: of a layer's input, and of gradients.
        weight: of a weight (out, in), in forward.
        weight_t: of its transpose, in the input's gradient.
        multiple: of which a weight's sizes are multiples.
        sm: NVIDIA's compute capabilities that have such products.
        cuda: the least version of CUDA.
        amd: AMD's architectures.
        grouped: NVIDIA's compute capabilities that have grouped products, a mixture's experts'.
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
        """True if shards of a matrix can be quantized separately: no block is a whole row."""
        return self.data.columns is not None


# DeepSeek-V3's (arXiv 2412.19437, section 3.3), which TransformerEngine has as ``Float8BlockScaling``. The products are
# cuBLASLt's.
BLOCKS = Scaling(
    noun="block of 128",
    data=Block(1, BLOCK),
    weight=Block(BLOCK, BLOCK),
    weight_t=Block(BLOCK, BLOCK),
    multiple=BLOCK,
    sm=((9, 0),),
    cuda=(12, 9),
)
# torchao's rowwise_with_gw_hp: a weight's transpose has one scale, the largest of forward's, so that backward reads the
# weight once. The products are CUTLASS's, cuBLASLt's and hipBLASLt's (ATen's RowwiseScaledMM.cu, ScaledBlas.cpp).
ROWS = Scaling(
    noun="row",
    data=Block(1, None),
    weight=Block(1, None),
    weight_t=Block(None, None),
    multiple=16,
    sm=((8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)),
    cuda=(12, 0),
    amd=("gfx942", "gfx950"),
    grouped=((9, 0),),  # CUTLASS's (ATen's ScaledGroupMM.cu)
)
# The Open Compute Project's MXFP8 (Microscaling Formats, version 1.0): 8 bits a scale, which a power of two in float32
# has as its exponent. The products are cuBLASLt's (ATen's ScaledBlas.cpp, CUDABlas.cpp).
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
    """The float8 GEMMs of a linear layer: of its result and of its input's gradient, and, with ``wgrad``, of its
    weight's gradient."""

    scaling: Scaling
    wgrad: bool


RECIPES = {
    "fp8": Recipe(BLOCKS, wgrad=True),
    "fp8-wgrad-bf16": Recipe(BLOCKS, wgrad=False),
    "fp8-rowwise": Recipe(ROWS, wgrad=False),
    "mxfp8": Recipe(MX, wgrad=True),
    "mxfp8-wgrad-bf16": Recipe(MX, wgrad=False),
}
