"""Compute every operator in plain torch: the reference for tests of kernels and lowerings, most exact in float64.

``reference.bias_glu(x, None, None, "silu", layout="swapped")`` computes the operator ``fused::bias_glu``,
``reference.bias_glu_backward`` its backward operator, and so on. Other names, such as ``reference.unpack``, are
names of ``formulas``.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from torch_fused_ops import formulas
from torch_fused_ops.operators.autograd import REGISTERED

if TYPE_CHECKING:
    from torch_fused_ops.formulas import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name not in REGISTERED:
        return getattr(formulas, name)
    signature, plain = REGISTERED[name].signature, REGISTERED[name].plain
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
