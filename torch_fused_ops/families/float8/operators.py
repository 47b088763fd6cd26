"""Define ``fused::linear_fp8``, a linear layer whose GEMMs run in float8, and the operators that it calls.

    quantize           float8 values and a scale per block: (1, 128), (128, 128), (1, 32), a row, or the whole matrix
    quantize_by        quantize with known scales
    dequantize         the inverse of quantize, except for rounding
    requantize         converts a quantized matrix to its quantized transpose, in the blocks of a weight
    scaled_mm          a GEMM of two quantized matrices
    scaled_mm_tiled    a GEMM in blocks of (1, 32), with scales in sm_100's layout; only lowerings call it
    linear_fp8         input · weightᵀ + bias and its gradients, by a recipe (``recipes.RECIPES``)

    scaled_grouped_mm      a grouped GEMM: each expert of a mixture multiplies its own rows
    grouped_linear_fp8     input · weight[expert of the row], and its gradients

Only this package calls the other operators, so they do not check their arguments.

``…linear_fp8`` are CompositeImplicitAutograd: compilers see the operators above, with their blocks, and edit and fuse
them (``lowerings/float8.py``).

A weight's gradient sums over the tokens. If this GEMM runs in float8, both operands are quantized along the tokens: the
gradient in blocks of data, the input in blocks of a weight, which makes the GEMM faster on sm_90 (docs/fp8.md). Forward
then saves only the quantized input, a byte per element. Otherwise the model's dtype is used, and the input is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.declaration import Argument, Signature, arguments_of, one_of, refuse
from torch_fused_ops.families.float8 import formulas as float8
from torch_fused_ops.families.float8.recipes import BLOCK, MX_BLOCK, RECIPES, Block, Recipe
from torch_fused_ops.families.float8.sharding import multiples
from torch_fused_ops.formulas import FP8
from torch_fused_ops.operators import fp8_store
from torch_fused_ops.operators.autograd import Implementation, define, register
from torch_fused_ops.operators.checks import refuse_dtype
from torch_fused_ops.settings.switches import is_without

GEMM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPED_GEMM_DTYPES = (torch.bfloat16,)  # the only result dtype of torch's grouped GEMMs


# ---- fakes -----------------------------------------------------------------------------------------------------------


def _fake_quantize(input: Tensor, rows: int, columns: int = BLOCK) -> tuple[Tensor, Tensor]:
    r, c = input.shape
    values = input.new_empty((r, float8.stored_columns(c, columns)), dtype=FP8)
    return values, input.new_empty(float8.scales_shape(values.shape, rows, columns), dtype=torch.float32)


def _fake_product(a: Tensor, a_scales: Tensor, b: Tensor, *others: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[-2]), dtype=others[-1])


# ---- operators -------------------------------------------------------------------------------------------------------


def register_plain(
    name: str,
    doc: str,
    arguments: tuple[Argument, ...],
    results: tuple[str, ...],
    plain: Callable[..., Any],
    fake: Callable[..., Any],
) -> torch._ops.OpOverload:
    """Register an operator without a derivative. The function of the same name in ``kernels.py`` is its GPU kernel."""

    def kernel(*args: Any) -> Any:
        from torch_fused_ops.families.float8 import kernels  # not earlier: it needs Triton

        return kernels.launch_of(name)(*args)

    on_gpu = plain if is_without("float8_kernels") else kernel
    return register(Implementation(Signature(name, arguments, results, doc), plain, fake, plain, on_gpu))


def _register_product(
    name: str, doc: str, scales: str, others: dict[str, str], plain: Callable[..., Any]
) -> torch._ops.OpOverload:
    """Register a GEMM of quantized matrices: (a, a_{scales}, b, b_{scales}, others…, dtype)."""
    data, of_data = "Tensor: data", "Tensor: scales"
    operands = {"a": data, f"a_{scales}": of_data, "b": data, f"b_{scales}": of_data}
    return register_plain(
        name, doc, arguments_of(**operands, **others, dtype="ScalarType"), ("data",), plain, _fake_product
    )


_quantize = register_plain(
    "quantize",
    "Quantize a matrix in blocks of (rows, columns).",
    arguments_of(input="Tensor: data", rows="int", columns=f"int={BLOCK}"),
    ("data", "scales"),
    float8.quantize,
    _fake_quantize,
)
_quantize_by = register_plain(
    "quantize_by",
    "The values of quantize, in rows or in a single block, with scales that are known.",
    arguments_of(input="Tensor: data", scales="Tensor: scales"),
    ("data",),
    float8.quantize_by,
    lambda input, scales: input.new_empty(input.shape, dtype=FP8),
)
_dequantize = register_plain(
    "dequantize",
    "The inverse of quantize, except for rounding.",
    arguments_of(values="Tensor: data", scales="Tensor: scales", rows="int", dtype="ScalarType"),
    ("data",),
    float8.dequantize,
    lambda values, scales, rows, dtype: values.new_empty(values.shape, dtype=dtype),
)
_requantize = register_plain(
    "requantize",
    f"quantize(dequantize(values, scales, 1)ᵀ, {BLOCK}) in one pass; blocks of (1, {MX_BLOCK}) keep their shape.",
    arguments_of(values="Tensor: data", scales="Tensor: scales"),
    ("data", "scales"),
    float8.requantize,
    lambda values, scales: _fake_quantize(values.t(), *float8.block_of_columns(float8.columns_of(values, scales, 1))),
)
_scaled_mm = _register_product(
    "scaled_mm",
    "a · bᵀ + bias of matrices from quantize, with equally wide blocks: a in blocks of one row, b in blocks of rows.",
    "scales",
    {"bias": "Tensor?: per_column", "rows": "int"},
    float8.product,
)
_register_product(
    "scaled_mm_tiled",
    "scaled_mm in blocks of (1, 32), with 8-bit scales in tiles of 128 rows and 4 blocks, the layout of sm_100.",
    "tiles",
    {"bias": "Tensor?: per_column"},
    float8.tiled_product,
)
_scaled_grouped_mm = _register_product(
    "scaled_grouped_mm",
    "Each row of a times bᵀ of its expert; both are quantized in rows, and ends[e] is the end of expert e's rows.",
    "scales",
    {"ends": "Tensor: ends"},
    float8.grouped_product,
)

# ---- memory="fp8" ----------------------------------------------------------------------------------------------------


def _store(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scales = _quantize(x.reshape(-1, x.shape[-1]).contiguous(), 1, x.shape[-1])
    return values.view(x.shape), scales.view(x.shape[:-1])


def _load(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows: Tensor = _dequantize(stored.view(-1, stored.shape[-1]), scale.view(1, -1), 1, dtype)
    return rows.view(stored.shape)


fp8_store.KERNELS.update(store=_store, load=_load)

# ---- linear ----------------------------------------------------------------------------------------------------------


def _refuse_second_derivative(name: str, grad: Tensor) -> None:
    if torch.is_grad_enabled() and grad.requires_grad:
        raise RuntimeError(
            f"a second derivative through fused::{name} is not accepted: its inputs are rounded to float8"
        )


class _Linear(torch.autograd.Function):
    """A linear layer on a matrix. Each GEMM's operands are quantized along the axis that the GEMM sums over."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, recipe: Recipe
    ) -> Tensor:
        scaling = recipe.scaling
        values, scales = _quantize(input, *scaling.data.sizes_in(input.shape))
        rows, columns = scaling.weight.sizes_in(weight.shape)
        of_weight = _quantize(weight, rows, columns)
        out: Tensor = _scaled_mm(values, scales, *of_weight, bias, rows, dtype)
        # The transposed weight's single scale, saved so that backward need not reduce the weight again.
        largest = of_weight[1].amax(1, keepdim=True) if scaling.weight_t == Block(None, None) else None
        ctx.save_for_backward(weight, largest, *((values, scales) if recipe.wgrad else (input,)))
        ctx.rest = input.dtype, None if bias is None else bias.dtype, recipe
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, largest, *saved_input = ctx.saved_tensors
        input_dtype, bias_dtype, (scaling, wgrad) = ctx.rest
        d_input = d_weight = d_bias = None
        _refuse_second_derivative("linear_fp8", grad)
        if ctx.needs_input_grad[0]:
            weight_t = weight.t()
            rows, columns = scaling.weight_t.sizes_in(weight_t.shape)
            known = largest is not None
            of_weight = (_quantize_by(weight_t, largest), largest) if known else _quantize(weight_t, rows, columns)
            of_grad = _quantize(grad, *scaling.data.sizes_in(grad.shape))
            d_input = _scaled_mm(*of_grad, *of_weight, None, rows, grad.dtype).to(input_dtype)
        if ctx.needs_input_grad[1]:
            if wgrad:
                of_grad = _quantize(grad.t(), *scaling.data.sizes_in(grad.t().shape))
                of_input = _requantize(*saved_input)
                d_weight = _scaled_mm(*of_grad, *of_input, None, scaling.weight.rows, grad.dtype)
            else:
                d_weight = torch.mm(grad.t(), saved_input[0].to(grad.dtype))
            d_weight = d_weight.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            d_bias = grad.sum(0).to(bias_dtype)
        return d_input, d_weight, d_bias, None, None


