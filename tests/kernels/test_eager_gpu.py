"""Eager GPU kernels that Inductor generates from the formulas, without a GPU: results, keys, machine code.

Triton's interpreter runs them on CPU tensors. `test_on_gpu.py` runs them on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import meta, on_gpu
from torch import Tensor
from torch.utils._pytree import tree_map_only

pytest.importorskip("triton")

from kernel_harness import assert_close, wide

import torch_fused_ops as tfo
from torch_fused_ops import virtual_gpu
from torch_fused_ops.kernels import compiled
from torch_fused_ops.operators import reference
from torch_fused_ops.operators.autograd import REGISTERED
from torch_fused_ops.testing.samples import OPERATORS, backward_samples, samples
from torch_fused_ops.virtual_gpu import A100, B200, GPU, H100

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of infinities
T, F = True, False
SEED = torch.tensor([-3141592653589793238])
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def normal(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, dtype=F64).to(dtype)


def identify(name: str, *args: Any) -> tuple[Any, list[Tensor]]:
    key, tensors = compiled.identification(REGISTERED[name].signature, on_gpu=True)(args)
    return compiled.with_defaults(REGISTERED[name].signature, key, len(args)), tensors


# ---- results ---------------------------------------------------------------------------------------------------------

# An operator, and a function from a number of rows to its arguments. All numbers of rows have one kernel.
RESULTS: dict[str, tuple[str, Callable[[int], tuple[Any, ...]]]] = {
    "sequence": ("bias_act", lambda n: (normal(n, 33), None, None, "gelu")),
    "bias and scale": ("bias_act", lambda n: (normal(2, n, 48, dtype=BF16), normal(48), normal(2, n), "silu")),
    "float64": ("bias_act", lambda n: (normal(n, 8, dtype=F64), normal(8), None, "tanh")),
    "sums in blocks": (
        "bias_act_backward",
        lambda n: (*(normal(64 * n, 40) for _ in "gx"), normal(40), normal(64 * n), "gelu", [T, T, T]),
    ),
    "sums": ("bias_act_backward", lambda n: (normal(n, 40), normal(n, 40), normal(40), None, "silu", [T, T, F])),
    "rows apart": (
        "glu_backward",
        lambda n: (normal(n, 32), normal(n, 64)[:, 32:], normal(n, 32), None, "silu", 1.0, 0.7, [T, T, F]),
    ),
    "interleaved": ("bias_glu", lambda n: (normal(n, 64), normal(64), None, "gelu_tanh", "interleaved", 0.0, None)),
    "packed": (
        "bias_glu_backward",
        lambda n: (
            *(normal(64 * n, 33), normal(64 * n, 66), normal(66), normal(64 * n)),
            *("quick_gelu", "swapped", 0.0, None, [T, T, T]),
        ),
    ),
    "dropout": ("dropout_add", lambda n: (normal(n, 36), normal(36), normal(n, 36, dtype=BF16), SEED, 0.3)),
    "dropout backward": ("dropout_add_backward", lambda n: (normal(64 * n, 36), SEED, 0.3, F32, F32, [T, T])),
    "dropout bias": ("dropout_add_backward", lambda n: (normal(64 * n, 36), SEED, 0.3, F32, F32, [F, T])),
    "mask": (
        "scaled_masked_softmax",
        lambda n: (normal(2, 3, n, 24), torch.rand(2, 1, n, 24) > 0.5, normal(3), 0.5, T, -1, -1),
    ),
    "window": ("scaled_masked_softmax", lambda n: (normal(n, 24), None, None, -0.5, F, 3, -1)),
    "softmax backward": (
        "scaled_masked_softmax_backward",
        lambda n: (normal(2, 3, n, 24), 0.7 * normal(2, 3, n, 24).softmax(-1), 0.5, T, -1, -1, F32, [T, T]),
    ),
}


def check(name: str, args: tuple[Any, ...], run: Callable[..., Any] | None = None) -> None:
    """Compare a call with its float64 reference. A sum, and a value near 0, is as exact as its terms."""
    expected = getattr(reference, name)(*wide(args))
    as_kernel = REGISTERED[name].plain(*args)
    results = (run or on_gpu(name))(*args)
    terms = softmax_terms(*args) if name == "scaled_masked_softmax_backward" else itertools.repeat(0.0)
    triples = zip(*(r if isinstance(r, tuple) else (r,) for r in (results, expected, as_kernel)), strict=True)
    for (actual, exact, plain), of_terms in zip(triples, terms, strict=False):
        if plain is None:
            assert actual is None
            continue
        assert (actual.dtype, actual.shape, actual.is_contiguous()) == (plain.dtype, plain.shape, True)
        finest = F64 if any(isinstance(a, Tensor) and a.dtype == F64 for a in args) else F32
        size = float(exact.detach().abs().max()) * max(1.0, (args[0].numel() / exact.numel()) ** 0.5)
        assert_close(actual, exact.double(), gradient=True, absolute=8 * torch.finfo(finest).eps * max(size, of_terms))


def softmax_terms(grad: Tensor, output: Tensor, scale: float, *_: Any) -> tuple[float, float]:
    """Return the sizes of the terms that cancel in the gradients of input and sink (see ``testing.precision``)."""
    products = (grad * output).double().abs()
    of_row = products.sum(-1, keepdim=True)
    of_sink = (1 + output.double().sum(-1, keepdim=True)) * of_row
    return float((abs(scale) * (products + output * of_row)).max()), float(of_sink.sum())


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("case", RESULTS)
def test_results_for_every_number_of_rows(case: str) -> None:
    name, arguments = RESULTS[case]
    for rows in (7, 2, 1):
        check(name, arguments(rows))
    assert len({identify(name, *arguments(rows))[0] for rows in (7, 2)}) == 1


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("case", ["rows apart", "packed", "mask", "bias and scale"])
def test_results_for_any_width(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some widths, a kernel serves all numbers of columns."""
    name, arguments = RESULTS[case]
    key_of = compiled.with_defaults
    monkeypatch.setattr(compiled, "with_defaults", lambda *args: compiled._of_any_width(key_of(*args)))
    check(name, arguments(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", RESULTS)
def test_results_on_cuda(case: str) -> None:
    name, arguments = RESULTS[case]
    for rows in (7, 2, 1):

        def run(*args: Any) -> Any:
            on_cuda = (a.cuda() if isinstance(a, Tensor) else a for a in args)
            return tree_map_only(Tensor, Tensor.cpu, getattr(torch.ops.fused, name)(*on_cuda))

        check(name, arguments(rows), run)


def test_registered_activations_are_compiled() -> None:
    tfo.register_activation("tests_eager_gpu", lambda x: x * torch.sigmoid(1.3 * x))
    check("bias_act", (normal(4, 16), normal(16), None, "tests_eager_gpu"))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("backward", [False, True])
def test_every_sample(op: str, backward: bool) -> None:
    for sample in (backward_samples if backward else samples)(op):
        if all(t.numel() for t in sample.args if isinstance(t, Tensor)):
            check(sample.op, tuple(sample.args))


# ---- keys ------------------------------------------------------------------------------------------------------------


def place(name: str, *args: Any) -> tuple[Any, ...]:
    return tuple(identify(name, *args)[0][-1][1:])  # without the device


def test_a_kernel_assumes_divisors_of_sizes() -> None:
    """Columns, their divisor if they are symbols, rows of a block, and whether offsets have 64 bits."""
    x, bias, seed = meta(128, 96), meta(96), meta(1, dtype=torch.int64)
    assert place("bias_act", x, None, None, "gelu") == (0, 16, 1, False)
    assert place("bias_act", meta(3, 1000), None, None, "gelu") == (0, 8, 1, False)
    assert place("glu", x, meta(128, 192)[:, 96:], None, "silu") == (96, 1, 1, False)
    assert (
        place("bias_act", x, bias, None, "gelu") == place("bias_act", x, None, meta(128), "gelu") == (96, 1, 1, False)
    )
    assert place("bias_glu", meta(128, 192), None, None, "silu") == (96, 1, 1, False)
    assert place("scaled_masked_softmax", x, None, None) == (96, 1, 1, False)
    backward = ("bias_act_backward", x, x, bias, None, "gelu")
    assert place(*backward, [T, T, F]) == (96, 1, 64, False)
    assert place(*backward, [T, F, F]) == (96, 1, 1, False)
    assert place("bias_act_backward", x[:100], x[:100], bias, None, "gelu", [T, T, F]) == (96, 1, 1, False)
    assert place("dropout_add", x, None, x, seed, 0.1) == (0, 16, 1, False)
    assert place("dropout_add_backward", x, seed, 0.1, BF16, None, [T, F]) == (0, 16, 1, False)
    assert place("dropout_add_backward", x, seed, 0.1, BF16, BF16, [T, T]) == (96, 1, 64, False)
    assert place("bias_act", meta(2**21, 2**10), None, None, "gelu") == (0, 16, 1, True)


def test_rows_apart_and_masks_have_layouts() -> None:
    x, mask = meta(2, 8, 48), meta(2, 1, 24, dtype=torch.bool)
    key, tensors = identify("glu", x[..., :24], x[..., 24:], None, "silu")
    assert key[:2] == ((BF16, "rows", 48),) * 2 and tensors[1].stride() == (384, 48, 1)
    key, tensors = identify("glu", x.transpose(0, 1), x.transpose(0, 1), None, "silu")
    assert key[:2] == (BF16, BF16) and tensors[0].is_contiguous()  # a copy: rows have no common stride
    key, tensors = identify("scaled_masked_softmax", meta(2, 8, 24), mask, None)
    assert key[1] == (torch.bool, False, True, False) and tensors[1].dtype == torch.bool


def test_many_widths_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's keys grow with every token. After a few widths, two kernels serve all."""
    keys: list[Any] = []
    monkeypatch.setattr(compiled, "_KERNELS", {})
    monkeypatch.setattr(compiled, "_compile", lambda signature, key: keys.append(key) or (lambda tensors: tensors[0]))
    monkeypatch.setattr(compiled, "_MOST_WIDTHS", 3)
    monkeypatch.setattr(compiled, "FEWEST", 1)
    registered = REGISTERED["scaled_masked_softmax"]
    run = compiled.kernel(registered.signature, registered.plain, on_gpu=True)
    for columns in (*range(10, 20), 32, 48):
        x = torch.ones(2, columns)
        assert run(x, None, None) is x
    assert [(k[-1].columns, k[-1].unit) for k in keys] == [(10, 1), (11, 1), (12, 1), (0, 1), (0, 2), (0, 16)]
    assert run(torch.ones(3, 11), None, None).shape == (3, 11) and len(keys) == 6


def test_the_first_call_compiles_unless_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(compiled, "_KERNELS", {})
    monkeypatch.setattr(compiled, "_compile", lambda *key: calls.append(key) or (lambda tensors: tensors[0]))
    x = torch.ones(2, 3)
    may_compile = lambda: compiled._may_compile(FakeDevice("cuda"), [x], ())  # noqa: E731
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert may_compile() is not capturing
    monkeypatch.setattr(compiled, "_failures", {"cuda": "TritonMissing"})
    assert not may_compile() and compiled.status() == "formulas in plain PyTorch on cuda: TritonMissing"
    registered = REGISTERED["bias_act"]
    run = compiled.kernel(registered.signature, registered.plain, on_gpu=True)
    assert run(torch.ones(0, 3), None, None, "gelu").shape == (0, 3) and not calls


class FakeDevice:
    """The attributes of a first tensor that ``_may_compile`` reads."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device, 0)

    def numel(self) -> int:
        return 1


# ---- machine code ----------------------------------------------------------------------------------------------------

N = 4096
X, X2, B, B2 = meta(N, N), meta(N, 2 * N), meta(N), meta(2 * N)
S, SCORES = meta(N, dtype=F32), meta(2, 16, 1024, 1024)
RANDOM = meta(1, dtype=torch.int64)
CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "gelu": ("bias_act", (X, None, None, "gelu")),
    "gelu bias scale": ("bias_act", (X, B, S, "gelu")),
    "gelu backward": ("bias_act_backward", (X, X.clone(), None, None, "gelu", [T, F, F])),
    "gelu bias backward": ("bias_act_backward", (X, X.clone(), B, None, "gelu", [T, T, F])),
    "silu glu": ("glu", (X, X.clone(), None, "silu", 0.0, None)),
    "silu glu scale backward": ("glu_backward", (X, X.clone(), X.clone(), S, "silu", 0.0, None, [T, T, T])),
    "swiglu packed bias": ("bias_glu", (X2, B2, None, "silu", "halves", 0.0, None)),
    "swiglu packed bias backward": ("bias_glu_backward", (X, X2, B2, None, "silu", "halves", 0.0, None, [T, T, F])),
    "interleaved": ("bias_glu", (X2, B2, None, "quick_gelu", "interleaved", 1.0, 7.0)),
    "interleaved backward": (
        "bias_glu_backward",
        (X, X2, B2, None, "quick_gelu", "interleaved", 1.0, 7.0, [T, T, F]),
    ),
    "dropout": ("dropout_add", (X, B, X.clone(), RANDOM, 0.1)),
    "dropout backward": ("dropout_add_backward", (X, RANDOM, 0.1, BF16, BF16, [T, T])),
    "softmax": ("scaled_masked_softmax", (SCORES, None, None, 0.125, F, -1, -1)),
    "softmax mask": (
        "scaled_masked_softmax",
        (SCORES, meta(2, 1, 1024, 1024, dtype=torch.bool), meta(16), 0.125, F, -1, -1),
    ),
    "softmax causal": ("scaled_masked_softmax", (SCORES, None, None, 0.125, T, -1, -1)),
    "softmax long": ("scaled_masked_softmax", (meta(1, 1, 64, 16384), None, None, 0.125, T, -1, -1)),
    "softmax backward": (
        "scaled_masked_softmax_backward",
        (SCORES, SCORES.clone(), 0.125, T, -1, -1, BF16, [T, T]),
    ),
}
# This one runs by default, on one GPU.
DEFAULT = {"swiglu packed bias backward"}
SLOW = [pytest.mark.slow]
ON_GPUS = [
    pytest.param(case, gpu, marks=[] if case in DEFAULT and gpu is H100 else SLOW, id=f"{case}-{gpu.arch}")
    for case in CALLS
    for gpu in (A100, H100, B200)
]


@pytest.mark.parametrize(("case", "gpu"), ON_GPUS)
def test_machine_code_has_wide_loads_and_no_spills(case: str, gpu: GPU) -> None:
    """A call launches one kernel, and one or two for sums over rows. Data is loaded and stored in 16 bytes a thread."""
    operator, args = CALLS[case]
    graph = virtual_gpu.compile_operator_on_paper(operator, *args, gpu=gpu).inference
    sums = "bias" in case or case.startswith(("dropout", "interleaved", "softmax"))
    is_split = case in ("dropout backward", "interleaved backward") or (case == "softmax backward" and gpu is not B200)
    assert not graph.extern and len(graph.kernels) == 1 + (operator.endswith("backward") and sums) + is_split
    for kernel in graph.kernels:
        code = virtual_gpu.assemble(kernel, gpu)
        assert code.spills == 0, code
        # Atomic sums depend on the order of threads and would differ between runs.
        assert not [i for i in code.instructions if i.lower().startswith(("atom", "red."))]
    code = virtual_gpu.assemble(graph.kernels[0], gpu)
    vectors = [i for i in code.instructions if i.startswith(("LDG", "STG")) and i.endswith(".128")]
    assert {i[:3] for i in vectors} == {"LDG", "STG"} or "interleaved" in case, code.instructions
