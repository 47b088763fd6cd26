"""``fused::bias_act``, ``fused::glu``, ``fused::bias_glu`` in eager mode."""

import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from torch_fused_ops import activations, reference
from torch_fused_ops.kernels import cpu
from torch_fused_ops.operators.activation import FAMILY
from torch_fused_ops.testing.check import run_opcheck
from torch_fused_ops.testing.samples import ACTIVATION_OPERATORS as OPERATORS
from torch_fused_ops.testing.samples import backward_samples, samples

fused = torch.ops.fused
NAMES = activations.names()
REST = {op.name: op.defaults[1:] for op in FAMILY}  # the schemas' defaults, behind the activation


def every_sample(core):
    return [s for op in OPERATORS for make in (samples, backward_samples) for s in make(op, core=core)]


def differentiable():
    """What a derivative may depend on: activation, optional tensors, layout, offset and clamp."""
    for op in OPERATORS:
        for name in NAMES:
            yield op, (name, *REST[op]), (True, True, True)
        for has in ((True, False, False), (True, True, False), (True, False, True)):
            if op != "glu" or has[1]:
                yield op, ("gelu", *REST[op]), has
    yield "glu", ("quick_gelu", 1.0, 0.9), (True, True, True)
    yield "bias_glu", ("quick_gelu", "halves", 1.0, 0.9), (True, True, True)
    yield "bias_glu", ("silu", "swapped", 1.0, 0.9), (True, True, True)
    yield "bias_glu", ("gelu_tanh", "interleaved", 0.5, 0.9), (True, True, True)


DIFFERENTIABLE = list(differentiable())


def tensors_for(op, has=(True, True, True), shape=(2, 4), dtype=torch.float64, batch=()):
    """Tensor arguments (None where absent), away from kinks; ``batch`` gives each argument a leading axis or none."""
    g = torch.Generator().manual_seed(3)
    shapes = shape, (shape if op == "glu" else shape[-1:]), shape[:-1]
    batch = batch or ((),) * 3
    return [
        torch.randn(*b, *s, generator=g, dtype=dtype) if h else None for h, s, b in zip(has, shapes, batch, strict=True)
    ]


def composed(op, scalars):
    """The operator as a user would compose it from PyTorch's own functions."""

    def fn(a, b, scale):
        if op == "bias_act":
            y = activations.get(scalars[0]).definition(a if b is None else a + b)
        else:
            if op == "bias_glu":
                a = a if b is None else a + b
                a, b = reference.unpack(a, scalars[1])
            up_offset, clamp = scalars[-2:]
            if clamp is not None:
                a, b = a.clamp(max=clamp), b.clamp(-clamp, clamp)
            y = activations.get(scalars[0]).definition(a) * (b + up_offset)
        return y if scale is None else y * scale[..., None]

    return fn


def operator(op, scalars):
    return lambda *tensors: getattr(fused, op)(*tensors, *scalars)


def case_id(case):
    return "-".join(str(c) for c in (case[0], *case[1])) + "-" + "".join("01"[h] for h in case[2])


# ---- registration ----------------------------------------------------------------------------------------------------


@pytest.mark.every(8)
@pytest.mark.parametrize("sample", every_sample(core=True), ids=str)
def test_opcheck(sample):
    assert run_opcheck(sample) is None


@pytest.mark.slow
@pytest.mark.parametrize("sample", every_sample(core=False), ids=str)
def test_opcheck_all(sample):
    assert run_opcheck(sample) is None


