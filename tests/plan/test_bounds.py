"""Every number of a plan has a bound, and no plan is read, asked or predicted without an end."""

import math
from collections.abc import Iterator
from typing import Any, get_args

import annotated_types
import pytest
import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.assemble.context import check_supported, elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.units import divisors, largest_divisor
from headrace.costs.machine import Machine
from headrace.plan.plan import Plan
from headrace.predict.prediction import predict
from headrace.techniques.memory.dynamic_batch import halves

EXTREMES = ("nan", "inf", "-inf", "1e308", "-1", str(2**63 - 1), str(2**63), "true", "1000000007")
pytestmark = pytest.mark.timeout(240)  # a number that is counted up to fails its test
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
    """Return every numeric field of a plan and of all techniques by its key."""
    found = dict(numbers(Plan, ""))
    for name, technique in catalogue().techniques.items():
        found |= numbers(technique, f"techniques.{name}.")
    return found


def test_every_number_has_both_bounds() -> None:
    found = every_number()
    assert len(found) > 100
    for key, field in found.items():
        said = [
            *field.metadata,
            *(
                m
                for kind in get_args(field.annotation)
                for m in getattr(kind, "__metadata__", ())
                for m in getattr(m, "metadata", [m])
            ),
        ]
        for bound in (LEAST, MOST):
            assert any(isinstance(m, bound) for m in said), f"{key} lacks a bound"


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_reading_extreme_numbers_ends_soon(every: int) -> None:
    """Try every third of the extremes at each number, in turn; the slow test tries all of them."""
    for number, key in enumerate(every_number()):
        for value in EXTREMES[number % every :: every]:
            try:
                plan = Plan.read("", catalogue(), overrides=["goal.steps=4", f"{key}={value}"])
            except HeadraceError:
                plan = None
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
    """Return the smallest plan with overrides."""
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


def bounds(field: FieldInfo) -> list[float]:
    """The nearest numbers to both bounds of a field that it takes."""
    kinds = {field.annotation, *get_args(field.annotation)}
    step = 1e-9 if float in kinds else 1
    said = [
        *field.metadata,
        *(
            m
            for kind in get_args(field.annotation)
            for m in getattr(kind, "__metadata__", ())
            for m in getattr(m, "metadata", [m])
        ),
    ]
    found: dict[float, None] = {}
    for m in said:
        for name, over in (("ge", 0), ("le", 0), ("gt", step), ("lt", -step)):
            if (bound := getattr(m, name, None)) is not None:
                found[bound + over] = None
    return [*found]


DEEP = "model.layers"
"""The one number in whose proportion a prediction takes time: it tells of each layer."""
BESIDE = {
    "pipeline_parallel": ("mesh.pipeline=2", "model.layers=64"),
    "tensor_parallel": ("mesh.tensor=2",),
    "context_parallel": ("mesh.context=2",),
    "fsdp": ("mesh.data=2",),
}
"""What lets a technique come so far as to look at its knobs."""


def plan_on_a_gpu(*overrides: str, on: str = "", predicted: bool = True) -> None:
    """Read a plan, ask its techniques, and predict it on an H200."""
    asked = ["goal.steps=4", "device=cpu", "model.layers=2", *BESIDE.get(on, ()), *overrides]
    try:
        plan = Plan.read("", catalogue(), overrides=asked, with_=[on] if on else [])
        there = elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200")
        check_supported([*plan.techniques.values()], there)
        if predicted:
            predict(plan, there, Machine.assumed("NVIDIA H200"))
    except HeadraceError:
        pass


@pytest.mark.parametrize(
    "predicted", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["asked", "predicted"]
)
def test_every_number_at_its_bounds_is_planned_soon(predicted: bool) -> None:
    for key, field in every_number().items():
        found = bounds(field)
        assert len(found) >= 2, key
        on = key.split(".")[1] if key.startswith("techniques.") else ""
        for value in found:
            plan_on_a_gpu(
                f"{key}={value if key != DEEP else min(value, 10_000)}", on=on, predicted=predicted
            )


@pytest.mark.parametrize(
    ("on", "overrides"),
    [
        (
            "pipeline_parallel",
            (
                "mesh.pipeline=7",
                "batch.tokens=68719476736",
                "techniques.pipeline_parallel.schedule=interleaved",
                "techniques.pipeline_parallel.chunks=2",
            ),
        ),
        ("dynamic_batch", ("batch.tokens=68719476736", "data.sequence_length=2")),
        ("gqa", ("model.dim=16777216", "model.heads=8388608", "techniques.gqa.queries_per_key=7")),
        (
            "sequence_length_schedule",
            (
                "data.sequence_length=16777216",
                "model.context=16777216",
                "techniques.sequence_length_schedule.start=1000003",
            ),
        ),
        ("tensor_parallel", ("mesh.tensor=1000003", "model.heads=8")),
        ("adamw_8bit", ("mesh.tensor=1000003", "model.dim=16777216")),
        ("", ("batch.tokens=68719476736", "data.sequence_length=2", "batch.micro_sequences=7")),
        ("", ("mesh.pipeline=65536", "mesh.data=3")),
    ],
)
def test_numbers_that_go_together_are_planned_soon(on: str, overrides: tuple[str, ...]) -> None:
    plan_on_a_gpu(*overrides, on=on)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 12, 97, 720720, 2**36, 2**36 - 5])
def test_divisors_are_all_that_divide(number: int) -> None:
    found = divisors(number)
    assert found == sorted({*found}) and all(number % d == 0 for d in found)
    if number < 10**6:
        assert found == [d for d in range(1, number + 1) if number % d == 0]
    assert found[0] == 1 and found[-1] == number


def test_a_dynamic_batch_goes_down_in_few_steps() -> None:
    assert [*halves(2**35)] == [2**n for n in range(35, -1, -1)]
    assert [*halves(30)] == [30, 15, 5, 1] and [*halves(10**9 + 7)] == [10**9 + 7, 1]
