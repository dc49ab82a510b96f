"""Verdicts on a window of steady steps: the narrowest station first, and nothing that was not read.

Each rule looks at one bottleneck of the taxonomy and answers with a finding, or with nothing. A
finding's share is what of the step's time a remedy could win back, at most: for memory and for what
is wrong rather than slow it says what it is a share of. Findings are ranked by it. Where no rule
fires the verdict is computation, which is no fault; where too little was read there is none.

Every threshold of this file stands at its top.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean, median, pstdev

from headrace.core.units import format_bytes, format_seconds
from headrace.doctor.findings import Finding
from headrace.doctor.window import Window, finite

FEWEST_STEPS = 8
"""Steady steps below which nothing is judged."""
INPUT_SHARE = 0.05
"""Of a step, waiting for the loader, from which it is named."""
SLACK_SHARE = 0.02
"""Of a step, in which the host waits for the device: below it the host is never ahead."""
DRY_SHARE = 0.2
"""Of the steps, at whose beginning the device had nothing left to do."""
COMMUNICATION_SHARE = 0.05
WASTE_SHARE = 0.05
"""Of the tokens, padding or without a target."""
LATE_GRAPHS = 2
"""Compilations after the first steps that a change of shape explains."""
PRESSURE = 0.92
"""Of the device's memory, reserved: the next odd shape may not fit."""
FRAGMENTS = 0.10
"""Of the device's memory, reserved and not allocated at the peak."""
UNUSED = 0.75
"""Of the device's memory, reserved: below it what trades time for memory need not be on."""
RANK_SPREAD = 0.10
"""Of a step, between the slowest rank's own work and the median's."""
SPIKE_SIGMAS, SPIKE_WINDOW, SPIKE_SHARE = 6.0, 128, 0.01
"""A loss or norm is a spike so far above the steps before it (OLMo-core's monitor); how many of the
steps may be."""
CLIPPED_SHARE = 0.9
"""Of the steps, clipped, from which the norm limits every update."""
RISE_SIGMAS = 3.0
"""How far the end of the losses may lie above their beginning, in deviations of a step."""

Rule = Callable[[Window], Finding | None]


def judge(window: Window) -> list[Finding]:
    """Findings by share, the largest first; one that says so where nothing is wrong or known."""
    if window.steps < FEWEST_STEPS:
        return [Finding(
            "not measured", 0.0, "Too few steady steps were measured to judge this run.",
            f"{window.steps} of at least {FEWEST_STEPS}", "measured", "everything",
        )]  # fmt: skip
    found = [finding for rule in RULES if (finding := rule(window)) is not None]
    found.sort(key=lambda f: -f.share)
    return found or [_computation(window)]


def unread(window: Window) -> str:
    """What would sharpen a verdict."""
    missing = {
        "input": window.input_s, "host lead": window.slack_s or window.dry_share,
        "memory": window.reserved_bytes, "tokens": window.useful_share, "ranks": window.rank_s,
    }  # fmt: skip
    return ", ".join(name for name, value in missing.items() if value is None)


def _computation(window: Window) -> Finding:
    share = window.share(tuple(
        a + b for a, b in zip(window.forward_s or (), window.backward_s or (), strict=False)
    )) or 1.0  # fmt: skip
    return Finding(
        "computation", share, "Nothing holds this run up but its computation.",
        f"median step {format_seconds(median(window.step_s))} over {window.steps} steps",
        "measured", "kernels: memory bandwidth, kernel efficiency and matrix products are not told "
        "apart without a trace",
    )  # fmt: skip


def _input(window: Window) -> Finding | None:
    share = window.share(window.input_s)
    if share is None or share < INPUT_SHARE:
        return None
    return Finding(
        "input", share, f"The device waits for data in {share:.0%} of the time.",
        f"{format_seconds(mean(window.input_s or ()))} of a step of "
        f"{format_seconds(mean(window.step_s))}",
        "measured",
    )  # fmt: skip


def _launch(window: Window) -> Finding | None:
    """The host is never ahead, or compiles again and again."""
    if window.late_graphs is not None and window.late_graphs > LATE_GRAPHS:
        share = window.late_graphs / (window.late_graphs + window.steps)
        return Finding(
            "launch", share, f"{window.late_graphs} steps compiled again after the run was warm.",
            f"of {window.late_graphs + window.steps} steps", "measured",
            "which frame: headrace explain PLAN --graph",
        )  # fmt: skip
    slack, dry = window.share(window.slack_s), window.dry_share
    if window.device != "cuda" or (window.share(window.input_s) or 0.0) >= INPUT_SHARE:
        return None
    if slack is not None and slack < SLACK_SHARE:
        told, share = f"the host waited for the device in {slack:.1%} of the time", 1.0 - slack
    elif dry is not None and dry > DRY_SHARE:
        told, share = f"it had nothing left to do when {dry:.0%} of the steps began", dry
    else:
        return None
    return Finding(
        "launch", share, "The device waits for the host to give it work.", told, "inferred",
        "how much of a step the device idles: a trace tells",
    )  # fmt: skip


