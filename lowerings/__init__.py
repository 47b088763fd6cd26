"""The Inductor plug-in: pick-up, memory policy and lowerings of the fused operators.

Lives at the top of the repository, is installed and imported as ``torch_fused_ops.lowerings`` and under no other
name: a second copy would register every lowering and pass twice.
"""

if __name__ != "torch_fused_ops.lowerings":
    raise ImportError(
        f"this package is imported as torch_fused_ops.lowerings, not as {__name__!r}: install the project "
        "(`pip install -e .`) and import it by that name"
    )

from importlib import import_module
from threading import get_ident
from typing import Any

import torch

from torch_fused_ops import environment
from torch_fused_ops.lowerings import internals

_registered = _checked = False
_registering: set[int] = set()  # threads that are at it
_off = ""


def register() -> None:
    """Put our operators into Inductor's and the partitioner's tables, and our identity into cache keys. Idempotent.

    Runs by itself when ``torch._inductor.lowering`` is first imported (see ``torch_fused_ops/__init__.py``). Where this
    torch lacks what it takes, pick-up is off, and Inductor calls our operators as it calls anybody's.
    """
    global _registered
    me = get_ident()
    # operators registers as it is imported: when *it* is what imports Inductor first, it is still half way through
    # here. Another thread waits for the imports; a lock of ours besides could wait for them the other way round.
    if _registered or me in _registering:
        return
    _registering.add(me)
    try:
        _turn_off(_lacking(imported=True))
        if not _off:
            for name in ("dropout", "float8", "operators", "softmax"):
                import_module(f"{__name__}.{name}")
            import_module(f"{__name__}.partition").allow_recomputation()
            passes = import_module(f"{__name__}.passes")
            passes.tag_caches()
            if environment.POLICY is not None:
                passes.enable(environment.POLICY)
    except Exception as error:
        _turn_off(f"{type(error).__name__}: {error}")
    finally:
        _registering.discard(me)
    _registered = True


def _lacking(imported: bool = False) -> str:
    names = internals.missing(imported)
    return f"it has no {', '.join(names)}" if names else ""


def _turn_off(why: str) -> None:
    global _off
    if why and not _off:
        _off = why
        internals.warn(f"{off()} Operators work as they are; torch.compile does not find MLPs.")


def off() -> str:
    """Why pick-up is off on this torch; "" where nothing is known to miss."""
    return _off and f"torch_fused_ops: pick-up is off on torch {torch.__version__} ({_off}); {internals.tested()}."


def pick_up() -> Any:
    """The module of passes; where pick-up is off, one with the same functions, which leave everything as it is."""
    global _checked
    register()
    if not _checked:
        _checked = True
        _turn_off(_lacking())
        if not _off and internals.is_newer(torch.__version__):
            internals.warn(
                f"torch_fused_ops on torch {torch.__version__}: {internals.tested()}. All that it needs is there; "
                "please report what does not work."
            )
    return import_module(f"{__name__}.{'disabled' if _off else 'passes'}")


def require() -> None:
    """RuntimeError where pick-up is off."""
    pick_up()
    if _off:
        raise RuntimeError(off())
