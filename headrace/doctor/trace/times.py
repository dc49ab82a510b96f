"""Measure where each step of one rank's trace went: unions of intervals, never summed kernels.

The device is busy, or idle for one cause: the launch came too late because the host waited for its
data loader (input), for the device (sync), for the driver's allocator (allocator), for a batch to
be copied (copies), or was merely slow (launch); or work was queued and did not start: the device's
own cost between two kernels (between) or a wait for something else (dependency).

Three times of collectives are measured: all of it, what no kernel hid (exposed: an upper bound),
and what a kernel waited for (blocking: queued before the collective ended, started as it ended).
Only the last can be recovered from the link. Where the next kernel was launched after the
collective had ended, the host was behind, for the causes above. The method is HTA's and
Megatron-Bridge's.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field

from headrace.doctor.trace.file import Event, Trace, shown
from headrace.doctor.trace.kernels import (
    KernelRow,
    brief_kernels,
    family_of,
    is_host_copy,
    is_memory_bound,
    is_slow_matmul,
    table,
)
from headrace.doctor.trace.limits import (
    AWAY_US,
    BACK_TO_BACK_US,
    CLOCK_SLACK_US,
    LAUNCH_LATENCY_US,
    WAIT_SLACK_US,
)
from headrace.doctor.trace.roofline import Roof, RoofTimes, machine_of, roof_times
from headrace.doctor.trace.steps import DeviceStep, Union, device_steps, label_of

CAUSES = ("launch", "sync", "input", "allocator", "copies", "between", "dependency", "unexplained")

NESTED = 64
"""Synchronisations that are looked back at: .item() is three, each inside the one before."""


@dataclass(frozen=True)
class StepTimes:
    """Hold the times of one step, in seconds.

    Args:
        label: ProfilerStep's number, or the step's place in the trace.
        wall_s: all of the step.
        busy_s: the device ran a kernel, a copy or a memset.
        compute_s: it ran a kernel that is no collective.
        collective_s: it ran a collective.
        exposed_s: it ran a collective and nothing else.
        blocking_s: a kernel waited for a collective.
        to_device_s: it ran a copy from the host and no kernel.
        to_host_s: it ran a copy to the host and no kernel.
        memory_s: elementwise, normalisation and optimizer kernels that are long enough.
        slow_matmuls_s: float32 matmuls without tensor cores.
        idle_s: nothing ran, by cause, as in CAUSES.
        after_s: only a collective ran and the next kernel was launched after it, by cause.
    """

    label: int
    wall_s: float
    busy_s: float
    compute_s: float
    collective_s: float
    exposed_s: float
    blocking_s: float
    to_device_s: float
    to_host_s: float
    memory_s: float
    slow_matmuls_s: float
    idle_s: dict[str, float]
    after_s: dict[str, float]


@dataclass(frozen=True)
class TracedCollective:
    """Hold one collective of one rank; `key` names it across ranks: step, kernel, place."""

    key: tuple[int, str, int]
    spent_s: float
    blocking_s: float


@dataclass(frozen=True)
class RankTimes:
    """Hold the numbers of one rank's trace.

    Args:
        path: the file's name.
        rank: its number; the lowest that no other file has, where the file does not say.
        world: ranks of the run, or None.
        marks: steps that the trace marks, measured or not.
        steps: those that were measured.
        kernels: the table, the longest first.
        brief_share: share of kernels under BRIEF_KERNEL_US; None without kernels.
        launches: kernels a step.
        collectives: those of the measured steps.
        away_s: idle seconds in which the host launched nothing for long, and a batch followed.
        syncs: what the host waited in, the most often first.
        events: events on the device, in the whole trace.
        odd: events that were left out, since no clock can have given their times.
        frames: whether Python frames were recorded, which slows the host.
        loads: whether a data loader is marked, without which its wait may look like a launch.
        roof: the measured steps against the device's ceilings; None without shapes or ceilings.
    """

    path: str
    rank: int
    world: int | None
    marks: int
    steps: tuple[StepTimes, ...]
    kernels: tuple[KernelRow, ...]
    brief_share: float | None
    launches: float
    collectives: tuple[TracedCollective, ...]
    away_s: float
    syncs: tuple[str, ...]
    events: int
    odd: int
    frames: bool
    loads: bool
    roof: RoofTimes | None

    @property
    def wall_s(self) -> float:
        """Return the seconds of all measured steps."""
        return sum(step.wall_s for step in self.steps)


@dataclass
class _Rank:
    """Measure one trace."""

    trace: Trace
    steps: list[DeviceStep]
    waits: dict[str, list[float]] = field(default_factory=dict)
    after: dict[str, list[float]] = field(default_factory=dict)
    away_us: float = 0.0
    blamed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        trace = self.trace
        self.lows = [step.low_us for step in self.steps]
        self.waits, self.after = (
            {cause: [0.0] * len(self.steps) for cause in CAUSES} for _ in range(2)
        )
        self.loads, self.allocations = Union.of(trace.loads), Union.of(trace.allocations)
        self.mark_starts = [e.start_us for e in trace.steps]
        self.hold_starts = [e.start_us for e in trace.holds]
        kernels = [e for e in trace.device if e.kind == "kernel"]
        self.comm = [e for e in kernels if family_of(e.name) == "collectives"]
        self.compute = [e for e in kernels if family_of(e.name) != "collectives"]

    def place_of(self, at: float) -> int | None:
        """Return the place of the step that holds a moment."""
        place = bisect_right(self.lows, at) - 1
        return place if place >= 0 and at < self.steps[place].high_us else None

    def launched(self, event: Event) -> float | None:
        """Return when a kernel's launch was called."""
        return self.trace.launches.get(event.call)

    def step_of(self, event: Event) -> int | None:
        """Return the label of the step that launched an event, or else of the one it ran in."""
        call, marks = self.launched(event), self.trace.steps
        if call is not None and marks:
            place = bisect_right(self.mark_starts, call) - 1
            return label_of(marks[place], place) if place >= 0 else None
        ran = self.place_of(event.start_us)
        return None if ran is None else self.steps[ran].label

    def synchronisation_at(self, at: float, until: float) -> Event | None:
        """Return the synchronisation in which the host waited at a moment, begun before `until`."""
        last = bisect_left(self.hold_starts, until)
        for event in self.trace.holds[max(last - NESTED, 0) : last]:  # the outermost first
            if event.start_us < at <= event.end_us + CLOCK_SLACK_US:
                return event
        return None

    def share_out_idle(self) -> None:
        """Share out every gap between the device's events to its causes."""
        before: Event | None = None
        for event in self.trace.device:
            if before is not None and event.start_us > before.end_us:
                place = self.place_of((before.end_us + event.start_us) / 2)
                if place is not None:
                    for cause, spent in self._causes(before, event).items():
                        self.waits[cause][place] += spent
            if before is None or event.end_us > before.end_us:
                before = event

    def _causes(self, before: Event, after: Event) -> dict[str, float]:
        """Return why the device was idle between two events: cause -> microseconds."""
        low, high, call = before.end_us, after.start_us, self.launched(after)
        gap = high - low
        if call is None:
            return {"unexplained": gap}
        if call + LAUNCH_LATENCY_US < low or (call < low and gap < BACK_TO_BACK_US):
            return {"between" if gap < BACK_TO_BACK_US else "dependency": gap}
        return self._of_the_host(low, high, call, before, after)

    def _of_the_host(
        self, low: float, high: float, call: float, before: Event, after: Event
    ) -> dict[str, float]:
        """Return why the host launched too late what runs from `high` on: cause -> microseconds."""
        gap = high - low
        causes = {"input": self.loads.inside(low, high)}
        causes["allocator"] = min(self.allocations.inside(low, high), gap - causes["input"])
        rest = gap - sum(causes.values())
        hold = self.synchronisation_at(low, call)
        if hold is not None and is_host_copy(before, "HtoD"):
            causes["copies"] = rest
        elif not self.trace.loads and gap > AWAY_US and is_host_copy(after, "HtoD"):
            causes["input"] = rest
            self.away_us += rest
        elif hold is not None:
            causes["sync"] = rest
            self.blamed[hold.name] += 1
        else:
            causes["launch"] = rest
        return causes

    def share_out_collectives(self) -> Union:
        """Return when kernels waited for collectives; add to `after` where the host was behind."""
        comm, spans = Union.of(self.comm), []
        ends = sorted(e.end_us for e in self.comm)
        before: Event | None = None
        for event in self.compute:
            if before is not None and event.start_us > before.end_us:
                low, high = before.end_us, event.start_us
                place = bisect_right(ends, high + WAIT_SLACK_US) - 1
                ended = ends[place] if place >= 0 else low
                call = self.launched(event)
                waited = high - ended <= WAIT_SLACK_US and (call is None or call < ended)
                if ended > low and (waited or self.synchronisation_at(ended, high)):
                    spans += comm.clipped(low, min(ended, high))
                elif call is not None and call > low:
                    self._add_after(comm.clipped(low, min(call, high)), call, before, event)
            if before is None or event.end_us > before.end_us:
                before = event
        return Union(spans)

    def _add_after(
        self, spans: list[tuple[float, float]], call: float, before: Event, after: Event
    ) -> None:
        for low, high in spans:
            place = self.place_of((low + high) / 2)
            if place is not None:
                for cause, spent in self._of_the_host(low, high, call, before, after).items():
                    self.after[cause][place] += spent


