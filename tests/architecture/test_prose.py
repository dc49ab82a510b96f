"""Nothing decides by the text of a message: messages may be reworded, and nothing else changes.

The package's syntax trees are searched for comparisons, string methods and regular expressions over
the text of our own errors, findings, refusals and cards. What has a type is asked by its type: the
changes of a `Remedy`, the `RefusalKind` of a refusal, the fields of a card.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

import pytest
from trees import tree_of

MESSAGES = ("message", "sentence", "evidence", "reason", "refused", "detail")
"""Attributes that hold text for a reader."""
CARD = ("buys", "costs", "helps", "hurts", "source")
"""Fields of a card."""
ASKS = (
    "startswith",
    "endswith",
    "find",
    "index",
    "partition",
    "rpartition",
    "split",
    "rsplit",
    "removeprefix",
    "removesuffix",
    "count",
    "rfind",
    "isupper",
    "islower",
)
"""Methods of a text that a decision is made with; `splitlines` only shortens what is shown."""
PATTERNS = ("search", "match", "fullmatch", "findall", "finditer", "split")
"""Functions of `re`, and methods of a compiled pattern."""

FOREIGN = {
    "core/errors.py:__init__": "torch tells sizes in its message alone, and has no fields for them",
    "core/errors.py:is_out_of_memory": "C++ allocators raise a RuntimeError and say what it is",
    "core/errors.py:at_a_limit": "Rust and C++ say in words alone that no thread could be started",
    "train/run_folder.py:telling_of_lost_ranks": "gloo and NCCL have no type for a lost rank",
    "train/run_folder.py:in_words": "gloo and NCCL have no type for a lost rank",
    "report/parts.py:_own_attention": "a kernel that the sentence names is not shown twice",
}
"""Places that may read a text: those of torch and of the system have no types. Each with why."""


def _is_message(node: ast.expr, errors: frozenset[str]) -> bool:
    """Return whether an expression is the text of one of our messages.

    Args:
        node: the expression.
        errors: names that `except ... as NAME` binds around it, and "=NAME" for each name that a
            message was assigned to.
    """
    if isinstance(node, ast.Name):
        return f"={node.id}" in errors
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in ("str", "repr") and node.args:
            inner = node.args[0]
            return (isinstance(inner, ast.Name) and inner.id in errors) or _is_message(
                inner, errors
            )
        if isinstance(node.func, ast.Attribute):  # text.lower(), technique.line()
            return node.func.attr == "line" or _is_message(node.func.value, errors)
        return False
    if isinstance(node, ast.JoinedStr):
        return any(
            isinstance(part, ast.FormattedValue)
            and isinstance(part.value, ast.Name)
            and part.value.id in errors
            for part in node.values
        )
    if isinstance(node, ast.Subscript):
        return _is_message(node.value, errors)
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value
    if node.attr in CARD:
        return isinstance(owner, ast.Attribute | ast.Name) and _last(owner) == "card"
    if node.attr == "text":
        return isinstance(owner, ast.Attribute) and owner.attr == "remedy"
    return node.attr in (*MESSAGES, "__doc__")


def _last(node: ast.Attribute | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id


def decisions(tree: ast.AST) -> list[tuple[str, int]]:
    """Return the function and the line of each decision that is made on the text of a message."""
    found: list[tuple[str, int]] = []

    def walk(node: ast.AST, function: str, errors: frozenset[str]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
            given = [*node.args.args, *node.args.kwonlyargs]
            errors = frozenset(one.arg for one in given if _is_error(one.annotation))
            inside = [*ast.walk(node)]
            errors |= {part.name for part in inside if _is_bound(part)}
            for _ in range(2):  # a name may be given what another holds
                errors |= {f"={name}" for name in _assigned(inside, errors)}
        if isinstance(node, ast.expr) and _decides(node, errors):
            found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            walk(child, function, errors)

    walk(tree, "", frozenset())
    return found


def _is_bound(node: ast.AST) -> TypeGuard[ast.ExceptHandler]:
    return isinstance(node, ast.ExceptHandler) and node.name is not None


def _assigned(inside: Sequence[ast.AST], errors: frozenset[str]) -> Iterator[str]:
    """Yield the names that a function gives the text of a message, by the nodes inside of it."""
    for node in inside:
        if isinstance(node, ast.Assign) and _is_message(node.value, errors):
            yield from (one.id for one in node.targets if isinstance(one, ast.Name))
        if isinstance(node, ast.NamedExpr) and _is_message(node.value, errors):
            yield node.target.id


def _is_error(annotation: ast.expr | None) -> bool:
    """Return whether an annotation is that of an exception."""
    words = "" if annotation is None else ast.unparse(annotation)
    return "Error" in words or "Exception" in words


def _decides(node: ast.expr, errors: frozenset[str]) -> bool:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        typed = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
        asked = any(isinstance(sign, typed) for sign in node.ops)
        empty = any(isinstance(side, ast.Constant) and side.value == "" for side in sides)
        return asked and not empty and any(_is_message(side, errors) for side in sides)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr in ASKS and _is_message(node.func.value, errors):
        return True
    pattern = node.func.attr in PATTERNS
    return pattern and any(_is_message(argument, errors) for argument in node.args)


def found_in(package: Path) -> dict[str, int]:
    """Return the places of a package that decide by a message, as `path:function` -> line."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        for function, line in decisions(tree_of(path)):
            found[f"{path.relative_to(package)}:{function}"] = line
    return found


def test_nothing_decides_by_the_text_of_a_message(root: Path) -> None:
    found = found_in(root / "headrace")
    assert not {place: line for place, line in found.items() if place not in FOREIGN}
    assert set(FOREIGN) <= set(found), "a listed place reads no message any more: take it out"


@pytest.mark.parametrize(
    "line",
    [
        "error.message.startswith('a')",
        "'not done' in found.reason",
        "re.search('--with', error.remedy.text)",
        "finding.sentence == 'a'",
        "PATTERN.match(finding.evidence)",
        "technique.card.costs.split(';')",
        "'liger' in technique.line().lower()",
        "technique.__doc__.find('a')",
        "reading.refused.partition(':')[0]",
    ],
)
def test_a_decision_on_a_text_is_seen(line: str) -> None:
    assert [*decisions(ast.parse(f"def f():\n    return {line}"))] == [("f", 2)]


def test_a_decision_on_an_error_is_seen() -> None:
    code = "def f(e: OSError):\n text = f'{e}'\n return 'a' in text"
    assert decisions(ast.parse(code)) == [("f", 3)]
    code = "def f():\n try:\n  g()\n except ConfigError as error:\n  return 'a' in str(error)"
    assert decisions(ast.parse(code)) == [("f", 5)]
    assert [*decisions(ast.parse("def f(error: OSError):\n return str(error) == 'a'"))] == [
        ("f", 2)
    ]


@pytest.mark.parametrize(
    "line",
    [
        "error.remedy.changes",
        "other.remedy == leave_out('a')",
        "found.refusal is RefusalKind.TIME",
        "found.refused == ''",
        "print(error.message)",
        "error.message.splitlines()[0]",
    ],
)
def test_a_type_or_a_text_that_is_shown_is_no_decision(line: str) -> None:
    assert not [*decisions(ast.parse(f"def f():\n    return {line}"))]
