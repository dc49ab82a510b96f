"""The doctor's whole answer: findings of a run or of a plan, and what to do about each.

A run's findings come from what it measured; what binds its steps is told by how busy each resource
is (physics.py), and a plan that was not run has findings that the ledger
foresees: whether it fits, memory that is paid for in time and not needed, and what would take most
of the step. Remedies are forecast with the rates of the device that the run was on: probed, if this
is that device and it was, else its datasheet's. Of a GPU that nothing is known of there are
findings and no remedies.

A loop that is not Headrace's, watched or traced, has no plan: see loop.py for its remedies.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headrace.assemble.build import predict
from headrace.core.command import train_command
from headrace.core.errors import HeadraceError, RunError
from headrace.core.units import format_bytes, format_seconds
from headrace.costs.machine import ANCHOR_PRODUCT, Machine
from headrace.doctor.findings import ABSTAINED, Finding
from headrace.doctor.forecast import SHARE_ENDS, Measured, by_ledger
from headrace.doctor.judge import UNUSED
from headrace.doctor.loop import (
    LoopRemedy,
    examine,
    loop_remedies,
    unjudged,
    unjudged_first,
    without_repeats,
)
from headrace.doctor.remedies import BOUGHT, HEALTHY, Remedy, remedies
from headrace.doctor.run import WRONG, diagnose_run, place_of, rows_of, use_of
from headrace.doctor.window import of_run
from headrace.inference.load import read_recorded_plan
from headrace.plan.changes import parse
from headrace.plan.plan import Plan
from headrace.plan.symptoms import BOTTLENECKS, saves_memory
from headrace.plan.technique import Catalogue, Context
from headrace.predict.candidates import Asking
from headrace.predict.foresight import IDLE, KINDS, LAUNCHES, Foresight, foresee
from headrace.predict.intervals import widening
from headrace.probes.at_hand import rates
from headrace.train.run_folder import RunFolder

TOLD = 3
"""Remedies of a finding that a reader is told."""
ALWAYS_TOLD, WORTH = ("input", "wasted tokens"), 0.02
"""Stations that stand in every answer, and the share of the time, or of the tokens, below which
they need no remedy."""
PARTS = re.compile(r"(?:; |\. )(?![^(]*\))")
"""What stands between parts of a card's text; not inside of parentheses."""
RECEIPT = re.compile("(H200, )?(compiled recipe|plain trunk)")
"""How a part begins that is a receipt."""
TOO_FEW = "nothing is forecast from so few steps"
LEAST_GAIN = 0.01
"""Of the time, for which free memory is worth a finding of a plan."""
TRAFFIC_SHARE = 0.4
"""Of the step, memory traffic, from which a plan is called bound by it."""
HOST_SHARE = 0.05
"""Of the step, in which the device would wait for launches, from which that is named."""


NOTHING_GAINS = f"no remedy is forecast to gain more than {HEALTHY:.0%}"
BEFORE_TIME = (*WRONG, "memory capacity")
"""Bottlenecks that are wrong whatever their remedies gain in time."""


@dataclass(frozen=True)
class Advised:
    """A finding with its remedies, the best first; none where nothing is known to help."""

    finding: Finding
    remedies: tuple[Remedy, ...] | tuple[LoopRemedy, ...] = ()


