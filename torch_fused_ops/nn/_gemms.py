"""The three GEMMs of a linear layer, with one weight or a weight per expert."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fused_ops import functional
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.operators.flop_formulas import count, rows_times_columns
from torch_fused_ops.operators.routing import readable
from torch_fused_ops.policy import check_known


class Gemms:
    """The GEMM x · weightᵀ and the GEMMs of its gradients, with one weight and one bias for all rows.

    Args:
        gemm: precision of ``forward``, as ``FusionPolicy.gemm``. float8 operators have derivatives of their own.
    """

    def __init__(self, gemm: str = "bf16") -> None:
        self.gemm = gemm

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute x · weightᵀ."""
        return linear(self.gemm, x, weight)

    def add(self, y: Tensor, bias: Tensor, scale: Tensor | None = None) -> Tensor:
        """Compute y + bias · scale[..., None] (y + bias if scale is None), in y's dtype."""
        return y + (bias if scale is None else (bias * scale.unsqueeze(-1)).to(y.dtype))

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Compute x's gradient, grad · weight."""
        return grad.matmul(weight)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Compute weight's gradient, gradᵀ · x."""
        return grad.reshape(-1, grad.shape[-1]).t().mm(x.reshape(-1, x.shape[-1]))


DENSE = Gemms()


def linear(gemm: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x · weightᵀ + bias in the precision ``gemm``. Under autocast, x and weight are cast to its dtype."""
    if gemm == "bf16":
        return F.linear(x, weight, bias)
    x, weight = under_autocast(x, weight)
    return functional.linear_fp8(x, weight, bias, recipe=gemm)


def check_gemm(gemm: object, experts: bool = False, **sizes: int) -> None:
    """Raise ValueError if the recipe is unknown, or does not support experts (if ``experts``) or one of the sizes."""
    check_known("gemm", gemm)
    if experts and gemm in RECIPES and not RECIPES[str(gemm)].scaling.grouped:
        accepted = ", ".join(("bf16", *(name for name, recipe in RECIPES.items() if recipe.scaling.grouped)))
        raise ValueError(
            f"gemm={gemm!r} is not accepted of experts: grouped GEMMs do not take a scale for each "
            f"{RECIPES[str(gemm)].scaling.noun}; accepted: {accepted}"
        )
    multiple = RECIPES[str(gemm)].scaling.multiple if gemm in RECIPES else 1
    for name, size in sizes.items():
        if size % multiple:
            raise ValueError(f"{name}={size} is not accepted with gemm={gemm!r}: it must be a multiple of {multiple}")


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast casts a GEMM's inputs: to its dtype, except float64."""
    kind = tensors[0].device.type
    available = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)  # torch 2.11's Dynamo cannot trace it
    if not available or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def check_shape(name: str, t: Any, accepted: Sequence[Any], rows: str = "") -> None:
    """Check a tensor's shape. In front, ``rows`` allows no axis (""), one of any size ("T") or any number ("...").

    Raises:
        TypeError, ValueError: t is not a tensor, or has another shape.
    """
    if isinstance(t, torch.fx.Proxy) or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return  # no sizes to compare
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} of type {type(t).__name__} is not accepted: it must be a tensor")
    axes = t.ndim - len(accepted)
    if t.shape[max(axes, 0) :] == tuple(accepted) and (rows == "..." or axes == (rows == "T")):
        return
    # A Python exception makes Dynamo run this frame eagerly from then on; an operator's exception does not.
    (_refuse_op if torch.compiler.is_compiling() else _refuse)(name, t.shape, accepted, rows)


def _refuse(name: str, shape: Sequence[int], accepted: Sequence[int], rows: str) -> None:
    shapes = f"({rows}, {accepted[0]})" if rows else f"{tuple(accepted)}"
    verb, pronoun = ("are", "they") if name.endswith("s") else ("is", "it")
    raise ValueError(f"{name} of shape {tuple(shape)} {verb} not accepted: {pronoun} must be {shapes}")


