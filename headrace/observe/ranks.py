"""Compare what ranks take for their own work: replicas step by step, and stages of a pipeline.

A clock of a rank that waits for another inside of its work says nothing of its own speed. Ranks
that only share out rows wait after it. Ranks of a pipeline wait between their passes, which is
timed apart.
"""

import platform
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, Protocol

RANKED_STEPS = 512
"""Newest steps in which ranks are compared."""


class PlacedRank(Protocol):
    """Say where a rank is among all of a run."""

    @property
    def ranks(self) -> int:
        """Return how many ranks there are."""
        ...

    def size(self, axis: str) -> int:
        """Return how many ranks an axis has."""
        ...

    def place(self, axis: str) -> int:
        """Return this rank's coordinate on an axis."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        ...


class OwnTimes:
    """Keep what the newest steps took of this rank alone, and compare it with the others'."""

    def __init__(self) -> None:
        self._input_s: deque[float] = deque(maxlen=RANKED_STEPS)
        self._passes_s: deque[tuple[int, float]] = deque(maxlen=RANKED_STEPS)

    def saw(self, row: Mapping[str, Any]) -> None:
        """Take note of a step, unless it compiled or was traced."""
        if row["compile_s"] == 0 and "traced" not in row:
            self._input_s.append(row["input_s"])
            self._passes_s.append((row["step"], row["forward_s"] + row["backward_s"]))

    def compared(
        self, world: PlacedRank, model: Any, micro_batches: float, idle_share: float | None
    ) -> dict[str, Any]:
        """Return "ranks" and "stages", of which one may be None; every rank calls this at once.

        Args:
            world: the ranks.
            model: what this rank has of it: `blocks`, and the last stage a `head`.
            micro_batches: of a step.
            idle_share: share of a step in which the schedule of a pipeline lets a rank wait where
                all stages are equally slow; None without a pipeline.
        """
        alike = world.size("shard") == world.ranks  # else they hold waits for other ranks
        pairs = zip(self._passes_s, self._input_s, strict=True)
        own_s = [(step, passes + read) for (step, passes), read in pairs] if alike else []
        place, has_head = world.place("pipeline"), getattr(model, "head", None) is not None
        each = world.gather([own_s, place, has_head, len(model.blocks), [*self._passes_s]])
        hosts = world.gather(platform.node())
        stages = None
        if world.size("pipeline") > 1:
            stages = between_stages([(place, n, dict(s)) for _, place, _, n, s in each])
        if stages is not None:
            stages |= {"micro_batches": micro_batches, "idle_share": idle_share}
            stages["head"] = next((place for _, place, ends, *_ in each if ends), None)
        ranks = between_ranks([dict(one[0]) for one in each])
        return {"ranks": ranks and {**ranks, "hosts": hosts}, "stages": stages}


def between_ranks(own_s: Sequence[Mapping[int, float]]) -> dict[str, Any] | None:
    """Return how evenly ranks work, from the seconds that each one takes for the same steps.

    Args:
        own_s: for each rank, step -> seconds until its gradients were ready to be summed.

    Returns:
        "own_s": each rank's median; "late_s": by how much the last rank of a step is behind the
        others' median, in the median step, so that what disturbs a rank now and then is not it;
        "waited_s": of each rank, its mean wait for the last; "last": who that was most often;
        "last_share": in how much of the "steps". None without a common step.
    """
    steps = sorted(set.intersection(*(set(times) for times in own_s))) if own_s else []
    if len(own_s) < 2 or not steps:
        return None
    table = [[times[step] for times in own_s] for step in steps]
    lasts = Counter(row.index(max(row)) for row in table)
    last, often = lasts.most_common(1)[0]
    delays_s = [max(row) - median(sorted(row)[:-1]) for row in table]
    return {
        "steps": len(steps),
        "own_s": [median(column) for column in zip(*table, strict=True)],
        "late_s": median(delays_s),
        "last": last,
        "last_share": often / len(steps),
        "waited_s": [
            fmean([max(row) - own for row, own in zip(table, column, strict=True)])
            for column in zip(*table, strict=True)
        ],
    }


def between_stages(
    ranks: Sequence[tuple[int, int, Mapping[int, float]]],
) -> dict[str, Any] | None:
    """Return how evenly ranks of a pipeline compute.

    Args:
        ranks: of each rank, its place in its pipeline, its layers, and step -> seconds of its
            passes without the waits between them.

    Returns:
        for each place, "own_s", the median of a step, of several replicas their mean, and
        "layers"; and the "steps" that all have. None without a common step.
    """
    steps = set.intersection(*(set(times) for _, _, times in ranks)) if ranks else set()
    if not steps:
        return None
    own_s: dict[int, list[float]] = {}
    for place, _, times in ranks:
        own_s.setdefault(place, []).append(median(times[step] for step in steps))
    layers = {place: count for place, count, _ in ranks}
    places = sorted(own_s)
    return {
        "steps": len(steps),
        "own_s": [fmean(own_s[place]) for place in places],
        "layers": [layers[place] for place in places],
    }
