"""What `data mix` counts before a run is what the run then reads, and what `plan` says of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import write_corpus

MIXED = (
    "data.mixture.stages=[{until=0.1,weights=[1,3]},{temperature=2}]",
    "data.mixture.max_tokens=[0,160]",
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("two")
    corpora = [write_corpus(folder / name, seed=seed) for seed, name in enumerate("ab")]
    return 'data.sources=["{}","{}"]'.format(*corpora)


def test_mix_counts_what_a_run_reads(
    call: Callable[..., Any], tiny_demo: list[str], two: str
) -> None:
    told = call("data", "mix", *tiny_demo, two, *MIXED)
    planned = call("plan", *tiny_demo, two, *MIXED)["mixture"]
    ran = call("train", *tiny_demo, two, *MIXED, "name=mixed")
    read = ran["data"]["mixture"]
    assert planned["sources"] == read["sources"] and planned["stages"] == read["stages"]
    assert [one["rows"] for one in told["sources"]] == [one["rows"] for one in read["sources"]]
    assert told["tokens"] == ran["tokens"] == 6 * 128 and told["stage_begins_tokens"] == [0, 512]
    assert told["sources"][1]["tokens"] == 160 and told["exact"] is True
    assert [one["stage"] for one in told["stages"]] == [0, 0, 1, 1]
    assert all(0 < one["worth_tokens"] <= one["tokens"] for one in told["sources"])


def test_a_person_is_told_of_what_repeats(
    say: Callable[..., tuple[str, str]], tiny_demo: list[str], two: str
) -> None:
    out, _ = say("data", "mix", *tiny_demo, two, "goal.steps=9000", "schedule.steps=9000")
    assert "epochs" in out and "arXiv 2305.16264" in out and "data.mixture.max_epochs=4" in out
    _, notes = say("train", *tiny_demo, two, *MIXED, "name=staged")
    assert "mixture of 768 tokens" in notes
    page = Path("runs/staged/report.html").read_text()
    assert "Mixture" in page and "Epochs" in page
