"""Plans of a CPU are predicted, written down and then measured, whatever cuts a command off."""

import json
import sys
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import foresight_cpu as cpu
import lists
import pytest
from probed_cpu import probed_cpu

ROOT = Path(__file__).parents[2]

LIST = """
[common]
device = "cpu"
goal = { steps = 4 }
[shapes]
least = { dim = 16, layers = 1, heads = 1, vocab = 64 }
[sets]
plain = ""
halves = "batch.micro_sequences=1"
[[choices]]
shape = "least"
length = 8
rows = 2
sets = ["plain", "halves"]
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the command and read what it wrote."""
    file, results = tmp_path / "list.toml", tmp_path / "results"
    file.write_text(LIST)
    monkeypatch.setattr(cpu, "rates", lambda seconds: probed_cpu())
    monkeypatch.setattr(cpu, "settled_s", lambda: 1.0)
    monkeypatch.setattr(cpu, "TIMED_S", 0.0)
    monkeypatch.setattr(cpu, "as_fast", lambda known_s: known_s > 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is put back

    def give(*words: str) -> list[dict[str, Any]]:
        named = ["--list", str(file), "--results", str(results), "--here"]
        monkeypatch.setattr(sys, "argv", ["foresight_cpu.py", *named, *words])
        cpu.main()
        return list(map(json.loads, (results / "plans.jsonl").read_text().splitlines()))

    return give


@pytest.mark.slow
def test_a_prediction_stands_before_its_outcome(
    rows: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # a command that is cut off after the first probe
        patch.setattr(cpu, "as_fast", lambda known_s: False)
        patch.setattr(cpu, "WAITS_S", 0.0)
        assert [r["kind"] for r in rows("--only", "least-8x2/plain")] == ["prediction"]
    assert "left: least-8x2/plain" in capsys.readouterr().out
    found = rows()
    assert [r["kind"] for r in found] == ["prediction", "outcome"] * 2
    assert rows() == found  # nothing is written twice
    for said, came in zip(found[::2], found[1::2], strict=True):
        assert said["id"] == came["id"] and said["plan_sha256"] == came["plan_sha256"]
        assert said["device"] == came["device"] == "cpu" and "threads" in came["hardware"]
        assert said["hardware"] == came["hardware"] and said["tier"] == "after_probes"
        assert came["n"] == cpu.LEAST and came["allocated_bytes"] > 0
        assert said["step_s"] > 0 and sum(said["parts_s"].values()) == pytest.approx(said["step_s"])
    assert "2 plans: steps " in capsys.readouterr().out


def test_the_list_is_long_and_wide_enough() -> None:
    every = list(lists.configurations([cpu.LIST]))
    plans = [one.plan for one in every]
    assert len({one.id for one in every}) == len(every) >= 30
    assert {plan.device for plan in plans} == {"cpu"}
    assert len({(p.model.dim, p.model.layers, p.model.vocab) for p in plans}) >= 8
    assert len({p.data.sequence_length for p in plans}) >= 4
    compiled = sum("torch_compile" in plan.techniques for plan in plans)
    assert 8 <= compiled <= len(plans) - 15


@pytest.mark.parametrize(
    ("looks", "counted"),
    [
        ([True] * 9, [3, 4, 5, 6, 7]),
        ([True, True, False, True, True, True, True, True], [3, 6, 7, 8, 9]),
        ([False, True] * 9, []),
    ],
    ids=["steady", "once not", "never long enough"],
)
def test_a_step_counts_where_the_processor_is_steady_before_and_after_it(
    monkeypatch: pytest.MonkeyPatch, looks: list[bool], counted: list[int]
) -> None:
    """Check that whether a step counts does not depend on what the step itself takes."""
    monkeypatch.setattr(cpu, "SOUGHT_S", 0.05)
    monkeypatch.setattr(cpu, "GROUP_S", 0.0)
    monkeypatch.setattr(cpu, "TIMED_S", 0.0)
    steps, seen = iter(range(1, 10**9)), iter(chain(looks, repeat(False)))
    assert cpu.counted(lambda: float(next(steps)), lambda: next(seen)) == counted


def test_after_a_probe_in_an_unsteady_minute_nothing_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readings = iter([1.0, 1.5])
    monkeypatch.setattr(cpu, "settled_s", lambda: next(readings))
    monkeypatch.setattr(cpu, "rates", lambda seconds: probed_cpu())
    one = next(lists.configurations([cpu.LIST]))
    assert cpu.foretell(one, tmp_path, 0.0) is None and not [*tmp_path.iterdir()]
    assert "1.0000 s before the probe and 1.5000 s after" in capsys.readouterr().out


def test_the_fixed_work_is_a_step_that_learns() -> None:
    before = cpu.reference_s()
    assert before > 0
    assert cpu._small_step() is cpu._small_step()
    assert cpu.as_fast(1e-9) is False
