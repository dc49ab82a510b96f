"""This module holds the verbs under `headrace data`; the work of each is in data_VERB.py."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from headrace.cli.arguments import DeviceName, Json, Overrides, PlanName
from headrace.cli.data_clean import Words, decontaminate, dedup
from headrace.cli.data_inspect import inspect
from headrace.cli.data_mix import mix
from headrace.cli.data_pack import pack
from headrace.cli.terminal import exit_codes, make_progress, show_json, show_table
from headrace.core.limits import (
    TRAINED_VOCAB,
    WIDEST,
    TextGrouping,
    TokenizerPattern,
    TokenizerText,
)
from headrace.core.loading import loading

data = typer.Typer(no_args_is_help=True)
data.command()(inspect)
data.command()(pack)
data.command()(mix)


EngineOption = Annotated[
    Literal["local", "ray", "slurm"] | None,
    typer.Option(
        help="Make parts in processes of this machine, on Ray, or as a Slurm array; a killed one "
        "goes on with the parts that are finished. The shards are those of one process."
    ),
]
Workers = Annotated[
    int, typer.Option(min=0, max=1 << 16, help="Parts made at once; 0 is one for each core.")
]
DryRun = Annotated[bool, typer.Option(help="Print what Slurm would be given, and submit nothing.")]


@data.command()
def ingest(
    plan: PlanName = "demo",
    overrides: Overrides = None,
    *,
    engine: EngineOption = None,
    workers: Workers = 0,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Prepare the tokenizer and the shards of a plan's data, without training."""
    with exit_codes(json):
        with loading():
            from headrace.cli.data_engine import prepared_on, submission
            from headrace.cli.plans import named_plan
            from headrace.train.interrupts import Preparing
        if dry_run:
            given = submission(named_plan(plan, overrides, verb="data ingest"), engine, workers)
            if json:
                show_json(given)
            else:
                print("\n".join(given.values()))
            return
        progress = make_progress(json)
        try:
            with Preparing():
                wanted = named_plan(plan, overrides, verb="data ingest")
                prepared = prepared_on(wanted, engine, workers, progress.task)
                sides = prepared.sides(wanted.data.validation)
                doubts = sides.doubts(wanted.data.sequence_length)
                for document in prepared.left_out:
                    progress.note(document.line())
                for step in prepared.cleaning.steps if prepared.cleaning else ():
                    progress.note(step.line())
                if prepared.tokenizer.note:
                    progress.note(prepared.tokenizer.note)
                for doubt in doubts:
                    progress.note(doubt.line)
        finally:
            progress.close()
        value = prepared.to_dict(wanted.data.validation)
        if json:
            left_out = [document.to_dict() for document in prepared.left_out]
            doubtful = [doubt.to_dict() for doubt in doubts]
            show_json(value | {"left_out": left_out, "doubts": doubtful})
        else:
            rows = {key: val for key, val in value.items() if val is not None}
            if both := rows.get("overlap"):
                rows["overlap"] = f"{both['documents']} of {both['of_documents']} documents"
            rows |= {name: one["line"] for name, one in rows.pop("cleaning", {}).items()}
            if prepared.trained_on:
                rows["trained_on"] = prepared.trained_on.format()
            show_table(["what", "value"], [[key, str(val)] for key, val in rows.items()])


@data.command()
def tokenizer(
    words: Words,
    *,
    vocab: Annotated[
        int, typer.Option(min=257, max=WIDEST, help="Entries, special tokens included.")
    ] = TRAINED_VOCAB,
    pattern: Annotated[TokenizerPattern, typer.Option(help="How text falls into words.")] = "gpt4",
    learn_from: Annotated[
        TokenizerText, typer.Option(help="A sample of up to 64 MiB, or the counted words of all.")
    ] = "sample",
    special: Annotated[
        list[str] | None, typer.Option(help="A further special token, such as <|user|>.")
    ] = None,
    special_from_text: Annotated[
        bool, typer.Option("--special-from-text", help="Text that spells one becomes it.")
    ] = False,
    to: Annotated[Path, typer.Option(help="The file that is written, or a folder for it.")] = Path(
        "tokenizer.json"
    ),
    json: Json = False,
) -> None:
    """Train a byte-level BPE on text, and write its tokenizer.json."""
    with exit_codes(json):
        with loading():
            from headrace.cli.data_tokenizer import train_file
            from headrace.data.command_words import read_words
        keys = {
            "vocab": vocab,
            "tokenizer_pattern": pattern,
            "tokenizer_text": learn_from,
            "special_tokens": special or [],
            "special_from_text": special_from_text,
        }
        train_file(read_words(words, keys), to, as_json=json)


@data.command()
def fertility(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="TOKENIZERS",
            help="tokenizer.json files, their folders, or tiktoken:NAME; and data.KEY=VALUE.",
        ),
    ],
    *,
    text: Annotated[
        list[str], typer.Option(help="Text, as data.sources names it; each file is compared apart.")
    ],
    by: Annotated[TextGrouping, typer.Option(help="How texts are grouped.")] = "source",
    plan: Annotated[
        str, typer.Option(help="A recipe's name or a TOML file, whose cost is told.")
    ] = "",
    device_name: DeviceName = "",
    output: Annotated[Path | None, typer.Option(help="Where the page goes, as HTML.")] = None,
    json: Json = False,
) -> None:
    """Compare tokenizers on text: tokens per word, character and byte, and what they cost."""
    with exit_codes(json):
        with loading():
            from headrace.cli.data_fertility import compare
            from headrace.data.command_words import read_words, split_words
        tokenizers, settings = split_words(words)
        compare(
            tokenizers,
            read_words([*text, *settings]),
            by=by,
            plan=plan,
            device_name=device_name,
            output=output,
            as_json=json,
        )


@data.command()
def part(
    job: Annotated[Path, typer.Argument(help="The folder of a job, beside prepared data.")],
    *,
    stage: Annotated[str, typer.Option(help="A stage of it.")] = "survey",
    task: Annotated[str, typer.Option(help="K/N: make every N-th part, from K on.")] = "0/1",
    json: Json = False,
) -> None:
    """Make parts of an ingest that runs on an engine; what a task of a Slurm array runs."""
    with exit_codes(json):
        with loading():
            from headrace.cli.data_engine import make_parts
            from headrace.train.interrupts import Preparing
        with Preparing():
            made = make_parts(job, stage, task)
        if json:
            show_json(made)
        else:
            show_table(["what", "value"], [[key, str(val)] for key, val in made.items()])


data.command()(dedup)
data.command()(decontaminate)
