"""Choose remedies for a finding: candidates by their symptoms or the ledger, by forecast gain.

No technique is known by name here. A technique is a candidate when its `symptoms` name the
finding's bottleneck and it can run on this plan; what it cannot stand beside is taken out with it.
Of what the ledger prices (`PRICED`) every single change that keeps what is learned is a candidate.
Where launches bind a GPU, and for a step's time on a CPU, so is the best pair (`PAIRED`). There are
keys of the plan too (plan_keys.py), rows of a micro-batch, and for memory that nobody uses the
techniques that trade time for it, taken out. Each is predicted like a plan of its own. What the
ledger says makes the step slower, or what changes what is learned, is no remedy for lost time. What
does not shrink the peak is none for full memory. What nothing predicts is listed last.

Bottlenecks that the ledger does not price (waiting for data, for other ranks, padding) are forecast
by their measured share. Learning is not forecast: seeds decide. For an instability all keys that
are far off come first, together (plan/gentler).
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from headrace.core.errors import HeadraceError, UnsupportedError
from headrace.core.statistics import Interval
from headrace.costs.machine import SQUARE, Machine
from headrace.doctor.change_words import cost_of, costs_of, sentence_of
from headrace.doctor.findings import Finding
from headrace.doctor.forecast import NOTHING, Forecast, MeasuredRun, Source, by_ledger, by_share
from headrace.doctor.layout import WRONG_LAYOUT, by_layouts
from headrace.doctor.link_remedies import INTERCONNECT, by_links, of_links
from headrace.doctor.overfitting import sooner
from headrace.doctor.packing import PADDED, by_packing, repacked
from headrace.doctor.plan_keys import (
    HALVES,
    KEY_EQUALITY,
    KEYS,
    concerns_halves,
    in_force_alone,
    key_equality,
    rate_is_far_off,
)
from headrace.doctor.stage_remedies import IMBALANCED, by_stages, rebalanced
from headrace.plan.changes import parse as parse_changes
from headrace.plan.plan import Plan
from headrace.plan.symptoms import BOTTLENECKS, parse, saves_memory
from headrace.plan.technique import EFFECTS, Catalogue, Context, Technique
from headrace.predict.candidates import MICRO, Asking, Candidate, Words

ALSO: Mapping[str, tuple[str, ...]] = {"computation": ("memory bandwidth", "kernel efficiency")}
"""Bottleneck -> bottlenecks that look like it where there is no trace."""
LEDGER_FIRST = "launch"
"""The ledger prices launches; where it sees no change, the finding's share decides."""
PRICED = (LEDGER_FIRST, "computation", "memory bandwidth", "kernel efficiency")
"""Bottlenecks for which every change that the ledger predicts to be faster is a remedy."""
ON_TOP = 1.02
"""Times the speed of the best single change that a pair must reach to be worth its second word."""
NEARLY = 0.9
"""Share of the largest forecast gain that a plainer remedy must reach to stand before it: forecasts
of natural runs were a quarter off in the median (natural.jsonl)."""
SHARES = ("input", "interconnect", "wasted tokens", LEDGER_FIRST)
"""Bottlenecks of which the finding's share forecasts a gain."""
QUALITY = ("instability", "forgetting", "overfitting", "chat template", "recipe", "silent no-op")
"""Bottlenecks of learning, which no time of a step forecasts."""
OF_TIME = ("computation", "memory bandwidth", "kernel efficiency", LEDGER_FIRST)
"""Bottlenecks that name what the time of a step itself goes to."""
PAIRED: Mapping[str, tuple[str, ...]] = {"cuda": (LEDGER_FIRST,), "cpu": OF_TIME}
"""By device: bottlenecks for which the best pair of changes is a remedy too. On a GPU compiling and
graphs lessen launches together; on a CPU compiling stands beside kept memory, threads or a loss in
chunks, which act on different parts of a step."""
NARROWER = (*HALVES, "fp8")
"""Values of a knob that round what ranks send."""
CAUSES = ("instability",)
"""Bottlenecks that keys of the plan cause; these come before techniques that bear with them."""
HEALTHY = 0.05
"""Gain that no remedy of a healthy run is forecast to exceed. Chosen, not measured."""
MOST = 8
"""Most remedies of one finding that are kept."""