@dataclass(frozen=True)
class Advice:
    """The doctor's answer.

    Args:
        findings: the gravest first.
        rates: what the forecasts rest on.
        unknown: why there are no remedies, if no finding has one.
        timed: whether the gain of a change can be forecast on this run.
        run: the folder of the run whose plan a remedy changes; None of a plan or of a loop.
    """

    findings: tuple[Advised, ...]
    rates: str = ""
    unknown: str = ""
    timed: bool = False
    run: Path | None = None

    @property
    def verdict(self) -> Finding | None:
        """The first finding: what is wrong, what binds the steps, or that it is not known."""
        return next((one.finding for one in self.findings), None)

    @property
    def first(self) -> Remedy | LoopRemedy | None:
        """The remedy to try first.

        Of what is wrong it is the first of its own; else the one of any finding with the largest
        forecast gain that does not change what is learned; else the verdict's first.
        """
        known = [remedy for one in self.findings for remedy in one.remedies]
        if self.verdict is not None and self.verdict.bottleneck in BEFORE_TIME:
            return next(iter(known), None)
        gains = [
            (remedy.gain.value, remedy) for remedy in known
            if remedy.gain is not None and remedy.equality != "learning"
        ]  # fmt: skip
        best = max(gains, key=lambda one: one[0], default=None)
        if best is not None and best[0] > 0:
            return best[1]
        return None if self.timed else next(iter(known), None)

    @property
    def healthy(self) -> bool | None:
        """Whether nothing is wrong and no remedy is forecast to gain more than `HEALTHY`.

        None where no gain is forecast at all, or too little was measured to judge.
        """
        if self.verdict is None or self.verdict.bottleneck in BEFORE_TIME:
            return None if self.verdict is None else False
        gains = [
            remedy.gain.value for one in self.findings for remedy in one.remedies
            if remedy.gain is not None and remedy.equality != "learning"
        ]  # fmt: skip
        if any(gain > HEALTHY for gain in gains):
            return False
        return True if self.timed else None

    def command(self, remedy: Remedy | LoopRemedy) -> str:
        """What applies a remedy: a command, or words where no plan can be run again."""
        words = words_of(remedy)
        return words if self.run is None else train_command(self.run, words)


# --- a run -----------------------------------------------------------------------------------


def advise(
    folder: Path, catalogue: Catalogue, rates_here: Callable[[torch.device], Machine] = rates
) -> Advice:
    """Findings of a run that has ended, and their remedies.

    Args:
        folder: the run's.
        catalogue: the techniques that there are.
        rates_here: of a device that is here; by itself nothing is measured.

    Raises:
        ConfigError: the run has not ended.
        RunError: a file of it is damaged.
    """
    run = RunFolder(folder)
    report = run.read_report()
    use = use_of(folder, report, catalogue, rates_here)
    findings = unjudged_first(without_repeats(diagnose_run(folder, use), report))
    if unjudged(findings):
        return Advice(tuple(map(Advised, findings)), unknown=TOO_FEW)
    measured = Measured.of(of_run(report, rows_of(folder)), use)
    try:
        plan = read_recorded_plan(folder, catalogue)
        context, machine = place_of(plan, run.read("environment") or {}, rates_here)
        advice = advised(findings, plan, context, machine, catalogue, measured)
        return replace(advice, run=folder)
    except RunError:
        raise
    except (HeadraceError, OSError) as error:
        told = error.message if isinstance(error, HeadraceError) else str(error)
        return Advice(tuple(map(Advised, findings)), unknown=f"no remedies are forecast: {told}")


def advised(
    findings: list[Finding], plan: Plan, context: Context, machine: Machine, catalogue: Catalogue,
    measured: Measured,
) -> Advice:  # fmt: skip
    """Findings with their remedies; the first finding of a bottleneck has them.

    Raises:
        ConfigError, UnsupportedError: the plan itself cannot run there.
    """
    found = []
    for finding, new in _worth(findings):
        able = new and finding.bottleneck in BOTTLENECKS
        known = remedies(finding, plan, context, machine, catalogue, measured) if able else []
        found.append(Advised(finding, tuple(known)))
    found = _by_gain(found)
    words = {"probes": "measured by probes", "datasheet": "assumed from its datasheet"}
    rates = f"rates of {machine.name} {words[machine.source]}"
    wider = widening(machine, "after_probes" if machine.source == "probes" else "no_gpu")
    if wider.why:
        rates += f"; a rate may be {wider.times:g} times off: {wider.why}"
    none = bool(found) and not any(one.remedies for one in found)
    asking = Asking(plan, context, machine, catalogue)
    seen = asking.answer(plan).foresight
    timed = by_ledger(seen, seen, measured).gain is not None
    return Advice(tuple(found), rates, _no_remedy(findings, asking) if none else "", timed)


def _by_gain(found: list[Advised]) -> list[Advised]:
    """The findings, what is wrong first, then by what the best remedy of each gains.

    A run's bottleneck is the one whose best remedy gains most. What has no forecast stays as it
    stood, behind those that have one.
    """
    wrong = [one for one in found if one.finding.bottleneck in BEFORE_TIME]
    rest = [one for one in found if one.finding.bottleneck not in BEFORE_TIME]
    return [*wrong, *sorted(rest, key=lambda one: -_best_gain(one))]


