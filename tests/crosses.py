"""Cross choices so that a few quick cases hold them all, and the rest run with the slow tests."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

Case = dict[str, Any]


def whole_cross(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return every combination."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def in_turn(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return as many combinations as the longest axis has choices: each axis in turn, repeated."""
    most = max(map(len, axes.values()))
    return [{axis: found[n % len(found)] for axis, found in axes.items()} for n in range(most)]


def pairwise_cover(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Return few combinations in which each pair of choices that is allowed occurs (greedy)."""
    candidates = [case for case in whole_cross(axes) if allowed(case)]
    pairs = [set(itertools.combinations(case.items(), 2)) for case in candidates]
    missing = set().union(*pairs)
    cover = []
    while missing:
        best = max(range(len(candidates)), key=lambda i: len(pairs[i] & missing))
        missing -= pairs[best]
        cover.append(candidates[best])
    return cover


def crossed(*, together: int, **axes: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by a whole cross, of which all but a few cases are marked `slow`.

    Args:
        together: 1 if quick cases hold every choice, 2 if they hold every pair of choices.
        axes: the choices of each argument; a mapping gives them names.
    """
    names = {axis: list(choices) for axis, choices in axes.items()}
    values = {a: list(c.values()) if isinstance(c, Mapping) else names[a] for a, c in axes.items()}
    numbers = {axis: range(len(found)) for axis, found in names.items()}
    quick = in_turn(numbers) if together == 1 else pairwise_cover(numbers)
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(values[axis][number] for axis, number in case.items()),
                id="-".join(str(names[axis][number]) for axis, number in case.items()),
                marks=[] if case in quick else [pytest.mark.slow],
            )
            for case in whole_cross(numbers)
        ],
    )
