"""Train a run for natural.py, ask the doctor about it, and choose the changes to measure.

A run is trained as `headrace train` does, with its signals on. From its third step on it is alone
on the device and on the host (natural_gate.py). It waits for them between two steps, where no
signal counts the time. Then the doctor reads its folder as `headrace doctor RUN` does, and what
is to be measured is written down: the two remedies that a reader is shown first, compiling with
graphs, and the changes that promise most of all that keep what is learned. The ledger's order is
used for that choice alone, and with a wide margin.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import receipts
import torch
from natural_gate import Gate
from natural_times import TOGETHER_BYTES

from headrace.assemble.context import choose_device
from headrace.cli.catalogue import catalogue
from headrace.cli.plans import rates_here
from headrace.core.errors import HeadraceError
from headrace.costs.machine import Machine
from headrace.doctor.advice import Advice, advise
from headrace.doctor.findings import ABSTAINED
from headrace.doctor.forecast import MeasuredRun
from headrace.doctor.observation import WARM_STEPS, observe
from headrace.doctor.run import examined_run, place_of, rows_of, use_of
from headrace.doctor.words import describe
from headrace.doctor.words.answer import SHOWN, render_rates, why_no_remedy
from headrace.inference.load import resolve_run
from headrace.kernels.cpu_units import bf16_units
from headrace.plan.plan import Plan
from headrace.plan.symptoms import BOTTLENECKS, parse, saves_memory
from headrace.predict.candidates import MICRO, Asking, Candidate, Words, singles
from headrace.predict.prediction import at
from headrace.train import train
from headrace.train.run_folder import RunFolder
from headrace.train.session import Session
from headrace.tuner.effects import effect_of
from headrace.tuner.readings import (
    Reading,
    device_weights,
    read,
    wait,
)

# --- what is said ----------------------------------------------------------------------------

HEALTHY = 0.05
"""The gain up to which a run counts as healthy: no remedy is forecast to gain more."""
TIMED = ("computation", "memory bandwidth", "kernel efficiency", "launch")
"""Bottlenecks whose remedies make steady steps shorter."""
NEVER = ("launch:compilation", "kernel efficiency:convolution")
"""Symptoms whose techniques change no steady step of these plans."""
HOPE, SAME, LOSS, UNKNOWN = 0.75, 0.985, 0.9, 0.9
"""Predicted ratios of step times, before over after, below which a change is not measured: HOPE for
a technique that is for speed, SAME for one that is not, and LOSS for fewer rows on a CPU, whose
caches no ledger knows. UNKNOWN stands for a ratio that is not predicted. Predictions of
launch-bound steps were off by a third."""
ATTENDS = "parts.attend"
"""The name of the socket that computes attention."""
GRAPHS = frozenset(("+torch_compile", "+cuda_graphs"))
"""Words of the change that is always measured where it can run."""
SLOW_TO_COMPILE = "max-autotune"
"""Part of the words of a change that compiles for minutes.

Such a change is measured only where the doctor names it.
"""
LARGE_BYTES = 12 << 30
"""Bytes of a plan from which on one change less is measured, since few processes fit beside it."""
SPARE_BYTES = 2 << 30
"""Bytes of a device that a process takes beside its plans."""


@dataclass
class Answer(Reading):
    """Hold what the doctor answered about a run, as facts of a row."""

    facts: dict[str, Any] = field(default_factory=dict)


def say(
    plan: Plan, work: Plan, gate: Gate, most: int, room_bytes: float, kept: Path | None
) -> Answer:
    """Train a run, ask the doctor, and list what is to be measured.

    Args:
        plan: the plan as the row names it.
        work: the same plan with its folders.
        gate: the gate to the device.
        most: the most changes that are measured.
        room_bytes: the memory of the device for the run's plan and a changed one.
        kept: the folder that the run's small files are copied to, if any.
    """
    facts: dict[str, Any] = {}
    outcome = read(lambda reading: facts.update(_say(plan, work, gate, most, room_bytes, kept)))
    return Answer(refused=outcome.refused, poisoned=outcome.poisoned, facts=facts)


def _say(
    plan: Plan, work: Plan, gate: Gate, most: int, room_bytes: float, kept: Path | None
) -> dict[str, Any]:
    device = choose_device(work)
    drawn = nullcontext() if device.type == "cpu" else device_weights(device)
    with drawn, alone_from_third_step(gate):
        path = train.run(work).folder
    folder = resolve_run(path or Path(work.directory) / work.name)
    measured_rates = partial(rates_here, sure=True)
    advice, run = advise(folder, catalogue(), measured_rates), RunFolder(folder)
    report = run.read_report()
    place = place_of(plan, run.read("environment") or {}, measured_rates)
    asking = Asking(plan, *place, catalogue())
    spent_s = observe(report, rows_of(folder)).step_s
    answer = verdict(advice)
    if kept is not None:
        copy(folder, kept)
    remedies = [tuple(one["change"]) for one in answer["remedies"]]
    return {
        "precision": asking.context.precision,
        "compiled": "torch_compile" in plan.techniques,
        "parameters": report["parameters"],
        "steps": report["steps"],
        "step_s": median(spent_s) if spent_s else None,
        "threads": torch.get_num_threads(),
        **answer,
        "knew": knew(folder, report, measured_rates),
        "rates": render_rates(advice.rates),
        "unknown": why_no_remedy(advice),
        **to_measure(asking, remedies, most, room_bytes),
    }


def knew(
    folder: Path, report: dict[str, Any], measured_rates: Callable[[torch.device], Machine]
) -> dict[str, Any]:
    """Return what a forecast takes from a run's signals, so that it can be made again."""
    use = use_of(folder, report, catalogue(), measured_rates)
    run = MeasuredRun.of(examined_run(folder, use)[0])
    return {key: getattr(run, key) for key in ("step_s", "waits_s", "slack_s", "by_host")}


