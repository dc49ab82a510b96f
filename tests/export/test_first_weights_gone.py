"""The folder that a run started from is gone or changed: what goes on, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import in_order, tells
from tiny import assert_same_run, losses

from headrace.core.errors import ConfigError

WORDS = ["schedule.warmup_steps=0", "checkpoint.every_steps=2", "eval.every_steps=2"]
TAKES = ["goal.steps=4", "name=tuned", "model.pretrained=one"]


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path, zygote: Any
) -> Path:
    """Return a folder with two exports, `one` and `two`, whose weights have the same shapes."""
    from tiny import PLAN

    here = tmp_path_factory.mktemp("exported")
    (here / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    for name, seed in (("one", 1), ("two", 2)):
        words = ["tiny.toml", f"name={name}", f"seed={seed}", "goal.steps=1"]
        assert zygote.run(here, "train", *words).code == 0
        assert zygote.run(here, "export", name, "--to", "hf", "--output", name).code == 0
    return here


@pytest.fixture
def here(exported: Path, plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Move into the folder of a test, with copies of the exports `one` and `two`."""
    for name in ("one", "two"):
        shutil.copytree(exported / name, plan_file.parent / name)
    monkeypatch.chdir(plan_file.parent)
    return plan_file.parent


def test_a_run_of_all_weights_needs_its_first_folder_no_more(
    here: Path, plan_file: Path, train: Callable[..., Path], zygote: Any
) -> None:
    whole = train(*WORDS, *TAKES[1:], "goal.steps=4", "name=whole")
    words = [str(plan_file), *WORDS, *TAKES[1:]]
    assert zygote.run(here, "train", *words, "goal.steps=2").code == 0
    shutil.rmtree(here / "one")
    ended = zygote.run(here, "train", *words, "goal.steps=4", "--resume")
    assert ended.code == 0, ended.err
    told = ended.out + ended.err
    assert tells(told, "changed since", "going on", "shards")
    assert_same_run(whole, run := here / "runs" / "tuned")
    assert 'pretrained = "one"' in (run / "plan.toml").read_text()
    report = json.loads((run / "report.json").read_text())
    assert report["not_made"] == {} and report["sample"]["text"]
    ended = zygote.run(here, "train", str(run / "plan.toml"), "goal.steps=5", "--resume")
    assert ended.code == 0, ended.err  # as an interrupted run is told to go on
    for verb in (["eval", "tuned"], ["sample", "tuned", "--tokens", "2"], ["report", "tuned"]):
        ended = zygote.run(here, *verb)
        assert ended.code == 0, ended.err
    ended = zygote.run(here, "export", "tuned", "--to", "hf", "--output", "out")
    assert ended.code == 0, ended.err


def test_other_weights_in_the_first_folder_change_nothing(
    here: Path, train: Callable[..., Path]
) -> None:
    """A resume reads the checkpoint alone, and still knows which folder the run started from."""
    whole = train(*WORDS, *TAKES, "name=whole")
    train(*WORDS, *TAKES, "goal.steps=2")
    shutil.copy(here / "two" / "model.safetensors", here / "one" / "model.safetensors")
    assert_same_run(whole, train(*WORDS, *TAKES, resume=True))
    for other, told in {
        "model.pretrained=two": r"model\.pretrained was 'one' and is now 'two'",
        "model.layers=2": r"model\.layers was 1 and is now 2",
    }.items():
        with pytest.raises(ConfigError, match=told):
            train(*WORDS, *TAKES, "goal.steps=6", other, resume=True)


def test_how_random_weights_begin_says_nothing_of_loaded_ones(
    here: Path, train: Callable[..., Path]
) -> None:
    words = [*WORDS, *TAKES, "goal.steps=2"]
    plain = train(*words, "name=plain")
    for number, key in enumerate(("output_init='zero'", "init_std=0.5", "vocab_multiple=7")):
        other = train(*words, f"model.{key}", f"name=other{number}")
        assert torch.equal(losses(other), losses(plain))
    resumed = train(*words, "model.output_init='plain'", "name=plain", "goal.steps=3", resume=True)
    assert len(losses(resumed)) == 3


def test_a_resume_before_any_checkpoint_starts_again_from_the_folder(
    here: Path, train: Callable[..., Path]
) -> None:
    words = [*WORDS, *TAKES, "goal.steps=2", "checkpoint.every_steps=0"]
    first = losses(train(*words))
    assert torch.equal(losses(train(*words, resume=True)), first)
    shutil.rmtree(here / "one")
    with pytest.raises(ConfigError, match=in_order("model.pretrained", "'one'", "does not exist")):
        train(*words, resume=True)


def refused(zygote: Any, here: Path, words: list[str], told: str) -> str:
    ended = zygote.run(here, *words)
    assert ended.code == 2 and told in ended.err, (words, ended.err)
    return ended.err


