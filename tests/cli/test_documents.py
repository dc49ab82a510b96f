"""`--json` prints one document that holds the exit code, of every verb and however it ends."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from tiny_gguf import model, write
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.catalogue import catalogue
from headrace.cli.plans import named_plan, place
from headrace.data.cleaning import asked_sources
from headrace.data.left_out import LeftOutTally
from headrace.data.parts import list_parts
from headrace.data.scale.job import JobRecord
from headrace.data.tokenizer import train_tokenizer
from headrace.plan.changes import changed
from headrace.plan.data_config import DataConfig
from headrace.plan.plan import Plan
from headrace.probes import together
from headrace.tuner import ablate, command
from headrace.tuner.proposals import Sources
from headrace.tuner.readings import Reading
from headrace.tuner.worker import Worker

Call = Callable[..., Any]
RUN = "runs/demo"
VERBS: dict[str, tuple[str, ...]] = {
    "train": ("TINY", "name=documented", "goal.steps=1"),
    "eval": (RUN,),
    "finetune": (RUN, "TEXT", "goal.steps=1", "name=finetuned"),
    "extend": (RUN, "--to", "32", "goal.steps=1", "name=extended", "--questions", "1"),
    "compress": (RUN, "--to", "int8", "--tokens", "128", "--output", "OUT"),
    "prune": (RUN, "--by", "10%", "--tokens", "128", "--output", "OUT"),
    "distill": (RUN, RUN, "TEXT", "goal.steps=1", "name=distilled"),
    "sample": (RUN, "--tokens", "2"),
    "list": (),
    "explain": ("muon",),
    "report": (RUN,),
    "export": (RUN, "--to", "hf", "--output", "OUT"),
    "import": ("litgpt", str(Path(__file__).parents[1] / "migrate/configs/litgpt_lora.yaml")),
    "run": ("GGUF", "--max-tokens", "2"),
    "data ingest": ("TINY",),
    "data part": ("JOB", "--task", "1/2"),
    "data inspect": ("TEXT",),
    "data pack": ("TINY",),
    "data mix": ("TINY",),
    "data dedup": ("TEXT",),
    "data decontaminate": ("TEXT", "--against", "TEXT"),
    "data tokenizer": (f"{RUN}/tokenizer.json", "data.text_key=version", "--to", "OUT"),
    "data fertility": (
        *(f"{RUN}/tokenizer.json", "--text", f"{RUN}/tokenizer.json"),
        *("data.text_key=version", "--plan", "demo", "--device-name", "H200"),
    ),
    "plan": (f"{RUN}/plan.toml",),
    "probe": ("--device", "cpu", "--seconds", "1"),
    "doctor": (RUN,),
    "tune": ("TINY", "--for", "time"),
    "lr-find": ("TINY", "--steps", "20"),
    "check mup": (
        "TINY",
        "--without",
        "muon",
        "--with",
        "mup",
        "techniques.mup.base_dim=32",
        "--widest",
        "128",
    ),
    "ablate": ("TINY", "--with", "z_loss", "--out", "OUT"),
}
"""Words after each verb with which it succeeds."""
MORE = {
    "list": (("--families",), ("--recipes",)),
    "explain": (("demo",), ("--matrix",)),
    "report": ((RUN, RUN, "--output", "OUT"),),
    "plan": (("demo", "--sweep", "device=cpu"),),
    "doctor": ((f"{RUN}/plan.toml",),),
}
"""Other documents of the same verbs."""
ROWS = ("list", "doctor")
"""Verbs whose document is an array, which has no place for a code: only success prints it."""


def verbs_with_json() -> set[str]:
    """Every verb that has --json, by its words."""

    def walk(group: Any, words: str) -> Iterator[str]:
        for name in group.commands:
            verb = group.load(name) if hasattr(group, "load") else group.commands[name]
            if hasattr(verb, "commands"):
                yield from walk(verb, f"{words}{name} ")
            elif any("--json" in option.opts for option in verb.params):
                yield f"{words}{name}"

    return set(walk(typer.main.get_command(app), ""))


def test_every_verb_with_json_is_looked_at() -> None:
    elsewhere = {"chat", "launch", "status", "logs", "stop", "ui"}
    assert verbs_with_json() == {*VERBS, *elsewhere}, "test_finetune, launch/ and ui/ look at these"


def proposal(plan: Plan) -> Any:
    """A plan to try, of which nothing is predicted."""
    memory = SimpleNamespace(peak_bytes=2**20, capacity_bytes=2**30, fits="yes")
    seen = SimpleNamespace(time=SimpleNamespace(step_s=None), memory=memory)
    return SimpleNamespace(plan=plan, prediction=seen)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings that are made up, and probes that measure nothing."""

    def measure(first: Any, second: Any, **how: Any) -> Reading:
        found = Reading([1.0, 1.0, 1.0], 2.0**20, evidence=dict.fromkeys(second.techniques, "on"))
        found.beside = Reading([1.0, 1.0, 1.0], 2.0**20)
        return found

    for room in (ablate, command):
        monkeypatch.setattr(room, "measure_with", lambda worker: measure)

    def sources(*given: Any) -> Sources:
        def single(best: Plan) -> list[Any]:
            on = changed(best, ["+fused_rope"], catalogue())
            return [] if on.techniques == best.techniques else [proposal(on)]

        return Sources(lambda first: (proposal(first), []), single, lambda best: [])

    monkeypatch.setattr(command, "sources", sources)
    monkeypatch.setattr(Worker, "begin", lambda self, what: None)
    plan = named_plan("demo", ["device=cpu"])
    monkeypatch.setattr(together, "measure_together", lambda where, **how: place(plan)[1])