def _best_gain(one: Advised) -> float:
    """The largest forecast gain of its remedies that keep what is learned; 0 without one."""
    gains = [r.gain.value for r in one.remedies if r.gain is not None and r.equality != "learning"]
    return max([0.0, *gains])


def _worth(findings: Sequence[Finding]) -> list[tuple[Finding, bool]]:
    """Each with whether remedies are told of it: the first of a name, if it is no small station."""
    names = [finding.bottleneck for finding in findings]
    return [
        (one, one.bottleneck not in names[:number]
         and not (one.bottleneck in ALWAYS_TOLD and one.share < WORTH))
        for number, one in enumerate(findings)
    ]  # fmt: skip


def _no_remedy(findings: list[Finding], asking: Asking) -> str:
    """Why no finding has a remedy; without the reason where a finding is about just that."""
    why = asking.answer(asking.start).foresight.unknown
    if any(finding.evidence == why for finding in findings):
        return "no remedy is forecast without it"
    why = why or "no change is known that would help with any of this"
    return f"no remedy is forecast: {why}"


# --- a loop that is not Headrace's -----------------------------------------------------------


def advise_loop(paths: Sequence[Path], catalogue: Catalogue) -> Advice:
    """Findings of a watched loop or of a trainer's traces, with remedies in its own words.

    Args:
        paths: what `headrace.watch` saved, or traces, one of each rank.
        catalogue: the techniques that there are.

    Raises:
        ConfigError, RunError: as `headrace.doctor.run.diagnose`.
    """
    findings, loop = examine(paths)
    if unjudged(findings):
        return Advice(tuple(map(Advised, findings)), unknown=TOO_FEW)
    found = tuple(
        Advised(finding, tuple(loop_remedies(finding, loop, catalogue)) if new else ())
        for finding, new in _worth(findings)
    )
    judged = any(one.bottleneck != ABSTAINED and one.share for one in findings)
    none = judged and not any(one.remedies for one in found)
    unknown = "no change is known that would help with any of this" if none else ""
    rates = "a remedy takes between half and all of its finding's share"
    gains = any(remedy.gain for one in found for remedy in one.remedies)
    return Advice(found, rates if gains else "", unknown)


# --- a plan ----------------------------------------------------------------------------------


def advise_plan(plan: Plan, context: Context, machine: Machine, catalogue: Catalogue) -> Advice:
    """What is foreseen to hold up a plan that was not run, and remedies.

    Raises:
        ConfigError, UnsupportedError: it cannot run there.
    """
    seen = foresee(plan, context, machine)
    findings = [*_wide(plan, context, machine), *foreseen(plan, seen)]
    advice = advised(findings, plan, context, machine, catalogue, Measured())
    timed = seen.step_s is not None
    return replace(advice, findings=tuple(x for x in advice.findings if not _idle(x, timed)))


def _idle(advised: Advised, timed: bool) -> bool:
    """Whether it says that memory is free, and nothing that would use it gains a percent."""
    gains = [remedy.gain for remedy in advised.remedies]
    small = all(gain is not None and gain.value < LEAST_GAIN for gain in gains)
    return advised.finding.bottleneck == "unused memory" and timed and small


def _wide(plan: Plan, context: Context, machine: Machine) -> list[Finding]:
    """That products are of fp32 numbers, where a GPU has faster ones; a step's time is not told."""
    work = predict(plan, context).work.values() if context.device == "cuda" else ()
    wide = any(piece.kind == "product" and piece.precision == "fp32" for piece in work)
    if not wide or not any(known.precision == "bf16" for known in machine.products):
        return []
    wide_s, half_s = (machine.product_s(p, *ANCHOR_PRODUCT) for p in ("fp32", "bf16"))
    return [Finding(
        "kernel efficiency", 0.0,
        f"Products are of fp32 numbers: a large one takes {wide_s / half_s:.0f} times as long as "
        "in bf16.",
        f"{format_seconds(wide_s)} and {format_seconds(half_s)}, each of 8,192 cubed", "inferred",
    )]  # fmt: skip


