"""Measure whether techniques that round otherwise learn the same, over shapes and seeds.

    python benchmarks/equal_learning.py measure --shapes 160m 330m --data NOVELS --minutes 9
    python benchmarks/equal_learning.py write     # headrace/tuner/equal_learning.json, of the rows
    python benchmarks/equal_learning.py write --check

Of each shape a compiled bf16 plan is trained for 1,000 steps with each technique and without it, of
the same seed and rows. A pair has a row in equal_learning.jsonl: by how many nats its last quarter
of the steps is off. Losers have theirs. `write` makes receipts of them, that the tuner's judge
rests on (headrace/tuner/equal_learning.py): the mean over all pairs of a technique, with the upper
end of its one-sided interval of 95% by Student's t over pairs. Trainings are kept in `--folder`, so
that a call which was cut off goes on.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import receipts
from readme_table import read_rows
from scoring.numbers import LOSER_STEPS

from headrace.assemble.context import choose_device, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.files import write_whole
from headrace.core.statistics import no_worse, t_two_sided
from headrace.data.ingest import prepare
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.tuner.brief_training import train_steps
from headrace.tuner.equal_learning import FILE, EqualLearning
from headrace.tuner.equality import BATCHES, NATS
from headrace.tuner.store import Store, fingerprint, here
from headrace.tuner.worker import Worker

TOPIC = "equal_learning"
BASE = "batch.tokens=16384 optimizer.lr=1e-3 schedule.warmup_steps=50"
"""Changes of every shape's plan, beside that nothing rounds otherwise: steps that end in time."""
CHANGES = {
    "float8_linear": "+float8_linear techniques.float8_linear.min_size={dim}",
    "bf16_parameters": "+bf16_parameters techniques.bf16_parameters.rounding=stochastic",
}
"""Technique -> the change that adds it to a plan of so many features."""
KNOBS = {"float8_linear": ("recipe",), "bf16_parameters": ("rounding",)}
"""Technique -> the knobs of which its rounding depends; a receipt holds for their values."""
TAIL = 4
"""A pair is compared over its last steps, one in so many of all."""
READY_S = 60.0
"""Seconds to allow for building and compiling a plan."""


def plan_of(shape: str, seed: int, words: str, args: argparse.Namespace) -> Plan:
    """Return a shape's plan with a seed and changes."""
    known = catalogue()
    plan = Plan.read(receipts.plan_file(shape).read_text(), known)
    dropped = [
        f"-{name}" for name in CHANGES if name in plan.techniques and f"+{name}" not in words
    ]
    data = [f"data.directory={args.folder / 'data'}"]
    if args.data:
        data.append(f"data.sources={json.dumps([str(path) for path in args.data])}")
    goal = [f"goal.steps={args.steps}", f"seed={seed}"]
    added = words.format(dim=plan.model.dim).split()
    added = [word for word in added if word[:1] != "+" or word[1:] not in plan.techniques]
    return changed(plan, [*dropped, *BASE.split(), *data, *goal, *args.set, *added], known)


def measure(args: argparse.Namespace) -> None:
    """Train pairs, one seed of all shapes and techniques after the other, until time is up."""
    ends_s = time.monotonic() + 60 * args.minutes
    args.folder.mkdir(parents=True, exist_ok=True)
    for shape in args.shapes:
        prepare(plan_of(shape, 0, "", args))
    taken = [(s, shape, name) for s in args.seeds for shape in args.shapes for name in args.only]
    with Worker(here=args.here, log=args.folder / "worker.log") as worker:
        for seed, shape, name in taken:
            first, second = (plan_of(shape, seed, w, args) for w in ("", CHANGES[name]))
            trained = [trained_of(plan, args, worker, ends_s) for plan in (first, second)]
            why = next((why for _, why, _ in trained if why), "")
            if why:
                print(f"left: {shape} seed {seed} {name}: {why}", flush=True)
                continue
            write_pair(args, shape, seed, name, (first, second), [t[0] for t in trained])


