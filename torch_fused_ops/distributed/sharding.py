"""DTensor: how the operators are computed on shards.

``register()`` puts ``rules()`` into DTensor's table; it runs by itself when ``torch.distributed.tensor`` is
first imported (see ``torch_fused_ops/__init__.py``). A rule lists the ways of sharding in which every rank's own part
of the result is the operator of its own parts of the arguments; DTensor takes the one that moves least. Results that
may be None have no rules: DTensor (2.11 to 2.15) wraps none of a tuple whose first element is not always a tensor. So
backward, which has such results, is done by hand, ``…_by_shards``.

``fused::dropout_add``'s mask depends on an element's place in the tensor that it is given: on shards, on its place in
the shard. So the operator on a sharded tensor is not the operator on the whole one, and the seeds of different shards
must differ, or masks repeat. ``functional.bias_dropout_add`` sees to both, in ``dropout_add_by_shards``; who calls the
operator on DTensors himself gives it a seed that differs by rank (``functional.shard_seed``), and gradients that are
sharded as the result is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.declaration import PointwiseOperator, Signature, elementwise
from torch_fused_ops.distributed import float8

__all__ = ["dropout_add_backward_by_shards", "dropout_add_by_shards", "register", "rules", "shard_seed"]

Placements = Sequence[Any]  # one for each tensor argument or result, None for what is none


def _dropout_add(input: Any, bias: Any, residual: Any, seed: Any, p: float) -> list[tuple[Placements, Placements]]:
    from torch.distributed.tensor import Replicate, Shard

    def given(t: Any, placement: Any) -> Any:
        return None if t is None else placement

    whole = Replicate()
    ways: list[tuple[Placements, Placements]] = [
        ([whole], [whole, given(bias, whole), given(residual, whole), whole, None])
    ]
    last = input.ndim - 1
    for axis in range(input.ndim):
        here = Shard(axis)
        of_bias = given(bias, Shard(0) if axis == last else whole)
        ways.append(([here], [here, of_bias, given(residual, here), whole, None]))
    return ways


# ---- operators that are computed row by row --------------------------------------------------------------------------


def _elementwise(op: PointwiseOperator, signature: Signature) -> Callable[..., list[tuple[Placements, Placements]]]:
    """The rule of one of a declared operator's four: any axis of the data, but not the last where rows are whole.

    By the tensors' kinds: packed data is sharded so that gate and up of a column stay together; what is one number a
    column is whole beside shards of another axis, and what is one number a row beside shards of the last; as gradients
    they are sums over those shards.
    """
    kinds, results = [argument.kind for argument in signature.arguments], signature.results
    stores = signature in (op.fp8, op.fp8_backward)

    def rule(*args: Any) -> list[tuple[Placements, Placements]]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        last = args[0].ndim - 1
        columns = Shard if "packed" not in kinds else _packed(args[kinds.index("packed")], args)
        wanted = args[-1] if signature.is_backward else [True] * len(results)

        def of(kind: str, axis: int | None, elsewhere: Any) -> Any:
            along = axis == last
            if axis is None:
                return Replicate()
            if kind in ("per_column", "per_row") and along != (kind == "per_column"):
                return elsewhere
            by_columns = along and columns and kind in ("packed", "per_column")
            return columns(0 if kind == "per_column" else axis) if by_columns and columns else Shard(axis)

        def way(axis: int | None) -> tuple[Placements, Placements]:
            found = [of(kind, axis, Partial()) if w else None for kind, w in zip(results, wanted, strict=True)]
            given = [
                None if not kind or arg is None else of(kind, axis, Replicate())
                for kind, arg in zip(kinds, args, strict=False)
            ]
            return found, given

        of_rows = stores or columns is None
        return [way(None), *(way(axis) for axis in range(last if of_rows else last + 1))]

    return rule


def _packed(data: Any, args: Sequence[Any]) -> Callable[[int], Any] | None:
    """How packed columns are sharded so that each shard holds gate and up of the same columns; None if they are not.

    "interleaved": in whole pairs. Halves, in either order: half by half, if that is how they come (a linear whose
    packed weight is sharded so gives it, from torch 2.13 on); otherwise they are brought together.
    """
    from torch.distributed.tensor import Shard

    last, mesh = data.ndim - 1, data.mesh
    if "interleaved" in args:
        return Shard if data.shape[last] % (2 * mesh.size()) == 0 else None
    for one in data.placements if mesh.ndim == 1 else ():
        if getattr(one, "split_factor", None) == 2 and one.dim == last and data.shape[last] % (2 * mesh.size()) == 0:
            from torch.distributed.tensor.placement_types import _StridedShard

            return lambda axis: _StridedShard(axis, split_factor=2)
    return None


# ---- softmax ---------------------------------------------------------------------------------------------------------


def _softmax_axes(data: Any, causal: bool, window_left: int, window_right: int) -> range:
    """The axes that may be sharded: never the last; queries only where their place in the sequence means nothing."""
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
) -> list[tuple[Placements, Placements]]:
    from torch.distributed.tensor import Replicate, Shard

    whole, heads = Replicate(), input.ndim - 3

    def way(axis: int | None) -> tuple[Placements, Placements]:
        here = whole if axis is None else Shard(axis)
        of_mask: Any = whole
        of_sink: Any = whole
        if axis is not None and mask is not None:
            own = axis - (input.ndim - mask.ndim)  # the mask is broadcast from the right
            of_mask = Shard(own) if own >= 0 and mask.shape[own] != 1 else whole
        if axis == heads:
            of_sink = Shard(0)
        return [here], [here, None if mask is None else of_mask, None if sink is None else of_sink]

    return [way(None), *map(way, _softmax_axes(input, causal, window_left, window_right))]


def _scaled_masked_softmax_backward(
    grad: Any,
    output: Any,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    sink_dtype: Any,
    output_mask: Sequence[bool],
) -> list[tuple[Placements, Placements]]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    def way(axis: int | None) -> tuple[Placements, Placements]:
        here = Replicate() if axis is None else Shard(axis)
        of_sink = here if axis is None else Shard(0) if axis == output.ndim - 3 else Partial()
        results = [d if wanted else None for d, wanted in zip((here, of_sink), output_mask, strict=True)]
        return results, [here, here]

    return [way(None), *map(way, _softmax_axes(output, causal, window_left, window_right))]


@functools.cache
def rules() -> dict[str, Callable[..., list[tuple[Placements, Placements]]]]:
    """The rule of each operator, by name."""
    return {
        **{s.name: _elementwise(op, s) for op in elementwise() for s in op.signatures},
        "scaled_masked_softmax": _scaled_masked_softmax,
        "scaled_masked_softmax_backward": _scaled_masked_softmax_backward,
        "dropout_add": _dropout_add,
        **float8.RULES,
    }


_registered = False


def register() -> None:
    """Put our rules into DTensor's table. Idempotent."""
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
        # DTensor remembers what it did of a call, by the arguments that register_sharding takes to matter: tensors, and
        # integers and what follows them. Rules read layout, causal, …, too.
        known[op].static_argnum = sum("Tensor" in str(argument.type) for argument in op._schema.arguments)


