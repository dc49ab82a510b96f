"""What of a source gives no text is counted by reason, and told again of prepared data."""

import json
import os
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from facts import INGEST, begins, in_order, tells

from headrace.core.errors import ConfigError
from headrace.core.files import printable
from headrace.data import left_out
from headrace.data.fields import TextReading
from headrace.data.ingest import prepare, reopen
from headrace.data.left_out import LeftOut, LeftOutTally, Reason
from headrace.data.listing import Asked
from headrace.data.sources import read_documents, source_signature
from headrace.plan.plan import Plan
from headrace.plan.technique import installed

MakePlan = Callable[..., Plan]


def counted(source: object, **options: Any) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return reason -> (count, examples without their folder)."""
    tally = LeftOutTally()
    for _ in read_documents(str(source), reading=TextReading(**options), left_out=tally):
        pass
    return {
        one.reason.value: (one.count, tuple(name.rpartition("/in/")[2] for name in one.examples))
        for one in tally.records
    }


@contextmanager
def unreadable(*names: str) -> Iterator[None]:
    """Files that this user may not read, also where the tests run as root."""
    access = os.access
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda p, m: Path(p).name not in names and access(p, m))
        yield


def test_every_file_that_is_not_read_has_a_reason(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in (
        "a.txt",
        "b.png",
        "c.png",
        "d.png",
        "e.doc",
        ".git/x.txt",
        "__pycache__/y.py",
        "shut.txt",
        "deep/z.md",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "empty.txt").touch()
    (folder / "gone.txt").symlink_to("nowhere")
    (folder / "self.txt").symlink_to("self.txt")
    (folder / "twin.txt").symlink_to("a.txt")
    (folder / "deep" / "up").symlink_to(folder)
    (folder / "same").symlink_to("deep")
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(folder / "s.txt"))
        with unreadable("shut.txt"):
            found = counted(folder)
    assert found == {
        "ending": (4, ("b.png", "c.png", "d.png")),
        "empty_file": (1, ("empty.txt",)),
        "hidden": (1, (".git",)),
        "cache": (1, ("__pycache__/",)),
        "no_permission": (1, ("shut.txt",)),
        "broken_link": (2, ("gone.txt", "self.txt")),
        "circle": (1, ("deep/up/",)),
        "twice": (2, ("same/", "twin.txt")),
        "special": (2, ("pipe.txt", "s.txt")),
    }


def test_a_glob_tells_what_it_matches_and_does_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("a.txt", "b.png", "deep/c.txt", "deep/.d.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "deep" / "up").symlink_to(folder)
    (folder / "deep" / "up-too").symlink_to(folder)
    assert counted(folder / "*") == {"ending": (1, ("b.png",)), "folder": (1, ("deep/",))}
    assert counted(folder / "*.txt") == {}
    every = {"ending": (1, ("b.png",)), "circle": (2, ("deep/up/", "deep/up-too/"))}
    assert counted(folder / "**") == counted(folder / "**/*") == every
    read = [d.text for d in read_documents(str(folder / "**" / "*.txt"))]
    assert read == ["a.txt", "deep/c.txt"]
    named = folder.rename(tmp_path / "in[1]")  # a folder of that name means itself
    for pattern in ("*.txt", "**/[a-b].txt", "a.tx[t]"):
        assert [d.text for d in read_documents(str(named / pattern))] == ["a.txt"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "a.jsonl",
            '{"text": ""}\n\n{"text": null}\n{"text": "a"}\n{"text": "h\\ud800"}\n',
            {
                "empty_text": (1, ("a.jsonl:1",)),
                "null_text": (1, ("a.jsonl:3",)),
                "blank_line": (1, ("a.jsonl:2",)),
                "half_character": (1, ("a.jsonl:5",)),
            },
        ),
        (
            "a.csv",
            "text,n\n,1\n\na,2\n",
            {"empty_text": (1, ("a.csv:2",)), "blank_line": (1, ("a.csv:3",))},
        ),
        ("a.txt", "\ufeff", {"empty_text": (1, ("a.txt",))}),
    ],
)
def test_every_row_that_is_skipped_has_a_reason(
    tmp_path: Path, name: str, content: str, expected: object
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(content)
    assert counted(tmp_path / "in" / name) == expected


def test_the_standard_library_leaves_nothing_out() -> None:
    assert counted("stdlib") == {}


def test_a_line_for_each_reason() -> None:
    tally = LeftOutTally()
    for number in range(4):
        tally.add(Reason.ENDING, f"{number}.png")
    tally.add(Reason.NULL_TEXT, "a.jsonl:7")
    ending, null = (one.line() for one in tally.records)
    assert tells(ending, "left out", "4 files", "(0.png, 1.png, 2.png, ...)")
    assert tells(null, "left out", "1 row", "null", "(a.jsonl:7)")


def test_prepared_data_tells_it_again(make_plan: MakePlan, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [{"text": f"document {i} of some words"} for i in range(30)] + [{"text": None}]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "b.png").write_text("b")
    (own := tmp_path / "own.txt").write_text("held out")
    (empty := tmp_path / "empty.txt").touch()
    plan = make_plan(sources=str(folder), validation=str(own))
    first = prepare(plan)
    assert [(one.reason, one.count) for one in first.left_out] == [("ending", 1), ("null_text", 1)]
    again = prepare(plan)
    assert again.left_out == first.left_out
    (folder / "c.png").write_text("c")  # is no other data, and is told all the same
    later = prepare(plan)
    assert later.directory == first.directory
    assert [(one.reason, one.count) for one in later.left_out] == [("ending", 2), ("null_text", 1)]
    assert reopen(plan, first.record(), first.directory).left_out == first.left_out
    assert prepare(make_plan(sources=str(folder), validation=0.1)).left_out == later.left_out
    with pytest.raises(ConfigError, match="gives no documents"):
        prepare(make_plan(sources=str(folder), validation=str(empty)))


def test_a_damaged_record_is_named(make_plan: MakePlan, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words, " * 40 + "\nand more of them\n")
    plan = make_plan(sources=str(tmp_path / "a.txt"))
    folder = prepare(plan).directory
    for damage in ("[", "[1]", "7", '[{"reason": "none", "count": 1, "examples": ["a"]}]'):
        (folder / left_out.FILE).write_text(damage)
        with pytest.raises(ConfigError, match=r"left_out.json is damaged") as caught:
            prepare(plan)
        assert begins(caught.value.remedy.text, "rm", "-r", folder, "&&", *INGEST)
    (folder / left_out.FILE).unlink()
    assert prepare(plan).left_out == ()


def test_a_name_that_is_not_utf_8_is_a_name(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text("one")
    (tmp_path / os.fsdecode(b"\xff.png")).write_text("")
    tally = LeftOutTally()
    (document,) = read_documents(str(tmp_path), left_out=tally)
    assert document[:2] == ("one", f"{tmp_path}/caf\\xe9.txt")
    assert tally.records == (
        LeftOut(reason=Reason.ENDING, count=1, examples=(f"{tmp_path}/\\xff.png",)),
    )
    first = source_signature(str(tmp_path))
    os.rename(tmp_path / name, tmp_path / "cafe.txt")
    assert source_signature(str(tmp_path)) != first
    assert printable("caf\u00e9") == "caf\u00e9"
    assert printable("two\nlines\x1b[31m") == r"two\nlines\x1b[31m"


def test_an_error_names_the_key_that_names_the_source(make_plan: MakePlan, tmp_path: Path) -> None:
    for name in ("one.txt", "two words.txt"):
        (tmp_path / name).write_text(f"{name} has some text, " * 40 + "\nand more of it\n")
    one, two = str(tmp_path / "one.txt"), str(tmp_path / "two words.txt")
    for wrong, kept in (
        ({"sources": one, "validation": two + "t"}, {"sources": one}),
        ({"sources": [one, two + "t"]}, {}),
        ({"sources": two + "t"}, {}),
    ):
        with pytest.raises(ConfigError, match=in_order("does not exist", "nearest")) as caught:
            prepare(make_plan(**wrong))
        (word,) = shlex.split(caught.value.remedy.text)
        plan = Plan.read("", installed(), overrides=["goal.steps=1", word])
        mended = prepare(make_plan(**kept, **plan.data.model_dump(exclude_unset=True)))
        assert len(mended.train) == (2 if isinstance(wrong["sources"], list) else 1)


def test_folders_may_be_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")
    Path("a.txt").write_text("deep")
    monkeypatch.chdir(tmp_path)
    try:
        assert [d.text for d in read_documents("d")] == ["deep"]
    finally:
        subprocess.run(["rm", "-r", "d"], check=True)  # deeper than Python's own removal goes


def test_a_link_that_leads_nowhere_is_not_its_own_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("gone.txt")
    with pytest.raises(
        ConfigError, match=in_order(tmp_path / "a.txt", "link", "gone.txt")
    ) as caught:
        list(read_documents(str(tmp_path / "a.txt")))
    assert caught.value.remedy.text == "data.sources=PATH"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x" * 5000, "cannot be read: File name too long"),
        ("~nobody-of-this-name/x", "does not exist"),
        ("a\0b", r"= 'a\x00b' does not exist"),
        ("[", "matches no readable file: no files"),
    ],
    ids=["long", "user", "zero", "glob"],
)
def test_no_name_ends_in_a_traceback(source: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(read_documents(source))
    assert says in caught.value.message and caught.value.remedy.text == "data.sources=PATH"


def test_a_file_that_two_sources_name_is_told(tmp_path: Path, tiny_plan: MakePlan) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    text = "The mill wheel turns with the river. " * 400
    (one / "a.txt").write_text(text)
    (one / "b.txt").write_text(text[::-1])
    (two / "copy.txt").write_text(text)
    (two / "other.txt").write_text("x" + text[1:])  # as long, and another one
    (two / "link.txt").symlink_to(one / "b.txt")

    def told(*sources: Path) -> list[LeftOut]:
        names = json.dumps([str(source) for source in sources])
        prepared = prepare(tiny_plan(f"data.sources={names}", f"data.directory={tmp_path}/kept"))
        return [one for one in prepared.left_out if one.reason is Reason.READ_TWICE]

    for _ in range(2):  # while it is prepared, and of what is prepared
        (found,) = told(one, two)
        assert found.count == 2
        assert {name.rpartition("/")[2] for name in found.examples} == {"copy.txt", "link.txt"}
        assert tells(found.line(), "not left out", "2 files", "data.sources")
    (found,) = told(one, one / "a.txt")
    assert found.count == 1 and "read twice" in found.line()
    assert not told(one)


SEVERAL = {
    "a.jsonl,b.txt": ["a.jsonl", "b.txt"],
    "a.jsonl b.txt": ["a.jsonl", "b.txt"],
    "[ab].{jsonl,txt}": ["[ab].jsonl", "[ab].txt"],
    "*.{jsonl,csv}": "*.jsonl",
}


@pytest.mark.parametrize("typed", SEVERAL)
def test_several_sources_in_one_are_named_without_leaving_one_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.txt").write_text("two")
    with pytest.raises(ConfigError, match="does not exist: it") as caught:
        [*read_documents(typed)]
    key, _, named = shlex.split(caught.value.remedy.text)[0].partition("=")
    assert key == "data.sources"
    expected = SEVERAL[typed]
    assert named == expected if isinstance(expected, str) else json.loads(named) == expected


@pytest.mark.parametrize("name", ["a.txt,b.txt", "a.txt b.txt", "a.{txt,md}.txt", "a:b.txt"])
def test_a_file_whose_name_looks_like_several_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for each in ("a.txt", "b.txt", "a", name):
        (tmp_path / each).write_text(each)
    assert [d.text for d in read_documents(name)] == [name]
    assert [d.text for d in read_documents(f"{name[:-3]}*")] == [name]


MEANT = {
    "data.validation": {
        "5%": "data.validation=0.05",
        "12.5 %": "data.validation=0.125",
        "a.txt,b.txt": "mkdir held-out && cp -r a.txt b.txt held-out, and data.validation=held-out",
    },
    "data.sources": {
        "ftp://b/a": "data.sources=PATH",
        "https://example.com/a.txt?x=1": "curl -LO 'https://example.com/a.txt?x=1', and "
        "data.sources='a.txt?x=1'",
    },
}


@pytest.mark.parametrize(("key", "typed"), [(k, t) for k, each in MEANT.items() for t in each])
def test_what_is_no_path_is_told_as_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, typed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    with pytest.raises(ConfigError, match="does not exist: it") as caught:
        [*read_documents(Asked(typed, key))]
    assert caught.value.remedy.text.replace("'", "") == MEANT[key][typed].replace("'", "")
