"""The operators as typed Python functions.

These functions call ``torch.ops.fused.*`` and check arguments. They trace without graph breaks, so ``torch.compile``
sees the operators. They add names, annotations, documentation, and errors that name the argument.

All functions share these conventions:

* Shapes. ``n`` is the last axis's size, after any number of other axes. ``bias`` is a vector over the last axis, added
  before the activation. ``token_scale`` has input's shape without the last axis; it multiplies each row of the result
  (an expert's routing weight). Results are contiguous.
* Dtypes. float16, bfloat16, float32 and float64, in any mixture. The result has the first tensor's dtype, even if
  PyTorch would promote it (under autocast a bfloat16 GEMM result plus a float32 bias gives bfloat16). Arithmetic is
  float32 (float64 if any tensor is float64), rounded once at the end. As with PyTorch's activations, autocast does not
  change dtypes, except in ``scaled_masked_softmax``.
* Gradients. Every floating tensor argument has gradients, to any order and under every ``torch.func`` transform.
* Errors. A wrong type or dtype is a TypeError. A wrong shape, device, name or range is a ValueError. Each message names
  the argument, its value and the accepted values.
* ``activation`` is one of ``torch_fused_ops.activations.names()``: relu, relu2, silu, gelu, gelu_tanh, quick_gelu,
  sigmoid, tanh, leaky_relu, relu6, hardswish, elu, softplus, mish (with the default parameters of PyTorch's functions),
  identity (a bilinear gate), and names added with ``register_activation``.
* ``clamp``, a number above 0, bounds gate from above and up on both sides; None does not clamp. ``up_offset``, a finite
  number, is added to up after clamping.
* ``memory`` decides how autograd saves the activation's inputs. ``"free"`` saves the tensors (ReLU saves its result
  instead, which the next linear saves anyway). ``"fp8"`` saves their values in float8_e4m3fn with one float32 scale per
  row, half the bytes of bfloat16. Results do not depend on ``memory``. With ``"fp8"`` gradients are exact at the stored
  values. A stored value's error is at most 2⁻⁴ of the value, or 2⁻¹⁰/448 of the row's largest value if that is larger
  (the latter is doubled on GPUs in eager mode, where scales are powers of two). A row with an infinity or a NaN has NaN
  gradients. Bias and token_scale are saved exactly. Backward with ``create_graph=True`` raises; ``torch.func``
  transforms are exact, to any order.
* ``layout`` of a packed last axis ``2n``: ``"halves"`` is ``[gate | up]``, ``"interleaved"`` is ``g0 u0 g1 u1 …``,
  ``"swapped"`` is ``[up | gate]``, as in ``F.glu``. The activation is applied to the *gate*.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack  # torch requires it; in typing from Python 3.11 on

from torch_fused_ops import activations, families
from torch_fused_ops.declaration import OPERATORS, between
from torch_fused_ops.families.dropout.sharding import dropout_add_by_shards, shard_seed
from torch_fused_ops.operators.viewless import MakeViewlessTensor, make_viewless_tensor

__all__ = [
    "MakeViewlessTensor",
    "bias_act",
    "bias_dropout_add",
    "bias_geglu",
    "bias_gelu",
    "bias_glu",
    "bias_swiglu",
    "dropout_add",
    "geglu",
    "glu",
    "linear_fp8",
    "make_viewless_tensor",
    "scaled_masked_softmax",
    "shard_seed",
    "swiglu",
]

families.register()


GELU = {"none": "gelu", "tanh": "gelu_tanh"}
_NONE = type(None)
_NUMBERS = (int, float, torch.SymFloat)
# Types in PyTorch's schemas: the accepted values, for messages, and their types.
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "Tensor": ("a tensor", (Tensor,)),
    "Optional[Tensor]": ("a tensor or None", (Tensor, _NONE)),
    "Optional[ScalarType]": ("a torch.dtype or None", (torch.dtype, _NONE)),
    "str": ("a string", (str,)),
    "bool": ("True or False", (bool,)),
    "int": ("an integer", (int, torch.SymInt)),
    "float": ("a number", _NUMBERS),
    "Optional[float]": ("a number or None", (*_NUMBERS, _NONE)),
}
# Messages that say more than the type.
_ACCEPTED = {
    "activation": f"a string, one of {', '.join(activations.names())}, or a registered name",
    "approximate": "a string, 'none' or 'tanh'",
    "layout": "'halves', 'interleaved' or 'swapped'",
    "p": "a number from 0 to 1",
}
_ARGUMENTS = {
    name: tuple((a.name, str(a.real_type)) for a in getattr(torch.ops.fused, name).default._schema.arguments)
    for name in ("bias_act", "glu", "bias_glu", "dropout_add", "scaled_masked_softmax", "linear_fp8")
}


def _check(name: str, value: object, type_name: str) -> None:
    """Raise TypeError if an argument does not have its schema's type. True and False are not numbers."""
    accepted, types = _TYPES[type_name]
    if isinstance(value, types) and (bool in types or not isinstance(value, bool)):
        return
    # Accept every object with __torch_function__: torch.fx proxies and tensor-likes dispatch the call themselves.
    if Tensor not in types or isinstance(value, type) or not hasattr(value, "__torch_function__"):
        _refuse(name, value, _ACCEPTED.get(name, accepted))


