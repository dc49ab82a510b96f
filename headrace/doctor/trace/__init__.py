"""Reads traces of torch.profiler from any trainer and names the bottleneck.

    torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=2, active=5),
                           on_trace_ready=torch.profiler.tensorboard_trace_handler("traces"))

records one; several ranks' files of one recording may be given together. file.py reads them,
steps.py finds the steps, times.py shares out each step's time, ranks.py compares
ranks, limits.py holds every threshold, and here the numbers become verdicts.

A verdict's share is what could be recovered of a step: an upper bound, for what stands next in the
way is not known. Exposed communication is reported and only blocking communication counts. What one
rank suffers and most do not is that rank's: shares are the median over ranks, but the straggler's
is that of the rank which waits longest.

What a trace cannot tell is said. It holds no FLOPs and no bytes of kernels: where shapes were
recorded (record_shapes=True) roofline.py models them, and judges kernels against the device's
ceilings; without shapes their efficiency is not judged, and memory-bound families are told by names
alone. The profiler slows the host, so a launch verdict is an upper bound too. Where the device was
not recorded, or fewer than two steps, the doctor abstains.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from headrace.core.units import format_seconds
from headrace.doctor.findings import ABSTAINED, Finding
from headrace.doctor.trace.file import RECORD
from headrace.doctor.trace.limits import (
    ALARM,
    BOTH_WAYS,
    BOUND_SHARE,
    FEW_STEPS,
    FUSION_RECOVERS,
    INEFFICIENT,
    MEMORY_BOUND,
    NEAR_ROOF,
    SAME_RANK,
    SHORT_KERNEL_US,
    SLOW_PRODUCT_RECOVERS,
    WORTH_TELLING,
)
from headrace.doctor.trace.ranks import TraceNumbers, measure_traces
from headrace.doctor.trace.roofline import RoofTimes
from headrace.doctor.trace.times import RankTimes

NO_SHAPES = "efficiency of kernels: no shapes were recorded, or the device's rates are unknown"


def diagnose_trace(paths: Sequence[Path]) -> list[Finding]:
    """Verdicts on one run's traces, what could recover most first; never empty.

    Args:
        paths: one file of each rank.

    Raises:
        ConfigError: as measure_traces.
    """
    return judge(measure_traces(paths))


def judge(numbers: TraceNumbers) -> list[Finding]:
    """The verdicts on measured traces, what could recover most first; never empty."""
    nothing = _unmeasured(numbers)
    if nothing:
        return [nothing]
    verdicts = (
        _launch, _input, _interconnect, _straggler, _allocator, _bandwidth, _products, _waits,
        _unexplained,
    )  # fmt: skip
    found = [finding for verdict in verdicts if (finding := verdict(numbers))]
    return sorted(found, key=lambda f: -f.share) or [computation(numbers)]


def _finding(
    name: str, share: float, sentence: str, evidence: str, numbers: TraceNumbers, *,
    sure: bool = True, missing: Sequence[str] = (),
) -> Finding:  # fmt: skip
    """A verdict with what it could gain at most and how much was looked at."""
    steps = [len(r.steps) for r in numbers.ranks if r.steps]
    many = min(steps) >= FEW_STEPS
    gain = f"Without it a step is at most {share / max(1 - share, 1e-9):.0%} faster."
    window = f"{min(steps)} steps of {format_seconds(numbers.step_s())}"
    window += f" on each of {len(steps)} ranks" if len(steps) > 1 else ""
    less = [] if many else [f"steps enough: {FEW_STEPS + 1} or more"]
    odd = _notes(numbers, "left out")
    less += [*odd, *(f"{r.path}: no step of it on a device" for r in numbers.ranks if not r.steps)]
    return Finding(
        name, share, f"{sentence} {gain}", f"{evidence}; {window}",
        "measured" if sure and many and not odd else "inferred",
        "; ".join(dict.fromkeys([*missing, *less])),
    )  # fmt: skip


def _time(numbers: TraceNumbers, share: float) -> str:
    """A share as a time of a step."""
    return f"{format_seconds(share * numbers.step_s())} ({share:.1%})"


def _times(numbers: TraceNumbers, shares: Mapping[str, float]) -> str:
    """Those that are worth telling."""
    told = [f"{what} {_time(numbers, s)}" for what, s in shares.items() if s >= WORTH_TELLING]
    return ", ".join(told)


def _notes(numbers: TraceNumbers, word: str = "") -> list[str]:
    return [note for rank in numbers.ranks for note in rank.notes if word in note]


def _unmeasured(numbers: TraceNumbers) -> Finding | None:
    """The one finding of traces that tell nothing."""
    if any(rank.steps for rank in numbers.ranks):
        return None
    first = max(numbers.ranks, key=lambda rank: rank.events)
    odd = _notes(numbers, "left out")
    if not first.events:
        why = "The trace holds no event of a device: there is no device time to judge."
        if odd:
            why = "The trace holds no event of a device whose time can be read."
        missing = f"everything of the device; record with {RECORD}"
    else:
        why = "The trace holds fewer than two steps that follow each other, marked and launched."
        missing = f"steps; call prof.step() after each and record with {RECORD}"
    evidence = f"{first.path}: {first.events} events of the device, {first.marks} steps marked"
    return Finding(ABSTAINED, 0.0, why, "; ".join([evidence, *odd]), "measured", missing)


def _launch(numbers: TraceNumbers) -> Finding | None:
    """What launches that came late take, less what the profiler added, which slows the host."""
    late, sync, between = (numbers.idle(cause) for cause in ("launch", "sync", "between"))
    between = between if between >= ALARM else 0.0
    traced_s, own_s = numbers.step_s(), numbers.profiler_s()
    share = max(0.0, (late + sync + between) * traced_s - own_s) / max(traced_s - own_s, 1e-9)
    if share < ALARM:
        return None
    first = max(numbers.ranks, key=lambda rank: rank.launches)
    names = ", ".join(first.syncs[:2]) or "a synchronisation"
    parts = {
        "late launches": late,
        f"after the host waited for the device in {names}": sync,
        "between queued kernels": between,
        "of it the profiler's own": own_s / traced_s,
    }
    evidence = (
        f"{_times(numbers, parts)}; {first.launches:.0f} kernels a step, {first.short or 0:.0%} "
        f"of them under {SHORT_KERNEL_US:.0f} us"
    )
    notes = [*_notes(numbers, "frames"), *_notes(numbers, "DataLoader")]
    unknown = [] if numbers.undisturbed_s else ["the profiler's own cost on the host"]
    return _finding(
        "launch", share, f"The device was idle for {share:.0%} of a step for want of launches.",
        evidence, numbers, sure=not notes, missing=[*unknown, *notes],
    )  # fmt: skip


def _host_copies(numbers: TraceNumbers) -> tuple[float, bool]:
    """Copies between host and device that no kernel hid, and whether they look like offload."""
    there = numbers.share(lambda step: step.to_device_s) + numbers.idle("copies")
    back = numbers.share(lambda step: step.to_host_s)
    return there + back, back > BOTH_WAYS * (there + back)


def _input(numbers: TraceNumbers) -> Finding | None:
    waited, (copied, offload) = numbers.idle("input"), _host_copies(numbers)
    copied = 0.0 if offload else copied
    share = waited + copied
    if share < ALARM:
        return None
    away_s = sum(rank.away_s for rank in numbers.ranks)
    where = "the host was away before a batch's copy" if away_s else "the data loader was at work"
    return _finding(
        "input", share, f"The device waited {share:.0%} of a step for its next batch.",
        _times(numbers, {f"idle while {where}": waited, "batches' copies not hidden": copied}),
        numbers, sure=not away_s,
        missing=["the loader's parts: reading, decoding, collating"],
    )  # fmt: skip


def _interconnect(numbers: TraceNumbers) -> Finding | None:
    ranks = numbers.between_ranks
    shares = [
        (sum(step.blocking_s for step in rank.steps) - waited) / rank.wall_s
        for rank, waited in zip(numbers.ranks, ranks.waited_s, strict=True)
        if rank.steps
    ]
    blocking, (copied, offload) = median(shares), _host_copies(numbers)
    copied = copied if offload else 0.0
    share = blocking + copied
    if share < ALARM:
        return None
    parts = {
        "blocking transfers": blocking,
        "of collectives' whole time": numbers.share(lambda step: step.collective_s),
        "exposed": numbers.share(lambda step: step.exposed_s),
        "copies between host and device that nothing hid": copied,
    }
    evidence = _times(numbers, parts)
    alone = blocking >= ALARM and not ranks.matched
    tell = ["transfer against waiting for a slower rank: give every rank's trace"] if alone else []
    return _finding(
        "interconnect", share, f"Kernels waited {share:.0%} of a step for data on its way.",
        evidence, numbers, sure=not alone, missing=[*tell, "the link's rate against a probe"],
    )  # fmt: skip


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
    who = f"rank {ranks.last}" if same else "changing ranks"
    evidence = (
        f"rank {victim} waits longest, {who} came last in {ranks.last_share:.0%} of "
        f"{ranks.matched} collectives"
    )
    given, world = len(numbers.ranks), max((r.world or 0) for r in numbers.ranks)
    missing = [f"{world - given} of {world} ranks"] if world > given else []
    cause = _slower_in(numbers, ranks.last) if same else ""
    return _finding(
        "straggler", share, f"Kernels waited {share:.0%} of a step for {who}.",
        evidence + cause, numbers, missing=missing or ["clocks and temperatures"],
    )  # fmt: skip


def _slower_in(numbers: TraceNumbers, last: int | None) -> str:
    """What the last rank spends more on than the others' median, a step."""

    def spent(rank: RankTimes) -> dict[str, float]:
        parts = {"kernels": sum(s.compute_s for s in rank.steps)}
        for cause in ("launch", "sync", "input", "allocator", "copies"):
            parts[f"idle ({cause})"] = sum(s.idle_s[cause] + s.late_s[cause] for s in rank.steps)
        return {name: whole / len(rank.steps) for name, whole in parts.items()}

    own = [spent(r) for r in numbers.ranks if r.rank == last and r.steps]
    others = [spent(r) for r in numbers.ranks if r.rank != last and r.steps]
    if not own or not others:
        return ""
    more = {name: own[0][name] - median([o[name] for o in others]) for name in own[0]}
    name = max(more, key=lambda part: more[part])
    return (
        f"; it spends {format_seconds(more[name])} more a step on {name}" if more[name] > 0 else ""
    )


