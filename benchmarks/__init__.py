"""Measure this library and PyTorch on this machine: ``python -m torch_fused_ops bench``; ``docs/benchmarks.md``.

    harness     times, checks and writes
    ways        variants to compare
    pointwise, mlp, model    benchmarks
    models      their models, in plain PyTorch
    laboratory  scripts behind other figures of the pages, in a clone only

The folder is at the top of the repository. It is installed and imported as ``torch_fused_ops.benchmarks``.
"""
