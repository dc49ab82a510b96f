"""Define what a finding is: a kind, a share, and facts; words come last (`doctor/words`).

Every decision of the doctor reads the kind or the facts of a finding. The sentence, the evidence
and what was not measured are rendered from them when a reader asks. The name of a bottleneck is
public: it stands in findings.json and in report.json, and techniques name it in their `symptoms`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal

ABSTAINED = "not measured"
"""The bottleneck of a finding that names none."""
PASSES = "forward and backward"
"""The phase of both passes. It is no bottleneck: a device may do nothing in most of it."""
PHASES: Mapping[str, tuple[str, ...]] = {
    PASSES: ("forward", "backward"),
    "input": ("input",),
    "optimizer": ("optimizer",),
    "communication": ("communication_exposed",),
    "compilation": ("compile",),
    "evaluation": ("eval",),
    "checkpointing": ("checkpoint",),
    "between steps": ("other",),
}
"""Name of a phase for a reader -> its keys in `phase_s` of report.json."""

Facts = Mapping[str, Any]
"""Facts of a finding by name. A name ends with its unit (`_s`, `_bytes`, `_share`, `_nats`)."""
Confidence = Literal["measured", "inferred"]


class Kind(Enum):
    """Name what a finding says. `doctor/words` has one sentence for each."""

    PHASE = auto()
    PEAK_MEMORY = auto()
    TOKENS_WITHOUT_TARGET = auto()

    TOO_FEW_STEPS = auto()
    OUT_OF_MEMORY = auto()
    ENDED_NOT_FINITE = auto()
    DIVERGED = auto()
    UNTRAINED = auto()
    INACTIVE = auto()
    UNREACHED = auto()
    ABOVE_THE_START = auto()
    FORGOT = auto()
    OVERFITS = auto()
    RELAPSED = auto()
    RISING = auto()
    SPIKES = auto()
    LOST_STEPS = auto()

    INPUT_WAIT = auto()
    EXPOSED_COMMUNICATION = auto()
    STRAGGLER = auto()
    PIPELINE_IMBALANCE = auto()
    WRONG_LAYOUT = auto()
    RECOMPILES = auto()
    TINY_OPERATIONS = auto()
    GRAPH_BREAKS = auto()
    WIDE_MATMULS = auto()
    WASTED_TOKENS = auto()
    NEEDLESS_SAVINGS = auto()
    MEMORY_IN_PIECES = auto()
    MEMORY_FULL = auto()
    CLOCK_LIMITED = auto()
    SLOWER_RECIPE = auto()

    GPU_IDLES = auto()
    HOST_NEVER_AHEAD = auto()
    OPERATION_OVERHEAD = auto()
    MOVES_BYTES = auto()
    SMALL_MATMULS = auto()
    SLOW_KERNELS = auto()
    COMPUTES = auto()
    NEAR_THE_PEAK = auto()
    UNPRICED = auto()
    OTHER_TEMPLATE = auto()
    WIDE_BASE = auto()
    HOST_OPERATIONS = auto()
    HOST_SPLIT = auto()
    NO_TRACE = auto()
    UNREADABLE_TRACE = auto()
    NO_HOOK = auto()
    NOT_IN_LOG = auto()

    TRACE_WITHOUT_DEVICE = auto()
    TRACE_WITHOUT_TIMES = auto()
    TRACE_WITHOUT_STEPS = auto()
    TRACE_LAUNCH = auto()
    TRACE_INPUT = auto()
    TRACE_INTERCONNECT = auto()
    TRACE_STRAGGLER = auto()
    TRACE_ALLOCATOR = auto()
    TRACE_MEMORY_KERNELS = auto()
    TRACE_BANDWIDTH = auto()
    TRACE_SLOW_MATMULS = auto()
    TRACE_INEFFICIENT = auto()
    TRACE_DEPENDENCY = auto()
    TRACE_UNEXPLAINED = auto()
    TRACE_COMPUTATION = auto()

    PLAN_IN_FP32 = auto()
    PLAN_DOES_NOT_FIT = auto()
    PLAN_SAVES_NEEDLESSLY = auto()
    PLAN_MICRO_BATCHES = auto()
    PLAN_MEMORY = auto()
    PLAN_WITHOUT_TIME = auto()
    PLAN_LAUNCH = auto()
    PLAN_MOVES_BYTES = auto()
    PLAN_STEP = auto()


_BOTTLENECKS: Mapping[str, tuple[Kind, ...]] = {
    "memory": (Kind.PEAK_MEMORY, Kind.PLAN_MEMORY),
    "wasted tokens": (Kind.TOKENS_WITHOUT_TARGET, Kind.WASTED_TOKENS),
    ABSTAINED: (
        Kind.TOO_FEW_STEPS,
        Kind.UNPRICED,
        Kind.NO_TRACE,
        Kind.UNREADABLE_TRACE,
        Kind.NO_HOOK,
        Kind.NOT_IN_LOG,
        Kind.TRACE_WITHOUT_DEVICE,
        Kind.TRACE_WITHOUT_TIMES,
        Kind.TRACE_WITHOUT_STEPS,
        Kind.TRACE_DEPENDENCY,
        Kind.TRACE_UNEXPLAINED,
        Kind.PLAN_WITHOUT_TIME,
    ),
    "memory capacity": (
        Kind.OUT_OF_MEMORY,
        Kind.MEMORY_FULL,
        Kind.TRACE_ALLOCATOR,
        Kind.PLAN_DOES_NOT_FIT,
    ),
    "fragmentation": (Kind.MEMORY_IN_PIECES,),
    "unused memory": (
        Kind.NEEDLESS_SAVINGS,
        Kind.PLAN_SAVES_NEEDLESSLY,
        Kind.PLAN_MICRO_BATCHES,
    ),
    "instability": (
        Kind.ENDED_NOT_FINITE,
        Kind.DIVERGED,
        Kind.ABOVE_THE_START,
        Kind.RELAPSED,
        Kind.RISING,
        Kind.SPIKES,
        Kind.LOST_STEPS,
    ),
    "silent no-op": (Kind.UNTRAINED, Kind.INACTIVE, Kind.UNREACHED),
    "forgetting": (Kind.FORGOT,),
    "overfitting": (Kind.OVERFITS,),
    "chat template": (Kind.OTHER_TEMPLATE,),
    "recipe": (Kind.SLOWER_RECIPE,),
    "input": (Kind.INPUT_WAIT, Kind.TRACE_INPUT),
    "interconnect": (Kind.EXPOSED_COMMUNICATION, Kind.TRACE_INTERCONNECT),
    "straggler": (Kind.STRAGGLER, Kind.TRACE_STRAGGLER),
    "pipeline imbalance": (Kind.PIPELINE_IMBALANCE,),
    "wrong layout": (Kind.WRONG_LAYOUT,),
    "launch": (
        Kind.RECOMPILES,
        Kind.TINY_OPERATIONS,
        Kind.GRAPH_BREAKS,
        Kind.GPU_IDLES,
        Kind.HOST_NEVER_AHEAD,
        Kind.OPERATION_OVERHEAD,
        Kind.TRACE_LAUNCH,
        Kind.PLAN_LAUNCH,
    ),
    "memory bandwidth": (
        Kind.MOVES_BYTES,
        Kind.WIDE_BASE,
        Kind.TRACE_MEMORY_KERNELS,
        Kind.TRACE_BANDWIDTH,
        Kind.PLAN_MOVES_BYTES,
    ),
    "kernel efficiency": (
        Kind.WIDE_MATMULS,
        Kind.CLOCK_LIMITED,
        Kind.SMALL_MATMULS,
        Kind.SLOW_KERNELS,
        Kind.TRACE_SLOW_MATMULS,
        Kind.TRACE_INEFFICIENT,
        Kind.PLAN_IN_FP32,
    ),
    "computation": (
        Kind.COMPUTES,
        Kind.NEAR_THE_PEAK,
        Kind.HOST_OPERATIONS,
        Kind.HOST_SPLIT,
        Kind.TRACE_COMPUTATION,
    ),
}
BOTTLENECK_OF: Mapping[Kind, str] = {
    kind: bottleneck for bottleneck, members in _BOTTLENECKS.items() for kind in members
}
"""Bottleneck of each kind; a phase and the largest part of a plan's step name their own."""
KIND_OF: Mapping[str, Kind] = {name: members[0] for name, members in _BOTTLENECKS.items()}
"""Bottleneck -> a kind that names it, for whom the bottleneck alone matters."""
OF_PHASES = (Kind.PHASE, Kind.PEAK_MEMORY, Kind.TOKENS_WITHOUT_TARGET)
"""Kinds that say where time, memory and tokens went, and that nothing is wrong with it."""


