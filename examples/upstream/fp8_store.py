"""Activations stored in float8 are not scaled back (docs/upstream.md).

Forward reads the option of ``post_grad_fusion_options["activation_quantization_aten_pass"]`` with
``.get("use_scaling", True)``, backward with ``.get("use_scaling", False)``. Remedy: set ``use_scaling``.
"""

from collections.abc import Callable

import torch
import torch._inductor.config
from torch import Tensor, nn

NAME = "activation_quantization_aten_pass"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
x = torch.randn(128, 64).bfloat16()


def gradients(fn: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.cat(
        [g.float().flatten() for g in torch.autograd.grad(fn(leaf).float().sum(), [leaf, *model.parameters()])]
    )


def off(**store: bool) -> float:
    torch._dynamo.reset()
    expected = gradients(model)
    with torch._inductor.config.patch(post_grad_fusion_options={NAME: {"size_in_mb": 0, **store}}):
        actual = gradients(torch.compile(model, backend="aot_eager_decomp_partition"))  # or "inductor"
    return float((actual - expected).norm() / expected.norm())


assert off() > 100  # scaled in forward, and not back
assert off(use_scaling=True) < 0.1
assert off(use_scaling=False) < 0.1
