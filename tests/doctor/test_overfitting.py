"""A run that learns its text by heart is told so, with commands that end it sooner."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headrace.assemble.build import make_context
from headrace.cli.app import app
from headrace.doctor.findings import Kind
from headrace.doctor.forecast import MeasuredRun
from headrace.doctor.observation import Observation, observe
from headrace.doctor.overfitting import overfits, sooner
from headrace.doctor.so_far import report_so_far
from headrace.doctor.words import describe
from headrace.plan.plan import Plan
from headrace.plan.technique import Unsupported, installed

PROSE = Path(__file__).parents[2] / "docs" / "design.md"
RECIPES = Path(__file__).parents[2] / "headrace" / "recipes"
GOAL = "[goal]\nsteps = 9\n"
FELL = tuple(3.0 - 0.1 * n for n in range(20))
SEEN = Observation(
    loss=FELL,
    val_nats=(2.5, 2.0, 2.1, 2.3),
    val_steps=(5, 10, 15, 20),
    val_passes=(2.0, 4.0, 6.0, 8.0),
)
LOOKS = (2.2, 2.0, 2.01, 2.02, 2.03, 2.04)
"""Validations that rise slowly and do not scatter."""
MANY = {"val_steps": (3, 6, 9, 12, 16, 20), "val_passes": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)}


def test_a_validation_loss_that_rose_while_the_training_loss_fell_is_named() -> None:
    finding = overfits(SEEN)
    assert finding is not None and finding.kind is Kind.OVERFITS
    assert finding.bottleneck == "overfitting" and finding.share == pytest.approx(0.15)
    told = describe(finding)
    assert "15.0%" in told.sentence and "after 4 of 8 passes" in told.evidence
    assert MeasuredRun.of(SEEN).lowest_step == 10
    assert overfits(replace(SEEN, val_nats=LOOKS, **MANY)) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"val_nats": (2.5, 2.2, 2.0, 2.01)},
        {"val_nats": (2.0, 2.3), "val_steps": (10, 20), "val_passes": (4.0, 8.0)},
        {"val_nats": (2.5, 2.0, 2.1, float("nan"))},
        {"loss": tuple(reversed(FELL))},
        {"loss": (2.0, 2.01) * 10},
        {"loss": None},
        {"val_passes": (0.3, 0.5, 0.8, 1.02)},
        {"val_passes": ()},
        {"val_steps": (0, 0, 0, 0)},
        {"val_nats": (), "val_steps": (), "val_passes": ()},
        {"before_nats": 1.9},
        {"val_nats": (2.2, 2.0, 2.08, 2.01, 2.09, 2.05), **MANY},
    ],
    ids=[
        *("little", "two looks", "not finite", "diverges", "flat", "no losses", "read once"),
        *("passes unknown", "steps unknown", "no looks", "began lower", "scatters"),
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
    plain = f"{GOAL}[optimizer]\nweight_decay = 1.0\n[techniques.adamw]\n"
    assert [*sooner(Plan.read(plain, installed()), 0)] == []


@pytest.mark.parametrize("recipe", ["demo", "small", "124m"])
def test_warmups_end_with_a_run_that_ends_sooner(recipe: str) -> None:
    text = (RECIPES / f"{recipe}.toml").read_text()
    ends = next(sooner(Plan.read(text, installed()), 15))
    plan = Plan.read(text, installed(), overrides=list(ends))
    assert plan.goal.steps == plan.schedule.steps == 15 and plan.schedule.warmup_steps <= 2
    there = make_context(plan, torch.device("cpu"))
    muon = plan.techniques.get("muon")
    assert muon is None or not isinstance(muon.supports(there), Unsupported)


def test_a_run_that_has_not_ended_may_have_validated() -> None:
    """Its rows say nothing of passes, so that nothing is said of them."""
    rows = [{"step": n, "loss": 3.0, "tokens": 10 * n, "step_s": 0.1} for n in range(1, 9)]
    rows[3]["val_loss_nats"] = 2.5
    report = report_so_far(Path("nowhere"), rows)
    assert report["val"] == [{"step": 4, "tokens": 40, "loss_nats": 2.5}]
    seen = observe(report, rows)
    assert (seen.val_nats, seen.val_steps, seen.val_passes) == ((2.5,), (4,), ())


def test_passes_are_over_the_tokens_that_differ() -> None:
    """A little source that is read often does not make the whole text one that was read twice."""
    sources = [
        {"tokens": 900, "source_tokens": 9000},
        {"tokens": 100, "source_tokens": 25},
        {"tokens": 0, "source_tokens": None},
    ]
    report = {
        **report_so_far(Path("nowhere"), [{"step": 9, "loss": 3.0, "tokens": 1000}]),
        "data": {"mixture": {"sources": sources}},
        "val": [{"step": 4, "tokens": 500, "loss_nats": 2.5}, {"loss_nats": 2.0, "tokens": 1000}],
    }
    passes = observe(report, []).val_passes
    assert passes == pytest.approx((0.5 * 1000 / 925, 1000 / 925))


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
