"""Define strict pydantic tables, whose mistakes become one message with the nearest right key."""

import ast
import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date, time
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from headrace.core.errors import ConfigError, alike
from headrace.core.foreign import Meant, meant_by
from headrace.core.guess import choice, guesses
from headrace.core.inline import inline_text
from headrace.core.remedy import Remedy, as_remedy, leave_out, mend

T = TypeVar("T", bound=BaseModel)
READ = {"read": True}
"""The validation context of `read_table`, whose caller has resolved every name."""
UNSET = ("null", "none", "nil", "unset", "")
"""Words that people write for a number where they mean none; TOML has no such value."""


SHARE = 0.01
"""Least default of a key of at most 1 from which the key counts as a share, which people may write
as so many of a hundred."""


class Wrong(ValueError):
    """A check of a whole table raises this error; `explained` keeps its remedy.

    Args:
        message: what was asked and what was found.
        remedy: the keys that mend it, as they are typed.
    """

    def __init__(self, message: str, remedy: Remedy | str) -> None:
        super().__init__(message)
        self.remedy = as_remedy(remedy)


class Strict(BaseModel):
    """A frozen table: unknown keys, wrong types, wrong ranges and infinite numbers are errors."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _as_meant(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number, and take a number or a date for a word."""
        if not isinstance(given, int | float | date | time):
            return given
        accepted = _accepted(cls, str(info.field_name))
        takes_number = not accepted.isdisjoint((int, float))
        if isinstance(given, bool):
            if takes_number and bool not in accepted:
                raise ValueError(f"{str(given).lower()} is no number")
        elif str in accepted and not takes_number:
            return str(given)
        return given

    def _repr_html_(self) -> str:
        values = self.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
        title = f"{type(self).__name__}, what differs from the defaults"
        return inline_text(title, tomli_w.dumps(values))


@cache
def _accepted(table: type[BaseModel], field: str) -> frozenset[Any]:
    """Return the kinds of values that the annotation of a field names."""
    kind = table.model_fields[field].annotation
    args = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    return frozenset(getattr(k, "__origin__", k) for k in (kind, *args))


