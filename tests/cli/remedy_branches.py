"""Branches that cannot begin, evaluations of other rows, and how each remedy is followed."""

import shutil
from pathlib import Path

from remedy_runs import trained
from shell import Case

BRANCH = "train --branch demo@3 goal.steps=7"


def no_checkpoints(run: Path) -> None:
    """Let the run have saved nothing."""
    shutil.rmtree(run / "checkpoints")


BRANCHES = {
    "cli/train:_words_of_branch#1": Case(f"{BRANCH} --resume"),
    "cli/train:_words_of_branch#1 checkpoint": Case(f"{BRANCH} --checkpoint step-3"),
    "cli/train:_words_of_branch#2": Case("train demo --branch demo@3", fills={"N": "7"}),
    "inference/branch:_split#1": Case(
        "train goal.steps=7 --branch @3", fills={"RUN@STEP": "demo@3"}
    ),
    "inference/branch:_split#2": Case(BRANCH, no_checkpoints),
    "inference/branch:_split#3": Case("train --branch demo@4 goal.steps=7"),
    "inference/branch:_check_continues#1": Case(f"{BRANCH} seed=9"),
    "inference/branch:_check_continues#1 technique": Case(f"{BRANCH} --with z_loss"),
    "inference/branch:_check_phase#1": Case(
        "train --branch other@3 goal.steps=7 schedule.steps=40",
        trained("goal.steps=3 schedule.steps=7 schedule.decay_fraction=0.9 name=other"),
    ),
    "inference/branch:_check_phase#1 checkpoint": Case(
        "train --branch other@6 goal.steps=7 schedule.steps=40",
        trained("goal.steps=6 schedule.steps=8 schedule.decay_fraction=0.6 name=other"),
    ),
    "inference/branch:plan_of_branch#1": Case("train --branch demo@6 goal.steps=6"),
    "cli/runs:_length_asked#1": Case("eval demo seed=3"),
    "cli/runs:_length_asked#1 beside": Case(
        "eval demo batch.tokens=99 data.sequence_length=1 seed=3 data.sequence_length=8"
    ),
    "cli/runs:_length_asked#2": Case("eval demo data.sequence_length=1"),
    "train/evaluate:check_length#1": Case("eval demo data.sequence_length=99999"),
    "train/evaluate:check_stride#1": Case("eval demo --stride 99999"),
}
"""Each error by its site."""