def _check_linear(input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, recipe: str) -> None:
    for name, t in (("input", input), ("weight", weight), ("bias", bias)):
        if t is not None and t.dtype not in GEMM_DTYPES:
            refuse(f"{name}.dtype", t.dtype, ", ".join(map(str, GEMM_DTYPES)))
    if dtype not in GEMM_DTYPES:
        refuse("dtype", dtype, ", ".join(map(str, GEMM_DTYPES)))
    if weight.ndim == 2 and (input.ndim < 1 or input.shape[-1] != weight.shape[1]):
        raise ValueError(f"input has shape {tuple(input.shape)}; accepted: (…, {weight.shape[1]}), weight's last axis")
    scaling = RECIPES[recipe].scaling
    sizes, multiple_of = multiples(weight, scaling.multiple)
    if weight.ndim != 2 or any(size % multiple or not size for size, multiple in sizes):
        raise ValueError(f"weight has shape {tuple(weight.shape)}; accepted: two axes, multiples of {multiple_of}")
    if hasattr(weight, "device_mesh") and not scaling.takes_shards:
        accepted = [name for name, recipe_of in RECIPES.items() if recipe_of.scaling.takes_shards]
        refuse("recipe", recipe, f"{' or '.join(accepted)} for DTensors: a row may be on several ranks")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; accepted: ({weight.shape[0]},), weight's first axis")


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    recipe: str = "fp8",
) -> Tensor:
    """Compute ``fused::linear_fp8``: see ``functional.linear_fp8``."""
    dtype = dtype or input.dtype
    one_of("recipe", tuple(RECIPES)).check(recipe)
    _check_linear(input, weight, bias, dtype, recipe)
    rows = input.reshape(-1, input.shape[-1])
    out: Tensor = _Linear.apply(rows, weight, bias, dtype, RECIPES[recipe])  # type: ignore[no-untyped-call]
    return out.view(*input.shape[:-1], weight.shape[0])


