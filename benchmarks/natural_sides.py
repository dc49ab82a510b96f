"""What a process does for natural.py: train a run and ask the doctor, and time changes of a plan.

A run is trained as `headrace train` does, with its signals on. From its third step on it is alone
on the device and on the host (natural_gate.py); what it waits for its turn lies between two steps,
where no signal counts it. Then the doctor reads its folder as `headrace doctor RUN` does, and what
is to be measured is written down: every remedy that a reader is told of, and every other single
change that keeps what is learned and is not sure to lose. The ledger's order is used for that
choice alone, and with a wide margin.

A change is measured beside the run's own plan in one process. Both are built and warm before the
process takes its turn, blocks of steps go A B B A, and a change that is clearly behind the best one
so far is left after a look at it.
"""

import gc
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from natural_gate import Gate

from headrace import train
from headrace.arguments import rates_here
from headrace.changes import changed
from headrace.cli import catalogue
from headrace.context import choose_device
from headrace.core.errors import HeadraceError
from headrace.core.plan import Plan
from headrace.core.statistics import order_abba, paired_ratio
from headrace.core.symptoms import BOTTLENECKS, parse, saves_memory
from headrace.doctor.advice import TOLD, Advice, advise, place_of
from headrace.doctor.run import rows_of
from headrace.doctor.trace import ABSTAINED
from headrace.doctor.window import WARM_STEPS, of_run
from headrace.load import resolve_run
from headrace.planner.candidates import MICRO, Asking, Candidate, Words, singles
from headrace.planner.foresight import at
from headrace.progress import Progress
from headrace.run_folder import RunFolder
from headrace.session import Session
from headrace.trials.kinds import kind_of
from headrace.trials.readings import (
    Clock,
    Reading,
    device_weights,
    flags_of,
    opened,
    read,
    wait,
    why,
)

# --- what is said ----------------------------------------------------------------------------

HEALTHY = 0.05
"""A gain; a run of which no remedy is said to gain more is said to be healthy."""
TIMED = ("computation", "memory bandwidth", "kernel efficiency", "launch")
"""Bottlenecks whose remedies make steady steps shorter."""
NEVER = ("launch:compilation", "kernel efficiency:convolution")
"""Symptoms of what does nothing to a steady step of these plans."""
HOPE, SAME, LOSS, UNKNOWN = 0.75, 0.985, 0.9, 0.9
"""Predicted time of a step before over after, below which a change is not measured: where the
technique is there for speed, where it is not, and where it is fewer rows on a CPU, whose caches no
ledger knows; and what is taken for it where nothing is predicted. Predictions of launch-bound steps
were off by a third."""
ATTENDS, ALIKE = "parts.attend", 2
"""The socket of what computes attention; and how many that do one thing are measured."""
SLOW_TO_COMPILE = "max-autotune"
"""In the words of what compiles for minutes; it is measured where the doctor says it."""
LARGE_BYTES = 12 << 30
"""Of a plan, from which on half as many changes that nobody said are measured: few processes find
room beside it."""
SPARE_BYTES = 2 << 30
"""Of a device, what a process takes beside two plans."""


def awake() -> None:
    """What a process does first: all is imported by then, and the device is found."""
    if torch.cuda.is_available():
        torch.cuda.init()


@dataclass
class Said(Reading):
    """What was said of a run: the row's facts."""

    facts: dict[str, Any] = field(default_factory=dict)


def say(
    plan: Plan, work: Plan, gate: Gate, most: int, room_bytes: float, kept: Path | None
) -> Said:
    """Train a run, ask the doctor, and list what is to be measured.

    Args:
        plan: as the row names it.
        work: the same with its folders.
        gate: to the device.
        most: changes that nobody said, at most.
        room_bytes: of the device, for the run's plan and a changed one.
        kept: where the run's small files are copied to, if anywhere.
    """
    facts: dict[str, Any] = {}
    found = read(lambda reading: facts.update(_say(plan, work, gate, most, room_bytes, kept)))
    return Said(refused=found.refused, poisoned=found.poisoned, facts=facts)


