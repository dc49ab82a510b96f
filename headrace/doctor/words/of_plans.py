"""Render findings of plans that were not run."""

from collections.abc import Mapping
from typing import Any

from headrace.core.units import format_bytes, format_seconds
from headrace.doctor.findings import Finding, Kind
from headrace.doctor.words.described import Describe, Words


def _in_fp32(finding: Finding, facts: Any) -> Words:
    wide_s, half_s = facts["fp32_s"], facts["bf16_s"]
    sentence = (
        f"Products are of fp32 numbers: a large one takes {wide_s / half_s:.0f} times as long as "
        "in bf16."
    )
    return (
        sentence,
        f"{format_seconds(wide_s)} and {format_seconds(half_s)}, each of 8,192 cubed",
        "",
    )


def _peak(facts: Any) -> str:
    peak, capacity = format_bytes(facts["peak_bytes"]), format_bytes(facts["capacity_bytes"])
    return f"{peak} of {capacity} predicted"


def _does_not_fit(finding: Finding, facts: Any) -> Words:
    fits = "does not fit" if facts["fits"] == "no" else "fits tightly"
    return f"The plan {fits}; most of its peak is {facts['owner']}.", _peak(facts), ""


def _saves_needlessly(finding: Finding, facts: Any) -> Words:
    names = ", ".join(facts["names"])
    return f"{names} trades time for memory that is free.", _peak(facts), ""


def _micro_batches(finding: Finding, facts: Any) -> Words:
    rows = facts["rows"]
    sentence = (
        f"A step is {facts['micro_batches']} forward passes of {rows} row{'s' * (rows > 1)}, and "
        "memory is free for larger ones."
    )
    return sentence, _peak(facts), ""


def _memory(finding: Finding, facts: Any) -> Words:
    share = facts["owner_share"]
    sentence = f"The plan fits; most of its peak is {facts['owner']}: {share:.0%}."
    return sentence, f"{_peak(facts)}; headrace plan has every line", ""


def _without_time(finding: Finding, facts: Any) -> Words:
    return "The step's time is not predicted.", facts["why"], ""


def _launch(finding: Finding, facts: Any) -> Words:
    sentence = f"The device would wait for launches in {finding.share:.0%} of the step."
    return sentence, f"a step of {format_seconds(facts['step_s'])}", ""


def _shares(facts: Any) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in facts["shares"].items())


def _moves_bytes(finding: Finding, facts: Any) -> Words:
    sentence = f"Work that only moves bytes would take {finding.share:.0%} of the step."
    return sentence, _shares(facts), ""


def _step(finding: Finding, facts: Any) -> Words:
    sentence = f"Most of the step would be {facts['part']}: {finding.share:.0%}."
    return sentence, _shares(facts), ""


OF_PLANS: Mapping[Kind, Describe] = {
    Kind.PLAN_IN_FP32: _in_fp32,
    Kind.PLAN_DOES_NOT_FIT: _does_not_fit,
    Kind.PLAN_SAVES_NEEDLESSLY: _saves_needlessly,
    Kind.PLAN_MICRO_BATCHES: _micro_batches,
    Kind.PLAN_MEMORY: _memory,
    Kind.PLAN_WITHOUT_TIME: _without_time,
    Kind.PLAN_LAUNCH: _launch,
    Kind.PLAN_MOVES_BYTES: _moves_bytes,
    Kind.PLAN_STEP: _step,
}
