"""Check the sizes of files and functions, and habits that a reader relies on."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FILE_LINES, KERNEL_LINES, FUNCTION_LINES, COLUMNS = 500, 600, 60, 100
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _files(root: Path, *kinds: str) -> list[Path]:
    rooms = ("headrace", "tests", "benchmarks", "docs")
    found = [p for room in rooms for kind in kinds for p in (root / room).rglob(f"*.{kind}")]
    found += [p for kind in kinds for p in root.glob(f"*.{kind}")]
    assert found
    return sorted(found)


def test_modules_of_tests_have_names_of_their_own(root: Path) -> None:
    """Check that no two test files share a name: pytest could not collect the tests if they did."""
    counts = Counter(path.name for path in (root / "tests").rglob("*.py"))
    assert [n for n, count in counts.items() if count > 1 and n != "conftest.py"] == []


def test_files_are_short(root: Path) -> None:
    for path in (
        p for room in ("headrace", "tests", "benchmarks") for p in (root / room).rglob("*.py")
    ):
        most = KERNEL_LINES if "kernels" in path.parts else FILE_LINES
        lines = len(path.read_text().splitlines())
        assert lines <= most, f"{path.relative_to(root)} has {lines} lines, {most} at most"


def test_functions_are_short(trees: dict[str, ast.Module]) -> None:
    """The signature is not counted: the formatter gives each of many arguments its own line."""
    lines = {
        f"{module}.{node.name}": (node.end_lineno or 0) - node.body[0].lineno + 1
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    }
    assert not {name: count for name, count in lines.items() if count > FUNCTION_LINES}


def test_lines_are_narrow(root: Path) -> None:
    for path in _files(root, "py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            columns = len(line.split("  # type: ignore")[0])  # as ruff counts
            where = f"{path.relative_to(root)}:{number}"
            assert columns <= COLUMNS, f"{where} has {columns} columns, {COLUMNS} at most"


def test_text_is_ascii(root: Path) -> None:
    for path in _files(root, "py", "toml", "md", "yml", "txt"):
        assert path.read_text().isascii(), f"{path.relative_to(root)} is not ASCII"


def _public(node: ast.AST, path: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the public classes, functions and methods under `node`, without nested functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *FUNCTIONS)) and not child.name.startswith("_"):
            yield f"{path}.{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from _public(child, f"{path}.{child.name}")


def test_every_public_name_is_documented(trees: dict[str, ast.Module]) -> None:
    bare = [
        name
        for module, tree in trees.items()
        for name, node in [(module, tree), *_public(tree, module)]
        if not ast.get_docstring(node)  # type: ignore[arg-type]
    ]
    assert not bare
