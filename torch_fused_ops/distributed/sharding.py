"""DTensor sharding rules of the operators.

``register()`` puts ``rules()`` into DTensor's table; the first import of ``torch.distributed.tensor`` runs it (see
``torch_fused_ops/__init__.py``). A rule lists the shardings in which every rank's shard of the result is the operator
of its shards of the arguments; DTensor takes the one that moves least. Operators with results that may be None have no
rules: DTensor (2.11 to 2.15) wraps none of a tuple whose first element is not always a tensor. ``…_by_shards`` computes
those, the backward operators.

``fused::dropout_add``'s mask depends on an element's place in its argument, here the shard. So the operator on a
sharded tensor is not the operator on the whole one, and masks repeat unless the shards' seeds differ.
``functional.bias_dropout_add`` handles both, in ``dropout_add_by_shards``. Direct calls of the operator on DTensors
need a seed that differs by rank (``functional.shard_seed``), and gradients that are sharded as the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.declaration import Signature, elementwise
from torch_fused_ops.distributed import float8

__all__ = ["dropout_add_backward_by_shards", "dropout_add_by_shards", "register", "rules", "shard_seed"]

Placements = Sequence[Any]  # one per tensor argument or result, None for other arguments
Sharding = tuple[Placements, Placements]  # (results, arguments)


def _dropout_add(input: Any, bias: Any, residual: Any, seed: Any, p: float) -> list[Sharding]:
    from torch.distributed.tensor import Replicate, Shard

    whole, last = Replicate(), input.ndim - 1

    def sharding(here: Any, of_bias: Any) -> Sharding:
        arguments = [here, None if bias is None else of_bias, None if residual is None else here, whole, None]
        return [here], arguments

    axes = range(input.ndim)
    return [sharding(whole, whole), *(sharding(Shard(i), Shard(0) if i == last else whole) for i in axes)]


# ---- pointwise operators ---------------------------------------------------------------------------------------------


def _elementwise(signature: Signature) -> Callable[..., list[Sharding]]:
    """The rule of a declared operator or of its backward operator: any axis of the data.

    Packed data is sharded so that gate and up of a column stay together. A vector over the columns is replicated beside
    shards of another axis, a vector over the rows beside shards of the last; their gradients are sums over those
    shards.
    """
    kinds, results = [argument.kind for argument in signature.arguments], signature.results

    def rule(*args: Any) -> list[Sharding]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        last = args[0].ndim - 1
        columns = Shard if "packed" not in kinds else _packed(args[kinds.index("packed")], args)
        requested = args[-1] if signature.is_backward else [True] * len(results)

        def of(kind: str, axis: int | None, elsewhere: Any) -> Any:
            along = axis == last
            if axis is None:
                return Replicate()
            if kind in ("per_column", "per_row") and along != (kind == "per_column"):
                return elsewhere
            by_columns = along and columns and kind in ("packed", "per_column")
            return columns(0 if kind == "per_column" else axis) if by_columns and columns else Shard(axis)

        def sharding(axis: int | None) -> Sharding:
            outputs = [of(kind, axis, Partial()) if w else None for kind, w in zip(results, requested, strict=True)]
            inputs = [
                None if not kind or arg is None else of(kind, axis, Replicate())
                for kind, arg in zip(kinds, args, strict=False)
            ]
            return outputs, inputs

        return [sharding(None), *map(sharding, range(last if columns is None else last + 1))]

    return rule


def _packed(data: Any, args: Sequence[Any]) -> Callable[[int], Any] | None:
    """The placement by which each shard of packed columns holds gate and up of the same columns; None if there is none.

    "interleaved" columns are sharded in whole pairs. Halves, in either order, are each sharded if they arrive so (from
    a linear with such a weight, torch 2.13 on); otherwise they are gathered.
    """
    from torch.distributed.tensor import Shard

    last, mesh = data.ndim - 1, data.mesh
    if "interleaved" in args:
        return Shard if data.shape[last] % (2 * mesh.size()) == 0 else None
    for placement in data.placements if mesh.ndim == 1 else ():
        halves = getattr(placement, "split_factor", None) == 2 and placement.dim == last
        if halves and data.shape[last] % (2 * mesh.size()) == 0:
            from torch.distributed.tensor.placement_types import _StridedShard

            return lambda axis: _StridedShard(axis, split_factor=2)
    return None


# ---- softmax ---------------------------------------------------------------------------------------------------------


def _softmax_axes(data: Any, causal: bool, window_left: int, window_right: int) -> range:
    """The axes that may be sharded: never the last; queries only if the mask does not depend on their place."""
    by_place = causal or window_left >= 0 or window_right >= 0
    return range(data.ndim - (2 if by_place else 1))


def _scaled_masked_softmax(
    input: Any,
    mask: Any,
    sink: Any,
    scale: float = 1.0,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
) -> list[Sharding]:
    from torch.distributed.tensor import Replicate, Shard

    whole, heads = Replicate(), input.ndim - 3

    def sharding(axis: int | None) -> Sharding:
        here = whole if axis is None else Shard(axis)
        of_mask: Any = whole
        of_sink: Any = Shard(0) if axis == heads else whole
        if axis is not None and mask is not None:
            mask_axis = axis - (input.ndim - mask.ndim)  # the mask is broadcast from the right
            of_mask = Shard(mask_axis) if mask_axis >= 0 and mask.shape[mask_axis] != 1 else whole
        return [here], [here, None if mask is None else of_mask, None if sink is None else of_sink]

    return [sharding(None), *map(sharding, _softmax_axes(input, causal, window_left, window_right))]


def _scaled_masked_softmax_backward(
    grad: Any,
    output: Any,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    sink_dtype: Any,
    output_mask: Sequence[bool],
) -> list[Sharding]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    def sharding(axis: int | None) -> Sharding:
        here = Replicate() if axis is None else Shard(axis)
        of_sink = here if axis is None else Shard(0) if axis == output.ndim - 3 else Partial()
        results = [
            placement if requested else None for placement, requested in zip((here, of_sink), output_mask, strict=True)
        ]
        return results, [here, here]

    return [sharding(None), *map(sharding, _softmax_axes(output, causal, window_left, window_right))]


@functools.cache
def rules() -> dict[str, Callable[..., list[Sharding]]]:
    """The rule of each operator, by name."""
    return {
        **{s.name: _elementwise(s) for op in elementwise() for s in op.signatures},
        "scaled_masked_softmax": _scaled_masked_softmax,
        "scaled_masked_softmax_backward": _scaled_masked_softmax_backward,
        "dropout_add": _dropout_add,
        **float8.RULES,
    }


_registered = False


def register() -> None:
    """Put the rules into DTensor's table. Idempotent."""
    global _registered
    if _registered:
        return
    _registered = True
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    dispatcher = DTensor._op_dispatcher
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    known = dispatcher.sharding_propagator.op_to_schema_info
    for name, rule in rules().items():
        op = getattr(torch.ops.fused, name).default
        if name.endswith("_backward"):  # results that may be None: see above
            handlers[op] = _by_shards
            continue
        register_sharding(op)(rule)
        # DTensor caches a call's sharding by the arguments that register_sharding counts: tensors, and integers and all
        # behind them. Rules read layout, causal, …, too.
        known[op].static_argnum = sum("Tensor" in str(argument.type) for argument in op._schema.arguments)


