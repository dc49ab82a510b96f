"""Measure what reaches 1.54 bits per byte on held-out novels soonest: whole recipes, and parts.

    python benchmarks/learning.py search --data DIR --side adamw --runs 12 --minutes 9
    python benchmarks/learning.py search --data DIR --side ours --runs 12 --minutes 9
    python benchmarks/learning.py search --data DIR --shape "d768 L12 h12 V16384 T1024" \
        --set model.dim=768 model.layers=12 model.heads=12 --start 1 16 0.6 0.8 0.1
    python benchmarks/learning.py final --data DIR
    python benchmarks/learning.py search final --data DIR --side ours adamw --runs 3
    python benchmarks/learning.py techniques --data DIR --minutes 9 [--part 1/3]

DIR holds `train` and `val` of the 100 English novels, as in time_to_quality.py. `search` looks for
the fastest point of a side over learning rate, batch, horizon and schedule: the side's start, then
always an untried neighbour of the best point so far. Both sides get the same number of runs and the
same steps of the search. `final` runs the best of each side with the same seeds, in turn. One call
of both compiles once. `techniques` compares the recipe with itself, one technique or key changed;
where the target is not reached, the changed recipe gets longer horizons, and its own schedule over
them.

Each row is on disk as soon as it was measured, and a call goes on where another was cut off. What
is compiled and evaluated is off the clock; `learning_runs.py` is the clock. The page of the rows is
made by learning_page.py.
"""

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import receipts
from learning_runs import SIDES, Point, Reading, Runs, fingerprint

from headrace.cli.catalogue import catalogue
from headrace.core.errors import HeadraceError
from headrace.core.statistics import order_abba, seeds_error, seeds_ratio

TOPIC = "learning"
LADDERS: dict[str, tuple[float, ...]] = {
    "factor": (0.25, 0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0),
    "rows": (8, 16, 32, 64, 128),
    "epochs": (0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 1.0, 1.2, 1.5, 1.9, 2.4, 3.0),
    "decay": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "final": (0.0, 0.1, 0.2),
}
"""The values that a search may take, in order; the same for both sides."""
PATIENCE = 1.25
"""A run of the search ends where it has taken this many times the best time so far."""
LONGER = (1.0, 1.5, 2.25)
"""Factors of the recipe's horizon that a changed recipe may need to reach the target."""
ROOMS = ("optim", "schedule", "design", "stability")
NEEDS: dict[str, list[str]] = {
    "batch_ramp": ["techniques.batch_ramp.until=100"],
    "cosine": ["-warmup_stable_decay"],
    "inverse_sqrt": ["-warmup_stable_decay"],
    "mup": ["-muon"],
    "schedule_free": ["-warmup_stable_decay"],
    "swiglu": ["-relu_squared"],
}
"""Technique -> what else changes where it is added to the recipe."""
SET: dict[str, list[str]] = {
    "optimizer.lr_factors.embeddings": ["optimizer.lr_factors.embeddings=1.0"],
    "optimizer.betas": ["optimizer.betas=[0.9,0.95]"],
    "optimizer.eps": ["optimizer.eps=1e-8"],
    "techniques.muon.momentum_warmup_steps": ["techniques.muon.momentum_warmup_steps=0"],
    "techniques.muon.weight_decay": ["techniques.muon.weight_decay=0.0"],
    "techniques.muon.normalize_rows": ["techniques.muon.normalize_rows=false"],
    "techniques.muon.cautious_decay": ["techniques.muon.cautious_decay=true"],
    "techniques.muon.head_pairs": ["techniques.muon.head_pairs=true"],
    "techniques.muon.fraction": ["techniques.muon.fraction=0.25"],
}
"""Key of the recipe -> what it is set to instead."""


# --- the search ------------------------------------------------------------------------------


