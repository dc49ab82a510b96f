"""Where each step of one rank's trace went: unions of intervals, never summed kernels.

The device is busy, or idle for one cause: the launch came too late because the host waited for its
data loader (input), for the device (sync), for the driver's allocator (allocator), for a batch to
be copied (copies), or was merely slow (launch); or work was queued and did not start: the device's
own cost between two kernels (between) or a wait for something else (dependency).

Of collectives: all of their time, what no kernel hid (exposed: an upper bound), and what a kernel
waited for (blocking: queued before the collective ended, started as it ended). Only the last can be
recovered from the link. Where the next kernel was launched after the collective had ended, the host
was late, for the causes above. The method is HTA's and Megatron-Bridge's.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field

from headrace.doctor.trace.file import Event, Trace, shown
from headrace.doctor.trace.kernels import (
    KernelRow,
    family_of,
    is_host_copy,
    is_memory_bound,
    is_slow_product,
    short_kernels,
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
from headrace.doctor.trace.steps import Union, Window, label_of, windows

CAUSES = (
    "launch", "sync", "input", "allocator", "copies", "between", "dependency", "unexplained"
)  # fmt: skip

NESTED = 64
"""so many synchronisations are looked back at: .item() is three, each inside the one before"""


@dataclass(frozen=True)
class StepTimes:
    """One step, in seconds.

    Args:
        label: ProfilerStep's number, or the step's place in the trace.
        wall_s: the step.
        busy_s: the device ran a kernel, a copy or a memset.
        compute_s: it ran a kernel that is no collective.
        collective_s: it ran a collective.
        exposed_s: a collective and nothing else.
        blocking_s: a kernel waited for a collective.
        to_device_s: a copy from the host and no kernel.
        to_host_s: a copy to the host and no kernel.
        memory_s: elementwise, normalisation and optimizer kernels that are not short.
        slow_products_s: float32 products without tensor cores.
        idle_s: nothing ran, by cause, as in CAUSES.
        late_s: only a collective ran and the next kernel was launched after it, by cause.
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
    slow_products_s: float
    idle_s: dict[str, float]
    late_s: dict[str, float]


@dataclass(frozen=True)
class Collective:
    """One collective of one rank; `key` names it across ranks: step, kernel and group, place."""

    key: tuple[int, str, int]
    spent_s: float
    blocking_s: float


@dataclass(frozen=True)
class RankTimes:
    """One rank's trace in numbers.

    Args:
        path: the file's name.
        rank: its number; of a file that does not tell, the lowest that no other one has.
        world: ranks of the run, or None.
        marks: steps that the trace marks, measured or not.
        steps: those that were measured.
        kernels: the table, the longest first.
        short: share of kernels under SHORT_KERNEL_US; None without kernels.
        launches: kernels a step.
        collectives: of the measured steps.
        away_s: of idle "launch" and "sync": the host launched nothing for long, a batch followed.
        syncs: what the host waited in, the most often first.
        events: on the device, in the whole trace.
        notes: what a reader should know of the measurement.
        roof: the measured steps against the device's ceilings; None without shapes or ceilings.
    """

    path: str
    rank: int
    world: int | None
    marks: int
    steps: tuple[StepTimes, ...]
    kernels: tuple[KernelRow, ...]
    short: float | None
    launches: float
    collectives: tuple[Collective, ...]
    away_s: float
    syncs: tuple[str, ...]
    events: int
    notes: tuple[str, ...]
    roof: RoofTimes | None

    @property
    def wall_s(self) -> float:
        """All measured steps."""
        return sum(step.wall_s for step in self.steps)


