"""Provide the package as syntax trees to the tests of its architecture."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from trees import tree_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every module of the package by its full name."""
    found = {}
    for path in sorted((ROOT / "headrace").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = tree_of(path)
    return found


def _names(node: ast.AST, modules: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            yield whole if whole in modules else base


@pytest.fixture(scope="session")
def imports(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """What each module imports, wherever in it the import stands."""
    known = set(trees)
    return {
        name: {n for node in ast.walk(tree) for n in _names(node, known)}
        for name, tree in trees.items()
    }
