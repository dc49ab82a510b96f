"""The field of a row that holds its text: by name, or dotted into what the row holds."""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace.core.errors import MANY, ConfigError, nearest
from headrace.core.files import toml_value
from headrace.data.chat.conversation import ChatReading
from headrace.plan.data_config import DataConfig
from headrace.plan.text_template import template_parts

MISSING = object()
"""What `find` returns where there is no such field; a field may hold None."""
DEEPEST = 4
"""Objects inside each other whose fields a message lists."""


@dataclass(frozen=True)
class TextReading:
    """Say how rows and files become texts.

    Args:
        text_key: the field that holds the text.
        template: fields in braces and what stands between them; "" for `text_key` alone.
        separator: a text at which a document is cut; "" for none.
        replace: whether bytes that are not UTF-8 become U+FFFD, or are refused.
        setting: what names the field instead of the plan's own keys; "" for those.
        chat: how rows become conversations, in the place of texts.
    """

    text_key: str = "text"
    template: str = ""
    separator: str = ""
    replace: bool = False
    setting: str = ""
    chat: ChatReading | None = None

    @staticmethod
    def of(data: DataConfig) -> "TextReading":
        """Return how a plan's data is read."""
        return TextReading(
            data.text_key,
            data.text_template,
            data.separator,
            data.invalid_utf8 == "replace",
            chat=ChatReading(data.chat, data.text_key) if data.chat else None,
        )

    @cached_property
    def parts(self) -> tuple[tuple[str, str | None], ...]:
        """Return the text as (literal text, the key whose field follows it, or None)."""
        return template_parts(self.template) if self.template else (("", self.text_key),)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Return the fields that every row must have, each once."""
        if self.chat is not None:
            return ()
        return tuple(dict.fromkeys(key for _, key in self.parts if key is not None))

    def lacking(self, row: Any) -> str | None:
        """Return the first of the keys that a row has no field for, or None."""
        return next((key for key in self.keys if find(row, key) is MISSING), None)

    def join(self, fields: Mapping[str, str | None]) -> str | None:
        """Return the text of a row by key; None where all of its fields are null."""
        if not self.template:
            return fields[self.text_key]
        if all(value is None for value in fields.values()):
            return None
        return "".join(
            literal + ((key is not None and fields[key]) or "") for literal, key in self.parts
        )

    def chosen(self, key: str, other: str) -> str:
        """Return the setting that reads another field in the place of one, as it is typed."""
        if not self.template:
            return f"{self.setting or 'data.text_key'}={as_typed(other)}"
        template = "".join(
            f"{literal.replace('{', '{{').replace('}', '}}')}"
            + (f"{{{other if name == key else name}}}" if name is not None else "")
            for literal, name in self.parts
        )
        return f"{self.setting or 'data.text_template'}={as_typed(template)}"


def find(row: Any, key: str) -> Any:
    """Return what a row holds under a key, or MISSING.

    A field of that very name comes first. Then a dot leads into an object, and a number behind it
    into a list: `messages.0.content`. A null on the way is a null.
    """
    if isinstance(row, dict):
        if key in row:
            return row[key]
        at = key.find(".")
        while at >= 0:
            inner = row.get(key[:at], MISSING)
            if inner is None:
                return None
            if inner is not MISSING and (value := find(inner, key[at + 1 :])) is not MISSING:
                return value
            at = key.find(".", at + 1)
    elif isinstance(row, list):
        place, _, rest = key.partition(".")
        if place.isdecimal() and len(place) < 10 and int(place) < len(row):
            inner = row[int(place)]
            return find(inner, rest) if rest and inner is not None else inner
    return MISSING


def once(*keys: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return what makes an object of its fields, and refuses one that has its text twice.

    JSON leaves open which of two equal fields counts; the other text would be lost.
    """
    parts = frozenset(part for key in keys for part in (key, *key.split(".")))

    def made(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(fields)
        if len(row) != len(fields):
            for part in sorted(parts & {*row}):
                if sum(name == part for name, _ in fields) > 1:
                    raise ValueError(f"it has the field {part!r} twice")
        return row

    return made


def top(key: str, columns: Sequence[str]) -> str | None:
    """Return the column of a table that a dotted key is in, or None."""
    if key in columns:
        return key
    at = key.find(".")
    while at >= 0:
        if key[:at] in columns:
            return key[:at]
        at = key.find(".", at + 1)
    return None


def leaves(row: Any) -> Iterator[str]:
    """Yield the keys of what a row holds, dotted; of a list its first element stands for all."""
    return (key for key, _ in _leaves(row))


def text_leaves(row: Any) -> Iterator[str]:
    """Yield those keys that hold text."""
    return (key for key, value in _leaves(row) if isinstance(value, str))


def _leaves(value: Any, before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value[:1])
    if not inner or not value or depth > DEEPEST:
        if before:
            yield before.removesuffix("."), value
        return
    for key, inner_value in inner:
        yield from _leaves(inner_value, f"{before}{key}.", depth + 1)


def text_of(row: Any, reading: TextReading, origin: str, remedy: Callable[[], str]) -> str | None:
    """Return the text of a row, or None for a null.

    Args:
        row: an object with fields, or a text.
        reading: the fields that hold the text.
        origin: where the row stands.
        remedy: makes the command that takes the row out.

    Raises:
        ConfigError: the row has no text there.
        UnicodeDecodeError: it holds bytes that are not UTF-8.
    """
    if reading.chat is not None:
        return reading.chat.text_of(row, origin, remedy)
    if isinstance(row, str):
        return row
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise ConfigError(f"{origin} is a JSON {kind}, not an object with fields", remedy())
    fields = {key: _field(row, key, reading, origin, remedy) for key in reading.keys}
    return reading.join(fields)


def _field(
    row: dict[str, Any], key: str, reading: TextReading, origin: str, remedy: Callable[[], str]
) -> str | None:
    value = find(row, key)
    if value is MISSING:
        raise no_field(key, reading, leaves(row), text_leaves(row), origin, remedy)
    if isinstance(value, bytes):
        return value.decode(errors="replace" if reading.replace else "strict")
    if isinstance(value, str | None):
        return value
    if reading.template and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    others = [*text_leaves(row)]
    raise ConfigError(
        f"{origin}: the field {key!r} holds {type(value).__name__}, not text",
        _chosen(key, reading, others) if others else remedy(),
    )


def no_field(
    key: str,
    reading: TextReading,
    names: Iterable[str],
    texts: Iterable[str],
    origin: str,
    remedy: Callable[[], str],
) -> ConfigError:
    """Say that a row has no such field, which ones it has, and which may be meant."""
    names, texts = [*names], [*texts]
    return ConfigError(
        f"{origin} has no field {key!r}; its fields are {_listed(names)}",
        _chosen(key, reading, texts) if texts else remedy(),
    )


def lacks(key: str, row: Any, origin: str, remedy: str, where: str = "before") -> ConfigError:
    """Say that a row has no such field, and that rows before it, or behind it, have one."""
    return ConfigError(
        f"{origin} has no field {key!r}; its fields are {_listed([*leaves(row)])}; rows {where} "
        "it have one",
        remedy,
    )


def _listed(names: Sequence[str]) -> str:
    return (", ".join(names[:MANY]) or "none") + " and others" * (len(names) > MANY)


def _chosen(key: str, reading: TextReading, names: Sequence[str]) -> str:
    """Return the key to give instead: the only one, the nearest one, or one of all names."""
    close = names[0] if len(names) == 1 else nearest(key, names)
    if close in names:
        return reading.chosen(key, close)
    return f"{reading.chosen(key, names[0])}, or another of {_listed(names)}"


def as_typed(key: str) -> str:
    """Return a key as the command line takes it; one that looks like a number or a date quoted."""
    plain = toml_value(key, "data.text_key") == key
    return shlex.quote(key if plain else json.dumps(key, ensure_ascii=False))
