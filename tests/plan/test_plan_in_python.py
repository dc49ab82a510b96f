"""A plan that is made in Python is checked as one that is read from TOML is."""

from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.plan.plan import Plan
from headrace.plan.technique import Technique, installed
from headrace.techniques.optim.muon import Muon

GOAL: dict[str, Any] = {"steps": 4}


def test_a_technique_is_found_by_its_name_and_has_its_knobs() -> None:
    plan = Plan(goal=GOAL, techniques={"muon": {"lr": 0.05}})  # type: ignore[arg-type]
    assert plan.techniques["muon"] == Muon(lr=0.05)
    assert plan == Plan.read("goal = { steps = 4 }\ntechniques.muon = { lr = 0.05 }", installed())
    assert Plan(goal=GOAL, techniques={"muon": Muon()}).techniques["muon"] == Muon()  # type: ignore[arg-type]
    assert type(Plan.model_validate(dict(plan)).techniques["muon"]) is Muon


@pytest.mark.parametrize(
    ("tables", "told", "remedy"),
    [
        ({"techniques": {"nonsense": {}}}, "there is no technique 'nonsense'", "headrace list"),
        ({"techniques": {"muon": {"rate": 1}}}, "no key 'techniques.muon.rate'", ""),
        ({"techniques": {"muon": {"lr": -1.0}}}, "techniques.muon.lr = -1.0", ""),
        ({"techniques": {"muon": 3}}, "techniques.muon", ""),
        ({"techniques": {"torch_compile": {"mode": "reduce-overhead"}}}, "--with cuda_graphs", ""),
        ({"techniques": {"sophia": Muon()}}, "has muon under the name 'sophia'", "'muon'"),
        ({"techniques": {"muon": Technique()}}, "under the name 'muon'", ""),
        ({"techniques": 3}, "techniques = 3", ""),
        ({"batch": {"tokens": "many"}}, "batch.tokens = 'many'", ""),
        ({"batches": {}}, "the plan has no key 'batches'", "batch"),
        ({"model": {"family": "lama"}}, "there is no model family 'lama'", "model.family=llama"),
        ({"goal": {}}, "the plan has no goal", ""),
    ],
)
def test_a_mistake_is_one_error_of_ours(tables: dict[str, Any], told: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan(**{"goal": GOAL, **tables})
    assert told in caught.value.message and remedy in caught.value.remedy.text


def test_a_family_gives_its_defaults() -> None:
    made = Plan(goal=GOAL, model={"family": "gpt2"})  # type: ignore[arg-type]
    assert made == Plan.read('goal = { steps = 4 }\nmodel = { family = "gpt2" }', installed())


def test_a_technique_is_named_by_a_string() -> None:
    for name in (1, None, ("muon",)):
        with pytest.raises(ConfigError, match="there is no technique"):
            Plan(techniques={name: {}})  # type: ignore[dict-item]
