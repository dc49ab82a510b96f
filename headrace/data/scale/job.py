"""A job: the folder in which workers leave what they made of each part, until it is merged.

It lies beside the prepared data as `.NAME.job`, where NAME is what all of it goes into is called,
so another state of the sources is another job. In it:

    job.json              the plan's data table and the parts, as they were listed
    deduplication/00012   what a cleaner learned of part 12; `decontamination` likewise
    deduplication.decided/00012   what was decided of it, once all parts were merged
    survey/00012.json     what the first stage learned of part 12
    encode-DIGEST/        the second stage, named by what it was decided to do
        decision.json     tokenizer and split
        00012/            part 12: a shard set a side, and part.json

A part appears whole, by a rename, once it is on the disk, and carries its own sha256: one that is
there is never made again, and a kill leaves at worst what nobody reads. Workers share nothing but
this folder, which every machine of an engine must see under the same path. A worker holds 64 MiB of
text for the tokenizer, the places of at most 262,144 groups of documents, and one batch of 8 MiB
that is being encoded; the process that merges holds as much, of one part at a time. Of a cleaner it
holds what one process does: sketches or digests of all documents, and it decides alone what falls.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.core.errors import ConfigError, HeadraceError, MemoryFull, is_out_of_memory
from headrace.core.files import publish, shell, write_whole
from headrace.core.progress import OnProgress
from headrace.core.strict import Strict
from headrace.data.chat.encode import chat_encoder
from headrace.data.chat.record import ChatCounts
from headrace.data.cleaning import DOING, Learner, LearnHere, StepName
from headrace.data.heldout import Split
from headrace.data.ingest import LESS_TO_HOLD, disk_error, prepare
from headrace.data.left_out import LeftOut, LeftOutTally
from headrace.data.number_column import NumberColumn
from headrace.data.parts import SourcePart
from headrace.data.pipeline import Encoder, Pipeline
from headrace.data.prepared import Prepared
from headrace.data.quality.cleaner import Cleaner, PartCleaner, PartState
from headrace.data.scale.sealed import (
    as_json,
    read_sealed,
    read_state,
    write_sealed,
    write_state,
)
from headrace.data.scored import column_of
from headrace.data.shards import Shards, ShardWriter
from headrace.data.survey import Survey
from headrace.data.tokenizer import Tokenizer
from headrace.plan.data_config import DataConfig
from headrace.plan.plan import Plan

SURVEY = "survey"
STEPS: tuple[StepName, ...] = ("deduplication", "decontamination")
"""Stages in which cleaners learn, in their order."""
SIDES = ("train", "validation")


class JobRecord(Strict):
    """What workers must know of a job."""

    data: DataConfig
    parts: tuple[SourcePart, ...]
    cwd: str
    """The folder from which relative paths of the plan lead."""
    table: str = ""
    """The table of the plan that names the field which scores rows."""


class PartWorkers(Protocol):
    """What runs a stage over parts: `run_part` of each of them, somewhere."""

    def run(
        self, folder: Path, stage: str, numbers: Sequence[int], done: Callable[[int], None]
    ) -> None:
        """Make parts, and return when all are there.

        Args:
            folder: of the job.
            stage: its name.
            numbers: of the parts, in the order in which they are wanted.
            done: called with the number of a part that is there.

        Raises:
            HeadraceError: a part cannot be made, or the engine broke.
        """
        ...


class PartsJob:
    """Runs the stages on workers, and merges what they leave; a `PartEngine` of the pipeline.

    Args:
        target: the folder of prepared data that the job is for.
        workers: make the parts.
    """

    def __init__(self, target: Path, workers: PartWorkers) -> None:
        self.folder, self._workers = job_folder(target), workers
        self._stage = ""

    def learner(self, pipeline: Pipeline) -> Learner:
        """Return what lets workers learn the parts for cleaners; makes the folder of the job."""
        record = JobRecord(
            data=pipeline.data,
            parts=pipeline.parts,
            cwd=os.getcwd(),
            table=pipeline.column.table if pipeline.column else "",
        )
        file = self.folder / "job.json"
        if file.exists() and as_json(record) != file.read_text():
            shutil.rmtree(self.folder)  # of another version, or from another folder
        self.folder.mkdir(exist_ok=True)
        if not file.exists():
            write_whole(file, as_json(record))
        return _PartsLearner(self, pipeline)

    def begin_survey(self, pipeline: Pipeline, progress: OnProgress) -> None:
        """Make the surveys of the parts that no earlier job left."""
        self.run(SURVEY, pipeline, "reading", progress)

    def survey(
        self, pipeline: Pipeline, number: int, survey: Survey, progress: OnProgress
    ) -> LeftOutTally:
        """Merge what was learned of a part."""
        state = read_sealed(part_path(self.folder, SURVEY, number))
        survey.merge(Survey.of_state(state["survey"]))
        tally = LeftOutTally()
        tally.take_records(LeftOut.model_validate(record) for record in state["left_out"])
        return tally

    def begin_encode(self, pipeline: Pipeline, encoder: Encoder, progress: OnProgress) -> None:
        """Encode the parts that no earlier job left."""
        decision = {
            "tokenizer": encoder.tokenizer.text,
            "is_lossy": encoder.is_lossy,
            "split": encoder.split and encoder.split.state(),
        }
        digest = hashlib.sha256(as_json(decision).encode()).hexdigest()
        self._stage = f"encode-{digest[:12]}"
        (self.folder / self._stage).mkdir(exist_ok=True)
        write_sealed(self.folder / self._stage / "decision.json", decision)
        self.run(self._stage, pipeline, "encoding", progress)

    def encode(
        self,
        pipeline: Pipeline,
        number: int,
        encoder: Encoder,
        train: ShardWriter,
        validation: ShardWriter,
        progress: Callable[[int], None],
    ) -> None:
        """Copy the tokens of a part into both sides, compared with its hashes."""
        folder = part_path(self.folder, self._stage, number)
        counts = read_sealed(folder / "part.json")
        for name, writer in zip(SIDES, (train, validation), strict=True):
            if name in counts["sides"]:
                try:
                    (shards := Shards.open(folder / name)).verify()
                except ConfigError as error:
                    remedy = f"rm -r {shell(folder)}, and the same command again"
                    raise ConfigError(error.message, remedy) from None
                writer.take(shards)
        encoder.cut_documents += counts["cut_documents"]
        encoder.loses = encoder.loses or counts["loses"]
        encoder.text_bytes += counts["text_bytes"]
        if encoder.chat is not None:
            encoder.chat.record.take(ChatCounts.model_validate(counts["chat"]))
        if pipeline.column:
            encoder.scores.frombytes(read_state(folder / "scores").arrays["scores"].tobytes())
        progress(encoder.text_bytes)

    def run(self, stage: str, pipeline: Pipeline, doing: str, progress: OnProgress) -> None:
        """Run a stage over the parts that are not there, and tell how far it is."""
        self._save_decided(pipeline)
        (self.folder / stage).mkdir(exist_ok=True)
        sizes = [max(1, sum(file.size for file in part.files)) for part in pipeline.parts]
        missing = missing_parts(self.folder, stage, len(sizes))
        total, done = sum(sizes), sum(sizes) - sum(sizes[n] for n in missing)
        progress(doing, done, total)

        def made(number: int) -> None:
            nonlocal done
            done += sizes[number]
            progress(doing, done, total)

        if missing:
            self._workers.run(self.folder, stage, missing, made)

    def _save_decided(self, pipeline: Pipeline) -> None:
        """Write what cleaners decided of each part, which the stages after them read.

        A job that goes on finds it there: the same text gives the same decisions.
        """
        for step in pipeline.cleaning.steps_done:
            (folder := decided_path(self.folder, step)).mkdir(exist_ok=True)
            for number in range(len(pipeline.parts)):
                if not (file := folder / f"{number:05d}").exists():
                    write_state(file, pipeline.cleaning.decided(step, number))


class _PartsLearner:
    """Lets workers learn the parts for a cleaner, and merges what they learned in their order."""

    def __init__(self, job: PartsJob, pipeline: Pipeline) -> None:
        self._job, self._pipeline = job, pipeline
        self._here = LearnHere(pipeline.cleaning)
        self._step: StepName = "deduplication"

    def begin(self, step: StepName, cleaner: Cleaner, progress: OnProgress) -> None:
        """Let workers learn the parts that no earlier job left, where a cleaner takes parts."""
        self._step = step
        self._here.begin(step, cleaner, progress)
        if isinstance(cleaner, PartCleaner):
            self._job.run(step, self._pipeline, DOING[step], progress)

    def learn(self, number: int, cleaner: Cleaner, begin: int, progress: OnProgress) -> int:
        """Merge what was learned of a part; a cleaner that takes no parts learns it here."""
        if not isinstance(cleaner, PartCleaner):
            return self._here.learn(number, cleaner, begin, progress)
        state = read_state(part_path(self._job.folder, self._step, number))
        source = self._pipeline.parts[number].source
        cleaner.merge(PartState(state.arrays, state.values["learned"]), source, begin)
        self._pipeline.cleaning.note_count(number, state.values["read"])
        return state.values["given"]


def job_folder(target: Path) -> Path:
    """Return the folder of the job that makes prepared data, as an absolute path."""
    return target.absolute().with_name(f".{target.name}.job")


def ingest_on(plan: Plan, workers: PartWorkers, *, progress: OnProgress | None = None) -> Prepared:
    """Prepare the data of a plan on workers: the same shards as `prepare` makes alone.

    Args:
        plan: whose data is wanted.
        workers: what makes the parts.
        progress: as `prepare` takes it.

    Raises:
        HeadraceError: see `prepare`; finished parts stay, and the same command goes on with them.
    """
    engine_for = lambda target: PartsJob(target, workers)  # noqa: E731
    prepared = prepare(plan, progress=progress, engine_for=engine_for)
    shutil.rmtree(job_folder(prepared.directory), ignore_errors=True)
    return prepared


def part_path(folder: Path, stage: str, number: int) -> Path:
    """Return where the result of a part lies: a folder of what is encoded, else a file."""
    return folder / stage / (f"{number:05d}.json" if stage == SURVEY else f"{number:05d}")


def decided_path(folder: Path, step: StepName) -> Path:
    """Return the folder of what a cleaner decided, a file for each part."""
    return folder / f"{step}.decided"


def missing_parts(folder: Path, stage: str, count: int) -> list[int]:
    """Return the numbers of the parts, of so many, that are not there.

    The folder is listed: a shared file system that was asked for a name may go on denying it for a
    minute after another machine has made it.
    """
    there = set(os.listdir(folder / stage))
    return [n for n in range(count) if part_path(folder, stage, n).name not in there]


def run_part(folder: Path, stage: str, number: int) -> None:
    """Make one part, unless it is there; what a worker calls.

    Raises:
        HeadraceError: it cannot be made; nothing of it is left that could be taken for whole.
    """
    folder = folder.absolute()
    with _as_one_error(folder):
        record = _record(folder, (folder / "job.json").stat().st_mtime_ns)
        column = column_of(record.data)
        noted = NumberColumn(column, record.table) if column else None
        pipeline = Pipeline(record.data, record.parts, noted)
        if part_path(folder, stage, number).exists():
            return
        with chdir(record.cwd):
            for step in STEPS:
                if step == stage:
                    return _learn(pipeline, folder, step, number)
                if (decided := decided_path(folder, step)).exists():
                    state = read_state(decided / f"{number:05d}")
                    pipeline.cleaning.take_decided(step, number, state)
            if stage == SURVEY:
                _survey(pipeline, folder, number)
            else:
                _encode(pipeline, folder / stage, number)


@lru_cache(maxsize=1)
def _record(folder: Path, written_ns: int) -> JobRecord:
    return JobRecord.model_validate(json.loads((folder / "job.json").read_bytes()))


@contextmanager
def _as_one_error(folder: Path) -> Iterator[None]:
    """Raise what goes wrong as one error for a user."""
    try:
        yield
    except HeadraceError:
        raise
    except (RuntimeError, MemoryError, OSError) as error:
        if is_out_of_memory(error):
            raise MemoryFull(error, "data that is being prepared", LESS_TO_HOLD) from None
        if isinstance(error, OSError):
            raise disk_error(error, folder.parent) from None
        raise


def _learn(pipeline: Pipeline, folder: Path, step: StepName, number: int) -> None:
    cleaner = pipeline.cleaning.part_cleaner(step)
    given = pipeline.cleaning.learn_part(number, cleaner, 0, lambda size: None)
    learned = cleaner.learned()
    values = {
        "learned": learned.values,
        "given": given,
        "read": pipeline.cleaning.read_count(number),
    }
    write_state(part_path(folder, step, number), PartState(learned.arrays, values))


def _survey(pipeline: Pipeline, folder: Path, number: int) -> None:
    survey = pipeline.new_survey()
    tally = pipeline.survey(number, survey, lambda done: None)
    left_out = [record.model_dump(mode="json") for record in tally.records]
    state = {"survey": survey.state(), "left_out": left_out}
    write_sealed(part_path(folder, SURVEY, number), state)


class _SideWriter:
    """Writes one side of a part once it has a document."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self._writer: ShardWriter | None = None

    def add(
        self,
        document_ids: np.ndarray,
        *,
        text_bytes: int = 0,
        counted_bytes: int | None = None,
        counted: np.ndarray | None = None,
    ) -> None:
        """Add a document; see `ShardWriter.add`."""
        if self._writer is None:
            known = self._tokenizer
            self._writer = ShardWriter(
                self._folder,
                known.vocab,
                document_token=known.document_token,
                tokenizer=known.fingerprint,
                answers=counted is not None,
            )
        sizes = {"text_bytes": text_bytes, "counted_bytes": counted_bytes}
        self._writer.add(document_ids, **sizes, counted=counted)

    def close(self) -> bool:
        """Finish the set, and return whether there is one."""
        if self._writer is not None:
            self._writer.close()
        return self._writer is not None