@pytest.mark.parametrize("op", OPERATORS)
def test_inputs_are_not_written(op):
    for sample in samples(op):
        before = [None if t is None else (t.detach().clone(), t._version) for t in sample.tensors]
        out = sample()
        if out.requires_grad:
            out.sum().backward()
        for t, b in zip(sample.tensors, before, strict=True):
            assert t is None or (t._version == b[1] and torch.equal(t, b[0])), sample


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=case_id)
def test_gradcheck(case):
    op, scalars, has = case
    tensors = [None if t is None else t.requires_grad_() for t in tensors_for(op, has)]
    fn = operator(op, scalars)
    assert torch.autograd.gradcheck(
        fn, tensors, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(fn, tensors, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("has", list(itertools.product((True, False), repeat=3))[:-1])
@pytest.mark.parametrize("op", OPERATORS)
def test_frozen_arguments_cost_nothing(op, has):
    """No gradient for an argument that needs none, and none computed: the backward operator is told so."""
    masks = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is getattr(fused, f"{op}_backward").default:
                masks.append(tuple(args[-1]))
            return func(*args, **(kwargs or {}))

    tensors = [t.requires_grad_(h) for t, h in zip(tensors_for(op), has, strict=True)]
    with Recorder():
        operator(op, ("silu", *REST[op]))(*tensors).sum().backward()
    assert masks == [has]
    assert tuple(t.grad is not None for t in tensors) == has
    grads = getattr(fused, f"{op}_backward")(
        torch.ones(2, 2 if op == "bias_glu" else 4), *tensors, "silu", *REST[op], list(has)
    )
    assert tuple(g is not None for g in grads) == has


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_derivatives_at_zero(name, dtype):
    slope = grad(activations.get(name).definition)
    first, second = (derivative(torch.zeros((), dtype=torch.float64)).item() for derivative in (slope, grad(slope)))
    x = torch.zeros(3, dtype=dtype, requires_grad=True)

    def fn(x):
        return fused.bias_act(x, None, None, name).sum()

    (g,) = torch.autograd.grad(fn(x), x, create_graph=True)
    assert g.tolist() == pytest.approx([first] * 3, rel=1e-6)
    h = torch.autograd.grad(g.sum(), x)[0] if g.requires_grad else torch.zeros(3)
    assert h.tolist() == pytest.approx([second] * 3, rel=1e-6)
    x = x.detach()
    assert grad(fn)(x).tolist() == pytest.approx([first] * 3, rel=1e-6)
    assert hessian(fn)(x).diagonal().tolist() == pytest.approx([second] * 3, rel=1e-6)
    assert jvp(fn, (x,), (torch.ones_like(x),))[1].item() == pytest.approx(3 * first, rel=1e-6)


def test_retain_graph_and_double_backward():
    x, b = (t.requires_grad_() for t in tensors_for("bias_act")[:2])
    out = fused.bias_act(x, b, None, "gelu").square().sum()
    once = torch.autograd.grad(out, (x, b), retain_graph=True)
    again = torch.autograd.grad(out, (x, b), create_graph=True)
    for g, h in zip(once, again, strict=True):
        assert torch.equal(g, h)
    seconds = torch.autograd.grad(sum(g.sum() for g in again), (x, b))
    plain = torch.autograd.grad(F.gelu(x + b).square().sum(), (x, b), create_graph=True)
    expected = torch.autograd.grad(sum(g.sum() for g in plain), (x, b))
    torch.testing.assert_close(seconds, expected)


# ---- torch.func ------------------------------------------------------------------------------------------------------


BATCHED = [in_dims for in_dims in itertools.product((None, 0, -1), repeat=3) if any(d is not None for d in in_dims)]


@pytest.mark.parametrize("op", OPERATORS)
def test_vmap_without_grad_and_of_the_backward_operator(op):
    """The vmap rules themselves: below autograd, for the operator and for its backward operator."""
    scalars = ("silu", *REST[op])
    width = 2 if op == "bias_glu" else 4
    for in_dims in BATCHED:
        tensors = tensors_for(op, batch=[() if d is None else (3,) for d in in_dims])
        tensors = [t if d is None else t.movedim(0, d) for d, t in zip(in_dims, tensors, strict=True)]
        grads = torch.randn(3, 2, width, dtype=torch.float64)
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            got = vmap(operator(op, scalars), in_dims)(*tensors)
        torch.testing.assert_close(got, vmap(composed(op, scalars), in_dims)(*tensors))
        for mask in ((True, True, True), (False, True, True), (True, False, False), (False, False, True)):

            def backward(g, *t, mask=mask):
                out = getattr(fused, f"{op}_backward")(g, *t, *scalars, list(mask))
                return tuple(o for o in out if o is not None)

            def expected(g, *t, mask=mask):
                pulled = vjp(composed(op, scalars), *t)[1](g)
                return tuple(p for p, m in zip(pulled, mask, strict=True) if m)

            got = vmap(backward, (0, *in_dims))(grads, *tensors)
            torch.testing.assert_close(got, vmap(expected, (0, *in_dims))(grads, *tensors))


def test_per_example_gradients_of_a_module():
    class MLP(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4)
            self.bias = torch.nn.Parameter(torch.randn(6))

        def forward(self, x):
            return self.b(fused.bias_act(self.a(x), self.bias, None, "gelu"))

    model, x = MLP().double(), torch.randn(5, 4, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    each = vmap(grad(lambda p, x: functional_call(model, p, (x,)).square().sum()), (None, 0))(parameters, x)
    for i in range(5):
        expected = torch.autograd.grad(model(x[i]).square().sum(), tuple(parameters.values()))
        torch.testing.assert_close(tuple(e[i] for e in each.values()), expected)


# ---- manners ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATORS)
def test_autocast_keeps_the_dtype(op):
    tensors = tensors_for(op, dtype=torch.float32)
    fn = operator(op, ("gelu", *REST[op]))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert torch.equal(fn(*tensors), fn(*tensors).float()) and fn(*tensors).dtype == torch.float32
            low = fn(tensors[0].to(dtype), *tensors[1:])
        assert low.dtype == dtype


def test_flops_are_counted_as_without_us():
    w1, w2 = torch.randn(8, 16, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    x, b = torch.randn(4, 8, requires_grad=True), torch.randn(16, requires_grad=True)
    totals = []
    for act in (lambda h: F.gelu(h + b), lambda h: fused.bias_act(h, b, None, "gelu")):
        with FlopCounterMode(display=False) as counter:
            (act(x @ w1) @ w2).sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] == 6 * 2 * 4 * 8 * 16


@pytest.mark.parametrize("op", OPERATORS)
def test_only_arguments_are_saved(op):
    saved = []
    tensors = [t.requires_grad_() for t in tensors_for(op)]
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        operator(op, ("gelu", *REST[op]))(*tensors)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in tensors}
    assert len(saved) == 3


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that live at once, those made inside the operators' own kernels included."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.seen = 0, 0, set()

    def freed(self, key, size):
        self.seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fused":
            with self:  # a mode is off inside its own handler: into the kernel itself with it on
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)
        out = func(*args, **(kwargs or {}))
        mine = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in mine and key not in self.seen:
                    self.seen.add(key)
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self.freed, key, size)
        return out


