"""Express changes of a plan as words: `+technique`, `-technique`, `key=value`.

A sweep, a tuner and a receipt use the same words, and `headrace train` takes them. A key that a
technique rewrites, as `model.kv_heads`, goes with the technique: removing the technique leaves the
key as if nobody had given it.
"""

import json
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Technique


@dataclass(frozen=True)
class Changes:
    """Hold the words of a change by what they do.

    Args:
        with_: names of the techniques that are added.
        without: names of the techniques that are removed.
        overrides: `key=value` words.
    """

    with_: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    def plan(self, text: str, catalogue: Catalogue, more: Iterable[str] = ()) -> Plan:
        """Return the plan of a TOML text with the changes, and with the overrides `more` on top.

        Raises:
            ConfigError: as `Plan.read` raises it.
        """
        return Plan.read(
            text,
            catalogue,
            overrides=[*self.overrides, *more],
            with_=self.with_,
            without=self.without,
        )

    def settings(self) -> dict[str, str]:
        """Return the keys that the overrides set -> their values as they are written."""
        pairs = (override.partition("=") for override in self.overrides)
        return {key.strip(): value.strip() for key, _, value in pairs}

    def command(self) -> list[str]:
        """Return the changes as arguments of `headrace train`."""
        return [
            *self.overrides,
            *(w for name in self.with_ for w in ("--with", name)),
            *(w for name in self.without for w in ("--without", name)),
        ]


def parse(words: Iterable[str]) -> Changes:
    """Parse words such as `+muon`, `-muon` and `batch.micro_sequences=2`."""
    words = tuple(words)
    return Changes(
        tuple(w[1:] for w in words if w[0] == "+"),
        tuple(w[1:] for w in words if w[0] == "-"),
        tuple(w for w in words if w[0] not in "+-"),
    )


def changed(plan: Plan, words: Iterable[str], catalogue: Catalogue) -> Plan:
    """Return the plan with changes.

    Raises:
        ConfigError: a name or a key is wrong, or the changed plan contradicts itself.
    """
    return parse(words).plan(tomli_w.dumps(_given(plan)), catalogue)


def difference(before: Plan, after: Plan) -> tuple[str, ...]:
    """Return the fewest words that make `after` from `before`, always in the same order.

    A value that `before` has and `after` lacks cannot be expressed, and is left out.
    """
    had, has = before.techniques, after.techniques
    words = [f"-{name}" for name in sorted(had) if name not in has]
    words += [f"+{name}" for name in sorted(has) if name not in had]
    old = _values(before)
    for name, technique in has.items():
        if name not in had:
            old |= _knobs(name, type(technique).model_construct())
    new = _values_to_set(after, before)
    words += [f"{k}={word(new[k])}" for k in sorted(new) if k not in old or old[k] != new[k]]
    return tuple(words)


def _given(plan: Plan) -> dict[str, Any]:
    """Return the tables of the plan as they were written.

    Defaults, and keys that the plan's techniques rewrite, are left out.
    """
    given = plan.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    for key in rewritten(plan):
        table, _, leaf = key.partition(".")
        given.get(table, {}).pop(leaf, None)
    return given


def rewritten(plan: Plan) -> set[str]:
    """Return the dotted keys of the plan that its techniques rewrite."""
    return {key for technique in plan.techniques.values() for key in technique.keys(plan)}


def flat(plan: Plan) -> dict[str, Any]:
    """Return the plan's dotted keys -> values; techniques and keys without a value are left out."""
    return flatten(plan.model_dump(mode="json", exclude_none=True, exclude={"techniques"}))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the dotted keys of nested tables -> values.

    Args:
        table: the outermost table.
        prefix: text that is put before each key.
    """
    flattened: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        flattened |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flattened


def _values(plan: Plan) -> dict[str, Any]:
    """Return the plan's dotted keys -> values, with the knobs of its techniques.

    A key that a technique rewrites has its default.
    """
    settings = flat(plan)
    for key in rewritten(plan):
        table, _, leaf = key.partition(".")
        default = type(getattr(plan, table)).model_fields[leaf].default
        settings |= {key: list(default) if isinstance(default, tuple) else default}
    settings = {key: value for key, value in settings.items() if value is not None}
    for name, technique in plan.techniques.items():
        settings |= _knobs(name, technique)
    return settings


def _values_to_set(plan: Plan, before: Plan) -> dict[str, Any]:
    """Return the plan's dotted keys -> values, with the knobs of its techniques.

    A key that a technique rewrites is left out, unless `before` gives it another value.
    """
    settings, made, given = _values(plan), flat(plan), _given(before)
    for key in rewritten(plan):
        table, _, leaf = key.partition(".")
        asked = given.get(table, {}).get(leaf, "auto")
        settings.pop(key, None)
        if asked not in ("auto", made.get(key)):
            settings[key] = made[key]
    return settings


def _knobs(name: str, technique: Technique[Any]) -> dict[str, Any]:
    values = technique.model_dump(mode="json", exclude_none=True)
    return {f"techniques.{name}.{key}": value for key, value in values.items()}


def word(value: Any) -> str:
    """Return a value as an override writes it: TOML in one line, or a bare word."""
    if not isinstance(value, str):
        return _toml(value)
    try:
        tomllib.loads(f"x = {value}")
    except tomllib.TOMLDecodeError:
        return value
    return _toml(value)


def _toml(value: Any) -> str:
    """Return a value as TOML in one line.

    TOML has no None, so a key of a table without a value is left out.

    Raises:
        ValueError: None stands where a value must.
    """
    if value is None:
        raise ValueError("TOML has no None")
    if isinstance(value, Mapping):
        pairs = (f"{key} = {_toml(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return tomli_w.dumps({"x": value}).removeprefix("x = ").removesuffix("\n")
    return json.dumps(value)


def override(plan: Mapping[str, Any], key: str) -> str:
    """Return `key=value` with the value of a dumped plan, quoted for a shell.

    Nothing unsets a key. So for a key without a value the override is its whole table without the
    key. A key of an optional table that is not there, as `data.mixture`, stands for that table.
    """
    table: Any = plan
    *path, last = key.split(".")
    if len(path) == 2 and path[0] != "techniques" and path[1] not in plan.get(path[0], {}):
        path, last = path[:1], path[1]
    for part in path:
        table = table.get(part, {})
    if table.get(last) is not None:
        return shlex.quote(f"{key}={word(table[last])}")
    return shlex.quote(f"{'.'.join(path)}={_toml(table)}")
