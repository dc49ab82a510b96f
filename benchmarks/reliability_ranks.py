"""Count how often a run of several ranks goes on exactly after `kill -9` of one of them.

    python benchmarks/reliability_ranks.py --kills 20 --ranks 4

A plan of the standard library is trained once without a fault, by torchrun and gloo. Then the same
plan is trained again, and at a random moment, one in four of them before its first step, a random
rank is killed. torchrun ends, the command with `--resume` goes on from the last checkpoint, and the
next kill comes. After each kill the rows of metrics.jsonl that were written until the next one are
held against those of the whole run: a kill was resumed exactly where every loss is equal to the
bit. If the last weights and optimizer states are not, none was. A start that has not ended a
minute after its rank was killed hung, and is ended.

One row of results/reliability.jsonl (kind `killed_rank`): both counts, and the seconds from a kill
until every process had ended.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import receipts
import torch

from headrace.cli.catalogue import catalogue
from headrace.plan.plan import Plan
from headrace.train.checkpoint import Saved

PLAN = """
name = "whole"
device = "cpu"
guard = false

[model]
dim = 48
layers = 2
heads = 2

[data]
sources = "stdlib"
vocab = 1024
sequence_length = 32

[goal]
steps = {steps}

[batch]
tokens = 512

[schedule]
steps = {steps}

[eval]
every_steps = 100
tokens = 1024

[checkpoint]
every_steps = 5

[mesh]
data = {ranks}
{more}
"""
STEPS_APART = 30
"""Steps of the whole run a kill."""
EARLY = 4
"""One kill of so many comes at any moment since the start, the others after a step."""
EARLY_S, AFTER_S = 12.0, 1.0
"""Seconds within which an early kill comes after the start, and a late one after its step."""
HUNG_S = 60.0


class Torchrun:
    """A start of the command, by as many ranks as the plan has.

    Args:
        cwd: where plan.toml lies.
        ranks: how many.
        words: behind `headrace train plan.toml`.
    """

    def __init__(self, cwd: Path, ranks: int, *words: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.log = (cwd / "log.txt").open("a+")
        self.process = subprocess.Popen(
            [*command, f"--nproc-per-node={ranks}", "-m", "headrace", "train", "plan.toml", *words],
            cwd=cwd,
            env=env,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def worker(self, rank: int) -> int | None:
        """Return the process of a rank; None before it is there."""
        wanted = f"RANK={rank}".encode()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, IndexError, ValueError):
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                known = (stat.parent / "environ").read_bytes().split(b"\0")
                if parent == self.process.pid and wanted in known:
                    return int(stat.parent.name)
        return None

    def ended_after_s(self) -> float:
        """Return the seconds until all processes have ended; end what takes more than a minute."""
        began_s = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(HUNG_S)
        took_s = time.monotonic() - began_s
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()
        return took_s


def losses(run: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of each whole row of metrics.jsonl."""
    rows = list[tuple[int, float]]()
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError):
            row = json.loads(line)
            rows.append((row["step"], row["loss"]))
    return rows


def last_state(run: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the newest checkpoint."""
    saved, state = Saved(run / "checkpoints" / "latest"), {}
    for name in saved.names():
        shape, dtype = saved.shape_of(name)
        state[name] = torch.empty(shape, dtype=dtype)
        saved.fill_(name, state[name])
    return state


def is_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Return whether two states are equal to the bit."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def kill_one(started: Torchrun, run: Path, rank: int, after_step: int, delay_s: float) -> bool:
    """Kill a rank after a step, or after a delay alone where that is 0; return if it was there."""
    give_up_s = time.monotonic() + 120
    while after_step and time.monotonic() < give_up_s and started.process.poll() is None:
        rows = losses(run)
        if rows and rows[-1][0] >= after_step:
            break
        time.sleep(0.05)
    time.sleep(delay_s)
    while started.process.poll() is None and (pid := started.worker(rank)) is None:
        time.sleep(0.05)
    if started.process.poll() is not None:
        return False
    os.kill(pid, signal.SIGKILL)  # pyright: ignore[reportPossiblyUnboundVariable]
    return True


def measure(cwd: Path, kills: int, ranks: int, seed: int) -> dict[str, Any]:
    """Return the metrics of a row."""
    whole, killed, chance = cwd / "runs/whole", cwd / "runs/killed", random.Random(seed)
    if Torchrun(cwd, ranks).process.wait() != 0:
        raise SystemExit(f"the run without a fault failed: {(cwd / 'log.txt').read_text()[-2000:]}")
    wanted, exact, ended_s, at = dict(losses(whole)), list[bool](), list[float](), list[int]()
    for attempt in range(kills + 1):
        resume = ["--resume"] if killed.exists() else []
        began_with = losses(killed)
        started = Torchrun(cwd, ranks, "name=killed", *resume)
        if attempt < kills:
            early = attempt % EARLY == 1
            after = 0 if early else (began_with[-1][0] if began_with else 0) + STEPS_APART // 2
            delay_s = chance.uniform(0, EARLY_S if early else AFTER_S)
            if not kill_one(started, killed, chance.randrange(ranks), after, delay_s):
                raise SystemExit("the run ended before its rank was killed; more steps are needed")
            ended_s.append(started.ended_after_s())
        elif started.process.wait() != 0:
            raise SystemExit(f"the last resume failed: {(cwd / 'log.txt').read_text()[-2000:]}")
        rows = losses(killed)
        at.append(rows[-1][0] if rows else 0)
        if attempt:  # what came after the kill before
            exact.append(all(wanted.get(step) == loss for step, loss in rows))
        print(f"{attempt}: step {at[-1]}, ended after {ended_s[-1]:.1f} s", flush=True)
    same = is_equal(last_state(whole), last_state(killed))
    return {
        "resumed_exactly": receipts.spread([same * sum(exact)], f"of {kills} kills"),
        "hung": receipts.spread([sum(s >= HUNG_S for s in ended_s)], f"of {kills} kills"),
        "ended_after": receipts.spread(ended_s, "s"),
        "killed_at": receipts.spread(at[:-1], "steps"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--fsdp", action="store_true", help="slices, in the place of replicas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a folder to work in; a temporary one without it")
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    steps = STEPS_APART * (args.kills + 2)
    more = "[techniques.fsdp]" if args.fsdp else ""
    text = PLAN.format(steps=steps, ranks=args.ranks, more=more)
    plan = Plan.read(text, catalogue())
    with tempfile.TemporaryDirectory() as scratch:
        cwd = args.work or Path(scratch)
        cwd.mkdir(parents=True, exist_ok=True)
        (cwd / "plan.toml").write_text(text)
        values = measure(cwd, args.kills, args.ranks, args.seed)
    row = receipts.append(
        "reliability",
        values,
        results=args.results,
        kind="killed_rank",
        n=args.kills,
        ranks=args.ranks,
        backend="gloo",
        seeds=[args.seed],
        plan_sha256=receipts.sha256(plan.dump()),
        techniques=sorted(plan.techniques),
    )
    print({name: one["value"] for name, one in row["metrics"].items()})


if __name__ == "__main__":
    main()
