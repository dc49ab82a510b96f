"""Count what is read per step where the batch grows in stages: a pure function of the step."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class BatchStages:
    """Hold a count per step that changes at few steps.

    Args:
        stages: (first step, count of each of its steps), rising from step 0.
    """

    stages: tuple[tuple[int, int], ...]

    def at(self, step: int) -> int:
        """Return the count of a step (0 is the first)."""
        return self.stages[self._stage(step)][1]

    def before(self, step: int) -> int:
        """Return the sum of the counts of all steps before this one."""
        ends = [*(first for first, _ in self.stages[1:]), step]
        return sum(
            count * max(0, min(step, end) - first)
            for (first, count), end in zip(self.stages, ends, strict=True)
        )

    def step_of(self, place: int) -> int:
        """Return the step that has the place-th (from 0) of all that is counted."""
        sums = [self.before(first) for first, _ in self.stages]
        stage = bisect_right(sums, place) - 1
        first, count = self.stages[stage]
        return first + (place - sums[stage]) // count

    def steps_to(self, total: int) -> int:
        """Return how many steps count at least `total` together."""
        return self.step_of(total - 1) + 1 if total > 0 else 0

    def whole(self, steps: float) -> float:
        """Return how many steps of the last count are as much as so many steps from the first."""
        if len(self.stages) == 1:
            return steps
        return self.before(round(steps)) / self.stages[-1][1]

    def each(self, edit: Callable[[int], int]) -> "BatchStages":
        """Return the same stages with `edit(count)` in each."""
        return replace(self, stages=tuple((first, edit(count)) for first, count in self.stages))

    def _stage(self, step: int) -> int:
        return bisect_right([first for first, _ in self.stages], step) - 1
