"""Eager CPU kernels that Inductor compiles: the same bits as torch.compile, any size, threads, and failures."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fused_ops as tfo
from torch_fused_ops.kernels import compiled
from torch_fused_ops.operators.autograd import REGISTERED

pytestmark = pytest.mark.skipif(not compiled.IS_SUPPORTED, reason="compiled kernels need torch 2.13")
fused = torch.ops.fused
SEED = torch.tensor([7])


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """Compile calls of any size. Yields the table of kernels, which is empty when a test begins."""
    compiled._KERNELS.clear()
    monkeypatch.setattr(compiled, "FEWEST", 1)
    monkeypatch.setattr(compiled, "_failures", {})
    yield compiled._KERNELS
    compiled._KERNELS.clear()


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


# An operator, and a function that returns its arguments for a number of rows of n elements.
CASES: dict[str, tuple[Callable[..., Any], Callable[[int, int], tuple[Any, ...]]]] = {
    "gelu": (fused.bias_act, lambda rows, n: (normal(rows, n), None, None, "gelu")),
    "bias": (
        fused.bias_act_backward,
        lambda rows, n: (normal(rows, n), normal(rows, n), normal(n), None, "silu", [True, True, False]),
    ),
    "columns": (fused.glu_backward, lambda rows, n: (
        *(normal(rows, n), normal(rows, 2 * n)[:, n:], normal(rows, 3 * n)[:, :n], None),
        *("gelu_tanh", 1.0, 7.0, [True, True, False]),
    )),
    "three axes": (
        fused.bias_glu_backward,
        lambda rows, n: (
            *(normal(rows, 1, n), normal(rows, 1, 2 * n), normal(2 * n), torch.rand(rows, 1)),
            *("silu", "halves", 0.0, None, [True, True, True]),
        ),
    ),
    "float32": (fused.glu_backward, lambda rows, n: (
        *(normal(rows, n, dtype=torch.float32) for _ in range(3)), None, "quick_gelu", 0.0, None, [True, True, False],
    )),
    "dropout": (fused.dropout_add, lambda rows, n: (normal(rows, n), normal(n), normal(rows, n), SEED, 0.3)),
    "dropout backward": (
        fused.dropout_add_backward,
        lambda rows, n: (normal(rows, n), SEED, 0.3, torch.bfloat16, None, [True, False]),
    ),
    "mask": (
        fused.scaled_masked_softmax,
        lambda rows, n: (normal(1, 2, rows, n), torch.rand(rows, n) > 0.3, torch.randn(2), 0.125, True),
    ),
}  # fmt: skip


def results(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    out = fn(*args)
    return [t for t in (out if isinstance(out, tuple) else [out]) if t is not None]


def formula_results(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    fewest, compiled.FEWEST = compiled.FEWEST, 1 << 62
    saved = dict(compiled._KERNELS)
    compiled._KERNELS.clear()
    try:
        return results(fn, args)
    finally:
        compiled.FEWEST = fewest
        compiled._KERNELS.update(saved)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "gelu" else pytest.mark.slow) for n in CASES])
def test_one_kernel_serves_every_size(name: str, kernels: dict[Any, Any]) -> None:
    """One kernel serves all sizes. It returns the same bits as torch.compile's kernel for one size."""
    operator, arguments = CASES[name]
    args = arguments(24, 48)
    code = torch.compile(lambda *args: operator(*args), fullgraph=True, dynamic=False)
    for actual, expected in zip(results(operator, args), results(code, args), strict=True):
        assert torch.equal(actual, expected) and actual.stride() == expected.stride()
    count = len(set(kernels.values()))
    for rows, n in ((24, 48), (7, 33), (1, 64), (50, 1)):
        args = arguments(rows, n)
        for actual, expected in zip(results(operator, args), formula_results(operator, args), strict=True):
            assert actual.is_contiguous() and actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-4)
    assert len(set(kernels.values())) <= count + 2  # one row adds layouts: contiguous data, and a mask's axis of size 1


def test_calls_with_and_without_autograd_share_a_kernel(kernels: dict[Any, Any]) -> None:
    """Dispatchers drop trailing default arguments. Calls without these arguments have the same kernel."""
    gate, up = normal(8, 16), normal(8, 16).requires_grad_()
    fused.glu(gate, up.detach(), None, "silu")
    fused.glu(gate, up, None, "silu", 0.0, None)
    assert len(kernels) == 2 and len(set(kernels.values())) == 1


