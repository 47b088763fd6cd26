"""Routing maps: rows of tokens and back, against loops over lists, in float64, gradients included."""

import pytest
import torch
from harness import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_fused_ops.megatron import permute, sort_chunks_by_idxs, unpermute

HIDDEN = 3


def plan(routing: list[list[int]], experts: int, limit: int | None, capacity: int | None, align: int):
    """[(token, expert) or None for a row of zeros, …], by loops."""
    rows: list[tuple[int, int] | None] = []
    for expert in range(experts):
        own = [(token, expert) for token, row in enumerate(routing) if row[expert]]
        if capacity is not None:
            own = [*own, *[None] * capacity][:capacity]
        if align:
            own += [None] * (-len(own) % align)
        rows += own
    return rows if limit is None else rows[:limit]


@st.composite
def routings(draw):
    tokens, experts = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    cell = draw(st.sampled_from([st.integers(0, 1), st.just(0), st.just(1)]))  # none and all, too
    routing = [[draw(cell) for _ in range(experts)] for _ in range(tokens)]
    pairs = sum(map(sum, routing))
    mode = draw(st.sampled_from(["all", "some", "capacity", "align"]))
    limit = draw(st.integers(0, pairs)) if mode == "some" else None
    capacity = draw(st.integers(0, 4)) if mode == "capacity" else None
    align = draw(st.integers(1, 4)) if mode == "align" else 0
    return routing, experts, limit, capacity, align


@settings(max_examples=60, deadline=None)
@given(routings(), st.booleans(), st.integers(0, 2**31))
def test_rows_and_back_are_what_loops_give(case, merged: bool, seed: int) -> None:
    routing, experts, limit, capacity, align = case
    generator = torch.Generator().manual_seed(seed)
    count = len(routing)
    routing_map = torch.tensor(routing, dtype=torch.int64).reshape(count, experts)
    routing_map = routing_map.bool() if seed % 2 else routing_map
    x = torch.randn(count, HIDDEN, dtype=torch.float64, generator=generator, requires_grad=True)
    probs = torch.rand(count, experts, dtype=torch.float64, generator=generator, requires_grad=True)
    rows = plan(routing, experts, limit, capacity, align)
    counts = routing_map.sum(0)

    given = {"num_out_tokens": limit if capacity is None else capacity * experts, "drop_and_pad": capacity is not None}
    if align:
        given |= {"tokens_per_expert": counts, "align_size": align}
    found, row_probs, indices, offsets, padded = permute(x, routing_map, probs, **given)

    zero = (x.sum() + probs.sum()) * 0
    wanted = [x[row[0]] if row else torch.zeros(HIDDEN, dtype=torch.float64) for row in rows]
    wanted_probs = [probs[row] if row else zero for row in rows]
    assert torch.equal(found, torch.stack(wanted) if rows else x.new_zeros(0, HIDDEN))
    assert torch.equal(row_probs, torch.stack(wanted_probs) if rows else probs.new_zeros(0))
    assert indices.tolist() == [row[0] if row else -1 for row in rows]
    if align:
        sizes = [n + -n % align for n in counts.tolist()]
        assert padded.tolist() == sizes
        assert offsets.tolist() == [sum(sizes[:e]) - sum(counts.tolist()[:e]) for e in range(experts)]
    else:
        assert offsets is None and padded is None

    # What experts make of them, and back: by probabilities of the rows, or merged with those of the tokens.
    made = found.square()
    arguments = {"drop_and_pad": capacity is not None, "pad_offsets": offsets}
    if merged:
        y = unpermute(made, indices, x.shape, probs=probs, routing_map=routing_map, **arguments)
    else:
        y = unpermute(made * row_probs[:, None], indices, x.shape, **arguments)
    sums = [torch.zeros(HIDDEN, dtype=torch.float64) + zero for _ in range(count)]
    for row in rows:
        if row is not None:
            sums[row[0]] = sums[row[0]] + x[row[0]].square() * probs[row]
    truth = torch.stack(sums) if count else x * 1.0
    torch.testing.assert_close(y, truth)
    weights = torch.randn(truth.shape, dtype=torch.float64, generator=generator)
    got = torch.autograd.grad((y * weights).sum(), [x, probs], allow_unused=True, materialize_grads=True)
    want = torch.autograd.grad((truth * weights).sum(), [x, probs], allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(got, want)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=6).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(len(n))))))
def test_chunks_are_sorted(case) -> None:
    sizes, order = case
    given = torch.tensor(sizes, dtype=torch.int64), torch.tensor(order, dtype=torch.int64)
    x = torch.randn(sum(sizes), HIDDEN, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(sum(sizes), dtype=torch.float64, requires_grad=True)
    y, row_probs = sort_chunks_by_idxs(x, *given, probs)
    chunks, of_probs = x.split(sizes), probs.split(sizes)
    truth = torch.cat([chunks[i] for i in order]) if order else x * 1
    assert torch.equal(y, truth)
    assert torch.equal(row_probs, torch.cat([of_probs[i] for i in order]) if order else probs * 1)
    weights = torch.randn_like(y)
    dx, dp = torch.autograd.grad((y * weights).sum() + row_probs.square().sum(), [x, probs])
    assert torch.equal(dp, 2 * probs)
    assert torch.equal(dx, torch.autograd.grad((truth * weights).sum(), x)[0])
    assert sort_chunks_by_idxs(x, *given)[1] is None


def test_second_derivatives() -> None:
    routing_map = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)

    def both(x, probs, padded):
        given = {"num_out_tokens": 9, "drop_and_pad": True} if padded else {}
        rows, row_probs, indices, *_ = permute(x, routing_map, probs, **given)
        return unpermute(rows.square() * row_probs[:, None], indices, x.shape)

    for padded in (False, True):
        assert torch.autograd.gradcheck(lambda x, p, padded=padded: both(x, p, padded), (x, probs))
        assert torch.autograd.gradgradcheck(lambda x, p, padded=padded: both(x, p, padded), (x, probs))


