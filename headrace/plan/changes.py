"""Changes of a plan as words: `+technique`, `-technique`, `key=value`.

What a sweep tries, a tuner measures and a receipt keeps is said in the same words, and the words of
a change are what `headrace train` takes. A key that a technique rewrites, as `model.kv_heads`, goes
with the technique: taking it out leaves the key as if nobody had given it.
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
    """Words by what they do: techniques put in and left out, and keys set."""

    with_: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    def plan(self, text: str, catalogue: Catalogue, more: Iterable[str] = ()) -> Plan:
        """The plan of a text with the changes, and the overrides `more` over them.

        Raises:
            ConfigError: as `Plan.read` does.
        """
        return Plan.read(
            text, catalogue, overrides=[*self.overrides, *more], with_=self.with_,
            without=self.without,
        )  # fmt: skip

    def command(self) -> list[str]:
        """The changes as `headrace train` takes them."""
        return [
            *self.overrides,
            *(w for name in self.with_ for w in ("--with", name)),
            *(w for name in self.without for w in ("--without", name)),
        ]


def parse(words: Iterable[str]) -> Changes:
    """Of words such as `+muon`, `-muon` and `batch.micro_sequences=2`."""
    words = tuple(words)
    return Changes(
        tuple(w[1:] for w in words if w[0] == "+"),
        tuple(w[1:] for w in words if w[0] == "-"),
        tuple(w for w in words if w[0] not in "+-"),
    )


def changed(plan: Plan, words: Iterable[str], catalogue: Catalogue) -> Plan:
    """The plan with changes.

    Raises:
        ConfigError: a name or a key is wrong, or the changed plan contradicts itself.
    """
    return parse(words).plan(tomli_w.dumps(_given(plan)), catalogue)


def difference(before: Plan, after: Plan) -> tuple[str, ...]:
    """The fewest words that make `after` of `before`, always in the same order.

    A value that `before` has and `after` has not cannot be said, and is left out.
    """
    had, has = before.techniques, after.techniques
    words = [f"-{name}" for name in sorted(had) if name not in has]
    words += [f"+{name}" for name in sorted(has) if name not in had]
    old = _values(before)
    for name, technique in has.items():
        if name not in had:
            old |= _knobs(name, type(technique).model_construct())
    new = _said(after, before)
    words += [f"{k}={word(new[k])}" for k in sorted(new) if k not in old or old[k] != new[k]]
    return tuple(words)


def _given(plan: Plan) -> dict[str, Any]:
    """What was written into the plan, without defaults and without what its techniques rewrite."""
    given = plan.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    for key in rewritten(plan):
        table, _, leaf = key.partition(".")
        given.get(table, {}).pop(leaf, None)
    return given


def rewritten(plan: Plan) -> set[str]:
    """Keys of the plan that its techniques rewrite."""
    return {key for technique in plan.techniques.values() for key in technique.keys(plan)}


def flat(plan: Plan) -> dict[str, Any]:
    """Every key of the plan itself that has a value, as table.key; techniques are left out."""
    return flatten(plan.model_dump(mode="json", exclude_none=True, exclude={"techniques"}))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested tables."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        found |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found


def _values(plan: Plan) -> dict[str, Any]:
    """Every key with its value, and as if not given where its techniques rewrite it."""
    found = flat(plan)
    for key in rewritten(plan):
        table, _, leaf = key.partition(".")
        default = type(getattr(plan, table)).model_fields[leaf].default
        found |= {key: default}
    found = {key: value for key, value in found.items() if value is not None}
    for name, technique in plan.techniques.items():
        found |= _knobs(name, technique)
    return found


def _said(plan: Plan, before: Plan) -> dict[str, Any]:
    """Every key with its value; what a technique rewrites only where `before` says otherwise."""
    found, made, given = _values(plan), flat(plan), _given(before)
    for key in rewritten(plan):
        table, _, leaf = key.partition(".")
        asked = given.get(table, {}).get(leaf, "auto")
        found.pop(key, None)
        if asked not in ("auto", made.get(key)):
            found[key] = made[key]
    return found


def _knobs(name: str, technique: Technique[Any]) -> dict[str, Any]:
    values = technique.model_dump(mode="json", exclude_none=True)
    return {f"techniques.{name}.{key}": value for key, value in values.items()}


def word(value: Any) -> str:
    """A value as an override writes it: TOML in one line, or a bare word."""
    if not isinstance(value, str):
        return _toml(value)
    try:
        tomllib.loads(f"x = {value}")
    except tomllib.TOMLDecodeError:
        return value
    return _toml(value)


def _toml(value: Any) -> str:
    """A value as TOML in one line; TOML has no None, so that a key without a value is left out.

    Raises:
        ValueError: None where a value must stand.
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
    """`key=value` with the value of a dumped plan, quoted for a shell.

    Nothing unsets a key, so that one without a value is said by its whole table without it.
    """
    table: Any = plan
    *path, last = key.split(".")
    for part in path:
        table = table.get(part, {})
    if table.get(last) is not None:
        return shlex.quote(f"{key}={word(table[last])}")
    return shlex.quote(f"{'.'.join(path)}={_toml(table)}")
