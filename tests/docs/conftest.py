"""A folder with what the pages talk about, and the technique that one of them writes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from snippets import blocks_of

import headrace.techniques.loss
from headrace.cli.catalogue import catalogue
from headrace.data.tokenizer import train_tokenizer


@pytest.fixture
def world(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Move into a folder that has the texts under the names that the pages use for them."""
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    for name in ("notes", "held-out"):
        (tmp_path / name).mkdir()
    for number, text in enumerate(texts):
        folder = "held-out" if number < 2 else "notes"
        (tmp_path / folder / f"{number}.{'md' if number % 2 else 'txt'}").write_text(text)
    rows = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    (tmp_path / "articles.jsonl").write_text(rows)
    pq.write_table(pa.table({"text": texts}), tmp_path / "articles.parquet")
    train_tokenizer(texts, vocab=300).save(tmp_path / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def max_z_loss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Any]]:
    """The technique of add-a-technique.md, found as any file of its room is."""
    folder = tmp_path_factory.mktemp("room")
    (block,) = [b for b in blocks_of("docs/guide/add-a-technique.md") if b.file]
    (folder / block.file).write_text(block.text)
    room = headrace.techniques.loss
    room.__path__.append(str(folder))
    try:
        yield catalogue().techniques["max_z_loss"]
    finally:
        room.__path__.remove(str(folder))
        sys.modules.pop("headrace.techniques.loss.max_z_loss", None)
        vars(room).pop("max_z_loss", None)
