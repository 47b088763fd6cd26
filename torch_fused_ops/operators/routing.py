"""Rows of a mixture's tokens: each token once for each of its experts, sorted by expert, and back.

A routing map (tokens, experts) marks each token's experts, any number of them. One cumulative sum over the map, expert
by expert, counts the row of each pair of a token and an expert; nothing is sorted:

    place = (pairs before it)                        as many rows as pairs, or the first so many of them
    place = expert · capacity + (its place there)    ``capacity`` rows for each expert; further pairs are dropped
    place = (padded sizes of the experts before it) + (its place there)

so sizes are known without waiting for the device. Rows without a token are zeros, and contribute to none.

``permute``, ``unpermute`` and ``sort_chunks_by_idxs`` have names and arguments of
``megatron.core.transformer.moe.moe_utils``; ``nn.permute`` takes ``topk``'s result instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def readable(t: Tensor) -> bool:
    """True if the values can be checked without waiting for a device."""
    from torch._subclasses.fake_tensor import FakeTensor

    real = t.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(t, FakeTensor)
    return real and not torch._C._functorch.is_functorch_wrapped_tensor(t)


# Compiled, these must not write in place, nor return the result of a ``to`` that changes nothing: with torch 2.11's
# Dynamo gradients are then zeros.


class _Gather(torch.autograd.Function):
    """rows[i] = tokens[token_of_row[i]], 0 for a token of -1; backward sums a token's rows."""

    @staticmethod
    def forward(tokens: Tensor, token_of_row: Tensor, order: Tensor | None, padded: bool) -> Tensor:
        if not padded:
            return tokens.index_select(0, token_of_row)
        nonempty = tokens if tokens.shape[0] else tokens.new_zeros(1, *tokens.shape[1:])
        rows = nonempty.index_select(0, token_of_row.clamp(min=0))
        of_none = token_of_row.lt(0).unsqueeze(-1)
        return rows.masked_fill(of_none, 0) if torch.compiler.is_compiling() else rows.masked_fill_(of_none, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        tokens, token_of_row, order, ctx.padded = inputs
        ctx.tokens = tokens.shape[0]
        ctx.save_for_backward(token_of_row, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Sum.apply(grad, *ctx.saved_tensors, ctx.tokens, ctx.padded), None, None, None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """tokens[t] = the sum of a token's rows, rounded once.

    With ``order``, (tokens, k), the rows are added in their order; else in float32, on a GPU as they come.
    """

    @staticmethod
    def forward(rows: Tensor, token_of_row: Tensor, order: Tensor | None, tokens: int, padded: bool) -> Tensor:
        if order is not None:
            of_tokens: Tensor = rows.index_select(0, order.flatten()).unflatten(0, order.shape)
            return of_tokens.sum(1)
        wide = torch.promote_types(rows.dtype, torch.float32)
        # The row behind the last token sums the rows without a token.
        sums = torch.zeros(tokens + padded, *rows.shape[1:], dtype=wide, device=rows.device)
        places = torch.where(token_of_row < 0, tokens, token_of_row) if padded else token_of_row
        add = sums.index_add if torch.compiler.is_compiling() else sums.index_add_
        sums = add(0, places, rows.to(wide))
        sums = sums[:tokens].clone() if padded else sums
        return sums if rows.dtype == wide else sums.to(rows.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, token_of_row, order, _, ctx.padded = inputs
        ctx.save_for_backward(token_of_row, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Gather.apply(grad, *ctx.saved_tensors, ctx.padded), None, None, None, None  # type: ignore[no-untyped-call]


def rows_of_tokens(tokens: Tensor, token_of_row: Tensor, order: Tensor | None = None, padded: bool = False) -> Tensor:
    """tokens[token_of_row], (rows, h).

    Args:
        tokens: (tokens, h).
        token_of_row: (rows,), or -1 for zeros, if ``padded``.
        order: (tokens, k), the rows of each token, if each has k.
    """
    rows: Tensor = _Gather.apply(tokens, token_of_row, order, padded)  # type: ignore[no-untyped-call]
    return rows


def tokens_of_rows(
    rows: Tensor, token_of_row: Tensor, tokens: int, order: Tensor | None = None, padded: bool = False
) -> Tensor:
    """The sum of each token's rows, (tokens, h); the arguments are ``rows_of_tokens``'."""
    summed: Tensor = _Sum.apply(rows, token_of_row, order, tokens, padded)  # type: ignore[no-untyped-call]
    return summed


# ---- Megatron's names ------------------------------------------------------------------------------------------------


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    tokens_per_expert: Tensor | None = None,
    align_size: int = 0,
    return_batch_invariant_inverse_map: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Each token once for each of its experts, sorted by expert, then by token.

    Args:
        tokens: (T, h).
        routing_map: (T, E), bool or integers: not 0 where a token goes to an expert.
        probs: (T, E), or None.
        num_out_tokens: the number of rows; further pairs are dropped. None: the number of pairs, for which the host
            waits. More than there are pairs is an error on a CPU; on a GPU, where checking would wait, further rows are
            undefined.
        fused: accepted, without effect.
        drop_and_pad: give each expert num_out_tokens // E rows: its first tokens, then zeros.
        tokens_per_expert: (E,), the map's sums; read with align_size only, and returned.
        align_size: pad each expert's rows with zeros to a multiple of this. The host waits for the number.
        return_batch_invariant_inverse_map: must be False.

    Returns:
        (rows, their probs or None, sorted_indices, pad_offsets or None, tokens_per_expert): sorted_indices (rows,) is
        each row's token, or -1 for rows without one, whose probability is 0. With align_size, pad_offsets (E,) is the
        number of zero rows before each expert's, and tokens_per_expert counts them, too.

    Raises:
        TypeError, ValueError: for dtypes, shapes and arguments that are not accepted.

    Source: ``megatron.core.transformer.moe.moe_utils.permute`` (its releases up to 0.16 return the first three). There
    an expert with fewer tokens than its capacity gets tokens that are not its own, and only TransformerEngine's kernel
    pads rows.
    """
    _check_map(tokens, "tokens", routing_map, probs)
    if return_batch_invariant_inverse_map:
        raise ValueError("return_batch_invariant_inverse_map=True is not accepted: this map is not supported")
    if num_out_tokens is not None and num_out_tokens < 0:
        raise ValueError(f"num_out_tokens={num_out_tokens} is not accepted: it must be 0 or more")
    count, experts = routing_map.shape
    align = align_size if tokens_per_expert is not None else 0
    offsets = None
    if drop_and_pad and num_out_tokens is not None:
        rows = num_out_tokens // experts * experts
        pair = _pairs(routing_map, rows, capacity=num_out_tokens // experts)
    elif align > 0:
        assert tokens_per_expert is not None
        sizes = tokens_per_expert.to(routing_map.device)
        if readable(sizes) and readable(routing_map) and not torch.equal(sizes, _mask(routing_map).sum(1)):
            raise ValueError(
                f"tokens_per_expert={sizes.tolist()} is not accepted: the routing map has "
                f"{_mask(routing_map).sum(1).tolist()}"
            )
        padding = -sizes % align
        tokens_per_expert = sizes + padding
        offsets = padding.cumsum(0) - padding
        rows = int(tokens_per_expert.sum())
        pair = _pairs(routing_map, rows, offsets=offsets)
    else:
        if num_out_tokens is None or readable(routing_map):
            pairs = int(_mask(routing_map).sum())
            if num_out_tokens is not None and num_out_tokens > pairs:
                raise ValueError(f"num_out_tokens={num_out_tokens} is not accepted: the routing map has {pairs} pairs")
            num_out_tokens = pairs if num_out_tokens is None else num_out_tokens
        rows = num_out_tokens
        pair = _pairs(routing_map, rows)
    padded = (drop_and_pad and num_out_tokens is not None) or offsets is not None
    token_of_row = torch.where(pair < 0, pair, pair % max(count, 1))
    row_probs = None if probs is None else _of_pairs(probs, pair)
    gathered = rows_of_tokens(tokens, token_of_row if padded else token_of_row.clamp(min=0), padded=padded)
    return gathered, row_probs, token_of_row, offsets, tokens_per_expert


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: Tensor | None = None,
    batch_invariant_inverse_map: Tensor | None = None,
) -> Tensor:
    """The sum of each token's rows, each with its probability if there are any: (rows, h) → (T, h), in the rows' dtype.

    Args:
        permuted_tokens: (rows, h), ``permute``'s result.
        sorted_indices, pad_offsets: ``permute``'s, too.
        restore_shape: (T, h).
        probs: (T, E), with ``permute``'s ``routing_map`` (T, E); or None for 1.
        drop_and_pad: as in ``permute``.
        fused: accepted, without effect.
        batch_invariant_inverse_map: must be None.

    Sums are float32's (float64's of float64), rounded once; on a GPU in any order.

    Raises:
        TypeError, ValueError: for dtypes, shapes and arguments that are not accepted.

    Source: ``megatron.core.transformer.moe.moe_utils.unpermute``, which rounds each sum to the wider of the rows' and
    the probabilities' dtypes.
    """
    rows, (count, hidden) = permuted_tokens, restore_shape
    if batch_invariant_inverse_map is not None:
        raise ValueError("batch_invariant_inverse_map is not accepted: this map is not supported")
    if rows.ndim != 2 or rows.shape[1] != hidden:
        raise ValueError(
            f"permuted_tokens of shape {tuple(rows.shape)} are not accepted: they must be (rows, {hidden})"
        )
    if sorted_indices.shape != rows.shape[:1]:
        raise ValueError(
            f"sorted_indices of shape {tuple(sorted_indices.shape)} are not accepted: they must be ({rows.shape[0]},)"
        )
    dtype = rows.dtype
    if probs is not None:
        if routing_map is None:
            raise ValueError("probs are not accepted without routing_map, which has each row's expert")
        _check_map(torch.empty(count, 0), "restore_shape", routing_map, probs)
        if drop_and_pad:
            capacity = rows.shape[0] // routing_map.shape[1]
            expert = torch.arange(rows.shape[0], device=rows.device) // max(capacity, 1)
            pair = torch.where(sorted_indices < 0, sorted_indices, expert * count + sorted_indices)
        else:
            pair = _pairs(routing_map, rows.shape[0], offsets=pad_offsets)
        of_rows = _of_pairs(probs, pair).unsqueeze(-1)
        wide = torch.promote_types(torch.promote_types(dtype, probs.dtype), torch.float32)
        rows = rows.to(wide) * of_rows
    # Any index may be -1: on a GPU the number of pairs was not checked.
    return tokens_of_rows(rows, sorted_indices, count, padded=True).to(dtype)


def sort_chunks_by_idxs(
    input: Tensor,
    split_sizes: Tensor,
    sorted_idxs: Tensor,
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Reorder the input's chunks, (N, …) → (N, …), and the probabilities (N,), without waiting for a GPU.

    Args:
        input: (N, …), rows of the first chunk, then of the second, and so on.
        split_sizes: (chunks,), integers with the sum N.
        sorted_idxs: (chunks,), the first chunk's number, the second's, …: each once.
        probs: (N,), or None.
        fused: accepted, without effect.

    Raises:
        ValueError: for shapes that are not accepted; on a CPU, for sizes whose sum is not N, and for indices that are
            not a permutation.

    Source: ``megatron.core.transformer.moe.moe_utils.sort_chunks_by_idxs``, which waits for both.
    """
    chunks = split_sizes.shape
    if split_sizes.ndim != 1 or sorted_idxs.shape != chunks:
        raise ValueError(
            f"split_sizes of shape {tuple(chunks)} and sorted_idxs of shape {tuple(sorted_idxs.shape)} are not "
            "accepted: they must be (chunks,)"
        )
    if probs is not None and probs.shape[:1] != input.shape[:1]:
        raise ValueError(f"probs of shape {tuple(probs.shape)} are not accepted: they must be ({input.shape[0]},)")
    if readable(split_sizes) and (int(split_sizes.sum()) != input.shape[0] or bool((split_sizes < 0).any())):
        raise ValueError(f"split_sizes={split_sizes.tolist()} are not accepted: their sum must be {input.shape[0]}")
    if readable(sorted_idxs) and sorted(sorted_idxs.tolist()) != list(range(chunks[0])):
        raise ValueError(f"sorted_idxs={sorted_idxs.tolist()} are not accepted: each of {chunks[0]} chunks comes once")
    sizes, order = (t.to(input.device, torch.int64, non_blocking=True) for t in (split_sizes, sorted_idxs))
    if not chunks[0]:
        return input.clone(), None if probs is None else probs.clone()
    starts, ends = sizes.cumsum(0) - sizes, sizes[order].cumsum(0)
    rows = torch.arange(input.shape[0], device=input.device)
    chunk = torch.searchsorted(ends, rows, right=True)
    source = rows + (starts[order] - (ends - sizes[order]))[chunk]
    return input.index_select(0, source), None if probs is None else probs.index_select(0, source)


def _check_map(tokens: Tensor, name: str, routing_map: Tensor, probs: Tensor | None) -> None:
    if routing_map.is_floating_point() or routing_map.is_complex():
        raise TypeError(f"routing_map of dtype {routing_map.dtype} is not accepted: it must be bool or integers")
    if tokens.ndim != 2:
        raise ValueError(f"{name} of shape {tuple(tokens.shape)} are not accepted: they must be (T, h)")
    if routing_map.ndim != 2 or routing_map.shape[0] != tokens.shape[0] or not routing_map.shape[1]:
        raise ValueError(
            f"routing_map of shape {tuple(routing_map.shape)} is not accepted: it must be ({tokens.shape[0]}, E)"
        )
    if probs is not None and probs.shape != routing_map.shape:
        raise ValueError(f"probs of shape {tuple(probs.shape)} are not accepted: they must be as routing_map")


def _mask(routing_map: Tensor) -> Tensor:
    """(E, T), bool"""
    return routing_map.bool().t()


def _pairs(routing_map: Tensor, rows: int, capacity: int | None = None, offsets: Tensor | None = None) -> Tensor:
    """(rows,): expert · T + token of each row, -1 for rows without a pair."""
    mask = _mask(routing_map).reshape(-1)
    experts, count = routing_map.shape[1], routing_map.shape[0]
    if capacity is None:
        place = mask.cumsum(0) - 1
        if offsets is not None:
            place = place + offsets.to(place.device).repeat_interleave(count, output_size=mask.shape[0])
        fits = mask
    else:
        within = mask.view(experts, count).cumsum(1) - 1
        place = (within + capacity * torch.arange(experts, device=mask.device).unsqueeze(-1)).reshape(-1)
        fits = mask & (within < capacity).reshape(-1)
    place = torch.where(fits & (place < rows), place, rows)
    pair = mask.new_full((rows + 1,), -1, dtype=torch.int64)
    return pair.scatter_(0, place, torch.arange(mask.shape[0], device=mask.device))[:rows]


def _of_pairs(probs: Tensor, pair: Tensor) -> Tensor:
    """(rows,): each row's probability, 0 for rows without a pair."""
    flat = probs.t().reshape(-1)
    if not flat.shape[0]:
        return flat.new_zeros(pair.shape)
    return flat.index_select(0, pair.clamp(min=0)).masked_fill(pair < 0, 0)
