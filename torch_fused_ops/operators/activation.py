"""Declare the activation family: an activation or a gated linear unit, with optional bias and routing weights."""

from __future__ import annotations

from torch import Tensor

from torch_fused_ops import activations, formulas
from torch_fused_ops.declaration import PointwiseOperator, above_zero_or_none, finite, known_activation, one_of
from torch_fused_ops.formulas import LAYOUTS
from torch_fused_ops.operators.registration import register_pointwise

_GLU = {"up_offset": "float=0.0", "clamp": "float?=None"}
_GLU_RULES = finite("up_offset"), above_zero_or_none("clamp")


def _keeps_result(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> bool:
    """Return True if backward can read the result, which the next linear layer saves, instead of the data.

    See ``Activation.gradient_from_output``. A nonzero ``input + bias`` must not round to 0; in one dtype it cannot.
    """
    return (
        token_scale is None
        and activations.get(activation).gradient_from_output
        and (bias is None or bias.dtype == input.dtype)
    )


bias_act = PointwiseOperator(
    "bias_act",
    "act(input + bias) · token_scale[..., None]; input (..., n), bias (n,), token_scale (...).",
    tensors={"input": "data", "bias": "per_column?", "token_scale": "per_row?"},
    scalars={"activation": "str"},
    value=formulas.act_element,
    grads=formulas.act_input_grads,
    rules=(known_activation,),
    keeps_result=_keeps_result,
)

glu = PointwiseOperator(
    "glu",
    "act(min(gate, clamp)) · (clamp(up, ±clamp) + up_offset) · token_scale[..., None]; gate, up (..., n).",
    tensors={"gate": "data", "up": "data", "token_scale": "per_row?"},
    scalars={"activation": "str", **_GLU},
    value=formulas.glu_element,
    grads=formulas.glu_input_grads,
    rules=(known_activation, *_GLU_RULES),
)

bias_glu = PointwiseOperator(
    "bias_glu",
    "glu of the packed input (..., 2n) + bias (2n,).",
    tensors={"input": "packed", "bias": "per_column?", "token_scale": "per_row?"},
    scalars={"activation": "str", "layout": 'str="halves"', **_GLU},
    value=formulas.glu_element,
    grads=formulas.glu_input_grads,
    rules=(known_activation, one_of("layout", LAYOUTS), *_GLU_RULES),
)

FAMILY = bias_act, glu, bias_glu
# Maps a qualified name, such as "fused::glu", to its operator.
CALLS = {f"fused::{op.name}": op for op in FAMILY}

for _operator in FAMILY:
    register_pointwise(_operator)
