"""What the newest burst of a run tells, in numbers for whoever judges or forecasts.

    facts = trace_facts(folder)          # of a run, or a folder of traces; None without any

The verdicts of the same traces are `headrace.doctor.trace.judge`'s; here is no threshold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from headrace.bursts import traces
from headrace.core.errors import ConfigError
from headrace.core.units import format_seconds
from headrace.doctor.trace.kernels import KernelRow
from headrace.doctor.trace.ranks import TraceNumbers, measure_traces
from headrace.doctor.trace.times import CAUSES, HostWait, RankTimes


@dataclass(frozen=True)
class TraceFacts:
    """The steady steps of one burst. Shares are of a step, 0 to 1, the median over ranks.

    Args:
        files: names of the traces.
        steps: that were measured on each rank.
        step_s: a step under the profiler, which is slower than one without.
        busy: the device ran something.
        families: "products", "attention", "elementwise", "optimizer", "collectives", "copies" or
            "other" -> share of a step; overlaps inside a family are counted once.
        idle: why the device did not compute (`times.CAUSES`) -> share.
        bandwidth_bound: kernels near the bandwidth's ceiling, modelled from shapes; without shapes
            all that move much and compute little, by name.
        bandwidth_modelled: which of the two.
        product_efficiency: of products, the time that their shapes' best needs over theirs; None
            where no shape was recorded or the device's rates are unknown, as the next three.
        product_of_peak: likewise, at the device's highest rate.
        attention_efficiency: as product_efficiency.
        inefficient: share of a step that products and attention take above their shapes' best.
        slow_products: float32 products without tensor cores, by name.
        kernels_per_step: launched.
        tiny_kernels: of them, those under `limits.SHORT_KERNEL_US`.
        tiny: their time as a share of a step.
        syncs: calls in which the host waited for the device, a step.
        copies_to_host: a step.
        collectives: their whole time.
        exposed: what no kernel hid: an upper bound.
        blocking: what a kernel waited for.
        transfer, jitter: of collectives that several ranks' traces show: the shortest time over
            ranks, and what a rank's own took beyond; None with one rank's trace.
        ceilings: whose rates the roofline used; empty where there was none.
        kernels: the table of the first rank, the longest first.
    """

    files: tuple[str, ...]
    steps: int
    step_s: float
    busy: float
    families: Mapping[str, float]
    idle: Mapping[str, float]
    bandwidth_bound: float
    bandwidth_modelled: bool
    product_efficiency: float | None
    product_of_peak: float | None
    attention_efficiency: float | None
    inefficient: float | None
    slow_products: float
    kernels_per_step: float
    tiny_kernels: float
    tiny: float
    syncs: tuple[HostWait, ...]
    copies_to_host: float
    collectives: float
    exposed: float
    blocking: float
    transfer: float | None
    jitter: float | None
    ceilings: str
    kernels: tuple[KernelRow, ...]


def newest(folder: Path) -> list[Path]:
    """The traces of the newest burst, one a rank, of a run or of a folder of traces."""
    found = traces(folder / "traces") or traces(folder)
    last = max((step for step, _ in found), default=None)
    return [path for (step, _), path in found.items() if step == last]


def trace_facts(folder: Path) -> TraceFacts | None:
    """Of the newest burst under a run's folder; None where there is none that can be read."""
    paths = newest(folder)
    try:
        return facts_of(measure_traces(paths)) if paths else None
    except ConfigError:
        return None  # damaged: `diagnose_run` says so


def facts_of(numbers: TraceNumbers) -> TraceFacts | None:
    """The same of traces that were measured already; None without a step on a device."""
    ranks = [rank for rank in numbers.ranks if rank.steps]
    if not ranks:
        return None
    first, between = ranks[0], numbers.between_ranks
    roof = first.roof
    walls = [rank.wall_s for rank in numbers.ranks]
    several = between.matched > 0
    families = {name for rank in ranks for name in rank.families}
    by_name = numbers.share(lambda step: step.memory_s)
    return TraceFacts(
        files=tuple(rank.path for rank in numbers.ranks),
        steps=min(len(rank.steps) for rank in ranks),
        step_s=numbers.step_s(),
        busy=numbers.share(lambda step: step.busy_s),
        families={name: _share(ranks, name) for name in sorted(families)},
        idle={cause: numbers.idle(cause) for cause in CAUSES},
        bandwidth_bound=roof.bandwidth_s / first.wall_s if roof else by_name,
        bandwidth_modelled=roof is not None,
        product_efficiency=_ratio(roof.products_best_s, roof.products_s) if roof else None,
        product_of_peak=_ratio(roof.products_roof_s, roof.products_s) if roof else None,
        attention_efficiency=_ratio(roof.attention_best_s, roof.attention_s) if roof else None,
        inefficient=roof.lost_s / first.wall_s if roof else None,
        slow_products=numbers.share(lambda step: step.slow_products_s),
        kernels_per_step=first.launches,
        tiny_kernels=(first.short or 0.0) * first.launches,
        tiny=first.short_s / first.wall_s,
        syncs=first.waits,
        copies_to_host=first.to_host,
        collectives=numbers.share(lambda step: step.collective_s),
        exposed=numbers.share(lambda step: step.exposed_s),
        blocking=numbers.share(lambda step: step.blocking_s),
        transfer=_of(between.transfer_s, walls) if several else None,
        jitter=_of(between.jitter_s, walls) if several else None,
        ceilings=roof.says if roof else "",
        kernels=first.kernels,
    )


def kernel_lines(facts: TraceFacts, most: int = 12) -> list[list[str]]:
    """The table of the longest kernels for a reader: kernel, class, ms a step, share, bound."""
    lines = []
    for row in facts.kernels[:most]:
        bound = row.bound + (f" {row.of_roof:.0%}" if row.of_roof is not None else "")
        name = row.name if len(row.name) <= 60 else f"{row.name[:57]}..."
        spent_s = row.total_s / facts.steps
        lines.append([name, row.family, format_seconds(spent_s), f"{row.share:.1%}", bound])
    return lines


def _share(ranks: list[RankTimes], family: str) -> float:
    return median([rank.families.get(family, 0.0) / rank.wall_s for rank in ranks])


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _of(spent_s: tuple[float, ...], walls_s: list[float]) -> float:
    return median([s / w for s, w in zip(spent_s, walls_s, strict=True) if w] or [0.0])
