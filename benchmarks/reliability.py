"""Spoil every file that a reader is given, and let a tiny run live for long; write what came of it.

    python benchmarks/reliability.py fuzz --minutes 5 --results results
    python benchmarks/reliability.py fuzz --guided --minutes 20 --results results
    python benchmarks/reliability.py soak --steps 100000 --kills 8 --results results

`fuzz` takes the readers of `tests/security/readers.py`, each in a forked process, and writes a
row with how many files were read, refused, and ended otherwise; the longest time of one file, and
how much the process grew. A file that ended otherwise is kept in the folder of work. With
`--guided`, atheris (pip install 'headrace[fuzz]') makes the files: it keeps those that reach a
branch which none reached before, and spoils them again.

`soak` trains the smallest decoder for so many steps with checkpoints and evaluations, ends it many
times on the way (by SIGKILL, SIGTERM and SIGINT in turn), resumes it, and looks at it twice a
second: memory, open files, threads, what lies in its folder, and whether the rows of metrics.jsonl
can be read while they are written. The row says whether each stayed bounded. Steps are real ones
of a model of a thousand parameters: in minutes it does to files and handles what a day of a large
run does.
"""

import argparse
import importlib
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import receipts  # noqa: E402

if TYPE_CHECKING:
    from security.readers import Reader

TOPIC = "reliability"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
"""How a run is ended on the way, in turn."""
LOOK_S = 0.5
WARM_STEPS = 500
"""Steps of a session after which its memory is compared: before them it is still growing."""
STOP_S = 120.0
"""Seconds in which a run that was asked to stop has saved and ended, and one file was read."""
OUTCOME = "outcome.json"
MOST_FAULTS = 20
"""Faults of one reader after which it is given no more."""
GUIDED_MIB = 4096
"""The memory that a reader's process may have while atheris makes its files."""


# ---- files that were spoiled ------------------------------------------------------------------


def fuzz(
    minutes: float, only: Sequence[str], seed: int, work: Path, results: Path, guided: bool = False
) -> int:
    """Run the readers on spoiled files for so many minutes in all; return the number of faults."""
    readers = the_readers(guided)
    names = [name for name in readers.READERS if not only or name in only]
    share_s = 60 * minutes / len(names)
    outcomes: dict[str, dict[str, Any]] = {}
    readers.make_shared()
    one = fuzz_guided if guided else fuzz_one
    for number, name in enumerate(names):
        folder = work / f"{number:02d}"
        folder.mkdir(parents=True)
        process = os.fork()
        if not process:
            try:
                one(readers.READERS[name], share_s, seed + number, folder)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0 if (folder / OUTCOME).is_file() else 1)
        code = ended(process, share_s + STOP_S)
        file = folder / OUTCOME
        outcomes[name] = json.loads(file.read_text()) if file.is_file() else {"faults": []}
        if code:  # a crash of a library, memory that ran out, or a file that hung
            outcomes[name]["faults"].append(f"exit status {code}")
        print(name, outcomes[name], flush=True)
    faults = sum(len(one.get("faults", ())) for one in outcomes.values())
    counted = {
        key: sum(one.get(key, 0) for one in outcomes.values())
        for key in ("files", "read", "refused")
    }
    receipts.append(
        TOPIC,
        {
            "files": receipts.spread([counted["files"]], "spoiled files"),
            "read": receipts.spread([counted["read"]], "spoiled files"),
            "refused": receipts.spread([counted["refused"]], "spoiled files"),
            "faults": receipts.spread([faults], "spoiled files"),
            "longest_s": receipts.spread(
                [one.get("longest_s", 0.0) for one in outcomes.values()],
                "s of the longest file of a reader",
            ),
            "grown_mib": receipts.spread(
                [one.get("grown_mib", 0.0) for one in outcomes.values()],
                "MiB that a reader's process grew",
            ),
        },
        results=results,
        kind="fuzz",
        engine=(engine := "atheris" if guided else "random"),
        shape=f"{len(names)} readers, {engine}",
        n=1,
        seed=seed,
        readers={
            name: {k: v for k, v in one.items() if k != "faults"}
            | {"faults": len(one.get("faults", ()))}
            for name, one in outcomes.items()
        },
    )
    return faults


