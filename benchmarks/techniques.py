"""Measure what each technique gains and costs at a shape: step time, peak memory, and loss.

    python benchmarks/techniques.py fused_swiglu selective_checkpoint --shapes 160m 1b
    python benchmarks/techniques.py --all memory loss --shapes 160m --missing results --limit-s 500

A technique is measured twice: added to the eager baseline, and put into (or left out of, or put in
the place of another in) the compiled recipe that `plans/` has for the shape. Sides go in groups,
and the base is timed before and after each group: the ratios of a row are to those two, or to the
one that could be read (n = 1). A reading is a fresh build on real text, with the median step of
each of two blocks; the peaks, allocated and reserved, are those of the steps. A row names what its
base's attention launches. With `--loss-steps` a side that was added to the baseline, or left out of
the recipe, also trains from the same seed on batches of `--loss-rows` sequences, by a schedule of
equal length. Its row has the mean loss of the last tenth, the base's, how far they are apart, and
how far the base's own is from it with another seed, of weights and rows: a smaller difference may
be noise. `--only-loss` times nothing, and its rows have no speed.

A technique that only acts beside another has that one in its base too:

    python benchmarks/techniques.py cudnn_autotune --base-with short_convolution
    python benchmarks/techniques.py tf32 --bases recipe --set model.precision=fp32 \
        --base-without cudnn_attention bf16_parameters

What acts only where a run begins, as where rows grow and every length is compiled, has no steady
steps: `--whole-run N` takes the seconds of the first N steps, with a compiler's empty caches.

    python benchmarks/techniques.py shape_buckets:multiple=256 --whole-run 50 --bases recipe \
        --base-with sequence_length_schedule --set techniques.sequence_length_schedule.until=40

What cannot run gets a row with the reason, at no device time. Readings are taken in a process of
their own, which is replaced when a side fails in it. No side begins after `--limit-s`; those that
are left are named, and `--missing FOLDER` goes on with what has no row at this commit.
`--set techniques.torch_compile.scope=block` compiles one block and reuses it for all.
"""

import argparse
import json
import math
import time
from pathlib import Path
from statistics import mean
from typing import Any

import receipts
from sides import ATTENTION, GRAPHS, Side, attention_of, brief_plan, run_whole, sides

from headrace.cli.catalogue import catalogue
from headrace.tuner.brief_training import train_steps
from headrace.tuner.readings import Reading, time_steps
from headrace.tuner.worker import Worker

BASES = ("trunk", "recipe")
GROUP = 8
"""Sides between two timings of their base."""
TRANSIENT = ("not done within", "its process died", "its base cannot")
"""Beginnings of reasons that another call may not meet; `--missing` measures such a side again."""
LOSS_ROWS = {"160m": 4}
"""Maps a shape to the sequences of a batch for the loss; others have 1."""
SIDE_LIMIT_S = 240.0


