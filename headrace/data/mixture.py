"""Deal the rows of a run to its sources, in exact integers.

A run is cut into stretches within which the shares of the sources stay. A stretch ends where a
stage of `data.mixture` ends, or where a source has given all that its limit allows: from then on
the others share its part by their weights. There are at most as many stretches as stages and
sources together, and they are all the state that a mixture has.

Of a stretch of n rows a source of weight w gets n w, rounded so that all of them add up to n (the
largest remainders are rounded up) and each is off by less than one row; a source that ends there
gets exactly what its limit leaves. So every stage border is exact to one row, and a limit to none.
Within a stretch, MixtureOrder deals rows by the same shares (order.py).

Borders and limits are whole rows, counted over the stream: they fall into the middle of a step
where the batch says so, a growing batch moves them to another step but not to another row, and
rows that a step cuts into shorter ones count as what they were cut from.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from headrace.core.errors import ConfigError
from headrace.core.remedy import Remedy, mend
from headrace.plan.mixture import MixtureStage
from headrace.plan.plan import Plan

SMALLEST_SHARE = 1 / 65_536
"""Smallest share of a source: the table of a period has two rows of it (order.py)."""

LEAST_RATIO = 1e-300
"""Weight beside the largest below which a power of sizes is taken for this. It is far below the
smallest share, so that a source whose power is 0 is refused and not left out in silence."""


@dataclass(frozen=True)
class Stretch:
    """Hold rows of the stream within which the shares of the sources stay.

    Args:
        stage: number of its stage.
        first: its first row.
        rows: how many rows it has; None where it does not end.
        shares: of its rows, of each source; they add up to 1.
        before: rows of each source before it.
    """

    stage: int
    first: int
    rows: int | None
    shares: tuple[Fraction, ...]
    before: tuple[int, ...]

    @property
    def quotas(self) -> tuple[int, ...]:
        """Return the rows of each source in a stretch that ends."""
        assert self.rows is not None
        return tuple(int(share * self.rows) for share in self.shares)


@dataclass(frozen=True)
class Mixture:
    """Hold what each source gives to the run.

    Args:
        stretches: in order, without gaps.
        spent: number of the stage whose sources are used up; None where none is.
    """

    stretches: tuple[Stretch, ...]
    spent: int | None = None

    @property
    def end(self) -> int | None:
        """Return the row at which the sources of a stage are used up; None where none is."""
        if self.spent is None:
            return None
        return sum(stretch.rows or 0 for stretch in self.stretches)


def deal(
    stages: Sequence[tuple[int, Sequence[Fraction]]],
    limits: Sequence[int | None],
) -> Mixture:
    """Return the mixture of stages and limits.

    Args:
        stages: the first row of each stage, rising from 0, and the weight of each source there.
        limits: the most rows of each source; None is no limit.
    """
    before = tuple(0 for _ in limits)
    stretches: list[Stretch] = []
    ends = [first for first, _ in stages[1:]]
    for number, ((row, weights), end) in enumerate(zip(stages, [*ends, None], strict=True)):
        while end is None or row < end:
            left = [
                None if limit is None else limit - dealt
                for limit, dealt in zip(limits, before, strict=True)
            ]
            active = [
                w if room != 0 else Fraction(0) for w, room in zip(weights, left, strict=True)
            ]
            if not (total := sum(active)):
                return Mixture(tuple(stretches), spent=number)
            shares = [w / total for w in active]
            lasts = [int(-(-room // s)) for s, room in zip(shares, left, strict=True) if s and room]
            if end is not None:
                lasts.append(end - row)
            rows = min(lasts) if lasts else None
            if rows is not None:
                quotas = _quotas(rows, shares, left)
                shares = [Fraction(quota, rows) for quota in quotas]
            stretches.append(stretch := Stretch(number, row, rows, tuple(shares), before))
            if rows is None:
                break
            row += rows
            before = tuple(b + quota for b, quota in zip(before, stretch.quotas, strict=True))
    return Mixture(tuple(stretches))


def _quotas(rows: int, shares: Sequence[Fraction], left: Sequence[int | None]) -> list[int]:
    """Return the rows of each source: by its share, and at most what its limit leaves.

    Each is less than one row away from its share of `rows`, except that what a source gives up at
    its limit is less than one row and goes to the others.
    """
    quotas, free = [0] * len(shares), {n for n, share in enumerate(shares) if share}
    while True:
        rest, weight = rows - sum(quotas), sum(shares[n] for n in free)
        full = {
            n for n in free if (room := left[n]) is not None and shares[n] * rest / weight >= room
        }
        for n in full:
            quotas[n] = left[n] or 0
        free -= full
        if not full or not free:
            break
    wanted = {n: shares[n] * rest / weight for n in sorted(free)}
    for n, exact in wanted.items():
        quotas[n] = int(exact)
    by_remainder = sorted(wanted, key=lambda n: (int(wanted[n]) - wanted[n], n))
    for n in by_remainder[: rows - sum(quotas)]:
        quotas[n] += 1
    return quotas


# --- out of a plan -----------------------------------------------------------------------------


def borders(plan: Plan) -> list[int]:
    """Return the first row of each stage of a plan's mixture; one of row 0 where it has none."""
    mixture, length = plan.data.mixture, plan.data.sequence_length
    firsts = [0]
    for stage in mixture.stages[:-1] if mixture else ():
        assert stage.until is not None
        until = Fraction(str(stage.until))
        tokens = until if until > 1 else until * plan.batches.before(plan.horizon_steps or 0)
        firsts.append(int(tokens / length))
    return firsts


