"""Parse the source of a module once for all tests of a process that read it."""

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(file: Path) -> ast.Module:
    """Return the syntax tree of a file, which nobody changes."""
    return ast.parse(file.read_text(), str(file))
