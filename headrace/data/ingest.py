"""Turn sources into shards: read twice, train or load the tokenizer, hold some out, encode, write.

The first pass counts, finds what is held out (see heldout.py) and keeps a sample for the tokenizer;
the second encodes. Both are stages of a pipeline over parts of the sources (see pipeline.py), which
run here or on an engine (see scale/). The tokenizer learns from at most 64 MiB of the training
side, picked by hash from all of it, or with `data.tokenizer_text = "all"` from the words of all of
it, which a pass of its own counts here (see bpe.py); its memory does not grow with the data either
way.

The result is kept under `data.directory` in a folder named by all that went into it. It is built
aside under a lock and renamed when complete and on disk: `kill -9` leaves at worst a folder that
nobody reads and the next run removes, and a second process waits and then finds the work done. A
cached set of up to 1 GiB is compared with its hashes on every start, a larger one by its sizes and
offsets.
"""

import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.core.command import rerun_train
from headrace.core.errors import (
    ConfigError,
    MemoryFull,
    RunError,
    TextLost,
    is_full_disk,
    is_out_of_memory,
)
from headrace.core.files import hold_lock, publish
from headrace.core.progress import OnProgress
from headrace.core.units import format_bytes
from headrace.data import left_out
from headrace.data.chat.encode import chat_encoder, template_of
from headrace.data.chat.record import chat_digest
from headrace.data.cleaning import Cleaning, asked_sources, uncleaned
from headrace.data.commands import rebuild_command
from headrace.data.fields import TextReading
from headrace.data.heldout import (
    RULE,
    Record,
    RecordDamaged,
    Split,
    Weights,
    refused_split,
)
from headrace.data.images import images_key, write_images
from headrace.data.left_out import LeftOutTally, Reason, without_text
from headrace.data.listing import Asked
from headrace.data.pipeline import (
    Encoder,
    InThisProcess,
    PartEngine,
    Pipeline,
    own_validation,
)
from headrace.data.prepared import PACED, Prepared, check_same_data, open_prepared
from headrace.data.repeated import Seen
from headrace.data.scored import column_of, number_of, save_column, with_scores
from headrace.data.shards import FORMAT, OtherFormat, ShardWriter, sync_file
from headrace.data.sources import source_signature
from headrace.data.survey import Survey
from headrace.data.tokenizer import open_tokenizer
from headrace.data.training import refuse_training_keys, train_for, training_key
from headrace.plan.plan import Plan

EngineFor = Callable[[Path], PartEngine]
"""(Folder that is made) -> what runs the stages."""

LESS_TO_HOLD = (
    "smaller documents: a .txt, .md or .py file is one and is read whole, .jsonl and .parquet row "
    "by row; data.tokenizer=PATH of a tokenizer.json, which holds no text to train one; or free "
    "some memory"
)
"""What makes preparing take less memory; the rest of it is streamed."""


def prepare(
    plan: Plan, *, progress: OnProgress | None = None, engine_for: EngineFor | None = None
) -> Prepared:
    """Return the tokenizer and shards of a plan, made now or kept from an earlier run.

    Args:
        plan: its `data` table says what; nothing else of the plan matters here.
        progress: called now and then with (description, done, total), in bytes of text.
        engine_for: gives what runs the stages, called with the folder that is made, when it must
            be; this process without it.

    Raises:
        ConfigError: a source, the tokenizer or the split is not possible, or shards are damaged.
        RunError: the disk is full.
        MemoryFull: the memory is.
    """
    try:
        return with_scores(plan, _prepare(plan, progress, engine_for), progress)
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryFull(error, "data that is being prepared", LESS_TO_HOLD) from None


