"""What a verdict is, and where a run's time went by its report.

A station is a phase's share of the wall clock with its evidence, and no verdict: what binds a step
is in physics.py. What the signals do not separate is said, not guessed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace.core.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Finding:
    """One verdict.

    Args:
        bottleneck: the station's name.
        share: of the measured time, or of the tokens or the memory it is about; 0 to 1.
        sentence: the verdict for a reader.
        evidence: the numbers that it rests on.
        confidence: "measured" or "inferred".
        not_measured: what would sharpen it.
    """

    bottleneck: str
    share: float
    sentence: str
    evidence: str
    confidence: str
    not_measured: str = ""


ABSTAINED = "not measured"
"""The bottleneck of a finding that names none."""
PASSES = "forward and backward"
"""The phase of both passes. It is no bottleneck: a device may do nothing in most of it."""
STATIONS = {
    PASSES: ("forward", "backward"),
    "input": ("input",),
    "optimizer": ("optimizer",),
    "communication": ("communication_exposed",),
    "compilation": ("compile",),
    "evaluation": ("eval",),
    "checkpointing": ("checkpoint",),
    "between steps": ("other",),
}


def stations(report: Mapping[str, Any]) -> list[Finding]:
    """Every phase that took time, the longest first, then memory and wasted tokens."""
    phase_s = report["phase_s"]
    total_s = sum(phase_s.values())
    found = []
    for station, phases in STATIONS.items():
        spent_s = sum(phase_s.get(p, 0.0) for p in phases)
        if total_s and spent_s:
            found.append(_station(station, spent_s, total_s, report))
    found.sort(key=lambda f: -f.share)
    return [*found, *_memory(report), *_waste(report)]


def plain(findings: list[Finding]) -> list[dict[str, Any]]:
    """As JSON values, for findings.json."""
    return [asdict(f) for f in findings]


def _station(station: str, spent_s: float, total_s: float, report: Mapping[str, Any]) -> Finding:
    share = spent_s / total_s
    evidence = f"{format_seconds(spent_s)} of {format_seconds(total_s)} measured"
    missing = ""
    if station == PASSES:
        phase_s = report["phase_s"]
        missing = "matrix products, attention and memory-bound work are not told apart"
        evidence += (
            f": forward {format_seconds(phase_s['forward'])}, "
            f"backward {format_seconds(phase_s['backward'])}"
        )
    if station == "input" and report["input_wait"]["p99_s"] is not None:
        wait = report["input_wait"]
        evidence += (
            f"; wait p50 {format_seconds(wait['p50_s'])}, p99 {format_seconds(wait['p99_s'])}, "
            f"{wait['stalled_steps']} stalled steps"
        )
    sentence = f"{station[0].upper()}{station[1:]} took {share:.1%} of the measured time."
    return Finding(station, share, sentence, evidence, "measured", missing)


def _memory(report: Mapping[str, Any]) -> list[Finding]:
    """What owns the peak, predicted against measured."""
    memory, lines = report["peak_memory_bytes"], report["memory_lines"]
    if not lines:
        return []
    top = max(lines, key=lambda line: line["bytes"])
    share = top["bytes"] / memory["predicted"]
    evidence = f"predicted {format_bytes(memory['predicted'])}"
    if memory["allocated"]:
        off = memory["predicted"] / memory["allocated"] - 1
        measured = format_bytes(memory["allocated"])
        evidence += f", measured {measured} by the {memory['method']} ({off:+.0%})"
    sentence = f"Most of the peak memory is {top['name']}: {share:.0%} of the prediction."
    return [Finding("memory", share, sentence, evidence, "inferred")]


def _waste(report: Mapping[str, Any]) -> list[Finding]:
    """Tokens that no loss counted."""
    share = report["wasted_token_fraction"]
    if share is None:
        return []
    sentence, evidence = (
        f"{share:.1%} of the tokens had no target.",
        f"of {report['tokens']} tokens",
    )
    padded = report.get("padding_fraction") or 0.0
    if padded > share:
        evidence += f"; {padded:.1%} are padding, and the loss counts {padded - share:.1%}"
    return [Finding("wasted tokens", share, sentence, evidence, "measured")]
