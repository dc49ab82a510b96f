"""The technique of docs/guide/add-a-technique.md: one file, and everything follows from it.

In this process the file is found as any of its room is. Where a tool reads the package itself, as
the shared suite and mkdocs do, it is put into a copy of the repository, and nothing else changes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from snippets import ROOT, blocks_of
from typer.testing import CliRunner

from headrace.catalogue.pages import reference
from headrace.cli.app import app
from headrace.cli.catalogue import catalogue
from headrace.model.head import IGNORED, Vocabulary
from headrace.recipes import recipes

NEEDED = (
    "headrace",
    "tests",
    "docs",
    "benchmarks",
    "results",
    "mkdocs.yml",
    "pyproject.toml",
    "README.md",
)
"""What of the repository the suite and the documentation are made from."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository with the technique that the guide writes."""
    folder = tmp_path_factory.mktemp("copy")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name)  # with what is compiled already
        else:
            shutil.copy(ROOT / name, folder)
    (block,) = [b for b in blocks_of("docs/guide/add-a-technique.md") if b.file]
    (folder / "headrace/techniques/loss" / block.file).write_text(block.text)
    return folder


def _module(copy: Path, *arguments: str) -> str:
    """`python -m ARGUMENTS` on the copy; returns what it said."""
    ended = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


def _json(*arguments: str, code: int = 0) -> Any:
    ended = CliRunner().invoke(app, [*arguments, "--json"])
    assert ended.exit_code == code, ended.output
    return json.loads(ended.stdout)


def test_it_is_in_the_catalogue_with_its_card(max_z_loss: type[Any]) -> None:
    (row,) = [r for r in _json("list") if r["technique"] == "max_z_loss"]
    assert row["what"] == max_z_loss.line()
    card = _json("explain", "max_z_loss")
    assert card["composes"] == ["terms"]
    assert card["knobs"]["weight"]["default"] == 2e-4


def test_it_has_a_page(max_z_loss: type[Any]) -> None:
    pages = reference(catalogue(), recipes())
    assert "`techniques.max_z_loss.weight`" in pages["reference/loss/max_z_loss.md"]
    assert "loss/max_z_loss.md" in pages["reference/techniques.md"]


