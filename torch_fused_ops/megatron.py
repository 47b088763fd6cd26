"""Megatron-LM's names for these operators: only the import changes.

    from torch_fused_ops.megatron import bias_swiglu_impl, get_bias_dropout_add, FusedScaleMaskSoftmax

Names, signatures and return conventions come from ``megatron.core.fusions`` (``fused_bias_gelu``,
``fused_bias_geglu``, ``fused_bias_swiglu``, ``fused_weighted_squared_relu``, ``fused_bias_dropout``,
``fused_softmax``), ``megatron.core.activations``, ``megatron.core.utils`` (viewless tensors) and, for softmax,
``megatron.core.transformer.enums`` and ``.utils``, at commit d98e8a64 ("upstream" below). ``docs/migrate.md`` lists the
differences from upstream, and the names that are missing.

These operators accept any number of axes, any strides, and any mixture of float16, bfloat16, float32 and float64.
Arithmetic is float32 (float64 if a tensor is float64), rounded once to the first data tensor's dtype.
Gradients of frozen arguments are not computed. ``torch.compile(fullgraph=True)``, double backward and ``torch.func``
work, on CPUs and GPUs. As upstream, packed axes have the gate half first.

* ``bias``: (n,), or a tensor that broadcasts to the input. A bias that is not a vector is added separately, unfused.
* ``weights``: a factor per row: (rows, 1) as upstream, or the input's shape with a last axis of 1.
* ``fp8_input_store``: save the input in float8_e4m3fn with a scale per row (``memory="fp8"`` of
  ``torch_fused_ops.functional``).

Errors name the argument, its value and the accepted values, as in ``torch_fused_ops.functional``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_fused_ops import functional
from torch_fused_ops.operators.viewless import MakeViewlessTensor as MakeViewlessTensor
from torch_fused_ops.operators.viewless import make_viewless_tensor as make_viewless_tensor

# ---- from upstream's conventions to the operators' -------------------------------------------------------------------


def _biased(input: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return (input, bias as a vector or None). Any other bias is added to the input here."""
    if bias is None or bias.ndim == 1:
        return input, bias
    if bias.shape[-1:] == input.shape[-1:] and bias.numel() == input.shape[-1]:
        return input, bias.reshape(-1)
    return (input + bias).to(input.dtype), None


def _token_scale(input: Tensor, weights: Tensor) -> Tensor:
    functional._check("weights", weights, "Tensor")
    rows = input.shape[:-1]
    if weights.shape[-1:] != (1,) or weights.numel() != math.prod(rows):
        shapes = dict.fromkeys(str(shape) for shape in ((math.prod(rows), 1), (*rows, 1)))
        accepted = f"{' or '.join(shapes)}, a number for each row"
        raise ValueError(f"weights has shape {tuple(weights.shape)}; accepted: {accepted}")
    return weights.reshape(rows)


def _glu(
    activation: str,
    input: Tensor,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    up_offset: Any = 0.0,
    clamp: float | None = None,
    fp8: bool = False,
) -> Tensor:
    input, bias = _biased(input, bias)
    scale = None if weights is None else _token_scale(input, weights)
    return functional.bias_glu(
        input,
        bias,
        scale,
        activation=activation,
        up_offset=float(up_offset),  # upstream's Functions take a tensor
        clamp=clamp,
        memory="fp8" if fp8 else "free",
    )


# ---- GELU (fused_bias_gelu, activations) -----------------------------------------------------------------------------


def bias_gelu(bias: Tensor | None, y: Tensor) -> Tensor:
    """``gelu_tanh(y + bias)``. The bias is the first argument."""
    y, bias = _biased(y, bias)
    return functional.bias_gelu(y, bias, "tanh")


class GeLUFunction:
    """``GeLUFunction.apply(input, bias)``: ``bias_gelu`` with its gradients. Saves input and bias."""

    @staticmethod
    def apply(input: Tensor, bias: Tensor | None) -> Tensor:
        """``gelu_tanh(input + bias)``."""
        return bias_gelu(bias, input)


