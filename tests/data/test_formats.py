"""Files are read right, or one error names the place and a command that mends it: each is run."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from facts import tells

from headrace.core.errors import ConfigError
from headrace.data import formats, json_values, text_file
from headrace.data.fields import TextReading
from headrace.data.left_out import LeftOutTally
from headrace.data.sources import read_documents

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
packed = pytest.mark.parametrize("suffix", PACK)


def texts(source: object, tally: LeftOutTally | None = None, **options: Any) -> list[str]:
    reading = TextReading(**options)
    return [d.text for d in read_documents(str(source), reading=reading, left_out=tally)]


def refused(source: object, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        texts(source, **options)
    assert caught.value.remedy.text
    return caught.value


def run(command: str) -> None:
    """Run a command as a user types it."""
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(["bash", "-ec", command], check=True, env={**os.environ, "PATH": tools})


def mended(error: ConfigError, source: Path, **options: Any) -> list[str]:
    """The texts once the remedy that was printed has been run as it stands."""
    remedy = error.remedy.text
    if remedy.startswith("data.text_key="):
        key = subprocess.run(["bash", "-c", f"printf %s {remedy}"], capture_output=True, text=True)
        return texts(source, text_key=key.stdout.removeprefix("data.text_key=").strip('"'))
    command, named, other = remedy.rpartition("data.sources=")
    if named:  # the file is the source, and another stands in its place
        run(command.removesuffix(", and ") or "true")
        return texts(source / "b.txt" if other == "PATH" else Path(other), **options)
    run(remedy)
    return texts(source, **options)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a file, compressed by its name, into a folder of its own."""

    def made(name: str, content: str | bytes) -> Path:
        path = tmp_path / "in" / name
        path.parent.mkdir(exist_ok=True)
        raw = content.encode() if isinstance(content, str) else content
        path.write_bytes(PACK.get(path.suffix, bytes)(raw))
        return path

    return made


@packed
@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "one"}, {"text": "two \\ud83d\\ude00"}, {"text": null}, "three"]',
        '\ufeff  [\n {"text": "one"},\n{"text":"two \U0001f600"}\n,"three"]\n\n',
        '{"text": "one"}\n{"text": "two \U0001f600"}\n\n{"text": "three"}',
        '{\n  "text": "one"\n}\n{\n  "text": "two \U0001f600"\n}"three"',
        '[{"text": "one"}] [{"text": "two \U0001f600"}, {"text": "three"}]',
    ],
)
def test_json_is_an_array_an_object_or_lines(write: Any, suffix: str, content: str) -> None:
    assert texts(write(f"a.json{suffix}", content)) == ["one", "two \U0001f600", "three"]


def test_an_array_is_a_stream(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "CHUNK_BYTES", 7)
    rows = [{"text": "\u00e9" * n, "n": [n, {"]": "}"}]} for n in range(1, 60)]
    for indent in (None, 2):
        path = write("a.json", json.dumps(rows, ensure_ascii=indent is None, indent=indent))
        assert texts(path) == [row["text"] for row in rows]


