"""What an ablation measures of a plan, and what came of it: trials, rows, tables.

A trial is a plan beside its base. Leaving each technique out of the plan comes first, for that is
what decides whether it stays; then each alone beside the plan without any; then pairs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from headrace.assemble.context import check_supported, choose_device, make_context
from headrace.core.errors import EXIT_DONE, ConfigError, HeadraceError
from headrace.core.remedy import mend
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue
from headrace.tuner.interplay import (
    ADDED,
    LEFT_OUT,
    MEMORY_MARGIN,
    PAIR,
    PAIRS,
    TABLE,
    Interplay,
    memory_of,
    pair_table,
    single_table,
    speed_of,
    stand,
)
from headrace.tuner.trial_row import UNCOUNTED

TrialNumbers = dict[str, Any]
Names = tuple[str, ...]
TitledRows = tuple[str, tuple[str, ...], list[list[str]]]
"""Title, heads, rows."""


def titled(kind: str, names: Names) -> str:
    """Render a trial's title."""
    words = {LEFT_OUT: "without", ADDED: "only", PAIR: "only"}
    return f"{words[kind]} {' + '.join(names)}"


@dataclass(frozen=True)
class AblationTrial:
    """Hold a trial: a plan beside its base.

    Args:
        kind: LEFT_OUT, ADDED or PAIR.
        names: the techniques under test.
        base: the plan beside it; None when it cannot be.
        side: the plan with the change; None likewise.
        refused: why not.
    """

    kind: str
    names: Names
    base: Plan | None
    side: Plan | None
    refused: str = ""

    @property
    def title(self) -> str:
        """Return its title, for a line of progress and for what is left."""
        return titled(self.kind, self.names)


@dataclass
class Ablation:
    """Hold the result of an ablation.

    Args:
        name: the plan's.
        techniques: those that it has.
        file: where its rows are.
        margin: the gain that counts on its device.
        rows: kind and names -> the row.
        left: measurements that were not made.
        interrupted: a signal ended it.
        exit_code: what the command ends with.
    """

    name: str
    techniques: Names
    file: Path
    margin: float
    rows: dict[tuple[str, Names], TrialNumbers] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    interrupted: bool = False
    exit_code: int = EXIT_DONE

    def of(self, kind: str) -> dict[str, TrialNumbers]:
        """Return the rows of single techniques."""
        return {names[0]: row for (what, names), row in self.rows.items() if what == kind}

    def pairs(self) -> list[Interplay]:
        """Return how the techniques of each measured pair stand to each other."""
        alone = self.of(ADDED)
        return [
            stand(row, alone.get(names[0]), alone.get(names[1]), (names[0], names[1]))
            for (kind, names), row in self.rows.items()
            if kind == PAIR
        ]

    def tables(self) -> list[TitledRows]:
        """Return the tables for a terminal; a column in which no row has anything is left out."""
        left, alone = self.of(LEFT_OUT), self.of(ADDED)
        rows = single_table(self.techniques, left, alone, self.margin)
        filled = [i for i in range(len(TABLE)) if any(row[i] for row in rows)]
        tables: list[TitledRows] = [
            (
                f"{self.name}: what each technique gains "
                "(95% intervals; above 0: a step is faster)",
                tuple(TABLE[i] for i in filled),
                [[row[i] for i in filled] for row in rows],
            )
        ]
        if pairs := self.pairs():
            title = "pairs, beside the plan without techniques"
            tables.append((title, PAIRS, pair_table(pairs)))
        return tables

    def lines(self) -> list[str]:
        """Return lines beside the tables: what to leave out, what is left, where the rows are."""
        lines, left = [], self.of(LEFT_OUT)
        timed = [row for row in left.values() if row["metrics"]]
        if timed and all(memory_of(row) is None for row in timed):
            lines.append(UNCOUNTED)
        if timed and len(self.techniques) == 1:
            lines.append("its gain on its own is the same: the plan has no other technique")
        for name, row in left.items():
            if why := row.get("different") if row.get("changes") != "learning" else "":
                lines.append(f"{name} does not compute what the plan without it does: {why}")
            if speed_of(row, self.margin) == "slower" and row["changes"] != "learning":
                lines.append(f"slower with {name}{_without(row)}")
        for (kind, names), row in self.rows.items():
            if why := row.get("refused"):
                lines.append(f"{titled(kind, names)}: {why}")
        if self.left:
            lines.append(f"left, the same command goes on: {', '.join(self.left)}")
        return [*lines, f"rows: {self.file}"]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        pairs = [
            {
                "names": p.names,
                "says": p.says,
                "why": p.why,
                **{
                    key: None if interval is None else vars(interval)
                    for key, interval in (
                        ("alone", p.alone),
                        ("both", p.both),
                        ("missed", p.missed),
                    )
                },
            }
            for p in self.pairs()
        ]
        return {
            "plan": self.name,
            "rows": list(self.rows.values()),
            "pairs": pairs,
            "left": self.left,
            "interrupted": self.interrupted,
            "file": str(self.file),
        }


def trials_of(plan: Plan, catalogue: Catalogue, pairs: bool) -> list[AblationTrial]:
    """Return every measurement of a plan, in the order in which they are worth their time.

    Args:
        plan: with its techniques.
        catalogue: techniques and families.
        pairs: two at a time, too.

    Raises:
        ConfigError: the plan has no techniques.
    """
    names = tuple(plan.techniques)
    if not names:
        raise ConfigError(f"{plan.name} has no techniques to leave out", mend("+TECHNIQUE"))

    def without(gone: Iterable[str]) -> Plan:
        return changed(plan, [f"-{name}" for name in gone], catalogue)

    trials = [_trial(LEFT_OUT, (name,), lambda: plan, partial(without, (name,))) for name in names]
    if len(names) == 1:  # the plan with it alone is the plan
        return trials
    kept: list[tuple[str, Names]] = [(ADDED, (name,)) for name in names]
    kept += [(PAIR, pair) for pair in combinations(names, 2) if pairs]
    for kind, own in kept:
        gone = [name for name in names if name not in own]
        trials.append(_trial(kind, own, partial(without, names), partial(without, gone)))
    return trials


def _trial(
    kind: str, names: Names, base: Callable[[], Plan], side: Callable[[], Plan]
) -> AblationTrial:
    """Return the trial with both plans checked against the device, or why they cannot run."""
    try:
        plans = base(), side()
        for plan in plans:
            here = make_context(plan, choose_device(plan))
            check_supported(list(plan.techniques.values()), here)
    except HeadraceError as error:
        return AblationTrial(kind, names, None, None, refused=format_error(error))
    return AblationTrial(kind, names, *plans)


def format_error(error: HeadraceError) -> str:
    """Render an error and its remedy in a line."""
    words = f"{error.message}; try: {error.remedy}" if error.remedy else error.message
    return " ".join(words.split())


def _without(row: TrialNumbers) -> str:
    """Render what a step that is slower with a technique is to be weighed against."""
    memory = memory_of(row)
    if memory is None:
        return "; its memory is not measured on this device"
    if memory < 1 - MEMORY_MARGIN:
        return f", which takes {1 - memory:.0%} less memory: worth it where memory is short"
    return f", and no less memory: --without {row['technique']}"
