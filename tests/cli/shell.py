"""A command line as a user types it, and what the next one is when the remedy is followed."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from remedies import KEY, alternatives, recording, words_of
from typer.testing import CliRunner

from headrace.cli.app import app

SHELL = re.compile(r"(mv|rm|cp|cat|ln|ls|sed|chmod|iconv|gzip) \S")
AND_KEY = re.compile(r", and [a-z_]+\.[a-z_.]+=\S+$")
USAGE = (
    "no key",
    "is not an override",
    "nput should be",
    "is not one of",
    "No such option",
    "Missing argument",
    "no such verb",
    "needs a value",
)


@dataclass(frozen=True)
class Told:
    """Say how a command ended: its exit code, the error's message and remedy, and the sites met."""

    code: int
    message: str = ""
    remedy: str = ""
    sites: tuple[str, ...] = ()


def run(argv: list[str]) -> Told:
    """Run `headrace ARGV --json` in this process, and return how it ended."""
    with recording() as made:
        ended = CliRunner().invoke(app, [*argv, "--json"], prog_name="headrace")
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    if "--help" in argv:
        return Told(ended.exit_code)
    said = json.loads(ended.stdout)
    if isinstance(said, list):  # rows, which only success prints
        return Told(ended.exit_code, sites=tuple(name for name, _ in made))
    assert said["exit_code"] == ended.exit_code
    told = (said.get("error") or "", said.get("remedy") or "") if ended.exit_code else ("", "")
    return Told(ended.exit_code, *told, tuple(name for name, _ in made))


_KEPT: dict[Callable[[], object], Path] = {}
"""What makes files -> where the first test that needed them has left a copy for the others."""


def once(make: Callable[[], object], *names: str) -> None:
    """Have files or folders made in this folder, or copy what was made for an earlier test.

    Args:
        make: makes them of the run that every test has.
        names: of what it makes.
    """
    if make in _KEPT:
        copied(names, _KEPT[make], Path())
        return
    make()
    copied(names, Path(), kept := Path(".made", make.__name__).absolute())
    _KEPT[make] = kept


def copied(names: tuple[str, ...], here: Path, there: Path) -> None:
    """Copy files or folders from one folder to another."""
    for name in names:
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        if (here / name).is_dir():
            shutil.copytree(here / name, there / name, symlinks=True)
        else:
            shutil.copy(here / name, there / name)


@dataclass
class Case:
    """A command that ends in an error, and how the words of its remedy are carried out.

    Args:
        argv: the command line; {tiny} and {run} stand for a plan and a run.
        before: makes what is wrong; given the folder of the copy of a run.
        does: words of the remedy that are done by hand, and what does them.
        fills: placeholders of the remedy, and what a user would write there.
        prose: ways of the remedy that need nothing to be typed, each with the reason.
        drops: words of the command line that the remedy takes the place of.
        then: the next command line, where a remedy says in words what becomes of it.
        whole: the remedy is one command of the shell, before the command line is typed again.
        through: errors that are made on the way and told as this one, with its remedy.
        fake: facts of another machine, which hold for every command of the case.
        lifted: they end where the remedy begins, since it is what changes them.
    """

    argv: str
    before: Callable[[Path], Any] = lambda run: None
    does: Mapping[str, Callable[[Path], Any]] = field(default_factory=dict)
    fills: Mapping[str, str] = field(default_factory=dict)
    prose: Mapping[str, str] = field(default_factory=dict)
    drops: tuple[str, ...] = ()
    then: str = ""
    whole: bool = False
    through: tuple[str, ...] = ()
    fake: Callable[[pytest.MonkeyPatch], Any] = lambda patch: None
    lifted: bool = False


def after(argv: list[str], words: list[str]) -> list[str]:
    """Return the command line after a remedy: a whole new one, or with changed keys and options."""
    if words[0] == "headrace":
        return expanded(words[1:])
    found = [*argv]
    for number, word in enumerate(words):
        last = words[number - 1] if number else ""
        if KEY.match(word):
            key = word.partition("=")[0]
            keys = [w.partition("=")[0] for w in found]
            below = [f"{k}.".startswith(f"{key}.") for k in keys]
            found = [*(w for w, gone in zip(found, below, strict=True) if not gone), word]
        elif last == "--without":
            at = [n for n, w in enumerate(found) if w == "--with" and found[n + 1] == word]
            for n in reversed(at):
                del found[n : n + 2]
            found += ["--without", word]
        elif last == "--with":
            if "--without" in found:  # it is asked for now
                found = [
                    w
                    for n, w in enumerate(found)
                    if (w, *found[n + 1 : n + 2]) != ("--without", word)
                    and (*found[n - 1 : n], w) != ("--without", word)
                ]
            found += ["--with", word]
        elif last.startswith("--"):
            if last in found:
                n = found.index(last)
                found[n : n + 2] = []
            found += [last, word]
        elif word.startswith("--") and word not in ("--with", "--without"):
            follows = words[number + 1] if number + 1 < len(words) else "--"
            if follows.startswith("--") and word not in found:
                found.append(word)
    return found


def expanded(words: list[str]) -> list[str]:
    """Words with the files that a shell finds for those with a star in them."""
    return [found for word in words for found in sorted(glob(word)) or [word]]


def follow(
    case: Case, argv: list[str], folder: Path, remedy: str, **known: Any
) -> list[tuple[str, Told]]:
    """Take each way of a remedy; what the command says then."""
    argv = [word for word in argv if word not in case.drops]
    if gone := re.search(r" without (--[a-z-]+)$", remedy):
        at = argv.index(gone[1])
        argv = argv[:at] + argv[at + 2 :]
    for name, value in case.fills.items():
        name = name.replace("{here}", str(folder.parent.parent))
        assert name in remedy, f"{name!r} is not in {remedy!r}"
        remedy = remedy.replace(name, value.format(**known))
    found: list[tuple[str, Told]] = []
    if case.whole:
        remedy, _, key = remedy.rpartition(", and ") if AND_KEY.search(remedy) else (remedy, "", "")
        for part in re.split(r"(?: && |; )(?=headrace )", remedy):
            if part.startswith("headrace "):
                found.append((part, run(shlex.split(part)[1:])))
            else:
                subprocess.run(["bash", "-ec", part], check=True, capture_output=True)
        argv = split(case.then, **known) if case.then else argv
        return [*found, (remedy, run(after(argv, words_of(key)) if key else argv))]
    done = False
    for words, act in case.does.items():
        assert words in remedy, f"{words!r} is not in {remedy!r}"
        act(folder)
        done = True
        remedy = remedy.replace(words, "")
    again = split(case.then, **known) if case.then else argv
    for way in alternatives(remedy.replace(", then ", "; ")):
        way = way.strip(" ,;")
        if not way or way in case.prose:
            continue
        if leave := re.match(r"leave out (\S+)", way):
            gone = leave[1]
            found.append((way, run([w for w in argv if w.partition("=")[0] != gone])))
        elif SHELL.match(way):
            typed = re.split(", (if|where) ", way)[0]
            subprocess.run(["bash", "-ec", typed], check=True, capture_output=True)
            done = True
        elif words := words_of(way):
            found.append((way, run(after(argv, words))))
        else:
            raise AssertionError(f"{way!r} of {remedy!r} is nothing that can be done")
    if done and not found:
        found.append((remedy, run(again)))
    return found


def split(argv: str, **known: Any) -> list[str]:
    """Split a command line into words, with its placeholders filled in."""
    return expanded(shlex.split(argv.format(**known)))