@pytest.mark.parametrize("content", ['[{"text": "one"}]', '{\n "text": "one"\n}\n'])
def test_lines_that_are_in_truth_an_array_are_read(write: Any, content: str) -> None:
    assert texts(write("a.jsonl", content)) == ["one"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('[{"text": "one"}, {"text": "two"}', "value 2 .* line 1: the file ends inside"),
        ('[{"text": "one"},\n {"text": ]', "value 2 .* line 2: Expecting value"),
        ('[{"text": "one"}\n{"text": "two"}]', "neither a comma nor a ]"),
        ('[{"text": "one"}] rest', "value 2 .* line 1: Expecting value"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_damaged_json_is_named(write: Any, content: str, says: str) -> None:
    path = write("a.json", content)
    error = refused(path)
    assert re.search(says, error.message)
    write("b.txt", "other")
    if "one" in content:  # without a single row, a file of a folder is left out
        assert "a.json" in refused(path.parent).message
    assert mended(error, path.parent) == ["other"]


def test_json_in_a_folder_that_is_no_text_is_left_out(write: Any) -> None:
    path = write("package.json", '{"name": "a", "version": {"of": 1}}')
    write("tsconfig.json", "// a comment\n{}")
    write("none.json", "[]")
    write("numbers.json", "[[1, 2], [3]]")
    write("a.txt", "one")
    tally = LeftOutTally()
    assert texts(path.parent, tally) == ["one"]
    found = {one.reason.value: one.count for one in tally.records}
    assert found == {"no_json": 1, "no_field": 2, "no_rows": 1}
    error = refused(path)
    assert tells(error.message, "its fields are", "name, version.of")
    assert mended(error, path) == ["a"]
    assert "is a JSON list" in refused(path.parent / "numbers.json").message


def test_rows_inside_of_an_object_are_taken_out(write: Any) -> None:
    path = write("a.json", json.dumps({"version": 1, "data": [{"text": "one"}, {"text": "two"}]}))
    assert tells((error := refused(path)).message, "rows", "'data'")
    assert mended(error, path) == ["one", "two"]


def test_a_value_without_end_is_refused(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "CHUNK_BYTES", 8)
    monkeypatch.setattr(text_file, "MOST_DOCUMENT_BYTES", 100)
    monkeypatch.setattr(formats, "CHUNK_BYTES", 8)
    long = "long " * 200
    for name, content in (
        ("a.json", json.dumps({"text": long}, indent=1)),
        ("a.jsonl", json.dumps({"text": "one"}) + "\n" + json.dumps({"text": long})),
        ("a.csv", f"text\none\n{long}\n"),
        ("a.jsonl.gz", json.dumps({"text": long})),
    ):
        error = refused(path := write(name, content))
        assert tells(error.message, path, "one document of more than 100 B", "data.separator")
        write("b.txt", "other")
        assert mended(error, path.parent)[-1] == "other"
        for left in path.parent.iterdir():
            left.unlink()
    lines = "\n".join([long[:40]] * 9)
    error = refused(path := write("a.txt.gz", lines))
    assert tells(error.message, path, "one document of more than 100 B")
    monkeypatch.undo()
    assert "".join(mended(error, path)) == lines


@packed
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "a"', "is not JSON: Expecting"),
        ("[1]", "is a JSON list"),
        ('{"text": "a', "at column 12"),
        ("[" * 100_000, "recursion"),
        ('{"n": ' + "9" * 5000 + "}", "is not JSON that can be read"),
        ('{"txt": "a", "id": 3}', "its fields are txt, id; rows before it have one"),
        ('{"text": 7}', "the field 'text' holds int, not text"),
    ],
)
def test_a_bad_line_is_taken_out(write: Any, line: str, says: str, suffix: str) -> None:
    path = write(f"a.jsonl{suffix}", f'{{"text": "one"}}\n{line}\n{{"text": "two"}}\n')
    error = refused(path)
    assert says in error.message and f"{path}:2" in error.message
    assert mended(error, path) == ["one", "two"]
    assert texts(path.parent) == ["one", "two"]


def test_a_bad_value_of_json_is_taken_out(write: Any) -> None:
    rows: list[Any] = [{"text": "one"}, 7, {"text": [1]}, {"txt": "a"}, {"text": "two"}]
    for content in (json.dumps(rows), "\n".join(json.dumps(r, indent=1) for r in rows)):
        path = write("a.json", content)
        for says in ("is a JSON int", "holds list, not text", "rows before it have one"):
            error = refused(path)
            assert f"{path}:2" in error.message and says in error.message
            run(error.remedy.text)
        assert texts(path) == ["one", "two"]


