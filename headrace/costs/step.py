"""Add up the time of a step from its pieces of work."""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.costs.constants import number, numbers
from headrace.costs.links import NODE
from headrace.costs.machine import Machine
from headrace.costs.work import (
    AROUND,
    CONTENTION,
    EDGE_S,
    HOST_S,
    OVERLAPPING,
    Attention,
    Beside,
    Collective,
    HostCopy,
    HostWork,
    Phase,
    Work,
    WorkKind,
)

USUAL_LAUNCH = numbers("usual_launch")
"""Seconds that hosts took in runs for what counts as one launch, of eager and of compiled code."""
EMPTY_S = number("empty_launch")


@dataclass(frozen=True)
class StepTime:
    """Say where a step's time would go, in seconds.

    Args:
        device_s: seconds by phase and kind of work, on the device, over all micro-batches; of
            collectives what no kernel hides, and what they make kernels slower.
        host_s: seconds that the host takes to launch the step, and does besides; 0 where the host
            is the device.
        edge_s: seconds between two steps, in which nothing runs.
        usual_launches_s: seconds that hosts took for the launches of such steps in runs.
    """

    device_s: Mapping[tuple[Phase, WorkKind], float]
    host_s: float
    edge_s: float = EDGE_S
    usual_launches_s: float = 0.0

    @property
    def by_host(self) -> bool:
        """Return whether the device waits for launches."""
        return self.host_s >= sum(self.device_s.values())

    @property
    def step_s(self) -> float:
        """Return the slower of device and host, and the edge between two steps."""
        return max(sum(self.device_s.values()), self.host_s) + self.edge_s

    @property
    def work_s(self) -> dict[str, float]:
        """Return seconds on the device by kind; recomputation and the update are apart."""
        sums = dict[str, float]()
        for (phase, kind), spent_s in self.device_s.items():
            name = f"{kind}, {phase}" if phase in ("recompute", "optimizer") else kind
            sums[name] = sums.get(name, 0.0) + spent_s
        return sums

    def of(self, what: str) -> float:
        """Return the seconds on the device of a phase or a kind."""
        return sum(spent_s for key, spent_s in self.device_s.items() if what in key)


def step_time(
    work: Mapping[str, Work], machine: Machine, micro_batches: float, idle: float = 0.0
) -> StepTime:
    """Return the time of a step from its pieces.

    On one device nothing overlaps but the host, which launches, and copies over its link, which a
    phase hides as far as its other work reaches: what is left of them counts. So it does of what
    ranks send each other while they compute.

    Args:
        work: pieces by name.
        machine: the rates.
        micro_batches: micro-batches of a step.
        idle: share of both passes in which a rank has nothing to do.
    """
    device_s: dict[tuple[Phase, WorkKind], float] = {}
    for piece in work.values():
        if not isinstance(piece, HostWork | Collective):
            key = (piece.phase, piece.kind)
            spent_s = piece.times(micro_batches) * piece.seconds(machine)
            device_s[key] = device_s.get(key, 0.0) + spent_s
    for phase, kind in list(device_s):
        if kind == "host link":
            others = sum(s for (p, k), s in device_s.items() if p == phase and k != kind)
            device_s[phase, kind] = max(0.0, device_s[phase, kind] - others)
    for phases in OVERLAPPING:
        pieces = {n: piece for n, piece in work.items() if piece.phase in phases}
        if any(isinstance(piece, Collective) for piece in pieces.values()):
            times = 1.0 if "optimizer" in phases else micro_batches
            exposed_s = _exposed_s(pieces, machine, times)
            inside = {n: piece for n, piece in pieces.items() if not _leaves_host(piece, machine)}
            inside_s = exposed_s if inside == pieces else _exposed_s(inside, machine, times)
            device_s[phases[-1], "collective"] = inside_s
            if exposed_s > inside_s:
                device_s[phases[-1], "network"] = exposed_s - inside_s
    if idle:
        passes_s = sum(s for (phase, _), s in device_s.items() if phase != "optimizer")
        device_s["backward", "wait"] = passes_s * idle / (1 - idle)
    launched = launches(work, micro_batches)
    graphs_s = launched.graphs * machine.graph_launch_s
    host_s = HOST_S + launched.every * machine.launch_s + graphs_s
    return StepTime(device_s, host_s, usual_launches_s=launched.usual_s(*USUAL_LAUNCH) + graphs_s)


def _leaves_host(piece: Work, machine: Machine) -> bool:
    """Return whether a piece is sent between hosts, at the rate that a plan gives the network."""
    far = isinstance(piece, Collective) and piece.reach > NODE
    return far and machine.network_bytes_per_s is not None


@dataclass(frozen=True)
class Launches:
    """Hold what a host launches in a step, in launches of an empty kernel.

    Args:
        every: all launches that no graph replays.
        eager: those of eager code.
        compiled: those of compiled code.
        graphs: how many recorded graphs are replayed.
    """

    every: float
    eager: float
    compiled: float
    graphs: float

    def usual_s(self, eager_s: float, compiled_s: float) -> float:
        """Return the seconds of all but the graphs by those of one launch of each kind.

        What is neither, as custom operations and blocks that run again, was timed itself.
        """
        other = self.every - self.eager - self.compiled
        return self.eager * eager_s + self.compiled * compiled_s + other * EMPTY_S


def launches(work: Mapping[str, Work], micro_batches: float) -> Launches:
    """Return what the host launches in a step of so many micro-batches."""
    every, replayed = 0.0, dict[Phase, float]()
    counts = dict.fromkeys(("eager", "compiled", "other"), 0.0)
    for piece in work.values():
        if piece.recorded:
            replayed[piece.phase] = piece.times(micro_batches)
            continue
        every += piece.launches(micro_batches)
        counts[piece.launched_by] += piece.launches(micro_batches)
    return Launches(every, counts["eager"], counts["compiled"], sum(replayed.values()))


def _exposed_s(pieces: Mapping[str, Work], machine: Machine, micro_batches: float) -> float:
    """Return the seconds that collectives of phases that run as one add to a step.

    They share one link, so they run one after another. Of those that run beside kernels, what is
    longer than these waits; what is not makes them slower by `CONTENTION`.
    """
    sent_s: dict[tuple[Beside, bool], float] = {}
    attention_s = blocks_s = 0.0
    for name, piece in pieces.items():
        if isinstance(piece, Collective):
            key = (piece.beside, piece.last)
            sent_s[key] = sent_s.get(key, 0.0) + piece.seconds(machine)
        elif not isinstance(piece, HostCopy) and not name.startswith(AROUND):
            blocks_s += piece.seconds(machine)
            attention_s += piece.seconds(machine) * isinstance(piece, Attention)
    whole_s = 0.0
    for last, times in ((False, micro_batches - 1), (True, 1.0)):
        taken_s = {
            beside: sent_s.get((beside, False), 0.0) + last * sent_s.get((beside, True), 0.0)
            for beside in ("", "attention", "blocks")
        }
        under_s = min(taken_s["attention"], attention_s)
        under_s += min(taken_s["blocks"], blocks_s - under_s)
        whole_s += times * (sum(taken_s.values()) - (1 - CONTENTION) * under_s)
    return whole_s
