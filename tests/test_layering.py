"""Imports run one way: reference <- kernels <- properties <- bench; and the reference stays NumPy only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("reference", "kernels", "properties", "bench")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(level, dotted module) of every import in the file, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            yield from ((node.level, f"{node.module or ''}.{name}".lstrip(".")) for name in names)


def imports_of(path: Path) -> list[tuple[int, str]]:
    return list(imported(ast.parse(path.read_text(), path.name)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_leftwards(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    allowed = ROOMS[: ROOMS.index(room) + 1]
    for level, module in imports_of(path):
        assert level == 0 or room == "bench", f"relative import of {module}: imports are absolute"
        parts = module.split(".")
        if parts[0] == "pagebench":
            assert parts[1] in allowed, f"{room} may not import {module}"
        assert parts[0] not in ("reference", "kernels", "properties", "tests"), f"{module}: say pagebench.{module}"


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "reference"], ids=lambda path: path.name)
def test_reference_needs_numpy_only(path: Path) -> None:
    roots = {module.split(".")[0] for _, module in imports_of(path)}
    assert not roots & {"torch", "triton", "cupy", "hypothesis", "pytest"}


def test_plugin_imports_nothing_heavy() -> None:
    """Every pytest of the environment loads it."""
    light = ("profile.py", "tally.py", "plugin.py")
    for name in light:
        tree = ast.parse((ROOT / "properties" / name).read_text())
        top = ast.Module([node for node in tree.body if not isinstance(node, ast.If)], [])
        outside = [node for node in top.body if isinstance(node, ast.Import | ast.ImportFrom)]
        roots = {module.split(".")[0] for _, module in imported(ast.Module(outside, []))}
        assert not roots & {"torch", "triton", "cupy", "hypothesis", "numpy"}, name


def test_kernels_is_a_namespace() -> None:
    """So that Hugging Face's `kernels` wins even when this repository's root is on the path; and it holds no tests."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "kernels").glob("test_*.py"))
    for room in ("reference", "properties"):
        assert (ROOT / room / "__init__.py").is_file()
