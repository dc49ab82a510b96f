"""Keep tokens on disk: flat arrays in memory maps, an index of documents, a manifest of hashes.

A shard set is a folder of `tokens-00000.bin`, ... (uint16 while the vocabulary allows, else uint32,
little endian), `offsets.bin` (uint64: where each document starts, counted over the whole set) and
`manifest.json`. Every file but the last holds the same number of tokens, so finding one is a
division. The manifest is written last, so a folder without one is not a shard set. It seals itself:
a field that was changed since is found when the set is opened, and so is one that contradicts
another. Opening compares sizes and looks at every offset, at any size; `verify` reads
everything, compares sha256, and looks at every id. Maps are made when first touched and the
oldest are dropped, so ten thousand files cost neither start-up time nor file descriptors.
"""

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from headrace.core.errors import ConfigError
from headrace.core.files import shell, write_whole
from headrace.core.strict import Strict

FORMAT = 3
DIGESTED_AS = 2
"""The format under which runs keep the digest of a manifest: what it covers is the same since."""
OFFSETS_AT_ONCE = 1 << 20
"""Offsets that are looked at together: 8 MiB, however many there are."""
DOCUMENTS_AT_ONCE = TOKENS_AT_ONCE = 1 << 20
"""Documents and tokens that are looked at together."""
SHARD_TOKENS = 1 << 27
OPEN_MAPS = 128
_REBUILD = "headrace data ingest PLAN"
"""What makes shards again, where their manifest does not say."""


Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class FileEntry(Strict):
    """An entry describes one file of the set."""

    items: Count
    """Tokens, or documents for the offsets."""
    sha256: Sha256


