"""Give the doctor's whole answer: findings of a run or of a plan, and what to do about each.

A run's findings come from what it measured; what binds its steps follows from how busy each
resource is (physics.py). A plan that was not run has findings that the ledger predicts
(of_plan.py): whether it fits, memory that is paid for in time and not needed, and what would take
most of the step. Remedies are forecast with the rates of the device that the run was on: probed, if
this is that device and it was, else its datasheet's. Of a GPU that nothing is known of there are
findings and no remedies.

A loop that is not Headrace's, watched or traced, has no plan: see loop_remedies.py. The answer is
rendered in words/answer.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

import torch

from headrace.core.command import train_command
from headrace.core.errors import HeadraceError, RunError
from headrace.costs.machine import Machine
from headrace.doctor.findings import Finding, Kind
from headrace.doctor.forecast import MeasuredRun, by_ledger
from headrace.doctor.layout import wrong_layout
from headrace.doctor.loop_remedies import LoopRemedy, examine_loop, loop_remedies
from headrace.doctor.observation import Observation
from headrace.doctor.of_plan import plan_findings
from headrace.doctor.packing import packing_of, with_packing
from headrace.doctor.remedies import HEALTHY, PlanRemedy, remedies
from headrace.doctor.rules import WRONG, presented, unjudged
from headrace.doctor.run import examined_run, examined_so_far, place_of, use_of
from headrace.doctor.so_far import has_ended
from headrace.inference.load import read_recorded_plan
from headrace.plan.plan import Plan
from headrace.plan.symptoms import BOTTLENECKS
from headrace.plan.technique import Catalogue, Context
from headrace.predict.candidates import Asking
from headrace.predict.intervals import Widening, widening
from headrace.predict.prediction import predict
from headrace.probes.at_hand import rates
from headrace.train.run_folder import RunFolder

ALWAYS_PRESENT, WORTH = ("input", "wasted tokens"), 0.02
"""Phases that stand in every answer, and the share of the time, or of the tokens, below which they
need no remedy. Chosen, not measured."""
LEAST_GAIN = 0.01
"""Share of the time that a remedy gains at least where free memory is worth a finding of a plan."""
BEFORE_TIME = (*WRONG, "memory capacity")
"""Bottlenecks that are wrong whatever their remedies gain in time."""


class NoRemedy(Enum):
    """Say why an answer has no remedy."""

    TOO_FEW_STEPS = auto()
    NOT_FORECAST = auto()
    REFUSED = auto()
    NOT_PREDICTED = auto()
    NO_CHANGE = auto()
    NO_CHANGE_OF_LOOP = auto()


@dataclass(frozen=True)
class Rates:
    """Say what forecasts rest on.

    Args:
        machine: the rates of the device; None of a loop, whose shares forecast.
        widening: how far off a rate may be.
    """

    machine: Machine | None = None
    widening: Widening | None = None


@dataclass(frozen=True)
class Advised:
    """Hold a finding with its remedies, the best first; none where nothing is known to help."""

    finding: Finding
    remedies: tuple[PlanRemedy, ...] | tuple[LoopRemedy, ...] = ()


@dataclass(frozen=True)
class Advice:
    """Hold the doctor's answer.

    Args:
        findings: the gravest first.
        rates: what the forecasts rest on; None where there are none.
        no_remedy: why there are no remedies, if no finding has one.
        why: the reason of an error or of a prediction, where that is why.
        timed: whether the gain of a change can be forecast on this run.
        run: the folder of the run whose plan a remedy changes; None of a plan or of a loop.
        so_far: how many steps a run that has not ended had written; None of anything else.
        left_open: why one rank of a plan is judged; "" where it names its layout.
    """

    findings: tuple[Advised, ...]
    rates: Rates | None = None
    no_remedy: NoRemedy | None = None
    why: str = ""
    timed: bool = False
    run: Path | None = None
    so_far: int | None = None
    left_open: str = ""

    @property
    def verdict(self) -> Finding | None:
        """Return the first finding: what is wrong, what binds the steps, or that it is unknown."""
        return next((one.finding for one in self.findings), None)

    @property
    def first(self) -> PlanRemedy | LoopRemedy | None:
        """Return the remedy to try first.

        Where something is wrong it is the first of its own; else the one of any finding with the
        largest forecast gain that does not change what is learned; else the verdict's first.
        """
        known = [remedy for one in self.findings for remedy in one.remedies]
        if self.verdict is not None and self.verdict.bottleneck in BEFORE_TIME:
            return next(iter(known), None)
        gains = [
            (remedy.gain.value, remedy)
            for remedy in known
            if remedy.gain is not None and remedy.equality != "learning"
        ]
        best = max(gains, key=lambda one: one[0], default=None)
        if best is not None and best[0] > 0:
            return best[1]
        return None if self.timed else next(iter(known), None)

    @property
    def healthy(self) -> bool | None:
        """Return whether nothing is wrong and no remedy is forecast to gain more than `HEALTHY`.

        It is None where no gain is forecast at all, or too little was measured to judge.
        """
        if self.verdict is None or self.verdict.bottleneck in BEFORE_TIME:
            return None if self.verdict is None else False
        gains = [
            remedy.gain.value
            for one in self.findings
            for remedy in one.remedies
            if remedy.gain is not None and remedy.equality != "learning"
        ]
        if any(gain > HEALTHY for gain in gains):
            return False
        return True if self.timed else None

    def command(self, remedy: PlanRemedy | LoopRemedy) -> str:
        """Return what applies a remedy: a command, or words where no plan can be run."""
        return remedy.words if self.run is None else train_command(self.run, remedy.words)


# --- a run -----------------------------------------------------------------------------------


def advise(
    folder: Path, catalogue: Catalogue, rates_here: Callable[[torch.device], Machine] = rates
) -> Advice:
    """Return the findings of a run, also of one that goes on, and their remedies.

    A run that has not ended is judged by what it has written so far; see `so_far`.

    Args:
        folder: the run's.
        catalogue: the techniques that there are.
        rates_here: returns the rates of a device that is here; by default nothing is measured.
            Where the run has not ended it is not asked, since a probe would slow the run.

    Raises:
        RunError: a file of it is damaged.
    """
    report = RunFolder(folder).read("report")
    if report is not None and has_ended(report):
        use = use_of(folder, report, catalogue, rates_here)
        return _advise_run(folder, catalogue, rates_here, examined_run(folder, use))
    examined = examined_so_far(folder, catalogue)
    advice = _advise_run(folder, catalogue, rates, examined, ended=False)
    return replace(advice, so_far=examined[0].watched_steps)


def _advise_run(
    folder: Path,
    catalogue: Catalogue,
    rates_here: Callable[[torch.device], Machine],
    examined: tuple[Observation, list[Finding]],
    *,
    ended: bool = True,
) -> Advice:
    """Return the answer on what is known of a run; see `advise`.

    The packing of its text is counted where it has ended: that reads the run's shards.
    """
    seen, findings = examined
    run = RunFolder(folder)
    findings = presented(findings, seen)
    alone = tuple(map(Advised, findings))
    if unjudged(findings):
        return Advice(alone, no_remedy=NoRemedy.TOO_FEW_STEPS)
    try:
        plan = read_recorded_plan(folder, catalogue)
        context, machine = place_of(plan, run.read("environment") or {}, rates_here)
        packing = packing_of(run, plan, findings, WORTH) if ended else None
        measured = replace(MeasuredRun.of(seen), packing=packing)
        findings = [with_packing(finding, packing, plan) for finding in findings]
        other = wrong_layout(plan, context, machine, catalogue, measured)
        findings += [other] if other is not None else []
        advice = advised(findings, plan, context, machine, catalogue, measured)
        return replace(advice, run=folder)
    except RunError:
        raise
    except (HeadraceError, OSError) as error:
        why = error.message if isinstance(error, HeadraceError) else str(error)
        return Advice(alone, no_remedy=NoRemedy.REFUSED, why=why)


def advised(
    findings: list[Finding],
    plan: Plan,
    context: Context,
    machine: Machine,
    catalogue: Catalogue,
    measured: MeasuredRun,
) -> Advice:
    """Return the findings with their remedies; the first finding of a bottleneck has them.

    Raises:
        ConfigError, UnsupportedError: the plan itself cannot run there.
    """
    with_remedies = []
    for finding, new in _worth(findings):
        able = new and finding.bottleneck in BOTTLENECKS
        known = remedies(finding, plan, context, machine, catalogue, measured) if able else []
        with_remedies.append(Advised(finding, tuple(known)))
    ordered = _by_gain(with_remedies)
    asking = Asking(plan, context, machine, catalogue)
    prediction = asking.answer(plan).prediction
    timed = by_ledger(prediction, prediction, measured).gain is not None
    wider = widening(machine, "after_probes" if machine.source == "probes" else "no_gpu")
    advice = Advice(tuple(ordered), Rates(machine, wider), timed=timed)
    if not ordered or any(one.remedies for one in ordered):
        return advice
    if any(f.kind is Kind.PLAN_WITHOUT_TIME for f in findings):
        return replace(advice, no_remedy=NoRemedy.NOT_PREDICTED)
    if prediction.time.unknown:
        return replace(advice, no_remedy=NoRemedy.NOT_FORECAST, why=prediction.time.unknown)
    return replace(advice, no_remedy=NoRemedy.NO_CHANGE)


def _by_gain(advised: list[Advised]) -> list[Advised]:
    """Return the findings, what is wrong first, then by what the best remedy of each gains.

    A run's bottleneck is the one whose best remedy gains most. What has no forecast stays in its
    place, behind those that have one.
    """
    wrong = [one for one in advised if one.finding.bottleneck in BEFORE_TIME]
    rest = [one for one in advised if one.finding.bottleneck not in BEFORE_TIME]
    return [*wrong, *sorted(rest, key=lambda one: -_best_gain(one))]


def _best_gain(one: Advised) -> float:
    """Return the largest forecast gain of its remedies that keep what is learned; 0 without one."""
    gains = [r.gain.value for r in one.remedies if r.gain is not None and r.equality != "learning"]
    return max([0.0, *gains])


def _worth(findings: Sequence[Finding]) -> list[tuple[Finding, bool]]:
    """Return each with whether it gets remedies: the first of a name, if it is no small phase."""
    names = [finding.bottleneck for finding in findings]
    return [
        (
            finding,
            finding.bottleneck not in names[:number]
            and not (finding.bottleneck in ALWAYS_PRESENT and finding.share < WORTH),
        )
        for number, finding in enumerate(findings)
    ]


# --- a loop that is not Headrace's -----------------------------------------------------------


def advise_loop(paths: Sequence[Path], catalogue: Catalogue) -> Advice:
    """Return the findings of a watched loop or of a trainer's traces, with remedies in its words.

    Args:
        paths: what `headrace.watch` saved, or traces, one of each rank.
        catalogue: the techniques that there are.

    Raises:
        ConfigError, RunError: as `headrace.doctor.run.diagnose`.
    """
    findings, loop = examine_loop(paths)
    if unjudged(findings):
        return Advice(tuple(map(Advised, findings)), no_remedy=NoRemedy.TOO_FEW_STEPS)
    with_remedies = tuple(
        Advised(finding, tuple(loop_remedies(finding, loop, catalogue)) if new else ())
        for finding, new in _worth(findings)
    )
    gains = any(remedy.gain for one in with_remedies for remedy in one.remedies)
    advice = Advice(with_remedies, Rates() if gains else None)
    judged = any(not one.abstains and one.share for one in findings)
    if judged and not any(one.remedies for one in with_remedies):
        return replace(advice, no_remedy=NoRemedy.NO_CHANGE_OF_LOOP)
    return advice


# --- a plan ----------------------------------------------------------------------------------


def advise_plan(plan: Plan, context: Context, machine: Machine, catalogue: Catalogue) -> Advice:
    """Return what is predicted to hold up a plan that was not run, and remedies.

    Raises:
        ConfigError, UnsupportedError: it cannot run there.
    """
    prediction = predict(plan, context, machine)
    findings = plan_findings(plan, context, machine, prediction)
    advice = advised(findings, plan, context, machine, catalogue, MeasuredRun())
    timed = prediction.time.step_s is not None
    kept = tuple(x for x in advice.findings if not _idle(x, timed))
    return replace(advice, findings=kept, left_open=plan.mesh.left_open)


def _idle(advised: Advised, timed: bool) -> bool:
    """Return whether it says that memory is free, and nothing that would use it gains a percent."""
    gains = [remedy.gain for remedy in advised.remedies]
    small = all(gain is not None and gain.value < LEAST_GAIN for gain in gains)
    return advised.finding.bottleneck == "unused memory" and timed and small