def reopen(
    plan: Plan, record: Mapping[str, Any] | None, run: Path, *, progress: OnProgress | None = None
) -> Prepared:
    """Return the data that a run was trained on, whatever became of its text since.

    Args:
        plan: the run's.
        record: what the run keeps of it, `Prepared.record`; an older run has none, and its data is
            prepared as its plan says, with its own tokenizer, which may lose text.
        run: its folder.
        progress: as `prepare` takes it.

    Raises:
        ConfigError: it is gone, or is another.
        RunError, MemoryFull: see `prepare`.
    """
    if record is None:
        prepared = _prepare_unrecorded(plan, run / "tokenizer.json", progress)
        return replace(prepared, has_begun=True)
    was = record["fingerprint"]
    if "cleaning" not in was:
        plan = uncleaned(plan)
    places = [Path(record[key]) for key in ("directory", "absolute")]
    places.append(Path(plan.data.directory).expanduser() / places[0].name)
    place = next((p for p in places if p.is_dir()), None)
    if place is not None:
        try:
            prepared = open_prepared(plan, place)
        except RecordDamaged:
            raise
        except ConfigError as error:
            remedy = _remade(plan, place, run, older=isinstance(error, OtherFormat))
            raise ConfigError(error.message, remedy) from None
    else:
        try:
            prepared = prepare(plan, progress=progress)
        except ConfigError as error:
            raise ConfigError(
                f"the data of this run is gone: its shards are not in {places[1]} any more, and "
                f"data.sources = {', '.join(plan.source_list)} cannot be prepared again",
                f"{rerun_train(run, 'name=NEW', 'data.sources=PATH')} for a new run, or the "
                f"shards back into {places[1]}, or the text where it was",
            ) from error
    own = ("mixture", *PACED)  # the plan's own, which a checkpoint is compared with
    text = {thing: digest for thing, digest in was.items() if thing not in own}
    where = f"shards in {prepared.directory}"
    if place is None:
        where += ", made now, as theirs are gone; an older version may have held out other text"
    now = {thing: digest for thing, digest in prepared.fingerprint.items() if thing not in own}
    check_same_data(text, now, where, run)
    return replace(with_scores(plan, prepared, progress), has_begun=True)


def _rebuild_whole(plan: Plan, folder: Path) -> str:
    """Return the command that rebuilds a whole folder: a part of it is never rebuilt alone."""
    return f"rm -r {shlex.quote(str(folder))} && {rebuild_command(plan.data)}"


def _remade(plan: Plan, folder: Path, run: Path, *, older: bool) -> str:
    """Return the command for damaged shards of a run, given whether its text is unchanged."""
    words = ["name=NEW"]
    try:
        if older or _key(plan) == folder.name:
            return _rebuild_whole(plan, folder)
    except (ConfigError, OSError):  # what they were made from is gone
        words.append("data.sources=PATH")
    return (
        f"{rerun_train(run, *words)} for a new run, since the text is not what these shards were "
        f"made from any more; or a copy of {folder} in its place"
    )


def _prepare_unrecorded(plan: Plan, own: Path, progress: OnProgress | None) -> Prepared:
    """Prepare the data of a run that keeps no record of it."""

    def prepare_with(**keys: Any) -> Prepared:
        data = plan.data.model_copy(update=keys)
        return prepare(plan.model_copy(update={"data": data}), progress=progress)

    if not own.is_file():  # it ended before it had begun
        return prepare(plan, progress=progress)
    keys = {} if plan.data.tokenizer == "bpe" else {"tokenizer": str(own)}
    try:
        return prepare_with(**keys)
    except TextLost:  # nobody had to say so when the run was made
        return prepare_with(**keys, lossy_tokenizer=True)


def is_current(plan: Plan, prepared: Prepared) -> bool:
    """Return whether preparing the plan's data now would give these very shards."""
    try:
        return _key(plan if prepared.cleaning else uncleaned(plan)) == prepared.directory.name
    except (ConfigError, OSError):  # what they were made from is gone
        return False


def _prepare(
    plan: Plan, progress: OnProgress | None, engine_for: EngineFor | None = None
) -> Prepared:
    progress = progress or (lambda description, done, total: None)
    target = folder_of(plan, listed := LeftOutTally())
    root = target.parent
    try:
        if not target.exists():
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root / f".{target.name}.lock"):
                if not target.exists():
                    engine = InThisProcess() if engine_for is None else engine_for(target)
                    _build_aside(plan, target, progress, engine)
        prepared = open_prepared(plan, target)
        return replace(prepared, left_out=left_out.current(prepared.left_out, listed.records))
    except ConfigError as error:
        if not target.exists():
            raise
        remedy = _rebuild_whole(plan, target)
        raise ConfigError(error.message, remedy) from None  # a part of it is never made anew
    except OSError as error:
        if is_out_of_memory(error):
            raise
        raise disk_error(error, root) from None


