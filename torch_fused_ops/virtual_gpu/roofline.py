"""Compute a program's roofline: the least time that its FLOP and bytes take at a GPU's rates.

This is a lower bound, not a prediction. Kernels run one after the other; each takes the longer of its two times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .gpus import GPU, H200
from .work import BF16_FLOP, BYTES_MOVED


@dataclass(frozen=True)
class Work:
    """Work of a kernel or library call: FLOP of GEMMs (``work.flop_of_bf16``), bytes moved."""

    flop: float = 0.0
    nbytes: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Rates per second that a GPU reaches.

    Attributes:
        flop: FLOP of a large bfloat16 GEMM on random numbers.
        nbytes: bytes that a large copy reads and writes.
        launch: seconds that each kernel takes in addition, to start and to end; 0 if not measured.
    """

    flop: float
    nbytes: float
    launch: float = 0.0

    def seconds(self, works: Iterable[Work]) -> float:
        """Return the least time of works that run one after the other, including a launch for each."""
        return sum(max(work.flop / self.flop, work.nbytes / self.nbytes) + self.launch for work in works)


H200_RATES = Rates(BF16_FLOP, BYTES_MOVED)
# Data sheets: FLOP/s of dense bfloat16 GEMMs that sum in float32 (a sheet's rate with sparsity is twice that), and
# bytes/s of memory. GeForce GPUs sum in float32 at half rate (NVIDIA RTX Blackwell GPU Architecture, appendix). Second
# sources: https://verda.com/blog/gb300-nvl72-architecture for GB200 and GB300, https://www.codesota.com/hardware/rtx-5090,
# https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/ for the A10G.
_SHEETS: Mapping[str, tuple[float, float]] = {
    "NVIDIA A100-SXM4-80GB": (312e12, 2.039e12),
    "NVIDIA H100 80GB HBM3": (989.5e12, 3.35e12),
    "NVIDIA H200": (989.5e12, 4.8e12),
    "NVIDIA B200": (2250e12, 8.0e12),
    "NVIDIA GB200": (2500e12, 8.0e12),
    "NVIDIA GB300": (2500e12, 8.0e12),
    "AMD Instinct MI300X": (1307.4e12, 5.3e12),
    "NVIDIA A10G": (70e12, 0.6e12),
    "NVIDIA L40S": (362.05e12, 0.864e12),
    "NVIDIA GeForce RTX 5090": (209.5e12, 1.792e12),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (503.8e12, 1.792e12),
}


# Rates that replace the H200's share of a data sheet. Two are fitted to Liger-Kernel's published measurements
# (`docs/paper-and-devices.md`): the H100's memory to 25 forward passes of versions 0.7 and 0.8 (March, July 2026), and
# the A100's FLOP to 32 rows of version 0.2 (September 2024). The H100's launch was measured in a row of six kernels; a
# kernel alone takes 6.2 µs. Three are from other publications: the A100's memory (the share is 10 to 20 % above
# published copies), the B200's fastest GEMM (1745, https://github.com/stas00/ml-engineering/tree/master/compute/accelerator),
# and the faster of two GEMMs for the MI300X (668 at that address, 782 elsewhere; the share would be 1044).
_FITTED: Mapping[str, Mapping[str, float]] = {
    "NVIDIA A100-SXM4-80GB": {"flop": 250e12, "nbytes": 1.66e12},
    "NVIDIA H100 80GB HBM3": {"nbytes": 3.08e12, "launch": 3.5e-6},
    "NVIDIA B200": {"flop": 1745e12},
    "AMD Instinct MI300X": {"flop": 782e12},
}


def estimated_rates(gpu: GPU) -> Rates | None:
    """Return a GPU's measured rates, with the H200's share of the data sheet for rates that were not measured.

    Return None for a GPU without a data sheet here.

    An H200 reaches 80 % of its sheet's FLOP and 90 % of its bytes; four other GPUs reached 80 to 88 % and 92 to 93 %.
    """
    if gpu.name == H200.name:
        return H200_RATES
    if gpu.name not in _SHEETS:
        return None
    (flop, nbytes), sheet = _SHEETS[gpu.name], _SHEETS[H200.name]
    share = Rates(flop * H200_RATES.flop / sheet[0], nbytes * H200_RATES.nbytes / sheet[1])
    return replace(share, **_FITTED.get(gpu.name, {}))