def meanings(table: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field, in one line, with the fields of base classes.

    The sources are read on this call: pydantic would read all of them whenever a run starts.
    """
    docstrings: dict[str, str] = {}
    for kind in reversed(table.__mro__):
        if issubclass(kind, Strict):
            docstrings |= _docstrings(kind.__module__).get(kind.__name__, {})
    return {name: docstrings.get(name, "") for name in table.model_fields}


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return class -> field -> the string that stands below that field in a module's source."""
    by_class: dict[str, dict[str, str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if not isinstance(node, ast.ClassDef):
            continue
        for one, next_one in pairwise(node.body):
            if (
                isinstance(one, ast.AnnAssign)
                and isinstance(one.target, ast.Name)
                and isinstance(next_one, ast.Expr)
                and isinstance(next_one.value, ast.Constant)
            ):
                words = " ".join(str(next_one.value.value).split())
                by_class.setdefault(node.name, {})[one.target.id] = words
    return by_class


def _table_at(table: type[BaseModel], path: tuple[Any, ...]) -> type[BaseModel]:
    """Return the class of the sub-table at `path`; it follows fields that are tables themselves."""
    for part in path:
        field = table.model_fields.get(str(part))
        annotations = [field.annotation, *get_args(field.annotation)] if field else []
        inner = [k for k in annotations if isinstance(k, type) and issubclass(k, BaseModel)]
        if not inner:
            return table
        table = inner[0]
    return table


def field_at(table: type[BaseModel], path: Sequence[str]) -> Any:
    """Return what kind of value the key at `path` takes, or None where there is no such key."""
    field = _table_at(table, tuple(path[:-1])).model_fields.get(path[-1])
    return None if field is None else field.annotation


def read_table(table: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Validate `values`, or raise ConfigError naming the key, what was found and what fits.

    Args:
        table: the class to build.
        values: parsed TOML.
        where: the dotted prefix of this table in the plan.
    """
    try:
        return table.model_validate(values, context=READ)
    except ValidationError as error:
        raise explained(table, error, where) from None


def explained(table: type[BaseModel], error: ValidationError, where: str = "") -> ConfigError:
    """Return what pydantic found as one error that names the keys, and has them in `keys`."""
    first_errors: dict[tuple[Any, ...], dict[str, Any]] = {}
    for item in error.errors():
        path = _written(table, item["loc"])
        whole = path == item["loc"]  # of the kinds that a value may have, the first tells why not
        first_errors.setdefault((*path, item["type"]) if whole else path, {**item, "loc": path})
    lines = [_explain(table, item, where) for item in first_errors.values()]
    messages = list(dict.fromkeys(message for message, _ in lines))
    refused = ConfigError("\n".join(messages), next((r for _, r in lines if r), Remedy()))
    paths = [".".join(map(str, item["loc"])) for item in first_errors.values() if item["loc"]]
    refused.keys = tuple(dict.fromkeys(paths))
    return refused


def _explain(table: type[BaseModel], item: dict[str, Any], where: str) -> tuple[str, Remedy]:
    """Return what is wrong by one error of pydantic's, and what to write instead."""
    path = tuple(item["loc"])
    key = ".".join([where, *map(str, path)] if where else map(str, path))
    if item["type"] == "extra_forbidden":
        return _unknown(table, item["input"], key, path)
    if any(isinstance(part, int) for part in path):
        return _explain_item(table, item, key, path)
    if item["type"] == "tuple_type" and isinstance(item["input"], str):
        whole = _guess(table, path, item)
        given = json.dumps(whole or [item["input"]], ensure_ascii=False)
        message = f"{key} = {item['input']!r}: input should be a list"
        return message, mend(f"{key}={given}")
    if item["type"] == "missing":
        return f"the plan needs the key {key!r}", mend(f"{key}=VALUE")
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        expected = item["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        meant = choice(item["input"], expected)
        right = meant or alike(item["input"], expected) or expected[0]
        return f"{key} = {item['input']!r} is not one of {', '.join(expected)}", mend(
            f"{key}={right}"
        )
    if item["type"] == "value_error":
        error = item["ctx"]["error"]
        default = leave_out(key) if key else Remedy()
        remedy = error.remedy if isinstance(error, Wrong) else default
        return f"{key}: {error}" if key else str(error), remedy
    if item["type"] in ("int_parsing", "float_parsing") and str(item["input"]).lower() in UNSET:
        message = (
            f"{key} = {item['input']!r} is no number, and nothing unsets a key that is written"
        )
        return message, Remedy(text=f"leave {key} out, of the plan's file where it stands there")
    reason = item["msg"][:1].lower() + item["msg"][1:]  # a pattern in it keeps its capitals
    field = _table_at(table, path[:-1]).model_fields.get(str(path[-1])) if path else None
    near = _guess(table, path, item)
    near = _near(field, item) if near is None else near
    if isinstance(near, list):
        return f"{key} = {item['input']!r}: {reason}", _given(key, near)
    return (
        f"{key} = {item['input']!r}: {reason}",
        leave_out(_settable(key)) if near is None else mend(f"{key}={near}"),
    )


def _unknown(
    table: type[BaseModel], given: Any, key: str, path: tuple[Any, ...]
) -> tuple[str, Remedy]:
    """Return what is wrong with a key that no table has, and the remedy that replaces it."""
    owner, prefix = _table_at(table, path[:-1]), key.rpartition(".")[0]
    choices, whole, value = owner.model_fields, key, given
    while isinstance(value, Mapping) and len(value) == 1:  # one key of a table that is not there
        ((name, value),) = value.items()
        whole = f"{whole}.{name}"
    near = alike(str(path[-1]), choices)
    placed = near is not None and _refused(owner, near, given) is None
    meant = meant_by(whole, choices, value)
    if meant is not None and not (placed and whole != key):
        return _foreign(table, owner, meant, whole, value)
    if not choices:
        return f"the plan has no key {key!r}; {prefix} has no knobs", mend(f"{prefix}={{}}")
    if near is None:
        known = ", ".join(sorted(choices))
        message = f"the plan has no key {key!r}; {prefix or 'a plan'} has {known}"
        return message, leave_out(whole)
    hint = f"{prefix}.{near}" if prefix else near
    fits = _fitting(owner, near, str(path[-1]), given)
    message = f"the plan has no key {key!r}; did you mean {hint}?"
    return message, leave_out(whole) if fits is None else _given(hint, fits)


def _foreign(
    table: type[BaseModel], beside: type[BaseModel], meant: Meant, key: str, given: Any
) -> tuple[str, Remedy]:
    """Return the message about a key that other trainers have, and what to write instead."""
    opening = f"the plan has no key {key!r}; "
    if meant.unlike:
        return f"{opening}the nearest is {meant.key}, {meant.unlike}", leave_out(key)
    if meant.option:
        off = given is False or str(given).lower() in (*UNSET, "no", "off", "0")
        instead = leave_out(key) if off else meant.option
        return f"{opening}the nearest is {meant.option}", instead
    *above, name = meant.key.split(".")
    inside = meant.key.rpartition(".")[0] == key.rpartition(".")[0]
    owner, value = beside if inside else _table_at(table, tuple(above)), given
    if name in owner.model_fields and (inside or len(above) < 2):
        value = _fitting(owner, name, key, given)
    remedy = leave_out(key) if value is None else _given(meant.key, value)
    return f"{opening}did you mean {meant.key}?", remedy


def _explain_item(
    table: type[BaseModel], item: dict[str, Any], key: str, path: tuple[int | str, ...]
) -> tuple[str, Remedy]:
    """Return what is wrong with an item of a list, and the whole list to write instead."""
    at = next(number for number, part in enumerate(path) if isinstance(part, int))
    whole = key.rsplit(".", len(path) - at)[0]
    field = _table_at(table, path[: at - 1]).model_fields.get(str(path[at - 1]))
    reason = item["msg"][:1].lower() + item["msg"][1:]
    message = f"{key} = {item['input']!r}: {reason}"
    if item["type"] == "missing":
        message = f"{whole} = {json.dumps(item['input'], default=str)} lacks an item"
    if item["type"] == "literal_error":
        expected = item["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        meant = choice(str(item["input"]), expected)
        given = json.dumps([meant or alike(str(item["input"]), expected) or expected[0]])
        message = f"{key} = {item['input']!r} is not one of {', '.join(expected)}"
        return message, mend(f"{whole}={given}")
    if field is None or not isinstance(field.default, tuple) or not field.default:
        return message, leave_out(whole)
    return message, mend(f"{whole}={json.dumps(field.default)}")


def _written(table: type[BaseModel], path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return a path as a plan writes it, without names of types, as `str` of `float | str`."""
    for number, part in enumerate(path[:-1]):
        field = None
        if all(isinstance(one, str) for one in path[: number + 1]):
            field = _table_at(table, path[:number]).model_fields.get(str(part))
        if field is not None and get_origin(field.annotation) in (Union, UnionType):
            members = [kind for kind in get_args(field.annotation) if kind is not NoneType]
            if len(members) > 1 and isinstance(path[number + 1], str):
                return path[: number + 1]
    return path


def _settable(key: str) -> str:
    """Return the key that a plan can set: for an item of a list, the key of the whole list."""
    before, _, last = key.rpartition(".")
    return before if last.isdigit() else key


def _fitting(table: type[BaseModel], name: str, written: str, given: Any) -> Any:
    """Return the first value near to the given one that a field takes; None where there is none.

    Args:
        table: of the field.
        name: the field's.
        written: what stood in its place: the digit of "beta2" tells which of two numbers it was.
        given: the value that was written.
    """
    if isinstance(given, Mapping):
        return given if _refused(table, name, given) is None else None
    field = table.model_fields[name]
    whole = isinstance(given, float) and given.is_integer()
    tried = [int(given), given] if whole else [given]
    if isinstance(field.default, tuple) and type(given) in (int, float):
        last = written[-1:]
        at = min(int(last) - 1 if last.isdigit() and last != "0" else 0, len(field.default) - 1)
        tried.append([*field.default[:at], given, *field.default[at + 1 :]])
    for value in (*tried, *guesses(given, name)):
        wrong = _refused(table, name, value)
        if wrong is None:
            return value
        near = _near(field, wrong)
        if near is not None and _refused(table, name, near) is None:
            return near
    default = [*field.default] if isinstance(field.default, tuple) else field.default
    return default if type(default) in (int, float, str, bool, list) else None


def _guess(table: type[BaseModel], path: tuple[Any, ...], item: dict[str, Any]) -> Any:
    """Return the likeliest meaning of a value that the field takes; None where it takes none."""
    owner, name = _table_at(table, path[:-1]), str(path[-1]) if path else ""
    field, limits = owner.model_fields.get(name), item.get("ctx", {})
    if field is None:
        return None
    usual = field.default if type(field.default) is float else 0.0
    share = limits.get("le", limits.get("lt")) == 1 and usual >= SHARE
    for value in guesses(item["input"], name, share=share):
        if value != item["input"] and _refused(owner, name, value) is None:
            return value
    return None


def _refused(table: type[BaseModel], name: str, value: Any) -> dict[str, Any] | None:
    """Return pydantic's error on a value of one field; None where the field takes it."""
    try:
        table.model_validate({name: value}, context=READ)
    except ValidationError as error:
        errors = [dict(item) for item in error.errors() if item["loc"][:1] == (name,)]
        return errors[0] if errors else None
    return None


def _given(key: str, value: Any) -> Remedy:
    """Return the override that gives a key its value; a table's key alone, as text."""
    while isinstance(value, Mapping) and len(value) == 1:
        ((name, value),) = value.items()
        key = f"{key}.{name}"
    if value == {}:
        return mend(f"{key}={{}}")
    if isinstance(value, bool):
        return mend(f"{key}={str(value).lower()}")
    if isinstance(value, list):
        return mend(f"{key}={str(value).replace(' ', '')}")
    if type(value) in (int, float, str):
        return mend(f"{key}={value}")
    return Remedy(text=key)


def _near(field: FieldInfo | None, item: dict[str, Any]) -> Any:
    """Return a value near to the refused one that works: a cleaned text, a bound or the default."""
    given, limits, kind = item["input"], item.get("ctx", {}), item["type"]
    if kind == "string_pattern_mismatch":
        cleaned = re.sub("[^A-Za-z0-9._-]+", "-", given).strip(".-_")
        if cleaned != given:
            return cleaned or None
    if (bound := next((limits[k] for k in ("ge", "le") if k in limits), None)) is not None:
        return bound
    default = None if field is None else field.default
    if default is None and "gt" in limits:
        return limits["gt"] + 1
    return default if type(default) in (int, float, str) and default != "" else None
