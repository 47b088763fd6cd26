"""The operators as typed Python functions.

Thin calls of ``torch.ops.fused.*``: no computation here, so they trace without graph breaks, and ``torch.compile`` sees
the operators themselves. What they add is names, annotations, documentation and errors naming the argument.

Conventions shared by all of them:

* Shapes. ``n`` is the last axis; any number of axes stand in front of it. ``bias`` is a vector over the last axis,
  added before the activation; ``token_scale``, shaped as the input without its last axis, is a factor for each row of
  the result (an expert's routing weight). Results are contiguous.
* Dtypes. float16, bfloat16, float32, float64, mixed as you like; the result has the dtype of the first tensor, also
  where PyTorch would promote it to a wider one's (a bfloat16 product under autocast and a float32 bias give bfloat16).
  Arithmetic is float32 (float64 if any tensor is float64), rounded once at the end. Autocast changes nothing, as for
  PyTorch's own activations; of softmax, see there.
* Gradients for every floating tensor argument, to any order, and under every ``torch.func`` transform.
* Errors. TypeError for what is no tensor, string or number, or has a dtype that is not accepted; ValueError for shapes,
  devices, names and ranges. Each names the argument, its value and what is accepted.
* ``activation`` is one of ``torch_fused_ops.activations.names()``: relu, relu2, silu, gelu, gelu_tanh, quick_gelu,
  sigmoid, tanh, and those added with ``register_activation``.
* ``clamp``, above 0, is an upper bound of gate, and a bound of up on both sides; None does not clamp. ``up_offset``,
  finite, is added to up afterwards.
* ``memory`` is what autograd keeps of the tensors that the activation acts on: ``"free"`` the tensors themselves (of
  ReLU its result, which the next linear keeps anyway), ``"fp8"`` their values in float8_e4m3fn with one float32 scale
  for each row, half of bfloat16's bytes. Results are the same, bit for bit; gradients are the exact ones at the stored
  values, each off by up to 2⁻⁴ of itself, or by 2⁻¹⁰/448 of its row's largest where that is more (twice that on GPUs
  in eager mode, whose scales are powers of two). A row with an infinity or a NaN has NaN for its gradient. Bias and
  token_scale are kept as they are. Second derivatives of a backward pass raise; ``torch.func`` transforms are exact, to
  any order.
* GLU layouts of a packed last axis ``2n``: ``"halves"`` is ``[gate | up]``, ``"interleaved"`` is ``g0 u0 g1 u1 …``, and
  ``"swapped"`` is ``[up | gate]``, as in ``F.glu``; a number b is b features of gate, b of up, and so on, which must
  divide n. The activation acts on the *gate*. ``convert_glu_layout`` packs a weight anew.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_fused_ops import activations, families
from torch_fused_ops.families.dropout.sharding import dropout_add_by_shards, shard_seed
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.operators import activation as declared
from torch_fused_ops.operators.viewless import (
    MakeViewlessTensor,
    assert_viewless_tensor,
    make_viewless_tensor,
    safely_set_viewless_tensor_data,
)

__all__ = [
    "MakeViewlessTensor",
    "assert_viewless_tensor",
    "bias_act",
    "bias_dropout_add",
    "bias_geglu",
    "bias_gelu",
    "bias_glu",
    "bias_swiglu",
    "convert_glu_layout",
    "dropout_add",
    "geglu",
    "gelu",
    "glu",
    "grouped_linear_fp8",
    "linear_fp8",
    "make_viewless_tensor",
    "quick_gelu",
    "safely_set_viewless_tensor_data",
    "scaled_masked_softmax",
    "shard_seed",
    "silu",
    "squared_relu",
    "swiglu",
]

families.register()


def __dir__() -> list[str]:
    return __all__


_keeps_result = declared.bias_act.keeps_result
_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _refuse(name: str, value: object, accepted: str) -> NoReturn:
    raise TypeError(f"{name}={value!r} is not accepted: it must be {accepted}, not {type(value).__name__}")


def _check_tensor(name: str, t: Any, accepted: str = "a tensor") -> None:
    # Anything with __torch_function__ passes: torch.fx proxies and tensor-likes dispatch for themselves.
    if not isinstance(t, Tensor) and (isinstance(t, type) or not hasattr(t, "__torch_function__")):
        _refuse(name, t, accepted)


def _check_optional(name: str, t: Any) -> None:
    if t is not None:
        _check_tensor(name, t, "a tensor or None")


def _check_number(name: str, value: object, accepted: str, *kinds: type) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        _refuse(name, value, accepted)


def _check_activation(activation: object) -> None:
    if not isinstance(activation, str):
        _refuse("activation", activation, f"a string, one of {', '.join(activations.names())}")


def _check_block(name: str, block: Any, size: int) -> Any:
    """The number of adjacent features of gate, then of up, among ``size`` features."""
    _check_number(name, block, "'halves', 'interleaved', 'swapped' or a number of features", int)
    if block < 1 or size % (2 * block):
        raise ValueError(
            f"{name}={block!r} is not accepted: it must be from 1 on, and twice it must divide the packed axis, {size}"
        )
    return block


def _check_glu_scalars(up_offset: object, clamp: object) -> None:
    _check_number("up_offset", up_offset, "a number", int, float)
    _check_number("clamp", clamp, "a number or None", int, float, type(None))


def _marked(memory: object, *tensors: Any) -> Any:
    """The first tensor, marked where backward is to find it in float8: an exported graph keeps nothing."""
    if memory != "fp8":
        raise ValueError(f"memory={memory!r} is not known; accepted: 'free', 'fp8'")
    needed = any(t is not None and (not isinstance(t, Tensor) or t.requires_grad) for t in tensors)
    if needed and torch.is_grad_enabled() and not torch.compiler.is_exporting():
        return torch.ops.fused.keep_fp8(tensors[0])
    return tensors[0]


def _gelu_name(approximate: object) -> str:
    if not isinstance(approximate, str):
        _refuse("approximate", approximate, "a string, 'none' or 'tanh'")
    if approximate not in _GELU:
        raise ValueError(f"approximate={approximate!r} is not known; accepted: 'none', 'tanh'")
    return _GELU[approximate]


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
        input: (..., n), and so is the result, in input's dtype.
        bias: (n,).
        token_scale: (...).

    ``activation``, ``memory`` and errors: see the module's conventions.
    """
    _check_tensor("input", input)
    _check_optional("bias", bias)
    _check_optional("token_scale", token_scale)
    _check_activation(activation)
    if bias is token_scale is None and isinstance(input, Tensor) and input.ndim == 0:  # operators take rows
        return bias_act(input.unsqueeze(0), activation=activation, memory=memory).squeeze(0)
    if memory != "free":
        marked = _marked(memory, input, bias, token_scale)
        # Of ReLU nothing is kept that the next linear does not keep.
        input = input if _keeps_result(input, bias, token_scale, activation) else marked
    out: Tensor = torch.ops.fused.bias_act(input, bias, token_scale, activation)
    return out


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

    A gated linear unit (Shazeer 2020, arXiv:2002.05202) with gate and up in two tensors. gpt-oss's is
    ``activation="quick_gelu", up_offset=1.0, clamp=7.0``.

    Args:
        gate: (..., n), what the activation acts on; the result has its shape and dtype.
        up: (..., n).
        token_scale: (...).

    ``activation``, ``up_offset``, ``clamp``, ``memory`` and errors: see the module's conventions.
    """
    _check_tensor("gate", gate)
    _check_tensor("up", up)
    _check_optional("token_scale", token_scale)
    _check_activation(activation)
    _check_glu_scalars(up_offset, clamp)
    if token_scale is None and isinstance(gate, Tensor) and isinstance(up, Tensor) and gate.ndim == up.ndim == 0:
        options: dict[str, Any] = {"up_offset": up_offset, "clamp": clamp, "memory": memory}
        return glu(gate.unsqueeze(0), up.unsqueeze(0), activation=activation, **options).squeeze(0)
    if memory != "free":
        gate = _marked(memory, gate, up, token_scale)
    out: Tensor = torch.ops.fused.glu(gate, up, token_scale, activation, up_offset, clamp)
    return out


def bias_glu(
    input: Tensor,
    bias: Tensor | None = None,
    token_scale: Tensor | None = None,
    *,
    activation: str,
    layout: str | int = "halves",
    up_offset: float = 0.0,
    clamp: float | None = None,
    memory: str = "free",
) -> Tensor:
    """``glu`` of the packed ``input + bias``, in one pass and without copies of the halves.

    Args:
        input: (..., 2n), gate and up packed as ``layout`` says.
        bias: (2n,), packed likewise, added before clamping.
        token_scale: (...).
        layout: "halves", "interleaved" or "swapped", or a number b: blocks of b features of gate, then of up. Those are
            read as they lie; a bias is then added on its own first, rounded to input's dtype, and what ``memory="fp8"``
            stores has a scale for each 2b features.

    Returns:
        (..., n), in input's dtype.

    ``activation``, ``up_offset``, ``clamp``, ``memory`` and errors: see the module's conventions. An odd last axis is a
    ValueError.
    """
    _check_tensor("input", input)
    _check_optional("bias", bias)
    _check_optional("token_scale", token_scale)
    _check_activation(activation)
    if not isinstance(layout, str):
        block = _check_block("layout", layout, input.shape[-1] if input.ndim else 0)
        layout = "interleaved" if block == 1 else "halves"
        if block > 1:
            # A row of blocks is as many rows of halves.
            h = input if bias is None else (input + bias).to(input.dtype)
            blocks = h.unflatten(-1, (-1, 2 * block))
            scales = token_scale if token_scale is None else token_scale.unsqueeze(-1).expand(blocks.shape[:-1])
            flags: Any = {"activation": activation, "up_offset": up_offset, "clamp": clamp, "memory": memory}
            whole: Tensor = bias_glu(blocks, None, scales, **flags).flatten(-2)
            return whole
    _check_glu_scalars(up_offset, clamp)
    if memory != "free":
        input = _marked(memory, input, bias, token_scale)
    out: Tensor = torch.ops.fused.bias_glu(input, bias, token_scale, activation, layout, up_offset, clamp)
    return out


def convert_glu_layout(packed: Tensor, source: str | int, target: str | int, dim: int = -1) -> Tensor:
    """``[gate | up] → g0 … g31 u0 … u31 g32 …``, or any layout into any other, along an axis: weights, biases, results.

        weight = convert_glu_layout(weight, "halves", 32, dim=0)

    Args:
        packed: 2n along ``dim``.
        source, target: as ``bias_glu`` takes them: "halves", "interleaved", "swapped", or a number that divides n.

    Returns:
        A contiguous tensor of packed's shape, and its gradient; or packed itself where the layouts are the same.

    Raises:
        TypeError, ValueError: for what is no layout, and for sizes that it does not divide.
    """
    _check_tensor("packed", packed)
    if not -packed.ndim <= dim < packed.ndim:
        raise ValueError(f"dim={dim!r} is not accepted: packed has {packed.ndim} axes")
    size, dim = packed.shape[dim], dim % packed.ndim
    whole = max(size // 2, 1)
    before, after = (
        _check_block(name, 1 if layout == "interleaved" else whole if layout in ("halves", "swapped") else layout, size)
        for name, layout in (("source", source), ("target", target))
    )
    swapped, swap = source == "swapped", target == "swapped"
    if (before, swapped) == (after, swap):
        return packed
    pairs = packed.unflatten(dim, (-1, 2, before))
    if swapped != swap:
        pairs = pairs.flip(dim + 1)
    halves = pairs.transpose(dim, dim + 1).flatten(dim + 1, dim + 2)  # (2, n)
    converted: Tensor = halves.unflatten(dim + 1, (-1, after)).transpose(dim, dim + 1).contiguous()
    return converted.flatten(dim, dim + 2)


# ---- activations, with a bias or without -----------------------------------------------------------------------------


def bias_gelu(
    input: Tensor,
    bias: Tensor | None = None,
    approximate: str = "none",
    *,
    token_scale: Tensor | None = None,
    memory: str = "free",
) -> Tensor:
    """``gelu(input + bias)`` (arXiv:1606.08415); ``approximate`` as in ``torch.nn.functional.gelu``.

    Keeps the negative tail, which PyTorch's own loses from x = -3 on. Shapes, dtypes and errors as ``bias_act``.
    """
    return bias_act(input, bias, token_scale, activation=_gelu_name(approximate), memory=memory)


def gelu(input: Tensor, approximate: str = "none", *, memory: str = "free") -> Tensor:
    """``input · Φ(input)``, or its tanh form. As ``torch.nn.functional.gelu``, with the negative tail kept."""
    return bias_act(input, activation=_gelu_name(approximate), memory=memory)


def silu(input: Tensor, *, memory: str = "free") -> Tensor:
    """``input · sigmoid(input)``. As ``torch.nn.functional.silu``."""
    return bias_act(input, activation="silu", memory=memory)


def quick_gelu(input: Tensor, *, memory: str = "free") -> Tensor:
    """``input · sigmoid(1.702 input)`` (CLIP's GELU)."""
    return bias_act(input, activation="quick_gelu", memory=memory)


def squared_relu(input: Tensor, *, memory: str = "free") -> Tensor:
    """``max(input, 0)²`` (Primer, arXiv:2109.08668)."""
    return bias_act(input, activation="relu2", memory=memory)


# ---- gated linear units: gate and up in two tensors ------------------------------------------------------------------


def swiglu(
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None = None,
    *,
    up_offset: float = 0.0,
    clamp: float | None = None,
    memory: str = "free",
) -> Tensor:
    """``silu(gate) · up``: Llama's GLU (arXiv:2002.05202). Arguments as ``glu``."""
    return glu(gate, up, token_scale, activation="silu", up_offset=up_offset, clamp=clamp, memory=memory)


def geglu(
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None = None,
    *,
    approximate: str = "none",
    up_offset: float = 0.0,
    clamp: float | None = None,
    memory: str = "free",
) -> Tensor:
    """``gelu(gate) · up`` (arXiv:2002.05202); T5's and Gemma's is ``approximate="tanh"``. Arguments as ``glu``."""
    return glu(
        gate, up, token_scale, activation=_gelu_name(approximate), up_offset=up_offset, clamp=clamp, memory=memory
    )


# ---- gated linear units: gate and up packed in one tensor ------------------------------------------------------------


def bias_swiglu(
    input: Tensor,
    bias: Tensor | None = None,
    token_scale: Tensor | None = None,
    *,
    layout: str | int = "halves",
    up_offset: float = 0.0,
    clamp: float | None = None,
    memory: str = "free",
) -> Tensor:
    """``swiglu`` of the packed ``input + bias``. Arguments as ``bias_glu``."""
    return bias_glu(
        input, bias, token_scale, activation="silu", layout=layout, up_offset=up_offset, clamp=clamp, memory=memory
    )


def bias_geglu(
    input: Tensor,
    bias: Tensor | None = None,
    token_scale: Tensor | None = None,
    *,
    approximate: str = "none",
    layout: str | int = "halves",
    up_offset: float = 0.0,
    clamp: float | None = None,
    memory: str = "free",
) -> Tensor:
    """``geglu`` of the packed ``input + bias``. Arguments as ``bias_glu``, ``approximate`` as ``bias_gelu``."""
    activation = _gelu_name(approximate)
    return bias_glu(
        input, bias, token_scale, activation=activation, layout=layout, up_offset=up_offset, clamp=clamp, memory=memory
    )


# ---- dropout, bias and residual --------------------------------------------------------------------------------------


def dropout_add(
    input: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, seed: Tensor, p: float
) -> Tensor:
    """``residual + dropout(input + bias)`` in one pass, with a mask that is a function of ``seed``; none is kept.

    Backward makes the mask again. It depends on the seed, the element's row-major index and p alone: it is the same in
    eager mode and compiled, on CPUs and GPUs, in every run. Each element's 32 random bits are Philox4x32-10's (Salmon
    et al. 2011, doi:10.1145/2063384.2063405). Two calls with one seed drop the same elements: draw a seed for each
    call, as ``bias_dropout_add`` does.

    Args:
        input: (..., n).
        bias: (n,), added before.
        residual: (..., n), added afterwards.
        seed: int64 with one element, on input's device. Whoever shards input by hand gives each shard
            ``shard_seed(seed, coordinate)``.
        p: the chance of being dropped, from 0 to 1; what is kept is divided by 1 - p.

    Returns:
        (..., n), in residual's dtype, or input's if there is none; rounded once. Errors: see the module's conventions.
    """
    _check_tensor("input", input)
    _check_optional("bias", bias)
    _check_optional("residual", residual)
    _check_tensor("seed", seed)
    _check_number("p", p, "a number from 0 to 1", int, float, torch.SymFloat)
    out: Tensor = torch.ops.fused.dropout_add(input, bias, residual, seed, p)
    return out


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool = True
) -> Tensor:
    """``residual + F.dropout(x + bias, p, training)``, in one pass and with no mask kept for backward.

    A seed is drawn from torch's generator for x's device, on that device: ``torch.manual_seed`` decides, the host does
    not wait, and under ``torch.func.vmap`` its ``randomness`` says whether examples share a mask. Which elements are
    dropped differs from ``F.dropout``'s choice.

    A DTensor x is worked on shard by shard: the coordinate along every mesh dimension that shards x is mixed into the
    seed, so that no two shards repeat a mask, and replicas have the same one. As with every random operator the
    generators of all ranks must be in the same state (``torch.manual_seed`` with one number on all of them).

    Args:
        x: (..., n). With p = 0 or in evaluation, without bias and residual, it is returned as it is.
        bias: (n,) or None.
        residual: (..., n) or None.
        p: the chance of being dropped, from 0 to 1.
        training: False: nothing is dropped, and no seed is drawn.

    Returns:
        (..., n), in residual's dtype, or x's if there is none. Errors: see the module's conventions.
    """
    _check_tensor("x", x)
    _check_optional("bias", bias)
    _check_optional("residual", residual)
    _check_number("p", p, "a number from 0 to 1", int, float, torch.SymFloat)
    if not isinstance(training, bool):
        raise TypeError(f"training={training!r} is not accepted: it must be True or False")
    if not 0 <= p <= 1:
        raise ValueError(f"p={p!r} is not accepted: it must be between 0 and 1")
    # The operator calls it input.
    if isinstance(x, Tensor) and not (x.is_floating_point() and x.dtype.itemsize > 1 and x.ndim):
        if x.ndim:
            raise TypeError(f"x has dtype {x.dtype}; accepted: float16, bfloat16, float32, float64")
        raise ValueError("x has shape (); accepted: at least one axis")
    if not training or p == 0:
        if bias is None and residual is None:
            return x
        p, seed = 0.0, torch.empty(1, dtype=torch.int64, device=x.device)  # which nothing reads
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
    """``softmax(scale · input)`` over the keys that nothing masks, in one pass; for backward its result alone is kept.

    Attention's scores → probabilities (Megatron-LM's ``FusedScaleMaskSoftmax``, with exact masks in place of −10000).
    ``mask``, ``causal`` and the window apply together. A row that they mask altogether is all zeros, and so is its
    gradient; −∞ in input counts as masked, NaN and +∞ make their row NaN. Under autocast on GPUs the result is float32,
    on CPUs autocast changes nothing: both as for ``torch.softmax``.

    Args:
        input: (..., sq, sk), queries and keys.
        mask: bool, True where a score is masked out; broadcasts to input's shape. An additive mask is made one with
            ``mask < 0`` or ``mask.isneginf()``.
        sink: (heads,), heads = input.shape[-3]: a logit for each head that stands in the denominator alone, unscaled
            (gpt-oss; "softmax off by one" is a sink of zeros).
        scale: a finite factor of the scores.
        causal: query i sees key j where j <= i + sk - sq: aligned at the last query and key.
        window_left, window_right: query i sees i + sk - sq - window_left <= j <= i + sk - sq + window_right; -1 is no
            bound.

    Returns:
        As input in shape and dtype. Errors: see the module's conventions.
    """
    _check_tensor("input", input)
    _check_optional("mask", mask)
    if isinstance(sink, (int, float)):
        _refuse("sink", sink, f"a tensor or None (a scale goes by name: scale={sink})")
    _check_optional("sink", sink)
    _check_number("scale", scale, "a number", int, float, torch.SymFloat)
    if not isinstance(causal, bool):
        _refuse("causal", causal, "True or False")
    _check_number("window_left", window_left, "an integer", int, torch.SymInt)
    _check_number("window_right", window_right, "an integer", int, torch.SymInt)
    out: Tensor = torch.ops.fused.scaled_masked_softmax(input, mask, sink, scale, causal, window_left, window_right)
    return out


