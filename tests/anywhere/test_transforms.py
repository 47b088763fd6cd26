"""Function transforms of every operator, eager and compiled, compared with the same functions in plain PyTorch."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from harness import GELU_TANH as gelu_tanh
from harness import raises
from torch import Tensor, nn
from torch.autograd.functional import hessian as hessian_by_graph
from torch.autograd.functional import hvp, jacobian, vhp
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from torch_fused_ops import functional as FF
from torch_fused_ops import megatron
from torch_fused_ops import nn as fused_nn
from torch_fused_ops.operators import reference

fused = torch.ops.fused
F64 = torch.float64
SEED = torch.tensor([7])


# ---- operators, and the same functions in PyTorch --------------------------------------------------------------------


def bias_act(x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    return gelu_tanh(x + bias) * scale[..., None]


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)  # silu_backward has no forward mode


def glu(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    return silu(gate.clamp(max=0.9)) * (up.clamp(-0.9, 0.9) + 1.0) * scale[..., None]


def bias_glu(x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    z = x + bias
    return F.gelu(z[..., ::2]) * z[..., 1::2] * scale[..., None]


def dropout_mask(shape: torch.Size, seed: Tensor) -> Tensor:
    return fused.dropout_add(torch.ones(shape, dtype=F64), None, None, seed, 0.5)


DROPOUT_MASKS = {shape: dropout_mask(torch.Size(shape), SEED) for shape in ((2, 4), (2, 3, 4))}


def dropout_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return residual + (x + bias) * DROPOUT_MASKS[tuple(x.shape)]


HIDDEN = torch.tensor([[False, True, False, False], [False, False, True, False], [True, False, False, False]])


def softmax(x: Tensor, sink: Tensor, mask: Tensor = HIDDEN) -> Tensor:
    scores = (x * 0.7).masked_fill(mask, -math.inf)
    return torch.softmax(torch.cat((scores, sink[..., None, None].expand(*scores.shape[:-1], 1)), -1), -1)[..., :-1]


def vjp_of(fn: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function: (grad, *arguments) → the arguments' gradients."""
    return lambda g, *t: vjp(fn, *t)[1](g)


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.linear(gelu_tanh(F.linear(x, w1, b1)), w2, b2)


def functional(module: nn.Module, *names: str) -> Callable[..., Tensor]:
    return lambda x, *p: functional_call(module, dict(zip(names, p, strict=True)), (x,))


PARAMETERS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
MLP_SHAPES = ((2, 3), (4, 3), (4,), (3, 4), (3,))


class Case(NamedTuple):
    fused: Callable[..., Any]
    reference: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    operator: bool = False  # True: run jvp and grad by default, and compile with every backend