def _refuse(name: str, value: object, accepted: str) -> NoReturn:
    raise TypeError(f"{name}={value!r} is not accepted: it must be {accepted}, not {type(value).__name__}")


def _call(operator: str, *args: Any, memory: str = "free") -> Tensor:
    """Call an operator with all of its arguments, after checking their types, at a memory level."""
    for (name, type_name), value in zip(_ARGUMENTS[operator], args, strict=True):
        _check(name, value, type_name)
    if memory != "free":
        args = (_marked(operator, memory, args), *args[1:])
    out: Tensor = getattr(torch.ops.fused, operator)(*args)
    return out


def _marked(operator: str, memory: object, args: tuple[Any, ...]) -> Any:
    """Return the first tensor, marked for float8 if any tensor needs gradients. Exported graphs save nothing."""
    if memory != "fp8":
        raise ValueError(f"memory={memory!r} is not known; accepted: 'free', 'fp8'")
    op: Any = OPERATORS[operator]
    tensors = args[: len(op.tensors)]
    needed = any(t is not None and (not isinstance(t, Tensor) or t.requires_grad) for t in tensors)
    # Torch 2.11's Dynamo evaluates torch.compiler.is_exporting() as True in every compilation.
    is_exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    # ReLU saves only its result, which the next linear saves anyway.
    if needed and torch.is_grad_enabled() and not is_exporting and not op.keeps_result(*args):
        return torch.ops.fused.keep_fp8(args[0])
    return args[0]


def _gelu_name(approximate: str) -> str:
    _check("approximate", approximate, "str")
    if approximate not in GELU:
        raise ValueError(f"approximate={approximate!r} is not known; accepted: 'none', 'tanh'")
    return GELU[approximate]


# ---- the three operators ---------------------------------------------------------------------------------------------


def bias_act(
    input: Tensor,
    bias: Tensor | None = None,
    token_scale: Tensor | None = None,
    *,
    activation: str,
    memory: str = "free",
) -> Tensor:
    """``act(input + bias) · token_scale[..., None]``, in one pass.

    Args:
        input: (..., n); the result has its shape and dtype.
        bias: (n,).
        token_scale: (...).

    The module's conventions describe ``activation``, ``memory`` and errors.
    """
    return _call("bias_act", input, bias, token_scale, activation, memory=memory)


def glu(
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None = None,
    *,
    activation: str,
    up_offset: float = 0.0,
    clamp: float | None = None,
    memory: str = "free",
) -> Tensor:
    """``act(min(gate, clamp)) · (clamp(up, ±clamp) + up_offset) · token_scale[..., None]``, in one pass.

    A gated linear unit (Shazeer 2020, arXiv:2002.05202) with gate and up in two tensors. gpt-oss uses
    ``activation="quick_gelu", up_offset=1.0, clamp=7.0``.

    Args:
        gate: (..., n), the activation's input; the result has its shape and dtype.
        up: (..., n).
        token_scale: (...).

    The module's conventions describe ``activation``, ``up_offset``, ``clamp``, ``memory`` and errors.
    """
    return _call("glu", gate, up, token_scale, activation, up_offset, clamp, memory=memory)


