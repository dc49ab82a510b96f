"""Best-fit rows: each token of each document once, no document cut that fits, one stream."""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from facts import in_order
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.data.loader import Loader, combine_hashes
from headrace.data.mixture import deal
from headrace.data.packing import best_fit
from headrace.data.packing.best_fit import BestFit
from headrace.data.rows import IGNORE, Weighing
from headrace.data.shards import Shards

Make = Callable[..., Shards]
LENGTHS = [3, 0, 15, 16, 31, 1, 1, 7, 40, 8, 2, 5, 70, 14, 15, 9]


def pieces_of(part: Shards, length: int) -> list[tuple[int, ...]]:
    """Return what the rows must hold: inputs of each whole row and rest, and their last target."""
    bounds = [*part.document_starts(0, part.tokens).tolist(), part.tokens]
    found = []
    for begin, end in pairwise(bounds):
        for first in range(begin, end, length):
            last = min(first + length, end)
            after = int(part.read(last, 1)[0]) if last < end else part.manifest.document_token
            found.append((*part.read(first, last - first).tolist(), after))
    return sorted(found)


def check_rows(packer: BestFit, source: int, length: int) -> None:
    """Compare all rows of a source with the pieces of its documents."""
    found, padding = [], 0
    for unit in range(packer.units[source]):
        row = packer.row(source, unit)
        assert row.ids.shape == (length + 1,) and row.starts[0] == 0
        targets = row.ids[1:] if row.targets is None else row.targets
        ends = [*(s for s in row.starts[1:].tolist() if s < length), length]
        for begin, end in zip(row.starts.tolist(), ends, strict=False):
            if (targets[begin:end] == IGNORE).all():
                padding += end - begin
                continue
            assert (targets[begin : end - 1] == row.ids[begin + 1 : end]).all()
            found.append((*row.ids[begin:end].tolist(), int(targets[end - 1])))
    part = packer.shards[source]
    assert sorted(found) == pieces_of(part, length)
    assert padding == packer.units[source] * length - part.tokens


def test_each_token_of_each_document_once(make_shards: Make) -> None:
    """Windows have few documents, and documents lie across files of 100 tokens."""
    part = make_shards(LENGTHS * 3)

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(length=st.integers(2, 90), window=st.integers(1, 50))
    def check(length: int, window: int) -> None:
        with patch.object(best_fit, "WINDOW", window):
            packer = BestFit([part], length)
            check_rows(packer, 0, length)
        assert 1 - packer.padding == pytest.approx(part.tokens / (packer.units[0] * length))

    check()


def test_one_stream_for_ranks_and_workers_and_a_resume(make_shards: Make) -> None:
    parts = [make_shards(LENGTHS), make_shards(LENGTHS[::-1] * 2)]

    def loader(**options: int) -> Loader:
        return Loader(
            BestFit(parts, 16),
            **{"seed": 1, "rows_per_step": 8, "micro_rows": 2, **options},  # type: ignore[arg-type]
            mixture=deal([(0, [Fraction(7), Fraction(3)])], [None, None]),
            segments=True,
        )

    with loader() as whole:
        expected = [whole.step() for _ in range(6)]
        for ranks, workers in [(1, 4), (2, 1), (4, 0)]:
            hashes = []
            for rank in range(ranks):
                with loader(rank=rank, ranks=ranks, workers=workers) as part:
                    for _ in range(6):
                        part.step()
                    hashes.append(part.local_hash)
            assert combine_hashes(hashes) == whole.stream_sha256
        with loader() as before, loader(workers=2) as after:
            for _ in range(2):
                before.step()
            state = before.state()
            assert len(state) == 3, "a few numbers, whatever was packed"
            after.load_state(state)
            for batch in expected[2:]:
                for one, two in zip(after.step().micros, batch.micros, strict=True):
                    assert (one.targets_BT == two.targets_BT).all() and one.wasted == two.wasted
                    assert one.segments_BT is not None and two.segments_BT is not None
                    assert (one.segments_BT == two.segments_BT).all()
            assert after.stream_sha256 == whole.stream_sha256


def test_few_windows_are_held_and_none_is_wrong(make_shards: Make) -> None:
    """Rows are the same where their windows were dropped and made again."""
    part = make_shards(LENGTHS * 4)
    with patch.object(best_fit, "WINDOW", 5):
        kept = BestFit([part], 16)
        with patch.object(best_fit, "MOST_WINDOWS", 1):
            dropping = BestFit([part], 16)
        order = np.random.default_rng(0).permutation(kept.units[0])
        for unit in order.tolist():
            assert (kept.row(0, unit).ids == dropping.row(0, unit).ids).all()
        assert dropping._window.cache_info().currsize == 1


def test_shorter_than_a_row(make_shards: Make) -> None:
    part = make_shards([9])
    assert BestFit([part], 10).units == (1,)
    with pytest.raises(ConfigError, match=in_order("10 tokens", "one row", "11 tokens")) as error:
        BestFit([part], 11)
    assert "data.sequence_length=8" in str(error.value)


@pytest.mark.parametrize("length", [2, 16, 33, 90])
def test_a_row_has_the_token_weighted_mean_of_its_documents(make_shards: Make, length: int) -> None:
    """Pieces differ, so that the tokens of a row say which documents it holds."""
    part = make_shards([n for n in LENGTHS * 2 if n], vocab=60_000)
    scores = np.random.default_rng(length).normal(size=part.documents).astype(np.float32)
    bounds = part.bounds(0, part.documents)
    pieces = [
        (scores[document], tuple(part.read(at, min(length, end - at)).tolist()))
        for document, (begin, end) in enumerate(pairwise(bounds.tolist()))
        for at in range(begin, end, length)
    ]
    of_piece = {ids: float(score) for score, ids in pieces}
    assert len(of_piece) == len(pieces)
    with patch.object(best_fit, "WINDOW", 7):
        packer = BestFit([part], length)
        assert isinstance(packer, Weighing)
        means = packer.means(0, scores)
        assert means.dtype == np.float32 and len(means) == packer.units[0]
        for unit, mean in enumerate(means.tolist()):
            row = packer.row(0, unit)
            cuts = [*(s for s in row.starts.tolist() if s < length), length]
            own = [tuple(row.ids[a:b].tolist()) for a, b in pairwise(cuts)]
            held = [(of_piece[ids], len(ids)) for ids in own if ids in of_piece]
            assert mean == pytest.approx(sum(s * n for s, n in held) / sum(n for _, n in held))
