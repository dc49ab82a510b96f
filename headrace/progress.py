"""How a run tells how it goes. The command line draws bars; a test or another rank stays silent."""

from typing import Any


class Progress:
    """Says nothing; the base of those that do."""

    def task(self, description: str, done: float, total: float | None) -> None:
        """A piece of long work stands at `done` of `total`."""

    def note(self, text: str) -> None:
        """One line worth reading."""

    def row(self, row: dict[str, Any], total_steps: int | None) -> None:
        """A step is complete."""

    def close(self) -> None:
        """No more will be told."""