def the_readers(guided: bool) -> ModuleType:
    """Import the readers, with every branch of the package counted where files are guided."""
    if guided:
        atheris = importlib.import_module("atheris")
        with atheris.instrument_imports(include=["headrace"]):
            return importlib.import_module("security.readers")
    return importlib.import_module("security.readers")


class Tally:
    """Gives spoiled files to one reader, and counts what comes of them."""

    def __init__(self, reader: "Reader", work: Path) -> None:
        self.reader, self.work, self.file = reader, work, reader.make(work)
        self.raw = self.file.read_bytes()
        self.counts = {"files": 0, "read": 0, "refused": 0}
        self.longest_s, self.faults, self._before_mib = 0.0, list[str](), resident_mib()

    def take(self, content: bytes) -> None:
        """Let the reader read a spoiled file, and keep the file where that is a fault."""
        from security.readers import outcome

        self.file.write_bytes(content)
        self.reader.sealed(self.file)
        started = time.perf_counter()
        self.counts["files"] += 1
        try:
            self.counts[outcome(self.reader, self.file)] += 1
        except Exception as error:
            kept = self.work / f"fault-{len(self.faults)}{self.file.suffix}"
            kept.write_bytes(content)
            self.faults.append(f"{type(error).__name__}: {error}"[:200])
        self.longest_s = max(self.longest_s, time.perf_counter() - started)

    def save(self) -> None:
        """Write what was counted."""
        made = {
            **self.counts,
            "faults": self.faults,
            "longest_s": round(self.longest_s, 3),
            "grown_mib": round(max(0.0, peak_mib() - self._before_mib)),
        }
        (self.work / OUTCOME).write_text(json.dumps(made))


def fuzz_one(reader: "Reader", seconds: float, seed: int, work: Path) -> None:
    """Run one reader on spoiled files until the time is over, and write what came of it."""
    from security.readers import outcome
    from security.spoil import spoiled

    chance, tally = random.Random(seed), Tally(reader, work)
    outcome(reader, tally.file)
    begun = time.monotonic()
    while time.monotonic() - begun < seconds and len(tally.faults) <= MOST_FAULTS:
        tally.take(spoiled(tally.raw, reader.values, chance))
    tally.save()


def fuzz_guided(reader: "Reader", seconds: float, seed: int, work: Path) -> None:
    """Run one reader on files that atheris makes of those that reached a new branch.

    libFuzzer ends the process: what was counted is written once a second. Half of the files are
    spoiled as `fuzz_one` does it, the others by libFuzzer.
    """
    from security.spoil import spoiled

    atheris, tally, saved = importlib.import_module("atheris"), Tally(reader, work), [0.0]

    def take(content: bytes) -> None:
        if len(tally.faults) <= MOST_FAULTS:
            tally.take(content)
        if time.monotonic() - saved[0] > 1:
            tally.save()
            saved[0] = time.monotonic()

    def changed(content: bytes, most: int, number: int) -> bytes:
        chance = random.Random(number)
        try:
            ours = chance.randrange(2) and spoiled(content, reader.values, chance)
        except (ValueError, LookupError, struct.error, RecursionError):  # no such file any more
            ours = b""
        return (ours or atheris.Mutate(content, most))[:most]

    (corpus := work / "corpus").mkdir()
    (corpus / "valid").write_bytes(tally.raw)
    options = {
        "max_total_time": max(1, round(seconds)),
        "seed": seed + 1,
        "max_len": max(1 << 16, 2 * len(tally.raw)),
        "timeout": round(STOP_S),
        "rss_limit_mb": GUIDED_MIB,
        "verbosity": 0,
        "artifact_prefix": f"{work}/",
    }
    words = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup(["fuzz", *words, str(corpus)], take, custom_mutator=changed)
    atheris.Fuzz()


