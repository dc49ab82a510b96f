"""Numbers on cards that say they are a receipt's are those of a row, and receipts come first."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.app import catalogue
from headrace.doctor.remedies import BOUGHT, Remedy, _costs
from headrace.doctor.words.answer import cost_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from readme_table import read_rows, shown

RECEIPTS = Path(__file__).parents[2] / "results" / "techniques.jsonl"
ROOMS = ("attention", "compile", "fusion", "loss", "memory", "precision")
NAMES = [name for name, kind in catalogue().techniques.items() if kind.room in ROOMS]
NAMES += ["loader_workers", "rope"]
BASES = {"compiled recipe": "recipe", "plain trunk": "trunk"}
HEAD = re.compile(r"(compiled recipe|plain trunk)[^:;]*?\b(with|without) it\b[^:;]*: ([^;]*)")
QUOTE = re.compile(
    r"(\d+\.\d\d)x(?: the (speed|memory|reserved memory))? \((1b|160m)((?:, [^)]*)?)\)"
)
LIKE = {
    "speed": ("speed_ratio", "run_ratio"), "memory": ("memory_ratio",),
    "reserved memory": ("reserved_ratio",),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Receipts on an H200 that the technique's page shows, and that hold a measurement."""
    read = read_rows(RECEIPTS)
    kinds = {row.get("measurement", "") for row in read}
    each = (shown([row for row in read if row.get("measurement", "") == kind]) for kind in kinds)
    whole = [row for found in each for _, row in found]
    return [row for row in whole if row.get("metrics") and row["hardware"] == "NVIDIA H200"]


def quotes(text: str) -> Iterator[tuple[str, bool, float, str, str, list[str]]]:
    """Base, whether it is left out there, value, what of, shape and knobs of what a text quotes."""
    for base, way, said in HEAD.findall(text):
        what = ""
        for value, named, shape, note in QUOTE.findall(said):
            what = named or what
            given = [word for word in re.split(r"[ ,]+", note) if "=" in word]
            yield BASES[base], way == "without", float(value), what, shape, given


@pytest.mark.parametrize("name", NAMES)
def test_what_a_card_quotes_is_a_rows(name: str, rows: list[dict[str, Any]]) -> None:
    card = catalogue().find(name).card
    for text in vars(card).values():
        found = [*quotes(text)]
        assert len(re.findall(r"\d\.\d\dx ", text)) == len(found), f"no head or no shape: {text}"
        for base, out, value, what, shape, given in found:
            wanted = [
                row["metrics"][like]["value"]
                for row in rows
                for like in LIKE[what]
                if (row["technique"], row["base"], row["shape"]) == (name, base, shape)
                and row["left_out"] == out
                and like in row["metrics"]
                and all(
                    any(g in w for w in (row["knobs"], *row.get("overrides", []))) for g in given
                )
            ]
            assert any(abs(value - one) <= 0.005 + 1e-9 for one in wanted), (text, value, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_card_leads_with_the_receipt_of_the_recipe(name: str, rows: list[dict[str, Any]]) -> None:
    """Published numbers come second (docs/design.md, Receipts)."""
    timed = [
        row for row in rows
        if row["technique"] == name and row["base"] == "recipe"
        and any(like in row["metrics"] for like in LIKE["speed"])
    ]  # fmt: skip
    card = catalogue().find(name).card
    leads = [text for text in (card.buys, card.costs) if text.startswith("H200, compiled recipe")]
    assert bool(timed) == bool(leads)
    slower = [row for row in timed if not row["left_out"]]
    if slower and all(row["metrics"].get("speed_ratio", {"value": 1})["value"] < 0.97
                      for row in slower):  # fmt: skip
        assert any(what == "speed" for _, _, _, what, *_ in quotes(card.costs)), "it is a cost"


@pytest.mark.parametrize("word", ["+", "-"])
@pytest.mark.parametrize("name", sorted(catalogue().techniques))
def test_the_doctor_tells_a_cost_that_was_not_measured_elsewhere(name: str, word: str) -> None:
    """Where a card has one beside its receipts: what a reader is told he takes for his run's."""
    said = _costs(catalogue(), f"{word}{name}")
    remedy = Remedy((word + name,), "", None, 0.0, "yes", said, "exact", "none")
    told, text = cost_of(remedy).removeprefix(BOUGHT), said.removeprefix(BOUGHT)
    assert told and told in text and told.count("(") == told.count(")")
    others = HEAD.sub("", text).replace("H200, ", "").strip("; ")
    assert not others or not HEAD.match(told.removeprefix("H200, "))


def test_a_receipt_is_a_cost_where_there_is_no_other() -> None:
    def of(costs: str) -> str:
        return cost_of(Remedy(("+a",), "", None, 0.0, "yes", costs, "exact", "none"))

    elsewhere = "H200, compiled recipe with it: 0.90x the speed (1b)"
    trunk = "plain trunk with it: 0.80x the speed (1b)"
    assert of(f"{elsewhere}; {trunk}; a disk (of 3; 4). It is slow") == "a disk (of 3; 4)"
    assert of(f"{elsewhere}; {trunk}") == elsewhere and of("") == ""
    assert of(f"{BOUGHT}{elsewhere}; all of it") == f"{BOUGHT}all of it"


def test_a_number_that_no_row_has_is_seen(rows: list[dict[str, Any]]) -> None:
    (quote,) = quotes("H200, compiled recipe with it: 0.31x the speed (1b)")
    assert quote == ("recipe", False, 0.31, "speed", "1b", [])
    two = [*quotes("plain trunk without it: 1.50x the memory (1b), 0.20x (160m, a=1); 0.9x")]
    assert [(out, value, what, given) for _, out, value, what, _, given in two] == [
        (True, 1.5, "memory", []), (True, 0.2, "memory", ["a=1"]),
    ]  # fmt: skip
    assert {row["base"] for row in rows} == {"recipe", "trunk"}