def _by_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A backward operator on DTensors: what is kept of forward, its second argument, stays where it is.

    Runs below autograd, as all that DTensor dispatches: so no DTensor.redistribute, which is above it.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    data = args[1]
    mesh = data.device_mesh
    ways = rules()[op._schema.name.removeprefix("fused::")](*(getattr(a, "_spec", a) for a in args))
    chosen = [next((way for way in ways if way[1][1] == here), ways[0]) for here in data.placements]

    def local(i: int, a: Any) -> Any:
        if not isinstance(a, DTensor):
            return a
        there = DTensorSpec(mesh, tuple(way[1][i] for way in chosen), tensor_meta=a._spec.tensor_meta)
        own = a._local_tensor
        return own if there.placements == a.placements else redistribute_local_tensor(own, a._spec, there)

    def result(i: int, own: Tensor | None, whole: Tensor | None) -> Any:
        if own is None or whole is None:
            return None
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = DTensorSpec(mesh, tuple(way[0][i] for way in chosen), tensor_meta=meta)
        return DTensor(own, spec, requires_grad=False)

    found = zip(op(*(local(i, a) for i, a in enumerate(args))), op(*map(_meta, args)), strict=True)
    return tuple(result(i, own, whole) for i, (own, whole) in enumerate(found))


def _meta(a: Any) -> Any:
    """A DTensor's shape, as a tensor without data."""
    return torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a


