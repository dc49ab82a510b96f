"""A change that rounds otherwise may rest on receipts, and is compared all the same."""

from dataclasses import replace
from typing import Any

import pytest

from headrace.cli.catalogue import catalogue
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.tuner.equal_learning import EqualLearning, receipts, shown_before
from headrace.tuner.equality import BATCHES, NATS, equality
from headrace.tuner.judge import Rules, judge
from headrace.tuner.readings import Reading

KNOWN = catalogue()
PLAN = Plan.read(
    "[model]\ndim = 256\nvocab = 320\n[data]\nsequence_length = 64\n[goal]\nsteps = 10\n", KNOWN
)
RECEIPT = EqualLearning(
    technique="float8_linear",
    knobs={"recipe": "tensorwise"},
    precision="bf16",
    least_dim=128,
    shapes=("160m", "330m"),
    seeds=6,
    steps=1000,
    nats=0.001,
    high=0.004,
    hardware="a GPU",
)


def shown(*words: str, first: Plan = PLAN, **receipt: Any) -> str:
    """Return what a receipt with other facts shows of a change."""
    second = changed(first, list(words), KNOWN)
    return shown_before(first, second, NATS, "bf16", [replace(RECEIPT, **receipt)])


def test_a_receipt_shows_a_technique_beside_exact_changes() -> None:
    text = shown("+float8_linear", "+torch_compile", "batch.micro_sequences=1")
    assert "float8_linear" in text and "0.0010" in text and "160m" in text


@pytest.mark.parametrize(
    "off",
    [
        {"precision": "fp32"},
        {"least_dim": 512},
        {"knobs": {"recipe": "rowwise"}},
        {"shapes": ("160m",)},
        {"seeds": 4},
        {"steps": 500},
        {"high": NATS},
        {"technique": "bf16_parameters", "knobs": {}},
    ],
)
def test_another_receipt_shows_nothing(off: dict[str, Any]) -> None:
    assert shown("+float8_linear", **off) == ""


def test_what_no_receipt_is_of_is_not_shown() -> None:
    fp8 = changed(PLAN, ["+float8_linear"], KNOWN)
    assert shown("+float8_linear", "+bf16_parameters") == ""
    assert shown("+torch_compile") == ""  # exact: nothing has to show it
    assert shown("+float8_linear", "optimizer.lr=2e-3") == ""  # learning
    assert shown("-float8_linear", first=fp8) == ""
    assert shown("techniques.float8_linear.recipe=rowwise", first=fp8) == ""


def readings(off: float, steps: int = 8 * BATCHES) -> tuple[Reading, Reading]:
    """Return readings of two plans whose losses lie apart."""
    falling = [8 * (i + 1) ** -0.1 for i in range(steps)]
    blocks: dict[str, Any] = {
        "norms": [1.0] * steps,
        "steps": 54,
        "limits": {"": 0.1, "the loss": 0.01},
    }
    one, two = (
        Reading(seconds=[s] * 4, losses=[x + o for x in falling], **blocks)
        for s, o in ((1.0, 0.0), (0.5, off))
    )
    return one, two


@pytest.mark.parametrize(
    ("off", "verdict"), [(0.0, "better"), (0.002, "better"), (0.5, "different")]
)
def test_the_steps_taken_must_not_speak_against_it(
    monkeypatch: pytest.MonkeyPatch, off: float, verdict: str
) -> None:
    monkeypatch.setattr("headrace.tuner.equality._other_numbers", lambda *a: "")
    one, two = readings(off)
    rules = Rules(device="cuda", precision="bf16", shown_before="long trainings")
    found = judge(replace(two, beside=one), "approximate", rules)
    assert found.verdict == verdict
    if verdict == "better" and off:
        assert "long trainings" in found.reason
        bare = judge(replace(two, beside=one), "approximate", replace(rules, shown_before=""))
        assert bare.verdict == "not shown"


def test_few_steps_are_no_evidence_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.tuner.equality._other_numbers", lambda *a: "")
    one, two = readings(0.5, steps=BATCHES)
    assert equality(one, two, "approximate", shown_before=True).verdict == "same"


def test_the_receipts_of_this_version_are_whole() -> None:
    for one in receipts():
        assert KNOWN.find(one.technique) and one.shapes and one.high >= one.nats