@pytest.mark.parametrize(
    ("row", "key", "expected"),
    [
        ({"a": {"b": "x"}}, "a.b", "x"),
        ({"a.b": "literal", "a": {"b": "x"}}, "a.b", "literal"),
        ({"messages": [{"content": "hi"}, {"content": "yo"}]}, "messages.1.content", "yo"),
        ({"a.b": {"c": "x"}}, "a.b.c", "x"),
        ({"a": {"b.c": "x"}}, "a.b.c", "x"),
        ({"a": [["x"]]}, "a.0.0", "x"),
    ],
)
def test_a_key_with_dots_leads_inside(write: Any, row: Any, key: str, expected: str) -> None:
    assert texts(write("a.jsonl", json.dumps(row)), text_key=key) == [expected]
    assert texts(write("a.json", json.dumps([row])), text_key=key) == [expected]
    pq.write_table(pa.Table.from_pylist([row]), path := write("a.parquet", ""))
    assert texts(path, text_key=key) == [expected]


def test_a_null_on_the_way_is_a_null(write: Any) -> None:
    tally = LeftOutTally()
    path = write("a.jsonl", '{"a": null}\n{"a": {"b": "x"}}\n{"a": {"b": null}}')
    assert texts(path, tally, text_key="a.b") == ["x"]
    assert [(one.reason.value, one.count) for one in tally.records] == [("null_text", 2)]


@pytest.mark.parametrize(
    ("row", "listed", "text"),
    [
        ({"id": 1, "data": {"body": "x", "n": 2}}, "id, data.body, data.n", "x"),
        ({"messages": [{"role": "user"}, {}]}, "messages.0.role", "user"),
        ({"txt": "x", "title": "y"}, "txt, title", "x"),
        ({"my text's": "x", "n": 1}, "my text's, n", "x"),
        ({"7": "x"}, "7", "x"),
        ({"true": "x"}, "true", "x"),
        ({"caf\u00e9": "x"}, "caf\u00e9", "x"),
    ],
)
def test_the_fields_that_are_there_are_told(write: Any, row: Any, listed: str, text: str) -> None:
    error = refused(path := write("a.jsonl", json.dumps(row)))
    assert "no field 'text'" in error.message
    assert error.message.endswith(f"its fields are {listed}")
    assert mended(error, path) == [text]
    pq.write_table(pa.Table.from_pylist([row]), path := write("a.parquet", ""))
    error = refused(path)
    assert sorted(error.message.partition("fields are ")[2].split(", ")) == sorted(
        listed.split(", ")
    )
    assert mended(error, path) == [text]


def test_a_row_without_any_text_is_taken_out(write: Any) -> None:
    for row in ("{}", '{"text": 7}', '{"n": 1}'):
        error = refused(path := write("a.jsonl", f'{row}\n{{"text": "one"}}'))
        assert mended(error, path) == ["one"]


