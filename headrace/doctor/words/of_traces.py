"""Render findings of traces of torch.profiler."""

from collections.abc import Mapping
from typing import Any

from headrace.core.units import format_seconds
from headrace.doctor.findings import Finding, Kind
from headrace.doctor.trace.file import RECORD
from headrace.doctor.trace.limits import (
    BRIEF_KERNEL_US,
    FEW_STEPS,
    FUSION_RECOVERS,
    NEAR_ROOF,
    WORTH_TELLING,
)
from headrace.doctor.words.described import Describe, Words

NO_SHAPES = "efficiency of kernels: no shapes were recorded, or the device's rates are unknown"
LEFT_OUT = "events left out, for no clock tells their times: {}"
FRAMES = "Python frames were recorded (with_stack), which slows the host"
NO_LOADER = "no DataLoader is marked: a wait for data may show as launch"


def _verdict(finding: Finding, facts: Any, sentence: str, evidence: str, *missing: str) -> Words:
    """Return a verdict with what it could gain at most and how much was looked at."""
    gain = (
        f"Without it a step is at most {finding.share / max(1 - finding.share, 1e-9):.0%} faster."
    )
    return f"{sentence} {gain}", *_looked_at(facts, evidence, *missing)


def _looked_at(facts: Any, evidence: str, *missing: str) -> tuple[str, str]:
    """Return the evidence with the steps that were measured, and what was not measured."""
    steps = f"{facts['steps']} steps of {format_seconds(facts['step_s'])}"
    steps += f" on each of {facts['ranks']} ranks" if facts["ranks"] > 1 else ""
    less = [] if facts["enough_steps"] else [f"steps enough: {FEW_STEPS + 1} or more"]
    less += [LEFT_OUT.format(count) for count in facts["left_out"]]
    less += [f"{path}: no step of it on a device" for path in facts["without_steps"]]
    return f"{evidence}; {steps}", "; ".join(dict.fromkeys([*missing, *less]))


def _time(facts: Any, share: float) -> str:
    """Return a share of a step as a time."""
    return f"{format_seconds(share * facts['step_s'])} ({share:.1%})"


def _times(facts: Any, shares: Mapping[str, float]) -> str:
    """Return the shares that are worth a reader's time."""
    parts = [f"{what} {_time(facts, s)}" for what, s in shares.items() if s >= WORTH_TELLING]
    return ", ".join(parts)


def _without(sentence: str, missing: str) -> Describe:
    """Return what renders a trace that says nothing."""

    def describe(finding: Finding, facts: Any) -> Words:
        evidence = (
            f"{facts['path']}: {facts['events']} events of the device, {facts['marks']} steps "
            "marked"
        )
        odd = [LEFT_OUT.format(count) for count in facts["left_out"]]
        return sentence, "; ".join([evidence, *odd]), f"{missing} record with {RECORD}"

    return describe


def _launch(finding: Finding, facts: Any) -> Words:
    names = ", ".join(facts["syncs"]) or "a synchronisation"
    parts = {
        "late launches": facts["slow_share"],
        f"after the host waited for the device in {names}": facts["sync_share"],
        "between queued kernels": facts["between_share"],
        "of it the profiler's own": facts["profiler_share"],
    }
    evidence = (
        f"{_times(facts, parts)}; {facts['launches']:.0f} kernels a step, "
        f"{facts['brief_share']:.0%} of them under {BRIEF_KERNEL_US:.0f} us"
    )
    unknown = [] if facts["profiler_known"] else ["the profiler's own cost on the host"]
    unknown += [FRAMES] * facts["frames"] + [NO_LOADER] * facts["no_loader"]
    sentence = f"The device was idle for {finding.share:.0%} of a step for want of launches."
    return _verdict(finding, facts, sentence, evidence, *unknown)


def _input(finding: Finding, facts: Any) -> Words:
    away = "the host was away before a batch's copy"
    where = away if facts["host_away"] else "the data loader was at work"
    parts = {
        f"idle while {where}": facts["waited_share"],
        "batches' copies not hidden": facts["copied_share"],
    }
    sentence = f"The device waited {finding.share:.0%} of a step for its next batch."
    missing = "the loader's parts: reading, decoding, collating"
    return _verdict(finding, facts, sentence, _times(facts, parts), missing)


def _interconnect(finding: Finding, facts: Any) -> Words:
    parts = {
        "blocking transfers": facts["blocking_share"],
        "of collectives' whole time": facts["collective_share"],
        "exposed": facts["exposed_share"],
        "copies between host and device that nothing hid": facts["copied_share"],
    }
    apart = "transfer against waiting for a slower rank: give every rank's trace"
    missing = [apart] if facts["one_rank_alone"] else []
    sentence = f"Kernels waited {finding.share:.0%} of a step for data on its way."
    rate = "the link's rate against a probe"
    return _verdict(finding, facts, sentence, _times(facts, parts), *missing, rate)


def _straggler(finding: Finding, facts: Any) -> Words:
    who = "changing ranks" if facts["rank"] is None else f"rank {facts['rank']}"
    evidence = (
        f"rank {facts['victim']} waits longest, {who} came last in {facts['last_share']:.0%} of "
        f"{facts['collectives']} collectives"
    )
    if facts["slower_in"] is not None:
        part, more_s = facts["slower_in"]
        evidence += f"; it spends {format_seconds(more_s)} more a step on {part}"
    missing = "clocks and temperatures"
    if facts["missing_ranks"] > 0:
        missing = f"{facts['missing_ranks']} of {facts['world']} ranks"
    sentence = f"Kernels waited {finding.share:.0%} of a step for {who}."
    return _verdict(finding, facts, sentence, evidence, missing)


