"""Ptxas 12.8 and 12.9 miscompile a transposed float8 store (docs/upstream.md).

The store reads registers that nothing has written. Executed instruction by instruction, its code writes 1,982 of a
block's 8,192 transposed bytes wrongly. Triton 3.9.0's ptxas is right.

Remedy: limit values by comparisons instead of ``PropagateNan.ALL``, or use blocks of 64 × 64.
"""

import re

import torch
import triton
import triton.language as tl

from torch_fused_ops.virtual_gpu import H100, assemble


@triton.jit
def transposed_float8(in0, in1, out0, out1, ynumel, xnumel, YBLOCK: tl.constexpr, XBLOCK: tl.constexpr):
    yindex = tl.program_id(1) * YBLOCK + tl.arange(0, YBLOCK)[:, None]
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[None, :]
    ymask, xmask = yindex < ynumel, xindex < xnumel
    v = tl.load(in0 + (xindex + 4096 * yindex), ymask & xmask, eviction_policy="evict_last").to(tl.float32)
    v = v * tl.broadcast_to(tl.load(in1 + tl.full([1, 1], 0, tl.int32)), [YBLOCK, XBLOCK])
    v = tl.maximum(v, tl.full([1, 1], -57344.0, tl.float32), tl.PropagateNan.ALL)
    q = tl.minimum(v, tl.full([1, 1], 57344.0, tl.float32), tl.PropagateNan.ALL).to(tl.float8e5)
    tl.store(out0 + (xindex + 4096 * yindex), q, ymask & xmask)
    tl.store(out1 + (yindex + 8192 * xindex), q, ymask & xmask)


def unwritten_reads(rows: int, columns: int, num_warps: int) -> list[str]:
    """Return the byte permutations that read a register before the first write to it. The code has no loop."""
    dtypes = torch.bfloat16, torch.float32, torch.float8_e5m2, torch.float8_e5m2
    args = *(torch.empty(8192, 4096, dtype=dtype, device="meta") for dtype in dtypes), 8192, 4096
    block = {"YBLOCK": rows, "XBLOCK": columns}
    code = assemble(transposed_float8, H100, *args, block=block, num_warps=num_warps)
    written: set[int] = set()
    found = []
    for name, text in re.findall(r"\*/\s+(?:@\S+ )?([A-Z][\w.]*) (.*?) ;", code.asm):
        result, *operands = (re.findall(r"\bR(\d+)", operand) for operand in text.split(","))
        if name == "PRMT" and any(int(register) not in written for operand in operands for register in operand):
            found.append(f"{name} {text}")
        words = 4 if ".128" in name else 2  # also if it writes one: a missed fault is better than a false one
        written |= {int(register) + i for register in result[:1] for i in range(words)}
    return found


if __name__ == "__main__":
    print(*unwritten_reads(128, 64, num_warps=8), sep="\n")
    assert bool(unwritten_reads(128, 64, num_warps=8)) == triton.__version__.startswith(("3.7.", "3.8."))
    assert not unwritten_reads(64, 64, num_warps=4)
