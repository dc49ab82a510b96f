"""Fit what forecasts assume of hosts to natural runs, and score the forecasts of today's doctor.

    python benchmarks/natural_error.py [--write results]

Rows of natural_said.jsonl have the step of each run and what bound it; rows of natural.jsonl the
steps with and without each change. From these steps come the constants of costs/constants.toml
that a gain's interval rests on:

- `usual_launch`: seconds of a host for one launch of eager and of compiled code, medians of steps
  that wait for launches (`HOST_DECIDES`);
- `host_spread`: how far single steps lie from that, as a factor that holds 80%;
- `host_drift`: how far the same plan's step lies from the one minutes before, likewise;
- `wider_natural`: how much farther out than an H200's the ends of a step's interval lie where
  another GPU was probed, so that 80% of its steps that the device decides lie inside.

Then each run is forecast again by today's code, from what its row says that the doctor knew, with
constants that are fitted without its workload. The share of gains inside of these intervals and
the median error of the gains are printed for each device, for first remedies, for all remedies that
a reader was shown, and for all changes that were measured. `--write` keeps the first in a row of
natural_again.jsonl for each device: what the runs of one that is not at hand say of today's code. A
row names the rates that its doctor had (`machine`); older rows do not, and are forecast by those of
MACHINES. A run whose plan is another one today is left out: its memory would be another.

On a CPU, whose host is its device, `gain_on_cpu` is fitted likewise: how far off its rates are.
Nobody kept the rates of the CPU of older rows. Their intervals are symmetric, so their half-widths
say how much work moved. Changes to bf16 are left out there: their doctor had no steps in bf16,
which a probe times first since.
"""

import argparse
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import receipts
import torch
from natural_runs import RUNS
from receipts import ROOT
from residuals import standing

from headrace.assemble.build import make_ledger
from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import HeadraceError
from headrace.core.statistics import Interval
from headrace.costs.machine import Machine
from headrace.costs.step import Launches, launches
from headrace.costs.work import EDGE_S, HOST_S
from headrace.doctor.forecast import ERROR, NOTHING, REST, Hosts, MeasuredRun, by_ledger, moved
from headrace.plan.plan import Plan
from headrace.predict.candidates import Asking
from headrace.predict.intervals import STEP
from headrace.predict.prediction import Prediction, at

MACHINES = {"H100": "h100-2026-11-25.json", "H200": "h200-third-list-1.json"}
"""A part of a GPU's name -> the probed rates by which rows that name none are forecast."""
LEVEL = 0.8
HOST_DECIDES = 1.25
"""Times as long as its device's part that a step takes at least where its host decides it."""
SAME_BYTES = 0.02
"""How far a plan's predicted memory may lie from a row's for it to be the same plan."""
RECORDED_ON_CPU = 0.0155, 0.06 + math.log(1.5)
"""The half-width, in the logarithm, of a gain on a CPU as rows of 19a0850 have it: at least, and
for each time the work that moves."""
HALF = ("bf16", "fp16")
NO_GAIN = 0.01
"""A gain below this is no measure of an error."""


@dataclass(frozen=True)
class Side:
    """Hold what is predicted of a plan, and what its host launches in a step."""

    prediction: Prediction
    launched: Launches
    graph_s: float
    """Seconds of the host for one replay of a graph."""

    def usual(self, eager_s: float, compiled_s: float) -> Prediction:
        """Return the prediction with other seconds for what is launched."""
        usual_s = self.launched.usual_s(eager_s, compiled_s) + self.launched.graphs * self.graph_s
        time = replace(self.prediction.time, usual_launches_s=usual_s)
        return replace(self.prediction, time=time)

    def host_decides(self, step_s: float) -> bool:
        """Return whether a step is so long that its device waited for launches."""
        return step_s - EDGE_S > HOST_DECIDES * self.prediction.time.device_s

    def launches_s(self, step_s: float) -> float:
        """Return the seconds that the launches of a measured step took that its host decides."""
        return step_s - EDGE_S - REST * HOST_S - self.launched.graphs * self.graph_s


@dataclass(frozen=True)
class Change:
    """Hold a measured change of a run.

    Args:
        words: the change.
        before_s, after_s: seconds of a step without and with it, in alternation.
        gain: the measured gain.
        first: whether it is the doctor's first remedy.
        named: whether it is a remedy that a reader was shown with a forecast.
        after: the changed plan's side; None where no time of it is predicted.
    """

    words: tuple[str, ...]
    before_s: float
    after_s: float
    gain: float
    first: bool
    named: bool
    after: Side | None