@pytest.mark.slow  # `make check` builds the pages of the technique's neighbours
def test_its_page_is_built_and_in_the_navigation(copy: Path, tmp_path: Path) -> None:
    _module(copy, "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path))
    page = (tmp_path / "reference/loss/max_z_loss.html").read_text()
    assert "techniques.max_z_loss.weight" in page and "arXiv 2309.10305" in page
    assert "loss/max_z_loss.html" in (tmp_path / "reference/techniques.html").read_text()
    assert "No row measures this technique alone yet" in page


def test_the_planner_counts_it(max_z_loss: type[Any], plan_file: Path) -> None:
    """Check that memory of logits grows from three to four tensors, and the peak by as much."""
    big_head = ("model.vocab_multiple=2048", "batch.tokens=1024")
    plain, held = (
        _json("explain", str(plan_file), *big_head, *more)
        for more in ((), ("--with", "max_z_loss"))
    )
    before, after = (told["memory_lines"]["logits"] for told in (plain, held))
    assert after == pytest.approx(4 / 3 * before)
    grown = held["peak_memory_bytes"] - plain["peak_memory_bytes"]
    assert grown == pytest.approx(after - before)


@pytest.mark.slow
def test_the_shared_suite_takes_it(copy: Path) -> None:
    """Check that the guide's technique passes every kind of contract test, and skips none."""
    kinds = ("trains", "equal", "predicts", "touches", "deletion")
    said = _module(
        copy,
        "pytest",
        *(f"tests/contract/test_{kind}.py" for kind in kinds),
        "-v",
        "--assert=plain",  # rewriting the assertions of a copy takes longer than the tests
        "-k",
        "max_z_loss or is_complete",
        "-m",
        "not slow and not gpu",
        "-p",
        "no:cacheprovider",
    )
    passed = {line.split("::")[0] for line in said.splitlines() if " PASSED" in line}
    assert passed >= {f"tests/contract/test_{kind}.py" for kind in kinds}
    assert "SKIPPED" not in said


@pytest.mark.slow
def test_it_is_equal_where_the_model_is_split(copy: Path) -> None:
    """Check that the guide's technique is equal under tensor, pipeline, context and FSDP splits."""
    splits = " or ".join(f"{kind}_parallel" for kind in ("tensor", "pipeline", "context"))
    said = _module(
        copy,
        "pytest",
        "tests/distributed/test_matrix.py",
        "-v",
        "-p",
        "no:cacheprovider",
        "-k",
        f"max_z_loss and ({splits} or fsdp)",
    )
    assert said.count(" PASSED") == 4


def test_a_wrong_knob_is_one_message(max_z_loss: type[Any], plan_file: Path) -> None:
    told = _json("train", str(plan_file), "techniques.max_z_loss.weight=2", code=2)
    assert "techniques.max_z_loss.weight = 2" in told["error"]
    told = _json("train", str(plan_file), "techniques.max_z_loss.weigh=2", code=2)
    assert "did you mean techniques.max_z_loss.weight" in told["error"]


def test_its_term_is_the_papers(max_z_loss: type[Any]) -> None:
    class Sockets:
        device = torch.device("cpu")

        def __init__(self) -> None:
            self.notes: dict[str, Any] = {}
            self.terms: list[Any] = []
            self.model = SimpleNamespace(head=object())

    build: Any = Sockets()
    max_z_loss(weight=0.3).apply(build)
    torch.manual_seed(0)
    logits, kept = torch.randn(4, 7).requires_grad_(), [0, 2, 3]
    term = build.terms[0](logits, torch.tensor([1, IGNORED, 3, 0]), None, Vocabulary())
    largest, places = logits.detach()[kept].max(-1)
    torch.testing.assert_close(term, 0.3 * (largest**2).sum())
    right = torch.zeros(4, 7)
    right[kept, places] = 2 * 0.3 * largest
    torch.testing.assert_close(torch.autograd.grad(term, logits)[0], right)
    added = max_z_loss().active(build).numbers["added_nats"]
    assert added == pytest.approx(term.item()) and added > 0.1
    build.model.head = None
    assert max_z_loss().active(build).active is None


def test_it_trains_predicts_and_proves_itself(
    max_z_loss: type[Any], plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plan_file.parent)
    big_head = ["model.vocab_multiple=2048", "batch.tokens=1024", "goal.steps=2"]
    sockets = _json("explain", str(plan_file), *big_head, "--with", "max_z_loss")["sockets"]
    assert sockets["terms"] == ["max_z_loss"]
    plain = _json("train", str(plan_file), *big_head)
    held = _json("train", str(plan_file), *big_head, "--with", "max_z_loss", "name=held")
    evidence = held["techniques"]["max_z_loss"]
    assert evidence["active"] and evidence["numbers"]["added_nats"] > 0
    grown = {
        key: held["peak_memory_bytes"][key] - plain["peak_memory_bytes"][key]
        for key in ("predicted", "allocated")
    }
    assert grown["allocated"] == pytest.approx(grown["predicted"], rel=0.05)
    resumed = _json(
        "train",
        str(plan_file),
        *big_head,
        "--with",
        "max_z_loss",
        "name=held",
        "goal.steps=3",
        "--resume",
    )
    assert resumed["steps"] == 3


def test_the_file_passes_the_same_check_as_all_code(tmp_path: Path) -> None:
    (block,) = [b for b in blocks_of("docs/guide/add-a-technique.md") if b.file]
    path = tmp_path / block.file
    path.write_text(block.text)
    for what in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *what, "--config", "pyproject.toml", str(path)]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stdout
