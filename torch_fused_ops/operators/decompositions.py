"""Every operator as plain aten, for graphs that others read: exported programs, ``make_fx``, ONNX.

The formulas are ``formulas.py``'s, so rounding and masks are the operators'. Under ``torch.compile`` and AOTInductor
nothing of this is needed: lowerings do better.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_fused_ops import activations
from torch_fused_ops.operators.autograd import COMPOSITES, REGISTERED


def decompositions(*, differentiable: bool = True) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Each of our operators, backward operators among them, with a function that computes it in aten's.

    For ``ExportedProgram.run_decompositions`` and ``make_fx``; add the tables of your own, which decide what is done
    with the rest::

        table = torch.export.default_decompositions()
        table.update(tfo.decompositions())
        program = program.run_decompositions(table)

    Args:
        differentiable: whether autograd may go through the result, which nothing shows while it is traced. GELU is
            then spelled with erfc. False: by the quicker formulas that the operators use where no derivative is taken
            through them; it would be wrong at 0. Better for ONNX, which has no erfc: 1 - erf, put in its place, loses
            GELU's negative tail.
    """
    if not isinstance(differentiable, bool):
        raise TypeError(f"differentiable={differentiable!r} is not accepted: it must be True or False")
    table: dict[torch._ops.OpOverload, Callable[..., Any]] = {
        signature.overload: functools.partial(_in_aten, plain, check, differentiable)
        for signature, plain, check in REGISTERED.values()
    }
    return table | COMPOSITES


def _in_aten(plain: Callable[..., Any], check: Callable[..., None] | None, differentiable: bool, *args: Any) -> Any:
    if check is not None:
        check(*args)
    with activations.spelled_for_derivatives(differentiable):
        results = plain(*args)
    several = results if isinstance(results, tuple) else (results,)
    # As operators return them: contiguous, and no argument.
    outputs = [t if t is None else t.clone() if any(t is a for a in args) else t.contiguous() for t in several]
    return tuple(outputs) if isinstance(results, tuple) else outputs[0]