def proposed(start: Point, tried: Sequence[tuple[Point, float]]) -> Point:
    """Return the next point of a search.

    Args:
        start: where it begins.
        tried: every point so far with its score, the lowest of which is the best.
    """
    if not tried:
        return start
    best = min(tried, key=lambda one: one[1])[0]
    known = {point for point, _ in tried}
    order = random.Random(len(tried))
    for reach in range(1, 2 * len(LADDERS)):
        near = [point for point in _neighbours(best, reach) if point not in known]
        if near:
            return order.choice(near)
    raise SystemExit("every point near the best one was tried")


def _neighbours(point: Point, reach: int) -> Iterator[Point]:
    """Yield the points that are `reach` steps away, one or two along each ladder."""
    for moves in product((-2, -1, 0, 1, 2), repeat=len(LADDERS)):
        if sum(map(abs, moves)) != reach:
            continue
        values = {}
        for (name, given), move in zip(LADDERS.items(), moves, strict=True):
            ladder = sorted({*given, getattr(point, name)})
            place = ladder.index(getattr(point, name)) + move
            if 0 <= place < len(ladder):
                values[name] = ladder[place]
        if len(values) == len(LADDERS):
            yield replace(point, **values)


def score(row: dict[str, Any]) -> float:
    """Return what the search lowers: seconds to the target, or more by the bits that miss."""
    metrics = row["metrics"]
    if row["reached"]:
        return metrics["seconds"]["value"]
    loss = metrics["bits_per_byte"]["value"]
    return 1e6 * (1 + loss) if math.isfinite(loss) else math.inf  # it diverged


def searched(args: argparse.Namespace, side: str, runs: Runs) -> list[tuple[Point, float]]:
    """Return the points of a side that the rows hold for this device, with their scores.

    A row of another recipe or text is none: its plan at that point was another.
    """
    rows = [r for r in read(args.results) if r["kind"] == "search" and r["side"] == side]
    rows = [r for r in rows if r["hardware"] == receipts.hardware() and r["shape"] == args.shape]
    points = [(Point(**row["point"]), row) for row in rows]
    return [
        (point, score(row))
        for point, row in points
        if fingerprint(runs.plan(side, point).dump()) == row["plan_sha256"]
    ]


def search(args: argparse.Namespace, runs: Runs) -> None:
    """Try points of each side until it has had its runs, or the minutes are over."""
    for side in args.side:
        while len(tried := searched(args, side, runs)) < args.runs and not args.over():
            point = proposed(args.start.get(side, SIDES[side].start), tried)
            best = min((value for _, value in tried), default=math.inf)
            limit_s = PATIENCE * best if best < 1e6 else math.inf
            reading = runs.run(runs.plan(side, point), limit_s=limit_s)
            write(args, "search", side, [reading], point, index=len(tried))


# --- the best of both sides ------------------------------------------------------------------


