"""Measure a training step of whole models: time, peak memory, and bytes saved for backward.

A step is forward, and backward to the parameters. The optimizer is the same for all variants, so it does not run.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from . import models, ways
from .harness import DTYPES, Case, Device, Plan, UsageError, sets_of

SHAPE = "BATCHxLENGTH, e.g. 8x1024"
MODELS: dict[str, tuple[Callable[[models.Config], nn.Module], models.Config]] = {
    "gpt2-124m": (models.GPT, models.GPT2),
    "llama3-8b-4-layers": (models.Llama, models.LLAMA),
    "small-gpt": (models.GPT, models.SMALL),
    "small-llama": (models.Llama, models.SMALL),
    "quick-gpt": (models.GPT, models.QUICK),
    "quick-llama": (models.Llama, models.QUICK),
}
DEFAULT: dict[str, list[tuple[str, int, int]]] = {  # model, batch, length
    "cuda": [("gpt2-124m", 16, 1024), ("llama3-8b-4-layers", 4, 2048)],
    "cpu": [("small-gpt", 8, 128), ("small-llama", 8, 128)],
    "quick": [("quick-gpt", 2, 16), ("quick-llama", 2, 16)],
}

Combination = tuple[str, int, int, torch.dtype]


def grid(device: Device, quick: bool, sizes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> list[Combination]:
    """Return the cases: the device's models, by default in bfloat16 on GPUs and in float32 on CPUs."""
    gpu = device.type == "cuda"
    chosen = DEFAULT["quick" if quick else device.type]
    if sizes:
        chosen = [(name, batch, length) for name, _, _ in chosen for batch, length in sizes]
    for name, _, length in chosen:
        if length > MODELS[name][1].context:
            raise UsageError(f"--sizes: {name} takes sequences of {MODELS[name][1].context} tokens, not {length}")
    kinds = [DTYPES[d] for d in dtypes] or [torch.bfloat16 if gpu else torch.float32]
    return [(*case, dtype) for case in chosen for dtype in kinds]


def name_of(model: str, batch: int, length: int, dtype: torch.dtype) -> str:
    return f"{model} {batch}×{length} {str(dtype).removeprefix('torch.')}"


def build(name: str, dtype: torch.dtype, device: Device, seed: int) -> nn.Module:
    """Build a model with random weights on the device."""
    make, config = MODELS[name]
    with torch.device(device.where):
        model = make(config).to(dtype)
    models.initialize(model, seed)
    return model


def batches(name: str, shape: tuple[int, int], sets: int, device: Device, seed: int) -> list[list[Tensor]]:
    """Return random tokens and targets."""
    generator = torch.Generator(device=device.where).manual_seed(seed)
    vocabulary = MODELS[name][1].vocabulary
    return [
        [torch.randint(vocabulary, shape, generator=generator, device=device.where) for _ in range(2)]
        for _ in range(sets)
    ]


def truth(model: nn.Module, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Return a function that computes the loss and gradients in float64, one sequence of the batch at a time."""

    def compute() -> list[Tensor]:
        doubled = copy.deepcopy(model).double()
        parts = list(zip(*(t.split(1) for t in inputs), strict=True))
        loss = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
        for part in parts:
            part_loss = doubled(*part) / len(parts)
            part_loss.backward()
            loss += part_loss.detach()
        return [loss, *(p.grad for p in doubled.parameters() if p.grad is not None)]

    return compute


def case(name: str, batch: int, length: int, dtype: torch.dtype, device: Device, plan: Plan) -> Case:
    """Return the case of a model's training step."""
    model = build(name, dtype, device, plan.seed)
    sets = min(4, sets_of(device, batch * length * 16))
    inputs = batches(name, (batch, length), sets, device, plan.seed)
    tangents = [None] * sets
    config = MODELS[name][1]
    return Case(
        name_of(name, batch, length, dtype),
        {"model": name, "tokens": batch * length, "batch": batch, "length": length, "width": config.width,
         "layers": config.layers, "parameters": sum(p.numel() for p in model.parameters())},
        {way: ways.training(way, model, inputs, tangents, fullgraph=True, dynamic=False) for way in ways.COMPILED},
        truth(model, inputs[0]),
        sets,
        dtype,
        ours=ways.OURS,
        loose=ways.LOOSE,
        named_only=ways.NAMED_ONLY,
    )  # fmt: skip