def foreseen(plan: Plan, seen: Foresight) -> list[Finding]:
    """Findings of a plan by its prediction: memory that is missing or unused, and the step."""
    found = []
    held = seen.peak_bytes / seen.capacity_bytes
    told = f"{format_bytes(seen.peak_bytes)} of {format_bytes(seen.capacity_bytes)} foreseen"
    owner = next(iter(seen.owners), "")
    saving = [name for name, t in plan.techniques.items() if saves_memory(t.symptoms)]
    micro = plan.rows_per_step // (plan.micro_rows * plan.mesh.data)
    if seen.fits != "yes":
        said = "does not fit" if seen.fits == "no" else "fits tightly"
        found.append(Finding(
            "memory capacity", held, f"The plan {said}; most of its peak is {owner}.", told,
            "inferred",
        ))  # fmt: skip
    elif saving and held < UNUSED:
        found.append(Finding(
            "unused memory", 1 - held,
            f"{', '.join(saving)} trades time for memory that is free.", told, "inferred",
        ))  # fmt: skip
    elif micro > 1 and held < UNUSED:
        found.append(Finding(
            "unused memory", 1 - held,
            f"A step is {micro} forward passes of {plan.micro_rows} row"
            f"{'s' * (plan.micro_rows > 1)}, and memory is free for larger ones.", told, "inferred",
        ))  # fmt: skip
    if seen.step_s is None and seen.fits == "yes":
        part = seen.owners.get(owner, 0.0) / max(seen.peak_bytes, 1.0)
        found.append(Finding(
            "memory", held, f"The plan fits; most of its peak is {owner}: {part:.0%}.",
            f"{told}; headrace plan has every line", "inferred",
        ))  # fmt: skip
    return [*found, _slowest(seen)]


def _slowest(seen: Foresight) -> Finding:
    """What would take most of the step."""
    if seen.step_s is None:
        return Finding("not measured", 0.0, "The step's time is not foreseen.", seen.unknown,
                       "inferred")  # fmt: skip
    shares = seen.shares()
    idle = shares.get(LAUNCHES, 0.0)
    if idle >= HOST_SHARE:
        return Finding(
            "launch", idle, f"The device would wait for launches in {idle:.0%} of the step.",
            f"a step of {format_seconds(seen.step_s)}", "inferred",
        )  # fmt: skip
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    traffic = shares.get("memory traffic", 0.0)
    if traffic >= TRAFFIC_SHARE:
        said = f"Work that only moves bytes would take {traffic:.0%} of the step."
        return Finding("memory bandwidth", traffic, said, told, "inferred")
    name, share = max(
        ((name, share) for name, share in shares.items() if name not in IDLE),
        key=lambda one: one[1],
    )
    said = f"Most of the step would be {name}: {share:.0%}."
    computes = name in (KINDS["product"], KINDS["attention"])
    what = "computation" if computes else "memory bandwidth"
    what = "interconnect" if name == KINDS["collective"] else what
    return Finding(what, share, said, told, "inferred")


# --- for a reader ----------------------------------------------------------------------------


def plain(advice: Advice) -> list[dict[str, Any]]:
    """Findings as JSON values, each with its remedies; what findings.json holds.

    The first is the verdict. Where no finding has a remedy, `unknown` of each says why. Each also
    has what holds of the whole answer: `healthy`, null where no gain can be forecast, and `first`,
    the remedy to try first with its `command`, or null.
    """
    first = advice.first
    whole = {
        "unknown": advice.unknown, "healthy": advice.healthy,
        "first": first and {**first.plain(), "command": advice.command(first)},
    }  # fmt: skip
    return [
        {
            **asdict(one.finding),
            "remedies": [
                {**remedy.plain(), "command": advice.command(remedy)} for remedy in one.remedies
            ],
            **whole,
        }
        for one in advice.findings
    ]


