"""Measure one run's traces together: each rank's numbers, and its collectives against others.

A collective ends for all ranks at once and begins for each as it arrives. So its transfer is its
shortest time over the ranks, and what a rank's own took beyond that is waiting for a slower one
(TraceLens, Megatron-Bridge). Durations are compared and never clocks, so ranks of several hosts may
be given. A collective is named by step, kernel, process group and place; where ranks ran different
numbers of a kind in a step, that kind is left out.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.doctor.trace.file import read_trace
from headrace.doctor.trace.times import RankTimes, StepTimes, measure

POINT_TO_POINT = "sendrecv"
"""Part of the names of transfers between two ranks, which are no collectives."""


@dataclass(frozen=True)
class Ranks:
    """Hold collectives compared over ranks; a tuple has one number a rank, in the files' order.

    Args:
        matched: collectives that two ranks or more have.
        waited_s: seconds that kernels waited beyond the shortest time over ranks.
        last: the rank for which the others wait most often.
        last_share: share of the matched collectives in which they do.
    """

    matched: int
    waited_s: tuple[float, ...]
    last: int | None
    last_share: float


@dataclass(frozen=True)
class TraceNumbers:
    """Hold all that was measured: each rank's steps and kernels, and the ranks compared.

    Where signals of the same run say how long its steps are without a profiler
    (`undisturbed_s`), what a traced step takes beyond that is the profiler's own doing.
    """

    ranks: tuple[RankTimes, ...]
    between_ranks: Ranks
    undisturbed_s: float | None = None

    def step_s(self) -> float:
        """Return the mean step of the median rank in seconds; 0 when none was measured."""
        return median([r.wall_s / len(r.steps) for r in self.ranks if r.steps] or [0.0])

    def profiler_s(self) -> float:
        """Return the seconds that a step took longer for being traced; 0 where nobody knows."""
        return max(0.0, self.step_s() - (self.undisturbed_s or self.step_s()))

    def share(self, of: Callable[[StepTimes], float]) -> float:
        """Return the share of a step that something takes: the median over measured ranks."""
        shares = [sum(map(of, r.steps)) / r.wall_s for r in self.ranks if r.steps]
        return median(shares or [0.0])

    def idle(self, cause: str) -> float:
        """Return the share of a step without computation for one of times.CAUSES."""
        return self.share(lambda step: step.idle_s[cause] + step.after_s[cause])


def measure_traces(paths: Sequence[Path]) -> TraceNumbers:
    """Return the numbers of one run's traces, one file a rank, read one after the other.

    Raises:
        ConfigError: a file cannot be read or was given twice, or two are of one rank.
    """
    assert paths, "at least one trace"
    twice = [path for path, n in Counter(path.absolute() for path in paths).items() if n > 1]
    if twice:
        left = [*dict.fromkeys(path.absolute() for path in paths)]
        kept = [next(path for path in paths if path.absolute() == one) for one in left]
        raise ConfigError(f"{twice[0]} was given twice", _command(kept))
    measured = [_measured(path) for path in paths]
    known = {rank.rank for rank, numbered in measured if numbered}
    free = (number for number in itertools.count() if number not in known)
    ranks = tuple(r if numbered else replace(r, rank=next(free)) for r, numbered in measured)
    often, count = Counter(r.rank for r in ranks).most_common(1)[0]
    if count > 1:
        names = ", ".join(r.path for r in ranks if r.rank == often)
        newest = sorted(zip(paths, ranks, strict=True), key=lambda one: one[0].stat().st_mtime)
        kept = {rank.rank: path for path, rank in newest}
        raise ConfigError(
            f"{count} of the {len(ranks)} traces are of rank {often}: {names}; one recording has "
            "one of each rank",
            _command([kept[rank] for rank in sorted(kept)]),
        )
    return TraceNumbers(ranks, _compare(ranks))


def _command(paths: Sequence[Path]) -> str:
    """Return the command that judges these traces."""
    return " ".join(["headrace doctor", *map(shell, paths)])


def _measured(path: Path) -> tuple[RankTimes, bool]:
    """Return one file's numbers, and whether it numbers its rank."""
    trace = read_trace(path)
    return measure(trace), trace.rank is not None


def _compare(ranks: Sequence[RankTimes]) -> Ranks:
    """Return the waits for a slower rank, in the collectives that several ranks took part in."""
    sizes = [Counter(c.key[:2] for c in r.collectives) for r in ranks]
    same = {
        kind
        for kind in set().union(*sizes)
        if len({size[kind] for size in sizes if size[kind]}) == 1
        and POINT_TO_POINT not in kind[1].lower()  # a stage waits for its neighbour by design
    }
    owns: dict[tuple[int, str, int], dict[int, tuple[float, float]]] = {}
    for place, rank in enumerate(ranks):
        for one in rank.collectives:
            if one.key[:2] in same:
                owns.setdefault(one.key, {})[place] = one.spent_s, one.blocking_s
    waited = [0.0] * len(ranks)
    last: Counter[int] = Counter()
    shared = [own for own in owns.values() if len(own) > 1]
    for own in shared:
        shortest = min(spent for spent, _ in own.values())
        last[min(own, key=lambda place: own[place][0])] += 1
        for place, (spent, blocking) in own.items():
            waited[place] += min(spent - shortest, blocking)
    place, often = last.most_common(1)[0] if last else (None, 0)
    return Ranks(
        len(shared),
        tuple(waited),
        None if place is None else ranks[place].rank,
        often / len(shared) if shared else 0.0,
    )
