"""Judge an observation by one table of rules, and say nothing about what is unavailable.

Each rule looks at one bottleneck and answers with a finding, or with nothing. What is wrong stands
first; then what takes time, by the share of a step that a remedy could win at most, padding among
it; then full memory; last what is known to be there and not what it costs, with a share of 0.
Where no rule fires the verdict is the resource that binds the steps by how busy it is (physics.py),
which is no fault. Where too little was measured there is no verdict.

A trace of some of the run's steps is more precise than signals: its findings take the place of
those of the same name, and a launch that signals only suspect is dropped where the trace does not
see it.

Every threshold of the rules stands at the top of this file, of across_ranks.py or of physics.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import isfinite
from statistics import fmean, median, quantiles
from typing import Any

from headrace.core.errors import Diverged, MemoryFull
from headrace.doctor import across_ranks, given
from headrace.doctor.findings import OF_PHASES, PASSES, Finding, Kind
from headrace.doctor.observation import Observation
from headrace.doctor.overfitting import overfits
from headrace.doctor.physics import INPUT_SHARE, binding, host_is_behind
from headrace.doctor.series import NEWEST_STEPS, Limits, finite, jumps, relapsed, rises

FEWEST_STEPS = 8
"""Steady steps below which nothing is judged. Chosen: fewer give no median that holds."""
COMMUNICATION_SHARE = 0.05
"""Share of a step, exposed, from which it is named, as Megatron-Bridge's guide has it."""
TINY_SHARE = 0.08
"""Share of a step in operations that do next to nothing, from which it is named. It is 5 to 6% of a
step of 256 tokens on a CPU."""
WASTE_SHARE = 0.05
"""Share of the tokens without a target from which it is named. Chosen, not measured."""
RECOMPILES, RECOMPILED_SHARE = 2, 0.05
"""Steps that may compile after the first, one new shape and one for any shape (torch's automatic
dynamic shapes), and the share of the time that they may take."""
WIDE_SHARE = 0.05
"""Share of a step that matmuls lose by a dtype wider than the plan's, from which it is named."""
PRESSURE = 0.8
"""Share of the device's memory reserved where the allocator began anew, above which it was full."""
FRAGMENTS = 0.10
"""Share of the device's memory reserved and not allocated at the peak, above which it is named."""
UNTRAINED_SHARE = 0.05
"""Share of the optimizer's parameters without a gradient in any step, from which it is named; a
head that is not in use is less."""
UNUSED = 0.75
"""Share of the device's memory below which a run without its savings need not have them on."""
JUMPS = Limits(sigmas=6.0, window=128, fewest=16)
"""A loss or norm jumps by six deviations (OLMo-core's monitor), of steps that did not jump."""
LOSS_JUMP, NORM_JUMP = 0.05, 2.0
"""Share of its own level by which a loss, and a norm, jumps at least: smaller ones no run
remembers, and the scatter of a norm is wide."""
JUMP_SHARE, FEWEST_JUMPS = 0.02, 3
"""Share of the steps, and how many, that jump in no healthy run (OLMo 2 reports 0.4% before its
cures)."""
STILL = 2
"""Gradient norms that jump in the later half, below which those before are no fault: soon after its
warmup a healthy run of small batches has up to five of them, and then no more. A loss has not."""
LOST_SHARE, LOST = 0.05, 3
"""Share of the steps, and how many, whose gradient may be not finite: a loss scale is found by
trying."""
RISE_SIGMAS, RISE_SHARE = 3.0, 0.02
"""How far the end of the losses lies above their beginning: in deviations of a step, and as a share
of the loss."""
BACK_STEPS = 3
"""Steps in a row for which a loss lies so far above its own best that it is no jump of one
batch."""
REDUCIBLE_CLOCK = (
    "thermal slowdown",
    "hardware slowdown",
    "power brake",
    "clocks that were set",
)
"""Why a clock is slow that need not be. A limit of power is how GPUs are built and not among it."""
LIMITED_SHARE, SLOWER = 0.2, 0.05
"""Share of the samples in which one of them held, and share of the clock that it took, from which
it is named. Chosen, not measured."""
WRONG = ("silent no-op", "instability", "forgetting", "overfitting", "recipe")
"""Bottlenecks that stand first whatever their share."""


