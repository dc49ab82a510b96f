"""A run that diverged says so first, by its own first loss and what a uniform guess costs."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import tells

from headrace.core.errors import Diverged
from headrace.core.outcome import ROSE, WORSE, Divergence, outcome_of
from headrace.doctor.run import diagnose_run
from headrace.report.run_files import read_run
from headrace.report.single import write_report
from headrace.report.words import verdict

GUESS = math.log(512)


def judged(
    *nats: float, first: float | None = GUESS, last: float | None = None, wild: bool = False
) -> Divergence:
    val = [{"loss_nats": one, "step": 10 * n} for n, one in enumerate(nats, 1)]
    last = nats[-1] if last is None and nats else last
    return outcome_of(val, first, last, step=90, vocab=512, ended_wild=wild).kind


def test_losses_that_rose_or_are_worse_than_a_guess_are_divergence() -> None:
    assert judged(64.0, first=None) == judged(5.0, 64.0) == "worse than a guess"
    assert judged(2.0, 2.5, first=None) == judged(2.5, first=2.0) == "rose"
    assert judged(4.0, 5.0, first=9.0) == "rose"
    assert judged(first=2.0, last=3.0) == "rose"
    assert judged(5.0, wild=True) == judged(wild=True) == "not finite"


def test_what_learned_or_learned_nothing_has_not_diverged() -> None:
    assert not judged(5.0, 4.0) and not judged(GUESS) and not judged(first=None)
    assert not judged(2.0, 2.0 * ROSE) and not judged(first=None, last=WORSE * GUESS)
    assert not judged(3.0, 5.0, last=0.2), "it knows its text by heart"
    assert not judged(5.0, 12.0, last=0.1)


def test_its_sentence_has_the_numbers() -> None:
    val = [{"loss_nats": 5.0, "step": 10}, {"loss_nats": 64.0, "step": 20}]
    found = outcome_of(val, 6.0, 60.0, step=20, vocab=512, ended_wild=False)
    before, guess = ("7.2", "step 10"), ("uniform", "9.0")
    assert tells(found.sentence, "diverged", "92.3 bits per token", "step 20", *before, *guess)
    assert found.to_dict()["diverged"] is True and found.to_dict()["first_nats"] == 5.0
    assert not outcome_of(val[:1], 6.0, 5.0, step=10, vocab=512, ended_wild=False).sentence


WILD = ("optimizer.lr=3", "optimizer.clip_norm=0", "eval.every_steps=4", "guard=false")


def test_every_place_says_first_that_a_run_diverged(
    plan_file: Path, tmp_path: Path, zygote: Any
) -> None:
    ended = zygote.run(tmp_path, "train", str(plan_file), *WILD)
    assert ended.code == 0, ended.err
    told = [line for line in ended.err.splitlines() if line and not line.startswith("note: ")]
    closing = next(n for n, line in enumerate(told) if "ended by steps" in line)
    assert told[closing].startswith("diverged (")
    assert any(line.startswith("The run diverged (") for line in told[closing + 1 :])
    folder = tmp_path / "runs" / "tiny"
    outcome = json.loads((folder / "report.json").read_text())["outcome"]
    assert outcome["diverged"] and outcome["last_nats"] > WORSE * outcome["guess_nats"]
    findings = json.loads((folder / "findings.json").read_text())
    assert findings[0]["bottleneck"] == "instability" and "diverged" in findings[0]["sentence"]
    assert verdict(read_run(folder).report).badge == "Diverged"
    page = write_report(folder).read_text()
    assert page.index("Diverged") < page.index("Key figures")
    doctor = zygote.run(tmp_path, "doctor", "tiny")
    assert doctor.out.startswith("instability: The run diverged (")
    first = json.loads(zygote.run(tmp_path, "train", str(plan_file), *WILD, "name=b", "--json").out)
    assert first["outcome"]["sentence"].startswith("diverged (")
    assert first["narrowest"]["station"] == "instability"


def test_a_run_that_ended_on_no_number_diverged(train: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(Diverged):
        train(
            "optimizer.lr=1e18",
            "optimizer.clip_norm=0",
            "eval.every_steps=1000",
            "schedule.kind=constant",
        )
    run = tmp_path / "runs" / "tiny"
    assert json.loads((run / "report.json").read_text())["outcome"]["kind"] == "not finite"
    assert verdict(read_run(run).report).badge == "Diverged"
    assert diagnose_run(run)[0].bottleneck == "instability"


def test_a_run_that_learns_has_not_diverged(train: Callable[..., Path]) -> None:
    folder = train()
    outcome = json.loads((folder / "report.json").read_text())["outcome"]
    assert outcome["diverged"] is False and outcome["sentence"] == ""
    assert outcome["first_nats"] >= outcome["last_nats"] > 0
    again = train("goal.steps=14", resume=True)
    kept = json.loads((again / "report.json").read_text())["outcome"]
    assert kept["first_step"] == outcome["first_step"] and kept["last_step"] == 14
