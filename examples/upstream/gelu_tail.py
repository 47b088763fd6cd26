"""GELU loses its negative tail (docs/upstream.md).

For negative x, the sums in ``0.5·x·(1 + erf(x/√2))`` and ``0.5·x·(1 + tanh(u))`` cancel.

Remedy: ``0.5·x·erfc(−x/√2)`` and ``x·sigmoid(2u)``. They take 22.6 instead of 36.2 instructions an element, and 14.0
instead of 27.6 (H200, Triton 3.9). Pull request 189234 changes the erf form only.
"""

import math

import torch
import torch.nn.functional as F

bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
x = bits[(bits >= -10) & (bits <= -3)]


def off(y: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the share of results with an error above one unit in the last place."""
    nearest = exact.bfloat16().abs()
    ulp = torch.nextafter(nearest, torch.tensor(math.inf).bfloat16()).double() - nearest.double()
    return ((y.double() - exact).abs() > ulp).double().mean().item()


wide = x.double()
u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
exact = {"none": 0.5 * wide * torch.erfc(-wide / math.sqrt(2)), "tanh": wide * torch.sigmoid(2 * u)}
for approximate, truth in exact.items():
    assert off(F.gelu(x, approximate=approximate), truth) >= 0.6
    assert off(torch.compile(F.gelu, backend="aot_eager_decomp_partition")(x, approximate=approximate), truth) >= 0.6

# Formulas without cancellation, in float32, which F.gelu also uses.
narrow = x.float()
v = math.sqrt(2 / math.pi) * (narrow + 0.044715 * narrow**3)
assert off((0.5 * narrow * torch.erfc(-narrow / math.sqrt(2))).bfloat16(), exact["none"]) == 0
assert off((narrow * torch.sigmoid(2 * v)).bfloat16(), exact["tanh"]) == 0

assert F.gelu(torch.tensor(-6.0), approximate="tanh") == 0  # x·sigmoid(2u) has -8.4e-11
