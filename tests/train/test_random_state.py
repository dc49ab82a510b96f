"""A resume goes on with each rank's random numbers where the run left them.

No technique of today draws from torch's own generator during a step, so one that does stands here.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import PLAN
from toys import toy

from headrace.assemble.sockets import Build
from headrace.core.progress import Progress
from headrace.model.zoo import families
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Stage
from headrace.train import train as trainer


def drawn_by(folder: Path, data: dict[str, str], name: str, steps: int, resume: bool) -> list[Any]:
    """What a technique draws in the steps of one process, and which rank it is."""
    found: list[Any] = []

    def draw(build: Build, finite: torch.Tensor) -> None:
        found.append((build.world.rank, float(torch.rand(()))))

    noise = toy(
        "noise",
        Stage.STEP,
        lambda build: build.after_update.append(draw),
        composes=("after_update",),
    )
    text = PLAN.format(**data).replace("steps = 12", f"steps = {steps}", 1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    keys = [f"name={name}", f"directory={folder}", f"mesh.data={ranks}", "guard=false"]
    plan = Plan.read(text, Catalogue({}, families()), overrides=keys)
    trainer.run(plan.replaced(techniques={"noise": noise}), progress=Progress(), resume=resume)
    return found


def same_numbers(folder: str, data: dict[str, str]) -> None:
    """Hold a run that was stopped and resumed against one that was not, on every rank."""
    root = Path(folder)
    parts = drawn_by(root, data, "parts", 4, False) + drawn_by(root, data, "parts", 8, True)
    whole = drawn_by(root, data, "whole", 8, False)
    assert parts == whole
    assert len({number for _, number in whole}) == 8
    assert {rank for rank, _ in whole} == {int(os.environ.get("RANK", "0"))}


def test_a_resume_draws_on(tmp_path: Path, corpus: Path, prepared_folder: Path) -> None:
    same_numbers(str(tmp_path), {"corpus": str(corpus), "prepared": str(prepared_folder)})


@pytest.mark.slow
def test_each_rank_draws_on(
    tmp_path: Path, corpus: Path, prepared_folder: Path, zygote: Any
) -> None:
    data = {"corpus": str(corpus), "prepared": str(prepared_folder)}
    zygote.call(2, tmp_path, Path(__file__), "same_numbers", folder=str(tmp_path), data=data)
