"""Generate sample inputs for every operator: small, named, and equal on every run and machine.

    for sample in samples("bias_glu", device="cpu"):
        out = sample()                                  # torch.ops.fused.bias_glu(*sample.args)
    for sample in backward_samples("bias_glu"):         # calls of torch.ops.fused.bias_glu_backward

A sample's name states its special feature. Its values depend only on its operator and name, not on other samples.
Use samples to check another implementation (a kernel, a lowering, a sharding rule) against ``reference``.
"""

from __future__ import annotations

import importlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.declaration import DATA, Operator, PointwiseOperator, pointwise_operators
from torch_fused_ops.operators.activation import FAMILY

VIEWS = ("transposed", "sliced", "expanded", "expanded last", "offset")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}

ACTIVATION_OPERATORS = tuple(op.name for op in FAMILY)
_DECLARED = tuple(pointwise_operators())  # operators declared before this import
# Maps operators to modules of this package that define their samples, backward_samples and measure.
_FAMILIES = {"dropout_add": "dropout", "scaled_masked_softmax": "softmax"}
OPERATORS = (*(op.name for op in _DECLARED), *_FAMILIES)


@dataclass(frozen=True)
class Sample:
    """One call of an operator.

    Attributes:
        op: the operator's name after ``fused::``.
        name: the special feature of this call; unique for the operator.
        args: all arguments of the schema, positionally, the tensors first.
        core: True if the sample is in the short list of main features (opcheck takes about a second per sample).
    """

    op: str
    name: str
    args: tuple[Any, ...]
    core: bool = False

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The operator's overload, torch.ops.fused.<op>.default."""
        overload: torch._ops.OpOverload = getattr(torch.ops.fused, self.op).default
        return overload

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The leading tensor arguments; None for an absent optional tensor."""
        return self.args[: sum("Tensor" in str(a.type) for a in self.overload._schema.arguments)]

    @property
    def scalars(self) -> tuple[Any, ...]:
        """The arguments after the tensors."""
        return self.args[len(self.tensors) :]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the forward operator's first data tensor."""
        if self.op.endswith("dropout_add_backward"):
            return next(a for a in self.args if isinstance(a, torch.dtype))
        dtype: torch.dtype = self.args[1 if self.op.endswith("_backward") else 0].dtype
        return dtype

    def __call__(self) -> Any:
        """Call the operator on these arguments."""
        return self.overload(*self.args)

    def __str__(self) -> str:
        return f"{self.op}[{self.name}]"


@dataclass(frozen=True)
class Case:
    """A recipe for a sample. ``shape`` is the result's shape; packed inputs double the last axis.

    A field with a scalar's name sets the scalar. Other scalars have the schema's defaults.
    """

    name: str
    shape: tuple[int, ...] = (3, 8)
    dtype: str = "fp32"
    activation: str = "gelu_tanh"
    view: str = "contiguous"
    absent: tuple[str, ...] = ()  # declared kinds of tensors to omit: "per_row?"
    other_dtypes: tuple[str, ...] = ()  # dtypes of the tensors after the first; the last dtype repeats
    values: str = "normal"
    requires_grad: tuple[bool, bool, bool] = (True, True, True)
    layout: str = "halves"
    up_offset: float = 0.0
    clamp: float | None = None
    p: float = 0.5
    mask: Callable[[torch.Generator], Tensor] | None = None  # makes a mask; None if the operator has none
    scale: float = 1.0
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    core: bool = False
    needs: str = ""  # name of an argument that the operator must have


