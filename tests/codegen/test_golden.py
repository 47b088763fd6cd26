"""Golden code: what Inductor generates for an H200 from our lowerings.

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
GOLDEN_TORCH = "2.13"  # Inductor's text changes with torch; its meaning is tested on every version elsewhere


def body(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    """The statements of the one kernel that ``fn`` becomes, without its name, metadata and index arithmetic."""
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

    def test_bias_gelu(self) -> None:
        self.assertExpectedInline(
            body(lambda x, b: fused.bias_act(x, b, None, "gelu"), (512, 1024), (1024,)),
            """\
tmp0 = tl.load(in_ptr0 + (x2), None).to(tl.float32)
tmp2 = tl.load(in_ptr1 + (x0), None, eviction_policy='evict_last').to(tl.float32)
tmp1 = tmp0.to(tl.float32)
tmp3 = tmp2.to(tl.float32)
tmp4 = tmp1 + tmp3
tmp5 = tl_math.abs(tmp4)
tmp6 = tl.full([1], 38.0, tl.float32)
tmp7 = tmp5 < tmp6
tmp8 = tl.where(tmp7, tmp5, tmp6)
tmp9 = tl.full([1], 0.305, tl.float32)
tmp10 = tmp8 * tmp9
tmp11 = tl.full([1], 1.0, tl.float32)
tmp12 = tmp10 + tmp11
tmp13 = libdevice.rsqrt(tmp12)
tmp14 = tmp13 * tmp13
tmp15 = tl.full([1], 0.03669929389992738, tl.float32)
tmp16 = tmp14 * tmp15
tmp17 = tl.full([1], -0.15298874309279162, tl.float32)
tmp18 = tmp16 + tmp17
tmp19 = tmp14 * tmp18
tmp20 = tl.full([1], 0.1857176397437275, tl.float32)
tmp21 = tmp19 + tmp20
tmp22 = tmp14 * tmp21
tmp23 = tl.full([1], -0.03797749533101353, tl.float32)
tmp24 = tmp22 + tmp23
tmp25 = tmp14 * tmp24
tmp26 = tl.full([1], 0.12102202023542959, tl.float32)
tmp27 = tmp25 + tmp26
tmp28 = tmp14 * tmp27
tmp29 = tl.full([1], 0.10342076847957368, tl.float32)
tmp30 = tmp28 + tmp29
tmp31 = tmp14 * tmp30
tmp32 = tl.full([1], 0.12246683118857601, tl.float32)
tmp33 = tmp31 + tmp32
tmp34 = tmp14 * tmp33
tmp35 = tl.full([1], 0.12163973187139278, tl.float32)
tmp36 = tmp34 + tmp35
tmp37 = tmp14 * tmp36
tmp38 = tmp4 * tmp4
tmp39 = tl.full([1], -0.7213475204444817, tl.float32)
tmp40 = tmp38 * tmp39
tmp41 = libdevice.exp2(tmp40)
tmp42 = tl.full([1], 0, tl.int32)
tmp43 = triton_helpers.maximum(tmp42, tmp4)
tmp44 = tmp8 * tmp37
tmp45 = tmp44 * tmp41
tmp46 = tmp43 - tmp45
tmp47 = tmp46.to(tl.float32)
tl.store(out_ptr0 + (x2), tmp47, None)
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

    def test_clamped_interleaved_glu(self) -> None:
        self.assertExpectedInline(
            body(lambda x: fused.bias_glu(x, None, None, "quick_gelu", "interleaved", 1.0, 7.0), (512, 2048)),
            """\
tmp0 = tl.load(in_ptr0 + (2*x0), None, eviction_policy='evict_last').to(tl.float32)
tmp2 = tl.load(in_ptr0 + (1 + 2*x0), None, eviction_policy='evict_last').to(tl.float32)
tmp1 = tmp0.to(tl.float32)
tmp3 = tmp2.to(tl.float32)
tmp4 = tl.full([1], 7.0, tl.float32)
tmp5 = triton_helpers.minimum(tmp1, tmp4)
tmp6 = tl.full([1], -7.0, tl.float32)
tmp7 = triton_helpers.maximum(tmp3, tmp6)
tmp8 = triton_helpers.minimum(tmp7, tmp4)
tmp9 = tl.full([1], -2.4554669595930156, tl.float32)
tmp10 = tmp5 * tmp9
tmp11 = libdevice.exp2(tmp10)
tmp12 = tl.full([1], 1.0, tl.float32)
tmp13 = tmp11 + tmp12
tmp14 = (tmp5 / tmp13)
tmp15 = tmp8 + tmp12
tmp16 = tmp14 * tmp15
tmp17 = tmp16.to(tl.float32)
tl.store(out_ptr0 + (x0), tmp17, None)
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