def make_job(text: str, folder: Path) -> Path:
    """Make the folder of a job of which no part is made."""
    data = DataConfig(sources=text)
    parts = list_parts(asked_sources(data), LeftOutTally())
    (folder / "survey").mkdir(parents=True)
    record = JobRecord(data=data, parts=parts, cwd=str(Path.cwd()))
    (folder / "job.json").write_text(record.model_dump_json())
    return folder


def words(verb: str, given: tuple[str, ...], tiny: list[str], folder: Path) -> list[str]:
    """Return the words of the whole command line, with TINY, TEXT and OUT filled in."""
    text = next(w.partition("=")[2] for w in tiny if w.startswith("data.sources="))
    known = {"TINY": tiny, "TEXT": [text], "OUT": [str(folder / "out")]}
    if "JOB" in given:
        known["JOB"] = [str(make_job(text, folder / "job"))]
    if "GGUF" in given:
        own = train_tokenizer(["the mill " * 50], vocab=270, pattern="gpt4")
        write(model({}), own, file := folder / "a.gguf")
        known["GGUF"] = [str(file)]
    return [*verb.split(), *(w for word in given for w in known.get(word, [word]))]


ASKED = [(verb, given) for verb in VERBS for given in (VERBS[verb], *MORE.get(verb, ()))]


@pytest.mark.parametrize(("verb", "given"), ASKED, ids=lambda part: str(part)[:30])
@pytest.mark.usefixtures("quick")
def test_a_document_of_success_has_the_exit_code(
    verb: str, given: tuple[str, ...], call: Call, tiny_demo: list[str], tmp_path: Path
) -> None:
    document = call(*words(verb, given, tiny_demo, tmp_path))
    if verb in ROWS:
        assert isinstance(document, list) and document and isinstance(document[0], dict)
        return
    assert isinstance(document, dict) and document["exit_code"] == 0 and len(document) > 1
    assert "error" not in document or document["error"] == ""