@packed
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.json"])
def test_another_encoding_is_named_and_changed(write: Any, name: str, suffix: str) -> None:
    content = {
        "a.jsonl": '{"text": "caf\u00e9"}\n',
        "a.json": '[{"text": "caf\u00e9"}]\n',
        "a.csv": "text\ncaf\u00e9\n",
        "a.txt": "caf\u00e9",
    }[name]
    encodings = ["latin1", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
    for encoding in encodings if not suffix else encodings[:2]:
        path = write(f"{name}{suffix}", content.encode(encoding))
        error = refused(path)
        assert f"{path}" in error.message and "is not UTF-8" in error.message, encoding
        assert mended(error, path) == ["caf\u00e9"], encoding
        assert texts(path.parent) == ["caf\u00e9"]


def test_a_byte_that_is_wrong_has_its_place(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "CHUNK_BYTES", 5)
    for name, content, offset in (
        ("a.txt", b"fine\ncaf\xe9", 8),
        ("a.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}', 27),
        ("a.json", b'["a",\n"caf\xe9 \xc3\xa9"]', 10),
        ("a.csv", b"text\na\ncaf\xe9\n", 10),
    ):
        error = refused(write(name, content))
        assert f"byte 0xe9 at offset {offset}" in error.message


def test_what_is_no_text_is_refused(write: Any) -> None:
    error = refused(path := write("a.txt", bytes(range(16)) * 4 + b"\0" * 64))
    assert "is no text" in error.message
    write("b.txt", "other")
    assert mended(error, path.parent) == ["other"]
    assert texts(write("b.txt", "one \0 zero")) == ["one \0 zero"]


def test_tables_of_every_kind_of_line(write: Any) -> None:
    assert texts(write("a.csv", "text,n\rone,1\r\rtwo,2\r")) == ["one", "two"]
    assert texts(write("a.csv", "text,n\r\none,1\r\n")) == ["one"]
    assert texts(write("a.csv", b'text\n"a\0b"\n')) == ["a\0b"]
    huge = "x" * (1 << 22)
    assert texts(write("a.csv", f'n,text\n1,"{huge}"\n')) == [huge]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("one,1\ntwo\nthree,3\n", "row 3 at line 3 has 1 fields"),
        ('one,1\n"two\nlines",2,2\nthree,3\n', "row 3 at line 3 has 3 fields"),
        ('one,1\n"two"x,2\nthree,3\n', "begins at line 3 is no row"),
        ('one,1\n"two,2\nthree,3\n', "begins at line 3 is no row"),
    ],
)
def test_a_bad_row_of_a_table_is_taken_out(write: Any, rows: str, says: str) -> None:
    error = refused(path := write("a.csv", f"text,n\n{rows}"))
    assert says in error.message
    assert mended(error, path) == ["one", "three"]


def test_columns_of_a_table_are_told(write: Any) -> None:
    error = refused(path := write("a.csv", "id,txt\n1,one\n"))
    assert tells(error.message, "its fields are", "id, txt")
    assert mended(error, path) == ["one"]


@pytest.mark.parametrize("sign", [";", "\t", "|"])
def test_columns_that_another_sign_cuts_are_cut_by_it(write: Any, sign: str) -> None:
    path = write("a.csv", f'id{sign}text\n1{sign}"one{sign} two, three"\n')
    error = refused(path)
    assert "between its columns" in error.message
    assert mended(error, path) == [f"one{sign} two, three"]
    error = refused(path := write("a.tsv", "id,text\n1,one\n"))
    assert mended(error, path) == ["one"]


def test_a_text_in_two_columns_is_refused(write: Any) -> None:
    error = refused(path := write("a.csv", "n,text,text\n1,one,two\n"))
    assert "has 2 columns 'text'" in error.message
    assert mended(error, path) == ["two"]
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, path := write("a.parquet", ""))
    assert "has 2 columns 'text'" in refused(path).message


def test_a_long_line_is_read(write: Any) -> None:
    long = "long " * (1 << 22)
    assert texts(write("a.jsonl", json.dumps({"text": long}))) == [long]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_streams_are_read_to_their_end(write: Any, suffix: str) -> None:
    one, two = (PACK[suffix](line) for line in (b'{"text": "one"}\n', b'{"text": "two"}\n'))
    path = write(f"a.jsonl{suffix}", "")
    path.write_bytes(one + two)
    assert texts(path) == ["one", "two"]
    damaged = {
        "cut": (one + two)[:-3],
        "cut before": two[:-5],
        "behind": one + b"garbage",
        "within": one + two[:1] + b"x" + two[2:],
    }
    for how, raw in damaged.items():
        path.write_bytes(raw)
        error = refused(path.parent)
        assert f"{path} cannot be read" in error.message, how
        (path.parent / "b.txt").write_text("other")
        assert mended(error, path.parent) == ["other"]
        (path.parent / "b.txt").unlink()