def ended(process: int, seconds: float) -> int:
    """Return how a process ended, which is killed where it has not in so many seconds."""
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1]


def resident_mib() -> float:
    """Return the memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mib() -> float:
    """Return the most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# ---- a long life ------------------------------------------------------------------------------

PLAN = """
name = "soak"
directory = "{work}/runs"
device = "cpu"
guard = false

[model]
dim = 8
layers = 1
heads = 1
ffn = 32
vocab = 320

[data]
sources = "{work}/text.txt"
directory = "{work}/prepared"
validation = "{work}/held.txt"
vocab = 300
sequence_length = 8

[goal]
steps = {steps}

[batch]
tokens = 16

[schedule]
kind = "constant"

[eval]
every_steps = {often}
tokens = 64

[checkpoint]
every_steps = {often}
keep_last = 2
"""


@dataclass
class Session:
    """Hold what was seen of one process of the run.

    Args:
        ended_by: the signal that ended it; "" where it ended by itself.
        looks: (step, memory in MiB, open files, threads) at each look.
    """

    ended_by: str = ""
    looks: list[tuple[int, float, int, int]] = field(default_factory=list)

    def growth_mib(self) -> float | None:
        """Return how much its memory grew from its warm-up to its end; None where it was brief."""
        warm = [look for look in self.looks if look[0] >= self.looks[0][0] + WARM_STEPS]
        if len(warm) < 8:
            return None
        quarter = max(1, len(warm) // 4)
        return median(m for _, m, _, _ in warm[-quarter:]) - median(
            m for _, m, _, _ in warm[:quarter]
        )


def soak(steps: int, often: int, kills: int, seed: int, work: Path, results: Path) -> int:
    """Train, end and resume a tiny run; write a row, and return the number of broken promises."""
    work.mkdir(parents=True, exist_ok=True)
    chance, plan = random.Random(seed), work / "soak.toml"
    words = ["mill", "river", "stone", "water", "gate", "grain", "wheel", "bread"]
    for name, lines in (("text", 4000), ("held", 40)):
        text = "".join(" ".join(chance.choices(words, k=8)) + "\n" for _ in range(lines))
        (work / f"{name}.txt").write_text(text)
    plan.write_text(PLAN.format(work=work, steps=steps, often=often))
    run, sessions = work / "runs" / "soak", list[Session]()
    stops = sorted(chance.sample(range(steps // 20, steps - steps // 20), kills)) if kills else []
    reads, torn, most_files, begun = 0, 0, 0, time.monotonic()
    for number in range(kills + 1):
        ends_at = stops[number] if number < len(stops) else None
        session, counted = live(run, plan, ends_at, SIGNALS[number % len(SIGNALS)])
        sessions.append(session)
        reads, torn = reads + counted["reads"], torn + counted["torn"]
        most_files = max(most_files, counted["files"])
        print(f"session {number}: {session.ended_by or 'done'} at {last_step(run)[0]}", flush=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    growth = [g for one in sessions if (g := one.growth_mib()) is not None]
    handles = [look[2] for one in sessions for look in one.looks]
    broken = {
        "steps": [row["step"] for row in rows] != [*range(1, steps + 1)],
        "losses": not all(isinstance(row["loss"], float) for row in rows),
        "torn": torn > 0,
        "status": json.loads((run / "report.json").read_text())["status"] != "done",
    }
    receipts.append(
        TOPIC,
        {
            "steps": receipts.spread([len(rows)], "steps"),
            "wall_s": receipts.spread([round(time.monotonic() - begun, 1)], "s"),
            "memory_growth_mib": receipts.spread(growth or [0.0], "MiB from the warm-up on"),
            "open_files": receipts.spread(handles, "open files of a process"),
            "threads": receipts.spread([k[3] for s in sessions for k in s.looks], "threads"),
            "files_in_run": receipts.spread([most_files], "files, at most"),
            "run_bytes_a_step": receipts.spread(
                [round((run / "metrics.jsonl").stat().st_size / len(rows), 1)],
                "bytes of metrics.jsonl a step",
            ),
            "reads_while_written": receipts.spread([reads], "reads of metrics.jsonl"),
            "torn_reads": receipts.spread([torn], "reads with a row that is none"),
            "broken": receipts.spread([sum(broken.values())], "promises"),
        },
        results=results,
        kind="soak",
        n=1,
        seed=seed,
        sessions=[
            {"ended_by": one.ended_by, "looks": len(one.looks), "growth_mib": one.growth_mib()}
            for one in sessions
        ],
        kept_checkpoints=len([*(run / "checkpoints").glob("step-*")]),
        evaluations=steps // often,
        broken=[name for name, wrong in broken.items() if wrong],
    )
    return sum(broken.values())


def live(
    run: Path, plan: Path, ends_at: int | None, how: signal.Signals
) -> tuple[Session, dict[str, int]]:
    """Start or resume the run, look at it, and end it at a step; None lets it end by itself."""
    began = (run / "plan.toml").is_file()
    words = [str(run / "plan.toml"), "--resume"] if began else [str(plan)]
    log = (run.parent.parent / "log.txt").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "train", *words],
        stdout=log,
        stderr=log,
        cwd=run.parent.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    session, counted = Session(), {"reads": 0, "torn": 0, "files": 0}
    while process.poll() is None:
        time.sleep(LOOK_S)
        step, torn = last_step(run)
        counted["reads"] += 1
        counted["torn"] += torn
        counted["files"] = max(counted["files"], sum(1 for _ in run.rglob("*")))
        seen = look_at(process.pid)
        if seen is not None and step:
            session.looks.append((step, *seen))
        if ends_at is not None and step >= ends_at:
            session.ended_by = how.name
            process.send_signal(how)
            process.wait(STOP_S)
    log.close()
    if not session.ended_by and process.returncode:
        raise SystemExit(f"the run ended with code {process.returncode}; see {log.name}")
    return session, counted


def look_at(process: int) -> tuple[float, int, int] | None:
    """Return a process's memory in MiB, open files and threads; None once it has ended."""
    folder = Path("/proc") / str(process)
    try:
        pages = int((folder / "statm").read_text().split()[1])
        handles = len([*(folder / "fd").iterdir()])
        threads = len([*(folder / "task").iterdir()])
    except (OSError, IndexError, ValueError):
        return None
    return (pages * os.sysconf("SC_PAGE_SIZE") / 2**20, handles, threads) if pages else None


def last_step(run: Path) -> tuple[int, int]:
    """Return the last step that a run wrote, and 1 if a whole line is no row, else 0."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 20_000))
            lines = file.read().split(b"\n")
    except OSError:
        return 0, 0
    whole = lines[1:-1] if len(lines) > 2 else lines[:-1]
    try:
        rows = [json.loads(line) for line in whole]
        return (rows[-1]["step"] if rows else 0), 0
    except (ValueError, KeyError, TypeError):
        return 0, 1


def main() -> int:
    """Run what the command line asks for; return 1 where anything was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["fuzz", "soak"])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--guided", action="store_true", help="atheris makes the files")
    parser.add_argument("--only", action="append", default=[], help="a reader's name; else all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--often", type=int, default=500, help="steps between saves")
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--commit", help=receipts.COMMIT_HELP)
    given = parser.parse_args()
    receipts.given_commit = given.commit
    with tempfile.TemporaryDirectory(prefix="headrace-reliability-") as made:
        work = given.work or Path(made)
        if given.what == "fuzz":
            most = (given.minutes, given.only, given.seed, work, given.results, given.guided)
            return min(1, fuzz(*most))
        return min(1, soak(given.steps, given.often, given.kills, given.seed, work, given.results))


if __name__ == "__main__":
    sys.exit(main())
