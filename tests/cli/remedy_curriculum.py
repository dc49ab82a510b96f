"""Scores of a curriculum that cannot be made, or are damaged: each remedy mends them."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from remedy_inputs import GOOD, MAKE
from shell import Case
from shell import run as run_command

from headrace.data.quality.scores import ScoreRecord

SHORT = """
goal = { minutes = 1 }
schedule = { kind = "constant" }
data = { sources = "x.jsonl", vocab = 300 }
"""
OWN = "data ingest own.toml data.directory=prepared"
UNTIL = "data.curriculum.until=3"


def plan(_: Path) -> None:
    """Write a plan without an end, and its text."""
    Path("own.toml").write_text(SHORT)
    Path("x.jsonl").write_text(GOOD)


def scored(change: Callable[[Path], Any], *keys: str) -> MAKE:
    """Prepare data with scores, and change what lies in their folder."""

    def make(run: Path) -> None:
        plan(run)
        with_numbers(run)
        assert not run_command([*OWN.split(), UNTIL, *keys]).code
        (folder,) = Path("prepared").glob("*/scores-*")
        change(folder)

    return make


def with_numbers(run: Path, value: float = 1.0) -> None:
    """Write text whose rows hold a number."""
    plan(run)
    rows = [{**json.loads(line), "x": value} for line in GOOD.splitlines()]
    Path("x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sealed(folder: Path) -> None:
    """Say that the scores are those of other documents, in a record that is whole."""
    file = folder / "scores.json"
    record = ScoreRecord.model_validate_json(file.read_bytes()).model_copy(update={"data": ("0",)})
    file.write_text(record.model_copy(update={"seal": record.digest}).model_dump_json())


def renamed(folder: Path) -> None:
    """Change a field of the record."""
    file = folder / "scores.json"
    file.write_text(file.read_text().replace("zlib", "zip"))


def cannot(number: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Let scores not be written in the folder `full`."""
    from headrace.data import scored as module

    plain = module.save_scores

    def save(folder: Path, *given: Any) -> None:
        if "full" in str(folder):
            raise OSError(number, os.strerror(number))
        plain(folder, *given)

    return lambda patch: patch.setattr(module, "save_scores", save)


def two(_: Path) -> None:
    """Write two sources."""
    Path("x.jsonl").write_text(GOOD)
    Path("y.jsonl").write_text(GOOD)


CURRICULUM = {
    "assemble/ordered:_check_epochs#1": Case(
        "train {tiny} goal.steps=4 data.sources=x.jsonl data.mixture.max_epochs=1 "
        "data.curriculum.pacing=step "
        "data.curriculum.start=0.05 data.curriculum.until=4",
        lambda _: Path("x.jsonl").write_text(GOOD),
    ),
    "cli/data_mix:_refuse_one_pool#1": Case(
        f'data mix own.toml \'data.sources=["x.jsonl","y.jsonl"]\' goal.steps=9 {UNTIL} '
        "data.sequence_length=16",
        lambda run: (plan(run), two(run)),
    ),
    "data/number_column:NumberColumn.number#1": Case(
        f"{OWN} {UNTIL} data.curriculum.score=column:x", plan
    ),
    "data/number_column:NumberColumn.number#1 other": Case(
        f"{OWN} {UNTIL} data.curriculum.score=column:text", with_numbers
    ),
    "data/scored:_save#1": Case(
        f"{OWN} {UNTIL} data.curriculum.score=column:x", lambda run: with_numbers(run, 1e300)
    ),
    "data/scored:open_shares#1": Case(f"{OWN} data.curriculum.score=length", plan),
    "data/scored:_gone#1": Case(
        f"{OWN} {UNTIL} data.curriculum.score=column:x",
        scored(shutil.rmtree, "data.curriculum.score=column:x"),
        whole=True,
    ),
    "data/scored:with_scores#1": Case(
        "data ingest own.toml data.directory=full data.curriculum.until=3",
        plan,
        fake=cannot(errno.EACCES),
        fills={"FOLDER that can be written, on a local disk": "prepared"},
    ),
    "data/scored:with_scores#2": Case(
        "data ingest own.toml data.directory=full data.curriculum.until=3",
        plan,
        fake=cannot(errno.ENOSPC),
        fills={"FOLDER on another disk": "prepared"},
        prose={"free some space": "no command"},
    ),
    "data/quality/scores:open_scores#1": Case(
        f"{OWN} {UNTIL}", scored(lambda f: (f / "scores.json").write_text("{")), whole=True
    ),
    "data/quality/scores:open_scores#2": Case(f"{OWN} {UNTIL}", scored(renamed), whole=True),
    "data/quality/scores:open_scores#3": Case(f"{OWN} {UNTIL}", scored(sealed), whole=True),
    "data/quality/scores:open_scores#4": Case(
        f"{OWN} {UNTIL}", scored(lambda f: (f / "train-00.bin").write_bytes(b"")), whole=True
    ),
    "inference/document_loss:losses#1": Case(
        f"{OWN} {UNTIL} data.curriculum.score=loss:runs/demo", plan
    ),
}