def bias_glu(
    input: Tensor,
    bias: Tensor | None = None,
    token_scale: Tensor | None = None,
    *,
    activation: str,
    layout: str = "halves",
    up_offset: float = 0.0,
    clamp: float | None = None,
    memory: str = "free",
) -> Tensor:
    """``glu`` of the packed ``input + bias``, in one pass and without copies of the halves.

    Args:
        input: (..., 2n), gate and up packed in ``layout``.
        bias: (2n,), packed in the same layout, added before clamping.
        token_scale: (...).
        layout: "halves", "interleaved" or "swapped".

    Returns:
        (..., n), in input's dtype.

    The module's conventions describe ``activation``, ``up_offset``, ``clamp``, ``memory`` and errors. An odd last axis
    raises a ValueError.
    """
    return _call("bias_glu", input, bias, token_scale, activation, layout, up_offset, clamp, memory=memory)


# ---- activations -----------------------------------------------------------------------------------------------------


def bias_gelu(
    input: Tensor,
    bias: Tensor | None = None,
    approximate: str = "none",
    *,
    token_scale: Tensor | None = None,
    memory: str = "free",
) -> Tensor:
    """``gelu(input + bias)`` (arXiv:1606.08415); ``approximate`` as in ``torch.nn.functional.gelu``.

    The negative tail is accurate; PyTorch's gelu loses it below x = -3. Other arguments are as in ``bias_act``.
    """
    return bias_act(input, bias, token_scale, activation=_gelu_name(approximate), memory=memory)


# ---- gated linear units ----------------------------------------------------------------------------------------------


class GluOptions(TypedDict, total=False):
    """Options of ``glu``; the module's conventions describe them."""

    up_offset: float
    clamp: float | None
    memory: str


class PackedGluOptions(GluOptions, total=False):
    """Options of ``bias_glu``."""

    layout: str


def swiglu(gate: Tensor, up: Tensor, token_scale: Tensor | None = None, **options: Unpack[GluOptions]) -> Tensor:
    """``silu(gate) · up``: Llama's GLU (arXiv:2002.05202). Arguments are as in ``glu``."""
    return glu(gate, up, token_scale, activation="silu", **options)


def geglu(
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None = None,
    *,
    approximate: str = "none",
    **options: Unpack[GluOptions],
) -> Tensor:
    """``gelu(gate) · up`` (arXiv:2002.05202); T5 and Gemma use ``approximate="tanh"``. Arguments: see ``glu``."""
    return glu(gate, up, token_scale, activation=_gelu_name(approximate), **options)


def bias_swiglu(
    input: Tensor, bias: Tensor | None = None, token_scale: Tensor | None = None, **options: Unpack[PackedGluOptions]
) -> Tensor:
    """``swiglu`` of the packed ``input + bias``. Arguments are as in ``bias_glu``."""
    return bias_glu(input, bias, token_scale, activation="silu", **options)


def bias_geglu(
    input: Tensor,
    bias: Tensor | None = None,
    token_scale: Tensor | None = None,
    *,
    approximate: str = "none",
    **options: Unpack[PackedGluOptions],
) -> Tensor:
    """``geglu`` of the packed ``input + bias``. Arguments are as in ``bias_glu`` and ``geglu``."""
    return bias_glu(input, bias, token_scale, activation=_gelu_name(approximate), **options)


# ---- dropout, bias and residual --------------------------------------------------------------------------------------