def test_frozen_weights_are_needed_as_they_were(here: Path, plan_file: Path, zygote: Any) -> None:
    """QLoRA's base: refused by name where it changed or is gone, by every verb."""
    words = ["train", str(plan_file), *WORDS, *TAKES, "--with", "qlora"]
    words += ["techniques.qlora.base=int8", "optimizer.lr=1e-3"]
    ended = zygote.run(here, *words, "goal.steps=2")
    assert ended.code == 0, ended.err
    before = zygote.run(here, "eval", "tuned", "--json")
    tried = [
        ["eval", "tuned"],
        ["sample", "tuned"],
        ["export", "tuned", "--to", "hf", "--output", "x"],
        [*words, "goal.steps=4", "--resume"],
    ]
    kept = (here / "one" / "model.safetensors").read_bytes()
    shutil.copy(here / "two" / "model.safetensors", here / "one" / "model.safetensors")
    for verb in tried:
        told = refused(zygote, here, verb, "'one' holds other weights")
        assert "sha256" in told and " -> " in told
    (here / "one").rename(here / "away")
    for verb in tried:
        assert tells(refused(zygote, here, verb, "'one' is gone"), "weights back into one")
    (here / "away").rename(here / "one")
    (here / "one" / "model.safetensors").write_bytes(kept)
    assert zygote.run(here, "eval", "tuned", "--json").out == before.out
    assert zygote.run(here, *words, "goal.steps=4", "--resume").code == 0


@pytest.mark.parametrize("own", [False, True], ids=["a folder", "the run's first weights"])
def test_a_teacher_is_needed_as_it_was_where_it_teaches(
    here: Path, plan_file: Path, zygote: Any, own: bool
) -> None:
    """A resume refuses another teacher; what reads the trained model alone needs none."""
    teacher = "one" if own else "two"
    words = ["train", str(plan_file), *WORDS, *TAKES, "--with", "distillation"]
    words += [] if own else ["techniques.distillation.teacher=two"]
    ended = zygote.run(here, *words, "goal.steps=2")
    assert ended.code == 0, ended.err
    before = zygote.run(here, "eval", "tuned", "--json")
    other = "two" if own else "one"
    shutil.copy(here / other / "model.safetensors", here / teacher / "model.safetensors")
    key = "model.pretrained" if own else "techniques.distillation.teacher"
    resume = [*words, "goal.steps=4", "--resume"]
    refused(zygote, here, resume, f"{key} = '{teacher}' holds other weights")
    assert zygote.run(here, "eval", "tuned", "--json").out == before.out
    shutil.rmtree(here / teacher)
    refused(zygote, here, resume, f"{key} = '{teacher}' is gone")
    assert zygote.run(here, "eval", "tuned", "--json").out == before.out
    assert zygote.run(here, "export", "tuned", "--to", "hf", "--output", "x").code == 0


def test_a_frozen_base_with_another_config_is_told_with_what_mends_it(
    here: Path, train: Callable[..., Path], zygote: Any
) -> None:
    train(*WORDS, *TAKES, "goal.steps=2", "techniques.lora.rank=2")
    config = here / "one" / "config.json"
    kept = config.read_text()
    config.write_text(json.dumps({**json.loads(kept), "rms_norm_eps": 0.125}))
    for verb in (["eval", "tuned"], ["train", "runs/tuned/plan.toml", "--resume", "goal.steps=3"]):
        ended = zygote.run(here, *verb)
        assert ended.code == 2 and "model.norm_eps 1e-05 -> 0.125" in ended.err
        asked = "goal.steps=3 " * ("--resume" in verb)  # what else was asked for
        words = f"runs/tuned/plan.toml {asked}name=NEW model.norm_eps=0.125 for a new run"
        assert words in ended.err
    config.write_text(kept)
    assert zygote.run(here, "eval", "tuned").code == 0


@pytest.mark.parametrize(
    "technique",
    ["lora", *(pytest.param(other, marks=pytest.mark.slow) for other in ("distillation", ""))],
)
def test_another_tokenizer_beside_the_first_weights_is_not_the_run(
    here: Path, plan_file: Path, zygote: Any, technique: str
) -> None:
    """A run that has begun has its own tokenizer, so none that lies there now is in its way."""
    chosen = ["--with", technique] if technique else []
    words = [str(plan_file), *WORDS, *TAKES[1:]]
    assert zygote.run(here, "train", *words, "goal.steps=2", *chosen).code == 0
    before = zygote.run(here, "eval", "tuned", "--json")
    file = here / "one" / "tokenizer.json"
    spec = json.loads(file.read_text())
    ids = spec["model"]["vocab"]
    one, two = [token for token, number in ids.items() if number in (280, 281)]
    ids[one], ids[two] = ids[two], ids[one]
    file.write_text(json.dumps(spec))
    ended = zygote.run(here, "eval", "tuned", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out) == json.loads(before.out)
    for verb in (
        ["sample", "tuned", "--tokens", "2"],
        ["export", "tuned", "--to", "hf", "--output", "out"],
        ["train", *words, "goal.steps=3", "--resume"],
    ):
        ended = zygote.run(here, *verb)
        assert ended.code == 0, ended.out + ended.err
    own = (here / "runs" / "tuned" / "tokenizer.json").read_text()
    assert (here / "out" / "tokenizer.json").read_text() == own