_refuse_op = torch.library.custom_op(
    "fused_nn::refuse", _refuse, mutates_args=(), schema="(str name, SymInt[] shape, SymInt[] accepted, str rows) -> ()"
)
_refuse_op.register_fake(_refuse)


# ---- experts ---------------------------------------------------------------------------------------------------------
#
# The derivatives of these two GEMMs, to any order, are calls of the same two GEMMs:
#
#     by_expert(x (T, k), weight (E, n, k), ends) → (T, n)     row t of expert e: weight[e] · x[t]
#     sums(a (T, n), b (T, k), ends) → (E, n, k)               the sum of a[t] ⊗ b[t] over e's rows t
#
# Rows are sorted by expert. ends[e] is the end of expert e's rows; it is int32, on the tensors' device. Both GEMMs are
# operators, because a compiler cannot trace loops whose length is in a tensor, and because F.grouped_mm's own
# derivative rejects expanded gradients, such as the gradient of a sum.


def _grouped(x: Tensor, n: int, k: int) -> bool:
    """Return True if ``F.grouped_mm`` supports the GEMM. Otherwise it runs expert by expert."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or x.device.type not in ("cpu", "cuda"):
        return False
    if n * x.element_size() % 16 or k * x.element_size() % 16:  # torch: "strides should be multiple of 16 bytes"
        return False
    return x.device.type == "cpu" or torch.cuda.get_device_capability(x.device) >= (8, 0)


def _aligned(t: Tensor) -> Tensor:
    """Copy t unless its rows or columns have 16-byte strides: gradients may be expanded, one row has any stride."""
    *_, row, column = t.stride()
    dense = column == 1 and row >= t.shape[-1] and row * t.element_size() % 16 == 0
    if t.ndim == 3:
        dense = dense or (row == 1 and column >= t.shape[-2] and column * t.element_size() % 16 == 0)
    return t if dense else t.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("fused_nn::grouped_mm", mutates_args=())
def _by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _grouped(x, *weight.shape[1:]):
        return F.grouped_mm(_aligned(x), _aligned(weight).transpose(1, 2), offs=ends)
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for w, (start, end) in zip(weight, _ranges(ends), strict=True):
        torch.mm(x[start:end], w.t(), out=y[start:end])
    return y


@torch.library.custom_op("fused_nn::grouped_outer_mm", mutates_args=())
def _sums(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if _grouped(a, a.shape[1], b.shape[1]):
        return F.grouped_mm(_aligned(a).t(), _aligned(b), offs=ends)
    y = a.new_empty(ends.shape[0], a.shape[1], b.shape[1])
    for out, (start, end) in zip(y, _ranges(ends), strict=True):
        torch.mm(a[start:end].t(), b[start:end], out=out)
    return y


def _ranges(ends: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *ends.tolist()]))


@_by_expert.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_sums.register_fake
def _(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(ends.shape[0], a.shape[1], b.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    first, second, ends = inputs
    needs_first, needs_second = ctx.needs_input_grad[:2]
    ctx.save_for_backward(first if needs_second else None, second if needs_first else None, ends)


def _by_expert_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    dx = None if weight is None else by_expert(grad, weight.transpose(1, 2), ends)
    return dx, None if x is None else sums(grad, x, ends), None


def _sums_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, ends = ctx.saved_tensors
    da = None if b is None else by_expert(b, grad, ends)
    return da, None if a is None else by_expert(a, grad.transpose(1, 2), ends), None


_by_expert.register_autograd(_by_expert_backward, setup_context=_save)
_sums.register_autograd(_sums_backward, setup_context=_save)


count(_by_expert._opoverload, lambda x, weight, ends, **out: rows_times_columns(x, weight))
count(_sums._opoverload, lambda a, b, ends, **out: 2 * a[0] * a[1] * b[1])

# torch.func's transforms need autograd Functions in eager mode; the fusion pass needs the operators.


class _ByExpert(torch.autograd.Function):
    forward = staticmethod(lambda x, weight, ends: _by_expert(x, weight, ends))
    setup_context = staticmethod(_save)
    backward = staticmethod(_by_expert_backward)


class _Sums(torch.autograd.Function):
    forward = staticmethod(lambda a, b, ends: _sums(a, b, ends))
    setup_context = staticmethod(_save)
    backward = staticmethod(_sums_backward)


def _native(x: Tensor, n: int, k: int) -> bool:
    """Return True if compiled code can call ``F.grouped_mm``: kernels, and until torch 2.13 the fake, need bfloat16."""
    return torch.compiler.is_compiling() and x.dtype == torch.bfloat16 and _grouped(x, n, k)


def by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row of x by its expert's weightᵀ."""
    if _native(x, *weight.shape[1:]):
        return F.grouped_mm(_aligned(x), _aligned(weight).transpose(1, 2), offs=ends)
    call: Callable[..., Tensor] = _by_expert if torch.compiler.is_compiling() else _ByExpert.apply
    return call(x, weight, ends)


