"""Run a list of measurements in one call, spread over the GPUs of one host.

    python benchmarks/campaign.py benchmarks/campaigns/h200.toml --minutes 25 --data novels

A list is TOML, and its jobs are taken in their order:

    [[jobs]]
    name = "overhead"
    seconds = 480                    # about; it does not begin when less is left
    limit_s = 600                    # killed then; twice `seconds` without it
    timed = true                     # nothing else on its GPU; without it up to `BESIDE` at a time
    each_gpu = false                 # once on every GPU, which no other job may have before
    cores = 24                       # of the host's; without it a GPU's share of them
    command = "{python} benchmarks/overhead.py --plan benchmarks/plans/160m.toml"

A command is bash's, and runs in this checkout with one GPU in sight and its share of the cores.
It may have `{python}`, `{data}` (a folder of text), `{logs}`, `{part}` (1/2 on the first of two
GPUs), and `{left_s}`, the seconds that are its own. The list may be given again: LOGS/NAME.done
holds the exit status of each job that ended, and such a job is not run again. Jobs write their rows
themselves.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import receipts

BESIDE = 3
"""The most untimed jobs that share one GPU."""
PAUSE_S = 0.2
END_S = 10.0
"""Seconds before the end of the call that are kept for killed jobs to end."""


@dataclass(frozen=True)
class Job:
    """Describe one command of the list."""

    name: str
    command: str
    seconds: float
    limit_s: float = 0.0
    timed: bool = True
    each_gpu: bool = False
    cores: int = 0

    @property
    def most_s(self) -> float:
        """Return the seconds after which the command is killed."""
        return self.limit_s or 2 * self.seconds


@dataclass
class Running:
    """Hold the process of a job and the GPU that it runs on."""

    job: Job
    label: str
    process: subprocess.Popen[bytes]
    ends_s: float


@dataclass
class Campaign:
    """Hold the jobs of a list that are left, and those that run."""

    waiting: list[Job]
    gpus: int
    ends_s: float
    logs: Path
    data: str
    running: list[list[Running]] = field(init=False)

    def __post_init__(self) -> None:
        self.running = [[] for _ in range(self.gpus)]
        self.logs.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Start the jobs that fit, until none runs and none fits."""
        while True:
            self.reap()
            begun = any([self.begin(gpu) for gpu in range(self.gpus)])
            if not begun and not any(self.running):
                return
            time.sleep(PAUSE_S)

    def begin(self, gpu: int) -> bool:
        """Start the first job that may run on a GPU now; return whether there was one."""
        for job in self.waiting:
            mine = self.running[gpu]
            label = f"{job.name}.{gpu}" if job.each_gpu else job.name
            begun = any(r.label == label for others in self.running for r in others)
            if begun or self.done(label):
                continue
            if self.left_s < job.seconds:
                if job.each_gpu:
                    return False
                continue
            if not job.timed and not mine and any(map(has_room, self.running)):
                continue
            if mine and (job.timed or not has_room(mine)):
                return False
            mine.append(self.start(job, label, gpu))
            return True
        return False

    @property
    def left_s(self) -> float:
        """Return seconds until all must have ended."""
        return self.ends_s - time.monotonic() - END_S

    def done(self, label: str) -> bool:
        """Return whether the job has ended, in this call or an earlier one."""
        return (self.logs / f"{label}.done").exists()

    def start(self, job: Job, label: str, gpu: int) -> Running:
        """Start the process of a job, in a process group of its own."""
        most_s = min(job.most_s, self.left_s)
        command = job.command.format(
            python=shlex.quote(sys.executable),
            data=self.data,
            logs=shlex.quote(str(self.logs)),
            part=f"{gpu + 1}/{self.gpus}",
            left_s=max(1, round(most_s - END_S)),
        )
        share = cores_of(gpu, self.gpus, job.cores, sorted(os.sched_getaffinity(0)))
        print(f"{label}: on GPU {gpu}, {self.left_s:.0f} s left", flush=True)
        with (self.logs / f"{label}.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=receipts.ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)},
                start_new_session=True,
            )
        if share:
            os.sched_setaffinity(process.pid, share)
        return Running(job, label, process, time.monotonic() + most_s)

    def reap(self) -> None:
        """Record the jobs that ended, and end those that ran past their limit."""
        now = time.monotonic()
        for mine in self.running:
            for one in list(mine):
                overdue = now > one.ends_s
                if overdue and one.process.poll() is None:
                    end(one.process)
                status = one.process.poll()
                if status is not None:
                    mine.remove(one)
                    (self.logs / f"{one.label}.done").write_text(f"{status}\n")
                    print(f"{one.label}: {'no time left, ' * overdue}status {status}", flush=True)


def has_room(mine: list[Running]) -> bool:
    """Return whether a GPU runs untimed jobs only, and fewer than `BESIDE`."""
    return 0 < len(mine) < BESIDE and not any(one.job.timed for one in mine)


def cores_of(gpu: int, gpus: int, wanted: int, cores: list[int]) -> list[int]:
    """Return a GPU's share of the host's cores, or as many as are wanted, around that share."""
    first, last = gpu * len(cores) // gpus, (gpu + 1) * len(cores) // gpus
    if wanted:
        first = max(0, min(first, len(cores) - wanted))
        last = first + wanted
    return cores[first:last]


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a group of processes, then kill what is left of it."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(END_S / 2)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def jobs(file: Path) -> list[Job]:
    """Return the jobs of a list; a key that no job has is an error."""
    tables = tomllib.loads(file.read_text())["jobs"]
    listed = [Job(**one) for one in tables]
    names = [job.name for job in listed]
    if len({*names}) < len(names):
        raise SystemExit(f"{file} has two jobs of one name")
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("list", type=Path)
    parser.add_argument("--minutes", type=float, required=True, help="all ends by then")
    parser.add_argument("--gpus", type=int, default=receipts.host_gpus())
    parser.add_argument("--data", default="data", help="a folder of text, for commands that ask")
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--only", nargs="*", default=[], help="jobs by name")
    args = parser.parse_args()
    if args.gpus < 1:
        raise SystemExit("no NVIDIA GPU is here; --gpus N says how many to take")
    every = [job for job in jobs(args.list) if not args.only or job.name in args.only]
    ends_s = time.monotonic() + 60 * args.minutes
    Campaign(every, args.gpus, ends_s, args.logs.absolute(), args.data).run()


if __name__ == "__main__":
    main()
