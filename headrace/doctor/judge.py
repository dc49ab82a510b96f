"""Verdicts on a window of steady steps, and nothing about what was not read.

Each rule looks at one bottleneck of the taxonomy and answers with a finding, or with nothing. What
is wrong stands first; then what takes time, by the share of a step that a remedy could win back at
most, wasted tokens among it; then full memory; last what is known to be there and not what it
costs, with a share of 0. Where no rule fires the verdict is the resource that binds the steps by
how busy it is (physics.py), which is no fault; where too little was read there is none.

A trace of some of the run's steps tells more than signals: its findings take the place of those of
the same name, and a launch that signals only suspect is dropped where the trace does not see it.

Every threshold of this file stands at its top.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from statistics import fmean, median, quantiles

from headrace.core.errors import Diverged, MemoryFull
from headrace.core.units import format_bytes, format_seconds
from headrace.doctor.findings import ABSTAINED, Finding
from headrace.doctor.physics import INPUT_SHARE, UNKNOWN, Use, binding, late_launches
from headrace.doctor.window import NEWEST_STEPS, Limits, Window, finite, jumps, relapsed, rises

FEWEST_STEPS = 8
"""Steady steps below which nothing is judged."""
COMMUNICATION_SHARE = 0.05
"""Of a step, exposed (Megatron-Bridge: what is above a twentieth must be explained)."""
LATE_SHARE = 0.05
"""Of a step, for which ranks wait for the last one; TraceML warns from 0.10 of the slow rank's."""
SAME_RANK = 0.8
"""Of the steps in which one rank is last, from which that rank is named (TraceML's cover)."""
TINY_SHARE = 0.08
"""Of a step, in operations that do next to nothing: 5 to 6% of a step of 256 tokens on a CPU."""
WASTE_SHARE = 0.05
"""Of the tokens, without a target."""
RECOMPILES, RECOMPILED_SHARE = 2, 0.05
"""Steps that compile again: one new shape and one for any shape are the compiler's own way (torch's
automatic dynamic shapes); and the share of the time that they may take."""
WIDE_SHARE = 0.05
"""Of a step, that products lose by a dtype wider than the plan's."""
PRESSURE = 0.8
"""Of the device's memory, reserved where the allocator began anew: it was full."""
FRAGMENTS = 0.10
"""Of the device's memory, reserved and not allocated at the peak."""
UNTRAINED_SHARE = 0.05
"""Of the optimizer's parameters, without a gradient in any step; a head not in use is less."""
UNUSED = 0.75
"""Of the device's memory, which a run without its savings would stay below: they need not be on."""
JUMPS = Limits(sigmas=6.0, window=128, fewest=16)
"""A loss or norm jumps by six deviations (OLMo-core's monitor), of steps that did not jump."""
LOSS_JUMP, NORM_JUMP = 0.05, 2.0
"""And by so much of its own level: smaller ones no run remembers; a norm's scatter is wide."""
JUMP_SHARE, FEWEST_JUMPS = 0.02, 3
"""Of the steps, and how many, that jump in no healthy run (OLMo 2 tells 0.4% before its cures)."""
STILL = 2
"""Gradient norms that jump in the later half, below which those before are no fault: soon after its
warmup a healthy run of small batches has up to five of them, and then no more. A loss has not."""
LOST_SHARE, LOST = 0.05, 3
"""Of the steps, and how many, whose gradient may be not finite: a loss scale is found by trying."""
RISE_SIGMAS, RISE_SHARE = 3.0, 0.02
"""How far the end of the losses lies above their beginning: in deviations of a step, and as a share
of the loss."""
BACK_STEPS = 3
"""In a row, for which a loss lies so far above its own best that it is no jump of one batch."""

Rule = Callable[[Window], Finding | None]


def judge(window: Window, trace: Sequence[Finding] = (), use: Use = UNKNOWN) -> list[Finding]:
    """Findings, the gravest first; one that says what binds the steps where nothing is wrong.

    Args:
        window: what signals say of the run's steady steps.
        trace: what traces of some of its steps say, where there are any.
        use: what the work of a step takes of the device.
    """
    return faults(window, trace, use) or [binding(window, use, busy_in(trace))]


