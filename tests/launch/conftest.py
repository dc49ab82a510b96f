"""Provide commands that stand for those of engines."""

from pathlib import Path

import pytest
from launched import tool


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of commands that are found first, in a new folder that is entered.

    Slurm numbers jobs from 1 on, and all of them have ended.
    """
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    tool(folder, "sbatch", "echo x >>count; wc -l <count")
    tool(folder, "squeue", 'echo "COMPLETED None"')
    tool(folder, "scancel", 'echo "$@" >stopped')
    return folder
