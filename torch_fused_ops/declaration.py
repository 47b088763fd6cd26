"""Declarations of operators: tensors and the meaning of their axes, scalars, the formula on elements.

    glu = PointwiseOperator(
        "glu",
        "act(min(gate, clamp)) · (clamp(up, ±clamp) + up_offset) · token_scale[..., None]; gate, up (..., n).",
        tensors={"gate": "data", "up": "data", "token_scale": "per_row?"},
        scalars={"activation": "str", "up_offset": "float=0.0", "clamp": "float?=None"},
        value=formulas.glu,
        grads=formulas.glu_grads,
        rules=(known_activation, finite("up_offset"), above_zero("clamp", optional=True)),
    )

Everything else follows from that: the schemas (below), what is accepted (``checks``), the plain-torch operators
(``eager``), vmap (``batching``), fake kernels and autograd (``autograd``, ``registration``), eager kernels
(``kernels/cpu.py``, ``kernels/activation.py``), Inductor's lowerings (``lowerings/operators.py``), DTensor's rules
(``distributed/sharding.py``), sample inputs (``testing/samples.py``), the page (``docs/operators.md``).

The *kind* of a tensor says what its axes are, and what it does:

    data        (..., n)  what the formula is of; the first gives the result its shape and dtype
    packed      (..., 2n) two tensors of data in one, gate and up, as the scalar ``layout`` says; the result is (..., n)
    per_column  (n,)      added to the first data; to packed data packed likewise, (2n,)
    per_row     (...)     one factor of the result for each row
    …           anything else belongs to a family that says itself what it is (a seed, a mask)

A question mark after it: the tensor may be None. Data comes first.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fused_ops import activations

DATA = ("data", "packed")


@dataclass(frozen=True)
class Argument:
    """One argument of a schema: its kind is that of a tensor, "" of a scalar."""

    name: str
    type: str
    kind: str = ""
    default: str | None = None

    def __str__(self) -> str:
        return f"{self.type} {self.name}" + ("" if self.default is None else f"={self.default}")

    @property
    def value(self) -> Any:
        """The default; ``inspect.Parameter.empty`` if there is none."""
        return inspect.Parameter.empty if self.default is None else ast.literal_eval(self.default)


@dataclass(frozen=True)
class Signature:
    """The arguments and results of one registered operator: ``results`` are the kinds of its results.

    The results of a backward operator may each be None.
    """

    name: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    doc: str

    @property
    def is_backward(self) -> bool:
        """True for a backward operator, whose last argument is the mask of requested results."""
        return self.arguments[-1].name == "output_mask"

    @property
    def overload(self) -> torch._ops.OpOverload:
        """``torch.ops.fused.<name>.default``; AttributeError before it is registered."""
        found: torch._ops.OpOverload = getattr(torch.ops.fused, self.name).default
        return found

    @property
    def schema(self) -> str:
        """As ``torch.library`` reads it, without the name."""
        one = "Tensor?" if self.is_backward else "Tensor"
        results = one if len(self.results) == 1 else f"({', '.join([one] * len(self.results))})"
        return f"({', '.join(map(str, self.arguments))}) -> {results}"


# ---- what scalars are accepted ---------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A check of a scalar: ``check(value)`` raises ValueError, naming the argument, its value and what is accepted"""

    name: str
    check: Callable[[Any], object]


def refuse(name: str, value: object, accepted: str) -> None:
    """ValueError for an argument's value."""
    raise ValueError(f"{name}={value!r} is not accepted: it must be {accepted}")


known_activation = Rule("activation", activations.get)


def one_of(name: str, accepted: Sequence[str]) -> Rule:
    """One of these strings."""

    def check(value: Any) -> None:
        if value not in accepted:
            raise ValueError(f"{name}={value!r} is not known; accepted: {', '.join(accepted)}")

    return Rule(name, check)


def finite(name: str) -> Rule:
    """A finite number."""
    return Rule(name, lambda value: None if math.isfinite(value) else refuse(name, value, "finite"))


