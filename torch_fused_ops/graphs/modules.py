"""Modules that the nodes of a captured graph come from."""

from __future__ import annotations

import functools
import re

from torch import fx, nn

# What Dynamo has in front of the model: a variable, and what was looked up in it until the model was reached. That is
# an element of the frame's ``args`` or ``kwargs`` (as where accelerate wraps ``forward`` for autocast), or of the
# user's own list or dict, a method's or closure's module, and what ``functools.partial`` holds.
_VARIABLE = re.compile(
    r"""^[LG]\[(['"]).*?\1\]"""
    r"""((?<=^L\['fn'\])\.(func\b|args(?=\[)|keywords(?=\[)))?"""
    r"""(\[.*?\]|\.__(closure|self|func|wrapped|defaults|kwdefaults)__|\.cell_contents)*"""
)

# The names that wrappers give to the module that they wrap: torch.compile, checkpoint and offload wrappers, FSDP1.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

# What Dynamo's paths have and ``named_modules()`` of the model as its author wrote it has not: how a module is looked
# up where its class has a ``__getattr__`` of its own, and the wrappers of torch.compile, checkpointing and FSDP.
_NO_NAMES = re.compile(
    r"\.__dict__(\._modules(?=\.|$)|\['_modules'\])|\._modules(?=\[)"
    rf"|\.?({'|'.join(WRAPPED)})\b"
)


@functools.lru_cache(maxsize=1 << 14)
def module_path(path: str) -> str:
    """A module's path in the model, from Dynamo's: ``L['self'].layers['0'].mlp`` is ``layers.0.mlp``.

    Dynamo's begins with the variable that leads to the model.
    """
    return re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", _NO_NAMES.sub("", _VARIABLE.sub("", path))).strip(".")


def tensor_path(path: str) -> str:
    """A parameter's or a buffer's path in the model, from Dynamo's."""
    return re.sub(r"(^|\.)_(parameters|buffers)\.", r"\1", module_path(path))


def module_stack(node: fx.Node) -> list[str]:
    """The paths of the modules that a captured node is in, outermost first."""
    return [module_path(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def is_parameter(node: fx.Node) -> bool:
    """Tell whether a placeholder of Dynamo's graph is a parameter or a buffer of a module."""
    if isinstance(node.meta.get("example_value"), nn.Parameter):
        return True
    return "._buffers[" in source_name(node)


def source_name(node: fx.Node) -> str:
    """Dynamo's name of a placeholder's variable: ``L['self']._parameters['weight']``."""
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    return str(name() if callable(name) else name)
