"""The Inductor plug-in: fusion passes, memory policy and lowerings of the fused operators.

The package's folder is at the top of the repository. It is installed and imported as ``torch_fused_ops.lowerings``. A
second copy under another name would register every lowering and pass twice.
"""

if __name__ != "torch_fused_ops.lowerings":
    raise ImportError(
        f"import this package as torch_fused_ops.lowerings, not as {__name__!r}: first install the project "
        "(`pip install -e .`)"
    )

import warnings
from importlib import import_module
from threading import get_ident
from typing import Any

import torch

from torch_fused_ops.lowerings import internals
from torch_fused_ops.settings import environment

_registered = _checked = False
_registering: set[int] = set()  # identifiers of threads inside register()
_off = ""


def register() -> None:
    """Register the fused operators with Inductor and its partitioner, and tag cache keys. Idempotent.

    The first import of ``torch._inductor.lowering`` calls this (see ``torch_fused_ops/__init__.py``). If this torch
    lacks a name in ``internals``, the fusion passes are off, and Inductor calls the operators as opaque kernels.
    """
    global _registered
    me = get_ident()
    # Importing ``operators`` registers lowerings. If it is first to import Inductor, this function runs while
    # it is partly imported. Other threads wait for the import locks, so a lock here could deadlock.
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
        warnings.warn(f"{off()} The operators still work; torch.compile fuses no MLPs.", stacklevel=2)


def off() -> str:
    """Return why the fusion passes are off on this torch, for messages; "" if they are on."""
    version = f"{torch.__version__} ({_off}); {internals.tested()}"
    return _off and f"torch_fused_ops: the fusion passes are off on torch {version}."


def load_passes() -> Any:
    """Return the module ``passes``, or if the fusion passes are off, ``disabled``, whose functions fuse nothing."""
    global _checked
    register()
    if not _checked:
        _checked = True
        _check()
        if not _off and internals.is_newer(torch.__version__):
            warnings.warn(
                f"torch_fused_ops on torch {torch.__version__}: {internals.tested()}. It has all that is needed; "
                "please report errors.",
                stacklevel=2,
            )
    return import_module(f"{__name__}.{'disabled' if _off else 'passes'}")


def require() -> None:
    """Raise RuntimeError if the fusion passes are off."""
    load_passes()
    if _off:
        raise RuntimeError(off())