def _encode(pipeline: Pipeline, stage: Path, number: int) -> None:
    decision = _decision(stage / "decision.json")
    split = decision["split"] and Split.of_state(decision["split"])
    tokenizer = _tokenizer(decision["tokenizer"])
    chat = chat_encoder(pipeline.data, tokenizer)
    encoder = Encoder(tokenizer, decision["is_lossy"], split, chat)
    whole = part_path(stage.parent, stage.name, number)
    aside = whole.with_name(f".{whole.name}.{os.uname().nodename}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        sides = {name: _SideWriter(aside / name, tokenizer) for name in SIDES}
        train, validation = (sides[name] for name in SIDES)
        encoder.encode(pipeline.documents(number), train, validation, lambda done: None)
        counts = {
            "sides": [name for name, side in sides.items() if side.close()],
            "cut_documents": encoder.cut_documents,
            "loses": encoder.loses,
            "text_bytes": encoder.text_bytes,
            "chat": chat and chat.record.counts.model_dump(mode="json"),
        }
        if pipeline.column:
            scores = np.frombuffer(encoder.scores, np.float64)
            write_state(aside / "scores", PartState({"scores": scores}))
        write_sealed(aside / "part.json", counts)
        try:
            publish(aside, whole)
        except OSError:
            if not whole.exists():  # another worker that was taken for dead made the same
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@lru_cache(maxsize=1)
def _decision(file: Path) -> Any:
    return read_sealed(file)


@lru_cache(maxsize=1)
def _tokenizer(text: str) -> Tokenizer:
    return Tokenizer(text)
