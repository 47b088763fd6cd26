"""Torch's versions: every private name that we use is listed, and fusion turns itself off if one is missing."""

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import python

import torch_fused_ops
from torch_fused_ops import lowerings
from torch_fused_ops.lowerings import internals

SOURCES = sorted(Path(lowerings.__file__).parent.rglob("*.py"))

# Names that some versions lack. Code checks for them before use; lowerings/compat.py lists them.
PROBED = {
    "torch._C",  # names of aten's functions, read with getattr
    "torch._dynamo.convert_frame.compile_lock",  # torch 2.11
    "torch._inductor.config.pre_grad_pass_timing",  # torch 2.13
    "torch._inductor.custom_graph_pass.CustomSchedulerPass",  # torch 2.13
    "torch._inductor.scheduler.FusedSchedulerNode",
    "torch.__path__",  # every package has one
    "torch.__version__",
}


def _private(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


def _names(path: Path) -> Iterator[str]:
    """Yield module.name of each private name of torch that a source file uses."""
    tree, modules = ast.parse(path.read_text()), {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname: a.name for a in node.names if a.asname and a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for a in node.names:
                full = f"{node.module}.{a.name}"
                if full in sys.modules:
                    modules[a.asname or a.name] = full
                elif _private(full):
                    yield full
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in modules and parts:
            full = ".".join((modules[node.id], *reversed(parts)))
            if _private(full):
                yield full


def _used_names() -> set[str]:
    """Return the private names that our sources use, shortened to a module and a name in it."""
    short = set()
    for name in {name for path in SOURCES for name in _names(path)}:
        parts = name.split(".")
        depth = max(i for i in range(1, len(parts)) if ".".join(parts[:i]) in sys.modules)
        if ".".join(parts[: depth + 1]) not in sys.modules:
            short.add(".".join(parts[: depth + 1]))
    return short


# Names that code computes before it reads them: slots of passes, and a value in cache keys.
BY_NAME = {
    *(f"torch._inductor.config.{slot}" for slot in lowerings.load_passes().SLOTS),
    "torch.compiler.config.cache_key_tag",
}


def test_the_table_of_internals_is_complete() -> None:
    for module in internals.INTERNALS:
        __import__(module)
    table = {f"{module}.{name}" for module, names in internals.INTERNALS.items() for name in names}
    used = {name for name in _used_names() if not name.startswith("torch.ops.")} - PROBED
    assert used | BY_NAME - PROBED == table


def test_this_torch_has_every_internal() -> None:
    assert internals.missing() == [] and lowerings.off() == ""


def test_every_probe_is_in_compat() -> None:
    """Sources do not compare versions. Only compat.py checks which names a version has."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        versions = [
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "__version__"
        ]  # fmt: skip
        allowed = {"passes.py", "__init__.py"}  # cache keys and messages
        assert not versions or path.name in allowed, path


OFF = """
import sys, warnings
import torch
{before}
import torch_fused_ops as tfo
from torch_fused_ops import functional as FF, nn as fnn
{after}

x = torch.randn(4, 8, requires_grad=True)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    wanted = model(x)
    torch.testing.assert_close(torch.compile(model, backend="fused")(x), wanted)
    tfo.enable()
    with tfo.enabled():
        assert tfo.compile_options(options={{"max_autotune": False}}) == {{"max_autotune": False}}
    tfo.disable()
    ours = torch.compile(lambda t: FF.bias_gelu(t), options=tfo.compile_options())
    torch.testing.assert_close(ours(x), torch.nn.functional.gelu(x))
    ours(x).sum().backward()
messages = [str(w.message) for w in seen if "torch_fused_ops" in str(w.message)]
assert len(messages) == 1, messages
assert "the fusion passes are off" in messages[0] and {names!r} in messages[0], messages
for call in (
    lambda: tfo.enable(tfo.FusionPolicy(strict=True)),
    lambda: tfo.explain(model, x),
    lambda: tfo.record().__enter__(),
    lambda: fnn.replace_mlps(model, x),
):
    try:
        call()
    except (RuntimeError, tfo.UnfusedError) as error:
        assert {names!r} in str(error), error
    else:
        raise AssertionError("no error")
eager = fnn.FusedMLP(8, 16)
eager(x).sum().backward()
FF.bias_dropout_add(x, None, x, 0.5).sum().backward()
assert x.grad is not None and torch.isfinite(x.grad).all()
print("done")
"""

TABLE = "import torch_fused_ops.lowerings.internals as i; i.INTERNALS['torch._inductor.{}'] {} ('Gone',)"
MISSING = {
    "a name of an imported module": ("", TABLE.format("ir", "+="), "torch._inductor.ir.Gone"),
    "a name of a module that is not imported": ("", TABLE.format("lowering", "+="), "torch._inductor.lowering.Gone"),
    "a module": ("", TABLE.format("gone", "="), "torch._inductor.gone"),
    "a deleted name": (
        "import torch._inductor.compile_fx",
        "import torch._inductor.custom_graph_pass as c; del c.CustomPartitionerFn",
        "torch._inductor.custom_graph_pass.CustomPartitionerFn",
    ),
    "an unlisted module": (
        "",
        "sys.modules['torch_fused_ops.lowerings.softmax'] = None",
        "lowerings.softmax",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MISSING)
def test_without_an_internal_fusion_is_off_and_operators_work(case: str) -> None:
    before, after, names = MISSING[case]
    assert "done" in python("-c", OFF.format(before=before, after=after, names=names), PYTHONPATH="")


@pytest.mark.codegen_is_slow
def test_the_backend_works_without_torchs_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)), torch.randn(4, 8)
    expected = model(x)
    monkeypatch.delattr(torch, "_TorchCompileInductorWrapper")
    with torch_fused_ops.record() as report:
        try:
            actual = torch.compile(model, backend="fused")(x)
        except Exception as error:  # Dynamo 2.15 needs the wrapper itself
            if "_TorchCompileInductorWrapper" not in str(error):
                raise
            pytest.skip(f"Dynamo itself needs it: {error}")
    torch.testing.assert_close(actual, expected)
    assert [site.op for site in report.sites] == ["fused::bias_act"]


@pytest.mark.slow
def test_a_newer_torch_warns_once_and_works() -> None:
    program = textwrap.dedent("""
            import warnings
            import torch
            torch.__version__ = torch.torch_version.TorchVersion("9.1.0a0+git")
            import torch_fused_ops as tfo
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for _ in range(3):
                    tfo.enable()
                model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
                assert tfo.explain(model, torch.randn(2, 8)).sites[0].op == "fused::bias_act"
            ours = [str(w.message) for w in seen if "torch_fused_ops" in str(w.message)]
            assert len(ours) == 1 and "9.1.0a0" in ours[0] and "tested with torch 2.11 to" in ours[0], ours
            print("done")
        """)
    out = python("-c", program, PYTHONPATH="")
    assert "done" in out


@pytest.mark.parametrize(
    ("version", "newer"),
    [("2.15.0+cu132", False), ("2.15.3", False), ("2.11.0", False), ("2.16.0.dev20270101", True), ("3.0.0", True)],
)
def test_newer_versions_are_recognized(version: str, newer: bool) -> None:
    assert internals.is_newer(version) is newer


def test_this_torch_is_tested() -> None:
    numbers = tuple(int(n) for n in torch.__version__.split(".")[:2])
    assert internals.TESTED[0] <= numbers <= internals.TESTED[1], f"{torch.__version__}: run the suite first"
    assert (
        f"{'.'.join(map(str, internals.TESTED[0]))}"
        in (Path(torch_fused_ops.__file__).parents[1] / "README.md").read_text()
    )
