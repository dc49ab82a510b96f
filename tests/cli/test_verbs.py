"""Every verb answers a person and a program, and ends with the exit code that it promises."""

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.errors import UnsupportedError
from headrace.costs.host import UNPROBED
from headrace.plan.technique import installed
from headrace.report.compare import compare_reports
from headrace.train import train as trainer

REPORT_KEYS = {
    "goal",
    "tokens",
    "wall_s",
    "steady_tokens_per_s",
    "model_flops_utilization",
    "peak_memory_bytes",
    "phase_s",
    "wasted_token_fraction",
    "val",
    "dollars",
    "restarts",
    "skipped_steps",
    "techniques",
    "stream_sha256",
    "seed",
    "narrowest",
    "sample",
}


def test_train_prints_its_report(call: Callable[..., Any], tiny_demo: list[str]) -> None:
    told = call("train", *tiny_demo, "name=twin")
    assert set(told) >= REPORT_KEYS
    assert told["steps"] == 6 and told["goal"]["ended_by"] == "steps"
    assert {
        "input",
        "forward",
        "backward",
        "optimizer",
        "communication_exposed",
        "checkpoint",
        "eval",
        "compile",
    } == set(told["phase_s"])
    assert {"allocated", "reserved", "predicted"} <= set(told["peak_memory_bytes"])
    first = call("doctor", "demo")
    assert first[0]["bottleneck"] and told["narrowest"]["station"]


def test_train_tells_a_person_what_to_do_next(
    say: Callable[..., tuple[str, str]], tiny_demo: list[str], workshop: Path
) -> None:
    out, error = say("train", *tiny_demo, "name=told")
    assert out == ""
    report = json.loads((workshop / "runs" / "told" / "report.json").read_text())
    found = json.loads((workshop / "runs" / "told" / "findings.json").read_text())
    verdict = report["narrowest"]["sentence"]
    assert verdict in [one["sentence"] for one in found], "the doctor's, and no second opinion"
    for said in ("bits per byte", verdict, "sample:", "runs/told/report.html"):
        assert said in error
    assert error.count("headrace sample runs/told") == 1
    assert "data.sources=" not in error, "it is one's own already"
    assert "\nbudget spent (steps): " in error and "tokens/s in steady steps" in error


