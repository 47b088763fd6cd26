"""A launch runs the kernel that Triton would run, with the same arguments, and finds it again without Triton.

Triton's driver is stood in for, and nothing is compiled: what counts is what a kernel would be compiled for. The
oracle is Triton's own ``kernel[grid](...)``.
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
    """What Triton asks of a driver; ``ran`` are the launches: (what was compiled, stream, grid, arguments)."""

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
        """Launches in Triton's place, which compiles it in C for each signature."""

        def run(x: int, y: int, z: int, stream: int, *given: Any) -> None:
            _function, _packed, meta, enter, _leave, *args = given
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
    """A new one, which has been compiled for nothing."""
    return triton.jit(_kernel)


def _kernel(a, b, c, m, n, k, WIDTH: tl.constexpr, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


def launch(jit: Any, first: torch.Tensor | None = None, rows: int = 3) -> None:
    launching.launch(jit, (1, 1, 1), CPU, (first, None, None), (rows, 5, 7), CONSTANTS)


CONSTANTS = {"WIDTH": 16, "SCALE": 1.5, "num_warps": 4, **launching.OPTIONS}


def tensor(dtype: torch.dtype, offset: int) -> torch.Tensor:
    """``offset`` bytes behind a multiple of 16."""
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
    """Each case twice, so that it is found the second time; what else was launched before must not matter."""
    jit = kernel()
    for tensors, integers, constants in [case for case in cases() for _ in range(2)]:
        launching.launch(jit, (2, 3, 4), CPU, tensors, integers, constants)
        jit[2, 3, 4](*tensors, *integers, **constants)
        ours, tritons = driver.ran
        assert ours[0] is tritons[0], (tensors, integers, constants)
        assert all(a is b for a, b in zip(ours[3], tritons[3], strict=True))
        assert ours[1:3] == tritons[1:3]
        driver.ran.clear()
    assert len(launching._COMPILED) > 1000


def triton_runs(jit: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was launched through Triton: appended to as it happens."""
    runs: list[Any] = []
    run = jit.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(args)
        return run(*args, **kwargs)

    monkeypatch.setattr(jit, "run", counted)
    return runs


def test_triton_is_asked_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    jit = kernel()
    runs = triton_runs(jit, monkeypatch)
    for offset, asked in ((0, 1), (0, 1), (8, 2), (4, 2), (0, 2)):
        launch(jit, tensor(torch.float32, offset))
        assert len(runs) == asked
    assert len(driver.ran) == 5


def test_what_is_read_at_each_launch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream, the device, Triton's switches, its hooks."""
    jit = kernel()
    runs = triton_runs(jit, monkeypatch)

    def launch(index: int = 0) -> int:
        """How often Triton was asked."""
        runs.clear()
        monkeypatch.setattr(torch.accelerator, "device_index", lambda _: torch.no_grad())  # stands for a context
        driver.device = index
        launching.launch(jit, (1, 1, 1), torch.device("cuda", index), (None,) * 3, (3, 5, 7), CONSTANTS)
        return len(runs)

    assert [launch(), launch()] == [1, 0]
    driver.stream = 7
    assert launch() == 0
    assert driver.ran[-1][1] == 7
    assert [launch(1), launch(1), launch(0)] == [1, 0, 0], "a device has kernels of its own"
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


def test_a_kernel_that_a_hook_keeps_from_compiling(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **_: True)
    launch(kernel())
    assert not launching._COMPILED


def test_backends_that_look_at_more_than_alignment(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's: a tensor of less than 2 GiB has another kernel than a larger one."""
    driver.get_current_target = virtual_gpu.MI300X.target  # type: ignore[method-assign]
    jit = kernel()
    launch(jit, tensor(torch.float32, 0))
    assert len(driver.ran) == 1
    assert not launching._COMPILED


def test_a_kernel_that_fails_says_how_to_do_without(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_operators(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours find their kernels again, whatever the tensors are, and hand over all arguments."""
    x, bias = torch.randn(6, 48, dtype=torch.bfloat16), torch.randn(48)
    forward, backward = (activation.launch_of(name) for name in ("bias_act", "bias_act_backward"))
    for _ in range(2):
        forward(x.clone(), bias, None, "gelu")
        backward(x.clone(), x, bias, None, "gelu", (True, True, False))
    first, second = driver.ran[: len(driver.ran) // 2], driver.ran[len(driver.ran) // 2 :]
    assert [source.fn.__name__ for source, *_ in first] == ["_forward", "_backward"]
    for ours, again in zip(first, second, strict=True):
        assert ours[0] is again[0]
        assert ours[2] == again[2]
        assert len(ours[3]) == len(again[3]) == len(ours[0].fn.arg_names)
    assert len(launching._COMPILED) == 2
