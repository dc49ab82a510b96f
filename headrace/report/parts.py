"""Render the middle of a run's page: where time and memory went, and what the techniques did."""

import warnings
from collections.abc import Mapping

import numpy as np

from headrace.core.units import format_count
from headrace.observe import PHASES
from headrace.report.page import Safe, bar, join, muted, section, stack, swatch, table, tag
from headrace.report.run_files import Report, RunFiles
from headrace.report.words import NOT_MEASURED, percent, seconds, size, whole

COLOURS = dict(zip(PHASES, ("c4", "c0", "c5", "c3", "c1", "c6", "c2", "soft"), strict=True))
REST = "other"
UNTOLD = f" While a run goes on, its evaluations and checkpoints count as {REST}."
STATES: dict[bool | None, tuple[str, str]] = {
    True: ("good", "in force"),
    False: ("bad", "not in force"),
    None: ("plain", "not checked"),
}


def phases(report: Report) -> dict[str, float]:
    """Return measured seconds by phase in the order of a step, and what no phase has last."""
    spent = {name: s for name in PHASES if (s := report.phase_s.get(name)) is not None}
    rest = (report.wall_s or 0.0) - sum(spent.values())
    return {**spent, REST: rest} if spent and rest > 0 else spent


def phase_stack(report: Report, *, width: float = 1.0) -> Safe:
    """Render the stacked bar of a run's phases."""
    spent = phases(report)
    total = sum(spent.values()) or 1.0
    words = ", ".join(f"{phase_name(k)} {percent(v / total)}" for k, v in spent.items())
    shares = [(COLOURS.get(k, "rule"), v / total) for k, v in spent.items()]
    return stack(f"{report.name}, time by phase: {words}", shares, width=width)


def phase_name(phase: str) -> str:
    """Return the name that the page shows: 'communication_exposed' -> 'communication'."""
    return phase.partition("_")[0]


def step_time(run: RunFiles) -> Safe:
    """Render where the wall time went, by phase."""
    report = run.report
    spent = phases(report)
    if not spent:
        return section("Where the time went", muted(f"Phases were {NOT_MEASURED}."))
    total = sum(spent.values()) or 1.0
    rows = []
    for phase in (*PHASES, *([REST] if REST in spent else [])):
        value = spent.get(phase)
        if value is None and report.status == "running":
            continue
        share = "" if value is None else percent(value / total)
        name = join((swatch(COLOURS.get(phase, "rule")), phase_name(phase)))
        rows.append((name, seconds(value), share, _median(run, phase)))
    return section(
        "Where the time went",
        phase_stack(report),
        table("Time by phase", ("Phase", "Total", "Share", "Per step"), rows),
        muted(
            "Per step: the median. Communication counts where computation does not hide it. ",
            _input_wait(report),
            UNTOLD if report.status == "running" else "",
        ),
    )


def _median(run: RunFiles, phase: str) -> str:
    """Return the median seconds of a phase in one step, where metrics.jsonl has them."""
    column = run.metrics.get(f"{phase}_s")
    if column is None:
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all NaN is rendered as not measured
        middle = float(np.nanmedian(column)) if len(column) else np.nan
    return seconds(middle if np.isfinite(middle) else None)


def _input_wait(report: Report) -> str:
    """Render how long steps waited for data."""
    wait = report.input_wait
    return (
        f"Waiting for data took {seconds(wait.p50_s)} in the middle step and "
        f"{seconds(wait.p99_s)} in the slowest hundredth; stalled steps: "
        f"{whole(wait.stalled_steps)}."
    )


STATE_LINES = ("parameters", "gradients", "optimizer")
WORK_LINE = "activations, logits and work"
"""Name of all other lines together, which a measurement cannot tell apart."""


