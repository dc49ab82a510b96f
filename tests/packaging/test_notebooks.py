"""The notebooks of examples/ are clean, and run in a kernel from top to bottom."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SHORT = {
    "first_run.ipynb": "steps = 6",
    "faster.ipynb": "minutes = 0.05",
}
"""What the cell of parameters says in a test, behind the text."""
SHOWS = {
    "first_run.ipynb": ("what differs from the defaults", "iframe sandbox", "The doctor", "steps"),
    "faster.ipynb": ("Memory at the peak", "tokens/s", "what differs from the defaults", "verdict"),
}
"""Notebook -> words of what its cells show."""


def cells(file: Path) -> list[dict[str, Any]]:
    """Return the cells of code of a notebook."""
    notebook = json.loads(file.read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebooks_are_known() -> None:
    assert {file.name for file in NOTEBOOKS} == {*SHORT} == {*SHOWS}


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_is_kept_without_outputs(file: Path) -> None:
    assert file.read_text().isascii()
    for cell in cells(file):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        ast.parse("".join(cell["source"]))
    assert cells(file)[0]["metadata"] == {"tags": ["parameters"]}


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_a_notebook_runs(file: Path, tmp_path: Path, corpus: Path) -> None:
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(file, as_version=4)
    parameters = next(cell for cell in notebook.cells if cell.cell_type == "code")
    parameters.source = f"text = {str(corpus)!r}\n{SHORT[file.name]}"
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    shown = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert not [words for words in SHOWS[file.name] if words not in shown]
    assert "Traceback" not in shown