@dataclass(frozen=True)
class Finding:
    """Hold one verdict of the doctor.

    Args:
        kind: what it says.
        share: the share of the measured time, or of the tokens or the memory it is about; 0 to 1.
        facts: the numbers and names that it rests on.
        confidence: whether it was measured, or inferred from what was.
        beside: findings of which the evidence stands behind its own.
    """

    kind: Kind
    share: float = 0.0
    facts: Facts = field(default_factory=dict)
    confidence: Confidence = "measured"
    beside: tuple["Finding", ...] = ()

    @property
    def bottleneck(self) -> str:
        """Return the public name of what it finds; `ABSTAINED` where it names nothing."""
        return self.facts.get("bottleneck") or BOTTLENECK_OF[self.kind]

    @property
    def abstains(self) -> bool:
        """Return whether it names no bottleneck."""
        return self.bottleneck == ABSTAINED


def phase_findings(report: Mapping[str, Any]) -> list[Finding]:
    """Return every phase that took time, the longest first, then memory and the padding fraction.

    Args:
        report: report.json of a run, or what `headrace.watch` saved.
    """
    phase_s = report["phase_s"]
    total_s = sum(phase_s.values())
    phases = []
    for name, keys in PHASES.items():
        spent_s = sum(phase_s.get(key, 0.0) for key in keys)
        if total_s and spent_s:
            phases.append(_phase(name, spent_s, total_s, report))
    phases.sort(key=lambda finding: -finding.share)
    return [*phases, *_peak_memory(report), *_tokens_without_target(report)]


