"""Find where the steps of a trace lie on the device, and unite intervals.

A step on the device goes from the first kernel that it launched on the busiest stream to the next
step's first kernel. The host runs ahead, so its own marks would cut the device's work in the wrong
place. The last step has no such end and is left out, and so is a first one that is still warming
up.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from headrace.doctor.trace.file import STEP, Event, Trace
from headrace.doctor.trace.kernels import family_of
from headrace.doctor.trace.limits import WARM_UP


class Union:
    """A union of intervals has their total length, in microseconds, up to any moment."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []
        for start, end in sorted(spans):
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            elif end > start:
                self.starts.append(start)
                self.ends.append(end)
        lengths = (e - s for s, e in zip(self.starts, self.ends, strict=True))
        self._before = list(accumulate(lengths, initial=0.0))

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Union":
        """Return the union of the times of events."""
        return cls((e.start_us, e.end_us) for e in events)

    def _until(self, at: float) -> float:
        index = bisect_right(self.starts, at)
        return self._before[index] - max(self.ends[index - 1] - at, 0.0) if index else 0.0

    def inside(self, low: float, high: float) -> float:
        """Return the microseconds covered between two moments."""
        return self._until(high) - self._until(low) if high > low else 0.0

    def clipped(self, low: float, high: float) -> list[tuple[float, float]]:
        """Return its intervals between two moments."""
        first, last = bisect_right(self.ends, low), bisect_left(self.starts, high)
        spans = zip(self.starts[first:last], self.ends[first:last], strict=True)
        return [(max(s, low), min(e, high)) for s, e in spans]

    def gaps(self) -> Iterable[tuple[float, float]]:
        """Return what lies between its intervals."""
        return zip(self.ends, self.starts[1:], strict=False)


@dataclass(frozen=True)
class DeviceStep:
    """Hold when one step ran on the device: from its first kernel to the next step's."""

    label: int
    low_us: float
    high_us: float


def device_steps(trace: Trace) -> list[DeviceStep]:
    """Return the steps on the device; none where the trace does not mark them."""
    marks = trace.steps
    if not trace.launches or not marks:
        marks = trace.device_steps
        firsts = [(mark, mark.start_us) for mark in marks]
    else:
        firsts = _first_kernels(trace)
    places = {mark.start_us: place for place, mark in enumerate(marks)}
    steps = []
    for (mark, low), (after, high) in pairwise(firsts):
        label, then = (label_of(m, places[m.start_us]) for m in (mark, after))
        if then == label + 1 and high > low:
            steps.append(DeviceStep(label, low, high))
    walls = [step.high_us - step.low_us for step in steps]
    if len(steps) > 3 and walls[0] > WARM_UP * median(walls):
        return steps[1:]
    return steps


def label_of(mark: Event, place: int) -> int:
    """Return the number of a ProfilerStep, or the place of another mark."""
    numbered = STEP.match(mark.name)
    return int(numbered[1]) if numbered else place


def _first_kernels(trace: Trace) -> list[tuple[Event, float]]:
    """Return when the first kernel began that each step launched on the busiest stream."""
    spent: dict[object, float] = {}
    for event in trace.device:
        if event.kind == "kernel" and family_of(event.name) != "collectives":
            spent[event.stream] = spent.get(event.stream, 0.0) + event.end_us - event.start_us
    main = max(spent, key=lambda stream: spent[stream], default=None)
    ran = sorted(
        (trace.launches[e.call], e.start_us)
        for e in trace.device
        if e.stream == main and e.call in trace.launches
    )
    calls = [call for call, _ in ran]
    bounds = [*(mark.start_us for mark in trace.steps), float("inf")]
    firsts = []
    for mark, (low, high) in zip(trace.steps, pairwise(bounds), strict=True):
        begun = [start for _, start in ran[bisect_left(calls, low) : bisect_left(calls, high)]]
        if begun:
            firsts.append((mark, min(begun)))
    return firsts
