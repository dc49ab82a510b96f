"""Checkpoints that were changed and sealed anew are refused by name, with one error."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from safetensors.torch import load_file
from tiny import FILE, resealed
from torch import Tensor
from typer.testing import CliRunner

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.cli.app import app
from headrace.core.errors import HeadraceError
from headrace.data.ingest import prepare
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.train.checkpoint import INDEX, Saved
from headrace.train.state import restore

Tensors, Index = dict[str, Tensor], dict[str, Any]
PARTS = 6
"""The changes are tried in as many tests, of which the first is quick."""


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path
) -> tuple[Path, Build]:
    """Train for two steps; return the run's folder and a build of the same plan."""
    from tiny import READ

    from headrace.cli.catalogue import catalogue
    from headrace.train import train as trainer

    folder = tmp_path_factory.mktemp("sealed")
    text = READ.format(corpus=corpus, prepared=prepared_folder)
    overrides = (f"directory={folder}", "goal.steps=2", "checkpoint.every_steps=1")
    plan = Plan.read(text, catalogue(), overrides=overrides)
    run = trainer.run(plan).folder
    assert run is not None
    return run, make_build(plan, prepare(plan), World(), torch.device("cpu"))


def describe(part: Index, name: str, tensor: Tensor) -> None:
    """Let the index say of a tensor what the file does."""
    part["pieces"][name] |= {
        "shape": list(tensor.shape),
        "size": list(tensor.shape),
        "offset": [0] * tensor.ndim,
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def retyped(name: str, dtype: torch.dtype) -> Callable[[Tensors, Index], None]:
    def change(tensors: Tensors, part: Index) -> None:
        tensors[name] = tensors[name].to(dtype)
        describe(part, name, tensors[name])

    return change


def reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Tensors, Index], None]:
    def change(tensors: Tensors, part: Index) -> None:
        tensors[name] = torch.zeros(shape, dtype=tensors[name].dtype)
        describe(part, name, tensors[name])

    return change


def dropped(name: str, *, file_alone: bool = False) -> Callable[[Tensors, Index], None]:
    def change(tensors: Tensors, part: Index) -> None:
        del tensors[name]
        if not file_alone:
            del part["pieces"][name]

    return change


def renamed(name: str) -> Callable[[Tensors, Index], None]:
    def change(tensors: Tensors, part: Index) -> None:
        tensors[f"{name}x"] = tensors.pop(name)
        part["pieces"][f"{name}x"] = part["pieces"].pop(name)

    return change


def untrue(name: str, **says: Any) -> Callable[[Tensors, Index], None]:
    """The index says otherwise than the file."""
    return lambda tensors, part: part["pieces"][name].update(says)


def rng(text: Any) -> Callable[[Tensors, Index], None]:
    return lambda tensors, part: part["rank_values"].update(rng=text)


def changes(names: list[str], tensors: Tensors, part: Index) -> Iterator[tuple[str, Any]]:
    """Every change that is tried, with what its error names."""
    dice = random.Random(0)
    types = [torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.bool]
    yield from changes_of_rng(part["rank_values"]["rng"]["cpu"])
    for name in names:
        tensor = tensors[name]
        yield name, retyped(name, torch.bfloat16)
        yield name, retyped(name, dice.choice([t for t in types if t != tensor.dtype]))
        yield (
            name,
            reshaped(name, (*tensor.shape[:-1], tensor.size(-1) + 1) if tensor.ndim else (2,)),
        )
        yield name, reshaped(name, (1, *tensor.shape))
        yield name, dropped(name)
        yield name, dropped(name, file_alone=True)
        yield name, renamed(name)
        yield name, untrue(name, dtype="bfloat16")
        yield name, untrue(name, dtype=dice.choice(["nonsense", None, 3, "load"]))
        yield name, untrue(name, offset=dice.choice([[9] * tensor.ndim + [1], "x", None, [-1]]))
        yield name, untrue(name, size=dice.choice([[7], None, "x", [2**62, 2]]))


def changes_of_rng(state: str) -> Iterator[tuple[str, Any]]:
    """Yield every wrong state of the generators of random numbers."""
    for wrong in (state[:-2], state[:100], state + "00", "", "zz", state[:-1], None, 7, [1]):
        yield "random numbers", rng({"cpu": wrong})
    for wrong in ({}, None, [], "x", {"gpu": state}):
        yield "random numbers", rng(wrong)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, PARTS))]
)
def test_every_change_of_a_checkpoint_is_one_error(
    part: int, trained: tuple[Path, Build], tmp_path: Path
) -> None:
    """Check a part of the changes: each of the 11 kinds of them, and one or two of every tensor."""
    run, build = trained
    step = run / "checkpoints" / "step-2"
    restore(build, Saved(step))  # as it was saved
    tensors, index = load_file(step / FILE), json.loads((step / INDEX).read_text())
    tried = list(changes(sorted(tensors), tensors, index["parts"][0]))
    assert len(tried) > 200
    for number, (name, change) in enumerate(tried[part::PARTS]):
        copy = tmp_path / str(number) / "step-2"
        shutil.copytree(step, copy)
        resealed(copy, change)
        with pytest.raises(HeadraceError) as caught:
            restore(build, Saved(copy))
            print("not refused:", name, change.__qualname__, change.__closure__)
        assert name in caught.value.message
        assert caught.value.remedy.text and caught.value.exit_code in (1, 2, 3)
        shutil.rmtree(copy.parent)


@pytest.mark.parametrize("verb", ["eval", "sample", "resume"])
def test_the_command_line_refuses_weights_of_another_type(
    verb: str, trained: tuple[Path, Build], tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained[0], copy, symlinks=True)
    name = "model/embed.weight"
    resealed(copy / "checkpoints" / "step-2", retyped(name, torch.bfloat16))
    words = {"resume": ["train", f"{copy}/plan.toml", "--resume", "goal.steps=3"]}
    ended = CliRunner().invoke(app, [*words.get(verb, [verb, str(copy)]), "--json"])
    told = json.loads(ended.stdout)
    assert ended.exit_code == told["exit_code"] == 1
    assert tells(told["error"], name, "torch.float32", "torch.bfloat16")
    assert told["remedy"] == "--checkpoint step-1"


def no_number(tensors: Tensors, part: Index) -> None:
    """Two of the weights are no numbers, as a run that diverged would leave them."""
    tensors["model/embed.weight"].view(-1)[:2] = torch.tensor([float("nan"), float("inf")])


def test_weights_that_are_no_numbers_are_told_before_a_step(
    trained: tuple[Path, Build], tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained[0], copy, symlinks=True)
    resume = ["train", f"{copy}/plan.toml", "--resume", "goal.steps=3", "--json"]
    for step, remedy in ((2, "--checkpoint step-1"), (1, "name=NEW, without --resume")):
        resealed(copy / "checkpoints" / f"step-{step}", no_number)
        chosen = [] if step == 2 else ["--checkpoint", "step-1"]
        ended = CliRunner().invoke(app, [*resume, *chosen])
        told = json.loads(ended.stdout)
        assert ended.exit_code == 1 and told["remedy"] == remedy
        assert "2 numbers of" in told["error"] and "model/embed.weight" in told["error"]
        assert "lr" not in told["remedy"]
    steps = [json.loads(line)["step"] for line in (copy / "metrics.jsonl").open()]
    assert steps == [1, 2]
