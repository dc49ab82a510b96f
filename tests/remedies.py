"""Where errors with a remedy are made, and what a remedy that is printed says to do.

A site is one call that makes an error or a refusal: its file, its function, and its number there.
"""

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from trees import tree_of

import headrace
from headrace.core.errors import HeadraceError
from headrace.core.strict import Wrong
from headrace.plan.technique import Unsupported

ROOT = Path(headrace.__file__).parent
ERRORS = str(ROOT / "core" / "errors.py")
MADE_BY = ((ERRORS, "__init__"), (__file__, "begin"))
"""Files and functions that an error passes while it is made."""
REFUSAL = "Unsupported"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _kinds() -> set[str]:
    """The names of all errors that a user is shown."""
    known = {Wrong.__name__}

    def walk(kind: type) -> None:
        known.add(kind.__name__)
        for child in kind.__subclasses__():
            walk(child)

    walk(HeadraceError)
    return known


@cache
def sites() -> dict[str, ast.Call]:
    """Return every site of the package where an error or refusal is made, by its name."""
    kinds, found = {*_kinds(), REFUSAL}, dict[str, ast.Call]()
    for file in sorted(ROOT.rglob("*.py")):
        module = file.relative_to(ROOT).with_suffix("").as_posix()
        for where, call in _calls(tree_of(file), "", kinds):
            number = 1 + sum(name.rpartition("#")[0] == f"{module}:{where}" for name in found)
            found[f"{module}:{where}#{number}"] = call
    return found


def _calls(node: ast.AST, where: str, kinds: set[str]) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inner = f"{where}.{child.name}".lstrip(".") if isinstance(child, FUNCTIONS) else where
        if isinstance(child, ast.Call):
            name = getattr(child.func, "id", getattr(child.func, "attr", ""))
            if name in kinds and not (name == REFUSAL and not child.args):
                yield where, child
        yield from _calls(child, inner, kinds)


@cache
def _by_file() -> dict[str, list[tuple[str, ast.Call]]]:
    found: dict[str, list[tuple[str, ast.Call]]] = {}
    for name, call in sites().items():
        found.setdefault(str(ROOT / f"{name.partition(':')[0]}.py"), []).append((name, call))
    return found


def site_at(file: str, line: int) -> str | None:
    """The site whose call stands at a line of a file."""
    here = [
        (call.end_lineno - call.lineno, name)
        for name, call in _by_file().get(file, [])
        if call.end_lineno is not None and call.lineno <= line <= call.end_lineno
    ]
    return min(here)[1] if here else None


@contextmanager
def recording() -> Iterator[list[tuple[str, Any]]]:
    """Collect the site of every error and refusal that is made, with what was made."""
    found: list[tuple[str, Any]] = []

    def watched(kind: Any) -> Any:
        before = kind.__init__

        def begin(self: Any, *given: Any, **named: Any) -> None:
            before(self, *given, **named)
            frame = sys._getframe(1)
            while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) in MADE_BY:
                frame = frame.f_back
            if frame is not None:
                name = site_at(frame.f_code.co_filename, frame.f_lineno)
                if name is not None:
                    found.append((name, self))

        return begin

    with pytest.MonkeyPatch.context() as patch:
        for kind in (HeadraceError, Unsupported, Wrong):
            patch.setattr(kind, "__init__", watched(kind))
        yield found


KEY = re.compile(r"[a-z_]+(\.[A-Za-z0-9_]+)*=(?!=)")
OPTION = re.compile(r"--[a-z][a-z-]*$")
VERB = "headrace"


def alternatives(remedy: str) -> list[str]:
    """The ways that a remedy offers, each on its own; what stands in brackets is one more."""
    inner = re.findall(r"\((?:or |with )?([^()]*)\)", remedy)
    outer = re.sub(r"\s*\([^()]*\)", "", remedy)
    parts = re.split(r"; or |,? or |; |, and ", outer)
    return [part.strip() for part in [*parts, *inner] if part.strip()]


def words_of(way: str) -> list[str]:
    """The words at the beginning of a way that can be typed; none where it is prose."""
    try:
        words = shlex.split(way)
    except ValueError:
        return []
    if words[:1] == [VERB]:
        end = next((n for n, w in enumerate(words) if w.endswith(",")), len(words) - 1)
        return [w.rstrip(",") for w in words[: end + 1]]
    found: list[str] = []
    for number, word in enumerate(words):
        option = number and OPTION.match(words[number - 1]) and words[number - 1] in found
        if not (KEY.match(word) or OPTION.match(word) or option):
            break
        found.append(word.rstrip(","))
        if word.endswith(","):
            break
    return found
