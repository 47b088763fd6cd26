"""Generate samples of ``fused::scaled_masked_softmax``, and measure its precision.

``forward``
    The limits of every forward result (``testing.precision``): float16 and bfloat16 are the correctly rounded truth or
    its neighbor, float32 within 1e-5 of the truth (or 1e-30), float64 within 1e-12.
``gradient`` of input, at most 2 ulp (float32: 1e-5, float64: 1e-12)
    The truth is scale · y · (g − Σ g·y) in float64 at the *rounded* output, which is all that backward gets. Errors are
    relative to the row's largest gradient (its ulp in half precision), after subtracting the loss allowed if the two
    terms cancel: 8 · 2⁻²⁴ (float64: 2⁻⁵³) of the largest scale · y · (|g| + Σ |g·y|) in the row.
``sum``, the gradient of sink, at most 4 ulp
    The ulp is of the compute dtype and of the sum of (1 + Σ y) · Σ |g·y| over the head's rows, after one rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.declaration import OPERATORS
from torch_fused_ops.operators import reference
from torch_fused_ops.testing import precision
from torch_fused_ops.testing.samples import DTYPES, Case, Sample, built, gradient, requested

OP = "scaled_masked_softmax"


_FULL = (0, 0, 0, 0)

# Views of a mask with other strides. Expanded views repeat its first values, the others have all its values.
_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.mT.contiguous().mT,
    "sliced": lambda t: torch.stack((t, ~t), -1).flatten(-2)[..., ::2],
    "offset": lambda t: torch.cat((t[..., :1], t), -1)[..., 1:],
    "expanded": lambda t: t[:1].expand(t.shape),
    "expanded last": lambda t: t[..., :1].expand(t.shape),
}


def _case(
    name: str,
    shape: tuple[int, ...] = (2, 3, 5, 8),
    dtype: str = "fp32",
    sink: str = "",
    mask: tuple[int, ...] = (),
    mask_view: str = "contiguous",
    window: tuple[int, int] = (-1, -1),
    **fields: Any,
) -> Case:
    """Make a case. ``sink``: its dtype, or "" for no sink. ``mask``: its shape, with 0 for the input's size, or ()."""
    of_mask = tuple(m or n for m, n in zip(mask, shape[len(shape) - len(mask) :], strict=True))
    return Case(
        name,
        shape,
        dtype,
        absent=() if sink else ("per_head?",),
        other_dtypes=(sink or dtype,),
        mask=(lambda g: _VIEWS[mask_view](torch.rand(of_mask, generator=g) < 0.3)) if mask else None,
        window_left=window[0],
        window_right=window[1],
        **{"scale": 0.3, **fields},
    )


def _cases() -> Iterator[Case]:
    yield _case("plain", core=True)
    for dtype in DTYPES:
        yield _case(f"{dtype}", (2, 2, 7, 33), dtype, dtype, _FULL, causal=True, core=dtype != "fp32")
        yield _case(f"wide scores {dtype}", (3, 4, 40), dtype, scale=2.0, values="wide")
        yield _case(f"tails {dtype}", (2, 3, 64), dtype, scale=1.0, values="tails")
        yield _case(f"peaked {dtype} with sink", (2, 3, 4, 40), dtype, dtype, scale=9.0, values="wide")
    for dtype, sink in (("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16"), ("bf16", "fp64"), ("fp64", "fp32")):
        yield _case(f"{dtype} with sink {sink}", (2, 3, 4, 10), dtype, sink, core=dtype == "bf16")
    several_axes = (_FULL, (0, 1, 0, 0), (0, 1, 1, 0), (1, 1, 0, 0))
    masks: tuple[tuple[int, ...], ...] = (*several_axes, (0, 0), (0,), (1,), (0, 1), (1, 0, 1, 1))
    for mask in masks:
        text = "x".join("n" if m == 0 else "1" for m in mask)
        yield _case(f"mask {text}", mask=mask, core=mask in several_axes)
        yield _case(f"mask {text} bf16", (2, 3, 4, 9), "bf16", "bf16", mask, scale=-1.0)
    for view in ("transposed", "sliced", "offset", "expanded", "expanded last"):
        yield _case(f"mask {view}", mask=_FULL, mask_view=view, core=view in ("transposed", "sliced"))
        yield _case(f"{view}", view=view, mask=(0, 1, 0, 0), sink="fp32", core=True)
    for causal, window, mask, sink in itertools.product(
        (False, True), ((-1, -1), (2, -1), (-1, 1), (3, 2)), ((), _FULL), ("", "fp32")
    ):
        text = f"causal {causal} window {window} mask {bool(mask)} sink {bool(sink)}"
        core = (bool(mask), bool(sink)) == (causal, window[0] >= 0)
        yield _case(text, (2, 2, 6, 8), "fp32", sink, mask, causal=causal, window=window, core=core)
    for sq, sk in ((7, 4), (4, 7), (1, 9), (9, 1), (1, 1)):  # if sq > sk, some queries see no key
        yield _case(f"causal {sq}x{sk}", (2, 3, sq, sk), sink="fp32", causal=True, core=sq == 7)
        yield _case(f"window {sq}x{sk}", (2, sq, sk), window=(1, 2))
    for scale in (1.0, 0.125, 0.0, -0.7, 1e-3, 30.0):
        yield _case(f"scale {scale}", (3, 4, 12), sink="fp32", scale=scale, mask=(0, 0), core=scale in (0.0, -0.7))
    for shape in ((0, 4), (4, 0), (2, 0, 5), (3, 4), (1, 1), (2, 3, 4, 5, 6), (2, 1500)):
        sink = "fp32" if len(shape) > 2 else ""
        core = shape in ((0, 4), (4, 0), (3, 4), (2, 3, 4, 5, 6))
        yield _case(f"shape {'x'.join(map(str, shape))}", shape, sink=sink, causal=True, core=core)
    yield _case("nothing to sum", (2, 3, 0, 4), sink="fp32", core=True)
    yield _case("frozen input", sink="fp32", requires_grad=(False, False, True), core=True)
    yield _case("frozen sink", sink="fp32", requires_grad=(True, False, False), core=True)
    yield _case("minus infinity", (2, 3, 4, 6), values="holes", sink="fp32")


