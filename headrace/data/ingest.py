"""Sources to shards: read twice, train or load the tokenizer, hold some out, encode, write.

The first pass counts, finds the held-out border and keeps a sample for the tokenizer; the second
encodes. A document is held out when the hash of its text falls below `data.validation`, so equal
texts fall on one side, on every machine, whatever is added later. Where there is one document only,
its end is held out. The tokenizer learns from at most
64 MiB of the training side, picked by hash from all of it, so its memory does not grow with the
data.

The result is kept under `data.directory` in a folder named by all that went into it. It is built
aside under a lock and renamed when complete and on disk: `kill -9` leaves at worst a folder that
nobody reads and the next run removes, and a second process waits and then finds the work done. A
cached set of up to 1 GiB is compared with its hashes on every start, a larger one by size only.
"""

import errno
import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import (
    ConfigError,
    MemoryFull,
    RunError,
    TextLost,
    is_out_of_memory,
)
from headrace.core.files import hold_lock, publish
from headrace.core.plan import DataConfig, Plan
from headrace.core.units import format_bytes
from headrace.data import left_out
from headrace.data.left_out import Tally
from headrace.data.prepared import Prepared, check_same_data, open_prepared
from headrace.data.shards import FORMAT, ShardWriter, sync_file
from headrace.data.sources import read_documents, source_signature
from headrace.data.tokenizer import Tokenizer, open_tokenizer, train_tokenizer

Progress = Callable[[str, float, float | None], None]
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
_HASH_RANGE = 1 << 64


@dataclass
class _Survey:
    """What the first pass learns."""

    text_bytes: int = 0
    lowest: int = _HASH_RANGE
    highest: int = -1
    last: int = -1
    """Where the last text's hash falls."""
    sample: list[tuple[int, int, str]] = field(default_factory=list)
    """(priority, hash of its document, piece of text)."""
    sample_bytes: int = 0
    bar: int = _HASH_RANGE
    """Pieces with a priority below it are kept."""

    def add(self, text: str, *, keep_sample: bool) -> None:
        raw = text.encode()
        digest = hashlib.sha256(raw).digest()
        place = _place(digest)
        self.text_bytes += len(raw)
        self.lowest, self.highest = min(self.lowest, place), max(self.highest, place)
        self.last = place
        if not keep_sample:
            return
        for begin in range(0, len(text), PIECE_CHARACTERS):
            priority = _place(hashlib.sha256(digest + begin.to_bytes(8, "little")).digest())
            if priority < self.bar:
                piece = text[begin : begin + PIECE_CHARACTERS]
                self.sample.append((priority, place, piece))
                self.sample_bytes += len(piece.encode())
        while self.sample_bytes > SAMPLE_BYTES:
            self.bar //= 2
            self.sample = [item for item in self.sample if item[0] < self.bar]
            self.sample_bytes = sum(len(piece.encode()) for _, _, piece in self.sample)