@dataclass(frozen=True)
class NaturalRun:
    """Hold a natural run: what its doctor knew, and what was measured.

    Args:
        workload, hardware: as its row has them.
        measured: what the doctor knew of the run.
        before: its plan's side.
        changes: those that ran.
    """

    workload: str
    hardware: str
    measured: MeasuredRun
    before: Side
    changes: tuple[Change, ...]

    @property
    def on_cpu(self) -> bool:
        """Return whether its host is its device."""
        return self.before.prediction.rates.basis == "on_cpu"


@dataclass(frozen=True)
class Constants:
    """Hold what is fitted: `usual_launch` in seconds, `host_drift` and `host_spread`."""

    eager_s: float
    compiled_s: float
    hosts: Hosts


@dataclass(frozen=True)
class Score:
    """Hold a forecast beside what came: whether its interval holds it, and the gain's error."""

    hardware: str
    first: bool
    named: bool
    inside: bool
    error: float

    @staticmethod
    def of(
        hardware: str, first: bool, forecast: Interval, came: float, *, named: bool = True
    ) -> "Score":
        """Compare a forecast with the measured gain."""
        error = abs(forecast.value - came) / max(abs(came), NO_GAIN)
        return Score(hardware, first, named, forecast.low <= came <= forecast.high, error)


# --- rows ------------------------------------------------------------------------------------


def natural_runs(results: Path) -> list[NaturalRun]:
    """Return the natural runs whose rates are known and whose plan is what their row says."""
    answers = {
        (row["id"], row["hardware"]): row for row in standing("natural_said", results, full=False)
    }
    known, runs = {run.id: run for run in RUNS}, list[NaturalRun]()
    for row in standing("natural", results, full=False):
        answer = answers.get((row["id"], row["hardware"]))
        if answer is None or row["id"] not in known:
            continue
        if (file := _rates_of(answer)) is None:
            continue
        asking = _asking(known[row["id"]].plan, results / "machines" / file)
        before = side(asking)
        if before is None or not _same(asking, answer):
            continue
        first = tuple(answer["first"]["change"]) if answer["first"] else None
        named = {tuple(one["change"]) for one in answer["remedies"] if one["gain"] is not None}
        changes = tuple(_changes(asking, row["measured"], first, named))
        knew = _measured(answer)
        runs.append(NaturalRun(row["workload"], row["hardware"], knew, before, changes))
    return runs


def _changes(
    asking: Asking,
    rows: Sequence[dict[str, Any]],
    first: tuple[str, ...] | None,
    named: Collection[tuple[str, ...]],
) -> Iterator[Change]:
    for row in rows:
        if "gain" in row:
            words = tuple(row["change"])
            came, after = row["gain"]["value"], side(asking, words)
            spent_s = row["before_s"], row["after_s"]
            yield Change(words, *spent_s, came, words == first, words in named, after)


def _rates_of(answer: dict[str, Any]) -> str | None:
    """Return the file of the rates that a row's doctor had, or of such a device's."""
    known = (file for name, file in MACHINES.items() if name in answer["hardware"])
    return answer.get("machine") or next(known, None)


def _measured(answer: dict[str, Any]) -> MeasuredRun:
    """Return what the doctor knew of a run; older rows say it by their verdict and findings."""
    if "knew" in answer:
        return MeasuredRun(**answer["knew"])
    waits = sum(share for name, share in answer["findings"] if name in ("input", "interconnect"))
    step_s = answer["step_s"]
    return MeasuredRun(step_s, step_s * waits, by_host=answer["verdict"] == "launch")


def _asking(plan: Plan, rates: Path) -> Asking:
    machine = Machine.read(rates)
    here = make_context(plan, torch.device("cpu"))
    place = here if machine.kind == "cpu" else elsewhere(here, machine.name)
    return Asking(plan, place, machine, catalogue())


def _same(asking: Asking, answer: dict[str, Any]) -> bool:
    """Return whether a changed plan takes the memory that a row says, so that it is the same."""
    for words, peak in zip(answer["changes"], answer["peaks"], strict=True):
        if (one := side(asking, tuple(words))) is not None:
            return abs(one.prediction.memory.peak_bytes / peak - 1) <= SAME_BYTES
    return False


def side(asking: Asking, words: tuple[str, ...] = ()) -> Side | None:
    """Return what is predicted of a plan with a change; None where no time is."""
    try:
        one = asking.answer(asking.start, words)
        ledger = make_ledger(one.plan, at(asking.context, one.plan))
    except HeadraceError:
        return None
    if one.prediction.time.step_s is None:
        return None
    launched = launches(ledger.work, ledger.sizes["micro_batches"])
    return Side(one.prediction, launched, asking.machine.graph_launch_s)


# --- the fit ---------------------------------------------------------------------------------


