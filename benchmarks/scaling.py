"""Measure how nearly many GPUs of one host train at the speed of one, for each layout.

    python benchmarks/scaling.py predict --ranks 4 --device-name "NVIDIA H100 80GB HBM3"
    python benchmarks/scaling.py measure --limit-s 540
    python benchmarks/scaling.py measure --ranks 2 --sides one fsdp replicas
    python benchmarks/scaling.py measure --ranks 2 --tiny --results DIR

`scaling_sides.py` has the sides: changes of a plan in plans/ for the GPUs that are here. Scaling is
weak: each GPU has as many tokens as one GPU alone. Every side runs in processes of its own, started
as torchrun starts them, and is read in every round, so that the ratio to one GPU of the same recipe
is between readings of one round. First the links between the GPUs are measured, and every side's
step is predicted with them. A row is appended at once for each reading (kind "reading"), for what
was refused with the reason, and at the end one for each side (kind "side") with the spread over
rounds. Sides go by importance, and none is begun that cannot be done by `--limit-s`. `predict`
prints what is predicted of each side and trains nothing; links are then assumed, or those of
`--machine`. `--tiny` runs the whole program with a small model on the CPU, where ranks talk through
gloo. torchtitan is a side where it is installed, and a row says so where it is not.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import receipts
import torch
from scaling_peer import read_titan
from scaling_ranks import SaveReading, Team, read_links, read_long_row, read_saves, read_steps
from scaling_sides import FEW, MANY, SIDES, TINY, Side

from headrace.assemble.build import make_context
from headrace.assemble.context import check_supported, elsewhere
from headrace.core.errors import EXIT_INTERRUPTED, HeadraceError
from headrace.costs.links import says
from headrace.costs.machine import Machine
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.predict.prediction import predict
from headrace.tuner.readings import Reading

GIB, GB = 2**30, 10**9
PROBED = receipts.ROOT / "results" / "machines"
"""Rates of GPUs that `headrace probe` measured; another device's are a datasheet's."""
FIRST_S = 45.0
"""Guessed seconds of a side beside its steps, as to compile, until one was read."""
WRITTEN_S = 15.0
"""Guessed seconds until a saved state is on the disk."""


# --- what is predicted ------------------------------------------------------------------------


def machine_of(args: argparse.Namespace) -> Machine:
    """Return the rates by which steps are predicted: given, of such a GPU, or assumed."""
    if args.machine:
        return Machine.read(args.machine)
    for path in sorted(PROBED.glob("*.json")):
        if (probed := Machine.read(path)).name == args.device_name:
            return probed
    return Machine.assumed(args.device_name)


def context_of(plan: Plan, args: argparse.Namespace) -> Context:
    """Return the place where a plan runs: this CPU, or a GPU that may not be here."""
    context = make_context(plan, torch.device("cpu"))
    return context if args.tiny else elsewhere(context, args.device_name)


def forecast(plan: Plan, machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    """Return what is predicted of a plan's step and memory, or why nothing is."""
    if args.tiny:
        return {"unknown": "a dry run is not predicted"}
    prediction = predict(plan, context_of(plan, args), machine)
    time, memory = prediction.time, prediction.memory
    return {
        "step_s": time.step_s,
        "tokens_per_s_per_gpu": time.step_s and plan.batch.tokens / time.step_s / plan.mesh.ranks,
        "peak_bytes": memory.peak_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "fits": memory.fits,
        "parts_s": time.parts_s,
        "unknown": time.unknown,
        "rates": machine.date or "datasheet",
        "links": "measured" if machine.links else "assumed",
    }