class Bench:
    """Measure the sides of one base at one shape, and write their rows."""

    def __init__(
        self,
        shape: str,
        base: str,
        compared: list[Side],
        args: argparse.Namespace,
        worker: Worker,
        ends_s: float,
    ) -> None:
        self.shape, self.base, self.args = shape, base, args
        self.first, self.others = compared[0], compared[1:]
        self.worker, self.ends_s = worker, ends_s
        self.attention = ""
        self.noise: list[Side] = []
        """The base, trained with other seeds."""

    def run(self) -> list[str]:
        """Measure group by group, and return the names of sides that were not begun."""
        only_loss = self.args.only_loss
        waiting = [s for s in self.others if self.wants_loss(s) or not only_loss]
        for side in (s for s in waiting if s.refused):
            self.write(side, [])
        waiting = [s for s in waiting if not s.refused]
        if only_loss:
            return self.run_losses(waiting)
        before: Reading | None = None
        if waiting and self.left_s > 0:  # first: what it loads is loaded for every reading
            self.attention = self.look()
            if self.args.whole_run:
                self.time(self.first)
        while waiting and self.left_s > 0:
            before = before or self.time(self.first)
            if before.refused:
                for side in waiting:
                    self.write(side, [before])
                return []
            group, waiting = waiting[:GROUP], waiting[GROUP:]
            if any(map(self.wants_loss, group)):
                self.train_base()
            done = list[Side]()
            try:
                for side in group:
                    if self.left_s > 0 and self.measure(side):
                        done.append(side)
                waiting = [s for s in group if s not in done] + waiting
                ran = [side for side in done if not side.why_not]
                after = self.time(self.first) if ran and self.left_s > 0 else None
            except KeyboardInterrupt:
                for side in done:
                    self.write(side, [before])
                raise SystemExit(130) from None
            bases = [before, after] if after and not after.refused else [before]
            for side in done:
                self.write(side, bases)
            before = None if after and after.refused else bases[-1]
        return [side.name for side in waiting]

    def run_losses(self, waiting: list[Side]) -> list[str]:
        """Train one side after the other, and return the names of sides that were not begun."""
        while waiting and self.left_s > 0:
            self.train_base()
            if self.first.loss.refused:
                for side in waiting:
                    self.write(side, [self.first.loss])
                return []
            side = waiting.pop(0)
            self.train(side)
            self.write(side, [])
        return [side.name for side in waiting]

    def train_base(self) -> None:
        """Train the base once for its loss, and with other seeds."""
        if self.first.loss.losses:
            return
        self.train(self.first)
        if self.first.loss.losses:
            seeds = range(1, self.args.noise_seeds + 1)
            self.noise = [Side(f"(base, seed + {n})", self.first.plan) for n in seeds]
            for seed, side in zip(seeds, self.noise, strict=True):
                self.train(side, seed)

    @property
    def left_s(self) -> float:
        """Return the seconds in which a side may still begin."""
        return self.ends_s - time.monotonic()

    def measure(self, side: Side) -> bool:
        """Measure the speed, and the loss where it is wanted and the side ran."""
        self.time(side)
        if self.wants_loss(side) and not side.why_not:
            self.train(side)
        return True

    def wants_loss(self, side: Side) -> bool:
        """Return whether a loss is wanted: in the recipe a technique computes the same."""
        return bool(self.args.loss_steps) and (self.base == "trunk" or self.left_out(side))

    def left_out(self, side: Side) -> bool:
        """Return whether the side is the base without the technique."""
        name = side.name.partition(":")[0]
        return name in self.first.plan.techniques and name not in side.plan.techniques

    def time(self, side: Side) -> Reading:
        """Return a reading of the steps."""
        warm, timed = self.args.steps
        began_s = time.monotonic()
        if steps := self.args.whole_run:
            side.speed = self.worker.ask(run_whole, side.plan, limit_s=SIDE_LIMIT_S, steps=steps)
        else:
            side.speed = self.worker.ask(
                time_steps,
                side.plan,
                limit_s=SIDE_LIMIT_S,
                text=True,
                warm=warm,
                timed=timed,
                blocks=2,
                name=side.name.partition(":")[0],
            )
        outcome = side.speed.refused or f"{side.step_s * 1e3:.2f} ms"
        self.say(side, outcome, began_s)
        return side.speed

    def look(self) -> str:
        """Return what the attention of the base launches, or why that is unknown."""
        reading = self.worker.ask(attention_of, self.first.plan, limit_s=SIDE_LIMIT_S)
        return reading.evidence.get(ATTENTION) or f"not read: {reading.refused or 'nothing seen'}"

    def train(self, side: Side, seed: int = 0) -> None:
        """Train briefly for the loss, with `seed` added to the plan's."""
        began_s, steps = time.monotonic(), self.args.loss_steps
        plan = brief_plan(side.plan, steps=steps, rows=loss_rows(self.args, self.shape), seed=seed)
        side.loss = self.worker.ask(train_steps, plan, limit_s=SIDE_LIMIT_S, steps=steps)
        self.say(side, side.loss.refused or f"loss {side.end_loss:.4f}", began_s)

    def say(self, side: Side, outcome: str, began_s: float) -> None:
        """Print a line of progress."""
        spent_s = time.monotonic() - began_s
        name = side.name or "(base)"
        print(f"{self.shape} {self.base} {name}: {outcome} ({spent_s:.0f} s)", flush=True)

    def write(self, side: Side, bases: list[Reading]) -> None:
        """Write one row: ratios to the base before and after."""
        name, _, knobs = side.name.partition(":")
        trained = int(bool(side.loss.losses))
        facts: dict[str, Any] = {
            "technique": name,
            "knobs": knobs,
            "base": self.base,
            "shape": self.shape,
            "seeds": [side.plan.seed],
            "n": len(bases) if side.speed.seconds else trained,
            "techniques": sorted(side.plan.techniques),
            "replaces": list(side.replaces),
            "left_out": self.left_out(side),
            "plan_sha256": receipts.sha256(side.plan.dump()),
            "baseline_sha256": receipts.sha256(self.first.plan.dump()),
            "overrides": changes(self.args),
            **kind(self.args),
        }
        if self.attention and bases:
            facts["base_attention"] = self.attention
        if self.wants_loss(side):
            steps, rows = self.args.loss_steps, loss_rows(self.args, self.shape)
            curve = brief_plan(side.plan, steps=steps, rows=rows).schedule.model_dump()
            facts |= {"loss_steps": steps, "loss_rows": rows, "loss_schedule": curve}
        metrics: dict[str, Any] = {}
        why_not = side.why_not or (side.loss.refused if self.args.only_loss else "")
        if bases and bases[0].refused and not why_not:
            facts["refused"] = f"its base cannot run: {bases[0].refused}"
        elif why_not:
            facts["refused"] = why_not
        else:
            facts["evidence"] = (side.speed.evidence or side.loss.evidence).get(name, "")
            metrics = (self.metrics(side, bases) if bases else {}) | self.losses(side)
            if self.args.whole_run:
                facts["graphs"] = [r.evidence.get(GRAPHS) for r in (side.speed, *bases)]
            facts["loss_refused"] = side.loss.refused
            if self.first.loss.refused and not side.loss.refused:
                facts["loss_refused"] = f"its base cannot train: {self.first.loss.refused}"
        receipts.append("techniques", metrics, results=self.args.results, **facts)
        shown = {n: round(m["value"], 4) for n, m in metrics.items()}
        print(
            json.dumps(
                {
                    "shape": self.shape,
                    "base": self.base,
                    "technique": side.name,
                    **shown,
                    "refused": facts.get("refused", ""),
                }
            ),
            flush=True,
        )

    def losses(self, side: Side) -> dict[str, Any]:
        """Return both last losses, their difference, and the spread over seeds of the base."""
        own, base = side.end_loss, self.first.end_loss
        if own is None:
            return {}
        ends = {"loss": [own]}
        if base is not None:
            others = [s.end_loss for s in self.noise if s.end_loss is not None]
            ends |= {
                "base_loss": [base],
                "loss_difference": [own - base],
                "loss_noise": [abs(other - base) for other in others],
            }
        known = {name: [v for v in values if math.isfinite(v)] for name, values in ends.items()}
        return {name: receipts.spread(values, "nats") for name, values in known.items() if values}

    def metrics(self, side: Side, bases: list[Reading]) -> dict[str, Any]:
        """Return the metrics of a side that ran."""
        tokens, own = side.plan.batch.tokens, side.speed
        ratios = [mean(b.seconds) / side.step_s for b in bases]
        of_side = {
            "speed_ratio": receipts.spread(ratios, "x"),
            "tokens_per_s": receipts.spread([tokens / s for s in own.seconds], "tokens/s"),
        }
        if self.args.whole_run:
            of_side = {
                "run_ratio": receipts.spread(ratios, "x"),
                "run": receipts.spread([sum(own.seconds)], "s"),
                "base_run": receipts.spread([sum(b.seconds) for b in bases], "s"),
            }
        for key, ratio, whole in (
            ("peak_bytes", "memory_ratio", "peak_memory"),
            ("reserved_bytes", "reserved_ratio", "reserved_memory"),
        ):
            memory, others = getattr(own, key), [getattr(b, key) for b in bases]
            if memory is not None:
                of_side[whole] = receipts.spread([memory], "bytes")
                if shares := [memory / other for other in others if other]:
                    of_side[ratio] = receipts.spread(shares, "x")
        return of_side


