"""A disk that is full: one message, and nothing that was whole is lost or left half."""

from pathlib import Path
from typing import Any

import pytest
from tiny import PLAN

BYTES = 40_000
"""The largest file that may be written; the weights are larger."""
SMALL = Path(__file__).parents[1] / "small_files.py"


@pytest.fixture(scope="module")
def home(
    zygote: Any, tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path
) -> Path:
    """A folder with tiny.toml and a run of four steps."""
    cwd = tmp_path_factory.mktemp("full")
    (cwd / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    words = ("goal.steps=4", "checkpoint.every_steps=2", "guard=false")
    ended = zygote.run(cwd, "train", "tiny.toml", *words)
    assert ended.code == 0, ended.err
    return cwd


@pytest.mark.parametrize(
    ("words", "told", "limit"),
    [
        ("export tiny --to hf --output out", "out could not be written", BYTES),
        (
            "train tiny.toml --resume --checkpoint step-2 optimizer.lr=2e-3",
            "a new run from step-2 cannot be written",
            BYTES,
        ),
        ("report tiny", "report.html cannot be written", 4_000),
    ],
    ids=["export", "fork", "report"],
)
def test_a_full_disk_is_one_message(
    zygote: Any, home: Path, words: str, told: str, limit: int
) -> None:
    before = {p: p.read_bytes() for p in home.rglob("*") if p.is_file() and p.name != ".lock"}
    call = [str(SMALL), "run", {"limit": limit, "argv": words.split()}]
    ended = zygote._start(home, {}, call=call).wait()
    assert ended.code == 1 and "Traceback" not in ended.err, ended.err
    assert sum(line.startswith("error: ") for line in ended.err.splitlines()) == 1
    assert told in ended.err and "File too large" in ended.err and "try: " in ended.err
    after = {p: p.read_bytes() for p in home.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == before
    assert sorted(p.name for p in (home / "runs").iterdir()) == ["tiny"]
