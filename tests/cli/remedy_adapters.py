"""Folders of adapters that are damaged, of other weights, or of another kind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remedy_inputs import GOOD
from remedy_weights import TRAIN
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shell import Case, once, run

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
ON = f"{TRAIN} model.pretrained=hf model.adapter=bad name=on"


def beside(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Train adapters beside an export, write them into `good`, and spoil the copy in `bad`."""

    def make(_: Path) -> None:
        Path("x.jsonl").write_text(GOOD)
        once(train_beside_an_export, "hf", "runs/tuned", "good")
        shutil.copytree("good", "bad")
        shutil.copytree("hf", "base")
        change(Path("bad"))

    return make


def train_beside_an_export() -> None:
    """Make an export, a run of adapters beside it, and what the run gives away."""
    assert run(["export", "demo", "--to", "hf", "--output", "hf"]).code == 0
    train = [*TRAIN.split(), "model.pretrained=hf", "--with", "lora", "name=tuned"]
    assert run([*train, "checkpoint.every_steps=1"]).code == 0
    assert run(["export", "tuned", "--to", "peft", "--output", "good"]).code == 0


def says(**fields: Any) -> Callable[[Path], Any]:
    """Write other values into adapter_config.json."""

    def change(folder: Path) -> None:
        table = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(table | fields))

    return change


def several(folder: Path) -> None:
    """Put the adapters into a folder below, as PEFT does with those that have names."""
    shutil.copytree("good", folder / "one")
    (folder / CONFIG).unlink()


def other_base(_: Path) -> None:
    """Change the weights of the base."""
    file = Path("hf") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1
    save_file(tensors, file, metadata={"format": "pt"})


def one_length(folder: Path) -> None:
    """Give one of the adapted linears lengths of its rows, as DoRA gives to all."""
    tensors = load_file(folder / TENSORS)
    with safe_open(folder / TENSORS, framework="pt") as opened:
        header = opened.metadata()
    name = next(n for n in tensors if n.endswith("down_proj.lora_B.weight"))
    lengths = {name.replace("lora_B.weight", "lora_magnitude_vector"): tensors[name].sum(1)}
    save_file(tensors | lengths, folder / TENSORS, metadata=header)


def of_other_base(_: Path) -> None:
    """Train an adapter beside other weights, in the run `other`, and give the first run a name."""
    shutil.copytree("hf", "moved")
    file = Path("moved") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    train = [*TRAIN.split(), "model.pretrained=moved", "--with", "lora", "name=other"]
    assert run([*train, "checkpoint.every_steps=1"]).code == 0


OTHERS = {"FOLDER of others": "good"}
ADAPTERS = {
    "model/peft:_damaged#1": Case(
        ON, beside(lambda bad: (bad / TENSORS).write_bytes(b"x")), fills=OTHERS
    ),
    "model/peft:_unsupported#1": Case(ON, beside(says(peft_type="IA3")), fills=OTHERS),
    "model/peft:_no_adapter#1": Case(ON, beside(several)),
    "core/folders:refuse_no_model#2": Case(
        f"{TRAIN} model.pretrained=bad name=on",
        beside(lambda bad: None),
        fills={"FOLDER of these weights": "hf"},
    ),
    "model/peft:_of_another_base#1": Case(
        ON,
        beside(other_base),
        fills={"FOLDER of that base": "base", **OTHERS},
        does={
            "model.adapter=good": lambda _: Path("hf/model.safetensors").write_bytes(
                Path("base/model.safetensors").read_bytes()
            )
        },
    ),
    "model/peft:check_continues#1": Case(
        f"{ON} --with dora techniques.dora.rank=16", beside(lambda bad: None)
    ),
    "model/peft:check_continues#2": Case(f"{ON} --with lora", beside(one_length)),
    "model/peft:check_continues#3": Case(
        f"{ON} --with lora techniques.lora.rank=2", beside(lambda bad: None)
    ),
    "model/peft:_refuse_other_tables#1": Case(
        f"{ON} --with lora 'techniques.lora.train_also=[\"head\"]'", beside(lambda bad: None)
    ),
    "inference/adapted:_check_base#1": Case(
        "sample demo --adapter other --tokens 2", beside(of_other_base)
    ),
    "inference/adapted:resolve_adapter#1": Case(
        "sample tuned --adapter demo --tokens 2", beside(lambda bad: None)
    ),
    "inference/adapted:resolve_adapter#2": Case(
        "sample demo --adapter nothing --tokens 2", beside(lambda bad: None)
    ),
    "export/opened:open_chosen#1": Case(
        "sample demo --adapter good --checkpoint latest --tokens 2",
        beside(lambda bad: None),
    ),
    "core/model_config:ModelConfig._check#7": Case(
        "explain demo device=cpu model.window_between=1"
    ),
    "core/model_config:ModelConfig._check#6": Case(
        f"{TRAIN} model.adapter=bad",
        beside(lambda bad: None),
        fills={"FOLDER of these weights": "hf"},
    ),
    "export/peft:export_peft#1": Case("export demo --to peft"),
    "assemble/adapted:AdapterTechnique._check_ranks#1": Case(
        f"{TRAIN} model.pretrained=hf --with lora name=on "
        'techniques.lora.targets=["mlp.down"] techniques.lora.ranks=[2,3]',
        beside(lambda bad: None),
    ),
}
"""Adapters that a run cannot begin with, or that it has not."""
