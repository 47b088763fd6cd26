"""Disassemble NVIDIA's machine code on first use, all waiting kernels in one call.

nvdisasm takes 0.2 to 0.3 s to start and some 4 ms per kernel. A step has dozens of kernels, and each reduction is
compiled in several configurations. So the code of all waiting kernels is disassembled as one image, and the listing is
split.
"""

from __future__ import annotations

import bisect
import functools
import pathlib
import re
import struct
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Sequence

from .gpus import import_triton

_LINE = re.compile(r"^(\s*/\*)([0-9a-f]{4,})(\*/.*)$", re.M)
# A jump's target is an address in the image: "@P0 BRA 0x1dc0 ;", "BSSY B0, 0x2a0 ;".
_JUMP = re.compile(r"(\*/\s+(?:@!?U?P\w+ )?(?:BRA|BSSY|CALL|JMP|RET)\b[^;]*?\b0x)([0-9a-f]+)")
_LOCK = threading.Lock()
_WAITING: weakref.WeakSet[Listing] = weakref.WeakSet()


@functools.cache
def nvidia_tools() -> pathlib.Path:
    """Return the folder with cuobjdump and nvdisasm, which is inside the Triton wheel.

    Raises:
        FileNotFoundError: this build of Triton has no such tools.
    """
    folder = pathlib.Path(import_triton().__file__).parent / "backends" / "nvidia" / "bin"
    if not (folder / "cuobjdump").exists():
        raise FileNotFoundError(f"cuobjdump is not in {folder}: this build of Triton has no NVIDIA tools")
    return folder


class Listing:
    """A kernel's machine code as text.

    Args:
        cubin: the compiled kernel, an ELF file.
        arch: its architecture in PTX's notation: "sm_90a".
    """

    def __init__(self, cubin: bytes, arch: str) -> None:
        self.code, self.arch = b"".join(_functions(cubin)), arch
        self._text: str | None = None
        with _LOCK:
            _WAITING.add(self)

    @property
    def text(self) -> str:
        """One instruction per line, with its address in the kernel: ``/*0070*/  @!P0 FMUL R0, R1, R2 ;``."""
        with _LOCK:
            if self._text is None:
                together = [self, *(other for other in _WAITING if other.arch == self.arch and other is not self)]
                _WAITING.difference_update(together)
                texts = _disassembled([listing.code for listing in together], self.arch)
                for listing, text in zip(together, texts, strict=True):
                    listing._text = text
            assert self._text is not None
            return self._text


def _functions(cubin: bytes) -> list[bytes]:
    """Read the functions' code from the section headers of a 64-bit ELF file."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + size * i) for i in range(count)]
    names = sections[names_at][4]  # the file offset of the name table
    return [
        cubin[place : place + length]
        for name, _, _, _, place, length in sections
        if cubin[names + name :].startswith(b".text.")
    ]


def _relative(instruction: str, start: int) -> str:
    """Make a jump's target relative to its kernel's start."""
    return _JUMP.sub(lambda jump: f"{jump[1]}{int(jump[2], 16) - start:x}", instruction)


def _disassembled(codes: Sequence[bytes], arch: str) -> list[str]:
    """Return each kernel's listing, with addresses that start at 0."""
    starts = [0]
    for code in codes:
        starts.append(starts[-1] + len(code))
    with tempfile.TemporaryDirectory() as folder:
        image = pathlib.Path(folder) / "image"
        image.write_bytes(b"".join(codes))
        command = [str(nvidia_tools() / "nvdisasm"), "--binary", arch.replace("sm_", "SM"), str(image)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines: list[list[str]] = [[] for _ in codes]
    for before, address, after in _LINE.findall(listing):
        number = bisect.bisect_right(starts, int(address, 16)) - 1
        lines[number].append(f"{before}{int(address, 16) - starts[number]:04x}{_relative(after, starts[number])}")
    return ["\n".join(kernel_lines) for kernel_lines in lines]
