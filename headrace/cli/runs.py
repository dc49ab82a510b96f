"""This module holds the verbs that use a run: eval, sample and report."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.arguments import Adapter, Checkpoint, Json, RunName
from headrace.cli.catalogue import catalogue
from headrace.cli.eval_tasks import evaluate_tasks
from headrace.cli.terminal import exit_codes, show_json, show_table
from headrace.core.command import rerun_without
from headrace.core.errors import ConfigError
from headrace.core.limits import MOST, WIDEST
from headrace.core.loading import loading

LENGTH = "data.sequence_length"
"""The one key that an evaluation may set."""
MOST_NEW = 1_000_000
"""The most tokens that a sample may add; each of them takes a forward pass."""


Tokens = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST, help="At most this many, spread evenly over the text; all without it."
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=WIDEST,
        help="Let rows overlap: each begins so many tokens after the last, and a target counts "
        "once, where it has the most tokens before it.",
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        help="Score sets of questions instead: a file of JSON lines, a folder of them, or the name "
        "of a task of lm-evaluation-harness (again for several)."
    ),
]


def evaluate_run(
    run: RunName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="data.sequence_length=N reads longer rows, and tells loss by place."),
    ] = None,
    *,
    checkpoint: Checkpoint = None,
    adapter: Adapter = "",
    tokens: Tokens = None,
    stride: Stride = None,
    tasks: Tasks = None,
    delimiter: Annotated[
        str, typer.Option(help="What stands between a prompt of --tasks and an answer.")
    ] = " ",
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="At most this many questions of each task."),
    ] = None,
    json: Json = False,
) -> None:
    """Print the validation loss of a run's checkpoint, or what it scores on sets of questions."""
    with exit_codes(json):
        if tasks:
            _refuse_beside_tasks(overrides, tokens, stride)
            evaluate_tasks(
                run,
                tasks,
                delimiter=delimiter,
                limit=limit,
                checkpoint=checkpoint,
                adapter=adapter,
                as_json=json,
            )
            return
        if limit is not None:
            raise ConfigError(
                "--limit counts questions, and there are none without --tasks",
                rerun_without("--limit", verb="eval"),
            )
        _show_loss(run, overrides or (), checkpoint, adapter, tokens, stride, as_json=json)


def _show_loss(
    run: Path,
    overrides: Sequence[str],
    checkpoint: str | None,
    adapter: str,
    tokens: int | None,
    stride: int | None,
    *,
    as_json: bool,
) -> None:
    """Print the loss of a run on its validation text."""
    with loading():
        from headrace.export.opened import open_any
        from headrace.train.evaluate import (
            LossByPlace,
            bins_of,
            check_length,
            check_stride,
            doubts,
            evaluate,
            finite,
        )
    length = _length_asked(overrides)
    opened = open_any(
        run, catalogue(), adapter=adapter, checkpoint=checkpoint, with_data=True, images=True
    )
    build, folder = opened.build, opened.run
    trained, places = build.plan.data.sequence_length, None
    if length is not None:
        check_length(build, length)
        places = LossByPlace(bins_of(trained, length), build.device)
    if stride is not None:
        check_stride(stride, length or trained)
    validation = opened.compute(
        lambda: finite(evaluate(build, tokens, length=length, stride=stride, places=places))
    )
    beside = {"adapter": adapter} if adapter else {}
    values = {"run": str(folder), **beside, **vars(validation), **build.prepared.loss_fields}
    values |= values.pop("more")
    if stride is not None:
        values |= {"stride": stride, "least_context": (length or trained) - stride}
    by_place = {} if places is None else {"places": places.rows(trained)}
    lengths = {} if places is None else {"sequence_length": length, "trained_length": trained}
    # A user who asks for few of many targets knows it, so all targets count then.
    counted = validation.tokens if validation.share == 1 else build.prepared.validation.tokens - 1
    reasons = doubts(build, None, counted, bits_per_byte=validation.bits_per_byte)
    if as_json:
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


def _refuse_beside_tasks(
    overrides: Sequence[str] | None, tokens: int | None, stride: int | None
) -> None:
    """Refuse words of the validation text beside `--tasks`, which reads none of it.

    Raises:
        ConfigError: names the first of them.
    """
    given = [
        *(overrides or ()),
        *([f"--tokens {tokens}"] if tokens is not None else ()),
        *([f"--stride {stride}"] if stride is not None else ()),
    ]
    if given:
        raise ConfigError(
            f"--tasks reads no validation text, which {given[0]} is of",
            rerun_without("--tasks", verb="eval"),
        )


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
                rerun_without(*(word for word in overrides if not _is_length(word)), verb="eval"),
            )
        number = int(value) if value.strip().isdecimal() else 1024
        near = min(max(2, number), WIDEST)
        if not _is_length(item):
            raise ConfigError(
                f"{item!r} is no length: rows have 2 to {WIDEST:,} tokens", f"{LENGTH}={near}"
            )
        length = near
    return length


def _is_length(item: str) -> bool:
    """Return whether a word sets the length of rows, to a number that rows can have."""
    key, _, value = (part.strip() for part in item.partition("="))
    return key == LENGTH and value.isdecimal() and value == str(min(max(2, int(value)), WIDEST))


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


def read_prompt(prompt: str) -> str:
    """Return a prompt that was typed as text.

    Raises:
        ConfigError: it is not UTF-8.
    """
    with suppress(UnicodeError):  # UTF-8 that a locale of ASCII handed over as bytes
        prompt = os.fsencode(prompt).decode()
    if prompt != (text := prompt.encode(errors="replace").decode()):
        raise ConfigError(f"the prompt is not UTF-8: {prompt!a}", f"--prompt {shlex.quote(text)}")
    return prompt


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
    adapter: Adapter = "",
    json: Json = False,
) -> None:
    """Continue a prompt with a trained run."""
    with exit_codes(json):
        prompt = read_prompt(prompt)
        if not -(2**63) <= seed < 2**63:
            raise ConfigError("--seed takes whole numbers of 64 bits", f"--seed {2**63 - 1}")
        with loading():
            from headrace.export.opened import open_any
            from headrace.inference.sample import generate_text
        opened = open_any(run, catalogue(), adapter=adapter, checkpoint=checkpoint)
        build = opened.build
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        text = opened.compute(lambda: generate_text(build, prompt, new_tokens=tokens, **how))
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
