"""Read activations written as a ``torch.autograd.Function``, if their backward is proved to be the derivative.

Examples are Bloom's GELU and many "memory-efficient" activations, which save less than autograd does. Dynamo
represents them by the higher-order operator ``autograd_function_apply(forward, backward, *args)`` with two graphs. A
function stays if its backward is deliberately not the derivative (straight-through estimators, clipped gradients).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch.fx import Node

from torch_fused_ops.graphs.reasons import Kind

from .graph import function_bodies, read
from .symbolic import Algebra, Ref, Step, Unprovable, evaluate


def forward_of(function: Node) -> tuple[tuple[Step, ...], Ref]:
    """Return the function's first result as an expression of its arguments.

    Raises:
        Unprovable: no rule reads the forward or the backward, or the backward is not the forward's derivative.
    """
    # A result that mark_non_differentiable names has no gradient, even if the backward returns one.
    marked: Any = function.kwargs.get("non_differentiable_idx", ())
    if 0 in marked:
        raise Unprovable(
            "the result of a custom autograd.Function is marked as not differentiable", Kind.CUSTOM_FUNCTION
        )
    bodies = function_bodies(function)
    if len(bodies) < 2:
        raise Unprovable("a custom autograd.Function without its graphs", Kind.CUSTOM_FUNCTION)
    (forward, outputs), (backward, gradients) = (read(body.graph) for body in bodies)
    results, saved = outputs
    if not isinstance(gradients, (tuple, list)):
        gradients = (gradients,)
    arguments = len(function.args) - 2
    _check_backward(forward, backward, results[0], len(results), tuple(saved), tuple(gradients), arguments)
    return forward, results[0]


@lru_cache(maxsize=256)
def _check_backward(
    forward: tuple[Step, ...],
    backward: tuple[Step, ...],
    result: Ref,
    results: int,
    saved: tuple[Ref, ...],
    gradients: tuple[Ref | None, ...],
    arguments: int,
) -> None:
    """Compare the backward, a function of the results' gradients and saved values, with the forward's derivative."""
    algebra = Algebra()
    variables = [algebra.variable(f"x{i}") for i in range(arguments)]
    grad = algebra.variable("grad")
    values = evaluate(algebra, forward, variables)
    unused = [algebra.variable(f"grad{i}") for i in range(1, results)]
    operands = [grad, *unused, *(ref.of(variables, values) for ref in saved)]
    computed = evaluate(algebra, backward, operands)
    for variable, gradient in zip(variables, gradients, strict=True):
        expected = algebra.mul(grad, algebra.derivative(result.of(variables, values), variable))
        if gradient is None:
            raise Unprovable("a custom autograd.Function gives no gradient for an argument", Kind.CUSTOM_FUNCTION)
        if not algebra.same(gradient.of(operands, computed), expected):
            raise Unprovable("the backward of a custom autograd.Function is not its derivative", Kind.CUSTOM_FUNCTION)
