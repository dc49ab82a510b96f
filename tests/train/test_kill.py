"""`kill -9` at random moments: the run ends as if nothing had happened, to the bit."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import assert_same_run, report

STEPS_APART = 12


def overrides(kills: int) -> tuple[str, ...]:
    """Return the keys of a run that is long enough to be killed so often."""
    steps = STEPS_APART * (kills + 4)
    return (f"goal.steps={steps}", "checkpoint.every_steps=2", "eval.every_steps=8")


def saving(run: Path) -> bool:
    """Whether a checkpoint is half written now."""
    return any((run / "checkpoints").glob("*.tmp"))


def saved_step(run: Path) -> int:
    """Return the step of the newest checkpoint, or 0 without any."""
    link = run / "checkpoints" / "latest"
    return int(os.readlink(link).removeprefix("step-")) if link.is_symlink() else 0


@pytest.mark.parametrize(("kills", "inside"), [(6, 1), pytest.param(14, 3, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_equals_one_that_is_not(
    zygote: Any, plan_file: Path, wait_until: Any, kills: int, inside: int
) -> None:
    cwd, chance = plan_file.parent, random.Random(0)
    command = ("train", "tiny.toml", *overrides(kills))
    assert zygote.run(cwd, *command, "name=whole").code == 0
    run, half_saved = cwd / "runs" / "killed", 0
    for attempt in range(kills):
        child = zygote.start(cwd, *command, "name=killed", *(["--resume"] if attempt else []))
        if attempt % 4 == 1:  # at any moment, mostly before the first step
            time.sleep(chance.uniform(0, 0.2))
        else:  # all over the run
            wait_until(lambda step=STEPS_APART * attempt: saved_step(run) > step)
            time.sleep(chance.uniform(0, 0.04))
        if attempt % 2 == 0:  # in the middle of a save
            wait_until(lambda: saving(run))
            time.sleep(chance.uniform(0, 0.004))
        child.send(signal.SIGKILL)
        assert child.wait().code == -signal.SIGKILL, "the run is too short for this machine"
        half_saved += saving(run)
    assert half_saved >= inside, "too few kills fell into a save"
    ended = zygote.run(cwd, *command, "name=killed", "--resume")
    assert ended.code == 0, ended.err
    assert_same_run(cwd / "runs" / "whole", run)
    early = (kills + 2) // 4  # killed before a step of theirs, mostly
    assert report(run)["restarts"] >= kills - early


@pytest.mark.slow
def test_killing_the_real_command_line(run_cli: Any, plan_file: Path, wait_until: Any) -> None:
    import subprocess
    import sys

    cwd = plan_file.parent
    command = ("train", "tiny.toml", *overrides(14))
    assert run_cli(cwd, *command, "name=whole").code == 0
    killed = cwd / "runs" / "killed"
    for attempt in range(3):
        resume = ["--resume"] if attempt else []
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *command, "name=killed", *resume],
            cwd=cwd,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        wait_until(lambda step=80 * attempt: saved_step(killed) > step)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    ended = run_cli(cwd, *command, "name=killed", "--resume")
    assert ended.code == 0, ended.err
    assert_same_run(cwd / "runs" / "whole", killed)
