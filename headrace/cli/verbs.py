"""This module reads the words of the command line, and reports a wrong one with a remedy."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from itertools import pairwise
from math import isfinite
from typing import Any, ClassVar, NamedTuple, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from headrace.cli.terminal import exit_codes, is_first
from headrace.core.command import typed
from headrace.core.errors import EXIT_PLAN, ConfigError, nearest
from headrace.core.system import check_system

UsageError: Any = typer.BadParameter.__base__
"""The class of the errors that typer raises where no verb accepts the command line.

typer exports only its subclass BadParameter, so the class is taken from that."""

MISTYPED = 0.85
"""Least similarity of two options, by difflib, at which one counts as the other mistyped."""
RETIRED = {
    "truth": (
        "headrace truth is a program of Headrace's repository now, for it reads the receipts there",
        "python benchmarks/truth.py",
    ),
}
"""Maps a removed verb to the message and the remedy that its user gets."""


class Verb(NamedTuple):
    """Hold a verb, and the module that is imported when the verb is called."""

    name: str
    function: str
    """its module and function in headrace.cli, as in "runs.sample"; or a `Typer` of more verbs"""
    help: str

    def line(self) -> TyperCommand:
        """Return the verb as the help of `headrace` lists it."""
        return TyperCommand(self.name, help=self.help)

    def load(self) -> Any:
        """Import the module of the verb, and return the whole verb."""
        module, _, name = self.function.partition(".")
        return _whole_verb(self, getattr(import_module(f"headrace.cli.{module}"), name))


@cache
def _whole_verb(verb: Verb, function: Any) -> Any:
    """Return a verb with its options; a command line asks for it three times."""
    alone = typer.Typer(add_completion=False)
    if isinstance(function, typer.Typer):
        alone.add_typer(function, name=verb.name, help=verb.help)
        return get_group(alone).commands[verb.name]
    alone.command(verb.name, help=verb.help)(function)
    return get_command(alone)


class Verbs(TyperGroup):
    """Hold the verbs of a command. With --json, errors of usage are printed as JSON, too."""

    verbs: ClassVar[tuple[Verb, ...]] = ()
    commands: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = {verb.name: verb.line() for verb in self.verbs}

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Parse what stands before the verb, and handle errors of the whole command line."""
        ctx.meta["json"] = "--json" in args
        ctx.meta["words"] = [*args]
        self._check_json(args)
        if not is_first() and {"--help", "--version"} & set(args):  # the first rank prints it
            raise typer.Exit
        with exit_codes(ctx.meta["json"], together=True), _usage(ctx):
            rest = super().parse_args(ctx, args)
        ctx.with_resource(self._answering(ctx))
        return rest

    @contextmanager
    def _answering(self, ctx: typer.Context) -> Iterator[None]:
        """Let remedies repeat the command line, and turn its errors into messages and codes."""
        words = ctx.meta["words"]
        with (
            typed(words, self._takes(words)),
            exit_codes(ctx.meta["json"], together=True),
            _usage(ctx),
        ):
            yield

    def resolve_command(
        self, ctx: typer.Context, args: list[str]
    ) -> tuple[str | None, Any, list[str]]:
        """Return the name of the verb, the verb, and the words behind it.

        Raises:
            ConfigError: the verb was removed.
            UnsupportedError: this system has not what the verbs need.
        """
        check_system()
        if args[0] in RETIRED:
            raise ConfigError(*RETIRED[args[0]])
        name, _, rest = super().resolve_command(ctx, args)
        return name, self.load(name), rest

    def load(self, name: str | None) -> Any:
        """Return a verb with its options; None where there is none of that name."""
        entry = next((verb for verb in self.verbs if verb.name == name), None)
        return entry and entry.load()

    def _takes(self, words: list[str]) -> set[str]:
        """Return the options of a command line's verb that take the next word as their value."""
        verb: Any = (self.load(words[0]) if words else None) or self
        if len(words) > 1 and verb is not self:
            verb = getattr(verb, "commands", {}).get(words[1], verb)
        return {
            name
            for option in verb.params
            if option.param_type_name == "option" and not getattr(option, "is_flag", False)
            for name in option.opts
        }

    def _check_json(self, args: list[str]) -> None:
        """Refuse --json where an option would take it as its value."""
        takes = self._takes(args)
        for word, after in pairwise(args):
            if word == "--":
                return
            if word in takes and after == "--json":
                with exit_codes(as_json=True):
                    raise ConfigError(
                        f"{word} needs a value, and --json is none", f"{word} VALUE --json"
                    )


@contextmanager
def _usage(ctx: typer.Context) -> Iterator[None]:
    """Turn an error of usage into a ConfigError with --json; without, let typer show it."""
    try:
        yield
    except UsageError as error:
        if not is_first():  # the first rank prints the same
            raise typer.Exit(EXIT_PLAN) from None
        if not ctx.meta["json"]:
            raise
        where = error.ctx or ctx
        remedy = _mended(error, where, ctx.meta["words"]) or f"{where.command_path} --help"
        with exit_codes(as_json=True):
            raise ConfigError(error.format_message(), remedy) from None


def _mended(error: Any, where: Any, words: list[str]) -> str:
    """Return the command line with the wrong word corrected; "" where no word is near.

    Args:
        error: what typer raises.
        where: the context of the verb, or of the group of verbs, that does not take the words.
        words: the words that follow `headrace`.
    """
    wrong, right = "", ""
    if name := getattr(error, "option_name", ""):
        options = [one for option in where.command.params for one in option.opts]
        near = get_close_matches(name.casefold(), options, n=1, cutoff=MISTYPED)
        wrong, right = name, next(iter(near), "")
    elif verbs := getattr(where.command, "commands", None):
        depth = len(where.command_path.split()) - 1
        wrong = words[depth] if depth < len(words) else ""
        near = nearest(wrong, verbs) if wrong else ""
        right = near if near in verbs else ""
    elif (option := getattr(error, "param", None)) is not None:
        at = [n for n, word in enumerate(words[:-1]) if word in option.opts]
        if at:
            value = _value(option, words[at[-1] + 1])
            corrected = [*words[: at[-1] + 1], *([value] if value else []), *words[at[-1] + 2 :]]
            return _command(corrected) if value else ""
    if not right or wrong not in words:
        return ""
    at = words.index(wrong)
    return _command([*words[:at], right, *words[at + 1 :]])


def _value(option: Any, given: str) -> str:
    """Return the allowed value of an option nearest to the given one; "" where none is near."""
    descriptor = getattr(option, "type_descriptor", None)
    choices = [str(one) for one in get_args(getattr(descriptor, "annotation", None))]
    if choices:
        near = nearest(given, choices)
        return near if near in choices else choices[0]
    try:
        number = float(given)
    except ValueError:
        return str(option.default) if type(option.default) in (int, float) else ""
    if option.min is not None and number < option.min:
        return f"{option.min:g}"
    if option.max is not None and number > option.max:
        return f"{option.max:g}"
    return f"{round(number)}" if type(option.default) is int and isfinite(number) else ""


def _command(words: list[str]) -> str:
    """Return a command of these words, quoted for a shell and without --json."""
    return shlex.join(["headrace", *(word for word in words if word != "--json")])
