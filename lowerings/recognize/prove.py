"""Compare expressions with the activation table, each structure of an expression only once."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch

from torch_fused_ops import activations
from torch_fused_ops.graphs.reasons import NOT_AN_MLP, Kind, Reason

from .graph import read
from .symbolic import MAX_NAMES, TOLERANCE, Algebra, Poly, Ref, Step, Unprovable, evaluate

log = logging.getLogger("torch_fused_ops")

NAMES = ("x", "y")  # an activation reads one tensor, a gated activation two


@dataclass(frozen=True)
class Match:
    """A proof that an expression is scale · ``activation``(gate_scale · gate) · up, or why it cannot be proved.

    ``gate`` and ``up`` are operand indices; ``up`` is None if the activation is not gated.
    """

    activation: str | None
    gate: int = 0
    up: int | None = None
    up_offset: float = 0.0
    clamp: float | None = None
    gate_scale: float = 1.0
    scale: float = 1.0
    reason: Reason | None = None


def prove(steps: tuple[Step, ...], result: Ref, operands: int, *, differentiable: bool = True) -> Match:
    """Compare an expression with every activation and with its gated forms.

    Args:
        steps: the expression.
        result: the step or operand that is its value.
        operands: the number of tensors that it reads.
        differentiable: True if derivatives at kinks must also be equal.
    """
    return _prove(steps, result, operands, differentiable, activations.names())


@lru_cache(maxsize=1024)
def _prove(steps: tuple[Step, ...], result: Ref, operands: int, kinks: bool, table: tuple[str, ...]) -> Match:
    if operands > len(NAMES):
        text = f"{operands} different tensors take part; an MLP's activation reads one or two"
        return _rejected(Kind.MANY_TENSORS, text)
    algebra = _table(table, kinks)[0].fork()
    variables = [algebra.variable(NAMES[i]) for i in range(operands)]
    forms = _table(table, kinks)[1]
    try:
        values = evaluate(algebra, steps, variables)
        expression = result.of(variables, values)
        rounds = result.kind == "value" and algebra.rounds(result.i, expression)
        if operands == 1:
            names = (name for (name, i), form in forms.items() if i == 0 and algebra.same(expression, form))
            match = next(map(Match, names), None)
        else:
            match = _gated(algebra, expression, steps, forms)
        match = match or _scaled(algebra, expression, steps, forms, operands)
    except Unprovable as e:
        return Match(None, reason=e.reason)
    if match is not None and rounds:
        return _rejected(
            Kind.ROUNDED, f"it is {match.activation} in real numbers, but large terms cancel, which rounds"
        )
    if match is None and kinks:
        smooth = _prove(steps, result, operands, False, table)
        if smooth.activation is not None:
            kind = Kind.RELU_KINK if smooth.activation in ("relu", "relu2") else Kind.KINK
            return _rejected(kind, f"it is {smooth.activation}, but with another gradient at the kink or at NaN")
    return match or _explain_mismatch(algebra, expression, steps, forms, operands == 1)


def _rejected(kind: Kind, text: str) -> Match:
    return Match(None, reason=Reason(kind, text))


Forms: TypeAlias = "dict[tuple[str, int], Poly]"
_warned: set[activations.Activation] = set()


@lru_cache(maxsize=8)
def _table(names: tuple[str, ...], kinks: bool) -> tuple[Algebra, Forms]:
    """Return every activation, as a function of x and as a function of y, and the algebra of these expressions."""
    algebra = Algebra(kinks)
    variables = [algebra.variable(name) for name in NAMES]
    table: Forms = {}
    for name in names:
        try:
            for i, x in enumerate(variables):
                table[name, i] = _applied(algebra, name, x)
        except Unprovable as e:  # a registered activation that no rule reads: the operators support it, fusion does not
            if (activation := activations.get(name)) not in _warned:
                _warned.add(activation)
                log.warning("the fusion pass cannot recognize the registered activation %r; it %s", name, e)
    return algebra, table


@lru_cache(maxsize=256)
def _definition(name: str) -> tuple[tuple[Step, ...], Ref]:
    """Return the activation's textbook definition as an expression, read like a graph."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

    definition = activations.get(name).definition
    with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch.no_grad():
        return read(make_fx(lambda x: definition(x))(torch.zeros(2, dtype=torch.float64)).graph)


# A name may be registered again. The new table is built at once, since it warns of activations that no rule reads.
activations._on_change.extend(known.cache_clear for known in (_prove, _table, _definition))


def _warn_of_unknown() -> None:
    _table(activations.names(), False)


activations._on_change.append(_warn_of_unknown)


