"""Where the steps of a trace lie on the device, and unions of intervals.

A step's window goes from the first kernel that it launched on the busiest stream to the next step's
first kernel. The host runs ahead, so its own marks would cut the device's work in the wrong place.
The last step has no such end and is left out, and so is a first one that is still warming up.
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
    """A union of intervals in microseconds, with the length covered up to any moment."""

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
        """Of events."""
        return cls((e.start_us, e.end_us) for e in events)

    def _until(self, at: float) -> float:
        index = bisect_right(self.starts, at)
        return self._before[index] - max(self.ends[index - 1] - at, 0.0) if index else 0.0

    def inside(self, low: float, high: float) -> float:
        """Microseconds covered between two moments."""
        return self._until(high) - self._until(low) if high > low else 0.0

    def clipped(self, low: float, high: float) -> list[tuple[float, float]]:
        """Its intervals between two moments."""
        first, last = bisect_right(self.ends, low), bisect_left(self.starts, high)
        spans = zip(self.starts[first:last], self.ends[first:last], strict=True)
        return [(max(s, low), min(e, high)) for s, e in spans]

    def gaps(self) -> Iterable[tuple[float, float]]:
        """What lies between its intervals."""
        return zip(self.ends, self.starts[1:], strict=False)


@dataclass(frozen=True)
class Window:
    """One step on the device: from its first kernel to the next step's."""

    label: int
    low_us: float
    high_us: float


def windows(trace: Trace) -> list[Window]:
    """The steps on the device; empty when the trace does not tell them apart."""
    marks = trace.steps
    if not trace.launches or not marks:
        marks = trace.device_steps
        firsts = [(mark, mark.start_us) for mark in marks]
    else:
        firsts = _first_kernels(trace)
    places = {mark.start_us: place for place, mark in enumerate(marks)}
    found = []
    for (mark, low), (after, high) in pairwise(firsts):
        label, then = (label_of(m, places[m.start_us]) for m in (mark, after))
        if then == label + 1 and high > low:
            found.append(Window(label, low, high))
    walls = [w.high_us - w.low_us for w in found]
    if len(found) > 3 and walls[0] > WARM_UP * median(walls):
        return found[1:]
    return found


def label_of(mark: Event, place: int) -> int:
    """The number of a ProfilerStep, or the place of another mark."""
    numbered = STEP.match(mark.name)
    return int(numbered[1]) if numbered else place


def _first_kernels(trace: Trace) -> list[tuple[Event, float]]:
    """When the first kernel that each step launched on the busiest stream began."""
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
    found = []
    for mark, (low, high) in zip(trace.steps, pairwise(bounds), strict=True):
        begun = [start for _, start in ran[bisect_left(calls, low) : bisect_left(calls, high)]]
        if begun:
            found.append((mark, min(begun)))
    return found
