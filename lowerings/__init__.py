"""The Inductor plug-in: pick-up, memory policy and lowerings of the fused operators.

Lives at the top of the repository, is installed and imported as ``torch_fused_ops.lowerings`` and under no other
name: a second copy would register every lowering and pass twice.
"""

if __name__ != "torch_fused_ops.lowerings":
    raise ImportError(
        f"this package is imported as torch_fused_ops.lowerings, not as {__name__!r}: install the project "
        "(`pip install -e .`) and import it by that name"
    )

_registered = False


def register() -> None:
    """Put our operators into Inductor's and the partitioner's tables, and our identity into cache keys. Idempotent.

    Runs by itself when ``torch._inductor.lowering`` is first imported (see ``torch_fused_ops/__init__.py``).
    """
    global _registered
    if _registered:
        return
    _registered = True
    # operators registers as it is imported: when *it* is what imports Inductor first, it is still half way through
    # here.
    from torch_fused_ops.lowerings import dropout, memory, operators, passes, softmax  # noqa: F401

    memory.allow_recomputation()
    passes.tag_caches()
