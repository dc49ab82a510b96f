"""The tiny plan that the programs which measure are given."""

from pathlib import Path

import pytest
from tiny import READ

CHUNKED = "[techniques.chunked_cross_entropy]\nchunk_tokens = 8\n"
PLAN = READ + "[techniques.selective_checkpoint]\n" + CHUNKED


@pytest.fixture
def plan(tmp_path: Path, corpus: Path, prepared_folder: Path) -> Path:
    """A plan file whose recipe has two techniques."""
    path = tmp_path / "tiny.toml"
    path.write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    return path