def measure(trace: Trace) -> RankTimes:
    """Return one rank's trace in numbers; the rank is 0 where the trace does not say."""
    rank, machine = _Rank(trace, device_steps(trace)), machine_of(trace.device_name)
    rank.share_out_idle()
    blocked = rank.share_out_collectives()
    inside = [e for e in trace.device if rank.place_of(e.start_us) is not None]
    counted = inside if rank.steps else trace.device
    kernels = sum(e.kind == "kernel" for e in inside)
    roof = Roof(machine) if machine else None
    ceilings = roof_times(roof, roof.worked(counted, trace.operations)) if roof else None
    return RankTimes(
        path=shown(trace.path.name, most=255),
        rank=trace.rank or 0,
        world=trace.world,
        marks=len(trace.steps or trace.device_steps),
        steps=_step_times(rank, blocked),
        kernels=table(counted, ceilings.kernels if ceilings else None),
        brief_share=brief_kernels(counted),
        launches=kernels / len(rank.steps) if rank.steps else 0.0,
        collectives=_collectives(rank, blocked),
        away_s=rank.away_us * 1e-6,
        syncs=tuple(shown(name) for name, _ in rank.blamed.most_common()),
        events=len(trace.device),
        odd=trace.odd,
        frames=trace.frames,
        loads=bool(trace.loads),
        roof=ceilings,
    )


