"""Measure whether the tuner's judge rejects exact changes, and accepts changes that learn worse.

    taskset -c 0-15 python benchmarks/tuner_trials.py --minutes 9 --part 1/6
    taskset -c 0-1 python benchmarks/tuner_trials.py --device cpu --shapes demo 1m --minutes 30

A trial is one change of a plan that learns the same: a technique or a knob alone, or a whole plan
that the sweep ranks high. It goes through the tuner's own pair and judge (`tuner/running.py`), and
its row records its verdict, and whether it was rejected for its loss or gradients. An exact
change never should be. Then what is approximate and was kept is trained beside the plan without it,
with the same seeds and rows, and a second row of the trial has how many nats it loses: the mean of
the last tenth of the steps.

What has a row of the same plans on the same hardware is not tried again, and readings are kept in
`--folder`, so a call that was cut off goes on. Several calls or GPUs take a part each; a part is
found from the shapes and bases alone. A pair that a whole limit was too short for has a row too,
which counts for nothing.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import parts
import receipts
import torch
from scoring.numbers import LOSER_NATS, LOSER_STEPS

from headrace.assemble.context import choose_device, make_context
from headrace.cli.catalogue import catalogue
from headrace.cli.plans import rates_here
from headrace.core.statistics import NoWorse, no_worse
from headrace.data.ingest import prepare
from headrace.plan.changes import changed, difference
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.tuner.brief_training import train_steps
from headrace.tuner.effects import effect_of
from headrace.tuner.equality import BATCHES
from headrace.tuner.judge import Compared, Rules, TrialVerdict
from headrace.tuner.pairs import measure_with
from headrace.tuner.pool import Pool
from headrace.tuner.proposals import Proposal, Sources, sources
from headrace.tuner.running import LONGEST, Tuning
from headrace.tuner.store import Store, fingerprint, here
from headrace.tuner.worker import Worker

TOPIC = "tuner_trials"
RECIPES = receipts.ROOT / "headrace" / "recipes"
PLANS = receipts.PLANS
LEARNS = "goal.steps=1000 optimizer.lr=1e-3 schedule.warmup_steps=50"
SHAPES: dict[str, tuple[Path, str]] = {
    "demo": (RECIPES / "demo.toml", ""),
    "small": (PLANS / "small.toml", ""),
    "1m": (PLANS / "tiny.toml", ""),
    "60m": (PLANS / "60m.toml", f"batch.tokens=16384 {LEARNS}"),
    "160m": (PLANS / "160m.toml", f"batch.tokens=16384 {LEARNS}"),
}
"""Maps a shape to its plan and changes of it: batches so small that 1,000 steps end in time."""
ON_CPU = ("demo", "1m")
"""Shapes whose trials a CPU can take."""
BASES = {"eager": "", "compiled": "+torch_compile", "fp32": "model.precision=fp32"}
"""Maps the name of a base to the changes that a shape's plan without techniques gets."""
WHOLES = 3
"""Whole plans of the sweep that are tried, of each kind; the rest differ from them in a knob."""
FEWER_ROWS = 4
"""The divisor of the base's micro-batch below which one only takes longer, and is not tried."""
LIMIT_S = 150.0
"""Seconds that one pair may take, with building and compiling."""
SEEDS = {"60m": 1, "160m": 1}
"""Trainings of an accepted plan and of its base, by shape. Other shapes have `MORE_SEEDS`, since
their last losses are of fewer tokens."""
MORE_SEEDS = 2
READY_S = 60.0
"""Seconds to allow for building and compiling a plan that is trained."""
BECAME: dict[TrialVerdict, str] = {
    "better": "kept",
    "worse": "lost",
    "undecided": "lost",
    "not shown": "not shown",
    "different": "rejected",
    "cut": "cut",
    "refused": "refused",
}
"""Maps the judge's verdict to the word that a row has for it."""


@dataclass(frozen=True)
class Start:
    """Hold a plan of which changes are tried.

    Args:
        shape, base: the names of its shape and base.
        plan: the plan of both.
        context: where it runs.
        sources: where its changes come from, as `tune` asks for them.
    """

    shape: str
    base: str
    plan: Plan
    context: Context
    sources: Sources


