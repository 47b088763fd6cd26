"""Load kernels as Python objects: generated kernels from source, hand-written kernels from their decorators."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .gpus import GPU, H200, described, import_triton
from .results import GeneratedKernel


@dataclass(frozen=True)
class Configuration:
    """A launch configuration that Inductor may choose for a generated kernel.

    Attributes:
        block: block sizes by name.
        num_warps: warps per block.
        num_stages: depth of Triton's software pipeline.
    """

    block: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int | None = None


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel with the arguments for its compilation.

    Attributes:
        jit: the `triton.JITFunction`.
        signature: types of arguments by name, "*bf16", "i32" or "constexpr".
        constants: values of arguments that are fixed.
        attrs: divisibility of arguments, by position.
        options: compiler options.
        configurations: the configurations that Inductor would try, in order; for a hand-written kernel, those of
            `triton.autotune`, or one without block sizes.
        inductor_meta: Inductor's metadata for its launcher; empty for a hand-written kernel.
    """

    jit: Any
    signature: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    attrs: Mapping[Any, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    configurations: tuple[Configuration, ...] = (Configuration(),)
    inductor_meta: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def _load(source: str, gpu: GPU) -> Kernel:
    from torch._inductor.codecache import PyCodeCache

    with described(gpu):
        module = PyCodeCache.load(source, extra=gpu.name)  # its configurations depend on the GPU
    autotuner = next((v for v in vars(module).values() if hasattr(v, "fn") and hasattr(v, "triton_meta")), None)
    if autotuner is None:
        raise ValueError(f"kernel: its source defines no kernel of Inductor:\n{source[:400]}")
    meta = autotuner.triton_meta
    # A fixed configuration is part of the code, which omits masks that its blocks do not need.
    fixed = autotuner.configs[0].kwargs if autotuner.heuristic_type.name == "FIXED" else {}
    return Kernel(
        autotuner.fn,
        dict(meta["signature"]),
        {**meta.get("constants", {}), **fixed},
        meta["configs"][0],
        {"enable_fp_fusion": meta.get("enable_fp_fusion", True)},
        tuple(Configuration(dict(c.kwargs), c.num_warps, c.num_stages) for c in autotuner.configs),
        autotuner.inductor_meta,
    )


def load(kernel: Any, gpu: GPU = H200) -> Kernel:
    """Load a kernel from a `GeneratedKernel`, from its source, or from a hand-written `triton.jit` function, which
    `triton.autotune` and `triton.heuristics` may wrap.

    Raises:
        TypeError: `kernel` is of another type.
    """
    import_triton()
    if isinstance(kernel, GeneratedKernel):
        kernel = kernel.source
    if isinstance(kernel, str):
        return _load(kernel, gpu)
    while hasattr(getattr(kernel, "fn", None), "fn"):  # autotune and heuristics wrap the function
        kernel = kernel.fn
    JITFunction = import_triton("triton.runtime.jit").JITFunction
    if type(kernel).__name__ == "InterpretedFunction":  # decorated under TRITON_INTERPRET=1
        return Kernel(JITFunction(kernel.fn))
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"kernel: got {type(kernel).__name__}, expected a GeneratedKernel or a triton.jit function")
    return Kernel(kernel)


def launch_grid(kernel: Kernel, named: Mapping[str, Any], configuration: Configuration) -> Sequence[int]:
    """Return the grid of a generated kernel's launch, from its arguments by name."""
    from torch._inductor.runtime.triton_heuristics import GridExpr

    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages or 1}
    grid = GridExpr.from_meta(dict(kernel.inductor_meta), {**configuration.block, **options})
    sizes: Sequence[int] = grid.eval_slow({**named, **configuration.block})
    return sizes