define(
    "linear_fp8",
    '(Tensor input, Tensor weight, Tensor? bias=None, ScalarType? dtype=None, str recipe="fp8") -> Tensor',
    linear,
)


# ---- experts ---------------------------------------------------------------------------------------------------------


class _GroupedLinear(torch.autograd.Function):
    """A linear layer for each expert, on rows sorted by expert. Forward has a scale per row and per weight column."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        experts, k, n = weight.shape
        rows = weight.transpose(1, 2).reshape(experts * n, k)
        values, scales = _quantize(rows, 1, k)
        scales = scales.view(experts, 1, n)
        of_input = _quantize(input, 1, k)
        out: Tensor = _scaled_grouped_mm(*of_input, values.view(experts, n, k), scales, ends, input.dtype)
        ctx.save_for_backward(input, weight, scales.amax(2, keepdim=True), ends)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, largest, ends = ctx.saved_tensors
        d_input = d_weight = None
        _refuse_second_derivative("grouped_linear_fp8", grad)
        grad = grad.contiguous()  # torch's grouped GEMMs reject expanded tensors, such as a sum's gradient
        if ctx.needs_input_grad[0]:
            of_grad = _quantize(grad, 1, grad.shape[1])
            d_input = _scaled_grouped_mm(*of_grad, _quantize_by(weight, largest), largest, ends, grad.dtype)
        if ctx.needs_input_grad[1]:
            if not input.shape[0]:
                d_weight = torch.zeros_like(weight)
            elif weight.stride(2) == 1:
                d_weight = torch.nn.functional.grouped_mm(input.contiguous().t(), grad, offs=ends)
            else:  # match the parameter's memory order; ``weight`` is its transpose
                d_weight = torch.nn.functional.grouped_mm(grad.t(), input.contiguous(), offs=ends).transpose(1, 2)
        return d_input, d_weight, None


def _check_grouped_linear(input: Tensor, weight: Tensor, ends: Tensor, recipe: str) -> None:
    one_of("recipe", tuple(name for name, (scaling, _) in RECIPES.items() if scaling.grouped)).check(recipe)
    multiple = RECIPES[recipe].scaling.multiple
    for name, t in (("input", input), ("weight", weight)):
        if t.dtype not in GROUPED_GEMM_DTYPES:
            refuse(f"{name}.dtype", t.dtype, ", ".join(map(str, GROUPED_GEMM_DTYPES)))
    if weight.ndim != 3 or any(size % multiple or not size for size in weight.shape[1:]):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; accepted: (experts, in, out), in and out multiples of {multiple}"
        )
    if input.ndim != 2 or input.shape[1] != weight.shape[1]:
        raise ValueError(
            f"input has shape {tuple(input.shape)}; accepted: (…, {weight.shape[1]}), weight's second axis"
        )
    if ends.dtype != torch.int32:
        refuse_dtype("ends", ends, (torch.int32,))
    if tuple(ends.shape) != (weight.shape[0],):
        raise ValueError(f"ends has shape {tuple(ends.shape)}; accepted: ({weight.shape[0]},), one for each expert")


def grouped_linear(input: Tensor, weight: Tensor, ends: Tensor, recipe: str = "fp8-rowwise") -> Tensor:
    """Return ``input[t] · weight[e]`` in float8, where e is the expert of row t. The fusion pass calls the operator.

    Rows are sorted by expert, as in ``torch.nn.functional.grouped_mm``. Each row, each column of an expert's weight,
    and each expert's transposed weight has one scale. The weight gradient is a grouped GEMM in bfloat16; torchao's
    ``_to_fp8_rowwise_then_scaled_grouped_mm`` pads each expert's rows for float8. The host does not wait.

    Args:
        input: (t, in), bfloat16. Results are undefined for rows after the last expert's end.
        weight: (experts, in, out), bfloat16. The transpose of a parameter (experts, out, in) is not copied.
        ends: (experts,), int32, on input's device: the end of each expert's rows.
        recipe: a recipe with grouped GEMMs.
    """
    _check_grouped_linear(input, weight, ends, recipe)
    out: Tensor = _GroupedLinear.apply(input, weight, ends)  # type: ignore[no-untyped-call]
    return out


define(
    "grouped_linear_fp8",
    '(Tensor input, Tensor weight, Tensor ends, str recipe="fp8-rowwise") -> Tensor',
    grouped_linear,
)
