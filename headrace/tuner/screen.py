"""Find which changes of learning are worth whole runs: a screen by short ones (rungs.py).

All that the sources propose train for a short part of a run, the better half for twice as long, and
so on; what is ahead of the plan as it is in the last rung is judged by whole runs over seeds, as
before (learning_trials.py). The rungs take half of what the minutes leave for learning, less where
two pairs of whole runs need more, and no rung begins that may not end in time. Their sizes follow
from the minutes and the measured step, so the same command goes on where it was.

Where whole-size rungs do not fit, or the plan has muP, a narrower model trains in the plan's place,
under muP, for as many steps as the whole one would have taken in the same seconds. What muP cannot
carry, as another optimizer's rate, is left to whole runs. So is what changes its steps on the way,
and what a part of a run cannot tell from the plan as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from typing import Any

from headrace.core.units import format_seconds
from headrace.plan.changes import difference
from headrace.plan.plan import Plan
from headrace.predict.candidates import Words
from headrace.tuner import rungs
from headrace.tuner.prefix import Prefixes, shrunk, stable_steps, timed_as
from headrace.tuner.proposals import Proposal, added_techniques
from headrace.tuner.readings import Reading
from headrace.tuner.rungs import Rung, RungRow, Screen
from headrace.tuner.running import PAIRS, Tuning
from headrace.tuner.store import fingerprint

DIVIDES = (2, 4)
"""By what the width of a proxy is divided, the widest first."""
PATIENT, LEAST_S = 4.0, 120.0
"""Ratio to its predicted seconds after which a short run is given up, and the seconds that it has
in any case."""
RECUTS = "recut"
"""Socket of techniques that cut rows otherwise from step to step."""


@dataclass(frozen=True)
class _Setup:
    """Hold how a screen goes: its rungs, and by how much the model is narrowed; 1 is whole."""

    rungs: tuple[Rung, ...]
    divide: int


class _Screening:
    """Run one screen; `tuning.screens` has what is known of it at each moment."""

    def __init__(self, tuning: Tuning, prefixes: Prefixes, waiting: Sequence[Proposal]) -> None:
        assert tuning.pool is not None
        self.tuning, self.prefixes, self.best = tuning, prefixes, tuning.pool.best.plan
        self.waiting = {difference(self.best, one.plan): one for one in waiting}
        self.plans: dict[Words, Plan] = {}
        self.step_s: dict[Words, float] = {}
        self.ready_s = self.proxy_s = 0.0
        tuning.screens.append(Screen(difference(tuning.first, self.best)))

    @property
    def screen(self) -> Screen:
        """Return what is known so far."""
        return self.tuning.screens[-1]

    def note(self, **fields: Any) -> None:
        """Write down what became known."""
        self.tuning.screens[-1] = replace(self.screen, **fields)

    def run(self) -> list[Proposal]:
        """Return what is worth whole runs: the winners, and then what was not screened."""
        base_s, self.ready_s = self.time(self.best)
        if base_s is None:
            self.note(stopped="a step of the plan as it is could not be timed")
        setup = None if base_s is None else self.choose(base_s)
        if base_s is None or setup is None or not self.prepare(setup, base_s):
            self.tuning.note_line(f"       {self.screen.sentence()}")
            return [*self.waiting.values()]
        live = [words for words in self.plans if words]
        for rung in self.screen.rungs:
            on = None
            if self.tuning.left_s() >= rung.cost_s(self.proxy_s, self.ready_s):
                on = self.climb(rung, live, base_s)
            if on is None:
                why = f"time was up before the end of rung {rung.number}: --minutes {self.minutes}"
                self.note(stopped=f"{why}, and the same command goes on", minutes=self.minutes)
                break
            live = on
            if not live:
                break
        if not self.screen.stopped:
            self.prefixes.keep(())
        self.tuning.note_line(f"       {self.screen.sentence()}")
        gone = {row.changes for row in self.screen.dropped}
        ahead = self.ahead(live)
        first = [self.waiting[words] for words in ahead]
        rest = [one for words, one in self.waiting.items() if words not in {*gone, *ahead}]
        return [*first, *rest]

    def ahead(self, live: Sequence[Words]) -> list[Words]:
        """Return those that went on, by their gaps in the last rung that ended, the best first."""
        gaps = {row.changes: row.gap or 0.0 for row in self.screen.rows if row.went_on}
        return sorted(live, key=lambda words: gaps.get(words, 0.0))

    # --- what is trained -----------------------------------------------------------------------

    def time(self, plan: Plan) -> tuple[float | None, float]:
        """Return the seconds of a step of a plan, and those of building and timing it."""
        steps = timed_as(plan)
        since_s, left_s = self.tuning.store.spent_s, self.tuning.left_s()
        limit_s = max(0.0, min(left_s, max(LEAST_S, left_s / 4)))
        reading = self.tuning.store.once(
            {"step_of": fingerprint(steps)},
            partial(self.prefixes.time, plan, limit_s),
            limit_s=limit_s,
            repeat=False,
        )
        seconds = reading.seconds[0] if reading.seconds else None
        return seconds, self.tuning.store.spent_s - since_s

    @property
    def minutes(self) -> int:
        """Return the whole minutes in which all rungs end, and two pairs of runs behind them."""
        needs_s = rungs.cost_s(self.screen.rungs, self.proxy_s, self.ready_s)
        return self.minutes_for(needs_s)

    def minutes_for(self, needs_s: float) -> int:
        """Return the whole minutes in which so many seconds are what a screen may take."""
        rest_s = max(2 * needs_s, needs_s + PAIRS * (self.tuning.longest_s or 0.0))
        return max(ceil(rest_s / (1 - self.tuning.share) / 60), int(self.tuning.minutes_s / 60) + 1)

    def choose(self, base_s: float) -> _Setup | None:
        """Return the rungs that fit; None where none do, which says what they would need.

        Whole-size rungs of all candidates come first, then those of a narrower model, then
        whole-size ones of fewer candidates. A plan with muP begins with the narrower model.
        """
        tuning, ready_s = self.tuning, self.ready_s
        rest_s = (1 - tuning.share) * tuning.minutes_s
        budget_s = min(rest_s / 2, rest_s - PAIRS * (tuning.longest_s or 0.0), tuning.left_s())
        run_s = tuning.longest_s
        run_steps = inf if run_s is None else run_s / base_s
        whole = min(len(self.waiting), rungs.MOST_SCREENED)
        narrow = self.tuning.sources.narrowed
        has_mup = (one := narrow(self.best, DIVIDES[0])) is not None and (
            {*one.techniques} == {*self.best.techniques}
        )
        for divide in (*DIVIDES, 1) if has_mup else (1, *DIVIDES):
            self.proxy_s = base_s
            if divide > 1:
                plan = narrow(self.best, divide)
                proxy_s = None if plan is None else self.time(plan)[0]
                if proxy_s is None:
                    continue
                self.proxy_s = proxy_s
            fit = rungs.longest_that_fit(whole, budget_s, self.proxy_s, ready_s, run_steps)
            if fit:
                return _Setup(fit, divide)
        self.proxy_s, fewer = base_s, whole
        while (fewer := fewer // 2) >= rungs.FEWEST_SCREENED:
            if fit := rungs.longest_that_fit(fewer, budget_s, base_s, ready_s, run_steps):
                return _Setup(fit, 1)
        shortest = rungs.rungs_of(rungs.FEWEST_SCREENED, rungs.LEAST_STEPS)
        if shortest[-1].steps > rungs.LONGEST_SHARE * run_steps:
            self.note(stopped="a whole run is hardly longer than the shortest rungs")
            return None
        needs_s = rungs.cost_s(shortest, base_s, ready_s)
        minutes = self.minutes_for(needs_s)
        why = f"the shortest rungs of {rungs.FEWEST_SCREENED} changes take "
        why += f"{format_seconds(needs_s)}, and {format_seconds(max(0.0, budget_s))} are theirs: "
        self.note(stopped=f"{why}--minutes {minutes} would do", minutes=minutes)
        return None

    def prepare(self, setup: _Setup, base_s: float) -> bool:
        """Choose the candidates, and time a step of each; return whether they are enough.

        What cannot be screened says why.
        """
        narrow, first = self.tuning.sources.narrowed, setup.rungs[0]
        plan = self.best if setup.divide == 1 else narrow(self.best, setup.divide)
        assert plan is not None, "its step was timed"
        self.plans, self.step_s = {(): plan}, {(): base_s}
        left_out: list[tuple[Words, str]] = []
        rows: list[RungRow] = []
        same = fingerprint(shrunk(plan, first.steps, first.steps))
        for words, one in self.waiting.items():
            part = one.plan if setup.divide == 1 else narrow(one.plan, setup.divide)
            if part is None:
                left_out.append((words, "muP carries no rate over for it"))
            elif _steps_differ(self.best, one.plan):
                left_out.append((words, "its steps change on the way, and are not timed by a few"))
            elif len(self.plans) > first.candidates:
                left_out.append((words, "the minutes are for those that promise more"))
            elif self.steps_of(part, first, base_s, base_s) == same:
                left_out.append((words, "a part of a run cannot tell it from the plan as it is"))
            else:
                step_s, _ = self.time(one.plan)
                if step_s is None:
                    why = "its step could not be timed"
                    rows.append(RungRow(words, 1, 0, 0.0, went_on=False, refused=why))
                    continue
                self.plans[words], self.step_s[words] = part, step_s
        width = None if setup.divide == 1 else plan.model.dim
        added = width is not None and {*plan.techniques} != {*self.best.techniques}
        self.note(rows=tuple(rows), width=width, mup_added=added, left_out=tuple(left_out))
        if (number := len(self.plans) - 1) < rungs.FEWEST_SCREENED:
            self.note(stopped=f"{number} of {len(self.waiting)} changes can be screened")
            return False
        self.note(rungs=rungs.rungs_of(number, first.steps))
        return True

    def steps_of(self, plan: Plan, rung: Rung, base_s: float, step_s: float) -> str:
        """Return the hash of what a plan would train in a rung, by the seconds of its step."""
        steps = round(rung.steps * base_s / step_s)
        return fingerprint(shrunk(plan, steps, steps))

    # --- a rung --------------------------------------------------------------------------------

    def climb(self, rung: Rung, live: Sequence[Words], base_s: float) -> list[Words] | None:
        """Train all that are left in a rung; return those that go on, or None if time was up."""
        tuning, last, names = self.tuning, self.screen.rungs[-1].number, ((), *live)
        seconds, shortest_s = rung.steps * base_s, self.screen.rungs[0].steps * base_s
        tuning.note_line(
            f"       rung {rung.number} of {last}: {len(live)} changes, each for the "
            f"{format_seconds(seconds)} of {rung.steps:,} steps, seeds: {rung.seeds}"
        )
        steps = {words: max(2, round(seconds / self.step_s[words])) for words in names}
        parts = {
            words: shrunk(
                self.plans[words], steps[words], max(2, round(shortest_s / self.step_s[words]))
            )
            for words in names
        }
        losses: dict[Words, list[float]] = {words: [] for words in names}
        refused: dict[Words, str] = {}
        goes_on: set[Words] | None = None
        rows: list[RungRow] = []
        seeds = range(tuning.first.seed, tuning.first.seed + rung.seeds)
        ended = False
        try:
            ended = self.train_all(rung, parts, seeds, losses, refused)
        finally:
            gaps = {
                words: None if words in refused else rungs.gap_of(losses[words], losses[()])
                for words in live
            }
            if ended:
                goes_on = rungs.better_half(gaps, rung, last)
            for words in names:
                if losses[words] or words in refused:
                    took_s = steps[words] * self.step_s[words]
                    on = words in goes_on if words and goes_on is not None else None
                    why, each = refused.get(words, ""), tuple(losses[words])
                    row = RungRow(
                        words, rung.number, steps[words], took_s, each, gaps.get(words), on, why
                    )
                    rows.append(row)
            self.note(rows=(*self.screen.rows, *rows))
        for row in rows:
            tuning.note_line(f"       {rungs.format_row(row)}")
        if goes_on is None:
            return None
        live = [words for words in live if words in goes_on]
        self.prefixes.keep([parts[w].replaced(seed=seed) for w in ((), *live) for seed in seeds])
        return live

    def train_all(
        self,
        rung: Rung,
        parts: Mapping[Words, Plan],
        seeds: Sequence[int],
        losses: Mapping[Words, list[float]],
        refused: dict[Words, str],
    ) -> bool:
        """Train the parts of a rung into `losses` and `refused`; return whether time sufficed.

        Those whose decay begins first come first, so that others go on from their states.
        """
        limit_s = max(LEAST_S, PATIENT * (rung.steps * self.proxy_s + self.ready_s))
        goes_on = rung.number < self.screen.rungs[-1].number
        order = sorted(parts, key=lambda words: stable_steps(parts[words]))
        for seed in seeds:
            for words in order:
                if words in refused:
                    continue
                if self.tuning.left_s() <= 0:
                    return False
                part = parts[words].replaced(seed=seed)
                reading = self.train(part, limit_s, goes_on=goes_on)
                if reading.refused:
                    refused[words] = reading.refused.splitlines()[0]
                else:
                    losses[words].append(reading.losses[-1])
        return True

    def train(self, plan: Plan, limit_s: float, *, goes_on: bool) -> Reading:
        """Return the reading of a part of a run, from the file or anew."""
        return self.tuning.store.once(
            {"part": fingerprint(plan)},
            partial(self.prefixes.train, plan, limit_s, goes_on=goes_on),
            limit_s=limit_s,
            repeat=False,
        )


def _steps_differ(before: Plan, after: Plan) -> bool:
    """Return whether a change makes steps of one run differ in what they cost."""
    recuts = any(RECUTS in technique.composes for technique in added_techniques(before, after))
    return recuts or len(after.batches.stages) > len(before.batches.stages)


def screened(
    tuning: Tuning, waiting: Sequence[Proposal], prefixes: Prefixes | None
) -> tuple[list[Proposal], set[Words]]:
    """Return the changes that are worth whole runs, the best first, and those that were dropped.

    Args:
        tuning: what is known; gets the screen.
        waiting: changes of the best so far, in the order of what they promise.
        prefixes: trains parts of runs; without it there is no screen.
    """
    few = len(waiting) < rungs.FEWEST_SCREENED
    if prefixes is None or few or tuning.share >= 1 or tuning.left_s() <= 0:
        return list(waiting), set()
    screening = _Screening(tuning, prefixes, waiting)
    worth = screening.run()
    kept = {difference(screening.best, one.plan) for one in worth}
    return worth, {*screening.waiting} - kept
