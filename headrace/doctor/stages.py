"""Hold what ranks of a pipeline take for their passes, and what other layers would make of it.

A step of a pipeline takes the passes of its slowest rank, and what filling and draining adds: the
schedule's share of waits where all ranks are equally slow. Of one micro-batch alone no rank waits
for a slower one, for each computes it once; of many, every other one does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class StageTimes:
    """Hold seconds of a step's passes of each rank of a pipeline, its first rank first.

    Args:
        own_s: seconds of each rank's passes, without the waits between them.
        layers: of each rank.
        micro_batches: of a step.
        idle_share: share of a step in which the schedule lets a rank wait where all are equally
            slow.
        head: the place of the rank that has the head.
    """

    own_s: tuple[float, ...]
    layers: tuple[int, ...]
    micro_batches: float
    idle_share: float
    head: int

    @staticmethod
    def of(signal: Mapping[str, Any] | None) -> "StageTimes | None":
        """Read what a run wrote into its report; None where it is not there."""
        if not signal or not signal["own_s"] or not all(s > 0 for s in signal["own_s"]):
            return None
        counts = tuple(int(n) for n in signal["layers"])
        own_s = tuple(float(s) for s in signal["own_s"])
        idle = float(signal["idle_share"] or 0.0)
        head = len(counts) - 1 if signal["head"] is None else int(signal["head"])
        return StageTimes(own_s, counts, float(signal["micro_batches"]), idle, head)

    @property
    def slowest(self) -> int:
        """Return the place of the rank that takes longest."""
        return self.own_s.index(max(self.own_s))

    @property
    def mean_s(self) -> float:
        """Return the mean seconds of the ranks' passes."""
        return fmean(self.own_s)

    @property
    def lost_s(self) -> float:
        """Return the seconds of a step in which the ranks wait for the slowest one's passes."""
        return (1 - 1 / self.micro_batches) * (max(self.own_s) - self.mean_s)

    @property
    def passes_s(self) -> float:
        """Return the seconds from a step's first pass to its last one, with no time to send."""
        fill_s = self.mean_s * self.idle_share / (1 - self.idle_share)
        return self.mean_s + self.lost_s + fill_s

    @property
    def waited_s(self) -> float:
        """Return the seconds of a step in which the first rank waits for others to compute."""
        return self.passes_s - self.own_s[0]

    def layer_s(self, place: int) -> float:
        """Return the seconds of one layer of a rank.

        Of the rank that has the head too, it is at most that of the fastest other rank.
        """
        each = [own_s / count for own_s, count in zip(self.own_s, self.layers, strict=True)]
        others = [one for rank, one in enumerate(each) if rank != self.head]
        return min(each[place], *others) if place == self.head else each[place]

    def with_layers(
        self, layers: Sequence[int], micro_batches: float, idle_share: float, head: int
    ) -> "StageTimes":
        """Return the times with other layers on each rank, under another schedule.

        Args:
            layers: of each rank.
            micro_batches: of a step.
            idle_share: see the class.
            head: the place of the rank that has the head then.
        """
        own_s = [n * self.layer_s(place) for place, n in enumerate(layers)]
        own_s[head] += self.own_s[self.head] - self.layers[self.head] * self.layer_s(self.head)
        return StageTimes(tuple(own_s), tuple(layers), micro_batches, idle_share, head)

    def moved(self, source: int, target: int) -> "StageTimes":
        """Return the times with one layer on another rank."""
        layers = [n - (place == source) + (place == target) for place, n in enumerate(self.layers)]
        return self.with_layers(layers, self.micro_batches, self.idle_share, self.head)

    def even(self) -> "StageTimes":
        """Return the times with layers moved, one by one, as long as the slowest rank gains.

        Each rank keeps one layer at least.
        """
        best = self
        while best.layers[best.slowest] > 1:
            others = [place for place in range(len(best.layers)) if place != best.slowest]
            tried = [best.moved(best.slowest, place) for place in others]
            least = min(tried, key=lambda one: max(one.own_s))
            if max(least.own_s) >= max(best.own_s):
                break
            best = least
        return best
