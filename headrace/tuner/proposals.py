"""Plans to try, where they come from, and what each promises after what was measured.

A prediction is multiplied by measured over predicted of the measured plan that differs from it in
the fewest words (of several, by the median). So a machine that is slower than its rates changes no
order, and a technique that turns out slower than it said takes those with it that share it.

What is foreseen to gain comes first, the fewest changes of nearly equal promises before the rest:
on a CPU each gain alone. What nothing is foreseen of follows, then what is foreseen to gain little,
what noise may have hidden, and what was cut off or could not run. Changes of learning come
in the order of what they promise for the time to the target: tokens by what a technique says of
itself (`token_share`) and by the batch, times what a token takes.

Where no time is predicted (a CPU, single precision) the ledger still gives an order: the same sum
of pieces over the machine's rates, which nobody compared with steps there. What must compile
first stands behind what is measured at once. What buys memory alone is left out while there is
plenty, and what the clock has cut off takes all that shares a word with it to the end.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import log, log2, prod
from statistics import median
from typing import Any, Protocol

from pydantic import ValidationError

from headrace.core.errors import HeadraceError
from headrace.core.limits import TuneAim
from headrace.costs.machine import Machine
from headrace.doctor.plan_keys import KEYS
from headrace.plan.changes import difference
from headrace.plan.plan import Plan
from headrace.plan.symptoms import parse
from headrace.plan.technique import (
    Catalogue,
    Context,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.predict.candidates import Asking, Candidate, Words, singles
from headrace.predict.prediction import Prediction, at
from headrace.predict.sweep import sweep
from headrace.tuner.kinds import APPROXIMATE, changes_architecture, kind_of
from headrace.tuner.store import fingerprint

TOP = 12
"""Whole plans of the sweep that may be measured; the rest differ from them in trifles."""
SLACK = 0.03
"""What is predicted to lose more than this share is not measured: predictions err by less."""
LEAST_GAIN = 1.005
"""Times the speed that a plan must be foreseen at to be measured for it, where a time is predicted:
what would be told as a gain of 1.00 is none, and no device's steps are this still."""
LESS_MEMORY = 1.005
"""What must be foreseen to save as much of the peak to be measured for it: peaks are sure."""
LOST_BEFORE = 0.985
"""Of its promise is left to a change that lost beside another plan."""
LAST = 0.98
"""What a change of unknown time promises that lost, or of which a part was cut off by the clock."""
COMPILING = 0.2
"""Of a guessed gain counts for what compiles first: it takes some five times as long to measure."""
ROUNDING = 0.2
"""Of a guessed gain counts for what rounds otherwise: what keeps the gradients comes before it."""
NO_TIME = ("memory capacity", "fragmentation", "instability", "recipe", "silent no-op")
"""Symptoms of what makes no steady step shorter where it fits anyway; so has `launch:compilation`,
whose steps compile again."""
HALF_BATCH = 0.8
"""Share of the tokens to a loss that half of the batch should need: between 1, far below the
critical batch, and 0.5, far above it (arXiv 1812.06162). Assumed, for the order alone."""
HIGHER_RATE = 0.9
"""Share of the tokens that twice AdamW's rate should leave where another rule takes the matrices:
embeddings and head bear a higher one. Assumed, for the order alone; the demo with Muon and half of
the batch came to 2.3 bits per byte in 0.78 of the tokens (one seed, two CPU cores)."""
LEARNS = ("recipe", "instability", "wasted tokens", "computation")
"""Symptoms of changes of learning, those first that come to a loss in fewer tokens."""


NEAR: Mapping[str, float] = {"cuda": 0.01, "cpu": 1.0}
"""By device: promises that differ by no larger share are the same, and the plan with fewer changes
comes first. On a CPU predictions have no interval yet, and one change is compiled in seconds, so
each gain of its own is tried alone before several together that promise up to twice as much."""
GAINS, UNKNOWN, SMALL, DOUBTED, CUT = range(5)
"""In which order plans are tried: a foreseen gain of `SLACK` or more; of nothing foreseen; of less;
one that looked faster where noise was too large to tell; cut off by the clock, or refused."""


class Proposal(Protocol):
    """A plan to try: headrace.predict.candidates.Candidate is one."""

    @property
    def plan(self) -> Plan:
        """With its changes."""
        ...

    @property
    def prediction(self) -> Prediction:
        """What is predicted of it."""
        ...


