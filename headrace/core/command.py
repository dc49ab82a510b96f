"""Keep the command line that a user typed, and build the commands that remedies make of it.

A remedy that repeats a command keeps every word of it that the remedy does not change, and starts
as many processes. Only `--json` is left out: it sets the output format, not what the command does.
"""

import os
import shlex
import tomllib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from headrace.core.files import printable, shell
from headrace.core.units import divisors

CHANGES = ("--with", "--without")
"""Options that change a plan, as `key=value` does."""

AXES = ("data", "tensor", "context", "pipeline")
"""Keys of a plan's mesh whose product is the number of its ranks."""

OF_PLANS = ("train", "launch", "plan", "tune", "ablate", "explain", "data")
"""Verbs that take a plan, and not a run."""


@dataclass
class Typed:
    """Hold a command line of `headrace`, split into its words."""

    words: list[str] = field(default_factory=list)
    takes: Collection[str] = ()
    """options that take the next word as their value"""

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield each word as (option, value): a plain word has no option, a flag has no value."""
        words, plain = iter(self.words), False
        for word in words:
            option, equals, value = word.partition("=")
            if plain or not word.startswith("--"):
                yield "", word
            elif word == "--":
                plain = True
            elif equals:
                yield option, value
            else:
                yield option, next(words, "") if option in self.takes else ""


_TYPED = Typed()


@contextmanager
def typed(words: Iterable[str], takes: Collection[str]) -> Iterator[None]:
    """Let remedies repeat this command line meanwhile.

    Args:
        words: what was typed behind `headrace`.
        takes: options that take the next word as their value.
    """
    before = _TYPED.words, _TYPED.takes
    _TYPED.words, _TYPED.takes = [*words], takes
    try:
        yield
    finally:
        _TYPED.words, _TYPED.takes = before


def headrace(ranks: int | None = None, per_host: int | None = None) -> str:
    """Return the words that start Headrace: `headrace`, or `torchrun ...` for several processes.

    Args:
        ranks: how many processes to start; None means as many as run now, on as many hosts.
        per_host: how many processes a host takes at most; None means all of them.
    """
    if ranks is None:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if per_host is not None and per_host < ranks:
        here = max(n for n in divisors(ranks) if n <= per_host)
        return f"torchrun --nnodes {ranks // here} --nproc-per-node {here} ... -m headrace"
    return f"torchrun --nproc-per-node {ranks} -m headrace" if ranks > 1 else "headrace"


def train_command(run: Path, *words: str) -> str:
    """Return the `headrace train` command for a run's own plan.

    The plan already holds all options that the run was started with. The command starts as many
    processes as run now. Where this process is alone, it starts as many as the plan has ranks,
    unless the words set its mesh.

    Args:
        run: the run's folder.
        words: what stands behind the plan, each as a shell takes it.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    ranks = _ranks_of(run) if alone and "mesh." not in " ".join(words) else None
    return " ".join([f"{headrace(ranks)} train", shell(run / "plan.toml"), *words])


def rerun_train(run: Path, *words: str) -> str:
    """Return `headrace train` for a run's own plan, with the typed words that the plan lacks.

    Args:
        run: the run's folder.
        words: what the remedy changes, each as a shell takes it. They come after the user's words,
            and replace those that set the same key or option.
    """
    typed_pairs = [*_pairs_behind_plan(_TYPED)] if _TYPED.words[:1] == ["train"] else []
    new = shlex.split(" ".join(words), comments=False)
    changed = {_key(pair) for pair in Typed(new, (*CHANGES, "--checkpoint")).pairs()}
    resumes = "--resume" in changed
    kept = [
        pair
        for pair in typed_pairs
        if not _replaced(pair, changed)
        and not _is_in_plan(pair, run)
        and (pair[0] != "--checkpoint" or resumes)
        and pair[0] != "--resume"
    ]
    return train_command(run, *(" ".join(_words(*pair)) for pair in kept), *words)


def rerun(*instead: tuple[str | Path, str | Path], verb: str, ranks: int | None = None) -> str:
    """Return the user's command with some of its words replaced.

    Args:
        instead: pairs of a word, or of the path or run that it names, and its replacement.
        verb: the verb to use where nothing was typed, as for a caller in Python; the command then
            has the new words alone.
        ranks: how many processes the command starts; None means as many as run now.
    """
    parts, left = [*_verb(_TYPED)], [*instead]
    for option, value in [*_TYPED.pairs()][len(parts) :]:
        match = next((pair for pair in left if _names(value, pair[0])), None)
        match = None if option and not value else match
        if match is not None:
            left.remove(match)
            parts += [*filter(None, [option]), shell(match[1])]
        elif option != "--json":
            parts += _words(option, value)
    if not _TYPED.words or left:
        parts = [verb, *(shell(new) for _, new in instead)]
    return " ".join([headrace(ranks), *parts])


def rerun_with(option: str, value: str, *, verb: str) -> str:
    """Return the user's command with an option set, which replaces the same option if typed.

    Args:
        option: the option, as "--checkpoint".
        value: the option's new value.
        verb: the command to use where nothing was typed.
    """
    parts = [*_verb(_TYPED)]
    for typed_option, given in [*_TYPED.pairs()][len(parts) :]:
        if typed_option not in (option, "--json"):
            parts += _words(typed_option, given)
    return " ".join([headrace(), *(parts or [verb]), *_words(option, value)])