@dataclass(frozen=True)
class Trial:
    """Describe a change of a start.

    Args:
        start: the plan that it changes.
        first: the start as a proposal.
        second: the plan with the change.
    """

    start: Start
    first: Proposal
    second: Proposal

    @property
    def change(self) -> tuple[str, ...]:
        """Return the change in words."""
        return difference(self.first.plan, self.second.plan)

    @property
    def name(self) -> str:
        """Return the name for a reader."""
        return f"{self.start.shape} {self.start.base}: {' '.join(self.change)}"


# --- what is tried ---------------------------------------------------------------------------


def start_of(shape: str, base: str, args: argparse.Namespace) -> Start:
    """Return a shape's plan without its techniques on the device that is asked for."""
    known = catalogue()
    path, words = SHAPES[shape]
    recipe = Plan.read(path.read_text(), known)
    bare = [f"-{name}" for name in recipe.techniques if f"+{name}" not in BASES[base]]
    added = [w for w in BASES[base].split() if w[1:] not in recipe.techniques]
    where = [f"device={args.device}", f"data.directory={args.folder / 'data'}"]
    plan = changed(recipe, [*bare, *added, *words.split(), *where, *args.set], known)
    device = choose_device(plan)
    context = make_context(plan, device)
    return Start(shape, base, plan, context, sources("time", context, rates_here(device), known))


def trials_of(start: Start) -> list[Trial]:
    """Return the changes that learn the same, each once, whole plans first."""
    first, wholes = start.sources.whole(start.plan)
    rows = start.plan.micro_rows
    trials: dict[str, Trial] = {}
    of_kind = {"exact": 0, "approximate": 0}
    for proposal in [*wholes, *start.sources.single(start.plan)]:
        kind = effect_of(start.plan, proposal.plan)
        fewer = proposal.plan.micro_rows * FEWER_ROWS < rows
        if kind == "learning" or proposal.prediction.memory.fits == "no" or fewer:
            continue
        trial = Trial(start, first, proposal)
        several = len(trial.change) - sum(w.startswith("techniques.") for w in trial.change) > 2
        of_kind[kind] += several
        if not several or of_kind[kind] <= WHOLES:
            trials.setdefault(fingerprint(proposal.plan), trial)
    return list(trials.values())


def mine(trials: list[Trial], which: tuple[int, int]) -> list[Trial]:
    """Return the trials of a part, including those that were tried already."""
    taken = parts.share({trial.name: 1.0 for trial in trials}, which)
    return [trial for trial in trials if trial.name in taken]


# --- trying ----------------------------------------------------------------------------------


