"""Ptxas 12.8 and 12.9 miscompile a transposed float8 store (docs/upstream.md).

The store reads registers that nothing has written. Executed instruction by instruction, its code writes 1,982 of a
block's 8,192 transposed bytes wrongly. Triton 3.9.0's ptxas is right.

Remedy: limit values by comparisons instead of ``PropagateNan.ALL``, or use blocks of 64 × 64.
"""

import torch
import triton
import triton.language as tl

from torch_fused_ops.virtual_gpu import H100, Audit, audit


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


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def audit_in(**configuration: int) -> Audit:
    x, scale = meta(8192, 4096, dtype=torch.bfloat16), meta(1, dtype=torch.float32)
    straight, transposed = (meta(*s, dtype=torch.float8_e5m2) for s in ((8192, 4096), (4096, 8192)))
    grid = 4096 // configuration["XBLOCK"], 8192 // configuration["YBLOCK"]
    return audit(transposed_float8, x, scale, straight, transposed, 8192, 4096, gpu=H100, grid=grid, **configuration)


if __name__ == "__main__":
    print(audit_in(YBLOCK=128, XBLOCK=64, num_warps=8))
