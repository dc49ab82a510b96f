"""`finetune` trains what a model and a file decide, and `chat` talks with what came of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.catalogue import catalogue
from headrace.cli.chat import _converse
from headrace.cli.finetune import ASKED, FULL_RATE, _pairs_line
from headrace.cli.train import closing_words
from headrace.inference.chat import Chat
from headrace.inference.load import open_model, read_plan
from headrace.plan.plan import Plan
from headrace.recipes import read_recipe, recipes
from headrace.train.result import Conclusion

TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"Where is the {word}?"},
            {"role": "assistant", "content": f"The {word} stands by the river."},
        ]
    }
    for word in ("mill", "wheel", "stone", "gate", "weir", "sluice", "grain", "flour") * 4
]


@pytest.fixture(scope="session")
def talks(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in TALKS))
    return str(file)


@pytest.fixture
def tuned(call: Callable[..., Any], workshop: Path, talks: str) -> Path:
    """The folder of a run that was fine-tuned on conversations; it is made once."""
    folder = workshop / "runs" / "talks"
    if not folder.exists():
        keys = ("goal.steps=2", "data.validation=0.2", "name=talks")
        report = call("finetune", "demo", talks, *keys)
        assert report["methods"][0]["method"] == "full" and report["methods"][0]["fits"] == "yes"
        assert report["before"]["loss_nats"] > 0 and report["val"][-1]["step"] == 2
        assert any("begins with messages" in line for line in report["told"])
    return folder


def test_a_run_is_tuned_and_talks(tuned: Path, call: Callable[..., Any]) -> None:
    told = call("chat", str(tuned), "--prompt", "Where is it?", "--tokens", "4")
    assert [one["role"] for one in told["messages"]] == ["user", "assistant"]
    twice = call("chat", "talks", "--prompt", "a", "--prompt", "b", "--tokens", "2", "--seed", "1")
    assert len(twice["messages"]) == 4
    exported = call("export", "talks", "--to", "hf", "--output", str(tuned / "out"))
    ended = Conclusion(json.loads((tuned / "report.json").read_text()), [], None, {})
    words = closing_words(tuned, ended, own_text=True)  # as of a resume by `train`
    assert f" chat {tuned}" in words and f" sample {tuned}" not in words
    template = Path(exported["folder"]) / "chat_template.jinja"
    assert template.read_text() == (tuned / "chat_template.jinja").read_text()


def test_the_weights_of_a_run_are_written_once(tuned: Path, workshop: Path) -> None:
    (exported,) = (workshop / "runs" / "demo" / "exported").iterdir()
    assert str(exported).endswith(Path(json_plan(tuned)).name)


def json_plan(run: Path) -> str:
    """Return the folder of weights that a run began from."""
    lines = (run / "plan.toml").read_text().splitlines()
    return next(line.split('"')[1] for line in lines if line.startswith("pretrained ="))


def test_an_answer_ends_where_the_template_ends_turns(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a turn is found by rendering one, and what follows it is no answer."""
    talk = Chat.of(open_model(tuned, catalogue()), tuned, system="Be short.")
    assert talk.end == "<|im_end|>"
    asked: list[str] = []

    def generated(model: Any, ids_BT: Any, *, until: Callable[..., bool], **how: Any) -> Any:
        asked.append(talk._text(ids_BT[0].tolist()))
        new = talk._encoder.encode(" By the river. <|im_end|>\nmore").ids
        assert [until(new[: n + 1]) for n in range(len(new))].index(True) > 2
        return ids_BT.new_tensor([[*ids_BT[0].tolist(), *new]])

    monkeypatch.setattr("headrace.inference.chat.generate", generated)
    pieces: list[str] = []
    assert talk.reply("Where?", new_tokens=8, show=pieces.append) == "By the river."
    assert "".join(pieces) == "By the river." and len([one for one in pieces if one]) > 1
    talk.reply("And then?", new_tokens=8)
    assert asked[1].startswith(asked[0]) and "By the river.<|im_end|>" in asked[1]
    assert asked[0].startswith("<|im_start|>system\nBe short.<|im_end|>")
    assert asked[0].endswith("<|im_start|>assistant\n")


