"""Make a plan from another trainer's config, and say of every key what became of it.

A trainer is a table of rules: key -> what becomes of its value. What no rule names is not carried,
and the nearest key of a plan is named (core/foreign). So no key is left out in silence: a draft has
a line for each key of the file, and one for each value that the plan needs and the file lacks,
which is the trainer's own default where it has one.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any

import tomli_w

from headrace.core.errors import ConfigError
from headrace.core.files import DEEPEST, encodable, printable, toml_value
from headrace.core.foreign import meant_by
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue

MOST_KEYS = 10_000
"""Most keys of a file; the longest example config of the four trainers has 120."""
MOST_REPAIRS = 100
"""How often a draft is read again without a value that a plan refuses, or with the nearest one."""
LARGEST = 1e100
"""Numbers of this size and beyond are none that a config means."""
SHOWN = 60
"""Letters of a value that a message shows."""
Numeric = int | float


class Fate(StrEnum):
    """Say what became of a key of another trainer's config."""

    CARRIED = "carried"
    """the plan says the same"""
    NEAREST = "nearest"
    """the plan says what comes nearest; the line tells the difference"""
    ADDED = "added"
    """the file does not say it: the trainer's own default, or what a plan needs"""
    IDLE = "idle"
    """its value asks for nothing"""
    LEFT = "left"
    """it is not in the plan; the line tells why"""


