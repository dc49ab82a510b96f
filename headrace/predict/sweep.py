"""Rank hundreds of layouts and technique sets of a plan by what the planner predicts.

Every single change of the start is predicted, then every change of the best of those, and so on
while a change is left. Most changes gain beside each other, and a plan that lacks many of them is
many levels away from the best. What is left of the limit goes to a beam search around that path. A
promising plan is not only a fast one. A technique that saves memory costs time until a larger
micro-batch uses it, so half of the beam lies on the front of time and peak. A plan that is
predicted not to fit is never ranked, but it may lead to one that fits.

A prediction is no measurement: what the sweep ranks first is what a tuner measures first. Where a
technique does not say yet what it does to time, plans with it have no time. Those with one such
change are listed apart, for a tuner to measure. Changes that are predicted to change nothing are
listed apart too.
"""

import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.limits import SweepAim
from headrace.core.units import format_bytes, format_count, format_seconds
from headrace.costs.links import known_between, probe_command
from headrace.costs.machine import Machine
from headrace.plan.changes import parse
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context
from headrace.predict.calibration import Calibration
from headrace.predict.candidates import Asking, Candidate, Words, silent
from headrace.predict.ranks import start_words

TIGHT_COSTS = 1.05
"""Factor on the step time of a plan that fits tightly, since it may not fit after all: it is ranked
like one that is 5% slower."""
SAME_TIME, SAME_PEAK = 1e-3, 5e-3
"""Relative differences of step time and of peak memory below which two plans count as the same."""
AS_FAST = 1.005
"""Largest ratio to the start's step time at which a plan still counts as equally fast."""
FITS = {"yes": "yes", "tight": "tightly", "no": "no"}
HEAD = ["rank", "step", "tokens/s", "gain", "whole run", "peak", "fits", "changes"]
LISTED = 8
"""Largest number of changes of unknown time that a reader is shown."""
NO_PRICE = (
    "there is no price, so plans are ranked by time alone and no dollars are told: "
    "hardware.dollars_per_hour=PRICE, of all devices of the run"
)
"""What a sweep for money says where the plan has no price."""


@dataclass(frozen=True)
class Sweep:
    """Hold the result of a sweep.

    Args:
        aim: what the plans are ranked by.
        start: the plan that the sweep began with.
        ranked: plans whose time is predicted and that fit, the best first. The start is among them.
            It is last if it does not fit, and absent if its time is unavailable.
        unknown: single changes that fit and whose time is not predicted, the smallest peak first.
        idle: single changes that are predicted to change nothing.
        asked: number of plans that were predicted.
        refused: reason -> number of plans that cannot run there or contradict themselves.
        too_large: number of plans that do not fit.
        unpriced: technique that is not `timed`, or another reason -> number of plans without a
            time.
        seconds: seconds that the sweep took.
        layouts_refused: each single change of the mesh that cannot run there -> why.
        stopped: whether time ended the sweep before it had predicted what it would have.
        linked: False where a probe by all ranks together would tell how fast their links are.
    """

    aim: SweepAim
    start: Candidate
    ranked: list[Candidate]
    unknown: list[Candidate]
    idle: list[Candidate]
    asked: int
    refused: Mapping[str, int]
    too_large: int
    unpriced: Mapping[str, int]
    seconds: float
    layouts_refused: Mapping[Words, str] = field(default_factory=dict)
    stopped: bool = False
    linked: bool = True

    def gain(self, candidate: Candidate) -> float | None:
        """Return how much faster than the start a candidate is; None where a time is missing.

        It is a share: 0.1 is 10% more tokens a second.
        """
        one, two = self.start.prediction.time.step_s, candidate.prediction.time.step_s
        return one / two - 1 if one and two else None


