"""What failures take of a run, by a closed form and by simulated runs."""

import json
import math
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.predict.failures import LLAMA_3, Reliability, failures_of, simulate

HOUR = 3600.0
WORDS = ("plan", "1b", "--gpu", "NVIDIA H200", "mesh.data=8", "--with", "fsdp")
LONG = (*WORDS, "goal.steps=2000000", "hardware.failures_per_1000_gpu_days=50")


def said(*words: str) -> dict[str, Any]:
    """Return what a command prints as JSON."""
    ended = CliRunner().invoke(app, [*words, "--json"])
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


@pytest.mark.parametrize(("mean_h", "every_h"), [(5, 1), (20, 2), (100, 5), (3, 0.1)])
@pytest.mark.parametrize("restart_h", [0.02, 1.0])
def test_simulated_runs_take_what_the_closed_form_says(
    mean_h: float, every_h: float, restart_h: float
) -> None:
    how = Reliability(HOUR * mean_h, HOUR * restart_h, HOUR * every_h, save_s=20.0)
    work_s = 40 * HOUR
    ran = simulate(how, work_s, runs=4000)
    error = ran.total_s.std() / math.sqrt(len(ran.total_s))
    # The form counts a save at the end too.
    assert ran.total_s.mean() == pytest.approx(how.expected_s(work_s), abs=4 * error + 60)
    left = ran.total_s - work_s - ran.lost_s
    assert (left > -1e-6).all(), "what is not work or lost is a restart or a save"
    assert ran.failures.mean() == pytest.approx(ran.total_s.mean() / how.mean_s, rel=0.05)


def test_a_run_that_never_fails_takes_its_work_and_its_saves() -> None:
    how = Reliability(math.inf, 600.0, 100.0, save_s=1.0)
    ran = simulate(how, 1000.0, runs=3)
    assert np.allclose(ran.total_s, 1009.0) and not ran.failures.any()
    assert how.goodput(1000.0) == 1


def test_a_run_that_fails_sooner_than_it_saves_never_ends() -> None:
    how = Reliability(60.0, 600.0, 6000.0)
    assert math.isinf(how.expected_s(60_000.0)) and how.goodput(60_000.0) == 0
    assert np.isinf(simulate(how, 60_000.0, runs=2).total_s).all()


def test_about_the_best_interval_beats_its_neighbours() -> None:
    how = Reliability(10 * HOUR, 600.0, 1.0, save_s=5.0)
    shares = [
        Reliability(how.mean_s, 600.0, how.best_interval_s * n, 5.0).goodput(100 * HOUR)
        for n in (0.25, 1, 4)
    ]
    assert max(shares) == shares[1]


def test_the_same_seed_fails_at_the_same_moments() -> None:
    how = Reliability(HOUR, 60.0, 600.0)
    assert (simulate(how, 9000.0).total_s == simulate(how, 9000.0).total_s).all()


def test_hours_and_dollars_count_what_failures_take() -> None:
    none = said(*LONG[:-1], "hardware.failures_per_1000_gpu_days=0", "hardware.dollars_per_hour=2")
    some = said(*LONG, "hardware.dollars_per_hour=2", "checkpoint.every_steps=50000")
    assert none["failures"] is None
    told = some["failures"]
    assert 0.5 < told["goodput"] < 0.99 and told["expected"] > 0.5
    assert some["hours"] == pytest.approx(none["hours"] / told["goodput"], rel=1e-6)
    assert some["dollars"] == pytest.approx(none["dollars"] / told["goodput"], rel=1e-6)
    assert told["goodput_between"]["low"] <= told["goodput"] <= told["goodput_between"]["high"]


def test_minutes_stay_and_fewer_steps_fit() -> None:
    words = (*LONG, "goal.minutes=2400", "checkpoint.every_steps=50000")
    none, some = said(*words, "hardware.failures_per_1000_gpu_days=0"), said(*words)
    assert none["hours"] == some["hours"] == pytest.approx(40)
    assert some["steps"] == pytest.approx(none["steps"] * some["failures"]["goodput"], rel=1e-3)


def test_memory_copies_are_checkpoints(tiny_plan: Any) -> None:
    often = ("checkpoint.every_steps=1000", "checkpoint.memory_every_steps=10")
    plan = tiny_plan(*often, "hardware.failures_per_1000_gpu_days=1e5")
    found = failures_of(plan, 1.0, 1e5, on_gpu=False)
    assert found is not None and found.every_steps == 10


def test_a_slower_restart_takes_more_of_a_run(tiny_plan: Any) -> None:
    often = ("hardware.failures_per_1000_gpu_days=1e5", "checkpoint.every_steps=10")
    soon, late = (
        failures_of(tiny_plan(*often, f"hardware.restart_minutes={n}"), 1.0, 1e5, on_gpu=False)
        for n in (1, 5)
    )
    assert soon is not None and late is not None and soon.goodput > late.goodput


def test_a_cpu_fails_where_the_plan_says_so(tiny_plan: Any) -> None:
    assert failures_of(tiny_plan(), 1.0, 1e9, on_gpu=False) is None
    assumed = failures_of(tiny_plan(), 1.0, 1e9, on_gpu=True)
    assert assumed is not None and assumed.is_assumed and assumed.rate == LLAMA_3
    assert failures_of(tiny_plan(), 1.0, 1e5, on_gpu=True) is None, "one GPU for a day"


def test_a_table_of_goodput() -> None:
    told = said(*LONG, "checkpoint.every_steps=50000", "--goodput")
    cells = {(c["every_steps"], c["restart_minutes"]): c["goodput"] for c in told["table"]}
    assert {m for _, m in cells} == {1, 4, 10, 30}
    assert cells[50000, 10] == pytest.approx(told["goodput"])
    assert cells[50000, 1] > cells[50000, 30]
    best = told["best_every_steps"]
    assert cells[best, 10] == max(share for (_, m), share in cells.items() if m == 10)
    page = CliRunner().invoke(app, [*LONG, "checkpoint.every_steps=50000", "--goodput"])
    assert "about the best" in page.output and "the plan's" in page.output


@pytest.mark.parametrize(
    ("words", "why", "code"),
    [
        ((*WORDS, "hardware.failures_per_1000_gpu_days=0"), "nothing fails", 3),
        ((*WORDS[:1], "--budget", "1gpu-hours"), "about one that is there", 2),
    ],
)
def test_goodput_is_refused_in_one_line(words: tuple[str, ...], why: str, code: int) -> None:
    ended = CliRunner().invoke(app, [*words, "--goodput"])
    assert ended.exit_code == code and why in ended.output


def test_a_budget_pays_for_failures_and_saves_before_they_come() -> None:
    words = ("plan", "small", "--gpu", "NVIDIA H200", "mesh.data=8", "--with", "fsdp")
    budget = ("--budget", "20000gpu-hours")
    none = said(*words, "hardware.failures_per_1000_gpu_days=0", *budget)
    some = said(*words, "hardware.failures_per_1000_gpu_days=20", *budget)
    assert 0.9 < some["tokens"] / none["tokens"] < 1
    told = some["prediction"]["failures"]
    assert told["expected"] > 10 and told["checkpoint_every_steps"] <= told["best_every_steps"]
    assert some["prediction"]["hours"] == pytest.approx(20000 / 8, rel=0.01)
