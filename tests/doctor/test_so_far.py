"""The doctor judges a run that has not ended by what it has written so far."""

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import ENVIRONMENT, add_rows, metric_rows, write_run
from tiny import PLAN

import headrace
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, RunError
from headrace.doctor import packing
from headrace.doctor.advice import Advice, NoRemedy, advise
from headrace.doctor.findings import Kind
from headrace.doctor.run import diagnose_run
from headrace.doctor.words.answer import findings_json, render_advice

CHAT = '\n[data.chat]\nkind = "chat"\n'


def never(*_: Any) -> Any:
    """Fail where rates are asked for, which a probe would measure."""
    raise AssertionError("nothing is measured beside a run that goes on")


def judged(folder: Path) -> Advice:
    """Return the doctor's answer on a run."""
    return advise(folder, catalogue(), never)


@pytest.fixture
def going(tmp_path: Path, corpus: Path, prepared_folder: Path) -> Path:
    """Return the folder of a run that goes on and has written no step yet."""
    folder = tmp_path / "runs" / "going"
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    return folder


def rows(count: int, **changes: float) -> list[dict[str, Any]]:
    """Return rows of metrics.jsonl, each with some numbers changed."""
    return [row | changes for row in metric_rows()[:count]]


def test_too_few_steps_are_told_until_there_are_enough(going: Path) -> None:
    for count in (0, 5):
        add_rows(going, rows(5)[:count])
        advice = judged(going)
        assert advice.no_remedy is NoRemedy.TOO_FEW_STEPS and advice.so_far == count
        assert advice.findings[0].finding.kind is Kind.TOO_FEW_STEPS
    add_rows(going, rows(10)[5:])
    assert judged(going).so_far == 10 and judged(going).no_remedy is not NoRemedy.TOO_FEW_STEPS


def test_a_run_that_waits_for_its_loader_is_told_so_with_commands(going: Path) -> None:
    add_rows(going, rows(40, input_s=0.2), whole=False)
    advice = judged(going)
    assert advice.so_far == 39, "the row that is being written is not read"
    assert advice.verdict is not None and advice.verdict.kind is Kind.INPUT_WAIT
    remedies = advice.findings[0].remedies
    assert remedies and advice.command(remedies[0]).startswith(f"headrace train {going}/plan.toml")
    lines = render_advice(advice).splitlines()
    assert lines[0].startswith("the run has not ended") and "39 steps" in lines[0]
    assert {row["so_far"] for row in findings_json(advice)} == {39}


def test_it_says_what_a_report_of_the_same_steps_would(going: Path, tmp_path: Path) -> None:
    """Check that both judge the same rows alike: what binds, and the share of every phase."""
    waits = rows(40, input_s=0.2, wasted_tokens=4096)
    add_rows(going, waits)
    plan = (going / "plan.toml").read_text()
    sums = {name: sum(row.get(f"{name}_s", 0.0) for row in waits) for name in ("input", "forward")}
    sums |= {name: sum(row[f"{name}_s"] for row in waits) for name in ("backward", "optimizer")}
    report: dict[str, Any] = {"phase_s": sums, "wasted_token_fraction": 0.5, "memory_lines": []}
    report["model_flops_utilization"] = {"value": None}
    ended = write_run(tmp_path / "ended", rows=waits, plan=plan, **report)
    both = [
        {
            one.finding.bottleneck: pytest.approx(one.finding.share)
            for one in advise(folder, catalogue()).findings
        }
        for folder in (going, ended)
    ]
    assert both[0] == both[1] and {"input", "wasted tokens"} <= {*both[0]}


def test_a_report_of_before_a_resume_is_not_judged(going: Path) -> None:
    old = {"format": 1, "status": "running", "error": "MemoryFull", "message": "no memory"}
    (going / "report.json").write_text(json.dumps(old))
    add_rows(going, rows(20))
    kinds = {one.finding.kind for one in judged(going).findings}
    assert Kind.OUT_OF_MEMORY not in kinds and judged(going).so_far == 20
    with pytest.raises(ConfigError, match="was resumed"):
        diagnose_run(going)


def test_masked_prompts_of_conversations_are_no_waste(going: Path) -> None:
    add_rows(going, rows(20, wasted_tokens=6000))
    assert Kind.WASTED_TOKENS in {one.finding.kind for one in judged(going).findings}
    with (going / "plan.toml").open("a") as plan:
        plan.write(CHAT)
    assert Kind.WASTED_TOKENS not in {one.finding.kind for one in judged(going).findings}


def test_a_loss_that_is_lost_is_told_while_the_run_goes_on(going: Path) -> None:
    lost = [row | {"loss": None, "grad_norm": None} for row in rows(40)[20:]]
    add_rows(going, [*rows(20), *lost])
    verdict = judged(going).verdict
    assert verdict is not None and verdict.bottleneck == "instability"


def test_no_shards_are_read_beside_a_run(going: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing.Shards, "open", never)
    add_rows(going, rows(20, wasted_tokens=4096))
    assert any(one.finding.bottleneck == "wasted tokens" for one in judged(going).findings)


def test_the_verb_and_python_judge_it_too(going: Path) -> None:
    add_rows(going, rows(20))
    printed = headrace.run_command("doctor", going)
    assert {row["so_far"] for row in printed} == {20}
    assert str(headrace.doctor(going)).startswith("the run has not ended")
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": "low"}\n')
    with pytest.raises(RunError, match="loss of row 21 is 'low'"):
        headrace.doctor(going)
