"""Keep tokens on disk: flat arrays in memory maps, an index of documents, a manifest of hashes.

A shard set is a folder of `tokens-00000.bin`, ... (uint16 while the vocabulary allows, else uint32,
little endian), `offsets.bin` (uint64: where each document starts, counted over the whole set) and
`manifest.json`. Every file but the last holds the same number of tokens, so finding one is a
division. The manifest is written last, so a folder without one is not a shard set. It seals itself:
a field that was changed since is found when the set is opened, and so is one that contradicts
another. Opening compares sizes and looks at every offset, at any size; `verify` reads
everything, compares sha256, and looks at every id.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from pydantic import ValidationError

from headrace.core.errors import ConfigError
from headrace.core.files import sha256_of, shell, write_whole
from headrace.data.manifest import FORMAT, FileEntry, Manifest
from headrace.data.shard_files import ShardFiles

OFFSETS_AT_ONCE = 1 << 20
"""Offsets that are looked at together: 8 MiB, however many there are."""
DOCUMENTS_AT_ONCE = TOKENS_AT_ONCE = 1 << 20
"""Documents and tokens that are looked at together."""
SHARD_TOKENS = 1 << 27
_REBUILD = "headrace data ingest PLAN"
"""What makes shards again, where their manifest does not say."""


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


class TokenSink(Protocol):
    """What takes the documents of one side: a `ShardWriter`, or what makes one when it must."""

    def add(
        self,
        document_ids: np.ndarray,
        *,
        text_bytes: int = 0,
        counted_bytes: int | None = None,
        counted: np.ndarray | None = None,
    ) -> None:
        """Take a document; see `ShardWriter.add`."""
        ...


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
        answers: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.vocab, self.document_token = directory, vocab, document_token
        self._tokenizer, self._source, self._rebuild = tokenizer, source, rebuild
        self._dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
        self._shard_tokens = shard_tokens
        self._offsets = _HashedFile(directory / "offsets.bin")
        self._file = _HashedFile(directory / _file_name(0))
        self._files: list[FileEntry] = []
        self._answers = _HashedFile(directory / _answers_name(0)) if answers else None
        self._answer_files: list[FileEntry] = []
        self.tokens = self.text_bytes = self.counted_bytes = 0

    @property
    def documents(self) -> int:
        """Return the number of documents added so far."""
        return self._offsets.items

    def add(
        self,
        document_ids: np.ndarray,
        *,
        text_bytes: int = 0,
        counted_bytes: int | None = None,
        counted: np.ndarray | None = None,
    ) -> None:
        """Append the document token and then the document's own ids; a conversation's ids alone.

        Args:
            document_ids: the document's tokens.
            text_bytes: UTF-8 bytes of its text.
            counted_bytes: those that the tokens stand for; all of the text without it.
            counted: uint8 [tokens], where a set holds conversations: 1 where the loss counts one.
        """
        assert (counted is None) == (self._answers is None)
        self.counted_bytes += text_bytes if counted_bytes is None else max(0, counted_bytes)
        self._offsets.write(np.array([self.tokens], dtype="<u8"))
        if counted is None:
            document_ids = np.concatenate([[self.document_token], document_ids])
        ids = document_ids.astype(self._dtype)
        self.tokens += len(ids)
        self.text_bytes += text_bytes
        self._write(ids, counted)

    def take(self, other: "Shards") -> None:
        """Append all documents of another set of the same tokenizer."""
        starts = other._map("offsets.bin")
        for begin in range(0, other.documents, OFFSETS_AT_ONCE):
            self._offsets.write(starts[begin : begin + OFFSETS_AT_ONCE] + np.uint64(self.tokens))
        for begin in range(0, other.tokens, TOKENS_AT_ONCE):
            ids = other.read(begin, min(TOKENS_AT_ONCE, other.tokens - begin))
            self._write(ids.astype(self._dtype), other.counted(begin, len(ids)))
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes
        self.counted_bytes += other.manifest.counted_bytes

    def _write(self, ids: np.ndarray, counted: np.ndarray | None) -> None:
        """Append ids and which of them a loss counts, over as many files as they need."""
        while len(ids):
            room = self._shard_tokens - self._file.items
            if not room:
                self._close_files()
                self._file = _HashedFile(self.directory / _file_name(len(self._files)))
                if self._answers is not None:
                    name = _answers_name(len(self._files))
                    self._answers = _HashedFile(self.directory / name)
                continue
            self._file.write(ids[:room])
            ids = ids[room:]
            if self._answers is not None and counted is not None:
                self._answers.write(counted[:room])
                counted = counted[room:]

    def _close_files(self) -> None:
        self._files.append(self._file.close())
        if self._answers is not None:
            self._answer_files.append(self._answers.close())

    def close(self) -> Manifest:
        """Finish all files and write the manifest, which makes the set valid.

        Raises:
            ConfigError: there is no document in it.
        """
        self._close_files()
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
            answers=tuple(self._answer_files) or None,
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
        self._files = ShardFiles(directory, self._dtype, len(manifest.files))
        self._map = self._files.map

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
        files = (*m.files, *(m.answers or ()))
        hashes = [m.dtype, m.document_token, m.offsets.sha256, *(f.sha256 for f in files)]
        return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    @property
    def has_answers(self) -> bool:
        """Return whether it holds conversations, of which the loss counts some tokens only."""
        return self.manifest.answers is not None

    @property
    def raw_share(self) -> float:
        """Return text bytes for each byte that its tokens stand for; 1 where nothing is lost."""
        counted = self.manifest.counted_bytes
        return self.text_bytes / counted if counted else 1.0

    @property
    def manifest_digest(self) -> str:
        """Return the sha256 of the manifest without names and commands: what tells the content."""
        return self.manifest.content_digest

    def verify(self, *, full: bool = True) -> None:
        """Compare every file's size, and with `full` its sha256, with the manifest.

        Raises:
            ConfigError: a file is missing, has another size, or other content.
        """
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.directory)}
        m = self.manifest
        expected = [(_file_name(i), f, self._dtype.itemsize) for i, f in enumerate(m.files)]
        expected += [(_answers_name(i), f, 1) for i, f in enumerate(m.answers or ())]
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
        m = self.manifest
        for number in range(len(self.manifest.files)):
            ids = self._map(_file_name(number))
            if len(ids) and (largest := int(ids.max())) >= self.manifest.vocab:
                raise ConfigError(
                    f"{self.directory / _file_name(number)} holds the id {largest:,}, and its "
                    f"tokenizer has {self.manifest.vocab:,} entries",
                    _rebuild(self.directory, self.manifest),
                )
        if m.answers is None:  # a conversation begins with what its template writes
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
        offsets, counted, first = self._map("offsets.bin"), 0, 0
        ends = [*offsets[DOCUMENTS_AT_ONCE::DOCUMENTS_AT_ONCE].tolist(), self.tokens]
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
        digest = sha256_of(path)
        if digest != expected:
            raise ConfigError(
                f"{path} has changed since it was written: its sha256 is {digest[:12]}..., "
                f"the manifest says {expected[:12]}...",
                _rebuild(self.directory, self.manifest),
            )

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens [start, start + count) as int64 [count], across files where needed."""
        out = np.empty(count, dtype=np.int64)
        self._read_into(out, start, _file_name)
        return out

    def counted(self, start: int, count: int) -> np.ndarray | None:
        """Return the bytes of tokens [start, start + count), uint8 [count]: what counts them.

        They are 0 where no loss counts a token, and see `Manifest.answers`. It is None where there
        are no conversations, and all count.
        """
        if self.manifest.answers is None:
            return None
        out = np.empty(count, dtype=np.uint8)
        self._read_into(out, start, _answers_name)
        return out

    def _read_into(self, out: np.ndarray, start: int, name: Callable[[int], str]) -> None:
        """Fill an array with the items from place `start` on, of the files that `name` names."""
        if start < 0 or start + len(out) > self.tokens:
            raise IndexError(f"tokens [{start}, {start + len(out)}) of {self.tokens}")
        done = 0
        while done < len(out):
            index, within = divmod(start + done, self.manifest.shard_tokens)
            wanted = min(len(out) - done, self.manifest.shard_tokens - within)
            out[done : done + wanted] = self._files.read(name(index), within, wanted)
            done += wanted

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return the places of the document starts within tokens [start, stop), ascending int64."""
        offsets = self._map("offsets.bin")
        # As uint64: a search for Python integers would convert the whole index to floats.
        first, last = np.searchsorted(offsets, np.array([start, stop], dtype=np.uint64))
        return offsets[first:last].astype(np.int64)

    def bounds(self, first: int, count: int) -> np.ndarray:
        """Return where documents [first, first + count) begin, and where the last ends.

        They are places in the stream, int64 [count + 1].
        """
        bounds = np.empty(count + 1, dtype=np.int64)
        part = self._map("offsets.bin")[first : first + count + 1]
        bounds[: len(part)] = part
        bounds[len(part) :] = self.tokens  # after the last document
        return bounds

    def bounds_of(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where each of `documents` begins and ends, int64 of the same shape."""
        offsets, last = self._map("offsets.bin"), self.documents - 1
        ends = offsets[np.minimum(documents + 1, last)].astype(np.int64)
        ends[documents == last] = self.tokens
        return offsets[documents].astype(np.int64), ends

    def read_pieces(self, begins: np.ndarray, sizes: np.ndarray, into: np.ndarray) -> None:
        """Read the tokens [begin, begin + size) of each piece, one after the other.

        Args:
            begins: int64 [pieces], places in the stream.
            sizes: int64 [pieces], 1 or more.
            into: int64, whose beginning takes the tokens.
        """
        at = 0
        for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True):
            self._read_into(into[at : at + size], begin, _file_name)
            at += size


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


def _answers_name(index: int) -> str:
    return f"answers-{index:05d}.bin"


def _rebuild(directory: Path, manifest: Manifest | None = None) -> str:
    command = manifest.rebuild if manifest else _REBUILD
    return f"rm -r {shell(directory)} && {command}"