@dataclass(frozen=True)
class Sources:
    """Where plans to try come from.

    Args:
        whole: of the first plan: itself, and others, the best first.
        single: of the best so far: its single changes.
        learning: likewise, those that change what is learned.
        guess_s: seconds of a plan's step where no time is predicted, for the order.
        failed: changes whose prediction failed -> why; filled as plans are asked for.
        lacking: of a plan: changes that nothing but a missing compiler forbids -> what to do.
    """

    whole: Callable[[Plan], tuple[Proposal, Sequence[Proposal]]]
    single: Callable[[Plan], Sequence[Proposal]]
    learning: Callable[[Plan], Sequence[Proposal]]
    guess_s: Callable[[Plan], float | None] = lambda plan: None
    failed: dict[Words, str] = field(default_factory=dict)
    lacking: Callable[[Plan], dict[Words, str]] = lambda plan: {}


def sources(
    aim: TuneAim,
    context: Context,
    machine: Machine,
    catalogue: Catalogue,
    architecture: bool = False,
) -> Sources:
    """Return the sweep's plans, and every single change that the planner knows.

    Args:
        aim: what is to become less.
        context: where the plan runs.
        machine: the rates of that device.
        catalogue: techniques that may be tried.
        architecture: changes of learning may change the model itself.
    """
    failed: dict[Words, str] = {}

    def whole(plan: Plan) -> tuple[Proposal, Sequence[Proposal]]:
        found = sweep(plan, context, machine, catalogue, "time" if aim == "quality" else aim)
        best = [c for c in found.ranked if c.changes][:TOP]
        return found.start, [*best, *found.unknown, *found.idle]

    def single(plan: Plan) -> Sequence[Proposal]:
        return singles(Asking(plan, context, machine, catalogue), failed.__setitem__)

    def learning(plan: Plan) -> Sequence[Candidate]:
        asking = Asking(plan, context, machine, catalogue, learning=True)
        every = [
            c
            for c in singles(asking, failed.__setitem__)
            if architecture or not changes_architecture(plan, c.plan)
        ]
        rates, fewer = KEYS["recipe"](plan), [c.changes for c in every if _tokens(plan, c.plan) < 1]
        rated = [(*words, *rate) for words in fewer for rate in rates]
        for words in (*rates, *rated, *with_batches(plan, [*fewer, *rated])):
            with suppress(HeadraceError):
                every.append(asking.answer(plan, words))
        found = [c for c in every if kind_of(plan, c.plan) == "learning"]
        start = asking.answer(plan)
        return sorted(found, key=lambda c: learning_order(start, c, guess_s))

    def guess_s(plan: Plan) -> float | None:
        return Asking(plan, context, machine, catalogue).guess_s(plan)

    def lacking(plan: Plan) -> dict[Words, str]:
        return without_compiler(plan, context, catalogue)

    return Sources(whole, single, learning, guess_s, failed, lacking)


def without_compiler(plan: Plan, context: Context, catalogue: Catalogue) -> dict[Words, str]:
    """Techniques that would run here if a compiler were installed, by why they cannot."""
    here = at(context, plan)
    there = replace(here, has_compiler=True, has_triton=True)
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, kind in catalogue.techniques.items():
        if name in plan.techniques or kind.stage is not Stage.COMPILE:
            continue
        with suppress(ValidationError):  # knobs that have no default
            answer, able = kind().supports(here), kind().supports(there)
            if isinstance(answer, Unsupported) and isinstance(able, Supported):
                found[f"{answer.reason}: {answer.remedy}"].append(f"+{name}")
    return {tuple(names): why for why, names in found.items()}


def with_batches(plan: Plan, changes: Sequence[Words]) -> list[Words]:
    """Half and twice the batch, alone and beside each of the changes, which need fewer tokens.

    Half a batch keeps the schedule's steps at first, in half the tokens: a run that needs as many
    tokens as before has them in the second variant. Twice the batch keeps the tokens.
    """
    found = []
    for factor in (0.5, 2.0):
        tokens, schedule = int(plan.batch.tokens * factor), plan.schedule
        words = [f"batch.tokens={tokens}"]
        if plan.batch.micro_sequences > tokens // plan.data.sequence_length:
            words.append("batch.micro_sequences=0")
        steps = {"schedule.steps": schedule.steps, "schedule.warmup_steps": schedule.warmup_steps,
                 "goal.steps": plan.goal.steps}  # fmt: skip
        as_long = [f"{key}={max(1, round(n / factor))}" for key, n in steps.items() if n]
        variants = [words, [*words, *as_long]] if factor < 1 and as_long else [[*words, *as_long]]
        found += [(*change, *more) for more in variants for change in (*changes, ())]
    return found


