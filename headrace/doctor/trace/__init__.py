"""Read traces of torch.profiler from any trainer and name the bottleneck.

    torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=2, active=5),
                           on_trace_ready=torch.profiler.tensorboard_trace_handler("traces"))

records one; several ranks' files of one recording may be given together. file.py reads them,
steps.py finds the steps, times.py shares out each step's time, ranks.py compares ranks, limits.py
holds every threshold, and here the numbers become verdicts.

A verdict's share is what could be recovered of a step: an upper bound, since the next bottleneck
is unavailable. Exposed communication is reported and only blocking communication counts. What one
rank suffers and most do not is that rank's: shares are the median over ranks, but the straggler's
is that of the rank which waits longest.

What a trace does not hold, the verdict says. It holds no FLOPs and no bytes of kernels: where
shapes were recorded (record_shapes=True) roofline.py models them, and judges kernels against the
device's ceilings. Without shapes their efficiency is not judged, and memory-bound families are
known by names alone. The profiler slows the host, so a launch verdict is an upper bound too. Where
the device was not recorded, or fewer than two steps, the doctor abstains.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from headrace.doctor.findings import Finding, Kind
from headrace.doctor.trace.limits import (
    ALARM,
    BOUND_SHARE,
    FEW_STEPS,
    FUSION_RECOVERS,
    INEFFICIENT,
    MEMORY_BOUND,
    OFFLOAD_SHARE,
    SAME_RANK,
    SLOW_MATMUL_RECOVERS,
)
from headrace.doctor.trace.ranks import TraceNumbers, measure_traces
from headrace.doctor.trace.roofline import RoofTimes
from headrace.doctor.trace.times import RankTimes

MOST_FAMILIES = 4
"""Families of kernels that a reader sees."""


def diagnose_trace(paths: Sequence[Path]) -> list[Finding]:
    """Return the verdicts on one run's traces, what could recover most first; never none.

    Args:
        paths: one file of each rank.

    Raises:
        ConfigError: as measure_traces.
    """
    return judge_trace(measure_traces(paths))


def judge_trace(numbers: TraceNumbers) -> list[Finding]:
    """Return the verdicts on measured traces, what could recover most first; never none."""
    if (nothing := _unmeasured(numbers)) is not None:
        return [nothing]
    answers = (rule(numbers) for rule in RULES)
    verdicts = [finding for finding in answers if finding is not None]
    return sorted(verdicts, key=lambda f: -f.share) or [computation(numbers)]


def _finding(
    kind: Kind, share: float, numbers: TraceNumbers, *, sure: bool = True, **facts: Any
) -> Finding:
    """Return a verdict with how much was looked at."""
    steps = [len(r.steps) for r in numbers.ranks if r.steps]
    many, odd = min(steps) >= FEW_STEPS, _odd(numbers)
    looked_at = {
        "steps": min(steps),
        "step_s": numbers.step_s(),
        "ranks": len(steps),
        "enough_steps": many,
        "left_out": odd,
        "without_steps": tuple(r.path for r in numbers.ranks if not r.steps),
    }
    confidence = "measured" if sure and many and not odd else "inferred"
    return Finding(kind, share, {**looked_at, **facts}, confidence)


def _odd(numbers: TraceNumbers) -> tuple[int, ...]:
    """Return how many events each rank's trace has whose times are none, where it has some."""
    return tuple(rank.odd for rank in numbers.ranks if rank.odd)


def _unmeasured(numbers: TraceNumbers) -> Finding | None:
    """Return the one finding of traces that say nothing."""
    if any(rank.steps for rank in numbers.ranks):
        return None
    first, odd = max(numbers.ranks, key=lambda rank: rank.events), _odd(numbers)
    kind = Kind.TRACE_WITHOUT_STEPS
    if not first.events:
        kind = Kind.TRACE_WITHOUT_TIMES if odd else Kind.TRACE_WITHOUT_DEVICE
    facts = {"path": first.path, "events": first.events, "marks": first.marks, "left_out": odd}
    return Finding(kind, 0.0, facts)


