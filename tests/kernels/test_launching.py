"""A launch runs the same kernel as Triton, with the same arguments. Later launches skip Triton.

A stub replaces Triton's driver and nothing is compiled: tests compare the specializations of kernels. The oracle is
Triton's own ``kernel[grid](...)``.
"""

import random
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch_fused_ops import virtual_gpu
from torch_fused_ops.kernels import activation, launching
from torch_fused_ops.kernels.launching import tl, triton

CPU = torch.device("cpu")


class Driver:
    """A stub of Triton's driver. ``ran`` lists the launches: (source, stream, grid, arguments)."""

    def __init__(self) -> None:
        self.ran: list[tuple[Any, int, tuple[int, ...], tuple[Any, ...]]] = []
        self.device = self.stream = 0
        self.utils = types.SimpleNamespace(
            load_binary=lambda *args: (None, 1, 32, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 1 << 20},
        )

    get_current_target = staticmethod(virtual_gpu.H100.target)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Replace Triton's launcher, which is compiled in C for each signature."""

        def run(x: int, y: int, z: int, stream: int, *values: Any) -> None:
            _function, _packed, meta, enter, _leave, *args = values
            enter(meta)
            self.ran.append((source, stream, (x, y, z), tuple(args)))

        return run


class NotCompiled(triton.compiler.CompiledKernel):  # type: ignore[misc]
    def __init__(self, src: Any, **_: Any) -> None:
        self.src, self.module, self._run, self._module_pid, self.kernel, self.name = src, None, None, None, None, "name"
        self.function = self.packed_metadata = None
        self.metadata_group, self.hash = {}, ""
        self.metadata = types.SimpleNamespace(
            shared=0, num_warps=4, warp_size=32, target=virtual_gpu.H100.target(), tmem_size=None
        )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton.compiler, "compile", lambda src, **options: NotCompiled(src, **options))
    monkeypatch.setattr(launching, "_COMPILED", {})
    return driver


def kernel() -> Any:
    """Return a new kernel without compiled variants."""
    return triton.jit(_kernel)


def _kernel(a, b, c, m, n, k, WIDTH: tl.constexpr, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


def launch(jit: Any, first: torch.Tensor | None = None, rows: int = 3) -> None:
    launching.launch(jit, (1, 1, 1), CPU, (first, None, None), (rows, 5, 7), CONSTANTS)


CONSTANTS = {"WIDTH": 16, "SCALE": 1.5, "num_warps": 4, **launching.OPTIONS}


def tensor(dtype: torch.dtype, offset: int) -> torch.Tensor:
    """Return a tensor whose address is ``offset`` bytes after a multiple of 16."""
    size = 4 * 16
    base = torch.zeros(size + 32, dtype=torch.uint8)
    first = -base.data_ptr() % 16 + offset
    return base[first : first + size].view(dtype)


def cases() -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]]:
    random.seed(0)
    kinds = [(dtype, offset) for dtype in (torch.bfloat16, torch.float16, torch.float32) for offset in (0, 4, 8, 12)]
    tensors = [None, *(tensor(dtype, offset) for dtype, offset in kinds for _ in range(2))]
    integers = [None, 0, 1, 2, 7, 8, 15, 16, 17, 24, 48, 1000, 2**31 - 1, 2**31, 2**31 + 16, 2**40, -1, -16, -(2**40)]
    for _ in range(1500):
        constants = CONSTANTS | {"WIDTH": random.choice([16, 32]), "SCALE": random.choice([None, 0.5, 1.5])}
        yield tuple(random.choices(tensors, k=3)), tuple(random.choices(integers, k=3)), constants


def test_a_launch_is_tritons(driver: Driver) -> None:
    """Each case runs twice, the second time from the table. Earlier launches must not affect it."""
    jit = kernel()
    for tensors, integers, constants in [case for case in cases() for _ in range(2)]:
        launching.launch(jit, (2, 3, 4), CPU, tensors, integers, constants)
        jit[2, 3, 4](*tensors, *integers, **constants)
        actual, expected = driver.ran
        assert actual[0] is expected[0], (tensors, integers, constants)
        assert all(a is b for a, b in zip(actual[3], expected[3], strict=True))
        assert actual[1:3] == expected[1:3]
        driver.ran.clear()
    assert len(launching._COMPILED) > 1000