@dataclass
class Entry:
    """Hold a side with its plan, what is predicted of it, and what was read so far."""

    side: Side
    ranks: int
    plan: Plan | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    readings: dict[int, Reading] = field(default_factory=dict)
    """round -> its reading"""
    wall_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Return the tokens of a step, over all GPUs."""
        assert self.plan is not None
        return self.plan.batch.tokens

    def rate(self, lap: int) -> float | None:
        """Return the tokens per second and GPU of a round; None where it has no reading."""
        reading = self.readings.get(lap)
        if reading is None or not reading.seconds:
            return None
        return self.tokens / sorted(reading.seconds)[len(reading.seconds) // 2] / self.ranks


def entries(args: argparse.Namespace, machine: Machine) -> list[Entry]:
    """Return the sides that were asked for, in order, with what is predicted or refused."""
    known = {side.name: side for side in SIDES}
    return [entry_of(known[name], args, machine) for name in args.sides]


def entry_of(side: Side, args: argparse.Namespace, machine: Machine) -> Entry:
    """Return a side with its plan and prediction, or why it cannot run."""
    entry = Entry(side, side.ranks or args.ranks)
    try:
        entry.plan = side.plan(args.ranks, args.set, tiny=args.tiny)
        if side.peer:
            entry.refused = peer_refusal(side, args)
            return entry
        check_supported([*entry.plan.techniques.values()], context_of(entry.plan, args))
        entry.facts["predicted"] = forecast(entry.plan, machine, args)
    except HeadraceError as error:
        entry.refused = str(error)
    return entry


def peer_refusal(side: Side, args: argparse.Namespace) -> str:
    """Return why a peer cannot be read here; "" where it can."""
    if find_spec(side.peer) is None:
        return f"{side.peer} is not installed here"
    return "a dry run has no peer" if args.tiny else ""


def print_forecasts(args: argparse.Namespace) -> None:
    """Print what is predicted of every side; nothing is trained."""
    machine = machine_of(args)
    links = link_words(machine, args.ranks)
    print(f"{machine.name}: rates of {machine.date or 'a datasheet'}; {links}")
    for entry in entries(args, machine):
        predicted = entry.facts.get("predicted", {})
        if entry.refused or not predicted.get("step_s"):
            why = entry.refused or predicted.get("unknown") or "a peer is not predicted"
            print(f"{entry.side.name}: {why}")
            continue
        print(
            f"{entry.side.name}: {predicted['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU, "
            f"{predicted['step_s'] * 1e3:,.0f} ms, {predicted['peak_bytes'] / GIB:.1f} GiB "
            f"(fits: {predicted['fits']})"
        )


def link_words(machine: Machine, ranks: int) -> str:
    """Return what is known of the links between so many GPUs, in words."""
    return says(machine.links, machine.name, ranks)


# --- what is measured -------------------------------------------------------------------------


class Bench:
    """Measure all sides in rounds, and write a row at once for each reading."""

    def __init__(self, args: argparse.Namespace, logs: Path) -> None:
        self.args, self.logs = args, logs
        self.ends_s = time.monotonic() + args.limit_s
        self.entries: list[Entry] = []
        self.links: dict[str, Any] = {}
        self.next: tuple[int, Team] | None = None
        self.beside_s = 0.0
        """most seconds that a side took beside its steps"""

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.ends_s - time.monotonic()

    def team(self, ranks: int) -> Team:
        """Return processes for so many ranks: those that wait already, or new ones."""
        if self.next is not None:
            (number, team), self.next = self.next, None
            if number == ranks:
                return team
            team.close()
        return Team(ranks, self.logs)

    def prepare(self, ranks: int) -> None:
        """Start the processes of the side that comes next, which import and then wait.

        A dry run has too few cores for that.
        """
        if self.next is None and not self.args.tiny:
            self.next = (ranks, Team(ranks, self.logs))

    def run(self) -> None:
        """Measure the links, then every side in every round, and write a row for each side."""
        machine = self.measured_links()
        self.entries = entries(self.args, machine)
        for entry in self.entries:
            if entry.refused:
                self.write(entry, "side", {}, refused=entry.refused, n=0)
        try:
            for lap in range(self.args.rounds):
                self.round(lap)
        finally:
            if self.next is not None:
                self.next[1].close()
            self.summarize()

    def measured_links(self) -> Machine:
        """Measure the links between the GPUs, and return the machine with them."""
        args = self.args
        machine = Machine.assumed("cpu") if args.tiny else machine_of(args)
        began_s = time.monotonic()
        team = self.team(args.ranks)
        self.prepare(args.ranks)
        device = "cpu" if args.tiny else "cuda"
        answer = team.ask(read_links, args.ranks, device, limit_s=min(120.0, self.left_s))
        if isinstance(answer, Reading):
            self.links = {"refused": answer.refused}
            print(f"links were not measured: {answer.refused}", flush=True)
            return machine
        self.links = {link.operation: round(link.stream.bytes_per_s / GB, 4) for link in answer}
        print(
            f"links in GB/s a rank ({time.monotonic() - began_s:.0f} s): {self.links}", flush=True
        )
        return replace(machine, links=answer)

    def round(self, lap: int) -> None:
        """Read every side once that is not refused and for which there is time."""
        able = [e for e in self.entries if not e.refused and not (lap and e.side.once)]
        for place, entry in enumerate(able):
            needed_s = self.needed_s(entry)
            if self.left_s < needed_s:
                print(
                    f"left in round {lap}: {entry.side.name} needs {needed_s:.0f} s, and "
                    f"{self.left_s:.0f} s are left",
                    flush=True,
                )
                continue
            began_s = time.monotonic()
            team = self.team(entry.ranks)
            after = able[(place + 1) % len(able)]
            self.prepare(after.ranks)
            reading = self.ask(team, entry)
            entry.wall_s = time.monotonic() - began_s
            entry.readings[lap] = reading
            if reading.seconds and not (entry.side.brief or entry.side.saves):
                spent_s = reading.steps * max(reading.seconds)
                self.beside_s = max(self.beside_s, entry.wall_s - spent_s)
            if reading.refused:
                entry.refused = reading.refused
                self.write(entry, "side", {}, refused=reading.refused, n=0, round=lap)
                continue
            self.write(entry, "reading", self.metrics(entry, [lap]), round=lap, n=1)

    def needed_s(self, entry: Entry) -> float:
        """Return the guessed seconds of a reading of a side."""
        if entry.wall_s:
            return 1.1 * entry.wall_s
        predicted_s = entry.facts.get("predicted", {}).get("step_s") or 1.0
        if self.args.tiny:
            return 5.0
        steps = 1 if entry.side.brief else self.args.warm + self.args.timed * self.args.blocks
        steps *= 1 + entry.side.saves
        beside_s = (self.beside_s or FIRST_S) + WRITTEN_S * entry.side.saves
        return 1.2 * (beside_s + steps * predicted_s)

    def ask(self, team: Team, entry: Entry) -> Reading:
        """Have a team take the reading of a side."""
        args, side, plan = self.args, entry.side, entry.plan
        assert plan is not None
        limit_s = self.left_s if side.brief else min(args.side_s, self.left_s)
        counts = {"warm": args.warm, "timed": args.timed, "blocks": args.blocks}
        if side.peer:
            from peers import shape_of

            shape = {**shape_of(side.shape), "length": plan.data.sequence_length}
            return team.ask(
                read_titan,
                plan,
                shape,
                checkpointed=side.shape == "8b",
                limit_s=limit_s,
                **counts,
            )
        if side.saves:
            with tempfile.TemporaryDirectory() as folder:
                return team.ask(
                    read_saves,
                    plan,
                    Path(folder, "checkpoints"),
                    warm=args.warm,
                    timed=args.timed * args.blocks,
                    saves=side.saves,
                    limit_s=self.left_s,
                )
        if side.brief:
            brief = max(8 * entry.ranks, side.brief // (TINY if args.tiny else 1))
            return team.ask(read_long_row, plan, brief=brief, steps=1, limit_s=limit_s)
        return team.ask(read_steps, plan, limit_s=limit_s, **counts)

    # --- rows ---------------------------------------------------------------------------------

    def metrics(self, entry: Entry, laps: list[int]) -> dict[str, Any]:
        """Return a side's metrics over rounds; ratios are between readings of one round."""
        readings = [entry.readings[lap] for lap in laps]
        step_s = [s for reading in readings for s in reading.seconds]
        rates = [rate for lap in laps if (rate := entry.rate(lap)) is not None]
        metrics = {
            "tokens_per_s_per_gpu": receipts.spread(rates, "tokens/s"),
            "step": receipts.spread(step_s, "s"),
        }
        for key, name in (("peak_bytes", "peak_memory"), ("reserved_bytes", "reserved_memory")):
            if values := [v for r in readings if (v := getattr(r, key)) is not None]:
                metrics[name] = receipts.spread(values, "bytes")
        for reading in readings:
            if isinstance(reading, SaveReading):
                metrics |= {
                    "first_stall": receipts.spread(reading.stalled_s[:1], "s"),
                    "stall": receipts.spread(reading.stalled_s[1:], "s"),
                    "save_call": receipts.spread(reading.called_s, "s"),
                    "written_after": receipts.spread(reading.written_s, "s"),
                }
        for other in self.entries:
            if other.side.name not in entry.side.against:
                continue
            pairs = [(entry.rate(lap), other.rate(lap)) for lap in laps]
            if ratios := [a / b for a, b in pairs if a and b]:
                metrics[f"ratio_to_{other.side.name}"] = receipts.spread(ratios, "x")
        if predicted_s := entry.facts.get("predicted", {}).get("step_s"):
            errors = [predicted_s / s - 1 for s in step_s]
            metrics["prediction_error"] = receipts.spread(errors, "share of the step")
        return metrics

    def write(self, entry: Entry, kind: str, metrics: dict[str, Any], **facts: Any) -> None:
        """Append a row for a side and print it."""
        plan, side = entry.plan, entry.side
        if plan is not None:
            facts |= {
                "techniques": {}
                if side.peer
                else {n: _given(t) for n, t in plan.techniques.items()},
                "mesh": {axis: n for axis, n in plan.mesh.sizes.items() if n > 1},
                "seeds": [plan.seed],
                "plan_sha256": receipts.sha256(plan.dump()),
                "tokens": plan.batch.tokens,
                "length": plan.data.sequence_length,
                "micro_sequences": plan.micro_rows,
            }
        readings = [r for r in entry.readings.values() if not r.refused]
        if readings:
            last = readings[-1]
            facts |= {
                "evidence": last.evidence,
                "losses": last.losses[:1],
                "peak_bytes_by_rank": last.norms,
                "ready_s": last.ready_s,
                "wall_s": entry.wall_s,
                "steps": last.steps,
            }
        row = receipts.append(
            "scaling",
            metrics,
            results=self.args.results,
            kind=kind,
            side=side.name,
            peer=side.peer,
            shape="tiny" if self.args.tiny else side.shape,
            ranks=entry.ranks,
            links_gb_per_s=self.links,
            versions={p: receipts.installed(p) for p in ("torchtitan", "torchao")},
            **entry.facts,
            **facts,
        )
        shown = {
            n: round(m["value"] / (GIB if m["unit"] == "bytes" else 1), 4)
            for n, m in metrics.items()
        }
        words = {"side": side.name, "kind": kind, "n": row.get("n"), **shown}
        print(
            json.dumps(words | {"refused": facts["refused"]} if "refused" in facts else words),
            flush=True,
        )

    def summarize(self) -> None:
        """Write a row for each side that was read: the spread over rounds."""
        for entry in self.entries:
            laps = [lap for lap, reading in entry.readings.items() if not reading.refused]
            if laps:
                later = {"failed_later": entry.refused} if entry.refused else {}
                self.write(entry, "side", self.metrics(entry, laps), n=len(laps), **later)


