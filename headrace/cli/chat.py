"""This module holds the verb `chat`."""

import sys
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
    """Answer what you say by a run that was trained on conversations; an empty line ends it."""
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
        how = {"temperature": temperature, "top_k": top_k, "seed": seed, "new_tokens": tokens}

        def answer(text: str) -> str:
            return opened.compute(lambda: talk.reply(text, **how))

        if prompt is not None:
            answers = [answer(text) for text in prompt]
            if json:
                show_json({"messages": talk.messages})
            else:
                print("\n".join(answers))
            return
        note("an empty line ends the conversation")
        try:
            while text := input("> ").strip():
                print(answer(text))
        except EOFError:
            return
