"""Inductor's choices for the kernels of one operator in eager mode on a GPU (``kernels/compiled.py``).

Inductor would measure several configurations of a kernel at its first launch. Eager kernels have one configuration, so
that a first call does not wait for the device and sums have the same order in every run.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import FixedTritonConfig

# The widest row that a program holds in registers, so that it reads the row once.
_WIDEST_ROW = 16384
# For sums over rows: 64 columns of a 16-bit tensor fill a 128-byte line, and a thread loads 16 bytes of two rows.
_SUMS_OF_BLOCKS = {"XBLOCK": 64, "num_warps": 8, "num_stages": 1}
_SUMS = {"XBLOCK": 32, "R0_BLOCK": 32, "num_warps": 4, "num_stages": 1}


class EagerChoices(InductorChoices):
    """Keep rows in registers, and give sums over rows configurations in which loads are contiguous.

    ``block`` is the number of rows in a block of such sums; None if the operator has no such sums.
    """

    def __init__(self, block: int | None) -> None:
        super().__init__()
        self.block = block

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Return True if a program holds the elements that it reduces in registers."""
        return bool(features.reduction_numel.is_number and features.reduction_numel <= _WIDEST_ROW)

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: Any) -> dict[str, Any]:
        """Add the configuration of a sum over rows."""
        if self.block is None or not features.is_reduction():
            return dict(kernel_kwargs)
        if features.reduction_numel == self.block:
            return {**kernel_kwargs, "fixed_config": FixedTritonConfig(_SUMS_OF_BLOCKS)}
        if not features.reduction_numel.is_number:  # another number is the length of a row
            return {**kernel_kwargs, "fixed_config": FixedTritonConfig(_SUMS)}
        return dict(kernel_kwargs)
