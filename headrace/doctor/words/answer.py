"""Render the doctor's answer: lines for a terminal, rows of findings.json, a closing verdict."""

from typing import Any

from headrace.core.units import format_bytes
from headrace.doctor.advice import Advice, NoRemedy, Rates
from headrace.doctor.findings import Finding, Kind
from headrace.doctor.loop_remedies import LoopRemedy
from headrace.doctor.remedies import HEALTHY, PlanRemedy
from headrace.doctor.words import describe

SHOWN = 3
"""Remedies of a finding that a reader sees."""
SHARE_ENDS = "between half and all of it"
"""What the ends are of a gain that is forecast by a share."""
NOTHING_GAINS = f"no remedy is forecast to gain more than {HEALTHY:.0%}"
NOTHING_HELPS = "no change is known that would help with any of this"


def findings_json(advice: Advice) -> list[dict[str, Any]]:
    """Return the findings as JSON values, each with its remedies: what findings.json holds.

    The first is the verdict. Where no finding has a remedy, `unknown` of each says why. Each also
    has what is true of the whole answer: `healthy`, null where no gain can be forecast; `first`,
    the remedy to try first with its `command`, or null; and `so_far`, the steps that a run which
    has not ended had written, else null.
    """
    first = advice.first
    whole = {
        "unknown": why_no_remedy(advice),
        "healthy": advice.healthy,
        "so_far": advice.so_far,
        "first": first and _remedy_json(advice, first),
    }
    return [
        {
            **finding_json(one.finding),
            "remedies": [_remedy_json(advice, remedy) for remedy in one.remedies],
            **whole,
        }
        for one in advice.findings
    ]


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON values."""
    words = describe(finding)
    return {
        "bottleneck": finding.bottleneck,
        "share": finding.share,
        "sentence": words.sentence,
        "evidence": words.evidence,
        "confidence": finding.confidence,
        "not_measured": words.not_measured,
    }


def _remedy_json(advice: Advice, remedy: PlanRemedy | LoopRemedy) -> dict[str, Any]:
    return {**remedy.to_dict(), "command": advice.command(remedy)}


def closing_verdict(advice: Advice) -> dict[str, Any]:
    """Return the verdict for report.json and a run's last lines, with the remedy to try first.

    Where the verdict is that too little is known, the longest phase stands in its place.
    """
    findings = [one.finding for one in advice.findings]
    shown = next((f for f in findings if not f.abstains), next(iter(findings), None))
    if shown is None:
        return {
            "station": None,
            "share": None,
            "sentence": "No step was measured.",
            "evidence": "",
            "healthy": None,
            "remedy": None,
            "gain": None,
            "unknown": "",
        }
    first, words = None if advice.healthy else advice.first, describe(shown)
    return {
        "station": shown.bottleneck,
        "share": shown.share,
        "sentence": words.sentence,
        "evidence": words.evidence,
        "healthy": advice.healthy,
        "remedy": first and advice.command(first),
        "gain": first and render_gain(first),
        "unknown": _unknown(findings[0]) if findings[0] is not shown else "",
    }


def _unknown(finding: Finding) -> str:
    """Return what an abstaining finding says, with what would sharpen it."""
    words = describe(finding)
    if finding.kind is Kind.TOO_FEW_STEPS or not words.not_measured:
        return words.sentence
    return f"{words.sentence} Not measured: {words.not_measured}."


def render_advice(advice: Advice) -> str:
    """Return the answer in lines: each finding, its evidence, and its best remedies."""
    lines = [] if advice.so_far is None else [render_so_far(advice.so_far)]
    for one in advice.findings:
        finding, words = one.finding, describe(one.finding)
        lines.append(f"{finding.bottleneck}: {words.sentence}")
        lines.append(f"  {words.evidence} ({finding.confidence})")
        if words.not_measured:
            lines.append(f"  not measured: {words.not_measured}")
        lines += [f"  {render_remedy(remedy)}" for remedy in one.remedies[:SHOWN]]
        if (more := len(one.remedies) - SHOWN) > 0:
            lines.append(f"  and {more} more: --json")
    if why := why_no_remedy(advice):
        lines.append(why)
    if advice.healthy:
        lines.append(f"healthy: {NOTHING_GAINS}")
    elif advice.run is not None and (first := advice.first) is not None:
        lines.append(f"try first: {advice.command(first)}")
    if advice.rates is not None and any(one.remedies for one in advice.findings):
        lines.append(f"forecasts for this run's step; {render_rates(advice.rates)}")
    return "\n".join([*lines, *filter(None, [advice.left_open])])


def render_so_far(steps: int) -> str:
    """Return that a run has not ended, and what it is judged by."""
    written = f"{steps} step{'s' * (steps != 1)}"
    return f"the run has not ended: it is judged by the {written} that it has written so far"


def why_no_remedy(advice: Advice) -> str:
    """Return why no finding has a remedy; "" where one has."""
    match advice.no_remedy:
        case None:
            return ""
        case NoRemedy.TOO_FEW_STEPS:
            return "nothing is forecast from so few steps"
        case NoRemedy.NOT_PREDICTED:
            return "no remedy is forecast without it"
        case NoRemedy.NO_CHANGE:
            return f"no remedy is forecast: {NOTHING_HELPS}"
        case NoRemedy.NO_CHANGE_OF_LOOP:
            return NOTHING_HELPS
        case NoRemedy.NOT_FORECAST:
            return f"no remedy is forecast: {advice.why}"
        case NoRemedy.REFUSED:
            return f"no remedies are forecast: {advice.why}"


def render_rates(rates: Rates | None) -> str:
    """Return what forecasts rest on; "" where there are none."""
    if rates is None:
        return ""
    if rates.machine is None or rates.widening is None:
        return "a remedy takes between half and all of its finding's share"
    sources = {"probes": "measured by probes", "datasheet": "assumed from its datasheet"}
    words = f"rates of {rates.machine.name} {sources[rates.machine.source]}"
    if rates.widening.why:
        words += f"; a rate may be {rates.widening.times:g} times off: {rates.widening.why}"
    return words


def render_remedy(remedy: PlanRemedy | LoopRemedy) -> str:
    """Return a remedy in one line: --with X: +4% (80%: +2% to +6%), memory -3.1 GiB, costs ..."""
    parts = [render_gain(remedy)]
    if remedy.memory_bytes is not None and abs(remedy.memory_bytes) >= 2**20:
        sign = "+" if remedy.memory_bytes > 0 else "-"
        parts.append(f"memory {sign}{format_bytes(abs(remedy.memory_bytes))}")
    if remedy.equality != "exact":
        change = {"learning": "what is learned", "approximate": "rounding"}[remedy.equality]
        parts.append(f"changes {change}")
    tight = ["the memory is nearly full then"] if remedy.fits == "tight" else []
    costs = remedy.costs if isinstance(remedy, LoopRemedy) else remedy.cost
    parts += [*tight, f"costs {costs}" if costs else remedy.what]
    if isinstance(remedy, LoopRemedy) and remedy.headrace:
        parts.append(f"in Headrace {' and '.join(remedy.headrace)}")
    return f"{remedy.words}: {', '.join(parts)}"


def render_gain(remedy: PlanRemedy | LoopRemedy) -> str:
    """Return the gain with its ends, or that there is none; by a share it has no middle."""
    if (gain := remedy.gain) is None:
        return f"gain not forecast ({remedy.unknown})"
    digits = 1 if max(map(abs, (gain.low, gain.high))) < 0.1 else 0
    low, value, high = (f"{one:+.{digits}%}" for one in (gain.low, gain.value, gain.high))
    if remedy.forecast_from == "share":
        return f"{low} to {high} ({SHARE_ENDS})"
    return f"{value} (80%: {low} to {high})"
