"""Verdicts on a window of steady steps, and nothing about what was not read.

Each rule looks at one bottleneck of the taxonomy and answers with a finding, or with nothing. What
is wrong stands first; then what takes time, by the share of a step that a remedy could win back at
most; then memory and tokens, whose shares are of something else. Where no rule fires the verdict is
computation, which is no fault; where too little was read there is none.

Every threshold of this file stands at its top.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isnan
from statistics import fmean, median, pstdev

from headrace.core.units import format_bytes, format_seconds
from headrace.doctor.findings import Finding
from headrace.doctor.window import Window, finite

FEWEST_STEPS = 8
"""Steady steps below which nothing is judged."""
INPUT_SHARE = 0.05
"""Of a step, waiting for the loader, from which it is named."""
SLACK_SHARE = 0.02
"""Of a step, in which the host waits for the device: below it the host is never ahead."""
COMMUNICATION_SHARE = 0.05
WASTE_SHARE = 0.05
"""Of the tokens, without a target."""
LATE_GRAPHS = 2
"""Compilations in the later half of a run that a change of shape explains."""
PRESSURE = 0.8
"""Of the device's memory, reserved where the allocator began anew: it was full."""
FRAGMENTS = 0.10
"""Of the device's memory, reserved and not allocated at the peak."""
UNUSED = 0.75
"""Of the device's memory, reserved: below it what trades time for memory need not be on."""
SPIKE_SIGMAS, SPIKE_WINDOW, SPIKE_FEWEST = 6.0, 128, 32
"""A loss or norm is a spike so far above the steps before it (OLMo-core's monitor), of which there
are so many at most and at least."""
SPIKE_SHARE, SPIKES = 0.01, 1
"""Of the steps, and how many, that may be spikes."""
LOST_SHARE, LOST = 0.05, 3
"""Of the steps, and how many, whose gradient may be not finite: a loss scale is found by trying."""
RISE_SIGMAS, RISE_SHARE = 3.0, 0.02
"""How far the end of the losses lies above their beginning: in deviations of a step, and as a share
of the loss."""
NEWEST_STEPS = 2048
"""Steps that spikes are looked for in."""

Rule = Callable[[Window], Finding | None]


def judge(window: Window) -> list[Finding]:
    """Findings, the gravest first; one that says so where nothing is wrong or known."""
    if window.steps < FEWEST_STEPS:
        return [Finding(
            "not measured", 0.0, "Too few steady steps were measured to judge them.",
            f"{window.steps} of at least {FEWEST_STEPS}", "measured", "everything",
        )]  # fmt: skip
    found: list[Finding] = []
    for rules in (WRONG, SLOW, OTHER):
        told = [finding for rule in rules if (finding := rule(window)) is not None]
        found += sorted(told, key=lambda f: -f.share)
    return found or [_computation(window)]


def _computation(window: Window) -> Finding:
    work = [a + b for a, b in zip(window.forward_s or (), window.backward_s or (), strict=False)]
    return Finding(
        "computation", window.share(work) or 1.0, "Nothing holds this up but its computation.",
        f"median step {format_seconds(median(window.step_s))} over {window.steps} steps",
        "measured", "kernels: memory bandwidth, kernel efficiency and matrix products are not told "
        "apart without a trace",
    )  # fmt: skip


def _no_op(window: Window) -> Finding | None:
    if not window.inactive:
        return None
    return Finding(
        "silent no-op", 1.0, f"{', '.join(window.inactive)} was asked for and does nothing.",
        "its evidence at the end of the run", "measured",
    )  # fmt: skip


def _instability(window: Window) -> Finding | None:
    losses, norms = finite(window.loss), finite(window.grad_norm)
    spikes = spiked(losses) + spiked(norms)
    lost = sum(map(isnan, window.grad_norm or ()))
    if spikes > max(SPIKES, SPIKE_SHARE * window.steps):
        return Finding(
            "instability", min(1.0, spikes / window.steps), "Loss or gradients jump.",
            f"{spikes} steps lie {SPIKE_SIGMAS:g} deviations above those before them", "measured",
        )  # fmt: skip
    if lost > max(LOST, LOST_SHARE * window.steps):
        return Finding(
            "instability", lost / window.steps, "Gradients are not finite again and again.",
            f"{lost} of {window.steps} steps", "measured",
        )  # fmt: skip
    if risen(losses):
        first, last = _ends(losses)
        return Finding(
            "instability", 1.0, "The loss rises.",
            f"{last:.4g} in the last quarter, {first:.4g} in the first", "measured",
        )  # fmt: skip
    return None