def fit(runs: Sequence[NaturalRun]) -> Constants:
    """Return the constants by these runs."""
    steps = [one for run in runs for one in host_steps(run)]
    eager_s = median(
        (spent_s - one.launched.usual_s(0.0, 0.0)) / one.launched.eager
        for one, spent_s in steps
        if not one.launched.compiled
    )
    compiled_s = median(
        max(0.0, spent_s - one.launched.usual_s(eager_s, 0.0)) / one.launched.compiled
        for one, spent_s in steps
        if one.launched.compiled
    )
    paces = [
        spent_s / one.launched.usual_s(eager_s, compiled_s) for one, spent_s in steps if spent_s > 0
    ]
    drifts = [
        run.changes[0].before_s / run.measured.step_s
        for run in runs
        if run.measured.by_host and run.changes and run.measured.step_s
    ]
    return Constants(eager_s, compiled_s, Hosts(factor(drifts), factor(paces)))


def host_steps(run: NaturalRun) -> Iterator[tuple[Side, float]]:
    """Yield each plan whose measured step its host decides, with the seconds of its launches."""
    for change in run.changes:
        for one, step_s in ((run.before, change.before_s), (change.after, change.after_s)):
            if one is None or one.launched.graphs or not one.host_decides(step_s):
                continue
            yield one, one.launches_s(step_s)


def factor(ratios: Sequence[float]) -> float:
    """Return the factor within which `LEVEL` of ratios lie, as if one more lay outside."""
    sizes = sorted(abs(math.log(ratio)) for ratio in ratios)
    return math.exp(sizes[min(len(sizes), math.ceil(LEVEL * (len(sizes) + 1))) - 1])


def wider_steps(runs: Sequence[NaturalRun]) -> dict[str, tuple[float, int]]:
    """Return by device how much farther out the ends of its steps lie, and the number of steps.

    The steps are those that the device decides, one a run. An H200's are those of its own width.
    """
    ratios: dict[str, list[float]] = {}
    for run in runs:
        step_s = run.before.prediction.time.step_s
        if not run.measured.by_host and run.measured.step_s and step_s:
            ratios.setdefault(run.hardware, []).append(run.measured.step_s / step_s)
    own = STEP["after_probes"]
    by_device = {}
    for hardware, those in ratios.items():
        beyond = sorted(max(ratio / own.high, own.low / ratio) for ratio in those)
        last = min(len(beyond), math.ceil(LEVEL * (len(beyond) + 1))) - 1
        by_device[hardware] = (max(1.0, beyond[last]), len(those))
    return by_device


# --- the score -------------------------------------------------------------------------------


def forecast(run: NaturalRun, change: Change, constants: Constants) -> Interval | None:
    """Return the gain that today's code forecasts of a change, by these constants."""
    if change.after is None:
        return None
    launch = constants.eager_s, constants.compiled_s
    sides = run.before.usual(*launch), change.after.usual(*launch)
    return by_ledger(*sides, run.measured, constants.hosts).gain


def scores(runs: Sequence[NaturalRun], constants: Constants) -> Iterator[Score]:
    """Yield the score of each forecast that was measured."""
    for run in runs:
        for change in run.changes:
            known = forecast(run, change, constants)
            if known is not None and abs(known.value) > NOTHING:
                place = run.hardware, change.first
                yield Score.of(*place, known, change.gain, named=change.named)


def left_out(runs: Sequence[NaturalRun]) -> list[Score]:
    """Return the scores of each workload by constants that are fitted to the others."""
    scored = list[Score]()
    for workload in dict.fromkeys(run.workload for run in runs):
        rest = [run for run in runs if run.workload != workload]
        scored += scores([run for run in runs if run.workload == workload], fit(rest))
    return scored


# --- a CPU -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuPair:
    """Hold a recorded forecast of a CPU: the work that moves, and what it was off, as logarithms.

    Args:
        workload, hardware: as its row has them.
        predicted: the logarithm of its ratio.
        size: the work that moves.
        came: the measured gain.
        first: whether it is the first remedy.
        half: whether the change is to bf16, and its doctor had no steps in bf16.
    """

    workload: str
    hardware: str
    predicted: float
    size: float
    came: float
    first: bool
    half: bool = False

    def score(self, widened: float) -> Score:
        """Return the score of an interval by rates that may be so far off."""
        half = ERROR.least + (ERROR.share + math.log(widened)) * self.size
        low, value, high = (math.expm1(self.predicted + sign * half) for sign in (-1, 0, 1))
        return Score.of(
            self.hardware, self.first, Interval(low, value, high, 0), math.expm1(self.came)
        )


def replayed_pairs(runs: Sequence[NaturalRun], constants: Constants) -> Iterator[CpuPair]:
    """Yield what today's code forecasts of changes of runs on CPUs."""
    for run in runs:
        for change in run.changes:
            known = forecast(run, change, constants)
            if known is not None and change.after is not None and abs(known.value) > NOTHING:
                predicted, came = math.log1p(known.value), math.log1p(change.gain)
                work = moved(run.before.prediction, change.after.prediction)
                size = max(abs(predicted), work)
                yield CpuPair(run.workload, run.hardware, predicted, size, came, change.first)