def _allocator(numbers: TraceNumbers) -> Finding | None:
    share = numbers.idle("allocator")
    if share < ALARM:
        return None
    return _finding(
        "memory capacity", share,
        f"The device was idle for {share:.0%} of a step while memory was asked of the driver.",
        f"allocations and frees by the driver {_time(numbers, share)}", numbers, sure=False,
        missing=["fragmentation against capacity: it needs torch.cuda.memory_stats()"],
    )  # fmt: skip


def _bandwidth(numbers: TraceNumbers) -> Finding | None:
    modelled = _modelled_bandwidth(numbers)
    if modelled is not None:
        return modelled
    spent = numbers.share(lambda step: step.memory_s)
    if spent < MEMORY_BOUND:
        return None
    share = spent * FUSION_RECOVERS
    return _finding(
        "memory bandwidth", share,
        f"{spent:.0%} of a step went to kernels that move much and compute little.",
        f"elementwise, normalisation and optimizer kernels {_time(numbers, spent)}, of which "
        f"fusing may recover {FUSION_RECOVERS:.0%}", numbers, sure=False,
        missing=["bytes moved: families are told by kernels' names"],
    )  # fmt: skip


def _roof(numbers: TraceNumbers) -> tuple[RankTimes, RoofTimes] | None:
    """The first rank whose steps stand against ceilings: ranks run the same kernels."""
    found = ((rank, rank.roof) for rank in numbers.ranks if rank.steps and rank.roof)
    return next(found, None)