def _say(
    plan: Plan, work: Plan, gate: Gate, most: int, room_bytes: float, kept: Path | None
) -> dict[str, Any]:
    device = choose_device(work)
    drawn = nullcontext() if device.type == "cpu" else device_weights(device)
    with drawn, turn_from_third_step(gate):
        path = train.run(work, progress=Progress())
    folder = resolve_run(path or Path(work.directory) / work.name)
    advice, run = advise(folder, catalogue(), rates_here), RunFolder(folder)
    report = run.read_report()
    place = place_of(plan, run.read("environment") or {}, rates_here)
    asking = Asking(plan, *place, catalogue())
    spent_s = of_run(report, rows_of(folder)).step_s
    told = verdict(advice)
    if kept is not None:
        copy(folder, kept)
    said = [tuple(one["change"]) for one in told["remedies"]]
    return {
        "precision": asking.context.precision, "compiled": "torch_compile" in plan.techniques,
        "parameters": report["parameters"], "steps": report["steps"],
        "step_s": median(spent_s) if spent_s else None, "threads": torch.get_num_threads(),
        **told, "rates": advice.rates, "unknown": advice.unknown,
        **to_measure(asking, said, most, room_bytes),
    }  # fmt: skip


@contextmanager
def turn_from_third_step(gate: Gate) -> Iterator[None]:
    """Runs inside wait for their turn before their third step, and leave it after the last."""
    next_batch, finish, held = Session.next_batch, Session.finish, ExitStack()

    def before(session: Session) -> Any:
        if session.counters.step == WARM_STEPS:
            held.enter_context(gate.alone())
        return next_batch(session)

    def after(session: Session, *given: Any) -> Any:
        wait(session.build)
        held.close()
        return finish(session, *given)

    Session.next_batch, Session.finish = before, after  # type: ignore[method-assign]
    try:
        yield
    finally:
        Session.next_batch, Session.finish = next_batch, finish  # type: ignore[method-assign]
        held.close()


def verdict(advice: Advice) -> dict[str, Any]:
    """The first finding, and every remedy that a reader is told of.

    What an evaluation and a compiler took of so short a run is no verdict on its steps.
    """
    findings = [one.finding for one in advice.findings]
    known = (f for f in findings if f.bottleneck in (*BOTTLENECKS, ABSTAINED))
    first = next(known, findings[0])
    remedies = [
        {
            "change": list(remedy.change), "of": one.finding.bottleneck,
            "gain": None if remedy.gain is None else
            {"low": remedy.gain.low, "value": remedy.gain.value, "high": remedy.gain.high},
            "forecast_from": remedy.forecast_from, "equality": remedy.equality,
        }
        for one in advice.findings for remedy in one.remedies[:TOLD]
    ]  # fmt: skip
    once = {tuple(one["change"]): one for one in reversed(remedies)}
    remedies = [one for one in remedies if once[tuple(one["change"])] is one]
    gains = [one["gain"]["value"] for one in remedies if one["gain"] is not None]
    return {
        "verdict": first.bottleneck, "share": first.share, "said": first.sentence,
        "healthy": all(gain <= HEALTHY for gain in gains),
        "findings": [[finding.bottleneck, finding.share] for finding in findings],
        "first": remedies[0] if remedies else None, "remedies": remedies,
    }  # fmt: skip