def _given(technique: Any) -> dict[str, Any]:
    """Return the knobs of a technique that the plan sets."""
    return technique.model_dump(mode="json", exclude_defaults=True)


def measure(args: argparse.Namespace) -> None:
    """Measure all sides."""
    here = torch.cuda.device_count()
    if not args.tiny and here < args.ranks:
        raise SystemExit(f"{args.ranks} GPUs were asked for and {here} are here; take --tiny")
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory() as own:
        logs = Path(args.logs or own)
        logs.mkdir(parents=True, exist_ok=True)
        Bench(args, logs).run()


def _end(number: int, frame: Any) -> None:
    raise SystemExit(EXIT_INTERRUPTED)


def parsed(words: list[str]) -> argparse.Namespace:
    """Return the program's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["predict", "measure"])
    parser.add_argument("--ranks", type=int, default=0, help="GPUs; all that are here, without it")
    parser.add_argument("--sides", nargs="+", choices=[s.name for s in SIDES], default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=4, help="steps before those that are timed")
    parser.add_argument("--timed", type=int, default=5, help="steps of a block")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of a reading")
    parser.add_argument("--side-s", type=float, default=100.0, help="limit of a short reading")
    parser.add_argument("--limit-s", type=float, default=540.0, help="limit of the whole call")
    parser.add_argument("--machine", type=Path, help="a file that `headrace probe` wrote")
    parser.add_argument("--device-name", default="", help="predict: of which GPU")
    parser.add_argument("--tiny", action="store_true", help="a dry run on the CPU")
    parser.add_argument("--logs", help="a folder that keeps what the ranks print")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for every plan")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args(words)
    receipts.given_commit = args.commit
    args.ranks = args.ranks or torch.cuda.device_count() or 2
    args.sides = args.sides or (FEW if args.ranks < 4 else MANY)
    if not args.device_name:
        cuda = torch.cuda.is_available()
        args.device_name = torch.cuda.get_device_name() if cuda else "NVIDIA H100 80GB HBM3"
    return args


def main() -> None:
    args = parsed(sys.argv[1:])
    print_forecasts(args) if args.what == "predict" else measure(args)


if __name__ == "__main__":
    main()
