"""Descriptions of GPUs, and a context in which torch and Triton believe that a described GPU is present."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

# The patches of `described` apply to the whole process.
_LOCK = threading.RLock()

TRITON_MISSING = "the virtual GPU needs Triton: pip install triton numpy"


@dataclass(frozen=True)
class GPU:
    """The properties of a GPU that Inductor and Triton read, named as in `torch.cuda.get_device_properties`.

    Attributes:
        name: the driver's name for the GPU.
        arch: the machine code's target, "sm_90" or "gfx942".
        capability: compute capability; ROCm reports (9, 4) for gfx942.
        multi_processor_count: streaming multiprocessors, or compute units.
        total_memory: bytes of device memory; for an H200, the number that CUDA reports.
        shared_memory_per_block: bytes per block by default.
        shared_memory_per_block_optin: the most bytes per block, which is Triton's limit.
        warp_size: threads that execute together.
        max_threads_per_block: threads in a block.
        max_threads_per_multi_processor: resident threads.
        regs_per_multiprocessor: 32-bit registers.
        L2_cache_size: bytes.
    """

    name: str
    arch: str
    capability: tuple[int, int]
    multi_processor_count: int
    total_memory: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    L2_cache_size: int
    warp_size: int = 32
    max_threads_per_block: int = 1024
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536

    @property
    def is_amd(self) -> bool:
        """True if Triton's AMD backend generates the machine code."""
        return self.arch.startswith("gfx")

    def target(self) -> Any:
        """Return this GPU's `triton.backends.compiler.GPUTarget`."""
        GPUTarget = import_triton("triton.backends.compiler").GPUTarget
        if self.is_amd:
            return GPUTarget("hip", self.arch, self.warp_size)
        return GPUTarget("cuda", self.capability[0] * 10 + self.capability[1], self.warp_size)

    def properties(self) -> Any:
        """Return an object like the result of `torch.cuda.get_device_properties`."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        major, minor = self.capability
        gcn = f"{self.arch}:sramecc+:xnack-" if self.is_amd else ""
        return types.SimpleNamespace(**fields, major=major, minor=minor, gcnArchName=gcn, is_integrated=0)


MiB, GiB = 1 << 20, 1 << 30
A100 = GPU("NVIDIA A100-SXM4-80GB", "sm_80", (8, 0), 108, 80 * GiB, 49152, 166912, 40 * MiB)
H100 = GPU("NVIDIA H100 80GB HBM3", "sm_90", (9, 0), 132, 80 * GiB, 49152, 232448, 50 * MiB)
H200 = GPU("NVIDIA H200", "sm_90", (9, 0), 132, 139 * GiB, 49152, 232448, 60 * MiB)
B200 = GPU("NVIDIA B200", "sm_100", (10, 0), 148, 180 * GiB, 49152, 232448, 126 * MiB)
MI300X = GPU(
    "AMD Instinct MI300X", "gfx942", (9, 4), 304, 192 * GiB, 65536, 65536, 4 * MiB, 64, regs_per_multiprocessor=131072
)
# One of a superchip's two GPUs. `nvidia-smi` lists 189,471 and 284,208 MiB.
GB200 = GPU("NVIDIA GB200", "sm_100", (10, 0), 152, 185 * GiB, 49152, 232448, 126 * MiB)
GB300 = GPU("NVIDIA GB300", "sm_103", (10, 3), 152, 277 * GiB, 49152, 232448, 126 * MiB)
_gpu_without_hbm = functools.partial(
    GPU, shared_memory_per_block=49152, shared_memory_per_block_optin=101376, max_threads_per_multi_processor=1536
)
A10G = _gpu_without_hbm("NVIDIA A10G", "sm_86", (8, 6), 80, 24 * GiB, L2_cache_size=6 * MiB)
L40S = _gpu_without_hbm("NVIDIA L40S", "sm_89", (8, 9), 142, 48 * GiB, L2_cache_size=96 * MiB)
RTX5090 = _gpu_without_hbm("NVIDIA GeForce RTX 5090", "sm_120", (12, 0), 170, 32 * GiB, L2_cache_size=96 * MiB)
RTXPRO6000 = _gpu_without_hbm(
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120", (12, 0), 188, 96 * GiB, L2_cache_size=128 * MiB
)
GPUS = {"A100": A100, "H100": H100, "H200": H200, "B200": B200, "GB200": GB200, "GB300": GB300, "MI300X": MI300X}
GPUS |= {"A10G": A10G, "L40S": L40S, "RTX5090": RTX5090, "RTXPRO6000": RTXPRO6000}


def by_name(name: str | GPU, argument: str = "name") -> GPU:
    """Return the described GPU called `name`.

    Args:
        name: a key of `GPUS`, in upper or lower case, with or without spaces ("RTX 5090"); or a GPU, which is returned.
        argument: the argument's name in messages.

    Raises:
        ValueError: for any other name.
    """
    gpu = name if isinstance(name, GPU) else GPUS.get(str(name).upper().replace(" ", ""))
    if gpu is None:
        raise ValueError(f"{argument}={name!r} is not known; accepted: {', '.join(GPUS)}, or a GPU(…)")
    return gpu


def import_triton(module: str = "triton") -> Any:
    """Import a module of Triton, or raise an error with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "triton":
            raise ModuleNotFoundError(TRITON_MISSING, name="triton") from error
        raise


