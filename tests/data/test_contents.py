"""A file whose bytes are something else than its name says: read, or mended without a loss."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from facts import tells
from test_formats import PACK, mended, refused, run, texts, write

__all__ = ["write"]
MARKED = b'\xef\xbb\xbf{"text": "one"}\n\xef\xbb\xbf{"text": "two"}\n'


@pytest.mark.parametrize("says", PACK)
@pytest.mark.parametrize("found", PACK)
def test_a_file_is_compressed_as_its_name_says_or_rewritten(
    write: Any, says: str, found: str
) -> None:
    path = write(f"a.txt{says}", "")
    path.write_bytes(PACK[found](b"one"))
    if says != found:
        error = refused(path)
        assert f"{path} is by its name" in error.message
        assert mended(error, path) == ["one"]
    assert texts(path) == ["one"]


@pytest.mark.parametrize("within", [".gz", ".zst"])
def test_what_is_compressed_twice_is_unpacked_once(write: Any, within: str) -> None:
    path = write("a.jsonl.gz", PACK[within](b'{"text": "one"}\n'))
    error = refused(path)
    assert "is compressed twice" in error.message
    assert mended(error, path) == ["one"]


def test_a_table_of_parquet_gets_its_name(write: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": ["one"]}), buffer := io.BytesIO())
    path = write("a.json", buffer.getvalue())
    error = refused(path.parent)
    assert tells(error.message, path, "parquet")
    assert mended(error, path.parent) == ["one"]


@pytest.mark.parametrize("begins", [b"%PDF-1.7\n", b"PK\x03\x04", b"\x89PNG\r\n", b""])
def test_what_is_no_text_is_taken_out_and_not_read_as_latin(write: Any, begins: bytes) -> None:
    chance = random.Random(3)
    path = write("a.txt", begins + b"a\xe9" * 20 + chance.randbytes(5000))
    write("b.txt", "other")
    error = refused(path.parent)
    assert "no text" in error.message and "python" not in error.remedy.text
    assert mended(error, path.parent) == ["other"]


WESTERN = {
    "latin": ("caf\u00e9 na\u00efve \u00c4rger\n" * 9, "latin-1"),
    "quotes": ("\u201cquoted\u201d \u2014 dash \u20ac5\n" * 9, "cp1252"),
}


@pytest.mark.parametrize("kind", WESTERN)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_western_text_comes_back_letter_by_letter(write: Any, kind: str, suffix: str) -> None:
    text, encoding = WESTERN[kind]
    path = write(f"a.txt{suffix}", text.encode(encoding))
    error = refused(path)
    assert "Windows-1252" in error.message
    assert mended(error, path) == [text]


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_what_is_utf_8_beside_a_wrong_byte_stays_as_it_is(write: Any, kind: str) -> None:
    """A file of two parts, of which one is in another encoding: only that part is changed."""
    good, old = "\u4e2d\u6587 \u00e4\u00f6\u00fc", "caf\u00e9"
    if kind == "txt":
        path = write("a.txt", (good * 9 + "\n").encode() + old.encode("latin-1"))
        assert mended(refused(path), path) == [good * 9 + "\ncaf\ufffd"]
        return
    row = '{"text": "%s"}\n'
    path = write("a.jsonl", (row % good).encode() + (row % old).encode("latin-1"))
    assert mended(refused(path), path) == [good, old]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("\u65e5\u672c\u8a9e\u306e\u6587\u7ae0", "shift_jis"),
        ("\u4e2d\u6587\u6587\u672c", "gbk"),
        ("\u0440\u0435\u043a\u0430 \u0432\u043e\u0434\u0430", "cp1251"),
    ],
)
def test_an_encoding_that_nothing_tells_is_not_guessed(
    write: Any, text: str, encoding: str
) -> None:
    path = write("a.txt", (text * 20).encode(encoding))
    write("b.txt", "other")
    error = refused(path.parent)
    assert "another encoding" in error.message and "iconv -f ENCODING" in error.message
    assert mended(error, path.parent) == ["other"]


LINES = {
    "carriage returns": b'{"text": "one"}\r{"text": "two"}',
    "none between": b'{"text": "one"}{"text": "two"}\n',
    "marks": MARKED,
    "a sequence": b'\x1e{"text": "one"}\n\x1e{"text": "two"}\n',
}


@pytest.mark.parametrize("kind", LINES)
def test_every_value_on_a_line_is_a_row(write: Any, kind: str) -> None:
    assert texts(write("a.jsonl", LINES[kind])) == ["one", "two"]


def test_a_wrong_value_among_carriage_returns_costs_no_other(write: Any) -> None:
    path = write("a.jsonl", b'{"text": "one"}\r{"text": \r{"text": "two"}')
    first = refused(path)
    assert "not JSON" in first.message
    run(first.remedy.text)
    again = refused(path)
    assert "a.jsonl:2 is not JSON" in again.message
    assert mended(again, path) == ["one", "two"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_what_a_second_remedy_replaces_is_kept_beside_the_first(write: Any, suffix: str) -> None:
    """Each command keeps the file as it was, so the one that came from the user is not lost."""
    content = b'{"text": "one"}\n{"text": \n{"text": "two"}\n{"text" "three"}\n'
    path = write(f"a.jsonl{suffix}", content)
    before = path.read_bytes()
    run(refused(path).remedy.text)
    assert mended(refused(path), path) == ["one", "two"]
    kept = sorted(p.name for p in path.parent.iterdir() if p != path)
    assert kept == [f"a.jsonl{suffix}.bad", f"a.jsonl{suffix}.bad2"]
    assert Path(f"{path}.bad").read_bytes() == before


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_first_row_without_the_field_takes_no_other_along(write: Any, name: str) -> None:
    rows = [{"head": "a title"}, {"text": "one"}, {"text": "two"}]
    content = json.dumps(rows) if name == "a.json" else "\n".join(map(json.dumps, rows))
    path = write(name, content)
    error = refused(path.parent)
    assert tells(error.message, path, "its fields are head", "rows behind it")
    assert mended(error, path.parent) == ["one", "two"]
