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
    """A constant is one number, or several that belong together.

    Args:
        value: the number, or the numbers in the order that the unit names.
        unit: the unit of each number.
        source: the measurements that it rests on, or why it is assumed.
        program: the program that fits it, as a path of the repository; "" where it is assumed or
            taken from the source by hand.
    """

    value: float | tuple[float, ...]
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
    value = row["value"]
    value = tuple(map(float, value)) if isinstance(value, list) else float(value)
    texts = {key: row[key] for key in ("unit", "source")} | {"program": row.get("program", "")}
    assert all(isinstance(text, str) for text in texts.values()), name
    assert row.keys() <= {"value", *texts}, f"{name} has a key that nobody reads"
    return Constant(value, **texts)


CONSTANTS = _read()
"""Every constant by name."""


def number(name: str) -> float:
    """Return the constant of this name."""
    value = CONSTANTS[name].value
    assert isinstance(value, float), f"{name} is several numbers"
    return value


def numbers(name: str) -> tuple[float, ...]:
    """Return the constants of this name, in the order of the file."""
    value = CONSTANTS[name].value
    assert isinstance(value, tuple), f"{name} is one number"
    return value
