"""Words of a command line that would be left out, beyond every bound, or name a part of a run."""

import json
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli.app import Headrace, app
from headrace.core.errors import HeadraceError

Call = Callable[..., Any]
RUN = "runs/demo"


def numbers() -> Iterator[str]:
    """Every option of a verb that takes a number, behind its verb."""

    for verb in Headrace.verbs:
        module, name = verb.function.split(".")
        found = getattr(import_module(f"headrace.cli.{module}"), name)
        inner = [(verb.name, found)]
        if isinstance(found, typer.Typer):
            inner = [
                (f"{verb.name} {one.name or getattr(one.callback, '__name__', '')}", one.callback)
                for one in found.registered_commands
            ]
        for words, function in inner:
            for option, kind in get_type_hints(function).items():
                if {int, float} & {kind, *get_args(kind)}:
                    yield f"{words} {option}"


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        (("sample", RUN), "--tokens"),
        (("sample", RUN), "--top-k"),
        (("sample", RUN), "--temperature"),
        (("sample", RUN), "--top-p"),
        (("sample", RUN), "--seed"),
        (("eval", RUN), "--tokens"),
        (("eval", RUN), "--stride"),
        (("eval", RUN, "--tasks", "x.jsonl"), "--limit"),
        (("finetune", RUN, "x.jsonl"), "--epochs"),
        (("distill", RUN, RUN, "x.jsonl"), "--epochs"),
        (("extend", RUN), "--to"),
        (("extend", RUN), "--questions"),
        (("compress", RUN), "--group"),
        (("compress", RUN), "--budget-mb"),
        (("compress", RUN), "--tokens"),
        (("prune", RUN), "--tokens"),
        (("prune", RUN), "--multiple"),
        (("run", "x.gguf", "--measure"), "--tokens"),
        (("chat", RUN, "--prompt", "x"), "--tokens"),
        (("chat", RUN, "--prompt", "x"), "--temperature"),
        (("chat", RUN, "--prompt", "x"), "--top-k"),
        (("chat", RUN, "--prompt", "x"), "--seed"),
        (("import", "torchtitan", "x.toml"), "--ranks"),
        (("data", "tokenizer", "x.txt"), "--vocab"),
        (("data", "ingest", "demo", "--engine", "local"), "--workers"),
        (("probe",), "--seconds"),
        (("tune", "demo"), "--seeds"),
        (("tune", "demo"), "--minutes"),
        (("lr-find", "demo"), "--steps"),
        (("lr-find", "demo"), "--low"),
        (("lr-find", "demo"), "--high"),
        (("check", "mup", "demo"), "--widest"),
        (("ablate", "demo", "--with", "z_loss"), "--loss-steps"),
        (("ablate", "demo", "--with", "z_loss"), "--minutes"),
        (("launch", "demo", "--dry-run"), "--nodes"),
        (("launch", "demo", "--dry-run"), "--gpus"),
        (("ui",), "--port"),
    ],
)
def test_a_number_beyond_every_bound_is_refused(
    call: Call, verb: tuple[str, ...], option: str
) -> None:
    for value in ("99999999999999999999", "-99999999999999999999", "nan"):
        if (option, value) in {("--minutes", "99999999999999999999")}:
            continue  # an endless time is none too many
        told = call(*verb, option, value, code=2)
        assert told["exit_code"] == 2 and told["error"]


def follow(remedy: str) -> Any:
    """Run each command of a remedy, and yield the JSON value that it prints."""
    for way in remedy.partition(", which")[0].split("; "):
        words = shlex.split(way)
        assert words[0] == "headrace"
        ended = CliRunner().invoke(app, [*words[1:], "--json"], prog_name="headrace")
        assert ended.exit_code == 0, ended.output
        yield json.loads(ended.stdout)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("explain", "muon", "demo"), "muon is a technique"),
        (("explain", "muon", "batch.tokens=512"), "muon is a technique"),
        (("explain", "muon", "--with", "z_loss"), "muon is a technique"),
        (("explain", "muon", "--matrix"), "takes nothing beside it"),
        (("explain", "--matrix", "--graph"), "takes nothing beside it"),
        (("list", "--families", "--recipes"), "ask for two"),
    ],
)
def test_words_that_would_be_left_out_are_refused(
    call: Call, argv: tuple[str, ...], words: str
) -> None:
    told = call(*argv, code=2)
    assert words in told["error"]
    if "demo" not in argv:  # where it would be a plan and an override
        assert [*follow(told["remedy"])]