def _clear_device_caches() -> None:
    """Clear torch's caches that depend on the device. They must not keep results for a described GPU.

    Only modules whose cached functions have no side effects are listed, so that clearing is always safe.
    """
    from torch._inductor.runtime.hints import DeviceProperties

    functions = [DeviceProperties.create]
    for name in (
        "torch._inductor.utils",
        "torch.utils._triton",
        "torch._inductor.fx_passes.pad_mm",
        "torch._inductor.codegen.cuda.cuda_env",
    ):
        with contextlib.suppress(ImportError):
            functions += vars(importlib.import_module(name)).values()
    for function in functions:
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _patches(gpu: GPU) -> dict[str, Any]:
    """Return replacements for torch's functions by dotted name while `gpu` is described."""

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    # Dynamo and Inductor query the device through CudaInterface, which has these functions of torch.cuda as attributes.
    shared = {
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": gpu.properties(),
        "is_bf16_supported": True,
        "synchronize": None,
    }
    cuda = {
        **shared,
        "is_available": True,
        "is_initialized": False,
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "is_current_stream_capturing": False,
        "_lazy_init": None,
        "set_rng_state": None,
    }
    interface = {**shared, "get_raw_stream": 0, "set_device": None, "exchange_device": 0, "maybe_exchange_device": 0}
    patches = {
        **{f"torch.cuda.{name}": answer(value) for name, value in cuda.items()},
        **{f"torch._dynamo.device_interface.CudaInterface.{name}": answer(v) for name, v in interface.items()},
        # the compiler saves and restores the generator's state
        "torch.cuda.get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": answer(None),
        "torch._subclasses.fake_tensor.init_gpu_context": answer(None),
        # torch's mode for machines without a device: fake tensors do not initialize it
        "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init": True,
    }
    if gpu.is_amd:
        patches |= {"torch.version.hip": "6.4.0", "torch.version.cuda": None}
    return patches


@contextlib.contextmanager
def described(gpu: GPU) -> Iterator[None]:
    """Make torch and Triton treat `gpu` as the only device until exit.

    Other threads wait to enter, but see the patches. Code generation works inside, but launching kernels and allocating
    on the device do not. A real device is not initialized or used.

    Args:
        gpu: the GPU to describe.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    triton = import_triton()
    import torch._dynamo.device_interface as device_interface
    import torch._inductor.runtime.triton_helpers
    import torch._subclasses.fake_tensor

    device_interface.get_interface_for_device("cpu")  # fill the registry first: filling it overwrites patches
    driver = triton.runtime.driver
    active = driver._active
    # It only knows the target and device 0.
    described_driver = types.SimpleNamespace(
        get_current_target=gpu.target,
        get_active_torch_device=functools.partial(torch.device, "cuda", 0),
        get_current_device=lambda: 0,
    )
    with _LOCK, contextlib.ExitStack() as stack:
        if "TRITON_DEFAULT_FP_FUSION" not in os.environ:  # Triton 3.9 warns then that 3.10 has another default
            os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
            stack.callback(os.environ.pop, "TRITON_DEFAULT_FP_FUSION", None)
        stack.callback(_clear_device_caches)
        _clear_device_caches()
        interfaces, cuda = device_interface.device_interfaces, device_interface.CudaInterface
        stack.enter_context(mock.patch.dict(interfaces, {"cuda": cuda, "cuda:0": cuda}))
        stack.enter_context(mock.patch.dict(device_interface.caching_worker_current_devices, {"cuda": 0}))
        worker_properties = {"cuda": [gpu.properties()]}
        stack.enter_context(mock.patch.dict(device_interface.caching_worker_device_properties, worker_properties))
        for name, value in _patches(gpu).items():
            stack.enter_context(mock.patch(name, value))
        stack.callback(setattr, driver, "_active", active)
        driver.set_active(described_driver)
        yield
