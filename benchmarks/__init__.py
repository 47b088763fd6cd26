"""Measurements of this library beside PyTorch's own: ``python -m torch_fused_ops bench``; ``docs/benchmarks.md``.

    harness     how everything is timed, checked, written down
    ways        the ways to run a function that are compared
    pointwise, mlp, inference, model    what is measured, and the targets
    probe       what a GPU does with our kernels, and could do with others
    gpu         everything in three commands, for a GPU that is there for half an hour; decisions: what follows
    on_paper    exact figures for a GPU that is not there
    models      the models that are measured, in plain PyTorch
    pictures    drawn from the results' JSON

Lives at the top of the repository, is installed and imported as ``torch_fused_ops.benchmarks``.
"""