@pytest.mark.parametrize(
    ("name", "near"),
    [("soap", "muon"), ("ZeRO-3", "fsdp"), ("mamba2", "linear_attention"), ("muno", "muon")],
)
def test_a_known_method_is_explained_by_what_comes_nearest(
    call: Call, name: str, near: str
) -> None:
    told = call("explain", name, code=2)
    assert told["remedy"] == f"headrace explain {near}" and near in told["error"]
    assert "not built here" in told["error"] or name == "muno"


def test_the_page_of_one_run_goes_where_it_is_asked_to(call: Call, tmp_path: Path) -> None:
    output = tmp_path / "one.html"
    before = Path(RUN, "report.html").stat().st_mtime_ns
    assert call("report", RUN, "--output", str(output))["page"] == str(output)
    assert output.read_text().startswith("<!") and "demo" in output.read_text()
    assert Path(RUN, "report.html").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("part", "more"),
    [
        ("plan.toml", ""),
        ("report.json", ""),
        ("checkpoints", ""),
        ("checkpoints/step-3", " --checkpoint step-3"),
        ("checkpoints/latest", " --checkpoint latest"),
    ],
)
def test_a_part_of_a_run_leads_to_the_run(call: Call, part: str, more: str) -> None:
    for verb in ("eval", "sample"):
        told = call(verb, f"{RUN}/{part}", code=2)
        assert f"part of the run {RUN}" in told["error"]
        assert told["remedy"] == f"headrace {verb} {RUN}{more}"
        assert [*follow(told["remedy"])]