def _modelled_bandwidth(numbers: TraceNumbers) -> Finding | None:
    """Kernels that move their bytes near the device's rate, where shapes tell how many."""
    if (found := _roof(numbers)) is None:
        return None
    rank, roof = found
    kernels_s, spent = sum(s.compute_s for s in rank.steps), roof.bandwidth_s / rank.wall_s
    share = spent * FUSION_RECOVERS
    if roof.bandwidth_s < BOUND_SHARE * kernels_s or share < ALARM:
        return None
    return _finding(
        "memory bandwidth", share,
        f"{spent:.0%} of a step went to kernels that memory's bandwidth holds up.",
        f"kernels at {NEAR_ROOF:.0%} or more of the bandwidth {_time(numbers, spent)}, of which "
        f"fusing may recover {FUSION_RECOVERS:.0%}; {roof.says}", numbers, sure=False,
        missing=["bytes moved: modelled from shapes, not counted"],
    )  # fmt: skip


def _products(numbers: TraceNumbers) -> Finding | None:
    spent = numbers.share(lambda step: step.slow_products_s)
    share = spent * SLOW_PRODUCT_RECOVERS
    if share < ALARM:
        return _inefficient(numbers)
    return _finding(
        "kernel efficiency", share,
        f"{spent:.0%} of a step went to float32 products without tensor cores.",
        f"kernels named sgemm or simt {_time(numbers, spent)}", numbers, sure=False,
        missing=["FLOPs: products are told by kernels' names"],
    )  # fmt: skip