def learning_order(
    before: Proposal, after: Candidate, guess_s: Callable[[Plan], float | None]
) -> tuple[float, int, int, Words]:
    """Return the place of a change of learning: what promises the target soonest comes first.

    What promises nothing follows: keys of the recipe, what is said to help learning, few words.
    """
    promise, words = sooner(before, after, guess_s), after.changes
    said = {parse(word)[0] for t in _put_in(before.plan, after.plan) for word in t.symptoms}
    rank = min((i for i, name in enumerate(LEARNS) if name in said), default=len(LEARNS))
    if not any(word[0] in "+-" for word in words):
        rank = -1
    return (-promise if promise != 1 else -1.0, rank, len(words), words)


def sooner(before: Proposal, after: Proposal, guess_s: Callable[[Plan], float | None]) -> float:
    """How many times as soon the target should come: 1 where nothing is known of its tokens.

    The tokens that it should need, by what techniques say of themselves and by the batch, times
    what a token takes, by predicted steps or else by the ledger alone. Half a batch with all of
    the schedule's tokens promises nothing: it is for a target that its sibling with half missed.
    """
    tokens, one, two = _tokens(before.plan, after.plan), before.plan, after.plan
    long = (two.horizon_steps or 0) > (one.horizon_steps or 0)
    if tokens == 1 or (two.batch.tokens < one.batch.tokens and long):
        return 1.0
    one_s, two_s = before.prediction.time.step_s, after.prediction.time.step_s
    if not (one_s and two_s):
        one_s, two_s = guess_s(before.plan), guess_s(after.plan)
    faster = one_s / two_s if one_s and two_s else 1.0
    return faster * (after.plan.batch.tokens / before.plan.batch.tokens) / tokens


def _tokens(before: Plan, after: Plan) -> float:
    """Share of the tokens to a loss that the second plan should need."""
    halved = log2(before.batch.tokens / after.batch.tokens)
    found = prod(t.token_share for t in _put_in(before, after))
    if found < 1 and after.optimizer.lr > before.optimizer.lr:
        found *= HIGHER_RATE
    return found * HALF_BATCH**halved


def _no_time(symptom: str) -> bool:
    bottleneck, part = parse(symptom)
    return bottleneck in NO_TIME or (bottleneck, part) == ("launch", "compilation")


def _put_in(before: Plan, after: Plan) -> list[Technique[Any]]:
    """Techniques of the second plan that the first has not."""
    return [t for name, t in after.techniques.items() if name not in before.techniques]


@dataclass
class _Waiting:
    proposal: Proposal
    words: frozenset[str]
    """that make it of the first plan"""
    change: tuple[str, ...]
    """that makes it of the plan that was the best when it came"""
    whole: bool
    """it stands by itself, whatever the best is"""