@dataclass(frozen=True)
class PlanRemedy:
    """Hold a change of the plan against a finding.

    Args:
        change: words, as `headrace.plan.changes` reads them.
        what: one sentence.
        gain: time before over after, less 1, on this run, between its ends; None where it is not
            forecast.
        memory_bytes: change of the peak in bytes.
        fits: "yes", "tight" or "no".
        costs: what it costs, in a reader's words.
        equality: what it does to the gradients: "exact", "approximate" or "learning".
        forecast_from: what the gain is from, and what its ends are: from the "ledger" they hold 80%
            of gains, from a "share" they are half and all of it.
        unknown: why there is no gain, or what it leaves out.
        cost: of what it costs, the part to show in a line.
    """

    change: Words
    what: str
    gain: Interval | None
    memory_bytes: float
    fits: str
    costs: str
    equality: str
    forecast_from: Source
    unknown: str = ""
    cost: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {key: value for key, value in asdict(self).items() if key != "cost"}

    @property
    def words(self) -> str:
        """Return the change as `headrace train` takes it."""
        return shlex.join(parse_changes(self.change).command())


def remedies(
    finding: Finding,
    plan: Plan,
    context: Context,
    machine: Machine,
    catalogue: Catalogue,
    measured: MeasuredRun,
) -> list[PlanRemedy]:
    """Return what to change, the largest forecast gain first and what is not forecast last.

    Args:
        finding: the doctor's.
        plan: the plan of the run.
        context: where it ran.
        machine: its rates.
        catalogue: the techniques that there are.
        measured: what the run measured; `MeasuredRun()` for a plan that did not run.

    Raises:
        ConfigError, UnsupportedError: the plan itself cannot run there.
    """
    if finding.bottleneck not in BOTTLENECKS:
        return []
    asking = Asking(plan, context, machine, catalogue, learning=True)
    ask = _Asker(finding, asking, measured)
    known_change = finding.facts.get("change")  # of a layout, which was chosen among all
    changes = [known_change] if known_change else candidates(finding.bottleneck, asking, measured)
    answers = map(ask.remedy, changes)
    known = _without_needless([one for one in answers if one is not None], finding)
    if finding.bottleneck in PAIRED.get(context.device, ()):
        known = _without_needless([*known, *ask.pairs(known)], finding)
    learns, name = finding.bottleneck in QUALITY, finding.bottleneck
    causes = [_keys(words) for words in KEYS[name](plan)] if name in CAUSES else []
    timed = name in OF_TIME
    known.sort(key=lambda remedy: _order(remedy, learns, causes, timed))
    if name in PRICED:
        known = ask.plainest_first(known)
    return _best_rows(known)[:MOST]