def test_padding_behind_xz_is_none_of_the_text(write: Any) -> None:
    path = write("a.txt.xz", "")
    path.write_bytes(lzma.compress(b"one ") + b"\0" * 8 + lzma.compress(b"two") + b"\0" * 4)
    assert texts(path) == ["one two"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_a_column_that_is_no_utf_8_is_mended(write: Any, kind: Any) -> None:
    raw = pa.array([*[b"fine"] * 1500, b"caf\xe9", None], pa.binary())
    wide = raw.cast(pa.large_binary()) if kind == pa.large_string() else raw
    text = wide if kind == pa.binary() else pa.Array.from_buffers(kind, 1502, wide.buffers())
    pq.write_table(pa.table({"it's": text}), path := write("a.parquet", ""))
    error = refused(path, text_key="it's")
    assert tells(error.message, "row 1,501", "not UTF-8", '"it\'s"', "0xe9", "offset 3")
    assert mended(error, path, text_key="it's") == [*["fine"] * 1500, "caf\ufffd"]


def test_parquet_that_is_compressed_as_a_whole(write: Any) -> None:
    pq.write_table(pa.table({"text": ["one"]}), buffer := io.BytesIO())
    path = write("a.parquet.gz", buffer.getvalue())
    error = refused(path)
    assert "compressed as a whole" in error.message
    assert mended(error, path.parent) == ["one"]


@pytest.mark.parametrize("name", ["notes.log", "README", "notes.log.gz"])
def test_a_kind_that_is_not_read_is_copied(
    write: Any, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write(name, "one")
    monkeypatch.chdir(tmp_path)
    error = refused(path)
    assert tells(error.message, path, "kinds are", ".jsonl", ".txt")
    command, _, source = error.remedy.text.removesuffix(", if it is text").partition(", and ")
    run(command)
    assert texts(source.removeprefix("data.sources=")) == ["one"]
    folder = refused(path.parent)
    assert f"holds only 1 {''.join(path.suffixes) or 'without an ending'}" in folder.message
    run(folder.remedy.text.partition(", if")[0])
    assert texts(path.parent) == ["one"]


def test_a_pipe_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo(pipe := tmp_path / "text.jsonl")
    error = refused(pipe)
    assert tells(error.message, pipe, "neither a file") and "nearest" not in error.message
    command, _, source = error.remedy.text.partition(", and ")
    with subprocess.Popen(["bash", "-ec", command]) as reader:
        pipe.write_text("one")
        assert reader.wait(10) == 0
    assert texts(source.removeprefix("data.sources=")) == ["one"]
    assert tells(refused("/dev/zero").message, "/dev/zero", "neither a file")


def test_a_remedy_takes_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"it's caf\xe9.txt")
    path.write_bytes(b"caf\xe9")
    assert mended(refused(path), path) == ["caf\u00e9"]


def test_the_tools_of_the_remedies_are_here() -> None:
    for tool in ("iconv", "gzip", "bzip2", "xz", "zstd", "sed"):
        assert shutil.which(tool), tool


def test_no_damage_ends_in_a_traceback(write: Any) -> None:
    chance = random.Random(7)
    rows = [{"text": f"row {i} \u00e9", "m": {"c": [{"x": str(i)}]}} for i in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    pq.write_table(pa.Table.from_pylist(rows), columns := io.BytesIO())
    whole = {
        "a.jsonl": lines,
        "a.json": json.dumps(rows).encode(),
        "a.txt": lines,
        "a.csv": b"id,text\n" + b'1,"row, ""2"" x"\n' * 40,
        "a.parquet": columns.getvalue(),
    }
    read = told = 0
    for _ in range(400):
        name = chance.choice([*whole])
        suffix = "" if name == "a.parquet" else chance.choice([*PACK])
        raw = bytearray(PACK[suffix](whole[name]))
        at = chance.randrange(len(raw))
        if chance.random() < 0.3:
            del raw[at:]
        elif chance.random() < 0.5:
            del raw[at : at + chance.randrange(1, 20)]
        else:
            raw[at] ^= 1 << chance.randrange(8)
        path = write("damaged" + name + suffix, "")
        path.write_bytes(raw)
        try:
            texts(path, LeftOutTally())
            read += 1
        except ConfigError as error:
            assert str(path) in error.message and error.remedy.text
            told += 1
    assert read > 20 and told > 200