def final(args: argparse.Namespace, runs: Runs) -> None:
    """Run the best point of each side with the same seeds, in turn, and compare."""
    points, numbers = {}, {}
    for side, what in SIDES.items():
        tried = searched(args, side, runs)
        points[side] = min(tried, key=lambda one: one[1])[0] if tried else what.start
        numbers[side] = len(tried)
    if len({*numbers.values()}) > 1:
        raise SystemExit(f"the sides had unequal numbers of search runs: {numbers}")
    readings: dict[str, list[Reading]] = {side: [] for side in SIDES}
    names = {"A": "adamw", "B": "ours"}
    for number, name in enumerate(order_abba(-(-args.seeds // 2))[: 2 * args.seeds]):
        plan = runs.plan(names[name], points[names[name]], seed=number // 2)
        readings[names[name]].append(runs.run(plan))
    facts = compare(readings["ours"], readings["adamw"])
    for side, own in readings.items():
        more = facts if side == "ours" else {}
        write(args, "time_to_target", side, own, points[side], searched=numbers[side], **more)


def compare(changed: Sequence[Reading], base: Sequence[Reading]) -> dict[str, Any]:
    """Return how many times as long `base` takes to the target, seed by seed, and the p-value."""
    ours, theirs = ([r.to_target for r in side] for side in (changed, base))
    sooner = seeds_ratio(ours, theirs)
    missed = all(seconds == math.inf for seconds in (*ours, *theirs))
    p = None if len(ours) < 2 or missed else seeds_error(ours, theirs)
    if sooner is None:
        return {"ratio": None, "p": p}
    high = sooner.high if math.isfinite(sooner.high) else None
    ratio = {"value": sooner.value, "low": sooner.low, "high": high, "unit": "ratio"}
    return {"ratio": ratio, "p": p, "pairs": sooner.n}


# --- one technique at a time -----------------------------------------------------------------


def changes(on: Sequence[str]) -> dict[str, tuple[str, list[str]]]:
    """Return technique or key -> how the recipe is changed by it, and the words of the change.

    Args:
        on: the recipe's techniques.
    """
    by_name: dict[str, tuple[str, list[str]]] = {}
    for name, technique in catalogue().techniques.items():
        if technique.room in ROOMS and name in on:
            by_name[name] = ("left out", [f"-{name}"])
        elif technique.room in ROOMS:
            by_name[name] = ("added", [f"+{name}", *NEEDS.get(name, [])])
    return by_name | {key: ("set", words) for key, words in SET.items()}


def techniques(args: argparse.Namespace, runs: Runs) -> None:
    """Compare the recipe with itself, one technique or key changed, and write a row for each."""
    tried = searched(args, "ours", runs)
    point = min(tried, key=lambda one: one[1])[0] if tried else SIDES["ours"].start
    part, parts = map(int, args.part.split("/"))
    on = [*runs.plan("ours", point).techniques]
    every = {name: what for name, what in changes(on).items() if name in (args.only or [name])}
    done = {row["technique"] for row in read(args.results) if _is_same(row, args, point, runs)}
    left = [name for name in [*every][part - 1 :: parts] if name not in done]
    base: list[Reading] = []
    for name in left:
        began, (change, words) = time.perf_counter(), every[name]
        facts: dict[str, Any] = {"technique": name, "change": change, "words": words}
        try:
            runs.plan("ours", point, words=words)
        except HeadraceError as error:
            write(args, "technique", "ours", [], point, refused=error.message, **facts)
            continue
        if not base:
            base = [runs.run(runs.plan("ours", point, seed=s)) for s in range(args.seeds)]
            began = time.perf_counter()
        try:
            readings, longer = changed_runs(args, runs, point, words)
        except (HeadraceError, RuntimeError) as error:  # torch's compiler and memory, too
            lines = str(error).splitlines() or [type(error).__name__]
            write(args, "technique", "ours", [], point, refused=lines[0], **facts)
            continue
        facts |= {"horizon_factor": longer, **compare(readings, base)}
        facts["base_seconds"] = [r.seconds if r.reached else None for r in base]
        write(args, "technique", "ours", readings, point, **facts)
        if args.over(time.perf_counter() - began):
            return


def changed_runs(
    args: argparse.Namespace, runs: Runs, point: Point, words: list[str]
) -> tuple[list[Reading], float]:
    """Return the runs of a changed recipe, and the factor of the horizon with which it succeeds."""
    for longer in args.longer:
        own = replace(point, epochs=point.epochs * longer)
        first = runs.run(runs.plan("ours", own, words=words))
        if first.reached or longer == args.longer[-1]:
            rest = (runs.plan("ours", own, seed=s, words=words) for s in range(1, args.seeds))
            return [first, *map(runs.run, rest)], longer
    raise AssertionError("there is no horizon")


def _is_same(row: dict[str, Any], args: argparse.Namespace, point: Point, runs: Runs) -> bool:
    """Return whether a row measured a change of this recipe on this device."""
    if row["kind"] != "technique" or Point(**row["point"]) != point:
        return False
    if (row["hardware"], row["shape"]) != (receipts.hardware(), args.shape):
        return False
    if "refused" in row:
        return True
    longer = replace(point, epochs=point.epochs * row["horizon_factor"])
    with suppress(HeadraceError):  # this recipe cannot be changed so
        plan = runs.plan("ours", longer, words=row["words"])
        return row["n"] >= args.seeds and fingerprint(plan.dump()) == row["plan_sha256"]
    return False


# --- rows ------------------------------------------------------------------------------------


def read(results: Path) -> list[dict[str, Any]]:
    """Return the rows of the topic, the oldest first."""
    file = results / f"{TOPIC}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def write(
    args: argparse.Namespace,
    kind: str,
    side: str,
    readings: Sequence[Reading],
    point: Point,
    **facts: Any,
) -> None:
    """Write one row of runs that differ in their seed alone, and print it in short."""
    metrics: dict[str, Any] = {}
    if readings:
        speeds = [r.tokens / r.seconds for r in readings]
        metrics = {
            "seconds": receipts.spread([r.seconds for r in readings], "s"),
            "bits_per_byte": receipts.spread([r.bits_per_byte for r in readings], "bits/byte"),
            "tokens": receipts.spread([r.tokens for r in readings], "tokens"),
            "tokens_per_s": receipts.spread(speeds, "tokens/s"),
            "apart_s": receipts.spread([r.apart_s for r in readings], "s"),
        }
        facts |= {
            "techniques": readings[0].techniques,
            "plan_sha256": readings[0].fingerprint,
            "curve": readings[0].curve,
        }
    if (ratio := facts.pop("ratio", None)) is not None:
        metrics["ratio"] = ratio
    reached = [r.reached for r in readings]
    receipts.append(
        TOPIC,
        metrics,
        results=args.results,
        kind=kind,
        side=side,
        shape=args.shape,
        target_bits_per_byte=args.target,
        point=asdict(point),
        reached=reached[0] if kind == "search" else reached,
        seconds=[r.seconds if r.reached else None for r in readings],
        seeds=[r.plan["seed"] for r in readings],
        n=len(readings),
        **facts,
    )
    shown = {k: round(m["value"], 4) for k, m in metrics.items()}
    name = facts.get("technique", side)
    print(json.dumps({kind: name, **asdict(point), "reached": reached, **shown}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=["search", "final", "techniques"])
    parser.add_argument("--data", type=Path, required=True, help="folder with train and val")
    parser.add_argument(
        "--side", nargs="+", choices=[*SIDES], default=["ours"], help="of search, in this order"
    )
    parser.add_argument("--runs", type=int, default=12, help="of a side's search")
    parser.add_argument(
        "--start",
        type=float,
        nargs=5,
        action="append",
        default=[],
        metavar=("FACTOR", "ROWS", "EPOCHS", "DECAY", "FINAL"),
        help="where a search of another shape begins; once for each side, in their order",
    )
    parser.add_argument("--seeds", type=int, help="5 of final, 3 of techniques")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after them")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th technique from the K-th")
    parser.add_argument("--only", nargs="*", help="these techniques and keys alone")
    parser.add_argument("--longer", type=float, nargs="*", default=[*LONGER])
    parser.add_argument("--shape", default="d512 L8 h8 V16384 T1024")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of every plan")
    parser.add_argument("--without", nargs="*", default=[], help="techniques that no plan has")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--work", type=Path, help="keep shards here")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args()
    receipts.given_commit = args.commit
    if args.start and len(args.start) != len(args.side):
        parser.error(f"--start is given {len(args.start)} times, for {len(args.side)} sides")
    points = (Point(factor, int(rows), *rest) for factor, rows, *rest in args.start)
    args.start = dict(zip(args.side, points, strict=False))
    ends = time.perf_counter() + 60 * args.minutes
    args.over = lambda more_s=0.0: time.perf_counter() + more_s > ends
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(args.data, args.work or Path(scratch), args.set, args.without)
        args.target = runs.plan("ours", SIDES["ours"].start).goal.bits_per_byte
        given = args.seeds
        for what in args.what:
            args.seeds = given or (5 if what == "final" else 3)
            {"search": search, "final": final, "techniques": techniques}[what](args, runs)


if __name__ == "__main__":
    main()