def memory(report: Report) -> Safe:
    """Render peak memory by named line, predicted against measured."""
    lines = {line.name: line.bytes for line in report.memory_lines or ()}
    measured = report.memory_measured or {}
    work = {name: value for name, value in lines.items() if name not in STATE_LINES}
    predicted = {name: lines[name] for name in STATE_LINES if name in lines}
    if work:
        total = sum(value or 0.0 for value in work.values())
        predicted |= {WORK_LINE: total, **{f"of which {k}": v for k, v in work.items()}}
    peak = report.peak_memory_bytes
    widest = max((v or 0.0 for d in (predicted, measured) for v in d.values()), default=0.0) or 1.0
    names = list(dict.fromkeys([*predicted, *measured]))
    rows = []
    for name in names:
        pair = predicted.get(name), measured.get(name)
        bars = join(
            bar(value / widest, colour)
            for value, colour in zip(pair, ("c0", "c2"), strict=True)
            if value is not None
        )
        rows.append((name, bars, *_pair(name, predicted, measured)))
    totals = ("Peak", "", size(peak.predicted), size(peak.allocated))
    rows.append([tag("strong", cell) for cell in totals])
    method = f" with the {peak.method}" if peak.method else ""
    head = ("Line", "", join((swatch("c0"), "Predicted")), join((swatch("c2"), "Measured")))
    return section(
        "Memory at the peak",
        table("Memory by line", head, rows, text=2),
        muted(
            _ratio(peak.predicted, peak.allocated),
            f"Measured{method}. Reserved from the device: {size(peak.reserved)}.",
        ),
    )


def _pair(
    name: str, predicted: Mapping[str, float | None], measured: Mapping[str, float | None]
) -> tuple[str, str]:
    """Return a line's two cells."""
    predicted_text = size(predicted[name]) if name in predicted else "not predicted"
    return predicted_text, "" if name.startswith("of which ") else size(measured.get(name))


def _ratio(predicted: float | None, measured: float | None) -> str:
    """Render how far the prediction was off."""
    if not predicted or not measured:
        return ""
    off = predicted / measured - 1
    return f"The prediction was {percent(abs(off))} too {'high' if off > 0 else 'low'}. "


def techniques(report: Report) -> Safe:
    """Render every technique of the plan with its evidence, and torch's own attention kernels."""
    beside = join((_own_attention(report), _first_step(report)))
    if not report.techniques:
        return section("Techniques", muted("None: this run is the plain baseline."), beside)
    rows = []
    for name, record in report.techniques.items():
        tone, word = STATES[record.active]
        numbers = ", ".join(
            f"{key.replace('_', ' ')} {NOT_MEASURED if v is None else format_count(v)}"
            for key, v in record.numbers.items()
        )
        proof = [record.detail or "no evidence was recorded"]
        if numbers:
            proof.append(muted(numbers))
        title = join((name, muted(record.line))) if record.line else name
        rows.append((title, tag("span", word, class_=f"badge {tone}"), join(proof)))
    head = ("Technique", "State", "Evidence")
    return section("Techniques", table("Techniques", head, rows, text=3), beside)


def _own_attention(report: Report) -> Safe:
    """Render the kernels of attention where no technique computed it."""
    if report.attention is None or not report.attention.detail:
        return join(())
    detail = report.attention.detail
    kernels = [name for name in report.attention.kernels if name not in detail]
    more = f"; its kernels: {', '.join(kernels)}" if kernels else ""
    return muted(f"Attention: {detail}{more}.")


def _first_step(report: Report) -> Safe:
    """Render how far it was from the plain trainer's, and what of it was not compared."""
    guard = report.guard
    if guard is None:
        return join(())
    if not guard.compared:
        return muted(f"The first step was not compared with the plain trainer's: {guard.why}.")
    sentence = (
        f"The first step was compared with that of a plain trainer without "
        f"{', '.join(guard.without) or 'techniques that could be left out'}: the loss is off by "
        f"{percent(guard.loss_off)}, and of {whole(guard.gradients)} gradients and their norm the "
        f"farthest is {guard.worst}, by {percent(guard.off)} of {percent(guard.band)} allowed."
    )
    kept = f" Not compared, for both had it: {', '.join(guard.kept)}." if guard.kept else ""
    return muted(sentence + kept)