@dataclass(frozen=True)
class KeyLine:
    """Hold what became of one key.

    Args:
        key: as the other trainer writes it, with its table.
        value: what stands there.
        fate: what became of it.
        words: what the plan has for it, as a command line types it.
        why: what is different, or why it is left out.
    """

    key: str
    value: Any
    fate: Fate
    words: tuple[str, ...] = ()
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the line as JSON has it."""
        return {
            "key": self.key,
            "value": self.value,
            "fate": str(self.fate),
            "plan": [*self.words],
            "why": self.why,
        }


@dataclass(frozen=True)
class Imported:
    """Hold a plan that was made of another trainer's config.

    Args:
        trainer: whose config it was.
        toml: the plan, with a comment for each key that is not carried as it was.
        plan: the same, checked.
        lines: what became of each key.
    """

    trainer: str
    toml: str
    plan: Plan
    lines: tuple[KeyLine, ...]

    def count(self, fate: Fate) -> int:
        """Return how many keys have a fate."""
        return sum(line.fate is fate for line in self.lines)


@dataclass
class Draft:
    """Hold a config's values, and the plan that becomes of them.

    Args:
        trainer: whose config it is.
        values: dotted key -> value, as the file has them.
        defaults: the trainer's own values of keys that the file lacks and a plan needs.
        ranks: processes that the config was run on.
    """

    trainer: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    lines: dict[str, KeyLine] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)

    def value(self, key: str, otherwise: Any = None) -> Any:
        """Return the file's value of a key, else the trainer's default, else the given one."""
        given = self.values.get(key)
        return self.defaults.get(key, otherwise) if given is None else given

    def number(self, key: str, otherwise: Numeric = 0) -> Numeric:
        """Return a key's value as a number; the given one where it is none."""
        number = as_number(self.value(key, otherwise))
        return otherwise if number is None else number

    def whole(self, key: str, otherwise: int = 0) -> int:
        """Return a key's value as a whole number; the given one where it is none."""
        number = self.number(key, otherwise)
        return int(number) if abs(number) < 1e18 else otherwise

    def is_on(self, key: str) -> bool:
        """Return whether a key asks for something."""
        return not is_off(self.value(key))

    def put(self, path: str, value: Any) -> str:
        """Set a key of the plan, and return the word that types it."""
        *above, leaf = path.split(".")
        table = self.tables
        for name in above:
            table = table.setdefault(name, {})
        table[leaf] = value
        return f"{path}={typed_value(value)}"

    def add(self, technique: str, **knobs: Any) -> tuple[str, ...]:
        """Put a technique into the plan, and return the words that type it."""
        table = self.tables.setdefault("techniques", {}).setdefault(technique, {})
        table |= knobs
        words = [f"techniques.{technique}.{k}={typed_value(v)}" for k, v in knobs.items()]
        return f"--with {technique}", *words

    def carry(self, key: str, *words: str, why: str = "") -> None:
        """Note that the plan says the same as a key."""
        self._note(key, Fate.CARRIED if key in self.values else Fate.ADDED, words, why)

    def near(self, key: str, *words: str, why: str) -> None:
        """Note that the plan says what comes nearest to a key."""
        self._note(key, Fate.NEAREST if key in self.values else Fate.ADDED, words, why)

    def leave(self, key: str, why: str) -> None:
        """Note that a key is not in the plan, and why; nothing where the file does not have it."""
        if key in self.values:
            self._note(key, Fate.LEFT, (), why)

    def idle(self, key: str, why: str = "asks for nothing") -> None:
        """Note that a key asks for nothing; nothing where the file does not have it."""
        if key in self.values:
            self._note(key, Fate.IDLE, (), why)

    def need(self, path: str, value: Any, why: str) -> None:
        """Set a key of the plan that no key of the file says."""
        words = (self.put(path, value),)
        self.lines[f" {path}"] = KeyLine("", None, Fate.ADDED, words, why)

    def _note(self, key: str, fate: Fate, words: tuple[str, ...], why: str) -> None:
        self.lines[key] = KeyLine(key, self.value(key), fate, words, why)

    def follow(self, rules: Mapping[str, "KeyRule"]) -> None:
        """Let each key's rule decide, and note what no rule names."""
        for key, rule in rules.items():
            if key in self.lines or (key not in self.values and key not in self.defaults):
                continue
            if self.value(key) is None:
                self.idle(key, "has no value")
            else:
                rule(self, key)
        for key in self.values:
            if key not in self.lines:
                self._unknown(key)

    def _unknown(self, key: str) -> None:
        """Note a key that no rule names, with the nearest key of a plan."""
        value = self.values[key]
        if is_off(value):
            self.idle(key)
            return
        meant = meant_by(key, given=value)
        near = meant.key or str(meant.option) if meant else ""
        self.leave(key, f"the nearest is {near}" if near else "a plan has no such key")

    def finish(self, catalogue: Catalogue, file: str) -> Imported:
        """Return the plan, without values that a plan refuses, each of which is noted.

        Args:
            catalogue: the techniques and model families that there are.
            file: where the config was read from, for messages.

        Raises:
            ConfigError: what is left is no plan.
        """
        for attempt in count():
            text = tomli_w.dumps(self.tables)
            try:
                plan = Plan.read(text, catalogue)
                break
            except ConfigError as error:
                if attempt == MOST_REPAIRS or not (self._drop(error) or self._fit(error)):
                    raise ConfigError(
                        f"{file} cannot be carried into a plan: {error.message}",
                        f"in {file} the value that is meant; in a plan it would be {error.remedy}",
                    ) from None
        lines = tuple(self.lines[key] for key in sorted(self.lines, key=self._place))
        return Imported(self.trainer, self._comments(file, lines) + text, plan, lines)

    def _drop(self, error: ConfigError) -> bool:
        """Take the values that an error refuses out of the plan; return whether there were any."""
        refused = [key for key in error.keys if _pop(self.tables, key)]
        for key, line in self.lines.items():
            words = {word.partition("=")[0] for word in line.words}
            if any(f"{word}.".startswith(f"{one}.") for word in words for one in refused):
                first = error.message.splitlines()[0]
                self.lines[key] = KeyLine(line.key, line.value, Fate.LEFT, (), first)
        return bool(refused)

    def _fit(self, error: ConfigError) -> bool:
        """Set keys to what an error says comes nearest; return whether it says that of any."""
        words = error.remedy.changes[0] if error.remedy.changes else ()
        keys = {word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word}
        if len(keys) != len(words) or not keys:
            return False
        for path, value in keys.items():
            self.put(path, toml_value(value, path))
        first, fitted = error.message.splitlines()[0], set[str]()
        for name, line in self.lines.items():
            if mine := {word.partition("=")[0] for word in line.words} & {*keys}:
                fate = Fate.ADDED if line.fate is Fate.ADDED else Fate.NEAREST
                rest = (f"{path}={keys[path]}" for path in sorted(mine))
                self.lines[name] = KeyLine(line.key, line.value, fate, (*rest,), first)
                fitted |= mine
        for path in sorted({*keys} - fitted):
            self.need(path, toml_value(keys[path], path), first)
        return True

    def _place(self, key: str) -> tuple[bool, int]:
        """Return the place of a line: keys of the file as they stand there, then what was added."""
        order = [*self.values]
        return (key not in self.values, order.index(key) if key in self.values else 0)

    def _comments(self, file: str, lines: tuple[KeyLine, ...]) -> str:
        """Return what is not carried as it was, as comments of the plan."""
        head = [f"made of {file}, a config of {self.trainer}"]
        for line in lines:
            if line.fate in (Fate.LEFT, Fate.NEAREST):
                what = "not carried" if line.fate is Fate.LEFT else "nearest"
                head.append(f"{what}: {line.key} = {shown(line.value)}: {line.why}")
        return "".join(f"# {printable(line)}\n" for line in head) + "\n"


