"""The technique of docs/guide/add-a-technique.md: one file, and everything follows from it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from snippets import ROOT, blocks_of
from typer.testing import CliRunner

from headrace.catalogue.pages import reference
from headrace.cli import app, catalogue
from headrace.model.head import IGNORED, Vocabulary
from headrace.recipes import recipes


def _json(*arguments: str, code: int = 0) -> Any:
    ended = CliRunner().invoke(app, [*arguments, "--json"])
    assert ended.exit_code == code, ended.output
    return json.loads(ended.stdout)


def test_it_is_in_the_catalogue_with_its_card(z_loss: type[Any]) -> None:
    (row,) = [r for r in _json("list") if r["technique"] == "z_loss"]
    assert row["what"] == z_loss.line()
    card = _json("explain", "z_loss")
    assert card["composes"] == ["terms"]
    assert card["knobs"]["weight"]["default"] == 1e-4


def test_it_has_a_page(z_loss: type[Any]) -> None:
    pages = reference(catalogue(), recipes())
    assert "`techniques.z_loss.weight`" in pages["reference/loss/z_loss.md"]
    assert "loss/z_loss.md" in pages["reference/techniques.md"]


def test_a_wrong_knob_is_one_message(z_loss: type[Any], plan_file: Path) -> None:
    told = _json("train", str(plan_file), "techniques.z_loss.weight=2", code=2)
    assert "techniques.z_loss.weight = 2" in told["error"]
    told = _json("train", str(plan_file), "techniques.z_loss.wait=2", code=2)
    assert "did you mean techniques.z_loss.weight" in told["error"]


def test_its_term_is_the_papers(z_loss: type[Any]) -> None:
    class Sockets:
        device = torch.device("cpu")

        def __init__(self) -> None:
            self.notes: dict[str, Any] = {}
            self.terms: list[Any] = []

    build: Any = Sockets()
    z_loss(weight=0.5).apply(build)
    logits = torch.randn(4, 7)
    targets = torch.tensor([1, IGNORED, 3, 0])
    found = build.terms[0](logits, targets, None, Vocabulary())
    expected = 0.5 * (logits[[0, 2, 3]].exp().sum(-1).log() ** 2).sum()
    torch.testing.assert_close(found, expected)
    assert z_loss().active(build).numbers["added_nats"] == pytest.approx(found.item())


def test_it_trains_predicts_and_proves_itself(
    z_loss: type[Any], plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plan_file.parent)
    big_head = ["model.vocab_multiple=2048", "batch.tokens=1024", "goal.steps=2"]
    sockets = _json("explain", str(plan_file), *big_head, "--with", "z_loss")["sockets"]
    assert sockets["terms"] == ["z_loss"]
    plain = _json("train", str(plan_file), *big_head)
    termed = _json("train", str(plan_file), *big_head, "--with", "z_loss", "name=termed")
    evidence = termed["techniques"]["z_loss"]
    assert evidence["active"] and evidence["numbers"]["added_nats"] > 0
    grown = {
        key: termed["peak_memory_bytes"][key] - plain["peak_memory_bytes"][key]
        for key in ("predicted", "allocated")
    }
    assert grown["allocated"] == pytest.approx(grown["predicted"], rel=0.05)
    resumed = _json("train", str(plan_file), *big_head, "--with", "z_loss", "name=termed",
                    "goal.steps=3", "--resume")  # fmt: skip
    assert resumed["steps"] == 3


def test_the_file_passes_the_same_check_as_all_code(tmp_path: Path) -> None:
    (block,) = [b for b in blocks_of("docs/guide/add-a-technique.md") if b.file]
    path = tmp_path / block.file
    path.write_text(block.text)
    for what in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *what, "--config", "pyproject.toml", str(path)]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stdout
