"""Measure the CPU time until the first step of two commits in pairs, and that of the help.

    python benchmarks/first_step.py --before 985a29e --rounds 3

`headrace train demo goal.steps=1` runs in a checkout of an earlier commit and in this one, in
alternation, A B B A, each in a process and a folder of its own where the text is prepared already.
Counted are CPU seconds, user and system, of one thread: a machine that others use stretches them
less than wall time. They are read at the run's first update of its weights, from a hook of torch's
optimizers, and at the end of the command, which also evaluates, saves and writes the report.
`headrace --help` is run as often. The receipt is a row of results/overhead.jsonl with the
measurement `first_step`: `overhead` is what this commit adds to the time until the first step.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import receipts
from overhead import alternate, less_one

from headrace.core.statistics import Interval, paired_ratio

WORDS = ("train", "demo", "goal.steps=1", "device=cpu")
"""The command that is measured."""
HELP_S = 0.4
"""CPU seconds that `headrace --help` may take on an idle core."""
PROGRAM = """
import os, runpy, sys
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook
mark = Path(sys.argv[1])
def stepped(*_):
    if not mark.exists():
        mark.write_text(repr(sum(os.times()[:2])))
register_optimizer_step_post_hook(stepped)
sys.argv = ["headrace", *sys.argv[2:]]
runpy.run_module("headrace", run_name="__main__")
"""
"""Runs the command, and writes the CPU seconds at the first update into a file."""


class Side:
    """Hold one checkout, with the folder that its runs are made in.

    Args:
        code: the checkout.
        folder: an empty folder.
    """

    def __init__(self, code: Path, folder: Path) -> None:
        self.code, self.folder = code, folder
        self.commands_s: list[float] = []
        """CPU seconds of each command whole"""
        self.help_s: list[float] = []
        """CPU seconds of each `headrace --help`"""
        self._runs = 0

    def first_step_s(self) -> float:
        """Return the CPU seconds of a new process until its first update, and time the help."""
        self._runs += 1
        mark = self.folder / f"first-{self._runs}"
        words = ["-c", PROGRAM, str(mark), *WORDS, f"name=run-{self._runs}"]
        self.commands_s.append(self._cpu_s(*words))
        self.help_s.append(self._cpu_s("-m", "headrace", "--help"))
        return float(mark.read_text())

    def warm(self) -> None:
        """Run everything once, so that text, tokenizer and byte code are there."""
        self.first_step_s()
        self.commands_s.clear()
        self.help_s.clear()

    def _cpu_s(self, *words: str) -> float:
        """Run Python and return its CPU seconds; end with what it printed where it failed."""
        own = {"PYTHONPATH": str(self.code), "OMP_NUM_THREADS": "1"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{self.code}: {done.stdout}{done.stderr}")
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@contextmanager
def checkout(commit: str, folder: Path) -> Iterator[Path]:
    """Yield a checkout of a commit of this repository, which is removed afterwards."""
    git = ["git", "-C", str(receipts.ROOT), "worktree"]
    path = str(folder / "code")
    subprocess.run([*git, "add", "--quiet", "--detach", path, commit], check=True)
    try:
        yield Path(path)
    finally:
        subprocess.run([*git, "remove", "--force", path], check=True)


def measure(before: Side, after: Side, rounds: int) -> tuple[int, dict[str, Any]]:
    """Return the number of pairs, and the metrics of the later side beside the earlier one."""
    before.warm()
    after.warm()
    earlier_s, later_s = alternate(before.first_step_s, after.first_step_s, rounds)
    return len(later_s), {
        "overhead": _share(paired_ratio(later_s, earlier_s)),
        "whole_command": _share(paired_ratio(after.commands_s, before.commands_s)),
        "before_cpu_s": receipts.spread(earlier_s, "s"),
        "after_cpu_s": receipts.spread(later_s, "s"),
        "help_before_cpu_s": receipts.spread(before.help_s, "s"),
        "help_cpu_s": receipts.spread(after.help_s, "s"),
    }


def _share(ratio: Interval) -> dict[str, Any]:
    """Return a ratio of times as the share that the later side adds."""
    added = less_one(ratio)
    unit = "of the earlier time"
    return {"value": added.value, "low": added.low, "high": added.high, "unit": unit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="a commit of this repository")
    parser.add_argument("--after", type=Path, default=receipts.ROOT, help="a folder: this checkout")
    parser.add_argument("--rounds", type=int, default=3, help="of A B B A: two pairs each")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, name) for name in ("before", "after")]
        for folder in folders:
            folder.mkdir()
        with checkout(args.before, folders[0]) as code:
            pairs, metrics = measure(
                Side(code, folders[0]), Side(args.after.resolve(), folders[1]), args.rounds
            )
    row = receipts.append(
        "overhead",
        metrics,
        results=args.results,
        hardware=receipts.processor(),
        measurement="first_step",
        shape="demo",
        before=args.before,
        n=pairs,
        seeds=[0],
        help_allowed_s=HELP_S,
    )
    print(json.dumps(row["metrics"], indent=1))


if __name__ == "__main__":
    main()
