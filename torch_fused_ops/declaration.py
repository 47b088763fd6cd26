"""Declarations of operators: the tensors with the meaning of each axis, the scalars, and the formula on elements.

    glu = PointwiseOperator(
        "glu",
        "act(min(gate, clamp)) · (clamp(up, ±clamp) + up_offset) · token_scale[..., None]; gate, up (..., n).",
        tensors={"gate": "data", "up": "data", "token_scale": "per_row?"},
        scalars={"activation": "str", "up_offset": "float=0.0", "clamp": "float?=None"},
        value=formulas.glu_element,
        grads=formulas.glu_input_grads,
        rules=(known_activation, finite("up_offset"), above_zero_or_none("clamp")),
    )

Other modules derive everything else from the declaration: argument checks (``checks``), the operators in plain torch
(``eager``), vmap (``batching``), fake kernels and autograd (``autograd``, ``registration``), eager kernels
(``kernels/compiled.py``), Inductor's lowerings (``lowerings/operators.py``), DTensor's rules
(``distributed/sharding.py``), sample inputs (``testing/samples.py``), the page ``docs/operators.md``, schemas (below).

The *kind* of a tensor defines its axes and its use:

    data        (..., n)  an operand of the formula; the first one has the result's shape and, by default, its dtype
    packed      (..., 2n) gate and up in one tensor, ordered as the scalar ``layout`` says; the result is (..., n)
    per_column  (n,)      a bias, added to the first data tensor; (2n,) in the same order if the data is packed
    per_row     (...)     a factor of each row of the result
    …                     other kinds, such as a seed or a mask; the family that uses the kind defines it

If a question mark follows the kind, the tensor may be None. In a ``PointwiseOperator``, data tensors come first.
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
    """One argument of a schema. ``kind`` is "" for a scalar; ``default`` is source text, or None if required."""

    name: str
    type: str
    kind: str = ""
    default: str | None = None

    def __str__(self) -> str:
        return f"{self.type} {self.name}" + ("" if self.default is None else f"={self.default}")

    @property
    def value(self) -> Any:
        """The default value; ``inspect.Parameter.empty`` if the argument is required."""
        return inspect.Parameter.empty if self.default is None else ast.literal_eval(self.default)


@dataclass(frozen=True)
class Signature:
    """The arguments and results of one registered operator. ``results`` has the kind of each result.

    If the operator is a backward operator, each result may be None.
    """

    name: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    doc: str

    @property
    def is_backward(self) -> bool:
        """True if this is a backward operator. Its last argument is the mask of requested results."""
        return self.arguments[-1].name == "output_mask"

    @property
    def overload(self) -> torch._ops.OpOverload:
        """``torch.ops.fused.<name>.default``. Raises AttributeError before the operator is registered."""
        overload: torch._ops.OpOverload = getattr(torch.ops.fused, self.name).default
        return overload

    @property
    def schema(self) -> str:
        """The schema in ``torch.library``'s syntax, without the name."""
        result = "Tensor?" if self.is_backward else "Tensor"
        results = result if len(self.results) == 1 else f"({', '.join([result] * len(self.results))})"
        return f"({', '.join(map(str, self.arguments))}) -> {results}"


# ---- rules for scalars -----------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A check of the scalar ``name``: ``check(value)`` raises a ValueError unless the value is accepted."""

    name: str
    check: Callable[[Any], object]


def refuse(name: str, value: object, accepted: str) -> None:
    """Raise a ValueError that names the argument, its value and the accepted values."""
    raise ValueError(f"{name}={value!r} is not accepted: it must be {accepted}")


known_activation = Rule("activation", activations.get)


def one_of(name: str, accepted: Sequence[str]) -> Rule:
    """Return a rule that accepts these strings."""

    def check(value: Any) -> None:
        if value not in accepted:
            raise ValueError(f"{name}={value!r} is not known; accepted: {', '.join(accepted)}")

    return Rule(name, check)


def finite(name: str) -> Rule:
    """Return a rule that accepts finite numbers."""
    return Rule(name, lambda value: None if math.isfinite(value) else refuse(name, value, "finite"))


