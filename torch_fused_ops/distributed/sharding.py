"""DTensor sharding rules of the operators.

``register()`` adds the operators' ``rules()`` to DTensor's table. It runs after the first import of
``torch.distributed.tensor`` (see ``torch_fused_ops/__init__.py``). A rule lists the shardings with which each rank can
apply the operator to its own shards; DTensor picks the sharding that moves the fewest bytes. Backward operators are not
in DTensor's table, because their results may be None: DTensor (2.11 to 2.15) wraps none of them if the first one may
be None. ``_by_shards`` runs them instead, with their rules. A family adds its own rules to ``RULES``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.declaration import OPERATORS, Signature

Placements = Sequence[Any]  # one per tensor argument or result, None for other arguments
Sharding = tuple[Placements, Placements]  # (results, arguments)

RULES: dict[str, Callable[..., list[Sharding]]] = {}  # rules that families add, by operator name


# ---- pointwise operators ---------------------------------------------------------------------------------------------


def _elementwise(signature: Signature) -> Callable[..., list[Sharding]]:
    """Return the rule of a pointwise operator or its backward operator: data may be sharded along any axis.

    Packed data is sharded so that gate and up of a column stay together (``_packed``). A vector over the columns is
    replicated if the data is sharded along another axis. A vector over the rows is replicated if the data is sharded
    along the last axis. The gradient of a replicated vector is a sum over the shards. A seed is always replicated.
    """
    kinds, results = [argument.kind for argument in signature.arguments], signature.results

    def rule(*args: Any) -> list[Sharding]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        last = args[0].ndim - 1
        columns = Shard if "packed" not in kinds else _packed(args[kinds.index("packed")], args)
        requested = args[-1] if signature.is_backward else [True] * len(results)

        def placement(kind: str, axis: int | None, elsewhere: Any) -> Any:
            along = axis == last
            if axis is None or kind == "seed":
                return Replicate()
            if kind in ("per_column", "per_row") and along != (kind == "per_column"):
                return elsewhere
            if along and columns and kind in ("packed", "per_column"):
                return columns(0 if kind == "per_column" else axis)
            return Shard(axis)

        def sharding(axis: int | None) -> Sharding:
            outputs = [
                placement(kind, axis, Partial()) if is_requested else None
                for kind, is_requested in zip(results, requested, strict=True)
            ]
            inputs = [
                None if not kind or arg is None else placement(kind, axis, Replicate())
                for kind, arg in zip(kinds, args, strict=False)
            ]
            return outputs, inputs

        return [sharding(None), *map(sharding, range(last if columns is None else last + 1))]

    return rule


def _packed(data: Any, args: Sequence[Any]) -> Callable[[int], Any] | None:
    """Return a placement whose shards hold gate and up of the same columns, or None if the columns must be gathered.

    "interleaved" columns are sharded in whole pairs. If the layout has halves, in either order, each half is sharded
    only if the data already is, as the result of a linear whose weight is (torch 2.13 and later).
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


@functools.cache
def rules() -> dict[str, Callable[..., list[Sharding]]]:
    """Return the operators' rules by name. Operators without a rule are missing."""
    declared = {s.name: _elementwise(s) for op in OPERATORS.values() if op.pointwise for s in op.signatures}
    return {**declared, **RULES}


@functools.cache
def register() -> None:
    """Add the rules to DTensor's table. Idempotent."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    dispatcher = DTensor._op_dispatcher
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    known = dispatcher.sharding_propagator.op_to_schema_info
    for name, rule in rules().items():
        op = getattr(torch.ops.fused, name).default
        if name.endswith("_backward"):  # results may be None: see the module's docstring
            handlers[op] = _by_shards
            continue
        register_sharding(op)(rule)
        # DTensor caches shardings. By default register_sharding's cache key has the tensors and the arguments from the
        # first integer on. Rules also read other scalars, such as layout and causal, so add all scalars to the key.
        known[op].static_argnum = sum("Tensor" in str(argument.type) for argument in op._schema.arguments)


def _by_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Run a backward operator on DTensors, sharded like the saved data (for dropout, like the gradient).

    DTensor dispatches below autograd, where DTensor.redistribute cannot run.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    data_index = int(args[1].is_floating_point())  # dropout: args[1] is the seed, and args[0] decides
    data = args[data_index]
    mesh = data.device_mesh
    shardings = rules()[op._schema.name.removeprefix("fused::")](*(getattr(a, "_spec", a) for a in args))
    chosen = [next((s for s in shardings if s[1][data_index] == p), shardings[0]) for p in data.placements]

    def local(i: int, a: Any) -> Any:
        if not isinstance(a, DTensor):
            return a
        target = DTensorSpec(mesh, tuple(inputs[i] for _, inputs in chosen), tensor_meta=a._spec.tensor_meta)
        t = a._local_tensor
        return t if target.placements == a.placements else redistribute_local_tensor(t, a._spec, target)

    def result(i: int, shard: Tensor | None, on_meta: Tensor | None) -> Any:
        if shard is None or on_meta is None:
            return None
        meta = TensorMeta(on_meta.shape, on_meta.stride(), on_meta.dtype)
        spec = DTensorSpec(mesh, tuple(outputs[i] for outputs, _ in chosen), tensor_meta=meta)
        return DTensor(shard, spec, requires_grad=False)

    meta_args = [torch.empty(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a for a in args]
    local_args = [local(i, a) for i, a in enumerate(args)]
    results = zip(op(*local_args), op(*meta_args), strict=True)
    return tuple(result(i, shard, on_meta) for i, (shard, on_meta) in enumerate(results))