def faults(window: Window, trace: Sequence[Finding] = (), use: Use = UNKNOWN) -> list[Finding]:
    """Findings without what binds the steps where nothing is wrong; none where nothing is."""
    traced = [f for f in trace if f.bottleneck not in ("computation", ABSTAINED)]
    ended = _ended(window)
    if window.steps < FEWEST_STEPS and not traced:
        return [ended or Finding(
            ABSTAINED, 0.0, "Too few steady steps were measured to judge them.",
            f"{window.steps} of at least {FEWEST_STEPS}", "measured", "everything",
        )]  # fmt: skip
    wrong, slow, full = (
        [finding for rule in rules if (finding := rule(window)) is not None]
        for rules in (WRONG, SLOW, MEMORY)
    )
    if (late := late_launches(window, use)) is not None:
        slow.append(late)
    if any(f.bottleneck != ABSTAINED for f in trace):
        slow, full = _with_trace(slow, full, traced)
    known = sorted((f for f in slow if f.share), key=lambda f: -f.share)
    found = [*sorted(wrong, key=lambda f: -f.share), *known, *full]
    found += [f for f in slow if not f.share and f.bottleneck not in {g.bottleneck for g in known}]
    if ended is not None:
        found = [ended, *(f for f in found if f.bottleneck != ended.bottleneck)]
    return found


def busy_in(trace: Sequence[Finding]) -> float | None:
    """The share of a step in which kernels ran, where a trace found nothing else to tell."""
    return next((f.share for f in trace if f.bottleneck == "computation"), None)


