"""Render findings of how ranks work together."""

from collections.abc import Mapping
from typing import Any

from headrace.core.units import format_seconds
from headrace.doctor.findings import Finding, Kind
from headrace.doctor.words.described import Describe, Words


def _straggler(finding: Finding, facts: Any) -> Words:
    who = f"rank {facts['rank']}" if facts["same_rank"] else "changing ranks"
    evidence = (
        f"the last rank is {format_seconds(facts['delay_s'])} behind the others' median in a step "
        f"of {format_seconds(facts['step_s'])}; rank {facts['rank']} is last in "
        f"{facts['last_share']:.0%} of the steps"
    )
    sentence = f"Ranks wait for {who} in {finding.share:.0%} of the time."
    why = "why: clocks, temperature, data or another process"
    if facts["same_rank"]:
        host = facts.get("host")
        evidence += f"; it is on {host}: the others alone, with --resume, do not wait" * bool(host)
        where = f"on {host}" if host else f"where rank {facts['rank']} is"
        why += f"; nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE {where} tells of the first two"
    return sentence, evidence, why


def _imbalance(finding: Finding, facts: Any) -> Words:
    own_s, layers, place = facts["own_s"], facts["layers"], facts["place"]
    each = ", ".join(
        f"{format_seconds(spent_s)} on {n} layer{'s' * (n != 1)}"
        for spent_s, n in zip(own_s, layers, strict=True)
    )
    evidence = (
        f"passes of a step, the first rank first: {each}; others wait "
        f"{format_seconds(facts['delay_s'])} for the slowest in a step of "
        f"{format_seconds(facts['step_s'])}; the schedule itself lets ranks wait for "
        f"{facts['idle_share']:.0%} at {facts['micro_batches']:.0f} micro-batches"
    )
    sentence = (
        f"Stages of the pipeline are not alike: rank {place} of {len(own_s)} takes "
        f"{facts['over_share']:.0%} more than their mean, and the others wait for it in "
        f"{finding.share:.0%} of the time."
    )
    return sentence, evidence, "whether its layers or its device are slower"


def _wrong_layout(finding: Finding, facts: Any) -> Words:
    now, other = (format_seconds(facts[f"{name}_s"]) for name in ("predicted", "other"))
    evidence = (
        f"{other} a step are predicted of it, and {now} of {facts['own_layout']}, which was "
        f"measured to take {format_seconds(facts['step_s'])}; a step may take "
        f"{facts['times']:.2g} times what is predicted"
    )
    sentence = (
        f"Another layout of the {facts['ranks']} ranks is predicted, not measured, to take "
        f"{finding.share:.0%} less: {facts['layout']}."
    )
    return sentence, evidence, "links between ranks, unless headrace probe timed them"


OF_RANKS: Mapping[Kind, Describe] = {
    Kind.STRAGGLER: _straggler,
    Kind.PIPELINE_IMBALANCE: _imbalance,
    Kind.WRONG_LAYOUT: _wrong_layout,
}