def test_a_run_leaves_its_files(workshop: Path) -> None:
    left = {p.name for p in (workshop / "runs" / "demo").iterdir()}
    assert {
        "plan.toml",
        "environment.json",
        "metrics.jsonl",
        "findings.json",
        "report.json",
        "report.html",
        "tokenizer.json",
        "checkpoints",
    } <= left
    rows = (workshop / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_resume_goes_on(call: Callable[..., Any], tiny_demo: list[str]) -> None:
    assert call("train", *tiny_demo, "name=longer")["steps"] == 6
    told = call("train", *tiny_demo, "name=longer", "goal.steps=9", "--resume")
    assert (told["steps"], told["restarts"]) == (9, 1)


def test_eval_repeats_the_reports_loss(call: Callable[..., Any], workshop: Path) -> None:
    report = json.loads((workshop / "runs" / "demo" / "report.json").read_text())
    best = min(report["val"], key=lambda v: v["bits_per_byte"])
    told = call("eval", "demo", "--tokens", "512")
    whole = call("eval", "demo")
    assert whole["share"] == 1.0 > told["share"] > 0
    assert told["tokens"] == pytest.approx(whole["tokens"] * told["share"])
    assert told["bits_per_byte"] == pytest.approx(best["bits_per_byte"], rel=1e-6)
    assert set(told) - {"exit_code"} == {
        "run",
        "loss_nats",
        "bits_per_byte",
        "tokens",
        "bytes",
        "share",
    }


def test_sample_is_the_same_for_the_same_seed(call: Callable[..., Any]) -> None:
    asked = ("sample", "demo", "--prompt", "river", "--tokens", "12")
    texts = [call(*asked, "--seed", seed)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_sample_continues_the_prompt(say: Callable[..., tuple[str, str]]) -> None:
    out, _ = say("sample", "demo", "--prompt", "river", "--tokens", "5", "--temperature", "0")
    assert out.startswith("river")


def test_a_prompt_of_other_bytes_is_one_message_and_2(call: Callable[..., Any]) -> None:
    told = call("sample", "demo", "--prompt", "caf\udce9", code=2)
    assert "not UTF-8" in told["error"] and told["remedy"] == "--prompt 'caf?'"
    texts = [  # a locale of ASCII hands UTF-8 over as bytes
        call("sample", "demo", "--prompt", prompt, "--tokens", "9", "--seed", "1")["text"]
        for prompt in ("caf\udcc3\udca9", "caf\xe9")
    ]
    assert texts[0] == texts[1]


def test_a_seed_of_more_than_64_bits_is_one_message_and_2(call: Callable[..., Any]) -> None:
    told = call("sample", "demo", "--seed", "9" * 30, code=2)
    assert "64 bits" in told["error"] and told["remedy"] == f"--seed {2**63 - 1}"
    assert call("sample", "demo", "--seed", told["remedy"].split()[1], "--tokens", "2")["text"]


def test_list_has_every_technique_family_and_recipe(call: Callable[..., Any]) -> None:
    known = installed()
    assert [row["technique"] for row in call("list")] == list(known.techniques)
    assert [row["family"] for row in call("list", "--families")] == list(known.families)
    assert "demo" in [row["recipe"] for row in call("list", "--recipes")]


def test_list_shows_a_person_every_name(say: Callable[..., tuple[str, str]]) -> None:
    out, _ = say("list")
    for name in installed().techniques:
        assert name in out


def test_explain_a_plan(call: Callable[..., Any], tiny_demo: list[str]) -> None:
    told = call("explain", *tiny_demo, "--with", "muon")
    assert told["sockets"]["routes"] == ["muon"]
    assert told["peak_memory_bytes"] > 0 and set(told["flops_per_token"]) >= {"forward", "backward"}
    assert sum(told["memory_lines"].values()) == pytest.approx(told["peak_memory_bytes"])


@pytest.mark.parametrize("name", installed().techniques)
def test_explain_a_technique(
    name: str, call: Callable[..., Any], say: Callable[..., tuple[str, str]]
) -> None:
    told, (text, _) = call("explain", name), say("explain", name)
    for key in ("buys", "costs", "helps", "hurts", "source"):
        assert told[key] and told[key] in text
    for knob in told["knobs"]:
        assert f"techniques.{name}.{knob}" in text


@pytest.mark.parametrize(
    ("asked", "message", "remedy"),
    [
        ("flash_atention", "the nearest is flash_attention", "headrace explain flash_attention"),
        ("nosuch.toml", "'nosuch.toml' is no plan, recipe or technique", "headrace list for"),
        ("runs/demo", "its plan is runs/demo/plan.toml", "headrace explain runs/demo/plan.toml"),
    ],
)
def test_explain_of_no_plan_names_what_is_near_or_nothing(
    asked: str, message: str, remedy: str, call: Callable[..., Any]
) -> None:
    told = call("explain", asked, code=2)
    assert told["error"].endswith(message) and told["remedy"].startswith(remedy)


@pytest.mark.parametrize("asked", [(), ("--graph",)])
def test_explain_without_a_name_says_what_it_takes(
    asked: tuple[str, ...], call: Callable[..., Any]
) -> None:
    told = call("explain", *asked, code=2)
    assert all(word in told["error"] for word in ("technique", "recipe", "--graph", "--matrix"))
    assert "headrace explain demo" in told["remedy"] and "headrace list" in told["remedy"]
    assert "muon" not in told["error"]
    assert call("explain", "--matrix")["pairs"]


def test_report_one_and_several(
    call: Callable[..., Any], tiny_demo: list[str], workshop: Path
) -> None:
    page = Path(call("report", "demo")["page"])
    assert page == Path("runs/demo/report.html") and "<html" in (workshop / page).read_text()
    call("train", *tiny_demo, "name=other")
    page = Path(call("report", "demo", "other", "--output", "both.html")["page"])
    assert (workshop / page).read_text() == compare_reports(
        [workshop / "runs" / "demo", workshop / "runs" / "other"], workshop / "again.html"
    ).read_text()


def test_doctor_names_the_narrowest_first(
    say: Callable[..., tuple[str, str]], call: Callable[..., Any], workshop: Path
) -> None:
    """Check that the doctor takes `demo` for the run, not the recipe, and a plan by its file."""
    out, _ = say("doctor", "demo")
    first = call("doctor", "demo")[0]
    assert out.startswith(f"{first['bottleneck']}: {first['sentence']}\n")
    saved = json.loads((workshop / "runs" / "demo" / "findings.json").read_text())
    assert saved[0]["bottleneck"] == first["bottleneck"] and first["remedies"] is not None
    file, on = "runs/demo/plan.toml", ("--device-name", "NVIDIA H200")
    plan = call("doctor", file, *on)
    assert plan[0]["confidence"] == "inferred"
    more = ("batch.micro_sequences=1", "--with", "full_checkpoint")
    other = call("doctor", file, *more, *on)
    named = "full_checkpoint trades time for memory"
    assert named in json.dumps(other) and named not in json.dumps(plan)
    assert "no key 'batch.nothing'" in call("doctor", file, "batch.nothing=1", code=2)["error"]
    assert "runs/demo is none" in call("doctor", "runs/demo", "--with", "muon", code=2)["error"]


def test_a_remedy_is_a_command_that_works(
    call: Callable[..., Any], workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the doctor's command for a run that waits for launches trains the run's plan."""
    folder = workshop / "runs" / "demo"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((folder / "report.json").read_text())
    ran = workshop / "runs" / "ran"
    shutil.copytree(folder, ran)
    report["signals"] |= {"device": "cuda"}
    first = {**rows[-1], "step_s": 0.02, "slack_s": 0.0, "dry": 1, "input_s": 0.0, "compile_s": 0}
    environment = json.loads((ran / "environment.json").read_text())
    environment |= {"device": "cuda", "device_name": "NVIDIA H100 80GB HBM3"}
    for name, told in (("report", report), ("environment", environment)):
        (ran / f"{name}.json").write_text(json.dumps(told))
    lines = [json.dumps({**first, "step": n}) + "\n" for n in range(1, 20)]
    (ran / "metrics.jsonl").write_text("".join(lines))
    found = call("doctor", "ran")
    assert found[0]["bottleneck"] == "launch" and found[0]["healthy"] is False
    words = shlex.split(found[0]["first"]["command"])
    assert words[:3] == ["headrace", "train", "runs/ran/plan.toml"]
    told: list[Any] = []

    def run(plan: Any, **_: Any) -> Any:
        told.append(plan)
        return SimpleNamespace(first=False)

    monkeypatch.setattr(trainer, "run", run)
    assert CliRunner().invoke(app, words[1:], prog_name="headrace").exit_code == 0
    (plan,) = told
    assert {*plan.techniques} == {"cuda_graphs", "muon", "torch_compile"}


def test_probe_keeps_what_it_measured(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    told = call("probe", "--seconds", "1", "--device", "cpu")
    assert Path(told["file"]).is_relative_to(tmp_path) and told["machine"]["products"]


def test_export(call: Callable[..., Any], workshop: Path) -> None:
    told = call("export", "demo", "--to", "hf", "--output", "exported")
    assert (workshop / told["folder"] / "config.json").is_file()
    assert list((workshop / told["folder"]).glob("*.safetensors"))


def test_ingest_prepares_without_training(call: Callable[..., Any], tiny_demo: list[str]) -> None:
    told = call("data", "ingest", *tiny_demo)
    assert told["train_tokens"] > 0 and told["validation_tokens"] > 0
    assert len(told["data_sha256"]) == len(told["tokenizer_sha256"]) == 64
    assert Path(told["folder"], "tokenizer.json").is_file()


PLAN_MISTAKES = [
    ("optimizer.learning_rate=1e-3", "'optimizer.learning_rate'", "optimizer.lr=0.001"),
    ("optimizer.weightdecay=0.1", "'optimizer.weightdecay'", "optimizer.weight_decay"),
    ("modle.dim=8", "modle", "model"),
    ("batch.tokens=100", "100 is not a multiple", "batch.tokens="),
    ("batch.tokens=many", "batch.tokens = 'many'", ""),
    ("model.dim=-1", "model.dim = -1", "model.dim=4"),
    ("model.activation=silu", "is not one of", "model.activation="),
    ("techniques.muno.lr=0.1", "no technique 'muno'", "muon"),
    ("data.sources=nowhere", "does not exist", ""),
    ("batch.tokens", "is not an override", "key=value"),
]


@pytest.mark.parametrize(("override", "found", "works"), PLAN_MISTAKES)
def test_a_wrong_plan_is_one_message_and_2(
    override: str,
    found: str,
    works: str,
    call: Callable[..., Any],
    say: Callable[..., tuple[str, str]],
    tiny_demo: list[str],
) -> None:
    told = call("train", *tiny_demo, override, code=2)
    assert told["exit_code"] == 2 and found in told["error"]
    assert works in told["error"] + told["remedy"]
    out, error = say("train", *tiny_demo, override, code=2)
    assert out == "" and "error:" in error and "Traceback" not in error


USAGE_MISTAKES = [
    (("plan", "demo", "--foo"), "--foo", "headrace plan --help"),
    (("tune",), "Missing argument", "headrace tune --help"),
    (("export", "demo"), "--to", "headrace export --help"),
    (("sample", "demo", "--tokens", "many"), "'--tokens'", "headrace sample demo --tokens 200"),
    (("sample", "demo", "--tokens", "0"), "'--tokens'", "headrace sample demo --tokens 1"),
    (("plan", "demo", "--for", "beauty"), "beauty", "headrace plan demo --for time"),
    (("data", "ingest", "--foo"), "--foo", "headrace data ingest --help"),
    (("data", "digest"), "digest", "headrace data ingest"),
    (("pln",), "'plan'", "headrace plan"),
    (("--foo",), "--foo", "headrace --help"),
    ((), "--json", "headrace --help"),
]


@pytest.mark.parametrize(("argv", "found", "works"), USAGE_MISTAKES)
def test_a_wrong_command_line_is_one_message_and_2(
    argv: tuple[str, ...],
    found: str,
    works: str,
    call: Callable[..., Any],
    say: Callable[..., tuple[str, str]],
) -> None:
    """Check that a mistake is told as JSON with --json, and else in the words of typer."""
    told = call(*argv, code=2)
    assert set(told) == {"error", "remedy", "exit_code"} and told["exit_code"] == 2
    assert found in told["error"] and works in told["remedy"]
    out, error = say(*argv, code=2)
    assert "Usage: headrace" in (error if argv else out) and '{"error"' not in out + error


@pytest.mark.parametrize(
    "argv",
    [
        ("plan", "demo", "--after"),
        ("plan", "demo", "--with"),
        ("export", "demo", "--to"),
        ("sample", "demo", "--prompt"),
    ],
)
def test_json_is_no_options_value(argv: tuple[str, ...], call: Callable[..., Any]) -> None:
    told = call(*argv, code=2)
    assert told["error"].startswith(f"{argv[-1]} ") and "--json" in told["error"]
    assert told["remedy"] == f"{argv[-1]} VALUE --json"


@pytest.mark.parametrize("verb", ["eval", "sample", "report", "doctor"])
def test_an_unknown_run_names_the_nearest_and_2(verb: str, call: Callable[..., Any]) -> None:
    told = call(verb, "dmeo", code=2)
    assert told["error"].startswith("dmeo ") and "nearest is demo" in told["error"]
    assert told["remedy"] == f"headrace {verb} runs/demo"


def test_where_no_run_was_made_an_unknown_run_says_so_and_what_makes_one(
    say: Callable[..., tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for argv in (("doctor", "dmeo"), ("plan", "demo", "--after", "dmeo")):
        _, error = say(*argv, code=2)
        assert error.startswith("error: dmeo ") and "no run was made" in error
        assert "nearest" not in error and "\n  try: headrace train demo" in error
    _, error = say("eval", "empty", code=2)
    assert error.startswith("error: empty ") and "no run was made" in error
    assert "no plan.toml" in error


@pytest.mark.parametrize(
    ("name", "meant", "works"),
    [
        ("a.gz", "a.gz", "mv a.gz a.gz.json, if it is one; headrace doctor a.gz.json"),
        ("a.JSON", "a.JSON", "mv a.JSON a.JSON.json, if it is one; headrace doctor a.JSON.json"),
        ("traces", "traces/rank0.json.gz", "headrace doctor traces/*.json.gz"),
    ],
)
def test_what_may_be_traces_is_told_how_they_are_named(
    name: str, meant: str, works: str, call: Callable[..., Any], workshop: Path
) -> None:
    """What the remedy gives is read as a trace, which this one is not."""
    (workshop / meant).parent.mkdir(exist_ok=True)
    (workshop / meant).write_bytes(gzip.compress(b"{}"))
    told = call("doctor", name, code=2)
    assert "is not a run" in told["error"] and ".json or .json.gz" in told["error"]
    assert told["remedy"] == works
    mended = meant if name == "traces" else f"{meant}.json"
    (workshop / meant).rename(workshop / mended)
    told = call("doctor", mended, code=2)
    assert mended in told["error"] and "no list 'traceEvents'" in told["error"]


def test_an_unknown_recipe_names_the_nearest_and_2(call: Callable[..., Any]) -> None:
    told = call("train", "dmeo", code=2)
    assert "nearest recipe is demo" in told["error"] and told["remedy"].startswith(
        "headrace train demo"
    )


def test_an_unknown_format_and_checkpoint_are_2(call: Callable[..., Any]) -> None:
    assert call("export", "demo", "--to", "gguff", "--output", "x", code=2)["exit_code"] == 2
    told = call("eval", "demo", "--checkpoint", "step-99", code=2)
    assert "step-6" in told["error"]


def test_what_is_not_supported_here_is_3(call: Callable[..., Any], tiny_demo: list[str]) -> None:
    told = call("train", *tiny_demo, "--with", "cudnn_attention", code=3)
    assert "NVIDIA" in told["error"] and "--without cudnn_attention" in told["remedy"]
    absent = "cuda" if not torch.cuda.is_available() else "mps"
    assert "finds none here" in call("train", *tiny_demo, f"device={absent}", code=3)["error"]


def test_one_technique_is_not_both_asked_for_and_left_out(
    call: Callable[..., Any], tiny_demo: list[str]
) -> None:
    told = call("explain", *tiny_demo, "--with", "muon", "--without", "muon", code=2)
    assert "muon" in told["error"] and told["remedy"] == "--with muon alone"


def test_the_clock_of_a_run_on_a_cpu_tells_of_its_plan_and_of_no_other(
    call: Callable[..., Any], tiny_demo: list[str]
) -> None:
    report = json.loads(Path("runs/demo/report.json").read_text())
    found = call("plan", *tiny_demo, "--after", "demo")
    assert found["step_s"] is None and "clock of demo" in found["until"]
    assert 3600 * found["hours"] == pytest.approx(report["wall_s"])
    found = call("plan", *tiny_demo, "--after", "demo", "batch.micro_sequences=1")
    assert found["hours"] == pytest.approx(0.05) and found["until"].endswith("latest 3 minutes")
    assert "demo ran otherwise (batch.micro_sequences)" in found["until"]
    told = call("plan", *tiny_demo, "--sweep", "--after", "demo", code=3)
    assert UNPROBED in told["error"]
    assert told["remedy"].startswith("headrace plan demo") and "--after" not in told["remedy"]
    found = call("plan", *tiny_demo)
    assert found["peak_bytes"] > 0 and found["fits"] == "yes" and "this CPU" in found["unknown"]


def test_steps_that_set_no_model_are_told_where_a_time_is_foreseen(
    call: Callable[..., Any], tiny_demo: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: Any) -> Any:
        raise UnsupportedError("its steps are those of several ranks", "without --after")

    monkeypatch.setattr("headrace.predict.prediction.after", silent)
    here = [word for word in tiny_demo if word != "device=cpu"]
    told = call("plan", *here, "--after", "demo", "--device-name", "NVIDIA H200", code=3)
    assert "several ranks" in told["error"]


def test_a_run_that_fails_is_1(
    call: Callable[..., Any], tiny_demo: list[str], workshop: Path
) -> None:
    told = call("train", *tiny_demo, "name=wild", "optimizer.lr=1e30", code=1)
    assert told["exit_code"] == 1 and "optimizer.lr=" in told["remedy"]
    report = json.loads((workshop / "runs" / "wild" / "report.json").read_text())
    assert report["status"] == "failed"


def test_a_reader_that_has_seen_enough_is_no_error(workshop: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "headrace", "explain", "--matrix"]
    with os.fdopen(writing, "wb") as closed:
        ended = subprocess.run(
            command, cwd=workshop, stdout=closed, stderr=subprocess.PIPE, check=False
        )
    assert not ended.stderr, ended.stderr.decode()


def test_python_m_headrace_is_headrace() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"headrace": "headrace.__main__:main"}
    script = "import sys; from headrace.cli.app import app; sys.argv[0] = 'headrace'; app()"
    told = [
        subprocess.run([sys.executable, *how, "--help"], capture_output=True, text=True, check=True)
        for how in (["-c", script], ["-m", "headrace"])
    ]
    assert told[0].stdout == told[1].stdout
    assert "train" in told[0].stdout