def _allocator(finding: Finding, facts: Any) -> Words:
    share = finding.share
    evidence = f"allocations and frees by the driver {_time(facts, share)}"
    sentence = (
        f"The device was idle for {share:.0%} of a step while memory was asked of the driver."
    )
    missing = "fragmentation against capacity: it needs torch.cuda.memory_stats()"
    return _verdict(finding, facts, sentence, evidence, missing)


def _memory_kernels(finding: Finding, facts: Any) -> Words:
    spent = facts["spent_share"]
    evidence = (
        f"elementwise, normalisation and optimizer kernels {_time(facts, spent)}, of which fusing "
        f"may recover {FUSION_RECOVERS:.0%}"
    )
    sentence = f"{spent:.0%} of a step went to kernels that move much and compute little."
    missing = "bytes moved: families are told by kernels' names"
    return _verdict(finding, facts, sentence, evidence, missing)


def _bandwidth(finding: Finding, facts: Any) -> Words:
    spent = facts["spent_share"]
    evidence = (
        f"kernels at {NEAR_ROOF:.0%} or more of the bandwidth {_time(facts, spent)}, of which "
        f"fusing may recover {FUSION_RECOVERS:.0%}; {facts['rates']}"
    )
    sentence = f"{spent:.0%} of a step went to kernels that memory's bandwidth holds up."
    missing = "bytes moved: modelled from shapes, not counted"
    return _verdict(finding, facts, sentence, evidence, missing)


def _slow_matmuls(finding: Finding, facts: Any) -> Words:
    spent = facts["spent_share"]
    evidence = f"kernels named sgemm or simt {_time(facts, spent)}"
    sentence = f"{spent:.0%} of a step went to float32 products without tensor cores."
    missing = "FLOPs: products are told by kernels' names"
    return _verdict(finding, facts, sentence, evidence, missing)


def _inefficient(finding: Finding, facts: Any) -> Words:
    reached = facts["reached_share"]
    evidence = (
        f"{_time(facts, facts['spent_share'])} where {format_seconds(facts['best_s'])} would do at "
        f"their shapes; {facts['rates']}"
    )
    sentence = f"Products and attention reach {reached:.0%} of what the device does elsewhere."
    missing = "what slows them: another backend, layout or clock"
    return _verdict(finding, facts, sentence, evidence, missing)


def _dependency(finding: Finding, facts: Any) -> Words:
    sentence = f"The device was idle for {finding.share:.0%} of a step, with work queued."
    evidence = f"stalls of queued kernels {_time(facts, finding.share)}"
    missing = "what they waited for: record with enable_cuda_sync_events"
    return _verdict(finding, facts, sentence, evidence, missing)


def _unexplained(finding: Finding, facts: Any) -> Words:
    share = finding.share
    sentence = f"The device was idle for {share:.0%} of a step, and why is not recorded."
    evidence = f"idle before kernels without a launch {_time(facts, share)}"
    missing = "launches: record with ProfilerActivity.CPU too"
    return _verdict(finding, facts, sentence, evidence, missing)


def _computation(finding: Finding, facts: Any) -> Words:
    share = finding.share
    parts = ", ".join(f"{name} {percent:.0f}%" for name, percent in facts["families"])
    evidence = f"busy {_time(facts, facts['busy_share'])}; of kernels' time {parts}"
    missing = [NO_SHAPES]
    if (rates := facts.get("rates")) is not None:
        reached, missing = "no product of known shape", []
        if "peak_share" in facts:
            reached = (
                f"products at {facts['peak_share']:.0%} of the peak and {facts['best_share']:.0%} "
                "of their shapes' best"
            )
        evidence = f"{evidence}; {reached}; {rates}"
    sentence = f"Nothing stands in the way of computation: kernels ran for {share:.0%} of a step."
    return sentence, *_looked_at(facts, evidence, *missing)


OF_TRACES: Mapping[Kind, Describe] = {
    Kind.TRACE_WITHOUT_DEVICE: _without(
        "The trace holds no event of a device: there is no device time to judge.",
        "everything of the device;",
    ),
    Kind.TRACE_WITHOUT_TIMES: _without(
        "The trace holds no event of a device whose time can be read.",
        "everything of the device;",
    ),
    Kind.TRACE_WITHOUT_STEPS: _without(
        "The trace holds fewer than two steps that follow each other, marked and launched.",
        "steps; call prof.step() after each and",
    ),
    Kind.TRACE_LAUNCH: _launch,
    Kind.TRACE_INPUT: _input,
    Kind.TRACE_INTERCONNECT: _interconnect,
    Kind.TRACE_STRAGGLER: _straggler,
    Kind.TRACE_ALLOCATOR: _allocator,
    Kind.TRACE_MEMORY_KERNELS: _memory_kernels,
    Kind.TRACE_BANDWIDTH: _bandwidth,
    Kind.TRACE_SLOW_MATMULS: _slow_matmuls,
    Kind.TRACE_INEFFICIENT: _inefficient,
    Kind.TRACE_DEPENDENCY: _dependency,
    Kind.TRACE_UNEXPLAINED: _unexplained,
    Kind.TRACE_COMPUTATION: _computation,
}
