"""One global stream, whoever reads it: the hash says so, and a resume reads nothing twice."""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from facts import tells

from headrace.core.errors import ConfigError
from headrace.data.loader import (
    Loader,
    ValidationRows,
    combine_hashes,
    validation_batches,
)
from headrace.data.mixture import Mixture, deal
from headrace.data.rows import IGNORE, Cut, Row
from headrace.data.shards import Shards

T, ROWS, STEPS = 16, 8, 7
PINNED = "33441578ad2e350647830d4eba0a45cec3a22fb5cba53866cde5feb803959467"
EVEN = deal([(0, [Fraction(7), Fraction(3)])], [None, None])
STAGED = deal([(0, [Fraction(1), Fraction(2)]), (21, [Fraction(1)] * 2)], [None, 19])
"""Its stages' border and its limit both fall into the middle of a step."""
Make = Callable[..., Shards]


class Counting:
    """A packer that writes down what it was asked for, and can fail or be slow."""

    sequence_length = T

    def __init__(self, inner: Cut) -> None:
        self.inner, self.units = inner, inner.units
        self.asked: list[tuple[int, int]] = []
        self.fail_at: int | None = None
        self.delay_s = 0.0

    def row(self, source: int, unit: int) -> Row:
        self.asked.append((source, unit))
        if self.fail_at is not None and len(self.asked) > self.fail_at:
            raise OSError("the disk went away")
        time.sleep(self.delay_s)
        return self.inner.row(source, unit)


@pytest.fixture
def packer(make_shards: Make) -> Counting:
    return Counting(Cut([make_shards([100, 3, 250]), make_shards([150])], T))


def loader(packer: Any, **options: Any) -> Loader:
    return Loader(packer, **{"seed": 1, "rows_per_step": ROWS, "micro_rows": 2, **options})


def rows_of(packer: Any, **options: Any) -> torch.Tensor:
    """Return the rows of all ranks over STEPS steps in global order [rows, 2, T]."""
    ranks = options.get("ranks", 1)
    steps = []
    loaders = [loader(packer, **options, rank=rank) for rank in range(ranks)]
    for step in range(STEPS):
        for each in loaders:
            micros = each.step(step).micros
            steps += [torch.stack([m.ids_BT, m.targets_BT], 1) for m in micros]
    for each in loaders:
        each.close()
    return torch.cat(steps)


@pytest.mark.parametrize("mixture", [None, EVEN, STAGED])
def test_one_stream_for_all_layouts(packer: Counting, mixture: Mixture | None) -> None:
    expected = rows_of(packer, mixture=mixture)
    assert expected.shape == (ROWS * STEPS, 2, T)
    assert (expected[:, 0, 1:] == expected[:, 1, :-1]).all()
    plain = loader(packer, mixture=mixture)
    for _ in range(STEPS):
        plain.step()
    for ranks, workers, micro_rows in [
        (1, 1, 8),
        (1, 4, 1),
        (2, 0, 4),
        (2, 4, 2),
        (4, 1, 2),
        (4, 0, 1),
    ]:
        options = {"ranks": ranks, "workers": workers, "micro_rows": micro_rows, "mixture": mixture}
        assert (rows_of(packer, **options) == expected).all()
        hashes = []
        for rank in range(ranks):
            with loader(packer, **options, rank=rank) as part:
                for _ in range(STEPS):
                    part.step()
                hashes.append(part.local_hash)
        assert combine_hashes(hashes) == plain.stream_sha256
        assert len(set(hashes)) == ranks


def test_the_hash_of_this_stream_is_pinned(packer: Counting) -> None:
    """Check the stream's hash against its definition and a pinned value that reports rely on."""
    total = 0
    for k, row in enumerate(rows_of(packer)):
        ids = torch.cat([row[0], row[1, -1:]]).numpy().astype("<i4")
        digest = hashlib.sha256(k.to_bytes(8, "little") + ids.tobytes()).digest()
        total += int.from_bytes(digest, "little")
    expected = hashlib.sha256((total % 2**256).to_bytes(32, "little")).hexdigest()
    with loader(packer) as plain:
        for _ in range(STEPS):
            plain.step()
        assert plain.stream_sha256 == expected == PINNED


