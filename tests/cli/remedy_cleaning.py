"""Text of which cleaning leaves nothing, folders that are taken, and records that are damaged."""

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from remedy_data import spoiled_shards
from remedy_inputs import GOOD, INGEST, text
from shell import Case

from headrace.data import cleaned, cleaning, parts


def fewer_once(patch: pytest.MonkeyPatch) -> None:
    """Let a source have one document less when it is read for the second time."""
    whole, reads = parts.read_documents, itertools.count(1)

    def documents(*given: Any, **named: Any) -> Iterator[Any]:
        every = [*whole(*given, **named)]
        return iter(every[:-1] if next(reads) == 2 else every)

    patch.setattr(parts, "read_documents", documents)


def other_times(patch: pytest.MonkeyPatch) -> None:
    """Let the files of a source be others whenever they are looked at."""
    looks = itertools.count()
    patch.setattr(cleaning, "source_signature", lambda *given: str(next(looks)))


def full(patch: pytest.MonkeyPatch) -> None:
    """Let the disk of the folder `full` take nothing."""
    whole = cleaned.publish

    def publish(aside: Path, path: Path) -> None:
        if path.name == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(aside, path)

    patch.setattr(cleaned, "publish", publish)


def taken(_: Path) -> None:
    """Write text, and a folder that is there already."""
    Path("x.jsonl").write_text(GOOD)
    Path("there").mkdir()


CLEANING = {
    "plan/cleaning:DeduplicationConfig._check_knobs#1": Case(
        f"{INGEST}jsonl data.deduplication.method=exact data.deduplication.threshold=0.9",
        text("x.jsonl", GOOD),
    ),
    "data/cleaning:CleaningRecord.load#1": spoiled_shards(
        lambda folder: (folder / cleaning.FILE).write_text("{}")
    ),
    "data/cleaning:Cleaning._read#1": Case(
        f"{INGEST}jsonl data.deduplication.method=exact",
        text("x.jsonl", GOOD),
        does={"the same command again": lambda run: None},
        fake=fewer_once,
    ),
    "data/cleaning:Cleaning.check_unchanged#1": Case(
        f"{INGEST}jsonl",
        text("x.jsonl", GOOD),
        does={"the same command again": lambda run: None},
        fake=other_times,
        lifted=True,
    ),
    "data/cleaning:Cleaning.emptied#1": Case(
        f"{INGEST}jsonl data.validation=x.jsonl",
        lambda _: (
            Path("x.jsonl").write_text(GOOD),
            Path("y.jsonl").write_text(GOOD.replace("mill", "weir").replace("the", "a")),
        ),
        fills={"PATH": "y.jsonl"},
    ),
    "data/quality/installed:evaluation_source#1": Case(
        "data decontaminate x.jsonl --against mill_quizz data.text_key=text",
        lambda _: (
            Path("x.jsonl").write_text(GOOD),
            Path(".cache/headrace/benchmarks").mkdir(parents=True),
            Path(".cache/headrace/benchmarks/mill_quiz.jsonl").write_text(GOOD),
        ),
        fake=lambda patch: patch.setenv("HOME", str(Path.cwd())),
    ),
    "data/cleaned:clean#1": Case("data dedup x.jsonl --to there", taken),
    "data/left_out:without_text#1 cleaned": Case(
        "data dedup data.text_key=text", text("x.jsonl", GOOD), fills={"PATH": "x.jsonl"}
    ),
    "data/left_out:without_text#1 evaluation": Case(
        "data decontaminate x.jsonl --against empty.jsonl",
        lambda _: (Path("x.jsonl").write_text(GOOD), Path("empty.jsonl").write_text("")),
        fills={"PATH": "x.jsonl"},
    ),
    "data/listing:_missing#2 evaluation": Case(
        "data decontaminate x.jsonl --against y.jsonl", text("x.jsonl", GOOD)
    ),
    "data/fields:no_field#1 evaluation": Case(
        "data decontaminate x.jsonl --against questions.jsonl",
        lambda _: (
            Path("x.jsonl").write_text(GOOD),
            Path("questions.jsonl").write_text(GOOD.replace('"text"', '"question"')),
        ),
    ),
    "data/cleaned:_check_step#1": Case(
        "data dedup x.jsonl data.validation=x.jsonl", text("x.jsonl", GOOD)
    ),
    "data/cleaned:_check_step#1 decontaminate": Case(
        "data decontaminate x.jsonl --against x.jsonl data.deduplication={{}}",
        text("x.jsonl", GOOD),
    ),
    "data/cleaned:_check_step#2": Case(
        "data decontaminate x.jsonl --against x.jsonl data.decontamination.against=[]",
        text("x.jsonl", GOOD),
    ),
    "data/cleaned:_written#1": Case(
        "data decontaminate x.jsonl --against x.jsonl --to full",
        text("x.jsonl", GOOD),
        fake=full,
        fills={"FOLDER on another disk": "elsewhere"},
        prose={"free some space": "no command"},
    ),
}