def _with_trace(
    slow: Sequence[Finding], full: list[Finding], traced: Sequence[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """The signals' findings with the traces' in their place: what takes time, and full memory.

    A trace sees the time that the allocator takes, and only signals whether the memory is full or
    in pieces.
    """
    told = {f.bottleneck for f in traced}
    kept = [f for f in slow if f.bottleneck not in told]
    kept = [f for f in kept if (f.bottleneck, f.confidence) != ("launch", "inferred")]
    if not full or "memory capacity" not in told:
        return [*traced, *kept], full
    (known,) = full
    both = [
        replace(known, share=f.share, evidence=f"{known.evidence}; {f.evidence}")
        if f.bottleneck == "memory capacity" else f for f in traced
    ]  # fmt: skip
    return [*both, *kept], []


# --- what is wrong ---------------------------------------------------------------------------


def _ended(window: Window) -> Finding | None:
    """What made the run end before its time; one step is enough to tell."""
    if window.ended_by == MemoryFull.__name__:
        told = "The run ended because the memory was full."
        return Finding("memory capacity", 1.0, told, window.message, "measured")
    lost = bool(window.loss) and not isfinite(window.loss[-1])
    if window.ended_by != Diverged.__name__ and not (window.ended_by and lost):
        return None
    return Finding(
        "instability", 1.0, "The run ended because a loss or a gradient was not finite.",
        window.message, "measured",
        "which layer: the first whose output or gradient is not finite",
    )  # fmt: skip


def _no_op(window: Window) -> Finding | None:
    if window.untrained >= UNTRAINED_SHARE:
        return Finding(
            "silent no-op", window.untrained,
            f"{window.untrained:.0%} of the optimizer's parameters are not trained.",
            "none of them had a gradient in any step that was looked at", "measured",
            "which: those whose grad is None before optimizer.step",
        )  # fmt: skip
    if not window.inactive:
        return None
    return Finding(
        "silent no-op", 1.0, f"{', '.join(window.inactive)} was asked for and does nothing.",
        "its evidence at the end of the run", "measured",
    )  # fmt: skip


def _instability(window: Window) -> Finding | None:
    return _rising(window) or _spikes(window) or _lost_steps(window)


def _spikes(window: Window) -> Finding | None:
    losses, norms = finite(window.loss), finite(window.grad_norm)[-NEWEST_STEPS:]
    high = jumps(losses, JUMPS, LOSS_JUMP), jumps(norms, JUMPS, NORM_JUMP)
    late = high[1] - jumps(norms[: len(norms) // 2], JUMPS, NORM_JUMP)
    told = high[0], high[1] if late >= STILL else 0
    count, of = max(zip(told, (len(losses), len(norms)), strict=True))
    if count < max(FEWEST_JUMPS, JUMP_SHARE * of):
        return None
    return Finding(
        "instability", min(1.0, count / of), "Loss or gradients jump.",
        f"losses jump in {high[0]} steps and gradient norms in {high[1]}, by more than "
        f"{JUMPS.sigmas:g} deviations of the steps before them", "measured",
    )  # fmt: skip


def _lost_steps(window: Window) -> Finding | None:
    lost, of = max(
        ((len(values) - len(finite(values)), len(values))
         for values in (window.loss or (), window.grad_norm or ())),
    )  # fmt: skip
    if lost <= max(LOST, LOST_SHARE * of):
        return None
    return Finding(
        "instability", lost / of, "Losses or gradients are not finite again and again.",
        f"{lost} of {of} steps", "measured",
    )  # fmt: skip


def _rising(window: Window) -> Finding | None:
    """The loss went back above its own best and stayed there for a while, or ends above it."""
    losses = finite(window.loss)
    back = relapsed(losses, JUMPS.sigmas, LOSS_JUMP, BACK_STEPS)
    if back >= max(BACK_STEPS, JUMP_SHARE * len(losses)):
        return Finding(
            "instability", back / len(losses),
            "The loss rose again and stayed up, as it does where the learning rate is too high.",
            f"{back} of {len(losses)} steps, {BACK_STEPS} or more in a row, lie far above what had "
            f"been reached, up to {max(losses):.4g}; the first has {losses[0]:.4g}", "measured",
        )  # fmt: skip
    if rises(losses, RISE_SIGMAS, RISE_SHARE):
        quarter = len(losses) // 4
        told = f"{median(losses[-quarter:]):.4g} in the last quarter"
        return Finding(
            "instability", 1.0, "The loss rises.",
            f"{told}, {median(losses[:quarter]):.4g} in the first", "measured",
        )  # fmt: skip
    return None


# --- what takes time -------------------------------------------------------------------------


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


def _input(window: Window) -> Finding | None:
    said = "The device waits for data in {:.0%} of the time."
    return _phase(window, window.input_s, "input", INPUT_SHARE, said)


def _interconnect(window: Window) -> Finding | None:
    """What is exposed, less the wait for ranks that are late, which is no transfer."""
    spent_s = window.communication_s
    if spent_s is not None and window.waited_s is not None:
        spent_s = tuple(max(0.0, s - window.waited_s) for s in spent_s)
    missing = "" if window.waited_s is not None else (
        "transfer and waiting for other ranks are told apart by a trace of every rank"
    )  # fmt: skip
    return _phase(
        window, spent_s, "interconnect", COMMUNICATION_SHARE,
        "Communication that nothing hides takes {:.0%} of the time.", missing,
    )  # fmt: skip


def _straggler(window: Window) -> Finding | None:
    late_s, mean_s = window.late_s, fmean(window.step_s)
    if late_s is None or (share := min(1.0, late_s / mean_s)) < LATE_SHARE:
        return None
    same = window.last_share >= SAME_RANK
    who = f"rank {window.last}" if same else "changing ranks"
    return Finding(
        "straggler", share, f"Ranks wait for {who} in {share:.0%} of the time.",
        f"the last rank is {format_seconds(late_s)} behind the others' median in a step of "
        f"{format_seconds(mean_s)}; rank {window.last} is last in {window.last_share:.0%} of the "
        "steps", "measured", "why: clocks, temperature, data or another process",
    )  # fmt: skip


def _recompiles(window: Window) -> Finding | None:
    again_s, count = sum(window.recompile_s), len(window.recompile_s)
    share = again_s / (sum(window.step_s) + again_s)
    if count <= RECOMPILES or share < RECOMPILED_SHARE:
        return None
    return Finding(
        "launch", share, f"Steps compile again after the first ones: {share:.0%} of the time.",
        f"{count} steps, {format_seconds(again_s)} more than others", "measured",
        "which frame: headrace explain PLAN --graph",
    )  # fmt: skip


def _tiny(window: Window) -> Finding | None:
    """Their time is that of an undisturbed host, so it is held against an undisturbed step."""
    if window.host_s is None:
        return None
    share = min(1.0, window.host_s / quantiles(window.step_s, n=4, method="inclusive")[0])
    if share < TINY_SHARE:
        return None
    return Finding(
        "launch", share, f"Operations that do next to nothing take {share:.0%} of the time.",
        f"{window.tiny} operations of a step are views or touch a page at most: "
        f"{format_seconds(window.host_s)} at what one costs here", "inferred",
        "which: a trace tells",
    )  # fmt: skip


def _breaks(window: Window) -> Finding | None:
    """Compiled code is left and entered again; what that costs is not read."""
    if not window.graph_breaks:
        return None
    return Finding(
        "launch", 0.0, "Compiled code is broken into pieces.",
        f"{window.graph_breaks} graph breaks", "inferred",
        "what they cost: a trace tells; where they are: headrace explain PLAN --graph",
    )  # fmt: skip


def _wide(window: Window) -> Finding | None:
    """Products in a dtype that is wider than the plan's; twice as wide is half as fast at best."""
    work = [a + b for a, b in zip(window.forward_s or (), window.backward_s or (), strict=False)]
    if not window.wide_flops or not work:
        return None
    slower = window.wide_flops * (window.wider - 1)
    share = slower / (1 + slower) * (window.share(work) or 0.0)
    if share < WIDE_SHARE:
        return None
    return Finding(
        "kernel efficiency", share,
        f"{window.wide_flops:.0%} of the products are computed wider than the plan says.",
        f"of their FLOPs in the step that was looked at; a dtype {window.wider:g} times as wide "
        "is so much slower at least", "inferred", "what else products could lose: a trace tells",
    )  # fmt: skip


def _waste(window: Window) -> Finding | None:
    if window.useful_share is None or (share := 1.0 - window.useful_share) < WASTE_SHARE:
        return None
    return Finding(
        "wasted tokens", share, f"{share:.0%} of the tokens are computed and count in no loss.",
        "padding, or tokens whose target is left out", "measured",
    )  # fmt: skip


def _needless(window: Window) -> Finding | None:
    """What trades time for memory where the memory is free without it; fewer bytes cost none."""
    held, whole = window.reserved_bytes, window.capacity_bytes
    if held is None or not whole or not window.savings:
        return None
    needless = [
        name for name, saving in window.savings.items()
        if (held + max(0.0, saving["bytes"])) / whole < UNUSED
        and (saving["again"] > 0 or saving["moved"] > 0)
    ]  # fmt: skip
    if not needless:
        return None
    again = sum(window.savings[name]["again"] for name in needless)
    more = max(window.savings[name]["bytes"] for name in needless)
    return Finding(
        "unused memory", max(0.0, again),
        f"{', '.join(needless)} trades time for memory that is free.",
        f"{format_bytes(held)} held and {format_bytes(more)} more without it, of "
        f"{format_bytes(whole)}; {again:.0%} of the work is done again", "inferred",
        "what it costs in time: leave it out and compare",
    )  # fmt: skip


def _memory(window: Window) -> Finding | None:
    """The allocator had to begin anew: the memory was full, or in pieces."""
    held, whole = window.reserved_bytes, window.capacity_bytes
    if held is None or not whole or not window.alloc_retries:
        return None
    told = f"{format_bytes(held)} reserved of {format_bytes(whole)}; the allocator began anew "
    told += f"{window.alloc_retries} times"
    loose = (held - (window.allocated_bytes or held)) / whole
    if loose > FRAGMENTS:
        said = f"{loose:.0%} of the memory is in pieces that nothing fits."
        return Finding("fragmentation", loose, said, told, "measured")
    if held / whole > PRESSURE:
        return Finding("memory capacity", held / whole, "The memory is full.", told, "measured")
    return None


WRONG: tuple[Rule, ...] = (_no_op, _instability)
SLOW: tuple[Rule, ...] = (
    _input, _recompiles, _tiny, _breaks, _interconnect, _straggler, _wide, _waste, _needless,
)  # fmt: skip
MEMORY: tuple[Rule, ...] = (_memory,)
