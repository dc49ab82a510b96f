"""Choose remedies for a loop that is not Headrace's: what a watch saved, or traces.

Such a loop has no plan, so nothing is predicted of it. Where the share of a finding says how much
of the step is lost, for waiting for data and tokens that no loss counts, the gain is forecast by
that share; the rest says that it is not forecast.

Remedies are in the loop's own words, see loop_changes.py. Beside each stand the techniques of
Headrace that do the same, by their `loop_changes` or their `symptoms`, and keys of a plan. No
technique is known by name here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.core.statistics import Interval
from headrace.doctor.findings import PASSES, Finding, Kind
from headrace.doctor.forecast import Forecast, Source, by_share
from headrace.doctor.loop import Change, Loop
from headrace.doctor.loop_changes import COOLER, OF_BOTTLENECKS, OF_PHASES
from headrace.doctor.rules import presented
from headrace.doctor.run import examined, is_watched, read_watched
from headrace.doctor.trace.host import host_families
from headrace.doctor.trace.ranks import measure_traces
from headrace.doctor.use import NO_PLAN
from headrace.plan.technique import Catalogue

SHARES = ("input", "wasted tokens")
"""Bottlenecks of which the share forecasts a gain."""
LEAST_SHARE: Mapping[str, float] = {
    **dict.fromkeys(OF_PHASES, 0.05),
    **dict.fromkeys((PASSES, "computation"), 0.5),
}
"""Share of the time below which what is no fault has nothing to change. Chosen."""


@dataclass(frozen=True)
class LoopRemedy:
    """Hold a change of a loop that is not Headrace's, against a finding.

    Args:
        change: one line in the loop's own words.
        what: one sentence.
        gain: time before over after, less 1, with its ends; None where it is not forecast.
        costs: what it costs, in a reader's words.
        equality: what it does to the gradients: "exact", "approximate" or "learning".
        forecast_from: what the gain is from. From a "share" its ends are half and all of it, and no
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

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @property
    def words(self) -> str:
        """Return the change as the loop has it."""
        return "; ".join(self.change)


def loop_remedies(finding: Finding, loop: Loop, catalogue: Catalogue) -> list[LoopRemedy]:
    """Return what to change, the first to try first; nothing where nothing is known to help.

    Args:
        finding: the doctor's, a bottleneck or a phase.
        loop: what is known of it.
        catalogue: the techniques that there are.
    """
    name = finding.bottleneck
    changes_of = {**OF_BOTTLENECKS, **OF_PHASES}.get(name)
    if changes_of is None or finding.share < LEAST_SHARE.get(name, 0.0):
        return []
    changes = [COOLER] if finding.kind is Kind.CLOCK_LIMITED else changes_of(loop)
    return [_remedy(finding, change, loop, catalogue) for change in changes]


def _remedy(finding: Finding, change: Change, loop: Loop, catalogue: Catalogue) -> LoopRemedy:
    why = NO_PLAN if loop.report else f"{NO_PLAN}, nor whether it has this"
    forecast = Forecast(None, "none", why)
    if change.part:
        forecast = Forecast(None, "none", f"{why}; it helps as far as {change.part}")
    elif finding.bottleneck in SHARES:
        share = finding.share if change.share is None else change.share
        forecast = by_share(share, forecast, left=change.left(share))
    return LoopRemedy(
        change=((loop.trainer and change.trainer) or change.words,),
        what=change.what,
        gain=forecast.gain,
        costs=change.costs,
        equality=change.equality,
        forecast_from=forecast.source,
        unknown=forecast.unknown,
        headrace=(*techniques_of(change, catalogue), *change.keys),
    )


def techniques_of(change: Change, catalogue: Catalogue) -> list[str]:
    """Return the names of the techniques that do in Headrace what the change does in a loop."""
    return [
        name
        for name, technique in sorted(catalogue.techniques.items())
        if change.same in technique.loop_changes or change.symptom in technique.symptoms
    ]


def examine_loop(paths: Sequence[Path]) -> tuple[list[Finding], Loop]:
    """Return the findings, the gravest first and what was not measured last, and the loop.

    Args:
        paths: what `headrace.watch` saved, or traces, one of each rank.

    Raises:
        ConfigError, RunError: as `headrace.doctor.run.diagnose`.
    """
    seen, findings = examined(paths)
    if seen.not_logged:
        return presented(findings, seen), Loop(seen.logged_loop)
    if not is_watched(paths[0]):
        return [*findings, *_of_the_host(findings, paths)], Loop({})
    return presented(findings, seen), Loop(read_watched(paths[0]))


def _of_the_host(findings: Sequence[Finding], paths: Sequence[Path]) -> list[Finding]:
    """Return operations by their time where a trace has no event of a device; no verdict."""
    if len(findings) != 1 or not findings[0].abstains:
        return []
    if any(rank.events for rank in measure_traces(paths).ranks):
        return []
    families = host_families(paths[0])
    return [Finding(Kind.HOST_OPERATIONS, 0.0, {"families": families})] if families else []
