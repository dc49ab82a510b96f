"""This module holds the verb `data mix`: how much of each source a run will read."""

from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import Json, Overrides, PlanName, With, Without
from headrace.cli.terminal import exit_codes, make_progress, show_json, show_table
from headrace.core.errors import ConfigError
from headrace.core.loading import loading
from headrace.core.remedy import mend

if TYPE_CHECKING:
    from headrace.data.mix_count import MixCount, SourceShare
    from headrace.plan.plan import Plan

HEAD = ["source", "stage", "tokens read", "share", "of tokens", "epochs", "worth, fresh tokens"]


def mix(
    plan: PlanName = "demo",
    overrides: Overrides = None,
    *,
    with_: With = None,
    without: Without = None,
    json: Json = False,
) -> None:
    """Count what a run reads of each source, by stage, and how often it repeats."""
    with exit_codes(json):
        with loading():
            from headrace.cli.plans import named_plan
            from headrace.data.ingest import prepare
            from headrace.data.mix_count import count_mix
            from headrace.data.mixture import run_rows
            from headrace.data.rows import Cut
            from headrace.train.interrupts import Preparing
        progress = make_progress(json)
        try:
            with Preparing():
                wanted = named_plan(plan, overrides, with_, without, verb="data mix")
                if run_rows(wanted) is None:
                    raise ConfigError(
                        "nothing in the plan says how many tokens the run reads: its goal is no "
                        "count of steps or tokens, and its schedule has no end",
                        mend("goal.steps=1000"),
                    )
                _refuse_one_pool(wanted)
                prepared = prepare(wanted, progress=progress.task)
        finally:
            progress.close()
        tokens = [shards.tokens for shards in prepared.train]
        counted = count_mix(wanted, tokens, Cut(prepared.train, wanted.data.sequence_length).units)
        assert counted is not None, "its rows are known"
        if json:
            show_json(counted.to_dict() | {"sources": [_valued(one) for one in counted.sources]})
        else:
            _show(wanted, counted)


def _refuse_one_pool(plan: "Plan") -> None:
    """Refuse to count sources whose rows a curriculum orders all together.

    Raises:
        ConfigError: it does.
    """
    data = plan.data
    is_mixed = data.mixture is not None or data.weights is not None
    if data.curriculum is not None and len(plan.source_list) > 1 and not is_mixed:
        raise ConfigError(
            "data.curriculum orders the rows of all sources together by score, and no mixture says "
            "how much of each is read",
            mend("data.mixture.temperature=1"),
        )


def prepared_mix(plan: "Plan") -> "MixCount | None":
    """Return how much of each source a run reads, where its data lies prepared; else None.

    Rows are the baseline's cuts of each source's tokens. It is None too where a source has none,
    which a run refuses. Only manifests are read.
    """
    from headrace.data.ingest import folder_of
    from headrace.data.mix_count import count_mix
    from headrace.data.shards import Shards

    try:
        folder = folder_of(plan)
        parts = [folder / f"train-{number:02d}" for number in range(len(plan.source_list))]
        tokens = [Shards.open(part).tokens for part in parts] if folder.is_dir() else []
    except (ConfigError, OSError):  # whoever prepares it says what is wrong
        return None
    units = [(count - 1) // plan.data.sequence_length for count in tokens]
    return count_mix(plan, tokens, units) if units and all(units) else None


def _worth(one: "SourceShare") -> float:
    """Return how many fresh tokens would teach as much as what is read of a source."""
    from headrace.predict.scaling import REPEATED, worth

    return worth(one.tokens, one.source_tokens, REPEATED)


def _valued(one: "SourceShare") -> dict[str, Any]:
    """Return a source as JSON values, with the fresh tokens that it is worth."""
    from dataclasses import asdict

    return {**asdict(one), "worth_tokens": _worth(one)}


def _show(plan: "Plan", counted: "MixCount") -> None:
    """Print the table of a count, and the warnings about sources that are read too often."""
    from headrace.core.units import format_count
    from headrace.data.mix_count import repetition

    staged = len(counted.stages) > len(counted.sources)
    rows = [
        [
            one.source,
            "all" if one.stage is None else str(one.stage),
            format_count(one.tokens),
            f"{one.share:.2%}",
            format_count(one.source_tokens),
            f"{one.epochs:.2f}",
            format_count(_worth(one)) if one.stage is None else "",
        ]
        for one in (*counted.sources, *(counted.stages if staged else ()))
    ]
    about = "" if counted.exact else "; the last, partial epoch by the sources' sizes"
    show_table(HEAD, rows, f"{plan.name}: {format_count(counted.tokens)} tokens{about}")
    if staged:
        begins = ", ".join(
            f"{number} at token {begin:,}" for number, begin in enumerate(counted.begins)
        )
        print(f"stages begin: {begins}")
    for one in counted.repeated:
        print(repetition(one))