class Bench:
    """Try changes, and train those that were accepted, until the time is up."""

    def __init__(self, args: argparse.Namespace, worker: Worker) -> None:
        self.args, self.worker = args, worker
        self.ends_s = time.monotonic() + 60 * args.minutes
        args.folder.mkdir(parents=True, exist_ok=True)

    @property
    def left_s(self) -> float:
        """Return the seconds that are left of the call."""
        return self.ends_s - time.monotonic()

    def run(self) -> None:
        """Run the trials of every start, then the trainings of accepted changes."""
        starts = [(s, b) for b in self.args.bases for s in self.args.shapes]
        tried: list[Trial] = []
        for shape, base in starts:
            if self.left_s <= 0:
                print(f"left: {shape} {base}", flush=True)
                continue
            start = start_of(shape, base, self.args)
            prepare(start.plan)
            tried += self.trials(start)
        if self.args.train_steps:
            for trial in tried:
                self.train(trial)

    def trials(self, start: Start) -> list[Trial]:
        """Try the trials of this part without a row, print what is left, and return all of them."""
        known, limit_s = self.known(), self.args.limit_s
        trials, waiting = mine(trials_of(start), self.args.part), list[Trial]()
        trials = [trial for trial in trials if {*self.args.having} <= {*trial.change}]
        for trial in trials:
            row = known.get(self.key(trial))
            if row is None or (row.get("verdict") == "cut" and row["limit_s"] < limit_s):
                waiting.append(trial)
        name = f"{start.shape} {start.base}"
        print(f"{name}: {len(waiting)} of {len(trials)} trials have no row yet", flush=True)
        while waiting and self.left_s >= min(limit_s, self.args.least_s):
            self.attempt(waiting.pop(0), min(limit_s, self.left_s))
        if waiting:
            print(f"left: {name}: {len(waiting)} trials", flush=True)
        return trials

    def attempt(self, trial: Trial, limit_s: float) -> None:
        """Measure and judge one pair as `tune` does, and write its row."""
        start, began_s = trial.start, time.monotonic()
        rules = Rules(device=start.context.device, precision=start.context.precision)
        measure = measure_with(self.worker)
        store = Store(None, here(choose_device(start.plan)))
        run = Tuning(
            start.plan, rules, limit_s / LONGEST / 60, measure, store, _nobody, time.monotonic
        )
        run.start, run.pool = trial.first, Pool(start.plan, trial.first)
        compared = run.pair(trial.first, trial.second, screen=True)
        spent_s = time.monotonic() - began_s
        if compared.verdict == "cut" and limit_s < self.args.limit_s:
            print(f"left: {trial.name}: {compared.reason}", flush=True)
            return
        self.append(trial, compared, spent_s)

    def append(self, trial: Trial, compared: Compared, spent_s: float) -> None:
        """Write the row of a trial."""
        verdict = BECAME[compared.verdict]
        facts = self.facts(trial) | {
            "verdict": verdict,
            "for_loss": compared.verdict == "different",
            "reason": compared.reason,
            "ratio": asdict(compared.ratio) if compared.ratio else None,
            "nats": None,
            "steps": 0,
            "timed": compared.steps,
            "loss_difference": compared.loss,
            "loss_noise": compared.noise,
            "before_s": compared.before_s,
            "after_s": compared.after_s,
            "seconds": spent_s,
            "limit_s": self.args.limit_s,
        }
        if verdict == "refused":
            facts["refused"] = compared.reason
        receipts.append(TOPIC, {}, results=self.args.results, **facts)
        ratio = f"{compared.ratio.value:.3f}x" if compared.ratio else "-"
        print(f"{trial.name}: {verdict}, {ratio} ({spent_s:.0f} s): {compared.reason}", flush=True)

    # --- training what was kept --------------------------------------------------------------

    def train(self, trial: Trial) -> None:
        """Write the second row of an accepted approximate change: the nats that it loses."""
        row = self.known().get(self.key(trial))
        if not row or row.get("verdict") != "kept" or row["equality"] != "approximate":
            return
        if row["steps"] >= self.args.train_steps:
            return
        off, half, began_s = list[float](), list[float](), time.monotonic()
        for seed in range(SEEDS.get(trial.start.shape, MORE_SEEDS)):
            ends = list[list[float]]()
            for plan, step_s in (
                (trial.first.plan, row["before_s"]),
                (trial.second.plan, row["after_s"]),
            ):
                losses, why = self.losses(plan, seed, step_s)
                if why:
                    print(f"left: {trial.name}: training: {why}", flush=True)
                    return
                ends.append(end_of(losses))
            difference = apart(*ends)
            off.append(difference.mean)
            half.append(difference.half)
        facts = {
            key: row[key]
            for key in ("verdict", "for_loss", "reason", "ratio", "before_s", "after_s")
        }
        nats = fmean(off)
        receipts.append(
            TOPIC,
            {},
            results=self.args.results,
            **self.facts(trial),
            **facts,
            nats=nats,
            steps=self.args.train_steps,
            nats_by_seed=off,
            half_by_seed=half,
            seeds=list(range(len(off))),
            seconds=time.monotonic() - began_s,
        )
        print(f"{trial.name}: {nats:+.4f} nats after {self.args.train_steps} steps", flush=True)

    def losses(self, plan: Plan, seed: int, step_s: float | None) -> tuple[list[float], str]:
        """Return the loss of each step of a training, kept or new, or why there is none."""
        steps = self.args.train_steps
        return kept_losses(
            plan.replaced(seed=seed),
            steps,
            self.args.folder / "trainings.jsonl",
            self.worker,
            left_s=self.left_s,
            needed_s=1.3 * steps * (step_s or 0.0) + self.args.ready_s,
        )

    # --- rows --------------------------------------------------------------------------------

    def facts(self, trial: Trial) -> dict[str, Any]:
        """Return the facts that both rows of a trial share."""
        return {
            "workload": trial.start.shape,
            "base": trial.start.base,
            "hardware": hardware(trial.start.context),
            "threads": torch.get_num_threads(),
            "precision": trial.start.context.precision,
            "change": list(trial.change),
            "equality": effect_of(trial.first.plan, trial.second.plan),
            "baseline_sha256": fingerprint(trial.first.plan),
            "plan_sha256": fingerprint(trial.second.plan),
        }

    def key(self, trial: Trial) -> tuple[str, ...]:
        """Return the key of a trial."""
        return _key(self.facts(trial))

    def known(self) -> dict[tuple[str, ...], dict[str, Any]]:
        """Return the newest row of each trial that no row retracts."""
        return {_key(row): row for row in _rows(self.args.results)}


