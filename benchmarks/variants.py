"""Describe the benchmarks' variants, for ``bench NAME --help``, which does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch_fused_ops.policy import GEMM, MEMORY

AUTOTUNE = "max-autotune-no-cudagraphs"
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # recipes' names in torchao


@dataclass(frozen=True)
class Meaning:
    """An explanation of some variants.

    Attributes:
        ways: the variants' names.
        benchmarks: the benchmarks that have them.
        text: the explanation.
    """

    ways: tuple[str, ...]
    benchmarks: tuple[str, ...]
    text: str


_EVERY, _TRAINED = ("pointwise", "mlp", "model"), ("mlp", "model")
MEANINGS = (
    Meaning(("eager",), _EVERY, "PyTorch without a compiler"),
    Meaning(("compile",), _EVERY, "torch.compile"),
    Meaning(("budget",), _TRAINED,
            "torch.compile under torch._functorch.config.activation_memory_budget = 0.99"),
    Meaning(("autotune",), _EVERY, f'torch.compile(mode="{AUTOTUNE}")'),
    Meaning(tuple(f"fused-{memory}" for memory in MEMORY if memory != "tiled"), _TRAINED,
            'backend="fused" with each level of FusionPolicy(memory=…); strict: unfused MLPs are errors'),
    Meaning(("fused-autotune",), _TRAINED, "fused-free with autotune's mode; both only if --ways names them"),
    Meaning(tuple(f"gemm-{recipe}" for recipe in GEMM if recipe != "bf16"), _TRAINED,
            "fused-free with FusionPolicy(gemm=…); only if --ways names it"),
    Meaning(tuple(f"torchao-{recipe.replace('_', '-')}" for recipe in TORCHAO), _TRAINED,
            "torch.compile after torchao's convert_to_float8_training of the same layers, if torchao can be "
            "imported; only if --ways names it"),
    Meaning(("operators",), ("pointwise",), "eager PyTorch with our eager operators"),
    Meaning(("fused",), ("pointwise",), "our operators under torch.compile"),
    Meaning(("gemms",), ("mlp",),
            "an MLP's GEMMs alone, into preallocated tensors: a lower bound for any fusion"),
    Meaning(("copy",), ("pointwise",), "a copy of as many bytes as the operator reads and writes"),
    Meaning(("liger",), ("pointwise",), "Liger-Kernel's SwiGLU and GEGLU, if liger_kernel can be imported"),
)  # fmt: skip
