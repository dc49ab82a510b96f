"""Train a plan for a part of its run, with its own schedule shrunk to that part.

So decays are compared at their ends. A longer rung goes on from the state of a shorter one where
the schedule allows: nothing depends on the end before the decay of warmup_stable_decay, and nothing
ever does with a constant rate or an inverse square root. Such a state is kept under the plan
without its decay, its stem. Plans that differ in the decay alone share it. Resuming is bit for
bit, so a loss is the same whether its run went on or began anew.
"""

import shutil
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Protocol

from headrace.core.errors import Diverged
from headrace.core.limits import MOST
from headrace.costs.count import total_parameters
from headrace.data.tokenizer import entries
from headrace.optim.schedule import decay_begins
from headrace.plan.plan import Plan
from headrace.plan.schedule import ENDLESS
from headrace.train import train as trainer
from headrace.train.run_folder import RunFolder
from headrace.tuner.readings import Reading, read, time_steps
from headrace.tuner.store import fingerprint
from headrace.tuner.worker import Worker

WARM, TIMED = 2, 5
"""Steps before a step is timed, and steps of which the median is its time."""
WARMUP_SHARE, UNKNOWN_SHARE = 0.5, 0.25
"""Largest share of the first rung that its warmup may take; and the share where a plan does not say
where it ends."""
STATE_BYTES, ROOM = 16, 0.02
"""Bytes of a state for each parameter, at most: a weight and three moments in fp32; and the share
of the free disk that one state may take, or it is not kept."""


class Prefixes(Protocol):
    """Train parts of runs, and time their steps."""

    def time(self, plan: Plan, limit_s: float) -> Reading:
        """Return a reading with the seconds of a step."""
        ...

    def train(self, plan: Plan, limit_s: float, *, goes_on: bool) -> Reading:
        """Return a reading with the validation loss at the end of a plan that `shrunk` made.

        Args:
            plan: what to train.
            limit_s: seconds after which it is given up.
            goes_on: whether a longer rung may follow, so that its state is worth keeping.
        """
        ...

    def keep(self, plans: Sequence[Plan]) -> None:
        """Remove the states of all but these plans."""
        ...


def shrunk(plan: Plan, steps: int, first_steps: int) -> Plan:
    """Return the plan with a schedule that ends after so many steps, which also end the run.

    The warmup is the plan's own, shrunk to the first rung, and is the same in longer ones: they go
    on from states behind it. Techniques that only set keys of the schedule are left out, and their
    keys stay.

    Args:
        plan: the run.
        steps: that it trains for.
        first_steps: that it trains for in the first rung.
    """
    warmup, horizon = plan.schedule.warmup_steps, plan.horizon_steps
    if warmup:
        share = warmup / horizon if horizon else UNKNOWN_SHARE
        most = max(1, round(min(share, WARMUP_SHARE) * first_steps))
        warmup = min(warmup, most)
    schedule = plan.schedule.model_copy(update={"steps": steps, "warmup_steps": warmup})
    return plan.replaced(
        name="prefix",
        guard=False,
        goal={"steps": steps},
        schedule=schedule,
        eval=plan.eval.model_copy(update={"every_steps": MOST}),
        checkpoint={"every_steps": 0},
        track={},
        techniques={n: t for n, t in plan.techniques.items() if not _sets_schedule(plan, n)},
    )


def _sets_schedule(plan: Plan, name: str) -> bool:
    """Return whether a technique does nothing but set keys of the plan's schedule."""
    technique = plan.techniques[name]
    tables = {key.partition(".")[0] for key in technique.keys(plan)}
    return tables == {"schedule"} and not technique.claims and not technique.composes


def timed_as(plan: Plan) -> Plan:
    """Return a plan whose steps take as long: without what changes no step's time."""
    return shrunk(plan, 1, 1).replaced(
        seed=0, optimizer={}, schedule={"kind": "constant"}, goal={"steps": 1}, hardware={}
    )


