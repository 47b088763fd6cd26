"""The operators on DTensors: every function of ``GROUPS`` runs in two gloo processes on the CPU."""

import copy
from pathlib import Path

import pytest
import torch
from harness import SwiGLU, python
from processes import in_processes, main

if not torch.distributed.is_available():
    pytest.skip("this torch has no distributed package", allow_module_level=True)

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map

import torch_fused_ops as tfo
from torch_fused_ops import functional
from torch_fused_ops.families.float8.recipes import RECIPES

P = 0.5


# ---- what runs in each of two processes ------------------------------------------------------------------------------


def leaf(mesh, t, placements):
    return distribute_tensor(t, mesh, placements).requires_grad_()


def numbers(*shape):
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=g).abs() + 1  # only the mask makes zeros


def dropout(mesh, rank):
    """functional.bias_dropout_add: masks differ between shards, replicas have the same mask."""
    cases = {
        "rows": ([Shard(0)], [Shard(0)]),
        "columns": ([Shard(1)], [Shard(1)]),
        "last": ([Shard(-1)], [Shard(1)]),
        "replicas": ([Replicate()], [Replicate()]),
        "residual elsewhere": ([Shard(0)], [Replicate()]),
    }
    for name, (places, residual_places) in cases.items():
        for has_bias in (True, False):
            x, r = leaf(mesh, numbers(8, 12), places), leaf(mesh, 100 * numbers(8, 12), residual_places)
            b = leaf(mesh, numbers(12), [Replicate()]) if has_bias else None
            torch.manual_seed(5)
            y = counted({}, functional.bias_dropout_add, x, b, r, P)
            assert y.shape == (8, 12) and y.placements[0] == (Shard(1) if name == "last" else places[0]), name
            full_y = y.full_tensor()
            is_kept = (full_y - r.full_tensor()).abs() > 1e-3
            biased = x.full_tensor() + (b.full_tensor() if b is not None else 0)
            torch.testing.assert_close(full_y, r.full_tensor() + biased * is_kept * 2)
            assert 0.2 < is_kept.float().mean() < 0.8
            halves = is_kept.chunk(2, 0 if name in ("rows", "residual elsewhere") else 1)
            if name != "replicas":
                assert not torch.equal(*halves), "a mask is repeated"
            # Replicas are equal on all ranks.
            torch.testing.assert_close(y.to_local() if name == "replicas" else full_y, full_y)
            g = numbers(8, 12)
            for grad_places in ([Shard(0)], [Replicate()], [Shard(1)]):
                tensors = [x, r] if b is None else [x, r, b]
                got = torch.autograd.grad(y, tensors, leaf(mesh, g, grad_places).detach(), retain_graph=True)
                expected = [g * is_kept * 2, g, (g * is_kept * 2).sum(0)]
                for d, e, t in zip(got, expected, tensors, strict=False):
                    assert d.shape == t.shape
                    torch.testing.assert_close(d.full_tensor(), e)
    # Partial sums are reduced before dropout, and evaluation drops nothing.
    part = DTensor.from_local(numbers(4, 6), mesh, [Partial()])
    y = functional.bias_dropout_add(part, None, None, P)
    assert set((y.full_tensor() / (2 * numbers(4, 6))).flatten().tolist()) <= {0.0, 2.0}
    x = leaf(mesh, numbers(8, 12), [Shard(0)])
    assert torch.equal(functional.bias_dropout_add(x, None, None, P, False).full_tensor(), x.full_tensor())


def placed(mesh, tensors, placements):
    return [None if t is None else leaf(mesh, t, [place]) for t, place in zip(tensors, placements, strict=True)]


def counted(expected, fn, *args):
    """Return fn's result, and assert its collectives by name."""
    with CommDebugMode() as comm:
        result = fn(*args)
    actual = {str(op).split(".")[-1]: n for op, n in comm.get_comm_counts().items()}
    assert actual == expected, (actual, expected)
    return result