def _launch(numbers: TraceNumbers) -> Finding | None:
    """Look for slow launches, less what the profiler added, which slows the host."""
    slow, sync, between = (numbers.idle(cause) for cause in ("launch", "sync", "between"))
    between = between if between >= ALARM else 0.0
    traced_s, own_s = numbers.step_s(), numbers.profiler_s()
    share = max(0.0, (slow + sync + between) * traced_s - own_s) / max(traced_s - own_s, 1e-9)
    if share < ALARM:
        return None
    first = max(numbers.ranks, key=lambda rank: rank.launches)
    frames = any(rank.frames for rank in numbers.ranks)
    unmarked = any(not rank.loads for rank in numbers.ranks)
    return _finding(
        Kind.TRACE_LAUNCH,
        share,
        numbers,
        sure=not frames and not unmarked,
        slow_share=slow,
        sync_share=sync,
        between_share=between,
        profiler_share=own_s / traced_s,
        syncs=first.syncs[:2],
        launches=first.launches,
        brief_share=first.brief_share or 0,
        profiler_known=bool(numbers.undisturbed_s),
        frames=frames,
        no_loader=unmarked,
    )


def _host_copies(numbers: TraceNumbers) -> tuple[float, bool]:
    """Return the share of copies to and from the host that nothing hid; whether they offload."""
    there = numbers.share(lambda step: step.to_device_s) + numbers.idle("copies")
    back = numbers.share(lambda step: step.to_host_s)
    return there + back, back > OFFLOAD_SHARE * (there + back)


def _input(numbers: TraceNumbers) -> Finding | None:
    waited, (copied, offload) = numbers.idle("input"), _host_copies(numbers)
    copied = 0.0 if offload else copied
    if waited + copied < ALARM:
        return None
    away = sum(rank.away_s for rank in numbers.ranks) > 0
    return _finding(
        Kind.TRACE_INPUT,
        waited + copied,
        numbers,
        sure=not away,
        host_away=away,
        waited_share=waited,
        copied_share=copied,
    )


def _interconnect(numbers: TraceNumbers) -> Finding | None:
    ranks = numbers.between_ranks
    shares = [
        (sum(step.blocking_s for step in rank.steps) - waited) / rank.wall_s
        for rank, waited in zip(numbers.ranks, ranks.waited_s, strict=True)
        if rank.steps
    ]
    blocking, (copied, offload) = median(shares), _host_copies(numbers)
    copied = copied if offload else 0.0
    if blocking + copied < ALARM:
        return None
    alone = blocking >= ALARM and not ranks.matched
    return _finding(
        Kind.TRACE_INTERCONNECT,
        blocking + copied,
        numbers,
        sure=not alone,
        one_rank_alone=alone,
        blocking_share=blocking,
        collective_share=numbers.share(lambda step: step.collective_s),
        exposed_share=numbers.share(lambda step: step.exposed_s),
        copied_share=copied,
    )


def _straggler(numbers: TraceNumbers) -> Finding | None:
    ranks = numbers.between_ranks
    waits = {
        rank.rank: waited / rank.wall_s
        for rank, waited in zip(numbers.ranks, ranks.waited_s, strict=True)
        if rank.steps
    }
    victim = max(waits, key=lambda rank: waits[rank])
    share = waits[victim]
    if share < ALARM:
        return None
    same = ranks.last is not None and ranks.last_share >= SAME_RANK
    given, world = len(numbers.ranks), max((r.world or 0) for r in numbers.ranks)
    return _finding(
        Kind.TRACE_STRAGGLER,
        share,
        numbers,
        victim=victim,
        rank=ranks.last if same else None,
        last_share=ranks.last_share,
        collectives=ranks.matched,
        slower_in=_slower_in(numbers, ranks.last) if same else None,
        missing_ranks=world - given,
        world=world,
    )


def _slower_in(numbers: TraceNumbers, last: int | None) -> tuple[str, float] | None:
    """Return what the last rank spends more on than the others' median, and seconds a step."""

    def spent(rank: RankTimes) -> dict[str, float]:
        parts = {"kernels": sum(s.compute_s for s in rank.steps)}
        for cause in ("launch", "sync", "input", "allocator", "copies"):
            parts[f"idle ({cause})"] = sum(s.idle_s[cause] + s.after_s[cause] for s in rank.steps)
        return {name: whole / len(rank.steps) for name, whole in parts.items()}

    own = [spent(r) for r in numbers.ranks if r.rank == last and r.steps]
    others = [spent(r) for r in numbers.ranks if r.rank != last and r.steps]
    if not own or not others:
        return None
    more_s = {name: own[0][name] - median([o[name] for o in others]) for name in own[0]}
    name = max(more_s, key=lambda part: more_s[part])
    return (name, more_s[name]) if more_s[name] > 0 else None


def _allocator(numbers: TraceNumbers) -> Finding | None:
    share = numbers.idle("allocator")
    return _finding(Kind.TRACE_ALLOCATOR, share, numbers, sure=False) if share >= ALARM else None


