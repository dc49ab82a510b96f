"""What means nothing is refused when a run begins; what is dubious is told in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import tells

from headrace.core.errors import ConfigError
from headrace.plan.changes import changed
from headrace.plan.doubts import check_meant, doubts_of
from headrace.plan.plan import Plan
from headrace.plan.technique import installed
from headrace.predict.candidates import Asking
from headrace.report.single import write_report

MINI = "model={family = 'headrace-mini', dim = 256}"
DUBIOUS = {
    "a high rate at once": (["optimizer.lr=0.02", "model.dim=64"], "warmup_steps = 0"),
    "a rate beyond any": (["optimizer.lr=1"], "1,000 times the default"),
    "warmup to the end": (["schedule.warmup_steps=40"], "100% of the run's 40 steps"),
    "warmup beyond the end": (
        ["schedule.warmup_steps=400", "schedule.steps=4000"],
        "comes to 10% of optimizer.lr",
    ),
    "no rate after the schedule": (
        ["schedule.steps=30", "schedule.final_fraction=0"],
        "10 steps after schedule.steps = 30",
    ),
    "weights that fade": (["optimizer.weight_decay=1e4"], "takes away 100% of every weight"),
    "a long memory": (["optimizer.betas=[0.999, 0.9999]"], "gradients of 1,000 steps"),
    "a memory just too long": (["optimizer.betas=[0.99, 0.9999]"], "gradients of 100 steps"),
    "a divisor without memory": (["optimizer.betas=[0.9, 0.0]"], "the size of those of 1"),
    "a goal that is no goal": (
        ["goal.bits_per_byte=20", "eval.every_steps=9"],
        "before anything is learned",
    ),
    "no validation on the way": (["eval.every_steps=50"], "it is validated once, at its end"),
    "a target seen too late": (["goal.bits_per_byte=2"], "it is validated once, at its end"),
    "no save on the way": (["checkpoint.every_steps=50"], "it is saved once, at its end"),
    "a base of the family": (
        [MINI, "techniques.mup.base_dim=128"],
        "has heads of 32, and this model of 64",
    ),
    "a base of unknown heads": (
        ["model={dim = 128, heads = 4}", "techniques.mup.base_dim=64"],
        "nothing says",
    ),
    "random rows": (["techniques.yarn={}"], "the weights of this run are random"),
    "no rest of a run": (["schedule.warmup_steps=30"], "takes 75% of the run's 40 steps"),
    "the normaliser alone": (["techniques.z_loss.weight=1"], "10,000 times the usual"),
    "noise for a target": (["techniques.label_smoothing.smoothing=0.9"], "10% of the probability"),
    "blocks that do not run": (["techniques.stochastic_depth.rate=0.9"], "in 90% of the steps"),
    "a rate that moves nothing": (["optimizer.lr=1e-12"], "it learns nothing"),
    "an eps for a rate": (["optimizer.eps=1"], "outweighs the size of gradients"),
    "gradients beside eps": (["optimizer.clip_norm=1e-9"], "nothing is learned"),
    "wild weights": (["model.init_std=1"], "scatter by 16"),
    "logits without a word": (["model.logit_cap=0.01"], "of the probability among 4,096"),
    "attention to all": (["techniques.logit_soft_cap.cap=0.01"], "at most 1.02 times as much"),
    "attention to itself": (["techniques.sliding_window.window=1"], "a token itself alone"),
    "experts without a choice": (
        ["techniques.mixture_of_experts={experts = 4, top_k = 4}"],
        "to all 4 experts",
    ),
    "a memory beyond the run": (["techniques.ademamix={}"], "keeps half of a gradient"),
    "an average of every step": (["techniques.schedule_free={}"], "recommend a warmup"),
    "no whole row": (["techniques.sequence_length_schedule.until=100"], "no step sees the 256"),
}
AT_THE_BORDER = (
    "optimizer.lr=5.01e-7",
    "optimizer.lr=0.0015625",
    "optimizer.lr=0.03 schedule.warmup_steps=4",
    "optimizer.weight_decay=50",
    "optimizer.betas=[0.98,0.9604]",
    "optimizer.eps=1e-4",
    "optimizer.clip_norm=1e-4",
    "schedule.warmup_steps=20",
    "schedule.steps=40 schedule.final_fraction=0",
    "goal.bits_per_byte=8 eval.every_steps=40",
    "checkpoint.every_steps=40",
    "model.init_std=0.1875",
    "model.logit_cap=4.16",
    "trace.every_steps=9 eval.every_steps=5",
    "techniques.ademamix.slow=0.933",
    "techniques.schedule_free.beta=0.9 schedule.warmup_steps=1",
    "techniques.logit_soft_cap.cap=1",
    "techniques.sliding_window.window=2",
    "techniques.sliding_window.window=1 techniques.sliding_window.between=1",
    "techniques.mixture_of_experts.experts=4 techniques.mixture_of_experts.top_k=3",
)
"""What is just as much as is not told."""
MEANINGLESS = ("lora", "dora", "qlora", "distillation")


def read(*overrides: str) -> Plan:
    return Plan.read("goal = {steps = 40}", installed(), overrides=overrides)


def test_a_plan_of_defaults_is_not_doubted() -> None:
    assert not doubts_of(read()) and not doubts_of(read("techniques.mup.base_dim=256"))


@pytest.mark.parametrize(("keys", "told"), DUBIOUS.values(), ids=DUBIOUS)
def test_what_is_dubious_is_told_and_its_remedy_ends_the_doubt(keys: list[str], told: str) -> None:
    (doubt,) = doubts_of(read(*keys))
    assert told in doubt.line and not doubt.meaningless and "\n" not in doubt.line
    check_meant([doubt])
    for words in doubt.remedy.changes[:1]:
        mended = changed(read(*keys), words, installed())
        assert told not in "".join(one.line for one in doubts_of(mended))


@pytest.mark.parametrize("keys", AT_THE_BORDER)
def test_what_is_at_a_border_is_not_doubted(keys: str) -> None:
    assert not doubts_of(read(*keys.split()))


@pytest.mark.parametrize("name", MEANINGLESS)
def test_what_means_nothing_is_refused_when_a_run_begins(
    name: str, train: Callable[..., Path], given: Callable[..., str], tmp_path: Path
) -> None:
    keys = [f"techniques.{name}={{}}", "model.dim=32", "goal.steps=1"]
    with pytest.raises(ConfigError, match="random") as caught:
        train(*keys)
    assert not (tmp_path / "runs").exists()
    assert tells(caught.value.remedy.text, "headrace export", "--to hf")
    start = given("model.dim=32")
    if name == "distillation":
        train(*keys, f"techniques.distillation.teacher={start.partition('=')[2]}")
    else:
        folder = train(*keys, start)
        assert json.loads((folder / "report.json").read_text())["doubts"] == []


def test_a_teacher_that_the_run_starts_from_is_one() -> None:
    plan = read("techniques.distillation={}", "model.pretrained=there")
    assert not any(doubt.meaningless for doubt in doubts_of(plan))


def test_a_doubt_is_told_in_the_report_and_its_page(train: Callable[..., Path]) -> None:
    folder = train("optimizer.lr=1", "goal.steps=2", "guard=false")
    (kept,) = json.loads((folder / "report.json").read_text())["doubts"]
    assert "1,000 times" in kept["reason"] and kept["remedy"] == "optimizer.lr=0.001"
    page = write_report(folder).read_text()
    assert page.index("1,000 times") < page.index("Key figures")


def test_no_change_that_means_nothing_is_proposed() -> None:
    plan, nothing = read(), None
    asking = Asking(plan, *[nothing] * 2, installed(), learning=True)  # type: ignore[arg-type]
    put_in = {words[0][1:] for words in asking.singles(plan) if words[0][0] == "+"}
    assert "muon" in put_in and not put_in & {*MEANINGLESS}
    start = read("model.pretrained=there")
    assert {*MEANINGLESS} <= {words[0][1:] for words in asking.singles(start)}


def test_every_verb_that_shows_a_plan_tells_its_doubts(
    plan_file: Path, tmp_path: Path, zygote: Any
) -> None:
    words = [str(plan_file), "--with", "lora", "optimizer.lr=1"]
    for verb in ("explain", "plan"):
        ended = zygote.run(tmp_path, verb, *words)
        assert ended.code == 0 and ended.out.count("note: ") == 2, ended.err
        told = json.loads(zygote.run(tmp_path, verb, *words, "--json").out)["doubts"]
        assert [one["meaningless"] for one in told] == [True, False]
    ended = zygote.run(tmp_path, "train", *words, "--json")
    assert ended.code == 2 and "model.pretrained" in json.loads(ended.out)["error"]
    ended = zygote.run(tmp_path, "train", str(plan_file), "optimizer.lr=1", "goal.steps=2")
    assert ended.code == 0 and "note: optimizer.lr = 1 is 1,000 times" in ended.err