@dataclass(frozen=True)
class _Asker:
    """Ask what changes of one plan would do about one finding."""

    finding: Finding
    asking: Asking
    measured: MeasuredRun

    @cached_property
    def before(self) -> Candidate:
        """Return what is predicted of the plan as it is."""
        return self.asking.answer(self.asking.start)

    @cached_property
    def halves_are_slow(self) -> bool:
        """Return whether it is a CPU that was not measured to multiply halves faster than fp32."""
        machine = self.asking.machine
        if self.asking.context.device != "cpu":
            return False
        if machine.source != "probes":
            return True
        try:
            half_s, whole_s = (machine.matmul_s(p, *SQUARE) for p in ("bf16", "fp32"))
        except UnsupportedError:
            return True
        return half_s >= whole_s

    def acts_on_all(self, name: str) -> bool:
        """Return whether a technique acts on all of the bottleneck, and not on a part alone."""
        return "" in _parts(self.asking.catalogue.find(name), self.finding.bottleneck)

    def remedy(self, words: Words, plan: Plan | None = None) -> PlanRemedy | None:
        """Return the remedy that a change is; None where it cannot run, fit or help.

        Args:
            words: the change.
            plan: the plan that it changes; the finding's own by default.
        """
        after = _answered(self.asking, words, plan)
        if after is None or after.prediction.memory.fits == "no" or not after.changes:
            return None
        if self.halves_are_slow and concerns_halves(after.changes, self.asking.catalogue):
            return None
        remedy = _remedy(self.finding, self.asking, self.before, after, self.measured, words)
        bottleneck = self.finding.bottleneck
        if bottleneck in PRICED and remedy.gain is None and plan is None:
            inferred = bottleneck == LEDGER_FIRST and self.finding.confidence == "inferred"
            if inferred and words[0][0] == "+" and not self.acts_on_all(words[0][1:]):
                return None  # it is no step that compiles again
            named = _names_bottleneck(bottleneck, words, self.asking) or words[0][0] not in "+-"
            return remedy if named and helps(bottleneck, remedy) else None
        return remedy if helps(bottleneck, remedy) else None

    def pairs(self, singles: Sequence[PlanRemedy]) -> list[PlanRemedy]:
        """Return what is best on top of the best single change, if that gains more."""
        known = [one for one in singles if one.gain is not None and one.equality != "learning"]
        if not known:
            return []
        best = max(known, key=lambda one: _gained(one))
        plan = self.asking.answer(self.asking.start, best.change).plan
        seconds = replace(self.asking, learning=False).singles(plan)
        more = [self.remedy(words, plan) for words in seconds]
        more = [one for one in more if one is not None and one.gain is not None]
        fewer = sorted(_without_needless(more, self.finding), key=_gained, reverse=True)
        top = next(iter(self.plainest_first(fewer)), None)
        worth = top is not None and 1 + _gained(top) > ON_TOP * (1 + _gained(best))
        if top is None or not worth:
            return []
        costs = "; ".join(dict.fromkeys(part for part in (best.costs, top.costs) if part))
        return [
            replace(top, what=f"{best.what} {top.what}", costs=costs, cost=best.cost or top.cost)
        ]

    def plainest_first(self, ordered: list[PlanRemedy]) -> list[PlanRemedy]:
        """Return the remedies, first the plainest of those that gain nearly as much as the first.

        This is the rule of one standard error (Breiman et al., 1984): where an estimate's error
        covers the difference of choices, take the simplest. Plainer is what changes the gradients
        less, then what has fewer words, then what acts at fewer places of the trainer.
        """
        if not ordered or _gained(ordered[0]) <= 0:
            return ordered

        def plainness(one: PlanRemedy) -> tuple[int, int, int]:
            added = [self.asking.catalogue.find(w[1:]) for w in one.change if w[0] == "+"]
            places = sum(len(t.claims) + len(t.composes) for t in added)
            return EFFECTS.index(one.equality), len(one.change), places

        least = NEARLY * _gained(ordered[0])
        plainest = min((one for one in ordered if _gained(one) >= least), key=plainness)
        return [plainest, *(one for one in ordered if one is not plainest)]


def _gained(remedy: PlanRemedy) -> float:
    return 0.0 if remedy.gain is None else remedy.gain.value


def candidates(bottleneck: str, asking: Asking, measured: MeasuredRun) -> Iterator[Words]:
    """Yield the changes that are known to help, whether they can run or not."""
    plan = asking.start
    hopeless = bottleneck == "instability" and rate_is_far_off(plan)
    for words in () if hopeless else asking.singles(plan):
        if _may_help(bottleneck, words, asking):
            yield words
    yield from KEYS.get(bottleneck, lambda plan: [])(plan)
    if bottleneck == PADDED and measured.packing is not None:
        yield from repacked(plan, measured.packing)
    if bottleneck == IMBALANCED and measured.stages is not None:
        yield from rebalanced(asking, measured.stages)
    if bottleneck == INTERCONNECT:
        yield from of_links(asking)
    if bottleneck == "overfitting":
        yield from sooner(plan, measured.lowest_step)
    if bottleneck == "silent no-op":
        yield from in_force_alone(plan, measured.inactive, measured.unreached)


