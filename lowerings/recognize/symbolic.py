"""Canonical forms of pointwise expressions: two ways to write one function get equal forms.

An expression is a polynomial with float coefficients over *atoms*. An atom is a variable, or a function applied to such
polynomials. This form alone settles operand order, association and distribution. Rewriting every function into a few
functions settles most other differences: ``tanh``, ``silu``, ``x / (1 + exp(-x))``, ``exp(x) / (1 + exp(x))`` are all
written with ``sigmoid``; ``abs``, ``clamp``, ``leaky_relu``, ``hardswish``, … with ``relu``; ``exp(a)·exp(b)`` becomes
``exp(a + b)``.

Equal forms prove equal functions, with constants to a relative 1e-6. Unequal forms prove nothing: a missing identity
costs a fusion, but never causes a wrong result.

Why not sympy: it leaves ``sqrt(2/pi)`` symbolic inside a function's argument and compares constants exactly. It needs
38 ms to bring NewGELU to exponentials and expand it, and 13 ms for the clamped GLU of gpt-oss. Here the whole proof
takes 0.1 and 5 ms (one core, once the forms of the activations are computed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from torch_fused_ops.formulas import CLAMP_KEEPS_BOUNDS
from torch_fused_ops.graphs.reasons import Kind, Rejection

# ((atom, power), …) sorted by atom; () is 1. An atom is its index in ``Algebra.atoms``.
Monomial: TypeAlias = tuple[tuple[int, int], ...]
Poly: TypeAlias = dict[Monomial, float]
Operand: TypeAlias = "Poly | float"

TOLERANCE = 1e-6  # relative, of each constant in the canonical form
CANCELED = 1e-12  # a sum this much smaller than its terms is rounding, not a term
MAX_TERMS = 128
MAX_POWER = 8
# Limits that end a long proof, for expressions that are not activations.
MAX_STEPS = 160  # calls
MAX_WORK = 1_000_000  # terms that are added, and atoms that are compared
MAX_NAMES = 128  # functions and variables in a message
# The derivative of torch.clamp exactly at a bound: 1 up to torch 2.13, 0 from 2.15 on.
CLAMP_KINK = 1.0 if CLAMP_KEEPS_BOUNDS else 0.0


class Unprovable(Rejection):
    """The expression cannot be proved; the message names the obstacle."""

    def __init__(self, obstacle: str, kind: Kind = Kind.UNPROVABLE) -> None:
        super().__init__(kind, f"cannot be proved: {obstacle}")


class Algebra:
    """Arithmetic on canonical forms. Atoms that agree to the tolerance are represented by the first of them."""

    def __init__(self, kinks: bool = True, atoms: tuple[tuple[str, tuple[Poly, ...]], ...] = ()) -> None:
        """``kinks``: True to distinguish functions by derivatives at kinks and NaN; ``atoms``: the initial atoms."""
        self.kinks = kinks
        self.atoms: list[tuple[str, tuple[Poly, ...]]] = list(atoms)
        self.lost: list[float] = []  # for each step of the last evaluation, the largest term that vanished in a sum
        self.inexact = False  # True if some atoms were equal only to the tolerance
        self.work = 0
        self._exact: dict[int, tuple[Poly, ...]] = {}

    def fork(self) -> Algebra:
        """Copy the algebra with its atoms, so that a proof does not depend on proofs before it."""
        return Algebra(self.kinks, tuple(self.atoms))

    # Atoms and comparison

    def variable(self, name: str) -> Poly:
        return self._atom(name)

    def _spend(self, work: int) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise Unprovable(f"more than {MAX_WORK} steps of algebra")

    def _atom(self, function: str, *args: Poly) -> Poly:
        self._spend(len(self.atoms))
        for i, (known, known_args) in enumerate(self.atoms):
            if known == function and all(map(self.same, args, known_args)):
                exact = self._exact.setdefault(i, args)
                self.inexact |= not all(self.same(p, q, 1e-12) for p, q in zip(args, exact, strict=True))
                return {((i, 1),): 1.0}
        self.atoms.append((function, args))
        return {((len(self.atoms) - 1, 1),): 1.0}

    @staticmethod
    def same(p: Poly, q: Poly, tolerance: float = TOLERANCE) -> bool:
        return p.keys() == q.keys() and all(math.isclose(c, q[m], rel_tol=tolerance) for m, c in p.items())

    def rounds(self, step: int, p: Poly) -> bool:
        """Return True if a step's value is p only without rounding: large terms cancel, or atoms are nearly equal."""
        return self.inexact or self.lost[step] > 8 * max(map(abs, p.values()), default=0.0)

    @staticmethod
    def constant(p: Poly) -> float | None:
        """Return p's value if p does not depend on any atom, otherwise None."""
        return 0.0 if not p else p[()] if p.keys() == {()} else None

    def ratio(self, p: Poly, q: Poly) -> float | None:
        """Return the number c with p = c·q; None if no such number exists."""
        if not p:
            return 0.0
        if p.keys() != q.keys():
            return None
        m = min(q)
        return p[m] / q[m] if self.same(p, self.mul(q, p[m] / q[m])) else None

    # Ring operations

    @staticmethod
    def lift(value: Operand) -> Poly:
        if isinstance(value, dict):
            return value
        if isinstance(value, (int, float)):
            if not -math.inf < value < math.inf:
                raise Unprovable(f"the constant {value} in it")
            return {(): float(value)} if value else {}
        raise Unprovable(f"an argument of type {type(value).__name__}")

    def add(self, p: Operand, q: Operand, factor: float = 1.0) -> Poly:
        """Return p + factor·q."""
        total, q = dict(self.lift(p)), self.lift(q)
        self._spend(len(total) + len(q))
        for m, c in q.items():
            c *= factor
            old = total.get(m, 0.0)
            if not math.isfinite(old + c):
                raise Unprovable("a constant beyond float64's range in it")
            if abs(old + c) <= CANCELED * abs(c):
                total.pop(m, None)
            else:
                total[m] = old + c
        if len(total) > MAX_TERMS:
            raise Unprovable(f"more than {MAX_TERMS} terms")
        return total

    def mul(self, p: Operand, q: Operand) -> Poly:
        if isinstance(q, (int, float)):
            q = self.lift(q)
        total: Poly = {}
        for m, c in self.lift(p).items():
            for n, d in self.lift(q).items():
                total = self.add(total, self._product(m, n), c * d)
        return total

    def _product(self, m: Monomial, n: Monomial) -> Poly:
        if not m or not n:
            return {m or n: 1.0}
        powers = dict(m)
        for atom, k in n:
            powers[atom] = powers.get(atom, 0) + k
        if max(powers.values()) > MAX_POWER:
            raise Unprovable(f"a power above {MAX_POWER}")
        if any(self.atoms[atom][0] == "relu" for atom in powers):
            powers = self._square_relus(powers)
        exponentials = [atom for atom in powers if self.atoms[atom][0] == "exp"]
        if not exponentials:
            return {tuple(sorted(powers.items())): 1.0}
        # exp(a)·exp(b) = exp(a + b)
        exponent: Poly = {}
        for atom in exponentials:
            exponent = self.add(exponent, self.atoms[atom][1][0], powers.pop(atom))
        if not exponent:
            return {tuple(sorted(powers.items())): 1.0}
        # exp(w)·sigmoid(w) = exp(w) - sigmoid(w) and exp(-w)·sigmoid(w) = 1 - sigmoid(w)
        for atom, k in powers.items():
            function, args = self.atoms[atom]
            for sign in (1.0, -1.0):
                if function == "sigmoid" and self.same(args[0], self.mul(exponent, sign)):
                    lower = {a: p for a, p in {**powers, atom: k - 1}.items() if p}
                    first = self.exp(exponent) if sign > 0 else self.lift(1.0)
                    second = self._atom(function, *args)
                    return self.mul({tuple(sorted(lower.items())): 1.0}, self.add(first, second, -1.0))
        ((e, _),) = next(iter(self._atom("exp", exponent)))
        return {tuple(sorted([*powers.items(), (e, 1)])): 1.0}

    def _square_relus(self, powers: dict[int, int]) -> dict[int, int]:
        """Replace x·relu(x) with relu(x)². The derivative of the square is 0 at the kink, for any derivative of relu.

        At NaN it is NaN, unless the gradients of all factors are masked.
        """
        for atom, k in powers.items():
            function, args = self.atoms[atom]
            if function != "relu":
                continue
            inner = args[0]
            relus = [b for b in powers if self.atoms[b][0] == "relu" and self.same(self.atoms[b][1][0], inner)]
            same = [b for b in powers if inner == {((b, 1),): 1.0} or b in relus]
            is_masked = same == relus and not any(self.atoms[b][1][2] for b in relus)
            ((square, _),) = next(iter(self._atom("relu", inner, {}, {} if is_masked else self.lift(1.0))))
            if same != [square] and (len(same) > 1 or k > 1):
                remaining = {b: n for b, n in powers.items() if b not in same}
                return self._square_relus({**remaining, square: sum(powers[b] for b in same)})
        return powers

    def sub(self, p: Operand, q: Operand) -> Poly:
        return self.add(p, q, -1.0)

    def div(self, p: Operand, q: Operand) -> Poly:
        return self.mul(p, self.reciprocal(q))

    def power(self, p: Operand, exponent: Operand) -> Poly:
        p, exponent = self.lift(p), self.lift(exponent)
        n, base = self.constant(exponent), self.constant(p)
        if n is None:
            if base is None or base <= 0:
                raise Unprovable("a power with a variable exponent")
            return self.exp(self.mul(exponent, math.log(base)))
        if n == int(n) and abs(n) <= MAX_POWER:
            result, factor = self.lift(1.0), p if n >= 0 else self.reciprocal(p)
            for _ in range(abs(int(n))):
                result = self.mul(result, factor)
            return result
        if n < 0:
            return self.reciprocal(self.power(p, -n))
        return self._function("pow", p, lambda v: v**n, exponent)

    # Functions, each in its canonical form

    def _function(self, name: str, p: Operand, on_constant: Callable[[float], Any], *parameters: Poly) -> Poly:
        p = self.lift(p)
        value = self.constant(p)
        if value is None:
            return self._atom(name, p, *parameters)
        try:
            return self.lift(on_constant(value))
        except (ValueError, ZeroDivisionError, OverflowError) as e:
            raise Unprovable(f"{name}({value})") from e

    @staticmethod
    def _lead(p: Poly) -> float:
        """Return the coefficient of the first term that is not constant. It fixes p's sign and scale."""
        return p[min((m for m in p if m), default=())]

    def reciprocal(self, p: Operand) -> Poly:
        p = self.lift(p)
        if not p:
            raise Unprovable("a division by zero")
        if len(p) == 1:  # 1/(c·a·b) = 1/c · 1/a · 1/b
            ((m, c),) = p.items()
            inverse = self.lift(1 / c)
            for atom, k in m:
                function, args = self.atoms[atom]
                value: Poly = {((atom, 1),): 1.0}
                factor = self.exp(self.mul(args[0], -1.0)) if function == "exp" else self._atom("reciprocal", value)
                inverse = self.mul(inverse, self.power(factor, float(k)))
            return inverse
        if len(p) == 2 and all(not m or (len(m) == 1 and self.atoms[m[0][0]][0] == "exp") for m in p):
            (a, c), (b, d) = ((self.atoms[m[0][0]][1][0] if m else {}, c) for m, c in p.items())
            if c * d > 0:  # 1/(c·exp(a) + d·exp(b)) = exp(-b)/d · sigmoid(b - a - log(c/d))
                inner = self.add(self.sub(b, a), -math.log(c / d))
                return self.mul(self.exp(self.mul(b, -1.0)), self.mul(self.sigmoid(inner), 1 / d))
        scale = self._lead(p)
        return self.mul(self._function("reciprocal", self.mul(p, 1 / scale), lambda v: 1 / v), 1 / scale)

    def exp(self, p: Operand) -> Poly:
        p = self.lift(p)
        offset = p.get((), 0.0)
        if abs(offset) > 700:
            raise Unprovable(f"exp({offset})")
        variable = {m: c for m, c in p.items() if m}
        return self.mul(self._atom("exp", variable) if variable else 1.0, math.exp(offset))

    def log(self, p: Operand) -> Poly:
        return self._function("log", p, math.log)

    def sigmoid(self, p: Operand) -> Poly:
        p = self.lift(p)
        if p and self._lead(p) < 0:  # one sign only: sigmoid(-p) = 1 - sigmoid(p)
            return self.sub(1.0, self.sigmoid(self.mul(p, -1.0)))
        return self._function("sigmoid", p, lambda v: 1 / (1 + math.exp(-v)))

    def tanh(self, p: Operand) -> Poly:
        return self.sub(self.mul(self.sigmoid(self.mul(p, 2.0)), 2.0), 1.0)

    def erf(self, p: Operand) -> Poly:
        p = self.lift(p)
        if p and self._lead(p) < 0:  # odd
            return self.mul(self.erf(self.mul(p, -1.0)), -1.0)
        return self._function("erf", p, math.erf)

    def relu(self, p: Operand, kink: float = 0.0, at_nan: float = 1.0) -> Poly:
        """Return max(p, 0).

        Args:
            p: the operand.
            kink: torch's derivative at p = 0: 0 for relu, 1 or 0 for clamp, 1/2 for maximum.
            at_nan: torch's derivative at NaN: 1 for relu and maximum, 0 for clamp, which masks the gradient.
        """
        p = self.lift(p)
        if self.constant(p) is not None:
            return self.lift(max(p.get((), 0.0), 0.0))
        kink, at_nan = (kink, at_nan) if self.kinks else (0.0, 1.0)
        lead = self._lead(p)
        if lead < 0:  # relu(p) = p + relu(-p)
            return self.add(p, self.relu(self.mul(p, -1.0), 1.0 - kink, 1.0 - at_nan))
        if len(p) == 1 and all(self.atoms[a][0] in ("relu", "sigmoid", "exp") for a, _ in next(iter(p))):
            return self._never_negative(p, kink, at_nan)
        return self.mul(self._atom("relu", self.mul(p, 1 / lead), self.lift(kink), self.lift(at_nan)), lead)

    def _never_negative(self, p: Poly, kink: float, at_nan: float) -> Poly:
        """Return relu(p) for p ≥ 0, which is p. If relu(q) is a factor of p, multiply the derivatives of both relus.

        The derivative of any other such p at NaN is NaN, even multiplied by 0.
        """
        ((m, c),) = p.items()
        relus = [(atom, k) for atom, k in m if self.atoms[atom][0] == "relu"]
        if len(relus) != 1 or relus[0][1] != 1:
            return p
        inner, *derivatives = self.atoms[relus[0][0]][1]
        products = (self.mul(q, factor) for q, factor in zip(derivatives, (kink, at_nan), strict=True))
        remaining = tuple((atom, k) for atom, k in m if atom != relus[0][0])
        return self.mul({remaining: c}, self._atom("relu", inner, *products))

    def maximum(self, p: Operand, q: Operand, kink: float = 0.5, at_nan: float = 1.0) -> Poly:
        return self.add(q, self.relu(self.sub(p, q), kink, at_nan))

    def minimum(self, p: Operand, q: Operand, kink: float = 0.5, at_nan: float = 1.0) -> Poly:
        return self.sub(p, self.relu(self.sub(p, q), 1.0 - kink, 1.0 - at_nan))

    def clamp(
        self,
        p: Operand,
        low: Operand | None = None,
        high: Operand | None = None,
        kink: float = CLAMP_KINK,
        at_nan: float = 0.0,
    ) -> Poly:
        p = self.lift(p)
        if low is not None and (self.kinks or low != -math.inf):  # an infinite bound masks the gradient of NaN
            p = self.maximum(p, low, kink, at_nan)
        return p if high is None or (not self.kinks and high == math.inf) else self.minimum(p, high, kink, at_nan)

    # Calculus

    def derivative(self, p: Poly, variable: Poly) -> Poly:
        """Return dp/dvariable, for functions that are differentiable everywhere."""
        slopes: dict[int, Poly] = {}  # the derivative of each atom; the atoms in its arguments come first
        for atom in sorted(self._inside(p)):
            slopes[atom] = self._slope(atom, variable, slopes)
        return self._chain(p, slopes)

    def _inside(self, p: Poly) -> set[int]:
        """Return the atoms in p, in their arguments, and so on."""
        inside: set[int] = set()
        pending = [atom for m in p for atom, _ in m]
        while pending:
            if (atom := pending.pop()) not in inside:
                inside.add(atom)
                pending.extend(inner for q in self.atoms[atom][1] for m in q for inner, _ in m)
        return inside

    def _chain(self, p: Poly, slopes: dict[int, Poly]) -> Poly:
        total: Poly = {}
        for m, c in p.items():
            for atom, k in m:
                remaining = tuple((a, n - (a == atom)) for a, n in m if n > (a == atom))
                total = self.add(total, self.mul({remaining: c * k}, slopes[atom]))
        return total

    def _slope(self, atom: int, variable: Poly, slopes: dict[int, Poly]) -> Poly:
        function, args = self.atoms[atom]
        value: Poly = {((atom, 1),): 1.0}
        if not args:
            return self.lift(1.0 if value == variable else 0.0)
        outer: dict[str, Callable[[], Poly]] = {
            "exp": lambda: value,
            "sigmoid": lambda: self.mul(value, self.sub(1.0, value)),
            "erf": lambda: self.mul(self.exp(self.mul(self.power(args[0], 2.0), -1.0)), 2 / math.sqrt(math.pi)),
            "log": lambda: self.reciprocal(args[0]),
            "reciprocal": lambda: self.mul(self.mul(value, value), -1.0),
        }
        if function not in outer:
            raise Unprovable(f"a custom autograd.Function of {function}", Kind.CUSTOM_FUNCTION)
        return self.mul(outer[function](), self._chain(args[0], slopes))

    # For people

    def names(self, p: Poly) -> int:
        """Count the functions and variables in p's text. ``text`` and ``constants`` take time in proportion."""
        sizes: dict[int, int] = {}
        for atom in sorted(self._inside(p)):
            sizes[atom] = 1 + sum(sizes[inner] for q in self.atoms[atom][1] for m in q for inner, _ in m)
        return sum(sizes[atom] for m in p for atom, _ in m)

    def text(self, p: Poly) -> str:
        """Return p as text: ``x·sigmoid(1.7·x)``."""
        terms = []
        for m, c in p.items():
            factors = [self._factor(a) + (f"^{k}" if k != 1 else "") for a, k in m]
            # coefficient and variables first
            factors.sort(key=lambda f: ("(" in f, f))
            size = f"{abs(c):.7g}"
            if not factors or size != "1":
                factors.insert(0, size)
            terms.append(("-" if c < 0 else "+", "·".join(factors)))
        text = " ".join(chain.from_iterable(sorted(terms))).removeprefix("+ ") or "0"  # "+" comes before "-"
        return f"-{text[2:]}" if text.startswith("- ") else text

    def _factor(self, atom: int) -> str:
        function, args = self.atoms[atom]
        if function == "relu":
            args = args[:1]
        return f"{function}({', '.join(map(self.text, args))})" if args else function

    def constants(self, p: Poly) -> tuple[str, list[float]]:
        """Return p's shape without constants, and the constants. Near misses have equal shapes."""
        parts = []
        for m, c in p.items():
            shapes, inner = [], [c]
            for a, k in m:
                function, args = self.atoms[a]
                below = [self.constants(q) for q in args[: 1 if function == "relu" else None]]
                shapes.append(f"{function}({','.join(s for s, _ in below)})^{k}")
                inner += chain.from_iterable(v for _, v in below)
            parts.append(("·".join(sorted(shapes)), inner))
        parts.sort(key=lambda part: part[0])
        return "+".join(s for s, _ in parts), list(chain.from_iterable(v for _, v in parts))


