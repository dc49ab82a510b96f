"""Plan the rungs of a screen of changes, and hold what came of them: successive halving.

All candidates train for a short time, the better half goes on for twice as long, and so on
(Jamieson and Talwalkar, arXiv 1502.07943; Hyperband, arXiv 1603.06560). The plan as it is trains in
every rung. Losses are compared at equal seconds: each candidate takes the steps that its measured
step time allows. A screen is no verdict: whole runs over seeds judge what wins its last rung.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf, isfinite
from statistics import fmean
from typing import Any

from headrace.core.units import format_seconds
from headrace.predict.candidates import Words

FEWEST_SCREENED = 3
"""Fewest candidates that are worth a screen: it is to find two of them."""
MOST_SCREENED = 24
"""Most candidates of a screen; the sources' order leaves the least promising ones out."""
FINALISTS = 2
"""Candidates of the last rung, at most, beside the plan as it is."""
LEAST_STEPS = 32
"""Steps of the plan as it is in the shortest first rung. Fewer show the first fall alone."""
LONGEST_SHARE = 0.5
"""Share of a whole run that the last rung may take; a longer one would be a whole run itself."""
SEEDS = (1, 2)
"""Seeds of the first rung, and of each later one. All candidates of a rung have the same."""


@dataclass(frozen=True)
class Rung:
    """Hold the size of a rung.

    Args:
        number: from 1.
        candidates: how many train in it, beside the plan as it is.
        steps: of the plan as it is.
        seeds: with how many each trains.
    """

    number: int
    candidates: int
    steps: int
    seeds: int

    def cost_s(self, step_s: float, ready_s: float) -> float:
        """Return the seconds that it takes at most, where nothing goes on from a kept state.

        Args:
            step_s: seconds of a step of what is trained.
            ready_s: seconds of building, compiling and evaluating a run.
        """
        return self.seeds * (self.candidates + 1) * (self.steps * step_s + ready_s)


@dataclass(frozen=True)
class RungRow:
    """Hold a candidate in a rung.

    Args:
        changes: words that make it from the plan as it is; empty for that plan.
        rung: number of the rung.
        steps: that it trained for with each seed, from the first on.
        seconds: that these take at its measured step time.
        losses: validation losses at their end in bits per byte, one a seed; inf has diverged.
        gap: mean difference from the losses of the plan as it is, seed for seed; above 0 is worse.
            None where one of both is not known.
        went_on: whether it was in the better half, or won the last rung; None for the plan as it
            is, and where the rung did not end.
        refused: why it has no loss, in words; "" where it has.
    """

    changes: Words
    rung: int
    steps: int
    seconds: float
    losses: tuple[float, ...] = ()
    gap: float | None = None
    went_on: bool | None = None
    refused: str = ""

    @property
    def loss(self) -> float | None:
        """Return the mean of its losses in bits per byte."""
        return fmean(self.losses) if self.losses else None


@dataclass(frozen=True)
class Screen:
    """Hold a screen of the changes of one plan.

    Args:
        baseline: words that make the plan as it is from the first plan; empty for that plan.
        rungs: as they were planned.
        rows: what trained in them.
        width: `model.dim` of the narrower model that trained in its place; None is whole.
        mup_added: the narrower model was given muP; else the plan has it.
        left_out: changes that were not screened -> why.
        stopped: why it did not begin, or ended before its last rung, in words; "" where it ended.
        minutes: whole minutes that should do for it; 0 where it ended.
    """

    baseline: Words
    rungs: tuple[Rung, ...] = ()
    rows: tuple[RungRow, ...] = ()
    width: int | None = None
    mup_added: bool = False
    left_out: tuple[tuple[Words, str], ...] = ()
    stopped: str = ""
    minutes: int = 0

    @property
    def screened(self) -> tuple[Words, ...]:
        """Return the changes that trained in the first rung."""
        return tuple(row.changes for row in self.rows if row.rung == 1 and row.changes)

    @property
    def dropped(self) -> tuple[RungRow, ...]:
        """Return the rows in which a candidate ended: of the worse half, or refused."""
        return tuple(row for row in self.rows if row.changes and row.went_on is False)

    @property
    def winners(self) -> tuple[RungRow, ...]:
        """Return the candidates that were ahead in the last rung, the best first; none before."""
        last = [row for row in self.rows if row.rung == len(self.rungs) and row.went_on]
        return tuple(sorted(last, key=lambda row: row.gap or 0.0))

    @property
    def ended(self) -> bool:
        """Return whether the last rung ended."""
        last = [row for row in self.rows if row.changes and row.rung == len(self.rungs)]
        return bool(last) and all(row.went_on is not None for row in last)

    def sentence(self) -> str:
        """Render what came of it."""
        if not self.rungs and self.stopped:
            return f"No screen of changes of learning: {self.stopped}."
        if not self.rows:
            return "A screen of changes of learning began, and no short run of it has ended."
        where = "whole-size runs"
        if self.width is not None:
            mup = "given muP" if self.mup_added else "with the plan's muP"
            where = f"runs of a model of {self.width} features, {mup}"
        words = f"A screen by short {where}: changes of learning: {len(self.screened)}"
        words += f", {len(self.dropped)} dropped, which is no verdict on them"
        if self.stopped:
            return f"{words}; {self.stopped}."
        if not self.ended:
            return f"{words}; it has not ended."
        if not self.winners:
            return f"{words}; none was ahead of the plan as it is in the last rung."
        return f"{words}; ahead in the last rung: {', '.join(map(_named, self.winners))}."

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "ended": self.ended, "sentence": self.sentence()}


