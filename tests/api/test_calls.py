"""What the names of `headrace` do is what the verbs do, and what they return shows itself."""

import ast
import inspect
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny import PLAN

import headrace
from headrace.api import calls
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.progress import Progress
from headrace.train.result import Result
from headrace.tuner import command

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path) -> Result:
    """Train the tiny plan once, by name of its file."""
    folder = tmp_path_factory.mktemp("api")
    file = folder / "tiny.toml"
    text = PLAN.format(corpus=corpus, prepared=prepared_folder)
    file.write_text(text.replace('name = "tiny"', f'name = "tiny"\ndirectory = "{folder}/runs"'))
    return headrace.train(file, progress=False)


def test_a_plan_is_read_with_changes_as_the_command_line_takes_them() -> None:
    plan = headrace.read_plan("demo", "model.layers=2", with_=["warmup"], without=["muon"])
    assert isinstance(plan, headrace.Plan)
    assert (plan.model.layers, [*plan.techniques]) == (2, ["warmup"])
    with pytest.raises(ConfigError, match="nearest recipe is demo"):
        headrace.read_plan("demi")


def test_a_run_is_opened_with_its_numbers(result: Result) -> None:
    run = headrace.open_run(result.folder)
    assert run.plan.model.dim == 16 and [row["step"] for row in run.metrics] == [*range(1, 13)]
    assert run.report["status"] == "done" and run.checkpoints[-1] == "step-12"
    whole = run.evaluate()
    assert whole.share == 1.0 and run.evaluate(tokens=64).tokens < whole.tokens
    assert run.sample("river", tokens=4, temperature=0) == run.sample(
        "river", tokens=4, temperature=0
    )
    assert sum(p.numel() for p in run.model().parameters()) == run.report["parameters"]
    assert run._repr_html_().startswith("<iframe sandbox srcdoc=")
    assert run.write_page() == result.page
    with pytest.raises(ConfigError, match="not a run"):
        headrace.open_run(result.folder.parent / "other")


def test_the_doctor_answers_as_the_command_does(result: Result) -> None:
    by_result, by_name = headrace.doctor(result), headrace.doctor(str(result.folder))
    printed = headrace.run_command("doctor", result.folder)
    names = [one.bottleneck for one in by_result]
    assert names == [one.bottleneck for one in by_name] == [row["bottleneck"] for row in printed]
    assert len(by_result) == len(names) and by_result[0].sentence in str(by_result)
    assert json.dumps(by_result.to_dict()) and by_result.healthy in (True, False, None)
    for one in by_result:
        assert len(one.commands) == len(one.remedies) and one.evidence in str(one)
        assert 0 <= one.share <= 1 and "<table>" in one._repr_html_()
    assert names[0] in by_result._repr_html_()


def test_a_plan_is_judged_before_it_runs() -> None:
    plan = headrace.read_plan("1b")
    forecast = headrace.predict(plan, device_name="NVIDIA H200")
    assert forecast.memory.fits == "yes" and forecast.time.step_s and forecast.run.steps == 24
    assert str(forecast).startswith("1b on NVIDIA H200")
    assert forecast.to_dict()["step_s"] == forecast.time.step_s
    shown = forecast._repr_html_()
    assert "Memory at the peak" in shown and "matrix products" in shown
    assert headrace.doctor(plan, device_name="NVIDIA H200")[0].sentence
    by_name = headrace.doctor("1b", "batch.micro_sequences=1", device_name="NVIDIA H200")
    assert by_name.first is None or "headrace" in by_name.first or by_name.first.startswith("-")


def test_a_run_goes_on(result: Result, tmp_path: Path) -> None:
    text = (result.folder / "plan.toml").read_text()
    (file := tmp_path / "tiny.toml").write_text(text)
    plan = headrace.read_plan(file, f"directory={tmp_path}/runs", "goal.steps=4")
    first = headrace.train(plan, progress=False)
    longer = tmp_path / "longer.toml"
    longer.write_text(plan.replaced(goal={"steps": 6}).to_toml())
    told = Progress()
    again = headrace.train(first.folder / "plan.toml", resume=True, progress=told)
    assert again.folder == first.folder and any("resumed" in note for note in told.notes)


def test_it_trains_in_any_thread(result: Result, tmp_path: Path) -> None:
    """Python hears signals in the main thread alone, which a server that trains does not use."""
    plan = headrace.read_plan(result.folder / "plan.toml", f"directory={tmp_path}", "goal.steps=2")
    ended: list[Any] = []

    def train() -> None:
        try:
            ended.append(headrace.train(plan, progress=False).report["status"])
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert ended == ["done"]


def test_tuning_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def tune_command(plan: Any, **how: Any) -> str:
        asked.update(how, plan=plan)
        return "tuned"

    monkeypatch.setattr(calls, "tune_command", tune_command)
    monkeypatch.setattr(calls, "place", lambda plan: ("context", "machine"))
    tuned: Any = headrace.tune("demo", minutes=3, aim="time", progress=False)
    assert tuned == "tuned" and (asked["minutes"], asked["aim"]) == (3, "time")
    assert {*asked} <= {*inspect.signature(command.tune_command).parameters}


def test_any_verb_returns_its_document(result: Result) -> None:
    rows = headrace.run_command("list")
    assert {"muon", "fsdp"} <= {row["technique"] for row in rows}
    report = headrace.run_command("eval", result.folder, "--tokens", 64)
    assert report["exit_code"] == 0 and report["bits_per_byte"] > 0
    for words, code in (
        (("explain", "muonn"), 2),
        (("probe", "--device", "mps"), 3),
        (("eval", "--nothing"), 2),
    ):
        with pytest.raises(HeadraceError) as told:
            headrace.run_command(*words)
        assert told.value.exit_code == code and told.value.message


def test_a_room_is_a_function_and_a_package() -> None:
    from headrace.train import session, train

    assert callable(headrace.train) and callable(headrace.doctor) and callable(headrace.predict)
    assert headrace.train.run is calls.train is not train.run
    assert vars(headrace.train)["session"] is session
    assert not hasattr(headrace.train, "walk") and not hasattr(headrace.doctor, "walk")
    assert all(hasattr(headrace, name) for name in headrace.__all__)
    assert {*dir(headrace)} >= {*headrace.__all__}


def test_the_stub_has_every_name_and_the_arguments_of_train() -> None:
    tree = ast.parse((ROOT / "headrace" / "__init__.pyi").read_text())
    names = {a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    names |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign)}  # type: ignore
    assert {*headrace.__all__} == names - {None}
    (call,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__call__")
    given = [one.arg for one in (*call.args.args, *call.args.kwonlyargs)]
    assert given == ["self", *inspect.signature(calls.train).parameters]
    (run,) = (n for n in ast.walk(tree) if isinstance(n, ast.Assign))
    assert ast.unparse(run) == "run = __call__"