def full(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def same(got, truth):
    torch.testing.assert_close(tree_map(full, got), truth, atol=1e-6, rtol=1e-5)


def activations(mesh, rank):
    """Activations communicate only for packed halves split along the last axis, partial sums, and float8 scales."""
    fused, replicated = torch.ops.fused, Replicate()
    t, n = 4, 8
    x, scale, g = torch.randn(2, t, n), torch.randn(2, t), torch.randn(2, t, n)
    packed, bias = torch.randn(2, t, 2 * n), torch.randn(n)
    packed_bias = torch.randn(2 * n)
    for tensor in (x, scale, g, packed, bias, packed_bias):
        torch.distributed.broadcast(tensor, 0)
    rows, tokens, last = Shard(0), Shard(1), Shard(2)
    calls = {
        "bias_act": ((x, bias, scale), ("gelu_tanh",), (last, Shard(0), replicated)),
        "glu": ((x, g, scale), ("silu", 1.0, 7.0), (last, last, replicated)),
        "bias_glu": ((packed, packed_bias, scale), ("silu", "interleaved"), (last, Shard(0), replicated)),
        "halves": ((packed, packed_bias, scale), ("silu",), None),
    }
    for name, (tensors, scalars, columns) in calls.items():
        vector = replicated if name != "glu" else None
        layouts = (
            [[p, vector or p, p] for p in (rows, tokens)] + [[replicated] * 3] + ([list(columns)] if columns else [])
        )
        for fp8 in (False, True):
            plain_op = getattr(fused, name.replace("halves", "bias_glu"))
            op = (lambda first, *other_args, op=plain_op: op(fused.keep_fp8(first), *other_args)) if fp8 else plain_op
            plain = [tensor.clone().requires_grad_() for tensor in tensors]
            truth = op(*plain, *scalars)
            truths = torch.autograd.grad(truth, plain, g)
            for layout in layouts:
                sharded = placed(mesh, tensors, layout)
                d = leaf(mesh, g, [layout[0]]).detach()
                # If ranks hold parts of rows, only the float8 scales are reduced, not the rows.
                scales = {"all_reduce": 2 if name == "glu" else 1} if fp8 and layout[0] == last else {}
                y = counted(scales, op, *sharded, *scalars)
                assert y.placements == (layout[0],)
                grads = counted({}, torch.autograd.grad, y, sharded, d)
                same(y, truth)
                for tensor, expected, place in zip(grads, truths, layout, strict=True):
                    sums = place == replicated and layout[0] != replicated
                    assert tensor.placements[0] == (Partial() if sums else place), (name, layout, tensor.placements)
                    same(tensor, expected)
    # Optional tensors are None, and some gradients are not requested.
    for op, scalars in ((fused.bias_act, ("relu",)), (fused.bias_act, ("silu",)), (fused.bias_glu, ("silu", "halves"))):
        data = leaf(mesh, packed, [tokens])
        (d,) = torch.autograd.grad(op(data, None, None, *scalars).sum(), data)
        plain = packed.clone().requires_grad_()
        same(d, torch.autograd.grad(op(plain, None, None, *scalars).sum(), plain)[0])
        v = leaf(mesh, packed_bias, [replicated])
        (d,) = torch.autograd.grad(op(data.detach(), v, None, *scalars).sum(), v)
        plain = packed_bias.clone().requires_grad_()
        same(d, torch.autograd.grad(op(packed, plain, None, *scalars).sum(), plain)[0])
    # A shard of the last axis does not contain matching halves, so packed halves are gathered.
    data, gather = leaf(mesh, packed, [last]), {"all_gather_into_tensor": 1}
    y = counted({}, fused.bias_glu, data, None, None, "silu", "interleaved")
    same(y, fused.bias_glu(packed, None, None, "silu", "interleaved"))
    for layout in ("halves", "swapped"):
        y = counted(gather, fused.bias_glu, data, None, None, "silu", layout)
        same(y, fused.bias_glu(packed, None, None, "silu", layout))
    # Pairs are not split: two ranks cannot divide 6 columns, 3 pairs, evenly.
    odd = packed[..., :6].contiguous()
    y = counted(gather, fused.bias_glu, leaf(mesh, odd, [last]), None, None, "silu", "interleaved")
    same(y, fused.bias_glu(odd, None, None, "silu", "interleaved"))
    # Partial sums are reduced before nonlinear operators.
    part = DTensor.from_local(x / 2, mesh, [Partial()], run_check=False)
    reduced = {"reduce_scatter_tensor": 1}
    same(counted(reduced, fused.bias_act, part, None, None, "silu"), fused.bias_act(x, None, None, "silu"))
    # The result of a linear whose weight is sharded half by half needs no communication.
    tokens, rows = leaf(mesh, x[..., :6].contiguous(), [replicated]), torch.arange(2.0 * n * 6).view(2 * n, 6).sin()
    try:
        weight = leaf(mesh, rows, [_StridedShard(0, split_factor=2)])
        h = torch.nn.functional.linear(tokens, weight)
    except ValueError:  # torch 2.11 supports such shards only from FSDP
        return
    y = counted({}, fused.bias_glu, h, None, None, "silu")
    assert y.placements == (last,)
    w = weight.full_tensor().detach().requires_grad_()
    truth = fused.bias_glu(x[..., :6] @ w.t(), None, None, "silu")
    same(y, truth)
    same(torch.autograd.grad(y.sum(), weight)[0], torch.autograd.grad(truth.sum(), w)[0])


def softmax(mesh, rank):
    """fused::scaled_masked_softmax gathers only sharded keys, and sharded queries if causal or windowed."""
    op, replicated = torch.ops.fused.scaled_masked_softmax, Replicate()
    g = torch.Generator().manual_seed(1)
    x, d = torch.randn(2, 4, 6, 8, generator=g), torch.randn(2, 4, 6, 8, generator=g)
    sink = torch.randn(4, generator=g)
    wide, narrow = torch.rand(2, 1, 6, 8, generator=g) < 0.3, torch.rand(6, 8, generator=g) < 0.3
    masks = {"wide": wide, "narrow": narrow, "none": None}
    where = {  # placement of x: placements of the sink and of each mask
        Shard(0): (replicated, Shard(0), replicated),
        Shard(1): (Shard(0), replicated, replicated),
        Shard(2): (replicated, Shard(2), Shard(0)),
    }
    for axis, (of_sink, of_wide, of_narrow) in where.items():
        for name, mask in masks.items():
            for scalars in ((0.5,), (0.5, True), (0.5, False, 2, 0)):
                gathers = {"all_gather_into_tensor": 1} if axis == Shard(2) and len(scalars) > 1 else None
                of_mask = replicated if gathers else of_wide if name == "wide" else of_narrow
                sharded = [leaf(mesh, x, [axis]), leaf(mesh, sink, [of_sink])]
                m = None
                if mask is not None:
                    m = distribute_tensor(mask, mesh, [of_mask])
                y = counted(gathers or {}, op, sharded[0], m, sharded[1], *scalars)
                plain = [x.clone().requires_grad_(), sink.clone().requires_grad_()]
                truth = op(plain[0], mask, plain[1], *scalars)
                same(y, truth)
                truths = torch.autograd.grad(truth, plain, d)
                grads = counted({}, torch.autograd.grad, y, sharded, leaf(mesh, d, list(y.placements)).detach())
                if gathers is None:
                    assert grads[1].placements[0] == (Shard(0) if axis == Shard(1) else Partial())
                same(grads, truths)
    y = counted({"all_gather_into_tensor": 1}, op, leaf(mesh, x, [Shard(3)]), None, None)
    same(y, x.softmax(-1))


def compiled_activations(mesh, rank):
    """The operators and their backward run on DTensors under torch.compile."""

    def step(x, bias, scale):
        return torch.ops.fused.bias_glu(x, bias, scale, "silu", "interleaved")

    tensors = numbers(4, 8), numbers(8), numbers(4)
    whole = [t.clone().requires_grad_() for t in tensors]
    truth = step(*whole)
    truths = torch.autograd.grad(truth.sum(), whole)
    for places in ((Shard(0), Replicate(), Shard(0)), (Shard(1), Shard(0), Replicate())):
        sharded = placed(mesh, tensors, places)
        y = torch.compile(step, backend="aot_eager", fullgraph=True)(*sharded)
        assert y.placements == places[:1]
        same(y, truth)
        same(torch.autograd.grad(y.sum(), sharded), truths)


def nearly(got, truth):
    """Compare norms: in float8, the order of a sum may change how a few elements are rounded."""
    assert (full(got) - truth).norm() <= 1e-6 * truth.norm()


def float8_layers(mesh, rank):
    """Columnwise and rowwise float8 linears compute one process's results; only sums communicate."""
    linear = torch.ops.fused.linear_fp8
    x, first, bias, _ = tensors = [torch.randn(s) for s in ((4, 24, 256), (512, 256), (512,), (256, 512))]
    for tensor in tensors:
        torch.distributed.broadcast(tensor, 0)
    columns, row = [Replicate(), Shard(0), Shard(0)], Shard(1)

    def layers(recipe, x, first, bias, second):
        return linear(linear(x, first, bias, None, recipe), second, None, None, recipe)

    for recipe in RECIPES:
        if RECIPES[recipe].scaling.data.columns is None:
            with pytest.raises(ValueError, match=r"it must be fp8 or .* or mxfp8-wgrad-bf16 for DTensors"):
                linear(*placed(mesh, tensors[:3], columns), None, recipe)
            continue
        full_tensors = [t.clone().requires_grad_() for t in tensors]
        truth = layers(recipe, *full_tensors)
        truths = torch.autograd.grad(truth.square().sum(), full_tensors)
        sharded = placed(mesh, tensors, [*columns, row])
        y = counted({}, layers, recipe, *sharded)
        assert y.placements == (Partial(),)
        y = y.redistribute(mesh, [Replicate()])
        nearly(y, truth)
        grads = counted({}, torch.autograd.grad, y.square().sum(), sharded)
        assert [d.placements[0] for d in grads] == [Partial(), *columns[1:], row]
        for got, expected in zip(grads, truths, strict=True):
            nearly(got, expected)
        by_tokens = linear(*placed(mesh, (x, first, bias), [Shard(0), Replicate(), Replicate()]), None, recipe)
        assert by_tokens.placements == (Shard(0),)
        nearly(by_tokens, linear(x, first, bias, None, recipe))
    with pytest.raises(ValueError, match=r"weight has shape \(128, 256\); accepted: .* multiples of 128 in each shard"):
        linear(*placed(mesh, (x, first[:128]), columns[:2]))


def float8_tensor_parallel(mesh, rank):
    """PyTorch's tensor parallelism with float8 GEMMs under torch.compile equals one process."""

    def step(model, x, recipe, memory):
        torch._dynamo.reset()
        policy = tfo.FusionPolicy(gemm=recipe, memory=memory, strict=recipe == "fp8")
        with tfo.record() as report:
            y = torch.compile(model, backend="fused", options={"policy": policy})(x)
        y.square().sum().backward()
        return y, report.sites[0]

    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    x = torch.randn(2, 24, 256)
    torch.distributed.broadcast(x, 0)
    for hidden, recipe, memory, reason in (
        (512, "fp8", "free", ""),
        (512, "fp8", "input", ""),
        (384, "fp8-wgrad-bf16", "free", "not multiples of 128 in each shard"),
        (512, "fp8-rowwise", "free", "tensor subclasses are not fused"),
    ):
        torch.manual_seed(0)
        alone = SwiGLU(256, hidden, lambda n, m: nn.Linear(n, m, bias=m == 256))
        parallel = parallelize_module(copy.deepcopy(alone), mesh, plan)
        y, site = step(parallel, x, recipe, memory)
        assert (site.gemm == "") == bool(reason) and reason in site.gemm_reason, site
        expected_y, _ = step(alone, x, "bf16" if reason else recipe, memory)
        nearly(y, expected_y)
        for got, expected in zip(parallel.parameters(), alone.parameters(), strict=True):
            nearly(got.grad, expected.grad)


def two_dimensions(rank, ranks, folder):
    """One mesh dimension shards tokens, the other columns."""
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = numbers(6, 8), numbers(8), numbers(6)
    places = [Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Replicate()]
    plain = [t.clone().requires_grad_() for t in tensors]
    op, scalars = torch.ops.fused.bias_act, ("gelu",)
    truths = torch.autograd.grad(op(*plain, *scalars), plain, numbers(6, 8))
    sharded = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(tensors, places, strict=True)]
    y = counted({}, op, *sharded, *scalars)
    grads = counted({}, torch.autograd.grad, y, sharded, distribute_tensor(numbers(6, 8), mesh, places[0]))
    same(y, op(*tensors, *scalars))
    assert [g.placements for g in grads] == [tuple(places[0]), (Partial(), Shard(0)), (Shard(0), Partial())]
    same(grads, truths)
    # Ranks have different numbers of rows.
    uneven = leaf(mesh, numbers(5, 8), [Shard(0), Shard(0)])
    (got,) = torch.autograd.grad(op(uneven, None, None, *scalars).sum(), uneven)
    unsharded = numbers(5, 8).requires_grad_()
    same(got, torch.autograd.grad(op(unsharded, None, None, *scalars).sum(), unsharded)[0])


