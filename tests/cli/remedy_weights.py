"""Weights that are numbers and of no use, and folders of weights that are damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remedy_inputs import GOOD, weights
from safetensors.torch import load_file, save_file
from shell import Case, run
from tiny import resealed

TRAIN = (
    "train demo device=cpu data.sources=x.jsonl data.sequence_length=16 batch.tokens=128 "
    "goal.steps=1 eval.tokens=64 schedule.warmup_steps=0 checkpoint.every_steps=0"
)
MIXER = "blocks.0.mixer.qkv.weight"


def huge(*steps: int) -> Callable[[Path], Any]:
    """Write numbers near the largest of fp32 into a tensor of checkpoints, and seal them anew."""

    def change(tensors: dict[str, Any], part: dict[str, Any]) -> None:
        tensors[f"model/{MIXER}"].fill_(3e38)

    def make(folder: Path) -> None:
        for step in steps:
            resealed(folder / "checkpoints" / f"step-{step}", change)

    return make


def given(value: float) -> Callable[[Path], Any]:
    """Export the run into `hf`, with that number in a whole tensor, and keep the file."""

    def change(folder: Path) -> None:
        Path("x.jsonl").write_text(GOOD)
        file = folder / "model.safetensors"
        shutil.copy(file, "weights.kept")
        tensors = load_file(file)
        next(t for name, t in tensors.items() if name.endswith("q_proj.weight")).fill_(value)
        save_file(tensors, file, metadata={"format": "pt"})

    return weights(change)


def whole(_: Path) -> None:
    """Bring the weights back, as a download does."""
    shutil.copy("weights.kept", "hf/model.safetensors")


FETCH = "hf download OWNER/NAME --local-dir hf, with the name that the weights were published under"
OTHERS = {"FOLDER of others": "good"}


def beside(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Keep a sound export in `good`, too."""

    def both(folder: Path) -> None:
        assert run(["export", "demo", "--to", "hf", "--output", "good"]).code == 0
        make(folder)

    return both


TOO_LARGE = {
    "load:computed#1": Case("eval demo", huge(6), through=("evaluate:finite#1",)),
    "state:diverged#1": Case(
        f"{TRAIN} model.pretrained=hf",
        beside(given(3e38)),
        does={FETCH: whole},
        fills=OTHERS,
    ),
    "state:diverged#2": Case(
        "train runs/demo/plan.toml --resume goal.steps=8", huge(6), through=("build:_stop#1",)
    ),
    "model/adapter:load_pretrained.source#3": Case(
        f"{TRAIN} model.pretrained=hf",
        beside(given(float("nan"))),
        does={FETCH: whole},
        fills=OTHERS,
    ),
}
"""Weights that no loss can be computed with."""
