"""The device that the kernels' tests run on."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    pytest.importorskip("triton")
    from kernel_harness import Device

    from torch_fused_ops.kernels import activation as kernels
    from torch_fused_ops.kernels import launching

    on = Device(request.param)
    monkeypatch.setattr(launching, "launch", on.launch)
    kernels._plan.cache_clear()
    yield on
    kernels._plan.cache_clear()
