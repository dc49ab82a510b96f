"""Inputs that people really have: each is read, or counted and told, or is one clear error."""

import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.core.errors import ConfigError
from headrace.data import formats
from headrace.data.columns import BATCH_BYTES
from headrace.data.fields import TextReading
from headrace.data.ingest import prepare
from headrace.data.left_out import LeftOutTally
from headrace.data.sources import read_documents
from headrace.data.tokenizer import END_OF_TEXT
from headrace.plan.data_config import DataConfig
from headrace.plan.plan import Plan

MakePlan = Callable[..., Plan]
TITLED = TextReading(template="{meta.title}: {text}")


def read(source: Path, reading: TextReading | None = None) -> tuple[list[str], dict[str, int]]:
    """Return the texts of a source, and how many were left out or changed by each reason."""
    tally = LeftOutTally()
    texts = [d.text for d in read_documents(str(source), reading=reading, left_out=tally)]
    return texts, {one.reason.value: one.count for one in tally.records}


def refused(source: Path, reading: TextReading | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(source, reading)
    assert caught.value.remedy.text
    return caught.value


def written(folder: Path, name: str, rows: list[Any]) -> Path:
    """Write rows in the form that a name's ending asks for."""
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_several_fields_are_joined(tmp_path: Path, name: str) -> None:
    rows = [
        {"text": "one", "meta": {"title": "A", "year": 7}},
        {"text": "two", "meta": {"title": None, "year": 8}},
        {"text": None, "meta": {"title": None, "year": 9}},
    ]
    path = written(tmp_path, name, rows)
    assert read(path, TITLED) == (["A: one", ": two"], {"null_text": 1})
    both = TextReading(template="{{{text}}} {meta.year} {text}")
    assert read(path, both)[0] == ["{one} 7 one", "{two} 8 two", "{} 9 "]
    error = refused(path, TextReading(template="{meta.titel}: {text}"))
    assert "no field 'meta.titel'" in error.message
    assert error.remedy.text == "data.text_template='{meta.title}: {text}'"


def test_columns_of_a_table_are_joined(tmp_path: Path) -> None:
    (path := tmp_path / "a.csv").write_text('title,text\nA,"one, two"\n,three\n')
    assert read(path, TextReading(template="{title}\n{text}"))[0] == ["A\none, two", "\nthree"]
    assert "no field 'body'" in refused(path, TextReading(template="{title} {body}")).message


def test_nothing_of_a_template_is_executed(tmp_path: Path) -> None:
    for template in ("no field", "{text", "{}", "{text!r}", "{text:>9}", "{text[0]}"):
        with pytest.raises(ValueError, match="text_template"):
            DataConfig(text_template=template)
    with pytest.raises(ValueError, match=r"data.text_key = 'body'"):
        DataConfig(text_template="{title}", text_key="body")
    path = written(tmp_path, "a.jsonl", [{"text": "{text.__class__} {other}"}])
    assert read(path, TextReading(template="<{text}>"))[0] == ["<{text.__class__} {other}>"]
    assert (
        "no field 'text.__class__'"
        in refused(path, TextReading(template="{text.__class__}")).message
    )


def test_null_and_missing_text(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"text": None}, {"text": ""}]
    for name in ("a.jsonl", "a.json", "a.parquet"):
        texts, left_out = read(written(tmp_path, name, rows))
        assert (texts, left_out) == (["one"], {"null_text": 1, "empty_text": 1})
    path = written(tmp_path, "a.jsonl", [*rows, {"id": 3}])
    assert "a.jsonl:4 has no field 'text'" in refused(path).message
    mixed = written(tmp_path, "a.jsonl", [{"text": "one"}, {"text": 7}, {"text": ["a"]}])
    assert "holds int, not text" in refused(mixed).message


