"""This module holds the verb `run`, which runs an exported file by its own runtime."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.arguments import Json, TextTokens
from headrace.cli.catalogue import catalogue
from headrace.cli.runs import MOST_NEW, read_prompt
from headrace.cli.terminal import exit_codes, show_json
from headrace.core.command import rerun_without
from headrace.core.errors import ConfigError
from headrace.core.loading import loading

if TYPE_CHECKING:
    from headrace.export.runtime import Distance, Runtime


def run_file(
    file: Annotated[Path, typer.Argument(help="An exported file, as NAME.gguf.")],
    *,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    max_tokens: Annotated[
        int, typer.Option(min=1, max=MOST_NEW, help="Most tokens to add; each is the likeliest.")
    ] = 32,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure loss, distance, memory and latency of the file."),
    ] = False,
    of: Annotated[
        Path | None,
        typer.Option(help="The run or quantized model that it was made of, if not around it."),
    ] = None,
    tokens: TextTokens = None,
    json: Json = False,
) -> None:
    """Run an exported file by its own runtime, and tell how far it is from its run's model.

    With --measure it reads validation text instead of continuing a prompt.
    """
    with exit_codes(json):
        _check_words(prompt, of, tokens, measure=measure)
        text = read_prompt(prompt)
        with loading():
            from headrace.cli.vision import run_images
            from headrace.export.edge_runtime import images_record
            from headrace.export.measured import measure_file
            from headrace.export.runtime import distance, open_runtime, run_beside
        if (record := images_record(file)) is not None:
            run_images(file, record, prompt, as_json=json)
            return
        if measure:
            reading = measure_file(file, catalogue(), of=of, tokens=tokens)
            if json:
                show_json(reading.to_dict())
            else:
                print("\n".join(reading.lines))
            return
        runtime = open_runtime(file, text, max_tokens)
        ids = runtime.encode(text)
        continued = runtime.continue_(ids, max_tokens)
        run = run_beside(file, runtime.origin)
        far = None if run is None else distance(runtime, [*ids, *continued.ids], run, catalogue())
        if json:
            show_json(
                {
                    "prompt": text,
                    "text": continued.text,
                    "runtime": runtime.name,
                    "prompt_tokens_per_s": continued.prompt_tokens_per_s,
                    "tokens_per_s": continued.tokens_per_s,
                    "run": None if run is None else str(run),
                    "distance": None if far is None else far._asdict(),
                }
            )
            return
        print(text + continued.text)
        print(f"{runtime.name}: {continued.tokens_per_s:,.0f} tokens/s", file=sys.stderr)
        _print_distance(runtime, run, far)


def _check_words(prompt: str, of: Path | None, tokens: int | None, *, measure: bool) -> None:
    """Refuse words that belong to another use of a file.

    Raises:
        ConfigError: names the first of them.
    """
    if measure and prompt:
        raise ConfigError(
            "--measure reads validation text, and --prompt is continued without it",
            rerun_without("--prompt", verb="run"),
        )
    if not measure and (of is not None or tokens is not None):
        option = "--tokens" if of is None else "--of"
        raise ConfigError(
            f"{option} says what a file is measured on, and nothing is measured",
            rerun_without(option, verb="run"),
        )


def _print_distance(runtime: "Runtime", run: Path | None, far: "Distance | None") -> None:
    """Print how far a file is from its run's model, or why that is not known."""
    if far is not None:
        print(
            f"log-probabilities differ from those of {run} by at most {far.largest_nats:.2g} "
            f"nats; the likeliest token is the same after {far.same_choice:.0%} of "
            f"{far.prefixes} prefixes",
            file=sys.stderr,
        )
    elif runtime.origin is not None:
        print(
            f"not compared: the checkpoint of {runtime.origin.run} that it was made of is not "
            "in the folder where the file lies",
            file=sys.stderr,
        )
    else:
        print("not compared: the file names no run whose model it is", file=sys.stderr)