def triton_runs(jit: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which launches through Triton are appended."""
    runs: list[Any] = []
    run = jit.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(args)
        return run(*args, **kwargs)

    monkeypatch.setattr(jit, "run", counted)
    return runs


def test_triton_runs_once_per_specialization(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    jit = kernel()
    runs = triton_runs(jit, monkeypatch)
    for offset, count in ((0, 1), (0, 1), (8, 2), (4, 2), (0, 2)):
        launch(jit, tensor(torch.float32, offset))
        assert len(runs) == count
    assert len(driver.ran) == 5


def test_launches_follow_device_stream_and_hooks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches follow the stream, the device, and Triton's switches and hooks."""
    jit = kernel()
    runs = triton_runs(jit, monkeypatch)

    def launch(index: int = 0) -> int:
        """Return the number of launches through Triton."""
        runs.clear()
        monkeypatch.setattr(torch.accelerator, "device_index", lambda _: torch.no_grad())  # any context manager
        driver.device = index
        launching.launch(jit, (1, 1, 1), torch.device("cuda", index), (None,) * 3, (3, 5, 7), CONSTANTS)
        return len(runs)

    assert [launch(), launch()] == [1, 0]
    driver.stream = 7
    assert launch() == 0
    assert driver.ran[-1][1] == 7
    assert [launch(1), launch(1), launch(0)] == [1, 0, 0], "each device has separate kernels"
    assert driver.ran[-1][0] is driver.ran[0][0]

    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    assert [launch(), launch()] == [1, 0]
    monkeypatch.setattr(triton.knobs.runtime, "debug", False)

    seen: list[Any] = []
    monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [seen.append])
    assert launch() == 0
    assert len(seen) == 1
    assert seen[0].get()["stream"] == 7

    jit.add_pre_run_hook(lambda *args, **kwargs: seen.append(kwargs["WIDTH"]))
    assert [launch(), launch()] == [1, 1]
    assert seen.count(16) == 2


def test_kernels_that_a_hook_prevents_are_not_stored(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **_: True)
    launch(kernel())
    assert not launching._COMPILED


def test_kernels_specialized_on_size_are_not_stored(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's backend compiles different kernels for tensors below and above 2 GiB."""
    driver.get_current_target = virtual_gpu.MI300X.target  # type: ignore[method-assign]
    jit = kernel()
    launch(jit, tensor(torch.float32, 0))
    assert len(driver.ran) == 1
    assert not launching._COMPILED


def test_errors_name_the_switch_for_kernels(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise ValueError("ptxas: no")

    monkeypatch.setattr(triton.compiler, "compile", fails)
    with pytest.raises(
        RuntimeError, match=r"_kernel of torch_fused_ops .* cpu: ptxas: no\n.*TORCH_FUSED_OPS_WITHOUT=kernels"
    ):
        launch(kernel())
    assert not launching._COMPILED


def test_memory_is_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MOST_COMPILED", 10)
    jit = kernel()
    for rows in range(35):
        launch(jit, rows=rows)
    assert len(launching._COMPILED) == 5


def test_operators_reuse_their_kernels(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators find their kernels in the table for new tensors, and pass all arguments."""
    x, bias = torch.randn(6, 48, dtype=torch.bfloat16), torch.randn(48)
    forward, backward = (activation.launch_of(name) for name in ("bias_act", "bias_act_backward"))
    for _ in range(2):
        forward(x.clone(), bias, None, "gelu")
        backward(x.clone(), x, bias, None, "gelu", (True, True, False))
    first, second = driver.ran[: len(driver.ran) // 2], driver.ran[len(driver.ran) // 2 :]
    assert [source.fn.__name__ for source, *_ in first] == ["_forward", "_backward"]
    for once, repeated in zip(first, second, strict=True):
        assert once[0] is repeated[0]
        assert once[2] == repeated[2]
        assert len(once[3]) == len(repeated[3]) == len(once[0].fn.arg_names)
    assert len(launching._COMPILED) == 2