def test_the_name_of_a_run_in_the_place_of_a_plan_leads_to_its_plan(
    call: Call, monkeypatch: pytest.MonkeyPatch, tiny_demo: list[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["train", *tiny_demo, "name=mine", "goal.steps=1", "--json"]
    assert CliRunner().invoke(app, argv, prog_name="headrace").exit_code == 0
    for verb in ("train", "plan", "explain", "data ingest"):
        told = call_here(*verb.split(), "mine")
        assert told["error"].endswith("runs/mine/plan.toml") or "it is a run" in told["error"]
        assert told["remedy"].startswith(f"headrace {verb} runs/mine/plan.toml")
        assert verb == "train" or [*follow(told["remedy"])]


def call_here(*argv: str) -> Any:
    ended = CliRunner().invoke(app, [*argv, "--json"], prog_name="headrace")
    assert ended.exit_code == 2, ended.output
    return json.loads(ended.stdout)


def test_a_guess_is_only_made_where_a_name_is_near(
    monkeypatch: pytest.MonkeyPatch, tiny_demo: list[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    told = call_here("train", *tiny_demo, "data.validation=5%", "name=x")
    assert told["remedy"] == "data.validation=0.05" and "runs" not in told["error"]
    told = call_here("train", *tiny_demo, "data.validation=qqq", "name=x")
    assert "nearest" not in told["error"]
    told = call_here("train", "qqq")
    assert (
        "the recipes are 124m, 160m, 1b, 7b, chat, demo" in told["error"]
        and told["remedy"] == "headrace train demo"
    )


def test_a_device_that_is_not_here_is_told_with_the_option(call: Call) -> None:
    assert call("probe", "--device", "mps", code=3)["remedy"] == "--device auto"


def test_a_second_export_is_led_to_a_folder_of_its_own(call: Call, tmp_path: Path) -> None:
    output = str(tmp_path / "model")
    argv = ("export", RUN, "--to", "hf")
    call(*argv, "--output", output)
    for number in (2, 3):
        told = call(*argv, "--output", output, code=2)
        assert told["remedy"] == f"--output {output}-{number}"
        assert call(*argv, *told["remedy"].split())["folder"] == f"{output}-{number}"


def test_every_number_that_an_option_takes_is_looked_at() -> None:
    assert {*numbers()} == {
        "sample tokens",
        "sample temperature",
        "sample top_k",
        "sample top_p",
        "sample seed",
        "eval tokens",
        "eval stride",
        "eval limit",
        "finetune epochs",
        "distill epochs",
        "launch nodes",
        "launch gpus",
        "ui port",
        "run max_tokens",
        "run tokens",
        "import ranks",
        "extend to",
        "extend questions",
        "compress group",
        "compress budget_mb",
        "compress tokens",
        "prune tokens",
        "prune multiple",
        "chat tokens",
        "chat temperature",
        "chat top_k",
        "chat seed",
        "data tokenizer vocab",
        "data ingest workers",
        "probe seconds",
        "tune seeds",
        "tune minutes",
        "lr-find steps",
        "lr-find low",
        "lr-find high",
        "check mup widest",
        "ablate minutes",
        "ablate loss_steps",
    }


ARRIVES = [
    (f"eval {RUN}", "export.opened.open_any", "--adapter", "adapter", "one"),
    (f"sample {RUN}", "export.opened.open_any", "--adapter", "adapter", "one"),
    (f"chat {RUN} --prompt x", "export.opened.open_chosen", "--adapter", "adapter", "one"),
    (f"export {RUN} --to hf", "export.opened.open_chosen", "--adapter", "adapter", "one"),
    (f"eval {RUN}", "export.opened.open_model", "--checkpoint", "checkpoint", "step-3"),
    (f"sample {RUN}", "export.opened.open_model", "--checkpoint", "checkpoint", "step-3"),
    (f"export {RUN} --to hf", "export.opened.open_model", "--checkpoint", "checkpoint", "step-3"),
    (f"sample {RUN}", "inference.sample.generate", "--tokens", "new_tokens", 7),
    (f"sample {RUN}", "inference.sample.generate", "--temperature", "temperature", 0.31),
    (f"sample {RUN}", "inference.sample.generate", "--top-k", "top_k", 7),
    (f"sample {RUN}", "inference.sample.generate", "--top-p", "top_p", 0.31),
    (f"sample {RUN}", "inference.sample.generate", "--seed", "seed", 7),
    ("probe", "probes.together.measure_together", "--seconds", "budget_s", 7.0),
    ("tune TINY", "tuner.command.tune_command", "--seeds", "seeds", 9),
    ("tune TINY", "tuner.command.tune_command", "--minutes", "minutes", 7.0),
    ("tune TINY", "tuner.command.tune_command", "--for", "aim", "memory"),
    ("tune TINY", "tuner.command.tune_command", "--architecture", "architecture", True),
    (
        "ablate TINY --with z_loss",
        "tuner.ablate.ablate_command",
        "--loss-steps",
        "loss_steps",
        7,
    ),
    ("ablate TINY --with z_loss", "tuner.ablate.ablate_command", "--minutes", "minutes", 7.0),
    ("ablate TINY --with z_loss", "tuner.ablate.ablate_command", "--pairs", "pairs", True),
    (
        "ablate TINY --with z_loss",
        "tuner.ablate.ablate_command",
        "--out",
        "folder",
        Path("seven"),
    ),
]
"""Command line, what it calls, the option, and the argument as which its value arrives."""


class ArrivedError(HeadraceError):
    """Ends a verb once it has called what is looked at."""


@pytest.mark.parametrize(("words", "called", "option", "name", "value"), ARRIVES)
def test_the_value_of_an_option_arrives(
    words: str,
    called: str,
    option: str,
    name: str,
    value: Any,
    call: Call,
    tiny_demo: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that a value typed for an option reaches the function, and differs from the default."""
    seen: dict[str, Any] = {}

    def look(*given: Any, **named: Any) -> None:
        seen.update(named)
        raise ArrivedError("it has arrived")

    monkeypatch.setattr(f"headrace.{called}", look)
    argv = [w for word in words.split() for w in (tiny_demo if word == "TINY" else [word])]
    typed = [option] if value is True else [option, str(value)]
    assert call(*argv, code=1)["error"] == "it has arrived"
    usual = seen.get(name)
    assert call(*argv, *typed, code=1)["error"] == "it has arrived"
    assert seen[name] == value != usual


def test_an_evaluation_drops_the_keys_that_it_does_not_take() -> None:
    """The remedy keeps a length that rows can have, and no word that is refused."""
    for words, left in (
        (["batch.tokens=99", "data.sequence_length=128"], " data.sequence_length=128"),
        (["seed=3", "data.sequence_length=1", "seed=4"], ""),
    ):
        told = CliRunner().invoke(app, ["eval", "runs/st", *words])
        assert told.exit_code == 2 and "is another key" in told.stderr
        assert told.stderr.rstrip().endswith(f"try: headrace eval runs/st{left}")