def _applied(algebra: Algebra, name: str, x: Poly) -> Poly:
    steps, result = _definition(name)
    return result.of([x], evaluate(algebra, steps, [x]))


def _constants(steps: tuple[Step, ...], *names: str) -> Iterator[tuple[str, float]]:
    """Yield the finite arguments except 0 of these functions, each with its function."""
    for name, args, kwargs in steps:
        for value in (*args, *(v for _, v in kwargs)) if name in names else ():
            if isinstance(value, (int, float)) and 0 < abs(value) < math.inf:
                yield name, float(value)


def _gated(algebra: Algebra, expression: Poly, steps: tuple[Step, ...], forms: Forms) -> Match | None:
    """Match act(min(gate, clamp)) · (clamp(up, ±clamp) + up_offset), with either operand as the gate."""
    variables = [algebra.variable(name) for name in NAMES]
    bounds = (bound for _, bound in _constants(steps, "clamp", "clamp_max", "minimum", "hardtanh") if bound > 0)
    for clamp in dict.fromkeys((None, *bounds)):
        for name, gate in forms:
            act, up = forms[name, gate], variables[1 - gate]
            if clamp is not None:
                act = _applied(algebra, name, algebra.clamp(variables[gate], None, clamp))
                up = algebra.clamp(up, -clamp, clamp)
            # expression = act·(up + offset): expression - act·up is a multiple of act
            offset = algebra.ratio(algebra.sub(expression, algebra.mul(act, up)), act)
            if offset is not None:
                return Match(name, gate, 1 - gate, round(offset, 12), clamp)
    return None


def _scaled(algebra: Algebra, expression: Poly, steps: tuple[Step, ...], forms: Forms, operands: int) -> Match | None:
    """Match scale · act(gate_scale · gate) · up, with the multipliers of muP and Falcon-H1.

    Both scales must be constants of the program. x·sigmoid(1.7·x) equals silu(1.7·x) / 1.7, but is more likely a typo
    of quick_gelu, whose constant is 1.702.
    """
    variables = [algebra.variable(name) for name in NAMES]
    constants = _constants(steps, "mul", "div")
    multipliers = [value if name == "mul" else 1 / value for name, value in constants]
    factors = dict.fromkeys((1.0, *multipliers))
    for (name, gate), form in forms.items():
        up = 1 - gate if operands == 2 else None
        if gate >= operands:
            continue
        for inside in factors:
            act = form if inside == 1 else _applied(algebra, name, algebra.mul(variables[gate], inside))
            scale = algebra.ratio(expression, act if up is None else algebra.mul(act, variables[up]))
            if scale and (inside == 1 or any(math.isclose(scale, f, rel_tol=TOLERANCE) for f in factors)):
                return Match(name, gate, up, gate_scale=inside, scale=1.0 if abs(scale - 1) < TOLERANCE else scale)
    return None


def _explain_mismatch(algebra: Algebra, expression: Poly, steps: tuple[Step, ...], forms: Forms, unary: bool) -> Match:
    """Explain why no activation matches, and name a similar activation if there is one."""
    is_long = algebra.names(expression) > MAX_NAMES  # the text doubles with every call of x·sin(x) on its own result
    text = f"a formula of more than {MAX_NAMES} functions and variables" if is_long else algebra.text(expression)
    text = text if len(text) <= 160 else f"{text[:160]}…"
    if algebra.constant(expression) is not None:  # a gate on a state that starts as zeros
        return _rejected(Kind.CONSTANT, f"{NOT_AN_MLP}it is {text} everywhere")
    if unary and len(steps) == 1 and hasattr(torch.nn.functional, steps[0][0]):
        text = f"{steps[0][0]}(x) = {text}"
    if not unary:
        return _rejected(Kind.UNKNOWN_GATED, f"{text} is not a supported gated activation")
    if is_long:
        return _rejected(Kind.UNKNOWN, f"{text} is not a supported activation")
    shape, constants = algebra.constants(expression)
    candidates: list[tuple[float, str]] = []
    for (name, i), form in forms.items():
        if i:
            continue
        its_shape, its_constants = algebra.constants(form)
        if shape == its_shape:
            pairs = zip(constants, its_constants, strict=True)
            mismatches = [(c, t) for c, t in pairs if abs(c - t) > TOLERANCE * abs(t)]
            values = ", ".join(f"{c:.7g} for {t:.7g}" for c, t in mismatches)
            candidates.append((max(abs(c / t - 1) for c, t in mismatches), f"{text} is like {name}, but has {values}"))
    if candidates and min(candidates)[0] < 0.5:
        return _rejected(Kind.NEAR, min(candidates)[1])
    return _rejected(Kind.UNKNOWN, f"{text} is not a supported activation")
