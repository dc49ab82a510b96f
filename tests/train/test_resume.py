"""A resume continues the same run, or refuses, says what is another, and changes nothing."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import in_order, tells
from tiny import READ, assert_same_run, losses, metrics, report, without_times, write_corpus

from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, RunError
from headrace.inference.load import open_model, plan_to_resume
from headrace.plan.plan import Plan
from headrace.train import state
from headrace.train import train as trainer
from headrace.train.evaluate import Validation, evaluate

Train = Callable[..., Path]


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def test_extending_the_goal_continues_and_equals_one_run(train: Train) -> None:
    train("name=parts", "goal.steps=7")
    parts = train("name=parts", "goal.steps=20", resume=True)
    whole = train("name=whole", "goal.steps=20")
    assert [row["step"] for row in metrics(parts)] == list(range(1, 21))
    pick = [without_times(row) for row in metrics(parts) if row["step"] != 7]
    assert pick == [without_times(row) for row in metrics(whole) if row["step"] != 7]
    ends = [without_times(report(run)["val"])[-1] for run in (parts, whole)]
    assert ends[0] == ends[1]
    assert report(parts)["stream_sha256"] == report(whole)["stream_sha256"]
    assert report(parts)["resumes"] == 1
    assert report(parts)["wall_s"] > report(parts)["val"][0]["wall_s"] > 0


@pytest.mark.parametrize("rows", ["none", "later ones"])
def test_a_resume_goes_on_with_the_time_that_the_run_took(
    train: Train, monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    """By the checkpoint where its rows are lost, and by rows of steps that are trained again."""
    run = train("goal.steps=4")
    kept = run / "metrics.jsonl"
    lost = json.dumps({**metrics(run)[-1], "step": 99, "wall_s": 9000.0}) + "\n"
    kept.write_text("" if rows == "none" else kept.read_text() + lost)
    whole = state.restore

    def restore(build: Any, saved: Any) -> dict[str, Any]:
        found = whole(build, saved)
        phases = {name: spent_s + 1000 for name, spent_s in found["phase_s"].items()}
        return {**found, "wall_s": 5000.0, "phase_s": phases}

    monkeypatch.setattr(state, "restore", restore)
    found = report(train("goal.steps=6", resume=True))
    assert found["wall_s"] >= (5000 if rows == "none" else 9000)
    assert found["val"][-1]["wall_s"] >= 5000
    assert found["phase_s"]["forward"] >= 1000 and found["phase_s"]["optimizer"] >= 1000


def test_what_was_random_before_a_run_does_not_matter(train: Train) -> None:
    torch.manual_seed(1)
    one = train("name=one")
    torch.manual_seed(2)
    assert_same_run(one, train("name=two"))


def test_resuming_a_finished_run_trains_nothing_and_keeps_what_was_measured(train: Train) -> None:
    run = train()
    before, rows = report(run), metrics(run)
    time.sleep(0.01)
    assert train(resume=True) == run
    after = report(run)
    assert metrics(run) == rows
    assert after["resumes"] == 1
    for key in (
        "status",
        "steps",
        "tokens",
        "val",
        "stream_sha256",
        "memory_measured",
        "peak_memory_bytes",
        "steady_tokens_per_s",
        "input_wait",
    ):
        assert after[key] == before[key], key


def test_a_fresh_run_never_touches_an_older_one(train: Train) -> None:
    first = train("goal.steps=2")
    before = contents(first)
    second, third = train("goal.steps=2"), train("goal.steps=2")
    assert [run.name for run in (first, second, third)] == ["tiny", "tiny-2", "tiny-3"]
    assert contents(first) == before
    assert train("goal.steps=3", resume=True) == third


def test_a_name_that_ends_in_a_number_is_a_name(train: Train) -> None:
    assert train("name=gpt-2", "goal.steps=1").name == "gpt-2"
    assert train("name=gpt-2", "goal.steps=2", resume=True).name == "gpt-2"


def test_there_must_be_something_to_resume(train: Train) -> None:
    with pytest.raises(ConfigError, match="no run 'tiny'"):
        train(resume=True)


def test_a_run_without_a_checkpoint_starts_again(train: Train) -> None:
    run = train()
    shutil.rmtree(run / "checkpoints")
    assert train(resume=True) == run
    assert_same_run(run, train("name=other"))


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(train: Train) -> None:
    train()
    with pytest.raises(ConfigError, match=in_order("step-5", "step-8", "step-12")) as told:
        train(resume=True, checkpoint="step-5")
    assert told.value.remedy.text == "--checkpoint step-12"


def test_going_back_to_an_older_checkpoint_trains_the_rest_again(train: Train) -> None:
    run, twin = train("name=one"), train("name=two")
    before = contents(run)
    forked = train("name=one", resume=True, checkpoint="step-8")
    assert forked.name == "one-2"
    assert contents(run) == before
    parent = json.loads((forked / "environment.json").read_text())["parent"]
    assert (parent["run"], parent["step"]) == (str(run), 8)
    assert_same_run(forked, twin)


def test_links_that_point_nowhere_are_put_right(train: Train) -> None:
    run, twin = train("name=one"), train("name=two")
    shutil.rmtree(run / "checkpoints" / "step-12")
    assert not (run / "checkpoints" / "best").exists()
    (run / "report.json").unlink()
    train("name=one", resume=True)
    assert_same_run(run, twin)


def test_going_back_keeps_what_was_after(train: Train) -> None:
    run = train("checkpoint.keep_last=9")
    before = contents(run)
    forked = train("goal.steps=9", "checkpoint.keep_last=9", resume=True, checkpoint="step-4")
    assert contents(run) == before
    steps = sorted(p.name for p in (forked / "checkpoints").glob("step-*"))
    assert steps == ["step-4", "step-8", "step-9"]
    assert [row["step"] for row in metrics(forked)] == list(range(1, 10))


def test_another_rate_is_refused_and_forks_from_a_checkpoint(train: Train) -> None:
    run = train()
    before = contents(run)
    with pytest.raises(ConfigError, match=in_order("optimizer.lr", 0.01, 0.002)) as told:
        train("optimizer.lr=2e-3", resume=True)
    assert "--resume --checkpoint step-12 optimizer.lr=0.002" in told.value.remedy.text
    forked = train("optimizer.lr=2e-3", "goal.steps=13", resume=True, checkpoint="step-12")
    assert forked != run
    assert contents(run) == before
    train("optimizer.lr=2e-3", "goal.steps=14", resume=True)


CHANGES = {
    "seed=4": ("seed", 3, 4),
    "batch.tokens=256": ("batch.tokens", 128, 256),
    "model.dim=32": ("model.dim", 16, 32),
    "model.qk_norm=true": ("model.qk_norm", False, True),
    "data.validation=0.3": ("data.validation", 0.05, 0.3),
    "data.vocab=310": (310,),
    "data.sequence_length=32": ("data.sequence_length", 16, 32),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_plan_is_refused_by_name_and_changes_nothing(train: Train, change: str) -> None:
    run = train()
    before = contents(run)
    with pytest.raises(ConfigError, match="cannot resume") as told:
        train(change, resume=True)
    assert tells(told.value.message, *CHANGES[change])
    assert contents(run) == before
    train("goal.steps=13", resume=True)


@pytest.fixture
def own_corpus(tmp_path: Path) -> tuple[Path, Path]:
    return write_corpus(tmp_path / "a", seed=1), write_corpus(tmp_path / "b", seed=2)


def test_text_that_changed_since_is_not_read_again(
    train: Train, own_corpus: tuple[Path, Path]
) -> None:
    """A run goes on with the shards that it has, and its evaluations are of the same text."""
    source = f"data.sources={own_corpus[0]}"
    run = train(source)
    before = evaluated(run)
    (own_corpus[0] / "03.txt").write_text("other words\n" * 500)
    assert evaluated(run) == before
    train(source, "goal.steps=13", resume=True)
    shutil.rmtree(own_corpus[0])
    before = evaluated(run)
    assert train(source, "goal.steps=14", resume=True) == run
    assert report(run)["steps"] == 14 and before.tokens == evaluated(run).tokens


def evaluated(run: Path) -> Validation:
    """What `headrace eval` finds."""
    build = open_model(run, catalogue(), with_data=True)
    found = evaluate(build)
    build.loader.close()
    return found


def test_shards_that_are_gone_are_made_again_or_the_run_is_refused(
    train: Train, own_corpus: tuple[Path, Path], tmp_path: Path
) -> None:
    keys = f"data.sources={own_corpus[0]}", f"data.directory={tmp_path / 'shards'}"
    run = train(*keys)
    before = evaluated(run)
    shutil.rmtree(tmp_path / "shards")
    assert evaluated(run) == before
    shutil.rmtree(tmp_path / "shards")
    text = own_corpus[0] / "03.txt"
    kept = text.read_text()
    text.write_text(kept + "one line more\n")
    changed = in_order("data", "tokenizer", "manifests", "changed")
    with pytest.raises(ConfigError, match=changed):
        evaluated(run)
    with pytest.raises(ConfigError, match=changed):
        train(*keys, "goal.steps=13", resume=True)
    shutil.rmtree(tmp_path / "shards")
    own_corpus[0].rename(own_corpus[0].with_name("away"))
    with pytest.raises(
        ConfigError,
        match=in_order("data", "gone", tmp_path / "shards", "data.sources", own_corpus[0]),
    ) as told:
        evaluated(run)
    assert "data.sources=PATH" in told.value.remedy.text
    assert str(own_corpus[1]) not in str(told.value)
    (run / "data.json").write_text('{"directory": 3}')
    with pytest.raises(RunError, match=r"data\.json is damaged"):
        evaluated(run)


def test_a_tokenizer_file_that_changed_since_is_not_read_again(
    train: Train, own_corpus: tuple[Path, Path]
) -> None:
    files = [train("name=a", f"data.sources={c}") / "tokenizer.json" for c in own_corpus]
    mine = own_corpus[0] / "tokenizer.json"
    shutil.copy(files[0], mine)
    sources = f"data.sources={own_corpus[0]}/*.txt"
    run = train(sources, f"data.tokenizer={mine}")
    before = evaluated(run)
    shutil.copy(files[1], mine)
    assert evaluated(run) == before
    train(sources, f"data.tokenizer={mine}", "goal.steps=13", resume=True)
    assert (run / "tokenizer.json").read_text() == files[0].read_text()


def test_another_mixture_is_refused(train: Train, own_corpus: tuple[Path, Path]) -> None:
    sources = 'data.sources=["{}", "{}"]'.format(*own_corpus)
    train(sources, "data.weights=[1, 2]")
    with pytest.raises(ConfigError, match=in_order("data.weights", [1.0, 2.0], [2.0, 1.0])):
        train(sources, "data.weights=[2, 1]", resume=True)
    with pytest.raises(ConfigError, match=in_order("data.weights", [1.0, 2.0], None)):
        train(sources, resume=True)


def test_a_run_goes_on_in_the_middle_of_a_stage(
    train: Train, own_corpus: tuple[Path, Path]
) -> None:
    """Compare with a run that was not stopped, and refuse stages that are others or elsewhere."""
    sources = 'data.sources=["{}", "{}"]'.format(*own_corpus)
    stages = "data.mixture.stages=[{until=0.19,weights=[1,3]},{weights=[2,1]}]"  # of 40 steps
    mixed = (sources, stages, "data.mixture.max_epochs=[0,5]")
    train(*mixed, "goal.steps=6")
    run = train(*mixed, "goal.steps=12", resume=True)
    whole = train(*mixed, "name=other")
    assert report(run)["stream_sha256"] == report(whole)["stream_sha256"]
    assert torch.equal(losses(run), losses(whole))
    told = report(run)["data"]["mixture"]
    assert told == report(whole)["data"]["mixture"]
    assert told["tokens"] == sum(one["tokens"] for one in told["sources"]) == report(run)["tokens"]
    assert told["stage_begins_tokens"] == [0, int(0.19 * 40 * 8) * 16] and len(told["stages"]) == 4
    other = "data.mixture.stages=[{until=0.25,weights=[1,3]},{weights=[2,1]}]"
    with pytest.raises(ConfigError, match=in_order("data.mixture.stages", "0.19", "0.25")):
        train(sources, other, "data.mixture.max_epochs=[0,5]", resume=True)
    moved = in_order("schedule.steps was 40 and is now 80", "moves the stages of data.mixture")
    with pytest.raises(ConfigError, match=moved) as refused:
        train(*mixed, "schedule.steps=80", resume=True)
    assert "schedule.steps=40" in refused.value.remedy.text
    with pytest.raises(ConfigError, match=in_order("data.mixture.max_epochs", [0.0, 5.0], None)):
        train(sources, resume=True)


def test_a_technique_that_was_switched_is_refused_by_name(train: Train) -> None:
    train()
    with pytest.raises(ConfigError, match=in_order("document_packing", "off")):
        train("techniques.document_packing={}", resume=True)


def test_an_exact_technique_may_be_switched(train: Train) -> None:
    """It computes what the baseline computes, so the run goes on as it would have."""
    run = train("goal.steps=6")
    train("goal.steps=12", "techniques.chunked_cross_entropy={chunk_tokens=7}", resume=True)
    train("goal.steps=12", "name=other")
    first, second = (metrics(r)[-1]["loss"] for r in (run, run.with_name("other")))
    assert first == pytest.approx(second, rel=1e-5)


def test_a_row_cut_short_by_a_kill_is_trained_again(train: Train) -> None:
    run = train()
    for path in (run / "checkpoints" / "step-12", run / "report.json"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[: len(text) - 40])
    train(resume=True)
    assert_same_run(run, train("name=other"))


def test_the_time_of_lost_steps_counts(train: Train) -> None:
    run = train("goal.steps=12")
    shutil.rmtree(run / "checkpoints" / "step-12")
    last_s = metrics(run)[-1]["wall_s"]
    at_step_9_s = metrics(train(resume=True))[8]["wall_s"]
    assert at_step_9_s > last_s
    assert report(run)["wall_s"] >= metrics(run)[-1]["wall_s"] > at_step_9_s


def test_two_processes_cannot_train_one_run(
    zygote: Any, plan_file: Path, wait_until: Callable[..., None]
) -> None:
    cwd = plan_file.parent
    long = ("train", "tiny.toml", "goal.steps=100000", "eval.every_steps=1000000")
    first = zygote.start(cwd, *long)
    wait_until((cwd / "runs/tiny/checkpoints/latest").exists)
    second = zygote.run(cwd, *long, "--resume")
    fresh = zygote.run(cwd, "train", "tiny.toml")
    first.send(15)
    assert first.wait().code == 143
    assert second.code == 2 and tells(second.err, "another process", "runs/tiny")
    assert "name=NEW" in second.err
    assert "Traceback" not in second.err
    assert fresh.code == 0 and (cwd / "runs/tiny-2/report.json").exists()


def test_two_runs_of_one_name_at_once_get_folders_of_their_own(
    zygote: Any, plan_file: Path
) -> None:
    cwd = plan_file.parent
    children = [zygote.start(cwd, "train", "tiny.toml", "goal.steps=3") for _ in range(4)]
    assert [child.wait().code for child in children] == [0] * 4
    names = sorted(p.parent.name for p in (cwd / "runs").glob("*/report.json"))
    assert names == ["tiny", "tiny-2", "tiny-3", "tiny-4"]


def test_a_folder_that_cannot_hold_runs_is_one_message(train: Train, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "runs"
    with pytest.raises(ConfigError, match=in_order(folder, "Not a directory")) as told:
        train(f"directory={folder}")
    assert "directory=FOLDER" in told.value.remedy.text


def test_metrics_of_a_diverged_step_are_valid_json(train: Train, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        train("optimizer.lr=1e30", "optimizer.clip_norm=0")
    for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_what_is_not_said_again_stays_as_it_was(
    plan_file: Path, tmp_path: Path, zygote: Any
) -> None:
    """A knob, a rate and a goal of the command line are the run's own from then on."""
    said = ["techniques.logit_soft_cap.cap=7", "optimizer.lr=3e-3", "goal.steps=4"]
    assert zygote.run(tmp_path, "train", str(plan_file), *said).code == 0
    again = zygote.run(tmp_path, "train", str(plan_file), "--resume", "goal.steps=6")
    assert again.code == 0
    told = " ".join(again.err.split())
    assert "keeps" in told and "optimizer.lr = 0.003" in told
    plan = (tmp_path / "runs" / "tiny" / "plan.toml").read_text()
    assert "cap = 7" in plan and "lr = 0.003" in plan and "steps = 6" in plan
    other = zygote.run(
        tmp_path, "train", str(plan_file), "--resume", "techniques.logit_soft_cap.cap=9"
    )
    assert other.code == 2 and "techniques.logit_soft_cap.cap" in other.err
    assert not (tmp_path / "runs" / "tiny-2").exists()


def test_a_later_goal_that_moves_the_schedule_is_told(
    corpus: Path, prepared_folder: Path, tmp_path: Path
) -> None:
    text = READ.format(corpus=corpus, prepared=prepared_folder)
    keys = [f"directory={tmp_path}", "checkpoint.every_steps=5", "schedule.final_fraction=0"]
    plan = Plan.read(text, catalogue(), overrides=[*keys, "goal.steps=10"])
    run = trainer.run(plan).folder
    told: list[str] = []
    how: dict[str, Any] = {"catalogue": catalogue(), "note": told.append}
    assert plan_to_resume(plan, run, **how).horizon_steps == 10 and not told
    longer = plan_to_resume(plan, run, overrides=["goal.steps=20"], **how)
    assert longer.horizon_steps == 20 and "schedule.steps=10 keeps it" in told[0]
    assert tells(told[0], "horizon", "10 steps", 20) and "times" in told[0]
    told.clear()
    plan_to_resume(plan, run, overrides=["goal.steps=20", "schedule.steps=10"], **how)
    assert not any("horizon" in line for line in told)
