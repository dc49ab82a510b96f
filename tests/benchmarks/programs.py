"""How a program that measures is run here, and the receipts that it writes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest


def run(patch: pytest.MonkeyPatch, program: Any, *words: Any) -> None:
    """Run the program with these arguments in this process."""
    patch.setattr(sys, "argv", ["program", *map(str, words), "--here"])
    program.main()


def rows(folder: Path, topic: str) -> list[dict[str, Any]]:
    """Return the receipts of a topic that a program wrote into `folder`."""
    return [json.loads(line) for line in (folder / f"{topic}.jsonl").read_text().splitlines()]
