"""Refuse docstrings that are no sentence, and names that the field does not use.

`make check` runs `python tests/architecture/english.py [PATH ...]`. What it knows is in
`english.toml` beside it: verbs, the glossary, and the names that may stay, each with its reason.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KNOWN: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
IMPERATIVE = frozenset(KNOWN["verbs"]["imperative"].split())
FINITE = frozenset(KNOWN["verbs"]["finite"].split())
INSTEAD: dict[str, str] = KNOWN["glossary"]["names"]
"""Part of an identifier that is refused -> the field's word."""
IN_TEXT: dict[str, str] = KNOWN["glossary"]["text"]
"""Regular expression of words that no reader sees -> the field's words."""
ALLOWED: dict[str, str] = KNOWN["allowed"]
"""Name, text or file that may stay -> why."""
NO_START = re.compile(r"(Of|Likewise|The same|And|So many|So|As one|That|Those|These|Such)\b")
FILE_NAME = re.compile(r"\b(\w+)\.py\b")
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def problems(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each problem of a Python file."""
    tree = ast.parse(source)
    in_tests = path.parts[0] == "tests"
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            line = node.body[0].lineno
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for problem in of_docstring(text, imperative=function and not in_tests):
                yield line, problem
        for line, text in _attribute_docstrings(node):
            if begins := NO_START.match(text):
                yield line, f'this docstring begins with "{begins[0]}"'
        if not in_tests:
            for line, name in _defined(node):
                for problem in of_name(name):
                    yield line, problem
    if not in_tests:
        for line, text in _texts(tree):
            for problem in of_text(text):
                yield line, problem


def of_docstring(text: str, *, imperative: bool) -> Iterator[str]:
    """Yield what is wrong with the first paragraph of a docstring.

    Args:
        imperative: it documents a function: its first word is a verb.
    """
    first = " ".join(text.split("\n\n")[0].split())
    if begins := NO_START.match(first):
        yield f'this docstring begins with "{begins[0]}"'
        return
    words = re.findall(r"[A-Za-z'-]+", first)
    head = words[0].lower() if words and first[0].isalpha() else ""
    if imperative and head not in IMPERATIVE:
        yield f'"{first[:60]}": a function\'s docstring begins with a verb, as "Return the ..."'
    elif not imperative and head not in IMPERATIVE and not FINITE & {w.lower() for w in words}:
        yield f'"{first[:60]}": this docstring has no verb'


def of_name(name: str) -> Iterator[str]:
    """Yield the field's word for each refused part of an identifier."""
    if name in ALLOWED:
        return
    for part in PARTS.findall(name):
        if instead := INSTEAD.get(part.lower()):
            yield f"{name}: say {instead}, not {part.lower()}"


def of_text(text: str) -> Iterator[str]:
    """Yield the field's words for what a reader shall not meet in a text.

    The name of a Python file may stand in a text where the file may have it.
    """
    if text in ALLOWED:
        return
    text = FILE_NAME.sub(lambda file: "" if file[1] in ALLOWED else file[0], text)
    for pattern, instead in IN_TEXT.items():
        if found := re.search(rf"\b({pattern})\b", text, re.IGNORECASE):
            yield f'"{found[0]}" in a text: say {instead}'


def _attribute_docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of the strings that follow assignments."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for before, after in pairwise(body):
        if not isinstance(before, ast.Assign | ast.AnnAssign) or not isinstance(after, ast.Expr):
            continue
        if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            yield after.lineno, after.value.value.strip()


def _defined(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of what a node defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.lineno, node.name
        case ast.arg():
            yield node.lineno, node.arg
        case ast.Name(ctx=ast.Store()):
            yield node.lineno, node.id
        case ast.Attribute(ctx=ast.Store()):
            yield node.lineno, node.attr
        case _:
            pass


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string literal, docstrings too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def main(paths: list[str]) -> int:
    """Print the problems of files and folders; return 1 where there are some."""
    count = 0
    for top in paths or KNOWN["paths"]["code"]:
        given = ROOT / top
        for path in sorted(given.rglob("*.py") if given.is_dir() else [given]):
            where = path.relative_to(ROOT)
            if str(where) in ALLOWED:
                continue
            found = list(problems(path.read_text(), where))
            if where.parts[0] != "tests":
                found += [(1, p) for p in of_name(path.stem)]
            count += len(found)
            for line, problem in sorted(found):
                print(f"{where}:{line}: {problem}")
    if not paths:
        for path in [p for top in KNOWN["paths"]["pages"] for p in sorted(ROOT.glob(top))]:
            for number, text in enumerate(path.read_text().splitlines(), 1):
                for problem in of_text(text):
                    count += 1
                    print(f"{path.relative_to(ROOT)}:{number}: {problem}")
    print(f"{count} problems", file=sys.stderr)
    return bool(count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