def test_a_token_or_the_order_changes_the_hash(packer: Counting) -> None:
    def stream(change: Callable[[int, Row], Row], order: Any = None) -> str:
        class Changed(Counting):
            def row(self, source: int, unit: int) -> Row:
                return change(unit, super().row(source, unit))

        with loader(Changed(packer.inner), order=order) as changed:
            changed.step()
            return changed.stream_sha256

    def flip(unit: int, row: Row) -> Row:
        ids = row.ids.copy()
        ids[3] += 1
        return Row(ids, row.starts)

    def keep(unit: int, row: Row) -> Row:
        return row

    assert (
        len({stream(keep, InOrder()), stream(keep, InOrder(swap=1)), stream(flip, InOrder())}) == 3
    )
    assert stream(keep, InOrder()) == stream(keep, InOrder())


def test_seeds_and_epochs_differ(packer: Counting) -> None:
    first = rows_of(packer)
    assert not (first == rows_of(packer, seed=2)).all()
    per_epoch = sum(packer.units)
    assert per_epoch < ROWS * STEPS
    epoch = {tuple(row.flatten().tolist()) for row in first[:per_epoch]}
    assert len(epoch) == per_epoch
    assert all(tuple(row.flatten().tolist()) in epoch for row in first[per_epoch:])


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_resume_is_exact_and_reads_nothing_else(packer: Counting, workers: int) -> None:
    whole = loader(packer)
    expected = [whole.step() for _ in range(STEPS)]
    with loader(packer, workers=workers) as before:
        for _ in range(3):
            before.step()
        state = before.state()
    assert state == {"step": 3, "rows": 3 * ROWS, "stream_hash": state["stream_hash"]}
    packer.asked.clear()
    with loader(packer, workers=workers, prefetch=1) as after:
        after.load_state(state)
        assert not packer.asked
        batch = after.step()
        assert len(packer.asked) <= ROWS + 2 * bool(workers)
        for step in range(3, STEPS):
            assert same(batch.micros, expected[step].micros)
            batch = after.step() if step + 1 < STEPS else batch
        assert after.stream_sha256 == whole.stream_sha256


def test_resume_under_other_ranks_continues_the_stream(packer: Counting) -> None:
    whole = loader(packer)
    for _ in range(6):
        whole.step()
    state: dict[str, Any] = loader(packer).state()
    for ranks, steps in [(1, 1), (4, 2), (2, 3)]:
        parts = [loader(packer, rank=r, ranks=ranks, workers=1) for r in range(ranks)]
        for part in parts:
            part.load_state(state)
            for _ in range(steps):
                part.step()
        total = sum(part.local_hash for part in parts)
        for part in parts:
            part.merge(total)
        states = [part.state() for part in parts]
        assert all(s == states[0] for s in states)
        state = states[0]
        for part in parts:
            part.close()
    assert state == whole.state()


def test_a_resume_with_another_batch_is_refused(packer: Counting) -> None:
    first = loader(packer)
    first.step()
    with pytest.raises(ConfigError) as error:
        loader(packer, rows_per_step=4).load_state(first.state())
    assert tells(error.value.message, "8 rows", "plan", "4 rows")
    assert error.value.remedy.changes[0] == (f"batch.tokens={8 * T}",)


def test_seeking_leaves_the_hash_alone_and_gives_the_same_batch(packer: Counting) -> None:
    with loader(packer, workers=2) as one:
        batches = [one.step() for _ in range(4)]
        hash_before = one.local_hash
        one.seek(1)
        assert one.local_hash == hash_before
        assert same(one.step().micros, batches[1].micros)
        assert same(one.step(3).micros, batches[3].micros)
        assert one.state()["step"] == 4


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_an_error_reaches_the_caller_and_the_step_can_be_tried_again(
    packer: Counting, workers: int
) -> None:
    whole = loader(packer)
    expected = [whole.step() for _ in range(2)]
    packer.asked.clear()
    packer.fail_at = ROWS + 3
    with loader(packer, workers=workers, prefetch=1) as one:
        one.step()
        with pytest.raises(OSError, match="the disk went away"):
            one.step()
        packer.fail_at = None
        assert same(one.step().micros, expected[1].micros)
        assert one.stream_sha256 == whole.stream_sha256