def _by_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A backward operator on DTensors; its second argument, which forward saved, keeps its placements.

    DTensor dispatches below autograd, where DTensor.redistribute cannot run.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    data = args[1]
    mesh = data.device_mesh
    shardings = rules()[op._schema.name.removeprefix("fused::")](*(getattr(a, "_spec", a) for a in args))
    chosen = [next((s for s in shardings if s[1][1] == here), shardings[0]) for here in data.placements]

    def local(i: int, a: Any) -> Any:
        if not isinstance(a, DTensor):
            return a
        there = DTensorSpec(mesh, tuple(inputs[i] for _, inputs in chosen), tensor_meta=a._spec.tensor_meta)
        t = a._local_tensor
        return t if there.placements == a.placements else redistribute_local_tensor(t, a._spec, there)

    def result(i: int, shard: Tensor | None, whole: Tensor | None) -> Any:
        if shard is None or whole is None:
            return None
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = DTensorSpec(mesh, tuple(outputs[i] for outputs, _ in chosen), tensor_meta=meta)
        return DTensor(shard, spec, requires_grad=False)

    results = zip(op(*(local(i, a) for i, a in enumerate(args))), op(*map(_meta, args)), strict=True)
    return tuple(result(i, shard, whole) for i, (shard, whole) in enumerate(results))