def _place(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def prepare(plan: Plan, *, progress: Progress | None = None) -> Prepared:
    """Tokenizer and shards of a plan, made now or found from before.

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
    plan: Plan, record: Mapping[str, Any] | None, own: Path, *, progress: Progress | None = None
) -> Prepared:
    """Return the data that a run was trained on, whatever became of its text since.

    Args:
        plan: the run's.
        record: what the run keeps of it, `Prepared.record`; an older run has none, and its data is
            prepared as its plan says, with its own tokenizer, which may lose text.
        own: the run's tokenizer.json.
        progress: as `prepare` takes it.

    Raises:
        ConfigError: it is gone, or is another.
        RunError, MemoryFull: see `prepare`.
    """
    if record is None:
        return _prepare_again(plan, own, progress)
    was = record["fingerprint"]
    places = [Path(record[key]) for key in ("directory", "absolute")]
    places.append(Path(plan.data.directory).expanduser() / places[0].name)
    place = next((p for p in places if p.is_dir()), None)
    if place is not None:
        found = open_prepared(plan, place)
    else:
        try:
            found = prepare(plan, progress=progress)
        except ConfigError as error:
            raise ConfigError(
                f"the data of this run is gone: its shards are not in {places[1]} any more, and "
                f"data.sources = {', '.join(plan.source_list)} cannot be prepared again",
                f"put the shards back into {places[1]}, or the text where it was",
            ) from error
    text = {thing: digest for thing, digest in was.items() if thing != "mixture"}  # the plan's own
    check_same_data(text, found.fingerprint, f"shards in {found.directory}")
    return found


def _prepare_again(plan: Plan, own: Path, progress: Progress | None) -> Prepared:
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
    """Whether preparing the plan's data now would find these very shards."""
    try:
        return _key(plan) == prepared.directory.name
    except (ConfigError, OSError):  # what they were made from is gone
        return False


def _prepare(plan: Plan, progress: Progress | None) -> Prepared:
    progress = progress or (lambda description, done, total: None)
    root = Path(plan.data.directory).expanduser()
    name = _key(plan, listed := Tally())
    target = root / name
    try:
        if not target.exists():
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root / f".{name}.lock"):
                if not target.exists():
                    _build_aside(plan, target, progress)
        found = open_prepared(plan, target)
        return replace(found, left_out=left_out.current(found.left_out, listed.records))
    except ConfigError as error:
        if not target.exists():
            raise
        remedy = f"rm -r {shlex.quote(str(target))} && {_rebuild_command(plan.data)}"
        raise ConfigError(error.message, remedy) from None  # a part of it is never made anew
    except OSError as error:
        if is_out_of_memory(error):
            raise
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"data cannot be prepared in {root.resolve()}: {error}",
                "data.directory=FOLDER that can be written, on a local disk",
            ) from None
        free_bytes = shutil.disk_usage(root).free
        raise RunError(
            f"the disk is full: {format_bytes(free_bytes)} left in {root.resolve()} while writing "
            "shards, which take 2 bytes a token (4 for a vocabulary over 65,536)",
            "free some space, or data.directory=FOLDER on another disk",
        ) from None


