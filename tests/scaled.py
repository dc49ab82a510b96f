"""The bytes of what is prepared, and workers in this process, to compare engines."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.data.prepared import Prepared
from headrace.data.scale.serve import PartFailure, attempt


def digests(prepared: Prepared) -> dict[str, str]:
    """sha256 of every file that was prepared, by name."""
    files = [path for path in sorted(prepared.directory.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(prepared.directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


class Here:
    """Makes parts in this process, the last first; `between` is called before each stage."""

    def __init__(self, between: Callable[[Path, str], Any] = lambda folder, stage: None) -> None:
        self.between, self.made = between, list[tuple[str, int]]()

    def run(
        self, folder: Path, stage: str, numbers: Sequence[int], done: Callable[[int], None]
    ) -> None:
        self.between(folder, stage)
        for number in reversed(numbers):
            if failure := attempt(str(folder), stage, number):
                raise PartFailure.model_validate_json(failure).error()
            self.made.append((stage.partition("-")[0], number))
            done(number)
