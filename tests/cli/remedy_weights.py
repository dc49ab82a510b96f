"""Weights that are numbers and of no use, and folders of weights that are damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remedy_inputs import FETCH, FINE, GOOD, weights
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


OTHERS = {"FOLDER of others": "good"}


def beside(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Keep a sound export in `good`, too."""

    def both(folder: Path) -> None:
        assert run(["export", "demo", "--to", "hf", "--output", "good"]).code == 0
        make(folder)

    return both


TOO_LARGE = {
    "inference/load:computed#1": Case("eval demo", huge(6), through=("train/evaluate:finite#1",)),
    "inference/load:computed#1 text": Case(
        "sample demo --tokens 4", huge(6), through=("inference/sample:draw#1",)
    ),
    "train/state:diverged#1": Case(
        f"{TRAIN} model.pretrained=hf",
        beside(given(3e38)),
        does={FETCH: whole},
        fills=OTHERS,
    ),
    "train/state:diverged#2": Case(
        "train runs/demo/plan.toml --resume goal.steps=8",
        huge(6),
        through=("assemble/build:_stop#1",),
    ),
    "model/adapter:load_pretrained.source#1": Case(
        f"{TRAIN} model.pretrained=hf",
        beside(given(float("nan"))),
        does={FETCH: whole},
        fills=OTHERS,
    ),
}
"""Weights that no loss can be computed with."""

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


def broken(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Export the run into `hf`, keep a copy in `kept`, and spoil the first."""
    return weights(lambda folder: (shutil.copytree(folder, "kept"), change(folder)))


def sound(_: Path) -> None:
    """Bring the folder back, as a download does."""
    shutil.rmtree("hf")
    shutil.copytree("kept", "hf")


def fetched(change: Callable[[Path], Any]) -> Case:
    """A folder that only its publisher can mend."""
    return Case(FINE, broken(change), does={FETCH: sound}, then=FINE)


def another(change: Callable[[Path], Any], words: str) -> Case:
    """A folder that Headrace does not read, where another is named."""
    return Case(FINE, broken(change), fills={words: "kept"})


def says(**keys: Any) -> Callable[[Path], Any]:
    """Write other values into config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return change


def indexed(weight_map: Any) -> Callable[[Path], Any]:
    """Give the weights another name, and an index that says this."""

    def change(folder: Path) -> None:
        (folder / WHOLE).rename(folder / "a.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return change


def without_index(weight_map: Any) -> Case:
    """An index that is nonsense beside files that are whole."""
    return Case(FINE, broken(indexed(weight_map)), prose={FETCH: "no network"})


def unreadable(folder: Path) -> None:
    """Let config.json be a file that no read succeeds on, for an administrator too."""
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/proc/self/mem")


def whole_numbers(folder: Path) -> None:
    """Store one tensor as 8-bit numbers, as a quantised model has them."""
    tensors = load_file(folder / WHOLE)
    name = next(iter(tensors))
    tensors[name] = tensors[name].char()
    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})


def untied(folder: Path) -> None:
    """Tie embeddings in config.json alone."""
    says(tie_word_embeddings=True)(folder)


def pickled(folder: Path) -> None:
    """Leave a pickle where the weights were."""
    (folder / WHOLE).rename(folder / "pytorch_model.bin")


def adapters(folder: Path) -> None:
    """Leave adapters where the weights were."""
    (folder / WHOLE).rename(folder / "adapter_model.safetensors")


def in_the_run(folder: Path) -> None:
    """Cut the weights of an export short that lies in the run."""
    assert run(["export", "demo", "--to", "hf"]).code == 0
    (folder / "hf" / WHOLE).write_bytes(b"x")


FOLDERS = {
    "model/adapter:read_json#1": fetched(unreadable),
    "model/adapter:read_json#3": fetched(lambda hf: (hf / "config.json").write_text("[]")),
    "model/adapter:_compare#1": fetched(says(num_hidden_layers=2)),
    "model/adapter:from_hf#1": Case(
        FINE,
        broken(untied),
        does={'"tie_word_embeddings": false in hf/config.json': sound},
        then=FINE,
    ),
    "model/adapter:_weight_files#1": Case(
        FINE,
        broken(adapters),
        does={
            "python -c 'from peft import AutoPeftModelForCausalLM as M; M.from_pretrained('\"'\"'hf"
            "'\"'\"').merge_and_unload().save_pretrained('\"'\"'hf'\"'\"')'": sound
        },
    ),
    "model/adapter:_weight_files#2": Case(
        FINE,
        broken(pickled),
        does={
            "python -c 'from transformers import AutoModelForCausalLM as M; M.from_pretrained("
            "'\"'\"'hf'\"'\"').save_pretrained('\"'\"'hf'\"'\"')'": sound
        },
        prose={FETCH: "no network", "where you trust the file": "it is the run's"},
    ),
    "model/adapter:_weight_files#3": fetched(lambda hf: (hf / WHOLE).unlink()),
    "model/adapter:_read_index#1": without_index({}),
    "model/adapter:_read_index#2": without_index({"model.norm.weight": "../a.safetensors"}),
    "model/adapter:_read_index#3": fetched(indexed({"model.norm.weight": "b.safetensors"})),
    "model/adapter:_open_tensors#1": Case(
        FINE,
        broken(lambda hf: (hf / WHOLE).write_text("version https://git-lfs.github.com/spec/v1\n")),
        does={"git -C hf lfs pull": sound},
        then=FINE,
    ),
    "model/adapter:_open_tensors#2": Case(
        FINE.replace("=hf", "=runs/demo/hf"), in_the_run, whole=True
    ),
    "model/adapter:_open_tensors#3": Case(
        FINE,
        broken(
            lambda hf: (
                (hf / WHOLE).rename(hf / "a.safetensors"),
                shutil.copy(hf / "a.safetensors", hf / "b.safetensors"),
            )
        ),
    ),
    "model/adapter:_open_tensors#4": another(
        whole_numbers, "FOLDER of the version that is not quantised"
    ),
    "model/hf_config:named_architecture#1": another(
        says(architectures=["MambaForCausalLM"]),
        "FOLDER of a model of one of these architectures",
    ),
    "model/hf_config:_refuse#1": another(
        says(hidden_act="gelu"), "FOLDER of a model with hidden_act = 'silu'"
    ),
}
"""Folders of weights that are damaged, or none of those that Headrace reads."""
GIVEN = TOO_LARGE | FOLDERS