def samples(device: torch.device, core: bool = False) -> Iterator[Sample]:
    """Yield the operator's samples; with ``core``, only the core samples."""
    return built(OPERATORS[OP], _cases(), device, core)


def backward_samples(device: torch.device, core: bool = False) -> Iterator[Sample]:
    """Yield the backward operator's samples at the rounded output."""
    for sample in samples(device, core):
        input, _, sink = sample.tensors
        assert input is not None
        view = sample.name if sample.name in ("expanded", "transposed", "sliced") else "contiguous"
        grad = gradient(sample, tuple(input.shape), input.dtype, view)
        with torch.no_grad():
            output = sample()
        args = (grad, output, *sample.scalars, None if sink is None else sink.dtype, requested((input, sink)))
        yield Sample(f"{OP}_backward", sample.name, args, sample.core)


def _gradient_error(got: Tensor, grad: Tensor, y: Tensor, truth: Tensor, scale: float, exact: torch.dtype) -> Tensor:
    """Return the element-wise error of input's gradient in the contract's unit."""
    if truth.numel() == 0:
        return truth
    size = abs(scale) * y * (grad.abs() + (grad * y).abs().sum(-1, keepdim=True))
    lost = 4 * torch.finfo(exact).eps * size.amax(-1, keepdim=True)
    largest = truth.abs().amax(-1, keepdim=True)
    unit = largest
    if got.dtype in precision.HALF:
        finfo = torch.finfo(got.dtype)
        unit = torch.exp2(largest.clamp_min(finfo.smallest_normal).log2().floor()) * finfo.eps
    error = (got.double() - truth).abs() - lost - precision.FLOORS[got.dtype]
    relative = error.clamp_min(0.0) / unit.clamp_min(precision.FLOORS[got.dtype])
    relative = torch.where((got == truth.to(got.dtype)) | (got.isnan() & truth.isnan()), 0.0, relative)
    return torch.where(relative.isnan(), torch.inf, relative)


def measure(sample: Sample) -> precision.Errors:
    """Return the largest errors of a sample's result and requested gradients."""
    input, _, sink = sample.tensors
    assert input is not None
    exact = reference.compute_dtype(input, sink)
    out = sample()
    wide: Any = tuple(
        a.detach().cpu().to(torch.float64 if a.is_floating_point() else a.dtype) if isinstance(a, Tensor) else a
        for a in sample.args
    )
    errors: precision.Errors = {}
    y = out.detach().cpu()
    precision._worst(errors, "forward", precision.error(y, reference.scaled_masked_softmax(*wide)), out.dtype)
    if not out.requires_grad:
        return errors
    g, got = precision.gradients(sample, out)
    grad, y = g.double().cpu(), y.double()
    truth: Any = reference.scaled_masked_softmax_backward  # Any: the types of the sample's scalars are unknown
    truths = truth(grad, y, *sample.scalars, torch.float64, requested((input, sink)))
    if got[0] is not None:
        e = _gradient_error(got[0], grad, y, truths[0], sample.scalars[0], exact)
        precision._worst(errors, "gradient", e, out.dtype)
    if got[2] is not None:
        absolute = (1 + y.sum(-1)) * (grad * y).abs().sum(-1)
        absolute = absolute.movedim(-2, 0).flatten(1).sum(-1)
        precision._worst(errors, "sum", precision.sum_error(got[2], truths[1], absolute, exact), got[2].dtype)
    return errors
