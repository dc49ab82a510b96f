"""This module holds the verb `chat`."""

import sys
from collections.abc import Callable
from itertools import count
from typing import Annotated

import typer

from headrace.cli.arguments import Adapter, Checkpoint, Json, RunName
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import exit_codes, note, show_json
from headrace.core.errors import ConfigError
from headrace.core.limits import WIDEST
from headrace.core.loading import loading

MOST_NEW = 100_000
"""The most tokens of an answer."""


def chat(
    run: RunName,
    *,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Say this and end; again for further turns.")
    ] = None,
    system: Annotated[str, typer.Option(help="A system prompt; the plan's without one.")] = "",
    tokens: Annotated[int, typer.Option(min=1, max=MOST_NEW, help="Most tokens an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=1e6, help="0 is greedy.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, max=WIDEST, help="0 is all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Draws the same answers.")] = 0,
    checkpoint: Checkpoint = None,
    adapter: Adapter = "",
    json: Json = False,
) -> None:
    """Answer what you say by a run that was trained on conversations; an empty line ends it.

    In a terminal Ctrl+C ends an answer that is being written, and Ctrl+D the conversation.
    """
    with exit_codes(json):
        if prompt is None and (json or not sys.stdin.isatty()):
            raise ConfigError(
                "chat reads what you say from a terminal, and this is none", "--prompt TEXT"
            )
        with loading():
            from headrace.cli.companions import note_template
            from headrace.export.opened import open_chosen
            from headrace.inference.chat import Chat
        opened = open_chosen(run, catalogue(), adapter=adapter, checkpoint=checkpoint)
        talk = Chat.of(opened.build, opened.talks, system)
        note_template(opened.talks, opened.build.plan)
        how = {"temperature": temperature, "top_k": top_k, "new_tokens": tokens}
        seeds = count(seed)  # another one for every answer

        def answer(text: str, show: Callable[[str], None] = lambda piece: None) -> str:
            drawn = next(seeds)
            return opened.compute(lambda: talk.reply(text, seed=drawn, show=show, **how))

        if prompt is not None:
            answers = [answer(text) for text in prompt]
            if json:
                show_json({"messages": talk.messages})
            else:
                print("\n".join(answers))
            return
        note("an empty line ends the conversation")
        _converse(lambda text: answer(text, _show))


def _converse(answer: Callable[[str], str]) -> None:
    """Answer each line of the terminal until an empty one, or the end of the input."""
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            return
        try:
            answer(text)
        except KeyboardInterrupt:
            note(" (cut off, and not remembered)")
        else:
            print()


def _show(piece: str) -> None:
    """Print a piece of an answer at once."""
    print(piece, end="", flush=True)
