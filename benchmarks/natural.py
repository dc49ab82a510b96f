"""Measure how right the doctor is on natural runs: compare its first remedy with the best one.

    python benchmarks/natural.py all --device cuda --minutes 9
    taskset -c 0,1 python benchmarks/natural.py all --device cpu --minutes 9 --part 1/6 --results r1

Nothing is planted into these runs (natural_runs.py). `say` trains each for some 30 to 60 steps and
asks the doctor, and writes natural_said.jsonl: its verdict, every remedy that a reader is shown,
and what will be measured. `measure` begins when this commit has answers for the whole list. It
times each change beside the run's own plan, and writes natural.jsonl, a row a run. `all` is both.
The doctor is right where its first remedy gains nearly what the best one does; docs/how-right.md
has the score.

A call may be cut off at any moment: answers and measurements are on disk at once, a second call
goes on where the first ended (by id, hardware, plan and commit), and each prints what is left. A
change that is measured lies in natural_parts.jsonl until its run has a row: when all are measured,
or at the end when the first remedy and three others are; `--close` writes rows of fewer, too. What
a row lacks it names as `left`. Small runs and large ones begin in alternation, the smallest of each
first.

On a GPU several processes compile at a time and one has the device (natural_gate.py). On a CPU
there is one process, on the cores that it is given: pin it, and give each of several its part of
the list, its own cores and its own folder of results.

Text is Python's standard library, prepared once under `--work`, with the tokenizer of each size.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import parts
import receipts
import torch
from natural_gate import HOW, Crew, Gate, Task
from natural_runs import RUNS, Run
from natural_said import SPARE_BYTES, Answer, say
from natural_times import BEGUN, STAGE, STAYS, Wanted, awake, measure

from headrace.assemble.context import choose_device, find_device, make_context
from headrace.cli.plans import rates_here
from headrace.costs.machine import Machine
from headrace.data.ingest import prepare
from headrace.predict.prediction import predict
from headrace.tuner.worker import Worker

ANSWERS, PARTS, ROWS = "natural_said", "natural_parts", "natural"
WORKERS = {"cuda": 8, "cpu": 1}
COMPILERS = "2"
"""Processes that each worker of a GPU compiles kernels with: there are several workers."""
ROOM = 0.88
"""Share of a device's memory for all processes; their contexts take the rest."""
LIMIT_S, GRACE_S = 420.0, 15.0
"""The most seconds of one run's process, and the seconds that it has after the call's end."""
TRIES = 4
"""Processes that may die on one run's changes before the rest is left to another call."""
OTHERS = 3
"""Measured changes beside the first remedy from which on a run is complete."""


@dataclass
class Book:
    """Read the rows of this hardware, and write new ones.

    Args:
        results: the folder of the rows.
        hardware: the hardware of this call.
        how: further facts of each row that is written.
    """

    results: Path
    hardware: str
    how: dict[str, Any]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def rows(self, topic: str) -> dict[str, dict[str, Any]]:
        """Return the newest row of each run whose plan is still the same."""
        return {row["id"]: row for row in self.lines(topic)}

    def lines(self, topic: str) -> list[dict[str, Any]]:
        """Return the rows of a topic on this hardware that no row retracts."""
        file, rows = self.results / f"{topic}.jsonl", list[dict[str, Any]]()
        for line in filter(str.strip, file.read_text().splitlines() if file.is_file() else []):
            try:
                rows.append(json.loads(line))
            except ValueError:
                rows.append({})
        gone = {row.get("retracts") for row in rows}
        return [
            row
            for number, row in enumerate(rows, 1)
            if number not in gone and row.get("hardware") == self.hardware
        ]

    def parts(self, run: Run) -> list[dict[str, Any]]:
        """Return what this commit measured of a run's changes."""
        about = self.about(run)
        return [row for row in self.lines(PARTS) if about.items() <= row.items()]

    def about(self, run: Run) -> dict[str, Any]:
        """Return the facts that rows of one run share."""
        return {
            "id": run.id,
            "hardware": self.hardware,
            "plan_sha256": run.sha256,
            "commit": receipts.commit(),
        }

    def answer(self, run: Run) -> dict[str, Any] | None:
        """Return what this commit's doctor answered about a run with its plan as it is now."""
        row = self.rows(ANSWERS).get(run.id)
        return row if row is not None and self.about(run).items() <= row.items() else None

    def write(self, topic: str, run: Run, **facts: Any) -> None:
        """Write one row of a run."""
        with self._lock:
            receipts.append(
                topic,
                {},
                results=self.results,
                id=run.id,
                device=run.device,
                workload=run.shape,
                words=run.words.split(),
                seeds=[run.plan.seed],
                plan_sha256=run.sha256,
                **{**facts, "hardware": self.hardware, **self.how},
            )


