"""A run that learns its text by heart is told so, with commands that end it sooner."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.doctor.findings import Kind
from headrace.doctor.forecast import MeasuredRun
from headrace.doctor.observation import Observation
from headrace.doctor.overfitting import overfits, sooner
from headrace.doctor.words import describe
from headrace.plan.plan import Plan
from headrace.plan.technique import installed

PROSE = Path(__file__).parents[2] / "docs" / "design.md"
GOAL = "[goal]\nsteps = 9\n"
FELL = tuple(3.0 - 0.1 * n for n in range(20))
SEEN = Observation(loss=FELL, val_nats=(2.5, 2.0, 2.1, 2.3), val_steps=(5, 10, 15, 20), epochs=8.0)


def test_a_validation_loss_that_rose_while_the_training_loss_fell_is_named() -> None:
    finding = overfits(SEEN)
    assert finding is not None and (finding.kind, finding.bottleneck) == (
        Kind.OVERFITS,
        "overfitting",
    )
    assert finding.share == pytest.approx(0.15)
    told = describe(finding)
    assert "15.0%" in told.sentence and "4 of 8 passes" in told.evidence
    assert MeasuredRun.of(SEEN).lowest_step == 10
    unsaid = overfits(replace(SEEN, epochs=None))
    assert unsaid is not None and "passes" not in describe(unsaid).evidence


@pytest.mark.parametrize(
    "change",
    [
        {"val_nats": (2.5, 2.2, 2.0, 2.01)},
        {"val_nats": (2.0, 2.3), "val_steps": (10, 20)},
        {"val_nats": (2.5, 2.0, 2.1, float("nan"))},
        {"loss": tuple(reversed(FELL))},
        {"loss": None},
        {"epochs": 1.0},
        {"val_nats": (), "val_steps": ()},
    ],
    ids=[
        "hardly rose",
        "two looks",
        "not finite",
        "diverges",
        "no losses",
        "read once",
        "no looks",
    ],
)
def test_what_is_no_overfitting_is_not_named(change: dict[str, object]) -> None:
    assert overfits(replace(SEEN, **change)) is None  # type: ignore[arg-type]


def test_a_run_ends_sooner_and_without_tables() -> None:
    plan = Plan.read(f"{GOAL}[techniques.bigram_embeddings]\n", installed())
    assert [*sooner(plan, 7)] == [
        ("goal.steps=7", "schedule.steps=7"),
        ("-bigram_embeddings",),
        ("optimizer.weight_decay=0.3",),
    ]
    both = f"{GOAL}[optimizer]\nweight_decay = 0.1\n[techniques.muon]\nweight_decay = 0.05\n"
    decays = ("optimizer.weight_decay=0.3", "techniques.muon.weight_decay=0.3")
    assert [*sooner(Plan.read(both, installed()), 0)] == [decays]
    assert [*sooner(Plan.read(both.replace("0.1", "1").replace("0.05", "1"), installed()), 0)] == []


@pytest.mark.slow
def test_a_run_over_a_brief_text_is_told_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(PROSE.read_text()[:9000])
    plan = ["train", "demo", "device=cpu", f"data.sources={text}", "data.validation=0.3"]
    plan += ["model.dim=64", "model.layers=1", "model.heads=2", "model.ffn=128", "data.vocab=300"]
    plan += ["data.sequence_length=16", "batch.tokens=128", "schedule.steps=300", "goal.steps=300"]
    plan += ["eval.every_steps=30", "name=long"]

    def call(*words: str) -> str:
        ended = CliRunner().invoke(app, [*words, "--json"], prog_name="headrace")
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    call(*plan)
    found = json.loads(call("doctor", "long"))
    (heart,) = (one for one in found if one["bottleneck"] == "overfitting")
    (ends,) = (r for r in heart["remedies"] if r["change"][0].startswith("goal.steps="))
    command = shlex.split(ends["command"])[1:]
    call(*command, "name=brief")
    later = json.loads(call("doctor", "brief"))
    assert "overfitting" not in [one["bottleneck"] for one in later]
