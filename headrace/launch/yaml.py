"""Write YAML of plain values: tables, lists, words and numbers.

No package that Headrace needs writes YAML. A word that could be read as something else stands in
double quotes (https://yaml.org/spec/1.2.2/#731-double-quoted-style), and a text of several lines is
a block.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
"""Words that need no quotes, unless they are in `SPECIAL`."""
SPECIAL = ("true", "false", "yes", "no", "on", "off", "null", "y", "n", ".inf", ".nan")


def to_yaml(value: Any) -> str:
    """Return a table or a list as YAML, one line a value.

    Args:
        value: made of dict, list, str, int, float, bool and None.
    """
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    """Yield the lines of a table or a list, without indentation."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _entry(f"{_word(key)}:", inner)
    elif isinstance(value, list) and value:
        for inner in value:
            first, *rest = _lines(inner) if isinstance(inner, dict | list) else _text(inner)
            yield f"- {first}"
            yield from (f"  {line}" if line else "" for line in rest)
    else:
        yield _scalar(value)


def _entry(key: str, value: Any) -> Iterator[str]:
    """Yield the lines of a key with its value."""
    if isinstance(value, dict | list) and value:
        yield key
        yield from (f"  {line}" if line else "" for line in _lines(value))
    else:
        first, *rest = _text(value)
        yield f"{key} {first}"
        yield from (f"  {line}" if line else "" for line in rest)


def _text(value: Any) -> list[str]:
    """Return the lines of one value: of a text of several lines as a block."""
    if isinstance(value, str) and "\n" in value.strip("\n") and _is_block(value):
        return ["|", *value.splitlines()]
    return [_scalar(value)]


def _is_block(text: str) -> bool:
    """Return whether a block gives a text back: it ends in one newline and begins with a word."""
    ends = text.endswith("\n") and not text.endswith("\n\n")
    plain = all(c.isprintable() or c == "\n" for c in text)
    return ends and plain and not text[0].isspace()


def _scalar(value: Any) -> str:
    """Return one value on one line."""
    return _word(value) if isinstance(value, str) else json.dumps(value)


def _word(text: str) -> str:
    """Return a word, in quotes where it could be read as something else."""
    if PLAIN.fullmatch(text) and text.lower() not in SPECIAL:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    """Return a character as it stands between double quotes."""
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable() and character.isascii():
        return character
    if character == "\n":
        return "\\n"
    return f"\\U{ord(character):08x}"