def _may_help(bottleneck: str, words: Words, asking: Asking) -> bool:
    """Return whether a single change is one for this bottleneck.

    What changes what is learned is no remedy for time, whatever its symptoms.
    """
    if bottleneck in PRICED and _equality(asking.catalogue, words) == "learning":
        return False
    return bottleneck in PRICED or _names_bottleneck(bottleneck, words, asking)


def _names_bottleneck(bottleneck: str, words: Words, asking: Asking) -> bool:
    """Return whether a single change's symptoms, or what it is, name this bottleneck."""
    sign, name = words[0][0], words[0][1:]
    if sign == "+":
        return bool(_parts(asking.catalogue.find(name), bottleneck))
    if sign == "-":
        saves = saves_memory(asking.start.techniques[name].symptoms)
        return bottleneck in ("unused memory", LEDGER_FIRST) and saves
    key, _, value = words[0].partition("=")
    if key != MICRO:
        return False
    larger = int(value) == 0 or int(value) > asking.start.micro_rows
    return bottleneck in (("unused memory", LEDGER_FIRST) if larger else ("memory capacity",))


def _parts(technique: type[Technique[Any]], bottleneck: str) -> set[str]:
    """Return the parts of a bottleneck that it is a remedy for; "" is all of it."""
    wanted = (bottleneck, *ALSO.get(bottleneck, ()))
    symptoms = map(parse, technique.symptoms)
    return {part for name, part in symptoms if name in wanted}


def _answered(asking: Asking, words: Words, plan: Plan | None = None) -> Candidate | None:
    """Return the plan with a change, mended if need be; None where it cannot run."""
    try:
        return asking.attempt(plan or asking.start, words)
    except HeadraceError:
        return None


def _remedy(
    finding: Finding,
    asking: Asking,
    before: Candidate,
    after: Candidate,
    measured: MeasuredRun,
    words: Words,
) -> PlanRemedy:
    forecast = _forecast(finding, asking, before, after, measured, words)
    return PlanRemedy(
        change=after.changes,
        what=sentence_of(asking, after.changes, words[0]),
        gain=forecast.gain,
        memory_bytes=after.prediction.memory.peak_bytes - before.prediction.memory.peak_bytes,
        fits=after.prediction.memory.fits,
        costs=costs_of(asking.catalogue, words[0]),
        cost=cost_of(asking.catalogue, words[0]),
        equality=_equality(asking.catalogue, after.changes),
        forecast_from=forecast.source,
        unknown=forecast.unknown,
    )


def _equality(catalogue: Catalogue, change: Words) -> str:
    """Return what the change does to gradients: the most that a part of it does."""
    parts = [key_equality(word.partition("=")[0], catalogue) for word in change]
    parts += [catalogue.find(word[1:]).equality for word in change if word[0] == "+"]
    parts += ["approximate" for word in change if word.partition("=")[2] in NARROWER]
    left = (catalogue.find(word[1:]).equality for word in change if word[0] == "-")
    return max([*parts, *(e for e in left if e == "learning")], key=EFFECTS.index)


def _forecast(
    finding: Finding,
    asking: Asking,
    before: Candidate,
    after: Candidate,
    measured: MeasuredRun,
    words: Words,
) -> Forecast:
    """Return the gain by what can forecast it."""
    bottleneck = finding.bottleneck
    ledger = by_ledger(before.prediction, after.prediction, measured)
    if bottleneck in QUALITY:
        why = "what it does to learning is not forecast: compare losses over seeds"
        if bottleneck == "silent no-op":
            why = "it does nothing, so leaving it out changes nothing"
        elif ledger.gain is not None and abs(ledger.gain.value) > NOTHING:
            why += f"; a step takes {1 / (1 + ledger.gain.value) - 1:+.1%}"
        return Forecast(None, "none", why)
    if bottleneck == "fragmentation":
        return Forecast(None, "none", "it gains memory that is reserved in pieces, not time")
    if bottleneck == WRONG_LAYOUT:
        return by_layouts(before, after)
    if bottleneck == IMBALANCED:
        return by_stages(asking, before, after, measured)
    if bottleneck not in SHARES:
        return ledger
    if bottleneck == INTERCONNECT and (sent := by_links(finding.share, before, after)):
        return sent
    if bottleneck == PADDED and (packing := measured.packing) is not None:
        return by_packing(packing, before.plan.techniques, after.plan.techniques, ledger)
    moves = ledger.gain is not None and abs(ledger.gain.value) > NOTHING
    if bottleneck == LEDGER_FIRST and (moves or words[0][0] != "+"):
        return ledger  # which alone knows what a part of the plan, or a knob, does to launches
    if words[0][0] == "+":
        parts = _parts(asking.catalogue.find(words[0][1:]), bottleneck)
        if parts and "" not in parts:
            why = f"it helps as far as {', '.join(sorted(parts))} is the cause"
            return Forecast(None, "none", why)
        priced = before.prediction.time.step_s is not None  # and the share is what that left over
        inferred = priced and finding.confidence == "inferred"
        if bottleneck == LEDGER_FIRST and (inferred or not parts):
            return ledger
    if bottleneck == LEDGER_FIRST:
        ledger = replace(ledger, gain=None)
    return by_share(finding.share, ledger)