def test_small_calls_and_float64_run_the_formula(kernels: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FEWEST", 1000)
    fused.bias_act(normal(999), None, None, "gelu")
    fused.bias_act(normal(2000, dtype=torch.float64), None, None, "gelu")
    fused.bias_act(torch.empty(0, 5), None, None, "gelu")
    with torch._subclasses.FakeTensorMode():
        fused.bias_act(torch.empty(2000), None, None, "gelu")
    assert not kernels


def stub(monkeypatch: pytest.MonkeyPatch, *outcomes: Exception | None) -> list[Any]:
    """Replace the compiler by one whose first calls have these outcomes. Returns the operators it was called for."""
    calls: list[Any] = []

    def compile(signature: Any, key: Any) -> Any:
        calls.append(signature.name)
        if len(calls) <= len(outcomes) and (error := outcomes[len(calls) - 1]) is not None:
            raise error
        return lambda tensors: tensors[0] + 1

    monkeypatch.setattr(compiled, "_compile", compile)
    return calls


def test_repeated_small_calls_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, x = stub(monkeypatch), torch.ones(4)
    for name, value in (("FEWEST", 5), ("REPEATS", 3)):
        monkeypatch.setattr(compiled, name, value)
    compiled._calls.cache_clear()
    registered = REGISTERED["bias_act"]
    kernel = compiled.kernel(registered.signature, registered.plain)
    for activation in ("gelu", "tanh", "gelu", "gelu"):
        assert not calls
        kernel(x, None, None, activation)
    assert calls == ["bias_act"] and torch.equal(kernel(x, None, None, "gelu"), x + 1)


def test_threads_compile_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls, x, barrier = stub(monkeypatch), torch.ones(4), threading.Barrier(8)
    outputs: list[Tensor] = []

    def call() -> None:
        barrier.wait()
        outputs.append(fused.bias_act(x, None, None, "gelu"))

    threads = [threading.Thread(target=call) for _ in range(8)]
    with caplog.at_level(logging.INFO, "torch_fused_ops"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fused.bias_act(x, None, None, "tanh")
    assert calls == ["bias_act"] * 2 and len(outputs) == 8 and all(torch.equal(y, x + 1) for y in outputs)
    assert [record.message.partition(",")[0] for record in caplog.records] == ["compiling eager kernels"]


FAILURES = {"compiler": "InvalidCxxCompiler: no g++\nwas found", "lowering": "no lowering"}


@pytest.mark.parametrize("reason", FAILURES.values(), ids=FAILURES)
def test_calls_run_the_formula_if_compiling_fails(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If there is no C++ compiler, no other kernel is tried. Other failures affect one kernel."""
    calls, x = stub(monkeypatch, RuntimeError(reason)), torch.ones(4)
    expected = formula_results(fused.bias_act, (x, None, None, "gelu"))
    for _ in range(3):
        assert torch.equal(fused.bias_act(x, None, None, "gelu"), *expected)
    assert len(calls) == 1
    assert [r.levelname for r in caplog.records if r.name == "torch_fused_ops"] == ["WARNING"]
    fused.bias_act(x, None, None, "tanh")
    assert len(calls) == (2 if reason == "no lowering" else 1)
    assert (compiled.status() == f"formulas in plain PyTorch on cpu: {compiled._failures.get('cpu')}") == (
        len(calls) == 1
    )


def test_number_of_kernels_per_operator_is_bounded(monkeypatch: pytest.MonkeyPatch, kernels: dict[Any, Any]) -> None:
    calls = stub(monkeypatch)
    monkeypatch.setattr(compiled, "_MOST_KERNELS", 5)
    for i in range(10):
        fused.dropout_add(torch.ones(4), None, None, SEED, i / 20 + 0.01)
    fused.bias_act(torch.ones(4), None, None, "gelu")
    assert calls == ["dropout_add"] * 5 + ["bias_act"] and len(kernels) == 6


def test_replaced_activation_is_compiled_anew(kernels: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stub(monkeypatch)
    for factor in (2.0, 3.0):
        tfo.register_activation("tests_compiled_anew", lambda x, factor=factor: factor * torch.relu(x), replace=True)
        fused.bias_act(torch.ones(4), None, None, "tests_compiled_anew")
    assert len(calls) == 2
