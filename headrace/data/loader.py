"""Rows to micro-batches: one global stream of rows, whoever reads it and however it is cut.

Row `r` of a step is global row `k`, the number of rows of all steps before it plus r. It is a pure
function of (seed, k): the order names its unit, the packer reads it. Rank `r` of `W` takes the r-th
of W contiguous parts of each step, and micro-batches are contiguous slices of that. So ranks,
workers, prefetch and micro-batch size change who does the work, never what is read, and the whole
state is the step.

**Stream hash.** Each global row gives sha256(k as 8 bytes || its T + 1 tokens as int32, all little
endian); rows are added modulo 2^256 (AdHash: Bellare and Micciancio, EUROCRYPT 1997), and the
report's `stream_sha256` is the sha256 of that sum. Adding makes the state 32 bytes and lets ranks
add up their own rows; the row number inside makes the order count all the same. Only rows that
`step` has handed out are counted, not those read ahead. With several ranks, before saving:

    total = sum of loader.local_hash over all ranks      # one small collective
    loader.merge(total)                                  # on every rank
    state = loader.state()                               # the same on every rank

B: rows of a micro-batch, T: sequence length.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.data.mixture import Mixture
from headrace.data.order import BlockedOrder, Order, make_order
from headrace.data.rows import IGNORE, Packer, Row, counted_targets
from headrace.data.shards import Shards
from headrace.plan.batches import BatchStages

_HASH_MODULUS = 1 << 256


@dataclass(frozen=True)
class Micro:
    """A micro-batch holds the rows of one forward pass, on the host."""

    ids_BT: Tensor
    """int64."""
    targets_BT: Tensor
    """int64; IGNORE where none counts."""
    segments_BT: Tensor | None = None
    """int32: which document of the row each token belongs to, from 0; only if asked for."""
    positions_BT: Tensor | None = None
    """int64: place within its document; only if asked for."""
    wasted: int = 0
    """Targets that no loss counts: padding and the ignored."""
    first_token: int = 0
    """Place of its first token in the whole stream."""
    numbers_BT: Mapping[str, Tensor] | None = None
    """What a loss needs to know beside tokens, by name: [B, T, ...] each, of rows that have it."""


@dataclass(frozen=True)
class StepBatch:
    """A step batch holds this rank's share of one optimizer step."""

    micros: list[Micro]
    wait_s: float
    """Seconds for which the caller waited for the data."""


def combine_hashes(sums: Iterable[int]) -> str:
    """Return the `stream_sha256` of the whole stream from the sums of its parts."""
    return hashlib.sha256((sum(sums) % _HASH_MODULUS).to_bytes(32, "little")).hexdigest()


def row_hash(row: int, ids: np.ndarray) -> int:
    """Return what one global row adds to the stream hash."""
    digest = hashlib.sha256(row.to_bytes(8, "little"))
    digest.update(ids.astype("<i4").data)
    return int.from_bytes(digest.digest(), "little")