def test_allocations_are_counted():
    x = torch.randn(1024, 1024)
    with Allocations() as counter:
        reference.bias_act(x, None, None, "silu")
    assert counter.peak >= 2 * x.nbytes and counter.now == 0


@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float32, "rows"), (torch.bfloat16, "rows"), (torch.float32, "transposed")]
)
@pytest.mark.parametrize("op", OPERATORS)
def test_cpu_temporaries_are_small(op, dtype, layout):
    """The eager CPU kernels hold their results and some cache-sized blocks, whatever the tensor's size."""
    tensors = tensors_for(op, shape=(2048, 1024), dtype=dtype)
    if layout == "transposed":
        tensors[0] = tensors[0].t().contiguous().t()
    scalars = ("gelu_tanh", *REST[op])
    with Allocations() as forward:
        out = operator(op, scalars)(*tensors)
    result = out.nbytes
    small = 16 * 4 * cpu.block()  # blocks in float32
    assert result <= forward.peak <= result + small
    incoming = torch.ones_like(out)
    with Allocations() as backward:
        grads = getattr(fused, f"{op}_backward")(incoming, *tensors, *scalars, [True, True, True])
    result = sum(g.nbytes for g in grads)
    assert result <= backward.peak <= result + small


@pytest.mark.parametrize("op", OPERATORS)
def test_blocks_are_one_operator(op, monkeypatch):
    """Of some rows at a time as of all at once: results, gradients, and what is stored in float8."""

    def results():
        for sample in samples(op):
            first, out = sample.tensors[0], sample()
            assert out.dtype == first.dtype and out.shape == (*first.shape[:-1], first.shape[-1] >> (op == "bias_glu"))
            yield from (out, *getattr(fused, f"{op}_fp8")(*sample.args))
            if leaves := [t for t in sample.tensors if t is not None and t.requires_grad]:
                yield from torch.autograd.grad(out, leaves, torch.full_like(out, 0.5))

    whole = list(results())
    monkeypatch.setattr(cpu, "_GRAIN", 0)
    monkeypatch.setattr(cpu, "block", lambda: 100)
    for expected, got in zip(whole, results(), strict=True):
        assert got.is_contiguous() and expected.is_contiguous() and got.dtype == expected.dtype
        torch.testing.assert_close(got.double(), expected.double(), rtol=1e-2, atol=1e-3, equal_nan=True)