@pytest.mark.parametrize("verb", VERBS)
def test_a_document_of_failure_has_the_exit_code(verb: str, call: Call) -> None:
    given = ("--to", "hf") if verb == "export" else ()
    nothing = ("--nothing",) if verb in ("list", "probe") else ("nothing-here",)
    document = call(*verb.split(), *nothing, *given, code=2)
    assert set(document) == {"error", "remedy", "exit_code"} and document["exit_code"] == 2


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("verb", ["tune", "ablate"])
@pytest.mark.usefixtures("quick")
def test_what_measures_and_is_interrupted_prints_one_document(
    verb: str,
    name: str,
    code: int,
    call: Call,
    tiny_demo: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*given: Any, **how: Any) -> None:
        os.kill(os.getpid(), getattr(signal, name))

    for room in (ablate, command):
        monkeypatch.setattr(room, "measure_with", lambda worker: interrupted)
    document = call(
        *words(verb, VERBS[verb], tiny_demo, tmp_path), f"name={verb}-{name}", code=code
    )
    assert document["exit_code"] == code
    assert document.get("interrupted") or document["error"].startswith("interrupted")


def test_an_interruption_of_anything_is_one_document(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a verb does when Ctrl-C comes, `exit_codes` answers it."""

    def interrupted(*given: Any, **how: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.inference.load.resolve_run", interrupted)
    for argv in (("eval", RUN), ("sample", RUN), ("report", RUN), ("export", RUN, "--to", "hf")):
        assert call(*argv, code=130)["exit_code"] == 130


def test_numbers_that_are_none_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.cli.terminal import show_json

    show_json({"loss": float("nan"), "rates": [float("inf")]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "loss": None,
        "rates": [None],
        "exit_code": 0,
    }


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["tune", "ablate"])
def test_a_true_ctrl_c_is_one_document(
    verb: str, zygote: Any, wait_until: Any, tiny_demo: list[str], tmp_path: Path
) -> None:
    """Check that Ctrl-C, while another process measures, leaves one JSON document and code 130."""
    child = zygote.start(tmp_path, *words(verb, VERBS[verb], tiny_demo, tmp_path), "--json")
    wait_until(lambda: any(tmp_path.rglob("trials.log")))
    child.send(signal.SIGINT)
    ended = child.wait()
    assert ended.code == 130, ended.err
    assert json.loads(ended.out)["exit_code"] == 130
    assert "Traceback" not in ended.err


def test_the_runner_of_tests_sees_both_outputs() -> None:
    """Check that the test runner keeps standard output apart from standard error."""
    ended = CliRunner().invoke(app, ["eval", "nothing-here", "--json"])
    assert json.loads(ended.stdout)["exit_code"] == 2 and not ended.stderr


@pytest.mark.parametrize("argv", [("eval", RUN), ("list",), ("eval", "nothing-here")])
def test_a_reader_that_is_gone_is_no_traceback(
    argv: tuple[str, ...],
    workshop: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check that a closed standard output, as under `| head -0`, causes no traceback."""
    monkeypatch.chdir(workshop)
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "stdout", os.fdopen(writer, "w"))
        app([*argv, "--json"], prog_name="headrace")
    assert ended.value.code == (2 if argv[-1] == "nothing-here" else 1)
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert told.count("error:") == (argv[-1] == "nothing-here")


def test_a_folder_that_is_named_nearly_as_a_checkpoint_is_none(
    workshop: Path, tmp_path: Path, call: Call
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(workshop / RUN, copy, symlinks=True)
    for name in ("step-\u00b2", "step-\u0663", "step--1", "step-x", "step-"):
        (copy / "checkpoints" / name).mkdir()
    assert call("eval", str(copy))["exit_code"] == 0
    told = call("eval", str(copy), "--checkpoint", "step-999", code=2)
    assert "it has step-3, step-6" in told["error"] and told["remedy"] == "--checkpoint step-6"
    again = call("train", str(copy / "plan.toml"), "--resume", "goal.steps=7")
    assert again["steps"] == 7


def test_the_largest_number_and_a_name_of_digits_are_answered(
    call: Call, tiny_demo: list[str]
) -> None:
    key = "techniques.mixture_of_experts.expert_ffn"
    told = call("explain", *tiny_demo, "--with", "mixture_of_experts", f"{key}={2**63 - 1}", code=2)
    assert key in told["error"] and told["remedy"].startswith(f"{key}=")
    assert call("explain", *tiny_demo, "name=2024")["exit_code"] == 0
