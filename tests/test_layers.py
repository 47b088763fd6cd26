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

# The parts, a package or a module each, from the ground up, with what they import. A part stands below all that import
# it. "torch_fused_ops" is the public face, __init__.py.
OPERATORS = [
    *(
        "activations",
        "formulas",
        "float8_recipes",
        "float8",
        "declaration",
        "kernels",
        "distributed",
        "flop_formulas",
        "operators",
        "reference",
    ),
    *("viewless", "routing", "functional"),
]
SITES = ["capture", "reasons", "sites"]
POLICY = ["policy", "environment"]
LAYERS: dict[str, list[str]] = {
    "virtual_gpu": [],
    "_version": [],
    "tiles": [],
    "capture": [],
    "reasons": [],
    "sites": ["reasons"],
    "gemm_registry": [],
    "flop_formulas": [],
    # operators
    "activations": [],
    "formulas": ["activations"],
    "float8_recipes": [],
    "float8": ["formulas", "float8_recipes"],
    "policy": ["float8_recipes", "tiles"],
    "bench_ways": ["policy"],
    "arguments": ["_version", "policy", "bench_ways"],
    "environment": ["_version", "policy"],
    "switches": [],
    "fusion_events": ["policy"],
    "declaration": ["activations"],
    "kernels": ["activations", "formulas", "float8_recipes", "float8", "declaration"],
    "distributed": ["float8_recipes", "float8", "declaration"],
    "operators": [
        *("activations", "formulas", "float8_recipes", "float8", "declaration", "kernels", "distributed"),
        *("flop_formulas", "switches"),
    ],
    "reference": ["formulas", "operators"],
    "viewless": ["operators"],
    "routing": [],
    "functional": ["activations", "float8_recipes", "distributed", "operators", "viewless"],
    "megatron": ["reference", "operators", "viewless", "routing", "functional"],
    "slapo": ["activations", "functional", "megatron"],
    # torch.compile
    "lowerings": [
        *("virtual_gpu", "_version", "tiles", "switches", *POLICY, *SITES, "fusion_events", "gemm_registry", *OPERATORS)
    ],
    "reports": ["virtual_gpu", "policy", *SITES, "fusion_events", "lowerings"],
    "verify": ["policy", *SITES, "fusion_events", "lowerings", "reports"],
    "planner": ["virtual_gpu", "policy", *SITES, "lowerings", "reports"],
    # modules
    "nn": ["virtual_gpu", *OPERATORS, "megatron", "tiles", "policy", *SITES, "lowerings", "reports"],
    "torch_fused_ops": [
        *("_version", "arguments", *OPERATORS, "gemm_registry", *POLICY, "lowerings", "reports", "verify", "planner")
    ],
    "integrations": ["reports"],
    # tools
    "testing": OPERATORS,
    "benchmarks": [
        *("virtual_gpu", "bench_ways", "arguments", *OPERATORS, "policy", *SITES, "lowerings", "nn"),
        "torch_fused_ops",
    ],
    "cli": [
        *("virtual_gpu", "arguments", "switches", *OPERATORS, "policy", "environment", "lowerings", "torch_fused_ops"),
        *("testing", "benchmarks"),
    ],
    "__main__": ["cli"],
}  # fmt: skip


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


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


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


def test_the_table_goes_from_the_ground_up() -> None:
    parts = list(LAYERS)
    assert set(parts) == {part_of(module) for module in modules()}
    for part, below in LAYERS.items():
        assert all(parts.index(one) < parts.index(part) for one in below), part


def test_every_part_has_its_place_in_the_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert not [part for part in LAYERS if not any(f" {part}{end}" in page for end in (".py", "/"))]


@pytest.mark.parametrize("part", LAYERS)
def test_a_part_imports_what_is_below_it(part: str) -> None:
    accepted = (part, *LAYERS[part])
    own = [module for module in modules() if part_of(module) == part]
    assert not {(module, other) for module in own for other in imports(module) if part_of(other) not in accepted}


def test_nothing_that_is_installed_imports_the_laboratory() -> None:
    folder = "torch_fused_ops.benchmarks.laboratory"
    assert any(module.startswith(folder) for module in modules())
    installed = [module for module in modules() if not module.startswith(folder)]
    assert not [module for module in installed if any(name.startswith(folder) for name in imports(module))]


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert [sorted(circle) for circle in circles()] == []
