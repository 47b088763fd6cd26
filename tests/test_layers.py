"""The imports that each layer of the library may have. No module imports itself through others.

Imports are read from the sources, including imports inside functions: these defer the cost, but not the dependency.
Imports only for type checkers must not form circles, but do not count as imports of a layer.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from torch_fused_ops.declaration import pointwise_operators
from torch_fused_ops.operators.autograd import COMPOSITES, REGISTERED

ROOT = Path(__file__).parents[1]
# The folders of packages, as pyproject.toml maps them.
FOLDERS = {
    "torch_fused_ops": ROOT / "torch_fused_ops",
    "torch_fused_ops.lowerings": ROOT / "lowerings",
    "torch_fused_ops.benchmarks": ROOT / "benchmarks",
}
if not all(folder.is_dir() for folder in FOLDERS.values()):
    pytest.skip("not in a clone", allow_module_level=True)

# The core can be read in an afternoon; docs/architecture.md gives the order.
CORE = (
    *("activations", "formulas", "declaration"),
    *("operators.activation", "operators.registration", "operators.eager", "operators.checks"),
    *("operators.batching", "operators.autograd", "operators.fp8_store", "operators.reference"),
    *("kernels.compiled", "kernels.cpu", "settings.switches"),
    *("graphs.reasons", "graphs.gemm_registry", "graphs.modules", "graphs.target"),
    *("lowerings.recognize.symbolic", "lowerings.recognize.graph", "lowerings.recognize.values"),
    *("lowerings.recognize.prove", "lowerings.recognize.autograd_functions", "lowerings.recognize.subgraph"),
    *("lowerings.recognize.canonical", "lowerings.recognize.rewrite"),
    *("lowerings.partition", "lowerings.saved_tensors", "lowerings.operators", "lowerings.programs"),
    *("lowerings.compat", "lowerings.cpp_vectors", "lowerings.choices"),
)
CORE_LINES = 8500  # at most

# The layers from the ground up: their modules (a package stands for all below it that no other row names), and the
# layers that they import. A family registers its operators, kernels, lowerings and sharding rules; the plug-in puts
# passes and families together, so it names them, and no file of the core does. "torch_fused_ops" is the public face.
WORDS, FAMILIES = ("core", "words"), ("dropout", "softmax", "float8")
LAYERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "core": (CORE, ()),
    "words": (("settings", "policy", "graphs", "_version"), ("core",)),
    "operators": (("operators", "kernels", "distributed.sharding"), ("core",)),
    "dropout": (("families.dropout", "lowerings.dropout", "lowerings.recognize.dropout"), (*WORDS, "operators")),
    "softmax": (("families.softmax", "lowerings.softmax"), (*WORDS, "operators")),
    "float8": (("families.float8", "lowerings.float8", "lowerings.recognize.gemms"), (*WORDS, "operators")),
    "levels": (
        (
            *(
                "lowerings.memory_levels",
                "lowerings.attention",
                "lowerings.offload",
                "lowerings.recognize.tiles",
                "lowerings.recognize.per_row_scale",
            ),
            *("lowerings.buffer_reuse", "lowerings.split_reductions"),
        ),
        WORDS,
    ),
    "plug-in": (("lowerings",), (*WORDS, "dropout", "float8", "levels")),
    "virtual_gpu": (("virtual_gpu",), ("core",)),
    "names": (("functional", "ops", "families", "megatron", "slapo"), ("core", "operators", *FAMILIES)),
    "distributed": (("distributed",), ("core",)),
    "reports": (("reports",), (*WORDS, "virtual_gpu", "plug-in")),
    # replace_mlps finds sites as reports do; nn.MLP takes Megatron's functions and checkpoints.
    "nn": (("nn",), (*WORDS, "operators", "float8", "names", "distributed", "plug-in", "reports")),
    "tools": (
        ("planner", "tools", "benchmarks.variants"),
        (*WORDS, "levels", "virtual_gpu", "plug-in", "reports"),
    ),
    "torch_fused_ops": (("torch_fused_ops",), (*WORDS, "operators", "names", "plug-in", "reports", "tools")),
    "programs": (
        ("testing", "benchmarks", "tools.cli", "__main__"),
        (*WORDS, *FAMILIES, "operators", "virtual_gpu", "plug-in", "names", "nn", "tools", "torch_fused_ops"),
    ),
}


def layer_of(module: str) -> str:
    """Return the layer with the longest prefix of a module's name."""
    names = module.removeprefix("torch_fused_ops.").split(".")
    while names:
        for layer, (prefixes, _) in LAYERS.items():
            if ".".join(names) in prefixes:
                return layer
        names.pop()
    raise AssertionError(f"{module} is in no layer")


@cache
def modules() -> dict[str, Path]:
    paths = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            paths[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return paths


@cache
def imports(module: str, for_types: bool) -> frozenset[str]:
    """Return the library's modules that a module imports anywhere. ``for_types``: include imports for type checkers."""
    path = modules()[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types:
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


def test_every_module_is_in_a_layer() -> None:
    assert {layer_of(module) for module in modules()} == set(LAYERS)
    order = list(LAYERS)
    assert all(
        order.index(below) < order.index(layer) for layer, (_, all_below) in LAYERS.items() for below in all_below
    )


def test_the_core_is_read_in_an_afternoon() -> None:
    files = [modules()[f"torch_fused_ops.{name}"] for name in CORE]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert lines <= CORE_LINES, f"{lines} lines in {len(files)} files"
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    first = [name.replace("/", ".") for name in re.findall(r"^\| \d \| `(.*)\.py` \|", page, re.M)]
    assert len(first) == 9 and set(first) <= set(CORE) and len(page.split()) < 900


def test_no_file_of_the_core_names_an_operator_of_a_family() -> None:
    declared = {signature.name for op in pointwise_operators() for signature in op.signatures}
    operators = {*REGISTERED, *(op._schema.name.removeprefix("fused::") for op in COMPOSITES)} - declared
    assert {"dropout_add", "scaled_masked_softmax", "quantize", "linear_fp8"} <= operators
    for name in CORE:
        tree = ast.walk(ast.parse(modules()[f"torch_fused_ops.{name}"].read_text(encoding="utf-8")))
        words = {
            getattr(node, "attr", getattr(node, "value", None)) for node in tree if not isinstance(node, ast.keyword)
        }
        assert not operators & {word for word in words if isinstance(word, str)}, name


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_what_the_table_says(layer: str) -> None:
    accepted = (layer, *LAYERS[layer][1])
    inside = [module for module in modules() if layer_of(module) == layer]
    upward = {
        (module, other) for module in inside for other in imports(module, False) if layer_of(other) not in accepted
    }
    assert not upward


def test_installed_modules_do_not_import_the_laboratory() -> None:
    folder = "torch_fused_ops.benchmarks.laboratory"
    assert any(module.startswith(folder) for module in modules())
    installed = [module for module in modules() if not module.startswith(folder)]
    assert not [module for module in installed if any(name.startswith(folder) for name in imports(module, True))]


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({module: imports(module, True) for module in modules()}).prepare()  # a CycleError names them
