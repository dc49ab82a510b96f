"""Permutations and mixtures are exact, repeatable and the same one by one or in bulk."""

from fractions import Fraction

import numpy as np
import pytest

from headrace.data.mixture import deal
from headrace.data.order import (
    BLOCK_ROWS,
    BlockedOrder,
    MixtureOrder,
    UniformOrder,
    make_order,
    permute,
    permute_many,
)

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 100, 127, 255, 257, 1000, 4097]
GOLDEN_SMALL = [2, 4, 0, 7, 1, 6, 9, 5, 3, 8]
GOLDEN_LARGE = [297539197, 610295869, 893754587]
GOLDEN_MIXTURE = ([0, 0, 0, 0, 0, 0, 0, 0], [4, 1, 2, 0, 1, 2, 3, 4])


def dealt(units: list[int], weights: list[float], *, seed: int) -> MixtureOrder:
    """Return the order by weights that stay."""
    mixture = deal([(0, [Fraction(str(w)) for w in weights])], [None] * len(units))
    return MixtureOrder(units, mixture, seed=seed)


@pytest.mark.parametrize("size", SIZES)
def test_a_permutation_hits_everything_once(size: int) -> None:
    for key in range(4):
        places = permute_many(np.arange(size), size=size, key=key)
        assert sorted(places) == list(range(size))
        some = range(0, size, 1 + size // 50)
        assert [permute(i, size=size, key=key) for i in some] == [places[i] for i in some]


def test_huge_sizes_need_no_memory() -> None:
    size = 10**15 + 7
    index = np.array([0, 1, 2, size - 1])
    places = permute_many(index, size=size, key=b"x")
    assert len(set(places)) == 4 and places.max() < size
    assert [permute(int(i), size=size, key=b"x") for i in index] == places.tolist()


def test_the_key_changes_the_order() -> None:
    orders = {tuple(permute_many(np.arange(50), size=50, key=(7, e))) for e in range(100)}
    assert len(orders) == 100
    # Shuffled in fact: neighbours end up apart and no trend is left.
    places = permute_many(np.arange(10_000), size=10_000, key=1)
    assert abs(np.corrcoef(np.arange(10_000), places)[0, 1]) < 0.05
    assert np.abs(np.diff(places)).mean() == pytest.approx(10_000 / 3, rel=0.05)


def test_golden_values() -> None:
    """A change here changes what every seed means: all resumes would break."""
    assert permute_many(np.arange(10), size=10, key=0).tolist() == GOLDEN_SMALL
    assert [permute(i, size=10**9, key=(1, 2)) for i in range(3)] == GOLDEN_LARGE
    source, unit = dealt([5, 7], [0.7, 0.3], seed=3)(10**6, 8)
    assert (source.tolist(), unit.tolist()) == GOLDEN_MIXTURE


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        permute(index, size=5, key=0)
    with pytest.raises(IndexError):
        permute_many(np.array([index]), size=5, key=0)


def test_without_weights_an_epoch_is_every_unit_once() -> None:
    order = make_order([3, 1, 7], seed=5)
    every = sorted((s, u) for s, n in enumerate([3, 1, 7]) for u in range(n))
    epochs = []
    for epoch in range(3):
        source, unit = order(epoch * 11, 11)
        epochs.append(list(zip(source.tolist(), unit.tolist(), strict=True)))
        assert sorted(epochs[-1]) == every
    assert epochs[0] != epochs[1] != epochs[2]
    source, unit = order(8, 20)
    across = list(zip(source.tolist(), unit.tolist(), strict=True))
    assert across == [pair for epoch in epochs for pair in epoch][8:28]


@pytest.mark.parametrize("weights", [[1], [0.7, 0.3], [1, 1, 1], [1e-4, 5, 0.333], [3, 0.0001]])
def test_a_mixture_is_exact_in_the_long_run(weights: list[float]) -> None:
    units = [60, 1111, 400][: len(weights)]
    order = dealt(units, weights, seed=1)
    (period,) = order._periods
    source, unit = order(0, 30 * period if min(weights) > 0.1 else 2 * period)
    share = np.array(weights) / sum(weights)
    for rows in range(period, len(source) + 1, period):
        counts = np.bincount(source[:rows], minlength=len(weights))
        assert np.abs(counts - share * rows).max() < 1
    for s, n in enumerate(units):
        mine = unit[source == s]
        whole = mine[: len(mine) // n * n].reshape(-1, n)
        assert (np.sort(whole) == np.arange(n)).all()


def test_any_row_of_a_mixture_can_be_asked_for_first() -> None:
    weights = [0.6, 0.4]
    source, unit = dealt([50, 60], weights, seed=2)(0, 5000)
    for first in (0, 1023, 4000):
        fresh = dealt([50, 60], weights, seed=2)
        one, two = fresh(first, 300)
        assert (one == source[first : first + 300]).all()
        assert (two == unit[first : first + 300]).all()
    assert dealt([50, 60], weights, seed=2).deal(10**14, 1)[1][0] > 10**13


def test_blocks_give_the_rows_of_their_order() -> None:
    for order in (UniformOrder([70, 2000], seed=3), dealt([70, 2000], [1, 3], seed=3)):
        blocked = BlockedOrder(order)
        for first, count in ((0, 1), (5, 32), (1020, 9), (1023, 1), (1024, 1024), (5000, 4000)):
            for part, whole in zip(blocked(first, count), order(first, count), strict=True):
                assert part.tolist() == whole.tolist()


def test_a_block_that_reaches_beyond_the_last_row_gives_those_before() -> None:
    mixture = deal([(0, [Fraction(1), Fraction(2)])], [300, 400])
    order = MixtureOrder([5, 7], mixture, seed=1)
    assert mixture.end is not None and mixture.end < BLOCK_ROWS
    whole = order(0, mixture.end)
    for part, expected in zip(BlockedOrder(order)(0, mixture.end), whole, strict=True):
        assert part.tolist() == expected.tolist()
    with pytest.raises(IndexError):
        BlockedOrder(order)(mixture.end, 1)
