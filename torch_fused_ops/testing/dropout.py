"""Sample inputs and the measure of ``fused::dropout_add``; see ``samples.py`` and ``precision.py``.

The mask is exact: every dtype drops the elements that float64 drops. The result is a sum of up to three terms. Where
they cancel no float32 formula has float32's relative accuracy: errors count relative to the terms' absolute sum there.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.families.dropout import formulas
from torch_fused_ops.operators import reference
from torch_fused_ops.testing import precision
from torch_fused_ops.testing.samples import DTYPES, Sample, _flags, _tensor

__all__ = ["backward_samples", "measure", "samples"]

OP = "dropout_add"


@dataclass(frozen=True)
class _Case:
    name: str
    shape: tuple[int, ...] = (5, 12)
    p: float = 0.5
    dtype: str = "fp32"
    bias_dtype: str = ""  # "" is input's
    residual_dtype: str = ""
    view: str = "contiguous"
    with_bias: bool = True
    with_residual: bool = True
    requires_grad: tuple[bool, bool, bool] = (True, True, True)
    core: bool = False


def _cases() -> Iterator[_Case]:
    for p in (0.0, 0.1, 0.5, 1.0):
        yield _Case(f"p {p}", (4, 33), p, core=True)
        yield _Case(f"p {p} bf16", (4, 36), p, "bf16")
    for p in (1e-12, 1.0 - 2.0**-40):
        yield _Case(f"p {p}", p=p)
    for dtype in DTYPES:
        yield _Case(dtype, (3, 21), dtype=dtype, core=dtype != "fp32")
    for shape in ((1,), (7,), (0,), (0, 8), (3, 0), (1, 1), (3, 7), (2, 3, 4), (2, 3, 4, 5), (3, 2051)):
        yield _Case(f"shape {'x'.join(map(str, shape))}", shape, core=shape in ((7,), (0, 8), (3, 0), (2, 3, 4)))
    for view in ("transposed", "sliced", "expanded", "expanded last", "offset"):
        yield _Case(view, (4, 6), view=view, core=True)
        yield _Case(f"{view} 3-D bf16", (2, 3, 10), 0.1, "bf16", view=view)
    for bias, residual in itertools.product((True, False), repeat=2):
        if not (bias and residual):
            yield _Case(f"bias {bias}, residual {residual}", with_bias=bias, with_residual=residual, core=True)
            yield _Case(
                f"bias {bias}, residual {residual}, p 0", p=0.0, with_bias=bias, with_residual=residual, core=not bias
            )
    for dtypes in (("bf16", "bf16", "fp32"), ("fp32", "fp32", "bf16"), ("fp16", "bf16", "fp16"), ("bf16", "fp64", "")):
        names = [d or dtypes[0] for d in dtypes]
        yield _Case(f"mixed {' '.join(names)}", (3, 10), 0.1, *dtypes, core=dtypes[0] == "bf16")
    for mask in itertools.product((True, False), repeat=3):
        if not all(mask):
            yield _Case(f"frozen {_flags(mask)}", requires_grad=mask, core=sum(mask) < 2)  # type: ignore[arg-type]


def _build(case: _Case, device: torch.device) -> Sample:
    g = torch.Generator().manual_seed(zlib.crc32(f"{OP} {case.name}".encode()))
    dtypes = [DTYPES[d or case.dtype] for d in (case.dtype, case.bias_dtype, case.residual_dtype)]
    small = "sliced" if case.view == "transposed" else case.view
    shapes = (case.shape, case.view), (case.shape[-1:], small), (case.shape, case.view)
    present = (True, case.with_bias, case.with_residual)
    tensors = tuple(
        # detach() keeps the strides, so that the view itself is the leaf.
        _tensor(shape, dtype, view, "normal", device, g).detach().requires_grad_(r) if here else None
        for (shape, view), dtype, here, r in zip(shapes, dtypes, present, case.requires_grad, strict=True)
    )
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), generator=g).to(device)
    return Sample(OP, case.name, (*tensors, seed, case.p), case.core)


def samples(device: torch.device, core: bool) -> Iterator[Sample]:
    """The samples of ``fused::dropout_add``; only the core ones if asked."""
    for case in _cases():
        if case.core or not core:
            yield _build(case, device)


def _output_dtype(sample: Sample) -> torch.dtype:
    first, _, residual, _ = sample.tensors
    t = first if residual is None else residual
    assert t is not None
    return t.dtype


def backward_samples(device: torch.device, core: bool) -> Iterator[Sample]:
    """The samples of its backward operator: those that require a gradient of input or bias."""
    for sample in samples(device, core):
        first, bias, _, seed = sample.tensors
        mask = [t is not None and t.requires_grad for t in (first, bias)]
        if not any(mask):
            continue
        assert first is not None
        g = torch.Generator().manual_seed(zlib.crc32(f"gradient of {sample}".encode()))
        view = "expanded" if sample.name.startswith("expanded") else "contiguous"
        grad = _tensor(tuple(first.shape), _output_dtype(sample), view, "normal", first.device, g)
        bias_dtype = None if bias is None else bias.dtype
        args = (grad, seed, sample.args[-1], first.dtype, bias_dtype, mask)
        yield Sample(f"{OP}_backward", sample.name, args, sample.core)


def _absolute(sample: Sample, wide: tuple[Any, ...]) -> Tensor:
    """The sum of the absolute values of the result's terms; float64."""
    x, *others = wide[:3]
    bias, residual = (None if t is None else t.abs() for t in others)
    return formulas.dropout_add(x.abs(), bias, residual, *wide[3:])


def measure(sample: Sample) -> precision.Errors:
    """The largest errors on a sample: of the result, and of every gradient that the sample asks for."""
    out = sample()
    floats = precision._cast(sample.args[:3], torch.float64, "cpu")
    wide = (*floats, sample.args[3].cpu(), sample.args[4])
    errors: precision.Errors = {}
    near = _absolute(sample, wide)
    truth = reference.dropout_add(*wide)
    precision._worst(errors, "forward", precision.error(out.detach().cpu(), truth, near), out.dtype)
    wanted = [t is not None and t.requires_grad for t in sample.tensors[:3]]
    if not any(wanted):
        return errors
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(out)
    required = [t for t, w in zip(sample.tensors, wanted, strict=False) if w and t is not None]
    grads = iter(torch.autograd.grad(out, required, grad))
    got = [next(grads).cpu() if w else None for w in wanted]
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
        # The operator's unrounded gradient: in the dtype that it computes in.
        backward = torch.ops.fused.dropout_add_backward
        rows = backward(grad.to(dtype), sample.args[3], p, dtype, None, [True, False])[0].double().cpu()
        total, absolute = (reference.over_rows(t) for t in (rows, rows.abs()))
        precision._worst(errors, "sum", precision.sum_error(got[1], total, absolute, dtype), got[1].dtype)
    if got[2] is not None:  # its truth is grad itself
        precision._worst(errors, "gradient", precision.error(got[2], grad.double().cpu()), got[2].dtype)
    return errors
