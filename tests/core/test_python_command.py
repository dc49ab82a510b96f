"""A script of a remedy runs by the Python that has what Headrace needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.files import python


def test_an_activated_environment_needs_no_path(tmp_path: Path) -> None:
    assert python("1", "a b") == "python -c 1 a b"


@pytest.mark.parametrize("other", [True, False], ids=["another python", "no python"])
def test_without_activation_the_path_is_told(
    other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the command runs this Python where PATH has one without pyarrow, or none."""
    if other:
        (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join((str(tmp_path), "/usr/bin", "/bin")))
    command = python("import sys, pyarrow; print(sys.executable, sys.argv[1])", "'it'")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [sys.executable, "it"]
