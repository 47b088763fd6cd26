"""Where in a model the nodes of a captured graph come from."""

from __future__ import annotations

import re

from torch import fx


def module_path(path: str) -> str:
    """A module's path in the model, from Dynamo's: ``L['self'].layers['0'].mlp`` is ``layers.0.mlp``.

    Dynamo's begins with the variable that held the model, maybe in a closure.
    """
    path = re.sub(r"^[LG]\[(['\"])(.*?)\1\](\.__closure__\[\d+\]\.cell_contents)?", "", path)
    path = re.sub(r"\._modules(?=\[)|\.?_orig_mod", "", path)
    return re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", path).strip(".")


def module_stack(node: fx.Node) -> list[str]:
    """The paths of the modules that a captured node is in, outermost first."""
    return [module_path(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