def copy(folder: Path, kept: Path) -> None:
    """Copy what the doctor reads of a run."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in ("report.json", "metrics.jsonl", "plan.toml", "environment.json"):
        if (folder / name).is_file():
            (kept / name).write_bytes((folder / name).read_bytes())


# --- what is to be measured ------------------------------------------------------------------


def to_measure(
    asking: Asking, said: Sequence[Words], most: int, room_bytes: float
) -> dict[str, Any]:
    """What was said first, then what promises most; and the bytes that the largest pair takes."""
    own_bytes = asking.answer(asking.start).foresight.peak_bytes
    found: dict[frozenset[str], Words] = {frozenset(words): words for words in said}
    peaks, others = [own_bytes], list[tuple[float, Candidate]]()
    for words in said:
        peaks.append(_peak(asking, words, own_bytes))
    for candidate in singles(asking):
        expected = _expected(asking, candidate.plan)
        if frozenset(candidate.changes) not in found and worth(asking, candidate, expected):
            others.append((UNKNOWN if expected is None else expected, candidate))
    others.sort(key=lambda one: -one[0])
    most = most if own_bytes < LARGE_BYTES else (most + 1) // 2
    for _, candidate in [*_few_alike(others)][:most]:
        peak = candidate.foresight.peak_bytes
        if own_bytes + peak + SPARE_BYTES <= room_bytes:
            found[frozenset(candidate.changes)] = candidate.changes
            peaks.append(peak)
    return {
        "changes": [list(words) for words in found.values()],
        "bytes": min(room_bytes, own_bytes + max(peaks) + SPARE_BYTES),
    }  # fmt: skip


def _peak(asking: Asking, words: Words, otherwise: float) -> float:
    try:
        return asking.answer(asking.start, words).foresight.peak_bytes
    except HeadraceError:  # its measurement tells
        return otherwise


def _expected(asking: Asking, plan: Plan) -> float | None:
    """Predicted time of a step before over after."""
    before_s, after_s = asking.guess_s(asking.start), asking.guess_s(plan)
    return before_s / after_s if before_s and after_s else None


def worth(asking: Asking, candidate: Candidate, expected: float | None) -> bool:
    """Whether a single change keeps what is learned, fits, and is not sure to lose."""
    words, on_cpu = candidate.changes, asking.context.device == "cpu"
    if not words or candidate.foresight.fits == "no" or any(SLOW_TO_COMPILE in w for w in words):
        return False
    if kind_of(asking.start, candidate.plan) == "learning":
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
    """What numbers alone decide: None where they do not.

    A CPU multiplies half precision slowly unless it has units for it, and a change of the plan's
    precision to what it is already does nothing.
    """
    before, after = asking.start.techniques, candidate.plan.techniques
    kinds = [technique for name, technique in after.items() if name not in before]
    if asking.context.device == "cpu" and any("float8" in t.name() for t in kinds):
        return False
    there = at(asking.context, candidate.plan).precision
    if there != asking.context.precision:
        if asking.context.device != "cpu":
            return None
        units = (torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_bf16_supported())
        return there == "bf16" and any(units)
    sockets = {socket for t in kinds for socket in (*t.claims, *t.composes)}
    return False if sockets == {"config.precision"} else None


def _few_alike(others: Sequence[tuple[float, Candidate]]) -> Iterator[tuple[float, Candidate]]:
    """Of all sizes of a micro-batch, and of all that compute attention, two that promise most."""
    seen: Counter[str] = Counter()
    for one in others:
        plan = one[1].plan
        kind = MICRO if any(word.startswith(f"{MICRO}=") for word in one[1].changes) else ""
        for word in one[1].changes:
            if word[0] == "+" and ATTENDS in plan.techniques[word[1:]].claims:
                kind = ATTENDS
        seen[kind] += 1
        if not kind or seen[kind] <= ALIKE:
            yield one


# --- what is measured ------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """How much is timed.

    Args:
        block_s: that a block of steps lasts at least; a step that takes longer is a block.
        look: rounds of A B B A before a change may be left.
        more: rounds for those that are not.
        slow_s: a step from which on both are one round.
        heat_s: of untimed steps before.
    """

    block_s: float
    look: int
    more: int
    slow_s: float
    heat_s: float


PACES = {"cuda": Pace(0.06, 2, 2, 0.05, 0.15), "cpu": Pace(0.4, 2, 2, 1.0, 0.0)}
FREE, HOPELESS = 3, 2.5
"""Steps of a plan before its turn, of which the first compile; and how many times as long as the
run's own the last of them takes where a change is left at once."""
BEHIND = 0.97
"""Of the best speed so far, below which a change is left after a look."""
MOST_STEPS = 200
"""Of a block."""
STAGE, BEGUN, READY = "stage", "begun", "ready"
"""The key of how far a process came, in a reading's evidence, where it did not die; and what it
holds before the run's own plan is warm and after."""
ENTRIES = 256
"""Compiled versions of a function that torch keeps in a process: every change brings its own."""


class Timed:
    """A plan that is built, and the seconds of its blocks."""

    def __init__(self, stack: ExitStack, plan: Plan, threads: int) -> None:
        self.build, self.micros = stack.enter_context(opened(plan, text=True, in_force=False))
        self.threads, self.index, self.step_s = threads, 0, math.inf
        self.seconds: list[float] = []

    def once(self) -> None:
        """A step that is not timed, but for what is planned with."""
        began_s = time.perf_counter()
        with self._own():
            self._step()
            wait(self.build)
        self.step_s = time.perf_counter() - began_s

    def run(self, blocks: int, steps: int) -> None:
        """Timed blocks, after a step that fills the queue of the device."""
        clock = Clock(self.build.device)
        with self._own():
            self._step()
            clock.mark()
            for _ in range(blocks * steps):
                self._step()
                clock.mark()
            seconds = clock.seconds()
        self.step_s = median(seconds)
        self.seconds += [median(seconds[i : i + steps]) for i in range(0, len(seconds), steps)]

    def _step(self) -> None:
        train.step(self.build, self.micros(self.index), self.index)
        self.index += 1

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Its flags are in force, and it takes no code that another plan compiled (pairs.py)."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with flags_of(self.build):
                yield
        finally:
            torch.set_num_threads(before)


