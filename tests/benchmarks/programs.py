"""How a program that measures is run here, and the receipts that it writes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest


def run(patch: pytest.MonkeyPatch, program: Any, *words: Any) -> None:
    """The program in this process."""
    patch.setattr(sys, "argv", ["program", *map(str, words), "--here"])
    program.main()


def rows(folder: Path, topic: str) -> list[dict[str, Any]]:
    """Receipts."""
    return [json.loads(line) for line in (folder / f"{topic}.jsonl").read_text().splitlines()]