@dataclass
class Pool:
    """Plans that wait, the best so far, and how wrong predictions were.

    Args:
        first: the plan that all began with.
        best: so far.
        memory: the peak is to become less, not the time.
        guess_s: see Sources.
        near: share by which promises differ that are the same.
    """

    first: Plan
    best: Proposal
    memory: bool = False
    guess_s: Callable[[Plan], float | None] = lambda plan: None
    near: float = NEAR["cuda"]
    best_s: float | None = None
    """measured seconds of its step"""
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    lost: set[tuple[str, ...]] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    """words of changes that the clock cut off"""
    refused: list[frozenset[str]] = field(default_factory=list)
    """changes that could not run"""
    doubted: set[str] = field(default_factory=set)
    """fingerprints of plans that are tried once more, for noise may have hidden their gain"""
    guesses: dict[str, float | None] = field(default_factory=dict)
    errors: list[tuple[frozenset[str], float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen.add(fingerprint(self.first))

    def add(self, proposals: Iterable[Proposal], *, whole: bool) -> None:
        """Plans that were not seen yet, and learn the same, wait from now on."""
        for proposal in proposals:
            key = fingerprint(proposal.plan)
            if key in self.seen or kind_of(self.first, proposal.plan) == "learning":
                continue
            words = frozenset(difference(self.first, proposal.plan))
            change = difference(self.best.plan, proposal.plan)
            timed = proposal.prediction.time.step_s is not None
            self.waiting[key] = _Waiting(proposal, words, change, whole and timed)
            self.seen.add(key)

    def take(self, *, small: bool = True) -> Proposal | None:
        """What promises most: a gain, then what nothing is known of, then what matters little.

        Of promises that are nearly the same the fewest changes come first: the likely winner is
        measured alone, and what stands beside it has to earn its own place.

        Args:
            small: also what is foreseen to gain less than `SLACK`.
        """
        ranks = self.worth()
        tiers = {key: self._tier(self.waiting[key], rank) for key, rank in ranks.items()}
        first = min(tiers.values(), default=SMALL)
        if not ranks or (first >= SMALL and not small):
            return None
        best = max(rank for key, rank in ranks.items() if tiers[key] == first)
        near = [
            k for k, rank in ranks.items() if tiers[k] == first and rank * (1 + self.near) >= best
        ]
        chosen = min(near, key=lambda key: (len(self.waiting[key].change), -ranks[key]))
        return self.waiting.pop(chosen).proposal

    def worth(self) -> dict[str, float]:
        """Return the rank of each waiting plan that is worth a trial, by its fingerprint.

        The others are foreseen to gain nothing. What looked faster in noise is worth another look.
        """
        least = LESS_MEMORY if self.memory else 1 - SLACK
        return {
            key: rank
            for key, one in self.waiting.items()
            for rank in [self._rank(one)]
            if key in self.doubted or (rank > least and not self._idle(one))
        }

    def _idle(self, one: _Waiting) -> bool:
        """Whether its steps are predicted, and no shorter than those of the best so far."""
        if self.memory or not one.proposal.prediction.time.step_s:
            return False
        promise = self._promise(one.proposal, one.words)
        return promise is not None and promise < LEAST_GAIN

    def keep(self, proposal: Proposal, step_s: float | None) -> None:
        """The best is another now; single changes of the one before wait no more."""
        self.best, self.best_s = proposal, step_s
        for key in [k for k, w in self.waiting.items() if not w.whole]:
            del self.waiting[key]
            self.seen.discard(key)

    def lose(self, proposal: Proposal) -> None:
        """The same change of another plan will promise less."""
        self.lost.add(difference(self.best.plan, proposal.plan))

    def doubt(self, proposal: Proposal) -> None:
        """Noise may have hidden its gain: it loses, and waits for one more trial after all else."""
        key = fingerprint(proposal.plan)
        self.lose(proposal)
        if key in self.doubted:
            return
        self.doubted.add(key)
        words = frozenset(difference(self.first, proposal.plan))
        change = difference(self.best.plan, proposal.plan)
        self.waiting[key] = _Waiting(proposal, words, change, whole=False)

    def refuse(self, proposal: Proposal) -> None:
        """It could not run: what has all of its changes comes last, for it will not either."""
        self.refused.append(frozenset(difference(self.best.plan, proposal.plan)))

    def late(self, proposal: Proposal) -> bool:
        """The clock cut it off: what shares a word with it comes last; whether this one did."""
        words = {*difference(self.best.plan, proposal.plan)}
        was, self.cut = bool(self.cut & words), self.cut | words
        return was

    def unshown(self, proposal: Proposal) -> None:
        """What rounds otherwise in it could not be shown to learn the same: that comes last."""
        put_in = _put_in(self.best.plan, proposal.plan)
        rounds = {f"+{t.name()}" for t in put_in if t.equality == "approximate"}
        words = difference(self.best.plan, proposal.plan)
        self.cut |= {w for w in words if w in rounds or w.partition("=")[0] in APPROXIMATE}
        self.lose(proposal)

    def correct(self, proposal: Proposal, measured_s: float) -> None:
        """Remember how wrong its prediction was."""
        if predicted_s := proposal.prediction.time.step_s:
            words = frozenset(difference(self.first, proposal.plan))
            self.errors.append((words, measured_s / predicted_s))

    def promise(self, proposal: Proposal) -> float | None:
        """How much better than the best so far it should be: 1.1 is a tenth; None is unknown."""
        words = frozenset(difference(self.first, proposal.plan))
        return self._promise(proposal, words)

    def _tier(self, one: _Waiting, rank: float) -> int:
        """Which comes first whatever the promise: a gain, the unknown, the small, what was cut."""
        if self._failed(one):
            return CUT
        if fingerprint(one.proposal.plan) in self.doubted:
            return DOUBTED
        if self.memory or one.proposal.prediction.time.step_s:
            return GAINS if rank >= 1 + SLACK else SMALL
        if one.change in self.lost:
            return SMALL
        guess = self.guess(one.proposal)
        return UNKNOWN if guess is None else GAINS if guess >= 1 + SLACK else SMALL

    def _rank(self, one: _Waiting) -> float:
        if not self.memory and self._buys_no_time(one.proposal):
            return 0.0
        promise = self._promise(one.proposal, one.words)
        if promise is not None and (self.memory or one.proposal.prediction.time.step_s):
            rank = promise * (LOST_BEFORE if one.change in self.lost else 1.0)
        else:
            rank = self._guessed(one.proposal)
            rank = min(rank, LAST) if one.change in self.lost else rank
        return min(rank, LAST) if self._failed(one) else rank

    def _failed(self, one: _Waiting) -> bool:
        """Whether the clock cut a part of it off, or it has all of what could not run."""
        change = {*one.change}
        return bool(self.cut & change) or any(words <= change for words in self.refused)

    def _guessed(self, proposal: Proposal) -> float:
        """A place for what no time is predicted of; 1 is in the middle, and 0 is left out."""
        put_in = _put_in(self.best.plan, proposal.plan)
        faster = self.guess(proposal) or 1.0
        compiles = any(t.stage is Stage.COMPILE for t in self.best.plan.techniques.values())
        if faster <= 1:
            return faster
        counts = 1.0 if kind_of(self.best.plan, proposal.plan) == "exact" else ROUNDING
        if not compiles and any(t.stage is Stage.COMPILE for t in put_in):
            counts *= COMPILING
        return 1 + counts * log(faster)

    def _buys_no_time(self, proposal: Proposal) -> bool:
        """Whether all that it puts in is for something else than steps that fit anyway."""
        put_in = _put_in(self.best.plan, proposal.plan)
        only_in = len(put_in) and {*self.best.plan.techniques} <= {*proposal.plan.techniques}
        said = [word for t in put_in for word in t.symptoms]
        fits = self.best.prediction.memory.fits == "yes"
        return bool(only_in and fits and said and all(map(_no_time, said)))

    def guess(self, proposal: Proposal) -> float | None:
        """How much faster than the best so far by the ledger alone; None where it does not tell."""
        one_s, two_s = (self._guess_s(p.plan) for p in (self.best, proposal))
        return one_s / two_s if one_s and two_s else None

    def _guess_s(self, plan: Plan) -> float | None:
        key = fingerprint(plan)
        if key not in self.guesses:
            self.guesses[key] = self.guess_s(plan)
        return self.guesses[key]

    def faster(self, proposal: Proposal) -> float | None:
        """Its step beside the best so far, as it is predicted: time before over after."""
        return self._faster(proposal, frozenset(difference(self.first, proposal.plan)))

    def _faster(self, proposal: Proposal, words: frozenset[str]) -> float | None:
        two_s = self._expected_s(proposal, words)
        one_s = self.best_s
        if one_s is None and two_s is not None:
            best = frozenset(difference(self.first, self.best.plan))
            one_s = self._expected_s(self.best, best)
        return one_s / two_s if one_s and two_s else None

    def _promise(self, proposal: Proposal, words: frozenset[str]) -> float | None:
        faster = self._faster(proposal, words)
        if not self.memory:
            return faster
        smaller = self.best.prediction.memory.peak_bytes / max(
            1.0, proposal.prediction.memory.peak_bytes
        )
        return smaller * min(1.0, faster or self.guess(proposal) or 1.0)

    def _expected_s(self, proposal: Proposal, words: frozenset[str]) -> float | None:
        """Seconds of its step: predicted, times the error of the measured plan nearest to it."""
        if not proposal.prediction.time.step_s:
            return None
        far = [(len(words ^ other), error) for other, error in self.errors]
        nearest = min((apart for apart, _ in far), default=0)
        errors = [error for apart, error in far if apart == nearest]
        return proposal.prediction.time.step_s * (median(errors) if errors else 1.0)
