"""Clean sources without a plan, and write what remains as a folder of .jsonl."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError, RunError, is_full_disk
from headrace.core.files import printable, publish, shell, sync_path, write_whole
from headrace.core.progress import OnProgress
from headrace.core.remedy import leave_out
from headrace.data.cleaning import Cleaning, StepName, asked_sources, evaluation_sets
from headrace.data.left_out import LeftOut, LeftOutTally, without_text
from headrace.data.parts import list_parts
from headrace.data.quality.cleaner import CleanReport
from headrace.plan.data_config import DataConfig

REPORT = "report.json"
"""What fell is kept beside the text in this file."""


@dataclass(frozen=True)
class Cleaned:
    """What was done with sources, and where what remains was written."""

    step: str
    report: CleanReport
    line: str
    left_out: tuple[LeftOut, ...]
    files: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        left_out = [one.to_dict() for one in self.left_out]
        report = self.report.model_dump(mode="json")
        return {"step": self.step, **report, "files": [*self.files], "left_out": left_out}

    def rows(self) -> dict[str, Any]:
        """Return what a table shows: all that is known but examples."""
        known = self.report.model_dump(exclude={"examples"}, exclude_none=True)
        files = {"files": ", ".join(self.files)} if self.files else {}
        return {self.step: self.line, **known, **files}


def _check_step(data: DataConfig, step: StepName) -> None:
    """Refuse to do more or less than one step.

    Raises:
        ConfigError: the other step is asked for too, or no evaluation set is named.
    """
    sets = [*dict.fromkeys(asked.key for asked, _ in evaluation_sets(data))]
    duplicates = [] if data.deduplication is None else ["data.deduplication"]
    if duplicates and sets:
        raise ConfigError(
            "data dedup and data decontaminate do one of these at a time, and the words ask for "
            f"{' and '.join(duplicates + sets)}; data ingest does both",
            leave_out((sets if step == "deduplication" else duplicates)[-1]),
        )
    if step == "decontamination" and not sets:
        raise ConfigError(
            "data.decontamination.against = [] names no evaluation set",
            leave_out("data.decontamination.against"),
        )


def clean(data: DataConfig, step: StepName, to: Path | None, *, progress: OnProgress) -> Cleaned:
    """Make the passes, and write what remains, whole or not at all.

    Args:
        data: the sources, and one table that says what falls.
        step: which table that is.
        to: a folder that is not there yet; one file for each source is written. None writes none.
        progress: called now and then with (description, done, total), in characters.

    Raises:
        ConfigError: another step is asked for, a source cannot be read, or the folder is there.
        RunError: a source changed meanwhile, or the disk is full.
    """
    _check_step(data, step)
    if to is not None and to.exists():
        names = (to.with_name(f"{to.name}-{number}") for number in range(2, 10**6))
        other = next(name for name in names if not name.exists())
        raise ConfigError(f"--to {printable(to)} is there already", f"--to {shell(other)}")
    tally = LeftOutTally()
    cleaning = Cleaning(data, list_parts(asked_sources(data), tally))
    cleaning.learn(progress, tally)
    assert cleaning.record is not None
    (done,) = cleaning.record.steps
    if not done.report.documents:
        sources = f"data.sources = {[asked.source for asked in asked_sources(data)]}"
        raise without_text(f"{sources} give", tally, "data.sources=PATH")
    files = () if to is None else _written(data, cleaning, to, progress)
    return Cleaned(done.name, done.report, done.line(), tally.records, files)


def _rows(data: DataConfig, cleaning: Cleaning, source: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file: the text, and how many duplicates fell for it where some may."""
    if data.deduplication is None:
        for part in cleaning.parts_of(source):
            yield from ({"text": document.text} for document in cleaning.documents(part))
    else:
        for text, duplicates in cleaning.with_duplicates(source):
            yield {"text": text} | ({} if duplicates is None else {"duplicates": duplicates})


def _written(
    data: DataConfig, cleaning: Cleaning, to: Path, progress: OnProgress
) -> tuple[str, ...]:
    """Write a file for each source and the report aside, then name the folder."""
    assert cleaning.record is not None
    aside = to.with_name(f".{to.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    names = []
    try:
        aside.mkdir(parents=True)
        for source in range(len(asked_sources(data))):
            names.append(f"{source:02d}.jsonl")
            done = 0
            with (aside / names[-1]).open("w", encoding="utf-8") as file:
                for row in _rows(data, cleaning, source):
                    done += len(row["text"])
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    progress("writing", done, None)
            sync_path(aside / names[-1])
        cleaning.check_unchanged()
        write_whole(aside / REPORT, json.dumps(cleaning.record.to_dict(), indent=1))
        publish(aside, to)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError) and is_full_disk(error):
            raise RunError(
                f"the disk is full while {printable(to)} is written",
                "free some space, or --to FOLDER on another disk",
            ) from None
        raise
    return tuple(str(to / name) for name in names)