def dropout_add(
    input: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, seed: Tensor, p: float
) -> Tensor:
    """``residual + dropout(input + bias)`` in one pass; ``seed`` determines the mask, which is not saved.

    Backward recomputes the mask. The mask depends only on the seed, the element's row-major index and p: it is equal in
    eager mode and compiled code, on CPUs and GPUs, in every run. Philox4x32-10 (Salmon et al. 2011,
    doi:10.1145/2063384.2063405) generates 32 random bits per element. Two calls with one seed drop the same elements:
    draw a seed for each call, as ``bias_dropout_add`` does.

    Args:
        input: (..., n).
        bias: (n,), added before dropout.
        residual: (..., n), added after dropout.
        seed: int64 with one element, on input's device. If input is one shard of a tensor, pass
            ``shard_seed(seed, coordinate)``.
        p: the probability of dropping an element, from 0 to 1; other elements are divided by 1 - p.

    Returns:
        (..., n), in residual's dtype, or in input's dtype if residual is None; rounded once. Errors: see the module's
        conventions.
    """
    return _call("dropout_add", input, bias, residual, seed, p)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool = True
) -> Tensor:
    """``residual + F.dropout(x + bias, p, training)``, in one pass, without saving a mask for backward.

    The seed is drawn from torch's generator on x's device. ``torch.manual_seed`` determines the seed, and the host does
    not wait. Under ``torch.func.vmap``, vmap's ``randomness`` decides if examples share a mask. ``F.dropout`` drops
    other elements.

    A DTensor x is processed shard by shard. The shard's coordinate along every mesh dimension that shards x is mixed
    into the seed, so each shard has its own mask, and replicas have equal masks. As for every random operator, the
    generators of all ranks must be in the same state (``torch.manual_seed`` with the same number on all ranks).

    Args:
        x: (..., n). If nothing is dropped or added (p = 0 or not training, no bias, no residual), x is returned.
        bias: (n,) or None.
        residual: (..., n) or None.
        p: the probability of dropping an element, from 0 to 1.
        training: if False, nothing is dropped, and no seed is drawn.

    Returns:
        (..., n), in residual's dtype, or in x's dtype if residual is None. Errors: see the module's conventions.
    """
    _check("x", x, "Tensor")
    _check("bias", bias, "Optional[Tensor]")
    _check("residual", residual, "Optional[Tensor]")
    _check("p", p, "float")
    _check("training", training, "bool")
    between("p", 0.0, 1.0).check(p)
    if not training or p == 0:
        if bias is None and residual is None:
            return x
        p, seed = 0.0, torch.empty(1, dtype=torch.int64, device=x.device)  # the operator does not read this seed
    else:
        seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=x.device)
    if isinstance(x, Tensor) and hasattr(x, "device_mesh"):  # a DTensor; torch.fx's proxies have every attribute
        return dropout_add_by_shards(x, bias, residual, seed, p)
    return dropout_add(x, bias, residual, seed=seed, p=p)


# ---- softmax ---------------------------------------------------------------------------------------------------------


def scaled_masked_softmax(
    input: Tensor,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
) -> Tensor:
    """``softmax(scale · input)`` over the unmasked keys, in one pass; only the result is saved for backward.

    Attention's scores become probabilities, as in Megatron-LM's ``FusedScaleMaskSoftmax``, but masks are exact instead
    of −10000. ``mask``, ``causal`` and the window apply together. A fully masked row and its gradient are 0. A score
    of −∞ counts as masked; NaN or +∞ makes its row NaN. As for ``torch.softmax``, autocast makes the result float32 on
    GPUs, and has no effect on CPUs.

    Args:
        input: (..., sq, sk), the scores of sq queries and sk keys.
        mask: bool, True where a score is masked out; broadcasts to input's shape. Convert an additive mask with
            ``mask < 0`` or ``mask.isneginf()``.
        sink: (heads,), heads = input.shape[-3]: an unscaled logit per head that is added only to the denominator
            (gpt-oss; "softmax off by one" is a sink of zeros).
        scale: a finite factor of the scores.
        causal: query i sees key j if j <= i + sk - sq, so the last query sees the last key.
        window_left, window_right: query i sees key j if i + sk - sq - window_left <= j <= i + sk - sq + window_right;
            -1 means unbounded.

    Returns:
        A tensor of input's shape and dtype (except under autocast). Errors: see the module's conventions.
    """
    if isinstance(sink, (int, float)):
        _refuse("sink", sink, f"a tensor or None (a scale goes by name: scale={sink})")
    return _call("scaled_masked_softmax", input, mask, sink, scale, causal, window_left, window_right)


# ---- linear layers in float8 -----------------------------------------------------------------------------------------


def linear_fp8(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str = "fp8",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``input · weightᵀ + bias``, and its gradients, as GEMMs in float8 with a scale per block or row.

    Before each GEMM both operands are quantized to float8 (e4m3) in blocks along the axis that the GEMM sums over.
    Scales are powers of two, sums are float32. docs/fp8.md lists each recipe's blocks, sources and GPUs. CPUs multiply
    the quantized numbers in the result's dtype.
    A block with an infinity or a NaN becomes NaN. Second derivatives and ``torch.func`` transforms raise.

    Args:
        input: (..., in); bfloat16, float16 or float32.
        weight: (out, in), both multiples of 128; "fp8-rowwise" needs multiples of 16, "mxfp8" multiples of 32. Its
            gradient has its dtype.
        bias: (out,).
        recipe: see ``FusionPolicy.gemm``. With "fp8" and "mxfp8" the input is saved for backward in float8.
        dtype: dtype of the result; by default input's dtype.

    Returns:
        (..., out). Errors: see the module's conventions. A size that is not such a multiple raises a ValueError.
    """
    return _call("linear_fp8", input, weight, bias, dtype, recipe)
