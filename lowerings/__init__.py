"""The Inductor plug-in: fusion passes, memory policy and lowerings of the fused operators.

The package lies at the top of the repository. It is installed and imported as ``torch_fused_ops.lowerings`` and under
no other name: a second copy would register every lowering and pass twice.
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

from torch_fused_ops.lowerings import internals
from torch_fused_ops.settings import environment

_registered = _checked = False
_registering: set[int] = set()  # threads that are at it
_off = ""


def register() -> None:
    """Put our operators into Inductor's and the partitioner's tables, and our identity into cache keys. Idempotent.

    Runs by itself when ``torch._inductor.lowering`` is first imported (see ``torch_fused_ops/__init__.py``). Where this
    torch lacks a name of ``internals``, the fusion passes are off, and Inductor calls our operators as any others.
    """
    global _registered
    me = get_ident()
    # The module operators registers as it is imported. If it is the first to import Inductor, it is half way through
    # here. Another thread waits for the imports; a lock of ours could wait for them in the other order.
    if _registered or me in _registering:
        return
    _registering.add(me)
    try:
        _check(imported=True)
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


def _check(imported: bool = False) -> None:
    names = internals.missing(imported)
    _turn_off(f"it lacks {', '.join(names)}" if names else "")


def _turn_off(why: str) -> None:
    global _off
    if why and not _off:
        _off = why
        internals.warn(f"{off()} The operators still work; torch.compile fuses no MLPs.")


def off() -> str:
    """The reason why the fusion passes are off on this torch, for messages; "" where they are on."""
    version = f"{torch.__version__} ({_off}); {internals.tested()}"
    return _off and f"torch_fused_ops: the fusion passes are off on torch {version}."


def pick_up() -> Any:
    """The module ``passes``; where the fusion passes are off, ``disabled``, whose functions do nothing."""
    global _checked
    register()
    if not _checked:
        _checked = True
        _check()
        if not _off and internals.is_newer(torch.__version__):
            internals.warn(
                f"torch_fused_ops on torch {torch.__version__}: {internals.tested()}. It has all that is needed; "
                "please report errors."
            )
    return import_module(f"{__name__}.{'disabled' if _off else 'passes'}")


def require() -> None:
    """Raise RuntimeError where the fusion passes are off."""
    pick_up()
    if _off:
        raise RuntimeError(off())
