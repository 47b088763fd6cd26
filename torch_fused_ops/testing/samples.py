"""Generate sample inputs for every operator: small, named, and equal on every run and machine.

    for sample in samples("bias_glu", device="cpu"):
        out = sample()                                  # torch.ops.fused.bias_glu(*sample.args)
    for sample in backward_samples("bias_glu"):         # calls of torch.ops.fused.bias_glu_backward

A sample's name states its special feature. Its values depend only on its operator and name, not on other samples.
Use samples to check another implementation (a kernel, a lowering, a sharding rule) against ``reference``.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fused_ops import activations, declaration
from torch_fused_ops.operators.activation import FAMILY

VIEWS = ("transposed", "sliced", "expanded", "expanded last", "offset")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
MIXED_DTYPES = (("bf16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16"), ("bf16", "fp64"), ("fp64", "fp32"))

ACTIVATION_OPERATORS = tuple(op.name for op in FAMILY)


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
    mask: tuple[int, ...] = ()  # the mask's shape, with 0 for the result's size; () for no mask
    mask_view: str = "contiguous"
    scale: float = 0.3
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    core: bool = False
    needs: str = ""  # name of an argument that the operator must have


def _cases() -> Iterator[Case]:
    for name in activations.names():
        yield Case(f"activation {name}", activation=name, core=name in ("relu", "gelu"))
        yield Case(f"tails of {name}", (2, 64), activation=name, values="tails", absent=("per_column?", "per_row?"))
    yield from _common_cases()
    yield Case("tensors alone", absent=("per_column?", "per_row?"), core=True)
    yield Case("bias alone", absent=("per_row?",), core=True, needs="bias")
    yield Case("scale alone", absent=("per_column?",), core=True, needs="bias")
    for dtype, other in MIXED_DTYPES:
        yield Case(f"mixed {dtype} with {other}", (3, 10), dtype, other_dtypes=(other,), core=dtype == "bf16")
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
    for layout in ("interleaved", "swapped"):
        yield Case(layout, (3, 7), activation="silu", layout=layout, core=True, needs="layout")
        case = Case(f"{layout} sliced bf16", (2, 3, 4), "bf16", "silu", "sliced", layout=layout, clamp=1.5)
        yield replace(case, needs="layout")


def _common_cases() -> Iterator[Case]:
    """Yield cases of pointwise operators and dropout_add: dtypes, sizes, strides, and tensors without a gradient."""
    for dtype in DTYPES:
        yield Case(dtype, (4, 33), dtype, "gelu", core=dtype != "fp32")
    for shape in ((7,), (0,), (0, 8), (3, 0), (1, 1), (2, 3, 4), (2, 1, 3, 2, 4), (3, 2051)):
        yield Case(f"shape {'x'.join(map(str, shape))}", shape, core=shape in ((7,), (0, 8), (3, 0), (2, 3, 4)))
    for view in VIEWS:
        yield Case(view, (4, 6), view=view, core=True)
        yield Case(f"{view} 3-D bf16", (2, 3, 10), "bf16", "silu", view, p=0.1)
    for mask in itertools.product((True, False), repeat=3):
        if not all(mask):
            flags = "".join("-" if m else "x" for m in mask)
            yield Case(f"frozen {flags}", (5, 12), requires_grad=mask, core=sum(mask) < 2)  # type: ignore[arg-type]


def _dropout_cases() -> Iterator[Case]:
    yield from _common_cases()
    for p in (0.0, 0.1, 1.0):
        yield Case(f"p {p}", (4, 33), p=p, core=True)
        yield Case(f"p {p} bf16", (4, 36), "bf16", p=p)
    for p in (1e-12, 1.0 - 2.0**-40):
        yield Case(f"p {p}", (5, 12), p=p)
    for bias, residual in ((True, False), (False, True), (False, False)):
        absent = ("per_column?",) * (not bias) + ("data?",) * (not residual)
        yield Case(f"bias {bias}, residual {residual}", (5, 12), absent=absent, core=True)
        yield Case(f"bias {bias}, residual {residual}, p 0", (5, 12), absent=absent, p=0.0, core=not bias)
    mixed = ("bf16", "bf16", "fp32"), ("fp32", "fp32", "bf16"), ("fp16", "bf16", "fp16"), ("bf16", "fp64", "bf16")
    for first, *dtypes in mixed:
        name = f"mixed {first} {' '.join(dtypes)}"
        yield Case(name, (3, 10), first, other_dtypes=tuple(dtypes), p=0.1, core=first == "bf16")


def _case(
    name: str,
    shape: tuple[int, ...] = (2, 3, 5, 8),
    dtype: str = "fp32",
    sink: str = "",
    window: tuple[int, int] = (-1, -1),
    **fields: Any,
) -> Case:
    """Make a case. ``sink`` is its dtype, or "" for no sink."""
    fields |= {"window_left": window[0], "window_right": window[1]}
    absent = () if sink else ("per_head?",)
    return Case(name, shape, dtype, absent=absent, other_dtypes=(sink or dtype,), **fields)


def _softmax_cases() -> Iterator[Case]:
    whole: tuple[int, ...] = (0, 0, 0, 0)
    by_key = (0, 1, 0, 0)
    yield _case("plain", core=True)
    for dtype in DTYPES:
        yield _case(dtype, (2, 2, 7, 33), dtype, dtype, mask=whole, causal=True, core=dtype != "fp32")
        yield _case(f"tails {dtype}", (2, 3, 64), dtype, scale=1.0, values="tails")
        yield _case(f"peaked {dtype} with sink", (2, 3, 4, 40), dtype, dtype, scale=9.0, values="wide")
    for dtype, sink in MIXED_DTYPES:
        yield _case(f"{dtype} with sink {sink}", (2, 3, 4, 10), dtype, sink, core=dtype == "bf16")
    several_axes = (whole, by_key, (0, 1, 1, 0), (1, 1, 0, 0))
    for mask in (*several_axes, (0, 0), (0,), (1,), (0, 1), (1, 0, 1, 1)):
        text = "x".join("n" if m == 0 else "1" for m in mask)
        yield _case(f"mask {text}", mask=mask, core=mask in several_axes)
    for view in VIEWS:
        yield _case(f"mask {view}", mask=whole, mask_view=view, core=view in ("transposed", "sliced"))
        yield _case(view, view=view, mask=by_key, sink="fp32", core=True)
    for causal, window in itertools.product((False, True), ((-1, -1), (2, -1), (-1, 1), (3, 2))):
        mask, sink = whole if causal else (), "fp32" if window[0] >= 0 else ""
        text = f"causal {causal} window {window}"
        yield _case(text, (2, 2, 6, 8), sink=sink, mask=mask, causal=causal, window=window, core=True)
    for sq, sk in ((7, 4), (4, 7), (1, 9), (9, 1), (1, 1)):  # if sq > sk, some queries see no key
        yield _case(f"causal {sq}x{sk}", (2, 3, sq, sk), sink="fp32", causal=True, core=sq == 7)
        yield _case(f"window {sq}x{sk}", (2, sq, sk), window=(1, 2))
    for scale in (0.0, -0.7):
        yield _case(f"scale {scale}", (3, 4, 12), sink="fp32", scale=scale, mask=(0, 0), core=True)
    for shape in ((0, 4), (4, 0), (2, 0, 5), (3, 4), (1, 1), (2, 3, 4, 5, 6), (2, 1500)):
        sink = "fp32" if len(shape) > 2 else ""
        core = shape in ((0, 4), (4, 0), (3, 4), (2, 3, 4, 5, 6))
        yield _case(f"shape {'x'.join(map(str, shape))}", shape, sink=sink, causal=True, core=core)
    yield _case("nothing to sum", (2, 3, 0, 4), sink="fp32", core=True)
    yield _case("frozen input", sink="fp32", requires_grad=(False, False, True), core=True)
    yield _case("frozen sink", sink="fp32", requires_grad=(True, False, False), core=True)
    yield _case("minus infinity", (2, 3, 4, 6), values="holes", sink="fp32")


_CASES = {"dropout_add": _dropout_cases, "scaled_masked_softmax": _softmax_cases}  # other operators are pointwise
OPERATORS = (*(op.name for op in declaration.pointwise_operators()), *_CASES)  # declared before this import


def _tensor(
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
    t = (t < -0.8 if dtype == torch.bool else t).to(device, dtype)
    if view == "transposed":
        return t.transpose(-1, -2)
    if view == "sliced":
        return t[..., 1::2]
    if view == "offset":
        return t[..., 1:]
    return t.expand(shape)


def _build(op: declaration.Operator, case: Case, device: torch.device) -> Sample:
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
            aligned = case.shape[len(case.shape) - len(case.mask) :]
            shape = tuple(m or size for m, size in zip(case.mask, aligned, strict=True))
            tensors.append(_tensor(shape, torch.bool, case.mask_view, "normal", device, g) if case.mask else None)
        else:
            shape = {"per_column": (n,), "per_row": rows, "per_head": rows[-2:-1]}.get(kind, (*rows, n))
            is_data = kind in (*declaration.DATA, "scores")
            view, values = (case.view, case.values) if is_data else (small, "normal")
            t = _tensor(shape, dtype, view, values, device, g)
            # detach() preserves strides and makes the view a leaf.
            tensors.append(t.detach().requires_grad_(case.requires_grad[i] if i < 3 else False))
    scalars = (getattr(case, a.name, a.value) for a in op.scalar_arguments)
    return Sample(op.name, case.name, (*tensors, *scalars), case.core)


def samples(op: str, device: str | torch.device = "cpu", *, core: bool = False) -> Iterator[Sample]:
    """Yield the samples of a forward operator; with ``core``, only the core samples.

    Args:
        op: a name in ``OPERATORS``.
        device: the tensors' device. Values are created on the CPU, so they are equal on all devices.
        core: True yields 23 to 35 samples instead of 47 to 74.

    Raises:
        ValueError: op is not known.
    """
    if op not in OPERATORS:
        raise ValueError(f"op={op!r} is not known; accepted: {', '.join(OPERATORS)}")
    declared = declaration.OPERATORS[op]
    for case in _CASES.get(op, _cases)():
        has = not case.needs or case.needs in declared.tensors or case.needs in declared.scalars
        if has and (case.core or not core):
            yield _build(declared, case, torch.device(device))


class _CallRecorder(TorchDispatchMode):
    """Records the arguments of the calls of one operator."""

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.overload = overload
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.overload:
            self.calls.append(tuple(a.detach() if isinstance(a, Tensor) else a for a in args))
        return func(*args, **(kwargs or {}))


def backward_samples(op: str, device: str | torch.device = "cpu", *, core: bool = False) -> Iterator[Sample]:
    """Yield samples of ``op``'s backward operator: the calls that autograd makes for the samples of ``op``.

    Most incoming gradients are contiguous; some have other strides, such as zero strides from ``sum().backward()``.
    """
    backward = getattr(torch.ops.fused, f"{op}_backward").default
    for sample in samples(op, device, core=core):
        leaves = [t for t in sample.tensors if t is not None and t.requires_grad]
        view, *_ = sample.name.split()
        view = view if view in ("expanded", "transposed", "sliced") else "contiguous"
        g = torch.Generator().manual_seed(zlib.crc32(f"gradient of {sample}".encode()))
        with _CallRecorder(backward) as recorder:
            out = sample()
            if leaves:
                grad = _tensor(tuple(out.shape), out.dtype, view, "normal", out.device, g)
                torch.autograd.grad(out, leaves, grad)
        for args in recorder.calls:  # none if no gradient needs arithmetic
            yield Sample(f"{op}_backward", sample.name, args, sample.core)