def asked_for(args: argparse.Namespace) -> list[str]:
    """Return techniques by name, and all of the named rooms; parallel ones need more devices."""
    known = catalogue().techniques
    rooms = {t.room for t in known.values()}
    for room in args.all:
        if room not in rooms:
            raise SystemExit(f"there is no room {room!r}; there are {', '.join(sorted(rooms))}")
    named = {asked.partition(":")[0] for asked in args.techniques}
    return [
        *args.techniques,
        *(n for n, t in known.items() if t.room in args.all and n not in named),
    ]


def loss_rows(args: argparse.Namespace, shape: str) -> int:
    """Return the sequences of a batch for the loss; 0 when no loss is wanted."""
    return (args.loss_rows or LOSS_ROWS.get(shape, 1)) if args.loss_steps else 0


def kind(args: argparse.Namespace) -> dict[str, Any]:
    """Return the `measurement` of rows; nothing where steady steps were timed."""
    if args.only_loss:
        return {"measurement": "loss"}
    return {"measurement": "run", "run_steps": args.whole_run} if args.whole_run else {}


def changes(args: argparse.Namespace) -> list[str]:
    """Return what is changed in every plan, in the words of variants.py."""
    more, less = (f"+{n}" for n in args.base_with), (f"-{n}" for n in args.base_without)
    return [*args.set, *more, *less]