def kept_losses(
    plan: Plan, steps: int, file: Path, worker: Worker, *, left_s: float, needed_s: float
) -> tuple[list[float], str]:
    """Return the loss of each step of a training, kept in a file or new, or why there is none.

    Args:
        plan: what to train.
        steps: of the training.
        file: keeps trainings from one call to the next.
        worker: trains.
        left_s: seconds that are left of the call.
        needed_s: seconds that a new training needs; with fewer none begins.
    """
    store = Store(file, here(choose_device(plan)))
    what = {"train": fingerprint(plan), "steps": steps}
    known = json.dumps([what, store.place], sort_keys=True) in store.readings
    if not known and left_s < needed_s:
        return [], f"about {needed_s:.0f} s are needed, {max(0.0, left_s):.0f} s are left"
    limit_s = max(left_s, 0.0)
    trained = store.once(
        what,
        lambda: worker.ask(train_steps, plan, steps=steps, limit_s=limit_s),
        limit_s=limit_s,
    )
    broken = "" if all(map(math.isfinite, trained.losses)) else "a loss is not finite"
    return trained.losses, trained.refused or broken


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    values = (row[k] for k in ("workload", "base", "hardware"))
    return (*values, " ".join(row["change"]))


def _rows(results: Path) -> Iterator[dict[str, Any]]:
    file = results / f"{TOPIC}.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    gone = {row.get("retracts") for row in rows}
    yield from (row for n, row in enumerate(rows, 1) if n not in gone and "change" in row)


def hardware(context: Context) -> str:
    """Return the device that a plan runs on, as rows name it."""
    return receipts.hardware() if context.device == "cuda" else receipts.processor()


def end_of(losses: list[float]) -> list[float]:
    """Return the losses of the last tenth, or as many as a test of them takes."""
    return losses[-max(BATCHES, len(losses) // 10) :]


def apart(one: list[float], two: list[float]) -> NoWorse:
    """Return the extra loss of the second run on the same batches, and half of its interval."""
    return no_worse([b - a for a, b in zip(one, two, strict=True)], LOSER_NATS, batches=BATCHES)


def _nobody(line: str) -> None:
    """Discard a line."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    accepted = argparse.ArgumentParser(description=__doc__)
    accepted.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    accepted.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), help="all that fit the device"
    )
    accepted.add_argument("--bases", nargs="+", choices=list(BASES), default=["eager"])
    accepted.add_argument("--minutes", type=float, default=9.0, help="of all; nothing begins later")
    accepted.add_argument(
        "--part", type=parts.part, default=(1, 1), help="K/N of each list of trials"
    )
    accepted.add_argument(
        "--having", nargs="*", default=[], help="only changes that have these words, as +tf32"
    )
    accepted.add_argument("--limit-s", type=float, default=LIMIT_S, help="of one pair")
    accepted.add_argument(
        "--least-s", type=float, default=45.0, help="no pair begins with less left"
    )
    accepted.add_argument(
        "--train-steps", type=int, default=LOSER_STEPS, help="of what was kept; 0: none"
    )
    accepted.add_argument(
        "--ready-s", type=float, default=READY_S, help="of a training, to allow for"
    )
    accepted.add_argument("--here", action="store_true", help="no process of its own, to debug")
    accepted.add_argument(
        "--folder",
        type=Path,
        default=Path("runs") / "tuner-trials",
        help="keeps data and trainings from one call to the next",
    )
    accepted.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    accepted.add_argument("--set", nargs="*", default=[], help="changes of every plan, in words")
    accepted.add_argument("--commit", help=receipts.COMMIT_HELP)
    return accepted


def main() -> None:
    args = parser().parse_args()
    receipts.given_commit = args.commit
    args.shapes = args.shapes or list(SHAPES if args.device == "cuda" else ON_CPU)
    args.folder.mkdir(parents=True, exist_ok=True)
    with Worker(here=args.here, log=args.folder / "worker.log") as worker:
        Bench(args, worker).run()


if __name__ == "__main__":
    main()