def above_zero_or_none(name: str) -> Rule:
    """Return a rule that accepts None and numbers above 0."""
    accepted = f"above 0, or None for no {name}"
    return Rule(name, lambda value: None if value is None or value > 0 else refuse(name, value, accepted))


def between(name: str, low: float, high: float) -> Rule:
    """Return a rule that accepts numbers from ``low`` to ``high``."""
    accepted = f"between {low:g} and {high:g}"
    return Rule(name, lambda value: None if low <= value <= high else refuse(name, value, accepted))


def bound(name: str) -> Rule:
    """Return a rule that accepts the integers from 0 on, and -1 for no bound."""
    accepted = "at least 0, or -1 for no bound"
    return Rule(name, lambda value: None if value >= -1 else refuse(name, value, accepted))


# ---- operators -------------------------------------------------------------------------------------------------------

OPERATORS: dict[str, Operator] = {}  # every declared operator, by name


@dataclass(frozen=True, eq=False)
class Operator:
    """A declared operator. Unless it is a ``PointwiseOperator``, its family supplies kernels, lowering and gradients.

    Attributes:
        name: the operator's name, without ``fused::``.
        doc: one line with the formula and the tensors' shapes.
        tensors: maps each tensor's name to its kind, in the schema's order.
        scalars: maps each scalar's name to its type and default in a schema's syntax, such as ``float=0.0``.
        backward: the signature of the operator that computes the gradients of the tensors.
        rules: checks of the scalars' values.
        pointwise: True if each element of the result depends on few elements, so recomputing it is cheap.
    """

    name: str
    doc: str
    tensors: Mapping[str, str]
    scalars: Mapping[str, str]
    backward: Signature = field(kw_only=True)
    rules: tuple[Rule, ...] = field(default=(), kw_only=True)
    pointwise: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        unknown = [rule.name for rule in self.rules if rule.name not in self.scalars]
        if unknown:
            raise ValueError(f"rules={unknown!r} name no scalars; accepted: {', '.join(self.scalars)}")
        if self.name in OPERATORS:
            raise ValueError(f"name={self.name!r} is declared already")
        OPERATORS[self.name] = self

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each tensor."""
        return tuple(kind.rstrip("?") for kind in self.tensors.values())

    def index(self, kind: str) -> int | None:
        """Return the index of the first tensor of this kind, or None if no tensor has this kind."""
        return self.kinds.index(kind) if kind in self.kinds else None

    @cached_property
    def tensor_arguments(self) -> tuple[Argument, ...]:
        """The operator's tensor arguments, in the schema's order."""
        return tuple(
            Argument(name, "Tensor?" if kind.endswith("?") else "Tensor", kind.rstrip("?"))
            for name, kind in self.tensors.items()
        )

    @cached_property
    def scalar_arguments(self) -> tuple[Argument, ...]:
        """The operator's scalar arguments with their defaults, in the schema's order."""
        return arguments_of(**self.scalars)

    @cached_property
    def forward(self) -> Signature:
        """The signature of the operator itself, as opposed to its backward operator."""
        return Signature(self.name, self.tensor_arguments + self.scalar_arguments, ("data",), self.doc)

    @property
    def signatures(self) -> tuple[Signature, Signature]:
        """The signatures of the operator and of its backward operator."""
        return self.forward, self.backward

    @cached_property
    def defaults(self) -> tuple[Any, ...]:
        """The default of each scalar; ``inspect.Parameter.empty`` if a scalar is required."""
        return tuple(a.value for a in self.scalar_arguments)

    def with_defaults(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Append trailing default values to a call's arguments, because dispatchers drop them."""
        missing = len(self.tensors) + len(self.scalars) - len(args)
        return args + self.defaults[-missing:] if missing else args