def measure(
    plan: Plan, changes: Sequence[Words], gate: Gate, parts: Path, about: Mapping[str, Any],
    ends_s: float,
) -> Reading:  # fmt: skip
    """Time changes beside a plan; each that is done is a line of `parts` at once.

    Args:
        plan: the run's, with its folders.
        changes: what is still to be measured.
        gate: to the device.
        parts: the file.
        about: what each line begins with.
        ends_s: on the clock of all processes; no change begins later.
    """
    return read(lambda found: _measure(plan, changes, gate, parts, about, ends_s, found))


def _measure(
    plan: Plan, changes: Sequence[Words], gate: Gate, parts: Path, about: Mapping[str, Any],
    ends_s: float, found: Reading,
) -> None:  # fmt: skip
    found.evidence[STAGE] = BEGUN
    torch._dynamo.config.recompile_limit = ENTRIES
    torch._dynamo.config.accumulated_recompile_limit = 8 * ENTRIES
    with ExitStack() as stack:
        base = Timed(stack, plan, torch.get_num_threads())
        warm(base)
        found.evidence[STAGE] = READY
        on_gpu, best = base.build.device.type == "cuda", 1.0
        held = torch.cuda.memory_allocated() if on_gpu else 0
        for number, words in enumerate(changes, 1):
            if time.time() >= ends_s:
                return
            line: dict[str, Any] = {**about, "change": list(words)}
            try:
                after = changed(plan, words, catalogue())
                line["equality"] = kind_of(plan, after)
                with ExitStack() as own:
                    two = Timed(own, after, base.threads + number * on_gpu)
                    line |= beside(base, two, best, gate)
                best = max(best, 1 + line["gain"]["value"])
            except Exception as error:  # whatever it is, the row tells it
                line["refused"] = why(error)
                if not isinstance(error, HeadraceError | torch.OutOfMemoryError):
                    _append(parts, line)
                    raise
            two = after = None
            _append(parts, line)
            _forget(base, held, on_gpu)


def _forget(base: Timed, held: int, on_gpu: bool) -> None:
    """Give back what a change took: its compiled code too, where that is not the base's or large."""
    gc.collect()
    large = on_gpu and torch.cuda.memory_allocated() > held + LEFT_BYTES
    if large or not base.build.compiled:
        torch._dynamo.reset()
        gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    if large and base.build.compiled:
        warm(base)


def _append(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def warm(one: Timed, than_s: float = math.inf) -> None:
    """Compile, and take two more steps; one that takes hopelessly long ends it."""
    for number in range(FREE):
        one.once()
        if number and one.step_s > HOPELESS * than_s:
            return


def beside(base: Timed, two: Timed, best: float, gate: Gate) -> dict[str, Any]:
    """What a change gains, by blocks in turn."""
    began_s = time.time()
    warm(two, base.step_s)
    pace, ready_s = PACES[two.build.device.type], time.time() - began_s
    base.seconds, two.seconds = [], []
    with gate.alone() as quiet:
        base.once()
        two.once()
        two.once()  # what the one before may have compiled or recorded is not of a step
        if two.step_s > HOPELESS * base.step_s:
            base.seconds, two.seconds = [base.step_s], [two.step_s]
        else:
            heat(base, two, pace.heat_s)
            in_turn(base, two, best, pace)
    ratio = paired_ratio(base.seconds, two.seconds)
    low, high = (ratio.value, ratio.value) if ratio.n < 2 else (ratio.low, ratio.high)
    return {
        "gain": {"low": low - 1, "value": ratio.value - 1, "high": high - 1, "n": ratio.n},
        "before_s": median(base.seconds), "after_s": median(two.seconds), "quiet": quiet,
        "ready_s": ready_s,
    }  # fmt: skip


def heat(base: Timed, two: Timed, heat_s: float) -> None:
    """Steps in turn until the device's clock is that of work."""
    ends_s = time.monotonic() + heat_s
    while time.monotonic() < ends_s:
        base.once()
        two.once()


def in_turn(base: Timed, two: Timed, best: float, pace: Pace) -> None:
    """Blocks A B B A: a look, and more where the change is not clearly behind the best."""
    slow = max(base.step_s, two.step_s) > pace.slow_s
    for rounds in (1, 1) if slow else (pace.look, pace.more):
        for name, run in groupby(order_abba(rounds)):
            one = base if name == "A" else two
            one.run(len(list(run)), max(1, min(MOST_STEPS, ceil(pace.block_s / one.step_s))))
        if paired_ratio(base.seconds, two.seconds).value < BEHIND * best:
            return
