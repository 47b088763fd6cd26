"""Which part of the library may import which, and that no module imports itself by way of others.

Read off the sources, imports inside functions included: those put off the cost of an import, not the dependency. What
only type checkers import does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# As pyproject.toml maps them.
FOLDERS = {
    "torch_fused_ops": ROOT / "torch_fused_ops",
    "torch_fused_ops.lowerings": ROOT / "lowerings",
    "torch_fused_ops.benchmarks": ROOT / "benchmarks",
}
if not all(folder.is_dir() for folder in FOLDERS.values()):
    pytest.skip("not in a clone", allow_module_level=True)

# The layers from the ground up: their modules (a name without a dot at its end stands for all below it, too), and the
# layers that they import. "torch_fused_ops" is the public face, __init__.py.
LAYERS: dict[str, tuple[list[str], list[str]]] = {
    "settings": (["settings", "_version", "policy", "families.float8.recipes"], []),
    "core": (
        [
            *("activations", "formulas", "declaration", "kernels", "operators", "graphs", "lowerings"),
            *("distributed.sharding", "families", "functional"),
        ],
        ["settings"],
    ),
    "virtual_gpu": (["virtual_gpu"], ["core"]),
    "names": (["megatron", "slapo"], ["settings", "core"]),
    "reports": (["reports"], ["settings", "core", "virtual_gpu"]),
    "nn": (["nn", "distributed"], ["settings", "core", "names", "reports", "virtual_gpu"]),
    "tools": (["planner", "integrations", "tools.verify"], ["settings", "core", "reports", "virtual_gpu"]),
    "benchmarks": (
        ["testing", "benchmarks", "tools.arguments"],
        ["settings", "core", "virtual_gpu", "nn", "torch_fused_ops"],
    ),
    "torch_fused_ops": (["torch_fused_ops"], ["settings", "core", "reports", "tools", "benchmarks"]),
    "cli": (["tools", "__main__"], ["settings", "core", "virtual_gpu", "benchmarks", "torch_fused_ops"]),
}


def layer_of(module: str) -> str:
    """The layer with the longest prefix of a module's name."""
    names = module.removeprefix("torch_fused_ops.").split(".")
    while names:
        for layer, (prefixes, _) in LAYERS.items():
            if ".".join(names) in prefixes:
                return layer
        names.pop()
    raise AssertionError(f"{module} is in no layer")


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of the library that a module imports, anywhere in its text."""
    path = modules()[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                names.add(inner if inner in modules() else source)
    return frozenset(name for name in names if name in modules() and name != module)


def circles() -> Iterator[set[str]]:
    """The strongly connected components (Tarjan 1972, doi:10.1137/0201010) that have more than one module."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[set[str]]:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in imports(module):
            if other not in number:
                yield from visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            place = stack.index(module)
            component = set(stack[place:])
            del stack[place:]
            if len(component) > 1:
                yield component

    for module in modules():
        if module not in number:
            yield from visit(module)


def test_every_module_is_in_a_layer() -> None:
    assert {layer_of(module) for module in modules()} == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_what_the_table_says(layer: str) -> None:
    accepted = (layer, *LAYERS[layer][1])
    inside = [module for module in modules() if layer_of(module) == layer]
    upward = {(module, other) for module in inside for other in imports(module) if layer_of(other) not in accepted}
    assert not upward


def test_nothing_that_is_installed_imports_the_laboratory() -> None:
    folder = "torch_fused_ops.benchmarks.laboratory"
    assert any(module.startswith(folder) for module in modules())
    installed = [module for module in modules() if not module.startswith(folder)]
    assert not [module for module in installed if any(name.startswith(folder) for name in imports(module))]


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert [sorted(circle) for circle in circles()] == []
