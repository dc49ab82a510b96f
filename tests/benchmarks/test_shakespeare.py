"""The benchmark of tinyshakespeare is measured whole on a tiny text and plan."""

import math
import sys
from pathlib import Path

import pytest
import receipts
import shakespeare
from programs import rows

from headrace.cli.catalogue import catalogue
from headrace.costs.count import total_parameters
from headrace.plan.plan import Plan

PLAN = """
name = "tiny"
device = "cpu"
model = { dim = 16, layers = 1, heads = 2, ffn = 32 }
data = { vocab = 260, sequence_length = 16 }
goal = { steps = 1 }
batch = { tokens = 64 }
schedule = { kind = "constant", steps = 4 }
eval = { every_steps = 1000, tokens = 1000000 }
checkpoint = { every_steps = 0 }
"""
LINES = [f"Line {n} speaks of {n * n} things and of {n % 7} more.\n" for n in range(200)]


def test_a_row_has_the_nats_of_each_held_out_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tenth of the characters is evaluated whole; the horizon ends the run."""
    text = "".join(LINES)
    (tmp_path / "input.txt").write_text(text)
    (plan := tmp_path / "tiny.toml").write_text(PLAN)
    held: dict[str, str] = {}
    split = shakespeare.split

    def kept(whole: str, work: Path) -> list[str]:
        words = split(whole, work)
        held.update({path.name: path.read_text() for path in work.glob("data.*.txt")})
        return words

    monkeypatch.setattr(shakespeare, "split", kept)
    words = ["--data", tmp_path, "--plan", plan, "--cores", 1, "--results", tmp_path]
    monkeypatch.setattr(sys, "argv", ["shakespeare", *map(str, words)])
    shakespeare.main()
    (row,) = rows(tmp_path, "learning")
    assert "".join(held[f"data.{name}.txt"] for name in ("sources", "validation")) == text
    assert len(held["data.validation.txt"]) == len(text) - int(0.9 * len(text))
    assert (row["kind"], row["shape"]) == ("shakespeare", "tiny")
    assert (row["steps"], row["horizon_steps"]) == (4, 4)
    values = {name: metric["value"] for name, metric in row["metrics"].items()}
    assert values["tokens"] == 4 * 64 and len(row["cores"]) == 1
    assert values["nats_per_token"] == pytest.approx(math.log(320), rel=0.1)  # hardly trained
    assert 0 < values["nats_per_character"] <= values["nats_per_token"]


def test_the_plan_is_under_a_million_parameters() -> None:
    """A larger one is refused by the program, once it has been trained."""
    plan = Plan.read(receipts.plan_file("shakespeare").read_text(), catalogue())
    unit = plan.model.vocab_multiple
    rows = -(-plan.data.vocab // unit) * unit
    sized = plan.model.model_copy(update={"vocab": rows})
    assert total_parameters(sized) < shakespeare.MOST_PARAMETERS
    assert plan.horizon_steps and plan.eval.tokens >= 1_000_000
