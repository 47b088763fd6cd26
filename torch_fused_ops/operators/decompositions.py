"""Decompose every operator into plain aten, for graphs that other tools read: exported programs, ``make_fx``, ONNX.

These functions use ``formulas.py``, so they round and mask exactly as the operators do. ``torch.compile`` and
AOTInductor do not need decompositions: lowerings generate better code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_fused_ops import activations
from torch_fused_ops.operators.autograd import COMPOSITES, REGISTERED, checked


def decompositions(*, differentiable: bool = True) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Map each operator and backward operator to a function that computes it with aten operators.

    Pass the table to ``ExportedProgram.run_decompositions`` or ``make_fx``, merged with the table for other operators::

        table = torch.export.default_decompositions()
        table.update(tfo.decompositions())
        program = program.run_decompositions(table)

    Args:
        differentiable: whether autograd may differentiate the result, which tracing cannot detect. If True, GELU uses
            erfc. If False, the results use the faster formulas for calls without derivatives, and autograd would give
            wrong derivatives at 0. Use False for ONNX, which replaces erfc by 1 - erf and loses GELU's negative tail.
    """
    if not isinstance(differentiable, bool):
        raise TypeError(f"differentiable={differentiable!r} is not accepted: it must be True or False")
    table: dict[torch._ops.OpOverload, Callable[..., Any]] = {
        operator.signature.overload: functools.partial(
            _in_aten, checked(operator.plain, operator.check), differentiable
        )
        for operator in REGISTERED.values()
    }
    return table | COMPOSITES


def _in_aten(plain: Callable[..., Any], differentiable: bool, *args: Any) -> Any:
    with activations.spelled_for_derivatives(differentiable):
        results = plain(*args)

    def owned(t: Tensor) -> Tensor:  # operators return contiguous tensors, and never an argument
        return t.clone() if any(t is a for a in args) else t.contiguous()

    return tree_map_only(Tensor, owned, results)
