"""The viewless tensors of ``torch_fused_ops.operators.viewless``."""

import gc
import itertools
import weakref

import pytest
import torch
from harness import Net, raises
from torch.utils.checkpoint import checkpoint

from torch_fused_ops.functional import (
    MakeViewlessTensor,
    make_viewless_tensor,
)

BACKENDS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow), "fused")


def views(requires_grad=False, dtype=torch.float32):
    base = torch.randn(4, 6, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_(requires_grad)
    return {
        "reshaped": base.view(6, 4),
        "transposed": base.t(),
        "rows": base[1:3],
        "columns": base[:, ::2],
        "expanded": base[0].expand(3, 6),
        "element": base[0, 0],
        "of size 0": base[:0],
    }


def make_viewless(t):
    return MakeViewlessTensor.apply(t, t.requires_grad)


def is_alias(out, inp):
    same = out.data_ptr() == inp.data_ptr() and out.untyped_storage()._cdata == inp.untyped_storage()._cdata
    layout = (out.shape, out.stride(), out.storage_offset()) == (inp.shape, inp.stride(), inp.storage_offset())
    return same and layout and out._base is None


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", views())
def test_any_view(name, requires_grad):
    view = views(requires_grad)[name]
    out = make_viewless(view)
    assert is_alias(out, view) and out.requires_grad == requires_grad and torch.equal(out, view)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_any_dtype(dtype):
    base = torch.ones(4, 6, dtype=dtype)
    out = make_viewless(base.t())
    assert is_alias(out, base.t()) and out.dtype == dtype


def test_subclasses_modes_checkpoint_and_export():
    x = torch.randn(4, 6, requires_grad=True)
    assert type(make_viewless(torch.nn.Parameter(x.detach()))) is torch.Tensor
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert make_viewless_tensor(fake.view(24), True, True)._base is None
    (g,) = torch.autograd.grad(checkpoint(lambda x: make_viewless(x.t()).square(), x, use_reentrant=False).sum(), x)
    torch.testing.assert_close(g, 2 * x)
    module = Net(lambda _, x: make_viewless_tensor(x.t(), True, True) * 2)
    assert torch.equal(torch.export.export(module, (x,)).module()(x), x.t() * 2)


CASES = list(itertools.product((True, False), repeat=4))


@pytest.mark.parametrize(("is_view", "keep_graph", "requires_grad", "source"), CASES)
def test_table(is_view, keep_graph, requires_grad, source):
    x = torch.randn(4, 6, requires_grad=source)
    middle = x * 2
    inp = middle.view(6, 4) if is_view else middle
    out = make_viewless_tensor(inp, requires_grad, keep_graph)
    assert is_alias(out, inp) and out.requires_grad == requires_grad
    assert inp.requires_grad == source  # the caller's tensor does not change

    in_graph = keep_graph and requires_grad and source
    itself = not is_view and requires_grad == source and (keep_graph or not source)
    assert (out is inp) == itself
    assert out.is_leaf == (not in_graph)
    if requires_grad:
        out.backward(torch.full_like(out, 3.0))
        assert (x.grad is not None) == in_graph and (out.is_leaf and out.grad is not None) != in_graph
        if in_graph:
            assert torch.equal(x.grad, torch.full_like(x, 6.0))

    alias = MakeViewlessTensor.apply(inp, requires_grad)
    assert alias is not inp and is_alias(alias, inp) and alias.requires_grad == requires_grad
    assert alias.is_leaf == (not (requires_grad and source))


def test_leaves_are_returned_unchanged():
    x = torch.randn(4, requires_grad=True)
    for keep_graph in (True, False):
        assert make_viewless_tensor(x, True, keep_graph) is x


@pytest.mark.parametrize("backend", [*BACKENDS[:-1], pytest.param("fused", marks=pytest.mark.slow)])
def test_table_compiled(backend):
    """Run ``test_table`` for intermediate tensors of one graph, in which a new leaf is cut off."""
    plain, asking = torch.randn(4, 6), torch.randn(len(CASES), 4, 6, requires_grad=True)

    def fn(plain, asking):
        outs = []
        for row, (is_view, keep_graph, requires_grad, source) in zip(asking, CASES, strict=True):
            middle = (row if source else plain) * 2
            out = make_viewless_tensor(middle.view(6, 4) if is_view else middle, requires_grad, keep_graph)
            outs.append((out, out.sin()))
        return outs

    outs = torch.compile(fn, backend=backend, fullgraph=True)(plain, asking)
    for i, ((out, after), (_, expected), case) in enumerate(zip(outs, fn(plain, asking), CASES, strict=True)):
        in_graph = all(case[1:])
        assert out._base is None and out.requires_grad == after.requires_grad == in_graph, case
        torch.testing.assert_close(after, expected)
        if in_graph:
            (g,) = torch.autograd.grad(after.sum(), asking, retain_graph=True)
            torch.testing.assert_close(g[i], 2 * (2 * asking[i]).cos().detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_results_share_memory(backend):
    x = torch.randn(4, 6, requires_grad=True)
    for fn in (
        lambda x: make_viewless_tensor(x.view(24), True, True),
        lambda x: make_viewless_tensor(x.view(24), False, False),
        lambda x: make_viewless_tensor(x.view(24), True, False),
        lambda x: MakeViewlessTensor.apply(x.t(), True),
    ):
        torch.compiler.reset()
        out, expected = torch.compile(fn, backend=backend, fullgraph=True)(x), fn(x)
        in_graph = expected.requires_grad and not expected.is_leaf
        assert is_alias(out, expected) and out.requires_grad == in_graph


def test_no_grad_and_inference_mode():
    x = torch.randn(4, 6, requires_grad=True)
    with torch.no_grad():
        assert not make_viewless_tensor(x.view(24), True, True).requires_grad
        assert make_viewless_tensor(x.view(24), True, False).requires_grad
    with torch.inference_mode():
        out = make_viewless_tensor(x.view(24), True, True)
        assert out._base is None and not out.requires_grad and out.data_ptr() == x.data_ptr()


def upstream_viewless(inp):
    """Set another tensor's data, as Megatron-LM does."""
    out = torch.empty((1,), dtype=inp.dtype)
    out.data = inp.data
    return out


def test_writes_to_saved_tensors_raise():
    def run(viewless):
        x = torch.zeros(4, requires_grad=True)
        e = x.exp()  # saves its result, 1
        with torch.no_grad():
            viewless(e.view(2, 2)).mul_(5)
        e.sum().backward()
        return x.grad

    assert torch.equal(run(upstream_viewless), torch.full((4,), 5.0))  # silently wrong
    raises(RuntimeError, "modified by an inplace operation", run, lambda v: make_viewless_tensor(v, True, False))

    for keep_graph in (True, False):
        source = (torch.zeros(4, requires_grad=True) * 1).exp()
        out = make_viewless_tensor(source.view(2, 2), True, keep_graph)
        with torch.no_grad():
            out.mul_(5)
        assert out._version == source._version > 0
        raises(RuntimeError, "modified by an inplace operation", source.sum().backward)


def test_writes_to_unsaved_tensors_are_accepted():
    x = torch.ones(4, requires_grad=True)
    out = make_viewless_tensor((x * 2).view(2, 2), True, True)
    out.mul_(3)
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 6.0))


def test_setting_data_frees_the_memory(only_new_garbage):
    def survives(make):
        base = torch.randn(1000)
        storage = weakref.ref(base.untyped_storage())
        alias = make(base.view(10, 100))
        alias.data = torch.empty(0)
        del base
        gc.collect()
        return storage() is not None

    assert survives(lambda v: v)
    assert not survives(lambda v: make_viewless_tensor(v, False, True))


@pytest.mark.parametrize("call", [make_viewless_tensor, lambda inp, rg, kg: MakeViewlessTensor.apply(inp, rg)])
def test_errors(call):
    raises(TypeError, r"inp=\[1\] is not accepted: it must be a tensor, not list", call, [1], True, True)
    with pytest.raises(ValueError, match=r"requires_grad=True is not accepted where inp has dtype torch.int64"):
        call(torch.arange(4).view(2, 2), True, True)
