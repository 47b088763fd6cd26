"""Golden code that Inductor generates for an H200 from this library's lowerings.

Renew it with ``EXPECTTEST_ACCEPT=1 pytest tests/codegen/test_golden.py``.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

fused = torch.ops.fused
GOLDEN_TORCH = "2.13"  # Inductor's text changes with torch; other tests check its meaning on every version


def body(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    """Return the statements of ``fn``'s only kernel, without its name, metadata and index arithmetic."""
    inputs = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes]
    (kernel,) = virtual_gpu.compile_on_paper(fn, *inputs, training=False).inference.kernels
    statements = kernel.source.split("):\n")[-1].split("''', device_str")[0]
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in statements.splitlines()]
    return (
        "\n".join(line for line in lines if line and not re.match(r"(xnumel|xoffset|xindex|xmask|[xr]\d+) =", line))
        + "\n"
    )


@pytest.mark.skipif(not torch.__version__.startswith(GOLDEN_TORCH), reason=f"golden text is torch {GOLDEN_TORCH}'s")
class TestGolden(TestCase):
    maxDiff = None

    def test_gelu_tanh(self) -> None:
        self.assertExpectedInline(
            body(lambda x: fused.bias_act(x, None, None, "gelu_tanh"), (512, 1024)),
            """\
tmp0 = tl.load(in_ptr0 + (x0), None).to(tl.float32)
tmp1 = tmp0.to(tl.float32)
tmp2 = tmp1 * tmp1
tmp3 = tl.full([1], -0.1029432395800235, tl.float32)
tmp4 = tmp2 * tmp3
tmp5 = tl.full([1], -2.302208198144325, tl.float32)
tmp6 = tmp4 + tmp5
tmp7 = tmp1 * tmp6
tmp8 = libdevice.exp2(tmp7)
tmp9 = tl.full([1], 1.0, tl.float32)
tmp10 = tmp8 + tmp9
tmp11 = (tmp1 / tmp10)
tmp12 = tmp11.to(tl.float32)
tl.store(out_ptr0 + (x0), tmp12, None)
""",
        )

    def test_swiglu_with_a_neighbor(self) -> None:
        self.assertExpectedInline(
            body(lambda g, u: fused.glu(g, u, None, "silu") * 2, (512, 1024), (512, 1024)),
            """\
tmp0 = tl.load(in_ptr0 + (x0), None).to(tl.float32)
tmp2 = tl.load(in_ptr1 + (x0), None).to(tl.float32)
tmp1 = tmp0.to(tl.float32)
tmp3 = tmp2.to(tl.float32)
tmp4 = tl.full([1], -1.4426950408889634, tl.float32)
tmp5 = tmp1 * tmp4
tmp6 = libdevice.exp2(tmp5)
tmp7 = tl.full([1], 1.0, tl.float32)
tmp8 = tmp6 + tmp7
tmp9 = (tmp1 / tmp8)
tmp10 = tmp9 * tmp3
tmp11 = tmp10.to(tl.float32)
tmp12 = tl.full([1], 2.0, tl.float32)
tmp13 = tmp11 * tmp12
tl.store(out_ptr0 + (x0), tmp13, None)
""",
        )

    def test_packed_backward_writes_both_halves_from_one_kernel(self) -> None:
        self.assertExpectedInline(
            body(
                lambda g, x: fused.bias_glu_backward(
                    g, x, None, None, "silu", "halves", 0.0, None, [True, False, False]
                )[0],
                (512, 1024),
                (512, 2048),
            ),
            """\
tmp0 = tl.load(in_ptr0 + (x2), None).to(tl.float32)
tmp2 = tl.load(in_ptr1 + (x0 + 2048*x1), None).to(tl.float32)
tmp4 = tl.load(in_ptr1 + (1024 + x0 + 2048*x1), None).to(tl.float32)
tmp1 = tmp0.to(tl.float32)
tmp3 = tmp2.to(tl.float32)
tmp5 = tmp4.to(tl.float32)
tmp6 = tmp1 * tmp5
tmp7 = tl.full([1], -1.4426950408889634, tl.float32)
tmp8 = tmp3 * tmp7
tmp9 = libdevice.exp2(tmp8)
tmp10 = tl.full([1], 1.0, tl.float32)
tmp11 = tmp9 + tmp10
tmp12 = (tmp10 / tmp11)
tmp13 = tmp10 - tmp12
tmp14 = tmp12 * tmp13
tmp15 = tmp3 * tmp14
tmp16 = tmp12 + tmp15
tmp17 = tmp6 * tmp16
tmp18 = tmp17.to(tl.float32)
tmp19 = (tmp3 / tmp11)
tmp20 = tmp1 * tmp19
tmp21 = tmp20.to(tl.float32)
tl.store(out_ptr0 + (x0 + 2048*x1), tmp18, None)
tl.store(out_ptr1 + (x0 + 2048*x1), tmp21, None)
""",
        )