class Loader:
    """Hand out the micro-batches of this rank step by step, reading ahead on threads.

    Args:
        packer: where rows come from.
        seed: of the order.
        rows_per_step: R, rows of a step over all ranks, or its stages where it grows; a multiple of
            ranks * micro_rows.
        micro_rows: B; a stage of fewer rows a rank has one micro-batch of these.
        mixture: what each source gives; without it every source counts by its rows.
        rank, ranks: which part of each step is read here.
        workers: threads that read ahead; 0 reads on the calling thread.
        prefetch: micro-batches that are read ahead.
        segments: whether micro-batches carry documents and positions.
        pin: whether tensors are page-locked, for asynchronous copies to a GPU.
        order: in place of the baseline's (seed and mixture are then not used).
    """

    def __init__(
        self,
        packer: Packer,
        *,
        seed: int = 0,
        rows_per_step: int | BatchStages,
        micro_rows: int,
        mixture: Mixture | None = None,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 0,
        prefetch: int = 4,
        segments: bool = False,
        pin: bool = False,
        order: Order | None = None,
    ) -> None:
        if isinstance(rows_per_step, int):
            rows_per_step = BatchStages(((0, rows_per_step),))
        self.packer, self.rows, self.micro_rows = packer, rows_per_step, micro_rows
        assert 0 <= rank < ranks
        assert all(rows % (ranks * self._size(rows // ranks)) == 0 for _, rows in self.rows.stages)
        self._micros = self.rows.each(lambda rows: rows // ranks // self._size(rows // ranks))
        self.rank, self.ranks = rank, ranks
        order = order or make_order(packer.units, seed=seed, mixture=mixture)
        self._order = BlockedOrder(order)
        self.segments, self._pin = segments, pin
        self._micros_per_step = self._micros.stages[-1][1]
        self._prefetch = prefetch
        self._pool: ThreadPoolExecutor | None = None
        if workers:
            self._pool = ThreadPoolExecutor(workers, "headrace-data")
        self._ahead: deque[Future[tuple[Micro, int]]] = deque()
        self._submitted = 0
        self._position = 0
        self._base_hash = 0
        self.local_hash = 0
        self.beside: list[Callable[[int, int, Row], Row]] = []
        """Each adds what a loss needs to know beside tokens: (source, unit, row) -> row. They are
        called on the threads that read."""

    def step(self, step: int | None = None) -> StepBatch:
        """Return the batch of a step, by default the next one; seek another step first.

        What a reading thread raised is raised here, and the same step can then be tried again.
        """
        if step is not None and step != self._position:
            self.seek(step)
        begin, added, micros = time.perf_counter(), 0, []
        first = self._micros.before(self._position)
        for m in range(self._micros.at(self._position)):
            micro, digest = self._take(first + m)
            micros.append(micro)
            added += digest
        wait_s = time.perf_counter() - begin
        self._position += 1
        self.local_hash = (self.local_hash + added) % _HASH_MODULUS
        return StepBatch(micros, wait_s)

    def peek(self, step: int) -> list[Micro]:
        """Return this rank's micro-batches of any step; the stream stays where it is."""
        first = self._micros.before(step)
        return [Loader._make(self, first + m)[0] for m in range(self._micros.at(step))]

    def seek(self, step: int) -> None:
        """Make `step` the next one. Reads nothing."""
        self._drop()
        self._position = step
        self._submitted = self._micros.before(step)

    def merge(self, total: int) -> None:
        """Take `total`, the sum of `local_hash` over all ranks, into the state."""
        self._base_hash = (self._base_hash + total) % _HASH_MODULUS
        self.local_hash = 0

    def state(self) -> dict[str, int | str]:
        """Return all that a resume needs; with several ranks only right after `merge`."""
        if self.ranks == 1:
            self.merge(self.local_hash)
        assert not self.local_hash, "merge the ranks' hashes before asking for the state"
        rows = self.rows.before(self._position)
        return {"step": self._position, "rows": rows, "stream_hash": f"{self._base_hash:064x}"}

    def load_state(self, state: dict[str, int | str]) -> None:
        """Go on where `state` was taken, under any number of ranks and workers.

        Raises:
            ConfigError: steps had another number of rows.
        """
        step, rows = int(state["step"]), int(state["rows"])
        if rows != self.rows.before(step):
            raise self._other_rows(step, rows)
        self._base_hash, self.local_hash = int(str(state["stream_hash"]), 16), 0
        self.seek(step)

    def _other_rows(self, step: int, rows: int) -> ConfigError:
        """Return the error of a checkpoint whose `step` steps read another number of rows."""
        grows, before = len(self.rows.stages) > 1, rows / step if step else 0
        message = (
            f"the checkpoint read {before:g} rows a step, the plan asks for {self.rows.at(step)} "
            "rows a step"
        )
        if grows:
            message = (
                f"the {step} steps of the checkpoint read {rows} rows, and by the plan's growing "
                f"batch they would have read {self.rows.before(step)}"
            )
        tokens = mend(f"batch.tokens={int(before) * self.packer.sequence_length}")
        return ConfigError(message, "the batch's stages as they were" if grows else tokens)

    def _size(self, rows: int) -> int:
        """Return the rows of a micro-batch where a rank has so many rows of a step."""
        return min(self.micro_rows, rows)

    @property
    def order(self) -> Order:
        """Return what says which row comes next."""
        return self._order.order

    @property
    def stream_sha256(self) -> str:
        """Hash of the stream so far: all ranks' up to the last merge, this rank's since."""
        return combine_hashes([self._base_hash, self.local_hash])

    def close(self) -> None:
        """End the threads; the loader cannot be used afterwards. Twice does no harm."""
        self._drop()
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _drop(self) -> None:
        """Forget what was read ahead."""
        while self._ahead:
            self._ahead.pop().cancel()

    def _take(self, index: int) -> tuple[Micro, int]:
        """Return micro-batch number `index` of this rank, read ahead where threads do it."""
        if not self._pool:
            return self._make(index)
        while self._submitted < index + 1 + self._prefetch:
            self._ahead.append(self._pool.submit(self._make, self._submitted))
            self._submitted += 1
        try:
            return self._ahead.popleft().result()
        except BaseException:
            self.seek(self._position)  # so that the same step can be tried again
            raise

    def _make(self, index: int) -> tuple[Micro, int]:
        """Return a micro-batch and the sum of its rows' hashes. It may run on any thread."""
        step = self._micros.step_of(index)
        m, count = index - self._micros.before(step), self._micros.at(step)
        size = self._size(self.rows.at(step) // self.ranks)
        first = self.rows.before(step) + (self.rank * count + m) * size
        sources, units = self._order(first, size)
        rows = [self.packer.row(int(s), int(u)) for s, u in zip(sources, units, strict=True)]
        digest = sum(row_hash(first + b, row.ids) for b, row in enumerate(rows))
        for add in self.beside:
            rows = [add(int(s), int(u), r) for s, u, r in zip(sources, units, rows, strict=True)]
        place = first * self.packer.sequence_length
        return collate(rows, segments=self.segments, pin=self._pin, first_token=place), digest


def collate(
    rows: Sequence[Row], *, segments: bool = False, pin: bool = False, first_token: int = 0
) -> Micro:
    """Return rows of one length as tensors."""
    shape = len(rows), len(rows[0].ids) - 1
    ids_BT = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
    targets_BT = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
    ids, targets = ids_BT.numpy(), targets_BT.numpy()
    wasted = 0
    for b, row in enumerate(rows):
        ids[b] = row.ids[:-1]
        if row.targets is None:
            targets[b] = row.ids[1:]
        else:
            targets[b] = row.targets
            wasted += int((row.targets == IGNORE).sum())
    numbers = {
        name: torch.from_numpy(np.stack([row.numbers[name] for row in rows if row.numbers]))
        for name in rows[0].numbers or ()
    }
    numbers = {name: x_BT.pin_memory() if pin else x_BT for name, x_BT in numbers.items()} or None
    if not segments:
        return Micro(ids_BT, targets_BT, None, None, wasted, first_token, numbers)
    segments_BT = torch.empty(shape, dtype=torch.int32, pin_memory=pin)
    positions_BT = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
    place = np.arange(shape[1])
    begins = np.zeros((shape[0], shape[1] + 1), dtype=bool)  # a start at T is a target, no input
    for b, row in enumerate(rows):
        begins[b, row.starts] = True
    begins = begins[:, :-1]
    begins[:, 0] = False  # the row's first document is number 0, whole or not
    np.cumsum(begins, axis=1, out=segments_BT.numpy())
    np.subtract(
        place, np.maximum.accumulate(np.where(begins, place, 0), axis=1), out=positions_BT.numpy()
    )
    parts = ids_BT, targets_BT, segments_BT, positions_BT
    return Micro(*parts, wasted, first_token, numbers)


@dataclass(frozen=True)
class ValidationRows:
    """Say which rows an evaluation reads of a text, and which targets of them count.

    Without a stride rows follow each other, and a target has as many tokens before it as its place
    in its row. With one, each row begins `stride` tokens after the last, and but for the first row
    only its last `stride` targets count: each target counts once, and has at least `sequence_length
    - stride` tokens before it, if the text has them (the sliding window of Baevski & Auli,
    arXiv 1809.10853, section 5.2, and of Hugging Face's perplexity guide).

    Args:
        targets: of the text.
        sequence_length: T, tokens of a row.
        stride: tokens between the beginnings of rows, 1 to T; T without one.
        tokens: at most so many are counted, in rows spread evenly over the text; all without it.
    """

    targets: int
    sequence_length: int
    stride: int
    tokens: int | None = None

    @staticmethod
    def of(
        shards: Shards, sequence_length: int, tokens: int | None, stride: int | None = None
    ) -> "ValidationRows":
        """Return the rows of a shard set."""
        stride = stride or sequence_length
        return ValidationRows(shards.tokens - 1, sequence_length, stride, tokens)

    @property
    def numbers(self) -> range | list[int]:
        """Return the numbers of the rows that are read: one at least."""
        further = max(0, self.targets - self.sequence_length)
        whole = min(1, self.targets) + -(-further // self.stride)
        if self.tokens is None or self.tokens // self.stride >= whole:
            return range(whole)
        count = max(1, self.tokens // self.stride)
        return [(2 * i + 1) * whole // (2 * count) for i in range(count)]

    def begin(self, number: int) -> int:
        """Return the place in the text of the first token of a row."""
        return number * self.stride

    def uncounted(self, number: int) -> int:
        """Return the targets at the beginning of a row that an earlier row counts."""
        return self.sequence_length - self.stride if number else 0

    @property
    def counted(self) -> int:
        """Return the targets that all rows together count."""
        ends = (
            min(self.begin(n) + self.sequence_length, self.targets)
            - self.begin(n)
            - self.uncounted(n)
            for n in self.numbers
        )
        return sum(ends)


def validation_batches(
    shards: Shards,
    sequence_length: int,
    *,
    tokens: int | None,
    micro_rows: int,
    rank: int = 0,
    ranks: int = 1,
    segments: bool = False,
    stride: int | None = None,
    beside: Callable[[int | None, Row], Row] = lambda number, row: row,
) -> Iterator[Micro]:
    """Yield the rows of the validation set, dealt out to the ranks in micro-batches of one shape.

    The rows are fixed: every call yields the same ones.

    Row i has the T + 1 tokens from i * stride, and the stride is T without one; see
    `ValidationRows`. A last short row, and whole rows where the number does not divide, are padding
    with ignored targets: every rank gets as many micro-batches. `beside` adds what a row carries
    beside tokens: (its number, or None of padding; the row) -> row.
    """
    rows = ValidationRows.of(shards, sequence_length, tokens, stride)
    every = rows.numbers
    for batch in range(-(-len(every) // (micro_rows * ranks))):
        first = (batch * ranks + rank) * micro_rows
        numbers = [*every[first : first + micro_rows]]
        padding = [None] * (micro_rows - len(numbers))
        yield collate(
            [beside(n, _validation_row(shards, rows, n)) for n in [*numbers, *padding]],
            segments=segments,
            first_token=first * sequence_length,
        )


def _validation_row(shards: Shards, rows: ValidationRows, number: int | None) -> Row:
    """Return row `number` of the validation set, padded where the set ends; None is all padding."""
    length = rows.sequence_length
    ids = np.full(length + 1, shards.manifest.document_token, dtype=np.int64)
    targets = np.full(length, IGNORE, dtype=np.int64)
    if number is None:
        return Row(ids, np.empty(0, dtype=np.int64), targets)
    start = rows.begin(number)
    count = min(length + 1, shards.tokens - start)
    ids[:count] = shards.read(start, count)
    counted = counted_targets(shards, start, ids[:count])
    targets[: count - 1] = ids[1:count] if counted is None else counted
    targets[: rows.uncounted(number)] = IGNORE
    return Row(ids, shards.document_starts(start, start + count) - start, targets)
