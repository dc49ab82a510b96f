"""What a row says of the command that made it."""

from pathlib import Path

import pytest
import receipts


def test_a_command_names_no_folder_of_one_machine() -> None:
    words = "benchmarks/x.py search --data /a/b --runs 3 --work /tmp/w --results /tmp/r --seeds 2"
    said = receipts.command(words.split())
    assert said == "python benchmarks/x.py search --data DIR --runs 3 --seeds 2"
    assert receipts.command(["x.py", "--novels", "/a/b"]) == "python x.py --novels DIR"


def test_a_folder_of_another_command_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    for _ in range(2):
        receipts.claim(folder, steps=3, text=None)
    (folder / "model").write_text("")
    receipts.claim(folder, steps=3, text=None)
    with pytest.raises(SystemExit, match="made with other steps"):
        receipts.claim(folder, steps=4, text=None)
    (folder / receipts.MADE_OF).unlink()
    with pytest.raises(SystemExit, match="made with other steps, text"):
        receipts.claim(folder, steps=3, text="x")