def recorded_pairs(results: Path) -> list[CpuPair]:
    """Return the recorded forecasts of CPUs whose rows name no rates."""
    answers = {
        (row["id"], row["hardware"]): row for row in standing("natural_said", results, full=False)
    }
    pairs = list[CpuPair]()
    for row in standing("natural", results, full=False):
        answer = answers.get((row["id"], row["hardware"]))
        if row["device"] != "cpu" or answer is None or "machine" in answer:
            continue
        came = {tuple(one["change"]): one["gain"] for one in row["measured"] if "gain" in one}
        for one in answer["remedies"]:
            words = tuple(one["change"])
            if one["gain"] is None or words not in came:
                continue
            predicted, high = (math.log1p(one["gain"][end]) for end in ("value", "high"))
            size = (high - predicted - RECORDED_ON_CPU[0]) / RECORDED_ON_CPU[1]
            first = bool(answer["first"]) and one == answer["first"]
            half = any(name in word for word in words for name in HALF)
            gain = math.log1p(came[words]["value"])
            place = row["workload"], row["hardware"]
            pairs.append(CpuPair(*place, predicted, size, gain, first, half))
    return pairs


def fit_cpu(pairs: Sequence[CpuPair]) -> float:
    """Return how far off a CPU's rates are, so that `LEVEL` of gains lie inside."""
    shares = [
        max(0.0, (abs(one.came - one.predicted) - ERROR.least) / one.size - ERROR.share)
        for one in pairs
        if not one.half
    ]
    return factor([math.exp(share) for share in shares])


def cpu_left_out(pairs: Sequence[CpuPair]) -> list[Score]:
    """Return the scores of each workload by a factor that is fitted to the others."""
    scored = list[Score]()
    for workload in dict.fromkeys(one.workload for one in pairs):
        widened = fit_cpu([one for one in pairs if one.workload != workload])
        own = [one for one in pairs if one.workload == workload and not one.half]
        scored += [one.score(widened) for one in own]
    return scored


# --- the program -----------------------------------------------------------------------------


def show(title: str, scored: Sequence[Score]) -> None:
    """Print the share inside and the median error of each device, of fewer and of more changes."""
    print(title)
    for hardware in dict.fromkeys(one.hardware for one in scored):
        for words, those in (
            ("first remedies", [s for s in scored if s.hardware == hardware and s.first]),
            ("all that were shown", [s for s in scored if s.hardware == hardware and s.named]),
            ("all that were measured", [s for s in scored if s.hardware == hardware]),
        ):
            if those:
                inside = fmean(one.inside for one in those)
                error = median(one.error for one in those)
                print(f"  {hardware}, {words}: {inside:.0%} of {len(those)}, error {error:.1%}")


def write(scored: Sequence[Score], results: Path) -> None:
    """Append a row for each device: how right forecasts of first remedies are, made again."""
    for hardware in dict.fromkeys(one.hardware for one in scored):
        firsts = [one for one in scored if one.first and one.hardware == hardware]
        if not firsts:
            continue
        metrics = {
            "coverage": receipts.spread([fmean(one.inside for one in firsts)], "of 1"),
            "median_error": receipts.spread([median(one.error for one in firsts)], "of the gain"),
        }
        receipts.append("natural_again", metrics, results=results, of=hardware, n=len(firsts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="folder of receipts")
    args = parser.parse_args()
    results = ROOT / "results"
    every = natural_runs(results)
    runs = [run for run in every if not run.on_cpu]
    known = fit(runs)
    pairs = [
        *recorded_pairs(results),
        *replayed_pairs([run for run in every if run.on_cpu], known),
    ]
    steps = [one for run in runs for one in host_steps(run)]
    print(f"usual_launch: [{known.eager_s:.3g}, {known.compiled_s:.3g}] s")
    print(f"host_drift: {known.hosts.drift:.3g}, host_spread: {known.hosts.spread:.3g}")
    print(f"  by {len(steps)} steps that a host decides, of {len(runs)} runs")
    for hardware, (times, n) in wider_steps(runs).items():
        print(f"wider_natural of {hardware}: {times:.3g}, by {n} steps")
    print(f"gain_on_cpu: {fit_cpu(pairs):.3g}, by {sum(not one.half for one in pairs)} gains")
    forecasts = left_out(runs)
    show("forecasts of workloads that are left out:", forecasts)
    if args.write:
        write(forecasts, args.write)
    show("the same on CPUs, where steps in bf16 were probed:", cpu_left_out(pairs))


if __name__ == "__main__":
    main()
