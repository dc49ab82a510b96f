"""Every number of a plan has a bound, and reading any plan takes under a second."""

import math
import time
from collections.abc import Iterator
from typing import Any, get_args

import annotated_types
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.arguments import catalogue
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.plan import Plan
from headrace.core.units import largest_divisor

EXTREMES = ("nan", "inf", "-inf", "1e308", "-1", str(2**63 - 1), str(2**63), "true", "1000000007")
LEAST, MOST = (annotated_types.Ge, annotated_types.Gt), (annotated_types.Le, annotated_types.Lt)


def numbers(table: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every field of a table, and of the tables in it, that takes a number."""
    for name, field in table.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from numbers(field.annotation, f"{prefix}{name}.")
        elif {int, float} & {*kinds}:
            yield f"{prefix}{name}", field


def every_number() -> dict[str, FieldInfo]:
    """Every number of a plan and of all techniques by its key."""
    found = dict(numbers(Plan, ""))
    for name, technique in catalogue().techniques.items():
        found |= numbers(technique, f"techniques.{name}.")
    return found


def test_every_number_has_both_bounds() -> None:
    found = every_number()
    assert len(found) > 100
    for key, field in found.items():
        said = [*field.metadata, *(
            m for kind in get_args(field.annotation) for m in getattr(kind, "__metadata__", ())
            for m in getattr(m, "metadata", [m])
        )]  # fmt: skip
        for bound in (LEAST, MOST):
            assert any(isinstance(m, bound) for m in said), f"{key} lacks a bound"


def test_reading_extreme_numbers_ends_soon() -> None:
    for key in every_number():
        for value in EXTREMES:
            began = time.process_time()
            try:
                plan = Plan.read("", catalogue(), overrides=["goal.steps=4", f"{key}={value}"])
            except HeadraceError:
                plan = None
            assert time.process_time() - began < 1, f"{key}={value}"
            if plan is not None:
                assert value not in ("nan", "inf", "-inf", "true", "1e308"), f"{key}={value}"


@pytest.mark.parametrize("rows", [1, 7, 1000, 2**35, 10**9 + 7])
def test_the_nearest_micro_batch_is_found_at_once(rows: int) -> None:
    for most in (1, 6, math.isqrt(rows), 10**9):
        found = largest_divisor(rows, most)
        assert rows % found == 0 and found <= most
        if rows <= 1000:
            assert found == max(n for n in range(1, min(rows, most) + 1) if rows % n == 0)


def read(*overrides: str) -> Plan:
    """The smallest plan with overrides."""
    return Plan.read("", catalogue(), overrides=["goal.steps=4", *overrides])


def test_a_micro_batch_beyond_every_row_is_refused_with_one_that_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        read("batch.micro_sequences=1000000000")
    assert "batch.micro_sequences=32" in caught.value.message


@pytest.mark.parametrize("name", ["2024", "1e5", "2024-11-25", "1.50", "007"])
def test_a_name_of_digits_is_a_name(name: str) -> None:
    assert read(f"name={name}").name == name


@pytest.mark.parametrize(
    ("given", "names"), [("batch.tokens=true", "batch.tokens"), ("optimizer.lr=false", "lr")]
)
def test_a_truth_is_no_number(given: str, names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(given)
    assert names in caught.value.message


def test_true_stays_a_truth() -> None:
    plan: Any = read("guard=false", "model.bias=true")
    assert plan.guard is False and plan.model.bias is True