# ---- dropout, shard by shard -----------------------------------------------------------------------------------------


# SplitMix64's constants, as int64: 0x9E3779B97F4A7C15; 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB with their shifts.
_SPLITMIX_STEP = 0x9E3779B97F4A7C15 - 2**64
_SPLITMIX = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)


def shard_seed(seed: Tensor, *coordinates: int | Tensor) -> Tensor:
    """A seed of its own for each shard: ``seed`` with the shard's coordinates mixed in, in tensor arithmetic.

    For each coordinate a step of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), a bijection whose
    every output bit depends on every bit that goes in. With the same seed, different coordinates give different seeds.

    Args:
        seed: int64.
        *coordinates: the shard's place along each mesh dimension (or group of ranks) that shards the tensor. None at
            all: seed as it is.

    Returns:
        int64, shaped as seed.

    Raises:
        TypeError: seed is no tensor.
    """
    if isinstance(seed, type) or not hasattr(seed, "__torch_function__"):
        raise TypeError(f"seed={seed!r} is not accepted: it must be a tensor, not {type(seed).__name__}")
    one = torch.ones_like(seed)  # so that all wraps as int64
    for coordinate in coordinates:
        z = seed + (one * coordinate + one) * _SPLITMIX_STEP
        for shift, factor in _SPLITMIX:
            z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor
        seed = z ^ (z >> 31 & (1 << 33) - 1)
    return seed


def _placements(t: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Where t is worked on, a bias over its last axis with it, and that bias's gradient: partial sums over other axes.

    What is random must be about one element in one place: t's partial sums are added up first.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    places = tuple(Replicate() if one.is_partial() else one for one in t.placements)
    columns = [one.is_shard(t.ndim - 1) or one.is_shard(-1) for one in places]
    bias = tuple(Shard(0) if column else Replicate() for column in columns)
    bias_grad = tuple(
        Partial() if one.is_shard() and not column else here
        for one, column, here in zip(places, columns, bias, strict=True)
    )
    return places, bias, bias_grad


def dropout_add_by_shards(x: Any, bias: Any, residual: Any, seed: Tensor, p: float) -> Tensor:
    """``fused::dropout_add`` of every rank's own shard of a DTensor x, with a seed for each shard.

    Bias and residual are brought to where x is. Gradients come to x's placements, too, wherever they were, so that
    backward's masks are forward's.
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

    coordinate = mesh.get_coordinate() or [0] * mesh.ndim  # None where this rank has no part
    own = shard_seed(seed, *(at for at, one in zip(coordinate, places, strict=True) if one.is_shard()))
    out = torch.ops.fused.dropout_add(
        local(x, places, places), local(bias, bias_places, bias_grad), local(residual, places, places), own, p
    )
    return DTensor.from_local(out, mesh, places, run_check=False, shape=x.shape, stride=_contiguous(x.shape))


def dropout_add_backward_by_shards(
    grad: Any, seed: Any, p: float, dtype: torch.dtype, bias_dtype: torch.dtype | None, output_mask: Sequence[bool]
) -> tuple[Any, Any]:
    """``fused::dropout_add_backward`` of every rank's own shard of a DTensor."""
    from torch.distributed.tensor import DTensor

    mesh, (places, _, bias_grad) = grad.device_mesh, _placements(grad)
    own = grad.redistribute(mesh, places).to_local()
    found = torch.ops.fused.dropout_add_backward(own, seed.to_local(), p, dtype, bias_dtype, output_mask)
    shapes = grad.shape, grad.shape[-1:]
    return tuple(  # type: ignore[return-value]
        None
        if d is None
        else DTensor.from_local(d, mesh, here, run_check=False, shape=shape, stride=_contiguous(shape))
        for d, here, shape in zip(found, (places, bias_grad), shapes, strict=True)
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