@contextmanager
def alone_from_third_step(gate: Gate) -> Iterator[None]:
    """Make a run inside wait before its third step until it is alone on the device."""
    next_batch, finish, stack = Session.next_batch, Session.finish, ExitStack()

    def before(session: Session) -> Any:
        if session.counters.step == WARM_STEPS:
            stack.enter_context(gate.alone())
        return next_batch(session)

    def after(session: Session, *given: Any) -> Any:
        wait(session.build)
        stack.close()
        return finish(session, *given)

    Session.next_batch, Session.finish = before, after  # type: ignore[method-assign]
    try:
        yield
    finally:
        Session.next_batch, Session.finish = next_batch, finish  # type: ignore[method-assign]
        stack.close()


def verdict(advice: Advice) -> dict[str, Any]:
    """Return the first finding, and every remedy that a reader is shown.

    Findings about evaluations or compiling, which take much of so short a run, are no verdict.
    """
    findings = [one.finding for one in advice.findings]
    known = (f for f in findings if f.bottleneck in (*BOTTLENECKS, ABSTAINED))
    first = next(known, findings[0])
    remedies = [
        {
            "change": list(remedy.change),
            "of": one.finding.bottleneck,
            "gain": None
            if remedy.gain is None
            else {"low": remedy.gain.low, "value": remedy.gain.value, "high": remedy.gain.high},
            "forecast_from": remedy.forecast_from,
            "equality": remedy.equality,
        }
        for one in advice.findings
        for remedy in one.remedies[:SHOWN]
    ]
    once = {tuple(one["change"]): one for one in reversed(remedies)}
    remedies = [one for one in remedies if once[tuple(one["change"])] is one]
    gains = [one["gain"]["value"] for one in remedies if one["gain"] is not None]
    return {
        "verdict": first.bottleneck,
        "share": first.share,
        "said": describe(first).sentence,
        "healthy": all(gain <= HEALTHY for gain in gains),
        "findings": [[finding.bottleneck, finding.share] for finding in findings],
        "first": remedies[0] if remedies else None,
        "remedies": remedies,
    }


def copy(folder: Path, kept: Path) -> None:
    """Copy what the doctor reads of a run."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in ("report.json", "metrics.jsonl", "plan.toml", "environment.json"):
        if (folder / name).is_file():
            (kept / name).write_bytes((folder / name).read_bytes())


# --- what is to be measured ------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Describe a change that could be measured.

    Args:
        words: the change.
        bytes: its peak of memory.
        promise: predicted ratio of step times, before over after; None where none is predicted.
        kind: what it does, such as other attention: one change of a kind is chosen; "" is no kind.
        learns: whether it changes what is learned.
        run: a fingerprint of what the changed plan computes; one change of each is chosen.
    """

    words: Words
    bytes: float
    promise: float | None = None
    kind: str = ""
    learns: bool = False
    run: str = ""

    @property
    def moves(self) -> bool:
        """Return whether the change is predicted to move a step, or has no prediction."""
        return self.promise is None or abs(self.promise - 1) > 1e-4