@dataclass
class _Rank:
    """One trace while it is measured."""

    trace: Trace
    windows: list[Window]
    waits: dict[str, list[float]] = field(default_factory=dict)
    late: dict[str, list[float]] = field(default_factory=dict)
    away_us: float = 0.0
    blamed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        trace = self.trace
        self.lows = [w.low_us for w in self.windows]
        self.waits, self.late = (
            {cause: [0.0] * len(self.windows) for cause in CAUSES} for _ in range(2)
        )
        self.loads, self.allocations = Union.of(trace.loads), Union.of(trace.allocations)
        self.mark_starts = [e.start_us for e in trace.steps]
        self.hold_starts = [e.start_us for e in trace.holds]
        kernels = [e for e in trace.device if e.kind == "kernel"]
        self.comm = [e for e in kernels if family_of(e.name) == "collectives"]
        self.compute = [e for e in kernels if family_of(e.name) != "collectives"]

    def window_of(self, at: float) -> int | None:
        """The place of the window that holds a moment."""
        place = bisect_right(self.lows, at) - 1
        return place if place >= 0 and at < self.windows[place].high_us else None

    def launched(self, event: Event) -> float | None:
        """When a kernel's launch was called."""
        return self.trace.launches.get(event.call)

    def step_of(self, event: Event) -> int | None:
        """The label of the step that launched an event, or else of the one it ran in."""
        call, marks = self.launched(event), self.trace.steps
        if call is not None and marks:
            place = bisect_right(self.mark_starts, call) - 1
            return label_of(marks[place], place) if place >= 0 else None
        ran = self.window_of(event.start_us)
        return None if ran is None else self.windows[ran].label

    def held_over(self, at: float, until: float) -> Event | None:
        """The synchronisation in which the host stood at a moment, begun before `until`."""
        last = bisect_left(self.hold_starts, until)
        for event in self.trace.holds[max(last - NESTED, 0) : last]:  # the outermost first
            if event.start_us < at <= event.end_us + CLOCK_SLACK_US:
                return event
        return None

    def share_out_idle(self) -> None:
        """Every gap between the device's events goes to its causes."""
        before: Event | None = None
        for event in self.trace.device:
            if before is not None and event.start_us > before.end_us:
                place = self.window_of((before.end_us + event.start_us) / 2)
                if place is not None:
                    for cause, spent in self._causes(before, event).items():
                        self.waits[cause][place] += spent
            if before is None or event.end_us > before.end_us:
                before = event

    def _causes(self, before: Event, after: Event) -> dict[str, float]:
        """Why the device was idle between two events: cause -> microseconds."""
        low, high, call = before.end_us, after.start_us, self.launched(after)
        gap = high - low
        if call is None:
            return {"unexplained": gap}
        if call + LAUNCH_LATENCY_US < low or (call < low and gap < BACK_TO_BACK_US):
            return {"between" if gap < BACK_TO_BACK_US else "dependency": gap}
        return self._late(low, high, call, before, after)

    def _late(
        self, low: float, high: float, call: float, before: Event, after: Event
    ) -> dict[str, float]:
        """Why the host was late with what runs from `high` on: cause -> microseconds."""
        gap = high - low
        found = {"input": self.loads.inside(low, high)}
        found["allocator"] = min(self.allocations.inside(low, high), gap - found["input"])
        rest = gap - sum(found.values())
        hold = self.held_over(low, call)
        if hold is not None and is_host_copy(before, "HtoD"):
            found["copies"] = rest
        elif not self.trace.loads and gap > AWAY_US and is_host_copy(after, "HtoD"):
            found["input"] = rest
            self.away_us += rest
        elif hold is not None:
            found["sync"] = rest
            self.blamed[hold.name] += 1
        else:
            found["launch"] = rest
        return found

    def share_out_collectives(self) -> Union:
        """When a kernel waited for a collective; where the host was late it goes to `late`."""
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
                if ended > low and (waited or self.held_over(ended, high)):
                    spans += comm.clipped(low, min(ended, high))
                elif call is not None and call > low:
                    self._add_late(comm.clipped(low, min(call, high)), call, before, event)
            if before is None or event.end_us > before.end_us:
                before = event
        return Union(spans)

    def _add_late(
        self, spans: list[tuple[float, float]], call: float, before: Event, after: Event
    ) -> None:
        for low, high in spans:
            place = self.window_of((low + high) / 2)
            if place is not None:
                for cause, spent in self._late(low, high, call, before, after).items():
                    self.late[cause][place] += spent


def measure(trace: Trace) -> RankTimes:
    """One rank's trace in numbers; a rank that it does not tell is 0."""
    rank, machine = _Rank(trace, windows(trace)), machine_of(trace.device_name)
    rank.share_out_idle()
    blocked = rank.share_out_collectives()
    inside = [e for e in trace.device if rank.window_of(e.start_us) is not None]
    counted = inside if rank.windows else trace.device
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
        short=short_kernels(counted),
        launches=kernels / len(rank.windows) if rank.windows else 0.0,
        collectives=_collectives(rank, blocked),
        away_s=rank.away_us * 1e-6,
        syncs=tuple(shown(name) for name, _ in rank.blamed.most_common()),
        events=len(trace.device),
        notes=_notes(trace),
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
        "slow": Union.of(e for e in compute if tf32 and is_slow_product(e.name)),
        "blocked": blocked,
    }
    found = []
    for place, window in enumerate(rank.windows):
        spent_s = {n: u.inside(window.low_us, window.high_us) * 1e-6 for n, u in unions.items()}
        found.append(
            StepTimes(
                label=window.label,
                wall_s=(window.high_us - window.low_us) * 1e-6,
                busy_s=spent_s["busy"],
                compute_s=spent_s["compute"],
                collective_s=spent_s["collective"],
                exposed_s=spent_s["kernels"] - spent_s["compute"],
                blocking_s=spent_s["blocked"],
                to_device_s=spent_s["HtoD"] - spent_s["kernels"],
                to_host_s=spent_s["DtoH"] - spent_s["kernels"],
                memory_s=spent_s["memory"],
                slow_products_s=spent_s["slow"],
                idle_s={cause: spent[place] * 1e-6 for cause, spent in rank.waits.items()},
                late_s={cause: spent[place] * 1e-6 for cause, spent in rank.late.items()},
            )
        )
    return tuple(found)


def _collectives(rank: _Rank, blocked: Union) -> tuple[Collective, ...]:
    """Those of measured steps, each with a key that names it on every rank."""
    measured = {w.label for w in rank.windows}
    seen: Counter[tuple[int, str]] = Counter()
    found = []
    for event in rank.comm:
        step = rank.step_of(event)
        if step not in measured:
            continue
        what = f"{event.name.split('(')[0]} {event.group}".strip()
        spent = event.end_us - event.start_us
        waited = blocked.inside(event.start_us, event.end_us)
        found.append(Collective((step, what, seen[step, what]), spent * 1e-6, waited * 1e-6))
        seen[step, what] += 1
    return tuple(found)


def _notes(trace: Trace) -> tuple[str, ...]:
    notes = [f"events left out, for no clock tells their times: {trace.odd}"] if trace.odd else []
    if trace.devices > 1:
        notes.append(f"{trace.devices} devices ran in this process: only the busiest was read")
    if trace.frames:
        notes.append("Python frames were recorded (with_stack), which slows the host")
    if not trace.loads:
        notes.append("no DataLoader is marked: a wait for data may show as launch")
    return tuple(notes)
