"""Compute every operator in plain torch: the reference for tests of kernels and lowerings, most exact in float64.

``reference.bias_glu(x, None, None, "silu", layout="swapped")`` computes the operator ``fused::bias_glu``,
``reference.bias_glu_backward`` its backward operator, and so on. The module also exports ``formulas``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch_fused_ops import formulas
from torch_fused_ops.formulas import *  # noqa: F403
from torch_fused_ops.operators.autograd import REGISTERED

__all__ = sorted({*formulas.__all__, *REGISTERED})


def __getattr__(name: str) -> Callable[..., Any]:
    try:
        signature, plain, _ = REGISTERED[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    parameters = [
        inspect.Parameter(a.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=a.value) for a in signature.arguments
    ]
    described = inspect.Signature(parameters)

    @functools.wraps(plain)
    def called(*args: Any, **kwargs: Any) -> Any:
        return plain(*(described.bind(*args, **kwargs).args if kwargs else args))

    called.__name__ = called.__qualname__ = name
    called.__doc__, called.__signature__ = signature.doc, described  # type: ignore[attr-defined]
    globals()[name] = called
    return called
