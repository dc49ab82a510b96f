"""Find near-duplicates: documents whose sets of word n-grams have a high Jaccard index.

Each document is sketched while it passes, and its text is let go. What follows happens in the order
of who stays for whom, which their text decides, so neither the order of files nor the number of
threads changes a result: the documents of each band that have one key are compared by their
sketches, those that are similar enough are united, and of each cluster those fall that are similar
to one that stays.

A document takes 128 bytes for its sketch, 4 a band and 32 for its place: by `predict_bytes`, 10 GB
of documents of 2 kB take 1.7 GB at most at the threshold 0.8. It says so before, for any number.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, get_args

import numpy as np

from headrace.core.cores import cores
from headrace.core.native import call_native
from headrace.data.quality.audit import SAMPLE_BYTES, Audit, AuditSample, SamplePart
from headrace.data.quality.bands import SKETCH_BYTES, choose_bands
from headrace.data.quality.cleaner import CleanReport, PartState
from headrace.data.quality.compiled import compiled
from headrace.data.quality.letters import encode_composed, letters
from headrace.data.quality.register import DIGEST_BYTES
from headrace.data.quality.whole import WholeDocuments
from headrace.data.quality.work import new_hashes, new_sketch_work
from headrace.plan.cleaning import LEAST_THRESHOLD, Keep, Scope

BATCH_BYTES = 2 << 20
"""Bytes of text that a thread sketches at once, and a document's more."""
BATCH_TIMES = 9
"""Most memory of a batch, by its bytes: its text, the hashes of n-grams of one letter each, and a
table in which those of one document are looked up."""
NGRAM_WORDS = 5
MOST_SAMPLED_BYTES = 1 << 20
"""Bytes of the longest document that the audit draws: its n-grams are held."""
NO_NGRAM = (1 << 64) - 1
"""The least other hash of a document without an n-gram."""
GROWTH = 1.125
"""Most memory of an array that grows, by what it holds (CPython's bytearray)."""
SETTLING_BYTES = 56
"""Most bytes a document of what `finish` works with, while it sorts digests into an order."""


class Sketches(NamedTuple):
    """A batch of documents has these sketches; see `native.sketch`."""

    kept: np.ndarray
    keys: np.ndarray
    least: np.ndarray
    sampled: np.ndarray
    ends: np.ndarray


