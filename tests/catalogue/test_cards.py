"""Receipts of cards are those of rows, come first, and are no cost that a doctor tells of a run."""

import json
import sys
from pathlib import Path

import pytest

from headrace.cli.catalogue import catalogue
from headrace.doctor.change_words import BOUGHT, cost_of, costs_of
from headrace.plan.technique import Card, Ratio, Receipt

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from card_receipts import RECEIPTS, measured_rows, refreshed, render

ROOMS = ("attention", "compile", "fusion", "loss", "memory", "precision")
NAMES = [name for name, kind in catalogue().techniques.items() if kind.room in ROOMS]
NAMES += ["loader_workers", "rope"]


def test_what_a_card_shows_as_measured_is_a_rows() -> None:
    before = RECEIPTS.read_text()
    assert render(refreshed(json.loads(before), measured_rows())) == before


def test_a_receipt_that_no_row_has_is_seen() -> None:
    rows = measured_rows()
    (one,) = [row for row in json.loads(RECEIPTS.read_text()) if row["technique"] == "alibi"]
    assert one["ratios"][0]["ratio"] == 0.97
    one["ratios"][0]["ratio"] = 3.0
    assert refreshed([one], rows)[0]["ratios"][0]["ratio"] != 3.0
    one["ratios"][0]["shape"] = "7b"
    with pytest.raises(SystemExit, match="no row has this"):
        refreshed([one], rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_card_leads_with_the_receipt_of_the_recipe(name: str) -> None:
    """Check that numbers measured on the recipe lead a card, before published ones."""
    timed = [
        row
        for row in measured_rows()
        if row["technique"] == name
        and row["base"] == "recipe"
        and row["hardware"] == "NVIDIA H200"
        and {"speed_ratio", "run_ratio"} & {*row["metrics"]}
    ]
    card = catalogue().find(name).card
    recipe = [r for r in card.receipts if r.where.startswith("compiled recipe")]
    assert bool(timed) == any(r.field in ("buys", "costs") for r in recipe)
    slower = [row for row in timed if not row["left_out"]]
    if slower and all(
        row["metrics"].get("speed_ratio", {"value": 1})["value"] < 0.97 for row in slower
    ):
        costs = [r for r in card.receipts if r.field == "costs"]
        assert any(one.of == "speed" for r in costs for one in r.ratios), "it is a cost"


@pytest.mark.parametrize("name", sorted(catalogue().techniques))
def test_no_receipt_is_written_into_a_card_by_hand(name: str) -> None:
    card = catalogue().find(name).card
    for field in ("buys", "costs", "helps", "hurts", "source"):
        assert not any(
            "x the speed" in part or "x the memory" in part for part in card.parts(field)
        )


@pytest.mark.parametrize("word", ["+", "-"])
@pytest.mark.parametrize("name", sorted(catalogue().techniques))
def test_the_doctor_tells_a_cost_that_was_not_measured_elsewhere(name: str, word: str) -> None:
    """Check that the doctor tells, as the cost of a change, a part of what its card says."""
    cost = cost_of(catalogue(), f"{word}{name}")
    card = catalogue().find(name).card
    assert cost.removeprefix(BOUGHT) in card.parts("costs" if word == "+" else "buys")
    assert cost.removeprefix(BOUGHT) in costs_of(catalogue(), f"{word}{name}")
    assert cost.startswith(BOUGHT) == (word == "-")


def test_a_card_is_shown_with_what_was_measured() -> None:
    speed, memory = Ratio(0.9, "speed", "1b"), Ratio(1.25, "memory", "1b", "a=1")
    with_it = Receipt("costs", "NVIDIA H200", "plain trunk with it", (speed, speed, memory), ", so")
    hurts = Receipt("hurts", "NVIDIA H200", "plain trunk with it", (speed,))
    card = Card("a", ("a disk", "it is small", "It is slow"), "b", "c", "d", (with_it, hurts))
    assert card.shown("costs") == (
        "H200, plain trunk with it: 0.90x the speed (1b), 0.90x (1b) and 1.25x the memory (1b, "
        "a=1), so; a disk; it is small. It is slow"
    )
    assert card.whole()["hurts"] == "c; H200, plain trunk with it: 0.90x the speed (1b)"
    assert card.whole()["buys"] == "a"