def test_a_conversation_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl+C ends an answer and then the conversation; so do Ctrl+D and an empty line."""
    for last in (KeyboardInterrupt, EOFError, " "):
        said = iter(("a", "b", last, "never"))

        def line(_: str, said: Any = said) -> str:
            if isinstance(one := next(said), str):
                return one
            raise one

        def answer(text: str) -> str:
            print(f"to {text}", end="")
            if text == "a":
                raise KeyboardInterrupt
            return ""

        monkeypatch.setattr("builtins.input", line)
        _converse(answer)
        shown = capsys.readouterr()
        assert shown.out == "to ato b\n" + "\n" * (last != " ")
        assert "cut off" in shown.err and next(said) == "never"


def test_plain_text_epochs_and_methods(
    call: Callable[..., Any], tiny_demo: list[str], tmp_path: Path
) -> None:
    """Text has no answers; epochs become steps; only a named method is looked at."""
    text = next(word for word in tiny_demo if word.startswith("data.sources="))
    shown = call("finetune", "demo", text, "--epochs", "2", "--with", "lora", "--dry-run")
    plan = shown["plan"]
    assert "chat" not in plan["data"] and plan["goal"]["steps"] == plan["schedule"]["steps"] > 2
    assert [one["method"] for one in shown["methods"]] == ["lora"] and "lora" in plan["techniques"]
    keys = ("eval.every_steps=7", "schedule.warmup_steps=1")
    half = call("finetune", "demo", text, *keys, "--epochs", "1", "--with", "full", "--dry-run")
    half = half["plan"]
    assert (half["eval"]["every_steps"], half["schedule"]["warmup_steps"]) == (7, 1), "as asked"
    assert half["goal"]["steps"] == pytest.approx(plan["goal"]["steps"] / 2, abs=1)
    assert not {"lora", "qlora"} & set(half["techniques"])
    words = ("finetune", "demo", text, "goal.steps=20", "--with", "full", "--dry-run")
    schedule = call(*words)["plan"]["schedule"]
    assert (schedule["steps"], schedule["warmup_steps"]) == (20, 2), "it ends where the run does"
    assert call(*words, "schedule.steps=90")["plan"]["schedule"]["steps"] == 90
    counted = tmp_path / "counted.toml"
    counted.write_text('name = "counted"\n[goal]\ntokens = 640\n[data]\nsequence_length = 16\n')
    words = ("finetune", "demo", text, "batch.tokens=64", "--with", "full", "--dry-run")
    words = (*words, "--recipe", str(counted))
    assert call(*words)["plan"]["goal"]["tokens"] == 640, "the plan says when it ends"
    goal = call(*words, "--epochs", "1", "goal.minutes=5")["plan"]["goal"]
    assert goal["steps"] > 2 and not goal.get("tokens") and goal["minutes"] == 5
    refused = call(*words, "--epochs", "1", "goal.steps=9", code=2)
    assert refused["error"] == "--epochs 1 and goal.steps both say how much is trained"


def test_pairs_are_compared(call: Callable[..., Any], tmp_path: Path) -> None:
    """Their fields say so; the learning rate is smaller than that of conversations."""
    rows = [
        {"prompt": f"Where is the {number}?", "chosen": "By the river.", "rejected": "No."}
        for number in range(40)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ("finetune", "demo", str(file), "--with", "lora", "--dry-run")
    plan = call(*words)["plan"]
    assert plan["data"]["chat"]["kind"] == "preference" and "preference" in plan["techniques"]
    chosen = call(*words, "data.chat.kind=chosen")["plan"]
    assert chosen["data"]["chat"]["kind"] == "chosen" and "preference" not in chosen["techniques"]
    assert plan["optimizer"]["lr"] == pytest.approx(chosen["optimizer"]["lr"] / 20)
    last = {"pairs": 8, "chosen_likelier": 0.75, "ranked_right": 0.5, "reward_margin": 0.1}
    assert _pairs_line(last, {"chosen_likelier": 0.25}) == (
        "of 8 held-out pairs the chosen answer is the likelier one in 75% (25% before); rewards "
        "rank 50% right, and are 0.1 apart"
    )


ADAPTED = {
    name: [*plan.techniques]
    for name, plan in ((name, Plan.read(read_recipe(name), catalogue())) for name in recipes())
    if any("frozen" in technique.composes for technique in plan.techniques.values())
}
"""Techniques of every recipe that trains adapters."""
NOT_HERE = {"optimizer_offload", "torch_compile"}
"""Techniques that need a GPU, or take longer than such a run."""


@pytest.mark.parametrize("name", ADAPTED)
def test_a_recipe_tunes_with_all_of_its_techniques(
    name: str, call: Callable[..., Any], talks: str, tuned: Path
) -> None:
    """Its method, its rows of a step and its rate stand; the model says how long a row is."""
    less = [one for one in NOT_HERE if one in ADAPTED[name]]
    words = [word for one in less for word in ("--without", one)]
    if "chunked_cross_entropy" in ADAPTED[name]:
        words.append("techniques.chunked_cross_entropy.chunk_tokens=8")
    report = call(
        *("finetune", "demo", talks, "--recipe", name, "goal.steps=2", f"name={name}"),
        *("data.validation=0.2", *words),
    )
    assert report["status"] == "done" and {*report["techniques"]} == {*ADAPTED[name]} - {*less}
    assert all(one["active"] for one in report["techniques"].values())
    written, ran = (
        Plan.read(read_recipe(name), catalogue()),
        read_plan(Path("runs", name), catalogue()),
    )
    assert [one["method"] for one in report["methods"]] == [
        one for one in ASKED if one in ADAPTED[name]
    ]
    assert (ran.data.sequence_length, ran.optimizer.lr) == (16, written.optimizer.lr)
    rows = written.batch.tokens // written.data.sequence_length
    assert (ran.batch.tokens, ran.batch.micro_sequences) == (
        16 * rows,
        written.batch.micro_sequences,
    )


def test_another_method_takes_the_place_of_the_recipes(
    call: Callable[..., Any], talks: str
) -> None:
    words = ("finetune", "demo", talks, "--recipe", "chat", "--dry-run", "data.validation=0.2")
    plan = call(*words, "--with", "full")["plan"]
    assert {*plan["techniques"]} == {"best_fit_packing", "neftune"}
    assert plan["optimizer"]["lr"] < 2e-3, "the rate of all weights, and not the recipe's"
    assert "qlora" in call(*words, "--with", "qlora")["plan"]["techniques"]
    own = Path("own.toml")
    own.write_text(read_recipe("finetune").replace("minutes = 600", "steps = 7"))
    plan = call("finetune", "demo", talks, "--recipe", "own.toml", *words[5:])["plan"]
    assert (plan["goal"]["steps"], plan["optimizer"]["lr"]) == (7, 2e-4), "as it is written"
    nearest = call("finetune", "demo", talks, "--recipe", "finetune-fest", code=2)
    assert "finetune-fast" in nearest["remedy"]


def test_a_file_of_examples_is_asked_for(call: Callable[..., Any], tmp_path: Path) -> None:
    assert "FILE.jsonl" in call("finetune", str(tmp_path), code=2)["remedy"]
    refused = call("finetune", str(tmp_path), "x.jsonl", code=2)
    assert "config.json" in refused["error"]


def test_a_folder_of_weights_is_no_run_of_its_name(
    tuned: Path, call: Callable[..., Any], tiny_demo: list[str], workshop: Path
) -> None:
    """The rate and the length of a folder's fine-tuning are not those of a run in `runs/`."""
    folder = workshop / "talks"  # a run of that name is there
    shutil.copytree(json_plan(tuned), folder)
    text = next(word for word in tiny_demo if word.startswith("data.sources="))
    plan = call("finetune", "talks", text, "--with", "full", "--dry-run")["plan"]
    shutil.rmtree(folder)
    assert plan["model"]["pretrained"] == "talks" and plan["optimizer"]["lr"] == FULL_RATE
    assert plan["data"]["sequence_length"] == 16, "as long as its config.json says"