def stable_steps(plan: Plan) -> int:
    """Return the steps of a shrunk plan after which its state is one of a longer run too; or 0."""
    if any(technique.follows_horizon for technique in plan.techniques.values()):
        return 0
    steps = plan.goal.steps or 0
    if plan.schedule.kind in ENDLESS:
        return steps
    decays = plan.schedule.kind == "warmup_stable_decay"
    return decay_begins(plan.schedule, steps) + 1 if decays else 0


def stem(plan: Plan) -> str:
    """Return the hash of a shrunk plan without its decay and its end."""
    kind = plan.schedule.kind if plan.schedule.kind in ENDLESS else "constant"
    schedule = {"kind": kind, "warmup_steps": plan.schedule.warmup_steps}
    return fingerprint(plan.replaced(schedule=schedule, goal={"steps": MOST}))[:16]


def newest_state(folder: Path, most: int) -> Path | None:
    """Return the checkpoint of the most steps, at most so many, that a stem's folder holds.

    The folder of each run is named after its stable steps: later checkpoints of it have decayed.
    """
    states = {
        int(path.name.removeprefix("step-")): path
        for path in sorted(folder.glob("*/*/checkpoints/step-*"))
        if path.name == f"step-{path.parts[-4]}"
    }
    steps = [step for step in states if step <= most]
    return states[max(steps)] if steps else None


def train_prefix(plan: Plan, folder: str, *, goes_on: bool) -> Reading:
    """Train a shrunk plan to its end, from the newest state of its stem.

    Args:
        plan: what `shrunk` returned.
        folder: of states and runs.
        goes_on: keep the state before its decay.
    """

    def go(reading: Reading) -> None:
        stable, steps = stable_steps(plan), plan.goal.steps or 0
        root = Path(folder) / stem(plan)
        begins = newest_state(root, min(stable, steps - 1))
        known = begins is not None and begins.name == f"step-{stable}"
        saves = goes_on and stable > 0 and not known and _has_room(plan, Path(folder))
        run = plan.replaced(
            directory=str(root / str(stable)),
            checkpoint={"every_steps": stable if saves else 0, "keep_best": False},
        )
        try:
            if begins is None:
                path = trainer.run(run).folder
            else:
                from_run, name = begins.parent.parent, begins.name
                result = trainer.run(
                    run, resume=True, folder=from_run, checkpoint=name, branch=True
                )
                path = result.folder
        except Diverged:
            reading.losses = [inf]
            return
        report = RunFolder(path).read_report()
        reading.losses = [report["val"][-1]["bits_per_byte"]]
        reading.tokens_per_s = report["steady_tokens_per_s"]
        reading.steps = steps - (0 if begins is None else int(begins.name.removeprefix("step-")))
        for state in path.glob("checkpoints/step-*"):
            if state.name != f"step-{stable}":
                shutil.rmtree(state)
        if not saves:
            shutil.rmtree(path)

    return read(go)


def _has_room(plan: Plan, folder: Path) -> bool:
    """Return whether the disk has room for the plan's state, and for those of many others."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = plan.model.vocab or entries(plan.data)  # a recipe leaves it to its tokenizer
    model = plan.model.model_copy(update={"vocab": vocab})
    needs_bytes = STATE_BYTES * total_parameters(model)
    return needs_bytes < ROOM * shutil.disk_usage(folder).free


class PrefixRuns:
    """Train parts of runs in a process of their own, with their states under a folder.

    Args:
        worker: the process.
        folder: of states and runs.
    """

    def __init__(self, worker: Worker, folder: Path) -> None:
        self.worker, self.folder = worker, folder

    def time(self, plan: Plan, limit_s: float) -> Reading:
        """Return a reading with the seconds of a step on the plan's text."""
        timing = partial(time_steps, text=True, warm=WARM, timed=TIMED)
        return self.worker.ask(timing, plan, limit_s=limit_s)

    def train(self, plan: Plan, limit_s: float, *, goes_on: bool) -> Reading:
        """Return a reading with the validation loss at the end of a shrunk plan."""
        return self.worker.ask(
            train_prefix, plan, str(self.folder), goes_on=goes_on, limit_s=limit_s
        )

    def keep(self, plans: Sequence[Plan]) -> None:
        """Remove the states of all but these plans."""
        names = {stem(plan) for plan in plans}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)
