"""A number that a row of a source holds beside its text, as how hard it is."""

import math
from collections.abc import Iterator
from typing import Any

from headrace.core.errors import MANY, ConfigError
from headrace.core.remedy import mend
from headrace.data.fields import MISSING, find, leaves


class NumberColumn:
    """Note each row as it is read, for whoever takes its documents.

    Readers note a row just before they yield its text, so that the newest row is that of the text.

    Args:
        key: name of the field; dots lead into it.
        table: the table of the plan that names it.
    """

    def __init__(self, key: str, table: str) -> None:
        self.key, self.table = key, table
        self._row: Any = MISSING

    def note(self, row: Any) -> None:
        """Keep a row until it is asked for."""
        self._row = row

    def newest(self) -> Any:
        """Return the row that was noted since the last call; MISSING where none was."""
        row, self._row = self._row, MISSING
        return row

    def number(self, row: Any, origin: str) -> float:
        """Return the number of a row.

        Args:
            row: as `newest` returned it.
            origin: where that row stands.

        Raises:
            ConfigError: it has none, as a text file has no fields.
        """
        value = find(row, self.key)
        number = _number(value)
        if number is not None:
            return number
        others = [*_numbers(row)]
        if value is MISSING:
            names = [*leaves(row)] if isinstance(row, dict) else []
            listed = ", ".join(names[:MANY]) or "none"
            what = f"has no field {self.key!r}; its fields are {listed}"
        else:
            what = f"holds {value!r:.60} in the field {self.key!r}"
        score = f"column:{others[0]}" if others else "compression"
        raise ConfigError(
            f"{origin} {what}, and {self.table}.score = 'column:{self.key}' needs a finite number "
            "in every row",
            mend(f"{self.table}.score={score}"),
        )


def _number(value: Any) -> float | None:
    """Return a value as a finite number; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _numbers(row: Any) -> Iterator[str]:
    """Yield the fields of a row that hold a number."""
    if isinstance(row, dict):
        for name in leaves(row):
            if not isinstance(value := find(row, name), str) and _number(value) is not None:
                yield name
