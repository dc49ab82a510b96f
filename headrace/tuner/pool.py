"""Order the candidates by what each promises after what was measured.

A prediction is multiplied by measured over predicted of the measured plan that differs from it in
the fewest words (of several, by the median). So a machine that is slower than its rates changes no
order, and a technique that turns out slower than predicted takes those with it that share it.

What is predicted to gain comes first, the fewest changes of nearly equal promises before the rest:
on a CPU each gain alone. What nothing is predicted of follows, then what is predicted to gain
little, what noise may have hidden, and what was cut off or could not run.

Where no time is predicted (a CPU, single precision) the ledger still gives an order: the same sum
of pieces over the machine's rates, which nobody compared with steps there. What must compile first
stands behind what is measured at once. What buys memory alone is left out while there is plenty,
and a change that the clock has cut off takes all that shares a word with it to the end.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import log
from statistics import median

from headrace.plan.changes import difference
from headrace.plan.plan import Plan
from headrace.plan.symptoms import parse
from headrace.plan.technique import Stage
from headrace.tuner.effects import effect_of, rounding_words
from headrace.tuner.proposals import Proposal, added_techniques
from headrace.tuner.store import fingerprint

SLACK = 0.03
"""Share that a plan may be predicted to lose and still be measured: predictions err by less."""
LEAST_GAIN = 1.005
"""Speed ratio at which a plan must be predicted to be measured for it, where a time is predicted:
what would be reported as a gain of 1.00 is none, and no device's steps are this steady."""
LESS_MEMORY = 1.005
"""Ratio of peaks that must be predicted for a plan to be measured for its memory: peaks are
sure."""
LOST_BEFORE = 0.985
"""Share of its promise that is left to a change that lost beside another plan."""
LAST = 0.98
"""Promise of a change of unknown time that lost, or of which a part was cut off by the clock."""
COMPILING = 0.2
"""Share of a guessed gain that counts for what compiles first: it takes some five times as long to
measure."""
ROUNDING = 0.2
"""Share of a guessed gain that counts for what rounds otherwise: what keeps the gradients comes
before it."""
NO_TIME = ("memory capacity", "fragmentation", "instability", "recipe", "silent no-op")
"""Symptoms of what makes no steady step shorter where it fits anyway; so has `launch:compilation`,
whose steps compile again."""
NEAR: Mapping[str, float] = {"cuda": 0.01, "cpu": 1.0}
"""Share by which promises differ that count as the same, by device: the plan with fewer changes
comes first. On a CPU predictions have no interval yet, and one change is compiled in seconds, so
each gain of its own is tried alone before several together that promise up to twice as much."""
GAINS, UNKNOWN, SMALL, DOUBTED, CUT = range(5)
"""Tiers in which plans are tried: a predicted gain of `SLACK` or more; of nothing predicted; of
less; a plan that looked faster where noise was too large to decide; cut off by the clock, or
refused."""