ROWS = ((2, 4), (4,), (2,))
CASES = {
    "bias_act": Case(lambda *t: fused.bias_act(*t, "gelu_tanh"), bias_act, ROWS, True),
    "bias_act tanh": Case(lambda x: fused.bias_act(x, None, None, "tanh"), torch.tanh, ((2, 4),)),
    "glu": Case(lambda *t: fused.glu(*t, "silu", 1.0, 0.9), glu, ((2, 4), (2, 4), (2,)), True),
    "bias_glu": Case(lambda *t: fused.bias_glu(*t, "gelu", "interleaved"), bias_glu, ROWS, True),
    "dropout_add": Case(lambda *t: fused.dropout_add(*t, SEED, 0.5), dropout_add, ((2, 4), (4,), (2, 4)), True),
    "softmax": Case(
        lambda x, sink: fused.scaled_masked_softmax(x, HIDDEN, sink, 0.7), softmax, ((2, 3, 4), (2,)), True
    ),
    "make_viewless": Case(lambda x: FF.make_viewless_tensor(x.mT, True, True) * 2, lambda x: x.mT * 2, ((2, 4),), True),
    "bias_act_backward": Case(
        lambda *t: fused.bias_act_backward(*t, "gelu_tanh", [True] * 3), vjp_of(bias_act), ((2, 4), *ROWS), True
    ),
    "glu_backward": Case(
        lambda *t: fused.glu_backward(*t, "silu", 1.0, 0.9, [True] * 3),
        vjp_of(glu),
        ((2, 4), (2, 4), (2, 4), (2,)),
        True,
    ),
    "bias_glu_backward": Case(
        lambda *t: fused.bias_glu_backward(*t, "gelu", "interleaved", 0.0, None, [True] * 3),
        vjp_of(bias_glu),
        ((2, 2), *ROWS),
        True,
    ),
    "dropout_add_backward": Case(
        lambda g: fused.dropout_add_backward(g, SEED, 0.5, F64, F64, [True] * 2),
        lambda g: (g * DROPOUT_MASKS[2, 4], (g * DROPOUT_MASKS[2, 4]).sum(0)),
        ((2, 4),),
        True,
    ),
    "softmax_backward": Case(
        lambda g, y: fused.scaled_masked_softmax_backward(g, y, 0.7, False, -1, -1, F64, [True] * 2),
        lambda g, y: (0.7 * y * (g - (g * y).sum(-1, keepdim=True)), ((y.sum(-1) - 1) * (g * y).sum(-1)).sum(-1)),
        ((2, 3, 4), (2, 3, 4)),
        True,
    ),
    "memory=fp8": Case(lambda x, b, s: FF.bias_gelu(x, b, "tanh", token_scale=s, memory="fp8"), bias_act, ROWS),
    "glu, memory=fp8": Case(
        lambda *t: FF.swiglu(*t, up_offset=1.0, clamp=0.9, memory="fp8"), glu, ((2, 4), (2, 4), (2,))
    ),
    "relu": Case(lambda x, b: FF.bias_act(x, b, activation="relu"), lambda x, b: F.relu(x + b), ((2, 4), (4,))),
    **{
        f"nn.FusedMLP {memory}": Case(functional(fused_nn.FusedMLP(3, 4, memory=memory), *PARAMETERS), mlp, MLP_SHAPES)
        for memory in ("off", "free", "input")
    },
}


def tensors(shapes: tuple[tuple[int, ...], ...], batch: tuple[tuple[int, ...], ...] = ()) -> tuple[Tensor, ...]:
    """Return numbers that float8 represents exactly, with 448/256 as a row's largest, so that "fp8" is exact."""
    generator, tensors = torch.Generator().manual_seed(3), []
    for shape, batch_shape in zip(shapes, batch or ((),) * len(shapes), strict=True):
        t = torch.randn(*batch_shape, *shape, generator=generator).mul(150).clamp(-400, 400).to(reference.FP8).to(F64)
        largest = t.abs().argmax(-1, keepdim=True)
        tensors.append(t.scatter(-1, largest, t.gather(-1, largest).sign() * 448) / 256)
    return tuple(tensors)


def assert_same(got: Any, expected: Any) -> None:
    got, expected = tree_leaves(got), tree_leaves(expected)
    assert len(got) == len(expected)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


# ---- transforms ------------------------------------------------------------------------------------------------------

Fn = Callable[..., Any]


def single_output(f: Fn) -> Fn:
    """Return a function that concatenates f's results into one tensor."""

    def fn(*t: Tensor) -> Tensor:
        outs = tree_leaves(f(*t))
        return outs[0] if len(outs) == 1 else torch.cat([o.flatten() for o in outs])

    return fn


def loss(f: Fn) -> Fn:
    return lambda *t: single_output(f)(*t).sin().sum()


def total(outs: Any) -> Tensor:
    return sum(o.sin().sum() for o in tree_leaves(outs))  # type: ignore[return-value]