def _key(plan: Plan, listed: Tally | None = None) -> str:
    """12 hex digits that change with anything that the shards depend on.

    `listed` counts the files of the sources that are left out.
    """
    data = plan.data
    spec = data.tokenizer
    if spec == "bpe":
        spec = f"bpe:{data.vocab}"
    elif not spec.startswith("tiktoken:"):
        spec = open_tokenizer(spec).fingerprint
    held_out = data.validation
    if isinstance(held_out, str):
        held_out = source_signature(held_out, listed)
    signatures = [source_signature(source, listed) for source in plan.source_list]
    facts: list[Any] = [FORMAT, signatures, spec, held_out, data.text_key]
    if data.lossy_tokenizer:  # what a strict plan would refuse is not taken from the cache
        facts.append("lossy")
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the system lets go of the lock however the process ends."""
    lock = hold_lock(path, wait=True, key="data.directory")
    try:
        yield
    finally:
        lock.release()


def _build_aside(plan: Plan, target: Path, progress: Progress) -> None:
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


def _build(plan: Plan, folder: Path, progress: Progress) -> None:
    """Both passes, into an empty folder."""
    data, tokenizer = plan.data, None
    if data.tokenizer != "bpe":
        tokenizer = open_tokenizer(data.tokenizer)
        if not data.lossy_tokenizer:
            tokenizer.refuse_losses()
    tally = Tally()
    survey, split = _read_through(plan, None, progress, tally), None
    if survey.lowest == survey.highest and isinstance(data.validation, float):
        split = data.validation  # one text only: its end is held out
        survey = _read_through(plan, split, progress)
    held_out = _held_out(plan, survey, split)
    if tokenizer is None:
        progress("training the tokenizer", 0, None)
        texts = (piece for _, place, piece in survey.sample if not held_out(place))
        tokenizer = train_tokenizer(texts, vocab=data.vocab)
        survey.sample = []
    tokenizer.save(folder / "tokenizer.json")
    with (folder / "tokenizer.json").open("rb") as file:
        sync_file(file)
    _write(plan, folder, tokenizer, held_out, split, survey.text_bytes, progress, tally)
    left_out.save(folder, tally.records)


def _read_through(
    plan: Plan, split: float | None, progress: Progress, tally: Tally | None = None
) -> _Survey:
    """The first pass."""
    survey = _Survey()
    for source in plan.source_list:
        for text in _texts(source, plan.data.text_key, split, tally):
            survey.add(text, keep_sample=plan.data.tokenizer == "bpe")
            progress("reading", survey.text_bytes, None)
    return survey


def _held_out(plan: Plan, survey: _Survey, split: float | None) -> Callable[[int], bool]:
    """Which documents are held out, by the place of their hash: at least one, and never all."""
    if survey.highest < 0:
        raise ConfigError(f"data.sources = {[*plan.source_list]} give no text", "data.sources=PATH")
    if isinstance(plan.data.validation, str):
        return lambda place: False
    if survey.lowest == survey.highest:
        raise ConfigError(
            f"data.sources = {', '.join(plan.source_list)} give one short document, and validation "
            "needs text of its own",
            "data.validation=PATH, or more text",
        )
    if split is not None:
        return lambda place: place == survey.last
    border = int(plan.data.validation * _HASH_RANGE)
    border = min(max(border, survey.lowest + 1), survey.highest)
    return lambda place: place < border


def _write(
    plan: Plan,
    folder: Path,
    tokenizer: Tokenizer,
    is_held_out: Callable[[int], bool],
    split: float | None,
    total_bytes: int,
    progress: Progress,
    tally: Tally,
) -> None:
    """The second pass: encode every document and add it to its side."""
    rebuild = _rebuild_command(plan.data)

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
        if not plan.data.lossy_tokenizer:
            tokenizer.check_document(text, ids)
        size = len(text.encode())
        side.add(ids, text_bytes=size, counted_bytes=tokenizer.bytes_of(ids))
        return size

    held_out = plan.data.validation
    own = isinstance(held_out, str)
    validation = writer("validation", held_out if own else ", ".join(plan.source_list))
    done_bytes = 0
    for i, source in enumerate(plan.source_list):
        train = writer(f"train-{i:02d}", source)
        for texts in _batches(source, plan.data.text_key, split):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                held = is_held_out(_place(hashlib.sha256(text.encode()).digest()))
                done_bytes += add(validation if held else train, text, ids)
            progress("encoding", done_bytes, total_bytes)
        if not train.documents:
            raise ConfigError(
                f"data.sources: {source} has no document left to train on, all were held out by "
                f"data.validation = {held_out}",
                "data.validation=PATH, a smaller share, or more documents in it",
            )
        train.close()
    if isinstance(held_out, str):
        for texts in _batches(held_out, plan.data.text_key, tally=tally):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                add(validation, text, ids)
    validation.close()


def _texts(
    source: str, text_key: str, split: float | None, tally: Tally | None = None
) -> Iterator[str]:
    """Documents of a source; where `split` is given, each as two, the second with that share."""
    for document in read_documents(source, text_key=text_key, left_out=tally):
        text = document.text
        if split is None:
            yield text
        else:
            cut = int(len(text) * (1 - split))
            cut = text.find("\n", cut) + 1 or cut
            yield from filter(None, (text[:cut], text[cut:]))


def _batches(
    source: str, text_key: str, split: float | None = None, tally: Tally | None = None
) -> Iterator[list[str]]:
    """Documents of a source in lists of about 8 MiB of text."""
    batch: list[str] = []
    size = 0
    for text in _texts(source, text_key, split, tally):
        batch.append(text)
        size += len(text)
        if size >= ENCODE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _rebuild_command(data: DataConfig) -> str:
    """`headrace data ingest` with the keys that are not at their defaults or not at demo's."""
    keys = {
        "sources", "validation", "text_key", "tokenizer", "lossy_tokenizer", "vocab", "directory",
    }  # fmt: skip
    asked = data.model_dump(mode="json", include=keys, exclude_defaults=True)
    words = ["headrace data ingest demo"]
    for key, value in {**asked, "vocab": data.vocab}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(shlex.quote(f"data.{key}={text}"))
    return " ".join(words)