def _input(window: Window) -> Finding | None:
    said = "The device waits for data in {:.0%} of the time."
    return _phase(window, window.input_s, "input", INPUT_SHARE, said)


def _phase(
    window: Window, spent_s: Sequence[float] | None, name: str, least: float, said: str,
    missing: str = "",
) -> Finding | None:  # fmt: skip
    """A phase that takes at least so much of the time."""
    share = window.share(spent_s)
    if share is None or spent_s is None or share < least:
        return None
    told = f"{format_seconds(fmean(spent_s))} of a step of {format_seconds(fmean(window.step_s))}"
    return Finding(name, share, said.format(share), told, "measured", missing)


def _recompiles(window: Window) -> Finding | None:
    late = window.late_graphs
    if late is None or late <= LATE_GRAPHS:
        return None
    return Finding(
        "launch", late / (late + window.steps), "Steps compile again long after the first ones.",
        f"{late} of {late + window.steps} steps", "measured",
        "which frame: headrace explain PLAN --graph",
    )  # fmt: skip


def _launch(window: Window) -> Finding | None:
    """The host is never ahead; how much that costs only a trace tells, so the share is 0."""
    slack = window.share(window.slack_s)
    waits = (window.share(window.input_s) or 0.0) >= INPUT_SHARE
    if window.device != "cuda" or slack is None or slack >= SLACK_SHARE or waits:
        return None
    return Finding(
        "launch", 0.0, "The host is never ahead of the device, which may wait for it.",
        f"the host waited for the device in {slack:.1%} of the time", "inferred",
        "how long the device idles: a trace tells",
    )  # fmt: skip


def _interconnect(window: Window) -> Finding | None:
    return _phase(
        window, window.communication_s, "interconnect", COMMUNICATION_SHARE,
        "Communication that nothing hides takes {:.0%} of the time.",
        "transfer and waiting for other ranks are told apart by a trace of every rank",
    )  # fmt: skip


def _memory(window: Window) -> Finding | None:
    """Capacity, fragments, or memory that is paid for and not used."""
    held, whole = window.reserved_bytes, window.capacity_bytes
    if held is None or not whole:
        return None
    told = f"{format_bytes(held)} reserved of {format_bytes(whole)}"
    loose = (held - (window.allocated_bytes or held)) / whole
    if window.alloc_retries:
        told += f"; the allocator began anew {window.alloc_retries} times"
        if loose > FRAGMENTS:
            said = f"{loose:.0%} of the memory is in pieces that nothing fits."
            return Finding("fragmentation", loose, said, told, "measured")
        if held / whole > PRESSURE:
            return Finding("memory capacity", held / whole, "The memory is full.", told, "measured")
    if held / whole < UNUSED and window.saves_memory:
        return Finding(
            "unused memory", 1.0 - held / whole,
            f"{', '.join(window.saves_memory)} trades time for memory that is free.", told,
            "inferred", "what it costs in time: leave it out and compare",
        )  # fmt: skip
    return None


def _waste(window: Window) -> Finding | None:
    if window.useful_share is None or (share := 1.0 - window.useful_share) < WASTE_SHARE:
        return None
    return Finding(
        "wasted tokens", share, f"{share:.0%} of the tokens are computed and count in no loss.",
        "padding, or tokens whose target is left out", "measured",
    )  # fmt: skip


def spiked(values: Sequence[float]) -> int:
    """How many lie far above the window before them."""
    values, count = values[-NEWEST_STEPS:], 0
    for end in range(SPIKE_FEWEST, len(values)):
        before = values[max(0, end - SPIKE_WINDOW) : end]
        middle = fmean(before)
        spread = (fmean([(v - middle) ** 2 for v in before])) ** 0.5
        count += spread > 0 and values[end] > middle + SPIKE_SIGMAS * spread
    return count


def _ends(losses: Sequence[float]) -> tuple[float, float]:
    """Means of the first and the last quarter."""
    quarter = len(losses) // 4
    return fmean(losses[:quarter]), fmean(losses[-quarter:])


def risen(losses: Sequence[float]) -> bool:
    """Whether the last quarter lies above the first by more than scatter, and visibly."""
    if len(losses) < 16:
        return False
    first, last = _ends(losses)
    scatter = pstdev([b - a for a, b in pairwise(losses)])
    return last - first > max(RISE_SIGMAS * scatter, RISE_SHARE * abs(first))


WRONG: tuple[Rule, ...] = (_no_op, _instability)
SLOW: tuple[Rule, ...] = (_input, _recompiles, _launch, _interconnect)
OTHER: tuple[Rule, ...] = (_memory, _waste)
