"""Find the modules that the nodes of a captured graph come from, and insert nodes."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import fx, nn

# The prefix of Dynamo's path to the model: a variable, and the lookups from it to the model. A lookup can be an element
# of the frame's ``args`` or ``kwargs`` (accelerate wraps ``forward`` for autocast) or of the user's list or dict, the
# module of a method or closure, or the content of ``functools.partial``. A wrapper can lead to a method's module.
_VARIABLE = re.compile(
    r"""^[LG]\[(['"]).*?\1\](.*\.(__self__|cell_contents)\b)?"""
    r"""((?<=^L\['fn'\])\.(func\b|args(?=\[)|keywords(?=\[)))?"""
    r"""(\[.*?\]|\.__(closure|self|func|wrapped|defaults|kwdefaults)__|\.cell_contents)*"""
)

# The names of the attributes with the wrapped module: torch.compile, checkpoint and offload wrappers, FSDP1.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

# Parts of Dynamo's paths that ``named_modules()`` of the unwrapped model does not have: lookups of a module in a class
# with its own ``__getattr__``, and the wrappers of torch.compile, checkpointing and FSDP.
_NO_NAMES = re.compile(
    r"\.__dict__(\._modules(?=\.|$)|\['_modules'\])|\._modules(?=\[)"
    rf"|\[['\"]({'|'.join(WRAPPED)})['\"]\]|\.?({'|'.join(WRAPPED)})\b"
)


@functools.lru_cache(maxsize=1 << 14)
def module_path(path: str) -> str:
    """Convert Dynamo's path of a module to its path in the model: ``L['self'].layers['0'].mlp`` to ``layers.0.mlp``.

    Dynamo's path begins with the variable that leads to the model.
    """
    return re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", _NO_NAMES.sub("", _VARIABLE.sub("", path))).strip(".")


def tensor_path(path: str) -> str:
    """Convert Dynamo's path of a parameter or buffer to its path in the model."""
    return re.sub(r"(^|\.)_(parameters|buffers)\.", r"\1", module_path(path))


def module_stack(node: fx.Node) -> list[str]:
    """Return the paths of the modules that contain a node of a captured graph or its backward, outermost first."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [module_path(path) for path, _ in stack.values()]


def innermost(node: fx.Node) -> str:
    """Return the path of the innermost module that contains a node; "" for the model itself."""
    return next(reversed(module_stack(node)), "")


_ACTIVATION = "torch_fused_ops_activation"  # key of meta["custom"], which tracing copies


def mark_activation(node: fx.Node, clamp: float | None) -> None:
    """Mark a call of a proved activation that stays in the graph, for memory levels, with the activation's clamp."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _ACTIVATION: clamp}


def is_of_activation(node: fx.Node) -> bool:
    """Return True for a node that tracing has derived from a marked call, in forward or backward."""
    return _ACTIVATION in node.meta.get("custom", {})


def marked_clamp(node: fx.Node) -> float | None:
    """Return the clamp of the activation to which a node belongs; None if it has none, or the node is not marked."""
    clamp: float | None = node.meta.get("custom", {}).get(_ACTIVATION)
    return clamp


def insert_call(graph: fx.Graph, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Insert a call with its fake value, and with the other metadata of ``like``."""
    node = graph.call_function(target, args, kwargs)
    values: Any = fx.node.map_arg(args, lambda argument: argument.meta["val"])
    with torch.no_grad():
        node.meta = {**({} if like is None else like.meta), "val": target(*values, **kwargs)}
    return node


def is_parameter(node: fx.Node) -> bool:
    """Return True if a placeholder of Dynamo's graph is a parameter or a buffer of a module."""
    if isinstance(node.meta.get("example_value"), nn.Parameter):
        return True
    return "._buffers[" in source_name(node)


def source_name(node: fx.Node) -> str:
    """Return Dynamo's name of a placeholder's variable: ``L['self']._parameters['weight']``."""
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    return str(name() if callable(name) else name)
