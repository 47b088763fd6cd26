# Written by `python docs/generate.py` from the operators' schemas; change that, not this file.

from collections.abc import Sequence

from torch import Tensor
from torch import dtype as ScalarType

def bias_act(
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
) -> Tensor: ...
def bias_act_backward(
    grad: Tensor,
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]: ...
def bias_act_backward_quantized(
    grad: Tensor,
    input: Tensor,
    activation: str,
    columns: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def bias_glu(
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str = "halves",
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> Tensor: ...
def bias_glu_backward(
    grad: Tensor,
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str,
    up_offset: float,
    clamp: float | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]: ...
def bias_glu_backward_quantized(
    grad: Tensor,
    input: Tensor,
    activation: str,
    layout: str,
    up_offset: float,
    clamp: float | None,
    columns: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def dequantize(
    values: Tensor,
    scales: Tensor,
    rows: int,
    dtype: ScalarType,
) -> Tensor: ...
def dropout_add(
    input: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seed: Tensor,
    p: float,
) -> Tensor: ...
def dropout_add_backward(
    grad: Tensor,
    seed: Tensor,
    p: float,
    dtype: ScalarType,
    bias_dtype: ScalarType | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]: ...
def glu(
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> Tensor: ...
def glu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float,
    clamp: float | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]: ...
def glu_backward_quantized(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    up_offset: float,
    clamp: float | None,
    columns: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]: ...
def grouped_linear_fp8(
    input: Tensor,
    weight: Tensor,
    ends: Tensor,
    recipe: str = "fp8-rowwise",
) -> Tensor: ...
def keep_fp8(
    input: Tensor,
) -> Tensor: ...
def linear_fp8(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: ScalarType | None = None,
    recipe: str = "fp8",
) -> Tensor: ...
def quantize(
    input: Tensor,
    rows: int,
    columns: int = 128,
) -> tuple[Tensor, Tensor]: ...
def quantize_both(
    input: Tensor,
    columns: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def quantize_by(
    input: Tensor,
    scales: Tensor,
) -> Tensor: ...
def requantize(
    values: Tensor,
    scales: Tensor,
) -> tuple[Tensor, Tensor]: ...
def scaled_grouped_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    ends: Tensor,
    dtype: ScalarType,
) -> Tensor: ...
def scaled_masked_softmax(
    input: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float = 1.0,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
) -> Tensor: ...
def scaled_masked_softmax_backward(
    grad: Tensor,
    output: Tensor,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    sink_dtype: ScalarType | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]: ...
def scaled_mm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None,
    rows: int,
    dtype: ScalarType,
) -> Tensor: ...
def scaled_mm_tiled(
    a: Tensor,
    a_tiles: Tensor,
    b: Tensor,
    b_tiles: Tensor,
    bias: Tensor | None,
    dtype: ScalarType,
) -> Tensor: ...
def with_saved(
    result: Tensor,
    saved: Sequence[Tensor],
) -> Tensor: ...
