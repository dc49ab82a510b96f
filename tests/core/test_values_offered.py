"""The value that an error of a plan offers is one that the plan takes, with whatever else it is."""

from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel

from headrace.core.errors import ConfigError
from headrace.plan.plan import Plan
from headrace.plan.technique import installed
from headrace.recipes import read_recipe

CATALOGUE, TEXT, IMAGES = installed(), read_recipe("demo"), read_recipe("vision-demo")
VALUES = ("-1", "0", "1.5", "1e30", "99999999999999", "true", "x", "[-1]", "null")


def keys(table: type[BaseModel], before: str = "") -> Iterator[str]:
    """Yield every key of a table and of the tables in it, except for techniques."""
    for name, field in table.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if inner:
            yield from keys(inner[0], f"{before}{name}.")
        elif name != "techniques":
            yield f"{before}{name}"


def read(words: list[str], technique: str) -> Plan:
    """Return the plan of the demo with some overrides and techniques."""
    added = [words[n + 1] for n, word in enumerate(words) if word == "--with"]
    overrides = [word for word in words if "=" in word]
    more = [technique] if technique else []
    text = IMAGES if any(word.startswith("vision.") for word in words) else TEXT
    return Plan.read(text, CATALOGUE, overrides=overrides, with_=[*more, *added])


def offered(key: str, value: str, technique: str = "") -> str | None:
    """What is offered for a wrong value; None where the plan takes it. It is then a plan."""
    try:
        read([f"{key}={value}"], technique)
    except ConfigError as error:
        if not error.remedy.changes:
            words = error.remedy.text.split()
            assert any(f"{key}.".startswith(f"{word}.") for word in words), "left out, by name"
            read([], technique)
        elif error.remedy.changes[0] == (f"-{technique}",):
            read([], "")
        else:
            read([f"{key}={value}", *error.remedy.changes[0]], technique)
        return error.remedy.text
    return None


@pytest.mark.parametrize("value", VALUES)
def test_a_key_of_the_plan(value: str) -> None:
    split = [f"mesh.{axis}" for axis in ("tensor", "context", "pipeline")]  # by two ways
    told = [offered(key, value) for key in keys(Plan) if value[0] != "9" or key not in split]
    assert any(told)


@pytest.mark.parametrize("value", VALUES)
def test_a_knob_of_a_technique(value: str) -> None:
    told = [
        offered(f"techniques.{name}.{knob}", value, name)
        for name, technique in CATALOGUE.techniques.items()
        for knob in technique.model_fields
    ]
    assert any(told)


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("data.validation", "-0.1", "data.validation=0.05"),
        ("data.validation", "1", "data.validation=0.05"),
        ("batch.tokens", "-1", "batch.tokens=128"),
        ("schedule.steps", "0", "schedule.steps=1 schedule.warmup_steps=1"),
        ("track.to", "TensorBoard", "'track.to=[\"tensorboard\"]'"),
        ("goal.dollars", "-1", "goal.dollars=1.0 hardware.dollars_per_hour=2"),
        ("data.weights", "x", "leave out data.weights"),
    ],
)
def test_a_value_that_would_be_refused_is_not_offered(key: str, value: str, remedy: str) -> None:
    assert offered(key, value) == remedy
