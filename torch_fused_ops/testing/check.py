"""Check every operator on a device: ``torch.library.opcheck`` and the precision contract, over the sample inputs.

    rows = check("cuda")
    print(*map(row_line, rows), sep="\n")
    assert all(row.passed for row in rows)

``python -m torch_fused_ops check`` runs this. ``precision.py`` states the measures and their limits.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from torch_fused_ops import activations
from torch_fused_ops.testing import precision
from torch_fused_ops.testing.samples import DTYPES, OPERATORS, Sample, backward_samples, samples


@dataclass
class Row:
    """The results for one operator (or one activation through ``bias_act``) and one dtype.

    Attributes:
        operator: e.g. ``bias_glu``, or ``bias_act gelu`` for the sweep over an activation's whole range.
        dtype: the dtype of the measured results.
        samples: the number of calls; for a sweep, the number of values.
        opchecks: the number of calls that opcheck has run, including calls of the backward operator.
        errors: the largest errors, by kind ("forward", "gradient", "sum"), in the units of ``precision.LIMITS``.
        failures: one line per failure.
    """

    operator: str
    dtype: torch.dtype
    samples: int = 0
    opchecks: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if nothing has failed."""
        return not self.failures

    def note(self, where: str, errors: precision.Errors) -> None:
        """Record the errors of results in this row's dtype, and a failure for each error above its limit."""
        for (kind, dtype), error in errors.items():
            if dtype == self.dtype:
                self.errors[kind] = max(self.errors.get(kind, 0.0), error)
                limit = precision.LIMITS[kind, dtype]
                if not error <= limit:
                    got, allowed = precision.show(kind, dtype, error), precision.show(kind, dtype, limit)
                    self.failures.append(f"{where}: {kind} error {got}, allowed {allowed}")


def run_opcheck(sample: Sample) -> str | None:
    """Run ``torch.library.opcheck`` on a call; return its error as one line, or None."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            torch.library.opcheck(sample.overload, sample.args)
        except Exception as e:
            return f"{sample}: opcheck: {type(e).__name__}: {' '.join(str(e).split())[:300]}"
    return None


def _sweeps(device: torch.device, quick: bool) -> Iterator[Row]:
    for name in activations.names():
        for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32):
            row = Row(f"bias_act {name}", dtype, precision.every_value(dtype).numel())
            try:
                row.note(f"bias_act {name} {dtype}", precision.sweep(name, dtype, device))
            except Exception as e:
                row.failures.append(f"bias_act {name} {dtype}: {type(e).__name__}: {e}")
            yield row


def _operator(op: str, device: torch.device, quick: bool) -> Iterator[Row]:
    rows = {dtype: Row(op, dtype) for dtype in DTYPES.values()}
    for sample in samples(op, device, core=quick):
        rows[sample.dtype].samples += 1
        try:
            errors = precision.measure(sample)
        except Exception as e:
            rows[sample.dtype].failures.append(f"{sample}: {type(e).__name__}: {e}")
            continue
        for row in rows.values():  # a gradient's dtype may differ from the result's dtype
            row.note(str(sample), errors)
    for sample in (*samples(op, device, core=True), *backward_samples(op, device, core=True)):
        rows[sample.dtype].opchecks += 1
        if failure := run_opcheck(sample):
            rows[sample.dtype].failures.append(failure)
    yield from rows.values()


def check(
    device: str | torch.device = "cpu", *, quick: bool = False, progress: Callable[[Row], None] | None = None
) -> list[Row]:
    """Run opcheck and measure precision for every operator.

    Args:
        device: the device of the operators. The truth is always computed on the CPU, in float64.
        quick: whether to run only the core samples, and sweeps only in bfloat16.
        progress: called with each finished row, unless it is None.
    """
    device = torch.device(device)
    rows = []
    for source in (_sweeps(device, quick), *(_operator(op, device, quick) for op in OPERATORS)):
        for row in source:
            rows.append(row)
            if progress is not None:
                progress(row)
    return rows


_COLUMNS = ("operator", "dtype", "samples", "opcheck", "forward", "gradient", "sum", "")


def line(cells: tuple[str, ...] = _COLUMNS) -> str:
    """Format one line of the table, by default the heading."""
    formats = ("<22", "<9", ">8", ">8", ">10", ">10", ">10", ">4")
    return "".join(format(cell, spec) for cell, spec in zip(cells, formats, strict=True))


def row_line(row: Row) -> str:
    """Format a row as one line of the table."""
    errors = (precision.show(k, row.dtype, row.errors[k]) if k in row.errors else "-" for k in precision.KINDS)
    dtype = str(row.dtype).removeprefix("torch.")
    opchecks = str(row.opchecks) if row.opchecks else "-"
    return line((row.operator, dtype, str(row.samples), opchecks, *errors, "ok" if row.passed else "FAIL"))
