"""Each line of a recipe says why it stands: a receipt, a source, or that there is none."""

import json
from pathlib import Path

import pytest

from headrace.catalogue.reasons import RECEIPTS, format_reasons, read_learning, reasons
from headrace.plan.plan import Plan
from headrace.plan.technique import installed
from headrace.recipes import read_recipe, recipes

KNOWN = installed()
MUON = {
    "line": "muon",
    "change": "left out",
    "ratio": 1.9,
    "low": 1.8,
    "high": None,
    "verdict": "helps",
    "n": 3,
    "hardware": "GPU",
    "shape": "d512",
    "date": "2026-11-26",
    "commit": "abc1234",
}
NEVER = MUON | {"line": "optimizer.eps", "ratio": None, "low": None, "verdict": "helps"}


def test_a_receipt_comes_before_a_source_and_what_has_none_says_so(tmp_path: Path) -> None:
    file = tmp_path / "learning.json"
    file.write_text(json.dumps([MUON, NEVER]))
    plan = Plan.read(read_recipe("124m"), KNOWN)
    found = {one.line: one for one in reasons(plan, KNOWN, file)}
    assert found["muon"].evidence == "receipt"
    assert found["muon"].value["lr"] == 0.025
    assert "1.90x sooner with it (1.80x to no end; 3 seeds, d512, GPU" in found["muon"].text
    assert "not reached by one side" in found["optimizer.eps"].text
    assert found["torch_compile"].evidence == "card receipt"
    assert (found["qk_norm"].evidence, found["model.dim"].evidence) == ("source", "none")
    assert "model.qk_norm" not in found  # the technique's line stands for it
    text = "\n".join(format_reasons([*found.values()]))
    assert "no receipt; source: " + KNOWN.techniques["qk_norm"].card.source in text
    assert "  model.dim = 768\n    no receipt; it is: Features of the residual stream." in text


@pytest.mark.parametrize(
    ("set_to", "text"),
    [
        ("0.0", "helps: the target 1.25x sooner with it (1.11x to 1.43x;"),
        ("0.05", "hurts: the target 0.80x sooner with it (0.70x to 0.90x;"),
    ],
)
def test_a_key_has_the_receipt_of_its_own_value(tmp_path: Path, set_to: str, text: str) -> None:
    """A recipe with the value that another one was set to is the other side of that pair."""
    line = {"line": "techniques.muon.weight_decay", "change": "set", "set_to": set_to}
    ends = {"ratio": 1.25, "low": 1 / 0.9, "high": 1 / 0.7}
    file = tmp_path / "learning.json"
    file.write_text(json.dumps([MUON | line | ends]))
    plan = Plan.read(read_recipe("124m"), KNOWN)
    found = {one.line: one for one in reasons(plan, KNOWN, file)}
    assert found["techniques.muon.weight_decay"].text.startswith(text)


@pytest.mark.parametrize("name", recipes())
def test_every_line_of_a_recipe_has_a_reason(name: str) -> None:
    plan = Plan.read(read_recipe(name), KNOWN)
    found = reasons(plan, KNOWN)
    assert {*plan.techniques} <= {one.line for one in found}
    assert all(one.text for one in found)


def test_a_key_that_a_technique_would_set_has_its_source() -> None:
    plan = Plan.read(read_recipe("demo"), KNOWN)
    found = {one.line: one for one in reasons(plan, KNOWN)}
    assert found["model.qk_norm"].text.startswith("as qk_norm: ")


def test_committed_receipts_name_techniques_and_keys_that_exist() -> None:
    for line in read_learning(RECEIPTS):
        assert line in KNOWN.techniques or line.partition(".")[0] in Plan.model_fields