def _bandwidth(numbers: TraceNumbers) -> Finding | None:
    if (modelled := _modelled_bandwidth(numbers)) is not None:
        return modelled
    spent = numbers.share(lambda step: step.memory_s)
    if spent < MEMORY_BOUND:
        return None
    share = spent * FUSION_RECOVERS
    return _finding(Kind.TRACE_MEMORY_KERNELS, share, numbers, sure=False, spent_share=spent)


def _roof(numbers: TraceNumbers) -> tuple[RankTimes, RoofTimes] | None:
    """Return the first rank whose steps stand against ceilings: ranks run the same kernels."""
    known = ((rank, rank.roof) for rank in numbers.ranks if rank.steps and rank.roof)
    return next(known, None)


def _modelled_bandwidth(numbers: TraceNumbers) -> Finding | None:
    """Look for kernels that move their bytes near the device's rate, where shapes say how many."""
    if (known := _roof(numbers)) is None:
        return None
    rank, roof = known
    kernels_s, spent = sum(s.compute_s for s in rank.steps), roof.bandwidth_s / rank.wall_s
    share = spent * FUSION_RECOVERS
    if roof.bandwidth_s < BOUND_SHARE * kernels_s or share < ALARM:
        return None
    return _finding(
        Kind.TRACE_BANDWIDTH, share, numbers, sure=False, spent_share=spent, rates=roof.says
    )


def _matmuls(numbers: TraceNumbers) -> Finding | None:
    spent = numbers.share(lambda step: step.slow_matmuls_s)
    share = spent * SLOW_MATMUL_RECOVERS
    if share < ALARM:
        return _inefficient(numbers)
    return _finding(Kind.TRACE_SLOW_MATMULS, share, numbers, sure=False, spent_share=spent)


def _inefficient(numbers: TraceNumbers) -> Finding | None:
    """Look for matmuls and attention that take longer than the device needs at their shapes."""
    if (known := _roof(numbers)) is None:
        return None
    rank, roof = known
    spent_s = roof.matmuls_s + roof.attention_s
    best_s, share = roof.matmuls_best_s + roof.attention_best_s, roof.lost_s / rank.wall_s
    if share < ALARM or best_s > INEFFICIENT * spent_s:
        return None
    return _finding(
        Kind.TRACE_INEFFICIENT,
        share,
        numbers,
        sure=roof.probed,
        reached_share=best_s / spent_s,
        spent_share=spent_s / rank.wall_s,
        best_s=best_s / len(rank.steps),
        rates=roof.says,
    )


def _dependency(numbers: TraceNumbers) -> Finding | None:
    return _unknown(numbers, Kind.TRACE_DEPENDENCY, "dependency")


def _unexplained(numbers: TraceNumbers) -> Finding | None:
    return _unknown(numbers, Kind.TRACE_UNEXPLAINED, "unexplained")


def _unknown(numbers: TraceNumbers, kind: Kind, cause: str) -> Finding | None:
    """Look for idle time whose cause the trace does not hold."""
    share = numbers.idle(cause)
    return _finding(kind, share, numbers, sure=False) if share >= ALARM else None


def computation(numbers: TraceNumbers) -> Finding:
    """Return what kernels ran, by family and against the ceilings: the verdict where no rule fires.

    Without a measured step its share is 0.
    """
    share = numbers.share(lambda step: step.compute_s)
    busy = numbers.share(lambda step: step.busy_s)
    rows = max(numbers.ranks, key=lambda rank: rank.events).kernels
    families: Counter[str] = Counter()
    for row in rows:
        families[row.family] += round(row.share * 1000)
    facts: dict[str, Any] = {
        "busy_share": busy,
        "families": tuple((n, tenths / 10) for n, tenths in families.most_common(MOST_FAMILIES)),
    }
    if (known := _roof(numbers)) is not None:
        roof = known[1]
        facts["rates"] = roof.says
        if roof.matmuls_s:
            facts["peak_share"] = roof.matmuls_roof_s / roof.matmuls_s
            facts["best_share"] = roof.matmuls_best_s / roof.matmuls_s
    return _finding(Kind.TRACE_COMPUTATION, share, numbers, **facts)


RULES = (
    _launch,
    _input,
    _interconnect,
    _straggler,
    _allocator,
    _bandwidth,
    _matmuls,
    _dependency,
    _unexplained,
)
"""Every rule of a trace, in the order in which findings of equal share stand."""
