"""Best-fit decreasing by groups is the plain algorithm's, row by row of free room."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.packing.fit import fit


def plainly(sizes: list[int], room: int) -> list[int]:
    """Place one piece after the other, and return the free room of each row, sorted."""
    free: list[int] = []
    for size in sorted(filter(None, sizes), reverse=True):
        fitting = [left for left in free if left >= size]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else room) - size)
    return sorted(free)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(2, 40), st.lists(st.integers(0, 39)))
def test_rows_are_those_of_the_plain_algorithm(room: int, numbers: list[int]) -> None:
    sizes = [number % room for number in numbers]
    fitted = fit(np.bincount(np.array(sizes, dtype=np.int64), minlength=room))
    placed = np.array(sorted((n for n in sizes if n), reverse=True), dtype=np.int64)
    rows = [fitted.pieces(row) for row in range(fitted.rows)]
    assert sorted(p for row in rows for p in row.tolist()) == [*range(len(placed))]
    assert sorted(room - int(placed[row].sum()) for row in rows) == plainly(sizes, room)


def test_a_million_pieces_fill_their_rows() -> None:
    """Rows of web-like lengths are nearly full, and few groups describe them all."""
    sizes = np.random.default_rng(0).lognormal(6.3, 1.1, 1 << 20).astype(np.int64) % 2048
    fitted = fit(np.bincount(sizes, minlength=2048))
    assert sizes.sum() > 0.999 * 2048 * fitted.rows
    assert len(fitted.ends) < 4096 and len(fitted.each) < 16_384
