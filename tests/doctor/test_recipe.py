"""A recipe is held against the runs beside it."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.doctor.recipe import FEWER_TOKENS, differences, slower_than_another, tokens_to

CURVE = [(100.0, 4.0), (200.0, 3.0), (300.0, 2.5), (400.0, 2.25)]
PLAN = {
    "data": {"sources": "text", "validation": 0.1}, "eval": {"tokens": 4096, "every_steps": 4},
    "optimizer": {"lr": 1e-3}, "techniques": {"torch_compile": {}},
}  # fmt: skip


def run(folder: Path, name: str, curve: list[tuple[float, float]], **other: Any) -> dict[str, Any]:
    """A folder with what is read of a run; the report comes back."""
    report = {
        "status": "done", "parameters": 1000, "tokenizer": {"sha256": "a"},
        "val": [{"tokens": tokens, "bits_per_byte": bits} for tokens, bits in curve],
    }  # fmt: skip
    plan = {**PLAN, **{key: other.pop(key) for key in [*other] if key in PLAN}}
    report |= other
    (folder / name).mkdir(parents=True)
    (folder / name / "report.json").write_text(json.dumps(report))
    lines = []
    for table, keys in plan.items():
        for key, value in keys.items():
            told = "{}" if value == {} else json.dumps(value)
            lines.append(f"{table}.{key} = {told}")
    (folder / name / "plan.toml").write_text("\n".join(lines))
    return report


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
    assert "better reached 2.750 bits per byte after 250" in found.evidence
    assert "-torch_compile, +muon, optimizer.lr=0.003 in place of 0.001" in found.evidence
    better = json.loads((tmp_path / "better" / "report.json").read_text())
    assert slower_than_another(tmp_path / "better", better) is None


@pytest.mark.parametrize(
    "other",
    [
        {"parameters": 1100}, {"tokenizer": {"sha256": "b"}},
        {"data": {"sources": "another", "validation": 0.1}}, {"eval": {"tokens": 64}},
        {"val": [{"tokens": 9, "bits_per_byte": 2.0}]},
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_not(tmp_path: Path, other: dict[str, Any]) -> None:
    mine = run(tmp_path, "mine", [(tokens, bits + 0.5) for tokens, bits in CURVE])
    run(tmp_path, "other", CURVE, **other)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "report.json").write_text("{")
    (tmp_path / "broken" / "plan.toml").write_text("")
    assert slower_than_another(tmp_path / "mine", mine) is None
    run(tmp_path, "same", CURVE)
    assert slower_than_another(tmp_path / "mine", mine) is not None
    assert slower_than_another(tmp_path / "mine", {**mine, "status": "interrupted"}) is None


def test_a_little_fewer_tokens_is_the_seeds(tmp_path: Path) -> None:
    mine = run(tmp_path, "mine", CURVE)
    less = 1 - FEWER_TOKENS / 2
    run(tmp_path, "other", [(tokens * less, bits) for tokens, bits in CURVE])
    assert slower_than_another(tmp_path / "mine", mine) is None
    assert differences(PLAN, PLAN) == "the same recipe: another seed"
