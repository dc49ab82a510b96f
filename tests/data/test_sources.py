"""Text in, and what a user reads when it does not come."""

import bz2
import gzip
import json
import lzma
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from facts import tells

from headrace.core.errors import ConfigError, RunError, UnsupportedError
from headrace.data.fields import TextReading
from headrace.data.sources import Document, read_documents, source_signature

LINES = b'{"text": "one"}\n\n{"text": "two \\ud83d\\ude00"}\n{"text": null}\n{"text": "h\\ud800"}\n'
TEXTS = ["one", "two \U0001f600", "h\ufffd"]


def texts(source: object, **options: Any) -> list[str]:
    return [
        document.text for document in read_documents(str(source), reading=TextReading(**options))
    ]


def failure(source: object, kind: type[Exception] = ConfigError, **options: str) -> str:
    with pytest.raises(kind) as caught:
        texts(source, **options)
    return str(caught.value)


def compress(raw: bytes, suffix: str) -> bytes:
    ways = {".gz": gzip.compress, ".zst": zstandard.compress}
    return {"": bytes, ".bz2": bz2.compress, ".xz": lzma.compress, **ways}[suffix](raw)


@pytest.mark.parametrize("compression", ["", ".gz", ".zst", ".bz2", ".xz"])
@pytest.mark.parametrize("suffix", [".txt", ".md", ".py"])
def test_a_plain_file_is_one_document(tmp_path: Path, suffix: str, compression: str) -> None:
    path = tmp_path / f"a{suffix}{compression}"
    path.write_bytes(compress("\ufeffone\r\ntw\u00f6\n".encode(), compression))
    assert list(read_documents(str(path))) == [Document("one\r\ntw\u00f6\n", str(path))]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst", ".bz2", ".xz"])
def test_json_lines(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(compress(LINES, compression))
    found = list(read_documents(str(path)))
    assert [d.text for d in found] == TEXTS
    assert [d.origin for d in found] == [f"{path}:{line}" for line in (1, 3, 5)]


def test_a_suffix_is_read_in_any_case_and_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    (inside / "A.TXT").write_text("one")
    (inside / "b.NDJSON").write_text('{"text": "two"}')
    (outside / "c.txt.XZ").write_bytes(lzma.compress(b"three"))
    (inside / "link").symlink_to(outside)
    (outside / "circle").symlink_to(inside)
    assert texts(inside) == ["one", "two", "three"]


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    whole = Path.iterdir

    def closed(path: Path) -> object:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied")
        return whole(path)

    monkeypatch.setattr(Path, "iterdir", closed)
    assert tells(failure(tmp_path), "only 1", "may not read")
    assert f"{tmp_path / 'closed'}/)" in failure(tmp_path)
    (tmp_path / "a.txt").write_text("one")
    assert texts(tmp_path) == ["one"]
    told = f"this user may not look into {tmp_path / 'closed'}"
    assert told in failure(tmp_path / "closed")


def test_a_table_gives_a_document_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffid,body\r\n1,"two\nlines, quoted ""so"""\r\n\r\n2,' + "x" * 200_000)
    assert texts(path, text_key="body") == ['two\nlines, quoted "so"', "x" * 200_000]
    assert tells(failure(path), "its fields are", "id, body")
    (tmp_path / "a.tsv").write_text("text\tn\none, two\t1\n")
    assert texts(tmp_path / "a.tsv") == ["one, two"]
    path.write_text("text,n\na\n")
    assert tells(failure(path), "row 2", "line 2", "1 fields", 2)
    path.write_bytes(b"text\na\ncaf\xe9\n")
    assert tells(failure(path), f"{path}:3", "not UTF-8", "0xe9", "offset 10")


def test_parquet_reads_only_the_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["one", None, "two"], "n": [1, 2, 3]}), path)
    found = list(read_documents(str(path), reading=TextReading("body")))
    assert found == [Document("one", f"{path}:1"), Document("two", f"{path}:3")]


