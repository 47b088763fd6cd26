"""A pytest plug-in: a test that loses the GPU ends its worker, and pytest-xdist starts another worker.

pytest -n 4 -p torch_fused_ops.benchmarks.laboratory.gpu_tests

After an illegal address, CUDA refuses all calls until the process ends.
"""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # Workers inherit these. Otherwise each would start as many compilers and threads as there are cores.
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="1")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_LeavesWithTheDevice(), "leaves-with-the-device")


class _LeavesWithTheDevice:
    """Hooks of a pytest-xdist worker."""

    @pytest.hookimpl(trylast=True)  # after xdist's own hook, which sends the test's result
    def pytest_runtest_logfinish(self) -> None:
        if torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except Exception:
                os._exit(1)
