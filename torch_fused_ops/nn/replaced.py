"""The class that a replaced module has: its own, with a forward in front that follows a recipe."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch_fused_ops.nn.proofs import Fusing

__all__ = ["Replaced", "class_of", "original_of"]


class Replaced:
    """In front of a module's class: its forward follows a recipe where one was proved."""

    _original: type[nn.Module]
    _members: frozenset[str]
    _input_name: str
    _fused: Fusing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        original: Callable[..., Any] = type(self)._original.forward
        # Under the compiler its own forward is what pick-up reads.
        if torch.compiler.is_compiling() or len(args) + len(kwargs) != 1:
            return original(self, *args, **kwargs)
        x: Any = args[0] if args else kwargs.get(type(self)._input_name)
        recipe = self._fused.recipe(self, x)  # type: ignore[arg-type]
        if recipe is None:
            return original(self, *args, **kwargs)
        return recipe.run(self, x, self._fused.memory, self._fused.gemm)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        return empty, (type(self)._original,), *state


@functools.cache
def class_of(original: Any) -> Any:
    """A class's subclass that follows recipes. It has its name: reports, pickles and wrapping policies go by names."""
    parameters = list(inspect.signature(original.forward).parameters)
    attributes = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_original": original,
        "_input_name": parameters[1] if len(parameters) > 1 else "",
    }
    made: Any = type(original.__name__, (Replaced, original), attributes)
    made._members = frozenset((*vars(made), "_members"))
    return made


def empty(original: Any) -> nn.Module:
    """An empty replaced module, for copies and pickles."""
    kind = class_of(original)
    made: nn.Module = kind.__new__(kind)
    return made


def original_of(module: nn.Module) -> type[nn.Module]:
    return module._original if isinstance(module, Replaced) else type(module)