def _step_times(rank: _Rank, blocked: Union) -> tuple[StepTimes, ...]:
    ran, compute, comm = rank.trace.device, rank.compute, rank.comm
    tf32 = rank.trace.computes_tf32
    unions = {
        "busy": Union.of(ran),
        "compute": Union.of(compute),
        "collective": Union.of(comm),
        "kernels": Union.of([*compute, *comm]),
        "HtoD": Union.of(e for e in ran if e.kind == "kernel" or is_host_copy(e, "HtoD")),
        "DtoH": Union.of(e for e in ran if e.kind == "kernel" or is_host_copy(e, "DtoH")),
        "memory": Union.of(e for e in compute if is_memory_bound(e)),
        "slow": Union.of(e for e in compute if tf32 and is_slow_matmul(e.name)),
        "blocked": blocked,
    }
    times = []
    for place, step in enumerate(rank.steps):
        spent_s = {n: u.inside(step.low_us, step.high_us) * 1e-6 for n, u in unions.items()}
        times.append(
            StepTimes(
                label=step.label,
                wall_s=(step.high_us - step.low_us) * 1e-6,
                busy_s=spent_s["busy"],
                compute_s=spent_s["compute"],
                collective_s=spent_s["collective"],
                exposed_s=spent_s["kernels"] - spent_s["compute"],
                blocking_s=spent_s["blocked"],
                to_device_s=spent_s["HtoD"] - spent_s["kernels"],
                to_host_s=spent_s["DtoH"] - spent_s["kernels"],
                memory_s=spent_s["memory"],
                slow_matmuls_s=spent_s["slow"],
                idle_s={cause: spent[place] * 1e-6 for cause, spent in rank.waits.items()},
                after_s={cause: spent[place] * 1e-6 for cause, spent in rank.after.items()},
            )
        )
    return tuple(times)


def _collectives(rank: _Rank, blocked: Union) -> tuple[TracedCollective, ...]:
    """Return those of measured steps, each with a key that names it on every rank."""
    measured = {step.label for step in rank.steps}
    seen: Counter[tuple[int, str]] = Counter()
    collectives = []
    for event in rank.comm:
        step = rank.step_of(event)
        if step not in measured:
            continue
        what = f"{event.name.split('(')[0]} {event.group}".strip()
        spent = event.end_us - event.start_us
        waited = blocked.inside(event.start_us, event.end_us)
        collectives.append(
            TracedCollective((step, what, seen[step, what]), spent * 1e-6, waited * 1e-6)
        )
        seen[step, what] += 1
    return tuple(collectives)