def _phase(name: str, spent_s: float, total_s: float, report: Mapping[str, Any]) -> Finding:
    facts: dict[str, Any] = {"bottleneck": name, "spent_s": spent_s, "total_s": total_s}
    if name == PASSES:
        facts |= {f"{key}_s": report["phase_s"][key] for key in ("forward", "backward")}
    if name == "input" and report["input_wait"]["p99_s"] is not None:
        facts["wait"] = report["input_wait"]
    return Finding(Kind.PHASE, spent_s / total_s, facts)


def _peak_memory(report: Mapping[str, Any]) -> list[Finding]:
    """Return what owns the peak, and the prediction beside the measurement."""
    memory, lines = report["peak_memory_bytes"], report["memory_lines"]
    if not lines:
        return []
    largest = max(lines, key=lambda line: line["bytes"])
    facts = {"owner": largest["name"], "predicted_bytes": memory["predicted"]}
    if memory["allocated"]:
        facts |= {"measured_bytes": memory["allocated"], "method": memory["method"]}
    share = largest["bytes"] / memory["predicted"]
    return [Finding(Kind.PEAK_MEMORY, share, facts, "inferred")]


def _tokens_without_target(report: Mapping[str, Any]) -> list[Finding]:
    """Return the share of the tokens that no loss counted."""
    share = report["wasted_token_fraction"]
    if share is None:
        return []
    facts = {"tokens": report["tokens"], "padding_share": report.get("padding_fraction") or 0.0}
    return [Finding(Kind.TOKENS_WITHOUT_TARGET, share, facts)]
