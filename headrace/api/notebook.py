"""Show the progress of a training inside of a Jupyter notebook."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from typing import Any

from headrace.cli.terminal import make_progress
from headrace.core.inline import in_notebook
from headrace.core.progress import Progress
from headrace.core.units import format_seconds

EVERY_S = 0.25
"""Seconds between two updates of what a notebook shows."""
NOTES = 20
"""Most notes that stand below the bars; the newest are shown."""
WIDTH, HEIGHT, POINTS = 320, 60, 200
"""Size in pixels of the picture of the loss, and its most points."""


class NotebookProgress(Progress):
    """Show bars, the loss as a line, and notes in the output of one cell, and update them."""

    def __init__(self) -> None:
        super().__init__()
        shown: Any = import_module("IPython.display")  # which a kernel has loaded
        self._html = shown.HTML
        self._handle = shown.display(shown.HTML(""), display_id=True)
        self._began_s = time.monotonic()
        self._shown_s = 0.0
        self._tasks: dict[str, tuple[float, float | None]] = {}
        self._facts: dict[str, str] = {}
        self._losses: list[float] = []

    def task(self, description: str, done: float, total: float | None) -> None:
        """Draw or advance the bar of this description."""
        self._tasks[description] = (done, total)
        self._show()

    def note(self, text: str) -> None:
        """Show a line below the bars."""
        super().note(text)
        self._show(now=True)

    def row(self, row: dict[str, Any], total_steps: int | None, **facts: float | None) -> None:
        """Advance the bar of training, with loss, speed and validation beside it."""
        self._losses.append(float(row["loss"]))
        if len(self._losses) > POINTS:  # every second one, so that the whole run stays in view
            self._losses = self._losses[::2]
        self._facts["loss"] = f"loss {row['loss']:.3f}"
        self._facts["speed"] = f"{row['tokens_per_s']:,.0f} tokens/s"
        if "val_bits_per_byte" in row:
            self._facts["val"] = f"{row['val_bits_per_byte']:.3f} bits per byte"
        if (left_s := facts.get("left_s")) is not None:
            self._facts["left"] = f"{format_seconds(left_s)} left"
        self.task("training", row["step"], total_steps)

    def close(self) -> None:
        """Show how it ended."""
        self._facts.pop("left", None)
        self._show(now=True)

    def _show(self, *, now: bool = False) -> None:
        if not now and time.monotonic() - self._shown_s < EVERY_S:
            return
        self._shown_s = time.monotonic()
        self._handle.update(self._html(self.render()))

    def render(self) -> str:
        """Return what the cell shows, as HTML."""
        lines = []
        for name, (done, total) in self._tasks.items():
            bar = f'<progress value="{done:g}" max="{total:g}"></progress>' if total else ""
            facts = "  ".join(self._facts.values()) if name == "training" else ""
            count = f"{done:,.0f}" if name == "training" else ""
            count += f" of {total:,.0f} steps" if count and total else " steps" if count else ""
            lines.append(f"<div>{escape(name)} {bar} {escape(count)} {escape(facts)}</div>")
        if len(self._losses) > 1:
            lines.append(_line_of(self._losses))
        lines += [f"<div><small>{escape(note)}</small></div>" for note in self.notes[-NOTES:]]
        return "".join(lines)


def _line_of(losses: list[float]) -> str:
    """Return the losses of a run as a small picture: an SVG without a scale."""
    low, high = min(losses), max(losses)
    room = (high - low) or 1.0
    step = WIDTH / (len(losses) - 1)
    points = " ".join(
        f"{number * step:.1f},{HEIGHT - 2 - (loss - low) / room * (HEIGHT - 4):.1f}"
        for number, loss in enumerate(losses)
    )
    label = f"loss, from {losses[0]:.3f} to {losses[-1]:.3f}"
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}">'
        f'<polyline points="{points}" fill="none" stroke="currentColor"/></svg>'
    )


@contextmanager
def shown(progress: Progress | bool) -> Iterator[Progress]:
    """Yield what shows the progress of a call, and close it at the end.

    Args:
        progress: True shows it in the cell of a notebook, as bars in a terminal, and as lines in a
            log; False shows nothing. An object is used as it is, and is not closed.
    """
    if isinstance(progress, Progress):
        yield progress
        return
    made = Progress()
    if progress:
        made = NotebookProgress() if in_notebook() else make_progress(as_json=False)
    try:
        yield made
    finally:
        made.close()