class Manifest(Strict):
    """What a shard set holds."""

    format: int = FORMAT
    dtype: Literal["uint16", "uint32"]
    vocab: int = Field(ge=1, le=1 << 32)
    document_token: Count
    """The id at the start of every document."""
    shard_tokens: int = Field(ge=1, lt=1 << 62)
    """Tokens in every file but the last."""
    tokens: Count
    documents: Count
    text_bytes: Count
    """UTF-8 bytes of the documents."""
    counted_bytes: Count
    """Bytes that the tokens stand for: fewer or more where the tokenizer changes text."""
    files: tuple[FileEntry, ...]
    offsets: FileEntry
    tokenizer: str
    """Fingerprint of the tokenizer."""
    source: str
    """What the user named."""
    rebuild: str
    """The command that makes this set again."""
    seal: str = ""
    """sha256 of all other fields."""

    @property
    def digest(self) -> str:
        """Return the sha256 over every field but the seal."""
        fields = self.model_dump(mode="json", exclude={"seal"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @model_validator(mode="after")
    def _check(self) -> "Manifest":
        *full, last = [f.items for f in self.files] or [0]
        if any(items != self.shard_tokens for items in full) or last > self.shard_tokens:
            raise ValueError(f"its files do not hold {self.shard_tokens:,} tokens each")
        if sum(full) + last != self.tokens:
            raise ValueError(f"its files hold {sum(full) + last:,} tokens, not {self.tokens:,}")
        if self.offsets.items != self.documents:
            raise ValueError(f"{self.offsets.items:,} offsets, for {self.documents:,} documents")
        if self.document_token >= self.vocab:
            raise ValueError(f"document_token {self.document_token} is none of {self.vocab} ids")
        if (self.dtype == "uint16") != (self.vocab <= 1 << 16):
            raise ValueError(f"{self.dtype} is not how {self.vocab:,} ids are kept")
        return self


def sync_file(file: BinaryIO) -> None:
    """Push a file's content to the disk itself."""
    file.flush()
    os.fsync(file.fileno())


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._sha256 = hashlib.sha256()
        self.items = 0

    def write(self, items: np.ndarray) -> None:
        raw = items.tobytes()
        self._file.write(raw)
        self._sha256.update(raw)
        self.items += len(items)

    def close(self) -> FileEntry:
        with self._file:
            sync_file(self._file)
        return FileEntry(items=self.items, sha256=self._sha256.hexdigest())


class ShardWriter:
    """Writes one shard set, document by document; nothing counts until `close`."""

    def __init__(
        self,
        directory: Path,
        vocab: int,
        *,
        document_token: int,
        shard_tokens: int = SHARD_TOKENS,
        tokenizer: str = "",
        source: str = "",
        rebuild: str = "headrace data ingest PLAN",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.vocab, self.document_token = directory, vocab, document_token
        self._tokenizer, self._source, self._rebuild = tokenizer, source, rebuild
        self._dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
        self._shard_tokens = shard_tokens
        self._offsets = _HashedFile(directory / "offsets.bin")
        self._file = _HashedFile(directory / _file_name(0))
        self._files: list[FileEntry] = []
        self.tokens = self.text_bytes = self.counted_bytes = 0

    @property
    def documents(self) -> int:
        """Return the number of documents added so far."""
        return self._offsets.items

    def add(
        self, document_ids: np.ndarray, *, text_bytes: int = 0, counted_bytes: int | None = None
    ) -> None:
        """Append the document token and then the document's own ids.

        Args:
            document_ids: the document's tokens.
            text_bytes: UTF-8 bytes of its text.
            counted_bytes: those that the tokens stand for; all of the text without it.
        """
        self.counted_bytes += text_bytes if counted_bytes is None else max(0, counted_bytes)
        self._offsets.write(np.array([self.tokens], dtype="<u8"))
        ids = np.empty(len(document_ids) + 1, dtype=self._dtype)
        ids[0], ids[1:] = self.document_token, document_ids
        self.tokens += len(ids)
        self.text_bytes += text_bytes
        while len(ids):
            room = self._shard_tokens - self._file.items
            if not room:
                self._files.append(self._file.close())
                self._file = _HashedFile(self.directory / _file_name(len(self._files)))
                continue
            self._file.write(ids[:room])
            ids = ids[room:]

    def close(self) -> Manifest:
        """Finish all files and write the manifest, which makes the set valid.

        Raises:
            ConfigError: there is no document in it.
        """
        self._files.append(self._file.close())
        offsets = self._offsets.close()
        if not offsets.items:
            raise ConfigError(
                f"{self._source or self.directory} gives no documents",
                "data.validation=PATH of text, or a share, as data.validation=0.05",
            )
        manifest = Manifest(
            dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
            vocab=self.vocab,
            document_token=self.document_token,
            shard_tokens=self._shard_tokens,
            tokens=self.tokens,
            documents=offsets.items,
            text_bytes=self.text_bytes,
            counted_bytes=self.counted_bytes,
            files=tuple(self._files),
            offsets=offsets,
            tokenizer=self._tokenizer,
            source=self._source,
            rebuild=self._rebuild,
        )
        manifest = manifest.model_copy(update={"seal": manifest.digest})
        write_whole(self.directory / "manifest.json", manifest.model_dump_json(indent=1))
        return manifest


class Shards:
    """A shard set that is open for reading. It can be read from several threads.

    Attributes:
        tokens: tokens in the set, document tokens included.
        documents: documents in the set.
        text_bytes: UTF-8 bytes of the text.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self.tokens, self.documents = manifest.tokens, manifest.documents
        self.text_bytes, self.source = manifest.text_bytes, manifest.source
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._map = lru_cache(maxsize=OPEN_MAPS)(self._open_map)

    @staticmethod
    def open(directory: Path | str) -> "Shards":
        """Read the manifest and compare the files' sizes with it.

        Raises:
            ConfigError: no shard set there, an unknown format, a file missing or cut short.
        """
        directory = Path(directory)
        path = directory / "manifest.json"
        try:
            raw = path.read_bytes()
            _check_format(directory, raw)
            manifest = Manifest.model_validate_json(raw)
        except FileNotFoundError:
            raise ConfigError(
                f"{directory} is not a shard set: it has no manifest.json",
                "headrace data ingest PLAN",
            ) from None
        except ValidationError as error:
            detail = error.errors()[0]
            where = ".".join(map(str, detail["loc"])) or "the file"
            raise ConfigError(
                f"{path} is damaged: {where}: {detail['msg'].lower()}", _rebuild(directory)
            ) from None
        if manifest.seal != manifest.digest:
            raise ConfigError(
                f"{path} was changed since it was written: its fields have sha256 "
                f"{manifest.digest[:12]}..., and its seal is {manifest.seal[:12] or 'missing'}",
                _rebuild(directory, manifest),
            )
        shards = Shards(directory, manifest)
        shards.verify(full=False)
        return shards

    @property
    def fingerprint(self) -> str:
        """Return the sha256 over the hashes of all files: equal content, equal fingerprint."""
        m = self.manifest
        hashes = [m.dtype, m.document_token, m.offsets.sha256, *(f.sha256 for f in m.files)]
        return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    @property
    def raw_share(self) -> float:
        """Return text bytes for each byte that its tokens stand for; 1 where nothing is lost."""
        counted = self.manifest.counted_bytes
        return self.text_bytes / counted if counted else 1.0

    @property
    def manifest_digest(self) -> str:
        """Return the sha256 of the manifest without names and commands: what tells the content."""
        content = self.manifest.model_dump(mode="json", exclude={"seal", "source", "rebuild"})
        content["format"] = DIGESTED_AS
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def verify(self, *, full: bool = True) -> None:
        """Compare every file's size, and with `full` its sha256, with the manifest.

        Raises:
            ConfigError: a file is missing, has another size, or other content.
        """
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.directory)}
        m = self.manifest
        expected = [(_file_name(i), f, self._dtype.itemsize) for i, f in enumerate(m.files)]
        for name, entry, item_bytes in [*expected, ("offsets.bin", m.offsets, 8)]:
            size = sizes.get(name)
            if size != entry.items * item_bytes:
                what = "is missing" if size is None else f"has {size:,} bytes"
                raise ConfigError(
                    f"{self.directory / name} {what}, expected {entry.items * item_bytes:,} bytes",
                    _rebuild(self.directory, m),
                )
            if full:
                self._verify_content(self.directory / name, entry.sha256)
        self._verify_offsets()
        if full:
            self._verify_ids()

    def _verify_offsets(self) -> None:
        """Look at every offset, a part at a time: a hash may be made again around nonsense."""
        offsets, before = self._map("offsets.bin"), -1
        for begin in range(0, len(offsets), OFFSETS_AT_ONCE):
            part = offsets[begin : begin + OFFSETS_AT_ONCE]
            first, last = int(part[0]), int(part[-1])
            rising = bool((part[1:] > part[:-1]).all())
            starts = first > before if begin else first == 0
            if not (starts and rising and last < self.tokens):
                raise ConfigError(
                    f"{self.directory / 'offsets.bin'} does not say where documents start: they "
                    f"rise from 0 and stay below {self.tokens:,} tokens",
                    _rebuild(self.directory, self.manifest),
                )
            before = last

    def _verify_ids(self) -> None:
        """Look at every id, for the same reason."""
        for number in range(len(self.manifest.files)):
            ids = self._map(_file_name(number))
            if len(ids) and (largest := int(ids.max())) >= self.manifest.vocab:
                raise ConfigError(
                    f"{self.directory / _file_name(number)} holds the id {largest:,}, and its "
                    f"tokenizer has {self.manifest.vocab:,} entries",
                    _rebuild(self.directory, self.manifest),
                )
        self._verify_starts()

    def _verify_starts(self) -> None:
        """Look at the token on which every offset falls: it begins a document."""
        m = self.manifest
        for number in range(len(m.files)):
            begin = number * m.shard_tokens
            starts = self.document_starts(begin, begin + m.shard_tokens)
            others = self._map(_file_name(number))[starts - begin] != m.document_token
            if others.any():
                place = int(starts[others.argmax()])
                raise ConfigError(
                    f"{self.directory / 'offsets.bin'} lets {int(others.sum()):,} of its documents "
                    f"begin where none does, the first at token {place:,}: document_token "
                    f"{m.document_token:,} is not there",
                    _rebuild(self.directory, m),
                )

    def verify_bytes(self, token_bytes: np.ndarray) -> None:
        """Compare the bytes that all ids stand for with those of the manifest.

        Args:
            token_bytes: [vocab], what each id stands for, as the tokenizer has it.

        Raises:
            ConfigError: with both.
        """
        offsets, counted = self._map("offsets.bin"), 0
        ends = [*offsets[DOCUMENTS_AT_ONCE::DOCUMENTS_AT_ONCE].tolist(), self.tokens]
        first = 0
        for part, end in enumerate(ends):
            starts = offsets[part * DOCUMENTS_AT_ONCE :][:DOCUMENTS_AT_ONCE].astype(np.int64)
            sums = np.zeros(len(starts), dtype=np.int64)
            for begin in range(first, end, TOKENS_AT_ONCE):
                sizes = token_bytes[self.read(begin, min(TOKENS_AT_ONCE, end - begin))]
                within = np.searchsorted(starts, begin + len(sizes))
                at = int(np.searchsorted(starts, begin, side="right")) - 1
                cuts = np.concatenate([[begin], starts[at + 1 : within]]) - begin
                sums[at:within] += np.add.reduceat(sizes, cuts, dtype=np.int64)
            counted += int(np.maximum(sums, 0).sum())  # as `add` counts a document
            first = end
        if counted != self.manifest.counted_bytes:
            raise ConfigError(
                f"the tokens in {self.directory} stand for {counted:,} bytes, and its manifest "
                f"says counted_bytes {self.manifest.counted_bytes:,}",
                _rebuild(self.directory, self.manifest),
            )

    def _verify_content(self, path: Path, expected: str) -> None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected:
            raise ConfigError(
                f"{path} has changed since it was written: its sha256 is {digest[:12]}..., "
                f"the manifest says {expected[:12]}...",
                _rebuild(self.directory, self.manifest),
            )

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count) as int64 [count], across files where needed."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens [{start}, {start + count}) of {self.tokens}")
        out = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            index, within = divmod(start + done, self.manifest.shard_tokens)
            part = self._map(_file_name(index))[within : within + count - done]
            out[done : done + len(part)] = part
            done += len(part)
        return out

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the places of the document starts within tokens [start, stop), ascending int64."""
        offsets = self._map("offsets.bin")
        # As uint64: a search for Python integers would convert the whole index to floats.
        first, last = np.searchsorted(offsets, np.array([start, stop], dtype=np.uint64))
        return offsets[first:last].astype(np.int64)

    def _open_map(self, name: str) -> np.ndarray:
        dtype = np.dtype("<u8") if name == "offsets.bin" else self._dtype
        return np.asarray(np.memmap(self.directory / name, dtype=dtype, mode="r"))


class OtherFormat(ConfigError):
    """The shards were written by another version of this package."""


def _check_format(directory: Path, raw: bytes) -> None:
    """Refuse a manifest of another format before it is read as one of this.

    Raises:
        OtherFormat: with both.
    """
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        return  # damaged, which reading it says
    format_number = manifest.get("format", FORMAT) if isinstance(manifest, dict) else FORMAT
    if format_number != FORMAT:
        rebuild = manifest.get("rebuild")
        command = rebuild if isinstance(rebuild, str) else _REBUILD
        raise OtherFormat(
            f"{directory} has shard format {format_number}, this version reads {FORMAT}",
            f"rm -r {shell(directory)} && {command}",
        )


def _file_name(index: int) -> str:
    return f"tokens-{index:05d}.bin"


def _rebuild(directory: Path, manifest: Manifest | None = None) -> str:
    command = manifest.rebuild if manifest else _REBUILD
    return f"rm -r {shell(directory)} && {command}"
