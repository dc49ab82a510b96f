"""A disk that is full: one message, and nothing that was whole is lost or left half."""

from pathlib import Path
from typing import Any

import pytest

BYTES = 40_000
"""The largest file that may be written; the weights are larger."""
SMALL = Path(__file__).parents[1] / "small_files.py"


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
    zygote: Any, four_steps: Path, words: str, told: str, limit: int
) -> None:
    before = {p: p.read_bytes() for p in four_steps.rglob("*") if p.is_file() and p.name != ".lock"}
    call = [str(SMALL), "run", {"limit": limit, "argv": words.split()}]
    ended = zygote._start(four_steps, {}, call=call).wait()
    assert ended.code == 1 and "Traceback" not in ended.err, ended.err
    assert sum(line.startswith("error: ") for line in ended.err.splitlines()) == 1
    assert told in ended.err and "File too large" in ended.err and "try: " in ended.err
    after = {p: p.read_bytes() for p in four_steps.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after == before
    assert sorted(p.name for p in (four_steps / "runs").iterdir()) == ["tiny"]
