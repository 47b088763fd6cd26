"""Softmax's lowerings: compiled equals eager, forward and backward, static and dynamic. GPU code is interpreted."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_operators import check, cpp, leaf
from torch import Tensor

from torch_fused_ops.operators import reference
from torch_fused_ops.testing import precision

softmax = torch.ops.fused.scaled_masked_softmax
Make = Callable[[], tuple[Callable[..., Tensor], list[Tensor]]]
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def hidden(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.3


CASES: dict[str, Make] = {
    "plain": lambda: (lambda x: softmax(x * 2, None, None) + 1, [leaf(3, 17, 24)]),
    "everything": lambda: (
        lambda x, m, s: softmax(x * 2, m, s, 0.3, True, 7, -1) * 3,
        [leaf(2, 3, 17, 24), hidden(2, 1, 17, 24), leaf(3)],
    ),
    "everything, bf16, sink fp32": lambda: (
        lambda x, m, s: softmax(x, m, s, -0.3, False, 5, 3),
        [leaf(2, 3, 17, 24, dtype=BF16), hidden(2, 1, 1, 24), leaf(3)],
    ),
    "more queries than keys": lambda: (lambda x: softmax(x, None, None, 0.3, True), [leaf(2, 9, 5)]),
    "one query": lambda: (lambda x, s: softmax(x, None, s, 0.3, True, 4), [leaf(2, 1, 33), leaf(2)]),
    "mask of one row": lambda: (lambda x, m: softmax(x, m, None), [leaf(4, 17, 24), hidden(24)]),
    "scale 0, expanded mask": lambda: (
        lambda x, m: softmax(x, m.expand(17, 24), None, 0.0),
        [leaf(4, 17, 24), hidden(17, 1)],
    ),
    "float64, transposed, sliced": lambda: (
        lambda x, m: softmax(x.mT[..., 1:], m[..., ::2], None, 0.3, True),
        [leaf(3, 17, 24, dtype=F64), hidden(24, 32)],
    ),
    "only the sink": lambda: (
        lambda x, s: softmax(x, None, s, 0.3),
        [leaf(2, 3, 17, 24, grad=False), leaf(3, dtype=BF16)],
    ),
    "empty": lambda: (lambda x, s: softmax(x, None, s) + 1, [leaf(2, 0, 8), leaf(2)]),
    "no keys": lambda: (lambda x, s: softmax(x, None, s) + 1, [leaf(2, 3, 0), leaf(2)]),
    "attention": lambda: (
        lambda q, k, v, m: softmax(q @ k.mT, m, None, 0.25, True) @ v,
        [leaf(2, 3, 17, 8), leaf(2, 3, 17, 8), leaf(2, 3, 17, 8), hidden(2, 1, 1, 17)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_eager(name: str) -> None:
    fn, args = CASES[name]()
    check(fn, args)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "everything", "more queries than keys"])
def test_dynamic_shapes(name: str) -> None:
    fn, args = CASES[name]()
    check(fn, args, dynamic=True)


@pytest.mark.codegen_is_slow
def test_all_lengths_share_a_compilation() -> None:
    """The batch and the numbers of queries and keys are symbolic."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fn = lambda x, s: softmax(x, None, s, 0.3, True, 6)  # noqa: E731
    compiled = torch.compile(fn, backend=counter, fullgraph=True, dynamic=True)
    for batch, sq, sk in ((2, 5, 7), (3, 7, 5), (4, 9, 9), (5, 3, 40)):
        x, s = leaf(batch, 3, sq, sk), leaf(3)
        torch.testing.assert_close(compiled(x, s), softmax(x, None, s, 0.3, True, 6))
    assert counter.frame_count == 1


def test_cpus_compute_an_exponential_once() -> None:
    (code,) = cpp(lambda x: softmax(x, None, None, 0.3), leaf(8, 64, grad=False))
    assert code.count("at::vec::clamp(") == 1