def fingerprint(plan: Plan) -> str:
    """Return what a resume compares of a plan's mixture.

    That is where its stages begin, and all that it says. So a goal that moves a stage's border is
    another mixture.
    """
    if (mixture := plan.data.mixture) is None:
        return json.dumps(plan.data.weights) if plan.data.weights else "by size"
    asked = [borders(plan), mixture.model_dump(mode="json")]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def run_rows(plan: Plan) -> int | None:
    """Return the rows of a run to its goal, or to its schedule's end; None where unknown."""
    return _rows_before(plan, plan.goal_steps or plan.horizon_steps)


def _rows_before(plan: Plan, step: int | None) -> int | None:
    """Return the rows of all steps before this one; None where it is not known."""
    return None if step is None else plan.batches.before(step) // plan.data.sequence_length


def mixture_of(plan: Plan, tokens: Sequence[int], units: Sequence[int]) -> Mixture | None:
    """Return a plan's mixture; None where every source counts by its rows, shuffled together.

    Args:
        plan: the plan.
        tokens: of each source, which its weight is by where the plan gives none.
        units: rows of each source, of which an epoch is.

    Raises:
        ConfigError: a share is too small, or the limits end before the run does.
    """
    data = plan.data
    if (asked := data.mixture) is None:
        if data.weights is None:
            return None
        weights = [Fraction(str(w)) for w in data.weights]
        _check_shares(weights, "data.weights", mend(f"data.weights={_raised(data.weights)}"))
        return deal([(0, weights)], [None] * len(units))
    stages = [_weights(stage, tokens, asked.weights) for stage in asked.resolved_stages()]
    limits = [_limit(plan, source, count) for source, count in enumerate(units)]
    mixture = deal(list(zip(borders(plan), stages, strict=True)), limits)
    _check_end(plan, mixture)
    return mixture


def _check_end(plan: Plan, mixture: Mixture) -> None:
    """Refuse limits by which a stage has no source left before the run ends.

    Raises:
        ConfigError: it has none; with the limits taken away, or the steps that there is text for.
    """
    asked, rows = plan.data.mixture, _rows_before(plan, plan.goal_steps)
    if asked is None or mixture.end is None or (rows is not None and rows <= mixture.end):
        return
    reads = "nothing in the plan says how many the run reads"
    if rows is not None:
        reads = f"the run reads {rows:,}"
    endless = mend(
        "data.mixture.max_epochs=0" if asked.max_epochs else "",
        f"data.mixture.max_tokens={[0] * len(plan.source_list)}".replace(" ", "")
        if asked.max_tokens
        else "",
    )
    whole = mixture.end // plan.rows_per_step
    raise ConfigError(
        f"by the limits of data.mixture the sources of stage {mixture.spent} are "
        f"used up after {mixture.end:,} sequences, and {reads}",
        endless | mend(f"goal.steps={whole}") if whole else endless,
    )


def _weights(
    stage: MixtureStage, tokens: Sequence[int], common: Sequence[float] | None
) -> list[Fraction]:
    """Return the weight of each source in a stage.

    Raises:
        ConfigError: a share is too small.
    """
    if stage.weights is not None:
        weights = [Fraction(str(w)) for w in stage.weights]
        key = "data.mixture.weights" if stage.weights is common else "a stage of data.mixture"
        near = f"{[*_raised(stage.weights)]}".replace(" ", "")
        whole = mend(f"{key}={near}") if stage.weights is common else Remedy(text=f"weights={near}")
        _check_shares(weights, key, whole)
        return weights
    hot = stage.temperature or 1.0
    weights = by_temperature(tokens, hot)
    warmer = next(t for n in range(64) if not _too_small(by_temperature(tokens, t := hot * 1.5**n)))
    _check_shares(weights, "data.mixture by size", mend(f"data.mixture.temperature={warmer:.3g}"))
    return weights


def by_temperature(tokens: Sequence[int], temperature: float) -> list[Fraction]:
    """Return weights tokens^(1/temperature), relative to the largest, to nine digits.

    Nine digits are the same on every machine, whatever its library of powers rounds to. At a
    temperature of 1 they are exact.
    """
    if temperature == 1:
        return [Fraction(count) for count in tokens]
    most = max(tokens)
    ratios = ((count / most) ** (1 / temperature) for count in tokens)
    return [Fraction(f"{max(ratio, LEAST_RATIO):.9g}") for ratio in ratios]


def _limit(plan: Plan, source: int, units: int) -> int | None:
    """Return the most rows of a source by the plan's limits; None where it has none."""
    asked, length = plan.data.mixture, plan.data.sequence_length
    assert asked is not None
    limits: list[int] = []
    if asked.max_tokens is not None and asked.max_tokens[source]:
        limits.append(asked.max_tokens[source] // length)
    if epochs := asked.epochs_of(source):
        limits.append(int(Fraction(str(epochs)) * units))
    return min(limits, default=None)


def _too_small(weights: Sequence[Fraction]) -> bool:
    """Return whether a source that has a share has less than the smallest possible one."""
    return min(w for w in weights if w) < sum(weights) * Fraction(SMALLEST_SHARE)


def _check_shares(weights: Sequence[Fraction], key: str, remedy: Remedy) -> None:
    """Refuse a share below the smallest.

    Raises:
        ConfigError: there is one.
    """
    if _too_small(weights):
        smallest = float(min(w for w in weights if w) / sum(weights))
        raise ConfigError(
            f"{key} gives one source a share of {smallest:.2g}, "
            f"the smallest possible is {SMALLEST_SHARE:.2g}",
            remedy,
        )


def _raised(weights: Sequence[float]) -> list[float]:
    """Return the weights, with those that are too small raised to the least that is possible."""
    least = sum(weights) * SMALLEST_SHARE
    return [w if not w or w >= 1.01 * least else float(f"{1.02 * least:.3g}") for w in weights]
