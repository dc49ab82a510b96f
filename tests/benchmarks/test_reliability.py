"""Spoiled files are counted by what came of them, whoever makes them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reliability
from security.readers import Reader

from headrace.core.errors import ConfigError


@pytest.fixture
def reader() -> Reader:
    """A reader that takes what begins with a brace, refuses a bracket, and fails at the rest."""

    def make(folder: Path) -> Path:
        (file := folder / "x.txt").write_text("{}")
        return file

    def read(file: Path) -> None:
        first = file.read_bytes()[:1]
        if first == b"[":
            raise ConfigError("a list", "give a table")
        if first != b"{":
            raise KeyError("a fault")

    return Reader("x", make, read)


def counted(work: Path) -> dict[str, Any]:
    return json.loads((work / reliability.OUTCOME).read_text())


def test_a_file_is_read_refused_or_a_fault_that_is_kept(tmp_path: Path, reader: Reader) -> None:
    tally = reliability.Tally(reader, tmp_path)
    for content in (b"{}", b"[]", b"{", b"x"):
        tally.take(content)
    tally.save()
    found = counted(tmp_path)
    assert (found["files"], found["read"], found["refused"]) == (4, 2, 1)
    assert found["faults"] == ["KeyError: 'a fault'"]
    assert (tmp_path / "fault-0.txt").read_bytes() == b"x"


def test_a_reader_that_fails_often_is_given_no_more(tmp_path: Path, reader: Reader) -> None:
    reliability.fuzz_one(reader, 20.0, 0, tmp_path)
    found = counted(tmp_path)
    assert len(found["faults"]) == reliability.MOST_FAULTS + 1
    assert found["files"] == found["read"] + found["refused"] + len(found["faults"])


def test_guided_files_go_the_same_way(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def setup(
        words: list[str], take: Callable[[bytes], None], custom_mutator: Callable[..., bytes]
    ) -> None:
        given.update(words=words, take=take, changed=custom_mutator)

    def fuzz() -> None:
        for number in range(8):
            given["take"](given["changed"](b"{}", 100, number))

    engine = SimpleNamespace(Setup=setup, Fuzz=fuzz, Mutate=lambda content, most: b"[" + content)
    monkeypatch.setitem(sys.modules, "atheris", engine)
    reliability.fuzz_guided(reader, 3.0, 0, tmp_path)
    assert "-max_total_time=3" in given["words"]
    assert (tmp_path / "corpus" / "valid").read_bytes() == b"{}"
    assert counted(tmp_path)["files"] >= 1