COLUMNS = {
    "dictionary": pa.array(["one", "two", "one", None]).dictionary_encode(),
    "large": pa.array(["one", "two", "one", None], pa.large_string()),
    "view": pa.array(["one", "two", "one", None], pa.string_view()),
    "bytes": pa.array([b"one", b"two", b"one", None], pa.large_binary()),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_every_kind_of_text(tmp_path: Path, kind: str) -> None:
    pq.write_table(pa.table({"text": COLUMNS[kind]}), path := tmp_path / "a.parquet")
    assert read(path) == (["one", "two", "one"], {"null_text": 1})


def test_columns_inside_of_others(tmp_path: Path) -> None:
    rows = [{"page": {"body": {"raw": "one"}, "tags": [{"name": "x"}]}}, {"page": None}]
    path = written(tmp_path, "a.parquet", rows)
    assert read(path, TextReading("page.body.raw")) == (["one"], {"null_text": 1})
    assert read(path, TextReading("page.tags.0.name"))[0] == ["x"]


def test_long_texts_of_a_table_are_read_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{number} " + "x" * (BATCH_BYTES // 32) for number in range(100)]
    pq.write_table(pa.table({"text": rows}), path := tmp_path / "a.parquet", compression="NONE")
    sizes, whole = [], pq.ParquetFile.iter_batches

    def batches(self: Any, *given: Any, **named: Any) -> Any:
        for batch in whole(self, *given, **named):
            sizes.append(batch.nbytes)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", batches)
    assert read(path)[0] == rows
    assert max(sizes) <= 1.1 * BATCH_BYTES and len(sizes) > 2


def test_marks_and_line_ends(tmp_path: Path) -> None:
    line = json.dumps({"text": "one\r\ntwo"})
    for name, content, texts in (
        ("a.txt", "\ufeffone\r\ntwo", ["one\r\ntwo"]),
        ("a.jsonl", f"\ufeff{line}\r\n{line}\r\n", ["one\r\ntwo"] * 2),
        ("a.csv", "\ufefftext,n\r\none,1\r\n", ["one"]),
        ("a.json", f"\ufeff[{line},\r\n{line}]", ["one\r\ntwo"] * 2),
    ):
        (path := tmp_path / name).write_bytes(content.encode())
        assert read(path) == (texts, {}), name


def test_bytes_that_are_not_utf_8_are_counted_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.data.json_values.CHUNK_BYTES", 3)
    bad, good = b"caf\xe9 \xff\xfe! \xef\xbf\xbd", "caf\ufffd \ufffd\ufffd! \ufffd"
    raw = pa.array([b"fine", bad], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    for name, content, texts in (
        ("a.txt", bad, [good]),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "' + bad + b'"}\n', ["fine", good]),
        ("a.csv", b"text\n" + bad + b"\n", [good]),
        ("a.json", b'["fine", "' + bad + b'"]', ["fine", good]),
        ("a.parquet", column, ["fine", good]),
        ("b.parquet", column.dictionary_encode(), ["fine", good]),
    ):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            pq.write_table(pa.table({"text": content}), path)
        assert "is not UTF-8" in refused(path).message, name
        assert read(path, TextReading(replace=True)) == (texts, {"not_utf_8": 3}), name
    (path := tmp_path / "a.txt").write_bytes("caf\u00e9".encode("utf-16"))
    assert "it is in UTF-16" in refused(path, TextReading(replace=True)).message


def test_what_was_replaced_is_told_by_whoever_prepares(make_plan: MakePlan, tmp_path: Path) -> None:
    lines = [b'{"text": "the mill wheel %d"}\n' % number for number in range(50)]
    (path := tmp_path / "a.jsonl").write_bytes(b"".join([*lines, b'{"text": "caf\xe9"}\n']))
    keys = {"sources": str(path), "validation": 0.2}
    with pytest.raises(ConfigError, match=r"data\.invalid_utf8=replace"):
        prepare(make_plan(**keys))
    prepared = prepare(make_plan(**keys, invalid_utf8="replace"))
    (told,) = prepared.left_out
    assert told.count == 1 and "became U+FFFD" in told.line()
    path.write_bytes(b"".join(lines))
    strict, lax = (prepare(make_plan(**keys, invalid_utf8=how)) for how in ("refuse", "replace"))
    assert strict.directory != lax.directory, "how text is read is part of what it is"


def test_members_of_gzip(tmp_path: Path) -> None:
    members = [gzip.compress(b'{"text": "%d"}\n' % number) for number in range(3)]
    (path := tmp_path / "a.jsonl.gz").write_bytes(b"".join(members))
    assert read(path)[0] == ["0", "1", "2"]
    path.write_bytes(b"".join(members)[:-9])
    assert f"{path} cannot be read" in refused(path).message


def test_hidden_temporary_and_empty_files_and_circles(tmp_path: Path) -> None:
    for name in (
        *("a.txt", ".b.txt", ".git/c.txt", "~$d.txt", "e.txt~", "#f.txt#", "g.jsonl.part"),
        *("_temporary/0/h.txt", "_delta_log/0.json", "__MACOSX/i.txt", "_index.md", "tmp.txt"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "up").symlink_to(tmp_path)
    texts, left_out = read(tmp_path)
    assert texts == ["_index.md", "a.txt", "tmp.txt"]
    assert left_out == {"hidden": 2, "temporary": 7, "empty_file": 1, "circle": 1}


def test_one_file_under_two_names(make_plan: MakePlan, tmp_path: Path) -> None:
    (folder := tmp_path / "in").mkdir()
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"the mill wheel number {number:02} turns")
    os.link(folder / "00.txt", folder / "hard.txt")
    (folder / "soft.txt").symlink_to("01.txt")
    shutil.copy(folder / "02.txt", folder / "copy.txt")
    long = "x" * (1 << 13)
    for name, text in (("p.txt", long), ("q.txt", long), ("r.txt", long[:-1] + "y")):
        (folder / name).write_text(text)
    prepared = prepare(make_plan(sources=str(folder), validation=0.3))
    told = {one.reason.value: one for one in prepared.left_out}
    assert {key: one.count for key, one in told.items()} == {"twice": 2, "copy": 2}
    assert {name.rpartition("/")[2] for name in told["copy"].examples} == {"copy.txt", "q.txt"}
    assert told["copy"].line().startswith("not left out: 2 files with the very bytes")


SPELLED = f"one{END_OF_TEXT}two {END_OF_TEXT}"


def test_text_of_a_special_token_is_text(make_plan: MakePlan, tmp_path: Path) -> None:
    texts = [f"the {n} mill{END_OF_TEXT}a {n} weir {END_OF_TEXT} {n}" for n in range(40)]
    rows = [{"text": text} for text in texts]
    path = written(tmp_path, "a.jsonl", rows)
    prepared = prepare(make_plan(sources=str(path), validation=0.2))
    (train,), token = prepared.train, prepared.tokenizer.document_token
    sets = (train, prepared.validation)
    ids = np.concatenate([shards.read(0, shards.tokens) for shards in sets])
    assert int((ids == token).sum()) == 40, "one for each document, and none of its text"
    asked = prepare(make_plan(sources=str(path), validation=0.2, separator=END_OF_TEXT))
    assert sum(s.documents for s in (*asked.train, asked.validation)) == 120


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_a_separator_cuts_a_stream(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "CHUNK_BYTES", chunk)
    reading = TextReading(separator=END_OF_TEXT)
    for name in ("a.txt", "a.txt.gz"):
        raw = f"\ufeffone{END_OF_TEXT}\n\u00e9two{END_OF_TEXT}{END_OF_TEXT}3".encode()
        (path := tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
        found = [*read_documents(str(path), reading=reading)]
        assert [d.text for d in found] == ["one", "\n\u00e9two", "3"]
        assert [d.origin.rpartition(":")[2] for d in found] == ["1", "2", "4"]
        assert read(path, reading)[1] == {"empty_text": 1}
    path = written(tmp_path, "a.jsonl", [{"text": SPELLED}])
    assert read(path, reading) == (["one", "two "], {"empty_text": 1})


GIGABYTES = """
import sys
from headrace.core.errors import ConfigError
from headrace.data.sources import read_documents
try:
    print(sum(len(d.text) for d in read_documents(sys.argv[1])))
except ConfigError as error:
    print(error.message)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.json", "a.jsonl.gz"])
def test_one_line_of_gigabytes_is_one_error(tmp_path: Path, name: str) -> None:
    """Read a file with a hole: three gigabytes of one line take no place on the disk."""
    path = tmp_path / name
    begin = {".json": b'["', "l": b'{"text": "', ".csv": b'text\n"'}.get(path.suffix, b"")
    if name.endswith(".gz"):
        with gzip.open(path, "wb", compresslevel=1) as packed:
            for _ in range(3 << 4):
                packed.write(b"x" * (1 << 26))
    else:
        with path.open("wb") as file:
            file.write(begin + b"the mill " * 4096)
            file.truncate(3 << 30)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))

    ended = subprocess.run(
        [sys.executable, "-c", GIGABYTES, str(path)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=True,
    )
    assert "one document of more than 1.0 GiB" in ended.stdout