def _meta(a: Any) -> Any:
    """A DTensor's shape, as a tensor without data."""
    return torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a


# ---- dropout, shard by shard -----------------------------------------------------------------------------------------


# SplitMix64's constants, as int64: 0x9E3779B97F4A7C15; 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB with their shifts.
_SPLITMIX_STEP = 0x9E3779B97F4A7C15 - 2**64
_SPLITMIX = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)


def shard_seed(seed: Tensor, *coordinates: int | Tensor) -> Tensor:
    """Derive a shard's seed: ``seed`` with the shard's coordinates mixed in, in tensor arithmetic.

    Each coordinate is a step of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), a bijection whose
    every output bit depends on every input bit. With the same seed, different coordinates give different seeds.

    Args:
        seed: int64.
        *coordinates: the shard's place along each mesh dimension (or group of ranks) that shards the tensor. Without
            any, the result is seed.

    Returns:
        int64, shaped as seed.

    Raises:
        TypeError: seed is not a tensor.
    """
    if isinstance(seed, type) or not hasattr(seed, "__torch_function__"):
        raise TypeError(f"seed={seed!r} is not accepted: it must be a tensor, not {type(seed).__name__}")
    unit = torch.ones_like(seed)  # int64 tensors wrap around
    for coordinate in coordinates:
        z = seed + (unit * coordinate + unit) * _SPLITMIX_STEP
        for shift, factor in _SPLITMIX:
            z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor
        seed = z ^ (z >> 31 & (1 << 33) - 1)
    return seed


def _placements(t: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Placements for t, for a bias over its last axis, and for that bias's gradient (partial sums over other axes).

    t's partial sums are added first, as dropout must see each element once.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    places = tuple(Replicate() if place.is_partial() else place for place in t.placements)
    columns = [place.is_shard(t.ndim - 1) or place.is_shard(-1) for place in places]
    bias = tuple(Shard(0) if column else Replicate() for column in columns)
    bias_grad = tuple(
        Partial() if place.is_shard() and not column else here
        for place, column, here in zip(places, columns, bias, strict=True)
    )
    return places, bias, bias_grad


def dropout_add_by_shards(x: Any, bias: Any, residual: Any, seed: Tensor, p: float) -> Tensor:
    """``fused::dropout_add`` of every rank's shard of a DTensor x, with a seed per shard.

    Bias, residual and gradients are redistributed to x's placements, so that backward's masks are forward's.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh, (places, bias_places, bias_grad) = x.device_mesh, _placements(x)

    def local(t: Any, here: Sequence[Any], grads: Sequence[Any]) -> Tensor | None:
        if t is None:
            return None
        if not isinstance(t, DTensor):  # the same on all ranks
            t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
        result: Tensor = t.redistribute(mesh, here).to_local(grad_placements=grads)
        return result

    coordinate = mesh.get_coordinate() or [0] * mesh.ndim  # None if this rank is not in the mesh
    seed = shard_seed(seed, *(at for at, place in zip(coordinate, places, strict=True) if place.is_shard()))
    out = torch.ops.fused.dropout_add(
        local(x, places, places), local(bias, bias_places, bias_grad), local(residual, places, places), seed, p
    )
    return DTensor.from_local(out, mesh, places, run_check=False, shape=x.shape, stride=_contiguous(x.shape))


def dropout_add_backward_by_shards(
    grad: Any, seed: Any, p: float, dtype: torch.dtype, bias_dtype: torch.dtype | None, output_mask: Sequence[bool]
) -> tuple[Any, Any]:
    """``fused::dropout_add_backward`` of every rank's shard of a DTensor."""
    from torch.distributed.tensor import DTensor

    mesh, (places, _, bias_grad) = grad.device_mesh, _placements(grad)
    local = grad.redistribute(mesh, places).to_local()
    results = torch.ops.fused.dropout_add_backward(local, seed.to_local(), p, dtype, bias_dtype, output_mask)
    shapes = grad.shape, grad.shape[-1:]
    return tuple(  # type: ignore[return-value]
        None
        if d is None
        else DTensor.from_local(d, mesh, here, run_check=False, shape=shape, stride=_contiguous(shape))
        for d, here, shape in zip(results, (places, bias_grad), shapes, strict=True)
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