def _interconnect(window: Window) -> Finding | None:
    share = window.share(window.communication_s)
    if share is None or share < COMMUNICATION_SHARE or _straggler(window) is not None:
        return None
    return Finding(
        "interconnect", share, f"Communication that nothing hides takes {share:.0%} of the time.",
        f"{format_seconds(mean(window.communication_s or ()))} a step", "measured",
        "transfer and waiting for other ranks are told apart by a trace of every rank",
    )  # fmt: skip


def _straggler(window: Window) -> Finding | None:
    if window.rank_s is None or len(window.rank_s) < 2:
        return None
    slowest, usual = max(window.rank_s), median(window.rank_s)
    share = (slowest - usual) / mean(window.step_s)
    if share < RANK_SPREAD:
        return None
    rank = window.rank_s.index(slowest)
    return Finding(
        "straggler", share, f"The others wait for rank {rank}.",
        f"its own work takes {format_seconds(slowest)} a step, the median rank's "
        f"{format_seconds(usual)}", "measured",
    )  # fmt: skip


def _waste(window: Window) -> Finding | None:
    if window.useful_share is None or (share := 1.0 - window.useful_share) < WASTE_SHARE:
        return None
    return Finding(
        "wasted tokens", share, f"{share:.0%} of the tokens teach nothing.",
        "padding, or tokens without a target", "measured",
    )  # fmt: skip


def _memory(window: Window) -> Finding | None:
    """Capacity, fragments, or memory that is paid for and not used."""
    held, whole = window.reserved_bytes, window.capacity_bytes
    if held is None or not whole:
        return None
    told = f"{format_bytes(held)} reserved of {format_bytes(whole)}"
    loose = (held - (window.allocated_bytes or held)) / whole
    if window.alloc_retries and loose > FRAGMENTS:
        return Finding(
            "fragmentation", loose, f"{loose:.0%} of the memory is in pieces that nothing fits.",
            f"{told}; the allocator began anew {window.alloc_retries} times", "measured",
        )  # fmt: skip
    if window.alloc_retries or held / whole > PRESSURE:
        return Finding(
            "memory capacity", held / whole, "The memory is full.",
            f"{told}; the allocator began anew {window.alloc_retries or 0} times", "measured",
        )  # fmt: skip
    if held / whole < UNUSED and window.saves_memory:
        return Finding(
            "unused memory", 1.0 - held / whole,
            f"{', '.join(window.saves_memory)} trades time for memory that is free.", told,
            "inferred", "what it costs in time: leave it out and compare",
        )  # fmt: skip
    return None


def _instability(window: Window) -> Finding | None:
    losses = finite(window.loss)
    spikes = spiked(losses) + spiked(finite(window.grad_norm))
    bad = spikes + (window.skipped_steps or 0)
    if bad > max(1.0, SPIKE_SHARE * window.steps):
        return Finding(
            "instability", min(1.0, bad / window.steps), "Loss or gradients jump.",
            f"{spikes} steps lie {SPIKE_SIGMAS:g} deviations above the {SPIKE_WINDOW} before them, "
            f"{window.skipped_steps or 0} were not finite", "measured",
        )  # fmt: skip
    if risen(losses):
        return Finding(
            "instability", 1.0, "The loss rises.",
            f"{mean(losses[-len(losses) // 4 :]):.4g} at the end, "
            f"{mean(losses[: len(losses) // 4]):.4g} at the beginning", "measured",
        )  # fmt: skip
    return None


def _clipped(window: Window) -> Finding | None:
    norms = finite(window.grad_norm)
    if not window.clip_norm or not norms:
        return None
    share = sum(norm > window.clip_norm for norm in norms) / len(norms)
    if share < CLIPPED_SHARE or median(norms) < 2 * window.clip_norm:
        return None
    return Finding(
        "instability", share, f"{share:.0%} of the steps are clipped, so the clip sets the rate.",
        f"median norm {median(norms):.3g}, optimizer.clip_norm = {window.clip_norm:g}", "measured",
    )  # fmt: skip


def _no_op(window: Window) -> Finding | None:
    if not window.inactive:
        return None
    return Finding(
        "silent no-op", 1.0, f"{', '.join(window.inactive)} was asked for and does nothing.",
        "its evidence at the end of the run", "measured",
    )  # fmt: skip


def spiked(values: Sequence[float]) -> int:
    """How many lie far above the window before them."""
    count = 0
    for end in range(FEWEST_STEPS, len(values)):
        before = values[max(0, end - SPIKE_WINDOW) : end]
        spread = pstdev(before)
        count += spread > 0 and values[end] > mean(before) + SPIKE_SIGMAS * spread
    return count


def risen(losses: Sequence[float]) -> bool:
    """Whether the last quarter lies above the first by more than a step's own scatter."""
    quarter = len(losses) // 4
    if quarter < 4:
        return False
    steps = [b - a for a, b in pairwise(losses)]
    return mean(losses[-quarter:]) - mean(losses[:quarter]) > RISE_SIGMAS * pstdev(steps)


RULES: tuple[Rule, ...] = (
    _no_op, _input, _launch, _interconnect, _straggler, _waste, _memory, _instability, _clipped,
)  # fmt: skip
