"""This module holds the verb `extend`: from a model of short rows to a run on longer ones."""

import json as json_module
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
import typer

from headrace.cli.arguments import Json, Overrides, With, Without
from headrace.cli.catalogue import catalogue
from headrace.cli.finetune import rate_of, with_its_schedule
from headrace.cli.terminal import (
    exit_codes,
    is_first,
    note,
    show_json,
    show_table,
    started_as,
)
from headrace.cli.train import begin_training, concluded, training_of
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.files import shell, toml_values, write_whole
from headrace.core.limits import WIDEST
from headrace.core.units import divisors

if TYPE_CHECKING:
    from headrace.core.progress import Progress
    from headrace.inference.extension import Extension
    from headrace.plan.plan import Plan

RECIPE = "long-context"
ROWS = 8
"""Sequences of the trained length of which a step has the tokens."""
PAGE, RECORD = "extension.html", "extension.json"
"""Files of the run's folder that say what short rows lost."""
USUAL = 2048
"""Tokens of a row of a Llama whose config.json does not say (transformers' default)."""
NOT_CARRIED = ("sequence_length", "tokenizer", "vocab", "curriculum", "directory")
"""Keys of the data of a run that its extension does not take over."""


def extend(
    model: Annotated[Path, typer.Argument(help="A run, or a folder of safetensors and config.")],
    overrides: Overrides = None,
    *,
    to: Annotated[
        int | None,
        typer.Option(
            min=2, max=WIDEST, help="Tokens of a row; a run that has them reports without."
        ),
    ] = None,
    full: Annotated[bool, typer.Option(help="Train all weights, not an adapter.")] = False,
    questions: Annotated[
        int, typer.Option(min=1, max=10_000, help="Needles of each length and depth.")
    ] = 8,
    with_: With = None,
    without: Without = None,
    dry_run: Annotated[bool, typer.Option(help="Show the plan and train nothing.")] = False,
    json: Json = False,
) -> None:
    """Train a model to read longer rows, and report what it lost on short ones.

    The plan is that of the recipe long-context: YaRN, short and long rows in every batch, and
    lora. The report compares the run with the weights that it began from: loss by place and by
    length of rows, and how often a sentence far back is found.
    """
    with exit_codes(json, together=True), ExitStack() as stack:
        progress, closing = begin_training(stack, as_json=json)
        with concluded(progress, closing):
            if to is None:
                flags = [*(["--full"] if full else ()), *(["--dry-run"] if dry_run else ())]
                _refuse_changes([*(overrides or ()), *(with_ or ()), *(without or ()), *flags])
                folder, report = model, {}
            else:
                adds = [*(() if full else ("lora",)), *(with_ or ())]
                drops = without or []
                plan = _plan(model, to, overrides or [], adds, drops, progress)
                _check_text(plan, to, progress)
                if dry_run:
                    _show_plan(plan, progress.notes, as_json=json)
                    return
                result = training_of(plan, progress)()
                if not result.first:
                    return
                folder, report = result.folder, result.conclude(closing, note).report
            if not is_first():
                return
            extension = _report(folder, questions, progress)
        if json:
            show_json({**report, "extension": extension.to_dict(), "told": progress.notes})
        else:
            _show(extension)


def _refuse_changes(words: list[str]) -> None:
    """Refuse changes of a plan where no run is to begin.

    Raises:
        ConfigError: names the first of them.
    """
    if words:
        raise ConfigError(
            f"{words[0]} changes a run that begins, and without --to a run that was extended is "
            "only compared again",
            "--to N",
        )


