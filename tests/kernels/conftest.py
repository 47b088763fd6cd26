"""The device that the kernels' tests run on."""

import pytest
import torch


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    pytest.importorskip("triton")
    from kernel_harness import Device

    from torch_fused_ops.families.float8 import kernels

    on = Device(request.param)
    monkeypatch.setattr(kernels, "launch", on.launch)
    return on
