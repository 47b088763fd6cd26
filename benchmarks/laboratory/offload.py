"""Measure ``offload``: the link's bandwidth, the time that copies add to a step, and its peak. No GPU has run it yet.

    python -m torch_fused_ops.benchmarks.laboratory.offload --part {link,layers,step} [--device cuda] [--quick]

The program fails if gradients with and without offloading differ in a bit.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic GEMMs

import torch
from torch import Tensor, nn

from torch_fused_ops import FusionPolicy
from torch_fused_ops.benchmarks import models
from torch_fused_ops.benchmarks.laboratory import run_script

PARTS = ("link", "layers", "step")


class Blocks(nn.Module):
    """Llama's layers, without embedding and head."""

    def __init__(self, config: models.Config, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.LlamaBlock(config) for _ in range(layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cos, sin)
        return x


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: torch.device, repetitions: int = 10) -> float:
    """Return the median time of a call. Its first two runs do not count."""
    times = []
    for _ in range(repetitions + 2):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repetitions // 2]


def link(device: torch.device, nbytes: int) -> None:
    """Print the bandwidth between pinned host memory and a device, alone and next to GEMMs."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory, a = torch.empty_like(host, device=device), torch.randn(4096, 4096, device=device).bfloat16()
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(to: Tensor, source: Tensor, gemms: int) -> None:
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        for _ in range(gemms):
            a @ a

    for name, to, source in (("to the host", host, memory), ("to the device", memory, host)):
        alone = seconds(lambda: copy(to, source, 0), device)  # noqa: B023
        print(f"{name}: {nbytes / alone / 1e9:.1f} GB/s", flush=True)
    gemms = 50 if device.type == "cuda" else 1
    times = [seconds(lambda: copy(host, memory, n), device) for n in (0, gemms)]  # noqa: B023
    print(f"copy {times[0] * 1e3:.2f} ms; with {gemms} GEMMs {times[1] * 1e3:.2f} ms", flush=True)


def compare(device: torch.device, config: models.Config, layers: int, offload: Any) -> bool:
    """Print time and peak of forward and backward with and without offloading. Return True if gradients are equal."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    model = Blocks(config, layers).to(device, torch.bfloat16)
    x = torch.randn(1, config.context, config.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.outer(torch.arange(config.context), 1e4 ** -torch.linspace(0, 1, config.width // config.heads // 2))
    cos, sin = (t.to(device, torch.bfloat16) for t in (angles.cos(), angles.sin()))
    gradients = []
    for moving in (False, offload):
        torch._dynamo.reset()
        policy = FusionPolicy(memory="fp8", offload=moving)
        fn = torch.compile(model, backend="fused", options={"policy": policy})  # type: ignore[dict-item]

        def step(fn: Any = fn) -> None:
            model.zero_grad()
            fn(x, cos, sin).float().square().mean().backward()

        step()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        text = f"offload={moving}: {seconds(step, device) * 1e3:.2f} ms"
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            step()
            text += f", peak {torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB"
        print(text, flush=True)
    same = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    print(f"gradients are {'' if same else 'NOT '}bitwise equal", flush=True)
    return same


def main(arguments: Namespace) -> int:
    """Run a part. Return exit code 1 if gradients differ."""
    device, quick = torch.device(arguments.device), arguments.quick
    if arguments.part == "link":
        link(device, 1 << (16 if quick else 28))
        return 0
    config = models.QUICK if quick else models.LLAMA
    if arguments.part == "layers":  # one layer's tensors move, and the copies have the next layer's time
        return int(not compare(device, config, 2 if quick else 3, {"blocks.0": True}))
    return int(not compare(device, config, 2 if quick else 8, {"blocks.[0-5]": True}))


if __name__ == "__main__":
    options: dict[str, Any] = {
        "part": {"choices": PARTS, "required": True},
        "device": {"default": "cuda", "help": "(default: cuda)"},
        "quick": {"action": "store_true", "help": "small sizes, on any machine"},
    }
    sys.exit(run_script(main, __doc__, **options))