class Group(IntEnum):
    """Order what rules find: what is wrong, what takes time, what fills the memory."""

    ENDED = 0
    WRONG = 1
    TIME = 2
    MEMORY = 3


@dataclass(frozen=True)
class Rule:
    """Name where a finding stands, and what looks for it."""

    group: Group
    look: Callable[[Observation], Finding | None]


def examine(seen: Observation) -> list[Finding]:
    """Return the faults, the gravest first, what binds the steps, the phases, and what is unknown.

    Args:
        seen: a run, or a watched loop.
    """
    every = faults(seen)
    wrong = [_with_graph_breaks(f, seen.graph_breaks) for f in every if not f.abstains]
    wrong = _placed(wrong, _clock(seen))
    wrong = _with_divergence(wrong, seen)
    unread = [f for f in (*every, *seen.traced) if f.abstains]
    if wrong and wrong[0].bottleneck == "instability":  # which few steps are enough to tell
        unread = [f for f in unread if f.kind is not Kind.TOO_FEW_STEPS]
    binds: list[Finding] = []
    if seen.steps >= FEWEST_STEPS:
        busy = busy_in([seen.split] if seen.split is not None and seen.split.share else [])
        named = {f.bottleneck for f in wrong}
        bound = binding(seen, busy)
        binds = [] if bound.bottleneck in named or (wrong and bound.abstains) else [bound]
    slower = [seen.beside] if seen.beside else []
    phases = [_with_split(f, seen) for f in seen.phases]
    return [*wrong, *slower, *binds, *phases, *unread]


def presented(findings: Sequence[Finding], seen: Observation) -> list[Finding]:
    """Return the findings as a reader gets them: each phase once, too few steps first.

    Too few steps stand first, since the phases behind them are of warm steps as well.
    """
    whole = sorted(_merged(findings), key=lambda finding: not unjudged([finding]))
    for kind, missing in (Kind.NO_HOOK, seen.not_hooked), (Kind.NOT_IN_LOG, seen.not_logged):
        if missing:
            whole.append(Finding(kind, 0.0, {"steps": seen.watched_steps, "missing": missing}))
    return whole


def faults(seen: Observation) -> list[Finding]:
    """Return what the table of rules finds, the gravest first; none where nothing is wrong."""
    traced = [f for f in seen.traced if f.bottleneck != "computation" and not f.abstains]
    ended = next(iter(_look(seen, Group.ENDED)), None)
    if seen.steps < FEWEST_STEPS and not traced:
        few = Finding(Kind.TOO_FEW_STEPS, 0.0, {"steps": seen.steps, "fewest": FEWEST_STEPS})
        return [ended or few]
    wrong, slow, full = (_look(seen, one) for one in (Group.WRONG, Group.TIME, Group.MEMORY))
    if any(not f.abstains for f in seen.traced):
        slow, full = _with_trace(slow, full, traced)
    priced = _by_share(f for f in slow if f.share)
    names = {f.bottleneck for f in priced}
    whole = [*_by_share(wrong), *priced, *full]
    whole += [f for f in slow if not f.share and f.bottleneck not in names]
    if ended is not None:
        whole = [ended, *(f for f in whole if f.bottleneck != ended.bottleneck)]
    return whole


def _look(seen: Observation, group: Group) -> list[Finding]:
    """Return what the rules of a group find."""
    answers = (rule.look(seen) for rule in RULES if rule.group is group)
    return [finding for finding in answers if finding is not None]


def unjudged(findings: Sequence[Finding]) -> bool:
    """Return whether the first finding says that there were too few steps to judge any."""
    return any(f.kind is Kind.TOO_FEW_STEPS for f in findings[:1])


def busy_in(trace: Sequence[Finding]) -> float | None:
    """Return the share of a step in which kernels ran, where a trace found nothing else."""
    return next((f.share for f in trace if f.bottleneck == "computation"), None)


def _by_share(findings: Any) -> list[Finding]:
    return sorted(findings, key=lambda finding: -finding.share)


