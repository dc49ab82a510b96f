"""A screen of changes of learning: rungs by the minutes, at equal seconds, and no verdict."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, log2
from pathlib import Path
from typing import Any

import pytest

from headrace.assemble.context import choose_device, make_context
from headrace.cli.catalogue import catalogue
from headrace.costs.machine import Machine as Rates
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.tuner import rungs
from headrace.tuner.judge import Rules
from headrace.tuner.mup_check import narrowed
from headrace.tuner.page import write_tune_page
from headrace.tuner.path import TRIALS, Tuned, dumps
from headrace.tuner.prefix import PrefixRuns
from headrace.tuner.proposals import sources as real_sources
from headrace.tuner.readings import Reading
from headrace.tuner.rungs import Rung, better_half, gap_of, longest_that_fit, rungs_of
from headrace.tuner.store import Store
from headrace.tuner.tune import tune
from headrace.tuner.worker import Worker

KNOWN = catalogue()
CUDA = Rules(device="cuda", precision="bf16")
SLOW = "+z_loss"
BEST_LR = 0.004
CHANGES = (SLOW, *(f"optimizer.lr={lr}" for lr in (0.008, 0.002, 0.004, 0.0005, 0.00025)))
READY_S = 5.0


def off(plan: Plan) -> float:
    """Return by how much a plan's loss is above the best one's at the same steps."""
    return 0.1 * abs(log2(plan.optimizer.lr / BEST_LR))


@dataclass
class Parts:
    """Train parts of runs on a machine that is made up; wider models take longer."""

    machine: Any
    asked: list[Plan] = field(default_factory=list)
    kept: list[list[Plan]] = field(default_factory=list)
    interrupt_at: int | None = None
    diverges: float = inf

    def seconds(self, plan: Plan) -> float:
        """Return the seconds of a step of a plan."""
        return self.machine.step_s(plan) * plan.model.dim / 32

    def time(self, plan: Plan, limit_s: float) -> Reading:
        """Return the seconds of a step."""
        self.machine.now_s += READY_S
        return Reading(seconds=[self.seconds(plan)])

    def train(self, plan: Plan, limit_s: float, *, goes_on: bool) -> Reading:
        """Return a loss that falls with the steps and rises with the distance to the best rate."""
        if len(self.asked) + 1 == self.interrupt_at:
            raise KeyboardInterrupt
        self.asked.append(plan)
        steps = plan.goal.steps or 0
        self.machine.now_s += READY_S + steps * self.seconds(plan)
        loss = 1.0 + off(plan) + 2 / steps + 0.01 * plan.seed
        return Reading(losses=[inf if plan.optimizer.lr >= self.diverges else loss])

    def keep(self, plans: Sequence[Plan]) -> None:
        """Note which states are kept."""
        self.kept.append(list(plans))


def screen(
    machine: Any,
    plan: Plan,
    parts: Any,
    minutes: float = 60,
    *,
    changes: Sequence[str] = CHANGES,
    whole: list[Plan] | None = None,
    steps: int = 1000,
    narrowed: Any = None,
    **how: Any,
) -> Tuned:
    """Tune a plan of 1,000 steps, all in changes of learning."""

    def train(run: Plan, limit_s: float) -> Reading:
        (whole if whole is not None else []).append(run)
        seconds = steps * machine.step_s(run) * (0.5 + off(run)) * (1 + 0.01 * run.seed)
        machine.now_s += seconds
        return Reading(seconds=[seconds])

    def learning(best: Plan) -> list[Any]:
        plans = [changed(best, change.split(), KNOWN) for change in changes]
        return [machine.proposal(one, None) for one in plans if one != best]

    given = machine.sources([], start_s=machine.base_s)
    given = replace(given, learning=learning, **({"narrowed": narrowed} if narrowed else {}))
    first = plan.replaced(
        optimizer={"lr": 0.001},
        goal={"bits_per_byte": 1.1, "steps": steps},
        schedule={"steps": steps},
    )
    return tune(
        first,
        "quality",
        minutes,
        given,
        machine.measure,
        CUDA,
        train=train,
        prefixes=parts,
        clock=machine.clock,
        **how,
    )


def test_rungs_halve_at_equal_seconds_and_the_winner_goes_to_whole_runs(
    Machine: Any, plan: Plan, tmp_path: Path
) -> None:
    machine, whole, lines = Machine({"z_loss": 2.0}), list[Plan](), list[str]()
    parts = Parts(machine)
    tuned = screen(machine, plan, parts, whole=whole, note=lines.append)
    (seen,) = tuned.screens
    assert [(one.candidates, one.steps, one.seeds) for one in seen.rungs] == [
        (6, 64, 1),
        (3, 128, 2),
        (2, 256, 2),
    ]
    assert seen.ended and not seen.stopped and seen.width is None
    slow = next(row for row in seen.rows if row.changes == (SLOW,))
    assert (slow.steps, slow.seconds) == (32, pytest.approx(6.4))  # half of the steps, as long
    assert slow.gap == pytest.approx(2 / 32 - 2 / 64) and slow.went_on is False
    went_on = [(row.rung, row.changes[0][13:]) for row in seen.rows if row.went_on]
    rates = [[rate for rung, rate in went_on if rung == number] for number in (1, 2, 3)]
    assert rates == [["0.008", "0.002", "0.004"], ["0.008", "0.004"], ["0.008", "0.004"]]
    assert sorted({row.rung for row in seen.rows if not row.changes}) == [1, 2, 3]
    winners = [row.changes for row in seen.winners]
    assert winners == [("optimizer.lr=0.004",), ("optimizer.lr=0.008",)]
    assert {run.optimizer.lr for run in whole} == {0.001, 0.004, 0.008}
    assert whole[1].optimizer.lr == 0.004 and tuned.plan.optimizer.lr == 0.004
    assert parts.kept[-1] == [] and {one.seed for one in parts.kept[0]} == {plan.seed}
    said = tuned.sentence()
    assert "6, 4 dropped, which is no verdict on them; ahead in the last rung: optimizer.lr" in said
    assert any("rung 1: +z_loss: 1.26" in line for line in lines)
    (row, *_) = (one for one in json.loads(dumps(tuned))["screens"][0]["rows"] if one["changes"])
    assert row["changes"] == [SLOW] and row["went_on"] is False and row["gap"] > 0
    page = write_tune_page(tuned, tmp_path).read_text()
    assert "are worth whole runs" in page and "gone on" in page and "dropped" in page
    again = screen(Machine({"z_loss": 2.0}), plan, Parts(Machine({"z_loss": 2.0})))
    assert again.screens[0].rungs == seen.rungs


def test_nothing_ahead_in_the_last_rung_goes_to_whole_runs(Machine: Any, plan: Plan) -> None:
    machine, whole = Machine({"z_loss": 2.0}), list[Plan]()
    worse = (SLOW, "optimizer.lr=0.0005", "optimizer.lr=0.00025", "optimizer.lr=0.5")
    tuned = screen(machine, plan, Parts(machine, diverges=0.5), changes=worse, whole=whole)
    (seen,) = tuned.screens
    assert not whole and not tuned.kept and seen.ended and not seen.winners
    wild = next(row for row in seen.rows if row.changes == ("optimizer.lr=0.5",))
    assert wild.gap == inf and wild.went_on is False
    assert "none was ahead of the plan as it is in the last rung." in tuned.sentence()
    told = json.loads(dumps(tuned))["screens"][0]
    assert told["ended"] and any(row["gap"] is None for row in told["rows"])


def test_minutes_that_hold_no_rungs_say_how_many_do(Machine: Any, plan: Plan) -> None:
    machine, whole = Machine({"z_loss": 2.0}), list[Plan]()
    parts = Parts(machine)
    few = screen(machine, plan, parts, 7, whole=whole).screens[0]
    assert not parts.asked and whole and not few.rows and few.minutes == 9
    assert few.stopped.endswith("are theirs: --minutes 9 would do")
    machine = Machine({"z_loss": 2.0})
    enough = screen(machine, plan, Parts(machine), few.minutes).screens[0]
    assert enough.ended and [one.candidates for one in enough.rungs] == [3, 2]
    assert {why for _, why in enough.left_out} == {"the minutes are for those that promise more"}
    machine = Machine({})
    brief = screen(machine, plan, Parts(machine), steps=100).screens[0]
    assert brief.stopped == "a whole run is hardly longer than the shortest rungs"


def test_an_interrupt_keeps_what_is_known_and_the_same_command_goes_on(
    Machine: Any, plan: Plan, tmp_path: Path
) -> None:
    def go(interrupt_at: int | None, folder: Path) -> tuple[Tuned, Parts]:
        machine = Machine({"z_loss": 2.0})
        parts = Parts(machine, interrupt_at=interrupt_at)
        store = Store(folder / TRIALS, {}, machine.clock)
        return screen(machine, plan, parts, store=store), parts

    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    whole, all_parts = go(None, tmp_path / "one")
    first, begun = go(11, tmp_path / "two")
    (seen,) = first.screens
    assert first.interrupted and len(begun.asked) == 10 and not seen.ended
    assert {row.went_on for row in seen.rows if row.rung == 2} == {None}
    assert "it has not ended" in first.sentence()
    second, rest = go(None, tmp_path / "two")
    assert len(begun.asked) + len(rest.asked) == len(all_parts.asked)
    assert second.screens == whole.screens and second.plan == whole.plan


def test_a_narrower_model_under_mup_trains_where_whole_rungs_do_not_fit(
    Machine: Any, plan: Plan, tmp_path: Path
) -> None:
    def narrow(one: Plan, divide: int) -> Plan | None:
        return None if one.techniques else narrowed(one, divide, KNOWN)

    machine = Machine({"z_loss": 2.0}, base_s=1.0)
    parts = Parts(machine)
    tuned = screen(machine, plan, parts, 90, narrowed=narrow)
    seen = tuned.screens[0]
    assert seen.width == 16 and {one.model.dim for one in parts.asked} == {16}
    assert seen.left_out == (((SLOW,), "muP carries no rate over for it"),)
    assert seen.rows[0].seconds == pytest.approx(32.0) and seen.rows[0].steps == 32
    assert "runs of a model of 16 features, given muP" in seen.sentence()
    assert tuned.plan.model.dim == 32 and tuned.plan.optimizer.lr == BEST_LR
    assert "muP carries no rate" in write_tune_page(tuned, tmp_path).read_text()


def test_a_plan_is_narrowed_under_mup_where_that_can_be(plan: Plan) -> None:
    context = make_context(plan, choose_device(plan))
    given = real_sources("quality", context, Rates.assumed("cpu"), KNOWN)
    half = given.narrowed(plan, 2)
    assert half is not None and (half.model.dim, half.model.heads, half.model.ffn) == (16, 1, 24)
    assert half.techniques["mup"].model_dump()["base_dim"] == 32
    assert given.narrowed(plan, 4) is None  # not one whole head
    assert given.narrowed(changed(plan, ["+muon"], KNOWN), 2) is None


def test_real_short_runs_rank_a_rate_that_learns_before_one_that_does_not(
    Machine: Any, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real runs on this processor, whose steps are taken to be equally long."""
    monkeypatch.setattr(rungs, "LEAST_STEPS", 4)
    timed: list[Reading] = []

    class Runs(PrefixRuns):
        def time(self, plan: Plan, limit_s: float) -> Reading:
            timed.append(super().time(plan, limit_s))
            return Reading(seconds=[0.1])

    changes = ("optimizer.lr=0.02", "optimizer.lr=1e-07", "+lion optimizer.lr=1e-08")
    machine = Machine({})
    parts = Runs(Worker(here=True), tmp_path / "prefixes")
    tuned = screen(machine, plan, parts, changes=changes, steps=16)
    (seen,) = tuned.screens
    assert all(one.seconds[0] > 0 for one in timed) and len(timed) == 2
    assert seen.ended and [row.changes for row in seen.winners] == [("optimizer.lr=0.02",)]
    assert [(one.candidates, one.steps, one.seeds) for one in seen.rungs] == [(3, 4, 1), (2, 8, 2)]
    assert all(len(row.losses) == seen.rungs[row.rung - 1].seeds for row in seen.rows)
    assert not any((tmp_path / "prefixes").iterdir())


def test_gaps_and_halves() -> None:
    assert gap_of([2.0, 3.0], [1.5, 2.0]) == pytest.approx(0.75) and gap_of([], [1.0]) is None
    assert gap_of([inf], [1.0]) == inf and gap_of([1.0], [inf]) == -inf
    gaps = {("a",): 0.3, ("b",): 0.1, ("c",): 0.1, ("d",): None, ("e",): inf}
    rung = Rung(1, 5, 32, 1)
    assert better_half(gaps, rung, 2) == {("a",), ("b",), ("c",)}
    assert not better_half(gaps, replace(rung, number=2), 2)
    assert better_half({("a",): -0.1, ("b",): 0.0}, rung, 1) == {("a",)}
    assert [one.candidates for one in rungs_of(9, 32)] == [9, 5, 3, 2]
    longest = longest_that_fit(3, 200.0, 0.1, 5.0, inf)
    assert [one.steps for one in longest] == [64, 128]
    assert not longest_that_fit(3, 100.0, 0.1, 5.0, inf)
    assert not longest_that_fit(3, 1e9, 0.1, 5.0, 127.0)