def sweep(
    plan: Plan,
    context: Context,
    machine: Machine,
    catalogue: Catalogue,
    aim: SweepAim = "time",
    *,
    width: int = 4,
    depth: int = 8,
    limit: int = 600,
    seconds: float = math.inf,
    learning: bool = False,
    calibration: Calibration | None = None,
) -> Sweep:
    """Rank the plans that changes of a plan can make.

    Args:
        plan: the start.
        context: where it would run.
        machine: the rates of the device there.
        catalogue: the techniques that exist.
        aim: "time" and "money" rank by the time of a step, whose order a price does not change.
            "memory" ranks by the peak among plans as fast as the start, and puts slower ones after
            these.
        width: number of plans that are changed further at each level of the beam search.
        depth: number of levels of the first search, which is how many single changes its end may be
            away from the start. The beam search has one level less.
        limit: largest number of plans that are predicted.
        seconds: after so many no further plan is.
        learning: whether techniques that change what is learned may be changed too.
        calibration: correction by measured steps of one plan there; None without.

    Raises:
        ConfigError, UnsupportedError: the start itself cannot run there.
    """
    machine = machine.joined(plan.hardware.network_gb_per_s)
    asking = Asking(plan, context, machine, catalogue, learning, calibration, layouts=True)
    search = _Search(asking, aim, limit, seconds)
    for wide in [1] * depth + [width] * (depth - 1):
        if not search.widen(wide):
            break
    return search.result()