def on_1d_mesh(fn):
    """Return a check that runs ``fn`` on a one-dimensional mesh of all processes."""

    def check(rank, ranks, folder):
        torch.manual_seed(0)
        fn(init_device_mesh("cpu", (ranks,)), rank)

    check.__name__ = fn.__name__
    return check


GROUPS = {
    "two": [on_1d_mesh(fn) for fn in (dropout, activations, softmax, compiled_activations)],
    "float8": [on_1d_mesh(fn) for fn in (float8_layers, float8_tensor_parallel)],
}


# ---- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_checks_pass_in_two_processes(group: str, tmp_path: Path) -> None:
    in_processes(__file__, group, 2, tmp_path)


@pytest.mark.slow
def test_rules_are_registered_with_dtensor_and_not_before() -> None:
    late = "import sys, torch_fused_ops; assert 'torch.distributed.tensor' not in sys.modules; "
    program = (
        "import torch, torch_fused_ops, torch.distributed.tensor as dt; "
        "from torch_fused_ops.distributed import sharding; "
        "by = dt.DTensor._op_dispatcher; tables = [by._custom_op_handlers, by.sharding_propagator.op_to_schema_info]; "
        "assert all(any(getattr(torch.ops.fused, n).default in t for t in tables) for n in sharding.rules())"
    )
    for first in (late, "import torch.distributed.tensor; "):
        python("-c", first + program)


if __name__ == "__main__":
    main(GROUPS)