def test_close_ends_the_threads_at_once(packer: Counting) -> None:
    others = set(threading.enumerate())

    def readers() -> list[threading.Thread]:
        mine = set(threading.enumerate()) - others
        return [t for t in mine if t.name.startswith("headrace-data")]

    packer.delay_s = 0.01
    one = loader(packer, workers=4, prefetch=200)
    one.step()
    assert len(readers()) == 4
    asked = len(packer.asked)
    one.close()
    assert not readers() and len(packer.asked) - asked < 100 * ROWS  # of 200 steps ahead
    one.close()


def test_reading_ahead_takes_the_wait_away(packer: Counting) -> None:
    packer.delay_s = 0.002
    waits = {}
    for workers in (0, 2):
        with loader(packer, workers=workers, prefetch=ROWS) as one:
            one.step()
            time.sleep(0.1)
            waits[workers] = one.step().wait_s
    assert waits[0] >= ROWS * 0.002 > waits[2]


def test_micro_batches_carry_documents_and_positions(packer: Counting) -> None:
    with loader(packer, segments=True, order=InOrder()) as one:
        for step in range(2):
            for m, micro in enumerate(one.step().micros):
                assert micro.segments_BT is not None and micro.positions_BT is not None
                assert micro.segments_BT.dtype == torch.int32 and micro.wasted == 0
                assert micro.wasted == 0
                for b in range(2):
                    row = packer.inner.row(0, step * ROWS + m * 2 + b)
                    segment, position = plainly(row)
                    assert micro.segments_BT[b].tolist() == segment
                    assert micro.positions_BT[b].tolist() == position
    assert loader(packer).step().micros[0].segments_BT is None


@dataclass
class InOrder:
    swap: int = 0
    end: int | None = None

    def __call__(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(count, dtype=int), np.arange(first, first + count) ^ self.swap


def plainly(row: Row) -> tuple[list[int], list[int]]:
    """Return segments and positions, one token at a time."""
    segments, positions = [0], [0]
    for t in range(1, len(row.ids) - 1):
        new = t in row.starts
        segments.append(segments[-1] + new)
        positions.append(0 if new else positions[-1] + 1)
    return segments, positions


def test_a_packer_may_ignore_targets(packer: Counting) -> None:
    class Padding(Counting):
        def row(self, source: int, unit: int) -> Row:
            row = super().row(source, unit)
            targets = row.ids[1:].copy()
            targets[-5:] = IGNORE
            return Row(row.ids, row.starts, targets)

    micro = loader(Padding(packer.inner)).step().micros[0]
    assert micro.wasted == 10
    assert (micro.targets_BT[:, -5:] == IGNORE).all() and (micro.targets_BT[:, :-5] >= 0).all()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_validation_counts_every_target_once(make_shards: Make, ranks: int, tokens: int) -> None:
    shards = make_shards([70, 21])
    rows = [*ValidationRows.of(shards, T, tokens).numbers]
    assert rows == {1: [3], 40: [1, 4], 10_000: [0, 1, 2, 3, 4, 5]}[tokens]
    options = {"tokens": tokens, "micro_rows": 2, "ranks": ranks, "segments": True}
    dealt = [list(validation_batches(shards, T, **options, rank=r)) for r in range(ranks)]
    assert len({len(micros) for micros in dealt}) == 1
    assert all(m.ids_BT.shape == (2, T) for micros in dealt for m in micros)
    in_turn = [micro for group in zip(*dealt, strict=True) for micro in group]
    targets = torch.cat([m.targets_BT.flatten() for m in in_turn])
    inputs = torch.cat([m.ids_BT.flatten() for m in in_turn])
    stream = torch.from_numpy(shards.read(0, shards.tokens))
    places = torch.tensor([p for r in rows for p in range(r * T, r * T + T)])
    places = places[places < shards.tokens - 1]
    assert (targets[targets != IGNORE] == stream[places + 1]).all()
    assert (inputs[targets != IGNORE] == stream[places]).all()
    assert sum(m.wasted for m in in_turn) == len(targets) - len(places)
    assert [*ValidationRows.of(shards, T, None).numbers] == [*range(6)]


def same(left: list[Any], right: list[Any]) -> bool:
    return all(
        torch.equal(a.ids_BT, b.ids_BT) and torch.equal(a.targets_BT, b.targets_BT)
        for a, b in zip(left, right, strict=True)
    )