def _cases() -> Iterator[Case]:
    for name in activations.names():
        yield Case(f"activation {name}", activation=name, core=name in ("relu", "gelu"))
        yield Case(f"tails of {name}", (2, 64), activation=name, values="tails", absent=("per_column?", "per_row?"))
    for dtype, activation in itertools.product(DTYPES, ("silu", "gelu")):
        yield Case(f"{dtype} {activation}", (4, 33), dtype, activation, core=activation == "silu")
    yield from cases_of_shapes()
    yield Case("shape 2x1x3x2x4", (2, 1, 3, 2, 4))
    for view in VIEWS:
        yield Case(f"{view}", (4, 6), view=view, core=True)
        yield Case(f"{view} 3-D bf16", (2, 3, 10), "bf16", "silu", view=view)
    yield Case("tensors alone", absent=("per_column?", "per_row?"), core=True)
    yield Case("bias alone", absent=("per_row?",), core=True, needs="bias")
    yield Case("scale alone", absent=("per_column?",), core=True, needs="bias")
    for dtype, other in (("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16"), ("bf16", "fp64"), ("fp64", "fp32")):
        yield Case(f"mixed {dtype} with {other}", (3, 10), dtype, other_dtypes=(other,), core=dtype == "bf16")
    yield from cases_of_frozen_tensors()
    for up_offset, clamp in ((1.0, None), (0.0, 0.75), (1.0, 0.75)):
        yield Case(
            f"up_offset {up_offset} clamp {clamp}",
            (4, 16),
            activation="quick_gelu",
            up_offset=up_offset,
            clamp=clamp,
            core=True,
            needs="clamp",
        )
    yield Case("gpt-oss", (4, 64), "bf16", "quick_gelu", up_offset=1.0, clamp=7.0, values="wide", needs="clamp")
    packed_shapes: tuple[tuple[tuple[int, ...], str, str, float | None], ...] = (
        ((3, 7), "fp32", "contiguous", None),
        ((2, 3, 4), "bf16", "sliced", 1.5),
        ((0, 4), "fp32", "contiguous", None),
        ((5,), "fp64", "contiguous", 0.5),
    )
    for layout, (packed, dtype, view, clamp) in itertools.product(("interleaved", "swapped"), packed_shapes):
        yield Case(
            f"{layout} {'x'.join(map(str, packed))} {dtype}",
            packed,
            dtype,
            "silu",
            view,
            layout=layout,
            clamp=clamp,
            core=packed == (3, 7),
            needs="layout",
        )


def cases_of_shapes() -> Iterator[Case]:
    """Yield cases of tensors with one or more axes, with one element, and without elements."""
    for shape in ((1,), (7,), (0,), (0, 8), (3, 0), (1, 1), (3, 7), (2, 3, 4), (2, 3, 4, 5), (3, 2051)):
        yield Case(f"shape {'x'.join(map(str, shape))}", shape, core=shape in ((7,), (0, 8), (3, 0), (2, 3, 4)))


def cases_of_frozen_tensors() -> Iterator[Case]:
    """Yield a case for each nonempty subset of the first three tensors; the subset requires no gradient."""
    for mask in itertools.product((True, False), repeat=3):
        if not all(mask):
            flags = "".join("-" if m else "x" for m in mask)
            yield Case(f"frozen {flags}", requires_grad=mask, core=sum(mask) < 2)  # type: ignore[arg-type]


def tensor(
    shape: tuple[int, ...], dtype: torch.dtype, view: str, values: str, device: torch.device, g: torch.Generator
) -> Tensor:
    """Make a tensor with the named kind of values, and strides by ``view``."""
    if not shape:
        view = "contiguous"  # a single number has no strides
    elif len(shape) == 1 and view == "transposed":
        view = "sliced"
    last = shape[-1] if shape else 0
    allocated = {
        "contiguous": shape,
        "transposed": (*shape[:-2], *shape[:-3:-1]),
        "sliced": (*shape[:-1], 2 * last + 1),
        "expanded": (1, *shape[1:]),
        "expanded last": (*shape[:-1], 1),
        "offset": (*shape[:-1], last + 1),
    }[view]
    if values == "tails":  # beyond exp's underflow and overflow in float32, with 0.0 and -0.0
        t = torch.linspace(-100.0, 100.0, int(torch.Size(allocated).numel()), dtype=torch.float64)
        t = (t.abs() * t / 100.0 * (t.abs() > 4.0)).reshape(allocated)
    else:
        t = torch.randn(allocated, generator=g, dtype=torch.float64) * (5.0 if values == "wide" else 1.5)
    if values == "holes":  # a fifth of the numbers, and one whole row
        t.flatten()[::5] = -torch.inf
        t[..., 0, :] = -torch.inf
    t = t.to(device, dtype)
    if view == "transposed":
        return t.transpose(-1, -2)
    if view == "sliced":
        return t[..., 1::2]
    if view == "offset":
        return t[..., 1:]
    return t.expand(shape)