def disk_error(error: OSError, root: Path) -> ConfigError | RunError:
    """Return what is told of a disk that cannot be written, or is full; `root` lies on it."""
    if not is_full_disk(error):
        return ConfigError(
            f"data cannot be prepared in {root.resolve()}: {error}",
            "data.directory=FOLDER that can be written, on a local disk",
        )
    free_bytes = shutil.disk_usage(root).free
    return RunError(
        f"the disk is full: {format_bytes(free_bytes)} left in {root.resolve()} while writing "
        "shards, which take 2 bytes a token (4 for a vocabulary over 65,536)",
        "free some space, or data.directory=FOLDER on another disk",
    )


def folder_of(plan: Plan, listed: LeftOutTally | None = None) -> Path:
    """Return the folder that preparing the plan's data makes, whether it is there or not.

    `listed` counts files that are left out.
    """
    return Path(plan.data.directory).expanduser() / _key(plan, listed)


def _key(plan: Plan, listed: LeftOutTally | None = None) -> str:
    """Return 12 hex digits that change with anything that the shards depend on.

    `listed` counts the files of the sources that are left out.
    """
    if plan.vision is not None:
        return images_key(plan.vision)
    data = plan.data
    spec = data.tokenizer
    if spec != "bpe":
        refuse_training_keys(data)
    if spec == "bpe":
        spec = f"bpe:{data.vocab}" + training_key(data)
    elif not spec.startswith("tiktoken:"):
        own = bool(spec) and spec == plan.model.pretrained
        key = "model.pretrained" if own else "data.tokenizer"
        spec = open_tokenizer(spec, key).fingerprint
    validation = data.validation
    if isinstance(validation, str):
        validation = source_signature(Asked(validation, "data.validation"), listed)
    seen = None if listed is None else Seen(listed)
    signatures = [source_signature(asked, listed, seen) for asked in asked_sources(plan.data)]
    facts: list[Any] = [FORMAT, RULE, signatures, spec, validation, data.text_key]
    reading = TextReading.of(data)
    if reading != TextReading(data.text_key):  # at its defaults it is no fact
        facts.append(["reading", reading.template, reading.separator, reading.replace])
    if column := column_of(data):
        facts.append(["column", column])
    if data.lossy_tokenizer:  # what a strict plan would refuse is not taken from the cache
        facts.append("lossy")
    facts += Cleaning(plan.data).facts()
    if data.chat is not None:
        template = template_of(data)
        facts.append(["chat", chat_digest(data.chat, template.text, template.names)])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process in at a time; the system frees the lock however the process ends."""
    lock = hold_lock(path, wait=True, key="data.directory")
    try:
        yield
    finally:
        lock.release()


def _build_aside(plan: Plan, target: Path, progress: OnProgress, engine: PartEngine) -> None:
    """Make `target` whole or not at all. The lock is held."""
    aside = target.with_name(f".{target.name}.partial")
    if aside.exists():
        shutil.rmtree(aside)
    try:
        aside.mkdir()
        _build(plan, aside, progress, engine)
        publish(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _build(plan: Plan, folder: Path, progress: OnProgress, engine: PartEngine) -> None:
    """Make both passes, into an empty folder; draw images, where the plan is for images."""
    if plan.vision is not None:
        write_images(plan.vision, folder)
        return
    data, tokenizer, trained_on = plan.data, None, None
    if data.tokenizer != "bpe":
        tokenizer = open_tokenizer(data.tokenizer)
        if not data.lossy_tokenizer:
            tokenizer.refuse_losses()
    tally = LeftOutTally()
    pipeline = Pipeline.of(data, tally, number_of(plan))
    cleaning = pipeline.cleaning
    cleaning.learn(progress, learner=engine.learner(pipeline))
    survey = _read_through(pipeline, engine, progress, tally)
    split = _split(pipeline, survey, tally)
    if tokenizer is None:
        counted = data.tokenizer_text == "all"
        texts = (pipeline if counted else survey).training_texts(split)
        tokenizer, trained_on = train_for(data, texts, survey.text_bytes, progress)
        survey.sample = []
    tokenizer.save(folder / "tokenizer.json")
    with (folder / "tokenizer.json").open("rb") as file:
        sync_file(file)
    encoder = Encoder(tokenizer, data.lossy_tokenizer, split, chat_encoder(data, tokenizer))
    record = _write(plan, pipeline, engine, folder, encoder, survey.text_bytes, progress, tally)
    cleaning.check_unchanged()
    record.model_copy(update={"trained_on": trained_on}).save(folder)
    if cleaning.record is not None:
        cleaning.record.save(folder)
    left_out.save(folder, tally.records)


def _read_through(
    pipeline: Pipeline, engine: PartEngine, progress: OnProgress, tally: LeftOutTally
) -> Survey:
    """Make the first pass."""
    survey = pipeline.new_survey()
    engine.begin_survey(pipeline, progress)
    for source, asked in enumerate(asked_sources(pipeline.data)):
        before, met = survey.weights.documents, LeftOutTally()
        for number in pipeline.cleaning.parts_of(source):
            met.take(engine.survey(pipeline, number, survey, progress), *Reason)
        is_empty = survey.weights.documents == before
        if is_empty and (emptied := pipeline.cleaning.emptied(source)) is not None:
            raise emptied
        if is_empty and len(asked.beside) > 1:
            raise without_text(f"the files of {asked} give", met, asked.without())
        tally.take(met, *Reason)
    return survey


def _split(pipeline: Pipeline, survey: Survey, tally: LeftOutTally) -> Split | None:
    """Decide what is held out; None where validation has a text of its own."""
    sources = [asked.source for asked in asked_sources(pipeline.data)]
    if not survey.weights.documents:
        raise without_text(f"data.sources = {sources} give", tally, "data.sources=PATH")
    if isinstance(pipeline.data.validation, str):
        return None
    if (split := survey.weights.split()) is not None:
        return split

    def weigh(share: float) -> Weights:
        other = pipeline.new_survey(share)
        for number in range(len(pipeline.parts)):
            pipeline.survey(number, other, lambda done: None, keep_sample=False)
        return other.weights

    raise refused_split(survey.weights, ", ".join(sources), weigh)


def _write(
    plan: Plan,
    pipeline: Pipeline,
    engine: PartEngine,
    folder: Path,
    encoder: Encoder,
    total_bytes: int,
    progress: OnProgress,
    tally: LeftOutTally,
) -> Record:
    """Make the second pass: encode every document and add it to its side; return how."""
    data, tokenizer = pipeline.data, encoder.tokenizer
    own = data.validation if isinstance(data.validation, str) else ""

    def writer(name: str, source: str) -> ShardWriter:
        return ShardWriter(
            folder / name,
            tokenizer.vocab,
            document_token=tokenizer.document_token,
            tokenizer=tokenizer.fingerprint,
            source=source,
            rebuild=rebuild_command(data),
            answers=encoder.chat is not None,
        )

    sources = [asked.source for asked in asked_sources(data)]
    validation = writer("validation", own or ", ".join(sources))
    encoder.encode_own(own_validation(data, tally), validation)
    engine.begin_encode(pipeline, encoder, progress)
    scores: list[Sequence[float]] = []
    for i, source in enumerate(sources):
        train = writer(f"train-{i:02d}", source)
        for number in pipeline.cleaning.parts_of(i):
            engine.encode(
                pipeline,
                number,
                encoder,
                train,
                validation,
                lambda done: progress("encoding", done, total_bytes),
            )
        if encoder.chat is not None and not train.tokens:
            raise encoder.chat.record.nothing_left(source)
        train.close()
        scores.append(encoder.take_scores())
    if column_of(data):
        save_column(plan, folder, scores, progress)
    validation.close()
    if encoder.chat is not None:
        encoder.chat.record.save(folder)
    return Record(
        cut_documents=encoder.cut_documents,
        overlap=pipeline.cleaning.overlap,
        loses=encoder.loses,
    )
