"""A pytest plug-in: a test that loses the GPU ends its worker, and pytest-xdist starts another worker.

pytest -n 4 -p torch_fused_ops.benchmarks.laboratory.gpu_tests

After an illegal address CUDA refuses everything until the process ends.
"""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_LeavesWithTheDevice(), "leaves-with-the-device")


class _LeavesWithTheDevice:
    """In a worker of pytest-xdist."""

    @pytest.hookimpl(trylast=True)  # behind xdist's own hook, which has sent the test's result by then
    def pytest_runtest_logfinish(self) -> None:
        if torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except Exception:
                os._exit(1)
