"""A rank that is killed while another waits for its part of a checkpoint is named, and soon."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import report

DYING = Path(__file__).parents[1] / "dying_ranks.py"
WORDS = ["tiny.toml", "mesh.data=2", "guard=false"]
pytestmark = pytest.mark.timeout(180)  # a rank that waits for ever fails its test


def assert_named(told: str, run: Path, *, intact: str) -> None:
    assert "Traceback" not in told
    assert told.count("error: ") == 1, told
    assert re.search(rf"rank 1 .*step-\d+ .*{intact}", told)
    assert f"headrace train {run.relative_to(run.parents[1]) / 'plan.toml'} --resume" in told
    written = report(run)
    assert written["status"] == "failed" and written["error"] == "RankGone"
    assert not list((run / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize(
    ("at_step", "intact"), [(4, "no earlier checkpoint exists"), (12, "step-8 is intact")]
)
def test_a_killed_rank_is_named_by_the_one_that_waits(
    zygote: Any, plan_file: Path, at_step: int, intact: str
) -> None:
    """Check that a rank killed in a run, or in its last save, is named by the one that waits."""
    cwd = plan_file.parent
    call = [str(DYING), "train", {"at_step": at_step, "argv": WORDS}]
    worlds = zygote.world(2)
    children = [zygote._start(cwd, env, call=call) for env in worlds]
    assert children[1].wait().code == -9
    ended = children[0].wait()
    assert ended.code == 1, ended
    run = cwd / "runs" / "tiny"
    assert_named(ended.err, run, intact=intact)
    again = zygote.ranks(2, cwd, "train", "runs/tiny/plan.toml", "--resume", "--json")
    assert [e.code for e in again] == [0, 0], again
    assert json.loads(again[0].out)["steps"] == 12


@pytest.mark.slow
def test_a_killed_rank_is_named_under_torchrun(plan_file: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(DYING)]
    ended = subprocess.run(
        [*command, "8", *WORDS],
        cwd=plan_file.parent,
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 1
    run = plan_file.parent / "runs" / "tiny"
    told, _, its_own = ended.stderr.partition("failed (exitcode: -9)")  # what torchrun says
    assert its_own
    assert_named(told, run, intact="step-4 is intact")
