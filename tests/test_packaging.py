"""The wheel holds what the tree holds, under pagebench.* names only, and works from it."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("reference", "kernels", "properties")
SHIPPED = (".py", ".cu", ".cuh", ".hpp", ".cpp", ".h", ".typed")
BUILD = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from a copy, so that the tree gets no build folder and an old one cannot add to it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*ROOMS, "pyproject.toml", "README.md", "LICENSE"):
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, source / name)
    subprocess.run([sys.executable, "-c", BUILD, str(target)], cwd=source, check=True, capture_output=True, timeout=300)
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def in_tree() -> set[str]:
    files = [
        path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in SHIPPED or path.name == "py.typed"
    ]
    return {f"pagebench/{path.relative_to(ROOT)}" for path in files if "__pycache__" not in path.parts}


def test_wheel_holds_the_tree(wheel: zipfile.ZipFile) -> None:
    """A sub-package or a kind of file that pyproject.toml forgets would be missing without a word."""
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == in_tree()


def test_only_the_namespace_is_taken(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" not in name}
    assert tops == {"pagebench"}
    assert "pagebench/__init__.py" not in wheel.namelist()
    assert "pagebench/kernels/__init__.py" not in wheel.namelist()


def test_unpacked_wheel_tests_a_provider(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """From another folder, with nothing of the tree on the path."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    wheel.extractall(site)
    elsewhere.mkdir()
    shutil.copy(Path(__file__).with_name("numpy_provider.py"), elsewhere / "mine.py")
    environment = {**os.environ, "PYTHONPATH": str(site)}  # comes before the finder of an editable install
    where = [sys.executable, "-c", "import pagebench.properties; print(pagebench.properties.__file__)"]
    found = subprocess.run(where, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True)
    assert str(site) in found.stdout
    options = ["--provider", "mine.py:Provider", "--pagebench-profile", "quick", "-k", "copy", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "--pyargs", "pagebench.properties", *options]
    done = subprocess.run(
        command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "numpy [host]: copy_blocks" in done.stdout
