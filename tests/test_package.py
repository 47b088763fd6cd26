"""The installed package: the cost of importing it, and its completeness."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import python

ROOT = Path(__file__).parents[1]


def test_imports_are_few() -> None:
    """Inductor costs 1.7 s, Dynamo 1 s, torch.distributed.tensor 0.4 s; torch itself is imported anyway.

    Compiling does not import the planner, the reports and verify: they are imported on first use.
    """
    program = """
import sys, torch
before = set(sys.modules)
assert "torch_fused_ops_autoload" in before and "torch_fused_ops" not in before
import torch_fused_ops
heavy = ("torch._inductor", "torch._dynamo", "torch.distributed.tensor", "triton", "sympy", "transformers",
         "torch_fused_ops.lowerings", "torch_fused_ops.planner", "torch_fused_ops.reports", "torch_fused_ops.tools")
print([m for m in set(sys.modules) - before if m.startswith(heavy)])
print(len(set(sys.modules) - before))

import torch_fused_ops as tfo
from torch_fused_ops.lowerings import backend, passes, recognize, strict
recognize.rewrite(torch.fx.symbolic_trace(torch.nn.Linear(2, 2)).graph, tfo.FusionPolicy())
tools = ("torch_fused_ops.planner", "torch_fused_ops.reports", "torch_fused_ops.tools")
print([m for m in sys.modules if m.startswith(tools)])
names = "explain record Report plan Plan verify Verification"
print(*(getattr(tfo, name).__name__ for name in names.split()))
"""
    heavy, count, tools, names = python("-c", program).splitlines()
    assert heavy == tools == "[]" and int(count) < 70
    assert names == "explain record Report plan Plan verify Verification"


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "torch_fused_ops, torch._inductor.pattern_matcher",  # torch.library.opcheck imports both
        "torch_fused_ops",
        "torch._inductor.lowering",
        "torch_fused_ops.lowerings.operators",
        "torch_fused_ops.lowerings.programs",
    ],
)
def test_lowerings_register_whatever_is_imported_first(first: str) -> None:
    program = f"""
import {first}
import torch_fused_ops, torch._inductor.lowering as lowering, torch
from torch._functorch import partitioners
from torch_fused_ops import lowerings
assert lowerings.off() == ""
assert torch.ops.fused.glu_backward.default in lowering.lowerings
assert torch.ops.fused.glu in partitioners.get_default_op_list().recomputable_ops
assert torch.compiler.config.cache_key_tag.count("torch_fused_ops") == 1
"""
    python("-c", program)


@pytest.mark.slow
def test_clone_as_current_folder_imports_all_parts() -> None:
    """The clone's parts, links inside its package, are found before an installed copy. Lowerings have one name."""
    if not (ROOT / "lowerings").is_dir():
        pytest.skip("not in a clone")
    program = """
from importlib.util import find_spec
print(*(find_spec(f"torch_fused_ops.{part}").origin for part in ("functional", "lowerings", "benchmarks")), sep="\\n")
try:
    import lowerings
except ImportError as e:
    assert "torch_fused_ops.lowerings" in str(e)
else:
    raise SystemExit("imported under another name")
"""
    parts = ("functional.py", "lowerings/__init__.py", "benchmarks/__init__.py")
    assert python("-c", program, cwd=ROOT).splitlines() == [str(ROOT / "torch_fused_ops" / part) for part in parts]


@pytest.mark.slow
def test_command_line_hides_the_numpy_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``import torch`` warns if NumPy is missing; our command line suppresses the warning."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    commands = (["-c", "import torch_fused_ops"], ["-m", "torch_fused_ops", "--version"])
    warned = [
        "Failed to initialize NumPy" in subprocess.run([sys.executable, *c], capture_output=True, text=True).stderr
        for c in commands
    ]
    assert warned == [True, False]


def test_public_names_exist() -> None:
    import torch_fused_ops

    assert set(torch_fused_ops.__all__) <= set(dir(torch_fused_ops))
    assert all(hasattr(torch_fused_ops, name) or find_spec(f"torch_fused_ops.{name}") for name in dir(torch_fused_ops))
    assert not {"annotations", "Any", "importlib", "sys"} & set(dir(torch_fused_ops))


def test_every_package_and_data_file_is_installed() -> None:
    """pyproject.toml lists them by hand, because one package is a link to another folder."""
    text = (ROOT / "pyproject.toml").read_text()
    packages = [
        (*["torch_fused_ops"] * (folder == "lowerings"), *p.parent.relative_to(ROOT).parts)
        for folder in ("torch_fused_ops", "lowerings")
        for p in (ROOT / folder).rglob("__init__.py")
    ]
    files = [p for p in (ROOT / "torch_fused_ops").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    for name in (*map(".".join, packages), *(file.name for file in files)):
        assert f'"{name}"' in text, f"{name} is missing from pyproject.toml"


COMPILED = """
import torch
f = torch.compile(lambda x, w: torch.relu(x @ w) @ w, fullgraph=True)
f(torch.ones(2, 4), torch.eye(4))
from torch_fused_ops.lowerings import passes
print(passes.active_policy(), torch._inductor.config.pre_grad_custom_pass is not None)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "printed"),
    [("memory=input,exclude=a.*", "memory='input'"), ("1", "memory='free'"), ("off", "None False"), ("", "None False")],
)
def test_environment_enables_fusion(text: str, printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FUSED_OPS", text)
    out = python("-c", COMPILED)
    assert printed in out and (printed == "None False" or out.endswith(") True\n"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "module", "said"),
    [
        ("", "memory=fp88", "torch", "TORCH_FUSED_OPS='memory=fp88' is not accepted: memory='fp88' is not known"),
        ("_WITHOUT", "cuda", "torch_fused_ops", "TORCH_FUSED_OPS_WITHOUT='cuda' is not accepted"),
    ],
)
def test_invalid_environment_stops_the_import(
    name: str, text: str, module: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"TORCH_FUSED_OPS{name}", text)
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr


@pytest.mark.slow
def test_backend_is_found_without_an_import() -> None:
    program = """
import torch
f = torch.compile(lambda x, w: torch.relu(x @ w) @ w, backend="fused", fullgraph=True)
print(torch.allclose(f(torch.ones(2, 4), torch.eye(4)), torch.ones(2, 4)))
"""
    assert python("-c", program).strip() == "True"