# ---- linear layers in float8 -----------------------------------------------------------------------------------------


def linear_fp8(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str = "fp8",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``input · weightᵀ + bias``, and its gradients, as products of float8 with a scale for each block, or row.

    Before each product both operands are stored in float8 (e4m3) along the axis that it sums over, under scales that
    are powers of two: by recipe "fp8" the one with the tokens' axis in blocks of (1, 128), the other in (128, 128)
    (DeepSeek-V3, arXiv 2412.19437; TransformerEngine's ``Float8BlockScaling``). Sums are in float32. For backward the
    input is kept in float8, a byte an element. On CPUs the same numbers are multiplied in the result's dtype; which
    GPUs have such products is a recipe's matter (docs/fp8.md).

    A block with an infinity or a NaN is NaN. Second derivatives raise, and so do ``torch.func`` transforms.

    Args:
        input: (..., in); bfloat16, float16 or float32.
        weight: (out, in), both multiples of 128, of 16 in rows, of 32 by "mxfp8"; its gradient has its dtype.
        bias: (out,).
        recipe: "fp8" for all three products; "fp8-wgrad-bf16" leaves the weight's gradient to a product in the result's
            dtype, and keeps the input as it is for that. "fp8-rowwise": so, too, with a scale for each row, and one for
            the weight's transpose (torchao's ``rowwise_with_gw_hp``). "mxfp8" and "mxfp8-wgrad-bf16": as the first two,
            in blocks of (1, 32) of both operands (the Open Compute Project's Microscaling Formats).
        dtype: the result's; input's by default.

    Returns:
        (..., out). Errors: see the module's conventions; ValueError for sizes that are no such multiples.
    """
    _check_tensor("input", input)
    _check_tensor("weight", weight)
    _check_optional("bias", bias)
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is not known; accepted: {', '.join(RECIPES)}")
    if not isinstance(dtype, (torch.dtype, type(None))):
        _refuse("dtype", dtype, "a torch.dtype or None")
    out: Tensor = torch.ops.fused.linear_fp8(input, weight, bias, dtype, recipe)
    return out


def grouped_linear_fp8(input: Tensor, weight: Tensor, ends: Tensor, *, recipe: str = "fp8-rowwise") -> Tensor:
    """``input[t] · weight[e]``, e the expert of row t, and its gradients, in float8: a mixture's experts.

    As ``linear_fp8`` without a bias, for rows that are sorted by expert, as ``torch.nn.functional.grouped_mm`` takes
    them: a scale for each row, for each column of an expert's weight, and one for each expert's transpose. The weight's
    gradient is a grouped product in bfloat16. (torchao's ``_to_fp8_rowwise_then_scaled_grouped_mm`` has that in float8,
    too, for which each expert's rows are padded to multiples of 16.) The host waits for nothing.

    Second derivatives raise, and so do ``torch.func`` transforms.

    Args:
        input: (t, in), bfloat16; what rows behind the last expert's give is undefined.
        weight: (experts, in, out), bfloat16, in and out multiples of 16; a parameter (experts, out, in) transposed is
            not copied.
        ends: (experts,), int32, on input's device: where each expert's rows end.
        recipe: of those of docs/fp8.md that experts have.

    Returns:
        (t, out), bfloat16. Errors: see the module's conventions; ValueError for sizes that are no such multiples.
    """
    for name, t in (("input", input), ("weight", weight), ("ends", ends)):
        _check_tensor(name, t)
    out: Tensor = torch.ops.fused.grouped_linear_fp8(input, weight, ends, recipe)
    return out