def helps(bottleneck: str, remedy: PlanRemedy) -> bool:
    """Return whether a forecast is one of a remedy, or there is none and it may be."""
    if bottleneck == "memory capacity":
        return remedy.memory_bytes < 0
    if remedy.gain is None:
        sure = bottleneck not in ("computation", "unused memory")
        sure &= bottleneck != LEDGER_FIRST or remedy.change[0][0] != "-"
        return sure or remedy.change[0].partition("=")[0] in KEY_EQUALITY
    if bottleneck == "computation":  # which is no fault: what is sure, or large, is worth a word
        return remedy.gain.low > 0 or remedy.gain.value > HEALTHY
    return remedy.gain.value > NOTHING


def _order(
    remedy: PlanRemedy, learns: bool, causes: Sequence[set[str]] = (), timed: bool = False
) -> tuple[int, bool, bool, bool, float, Words]:
    """Order what is forecast first, of that what keeps the gradients, of that the largest gain.

    Where learning is what is wrong, what changes it; where no gain is known, what saves memory, and
    of a step's time techniques before other keys. The likely causes come first, in their order.
    """
    most = remedy.memory_bytes if remedy.gain is None else -remedy.gain.value
    keys = _keys(remedy.change)
    cause = causes.index(keys) if keys in causes else len(causes)
    other = (remedy.equality == "learning") != learns
    last = timed and remedy.gain is None and remedy.change[0][0] != "+"
    return (cause, remedy.gain is None, other, last, most, remedy.change)


def _keys(change: Words) -> set[str]:
    """Return the keys that a change sets, and the techniques that it puts in or takes out."""
    return {word.partition("=")[0] for word in change}


def _does_it_all(other: PlanRemedy, one: PlanRemedy, *, timed: bool = False) -> bool:
    """Return whether a part of a change is as good as the whole, or a shorter one is the same.

    Args:
        other: the shorter change.
        one: the longer one.
        timed: time is all that counts, and more words must be worth it.
    """
    if other.gain is None or len(other.change) >= len(one.change):
        return False
    if not {*other.change} < {*one.change}:
        return (other.gain, other.memory_bytes, other.equality) == (
            one.gain,
            one.memory_bytes,
            one.equality,
        )
    if timed:
        return 1 + _gained(one) <= ON_TOP * (1 + _gained(other))
    faster = one.gain is not None and one.gain.value > other.gain.value + NOTHING
    return not faster and other.memory_bytes <= one.memory_bytes


def _without_needless(remedies: list[PlanRemedy], finding: Finding) -> list[PlanRemedy]:
    """Return the remedies of which no part, and no shorter one, does it all."""
    timed = finding.bottleneck in PRICED
    return [
        one
        for one in remedies
        if not any(_does_it_all(other, one, timed=timed) for other in remedies)
    ]


def _best_rows(remedies: list[PlanRemedy]) -> list[PlanRemedy]:
    """Return the remedies with the first alone of several sizes of a micro-batch."""
    rows = [remedy for remedy in remedies if remedy.change[0].partition("=")[0] == MICRO]
    return [remedy for remedy in remedies if remedy not in rows[1:]]
