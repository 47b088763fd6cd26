"""Compute each row of docs/migrate.md's tables, and compare it with the page."""

import math
import re
from functools import partial
from pathlib import Path

import harness
import pytest
import torch
import torch.nn.functional as F
from harness import saving

from torch_fused_ops import functional, megatron, slapo

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "migrate.md").read_text(encoding="utf-8")
TOKENS, WIDTH, MLP = 8192, 4096, 16384
meta = partial(harness.meta, requires_grad=True)


def saved_mib(fn, *tensors):
    """Return the MiB of the storages that autograd saves for this call."""
    return f"{saving(lambda: fn(*tensors))[1] / 2**20:.2f}"


def bias_new_gelu(x, bias):
    x = x + bias
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def bias_swiglu(x, bias):
    gate, up = torch.chunk(x + bias, 2, -1)
    return F.silu(gate) * up


def bias_dropout_add(x, bias, residual):
    return residual + torch.native_dropout(x + bias, 0.1, True)[0]  # has a mask as on GPUs, a byte per element


def masked_softmax(scores, mask):
    return torch.softmax((scores.float() * 0.5).masked_fill_(mask, -10000.0), -1).bfloat16()


def ours_softmax(scores, mask):
    kind = megatron.AttnMaskType.padding
    return megatron.FusedScaleMaskSoftmax(False, True, kind, True, None, True, 0.5)(scores, mask)


def memory_rows():
    x, bias, packed, packed_bias = meta(TOKENS, MLP), meta(MLP), meta(TOKENS, 2 * MLP), meta(2 * MLP)
    hidden = meta(TOKENS, WIDTH), meta(WIDTH), meta(TOKENS, WIDTH)
    scores = meta(4, 32, 2048, 2048), torch.empty(4, 1, 2048, 2048, dtype=torch.bool, device="meta")
    fp8 = saved_mib(lambda x, b: megatron.bias_swiglu_impl(x, b, fp8_input_store=True), packed, packed_bias)

    def ours_dropout(x, b, r):
        return megatron.bias_dropout_add_fused_train((x, b), r, 0.1)

    return {
        "bias + GELU: Slapo's `bias_new_gelu`": (
            saved_mib(bias_new_gelu, x, bias),
            saved_mib(slapo.bias_new_gelu, x, bias),
            "",
        ),
        "bias + GELU: `F.gelu(x + bias)`": (
            saved_mib(lambda x, b: F.gelu(x + b, approximate="tanh"), x, bias),
            saved_mib(megatron.bias_gelu_impl, x, bias),
            "",
        ),
        "bias + SwiGLU: `bias_swiglu_impl`": (
            saved_mib(bias_swiglu, packed, packed_bias),
            saved_mib(megatron.bias_swiglu_impl, packed, packed_bias),
            fp8,
        ),
        "bias + dropout + residual: `bias_dropout_add_fused_train`": (
            saved_mib(bias_dropout_add, *hidden),
            saved_mib(ours_dropout, *hidden),
            "",
        ),
        "masked softmax: `FusedScaleMaskSoftmax`": (
            saved_mib(masked_softmax, *scores),
            saved_mib(ours_softmax, *scores),
            "",
        ),
    }


def test_memory():
    for name, cells in memory_rows().items():
        row = "| " + " | ".join((name, *cells)).strip() + " |"
        assert row in PAGE, row


def test_dropout_saves_only_its_seed():
    _, saved = saving(lambda: megatron.bias_dropout_add_fused_train((meta(4, 8), meta(8)), meta(4, 8), 0.1))
    assert saved == 8 and "one seed of 8 bytes" in PAGE


def bias_gelu(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


GELUS = {
    "step by step in bfloat16: Megatron-LM and Slapo in eager mode": bias_gelu,
    "same formula in float32, rounded once: Megatron-LM and Slapo, fused": lambda x: bias_gelu(x.float()).bfloat16(),
    "ours": lambda x: megatron.bias_gelu(None, x),
}


@pytest.mark.parametrize("name", GELUS)
def test_tail(name):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[(every >= -10) & (every <= -3)]
    z = x.double()
    exact = (z * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))).bfloat16()
    got = GELUS[name](x)
    ulps = (got.view(torch.int16).int() & 0x7FFF) - (exact.view(torch.int16).int() & 0x7FFF)  # all are negative, or 0
    off, zero = ((share.float().mean() * 100).item() for share in (ulps.abs() > 1, got == 0))
    page = (DOCS / "numerics.md").read_text(encoding="utf-8")
    assert f"of the {len(x)} bfloat16 inputs in [−10, −3]" in page
    assert f"| {name} | {off:.1f} % | {zero:.1f} % |" in page, (off, zero)


def test_every_name_on_the_page_exists():
    for module, page in ((megatron, "## From Megatron-LM"), (slapo, "## From Slapo")):
        text = PAGE.partition(page)[2].partition("\n## ")[0].partition("\nFurther differences")[0]
        first = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
        names = [name.split("(")[0] for cell in first for name in cell.split("`")[1::2]]
        for name in names:
            assert "=" in name or "…" in name or hasattr(module, name), name
        assert len(names) > 3
    for page in ("Liger Kernel", "TransformerEngine"):  # test_functional.py tests the right columns
        text = PAGE.partition(f"\n## From {page}\n")[2].partition("\n## ")[0]
        calls = re.findall(r"`(\w+)\([^`]*\)`[^|]*\|$", text, re.M)
        assert {"swiglu", "bias_glu"} & {*calls} and {*calls} - {"compile"} <= set(functional.__all__), calls
