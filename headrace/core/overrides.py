"""Write overrides, `key=value`, into a plan's tables, and offer those that mend an error."""

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel

from headrace.core.errors import ConfigError
from headrace.core.files import toml_value
from headrace.core.remedy import leave_out, mend
from headrace.core.strict import field_at

MOST = 4
"""How many values that an error offers are tried before what works is given up."""


def write_override(values: dict[str, Any], item: str, plan: type[BaseModel]) -> None:
    """Write one `a.b=value` into nested tables.

    Args:
        values: the tables, which are changed.
        item: the override.
        plan: the class of the whole table, which tells what kind of value a key takes.

    Raises:
        ConfigError: it is no override, or its key leads through what is no table.
    """
    key, equals, raw = item.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"{item!r} is not an override", "key=value, as in batch.tokens=16384")
    value = toml_value(raw, key)
    if isinstance(value, float) and field_at(plan, key.strip().split(".")) is str:
        value = raw  # 1e5 is a name, too
    *path, last = key.strip().split(".")
    table: Any = values
    for depth, part in enumerate(path, 1):
        within, table = table, table.setdefault(part, {})
        if isinstance(table, str):  # one word may stand for a table
            words = getattr(field_at(plan, path[:depth]), "words", {})
            table = within[part] = dict(words[table]) if table in words else table
        if not isinstance(table, dict):
            whole = key.partition(part)[0] + part
            raise ConfigError(
                f"{key!r} goes through {part!r}, which is not a table", mend(f"{whole}={raw}")
            )
    table[last] = value


def known_of(overrides: Iterable[str], plan: type[BaseModel]) -> list[str]:
    """Return the overrides whose key the plan has; a remedy replaces the others.

    Args:
        overrides: `key=value` strings; a technique's own are returned too.
        plan: the class of the whole table.
    """
    keys = {item: item.partition("=")[0].strip().split(".") for item in overrides}
    return [
        item
        for item, key in keys.items()
        if key[0] == "techniques" or field_at(plan, key) is not None
    ]


def settle(error: ConfigError, read: Callable[[list[str]], object]) -> ConfigError:
    """Return the error with a remedy that is not refused in its turn, where one is found.

    A value that is offered may itself be refused: for its own key another is offered then, and a
    key that must change with it is said beside it.

    Args:
        error: of a plan; only a remedy that is one `key=value` is followed.
        read: reads the same plan with more overrides.
    """
    first = candidate = error.remedy.only_override
    offered: dict[str, str] = {}
    for _ in range(MOST):
        if candidate is None or candidate in offered.values():
            break
        offered[candidate.partition("=")[0]] = candidate
        try:
            read([*offered.values()])
        except ConfigError as other:
            candidate = other.remedy.only_override
            if first and other.remedy == leave_out(first.partition("=")[0]):
                error.remedy = other.remedy
                break
        else:
            if [*offered.values()] != [first]:
                error.remedy = mend(*offered.values())
            break
    return error
