"""Generate samples of ``fused::dropout_add``, and measure its precision; see ``samples.py`` and ``precision.py``.

The mask is exact: every dtype drops the same elements as float64. The result is a sum of up to three terms. If they
cancel, no float32 formula has float32's relative accuracy, so errors are relative to the sum of absolute terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.declaration import OPERATORS
from torch_fused_ops.families.dropout import formulas
from torch_fused_ops.operators import reference
from torch_fused_ops.testing import precision
from torch_fused_ops.testing.samples import (
    DTYPES,
    VIEWS,
    Case,
    Sample,
    built,
    cases_of_frozen_tensors,
    cases_of_shapes,
    gradient,
    requested,
)


def _cases() -> Iterator[Case]:
    for p in (0.0, 0.1, 0.5, 1.0):
        yield Case(f"p {p}", (4, 33), p=p, core=True)
        yield Case(f"p {p} bf16", (4, 36), "bf16", p=p)
    for p in (1e-12, 1.0 - 2.0**-40):
        yield Case(f"p {p}", (5, 12), p=p)
    for dtype in DTYPES:
        yield Case(dtype, (3, 21), dtype, core=dtype != "fp32")
    yield from cases_of_shapes()
    for view in VIEWS:
        yield Case(view, (4, 6), view=view, core=True)
        yield Case(f"{view} 3-D bf16", (2, 3, 10), "bf16", view=view, p=0.1)
    for bias, residual in ((True, False), (False, True), (False, False)):
        absent = ("per_column?",) * (not bias) + ("data?",) * (not residual)
        yield Case(f"bias {bias}, residual {residual}", (5, 12), absent=absent, core=True)
        yield Case(f"bias {bias}, residual {residual}, p 0", (5, 12), absent=absent, p=0.0, core=not bias)
    mixed = ("bf16", "bf16", "fp32"), ("fp32", "fp32", "bf16"), ("fp16", "bf16", "fp16"), ("bf16", "fp64", "bf16")
    for first, *dtypes in mixed:
        name = f"mixed {first} {' '.join(dtypes)}"
        yield Case(name, (3, 10), first, other_dtypes=tuple(dtypes), p=0.1, core=first == "bf16")
    for case in cases_of_frozen_tensors():
        yield replace(case, shape=(5, 12))


def samples(device: torch.device, core: bool) -> Iterator[Sample]:
    """Yield the samples of ``fused::dropout_add``; with ``core``, only the core samples."""
    return built(OPERATORS["dropout_add"], _cases(), device, core)


def backward_samples(device: torch.device, core: bool) -> Iterator[Sample]:
    """Yield the backward operator's samples, one for each sample that requires a gradient of input or bias."""
    for sample in samples(device, core):
        first, bias, residual, seed = sample.tensors
        mask = requested((first, bias))
        if any(mask):
            assert first is not None
            dtype = first.dtype if residual is None else residual.dtype
            grad = gradient(sample, tuple(first.shape), dtype)
            args = (grad, seed, sample.args[-1], first.dtype, None if bias is None else bias.dtype, mask)
            yield Sample("dropout_add_backward", sample.name, args, sample.core)


def _absolute(sample: Sample, wide: tuple[Any, ...]) -> Tensor:
    """Return the sum of the result's absolute terms in float64."""
    x, *optional = wide[:3]
    bias, residual = (None if t is None else t.abs() for t in optional)
    return formulas.dropout_add(x.abs(), bias, residual, *wide[3:])


def measure(sample: Sample) -> precision.Errors:
    """Return the largest errors of a sample's result and requested gradients."""
    out = sample()
    floats = precision._cast(sample.args[:3], torch.float64, "cpu")
    wide = (*floats, sample.args[3].cpu(), sample.args[4])
    errors: precision.Errors = {}
    near = _absolute(sample, wide)
    truth = reference.dropout_add(*wide)
    precision._worst(errors, "forward", precision.error(out.detach().cpu(), truth, near), out.dtype)
    if not out.requires_grad:
        return errors
    grad, got = precision.gradients(sample, out)
    first, bias = sample.tensors[:2]
    assert first is not None
    seed, p = wide[3:]
    bias_dtype = None if bias is None else torch.float64
    d_input, _ = reference.dropout_add_backward(grad.double().cpu(), seed, p, torch.float64, bias_dtype, (True, False))
    assert d_input is not None
    if got[0] is not None:
        precision._worst(errors, "gradient", precision.error(got[0], d_input), got[0].dtype)
    if got[1] is not None and bias is not None:
        dtype = formulas.dropout_backward_dtype(grad, first.dtype, bias.dtype)
        # The operator's unrounded gradient, in its compute dtype.
        backward = torch.ops.fused.dropout_add_backward
        rows = backward(grad.to(dtype), sample.args[3], p, dtype, None, [True, False])[0].double().cpu()
        total, absolute = (reference.over_rows(t) for t in (rows, rows.abs()))
        precision._worst(errors, "sum", precision.sum_error(got[1], total, absolute, dtype), got[1].dtype)
    if got[2] is not None:  # the truth is grad
        precision._worst(errors, "gradient", precision.error(got[2], grad.double().cpu()), got[2].dtype)
    return errors