def _no_time(symptom: str) -> bool:
    bottleneck, part = parse(symptom)
    return bottleneck in NO_TIME or (bottleneck, part) == ("launch", "compilation")


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
    """Hold the candidates, the best plan so far, and how wrong predictions were.

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
    last: set[str] = field(default_factory=set)
    """fingerprints of plans that wait until all others were tried"""
    guesses: dict[str, float | None] = field(default_factory=dict)
    errors: list[tuple[frozenset[str], float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen.add(fingerprint(self.first))

    def add(self, proposals: Iterable[Proposal], *, whole: bool) -> None:
        """Add candidates that were not seen yet, and that learn the same."""
        for proposal in proposals:
            key = fingerprint(proposal.plan)
            if key in self.seen or effect_of(self.first, proposal.plan) == "learning":
                continue
            timed = proposal.prediction.time.step_s is not None
            self._wait(key, proposal, whole=whole and timed)
            self.seen.add(key)

    def _wait(self, key: str, proposal: Proposal, *, whole: bool) -> None:
        """Let a plan wait, with its changes of the first plan and of the best so far."""
        words = frozenset(difference(self.first, proposal.plan))
        change = difference(self.best.plan, proposal.plan)
        self.waiting[key] = _Waiting(proposal, words, change, whole)

    def take(self, *, small: bool = True) -> Proposal | None:
        """Take the candidate that promises most: a gain, then the unknown, then the small.

        Of promises that are nearly the same the fewest changes come first: the likely winner is
        measured alone, and what stands beside it has to earn its own place.

        Args:
            small: also what is predicted to gain less than `SLACK`.
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

        def order(key: str) -> tuple[bool, int, float]:
            one = self.waiting[key]
            rounds = first == CUT and bool(rounding_words(self.best.plan, one.proposal.plan))
            return rounds, len(one.change), -ranks[key]

        chosen = min(near, key=order)
        return self.waiting.pop(chosen).proposal

    def worth(self) -> dict[str, float]:
        """Return the rank of each waiting plan that is worth a trial, by its fingerprint.

        The others are predicted to gain nothing. What looked faster in noise is worth another look.
        """
        least = LESS_MEMORY if self.memory else 1 - SLACK
        return {
            key: rank
            for key, one in self.waiting.items()
            for rank in [self._rank(one)]
            if key in self.doubted | self.last or (rank > least and not self._idle(one))
        }

    def _idle(self, one: _Waiting) -> bool:
        """Return whether its steps are predicted, and no shorter than those of the best so far."""
        if self.memory or not one.proposal.prediction.time.step_s:
            return False
        promise = self._promise(one.proposal, one.words)
        return promise is not None and promise < LEAST_GAIN

    def keep(self, proposal: Proposal, step_s: float | None) -> None:
        """Make it the best; single changes of the one before wait no more."""
        self.best, self.best_s = proposal, step_s
        for key in [k for k, w in self.waiting.items() if not w.whole]:
            del self.waiting[key]
            self.seen.discard(key)

    def lose(self, proposal: Proposal) -> None:
        """Note that it lost: the same change of another plan will promise less."""
        self.lost.add(difference(self.best.plan, proposal.plan))

    def doubt(self, proposal: Proposal) -> None:
        """Note that noise may have hidden its gain: it waits for one more trial after all else."""
        key = fingerprint(proposal.plan)
        self.lose(proposal)
        if key in self.doubted:
            return
        self.doubted.add(key)
        self._wait(key, proposal, whole=False)

    def refuse(self, proposal: Proposal) -> None:
        """Note that it could not run: what has all of its changes comes last."""
        self.refused.append(frozenset(difference(self.best.plan, proposal.plan)))

    def note_cut_off(self, proposal: Proposal) -> bool:
        """Note that the clock cut it off; return whether a word of it was cut off before.

        What shares a word with it comes last.
        """
        words = {*difference(self.best.plan, proposal.plan)}
        was, self.cut = bool(self.cut & words), self.cut | words
        return was

    def unshown(self, proposal: Proposal) -> None:
        """Note that it could not be shown to learn the same.

        What rounds otherwise in it comes last.
        """
        self.cut |= rounding_words(self.best.plan, proposal.plan)
        self.lose(proposal)

    def claim(self, proposal: Proposal) -> bool:
        """Take that plan; return False where it was tried, or is predicted to gain nothing."""
        self.add([proposal], whole=True)
        key = fingerprint(proposal.plan)
        return key in self.worth() and self.waiting.pop(key, None) is not None

    def put_back(self, proposal: Proposal, *, last: bool = False) -> None:
        """Let a plan wait that was taken and not measured; it stands by itself.

        Args:
            proposal: the plan.
            last: it waits behind all others, with what rounds as it does.
        """
        key = fingerprint(proposal.plan)
        if last:
            self.last.add(key)
            self.cut |= rounding_words(self.best.plan, proposal.plan)
        self._wait(key, proposal, whole=True)

    def correct(self, proposal: Proposal, measured_s: float) -> None:
        """Remember how wrong its prediction was."""
        if predicted_s := proposal.prediction.time.step_s:
            words = frozenset(difference(self.first, proposal.plan))
            self.errors.append((words, measured_s / predicted_s))

    def promise(self, proposal: Proposal) -> float | None:
        """Return how much better than the best it should be: 1.1 is a tenth; None is unknown."""
        words = frozenset(difference(self.first, proposal.plan))
        return self._promise(proposal, words)

    def _tier(self, one: _Waiting, rank: float) -> int:
        """Return its tier: a gain, the unknown, the small, or what was cut."""
        if self._failed(one) or fingerprint(one.proposal.plan) in self.last:
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
        """Return whether the clock cut a part of it off, or it has all of what could not run."""
        change = {*one.change}
        return bool(self.cut & change) or any(words <= change for words in self.refused)

    def _guessed(self, proposal: Proposal) -> float:
        """Return a rank for what no time is predicted of; 1 is in the middle, and 0 is left out."""
        added = added_techniques(self.best.plan, proposal.plan)
        faster = self.guess(proposal) or 1.0
        compiles = any(t.stage is Stage.COMPILE for t in self.best.plan.techniques.values())
        if faster <= 1:
            return faster
        counts = 1.0 if effect_of(self.best.plan, proposal.plan) == "exact" else ROUNDING
        if not compiles and any(t.stage is Stage.COMPILE for t in added):
            counts *= COMPILING
        return 1 + counts * log(faster)

    def _buys_no_time(self, proposal: Proposal) -> bool:
        """Return whether all that it puts in is for something else than steps that fit anyway."""
        added = added_techniques(self.best.plan, proposal.plan)
        only_in = len(added) and {*self.best.plan.techniques} <= {*proposal.plan.techniques}
        symptoms = [word for t in added for word in t.symptoms]
        fits = self.best.prediction.memory.fits == "yes"
        return bool(only_in and fits and symptoms and all(map(_no_time, symptoms)))

    def guess(self, proposal: Proposal) -> float | None:
        """Return how much faster than the best so far by the ledger alone; None where unknown."""
        one_s, two_s = (self._guess_s(p.plan) for p in (self.best, proposal))
        return one_s / two_s if one_s and two_s else None

    def _guess_s(self, plan: Plan) -> float | None:
        key = fingerprint(plan)
        if key not in self.guesses:
            self.guesses[key] = self.guess_s(plan)
        return self.guesses[key]

    def faster(self, proposal: Proposal) -> float | None:
        """Return its step beside the best so far, as it is predicted: time before over after."""
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
        """Return the predicted seconds of its step, times the nearest measured plan's error."""
        if not proposal.prediction.time.step_s:
            return None
        far = [(len(words ^ other), error) for other, error in self.errors]
        nearest = min((apart for apart, _ in far), default=0)
        errors = [error for apart, error in far if apart == nearest]
        return proposal.prediction.time.step_s * (median(errors) if errors else 1.0)
