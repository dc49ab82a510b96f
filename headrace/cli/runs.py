"""This module holds the verbs that use a run: eval, sample, report and export."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.arguments import Checkpoint, Json, RunName
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import exit_codes, show_json, show_table
from headrace.core.command import rerun
from headrace.core.errors import ConfigError
from headrace.core.limits import MOST, WIDEST
from headrace.core.loading import loading

LENGTH = "data.sequence_length"
"""The one key that an evaluation may set."""
MOST_NEW = 1_000_000
"""The most tokens that a sample may add; each of them takes a forward pass."""


def evaluate_run(
    run: RunName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="data.sequence_length=N reads longer rows, and tells loss by place."),
    ] = None,
    *,
    checkpoint: Checkpoint = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST, help="At most this many, spread evenly over the text; all without it."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Print the validation loss of a run's checkpoint, in nats and bits per byte."""
    with exit_codes(json):
        with loading():
            from headrace.inference.load import computed, open_model, resolve_run
            from headrace.train.evaluate import (
                LossByPlace,
                bins_of,
                check_length,
                doubts,
                evaluate,
                finite,
            )
        folder, length = resolve_run(run), _length_asked(overrides or ())
        build = open_model(folder, catalogue(), checkpoint=checkpoint, with_data=True)
        trained, places = build.plan.data.sequence_length, None
        if length is not None:
            check_length(build, length)
            places = LossByPlace(bins_of(trained, length), build.device)
        validation = computed(
            lambda: finite(evaluate(build, tokens, length=length, places=places)),
            build,
            folder,
            catalogue(),
            checkpoint=checkpoint,
        )
        values = {"run": str(folder), **vars(validation), **build.prepared.loss_fields}
        by_place = {} if places is None else {"places": places.rows(trained)}
        lengths = {} if places is None else {"sequence_length": length, "trained_length": trained}
        # A user who asks for few of many targets knows it, so all targets count then.
        counted = (
            validation.tokens if validation.share == 1 else build.prepared.validation.tokens - 1
        )
        reasons = doubts(build, None, counted, bits_per_byte=validation.bits_per_byte)
        if json:
            doubtful = {"doubts": [doubt.to_dict() for doubt in reasons]} if reasons else {}
            show_json(values | lengths | by_place | doubtful)
        else:
            show_table(
                list(values),
                [[f"{v:.4f}" if isinstance(v, float) else str(v) for v in values.values()]],
            )
            if places is not None:
                _show_places(by_place["places"], trained, folder)
            for doubt in reasons:
                print(doubt.line)


def _length_asked(overrides: Sequence[str]) -> int | None:
    """Return the length of the rows that an evaluation is asked for; None without such a word.

    Raises:
        ConfigError: another key is set, or the length is no number of at least two tokens.
    """
    length = None
    for item in overrides:
        key, _, value = item.partition("=")
        if key.strip() != LENGTH:
            raise ConfigError(
                f"eval reads a run as its plan says, but for {LENGTH}: {item!r} is another key",
                rerun((item, f"{LENGTH}=N"), verb="eval"),
            )
        number = int(value) if value.strip().isdecimal() else 1024
        near = min(max(2, number), WIDEST)
        if value.strip() != str(near):
            raise ConfigError(
                f"{item!r} is no length: rows have 2 to {WIDEST:,} tokens", f"{LENGTH}={near}"
            )
        length = near
    return length


def _show_places(rows: Sequence[Mapping[str, Any]], trained: int, folder: Path) -> None:
    """Print the loss by place, and where the trained length ends."""
    print(f"{folder} was trained on rows of {trained} tokens; loss by the tokens before a target:")
    lines = [
        [
            f"{row['begin']} to {row['end'] - 1}",
            "trained" if row["trained"] else "beyond",
            str(row["targets"]),
            f"{row['loss_nats']:.4f}",
        ]
        for row in rows
    ]
    show_table(["places", "rows", "targets", "loss_nats"], lines)


def sample(
    run: RunName,
    *,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=1, max=MOST_NEW, help="Most tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, max=1e6, help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, max=WIDEST, help="0 is all.")] = 50,
    top_p: Annotated[float, typer.Option(max=1, help="Above 0; 1 is all.")] = 1.0,
    seed: int = 0,
    checkpoint: Checkpoint = None,
    json: Json = False,
) -> None:
    """Continue a prompt with a trained run."""
    with exit_codes(json):
        with suppress(UnicodeError):  # UTF-8 that a locale of ASCII handed over as bytes
            prompt = os.fsencode(prompt).decode()
        if prompt != (text := prompt.encode(errors="replace").decode()):
            raise ConfigError(
                f"the prompt is not UTF-8: {prompt!a}", f"--prompt {shlex.quote(text)}"
            )
        if not -(2**63) <= seed < 2**63:
            raise ConfigError("--seed takes whole numbers of 64 bits", f"--seed {2**63 - 1}")
        with loading():
            from headrace.inference.load import computed, open_model, resolve_run
            from headrace.inference.sample import generate_text
        folder = resolve_run(run)
        build = open_model(folder, catalogue(), checkpoint=checkpoint)
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        text = computed(
            lambda: generate_text(build, prompt, new_tokens=tokens, **how),
            build,
            folder,
            catalogue(),
            checkpoint=checkpoint,
        )
        lost = build.prepared.loss_fields
        if json:
            show_json({"prompt": prompt, "text": text, **lost})
        else:
            print(prompt + text)
            for loses in lost.values():
                print(f"the tokenizer loses text: {loses}", file=sys.stderr)


def report(
    runs: Annotated[list[Path], typer.Argument(help="One run, or several to compare.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option(help="Where the page goes: into the run, or comparison.html, without it."),
    ] = None,
    json: Json = False,
) -> None:
    """Write a run's page again, or lay runs side by side on one page."""
    with exit_codes(json):
        with loading():
            from headrace.inference.load import resolve_run
            from headrace.report.compare import compare_reports
            from headrace.report.single import write_report
        folders = [resolve_run(r) for r in runs]
        alone = len(folders) == 1
        page = (
            write_report(folders[0], output)
            if alone
            else compare_reports(folders, output or Path("comparison.html"))
        )
        if json:
            show_json({"page": str(page)})
        else:
            print(page)


def export(
    run: RunName,
    *,
    to: Annotated[str, typer.Option(help="hf: Hugging Face safetensors, config and tokenizer.")],
    output: Annotated[Path | None, typer.Option(help="A new folder; RUN/hf without it.")] = None,
    checkpoint: Checkpoint = None,
    json: Json = False,
) -> None:
    """Write a run's model in another tool's format."""
    with exit_codes(json):
        with loading():
            from headrace.export.run import export_run
            from headrace.inference.load import open_model, read_plan, resolve_run
            from headrace.model.companions import LOST, Companions, read_companions
        folder = resolve_run(run)
        build = open_model(folder, catalogue(), checkpoint=checkpoint)
        plan = read_plan(folder, catalogue())
        companions = read_companions(
            folder, plan.model.pretrained, lambda line: print(line, file=sys.stderr)
        )
        written = export_run(
            build,
            to,
            output or folder / to,
            run=folder,
            sequence_length=plan.data.sequence_length,
            companions=companions or Companions(),
        )
        loss_fields = build.prepared.loss_fields
        if json:
            lost = [*LOST] if companions is None else []
            show_json({"to": to, "folder": str(written), "not_kept": lost, **loss_fields})
        else:
            print(written)
            for loses in loss_fields.values():
                print(f"the tokenizer loses text: {loses}", file=sys.stderr)