def _plan(
    model: Path,
    to: int,
    words: list[str],
    add: list[str],
    drop: list[str],
    progress: "Progress",
) -> "Plan":
    """Return the plan of a run on longer rows.

    Raises:
        ConfigError, UnsupportedError: the model cannot be extended, or not to this length.
    """
    from headrace.export.start import beginning
    from headrace.model.adapter import longest_row, read_config
    from headrace.plan.plan import Plan
    from headrace.recipes import read_recipe

    folder, own = beginning(model, catalogue(), progress.note)
    position = read_config(folder, "MODEL").position
    if position != "rope":
        raise UnsupportedError(
            f"{model} has model.position = {position!r}, which knows no place beyond its "
            "own: only rope can be turned slower",
            f"headrace extend FOLDER --to {to}, with a model of model.position = 'rope'",
        )
    trained, data = longest_row(folder) or USUAL, dict[str, Any]()
    if own is not None:
        trained = own.data.sequence_length
        kept = own.dump()["data"]
        data = {key: value for key, value in kept.items() if key not in NOT_CARRIED}
    if to <= trained:
        raise ConfigError(
            f"--to {to} is not longer than the {trained:,} tokens of the rows that {model} was "
            "trained on",
            f"--to {min(WIDEST, 4 * trained)}",
        )
    given = {word.partition("=")[0].strip() for word in words}
    if own is None and "data.sources" not in given:
        raise ConfigError(
            f"extend {model} takes long texts to train on: a folder of weights brings none",
            f"headrace extend {shell(model)} --to {to} data.sources=PATH",
        )
    if "data.sources" in given:  # what is known of the run's own text holds for no other
        data = {}
    tables = toml_values(read_recipe(RECIPE, "extend"), RECIPE)
    tables["data"] = {**data, "sequence_length": to, "tokenizer": str(folder)}
    tables["model"] = {"pretrained": str(folder)}
    tables["name"] = f"{model.name}-{to}"
    tables["batch"] = {"tokens": to * max(2, -(-ROWS * trained // to))}
    rate = rate_of(own, "lora" if "lora" in add else "full")
    tables["optimizer"] = {**tables["optimizer"], "lr": rate}
    tables["techniques"]["yarn"] = {"factor": to / trained, "original_length": trained}
    piece = max(size for size in divisors(to) if size <= trained)
    mixing = {"lengths": [piece, 0], "shares": [0.5, 0.5]}
    tables["techniques"]["length_mixing"] = mixing
    text = tomli_w.dumps(tables)
    plan = Plan.read(text, catalogue(), overrides=words, with_=add, without=drop)
    return with_its_schedule(plan, frozenset(given))


def _check_text(plan: "Plan", to: int, progress: "Progress") -> None:
    """Prepare the text, and refuse one in which the new places never occur.

    Raises:
        ConfigError: no document, or not the whole validation text, is as long as a row.
    """
    import numpy as np

    from headrace.data.ingest import prepare

    prepared = prepare(plan, progress=progress.task)
    trained = int(plan.data.sequence_length / plan.dump()["techniques"]["yarn"]["factor"])
    if "document_packing" in plan.techniques:
        longest, known = (
            max(int(np.diff(s.bounds(0, s.documents)).max(initial=0)) for s in texts)
            for texts in (prepared.train, [prepared.validation])
        )
        if longest < to:
            shorter = f"--to {longest}, or " if longest > trained else ""
            raise ConfigError(
                f"no document of {', '.join(plan.source_list)} fills a row of {to:,} tokens, so "
                f"that far places would not be learned: the longest has {longest:,}",
                f"{shorter}data.sources=PATH of longer texts",
            )
        if known < to:
            progress.note(
                f"the longest document of the validation text has {known:,} tokens: no loss is "
                "known of places beyond; data.validation=PATH of longer texts measures them"
            )
    if prepared.validation.tokens <= to:
        raise ConfigError(
            f"the validation text has {prepared.validation.tokens:,} tokens, which is no row of "
            f"{to:,} tokens and its targets",
            "data.validation=PATH of a longer text, or a larger share as data.validation=0.2",
        )


def _show_plan(plan: "Plan", notes: list[str], *, as_json: bool) -> None:
    """Print the plan as TOML or as JSON, there with the notes on it."""
    if as_json:
        show_json({"plan": plan.dump(), "told": notes})
    else:
        print(plan.to_toml())


def _report(run: Path, questions: int, progress: "Progress") -> "Extension":
    """Measure both models, and write the page and the record into the run's folder."""
    from headrace.inference.extension import read_extension
    from headrace.report.extension import extension_page
    from headrace.report.page import write_page

    extension = read_extension(run, catalogue(), questions=questions, progress=progress.task)
    write_whole(extension.run / RECORD, json_module.dumps(extension.to_dict(), indent=1))
    write_page(extension.run / PAGE, extension_page(extension))
    return extension


def _show(extension: "Extension") -> None:
    """Print what the run gained and lost."""
    from headrace.report.extension import LENGTH_HEAD, length_rows

    show_table([*LENGTH_HEAD], length_rows(extension))
    note(f"\n{extension.verdict}")
    note(f"report: {extension.run / PAGE}")
    note(f"next:   {started_as()} export {extension.run} --to hf")