KeyRule = Callable[[Draft, str], None]
"""What becomes of a key; it notes its line itself."""


def to(path: str, *, why: str = "") -> KeyRule:
    """Return a rule that gives a key's value to a key of the plan."""

    def rule(draft: Draft, key: str) -> None:
        value = draft.value(key)
        number = as_number(value)
        word = draft.put(path, value if number is None else number)
        (draft.near if why else draft.carry)(key, word, why=why)

    return rule


def text_to(path: str, *, why: str = "") -> KeyRule:
    """Return a rule that gives a key's value to a key of the plan as a text."""

    def rule(draft: Draft, key: str) -> None:
        word = draft.put(path, str(draft.value(key)))
        (draft.near if why else draft.carry)(key, word, why=why)

    return rule


def never(why: str, *off: Any) -> KeyRule:
    """Return a rule that leaves a key out.

    Args:
        why: what is there instead.
        off: values that ask for nothing, beside false and none.
    """

    def rule(draft: Draft, key: str) -> None:
        value = draft.value(key)
        if is_off(value) or any(value == one for one in off):
            draft.idle(key)
        else:
            draft.leave(key, why)

    return rule


def always(why: str) -> KeyRule:
    """Return a rule for a key that says what is so in every plan."""
    return lambda draft, key: draft.idle(key, why)


def only_with(switch: str, rule: KeyRule) -> KeyRule:
    """Return a rule that counts only where another key asks for something."""

    def guarded(draft: Draft, key: str) -> None:
        if draft.is_on(switch):
            rule(draft, key)
        else:
            draft.idle(key, f"counts only with {switch}")

    return guarded


def switch(technique: str, why: str = "", **knobs: Any) -> KeyRule:
    """Return a rule that adds a technique where a key is on."""

    def rule(draft: Draft, key: str) -> None:
        if not draft.is_on(key):
            draft.idle(key)
            return
        words = draft.add(technique, **knobs)
        (draft.near if why else draft.carry)(key, *words, why=why)

    return rule


def is_off(value: Any) -> bool:
    """Return whether a value asks for nothing."""
    return value in (None, False, "", 0, [], {}) or str(value).lower() in ("none", "no", "false")


def as_number(value: Any) -> Numeric | None:
    """Return the number that a value is or spells; None where it is none, as true is."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value if isinstance(value, int | float) else str(value).strip())
    except (ValueError, OverflowError):
        return None
    if not abs(number) < LARGEST:
        return None
    if isinstance(value, int | float):
        return value
    text = str(value).strip()
    return int(number) if number.is_integer() and text.lstrip("+-").isdigit() else number


def flat(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return dotted key -> value of nested tables; lists stay values.

    Args:
        values: of the file.
        what: the file, for the message.

    Raises:
        ConfigError: there are more keys, or tables deeper inside each other, than any config has.
    """
    by_key: dict[str, Any] = {}
    for key, value in _walk(values, "", 0):
        by_key[key] = value
        if len(by_key) > MOST_KEYS or key.count(".") > DEEPEST:
            raise ConfigError(
                f"{what} is no config: it has over {MOST_KEYS:,} keys, or tables more than "
                f"{DEEPEST} deep",
                "the file that the trainer was started with",
            )
    return by_key


def _walk(values: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{printable(str(name))}"
        if isinstance(value, Mapping) and value and depth <= DEEPEST:
            yield from _walk(value, f"{key}.", depth + 1)
        else:
            yield key, _plain(value, depth)


def _plain(value: Any, depth: int) -> Any:
    """Return a value as a plan can hold it: dates and endless numbers as text, and no null inside.

    What lies too deep inside of lists is its text, which no key of a plan takes.
    """
    if isinstance(value, str):
        return encodable(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if abs(value) < LARGEST else str(float(min(max(value, -LARGEST), LARGEST)))
    if isinstance(value, list | tuple) and depth <= DEEPEST:
        return [_plain(one, depth + 1) for one in value if one is not None]
    if isinstance(value, Mapping) and depth <= DEEPEST:
        items = ((encodable(str(name)), one) for name, one in value.items() if one is not None)
        return {name: _plain(one, depth + 1) for name, one in items}
    return f"a {type(value).__name__}" if isinstance(value, list | Mapping) else str(value)


def _pop(tables: dict[str, Any], key: str) -> bool:
    """Take a key out of nested tables; return whether it stood there."""
    *above, leaf = key.split(".")
    for name in above:
        tables = tables.get(name, {}) if isinstance(tables, dict) else {}
    return isinstance(tables, dict) and tables.pop(leaf, None) is not None


def typed_value(value: Any) -> str:
    """Return a value as a command line types it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def shown(value: Any) -> str:
    """Return a value in one line of a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
