"""What a technique adds to the loss is divided once, by what it is a mean over.

The plainest reference needs no formula: targets that are cut in two parts, of which each is masked
in its turn. A mean over counted targets, times their number, adds up to that of the whole, and so
does a mean over all tokens, which neither mask moves. A sum that is divided by anything else, or
twice, does not. Micro-batches have one, two and three rows.
"""

import house
import pytest
import torch
from equality import at_the_update, flags_of, gradients_of
from house import PACKING, Variant
from torch import Tensor

from headrace.data.loader import Micro, collate
from headrace.data.rows import IGNORE, Row
from headrace.train.train import step

ADDS = {"objective", "terms", "auxiliary"}
"""Sockets of what a loss has beside cross-entropy."""
STRONG = {"z_loss": {"weight": 0.5}, "mixture_of_experts": {"balance": 1.0}}
"""Knobs with which the term is no small part of the loss."""
OF_TEXTS = {"example_loss", "preference"}
"""Techniques whose mean is over texts or pairs of them, which tests of their own compare."""
NAMES = [
    name
    for name, kind in house.CATALOGUE.techniques.items()
    if ADDS & {*kind.composes} and name not in OF_TEXTS
]


def masked(rows: list[Row], kept: list[Tensor]) -> list[Row]:
    found = []
    for row, keep in zip(rows, kept, strict=True):
        assert row.targets is not None
        targets = row.targets.copy()
        targets[~keep.numpy()] = IGNORE
        found.append(row._replace(targets=targets))
    return found


def sums(name: str, rows: list[Row], packing: bool) -> tuple[dict[str, Tensor], float]:
    """Loss and gradients of a step, times the targets that counted; and how many did."""
    knobs = {**house.tiny_knobs(name, "cpu"), **STRONG.get(name, {})}
    variants = [Variant(name, knobs), *([Variant(PACKING)] if packing else [])]
    build = house.random_build(house.plan_of(*variants))
    cuts, segments = [(0, 1), (1, 3), (3, 6)], build.mask.document
    micros: list[Micro] = [
        collate(rows[a:b], segments=segments, first_token=a * house.LENGTH) for a, b in cuts
    ]
    found: dict[str, Tensor] = {}
    watched = at_the_update(build, lambda: found.update(gradients_of(build)))
    with flags_of(build), watched:
        numbers = step(build, micros, 0)
    counted = float(numbers[3])
    found["loss"] = numbers[0]
    return {key: value.double() * counted for key, value in found.items()}, counted


def test_every_technique_that_adds_to_the_loss_is_here() -> None:
    assert {"z_loss", "label_smoothing", "distillation", "mixture_of_experts"} <= {*NAMES}


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_two_halves_of_the_targets_add_up_to_the_whole(name: str, packing: bool) -> None:
    rows = house.make_rows(house.SHAPES["grouped"]["vocab"], ignored=False)
    draw = torch.Generator().manual_seed(1)
    kept = [torch.rand(house.LENGTH, generator=draw) < 0.1 * (n + 2) for n in range(len(rows))]
    whole, all_counted = sums(name, rows, packing)
    one, first = sums(name, masked(rows, kept), packing)
    two, second = sums(name, masked(rows, [~keep for keep in kept]), packing)
    assert first + second == all_counted and 0 < first != second > 0
    for key, right in whole.items():
        off = (one[key] + two[key] - right).abs().max() / right.abs().max()
        assert off < 1e-5, (key, float(off))