def _with_trace(
    slow: Sequence[Finding], full: list[Finding], traced: Sequence[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """Return what takes time and full memory, with the trace's findings in place of the signals'.

    A trace sees the time that the allocator takes, and only signals whether the memory is full or
    in pieces.
    """
    names = {f.bottleneck for f in traced}
    kept = [f for f in slow if f.bottleneck not in names]
    kept = [f for f in kept if (f.bottleneck, f.confidence) != ("launch", "inferred")]
    if not full or "memory capacity" not in names:
        return [*traced, *kept], full
    (by_signals,) = full
    both = [
        replace(by_signals, share=f.share, beside=(*by_signals.beside, f))
        if f.bottleneck == "memory capacity"
        else f
        for f in traced
    ]
    return [*both, *kept], []


def _with_graph_breaks(finding: Finding, breaks: int | None) -> Finding:
    """Return a finding of slow launches with the graph breaks, which a trace does not show."""
    if finding.bottleneck != "launch" or not breaks or finding.kind is Kind.GRAPH_BREAKS:
        return finding
    return replace(finding, facts={**finding.facts, "graph_breaks": breaks})


def _placed(every: list[Finding], one: Finding | None) -> list[Finding]:
    """Return the findings with one more, behind what is wrong and what takes more."""
    if one is None:
        return every
    behind = (n for n, f in enumerate(every) if f.bottleneck not in WRONG and f.share < one.share)
    place = next(behind, len(every))
    return [*every[:place], one, *every[place:]]


def _with_divergence(every: list[Finding], seen: Observation) -> list[Finding]:
    """Return the findings with the divergence of the whole run first: nothing matters before it."""
    if not seen.outcome.get("diverged"):
        return every
    unstable = tuple(f for f in every if f.bottleneck == "instability")
    if seen.outcome.get("kind") == "not finite" and every and every[0] in unstable:
        return every
    facts = {"sentence": seen.outcome["sentence"]}
    facts |= {f"{name}_nats": seen.outcome[f"{name}_nats"] for name in ("last", "first", "guess")}
    diverged = Finding(Kind.DIVERGED, 1.0, facts, beside=unstable)
    return [diverged, *(f for f in every if f not in unstable)]


def _with_split(phase: Finding, seen: Observation) -> Finding:
    """Return a phase with what else is known of it: a trace's split, or what masks are."""
    facts = dict(phase.facts)
    if phase.kind is Kind.TOKENS_WITHOUT_TARGET and seen.masks_prompts:
        facts |= {"masks_prompts": True, "padded_share": seen.padding_share}
    if phase.bottleneck == PASSES:
        facts["in_trace"] = seen.split
        if seen.device == "cuda" and seen.gpu and not seen.gpu["samples"]:
            facts["no_clock"] = seen.gpu["why_not"]
    return replace(phase, facts=facts)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings without phases that another one names, which gets their evidence."""
    kept: list[Finding] = []
    for finding in findings:
        same = (n for n, other in enumerate(kept) if other.bottleneck == finding.bottleneck)
        at = next(same, None)
        if at is None or finding.kind not in OF_PHASES:
            kept.append(finding)
        else:
            kept[at] = replace(kept[at], beside=(*kept[at].beside, finding))
    return kept


# --- what is wrong ---------------------------------------------------------------------------


def _ended(seen: Observation) -> Finding | None:
    """Return a finding of what made the run end before its time; one step is enough for it."""
    if seen.ended_by == MemoryFull.__name__:
        return Finding(Kind.OUT_OF_MEMORY, 1.0, {"message": seen.message})
    lost = bool(seen.loss) and not isfinite(seen.loss[-1])
    if seen.ended_by != Diverged.__name__ and not (seen.ended_by and lost):
        return None
    return Finding(Kind.ENDED_NOT_FINITE, 1.0, {"message": seen.message})


def _no_op(seen: Observation) -> Finding | None:
    if seen.untrained >= UNTRAINED_SHARE:
        return Finding(Kind.UNTRAINED, seen.untrained)
    if seen.inactive:
        return Finding(Kind.INACTIVE, 1.0, {"names": seen.inactive})
    return given.unreached(seen)


def _instability(seen: Observation) -> Finding | None:
    return given.above_the_start(seen) or _rising(seen) or _spikes(seen) or _lost_steps(seen)


def _spikes(seen: Observation) -> Finding | None:
    losses, norms = finite(seen.loss), finite(seen.grad_norm)[-NEWEST_STEPS:]
    loss_jumps, norm_jumps = jumps(losses, JUMPS, LOSS_JUMP), jumps(norms, JUMPS, NORM_JUMP)
    later = norm_jumps - jumps(norms[: len(norms) // 2], JUMPS, NORM_JUMP)
    counted = loss_jumps, norm_jumps if later >= STILL else 0
    count, of = max(zip(counted, (len(losses), len(norms)), strict=True))
    if count < max(FEWEST_JUMPS, JUMP_SHARE * of):
        return None
    facts = {"loss_jumps": loss_jumps, "norm_jumps": norm_jumps, "sigmas": JUMPS.sigmas}
    return Finding(Kind.SPIKES, min(1.0, count / of), facts)


def _lost_steps(seen: Observation) -> Finding | None:
    series = (seen.loss or (), seen.grad_norm or ())
    lost, of = max((len(values) - len(finite(values)), len(values)) for values in series)
    if lost <= max(LOST, LOST_SHARE * of):
        return None
    return Finding(Kind.LOST_STEPS, lost / of, {"lost": lost, "steps": of})


def _rising(seen: Observation) -> Finding | None:
    """Look for a loss that went back above its own best and stayed there, or ends above it."""
    losses = finite(seen.loss)
    back = relapsed(losses, JUMPS.sigmas, LOSS_JUMP, BACK_STEPS)
    if back >= max(BACK_STEPS, JUMP_SHARE * len(losses)):
        facts = {
            "back": back,
            "steps": len(losses),
            "in_a_row": BACK_STEPS,
            "highest_nats": max(losses),
            "first_nats": losses[0],
        }
        return Finding(Kind.RELAPSED, back / len(losses), facts)
    if rises(losses, RISE_SIGMAS, RISE_SHARE):
        quarter = len(losses) // 4
        facts = {"last_nats": median(losses[-quarter:]), "first_nats": median(losses[:quarter])}
        return Finding(Kind.RISING, 1.0, facts)
    return None


# --- what takes time -------------------------------------------------------------------------


def _phase(
    seen: Observation, spent_s: Sequence[float] | None, kind: Kind, least: float, **more: Any
) -> Finding | None:
    """Look for a phase that takes at least a share of the time."""
    share = seen.share(spent_s)
    if share is None or spent_s is None or share < least:
        return None
    facts = {"spent_s": fmean(spent_s), "step_s": fmean(seen.step_s), **more}
    return Finding(kind, share, facts)


def _input(seen: Observation) -> Finding | None:
    return _phase(seen, seen.input_s, Kind.INPUT_WAIT, INPUT_SHARE)


def _interconnect(seen: Observation) -> Finding | None:
    """Look for exposed communication, less what is no transfer: waits for a straggler or stages."""
    spent_s, kind = seen.communication_s, Kind.EXPOSED_COMMUNICATION
    waited_s = seen.waited_s if seen.stages is None else seen.stages.waited_s
    if spent_s is not None and waited_s is not None:
        spent_s = tuple(max(0.0, s - waited_s) for s in spent_s)
    apart = waited_s is not None
    return _phase(seen, spent_s, kind, COMMUNICATION_SHARE, waits_apart=apart)


def _recompiles(seen: Observation) -> Finding | None:
    more_s, count = sum(seen.recompile_s), len(seen.recompile_s)
    if count <= RECOMPILES or (share := more_s / (sum(seen.step_s) + more_s)) < RECOMPILED_SHARE:
        return None
    return Finding(Kind.RECOMPILES, share, {"steps": count, "more_s": more_s})


def _tiny(seen: Observation) -> Finding | None:
    """Look for operations that do next to nothing.

    Their time is that of an undisturbed host, so it is compared with an undisturbed step.
    """
    if seen.host_s is None or not seen.steps:
        return None
    share = min(1.0, seen.host_s / quantiles(seen.step_s, n=4, method="inclusive")[0])
    if share < TINY_SHARE:
        return None
    facts = {"operations": seen.tiny, "host_s": seen.host_s}
    return Finding(Kind.TINY_OPERATIONS, share, facts, "inferred")


def _breaks(seen: Observation) -> Finding | None:
    """Look for compiled code that is left and entered again; what that costs is not read."""
    if not seen.graph_breaks:
        return None
    return Finding(Kind.GRAPH_BREAKS, 0.0, {"graph_breaks": seen.graph_breaks}, "inferred")


def _wide(seen: Observation) -> Finding | None:
    """Look for matmuls in a dtype wider than the plan's; twice as wide is half as fast at best."""
    work = [a + b for a, b in zip(seen.forward_s or (), seen.backward_s or (), strict=False)]
    if not seen.wide_flops or not work:
        return None
    slower = seen.wide_flops * (seen.wider - 1)
    share = slower / (1 + slower) * (seen.share(work) or 0.0)
    if share < WIDE_SHARE:
        return None
    facts = {"flops_share": seen.wide_flops, "times_as_wide": seen.wider}
    return Finding(Kind.WIDE_MATMULS, share, facts, "inferred")


def _waste(seen: Observation) -> Finding | None:
    if seen.masks_prompts or seen.useful_share is None:
        return None
    share, facts = 1.0 - seen.useful_share, {"counted_share": seen.counted_share}
    return Finding(Kind.WASTED_TOKENS, share, facts) if share >= WASTE_SHARE else None


def _needless(seen: Observation) -> Finding | None:
    """Look for techniques that trade time for memory that is free without them."""
    reserved, whole = seen.reserved_bytes, seen.capacity_bytes
    if reserved is None or not whole or not seen.savings:
        return None
    needless = {
        name: saving
        for name, saving in seen.savings.items()
        if (reserved + max(0.0, saving["bytes"])) / whole < UNUSED
        and (saving["again"] > 0 or saving["moved"] > 0)
    }
    if not needless:
        return None
    work_share = sum(saving["again"] for saving in needless.values())
    facts = {
        "names": tuple(needless),
        "reserved_bytes": reserved,
        "more_bytes": max(saving["bytes"] for saving in needless.values()),
        "capacity_bytes": whole,
        "work_share": work_share,
    }
    return Finding(Kind.NEEDLESS_SAVINGS, max(0.0, work_share), facts, "inferred")


def _memory(seen: Observation) -> Finding | None:
    """Look for an allocator that had to begin anew: the memory was full, or in pieces."""
    reserved, whole = seen.reserved_bytes, seen.capacity_bytes
    if reserved is None or not whole or not seen.alloc_retries:
        return None
    facts = {
        "reserved_bytes": reserved,
        "capacity_bytes": whole,
        "retries": seen.alloc_retries,
    }
    loose = (reserved - (seen.allocated_bytes or reserved)) / whole
    if loose > FRAGMENTS:
        return Finding(Kind.MEMORY_IN_PIECES, loose, facts)
    if reserved / whole > PRESSURE:
        return Finding(Kind.MEMORY_FULL, reserved / whole, facts)
    return None


def _clock(seen: Observation) -> Finding | None:
    """Look for a clock that something kept below what the device could do."""
    gpu = seen.gpu
    if not gpu or not gpu.get("samples"):
        return None
    limits = {why: share for why, share in gpu["slowed"].items() if why in REDUCIBLE_CLOCK}
    why = max(limits, key=lambda name: limits[name], default="")
    share = 1.0 - gpu["sm_clock_hz"]["median"] / gpu["sm_clock_hz"]["most"]
    if not why or limits[why] < LIMITED_SHARE or share < SLOWER:
        return None
    facts = {
        "why": why,
        "clock_hz": gpu["sm_clock_hz"]["median"],
        "highest_clock_hz": gpu["sm_clock_hz"]["most"],
        "limited_share": limits[why],
        "samples": gpu["samples"],
        "watched_s": gpu["watched_s"],
        "temperature_c": gpu["temperature_c"],
    }
    return Finding(Kind.CLOCK_LIMITED, share, facts, "inferred")


RULES: tuple[Rule, ...] = (
    Rule(Group.ENDED, _ended),
    Rule(Group.WRONG, _no_op),
    Rule(Group.WRONG, _instability),
    Rule(Group.WRONG, given.forgot),
    Rule(Group.WRONG, overfits),
    Rule(Group.TIME, _input),
    Rule(Group.TIME, _recompiles),
    Rule(Group.TIME, _tiny),
    Rule(Group.TIME, _breaks),
    Rule(Group.TIME, _interconnect),
    *(Rule(Group.TIME, look) for look in across_ranks.UNEVEN),
    Rule(Group.TIME, _wide),
    Rule(Group.TIME, _waste),
    Rule(Group.TIME, _needless),
    *(Rule(Group.TIME, look) for look in given.UNPRICED),
    Rule(Group.TIME, host_is_behind),
    Rule(Group.MEMORY, _memory),
)
"""Every rule, in the order in which findings of equal share stand."""