def renamed(technique: str, other: str, *words: str) -> str:
    """Return the user's command with one technique renamed; "" where no word names it.

    Args:
        technique: the name that was typed, behind --with or --without or in a key.
        other: the new name; "" leaves the word out.
        words: what is added at the end, each as a shell takes it.
    """
    parts, before, met = [*_verb(_TYPED)], f"techniques.{technique}", False
    for option, value in [*_TYPED.pairs()][len(parts) :]:
        key = _key((option, value))
        if option in CHANGES and value == technique:
            value, met = other, True
            if not other:
                continue
        elif not option and (key == before or key.startswith(f"{before}.")):
            value, met = f"techniques.{other}{value.strip()[len(before) :]}", True
        if option != "--json":
            parts += _words(option, value)
    return " ".join([headrace(), *parts, *words]) if met else ""


def rerun_without(*dropped: str, verb: str) -> str:
    """Return the user's command without some options and their values, or without other words.

    Args:
        *dropped: options to leave out, as "--after", and plain words as they were typed.
        verb: the command to use where nothing was typed.
    """
    parts = [*_verb(_TYPED)]
    for typed_option, given in [*_TYPED.pairs()][len(parts) :]:
        if (typed_option or given) not in (*dropped, "--json"):
            parts += _words(typed_option, given)
    return " ".join([headrace(), *(parts or [verb])])


def rerun_plan(verb: str, *words: str) -> str:
    """Return a command of another verb on the plan that the user named, with the same changes.

    Args:
        verb: the other verb, as "train".
        words: what is added, each as a shell takes it. A word here replaces a typed one that sets
            the same key or technique.
    """
    plain = [value for option, value in _TYPED.pairs() if not option][len(_verb(_TYPED)) :]
    new = shlex.split(" ".join(words))
    changed = {_key(pair) for pair in Typed(new, CHANGES).pairs()}
    kept = [
        p
        for p in _pairs_behind_plan(_TYPED)
        if p[0] in ("", *CHANGES) and not _replaced(p, changed)
    ]
    kept_words = [" ".join(_words(*pair)) for pair in kept]
    plan = shell(_plan_of(plain[0])) if plain else "PLAN"
    return " ".join([headrace(), verb, plan, *kept_words, *words])


def _plan_of(word: str) -> Path:
    """Return the plan file that a word of the command line names.

    For the verbs that take a run it is that run's plan.toml.
    """
    if _TYPED.words[0] in OF_PLANS:
        return Path(word)
    plans = (folder / "plan.toml" for folder in (Path(word), Path("runs") / word))
    return next((plan for plan in plans if plan.is_file()), Path(word))


def _verb(command: Typed) -> list[str]:
    return command.words[: 2 if command.words[:1] == ["data"] else 1]


def _pairs_behind_plan(command: Typed) -> Iterator[tuple[str, str]]:
    """Yield the (option, value) pairs behind the verb and its plan or run, except `--json`."""
    plain = len(_verb(command)) + 1
    for option, value in command.pairs():
        if option:
            if option != "--json":
                yield option, value
        elif plain:
            plain -= 1
        else:
            yield option, value


def _words(option: str, value: str) -> list[str]:
    """Return an option and its value, or a plain word alone, quoted as a shell takes them."""
    quoted = shlex.quote(value) if printable(value) == value else shell(value)
    return [quoted] if not option else [option, quoted] if value else [option]


def _names(word: str, thing: str | Path) -> bool:
    """Return whether a word equals `thing`, or is the path or the name of the run `thing`."""
    if isinstance(thing, str):
        return word == thing
    return thing in (Path(word), Path("runs") / word)


def _key(pair: tuple[str, str]) -> str:
    """Return what a word sets: a key of the plan, an option, or a technique it switches."""
    option, value = pair
    if option in CHANGES:
        return f"{option} {value}"
    return option or value.partition("=")[0].strip()


def _replaced(pair: tuple[str, str], changed: Collection[str]) -> bool:
    """Return whether one of the changed keys and options overrides this word."""
    key = _key(pair)
    name = pair[1] if pair[0] in CHANGES else ""
    if pair[0] == "--with" and f"--without {name}" in changed:
        return True
    if pair[0] == "--without":
        mine = f"techniques.{name}"
        switched = f"--with {name}" in changed
        return switched or any(k == mine or k.startswith(f"{mine}.") for k in changed)
    technique = key.split(".")[1] if key.startswith("techniques.") else ""
    if technique and f"--without {technique}" in changed:
        return True
    return any(
        key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
        for other in changed
    )


def _ranks_of(run: Path) -> int | None:
    """Return the ranks of a run's own plan; None where the plan cannot be read."""
    try:
        mesh = tomllib.loads((run / "plan.toml").read_text(encoding="utf-8-sig")).get("mesh", {})
        return prod(int(mesh.get(axis, 1)) for axis in AXES)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _is_in_plan(pair: tuple[str, str], run: Path) -> bool:
    """Return whether a run's own plan already holds what this word sets."""
    option, value = pair
    try:
        table: Any = tomllib.loads((run / "plan.toml").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False
    if option in CHANGES:
        return (value in table.get("techniques", {})) == (option == "--with")
    if option:
        return False
    key, _, raw = value.partition("=")
    for part in key.strip().split("."):
        if not isinstance(table, dict) or part not in table:
            return False
        table = table[part]
    try:
        return bool(table == tomllib.loads(f"x = {raw}")["x"])
    except (ValueError, RecursionError):
        return bool(table == raw)
