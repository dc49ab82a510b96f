"""A recipe is held against the runs beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from headrace.doctor.recipe import FEWER_TOKENS, differences, slower_than_another, tokens_to
from headrace.doctor.words import describe

CURVE = [(100.0, 4.0), (200.0, 3.0), (300.0, 2.5), (400.0, 2.25)]
PLAN = {
    "data": {"sources": "text", "validation": 0.1},
    "eval": {"tokens": 4096, "every_steps": 4},
    "optimizer": {"lr": 1e-3},
    "techniques": {"torch_compile": {}},
}


def run(folder: Path, name: str, curve: list[tuple[float, float]], **other: Any) -> dict[str, Any]:
    """A folder with what is read of a run; the report comes back."""
    report = {
        "status": "done",
        "parameters": 1000,
        "tokenizer": {"sha256": "a"},
        "val": [{"tokens": tokens, "bits_per_byte": bits} for tokens, bits in curve],
    }
    plan = {**PLAN, **{key: other.pop(key) for key in [*other] if key in (*PLAN, "goal")}}
    report |= other
    (folder / name).mkdir(parents=True)
    (folder / name / "report.json").write_text(json.dumps(report))
    (folder / name / "plan.toml").write_text(tomli_w.dumps(plan))
    return report


def sooner(share: float) -> list[tuple[float, float]]:
    """Return the curve, with a share of its tokens."""
    return [(tokens * share, bits) for tokens, bits in CURVE]


def test_tokens_lie_between_two_validations() -> None:
    assert tokens_to(CURVE, 2.75) == 250 and tokens_to(CURVE, 5.0) == 100
    assert tokens_to(CURVE, 2.25) == 400 and tokens_to(CURVE, 2.0) is None
    assert tokens_to([], 2.0) is None


def test_another_run_came_as_far_with_fewer_tokens(tmp_path: Path) -> None:
    slow = [(tokens, bits + 0.5) for tokens, bits in CURVE]
    mine = run(tmp_path, "mine", slow)
    run(tmp_path, "better", CURVE, optimizer={"lr": 3e-3}, techniques={"muon": {}})
    run(tmp_path, "worse", slow)
    found = slower_than_another(tmp_path / "mine", mine)
    assert found is not None and found.bottleneck == "recipe"
    assert found.share == pytest.approx(1 - 250 / 400)
    facts = found.facts
    assert (facts["run"], facts["bits_per_byte"], facts["its_tokens"]) == ("better", 2.75, 250)
    words = "-torch_compile, +muon, optimizer.lr=0.003 in place of 0.001"
    assert facts["differences"] == words and words in describe(found).evidence
    better = json.loads((tmp_path / "better" / "report.json").read_text())
    assert slower_than_another(tmp_path / "better", better) is None


@pytest.mark.parametrize(
    "other",
    [
        {"parameters": 1100},
        {"tokenizer": {"sha256": "b"}},
        {"data": {"sources": "another", "validation": 0.1}},
        {"eval": {"tokens": 64}},
        {"val": [{"tokens": 9, "bits_per_byte": 2.0}]},
    ],
)
def test_what_cannot_be_compared_is_not(tmp_path: Path, other: dict[str, Any]) -> None:
    mine = run(tmp_path, "mine", [(tokens, bits + 0.5) for tokens, bits in CURVE])
    run(tmp_path, "other", CURVE, optimizer={"lr": 3e-3}, **other)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "report.json").write_text("{")
    (tmp_path / "broken" / "plan.toml").write_text("")
    assert slower_than_another(tmp_path / "mine", mine) is None
    run(tmp_path, "another", CURVE, optimizer={"lr": 3e-3})
    assert slower_than_another(tmp_path / "mine", mine) is not None
    assert slower_than_another(tmp_path / "mine", {**mine, "status": "interrupted"}) is None


def test_a_little_fewer_tokens_is_the_seeds(tmp_path: Path) -> None:
    mine = run(tmp_path, "mine", CURVE)
    less = 1 - FEWER_TOKENS / 2
    run(tmp_path, "other", sooner(less), optimizer={"lr": 3e-3})
    assert slower_than_another(tmp_path / "mine", mine) is None
    assert differences(PLAN, PLAN).endswith("another seed")


def test_a_seed_that_came_further_is_not_another_recipe(tmp_path: Path) -> None:
    mine = run(tmp_path, "mine", CURVE)
    text = {**PLAN["data"], "workers": 4, "directory": "elsewhere"}
    run(tmp_path, "seed", sooner(0.81), data=text)
    assert slower_than_another(tmp_path / "mine", mine) is None
    run(tmp_path, "knob", sooner(0.81), techniques={"torch_compile": {"scope": "block"}})
    found = slower_than_another(tmp_path / "mine", mine)
    assert found is None, "as much as seeds differ by"
    (tmp_path / "seed" / "report.json").unlink()
    found = slower_than_another(tmp_path / "mine", mine)
    assert found is not None
    assert "techniques.torch_compile.scope=block in place" in found.facts["differences"]


@pytest.mark.parametrize(
    ("siblings", "told"),
    [((0.75,), False), ((1.2, 0.9), False), ((0.97,), True), ((1.0, 1.03, 0.99), True)],
)
def test_another_recipe_has_to_beat_what_seeds_differ_by(
    tmp_path: Path, siblings: tuple[float, ...], told: bool
) -> None:
    """Siblings differ too: 1.2 and 0.9 are 25% apart, and 17% and 10% from the run."""
    mine = run(tmp_path, "mine", CURVE)
    run(tmp_path, "better", sooner(0.8), optimizer={"lr": 3e-3})
    for number, share in enumerate(siblings):
        run(tmp_path, f"seed-{number}", sooner(share))
    found = slower_than_another(tmp_path / "mine", mine)
    assert (found is not None) is told
    if found is not None:
        assert found.share == pytest.approx(0.2) and found.facts["run"] == "better"
        assert found.facts["repeats"] == len(siblings) + 1


def test_a_sibling_that_was_broken_off_or_ran_for_less_is_no_noise(tmp_path: Path) -> None:
    """Check that runs that were interrupted, or had a shorter goal, are not counted as siblings."""
    mine = run(tmp_path, "mine", CURVE)
    run(tmp_path, "better", sooner(0.8), optimizer={"lr": 3e-3})
    run(tmp_path, "broken", sooner(0.5), status="interrupted")
    run(tmp_path, "short", sooner(0.5), goal={"steps": 4})
    found = slower_than_another(tmp_path / "mine", mine)
    assert found is not None and found.facts["run"] == "better" and found.facts["repeats"] == 1