def above_zero(name: str, *, optional: bool = False) -> Rule:
    """A number above 0; or None, if its type has a question mark."""
    accepted = f"above 0, or None for no {name}" if optional else "above 0"
    return Rule(name, lambda value: None if value is None or value > 0 else refuse(name, value, accepted))


def between(name: str, low: float, high: float) -> Rule:
    """A number from ``low`` to ``high``."""
    accepted = f"between {low:g} and {high:g}"
    return Rule(name, lambda value: None if low <= value <= high else refuse(name, value, accepted))


# ---- operators -------------------------------------------------------------------------------------------------------

OPERATORS: dict[str, Operator] = {}  # all that are declared, by name


@dataclass(frozen=True, eq=False)
class Operator:
    """A declared operator: what is common to all families.

    Attributes:
        name: after ``fused::``.
        doc: what it computes and the tensors' shapes, in a line.
        tensors: the kind of each tensor, by name, in the schema's order.
        scalars: the type of each scalar, by name, as in a schema, with its default: ``float=0.0``.
        rules: what is accepted of the scalars besides their types.
        pointwise: whether an element of the result is made of few elements of the arguments: cheap to compute again.
    """

    name: str
    doc: str
    tensors: Mapping[str, str]
    scalars: Mapping[str, str]
    rules: tuple[Rule, ...] = field(default=(), kw_only=True)
    pointwise: bool = field(default=False, kw_only=True)

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """The signatures of all operators that are registered for it."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        unknown = [rule.name for rule in self.rules if rule.name not in self.scalars]
        if unknown:
            raise ValueError(f"rules={unknown!r} are not about scalars; accepted: {', '.join(self.scalars)}")
        if self.name in OPERATORS:
            raise ValueError(f"name={self.name!r} is declared already")
        OPERATORS[self.name] = self

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each tensor."""
        return tuple(kind.rstrip("?") for kind in self.tensors.values())

    def index(self, kind: str) -> int | None:
        """The index of the tensor of that kind; None if there is none."""
        return self.kinds.index(kind) if kind in self.kinds else None

    @cached_property
    def tensor_arguments(self) -> tuple[Argument, ...]:
        """The tensors, as arguments."""
        return tuple(
            Argument(name, "Tensor?" if kind.endswith("?") else "Tensor", kind.rstrip("?"))
            for name, kind in self.tensors.items()
        )

    @cached_property
    def scalar_arguments(self) -> tuple[Argument, ...]:
        """The scalars, as arguments, with their defaults."""
        return tuple(
            Argument(name, of, default=default if equals else None)
            for name, (of, equals, default) in ((n, t.partition("=")) for n, t in self.scalars.items())
        )

    @cached_property
    def forward(self) -> Signature:
        """The operator itself."""
        return Signature(self.name, self.tensor_arguments + self.scalar_arguments, ("data",), self.doc)

    @cached_property
    def defaults(self) -> tuple[Any, ...]:
        """The defaults of the scalars."""
        return tuple(a.value for a in self.scalar_arguments)

    def complete(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A call's arguments with the trailing defaults, which dispatchers drop."""
        left_out = len(self.tensors) + len(self.scalars) - len(args)
        return args + self.defaults[-left_out:] if left_out else args


def arguments_of(**types: str) -> tuple[Argument, ...]:
    """Arguments of a signature that is written out: ``grad="Tensor: data", p="float", rows="int=1"``."""
    parts = ((name, *text.partition(":")[::2]) for name, text in types.items())
    split = ((name, *of.partition("=")[::2], kind) for name, of, kind in parts)
    return tuple(Argument(name, of, kind.strip(), default or None) for name, of, default, kind in split)


@dataclass(frozen=True, eq=False)
class OpaqueOperator(Operator):
    """An operator that is no formula of its data's elements: its family has kernels, lowering and gradients itself.

    Attributes:
        gradients: the signature of its backward operator.
    """

    gradients: Signature = field(kw_only=True)

    @property
    def signatures(self) -> tuple[Signature, Signature]:
        return self.forward, self.gradients


@dataclass(frozen=True, eq=False)
class PointwiseOperator(Operator):
    """An operator whose result is a formula of its data, element by element.

    It comes in two: itself and ``…_backward``.

    Attributes:
        value: (data…, scale, scalars…) -> the result on elements, widened; packed data is two, gate and up, its bias
            added already. ``scale`` is there if a tensor is ``per_row``, and may be None; ``layout`` is not.
        grads: (grad, data…, scale, scalars…) -> the gradient of each of the data, likewise.
        keeps_result: the operator's arguments -> whether backward needs no more than the result, which then takes the
            data's place.
        kernels: the module with its Triton kernels, whose ``launch_of(name)`` gives what runs each of the two on GPUs,
            as the operator is called; without one, GPUs run it in eager mode as blocks of plain torch.
    """

    value: Callable[..., Tensor] = field(kw_only=True)
    grads: Callable[..., tuple[Tensor, ...]] = field(kw_only=True)
    keeps_result: Callable[..., bool] = field(default=lambda *args: False, kw_only=True)
    kernels: str | None = field(default=None, kw_only=True)
    pointwise: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        data = [kind in DATA for kind in self.kinds]
        if not data[0] or data != sorted(data, reverse=True) or (self.is_packed and sum(data) > 1):
            raise ValueError(f"tensors={self.tensors!r} is not accepted: data comes first, packed data alone")
        if "activation" in self.scalars and next(iter(self.scalars)) != "activation":
            raise ValueError(f"scalars={self.scalars!r} is not accepted: the activation comes first")
        if self.is_packed != ("layout" in self.scalars):
            raise ValueError(f"scalars={self.scalars!r} is not accepted: packed data has a layout, other has none")
        super().__post_init__()

    # -- how its arguments are read --

    @cached_property
    def is_packed(self) -> bool:
        """True if its data is packed."""
        return "packed" in self.kinds

    @cached_property
    def data(self) -> int:
        """The number of its data tensors."""
        return sum(kind in DATA for kind in self.kinds)

    @cached_property
    def bias(self) -> int | None:
        """The index of the tensor that is added to the data."""
        return self.index("per_column")

    @cached_property
    def scale(self) -> int | None:
        """The index of the tensor that is a factor for each row."""
        return self.index("per_row")

    @cached_property
    def layout(self) -> int | None:
        """The argument with the layout of packed data."""
        return len(self.tensors) + list(self.scalars).index("layout") if self.is_packed else None

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
        """(tensors, layout or None, the formula's scalars) of a call's arguments."""
        args, count = self.complete(args), len(self.tensors)
        if self.layout is None:
            return args[:count], None, args[count:]
        return args[:count], args[self.layout], args[count : self.layout] + args[self.layout + 1 :]

    def reads_halves(self, args: tuple[Any, ...]) -> bool:
        """Say whether a call's packed data is two halves side by side."""
        return self.layout is not None and self.complete(args)[self.layout] != "interleaved"

    # -- its signatures --

    @cached_property
    def required_scalars(self) -> tuple[Argument, ...]:
        """The scalars, as arguments of a backward operator: without defaults."""
        return tuple(Argument(a.name, a.type) for a in self.scalar_arguments)

    @cached_property
    def backward(self) -> Signature:
        """The gradients of its tensors."""
        mask = Argument("output_mask", f"bool[{len(self.tensors)}]")
        arguments = (Argument("grad", "Tensor", "data"), *self.tensor_arguments, *self.required_scalars, mask)
        doc = f"The gradients of {self.name} for ({', '.join(self.tensors)}); None where output_mask says no."
        return Signature(f"{self.name}_backward", arguments, self.kinds, doc)

    @property
    def signatures(self) -> tuple[Signature, Signature]:
        return self.forward, self.backward


def elementwise() -> Iterator[PointwiseOperator]:
    """Those of ``OPERATORS`` that are formulas on elements."""
    return (op for op in OPERATORS.values() if isinstance(op, PointwiseOperator))