def arguments_of(**types: str) -> tuple[Argument, ...]:
    """Return a signature's arguments from text such as ``grad="Tensor: data", p="float", rows="int=1"``."""
    parts = ((name, *text.partition(":")[::2]) for name, text in types.items())
    split = ((name, *typed.partition("=")[::2], kind) for name, typed, kind in parts)
    return tuple(Argument(name, type, kind.strip(), default or None) for name, type, default, kind in split)


@dataclass(frozen=True, eq=False)
class PointwiseOperator(Operator):
    """An operator whose result is a formula of its data, element by element. Its backward operator follows from it.

    Attributes:
        value: (data…, scale, scalars…) -> the result's elements, in a wide dtype. The bias is already added to data,
            and packed data is passed as gate and up. ``scale`` is passed only if a tensor is ``per_row``; it may
            be None. ``layout`` is not passed.
        grads: (grad, data…, scale, scalars…) -> the gradient of each data tensor. Arguments are as in ``value``.
        keeps_result: called with the operator's arguments; True if backward needs only the result, which is then saved
            instead of the data.
    """

    value: Callable[..., Tensor] = field(kw_only=True)
    grads: Callable[..., tuple[Tensor, ...]] = field(kw_only=True)
    keeps_result: Callable[..., bool] = field(default=lambda *args: False, kw_only=True)
    backward: Signature = field(init=False)
    pointwise: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        data = [kind in DATA for kind in self.kinds]
        if not data[0] or data != sorted(data, reverse=True) or (self.is_packed and sum(data) > 1):
            raise ValueError(f"tensors={self.tensors!r} is not accepted: data must come first, and packed data alone")
        if "activation" in self.scalars and next(iter(self.scalars)) != "activation":
            raise ValueError(f"scalars={self.scalars!r} is not accepted: the activation comes first")
        if self.is_packed != ("layout" in self.scalars):
            raise ValueError(f"scalars={self.scalars!r} is not accepted: only packed data has a layout")
        mask = Argument("output_mask", f"bool[{len(self.tensors)}]")
        arguments = (Argument("grad", "Tensor", "data"), *self.tensor_arguments, *self.required_scalars, mask)
        doc = f"The gradients of {self.name} for ({', '.join(self.tensors)}); None if output_mask is False."
        object.__setattr__(self, "backward", Signature(f"{self.name}_backward", arguments, self.kinds, doc))
        super().__post_init__()

    @cached_property
    def is_packed(self) -> bool:
        """True if the data is packed: gate and up in one tensor."""
        return "packed" in self.kinds

    @cached_property
    def num_data(self) -> int:
        """The number of data tensors."""
        return sum(kind in DATA for kind in self.kinds)

    @cached_property
    def bias_index(self) -> int | None:
        """The index of the bias, the tensor that is added to the data; None without a bias."""
        return self.index("per_column")

    @cached_property
    def scale_index(self) -> int | None:
        """The index of the tensor with a factor per row; None without such a tensor."""
        return self.index("per_row")

    @cached_property
    def layout_index(self) -> int | None:
        """The index of the argument ``layout`` in a call; None if the data is not packed."""
        return len(self.tensors) + list(self.scalars).index("layout") if self.is_packed else None

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
        """Split a call's arguments into (tensors, layout or None, the formula's scalars)."""
        args, count = self.with_defaults(args), len(self.tensors)
        if self.layout_index is None:
            return args[:count], None, args[count:]
        return args[:count], args[self.layout_index], args[count : self.layout_index] + args[self.layout_index + 1 :]

    def reads_halves(self, args: tuple[Any, ...]) -> bool:
        """Return True if a call's packed data has gate and up as two contiguous halves."""
        return self.layout_index is not None and self.with_defaults(args)[self.layout_index] != "interleaved"

    @cached_property
    def required_scalars(self) -> tuple[Argument, ...]:
        """The scalar arguments of the backward operator, which do not have defaults."""
        return tuple(Argument(a.name, a.type) for a in self.scalar_arguments)


def pointwise_operators() -> Iterator[PointwiseOperator]:
    """Yield the pointwise operators of ``OPERATORS``."""
    return (op for op in OPERATORS.values() if isinstance(op, PointwiseOperator))