@dataclass
class Call:
    """Hold one call of the program: its runs, its rows, and the time at which it ends."""

    runs: list[Run]
    args: argparse.Namespace
    book: Book
    gate: Gate
    ends_s: float
    """The end of the call in seconds since the epoch, which all processes share."""

    def crew(self, room_bytes: float) -> Crew:
        """Return the processes that work on this device."""
        ends_s = time.monotonic() + self.ends_s - time.time()
        return Crew(
            self.args.workers,
            room_bytes,
            self.gate,
            ends_s,
            self.args.work / "logs",
            awake,
            self.args.here,
        )

    def limit_s(self) -> float:
        """Return the seconds that a process may take from now."""
        return max(1.0, min(LIMIT_S, self.ends_s - time.time() + GRACE_S))

    # --- said ---

    def unsaid(self) -> list[Run]:
        """Return the runs that this commit's doctor has not judged, slow compilers first."""
        left = [run for run in self.runs if self.book.answer(run) is None]
        return sorted(
            left, key=lambda run: ("torch_compile" in run.plan.techniques, run.cost), reverse=True
        )

    def say(self, crew: Crew, room_bytes: float) -> None:
        """Train the runs that have no answer yet, and ask the doctor about each."""

        def task(run: Run) -> Task:
            taken = min(room_bytes, peak_bytes(run) + SPARE_BYTES)
            return Task(run.id, taken, lambda worker: self._say(crew, worker, run, room_bytes))

        crew.run([task(run) for run in self.unsaid()])

    def _say(self, crew: Crew, worker: Worker, run: Run, room_bytes: float) -> None:
        began_s, kept = time.monotonic(), self.args.keep
        reading = worker.ask(
            say,
            run.plan,
            run.in_folder(self.args.work),
            self.gate,
            self.args.most,
            room_bytes,
            kept / run.slug if kept else None,
            limit_s=self.limit_s(),
        )
        if crew.closed:
            return
        spent_s = time.monotonic() - began_s
        if isinstance(reading, Answer) and not reading.refused:
            self.book.write(ANSWERS, run, **reading.facts)
            first = reading.facts["first"]
            message = (
                f"{reading.facts['verdict']}; {' '.join(first['change']) if first else 'nothing'}"
            )
        elif reading.timed_out:
            message = f"{reading.refused}, no row"
        else:
            self.book.write(ANSWERS, run, refused=reading.refused)
            message = reading.refused
        print(f"said {run.id}: {message} ({spent_s:.0f} s)", flush=True)

    # --- measured ---

    def unmeasured(self) -> list[tuple[Run, dict[str, Any]]]:
        """Return the runs that can be measured and have no row, large and small in alternation."""
        done = self.book.rows(ROWS)
        answers = [(run, self.book.answer(run)) for run in self.runs]
        left = [
            (run, answer)
            for run, answer in answers
            if answer is not None
            and "refused" not in answer
            and not _of(done.get(run.id, {}), answer)
        ]
        left.sort(key=lambda one: one[1]["bytes"])
        half = (len(left) + 1) // 2
        pairs = zip_longest(left[:half], left[half:])
        return [one for pair in pairs for one in pair if one is not None]

    def measure(self, crew: Crew) -> None:
        """Time the recorded changes of each run beside the run's own plan."""
        crew.run(
            [
                Task(
                    run.id,
                    answer["bytes"],
                    lambda worker, run=run, answer=answer: self._measure(crew, worker, run, answer),
                )
                for run, answer in self.unmeasured()
            ]
        )

    def _measure(self, crew: Crew, worker: Worker, run: Run, answer: dict[str, Any]) -> None:
        began_s, about = time.monotonic(), self.book.about(run)
        file, first = self.book.results / f"{PARTS}.jsonl", answer["first"]
        for attempt in range(TRIES):
            left = self.left(run, answer)
            if not left or time.time() >= self.ends_s:
                break
            peaks = {tuple(w): b for w, b in zip(answer["changes"], answer["peaks"], strict=True)}
            wanted = Wanted(
                left,
                [peaks[words] for words in left],
                tuple(first["change"]) if first else (),
                attempt > 0,
            )
            reading = worker.ask(
                measure,
                run.in_folder(self.args.work),
                wanted,
                self.gate,
                file,
                about,
                self.ends_s,
                limit_s=self.limit_s(),
            )
            if crew.closed:
                return
            if reading.timed_out:
                break
            stage = reading.evidence.get(STAGE)
            if stage == BEGUN:
                print(f"{run.id}: its own plan cannot be timed: {reading.refused}", flush=True)
                break
            if (
                stage is None and attempt and self.left(run, answer) == left
            ):  # over the first of them
                line = {**about, "change": list(left[0]), "refused": reading.refused}
                with file.open("a") as out:
                    out.write(json.dumps(line) + "\n")
        spent_s = time.monotonic() - began_s
        self.finish(run, answer, f"({spent_s:.0f} s)")

    def left(self, run: Run, answer: dict[str, Any]) -> list[tuple[str, ...]]:
        """Return the changes of a run that are not measured yet, in the order of measuring."""
        done = {tuple(row["change"]) for row in self.book.parts(run)}
        left = [tuple(words) for words in answer["changes"] if tuple(words) not in done]
        return sorted(left, key=lambda words: any(word in STAYS for word in words))

    def finish(
        self, run: Run, answer: dict[str, Any], spent: str = "", *, close: bool = False
    ) -> None:
        """Write the row of a run whose changes are all measured."""
        left, part_rows = self.left(run, answer), self.book.parts(run)
        first = answer["first"]["change"] if answer["first"] else None
        others = sum("gain" in row and row["change"] != first for row in part_rows)
        enough = others >= OTHERS and (
            first is None or first in [row["change"] for row in part_rows]
        )
        if left and not enough and not (close and part_rows):
            print(
                f"{run.id}: {len(part_rows)} of {len(answer['changes'])} measured {spent}",
                flush=True,
            )
            return
        own = (
            "change",
            "gain",
            "refused",
            "equality",
            "before_s",
            "after_s",
            "quiet",
            "others_s",
            "ready_s",
            "turn_s",
            "together",
        )
        measured = [{key: row[key] for key in own if key in row} for row in part_rows]
        before = [row["before_s"] for row in measured if "before_s" in row]
        self.book.write(
            ROWS,
            run,
            precision=answer["precision"],
            compiled=answer["compiled"],
            parameters=answer["parameters"],
            threads=answer["threads"],
            said=answer["commit"],
            verdict=answer["verdict"],
            healthy=answer["healthy"],
            first_change=first,
            measured=measured,
            steps=answer["steps"],
            before_s=sorted(before)[len(before) // 2] if before else None,
            left=[list(words) for words in left],
        )
        gains = {" ".join(row["change"]): row["gain"]["value"] for row in measured if "gain" in row}
        best = max(gains, key=lambda name: gains[name], default="")
        message = f"first {gains.get(' '.join(first), float('nan')):+.1%}, " if first else ""
        message += f"best {gains[best]:+.1%} by {best}" if best else "nothing could be measured"
        print(f"measured {run.id}: {message} {spent}", flush=True)


def _of(row: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Return whether the row of a run belongs to this answer of the doctor."""
    return (row.get("plan_sha256"), row.get("said")) == (answer["plan_sha256"], answer["commit"])


def peak_bytes(run: Run) -> float:
    """Return the bytes that a run is predicted to take of its device."""
    context = make_context(run.plan, choose_device(run.plan))
    return predict(run.plan, context, rates_here(choose_device(run.plan))).memory.peak_bytes


def prepare_text(runs: list[Run], work: Path) -> None:
    """Prepare the text once for every tokenizer, before processes ask for it."""
    plans = {run.plan.data.vocab: run.in_folder(work) for run in runs}
    for vocab, plan in plans.items():
        began_s = time.monotonic()
        prepare(plan)
        print(f"text with {vocab} entries ({time.monotonic() - began_s:.0f} s)", flush=True)


def keep_rates(machine: Machine, results: Path) -> str:
    """Write the rates that a call's doctor has beside its rows; return the file's name."""
    words = re.sub(r"[^a-z0-9]+", "-", machine.name.lower()).strip("-")
    name = f"{words}-{time.strftime('%Y-%m-%d-%H%M', time.gmtime())}.json"
    (results / "machines").mkdir(exist_ok=True)
    machine.write(results / "machines" / name)
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("say", "measure", "all"))
    parser.add_argument("--device", choices=tuple(WORKERS), required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="all ends by then")
    parser.add_argument("--part", type=parts.part, default=(1, 1), help="as 2/6: of the list")
    parser.add_argument("--only", nargs="*", default=[], metavar="ID", help="runs by id")
    parser.add_argument("--most", type=int, default=5, help="changes of a run")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: as the device has")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "headrace-natural"
    )
    parser.add_argument("--keep", type=Path, help="a folder for what the doctor reads of each run")
    parser.add_argument("--close", action="store_true", help="also rows of runs that are not whole")
    parser.add_argument("--here", action="store_true", help="no process of its own, to debug")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    args = parser.parse_args()
    receipts.given_commit = args.commit
    args.work, args.results = args.work.absolute(), args.results.absolute()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: rows name the processor
    else:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", COMPILERS)
    if not args.here:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an error: the crew ends too
    cores = len(os.sched_getaffinity(0))
    args.workers = args.workers or min(WORKERS[args.device], max(1, 2 * cores // 3))
    args.results.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    asked = [run for run in RUNS if run.device == args.device]
    mine = parts.share({run.id: run.cost for run in asked}, args.part)
    runs = [run for run in asked if run.id in mine and (not args.only or run.id in args.only)]
    sys.exit(go(runs, args, cores))


def go(runs: list[Run], args: argparse.Namespace, cores: int) -> int:
    """Ask and measure as the command line wants; return exit status 1 where runs are left."""
    ends_s = time.time() + 60 * args.minutes - GRACE_S
    gate = Gate(args.work / "gate.lock", os.getpid())
    room_bytes = ROOM * (torch.cuda.mem_get_info()[1] if args.device == "cuda" else 1e12)
    how = {
        "how": HOW if args.workers > 1 else "one process",
        "workers": args.workers,
        "cores": cores,
    }
    call = Call(runs, args, Book(args.results, receipts.hardware(), how), gate, ends_s)
    if args.what != "measure" and call.unsaid():  # as the doctor does, before anything else runs
        machine = rates_here(find_device(args.device), sure=True)
        print(f"rates of {machine.name} by {machine.source}", flush=True)
        how["machine"] = keep_rates(machine, args.results)
    with call.crew(room_bytes) as crew:
        if call.unsaid() or call.unmeasured():
            prepare_text(runs, args.work)
        if args.what != "measure":
            call.say(crew, room_bytes)
        unsaid = call.unsaid()
        if args.what != "say" and unsaid:
            print("nothing is measured before all is said", flush=True)
        elif args.what != "say":
            call.measure(crew)
            for run, answer in call.unmeasured():
                call.finish(run, answer, "until now", close=args.close)
    for run in unsaid:
        print(f"left: {run.id}: not said", flush=True)
    unmeasured = call.unmeasured() if args.what != "say" else []
    for run, answer in unmeasured:
        left = len(call.left(run, answer))
        print(f"left: {run.id}: {left} of {len(answer['changes'])} changes", flush=True)
    done, answers = call.book.rows(ROWS), {run.id: call.book.answer(run) for run in runs}
    whole = sum(
        answer is not None and _of(done.get(name, {}), answer) for name, answer in answers.items()
    )
    print(f"{len(runs) - len(unsaid)} of {len(runs)} said, {whole} measured", flush=True)
    return int(bool(unsaid or unmeasured))


if __name__ == "__main__":
    main()
