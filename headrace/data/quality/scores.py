"""Score documents: how hard each one is, kept beside the shards as one float32 a document.

Scores are computed once, from the tokens of a shard set or while its text is read, and lie in a
folder of their own within the prepared data: `train-00.bin`, ... (float32, little endian, one value
a document in the order of the shards) and `scores.json`, which is written last and holds their
sha256, what was computed and of what. A score is a function of its document alone. What was written
before an interruption therefore stands, and the same command goes on behind it.

- `compression`: bytes that zlib (level 6) makes of a byte of text. Text that repeats itself has low
  values. A short document has high ones: the header counts too, and little stands before to refer
  to.
- `length`: tokens of the document, its document token included.
- `loss` and `column` come from elsewhere: a trained model, and the rows of the source.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field, ValidationError

from headrace.core.errors import ConfigError
from headrace.core.files import publish, shell, write_whole
from headrace.core.strict import Strict
from headrace.data.shards import FileEntry, Shards
from headrace.data.tokenizer import Tokenizer

FILE = "scores.json"
AT_ONCE = 4096
"""Documents after which scores are written and progress is shown, and which are lost at most."""
PIECE_TOKENS = 1 << 18
"""Tokens of a document that become text together; a character that is cut there counts as U+FFFD.
"""

ScoreDocuments = Callable[[Shards, int], Iterator[float]]
"""(shards, the first document that is asked for) -> the scores from that one on."""


class NotFinite(ValueError):
    """A score is no finite float32."""


class ScoreRecord(Strict):
    """What a folder of scores holds."""

    format: int = 1
    what: str
    """What was computed: the kind of score, and what it was computed with."""
    data: tuple[str, ...]
    """Fingerprints of the shard sets."""
    files: tuple[FileEntry, ...]
    least: float
    mean: float
    largest: float
    seal: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    """sha256 of all other fields."""

    @property
    def digest(self) -> str:
        """Return the sha256 over every field but the seal."""
        fields = self.model_dump(mode="json", exclude={"seal"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Scores:
    """Hold the scores of all documents, one array a shard set."""

    values: tuple[np.ndarray, ...]
    """float32 [documents] of each set."""
    record: ScoreRecord

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of what was computed and of its values."""
        return self.record.digest


def folder_of(directory: Path, what: str) -> Path:
    """Return where scores of a kind lie within prepared data."""
    return directory / f"scores-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def lengths(shards: Shards, first: int) -> Iterator[float]:
    """Yield the tokens of each document."""
    yield from np.diff(shards.bounds(first, shards.documents - first)).astype(float).tolist()


def compression(tokenizer: Tokenizer) -> ScoreDocuments:
    """Return what computes the compression ratio of each document's text."""

    def scores(shards: Shards, first: int) -> Iterator[float]:
        bounds = shards.bounds(first, shards.documents - first)
        for begin, end in zip((bounds[:-1] + 1).tolist(), bounds[1:].tolist(), strict=True):
            packer, size, packed = zlib.compressobj(6), 0, 0
            for at in range(begin, end, PIECE_TOKENS):
                ids = shards.read(at, min(PIECE_TOKENS, end - at))
                raw = tokenizer.decode(ids.tolist()).encode()
                size += len(raw)
                packed += len(packer.compress(raw))
            packed += len(packer.flush())
            yield packed / max(1, size)

    return scores


def save_scores(
    folder: Path,
    what: str,
    sets: Sequence[Shards],
    scores: ScoreDocuments,
    progress: Callable[[str, float, float | None], None],
) -> None:
    """Compute the scores of every document, and write them; go on where it was interrupted.

    Args:
        folder: where they are to lie.
        what: what is computed, in words that name all it depends on.
        sets: the shard sets.
        scores: computes them.
        progress: called now and then with (description, documents done, all documents).

    Raises:
        NotFinite: a score is no finite number.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    aside.mkdir(parents=True, exist_ok=True)
    total, done = sum(part.documents for part in sets), 0
    description = f"scoring documents by {what.partition(' ')[0]}"
    for number, part in enumerate(sets):
        with (aside / _file_name(number)).open("ab") as file:
            have = file.tell() // 4
            file.truncate(have * 4)
            values: list[float] = []
            for document, value in enumerate(scores(part, have), have):
                values.append(_finite(value, part, document, what))
                if len(values) == AT_ONCE or document + 1 == part.documents:
                    file.write(np.array(values, dtype="<f4").tobytes())
                    file.flush()
                    os.fsync(file.fileno())
                    values = []
                    progress(description, done + document + 1, total)
        done += part.documents
    _write_record(aside, what, sets)
    publish(aside, folder)


def _finite(value: float, shards: Shards, document: int, what: str) -> float:
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        if np.isfinite(np.float32(value)):
            return value
    raise NotFinite(
        f"the score of document {document + 1:,} of {shards.source or shards.directory} by {what} "
        f"is {value:g}, and float32 holds it as no finite number, which has no order"
    )


def _write_record(aside: Path, what: str, sets: Sequence[Shards]) -> None:
    files, arrays = [], []
    for number in range(len(sets)):
        raw = (aside / _file_name(number)).read_bytes()
        files.append(FileEntry(items=len(raw) // 4, sha256=hashlib.sha256(raw).hexdigest()))
        arrays.append(np.frombuffer(raw, dtype="<f4"))
    both = np.concatenate(arrays)
    record = ScoreRecord(
        what=what,
        data=tuple(part.fingerprint for part in sets),
        files=tuple(files),
        least=float(both.min()),
        mean=float(both.mean(dtype=np.float64)),
        largest=float(both.max()),
    )
    record = record.model_copy(update={"seal": record.digest})
    write_whole(aside / FILE, record.model_dump_json(indent=1))


def open_scores(folder: Path, sets: Sequence[Shards]) -> Scores:
    """Open the scores of these shard sets, compared with their hashes.

    Raises:
        ConfigError: they are damaged, or are those of other documents.
    """
    remedy = f"rm -r {shell(folder)}"  # the same command then computes them again
    try:
        record = ScoreRecord.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"{folder / FILE} is damaged: {problem}", remedy) from None
    if record.seal != record.digest:
        raise ConfigError(
            f"{folder / FILE} was changed since it was written: its fields have sha256 "
            f"{record.digest[:12]}..., and its seal is {record.seal[:12] or 'missing'}",
            remedy,
        )
    if record.data != tuple(part.fingerprint for part in sets):
        raise ConfigError(
            f"{folder} holds the scores of other documents than lie beside it", remedy
        )
    arrays = []
    for number, (part, entry) in enumerate(zip(sets, record.files, strict=True)):
        path = folder / _file_name(number)
        raw = path.read_bytes() if path.is_file() else b""
        digest = hashlib.sha256(raw).hexdigest()
        if digest != entry.sha256 or len(raw) != 4 * part.documents:
            raise ConfigError(
                f"{path} has changed since it was written: it has {len(raw):,} bytes for "
                f"{part.documents:,} documents of 4, and its sha256 is {digest[:12]}..., the "
                f"record says {entry.sha256[:12]}...",
                remedy,
            )
        arrays.append(np.frombuffer(raw, dtype="<f4"))
    return Scores(tuple(arrays), record)


def _file_name(number: int) -> str:
    return f"train-{number:02d}.bin"
