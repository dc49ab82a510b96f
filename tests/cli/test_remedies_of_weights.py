"""Each refusal about first weights, their tokenizer or their path leads to a plan that runs."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.assemble.build import check_weights, make_build
from headrace.core.errors import HeadraceError
from headrace.data.ingest import prepare
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Stage

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path, zygote: Any
) -> Path:
    """Return a folder of weights: `one` (vocabulary 300), `two` (280), `bare` (no tokenizer)."""
    from tiny import PLAN

    here = tmp_path_factory.mktemp("folders")
    (here / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    for name, vocab in (("one", 300), ("two", 280)):
        words = ["tiny.toml", f"name={name}", f"data.vocab={vocab}", "goal.steps=1"]
        words += ["model.vocab_multiple=1"]
        assert zygote.run(here, "train", *words).code == 0
        assert zygote.run(here, "export", name, "--to", "hf", "--output", name).code == 0
    shutil.copytree(here / "one", here / "bare")
    (here / "bare" / "tokenizer.json").unlink()
    return here


@pytest.fixture
def here(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for each test, with copies of the folders."""
    for name in ("one", "two", "bare"):
        shutil.copytree(folders / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refusal(here: Path, tiny_plan: Callable[..., Plan]) -> Callable[..., HeadraceError | None]:
    """What a run of these words is refused with, before its first step; None if it is not."""

    def of(*words: str, note_line: Callable[[str], None] = print) -> HeadraceError | None:
        try:
            plan = tiny_plan(*words)
            check_weights(plan)
            build = make_build(
                plan, prepare(plan), World(), CPU, until=Stage.STEP, note_line=note_line
            )
        except HeadraceError as error:
            return error
        build.loader.close()
        return None

    return of


def follow(refusal: Callable[..., HeadraceError | None], *words: str) -> list[str]:
    """Do as each remedy says, at most twice, until the plan is accepted; returns the messages."""
    told = []
    for _ in range(2):
        error = refusal(*words)
        assert error is not None
        told.append(error.message)
        assert error.remedy.changes, error.remedy
        advised = error.remedy.changes[0]
        assert advised and all(re.fullmatch(r"[\w.]+=\S+", word) for word in advised), error
        words = (*words, *advised)
        if refusal(*words) is None:
            return told
    raise AssertionError(f"no way out: {told}, {refusal(*words)}")


@pytest.mark.parametrize(
    "words",
    [
        ["data.tokenizer=bpe", "data.vocab=290"],
        ["data.tokenizer=bpe", "data.vocab=400"],
        ["data.tokenizer=two"],
        ["model.vocab=512"],
        ["model.vocab=512", "data.tokenizer=bpe", "data.vocab=400"],
        ["model.vocab=100", "model.tied_embeddings=true", "model.norm=layer_norm"],
    ],
    ids=" ".join,
)
def test_weights_and_tokenizer_that_do_not_fit(refusal: Any, words: list[str]) -> None:
    follow(refusal, "model.pretrained=one", *words)


@pytest.mark.parametrize(
    "words",
    [
        ["model.vocab=100", "data.vocab=300"],
        ["model.vocab=290", "data.tokenizer=one"],
        ["techniques.distillation.teacher=two"],
        ["techniques.distillation.teacher=two", "model.vocab=280", "data.vocab=270"],
        ["techniques.distillation.teacher=twoo"],
        ["data.tokenizer=onne"],
    ],
    ids=" ".join,
)
def test_random_weights_and_a_tokenizer_or_a_teacher(refusal: Any, words: list[str]) -> None:
    follow(refusal, *words)


def test_a_vocabulary_key_is_never_traded_for_the_other(refusal: Any) -> None:
    """Check that following the remedies of data.vocab and model.vocab does not go in a circle."""
    told = follow(refusal, "model.pretrained=one", "data.tokenizer=bpe", "data.vocab=400")
    assert len(told) == 1 and "model.pretrained = 'one'" in told[0]
    assert told[0].count("sha256") == 2 and "stand for other text" in told[0]


def test_a_teacher_of_another_tokenizer_than_the_weights(refusal: Any) -> None:
    """The run's tokenizer is its weights', so only another teacher is a way out."""
    for extra in ([], ["data.tokenizer=two"]):
        words = ["model.pretrained=one", "techniques.distillation.teacher=two"]
        error = refusal(*words, *extra)
        if extra:  # the first weights are asked first
            assert error.remedy.text == "data.tokenizer=one"
        else:
            assert "280" in error.message and "300" in error.message
            assert not error.remedy.changes and "--without distillation" in error.remedy.text
            assert error.remedy.text.startswith("a teacher with ") and " one " in error.remedy.text
    assert refusal("model.pretrained=one", "techniques.distillation.teacher=bare") is None


def test_a_folder_without_a_tokenizer_takes_none_in_silence(refusal: Any, here: Path) -> None:
    told: list[str] = []
    error = refusal("model.pretrained=bare", note_line=told.append)
    assert "no tokenizer.json" in error.message and "bpe" not in error.remedy.text
    assert refusal("model.pretrained=bare", "data.tokenizer=one", note_line=told.append) is None
    (line,) = [line for line in told if "bare" in line]
    assert "data.tokenizer = 'one'" in line and "is not checked" in line
    error = refusal("model.pretrained=bare", "data.tokenizer=two")
    assert "300 vocabulary entries" in error.message and "tokenizer has 280" in error.message
    shutil.copy(here / "one" / "tokenizer.json", here / "bare")  # as the remedy says
    assert refusal("model.pretrained=bare") is None

    (here / "bare" / "tokenizer.json").unlink()
    (here / "bare" / "tokenizer.model").write_bytes(b"sentencepiece")
    error = refusal("model.pretrained=bare")
    assert error.remedy.text.startswith("python -c ") and "AutoTokenizer" in error.remedy.text


def test_weights_with_fewer_entries_than_their_own_tokenizer(refusal: Any, here: Path) -> None:
    config = json.loads((here / "one" / "config.json").read_text())
    tensors = load_file(here / "one" / "model.safetensors")
    cut = {n: t[:290].clone() if t.size(0) == 300 else t for n, t in tensors.items()}
    save_file(cut, here / "one" / "model.safetensors")
    (here / "one" / "config.json").write_text(json.dumps(config | {"vocab_size": 290}))
    error = refusal("model.pretrained=one")
    assert "300 entries" in error.message and "290" in error.message
    assert "resize_token_embeddings(300)" in error.remedy.text


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.2-1B"])
def test_a_name_of_the_hub_is_told_how_to_download_it(refusal: Any, here: Path, name: str) -> None:
    error = refusal(f"model.pretrained={name}")
    last = name.rpartition("/")[2]
    wanted = f"hf download {name} --local-dir {last}, then model.pretrained={last}"
    assert error.remedy.text == wanted
    assert "Hugging Face Hub" in error.message
    shutil.copytree(here / "one", here / last)  # as the command does
    assert refusal(error.remedy.text.rpartition("then ")[2]) is None


@pytest.mark.parametrize("key", ["model.pretrained", "techniques.distillation.teacher"])
def test_a_mistyped_path_is_told_the_nearest(refusal: Any, here: Path, key: str) -> None:
    shutil.copytree(here / "one", here / "models" / "chat-v2")
    more = ["data.tokenizer=one", "model.vocab=300"] if "teacher" in key else []
    for typed in ("models/chat-v3", "models/chatv2", f"{here}/modles/chat-v2"):
        error = refusal(*more, f"{key}={typed}")
        assert error.message.startswith(f"{key} = {typed!r} does not exist")
        assert "models/chat-v2" in error.message.partition("nearest path is")[2]
        assert "Hub" not in error.message
        assert follow(refusal, *more, f"{key}={typed}")
    error = refusal(*more, f"{key}=modles/chat-v2")  # a path, or OWNER/NAME of the hub
    path, _, download = error.remedy.text.partition("; or ")
    assert path == f"{key}=models/chat-v2" and download.startswith("hf download modles/chat-v2 ")
    error = refusal(*more, f"{key}=models/{'x' * 40}")
    assert f"{here / 'models'} has no x" in error.message and "Hub" not in error.message
    error = refusal(*more, f"{key}=models/{'x' * 400}")  # longer than a name can be
    assert "does not exist" in error.message


def test_what_is_no_folder_of_a_model_is_told_where_one_is(
    refusal: Any, here: Path, train: Callable[..., Path], zygote: Any
) -> None:
    shutil.copytree(here / "one", here / "models--org--chat" / "snapshots" / "0a1b")
    follow(refusal, "model.pretrained=models--org--chat")
    follow(refusal, "model.pretrained=one/model.safetensors")
    follow(refusal, "model.pretrained=one/config.json")
    train("name=own", "goal.steps=1")
    error = refusal("model.pretrained=runs/own")
    command, _, then = error.remedy.text.partition(", then ")
    assert zygote.run(here, *command.split()[1:]).code == 0
    assert refusal(then) is None
    follow(refusal, "model.pretrained=runs/own")  # its export is named from now on
    (here / "empty").mkdir()
    error = refusal("model.pretrained=empty")
    assert "no config.json" in error.message and "save_pretrained" in error.remedy.text


@pytest.mark.parametrize("verb", [["data", "ingest"], ["explain"], ["train"]], ids=" ".join)
def test_every_verb_tells_a_name_of_the_hub_alike(
    here: Path, plan_file: Path, zygote: Any, verb: list[str]
) -> None:
    """`gpt2` is a tokenizer of tiktoken too, which is no folder of weights."""
    ended = zygote.run(here, *verb, str(plan_file), "model.pretrained=gpt2")
    assert ended.code == 2
    command, _, key = ended.err.partition("try: ")[2].strip().partition(", then ")
    assert command.startswith("hf download gpt2 ") and key == "model.pretrained=gpt2"


def test_a_tokenizer_of_tiktoken_is_told_by_its_name(refusal: Any) -> None:
    assert refusal("data.tokenizer=gpt2").remedy.text == "data.tokenizer=tiktoken:gpt2"
    assert "hf download org/chat" in refusal("data.tokenizer=org/chat").remedy.text


def test_a_home_folder_is_found(refusal: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert refusal("model.pretrained=~/one") is None
    teacher = "techniques.distillation.teacher=~/one"
    assert refusal(teacher, "data.tokenizer=~/one", "model.vocab=300") is None


def test_a_disagreement_is_told_before_any_text_is_read(
    here: Path, tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.core.progress import Progress
    from headrace.train import train as trainer

    def never(*_: object, **__: object) -> None:
        raise AssertionError("data was prepared")

    monkeypatch.setattr(trainer, "prepare_together", never)
    for words in (["model.pretrained=one", "model.layers=7"], ["model.pretrained=gpt2"]):
        with pytest.raises(HeadraceError):
            trainer.run(tiny_plan(*words), progress=Progress())