def sums(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Compute aᵀ · b for each expert's rows."""
    if _native(a, a.shape[1], b.shape[1]):
        return F.grouped_mm(_aligned(a).t(), _aligned(b), offs=ends)
    call: Callable[..., Tensor] = _sums if torch.compiler.is_compiling() else _Sums.apply
    return call(a, b, ends)


class _Dense(torch.autograd.Function):
    """Return y unchanged; backward copies expanded gradients, which ``F.grouped_mm``'s own derivative rejects."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _aligned(grad)


def dense_gradient(y: Tensor) -> Tensor:
    """Let y's gradient have any strides. Eager mode calls our own operator, which accepts any strides already."""
    if not torch.compiler.is_compiling():
        return y
    same: Tensor = _Dense.apply(y)  # type: ignore[no-untyped-call]
    return same


def _expert_of_rows(rows: int, ends: Tensor) -> Tensor:
    """Return each row's expert. Rows that no expert owns, at the end, get the last expert."""
    places = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, places, right=True).clamp_max(ends.shape[0] - 1)


def _zero_beyond(t: Tensor, ends: Tensor) -> Tensor:
    """Set rows that no expert owns to 0. GEMMs leave these rows uninitialized."""
    owned = torch.arange(t.shape[0], dtype=ends.dtype, device=ends.device) < ends[-1]
    return torch.where(owned.view(-1, *[1] * (t.ndim - 1)), t, 0)


class _ZeroGradientBeyond(torch.autograd.Function):
    """Return t unchanged; its gradient is 0 in rows that no expert owns."""

    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor, ends: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _zero_beyond(grad, *ctx.saved_tensors), None