@pytest.mark.codegen_is_slow
def test_masked_rows_with_infinite_scores_are_zero() -> None:
    def fn(x: Tensor, m: Tensor, s: Tensor) -> Tensor:
        return softmax(x, m, s, 0.3)

    x, m = leaf(2, 5, 8), hidden(2, 5, 8)
    m[0, 1] = True
    with torch.no_grad():
        x[1, 2] = -torch.inf
        x[1, 3, 4] = torch.nan
    s = leaf(2)
    got = torch.compile(fn, fullgraph=True)(x, m, s)
    torch.testing.assert_close(got, fn(x, m, s), equal_nan=True)
    assert (got[0, 1] == 0).all() and (got[1, 2] == 0).all() and got[1, 3].isnan().all()
    (dx,) = torch.autograd.grad(got[:, :3].sum(), x)
    assert dx[:, :3].isfinite().all()


TYPES = {"*fp32": F32, "*bf16": BF16, "*fp64": F64, "*i1": torch.bool, "*fp16": torch.float16}


def interpret(kernel: Any, out: Tensor, *inputs: Tensor) -> Tensor:
    """Run a generated kernel on inputs of different dtypes, which identify its arguments."""
    from torch_fused_ops import virtual_gpu

    signature = re.search(r"'signature': \{(.*?)\}", kernel.source)
    assert signature
    by_type = {t.dtype: t for t in inputs}
    pointers = re.findall(r"'(in_ptr\d|out_ptr\d)': '(\*\w+)'", signature[1])
    args = [by_type[TYPES[t]] if name.startswith("in") else out for name, t in pointers]
    virtual_gpu.interpret(kernel, *args)
    return out


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    ("dtype", "sk", "scale"),
    [(BF16, 300, 0.3), (F32, 300, -0.3), (BF16, 1500, 0.125), (F32, 1500, 0.3), (torch.float16, 1500, 20.0)],
)
def test_gpu_code_meets_the_precision_contract(dtype: torch.dtype, sk: int, scale: float) -> None:
    """One kernel has all features, for rows that fit in registers (300) and for longer rows (1500)."""
    virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 2, 3, sk, generator=g, dtype=F64) * 4 + 30).to(dtype)
    sink = torch.tensor([30.0, -2.0]) * abs(scale)
    sink = sink.bfloat16() if dtype == F32 else sink
    mask = torch.rand(2, 1, 1, sk, generator=g) < 0.3
    mask[1] = True

    def fn(x: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
        return softmax(x, mask, sink, scale, True, sk // 2)

    (kernel,) = virtual_gpu.compile_on_paper(fn, x, mask, sink, training=False).inference.kernels
    y = interpret(kernel, torch.empty_like(x), x, mask, sink)
    truth = reference.scaled_masked_softmax(x.double(), mask, sink.double(), scale, True, sk // 2)
    assert precision.error(y, truth).max() <= precision.LIMITS["forward", dtype]
    assert (y[1] == 0).all()


@pytest.mark.parametrize("sk", [300, 1500])
def test_gpu_code_of_backward_meets_the_precision_contract(sk: int) -> None:
    virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")
    y = softmax(torch.randn(2, 3, sk), None, None, 1.0, True).bfloat16()
    g = torch.randn(2, 3, sk)  # a different dtype identifies the argument

    def fn(g: Tensor, y: Tensor) -> Tensor:
        return torch.ops.fused.scaled_masked_softmax_backward(g, y, 0.3, True, -1, -1, None, [True, False])[0]

    (kernel,) = virtual_gpu.compile_on_paper(fn, g, y, training=False).inference.kernels
    got = interpret(kernel, torch.empty_like(y), g, y)
    truth, _ = reference.scaled_masked_softmax_backward(g.double(), y.double(), 0.3, True, -1, -1, None, (True, False))
    assert truth is not None
    e = precision.softmax_gradient_error(got, g.double(), y.double(), truth, 0.3, F32)
    assert e.max() <= precision.LIMITS["gradient", BF16]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("causal", "left", "right"), itertools.product((False, True), (-1, 40), (-1, 17)))
def test_gpu_code_of_windows(causal: bool, left: int, right: int) -> None:
    virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")
    x = torch.randn(2, 30, 50)
    call = (None, None, 0.3, causal, left, right)
    (kernel,) = virtual_gpu.compile_on_paper(lambda x: softmax(x, *call), x, training=False).inference.kernels
    y = interpret(kernel, torch.empty_like(x), x)
    truth = reference.scaled_masked_softmax(x.double(), *call)
    assert precision.error(y, truth).max() <= 1e-5
