"""Say what an expression of a message or a remedy will say, as far as the source tells."""

import ast
import re
from collections.abc import Iterable
from functools import cache

from headrace.core.remedy import typed

DEEPEST = 6
"""How many names are followed, one after the other, to the text that they stand for."""
LETTERS = 8
"""Letters outside of placeholders from which a message is clear."""
PLACEHOLDER = re.compile(r"<[^<>]*>")
EMPTY = ("self", "value", "map", "str", "repr", "filter", "sorted", "len", "set", "error_type")
"""Names that say nothing of what will stand there."""
RERUN = ("rerun", "rerun_train", "train_command")
"""Functions that repeat a user's command with other words."""


def letters(text: str) -> int:
    """Return how many letters of a text stand outside of placeholders."""
    return len(re.findall(r"[A-Za-z]", PLACEHOLDER.sub("", text)))


class Speaker:
    """Render expressions of one file as text; what is not known stands in angle brackets."""

    def __init__(self, tree: ast.Module) -> None:
        self._constants = _once(tree.body)

    def text(self, node: ast.expr, function: ast.FunctionDef | None, depth: int = 0) -> str:
        """Return what a message says.

        Args:
            node: the expression.
            function: the function that it stands in, whose names are looked up.
            depth: how many names were followed before.
        """
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self._part(value, function, depth) for value in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left, function, depth) + self.text(node.right, function, depth)
        if isinstance(node, ast.IfExp):
            return self._either(self.text(n, function, depth) for n in (node.body, node.orelse))
        if isinstance(node, ast.Name) and depth < DEEPEST:
            value = self._value(node.id, function)
            return self.text(value, function, depth + 1) if value else f"<{node.id}>"
        return f"<{_name(node)}>"

    def remedy(self, node: ast.expr, function: ast.FunctionDef | None, depth: int = 0) -> str:
        """Return what a remedy says: as `text` does, and of calls that make remedies too."""
        parts: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            parts = [node.left, node.right]
        elif isinstance(node, ast.IfExp):
            parts = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            parts = node.values
        if parts:
            return self._either(self.remedy(part, function, depth) for part in parts)
        if isinstance(node, ast.Call):
            return self._call(node, function, depth)
        if isinstance(node, ast.Name) and depth < DEEPEST:
            value = self._value(node.id, function)
            return self.remedy(value, function, depth + 1) if value else f"<{node.id}>"
        return self.text(node, function, depth)

    def _part(self, node: ast.expr, function: ast.FunctionDef | None, depth: int) -> str:
        if not isinstance(node, ast.FormattedValue):
            return self.text(node, function, depth)
        value = node.value
        if isinstance(value, ast.Name) and depth < DEEPEST:
            constant = self._constants.get(value.id)
            if constant is not None:
                return self.text(constant, None, depth + 1)
        if isinstance(value, ast.IfExp | ast.Constant):
            return self.text(value, function, depth)
        return f"<{_name(value)}>"

    def _call(self, node: ast.Call, function: ast.FunctionDef | None, depth: int) -> str:
        name = _name(node.func)
        given = {k.arg: self.remedy(k.value, function, depth) for k in node.keywords if k.arg}
        words = [self.text(arg, function, depth) for arg in node.args]
        if name == "otherwise" and isinstance(node.func, ast.Attribute):
            first = self.remedy(node.func.value, function, depth)
            return f"{first} (or {self.remedy(node.args[0], function, depth)})"
        if name in ("mend", "Remedy"):
            return given.get("text") or _typed(words)
        if name == "leave_out":
            return f"leave out {' '.join(words)}"
        if name == "rerun_with":
            return f"the same command with {' '.join(words)}"
        if name == "rerun_without":
            return f"the same command without {' '.join(words)}"
        if name in RERUN:
            return f"the same command with {' '.join(words[name != 'rerun' :])}".strip()
        return f"<{name}>"

    def _value(self, name: str, function: ast.FunctionDef | None) -> ast.expr | None:
        """Return what a name stands for, where the function or the file assigns it once."""
        local = _of_function(function) if function else {}
        return local.get(name) or self._constants.get(name)

    def _either(self, texts: Iterable[str]) -> str:
        return " or ".join(dict.fromkeys(filter(None, texts)))


def _typed(words: list[str]) -> str:
    """Return the words of a change as they are typed; placeholders stay unquoted."""
    return " ".join(
        typed(word)
        if "<" not in word
        else re.sub(r"^\+", "--with ", re.sub("^-", "--without ", word))
        for word in words
        if word
    )


@cache
def _of_function(function: ast.FunctionDef) -> dict[str, ast.expr]:
    return _once(node for statement in function.body for node in ast.walk(statement))


def _once(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """Return the names that are assigned exactly once -> what they are assigned."""
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.NamedExpr):
            values.setdefault(node.target.id, []).append(node.value)
    return {name: values[0] for name, values in values.items() if len(values) == 1}


def _name(node: ast.expr) -> str:
    """Return a short name of what stands in a place that only a run fills."""
    if isinstance(node, ast.Name):
        return node.id.strip("_").lower()
    if isinstance(node, ast.Attribute):
        return node.attr.strip("_").lower()
    if isinstance(node, ast.Call):
        return _of_call(node)
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    return "value"


def _of_call(node: ast.Call) -> str:
    """Return the name of what a call is given, or of the call where it is given nothing."""
    names = [_name(arg) for arg in node.args]
    telling = [name for name in names if name not in EMPTY]
    if telling:
        return telling[0]
    if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Constant):
        inner = _name(node.func.value)
        return node.func.attr.strip("_") if inner in EMPTY else inner
    return _name(node.func)