def without_rows(names: list[str], shape: str, base: str, args: argparse.Namespace) -> list[str]:
    """Return the names without a row of the same measurement at this commit in `args.missing`.

    A row whose reason is one of `TRANSIENT` is none; out of memory is a result.
    """
    file = args.missing / "techniques.jsonl" if args.missing else None
    if file is None or not file.is_file():
        return names
    wanted = (shape, base, receipts.commit(), changes(args))
    loss = (args.loss_steps, loss_rows(args, shape))
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    done = {
        f"{r['technique']}:{r['knobs']}".rstrip(":")
        for r in rows
        if wanted == (r.get("shape"), r.get("base"), r.get("commit"), r.get("overrides", []))
        and kind(args) == {k: r[k] for k in ("measurement", "run_steps") if k in r}
        and (r.get("loss_steps", 0), r.get("loss_rows", 0))
        == (loss if base == "trunk" or r.get("left_out") else (0, 0))
        and not any(r.get(k, "").startswith(TRANSIENT) for k in ("refused", "loss_refused"))
    }
    return [name for name in names if name not in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("techniques", nargs="*", help="name, or name:knob=value,plan.key=value")
    parser.add_argument("--all", nargs="+", default=[], metavar="ROOM", help="a room's techniques")
    parser.add_argument("--shapes", nargs="+", default=["160m", "1b"], help="names or plan files")
    parser.add_argument("--bases", nargs="+", default=list(BASES), choices=BASES)
    parser.add_argument("--base-with", nargs="+", default=[], help="what every plan has")
    parser.add_argument("--base-without", nargs="+", default=[], help="what no plan has")
    parser.add_argument("--steps", nargs=2, type=int, default=[3, 5], metavar=("WARM", "TIMED"))
    parser.add_argument("--loss-steps", type=int, default=0)
    parser.add_argument("--loss-rows", type=int, default=0, help="0: 4 at 160m, else 1")
    parser.add_argument("--noise-seeds", type=int, default=1, help="of the base, beside its own")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--only-loss", action="store_true", help="time nothing")
    how.add_argument("--whole-run", type=int, default=0, metavar="STEPS", help="time all of them")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no side begins later")
    parser.add_argument("--missing", type=Path, help="a results folder: only what has no row there")
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every plan")
    args = parser.parse_args()
    if args.only_loss and not args.loss_steps:
        parser.error("--only-loss needs --loss-steps N, the length of the training")
    names, ends_s = asked_for(args), time.monotonic() + args.limit_s
    if not names:
        parser.error("name a technique first, or a room with --all")
    with Worker(here=args.here) as worker:
        for shape in args.shapes:
            path = receipts.plan_file(shape)
            for base in args.bases:
                rest = without_rows(names, path.stem, base, args)
                changed = (args.set, args.base_with, args.base_without)
                compared = sides(path, base, rest, *changed) if rest else []
                left = (
                    Bench(path.stem, base, compared, args, worker, ends_s).run() if compared else []
                )
                if left:
                    print(f"left: {path.stem} {base}: {' '.join(left)}", flush=True)


if __name__ == "__main__":
    main()