def narrowest(advice: Advice) -> dict[str, Any]:
    """The verdict for report.json and a run's closing sentence, with the remedy to try first.

    Where the verdict is that too little is known, the longest phase is told instead.
    """
    found = [one.finding for one in advice.findings]
    shown = next((f for f in found if f.bottleneck != ABSTAINED), next(iter(found), None))
    if shown is None:
        return {"station": None, "share": None, "sentence": "No step was measured.", "evidence": "",
                "healthy": None, "remedy": None, "gain": None, "unknown": ""}  # fmt: skip
    first = None if advice.healthy else advice.first
    return {
        "station": shown.bottleneck, "share": shown.share, "sentence": shown.sentence,
        "evidence": shown.evidence, "healthy": advice.healthy,
        "remedy": first and advice.command(first), "gain": first and gain_of(first),
        "unknown": _unknown(found[0]) if found[0] is not shown else "",
    }  # fmt: skip


def _unknown(finding: Finding) -> str:
    """What an abstaining finding says, with what would tell."""
    if finding.not_measured in ("", "everything"):
        return finding.sentence
    return f"{finding.sentence} Not measured: {finding.not_measured}."


def told(advice: Advice) -> str:
    """The answer in lines: a finding, its evidence, and the best remedies."""
    lines = []
    for one in advice.findings:
        finding = one.finding
        lines.append(f"{finding.bottleneck}: {finding.sentence}")
        lines.append(f"  {finding.evidence} ({finding.confidence})")
        if finding.not_measured:
            lines.append(f"  not measured: {finding.not_measured}")
        lines += [f"  {line_of(remedy)}" for remedy in one.remedies[:TOLD]]
        if (more := len(one.remedies) - TOLD) > 0:
            lines.append(f"  and {more} more: --json")
    lines += [line for line in (advice.unknown,) if line]
    if advice.healthy:
        lines.append(f"healthy: {NOTHING_GAINS}")
    elif advice.run is not None and (first := advice.first) is not None:
        lines.append(f"try first: {advice.command(first)}")
    if advice.rates and any(one.remedies for one in advice.findings):
        lines.append(f"forecasts for this run's step; {advice.rates}")
    return "\n".join(lines)


def line_of(remedy: Remedy | LoopRemedy) -> str:
    """A remedy in one line: --with X: +4% (80%: +2% to +6%), memory -3.1 GiB, costs ..."""
    parts = [gain_of(remedy)]
    if remedy.memory_bytes is not None and abs(remedy.memory_bytes) >= 2**20:
        sign = "+" if remedy.memory_bytes > 0 else "-"
        parts.append(f"memory {sign}{format_bytes(abs(remedy.memory_bytes))}")
    if remedy.equality != "exact":
        change = {"learning": "what is learned", "approximate": "rounding"}[remedy.equality]
        parts.append(f"changes {change}")
    tight = ["the memory is nearly full then"] if remedy.fits == "tight" else []
    costs = cost_of(remedy)
    parts += [*tight, f"costs {costs}" if costs else remedy.what]
    if isinstance(remedy, LoopRemedy) and remedy.headrace:
        parts.append(f"in Headrace {' and '.join(remedy.headrace)}")
    return f"{words_of(remedy)}: {', '.join(parts)}"


def cost_of(remedy: Remedy | LoopRemedy) -> str:
    """What it costs, in one part: no receipt, which was measured elsewhere, if another is known."""
    bought, said, rest = remedy.costs.rpartition(BOUGHT)
    parts = PARTS.split(rest)
    return f"{bought}{said}" + next((p for p in parts if not RECEIPT.match(p)), parts[0])


def words_of(remedy: Remedy | LoopRemedy) -> str:
    """The change as `headrace train` takes it, or as the loop has it that is not Headrace's."""
    if isinstance(remedy, LoopRemedy):
        return "; ".join(remedy.change)
    return shlex.join(parse(remedy.change).command())


def gain_of(remedy: Remedy | LoopRemedy) -> str:
    """The gain with its ends, or that there is none; of a share no middle, for nothing tells it."""
    if (gain := remedy.gain) is None:
        return f"gain not forecast ({remedy.unknown})"
    digits = 1 if max(map(abs, (gain.low, gain.high))) < 0.1 else 0
    low, value, high = (f"{one:+.{digits}%}" for one in (gain.low, gain.value, gain.high))
    if remedy.forecast_from == "share":
        return f"{low} to {high} ({SHARE_ENDS})"
    return f"{value} (80%: {low} to {high})"
