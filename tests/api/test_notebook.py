"""A cell shows how far a training is, and what is shown holds no text that is not escaped."""

import sys
from types import ModuleType
from typing import Any

import pytest

from headrace.api import notebook
from headrace.core.inline import in_notebook, inline_page, inline_table, inline_text
from headrace.core.progress import Lines, Progress

WILD = "<script>alert('&')</script>"


class Handle:
    """What IPython's `display` returns: it keeps what a cell shows."""

    shown = ""

    def update(self, value: str) -> None:
        self.shown = value


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """Pretend that a notebook's kernel runs this process."""
    handle = Handle()
    ipython: Any = ModuleType("IPython")
    shown: Any = ModuleType("IPython.display")
    ipython.get_ipython = lambda: type("Shell", (), {"kernel": None})()
    shown.HTML = str
    shown.display = lambda value, display_id: handle
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return handle


def row(step: int, loss: float, **more: float) -> dict[str, Any]:
    """A row as training reports it."""
    return {"step": step, "loss": loss, "tokens_per_s": 1234.0, **more}


def test_a_cell_shows_bars_the_loss_and_notes(cell: Handle) -> None:
    assert in_notebook()
    with notebook.shown(True) as progress:
        progress.task("reading", 1, 2)
        for step in range(1, 9):
            progress.row(row(step, 5.0 - step / 10, val_bits_per_byte=2.5), 8, left_s=3.0)
        progress.note(WILD)
    assert progress.notes == [WILD]
    for words in ("reading", "8 of 8 steps", "loss 4.200", "1,234 tokens/s", "2.500 bits per byte"):
        assert words in cell.shown
    assert "<svg" in cell.shown and "from 4.900 to 4.200" in cell.shown
    assert "&lt;script&gt;" in cell.shown and "<script" not in cell.shown
    assert "left" not in cell.shown, "it has ended"


def test_a_long_run_keeps_its_whole_curve(cell: Handle) -> None:
    progress = notebook.NotebookProgress()
    for step in range(1, 1001):
        progress.row(row(step, 1 / step), None)
    assert 2 < len(progress._losses) <= notebook.POINTS
    assert progress._losses[0] == 1.0 and "1,000 steps" in progress.render()


def test_what_shows_progress_is_chosen_by_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    with notebook.shown(False) as quiet:
        assert type(quiet) is Progress
    with notebook.shown(True) as lines:
        assert isinstance(lines, Lines)
    with notebook.shown(own := Progress()) as given:
        assert given is own


def test_what_is_shown_is_escaped() -> None:
    for html in (
        inline_table(WILD, [WILD], [[WILD]]),
        inline_text(WILD, WILD),
        inline_page(f'{WILD}"'),
    ):
        assert "<script" not in html and "&lt;script&gt;" in html
    assert inline_page('a "b"').count('"') == 4