def to_measure(
    asking: Asking, remedies: Sequence[Words], most: int, room_bytes: float
) -> dict[str, Any]:
    """Return the changes to measure and their bytes: remedies, compiling, the best predicted.

    A change of the learning is measured only where it is the first remedy, since no such change
    may be the best one.
    """
    own_bytes = asking.answer(asking.start).prediction.memory.peak_bytes
    remedy_choices = [_remedy_choice(asking, words, own_bytes) for words in remedies]
    more = [one for one in remedy_choices[1:] if one.moves and not one.learns]
    chosen = [*remedy_choices[:1], *more[:1]]
    known, others = {frozenset(words) for words in remedies}, more[1:]
    for candidate in singles(asking):
        one = _choice(asking, candidate)
        room = own_bytes + one.bytes + SPARE_BYTES <= room_bytes
        fits = room and candidate.prediction.memory.fits != "no"
        if fits and "+cuda_graphs" in one.words and {*one.words} <= GRAPHS:
            if not any("+cuda_graphs" in other.words for other in chosen):
                chosen.append(one)
        elif room and frozenset(one.words) not in known and worth(asking, candidate, one.promise):
            others.append(one)
    others.sort(key=lambda one: -(UNKNOWN if one.promise is None else one.promise))
    taken = {frozenset(one.words) for one in chosen}
    kind_names = {one.kind for one in chosen if one.kind}
    runs = {one.run for one in chosen}
    for one in others:
        if frozenset(one.words) not in taken and one.kind not in kind_names and one.run not in runs:
            chosen.append(one)
            kind_names |= {one.kind} - {""}
            runs.add(one.run)
    chosen = chosen[: max(0, most - (own_bytes >= LARGE_BYTES))]
    peaks = [one.bytes for one in chosen]
    together = min(sum(peaks), max([TOGETHER_BYTES, *peaks]))
    return {
        "changes": [list(one.words) for one in chosen],
        "peaks": peaks,
        "bytes": min(room_bytes, own_bytes + together + SPARE_BYTES),
    }


def _remedy_choice(asking: Asking, words: Words, otherwise: float) -> Choice:
    """Return a remedy with its bytes: those of the plan where it has no prediction."""
    try:
        candidate = asking.answer(asking.start, words)
    except HeadraceError:
        return Choice(words, otherwise)
    return replace(_choice(asking, candidate), words=words)


def _choice(asking: Asking, candidate: Candidate) -> Choice:
    plan, words = candidate.plan, candidate.changes
    kind = MICRO if words and all(word.startswith(f"{MICRO}=") for word in words) else ""
    if any(w[0] == "+" and ATTENDS in plan.techniques[w[1:]].claims for w in words):
        kind = ATTENDS
    learns = effect_of(asking.start, plan) == "learning"
    peak_bytes = candidate.prediction.memory.peak_bytes
    return Choice(words, peak_bytes, _expected(asking, plan), kind, learns, _run_of(asking, plan))


def _run_of(asking: Asking, plan: Plan) -> str:
    """Return a fingerprint of what a plan computes.

    A technique that only sets the precision has the same fingerprint as the key alone.
    """
    sockets = {name: {*t.claims, *t.composes} for name, t in plan.techniques.items()}
    rest = {n: t for n, t in plan.techniques.items() if sockets[n] != {"config.precision"}}
    update = {"precision": at(asking.context, plan).precision}
    alike = plan.replaced(model=plan.model.model_copy(update=update), techniques=rest)
    return receipts.sha256(alike.dump())


def _expected(asking: Asking, plan: Plan) -> float | None:
    """Return the predicted ratio of step times, before over after."""
    before_s, after_s = asking.guess_s(asking.start), asking.guess_s(plan)
    return before_s / after_s if before_s and after_s else None


def worth(asking: Asking, candidate: Candidate, expected: float | None) -> bool:
    """Return whether a single change keeps the learning, fits, and is not predicted to lose."""
    words, on_cpu = candidate.changes, asking.context.device == "cpu"
    if (
        not words
        or candidate.prediction.memory.fits == "no"
        or any(SLOW_TO_COMPILE in w for w in words)
    ):
        return False
    if effect_of(asking.start, candidate.plan) == "learning":
        return False
    if (known := _by_precision(asking, candidate)) is not None:
        return known
    promise = UNKNOWN if expected is None else expected
    moves = abs(promise - 1) > 1e-4
    if any(word.startswith(f"{MICRO}=") for word in words):
        return moves and promise >= (LOSS if on_cpu else SAME)
    if put_in := [asking.catalogue.find(w[1:]).symptoms for w in words if w[0] == "+"]:
        quicker = [any(parse(s)[0] in TIMED for s in {*one} - {*NEVER}) for one in put_in]
        if any(quicker):  # where not all are, the quicker one alone is a change too
            return all(quicker) and promise >= HOPE
        logits = on_cpu and any("memory capacity:logits" in one for one in put_in)
        return moves and promise >= (SAME if logits else 1.0)
    taken = [asking.start.techniques[w[1:]].symptoms for w in words if w[0] == "-"]
    if taken and all(map(saves_memory, taken)):
        return True
    return moves and promise >= (SAME if taken else 1.0)


def _by_precision(asking: Asking, candidate: Candidate) -> bool | None:
    """Return whether a change is worth it where its precision decides that alone, else None.

    A CPU multiplies half precision slowly unless it has units for it, and a change of the plan's
    precision to what it is already does nothing.
    """
    before, after = asking.start.techniques, candidate.plan.techniques
    added = [technique for name, technique in after.items() if name not in before]
    if asking.context.device == "cpu" and any("float8" in t.name() for t in added):
        return False
    there = at(asking.context, candidate.plan).precision
    if there != asking.context.precision:
        if asking.context.device != "cpu":
            return None
        return there == "bf16" and bool(bf16_units())
    sockets = {socket for t in added for socket in (*t.claims, *t.composes)}
    return False if sockets == {"config.precision"} else None