def nested(f: Fn, t: tuple[Tensor, ...]) -> Any:
    """Batch the first argument in both vmaps, odd ones in the outer vmap only, and even ones in the inner vmap only."""
    inner, outer = (tuple(None if i and i % 2 == skip else 0 for i in argnums(t)) for skip in (1, 0))
    args = [stacked(stacked((a,)))[0] if i == 0 else stacked((a,))[0] for i, a in enumerate(t)]
    return vmap(vmap(f, inner), outer)(*args)


def linearized(f: Fn, t: tuple[Tensor, ...]) -> Any:
    out, push = linearize(f, *t)
    return out, push(*tangents(t))


def argnums(t: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(range(len(t)))


def tangents(t: Any) -> Any:
    return tree_map(torch.cos, t)


def stacked(t: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.stack((a, a.flip(0) * 0.5)) for a in t)


def leaves_of(t: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(a.detach().clone().requires_grad_() for a in t)


TRANSFORMS: dict[str, Callable[[Fn, tuple[Tensor, ...]], Any]] = {
    "grad": lambda f, t: grad(loss(f), argnums(t))(*t),
    "vjp": lambda f, t: (lambda out, pull: (out, pull(tangents(out))))(*vjp(f, *t)),
    "jvp": lambda f, t: jvp(f, t, tangents(t)),
    "jvp of each argument": lambda f, t: [
        jvp(lambda a, i=i: f(*t[:i], a, *t[i + 1 :]), (t[i],), (tangents(t[i]),)) for i in argnums(t)
    ],
    "jacrev": lambda f, t: jacrev(f, argnums(t))(*t),
    "jacfwd": lambda f, t: jacfwd(f, argnums(t))(*t),
    "hessian": lambda f, t: hessian(loss(f), argnums(t))(*t),
    "jacrev of jacrev": lambda f, t: jacrev(jacrev(loss(f), argnums(t)), argnums(t))(*t),
    "jacfwd of jacfwd": lambda f, t: jacfwd(jacfwd(loss(f), argnums(t)), argnums(t))(*t),
    "grad of grad": lambda f, t: grad(lambda *a: total(grad(loss(f), argnums(t))(*a)), argnums(t))(*t),
    "grad of jvp": lambda f, t: grad(lambda *a: total(jvp(f, a, tangents(t))), argnums(t))(*t),
    "jvp of grad": lambda f, t: jvp(grad(loss(f), argnums(t)), t, tangents(t)),
    "jvp of jvp": lambda f, t: jvp(lambda *a: jvp(f, a, tangents(t)), t, tangents(t)),
    "vmap of grad": lambda f, t: vmap(grad(loss(f), argnums(t)))(*stacked(t)),
    "grad of vmap": lambda f, t: grad(lambda *a: total(vmap(f)(*a)), argnums(t))(*stacked(t)),
    "vmap of jvp": lambda f, t: vmap(lambda *a: jvp(f, a, tangents(a)))(*stacked(t)),
    "jvp of vmap": lambda f, t: jvp(vmap(f), stacked(t), tangents(stacked(t))),
    "vmap of tangents": lambda f, t: vmap(lambda *v: jvp(f, t, v))(*stacked(t)),
    "vmap of hessian": lambda f, t: vmap(hessian(loss(f), argnums(t)))(*stacked(t)),
    "vmap of jvp of grad": lambda f, t: vmap(lambda *a: jvp(grad(loss(f), argnums(t)), a, tangents(a)))(*stacked(t)),
    "nested vmap of some": lambda f, t: nested(f, t),
    "nested vmap": lambda f, t: vmap(vmap(f), (1,) * len(t), 1)(*stacked(stacked(t))),
    "functionalize of grad": lambda f, t: functionalize(grad(loss(f), argnums(t)))(*t),
    "linearize": lambda f, t: linearized(f, t),
    "linearize of grad": lambda f, t: linearized(grad(loss(f), argnums(t)), t),
}


def on_graph(use: Callable[[Any, tuple[Tensor, ...]], Any]) -> Callable[[Fn, tuple[Tensor, ...]], Any]:
    """Return a transform that calls ``use`` with a graph recorded by autograd before any transform starts."""

    def transform(f: Fn, t: tuple[Tensor, ...]) -> Any:
        leaves = leaves_of(t)
        return use(single_output(f)(*leaves), leaves)

    return transform


def pull(out: Tensor, leaves: tuple[Tensor, ...], **kwargs: Any) -> Callable[[Tensor], Any]:
    return lambda g: torch.autograd.grad(out, leaves, g, retain_graph=True, **kwargs)


def with_cosine(t: Tensor) -> Tensor:
    return torch.stack((t.detach(), t.detach().cos()))


def dual_pull(out: Tensor, leaves: tuple[Tensor, ...]) -> Any:
    with fwAD.dual_level():
        duals = pull(out, leaves)(fwAD.make_dual(out.detach().cos(), out.detach().sin()))
        return [tuple(fwAD.unpack_dual(g)) for g in duals]


def forward_over_reverse(f: Fn, t: tuple[Tensor, ...]) -> Any:
    """Use dual numbers without torch.func, with and without create_graph."""
    duals = []
    for create_graph in (False, True):
        with fwAD.dual_level():
            leaves = tuple(fwAD.make_dual(a, a.detach().cos()) for a in leaves_of(t))
            grads = torch.autograd.grad(loss(f)(*leaves), leaves, create_graph=create_graph)
            duals += [tuple(p.detach() for p in fwAD.unpack_dual(g)) for g in grads]
    return duals


def second_order(f: Fn, leaves: tuple[Tensor, ...], batched: bool = False) -> Any:
    first = torch.cat([g.flatten() for g in torch.autograd.grad(loss(f)(*leaves), leaves, create_graph=True)])
    tangent = with_cosine(first) if batched else first.detach().cos()
    return torch.autograd.grad(first, leaves, tangent, is_grads_batched=batched)


GRAPHS: dict[str, Callable[[Fn, tuple[Tensor, ...]], Any]] = {
    "vmap of a graph's backward": on_graph(lambda out, t: vmap(pull(out, t))(with_cosine(out))),
    "jvp of a graph's backward": on_graph(lambda out, t: jvp(pull(out, t), (out.detach(),), (out.detach().cos(),))),
    "grad of a graph's backward": on_graph(
        lambda out, t: grad(lambda g: total(pull(out, t, create_graph=True)(g)))(out.detach())
    ),
    "batched gradients": on_graph(lambda out, t: pull(out, t, is_grads_batched=True)(with_cosine(out))),
    "dual gradients": on_graph(dual_pull),
    "forward over reverse": forward_over_reverse,
    "double backward": lambda f, t: second_order(f, leaves_of(t)),
    "batched double backward": lambda f, t: second_order(f, leaves_of(t), batched=True),
    "jacobian by graph, vectorized": lambda f, t: jacobian(single_output(f), t, vectorize=True),
    "jacobian forward": lambda f, t: jacobian(single_output(f), t, vectorize=True, strategy="forward-mode"),
    "hessian by graph, vectorized": lambda f, t: hessian_by_graph(loss(f), t, vectorize=True),
    "hessian, forward over reverse": lambda f, t: hessian_by_graph(
        loss(f), t, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "vhp": lambda f, t: vhp(loss(f), t, tangents(t)),
    "hvp": lambda f, t: hvp(loss(f), t, tangents(t)),
}
ALL = {**TRANSFORMS, **GRAPHS}

# ---- each transform --------------------------------------------------------------------------------------------------

FP8 = ("memory=fp8", "glu, memory=fp8")
TWICE = (
    *("double backward", "batched double backward", "hessian by graph, vectorized", "vhp", "hvp"),
    "grad of a graph's backward",
)
REFUSED = RuntimeError, r"a second derivative through fused::\w+ with memory='fp8' is not accepted"
RAISES: dict[tuple[str, str], tuple[type[Exception], str]] = dict.fromkeys(itertools.product(FP8, TWICE), REFUSED)
# One operator of each kind: with a backward operator, float8, a seed, a mask or a view. Others use the same rules.
MECHANISMS = ("bias_glu", "bias_glu_backward", "memory=fp8", "dropout_add", "softmax", "make_viewless")
SLOW_TRANSFORMS = {
    *("linearize", "linearize of grad", "jacrev of jacrev", "jacfwd of jacfwd", "vmap of hessian"),
    *("batched double backward", "vmap of jvp of grad"),
}


FEW = ("vmap of grad", "nested vmap", "double backward")


def pairs() -> Iterator[Any]:
    """Yield all pairs of a case and a transform. By default, MECHANISMS run under all transforms that are not slow.

    ReLU, which saves its result, and modules, which have memory levels, run under a few.
    """
    for (name, case), transform in itertools.product(CASES.items(), ALL):
        quick = (name in MECHANISMS and transform not in SLOW_TRANSFORMS) or (name, transform) in RAISES
        quick |= (name == "relu" or name.startswith("nn.")) and transform in FEW
        marks = [] if quick or (case.operator and transform in ("jvp", "grad")) else [pytest.mark.slow]
        yield pytest.param(name, transform, marks=marks)


@pytest.mark.parametrize(("case", "transform"), pairs())
def test_transforms_match_plain_pytorch(case: str, transform: str) -> None:
    fused_fn, plain, shapes, _ = CASES[case]
    t = tensors(shapes)
    if (case, transform) in RAISES:
        error, text = RAISES[case, transform]
        raises(error, text, ALL[transform], fused_fn, t)
        return
    assert_same(ALL[transform](fused_fn, t), ALL[transform](plain, t))


# ---- vmap over every subset of the arguments -------------------------------------------------------------------------


def dropped_add(x: Tensor, bias: Tensor, residual: Tensor, seed: Tensor) -> Tensor:
    return residual + (x + bias) * dropout_mask(x.shape, seed)


def masks(*shape: int) -> Tensor:
    """Return masks of three examples. Each row has an unmasked element."""
    mask = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[..., 0] = False
    return mask


class Batch(NamedTuple):
    fused: Fn
    reference: Fn
    shapes: tuple[tuple[int, ...], ...]
    integers: tuple[Tensor, ...] = ()  # three examples of each argument without a derivative


BATCHES = {
    **{name: Batch(*CASES[name][:3]) for name in ("bias_act", "glu", "bias_glu", "memory=fp8", "make_viewless")},
    **{name: Batch(*CASES[name][:3]) for name in CASES if name.endswith("_backward")},
    "dropout_add": Batch(
        lambda *t: fused.dropout_add(*t, 0.5), dropped_add, ((2, 4), (4,), (2, 4)), (torch.tensor([[1], [2], [3]]),)
    ),
    **{
        f"softmax, mask {shape}": Batch(
            lambda x, sink, mask: fused.scaled_masked_softmax(x, mask, sink, 0.7),
            softmax,
            ((2, 2, 3, 4), (2,)),
            (masks(*shape),),
        )
        for shape in ((3, 4), (2, 3, 4), (2, 1, 3, 4))
    },
}
INSIDE: dict[str, Callable[[Fn, int], Fn]] = {
    "call": lambda f, _: lambda *a: f(*a),
    "grad": lambda f, n: grad(loss(f), tuple(range(n))),
    "jvp": lambda f, n: lambda *a: jvp(lambda *t: f(*t, *a[n:]), a[:n], tangents(a[:n])),
}


@pytest.mark.covering(every=7)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", BATCHES)
def test_vmap_equals_a_loop_over_examples(name: str, inside: str, recwarn: pytest.WarningsRecorder) -> None:
    """vmap gives each example's result, with any subset of the arguments batched along the first or the last axis."""
    fused_fn, reference_fn, shapes, integers = BATCHES[name]
    n = len(shapes)
    batched = *tensors(shapes, ((3,),) * n), *integers
    fn, plain = (INSIDE[inside](f, n) for f in (fused_fn, reference_fn))
    for dims in itertools.product((None, 0, -1), repeat=len(batched)):
        if set(dims) == {None}:
            continue
        args = [t[1] if d is None else t.movedim(0, d) for t, d in zip(batched, dims, strict=True)]
        examples = [[t[1 if d is None else i] for t, d in zip(batched, dims, strict=True)] for i in range(3)]
        outputs = [tree_leaves(plain(*a)) for a in examples]
        out = 0 if None in dims else 1  # torch accepts other positions only for batched results
        got = tree_leaves(vmap(fn, tuple(dims), out)(*args))
        assert_same(got, [torch.stack(values, out) for values in zip(*outputs, strict=True)])
    assert not [w for w in recwarn if "performance drop" in str(w.message)]


# ---- compiled --------------------------------------------------------------------------------------------------------

# PyTorch's own functions fail under the other transforms (2.13). "functionalize" has no proxy for its result. Dynamo
# skips "linearize". "jacfwd of jacfwd", "vmap of hessian" and "jvp of jvp" fail for fake tensors' tangents, even for
# a · constant. The gradient of a view's jvp fails in the same way: x.view_as(x). For a graph recorded outside, PyTorch
# raises "torch.compile with aot_autograd does not currently support double backward", loses dual numbers (even for
# F.gelu), or raises in vmap.
COMPILED = (
    *("grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "grad of grad", "grad of jvp", "jvp of grad"),
    *("vmap of grad", "grad of vmap", "vmap of jvp", "jvp of vmap", "vmap of tangents", "vmap of jvp of grad"),
    "nested vmap",
)
QUICK = ("jvp of grad", "grad of vmap")
BACKENDS = ("aot_eager", "inductor", "fused")


def compilations() -> Iterator[Any]:
    for (name, case), transform, backend in itertools.product(CASES.items(), COMPILED, BACKENDS):
        if backend != "aot_eager" and (transform not in QUICK or not case.operator):
            continue
        quick = case.operator and transform in QUICK and backend == "aot_eager" and not name.endswith("_backward")
        yield pytest.param(name, transform, backend, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.covering(1, "transform")
@pytest.mark.parametrize(("case", "transform", "backend"), compilations())
def test_compiled_transforms_match_plain_pytorch(case: str, transform: str, backend: str) -> None:
    fused_fn, plain, shapes, _ = CASES[case]
    t = tensors(shapes)
    compiled = torch.compile(lambda *a: ALL[transform](fused_fn, a), backend=backend, fullgraph=True)
    assert_same(compiled(*t), ALL[transform](plain, t))


@pytest.mark.slow
@pytest.mark.parametrize("transform", COMPILED)
def test_transforms_of_a_compiled_mlp_are_right(transform: str) -> None:
    """backend="fused" transforms a plain MLP correctly, fused or not."""
    t = tensors(MLP_SHAPES)
    got = torch.compile(lambda *a: ALL[transform](mlp, a), backend="fused", fullgraph=True)(*t)
    assert_same(got, ALL[transform](mlp, t))


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_dropout_follows_vmap_s_randomness(backend: str) -> None:
    x = torch.ones(3, 64, dtype=F64)

    def fn(x: Tensor) -> Tensor:
        return megatron.get_bias_dropout_add(True, True)((x, torch.zeros_like(x)), torch.zeros_like(x), 0.5)

    for randomness in ("same", "different"):
        torch.compiler.reset()
        run = torch.compile(lambda x, r=randomness: vmap(fn, randomness=r)(x), backend=backend)
        got = run(x)
        assert torch.equal(got[0], got[1]) == (randomness == "same")
        assert set(got.unique().tolist()) == {0.0, 2.0}
