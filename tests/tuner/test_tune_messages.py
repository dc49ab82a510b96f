"""Check what the tuner and its neighbours print: the end, reasons, and what to type next."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_tune import run_command
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.errors import Stopped
from headrace.plan.plan import Plan
from headrace.tuner import command
from headrace.tuner.judge import Rules, judge
from headrace.tuner.page import write_tune_page
from headrace.tuner.path import PLAN, Tuned
from headrace.tuner.readings import Reading
from headrace.tuner.tune import tune

FAST, SLOW = "fused_rope", ("fused_swiglu", "fused_rms_norm")
CUDA = Rules(device="cuda", precision="bf16")


def go(machine: Any, plan: Plan, *names: str, minutes: float) -> Tuned:
    """Tune on the made-up machine, with techniques by name as single changes."""
    sources = machine.sources([], names=names)
    return tune(plan, "time", minutes, sources, machine.measure, CUDA, clock=machine.clock)


def test_the_end_says_what_time_was_too_short_for(Machine: Any, plan: Plan) -> None:
    machine = Machine({FAST: 0.8, **dict.fromkeys(SLOW, 1.1)}, build_s=20.0)
    tuned = go(machine, plan, FAST, *SLOW, "activation_offload", "chunked_mlp", minutes=2)
    assert tuned.up and tuned.left == (f"+{SLOW[1]}",)
    end = command.format_end(tuned, Path("tuned")).splitlines()
    told = "time was up; 1 change was not tried: --minutes 1 should do, and the same"
    assert f"{told} command goes on" in end
    assert "not tried: no gain predicted: +activation_offload, +chunked_mlp" in end
    tuned = go(Machine({FAST: 0.8}), plan, FAST, minutes=60)
    assert "not tried" not in command.format_end(tuned, Path("tuned"))


def test_what_is_predicted_to_gain_nothing_is_neither_tried_nor_advised_for(
    Machine: Any, plan: Plan, change: Any, tmp_path: Path
) -> None:
    """Plenty of time, or none: it is told in one line, and no minutes are asked for it."""
    idle = ("fused_rms_norm", "fused_swiglu", "chunked_mlp")
    for minutes in (60.0, 4.0):
        machine = Machine({FAST: 0.8}, build_s=20.0)
        whole = [machine.proposal(change(plan, f"+{name}"), 1.0) for name in idle]
        gains = machine.proposal(change(plan, f"+{FAST}"), 0.8)
        sources = machine.sources([gains, *whole], start_s=1.0)
        tuned = tune(plan, "time", minutes, sources, machine.measure, CUDA, clock=machine.clock)
        assert not tuned.up and not tuned.left and not tuned.untried
        assert {*tuned.no_gain} == {f"+{name}" for name in idle}
        assert [step.changes for step in tuned.path] == [(f"+{FAST}",)]
        end = command.format_end(tuned, Path("tuned"))
        assert "--minutes" not in end and "time was up" not in end
        (line,) = [line for line in end.splitlines() if line.startswith("not tried")]
        assert line.startswith("not tried: no gain predicted: +")
        assert "No gain is predicted" in write_tune_page(tuned, tmp_path).read_text()
        assert {*tuned.to_dict()["no_gain_foreseen"]} == {*tuned.no_gain}


def test_minutes_are_told_as_they_were_given(Machine: Any, plan: Plan) -> None:
    machine, lines = Machine({FAST: 0.8}), list[str]()
    sources = machine.sources([], names=[FAST])
    tune(plan, "time", 2.5, sources, machine.measure, CUDA, clock=machine.clock, note=lines.append)
    assert lines[0].startswith(f"{plan.name}: 1 changes to try in 2.5 min;")


def test_what_is_for_money_says_that_it_has_no_price(
    Machine: Any, plan: Plan, tmp_path: Path
) -> None:
    priced = plan.replaced(hardware={"dollars_per_hour": 3.0})
    for run, said in ((plan, True), (priced, False)):
        _, why = command.aim_of(run, "money")
        assert ("hardware.dollars_per_hour=PRICE" in why and "\n" not in why) == said
        machine = Machine({FAST: 0.8})
        sources = machine.sources([], names=[FAST])
        tuned = tune(run, "money", 60, sources, machine.measure, CUDA, clock=machine.clock)
        assert ("dollars_per_hour=PRICE" in write_tune_page(tuned, tmp_path).read_text()) == said
    assert "dollars_per_hour" not in command.aim_of(plan, "time")[1]


def test_what_is_predicted_stands_in_the_unit_of_what_is_measured_beside_it(
    Machine: Any, plan: Plan, change: Any, tmp_path: Path
) -> None:
    """Speed beside speed and peak beside peak; the order of trials is by neither alone."""
    machine = Machine(
        {FAST: 1.1, SLOW[0]: 1.5, SLOW[1]: 4.4}, bytes={FAST: 0.5, SLOW[0]: 0.6, SLOW[1]: 0.2}
    )
    whole = [machine.proposal(change(plan, f"+{FAST}"), 1.25)]
    whole[0].prediction.memory.peak_bytes = 0.4e6
    sources = machine.sources(whole, start_s=1.0, names=SLOW)
    tuned = tune(plan, "memory", 60, sources, machine.measure, CUDA, clock=machine.clock)
    row = next(step for step in tuned.path if step.changes == (f"+{FAST}",))
    assert row.predicted == pytest.approx(2.5 / 1.25) and row.predicted_memory == 0.4
    assert row.predicted_speed == pytest.approx(0.8)
    line = row.line()
    assert line.startswith(f"kept: +{FAST}: speed 0.909 (") and ", predicted 0.800, the" in line
    assert line.endswith("the peak is 0.500 times what it was (predicted 0.400)")
    dear = next(step for step in tuned.path if step.changes == (f"+{SLOW[1]}",))
    assert dear.verdict == "reverted" and "4.4 times as long as the first" in dear.reason
    assert {*tuned.plan.techniques} == {FAST, SLOW[0]}  # 1.1 x 1.5 is within twice
    page = write_tune_page(tuned, tmp_path).read_text()
    assert f">{tuned.count_measured}<" in page
    assert "0.500, predicted 0.400" in page and ">0.800<" in page and ">2.000<" not in page


def test_an_interval_that_says_nothing_is_told_with_what_it_should_lie_above() -> None:
    one = Reading(seconds=[1.0, 1.2, 1.2, 1.0], steps=54)
    found = judge(Reading(seconds=[1.2, 1.0, 1.0, 1.2], steps=54, beside=one), "exact", Rules())
    assert found.verdict == "undecided" and found.ratio is not None
    interval = f"the interval {found.ratio.low:.3f} to {found.ratio.high:.3f}"
    assert found.reason == f"not all of {interval} lies above 1.020"


@pytest.mark.parametrize("verb", ["tune", "ablate", "doctor", "plan"])
def test_a_plan_that_is_not_there_is_answered_with_the_verb(verb: str) -> None:
    ended = CliRunner().invoke(app, [verb, "nothere-demo.toml", "--json"])
    assert ended.exit_code == 2
    assert json.loads(ended.stdout)["remedy"].startswith(f"headrace {verb} ")


def test_a_schedulers_signal_leaves_the_files_as_ctrl_c_does(
    Machine: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine({FAST: 0.5})
    machine.measure = lambda *given, **how: os.kill(os.getpid(), signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match=r"Nothing was measured in .*; the plan is as it was") as told:
        run_command(machine, plan, monkeypatch)
    assert told.value.exit_code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert (command.folder_of(plan) / PLAN).is_file()


@pytest.mark.slow
def test_the_process_that_measures_ends_with_one_that_was_killed() -> None:
    script = (
        "import os, time; from headrace.tuner.worker import Worker\n"
        "print(Worker()._process().submit(os.getpid).result(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as asks:
        assert asks.stdout is not None
        measures = Path("/proc") / asks.stdout.readline().decode().strip() / "cmdline"
        assert measures.read_bytes()
        asks.kill()
    ends_s = time.monotonic() + 20
    while measures.exists() and measures.read_bytes():
        assert time.monotonic() < ends_s, "it still holds its memory"
        time.sleep(0.1)
