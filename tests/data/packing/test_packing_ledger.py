"""The ledger counts what the packers do, token by token."""

from collections.abc import Callable
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest

from headrace.data.packing import best_fit
from headrace.data.packing.best_fit import BestFit
from headrace.data.packing.ledger import Choice, Policy, PolicyCount, packing_ledger
from headrace.data.rows import IGNORE, Cut, Packer
from headrace.data.shards import Shards

Make = Callable[..., Shards]
LENGTHS = [3, 0, 15, 16, 31, 1, 1, 7, 40, 8, 2, 5, 70, 14, 15, 9]


def counted(packer: Packer, parts: list[Shards], *, apart: bool) -> PolicyCount:
    """Count rows as they are read; every token of these sets is another one but for borders."""
    length, pairs, padding, inputs = packer.sequence_length, 0, 0, 0
    for source in range(len(parts)):
        for unit in range(packer.units[source]):
            row = packer.row(source, unit)
            inner = {int(s) for s in row.starts if 0 < s < length} if apart else set()
            pairs += sum(
                (b - a) * (b - a + 1) // 2 for a, b in pairwise(sorted({0, length} | inner))
            )
            padding += 0 if row.targets is None else int((row.targets == IGNORE).sum())
            inputs += length
    return PolicyCount(
        rows=sum(packer.units),
        dropped_tokens=sum(part.tokens for part in parts) - (inputs - padding),
        padding_tokens=padding,
        attention_pairs=pairs,
    )


def in_pieces(part: Shards, length: int, used: int) -> tuple[int, int, int]:
    """Return cropped tokens, split documents and needless splits of a cut stream, by its tokens."""
    cropped = split = needless = 0
    for begin, end in pairwise([*part.document_starts(0, part.tokens).tolist(), part.tokens]):
        rows = [place // length for place in range(begin, min(end, used))]
        cropped += sum(row != rows[0] for row in rows)
        split += len(set(rows)) > 1
        needless += len(set(rows)) > 1 and end - begin <= length
    return cropped, split, needless


@pytest.mark.parametrize("length", [2, 7, 16, 33])
def test_every_number_is_that_of_the_rows(make_shards: Make, length: int) -> None:
    parts = [make_shards(LENGTHS), make_shards(LENGTHS[::-1] * 2)]
    sizes = np.concatenate([np.diff(part.bounds(0, part.documents)) for part in parts])
    with patch.object(best_fit, "WINDOW", 5):
        ledger = packing_ledger(parts, length)
        best = counted(BestFit(parts, length), parts, apart=True)
    cut = Cut(parts, length)
    streams = [in_pieces(p, length, u * length) for p, u in zip(parts, cut.units, strict=True)]
    cropped, split, needless = (sum(column) for column in zip(*streams, strict=True))
    stream = {"cropped_tokens": cropped, "split_documents": split, "needless_splits": needless}
    long = {
        "cropped_tokens": int(np.maximum(sizes - length, 0).sum()),
        "split_documents": int((sizes > length).sum()),
    }
    for policy, rows, pieces in (
        (Policy.CUT, counted(cut, parts, apart=False), stream),
        (Policy.DOCUMENT_PACKING, counted(cut, parts, apart=True), stream),
        (Policy.BEST_FIT_PACKING, best, long),
    ):
        assert ledger.policies[policy] == rows.plus(PolicyCount(**pieces)), policy
    assert best.dropped_tokens == 0
    rows = sum(-(-int(size) // length) for size in sizes)
    padded = ledger.policies[Policy.PAD]
    assert (padded.rows, padded.padding_tokens) == (rows, rows * length - int(sizes.sum()))
    assert ledger.tokens == sizes.sum() and ledger.longest == sizes.max()
    for below, documents, tokens in ledger.histogram:
        inside = sizes[(below // 2 <= sizes) & (sizes < below)]
        assert (documents, tokens) == (len(inside), inside.sum())
    assert sum(documents for _, documents, _ in ledger.histogram) == len(sizes)
    assert (
        ledger.attention_flops(Policy.CUT, 2, 8)
        == 192 * ledger.policies[Policy.CUT].attention_pairs
    )


def test_each_choice_has_its_lengths(make_shards: Make) -> None:
    web = np.random.default_rng(0).lognormal(2.5, 1.0, 300).astype(int).tolist()
    for lengths, length, choice, policy in (
        (web, 64, Choice.WHOLE_DOCUMENTS, Policy.BEST_FIT_PACKING),
        ([40] * 30, 64, Choice.TOO_MUCH_PADDING, Policy.DOCUMENT_PACKING),
        ([5000], 16, Choice.NOTHING_TO_SEPARATE, Policy.CUT),
    ):
        ledger = packing_ledger([make_shards(lengths)], length)
        assert ledger.choose() == (policy, choice)
    assert ledger.in_force(["muon"]) is Policy.CUT
    both = ["document_packing", "best_fit_packing"]
    assert ledger.in_force(both) is Policy.BEST_FIT_PACKING
    assert ledger.in_force(both[:1]) is Policy.DOCUMENT_PACKING