class _AddBias(torch.autograd.Function):
    """Compute y + bias[expert of the row] · scale[:, None].

    Backward sums an expert's rows with a GEMM. The derivative of indexing would add, for example, a thousand rows in
    any order and round every sum. No tensor of y's size is saved.
    """

    @staticmethod
    def forward(y: Tensor, bias: Tensor, scale: Tensor | None, ends: Tensor) -> Tensor:
        rows = bias.to(y.dtype).index_select(0, _expert_of_rows(y.shape[0], ends))
        if torch.compiler.is_compiling():
            return y + (rows if scale is None else (rows * scale.unsqueeze(-1)).to(y.dtype))
        return (rows if scale is None else rows.mul_(scale.unsqueeze(-1))).add_(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor], output: Tensor) -> None:
        _, bias, scale, ends = inputs
        ctx.save_for_backward(bias, scale, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        bias, scale, ends = ctx.saved_tensors
        _, needs_bias, needs_scale, _ = ctx.needs_input_grad
        d_bias = d_scale = None
        if needs_bias:
            # Column 0 is the scale in grad's dtype, column 1 its rounding error. Zeros pad each row to 16 bytes.
            first = grad.new_ones(grad.shape[0]) if scale is None else scale.to(grad.dtype)
            second = torch.zeros_like(first) if scale is None else (scale - first).to(grad.dtype)
            columns = F.pad(torch.stack([first, second], 1), (0, 6))
            d_bias = sums(columns, grad, ends)[:, :2].sum(1).to(bias.dtype)
        if needs_scale:
            rows = bias.index_select(0, _expert_of_rows(grad.shape[0], ends))
            d_scale = (grad.to(torch.promote_types(grad.dtype, scale.dtype)) * rows).sum(-1).to(scale.dtype)
        return grad, d_bias, d_scale, None


class GroupedGemms(Gemms):
    """The GEMMs of rows that are sorted by expert, with a weight (E, n, k) and a bias (E, n)."""

    def __init__(self, ends: Tensor, gemm: str = "bf16", *, checked: bool = False) -> None:
        """``ends``: the end of each expert's rows; ``checked``: True if the last one is known to be the row count."""
        super().__init__(gemm)
        self.ends, self.checked = ends, checked

    @classmethod
    def from_counts(cls, x: Tensor, tokens_per_expert: Tensor | Sequence[int], experts: int) -> GroupedGemms:
        """Construct from the number of rows per expert, without waiting for a GPU.

        Raises:
            TypeError, ValueError: tokens_per_expert is not E integers whose sum is the number of rows. (The sum is not
                checked for a tensor on a GPU or in compiled code: see ``zero_beyond``.)
        """
        counts, rows = tokens_per_expert, x.shape[0]
        if isinstance(counts, Tensor):
            if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
                raise TypeError(f"tokens_per_expert of dtype {counts.dtype} is not accepted: it must have integers")
            if counts.shape != (experts,):
                shape = tuple(counts.shape)
                raise ValueError(f"tokens_per_expert of shape {shape} is not accepted: it must be ({experts},)")
            if readable(counts) and (int(counts.sum()) != rows or int(counts.min()) < 0):
                _refuse_counts(counts.tolist(), rows)
            ends = counts.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
            return cls(ends, checked=readable(counts))
        if any(isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)) for n in counts):
            raise TypeError(f"tokens_per_expert={counts!r} is not accepted: it must be a tensor or integers")
        if len(counts) != experts:
            raise ValueError(f"tokens_per_expert={counts!r} is not accepted: it must have {experts} numbers")
        if sum(counts) != rows or min(counts) < 0:
            _refuse_counts(counts, rows)
        return cls(torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=x.device), checked=True)

    def zero_beyond(self, output: Tensor) -> Tensor:
        """Set rows of a result that no expert owns to 0."""
        return output if self.checked else _zero_beyond(output, self.ends)

    def zero_gradient_beyond(self, t: Tensor) -> Tensor:
        """Return t, with a gradient of 0 in rows that no expert owns."""
        if self.checked:
            return t
        same: Tensor = _ZeroGradientBeyond.apply(t, self.ends)  # type: ignore[no-untyped-call]
        return same

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = under_autocast(x, weight)
        if self.gemm == "bf16":
            return by_expert(x, weight, self.ends)
        if {x.dtype, weight.dtype} != {torch.bfloat16}:
            dtypes = " and ".join(str(dtype) for dtype in dict.fromkeys((x.dtype, weight.dtype)))
            raise TypeError(
                f"gemm={self.gemm!r} is not accepted of experts in {dtypes}: rows and weights must be torch.bfloat16, "
                "by themselves or under autocast"
            )
        return functional.grouped_linear_fp8(x, weight.transpose(1, 2), self.ends, recipe=self.gemm)

    def add(self, y: Tensor, bias: Tensor, scale: Tensor | None = None) -> Tensor:
        added: Tensor = _AddBias.apply(y, bias, scale, self.ends)  # type: ignore[no-untyped-call]
        return added

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return by_expert(grad, weight.transpose(1, 2), self.ends)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        return sums(grad, x, self.ends)


def _refuse_counts(counts: Sequence[int], rows: int) -> None:
    raise ValueError(
        f"tokens_per_expert={list(counts)!r} is not accepted: it must be numbers from 0 on with the sum {rows}"
    )