def test_a_folder_is_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in (
        "b/z.txt",
        "a.md",
        "b/a.py",
        ".git/x.txt",
        "__pycache__/y.py",
        "empty.txt",
        "i.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else name)
    assert texts(tmp_path) == ["a.md", "b/a.py", "b/z.txt"]
    assert texts(tmp_path / "b/**/*.py") == ["b/a.py"]


def test_the_standard_library_is_there_without_its_tests() -> None:
    origins = [d.origin for d in read_documents("stdlib")]
    assert "json/decoder.py" in origins and origins == sorted(origins)
    parts = {part for origin in origins for part in origin.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages"}
    assert sum(len(t) for t in texts("stdlib")) > 5_000_000


def test_a_missing_path_names_its_nearest_sibling(tmp_path: Path) -> None:
    (tmp_path / "novels").mkdir()
    message = failure(tmp_path / "novel")
    assert "does not exist" in message and f"data.sources={tmp_path / 'novels'}" in message
    assert "does not exist" in failure(tmp_path / "no" / "where")
    assert "matches no readable file" in failure(tmp_path / "*.txt")


def test_nothing_readable_lists_what_is_there(tmp_path: Path) -> None:
    assert "holds no files" in failure(tmp_path)
    for name in ("a.png", "b.doc", "c.doc", ".d.txt"):
        (tmp_path / name).touch()
    assert tells(failure(tmp_path), "only 2 .doc", "1 .png", "1 hidden")
    assert ".jsonl" in failure(tmp_path / "a.png")


def test_not_utf8_names_file_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    assert tells(failure(path), path, "not UTF-8", "0xe9", "offset 3")
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES + b'{"text": "caf\xe9"}')
    at = f"offset {len(LINES) + 13}"
    assert tells(failure(path), f"{path}:6", "not UTF-8", "0xe9", at)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "is not JSON: Expecting"),
        ("[1]", "is a JSON list"),
        ("[" * 100_000, "recursion"),
        ('{"n": ' + "9" * 5000 + "}", "is not JSON that can be read"),
        ('{"txt": "a", "id": 3}', "its fields are txt, id; rows before it have one"),
        ('{"text": 7}', "the field 'text' holds int, not text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    found = failure(path)
    assert message in found and f"{path}:2" in found


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINES)
    assert texts(path) == TEXTS


def test_an_empty_path_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("one")
    monkeypatch.chdir(tmp_path)
    assert "empty path\n  try: data.sources=PATH" in failure("")
    assert texts(".") == ["one"]


def test_a_parquet_without_the_field(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["one"], "n": [1]}), path)
    assert tells(failure(path), "its fields are", "content, n")
    assert "holds int" in failure(path, text_key="n")


@pytest.mark.parametrize(
    "name", ["a.jsonl.gz", "a.txt.zst", "a.jsonl.xz", "a.txt.bz2", "a.parquet"]
)
@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, cut: bool) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": ["one"] * 1000}), path)
    else:
        lines = b"".join(json.dumps({"text": str(i)}).encode() + b"\n" for i in range(10_000))
        path.write_bytes(compress(lines, path.suffix))
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) * 3 // 4] if cut else b"garbage!" + raw[8:-8] + b"garbage!")
    assert f"{path} cannot be read" in failure(path)


def test_hugging_face_reads_local_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", "", "two"]}), tmp_path / "train.parquet")
    pq.write_table(pa.table({"text": ["three"]}), tmp_path / "test.parquet")
    assert texts(f"hf:{tmp_path / 'train.parquet'}") == ["one", "two"]
    assert texts(f"hf:{tmp_path}@test") == ["three"]
    found = failure(f"hf:{tmp_path}", text_key="body")
    assert tells(found, "no field 'body'", "its fields are", "text")
    assert "cannot be opened" in failure(f"hf:{tmp_path}@dev")
    assert "names no dataset" in failure("hf:@train")


def test_hugging_face_is_asked_to_stream_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*args: object, **options: object):
        assert args == ("owner/set", "en") and options == {"split": "dev", "streaming": True}
        yield {"text": "one"}
        raise ConnectionResetError("peer left")

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert tells(failure("hf:owner/set:en@dev", RunError), "row 1", "peer left")


def test_hugging_face_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'headrace[hf]'" in failure("hf:some/set", UnsupportedError)


def test_the_signature_follows_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = source_signature(str(tmp_path))
    assert source_signature(str(tmp_path)) == first
    os.utime(path, ns=(1, 1))
    second = source_signature(str(tmp_path))
    (tmp_path / "b.txt").write_text("two")
    third = source_signature(str(tmp_path))
    assert len({first, second, third, source_signature(f"hf:{tmp_path}")}) == 4
    assert source_signature("hf:a/b") != source_signature("hf:a/b@test")