Rule: TypeAlias = Callable[..., Poly]


def _unprovable(obstacle: str, kind: Kind = Kind.UNPROVABLE) -> Rule:
    def rule(a: Algebra, *args: object, **kwargs: object) -> Poly:
        raise Unprovable(obstacle, kind)

    return rule


def _opaque(name: str) -> Rule:
    def rule(a: Algebra, input: Operand) -> Poly:
        value = a.lift(input)
        if a.constant(value) is not None:
            raise Unprovable(f"{name} of a constant in it")
        return a._atom(name, value)

    return rule


def _gelu(a: Algebra, input: Operand, approximate: str = "none") -> Poly:
    if approximate == "none":
        inner = a.erf(a.mul(input, math.sqrt(0.5)))
    else:
        inner = a.tanh(a.mul(a.add(input, a.power(input, 3.0), 0.044715), math.sqrt(2 / math.pi)))
    return a.mul(a.mul(input, 0.5), a.add(inner, 1.0))


def _div(a: Algebra, input: Operand, other: Operand, rounding_mode: str | None = None) -> Poly:
    if rounding_mode is not None:
        raise Unprovable("a rounded division")
    return a.div(input, other)


def _elu(a: Algebra, input: Operand, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Poly:
    below = a.sub(a.exp(a.mul(a.minimum(input, 0.0, 1.0), input_scale)), 1.0)
    return a.mul(a.add(a.relu(input), below, alpha), scale)


def _softplus(a: Algebra, input: Operand, beta: float = 1.0, threshold: float = 20.0) -> Poly:
    if not threshold >= 20:  # torch returns x above the threshold, which from 20 on is log(1 + exp(x)) to 2e-9
        raise Unprovable(f"softplus with the threshold {threshold}")
    return a.mul(a.log(a.add(a.exp(a.mul(input, beta)), 1.0)), 1 / beta)


def _rrelu(a: Algebra, input: Operand, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Poly:
    if training:
        raise Unprovable("random slopes (rrelu) in it")
    return RULES["leaky_relu"](a, input, (lower + upper) / 2)


def _relu6(a: Algebra, input: Operand) -> Poly:
    return a.clamp(input, 0.0, 6.0, kink=0.0, at_nan=1.0)


# Every supported function's definition, under torch's name, with torch's parameter names. ``Call`` removes `inplace`,
# and subgraph.py checks in-place writes. Other arguments are not provable.
RULES: dict[str, Rule] = {
    "add": lambda a, input, other, alpha=1.0: a.add(input, a.mul(other, alpha)),
    "sub": lambda a, input, other, alpha=1.0: a.sub(input, a.mul(other, alpha)),
    "rsub": lambda a, input, other, alpha=1.0: a.sub(other, a.mul(input, alpha)),
    "mul": lambda a, input, other: a.mul(input, other),
    "div": _div,
    "neg": lambda a, input: a.mul(input, -1.0),
    "positive": lambda a, input: a.lift(input),
    "pow": lambda a, input, exponent: a.power(input, exponent),
    "square": lambda a, input: a.power(input, 2.0),
    "sqrt": lambda a, input: a.power(input, 0.5),
    "rsqrt": lambda a, input: a.power(input, -0.5),
    "reciprocal": lambda a, input: a.reciprocal(input),
    "addcmul": lambda a, input, tensor1, tensor2, value=1.0: a.add(input, a.mul(a.mul(tensor1, tensor2), value)),
    "exp": lambda a, input: a.exp(input),
    "exp2": lambda a, input: a.exp(a.mul(input, math.log(2))),
    "expm1": lambda a, input: a.sub(a.exp(input), 1.0),
    "log": lambda a, input: a.log(input),
    "log2": lambda a, input: a.mul(a.log(input), 1 / math.log(2)),
    "log10": lambda a, input: a.mul(a.log(input), 1 / math.log(10)),
    "sinh": lambda a, input: a.mul(a.sub(a.exp(input), a.exp(a.mul(input, -1.0))), 0.5),
    "cosh": lambda a, input: a.mul(a.add(a.exp(input), a.exp(a.mul(input, -1.0))), 0.5),
    "log1p": lambda a, input: a.log(a.add(input, 1.0)),
    "sigmoid": lambda a, input: a.sigmoid(input),
    "tanh": lambda a, input: a.tanh(input),
    "erf": lambda a, input: a.erf(input),
    "erfc": lambda a, input: a.sub(1.0, a.erf(input)),
    "relu": lambda a, input: a.relu(input),
    "abs": lambda a, input: a.add(a.relu(input, 0.5, 0.5), a.relu(a.mul(input, -1.0), 0.5, 0.5)),
    "maximum": lambda a, input, other: a.maximum(input, other),
    "minimum": lambda a, input, other: a.minimum(input, other),
    "clamp": lambda a, input, min=None, max=None: a.clamp(input, min, max),
    "clamp_min": lambda a, input, min: a.clamp(input, min),
    "clamp_max": lambda a, input, max: a.clamp(input, None, max),
    "gelu": _gelu,
    "silu": lambda a, input: a.mul(input, a.sigmoid(input)),
    "mish": lambda a, input: a.mul(input, a.tanh(_softplus(a, input))),
    "softplus": _softplus,
    "logsigmoid": lambda a, input: a.mul(_softplus(a, a.mul(input, -1.0)), -1.0),
    "softsign": lambda a, input: a.div(input, a.add(RULES["abs"](a, input), 1.0)),
    "tanhshrink": lambda a, input: a.sub(input, a.tanh(input)),
    "relu6": _relu6,
    "hardtanh": lambda a, input, min_val=-1.0, max_val=1.0: a.clamp(input, min_val, max_val, 0.0, 1.0),
    "hardsigmoid": lambda a, input: a.mul(a.clamp(a.add(input, 3.0), 0.0, 6.0, kink=0.0), 1 / 6),
    "hardswish": lambda a, input: a.mul(a.mul(input, _relu6(a, a.add(input, 3.0))), 1 / 6),
    "leaky_relu": lambda a, input, negative_slope=0.01: a.sub(
        a.relu(input, at_nan=0.0), a.mul(a.relu(a.mul(input, -1.0), 1.0), negative_slope)
    ),
    "rrelu": _rrelu,
    "elu": _elu,
    "celu": lambda a, input, alpha=1.0: _elu(a, input, alpha, input_scale=1 / alpha),
    "selu": lambda a, input: _elu(a, input, 1.6732632423543772, 1.0507009873554805),
    # Functions without identities: two calls are equal if their arguments are equal.
    **{name: _opaque(name) for name in ("sin", "cos", "tan", "asin", "acos", "atan", "asinh", "acosh", "atanh")},
    **{name: _opaque(name) for name in ("lgamma", "erfinv", "sinc", "i0", "ndtr", "log_ndtr", "digamma")},
    # Pointwise functions that no activation of the table contains. Their rules let a reason name them.
    # A comparison is not relu: relu(NaN) is NaN, and where(NaN > 0, x, 0) is 0.
    **dict.fromkeys(
        ("gt", "ge", "lt", "le", "eq", "ne"),
        _unprovable("it compares, and comparisons handle NaN differently", Kind.COMPARISON),
    ),
    "glu": _unprovable("a gate and its activation in one call (glu)"),
    "where": _unprovable("a mask or a comparison (where) in it"),
    "masked_fill": _unprovable("a mask (masked_fill) in it"),
    "prelu": _unprovable("learnable parameters (prelu) in it"),
    "threshold": _unprovable("a threshold in it"),
    **dict.fromkeys(
        ("floor", "ceil", "round", "trunc", "frac", "sign", "fmod", "remainder"), _unprovable("rounding in it")
    ),
    **dict.fromkeys(("atan2", "hypot", "logaddexp", "xlogy", "fmin", "fmax"), _unprovable("a function of two in it")),
    "nan_to_num": _unprovable("nan_to_num in it"),
}
# The rules whose result may be affine in affine arguments.
LINEAR = frozenset({"add", "sub", "rsub", "mul", "div", "neg", "positive"})

# A call of an expression: torch's name, arguments, keyword arguments. A Ref among the arguments refers to an operand or
# to an earlier step; all other arguments are constants.
Step: TypeAlias = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


class Ref(NamedTuple):
    """A value that a step reads: the i-th operand of the expression, or the result of its i-th step."""

    kind: str
    i: int

    def of(self, operands: Sequence[Poly], values: Sequence[Poly]) -> Poly:
        """Return the value, of the expression's operands and its steps' values."""
        return (operands if self.kind == "operand" else values)[self.i]


def evaluate(algebra: Algebra, steps: Sequence[Step], operands: Sequence[Poly]) -> list[Poly]:
    """Compute every step's value.

    Raises:
        Unprovable: a rule rejects the call, or the proof exceeds a limit.
    """
    values: list[Poly] = []
    if len(steps) > MAX_STEPS:
        raise Unprovable(f"more than {MAX_STEPS} calls")

    def value_of(argument: Any) -> Any:
        return argument.of(operands, values) if isinstance(argument, Ref) else argument

    lost: list[float] = []  # see _lost
    for name, args, kwargs in steps:
        arguments, keywords = list(map(value_of, args)), {k: value_of(v) for k, v in kwargs}
        try:
            value = RULES[name](algebra, *arguments, **keywords)
        except TypeError as e:
            raise Unprovable(f"a call of {name} with arguments that its rule does not accept") from e
        except (ValueError, ArithmeticError) as e:
            raise Unprovable(f"{name} of constants beyond float64's range in it") from e
        factor = keywords.pop("alpha", keywords.pop("value", 1.0))
        read = (*args, *(v for _, v in kwargs))
        before = [lost[a.i] if isinstance(a, Ref) and a.kind == "value" else 0.0 for a in read]
        lost.append(_lost(name, [*arguments, *keywords.values()], value, before, factor))
        values.append(value)
    algebra.lost = lost
    return values


def _lost(name: str, args: Sequence[Any], value: Poly, before: Sequence[float], factor: Any = 1.0) -> float:
    """Return the largest term that vanished in a sum so far, scaled by later steps.

    If it is larger than the result, the result may be its rounding error.
    ``(x + 2**23·1.5) - 2**23·1.5`` rounds x to integers, ``c = 4097·x; c - (c - x)`` to half its digits, and
    ``x·1e-45·1e45`` is 0. In the algebra all three are x.

    Args:
        name, args, value: the step's function, arguments and result.
        before: the largest vanished term of each argument.
        factor: ``alpha`` of a sum, or ``value`` of addcmul.
    """
    if name not in LINEAR and name != "addcmul":
        return max(before, default=0.0)
    terms = [Algebra.lift(p) if isinstance(p, (dict, int, float)) else {} for p in args]
    if name in ("mul", "div"):
        if any(not 1e-6 < abs(c) < 1e6 for p in (value, *terms) for c in p.values()):
            return math.inf
        p, q = (max(map(abs, p.values()), default=0.0) for p in terms[:2])
        scaled = (before[0] * q, before[1] * p) if name == "mul" else (before[0] / q if q else 0.0, before[1])
        return max(scaled)
    if not isinstance(factor, (int, float)) or not 1e-6 < abs(factor) < 1e6:
        return math.inf
    scale = max(abs(factor), 1.0)
    if name == "addcmul":  # a term that its product cancels is in its first argument
        terms, factors = terms[:1], terms[1:]
        scale *= math.prod(max([1.0, *map(abs, p.values())]) for p in factors)
    elif factor != 1.0:
        position = 0 if name == "rsub" else 1
        terms[position] = {m: c * factor for m, c in terms[position].items()}
    vanished = [abs(c) for p in terms for m, c in p.items() if abs(value.get(m, 0.0)) < abs(c) / 8]
    return max([*(n * scale for n in before), *vanished])
