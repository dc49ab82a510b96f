"""`extend` trains on longer rows, and compares what comes of it with what it began from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.extension import Extension, LengthReading, LossAtLength, lengths_of
from headrace.inference.needle import DEPTHS, NeedleCell
from headrace.report.extension import extension_page, length_rows

Call = Callable[..., Any]


def test_a_run_learns_longer_rows_and_says_what_it_lost(call: Call, workshop: Path) -> None:
    report = call(
        "extend", "demo", "--to", "128", "goal.steps=1", "--questions", "1", "name=stretched"
    )
    assert {"yarn", "lora", "length_mixing", "document_packing"} == {*report["techniques"]}
    assert all(one["active"] for one in report["techniques"].values())
    told, folder = report["extension"], workshop / "runs" / "stretched"
    assert (told["trained_length"], told["length"]) == (16, 128)
    before, after = told["before"], told["after"]
    assert [one["length"] for one in after["losses"]] == [16, 32, 64, 128]
    assert after["losses"][-1]["loss_nats"] == pytest.approx(report["val"][-1]["loss_nats"])
    short = before["losses"][0]["loss_nats"]
    assert told["change_percent"] == 100 * (after["losses"][0]["loss_nats"] / short - 1)
    assert (
        sum(one["targets"] for one in after["losses"][-1]["places"])
        == (after["losses"][-1]["targets"])
    )
    cells = [(cell["depth"], cell["questions"]) for cell in after["needles"]]
    assert cells == [(depth, 1) for depth in DEPTHS] * (len(cells) // 5) and cells
    assert json.loads((folder / "extension.json").read_text()) == told
    page = (folder / "extension.html").read_text()
    assert "16 to 128" in page and "heat" not in page and "color-mix" in page
    assert call("extend", "stretched", "--questions", "1")["extension"] == told, "measured again"


def test_a_plan_is_shown_with_the_lengths_of_the_model(call: Call) -> None:
    shown = call("extend", "demo", "--to", "40", "--full", "--dry-run")["plan"]
    assert shown["data"]["sequence_length"] == 40 and "lora" not in shown["techniques"]
    yarn = shown["techniques"]["yarn"]
    assert (yarn["factor"], yarn["original_length"]) == (2.5, 16)
    assert shown["techniques"]["length_mixing"]["lengths"] == [10, 0], "they divide the row"
    assert shown["batch"]["tokens"] % 40 == 0 and shown["batch"]["tokens"] >= 80
    adapted = call("extend", "demo", "--to", "40", "--dry-run", "goal.steps=20")["plan"]
    assert adapted["schedule"]["steps"] == 20 < shown["schedule"]["steps"]
    assert "lora" in adapted["techniques"]
    assert adapted["optimizer"]["lr"] != shown["optimizer"]["lr"]


def test_a_validation_text_of_short_documents_is_told(call: Call, tmp_path: Path) -> None:
    long, short = tmp_path / "long.txt", tmp_path / "short.jsonl"
    long.write_text("The mill stands by the river and grinds corn. " * 200)
    short.write_text(
        "".join(json.dumps({"text": f"The mill {n} grinds."}) + "\n" for n in range(60))
    )
    words = ("extend", "demo", "--to", "64", "--dry-run", f"data.sources={long}")
    longest = ("the longest document of the validation text has", "data.validation=PATH")
    told = call(*words, f"data.validation={short}")["told"]
    assert [note for note in told if all(part in note for part in longest)]
    other = tmp_path / "other.txt"
    other.write_text("The wheel turns in the water and grinds wheat. " * 200)
    told = call(*words, f"data.validation={other}")["told"]
    assert not [note for note in told if longest[0] in note]


def reading(*nats: float, found: int) -> LengthReading:
    """Return losses at 16, 32 ... tokens, with one cell of needles."""
    place = {"begin": 0, "end": 16, "targets": 9, "loss_nats": 1.0, "trained": True}
    losses = [LossAtLength(16 << n, one, one, 9, [place]) for n, one in enumerate(nats)]
    return LengthReading(losses, [NeedleCell(32, 0.5, found, 4)])


@pytest.mark.parametrize(
    ("short", "long", "kept", "gained"),
    [(4.019, 3.9, True, True), (4.021, 3.9, False, True), (3.9, 4.1, True, False)],
)
def test_short_rows_are_kept_within_half_a_percent(
    short: float, long: float, kept: bool, gained: bool
) -> None:
    before, after = reading(4.0, 9.0, found=1), reading(short, long, found=4)
    extension = Extension(Path("runs/x<y"), "base", 16, 32, before, after)
    assert (extension.is_kept, extension.gains_long) == (kept, gained)
    assert ("short rows are kept" in extension.verdict) is kept
    page = extension_page(extension)
    assert "x&lt;y" in page and "x<y" not in page
    assert "25%" in page and "100%" in page, "the needles that each of them finds"
    assert length_rows(extension)[1][1:3] == ["9.0000", f"{long:.4f}"]


def test_lengths_double_from_the_trained_one() -> None:
    assert lengths_of(16, 128) == [16, 32, 64, 128] and lengths_of(16, 40) == [16, 32, 40]
