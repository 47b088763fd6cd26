"""The operators that store float8, compiled: as in eager, in as few kernels and bytes as there can be."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from test_operators import leaf
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from torch_fused_ops import functional as FF

BF16 = torch.bfloat16
MIB = 1 << 20


CASES: dict[str, Any] = {
    "bias_act": lambda: (
        lambda x, b, s: FF.bias_gelu(x * 2, b, token_scale=s, memory="fp8") + 1,
        [leaf(6, 33, 24), leaf(24), leaf(6, 33)],
    ),
    "glu, clamped": lambda: (
        lambda g, u, s: FF.swiglu(g * 2, u, s, clamp=1.0, memory="fp8"),
        [leaf(33, 24), leaf(33, 24), leaf(33)],
    ),
    "bias_glu, bf16": lambda: (
        lambda x, b: FF.bias_swiglu(x * 2, b, memory="fp8"),
        [leaf(33, 48, dtype=BF16), leaf(48, dtype=BF16)],
    ),
    "bias_glu, swapped": lambda: (
        lambda x, b: FF.bias_swiglu(x * 2, b, layout="swapped", memory="fp8"),
        [leaf(33, 48), leaf(48)],
    ),
    "bias_glu, interleaved": lambda: (
        lambda x, b: FF.bias_swiglu(x * 2, b, layout="interleaved", memory="fp8"),
        [leaf(33, 48), leaf(48)],
    ),
    "one axis, float64": lambda: (lambda x: FF.gelu(x, memory="fp8"), [leaf(40, dtype=torch.float64)]),
    "empty": lambda: (lambda x: FF.gelu(x * 2, memory="fp8"), [leaf(3, 0)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True])
@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_eager(name: str, dynamic: bool) -> None:
    fn, args = CASES[name]()

    def step(f: Any) -> list[Tensor]:
        y = f(*args)
        seed = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(y.dtype).view(y.shape)
        return [y.detach(), *torch.autograd.grad(y, args, seed)]

    with inductor_config.patch(force_disable_caches=True):
        got, code = run_and_get_code(lambda: step(torch.compile(fn, fullgraph=True, dynamic=dynamic)))
    for g, e in zip(got, step(fn), strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}.get(e.dtype, 1.6e-2)
        torch.testing.assert_close(
            g, e, rtol=tolerance, atol=tolerance * max(1.0, e.abs().max().item() if e.numel() else 1)
        )
    assert not any("ops.fused" in re.sub(r"#.*", "", c) for c in code), "an operator is called from generated code"


ROWS, N = 8192, 16384
NUMBERS, SCALES = ROWS * N, 4 * ROWS  # a float8 tensor of the result's size, and its scales; bytes


@pytest.mark.parametrize(
    ("name", "kernels", "forward", "backward", "saved"),
    [
        # Of bf16, 2 bytes a number: forward reads the input and writes result, store and scales; backward reads grad,
        # store and scales and writes the input's gradient.
        ("bias_act", (1, 1), 2 + 2 + 1, 2 + 1 + 2, 1),
        ("glu", (1, 1), 4 + 2 + 2, 2 + 2 + 4, 2),
        ("halves", (1, 1), 4 + 2 + 2, 2 + 2 + 4, 2),
        # The scale runs over pairs and the result does not: the input is read twice.
        ("interleaved", (2, 1), 4 + 2 + 4 + 2, 2 + 2 + 4, 2),
    ],
)
def test_kernels_and_bytes(name: str, kernels: tuple[int, int], forward: int, backward: int, saved: int) -> None:
    virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

    def tensor(n: int) -> Tensor:
        return torch.empty(ROWS, n, dtype=BF16, device="meta", requires_grad=True)

    fn, args = {
        "bias_act": (lambda x: FF.gelu(x, memory="fp8"), [tensor(N)]),
        "glu": (lambda g, u: FF.swiglu(g, u, memory="fp8"), [tensor(N), tensor(N)]),
        "halves": (lambda x: FF.bias_swiglu(x, memory="fp8"), [tensor(2 * N)]),
        "interleaved": (lambda x: FF.bias_swiglu(x, layout="interleaved", memory="fp8"), [tensor(2 * N)]),
    }[name]
    paper = virtual_gpu.compile_on_paper(fn, *args, gpu=virtual_gpu.H200)
    graphs = paper.graphs
    assert (len(graphs["forward"].kernels), len(graphs["backward"].kernels)) == kernels
    scales = len(args) * SCALES
    assert graphs["backward"].bytes_moved == backward * NUMBERS + scales
    assert forward * NUMBERS < graphs["forward"].bytes_moved <= forward * NUMBERS + 2 * scales
    assert paper.saved_bytes() == saved * NUMBERS + scales