def build(op: Operator, case: Case, device: torch.device) -> Sample:
    """Build a sample from its recipe."""
    g = torch.Generator().manual_seed(zlib.crc32(f"{op.name} {case.name}".encode()))
    packed = "packed" in op.kinds
    rows, n = case.shape[:-1], case.shape[-1] * (2 if packed else 1)
    # Bias and scale also get unusual strides.
    small = "sliced" if case.view == "transposed" else case.view
    dtypes = (case.dtype, *(case.other_dtypes or (case.dtype,)))
    tensors: list[Tensor | None] = []
    for i, declared in enumerate(op.tensors.values()):
        kind, dtype = declared.rstrip("?"), DTYPES[dtypes[min(i, len(dtypes) - 1)]]
        if declared in case.absent:
            tensors.append(None)
        elif kind == "seed":
            tensors.append(torch.randint(-(2**63), 2**63 - 1, (1,), generator=g).to(device))
        elif kind == "mask":
            tensors.append(None if case.mask is None else case.mask(g).to(device))
        else:
            shape = {"per_column": (n,), "per_row": rows, "per_head": rows[-2:-1]}.get(kind, (*rows, n))
            is_data = kind in (*DATA, "scores")
            t = tensor(shape, dtype, case.view if is_data else small, case.values if is_data else "normal", device, g)
            # detach() preserves strides and makes the view a leaf.
            tensors.append(t.detach().requires_grad_(case.requires_grad[i] if i < 3 else False))
    scalars = (getattr(case, a.name, a.value) for a in op.scalar_arguments)
    return Sample(op.name, case.name, (*tensors, *scalars), case.core)


def built(op: Operator, cases: Iterable[Case], device: torch.device, core: bool) -> Iterator[Sample]:
    """Yield the samples of the cases that fit an operator; with ``core``, only the core samples."""
    for case in cases:
        has = not case.needs or case.needs in op.tensors or case.needs in op.scalars
        if has and (case.core or not core):
            yield build(op, case, device)


def family(op: str) -> ModuleType | None:
    """Return the module with an operator's samples and measure; None for pointwise operators."""
    name = _FAMILIES.get(op)
    return None if name is None else importlib.import_module(f"torch_fused_ops.testing.{name}")


def samples(op: str, device: str | torch.device = "cpu", *, core: bool = False) -> Iterator[Sample]:
    """Yield the samples of a forward operator; with ``core``, only the core samples.

    Args:
        op: a name in ``OPERATORS``.
        device: the tensors' device. Values are created on the CPU, so they are equal on all devices.
        core: True yields 24 to 35 samples instead of 51 to 109.

    Raises:
        ValueError: op is not known.
    """
    if op not in OPERATORS:
        raise ValueError(f"op={op!r} is not known; accepted: {', '.join(OPERATORS)}")
    if (module := family(op)) is not None:
        yield from module.samples(torch.device(device), core=core)
        return
    yield from built(declared_as(op), _cases(), torch.device(device), core)


def declared_as(op: str) -> PointwiseOperator:
    """Return the declaration of an operator."""
    return next(declared for declared in pointwise_operators() if op == declared.name)


def backward_samples(op: str, device: str | torch.device = "cpu", *, core: bool = False) -> Iterator[Sample]:
    """Yield samples of ``op``'s backward operator, one for each sample of ``op`` that requires a gradient.

    Most incoming gradients are contiguous; some are expanded with zero strides, as from ``sum().backward()``.
    """
    if (module := family(op)) is not None:
        yield from module.backward_samples(torch.device(device), core=core)
        return
    declared = declared_as(op)
    for sample in samples(op, device, core=core):
        mask = requested(sample.tensors)
        if any(mask):
            first, *optional = (None if t is None else t.detach() for t in sample.tensors)
            assert first is not None
            width = first.shape[-1] // 2 if declared.is_packed else first.shape[-1]
            grad = gradient(sample, (*first.shape[:-1], width), first.dtype)
            yield Sample(f"{op}_backward", sample.name, (grad, first, *optional, *sample.scalars, mask), sample.core)


def requested(tensors: Iterable[Tensor | None]) -> list[bool]:
    """Return the output_mask: True for each tensor that requires a gradient."""
    return [t is not None and t.requires_grad for t in tensors]


def gradient(sample: Sample, shape: tuple[int, ...], dtype: torch.dtype, view: str = "") -> Tensor:
    """Make a gradient of the sample's result for its backward operator."""
    g = torch.Generator().manual_seed(zlib.crc32(f"gradient of {sample}".encode()))
    view = view or ("expanded" if sample.name.startswith("expanded") else "contiguous")
    first = sample.tensors[0]
    assert first is not None
    return tensor(shape, dtype, view, "normal", first.device, g)