@dataclass
class _Search:
    """Hold the plans of a sweep by their changes, and counts of the rest."""

    asking: Asking
    aim: SweepAim
    limit: int
    seconds: float
    seen: dict[Words, Candidate | None] = field(default_factory=dict)
    """Changes -> the candidate that they make; None where it is not changed further."""
    grown: set[Words] = field(default_factory=set)
    unknown: list[Candidate] = field(default_factory=list)
    idle: list[Candidate] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    unpriced: Counter[str] = field(default_factory=Counter)
    layouts_refused: dict[Words, str] = field(default_factory=dict)
    stopped: bool = False
    asked: int = 0

    def __post_init__(self) -> None:
        self.began_s = time.perf_counter()
        self.start = self.asking.answer(self.asking.start)
        self.seen[()] = self.start
        self.key = _order(self.aim, self.start)

    def widen(self, width: int) -> bool:
        """Predict every single change of the most promising plans; return whether any were left."""
        first = not self.grown
        beam = [self.start] if first else self.beam(width)
        for parent in beam:
            self.grown.add(parent.changes)
            for words in self.asking.singles(parent.plan):
                self.stopped = time.perf_counter() - self.began_s > self.seconds
                if self.stopped or self.asked >= self.limit:
                    return False
                child = self.ask(parent, words)
                if child is not None:
                    self.sort_in(parent, child, first=first)
        return bool(beam)

    def ask(self, parent: Candidate, words: Words) -> Candidate | None:
        """Return the candidate that a change makes, mended by its error's remedy if need be.

        It is None where the change is refused, or where the plan was predicted before.
        """
        try:
            return self.fresh(parent, words)
        except HeadraceError as error:
            for more in self.asking.mended(words, error):
                with suppress(HeadraceError):
                    return self.fresh(parent, more)
            self.refused[why := error.message.splitlines()[0]] += 1
            if parent is self.start and any(word.startswith("mesh.") for word in words):
                self.layouts_refused[words] = why
            return None

    def fresh(self, parent: Candidate, words: Words) -> Candidate | None:
        """Return the candidate that a change makes; None where the plan was predicted before.

        Other words that make the same plan count too.

        Raises:
            ConfigError, UnsupportedError: the changed plan contradicts itself, or cannot run there.
        """
        changes, plan = self.asking.changed(parent.plan, words)
        if changes in self.seen:
            return None
        self.seen[changes] = None
        new_candidate = self.asking.predict(changes, plan)
        self.asked += 1
        return new_candidate

    def sort_in(self, parent: Candidate, child: Candidate, *, first: bool) -> None:
        """Keep a new candidate for the ranking, or list it apart."""
        kept = child.prediction.time.step_s is not None and not _same(parent, child)
        self.seen[child.changes] = child if kept else None
        if child.prediction.time.step_s is None:
            self.unpriced.update(silent(child.plan) or [child.prediction.time.unknown])
            if first and child.prediction.memory.fits != "no":
                self.unknown.append(child)
        elif not kept and first:
            self.idle.append(child)

    def beam(self, width: int) -> list[Candidate]:
        """Return the candidates to change further.

        Half of them are the best. The others are spread evenly over the front of time and peak.
        """
        left = [c for c in self.known() if c.changes not in self.grown]
        best = sorted(left, key=self.key)[: (width + 1) // 2]
        front = [c for c in _front(left) if c not in best]
        more = width - len(best)
        every = max(1, len(front) / max(1, more))
        return best + [front[int(i * every)] for i in range(min(more, len(front)))]

    def known(self) -> list[Candidate]:
        """Return the candidates that have a time and no needless change."""
        timed = [
            c for c in self.seen.values() if c is not None and c.prediction.time.step_s is not None
        ]
        return [c for c in timed if not self.needless(c)]

    def needless(self, candidate: Candidate) -> bool:
        """Return whether a candidate is predicted to be the same without some of its words.

        One word is left out at a time, or all words of one technique.
        """
        words = candidate.changes
        left_out = [{word} for word in words]
        for name in (word[1:] for word in words if word[0] == "+"):
            left_out.append({w for w in words if w[1:] == name or f".{name}." in w})
        fewer = (self.seen.get(tuple(w for w in words if w not in out)) for out in left_out)
        return any(one is not None and _same(one, candidate) for one in fewer)

    def result(self) -> Sweep:
        known = self.known()
        ranked = [c for c in known if c.prediction.memory.fits != "no" or c is self.start]
        return Sweep(
            self.aim,
            self.start,
            sorted(ranked, key=self.key),
            sorted(self.unknown, key=lambda c: (c.prediction.memory.peak_bytes, c.changes)),
            sorted(self.idle, key=lambda c: c.changes),
            self.asked,
            self.refused,
            sum(c.prediction.memory.fits == "no" for c in known),
            self.unpriced,
            time.perf_counter() - self.began_s,
            self.layouts_refused,
            self.stopped,
            self.linked(),
        )

    def linked(self) -> bool:
        """Return whether rates of the links between all ranks are known, or are none of a GPU's."""
        machine, plan = self.asking.machine, self.start.plan
        ranks, on_gpu = plan.mesh.ranks, self.asking.context.device == "cuda"
        if not on_gpu or plan.hardware.network_gb_per_s is not None:
            return True
        return known_between(machine.links, machine.name) >= ranks


def fastest_first(candidate: Candidate) -> tuple[Any, ...]:
    """Return the sort key of a candidate, the fastest that fits first."""
    prediction = candidate.prediction
    few = (len(candidate.changes), candidate.changes)
    if prediction.memory.fits == "no":
        return (True, prediction.memory.peak_bytes, *few)
    step_s = prediction.time.step_s or float("inf")
    return (False, step_s * (TIGHT_COSTS if prediction.memory.fits == "tight" else 1.0), *few)


def _order(aim: SweepAim, start: Candidate) -> Callable[[Candidate], tuple[Any, ...]]:
    """Return the sort key that ranks candidates with a time, the best first."""
    as_fast = AS_FAST * (start.prediction.time.step_s or float("inf"))

    def key(candidate: Candidate) -> tuple[Any, ...]:
        prediction, few = candidate.prediction, (len(candidate.changes), candidate.changes)
        wrong, cost, *_ = plainly = fastest_first(candidate)
        if wrong or aim != "memory":
            return plainly
        slower = (prediction.time.step_s or float("inf")) > as_fast
        return (False, slower, prediction.memory.peak_bytes * (cost if slower else 1.0), cost, *few)

    return key


def _same(one: Candidate, two: Candidate) -> bool:
    """Return whether two candidates are predicted to take the same time and the same peak."""
    a, b = one.prediction, two.prediction
    if a.time.step_s is None or b.time.step_s is None:
        return False
    nearer = abs(b.memory.peak_bytes / a.memory.peak_bytes - 1) < SAME_PEAK
    return nearer and abs(b.time.step_s / a.time.step_s - 1) < SAME_TIME


def _front(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates to which no other is both faster and smaller, the smallest first."""
    frontier: list[Candidate] = []
    least = float("inf")
    for candidate in sorted(
        candidates, key=lambda c: (c.prediction.time.step_s, c.prediction.memory.peak_bytes)
    ):
        if candidate.prediction.memory.peak_bytes < least:
            least = candidate.prediction.memory.peak_bytes
            frontier.append(candidate)
    return frontier[::-1]


# --- for a reader ----------------------------------------------------------------------------


def table(result: Sweep, most: int = 12) -> list[list[str]]:
    """Return the rows of a table under `HEAD`.

    They are the best plans, and the start whatever its rank.

    Args:
        result: the result of a sweep.
        most: largest number of plans, beside the start.
    """
    rows = []
    for rank, candidate in enumerate(result.ranked, 1):
        if rank <= most or candidate is result.start:
            rows.append([str(rank), *_cells(result, candidate)])
    if result.start not in result.ranked:
        rows.append(["-", *_cells(result, result.start)])
    return rows


def _cells(result: Sweep, candidate: Candidate) -> list[str]:
    seen, gain = candidate.prediction, result.gain(candidate)
    whole = "" if seen.run.hours is None else format_seconds(3600 * seen.run.hours)
    price = "" if seen.run.dollars is None else f", ${seen.run.dollars:,.2f}"
    return [
        "" if seen.time.step_s is None else format_seconds(seen.time.step_s),
        "" if seen.time.tokens_per_s is None else format_count(seen.time.tokens_per_s),
        "" if gain is None else f"{gain:+.1%}",
        whole + price,
        format_bytes(seen.memory.peak_bytes),
        FITS[seen.memory.fits],
        " ".join(candidate.changes) or "(the plan as it is)",
    ]


def format_summary(result: Sweep) -> str:
    """Return for a reader what the table leaves out: counts, reasons and plans without a time."""
    rate = result.asked / max(result.seconds, 1e-9)
    refused = sum(result.refused.values())
    lines = [
        f"{result.asked} plans predicted in {format_seconds(result.seconds)} "
        f"({rate:.0f} a second): {len(result.ranked)} ranked, {refused} more cannot run, "
        f"{result.too_large} do not fit{', stopped by time' if result.stopped else ''}",
    ]
    for words, why in [*result.layouts_refused.items()][:LISTED]:
        lines.append(f"impossible: {' '.join(words)}: {why}")
    if result.aim == "money" and result.start.plan.hardware.dollars_per_hour is None:
        lines.append(NO_PRICE)
    if result.unpriced:
        names = ", ".join(f"{n} {c}" for n, c in Counter(result.unpriced).most_common(LISTED))
        lines.append(f"time not predicted, by what does not say it: {names}")
    if result.unknown:
        words = "; ".join(" ".join(c.changes) for c in result.unknown[:LISTED])
        more = max(0, len(result.unknown) - LISTED)
        lines.append(f"only a measurement tells: {words}" + (f"; {more} more" if more else ""))
    return "\n".join(lines)


def command(
    result: Sweep,
    plan: str,
    overrides: Sequence[str],
    with_: Sequence[str],
    without: Sequence[str],
) -> str:
    """Return the shell command that runs the plan of the first rank.

    It keeps the words that the sweep's own plan was given in. Where no plan has a time it is a
    command that measures: the tuner, or of several ranks, which the tuner does not take, the probe
    of their links if that is missing, else a run. It is "" where no ranked plan fits.

    Args:
        result: the result of a sweep.
        plan: the plan as it was written on the command line.
        overrides: `key=value` words beside it.
        with_: techniques that were added to it by --with.
        without: techniques that were removed from it by --without.
    """
    best = result.ranked[0] if result.ranked else None
    if best is not None and best.prediction.memory.fits == "no":
        return ""
    changes = parse(() if best is None else best.changes)
    keys = {word.partition("=")[0] for word in changes.overrides}
    first = result.start.plan if best is None else best.plan
    if best is None and not result.linked:
        return probe_command(first.mesh.ranks)
    parts = ["tune" if best is None and first.mesh.ranks == 1 else "train", plan]
    parts += [word for word in overrides if word.partition("=")[0] not in keys]
    parts += changes.overrides
    for option, names in (
        ("--with", [n for n in with_ if n not in changes.without] + [*changes.with_]),
        ("--without", [n for n in without if n not in changes.with_] + [*changes.without]),
    ):
        parts += [part for name in names for part in (option, name)]
    return f"{start_words(first)} {shlex.join(parts)}"


def plain(result: Sweep, most: int = 12) -> dict[str, Any]:
    """Return the result of a sweep as JSON values, with the `most` best plans."""

    def rows(candidates: list[Candidate]) -> list[dict[str, Any]]:
        return [
            {"changes": list(c.changes), "gain": result.gain(c), **c.prediction.to_dict()}
            for c in candidates
        ]

    return {
        "aim": result.aim,
        "start": result.start.prediction.to_dict(),
        "ranked": rows(result.ranked[:most]),
        "ranks": len(result.ranked),
        "unknown": rows(result.unknown),
        "idle": [list(c.changes) for c in result.idle],
        "asked": result.asked,
        "refused": dict(result.refused),
        "too_large": result.too_large,
        "unpriced": dict(result.unpriced),
        "seconds": result.seconds,
        "stopped": result.stopped,
        "layouts_refused": [
            {"changes": list(words), "reason": why} for words, why in result.layouts_refused.items()
        ],
    }