def trained_of(
    plan: Plan, args: argparse.Namespace, worker: Worker, ends_s: float
) -> tuple[list[float], str, float]:
    """Return the loss of each step of a training, kept or new, or why there is none."""
    store = Store(args.folder / f"trainings-{plan.name}.jsonl", here(choose_device(plan)))
    left_s = ends_s - time.monotonic()
    what = {"train": fingerprint(plan), "steps": args.steps}
    known = json.dumps([what, store.place], sort_keys=True) in store.readings
    if not known and left_s < READY_S:
        return [], f"{max(0.0, left_s):.0f} s are left", 0.0
    reading = store.once(
        what,
        lambda: worker.ask(train_steps, plan, steps=args.steps, limit_s=max(1.0, left_s)),
        limit_s=left_s,
    )
    broken = "" if all(map(math.isfinite, reading.losses)) else "a loss is not finite"
    return reading.losses, reading.refused or broken, ends_s - time.monotonic()


def write_pair(
    args: argparse.Namespace,
    shape: str,
    seed: int,
    name: str,
    plans: tuple[Plan, Plan],
    losses: list[list[float]],
) -> None:
    """Write the row of a pair, and print it."""
    tail = max(BATCHES, len(losses[0]) // TAIL)
    apart = [b - a for a, b in zip(*(side[-tail:] for side in losses), strict=True)]
    test = no_worse(apart, NATS, batches=BATCHES)
    technique: Any = plans[1].techniques[name]
    metrics = {
        "nats": {
            "value": test.mean,
            "low": test.mean - test.half,
            "high": test.mean + test.half,
            "unit": "nats",
        }
    }
    facts = {
        "technique": name,
        "knobs": {knob: getattr(technique, knob) for knob in KNOBS[name]},
        "precision": make_context(plans[1], choose_device(plans[1])).precision,
        "dim": plans[1].model.dim,
        "shape": shape,
        "seeds": [seed],
        "steps": args.steps,
        "tail": tail,
        "loss": fmean(losses[0][-tail:]),
        "baseline_sha256": fingerprint(plans[0]),
        "plan_sha256": fingerprint(plans[1]),
        "n": 1,
    }
    receipts.append(TOPIC, metrics, results=args.results, **facts)
    print(f"{shape} seed {seed} {name}: {test.mean:+.4f} +- {test.half:.4f} nats", flush=True)


# --- receipts --------------------------------------------------------------------------------


def made(rows: Iterable[dict[str, Any]]) -> Iterator[EqualLearning]:
    """Yield a receipt for each technique, its knobs, precision and device, from pairs of them."""
    groups: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for row in rows:
        about = [row[key] for key in ("technique", "knobs", "precision", "hardware", "steps")]
        pair = (row["shape"], row["seeds"][0])
        groups.setdefault(json.dumps(about, sort_keys=True), {})[pair] = row  # the newest stands
    for key in sorted(groups):
        pairs = [*groups[key].values()]
        nats = [row["metrics"]["nats"]["value"] for row in pairs]
        if len(nats) < 2:
            continue
        half = t_two_sided(0.9, len(nats) - 1) * stdev(nats) / math.sqrt(len(nats))
        yield EqualLearning(
            technique=pairs[0]["technique"],
            knobs=pairs[0]["knobs"],
            precision=pairs[0]["precision"],
            least_dim=min(row["dim"] for row in pairs),
            shapes=tuple(sorted({row["shape"] for row in pairs})),
            seeds=len(pairs),
            steps=pairs[0]["steps"],
            nats=fmean(nats),
            high=fmean(nats) + half,
            hardware=pairs[0]["hardware"],
        )


def write(args: argparse.Namespace) -> int:
    """Write the receipts, or say whether the file is behind the rows."""
    rows = read_rows(args.results / f"{TOPIC}.jsonl")
    text = json.dumps([asdict(one) for one in made(rows)], indent=1) + "\n"
    if not args.check:
        write_whole(FILE, text)
        return 0
    if FILE.read_text() == text:
        return 0
    print("equal_learning.json is behind its rows; try: python benchmarks/equal_learning.py write")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "write"))
    parser.add_argument("--shapes", nargs="+", default=["160m", "330m"])
    parser.add_argument("--only", nargs="+", choices=list(CHANGES), default=list(CHANGES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=LOSER_STEPS)
    parser.add_argument("--data", nargs="+", type=Path, help="text; the plans' own without it")
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing begins later")
    parser.add_argument("--folder", type=Path, default=Path("runs") / "equal-learning")
    parser.add_argument("--check", action="store_true", help="write: exit 1 where it is behind")
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--set", nargs="*", default=[], help="changes of every plan, in words")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args()
    receipts.given_commit = args.commit
    if args.what == "write":
        return write(args)
    measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
