"""The constants of the cost model that were fitted to measurements, or are assumed.

They stand in `constants.toml`, each with its unit, its source and the program that fits it anew.
The file is read once, when a module of the cost model is imported; that module gives each constant
the name that its formulas use.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("constants.toml")
VERSION = 1
"""The version of the file that this module reads."""


@dataclass(frozen=True)
class Constant:
    """A constant is one number, several that belong together, or rows of several.

    Args:
        value: the number, or the numbers in the order that the unit names, or rows of these.
        unit: the unit of each number.
        source: the measurements that it rests on, or why it is assumed.
        program: the program that fits it, as a path of the repository; "" where it is assumed or
            taken from the source by hand.
    """

    value: float | tuple[float, ...] | tuple[tuple[float, ...], ...]
    unit: str
    source: str
    program: str = ""


def _read() -> dict[str, Constant]:
    """Return every constant of the file by name."""
    table: dict[str, Any] = tomllib.loads(FILE.read_text())
    assert table.pop("version") == VERSION, f"{FILE} has another version than {VERSION}"
    return {name: _constant(name, row) for name, row in table.items()}


def _constant(name: str, row: dict[str, Any]) -> Constant:
    """Return one row of the file, checked."""
    value = _floats(row["value"])
    texts = {key: row[key] for key in ("unit", "source")} | {"program": row.get("program", "")}
    assert all(isinstance(text, str) for text in texts.values()), name
    assert row.keys() <= {"value", *texts}, f"{name} has a key that nobody reads"
    return Constant(value, **texts)


def _floats(value: Any) -> Any:
    """Return a number as a float, and lists of numbers as tuples of floats."""
    return tuple(map(_floats, value)) if isinstance(value, list) else float(value)


CONSTANTS = _read()
"""Every constant by name."""


def number(name: str) -> float:
    """Return the constant of this name."""
    value = CONSTANTS[name].value
    assert isinstance(value, float), f"{name} is several numbers"
    return value


def numbers(name: str) -> tuple[float, ...]:
    """Return the constants of this name, in the order of the file."""
    value: Any = CONSTANTS[name].value
    assert isinstance(value, tuple) and isinstance(value[0], float), f"{name} is no list of numbers"
    return value


def table(name: str) -> tuple[tuple[float, ...], ...]:
    """Return the rows of numbers of this name, in the order of the file."""
    value: Any = CONSTANTS[name].value
    assert isinstance(value, tuple) and isinstance(value[0], tuple), f"{name} has no rows"
    return value