bias_gelu_impl = GeLUFunction.apply


def fast_gelu(x: Tensor) -> Tensor:
    """``gelu_tanh(x)``."""
    return functional.bias_gelu(x, None, "tanh")


# ---- GEGLU and quick GEGLU (fused_bias_geglu) ------------------------------------------------------------------------


def geglu(y: Tensor) -> Tensor:
    """``gelu_tanh(gate) · up`` of packed y (…, 2n)."""
    return _glu("gelu_tanh", y)


def bias_geglu_impl(input: Tensor, bias: Tensor | None, *, clamp_value: float | None = None) -> Tensor:
    """``gelu_tanh(min(gate, c)) · clamp(up, ±c)`` of packed ``input + bias``; c is clamp_value. bias may be None."""
    return _glu("gelu_tanh", input, bias, clamp=clamp_value)


class BiasGeGLUFunction:
    """``BiasGeGLUFunction.apply(input, bias)``: ``bias_geglu_impl``."""

    apply = staticmethod(bias_geglu_impl)


def quick_gelu(y: Tensor) -> Tensor:
    """``y · sigmoid(1.702 y)``."""
    return functional.bias_act(y, activation="quick_gelu")


def quick_geglu(y: Tensor, linear_offset: float = 0.0) -> Tensor:
    """``quick_gelu(gate) · (up + linear_offset)`` of packed y."""
    return _glu("quick_gelu", y, up_offset=linear_offset)


def weighted_quick_geglu(y: Tensor, weights: Tensor, linear_offset: float = 0.0) -> Tensor:
    """``quick_geglu(y) · weights``."""
    return _glu("quick_gelu", y, None, weights, up_offset=linear_offset)


def weighted_bias_quick_geglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    fp8_input_store: bool = False,
    linear_offset: float | Tensor = 0.0,
    clamp_value: float | None = None,
) -> Tensor:
    """``quick_gelu(min(gate, c)) · (clamp(up, ±c) + linear_offset) · weights`` of packed ``input + bias``, as gpt-oss.

    c is clamp_value. The sum is clamped, as in upstream's unfused path.
    """
    return _glu("quick_gelu", input, bias, weights, up_offset=linear_offset, clamp=clamp_value, fp8=fp8_input_store)


# ---- SwiGLU (fused_bias_swiglu) --------------------------------------------------------------------------------------


def swiglu(y: Tensor) -> Tensor:
    """``silu(gate) · up`` of packed y (…, 2n)."""
    return _glu("silu", y)


def bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
    clamp_value: float | None = None,
) -> Tensor:
    """``silu(min(gate, c)) · clamp(up, ±c)`` of packed ``input + bias``.

    Args:
        input: (…, 2n). bias: (2n,) or None.
        fp8_input_store: save the input in 8 bits for backward.
        cpu_offload_input: no effect; use ``torch.autograd.graph.save_on_cpu``.
        clamp_value: c, above 0; None and 0 do not clamp.
    """
    return _glu("silu", input, bias, clamp=clamp_value or None, fp8=fp8_input_store)


def weighted_bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    fp8_input_store: bool = False,
    clamp_value: float | None = None,
) -> Tensor:
    """``bias_swiglu_impl(input, bias) · weights``."""
    return _glu("silu", input, bias, weights, clamp=clamp_value or None, fp8=fp8_input_store)


# ---- squared ReLU (fused_weighted_squared_relu, activations) ---------------------------------------------------------


def squared_relu(x: Tensor) -> Tensor:
    """``max(x, 0)²``."""
    return functional.bias_act(x, activation="relu2")


def weighted_squared_relu_impl(input: Tensor, weights: Tensor) -> Tensor:
    """``max(input, 0)² · weights``."""
    return functional.bias_act(input, token_scale=_token_scale(input, weights), activation="relu2")