def _named(row: RungRow) -> str:
    return f"{' '.join(row.changes)} by {-(row.gap or 0.0):.3g} bits per byte"


def sizes(candidates: int) -> Iterator[int]:
    """Yield the number of candidates of each rung: halves of the one before, rounded up."""
    yield candidates
    while candidates > FINALISTS:
        candidates = ceil(candidates / 2)
        yield candidates


def rungs_of(candidates: int, first_steps: int) -> tuple[Rung, ...]:
    """Return the rungs of so many candidates, the first of which has so many steps."""
    return tuple(
        Rung(index + 1, size, first_steps << index, SEEDS[min(index, len(SEEDS) - 1)])
        for index, size in enumerate(sizes(candidates))
    )


def cost_s(rungs: Sequence[Rung], step_s: float, ready_s: float) -> float:
    """Return the seconds of all rungs, and of timing a step of each candidate before them."""
    probes_s = (rungs[0].candidates + 1) * ready_s
    return probes_s + sum(rung.cost_s(step_s, ready_s) for rung in rungs)


def longest_that_fit(
    candidates: int, budget_s: float, step_s: float, ready_s: float, run_steps: float
) -> tuple[Rung, ...]:
    """Return the longest rungs within a budget; none where even the shortest are too long.

    The steps of the first rung are a power of two times `LEAST_STEPS`, so that a clock that differs
    a little from one call to the next changes nothing.

    Args:
        candidates: how many there are.
        budget_s: seconds for all.
        step_s: see `Rung.cost_s`.
        ready_s: likewise.
        run_steps: steps of a whole run; inf is not known.
    """
    steps, longest = LEAST_STEPS, ()
    while True:
        rungs = rungs_of(candidates, steps)
        too_long = rungs[-1].steps > LONGEST_SHARE * run_steps
        if too_long or cost_s(rungs, step_s, ready_s) > budget_s:
            return longest
        longest, steps = rungs, 2 * steps


def gap_of(losses: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Return the mean difference of losses, seed for seed; None where a side has none.

    What has diverged is infinitely worse than what has not.
    """
    pairs = list(zip(losses, baseline, strict=False))
    if not pairs:
        return None
    if all(isfinite(a) and isfinite(b) for a, b in pairs):
        return fmean(a - b for a, b in pairs)
    return inf if any(not isfinite(a) for a, _ in pairs) else -inf


def better_half(gaps: Mapping[Words, float | None], rung: Rung, last: int) -> set[Words]:
    """Return the candidates that go on: the better half, or those ahead in the last rung.

    Args:
        gaps: candidate -> its gap in this rung, in the sources' order, which decides ties.
        rung: the rung that ended.
        last: number of the last rung.
    """
    known = {words: gap for words, gap in gaps.items() if gap is not None and gap < inf}
    if rung.number == last:
        return {words for words, gap in known.items() if gap < 0}
    ranked = sorted(known, key=lambda words: known[words])
    return {*ranked[: ceil(rung.candidates / 2)]}


def format_row(row: RungRow) -> str:
    """Render a row as a line of text."""
    name = " ".join(row.changes) or "the plan as it is"
    if row.loss is None:
        return f"rung {row.rung}: {name}: {row.refused}"
    words = f"rung {row.rung}: {name}: {row.loss:.4g} bits per byte after {row.steps:,} steps"
    words += f" ({format_seconds(row.seconds)})"
    words += "" if not row.changes or row.gap is None else f", {row.gap:+.3g}"
    return words + {True: ", goes on", False: ", dropped", None: ""}[row.went_on]
