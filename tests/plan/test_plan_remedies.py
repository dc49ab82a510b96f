"""What a mistyped key or value of a plan is told: words that can be typed, and that are taken."""

import re
import shlex

import pytest

from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, nearest
from headrace.plan.plan import Plan


def outcome(*overrides: str) -> ConfigError | None:
    """What a plan with overrides is refused with."""
    try:
        Plan.read("", catalogue(), overrides=["goal.steps=4", *overrides])
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("optimizer.LR=1", "optimizer.lr=1"),
        ("Seed=3", "seed=3"),
        ("model.family=GPT2", "model.family=gpt2"),
        ("model.family=zzzzzz", "model.family=headrace"),
        ("device=CUDA", "device=cuda"),
        ("schedule.kind=COSINE", "schedule.kind=cosine"),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9, 0.95]"),
        ("optimizer.betas=[0.9, nan]", "optimizer.betas=[0.9, 0.95]"),
        ("optimizer.betas=[0.9, 0.95, 1]", None),
        ("optimizer.betas=[0.9, 'x']", "optimizer.betas=[0.9, 0.95]"),
        ("data.weights=[0]", "leave out data.weights"),
        ("track.to=tensorboard", 'track.to=["tensorboard"]'),
        ("track.to=['Tensorboard']", 'track.to=["tensorboard"]'),
        ("data.validation=nan", "data.validation=0.05"),
        ("data.validation=-0.1", "data.validation=0.05"),
        ("data.sources=[3]", None),
        ("name=" + "x" * 300, "name=run"),
    ],
)
def test_a_value_leads_to_one_that_is_taken(typed: str, remedy: str | None) -> None:
    error = outcome(typed)
    assert error is not None and "constrained" not in str(error) and ".str" not in str(error)
    assert "\n" not in error.message
    (word,) = shlex.split(error.remedy.text) if "=" in error.remedy.text else [""]
    assert remedy in (None, word or error.remedy.text), error.remedy.text
    assert not re.search(r"[a-z]\.\d+(=|$)", error.remedy.text), "an item of a list is no key"
    assert outcome(*([word] if word else [])) is None


@pytest.mark.parametrize("typed", ["=3", "model.=3", ".dim=3", "model..dim=3", " =3", "model. =3"])
def test_a_key_with_an_empty_part_is_no_override(typed: str) -> None:
    error = outcome(typed)
    assert error is not None and "is not an override" in error.message


def test_a_name_is_near_in_any_case() -> None:
    assert nearest("MUON", ["muon", "Lion"]) == "muon"
    assert nearest("lion", ["muon", "Lion"]) == "Lion"
    assert nearest("a", ["A", "a"]) == "a" and nearest("A", ["A", "a"]) == "A"
