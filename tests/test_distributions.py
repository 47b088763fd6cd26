"""A release (CONTRIBUTING.md): the source distribution equals a clone, and the wheel contains the package."""

import functools
import re
import shutil
import subprocess
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import python

import torch_fused_ops as tfo

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow
alone = functools.partial(python, PYTHONPATH="")  # without this clone


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """Return the clone's files, including changed files and new files that are not ignored."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not in a clone")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in names if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def source(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the source distribution, built in a copy because a build writes files next to its sources."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked:
        (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "clone" / name, follow_symlinks=False)
    build = "from setuptools import build_meta; print(build_meta.build_sdist('../dist'))"
    name = alone("-c", build, cwd=folder / "clone").splitlines()[-1]
    assert name == f"torch_fused_ops-{tfo.__version__}.tar.gz"
    return folder / "dist" / name


@pytest.fixture(scope="module")
def unpacked(source: Path) -> Path:
    with tarfile.open(source) as archive:
        archive.extractall(source.parent, filter="data")
    return source.parent / source.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    """Return the wheel, built from the source distribution."""
    folder = unpacked.parent / "wheels"
    options = ("--no-build-isolation", "--no-deps", "--wheel-dir", str(folder))
    alone("-m", "pip", "wheel", ".", *options, cwd=unpacked)
    (built,) = folder.iterdir()
    assert built.name == f"torch_fused_ops-{tfo.__version__}-py3-none-any.whl"
    return built


def test_a_source_distribution_is_a_clone(unpacked: Path, tracked: set[str]) -> None:
    packed = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    generated = {name for name in packed if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    links = {name for name in tracked if (ROOT / name).is_symlink()}  # a distribution contains copies instead
    copies = {
        f"{link}/{name.partition('/')[2]}"
        for link in links
        for name in tracked
        if name.startswith(f"{Path(link).name}/")
    }
    assert tracked - links <= packed - generated <= tracked | copies


def test_a_wheel_is_the_package(wheel: Path, tracked: set[str], tmp_path: Path) -> None:
    top = "torch_fused_ops"
    links = {f"{top}/benchmarks", f"{top}/lowerings"}
    expected = {name for name in tracked if name.startswith(f"{top}/")} - links | {f"{top}_autoload.py"}
    parts = tuple(f"{part}/" for part in ("benchmarks", "lowerings"))
    expected |= {f"{top}/{name}" for name in tracked if name.startswith(parts) and name.endswith(".py")}
    expected = {name for name in expected if not name.startswith(f"{top}/benchmarks/laboratory/")}
    with zipfile.ZipFile(wheel) as archive:
        actual = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path)
    assert actual == expected
    program = f"""
import torch_fused_ops, torch_fused_ops.benchmarks, torch_fused_ops.lowerings as lowerings
assert {str(tmp_path)!r} in torch_fused_ops.__file__ and {str(tmp_path)!r} in lowerings.__file__
assert lowerings.off() == ""
from importlib.metadata import entry_points, version
assert version("torch-fused-ops") == torch_fused_ops.__version__
print(*(point.name for group in ("torch.backends", "torch_dynamo_backends") for point in entry_points(group=group)))
"""
    assert alone("-c", program, cwd=tmp_path.parent, PYTHONPATH=str(tmp_path)).split() == ["torch_fused_ops", "fused"]
    printed = alone("-m", top, "--version", cwd=tmp_path.parent, PYTHONPATH=str(tmp_path))
    assert printed == f"torch_fused_ops {tfo.__version__}\n"


def test_twine_accepts_both(source: Path, wheel: Path) -> None:
    if find_spec("twine") is None:
        pytest.skip("twine is not installed")
    out = alone("-m", "twine", "check", "--strict", str(source), str(wheel), cwd=source.parent)
    assert out.count("PASSED") == 2, out


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\] - (Unreleased|\d{4}-\d\d-\d\d)$", text, re.M)
    assert len(versions) == text.count("\n## ") and tfo.__version__ == versions[0][0]