def test_sums_are_rounded_once() -> None:
    """bfloat16's own sum of 256 ones and more ends at 256; both ways sum in float32."""
    experts = 300
    routing_map = torch.ones(1, experts, dtype=torch.bool)
    x = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    rows, _, indices, *_ = permute(x, routing_map, num_out_tokens=experts)
    y = unpermute(rows, indices, x.shape)
    assert y.dtype == torch.bfloat16 and y.tolist() == [[300.0, 300.0]]
    probs = torch.full((1, experts), 0.5)
    merged = unpermute(rows, indices, x.shape, probs=probs, routing_map=routing_map)
    assert merged.dtype == torch.bfloat16 and merged.tolist() == [[150.0, 150.0]]
    (dx,) = torch.autograd.grad(rows.sum(), x)
    assert dx.tolist() == [[300.0, 300.0]]


def test_zero_rows_bring_no_infinity_to_weights() -> None:
    """A row of padding is zeros, and not some token's: 0 · inf would be NaN in the experts' weight gradients."""
    x = torch.tensor([[float("inf"), 1.0], [2.0, 3.0]])
    rows, row_probs, *_ = permute(
        x, torch.tensor([[0, 0], [1, 0]]), torch.ones(2, 2), num_out_tokens=4, drop_and_pad=True
    )
    assert rows.tolist() == [[2.0, 3.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]] and row_probs.tolist() == [1, 0, 0, 0]


@pytest.mark.covering(every=2)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("padded", [False, True])
def test_one_graph(padded: bool) -> None:
    routing_map = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]).bool()
    x, probs = torch.randn(4, 8, requires_grad=True), torch.rand(4, 3, requires_grad=True)

    def both(x, probs, routing_map):
        rows, row_probs, indices, *_ = permute(x, routing_map, probs, num_out_tokens=6, drop_and_pad=padded)
        sizes = torch.tensor([2, 3, 1])
        rows, row_probs = sort_chunks_by_idxs(rows * 2, sizes, torch.tensor([2, 0, 1]), row_probs)
        rows, row_probs = sort_chunks_by_idxs(rows, sizes[[2, 0, 1]], torch.tensor([1, 2, 0]), row_probs)
        return unpermute(rows * row_probs[:, None], indices, x.shape, drop_and_pad=padded)

    wanted, found = both(x, probs, routing_map), torch.compile(both, fullgraph=True)(x, probs, routing_map)
    torch.testing.assert_close(found, wanted)
    d = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y, [x, probs], d) for y in (found, wanted)))


X, MAP, PROBS = torch.zeros(4, 3), torch.ones(4, 2, dtype=torch.bool), torch.ones(4, 2)
ROWS, INDICES = torch.zeros(8, 3), torch.arange(8) % 4


def two(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: permute(X, MAP.float()), TypeError, "routing_map of dtype torch.float32 is not accepted"),
        (lambda: permute(X[None], MAP), ValueError, r"tokens of shape \(1, 4, 3\) are not accepted"),
        (lambda: permute(X, MAP[:3]), ValueError, r"routing_map of shape \(3, 2\) .* \(4, E\)"),
        (lambda: permute(X, MAP, PROBS[:, :1]), ValueError, r"probs of shape \(4, 1\)"),
        (lambda: permute(X, MAP, num_out_tokens=9), ValueError, "num_out_tokens=9 is not accepted: .* 8 pairs"),
        (lambda: permute(X, MAP, num_out_tokens=-1), ValueError, "num_out_tokens=-1"),
        (lambda: permute(X, MAP, return_batch_invariant_inverse_map=True), ValueError, "return_batch_invariant"),
        (lambda: permute(X, MAP, tokens_per_expert=two(4, 3), align_size=4), ValueError, r"tokens_per_expert=\[4"),
        (lambda: unpermute(ROWS, INDICES, torch.Size([4, 2])), ValueError, r"permuted_tokens of shape \(8, 3\)"),
        (lambda: unpermute(ROWS, INDICES[:7], X.shape), ValueError, r"sorted_indices of shape \(7,\)"),
        (lambda: unpermute(ROWS, INDICES, X.shape, PROBS), ValueError, "probs are not accepted without routing_map"),
        (lambda: unpermute(ROWS, INDICES, X.shape, batch_invariant_inverse_map=X), ValueError, "batch_invariant"),
        (lambda: sort_chunks_by_idxs(X, two(2, 1), two(0, 1)), ValueError, r"split_sizes=\[2, 1\] .* must be 4"),
        (lambda: sort_chunks_by_idxs(X, two(2, 2), two(1, 1)), ValueError, r"sorted_idxs=\[1, 1\]"),
        (lambda: sort_chunks_by_idxs(X, two(2, 2), two(1)), ValueError, r"sorted_idxs of shape \(1,\)"),
        (lambda: sort_chunks_by_idxs(X, two(2, 2), two(1, 0), PROBS[:3, 0]), ValueError, r"probs of shape \(3,\)"),
    ],
)
def test_what_is_refused(call, error: type, words: str) -> None:
    raises(error, words, call)
