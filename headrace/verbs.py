"""The verbs of the command line: how its words are read, and how a wrong one is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperGroup

from headrace.core.command import typed
from headrace.core.errors import EXIT_PLAN, ConfigError
from headrace.terminal import exit_codes, is_first

UsageError: Any = typer.BadParameter.__base__
"""What typer raises where no verb takes the command line; it gives only this child a name."""


class Verbs(TyperGroup):
    """The verbs. With --json a command line that none of them takes is told as JSON, too."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """What stands before the verb."""
        ctx.meta["json"] = "--json" in args
        ctx.meta["words"] = [*args]
        self._check_json(args)
        if not is_first() and {"--help", "--version"} & set(args):  # the first rank prints it
            raise typer.Exit
        with exit_codes(ctx.meta["json"], together=True), _usage(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:
        """The verb, once it takes what stands behind it."""
        words = ctx.meta["words"]
        with (
            typed(words, self._takes(words)),
            exit_codes(ctx.meta["json"], together=True),
            _usage(ctx),
        ):
            return super().invoke(ctx)

    def _takes(self, words: list[str]) -> set[str]:
        """The options of the verb of a command line that take the next word as their value."""
        verb: Any = self
        for word in words[:2]:
            verb = getattr(verb, "commands", {}).get(word, verb)
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
    """With --json, an error of usage as one of ours; without, typer shows it."""
    try:
        yield
    except UsageError as error:
        if not is_first():  # which says the same
            raise typer.Exit(EXIT_PLAN) from None
        if not ctx.meta["json"]:
            raise
        where = error.ctx or ctx
        remedy = f"{where.command_path} --help"
        if where.parent is None:
            remedy = f"{where.command_path} VERB ... --json; {remedy} has the verbs"
        with exit_codes(as_json=True):
            raise ConfigError(error.format_message(), remedy) from None
