"""Graphs with offloaded tensors read memory that they have freed (docs/upstream.md).

``enable_activation_offloading`` lets ``ao::wait_tensor(host, keepalive=tensor)`` free the tensor with ``resize_(0)``.
The operator's schema declares no write to ``keepalive``, so Inductor may run the call before other readers of the
tensor, and ``reorder_for_peak_memory`` does, because the result of the wait seems to be free.

The operators are emulated here, as copies between two buffers of the CPU. Freed memory is filled with NaN.

Remedy: ``lowerings/offload.py`` passes the tensor as ``last_use_of_storage``, which frees nothing. Inductor frees the
tensor after its last reader. Upstream could declare the write: ``Tensor(b!)? keepalive``.
"""

from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

try:
    from torch._functorch._activation_offloading import offload_ops
except ImportError:
    raise SystemExit(0) from None  # torch 2.11 has no operators for offloading

pending: dict[int, tuple[Tensor, Tensor]] = {}  # copies, by the address of the result: source and result


@offload_ops.offload.register_kernel("cpu")
def offload(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    pending[host.data_ptr()] = tensor.detach(), host.detach()
    return host


@offload_ops.reload.register_kernel("cpu")
def reload(tensor: Tensor, device: torch.device, size: Any = None, stride: Any = None) -> Tensor:
    layout = (tensor.shape, tensor.stride()) if size is None else (size, stride)
    result = torch.empty_strided(*layout, dtype=tensor.dtype)
    pending[result.data_ptr()] = tensor.detach(), result.detach()
    return result


def wait(tensor: Tensor, keepalive: Tensor | None = None, last_use_of_storage: Tensor | None = None) -> Tensor:
    source, result = pending.pop(tensor.data_ptr())
    result.copy_(source)
    if keepalive is not None:
        keepalive.untyped_storage().fill_(0xFF)  # NaN, in the place of resize_(0)
    return tensor


library = torch.library.Library("ao", "IMPL")
library.impl("wait_tensor", wait, "CPU")


class MarkAll(CustomGraphPass):
    """Marks every computed value of the joint graph to be offloaded if it is saved."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta["should_offload"] = True

    def uuid(self) -> str:
        return "mark all"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(m, n) for m, n in ((64, 160), (160, 64)) * 2)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(nn.functional.gelu(self.a(x)))
        return x + self.d(nn.functional.gelu(self.c(self.norm(x))))  # type: ignore[no-any-return]


torch.manual_seed(0)
model, x = Model().double(), torch.randn(64, 64, dtype=torch.float64)
parameters = list(model.parameters())


def is_right(**settings: bool) -> bool:
    """Return True if compiled gradients with offloading are equal to eager ones, up to rounding."""
    torch._dynamo.reset()
    offloading = {"enable_activation_offloading": True, "activation_offload_separate_stream": True}
    offloading |= {"activation_offload_sink_wait": True, "activation_reload_prefetch": False}
    passes = {"joint_custom_post_pass": MarkAll(), "force_disable_caches": True}
    with functorch_config.patch(offloading), inductor_config.patch({**passes, **settings}):
        actual = torch.autograd.grad(torch.compile(model)(x).square().sum(), parameters)
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    return all(torch.allclose(a, b) for a, b in zip(actual, expected, strict=True))


assert not is_right()  # NaN
assert is_right(reorder_for_peak_memory=False)