# ---- bias, dropout, residual (fused_bias_dropout) --------------------------------------------------------------------

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def _bias_dropout_add_func(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor | None, prob: float, training: bool
) -> Tensor:
    if not isinstance(x_with_bias, (tuple, list)) or len(x_with_bias) != 2:
        raise TypeError(
            f"x_with_bias is a {type(x_with_bias).__name__}; accepted: (x, bias), two tensors; bias may be None"
        )
    x, bias = _biased(*x_with_bias)
    return functional.bias_dropout_add(x, bias, residual, prob, training=training)


def bias_dropout_add_fused_train(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
    """``residual + dropout(x + bias)``, in residual's dtype. ``x_with_bias`` is (x, bias or None).

    torch's generator determines the mask, but ``torch.nn.functional.dropout`` drops other elements.
    """
    return _bias_dropout_add_func(x_with_bias, residual, prob, True)


def bias_dropout_add_fused_inference(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float
) -> Tensor:
    """``residual + x + bias``, in residual's dtype."""
    return _bias_dropout_add_func(x_with_bias, residual, prob, False)


def bias_dropout_add_unfused(training: bool) -> BiasDropoutAdd:
    """Return a function of ``((x, bias), residual, prob)``: ``residual + dropout(x + bias)``, or without dropout."""
    return bias_dropout_add_fused_train if training else bias_dropout_add_fused_inference


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Return a function of ``((x, bias), residual, prob)`` for training or evaluation. ``fused`` has no effect."""
    return bias_dropout_add_unfused(training)


# ---- softmax (fused_softmax, transformer.enums, transformer.utils) ---------------------------------------------------


class AttnMaskType(enum.Enum):
    """Kinds of attention masks, with upstream's names and values. Upstream's members are accepted, by their names."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


_MASK_TYPES = tuple(AttnMaskType.__members__)
_CAUSAL = ("causal", "padding_causal", "causal_bottom_right")


def _hidden(mask: Tensor | None) -> Tensor | None:
    """Return the mask as a bool tensor, True where a score is masked out, or None if the mask is None."""
    if mask is None:
        return None
    functional._check("mask", mask, "Optional[Tensor]")
    if mask.dtype not in (torch.bool, torch.uint8):
        hint = "; convert a mask that is added to the scores with `mask < 0`" if mask.is_floating_point() else ""
        raise TypeError(f"mask has dtype {mask.dtype}; accepted: bool or uint8, nonzero where a score is masked{hint}")
    return mask if mask.dtype == torch.bool else mask != 0


class ScaledUpperTriangMaskedSoftmax:
    """``ScaledUpperTriangMaskedSoftmax.apply(inputs, scale)``: causal softmax."""

    @staticmethod
    def apply(inputs: Tensor, scale: float | None) -> Tensor:
        """``softmax(inputs · scale)`` over the last axis; query i of sq sees keys 0 … sk − sq + i."""
        return functional.scaled_masked_softmax(inputs, scale=_scale(scale), causal=True)


class ScaledMaskedSoftmax:
    """``ScaledMaskedSoftmax.apply(inputs, mask, scale)``: softmax of unmasked scores."""

    @staticmethod
    def apply(inputs: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """``softmax(inputs · scale)`` over the last axis, only over scores whose mask is 0.

        Args:
            inputs: (…, sq, sk).
            mask: bool or uint8, nonzero where a score is masked, broadcastable to inputs; or None.
            scale: a number; None means 1.

        Masked scores never count, and a fully masked row is 0.
        """
        return functional.scaled_masked_softmax(inputs, _hidden(mask), scale=_scale(scale))


class ScaledSoftmax:
    """``ScaledSoftmax.apply(inputs, scale)``: softmax of scaled scores."""

    @staticmethod
    def apply(inputs: Tensor, scale: float | None) -> Tensor:
        """``softmax(inputs · scale)`` over the last axis; inputs is (…, sq, sk), of any size."""
        return functional.scaled_masked_softmax(inputs, scale=_scale(scale))


def _scale(scale: float | None) -> float:
    return 1.0 if scale is None else float(scale)


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Return a copy of ``attention_scores`` with the dtype's lowest number where the mask is nonzero.

    ``FusedScaleMaskSoftmax`` recognizes this function by its name, and masks exactly instead of calling it.
    """
    hidden = _hidden(attention_mask)
    assert hidden is not None
    return attention_scores.masked_fill(hidden, torch.finfo(attention_scores.dtype).min)


def _window(window_size: Sequence[int] | None) -> tuple[int, int]:
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2 or any(w < -1 for w in window_size):
        raise ValueError(
            f"window_size={window_size!r} is not accepted: it must be (left, right), each at least -1, or None"
        )
    return window_size[0], window_size[1]


class FusedScaleMaskSoftmax(nn.Module):
    """``softmax(input · scale)`` with mask, causality and window: Megatron-LM's attention softmax.

    Args:
        input_in_fp16, input_in_bf16: the model's dtype; at most one is True.
        attn_mask_type: AttnMaskType. Causal members mask scores right of the diagonal that ends at the bottom right.
        scaled_masked_softmax_fusion: changes only the result of ``is_kernel_available``.
        mask_func: if None or ``attention_mask_func`` (of any library), scores with a nonzero mask are masked out. Any
            other function is called before the operator, on a copy, as upstream does: ``mask_func(scores, mask)``.
        softmax_in_fp32: validated as upstream. If True, input_in_fp16 or input_in_bf16 sets the result's dtype, even if
            the input has another dtype. Arithmetic is always float32.
        scale: a number or None; a number requires softmax_in_fp32.
        window_size: (left, right), how far a query sees; −1 means unbounded. None means no window.

    Raises:
        AssertionError: both half-precision flags are True, scale is set without softmax_in_fp32, or input is not 4-D.

    Mask, causality and window all apply. Masked scores never count; a fully masked row and its gradients are 0.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: enum.Enum,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise AssertionError("input_in_fp16=True and input_in_bf16=True; accepted: at most one of the two")
        if scale is not None and not softmax_in_fp32:
            raise AssertionError(
                f"scale={scale!r} with softmax_in_fp32=False; accepted: softmax_in_fp32=True, or no scale"
            )
        if getattr(attn_mask_type, "name", None) not in _MASK_TYPES:
            members = ", ".join(f"AttnMaskType.{m}" for m in _MASK_TYPES)
            raise TypeError(f"attn_mask_type={attn_mask_type!r} is not accepted: it must be one of {members}")
        _window(window_size)
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        self.window_size = window_size

    def forward(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """Return the attention probabilities.

        Args:
            input: (b, np, sq, sk), of any sizes and strides.
            mask: bool or uint8, nonzero where a score is masked, broadcastable to input; or None.
            softmax_offset: (np,), a logit for each head that is added only to the denominator (a sink); or None.

        Returns:
            (b, np, sq, sk), in the dtype that the flags set (see softmax_in_fp32), otherwise in the input's dtype.
        """
        if input.dim() != 4:
            raise AssertionError(f"input has shape {tuple(input.shape)}; accepted: four axes, (b, np, sq, sk)")
        scores, hidden, scale = input, None, _scale(self.scale)
        if mask is None or self._has_standard_mask_func:
            hidden = _hidden(mask)
        else:
            assert self.mask_func is not None
            wide = input.float() if self.input_in_float16 and self.softmax_in_fp32 else input
            scores, scale = self.mask_func(wide * scale, mask), 1.0
        sink = None if softmax_offset is None else softmax_offset.to(input.device)
        causal = self.attn_mask_type.name in _CAUSAL
        out: Tensor = torch.ops.fused.scaled_masked_softmax(
            scores, hidden, sink, scale, causal, *_window(self.window_size)
        )
        if self.input_in_float16 and self.softmax_in_fp32:
            return out.to(torch.float16 if self.input_in_fp16 else torch.bfloat16)
        return out

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Return True if fusion is requested and the operator applies the mask, without calling a ``mask_func``."""
        return bool(self.scaled_masked_softmax_fusion) and (mask is None or self._has_standard_mask_func)

    @property
    def _has_standard_mask_func(self) -> bool:
        return self.mask_func is None or getattr(self.mask_func, "__name__", None) == "attention_mask_func"