class NearDuplicates(WholeDocuments):
    """Drop documents that are similar to one that stays.

    Args:
        threshold: Jaccard index of the pairs that are wanted, from `LEAST_THRESHOLD` to below 1.
        recall: share of the pairs at the threshold that become candidates, below 1.
        words: words of an n-gram.
        scope: compare the documents of each source, or of all.
        keep: which of several stays.
        workers: threads that sketch; 0 takes the cores that this process may use.

    Raises:
        UnsupportedError: Numba is not installed.
    """

    def __init__(
        self,
        *,
        threshold: float = 0.8,
        recall: float = 0.999,
        words: int = NGRAM_WORDS,
        scope: Scope = "all",
        keep: Keep = "first",
        workers: int = 0,
    ) -> None:
        super().__init__()
        assert LEAST_THRESHOLD <= threshold < 1 and 0 < recall < 1 and words >= 1
        assert scope in get_args(Scope) and keep in get_args(Keep)
        self.bands = choose_bands(threshold, recall)
        self.words, self.scope = words, scope
        self.keep: Keep = keep
        self.audit: Audit | None = None
        self._native, self._letters = compiled(), letters()
        self._workers = workers or len(cores())
        self._pool = ThreadPoolExecutor(self._workers)
        self._pending: deque[tuple[Future[None], Sketches]] = deque()
        self._text, self._starts = bytearray(), array("q", [0])
        self._kept, self._keys, self._sample = bytearray(), bytearray(), AuditSample()
        self._collected = 0

    def predict_bytes(self, documents: int) -> int:
        """Return the most memory that so many documents take, in bytes."""
        each = GROWTH * (SKETCH_BYTES + 4 * self.bands.bands + 16 + DIGEST_BYTES)
        batches = (2 * self._workers + 2) * BATCH_TIMES * BATCH_BYTES
        return int(documents * (each + SETTLING_BYTES)) + batches + 2 * SAMPLE_BYTES

    def learn(self, source: int, index: int, text: str) -> None:
        """Learn a document: number `index` of source number `source`, both from 0."""
        raw = text.encode()
        self.register.add(source, index, raw)
        self._text += encode_composed(text, raw)
        self._starts.append(len(self._text))
        if len(self._text) >= BATCH_BYTES:
            self._send()

    def _send(self) -> None:
        """Let a thread sketch what came, and take what others have done."""
        starts = np.frombuffer(self._starts, np.int64)
        bar, most = self._sample.highest, MOST_SAMPLED_BYTES
        batch, arguments = self._prepare(self._text, starts, bar, most)
        self._pending.append((self._pool.submit(self._native.sketch, *arguments), batch))
        self._text, self._starts = bytearray(), array("q", [0])
        while len(self._pending) > 2 * self._workers:
            self._collect()

    def sketch(self, texts: Sequence[bytes]) -> Sketches:
        """Return the sketches of composed texts, in UTF-8, without a sample."""
        return self._sketched(texts, bar=0, most=0)

    def hashes(self, text: bytes) -> np.ndarray:
        """Return the distinct hashes of the n-grams of a composed text, in UTF-8."""
        batch = self._sketched([text], bar=NO_NGRAM, most=len(text))
        return batch.sampled[: batch.ends[0]]

    def _sketched(self, texts: Sequence[bytes], *, bar: int, most: int) -> Sketches:
        """Return what `native.sketch` writes for texts."""
        starts = np.zeros(len(texts) + 1, np.int64)
        starts[1:] = np.cumsum([len(text) for text in texts])
        batch, arguments = self._prepare(bytearray().join(texts), starts, bar, most)
        self._native.sketch(*arguments)
        return batch

    def _prepare(
        self, text: bytearray, starts: np.ndarray, bar: int, most: int
    ) -> tuple[Sketches, tuple[Any, ...]]:
        """Return what is written for the documents of a batch, and what `sketch` is called with.

        All of it is made here, because a thread that needs the interpreter waits for it.

        Args:
            text: bytes of all documents.
            starts: where each begins, and where the last ends.
            bar: documents are sampled whose least other hash is below.
            most: bytes of the longest document that is sampled.
        """
        bands, native = self.bands, self._native
        lengths, documents = np.diff(starts), starts.size - 1
        lengths = lengths[lengths <= most]
        ngrams, longest = int(lengths.sum()) // 2 + documents, int(lengths.max(initial=0))
        batch = Sketches(
            np.empty((documents, native.WORDS), np.uint64),
            np.empty((documents, bands.bands), np.uint32),
            np.empty(documents, np.uint64),
            new_hashes(ngrams),
            np.empty(documents, np.int64),
        )
        work = new_sketch_work(self.words, bands.bands * bands.rows, longest)
        raw = np.frombuffer(text, np.uint8)
        sizes = (bands.bands, bands.rows, np.uint64(bar), most)
        return batch, (raw, starts, self._letters, work, *sizes, *batch)

    def _collect(self) -> None:
        """Keep the sketches of the oldest batch, and draw from it."""
        sketched, batch = self._pending.popleft()
        sketched.result()
        self._kept += batch.kept.tobytes()
        self._keys += batch.keys.tobytes()
        numbers = np.arange(self._collected, self._collected + batch.ends.size)
        hashes = batch.sampled[: batch.ends[-1]].copy()
        sizes = np.diff(batch.ends, prepend=0)
        self._sample.add(SamplePart(batch.least, numbers, hashes, sizes))
        self._collected += batch.ends.size

    def _collect_all(self) -> None:
        """Wait for the sketches of all that came."""
        if len(self._starts) > 1:
            self._send()
        while self._pending:
            self._collect()
        self._pool.shutdown()

    def learned(self) -> PartState:
        """Return what was learned of a part."""
        self._collect_all()
        sketches = {
            "kept": np.frombuffer(bytes(self._kept), np.uint8),
            "keys": np.frombuffer(bytes(self._keys), np.uint8),
        }
        sample = self._sample.state()
        return PartState({**self.register.state(), **sketches, **sample.arrays}, sample.values)

    def merge(self, state: PartState, source: int, begin: int) -> None:
        """Learn a part that another has learned; see `PartCleaner.merge`."""
        self._sample.merge(state, len(self.register))
        self.register.take(state.arrays, source, begin)
        self._kept += state.arrays["kept"].tobytes()
        self._keys += state.arrays["keys"].tobytes()
        self._collected = len(self.register)

    def finish(self) -> CleanReport:
        """Decide what falls, after the last document."""
        self._collect_all()
        fell_for = call_native(self._cluster)
        scoped = self.register.sources() if self.scope == "source" else None
        self.audit = self._sample.audit(fell_for, self.bands.threshold, scoped)
        kept_bytes = len(self._kept) + len(self._keys) + self.register.memory_bytes
        kept_bytes += SETTLING_BYTES * fell_for.size + self._sample.memory_bytes
        self._kept, self._keys, self._sample = bytearray(), bytearray(), AuditSample()
        return self._settle(
            fell_for,
            predicted_recall=self.bands.merged(self.bands.threshold),
            audited_recall=self.audit.recall,
            memory_bytes=kept_bytes,
        )

    def _cluster(self) -> np.ndarray:
        """Return the document for which each falls, itself where it stays."""
        native, count = self._native, len(self.register)
        kept = np.frombuffer(self._kept, np.uint64).reshape(count, native.WORDS)
        keys = np.frombuffer(self._keys, np.uint32).reshape(count, self.bands.bands)
        order = self.register.order(self.keep)
        parent, fell_for = np.arange(count, dtype=np.uint32), np.arange(count, dtype=np.uint32)
        upper = np.uint64(32)
        for ranks in self._compared_ranks(kept, order):
            for band in range(self.bands.bands):
                ranked = keys[order[ranks], band].astype(np.uint64) << upper
                ranked |= ranks
                ranked.sort()
                native.link(ranked, order, kept, self.bands.cut, parent)
        native.flatten(parent)
        ranked = parent.astype(np.uint64) << upper
        ranked |= np.arange(count, dtype=np.uint32)
        ranked.sort()
        native.keep_first(ranked, order, kept, self.bands.cut, fell_for)
        by_number = np.empty(count, np.uint32)
        by_number[order] = order[fell_for]
        return by_number

    def _compared_ranks(self, kept: np.ndarray, order: np.ndarray) -> list[np.ndarray]:
        """Return the ranks that are compared with each other, without texts that have no word."""
        filled = np.asarray(kept.any(axis=1))[order]
        if self.scope == "all":
            return [np.flatnonzero(filled).astype(np.uint32)]
        sources = self.register.sources()[order]
        return [
            np.flatnonzero(filled & (sources == source)).astype(np.uint32)
            for source in np.unique(sources)
        ]
