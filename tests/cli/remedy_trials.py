"""Plans that measurements and one process refuse, and how each remedy is followed."""

from pathlib import Path
from typing import Any

from shell import Case

from headrace.tuner import command
from headrace.tuner.path import PLAN

SOON = "--minutes 0.01"
"""Option with which a tuning is over before it measures anything."""
OWN = "[goal]\nsteps = 6\n"
"""A plan without a target."""


def full_disk(_: Any) -> None:
    """Let the file of an ablation's rows be on a disk without room."""
    Path("runs/demo-ablation").mkdir(parents=True)
    Path("runs/demo-ablation/ablation.jsonl").symlink_to("/dev/full")


def room(_: Any) -> None:
    """Make room there."""
    Path("runs/demo-ablation/ablation.jsonl").unlink()


TRIALS = {
    "catalogue/graphs:explain_graphs#2": Case(
        "explain {tiny} --with torch_compile techniques.torch_compile.backend=eager "
        "mesh.tensor=2 --with tensor_parallel --graph"
    ),
    "tuner/ablate:ablate_command#1": Case(
        "ablate {tiny} --with z_loss --with tensor_parallel mesh.tensor=2 --minutes 0"
    ),
    "tuner/command:_check#1": Case(
        f"tune own.toml {{keys}} --for quality {SOON}",
        lambda _: Path("own.toml").write_text(OWN),
        fills={"TARGET": "9"},
    ),
    "tuner/command:_check#2": Case(f"tune {{tiny}} --with fsdp mesh.data=2 {SOON}"),
    "tuner/command:locked#1": Case(
        "ablate {tiny} --with z_loss --minutes 0 --out file/x",
        lambda _: Path("file").touch(),
        fills={"FOLDER that can be written": "out"},
    ),
    "tuner/command:write#1": Case(
        f"tune {{tiny}} {SOON}", lambda _: Path("runs/demo-tune", PLAN).mkdir(parents=True)
    ),
    "techniques/precision/float8_linear:Float8Linear._nothing_fits#1": Case(
        "train {tiny} goal.steps=1 --with float8_linear"
    ),
    "tuner/command:_check#3": Case(
        "tune {tiny} --minutes 0",
        fake=lambda patch: patch.setattr(command, "TUNE_MINUTES", 0.01),
    ),
}
"""Each site in the tuner and beside it whose command ends soon, with how to reach it."""
SLOW_TRIALS = {
    "tuner/ablate:Bench._append#1": Case(
        "ablate {tiny} --with z_loss --minutes 1",
        full_disk,
        does={", or the same command when there is room": room},
        fills={"FOLDER": "out"},
    ),
}
"""Each site that is reached only after something was measured, with how to reach it."""