def _inefficient(numbers: TraceNumbers) -> Finding | None:
    """Products and attention that take longer than the device needs at their shapes."""
    if (found := _roof(numbers)) is None:
        return None
    rank, roof = found
    spent_s = roof.products_s + roof.attention_s
    best_s, share = roof.products_best_s + roof.attention_best_s, roof.lost_s / rank.wall_s
    if share < ALARM or best_s > INEFFICIENT * spent_s:
        return None
    return _finding(
        "kernel efficiency", share,
        f"Products and attention reach {best_s / spent_s:.0%} of what the device does elsewhere.",
        f"{_time(numbers, spent_s / rank.wall_s)} where {format_seconds(best_s / len(rank.steps))} "
        f"would do at their shapes; {roof.says}", numbers, sure=roof.probed,
        missing=["what slows them: another backend, layout or clock"],
    )  # fmt: skip


def _waits(numbers: TraceNumbers) -> Finding | None:
    return _unknown(
        numbers, "dependency", "with work queued", "stalls of queued kernels",
        "what they waited for: record with enable_cuda_sync_events",
    )  # fmt: skip


def _unexplained(numbers: TraceNumbers) -> Finding | None:
    return _unknown(
        numbers, "unexplained", "and why is not recorded", "idle before kernels without a launch",
        "launches: record with ProfilerActivity.CPU too",
    )  # fmt: skip


def _unknown(
    numbers: TraceNumbers, cause: str, how: str, evidence: str, missing: str
) -> Finding | None:
    """Idle time whose cause the trace does not hold."""
    share = numbers.idle(cause)
    if share < ALARM:
        return None
    return _finding(
        ABSTAINED, share, f"The device was idle for {share:.0%} of a step, {how}.",
        f"{evidence} {_time(numbers, share)}", numbers, sure=False, missing=[missing],
    )  # fmt: skip


def _reached(roof: RoofTimes) -> str:
    """How near products are to the highest rate, and to the best of their shapes."""
    if not roof.products_s:
        return f"no product of known shape; {roof.says}"
    peak, best = roof.products_roof_s / roof.products_s, roof.products_best_s / roof.products_s
    return f"products at {peak:.0%} of the peak and {best:.0%} of their shapes' best; {roof.says}"


def computation(numbers: TraceNumbers) -> Finding:
    """What kernels ran, by family and against the ceilings: the verdict where nothing stands out.

    Without a measured step its share is 0.
    """
    share = numbers.share(lambda step: step.compute_s)
    busy = numbers.share(lambda step: step.busy_s)
    rows = max(numbers.ranks, key=lambda rank: rank.events).kernels
    families: Counter[str] = Counter()
    for row in rows:
        families[row.family] += round(row.share * 1000)
    parts = ", ".join(f"{name} {tenths / 10:.0f}%" for name, tenths in families.most_common(4))
    evidence, missing = f"busy {_time(numbers, busy)}; of kernels' time {parts}", NO_SHAPES
    if (told := _roof(numbers)) is not None:
        _, roof = told
        evidence, missing = f"{evidence}; {_reached(roof)}", ""
    found = _finding(
        "computation", share, "", evidence, numbers, missing=[missing] if missing else []
    )
    sentence = f"Nothing stands in the way of computation: kernels ran for {share:.0%} of a step."
    return Finding(
        found.bottleneck, share, sentence, found.evidence, found.confidence, found.not_measured
    )
