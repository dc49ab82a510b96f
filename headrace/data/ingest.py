"""Turn sources into shards: read twice, train or load the tokenizer, hold some out, encode, write.

The first pass counts, finds what is held out (see heldout.py) and keeps a sample for the tokenizer;
the second encodes. The tokenizer learns from at most 64 MiB of the training side, picked by hash
from all of it, so its memory does not grow with the data.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
from headrace.core.native import call_native
from headrace.core.units import format_bytes
from headrace.data import left_out
from headrace.data.heldout import (
    PLACES,
    RULE,
    Overlaps,
    Record,
    RecordDamaged,
    Split,
    Weights,
    refused_split,
)
from headrace.data.left_out import LeftOutTally, Reason
from headrace.data.listing import Asked
from headrace.data.prepared import Prepared, check_same_data, open_prepared
from headrace.data.repeated import Seen
from headrace.data.shards import FORMAT, OtherFormat, ShardWriter, sync_file
from headrace.data.sources import read_documents, source_signature
from headrace.data.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from headrace.plan.plan import DataConfig, Plan

OnProgress = Callable[[str, float, float | None], None]
"""(what is being done, how far, of how much or None)."""

SAMPLE_BYTES = 64 << 20
PIECE_CHARACTERS = 1 << 16
ENCODE_BYTES = 8 << 20
LESS_TO_HOLD = (
    "smaller documents: a .txt, .md or .py file is one and is read whole, .jsonl and .parquet row "
    "by row; data.tokenizer=PATH of a tokenizer.json, which holds no text to train one; or free "
    "some memory"
)
"""What makes preparing take less memory; the rest of it is streamed."""


@dataclass
class _Survey:
    """What the first pass learns."""

    weights: Weights
    text_bytes: int = 0
    sample: list[tuple[int, int, int, str]] = field(default_factory=list)
    """(priority, place of its document, characters before that one's held-out end, text)."""
    sample_bytes: int = 0
    bar: int = PLACES
    """Pieces with a priority below it are kept."""

    def add(self, text: str, *, keep_sample: bool, source: int = 0) -> None:
        raw = text.encode()
        digest = hashlib.sha256(raw).digest()
        place = _place(digest)
        self.text_bytes += len(raw)
        cut = self.weights.add(raw, place, source)
        if not keep_sample:
            return
        head = cut if len(raw) == len(text) else len(text) - len(raw[cut:].decode())
        for begin in range(0, len(text), PIECE_CHARACTERS):
            priority = _place(hashlib.sha256(digest + begin.to_bytes(8, "little")).digest())
            if priority < self.bar:
                piece = text[begin : begin + PIECE_CHARACTERS]
                self.sample.append((priority, place, max(0, head - begin), piece))
                self.sample_bytes += len(piece.encode())
        while self.sample_bytes > SAMPLE_BYTES:
            self.bar //= 2
            self.sample = [item for item in self.sample if item[0] < self.bar]
            self.sample_bytes = sum(len(piece.encode()) for *_, piece in self.sample)

    def training_texts(self, split: Split | None) -> Iterator[str]:
        """Yield the sample without what is held out."""
        for _, place, head, piece in self.sample:
            if split is None or not (split.is_cut(place) or split.is_validation(place)):
                yield piece
            elif split.is_cut(place) and head:
                yield piece[:head]


def _place(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def prepare(plan: Plan, *, progress: OnProgress | None = None) -> Prepared:
    """Return the tokenizer and shards of a plan, made now or kept from an earlier run.

    Args:
        plan: its `data` table says what; nothing else of the plan matters here.
        progress: called now and then with (description, done, total), in bytes of text.

    Raises:
        ConfigError: a source, the tokenizer or the split is not possible, or shards are damaged.
        RunError: the disk is full.
        MemoryFull: the memory is.
    """
    try:
        return _prepare(plan, progress)
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
    text = {thing: digest for thing, digest in was.items() if thing != "mixture"}  # the plan's own
    where = f"shards in {prepared.directory}"
    if place is None:
        where += ", made now, as theirs are gone; an older version may have held out other text"
    check_same_data(text, prepared.fingerprint, where, run)
    return replace(prepared, has_begun=True)


def _rebuild_whole(plan: Plan, folder: Path) -> str:
    """Return the command that rebuilds a whole folder: a part of it is never rebuilt alone."""
    return f"rm -r {shlex.quote(str(folder))} && {_rebuild_command(plan.data)}"


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
        return _key(plan) == prepared.directory.name
    except (ConfigError, OSError):  # what they were made from is gone
        return False


def _prepare(plan: Plan, progress: OnProgress | None) -> Prepared:
    progress = progress or (lambda description, done, total: None)
    root = Path(plan.data.directory).expanduser()
    name = _key(plan, listed := LeftOutTally())
    target = root / name
    try:
        if not target.exists():
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root / f".{name}.lock"):
                if not target.exists():
                    _build_aside(plan, target, progress)
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
        if not is_full_disk(error):
            raise ConfigError(
                f"data cannot be prepared in {root.resolve()}: {error}",
                "data.directory=FOLDER that can be written, on a local disk",
            ) from None
        free_bytes = shutil.disk_usage(root).free
        raise RunError(
            f"the disk is full: {format_bytes(free_bytes)} left in {root.resolve()} while writing "
            "shards, which take 2 bytes a token (4 for a vocabulary over 65,536)",
            "free some space, or data.directory=FOLDER on another disk",
        ) from None


def _key(plan: Plan, listed: LeftOutTally | None = None) -> str:
    """Return 12 hex digits that change with anything that the shards depend on.

    `listed` counts the files of the sources that are left out.
    """
    data = plan.data
    spec = data.tokenizer
    if spec == "bpe":
        spec = f"bpe:{data.vocab}"
    elif not spec.startswith("tiktoken:"):
        own = bool(spec) and spec == plan.model.pretrained
        key = "model.pretrained" if own else "data.tokenizer"
        spec = open_tokenizer(spec, key).fingerprint
    validation = data.validation
    if isinstance(validation, str):
        validation = source_signature(Asked(validation, "data.validation"), listed)
    seen = None if listed is None else Seen(listed)
    signatures = [source_signature(asked, listed, seen) for asked in _asked(plan)]
    facts: list[Any] = [FORMAT, RULE, signatures, spec, validation, data.text_key]
    if data.lossy_tokenizer:  # what a strict plan would refuse is not taken from the cache
        facts.append("lossy")
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _asked(plan: Plan) -> list[Asked]:
    """Return the sources, each with those that the plan names beside it."""
    return [Asked(source, beside=plan.source_list) for source in plan.source_list]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process in at a time; the system frees the lock however the process ends."""
    lock = hold_lock(path, wait=True, key="data.directory")
    try:
        yield
    finally:
        lock.release()


def _build_aside(plan: Plan, target: Path, progress: OnProgress) -> None:
    """Make `target` whole or not at all. The lock is held."""
    aside = target.with_name(f".{target.name}.partial")
    if aside.exists():
        shutil.rmtree(aside)
    try:
        aside.mkdir()
        _build(plan, aside, progress)
        publish(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _build(plan: Plan, folder: Path, progress: OnProgress) -> None:
    """Make both passes, into an empty folder."""
    data, tokenizer = plan.data, None
    if data.tokenizer != "bpe":
        tokenizer = open_tokenizer(data.tokenizer)
        if not data.lossy_tokenizer:
            tokenizer.refuse_losses()
    tally = LeftOutTally()
    survey = _read_through(plan, progress, tally=tally)
    split = _split(plan, survey, tally)
    if tokenizer is None:
        progress("training the tokenizer", 0, None)
        texts = survey.training_texts(split)
        tokenizer = call_native(lambda: train_tokenizer(texts, vocab=data.vocab))
        survey.sample = []
    tokenizer.save(folder / "tokenizer.json")
    with (folder / "tokenizer.json").open("rb") as file:
        sync_file(file)
    _write(plan, folder, tokenizer, split, survey.text_bytes, progress, tally)
    left_out.save(folder, tally.records)


def _read_through(
    plan: Plan, progress: OnProgress, share: float | None = None, tally: LeftOutTally | None = None
) -> _Survey:
    """Make the first pass; with `share`, look only at what could be held out of the text."""
    data, asked = plan.data, plan.data.validation
    own = isinstance(asked, str)
    survey = _Survey(Weights(share or (0.0 if own else asked)))
    sampled = share is None and data.tokenizer == "bpe"
    for number, asked_for in enumerate(_asked(plan)):
        before, met = survey.weights.documents, LeftOutTally()
        for document in read_documents(asked_for, text_key=data.text_key, left_out=met):
            survey.add(document.text, keep_sample=sampled, source=number)
            progress("reading", survey.text_bytes, None)
        if survey.weights.documents == before and len(asked_for.beside) > 1:
            raise _without_text(f"the files of {asked_for}", met, asked_for.without())
        if tally is not None:
            tally.take(met, *Reason)
    return survey


def _without_text(source: str, tally: LeftOutTally, remedy: str) -> ConfigError:
    why = "; ".join(record.format() for record in tally.records)
    return ConfigError(f"{source} give no text" + (why and f": {why}"), remedy)


def _split(plan: Plan, survey: _Survey, tally: LeftOutTally) -> Split | None:
    """Decide what is held out; None where validation has a text of its own."""
    if not survey.weights.documents:
        raise _without_text(f"data.sources = {[*plan.source_list]}", tally, "data.sources=PATH")
    if isinstance(plan.data.validation, str):
        return None
    if (split := survey.weights.split()) is not None:
        return split

    def weigh(share: float) -> Weights:
        return _read_through(plan, lambda *_: None, share).weights

    raise refused_split(survey.weights, ", ".join(plan.source_list), weigh)


def _write(
    plan: Plan,
    folder: Path,
    tokenizer: Tokenizer,
    split: Split | None,
    total_bytes: int,
    progress: OnProgress,
    tally: LeftOutTally,
) -> None:
    """Make the second pass: encode every document and add it to its side."""
    rebuild, asked = _rebuild_command(plan.data), plan.data.validation
    overlaps, cut_documents, done_bytes, lost = Overlaps(), 0, 0, ""

    def writer(name: str, source: str) -> ShardWriter:
        return ShardWriter(
            folder / name,
            tokenizer.vocab,
            document_token=tokenizer.document_token,
            tokenizer=tokenizer.fingerprint,
            source=source,
            rebuild=rebuild,
        )

    def add(side: ShardWriter, text: str, ids: np.ndarray) -> int:
        """Add a document, and return the bytes of its text."""
        nonlocal lost
        is_validation = side is validation
        if not plan.data.lossy_tokenizer:
            tokenizer.check_document(text, ids, is_validation=is_validation)
        elif is_validation and not lost:
            lost = tokenizer.lost_of(text, ids, is_validation=True)
        size = len(text.encode())
        side.add(ids, text_bytes=size, counted_bytes=tokenizer.bytes_of(ids))
        return size

    def encoded(pieces: list[_Piece]) -> Iterator[tuple[_Piece, np.ndarray]]:
        ids = call_native(lambda: tokenizer.encode_batch([p.text for p in pieces]))
        return zip(pieces, ids, strict=True)

    own, text_key = asked if isinstance(asked, str) else "", plan.data.text_key
    validation = writer("validation", own or ", ".join(plan.source_list))
    for pieces in _batches(Asked(own, "data.validation"), text_key, None, tally) if own else ():
        for piece, ids in encoded(pieces):
            overlaps.add(piece.place, piece.text, add(validation, piece.text, ids))
    for i, source in enumerate(_asked(plan)):
        train = writer(f"train-{i:02d}", source.source)
        for pieces in _batches(source, text_key, split):
            for piece, ids in encoded(pieces):
                cut_documents += piece.is_end
                overlaps.trained(piece.place, piece.text)
                done_bytes += add(validation if piece.is_validation else train, piece.text, ids)
            progress("encoding", done_bytes, total_bytes)
        train.close()
    validation.close()
    overlap = overlaps.result() if own else None
    Record(cut_documents=cut_documents, overlap=overlap, loses=lost).save(folder)


class _Piece(NamedTuple):
    """A piece is a document, or the part of it that lies on one side."""

    text: str
    place: int
    """Where the hash of the whole document falls."""
    is_validation: bool = False
    is_end: bool = False
    """Whether it is the held-out end of a document that is trained on."""


def _pieces(
    source: Asked, text_key: str, split: Split | None, tally: LeftOutTally | None
) -> Iterator[_Piece]:
    """Yield the documents of a source, those that are cut as two."""
    for document in read_documents(source, text_key=text_key, left_out=tally):
        text = document.text
        place = _place(hashlib.sha256(text.encode()).digest())
        trained, validation = (text, "") if split is None else split.parts(text, place)
        if trained:
            yield _Piece(trained, place)
        if validation:
            yield _Piece(validation, place, is_validation=True, is_end=bool(trained))


def _batches(
    source: Asked, text_key: str, split: Split | None, tally: LeftOutTally | None = None
) -> Iterator[list[_Piece]]:
    """Yield the pieces of a source in lists of about 8 MiB of text."""
    batch: list[_Piece] = []
    size = 0
    for piece in _pieces(source, text_key, split, tally):
        batch.append(piece)
        size += len(piece.text)
        if size >= ENCODE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _rebuild_command(data: DataConfig) -> str:
    """Return `headrace data ingest` with all keys that are not at their defaults or not demo's."""
    keys = {
        "sources",
        "validation",
        "text_key",
        "tokenizer",
        "lossy_tokenizer",
        "vocab",
        "directory",
    }
    asked = data.model_dump(mode="json", include=keys, exclude_defaults=True)
    words = ["headrace data ingest demo"]
    for key, value in {**asked, "vocab": data.vocab}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(shlex.quote(f"data.{key}={text}"))
    return " ".join(words)
