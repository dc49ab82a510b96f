"""Findings and remedies of a loop that is not Headrace's: a watch's report, or traces.

Such a loop has no plan, so nothing is foreseen of it. What a finding's share tells, waiting for
data and tokens that no loss counts, is forecast by that share; the rest says that it is not.

Remedies are told in the loop's own words, see loop_words.py. Beside each stand the techniques of
Headrace that do the same, found by their `symptoms` and their line in the catalogue, and keys of a
plan. No technique is known by name here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headrace.core.statistics import Interval
from headrace.doctor.findings import ABSTAINED, Finding, stations
from headrace.doctor.forecast import Forecast, Source, by_share
from headrace.doctor.loop_words import BOTTLENECKS, COOLER, STATIONS, Change, Loop
from headrace.doctor.run import HELD, LOOK_BYTES, WATCHED, diagnose, read_watched
from headrace.doctor.trace.host import host_families
from headrace.doctor.trace.ranks import measure_traces
from headrace.plan.technique import Catalogue

SHARES = ("input", "wasted tokens")
"""What a finding's share forecasts."""
LEAST_SHARE: Mapping[str, float] = {
    **dict.fromkeys(STATIONS, 0.05),
    **dict.fromkeys(("forward and backward", "computation"), 0.5),
}  # fmt: skip
"""Of the time, below which what is no fault has nothing to change."""
NO_PLAN = "no plan is known of this loop"


@dataclass(frozen=True)
class LoopRemedy:
    """A change of a loop that is not Headrace's, against a finding.

    Args:
        change: one line in the loop's own words.
        what: one sentence.
        gain: time before over after, less 1, with its ends; None where it is not forecast.
        costs: in a reader's words.
        equality: "exact", "approximate" or "learning": of the gradients.
        forecast_from: what the gain is from; of a "share" its ends are half and all of it, and no
            80% interval.
        unknown: why there is no gain, or what it leaves out.
        headrace: techniques and keys of a plan that do it in Headrace.
        memory_bytes, fits: unknown without a plan; there as a plan's remedies have them.
    """

    change: tuple[str, ...]
    what: str
    gain: Interval | None
    costs: str
    equality: str
    forecast_from: Source
    unknown: str = ""
    headrace: tuple[str, ...] = ()
    memory_bytes: None = None
    fits: None = None

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def loop_remedies(finding: Finding, loop: Loop, catalogue: Catalogue) -> list[LoopRemedy]:
    """What to change, the first to try first; none where nothing is known to help.

    Args:
        finding: the doctor's, a bottleneck or a station.
        loop: what is known of it.
        catalogue: the techniques that there are.
    """
    name = finding.bottleneck
    table = {**BOTTLENECKS, **STATIONS}.get(name)
    if table is None or finding.share < LEAST_SHARE.get(name, 0.0):
        return []
    held = name == "kernel efficiency" and any(why in finding.sentence for why in HELD)
    rows = [COOLER] if held else table(loop)
    return [_remedy(finding, row, loop, catalogue) for row in rows]


def _remedy(finding: Finding, row: Change, loop: Loop, catalogue: Catalogue) -> LoopRemedy:
    why = NO_PLAN if loop.report else f"{NO_PLAN}, nor whether it has this"
    told = Forecast(None, "none", why)
    if row.part:
        told = Forecast(None, "none", f"{why}; it helps as far as {row.part}")
    elif finding.bottleneck in SHARES:
        share = finding.share if row.share is None else row.share
        told = by_share(share, told, left=row.left(share))
    return LoopRemedy(
        change=((loop.trainer and row.trainer) or row.words,), what=row.what, gain=told.gain,
        costs=row.costs, equality=row.equality, forecast_from=told.source, unknown=told.unknown,
        headrace=(*techniques(row, catalogue), *row.keys),
    )  # fmt: skip


def techniques(row: Change, catalogue: Catalogue) -> list[str]:
    """Names of the techniques that have the change's symptom and say in their line what it says."""
    return [
        name for name, technique in sorted(catalogue.techniques.items())
        if row.symptom in technique.symptoms and row.like.lower() in technique.line().lower()
    ]  # fmt: skip


# --- findings --------------------------------------------------------------------------------


def examine(paths: Sequence[Path]) -> tuple[list[Finding], Loop]:
    """Findings, the gravest first and what was not measured last, and what is known of the loop.

    Args:
        paths: what `headrace.watch` saved, or traces, one of each rank.

    Raises:
        ConfigError, RunError: as `headrace.doctor.run.diagnose`.
    """
    findings = diagnose(paths)
    with paths[0].open("rb") as opened:
        watched = WATCHED.search(opened.read(LOOK_BYTES)) is not None
    if not watched:
        return [*findings, *_of_the_host(findings, paths)], Loop({})
    report = read_watched(paths[0])
    found = unjudged_first(without_repeats(findings, report))
    unseen = report.get("not_measured")
    if unseen and isinstance(unseen, list):
        found.append(Finding(
            ABSTAINED, 0.0, "What no hook told is not judged.",
            f"{report.get('measured_steps', 0)} steps were watched", "measured",
            "; ".join(map(str, unseen)),
        ))  # fmt: skip
    return found, Loop(report)


def without_repeats(findings: Sequence[Finding], report: Mapping[str, Any]) -> list[Finding]:
    """Findings without stations that another names: its evidence is put to that one's.

    Args:
        findings: of a run or of a watch.
        report: its report.
    """
    told = {(station.bottleneck, station.sentence) for station in stations(report)}
    kept: list[Finding] = []
    for finding in findings:
        name = finding.bottleneck
        at = next((n for n, other in enumerate(kept) if other.bottleneck == name), None)
        if at is None or (name, finding.sentence) not in told:
            kept.append(finding)
        else:
            both = f"{kept[at].evidence}; {finding.evidence}"
            kept[at] = replace(kept[at], evidence=both)
    return kept


def unjudged(findings: Sequence[Finding]) -> bool:
    """Whether the first says that there were too few steps to judge any: nothing is forecast."""
    return any(f.bottleneck == ABSTAINED and f.not_measured == "everything" for f in findings[:1])


def unjudged_first(findings: Sequence[Finding]) -> list[Finding]:
    """What says so first, for the stations behind it are of warm steps as well."""
    return sorted(findings, key=lambda finding: not unjudged([finding]))


def _of_the_host(findings: Sequence[Finding], paths: Sequence[Path]) -> list[Finding]:
    """Operations by their time where a trace holds no event of a device; no verdict."""
    if [f.bottleneck for f in findings] != [ABSTAINED]:
        return []
    if any(rank.events for rank in measure_traces(paths).ranks):
        return []
    shares = ", ".join(f"{name} {share:.0%}" for name, share in host_families(paths[0]).items())
    return [Finding(
        "computation", 0.0, "Where a CPU's time went is told by operation, and not judged.",
        f"of operations' own time {shares}", "measured",
        "what stands between operations, and how efficient they are",
    )] if shares else []  # fmt: skip
