"""Measurements of this library beside PyTorch's own: ``python -m torch_fused_ops bench``; ``docs/benchmarks.md``.

    harness     how everything is timed, checked, written down
    ways        the ways to run a function that are compared
    pointwise, mlp, inference, model    what is measured
    models      the models that are measured, in plain PyTorch
    laboratory  scripts behind other figures of the pages: of a clone, not installed

Lives at the top of the repository, is installed and imported as ``torch_fused_ops.benchmarks``.
"""
