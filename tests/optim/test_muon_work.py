"""Work of Muon's update is foreseen as its kernels do it."""

from math import prod
from typing import Any

import pytest
import torch
from test_update_traffic import Traffic
from torch.utils.flop_counter import FlopCounterMode

from headrace.costs.work import Matmul, Stream
from headrace.optim.muon import WHOLE, MatrixCut, MuonRule, change_, direction_, polar_
from headrace.optim.muon_work import HALF, MuonWork
from headrace.optim.submatrix import count_touched, longest


def work_of(shape: tuple[int, int], **given: Any) -> MuonWork:
    """Return the work of four matrices that one process updates, eagerly on a CPU."""
    usual: dict[str, Any] = {"compiled": False, "on_gpu": False, "cut": WHOLE, "symmetric": False}
    usual |= {"rows": False, "ahead": True, "fraction": 1.0, "slices": 1.0, "axis": "shard"}
    return MuonWork(shape=shape, count=4, ranks=1, sizes={}, **{**usual, **given})


@pytest.mark.parametrize(
    ("shape", "halves"), [((768, 768), True), ((768, 2048), True), ((512, 2048), False)]
)
def test_half_of_a_product_is_foreseen_where_the_kernel_serves(
    shape: tuple[int, int], halves: bool
) -> None:
    def of(symmetric: bool) -> dict[str, Any]:
        batch = work_of(shape, compiled=True, on_gpu=True, symmetric=symmetric)
        return {name.rsplit("/", 1)[-1]: piece for name, piece in batch.work().items()}

    whole, half = of(False), of(True)
    assert "sums" in whole and ("sums" not in half) == halves
    assert (half == whole) != halves and half["product"] == whole["product"]
    for name in ("gram", "squared"):
        shorter = half[name].flops / whole[name].flops  # of whole rows
        assert shorter == pytest.approx(HALF if halves else 1, rel=1e-3)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fraction", [0.25, 0.6])
@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (64, 64)], ids=str)
def test_an_update_of_a_part_moves_what_is_foreseen(
    shape: tuple[int, int], fraction: float, ahead: bool
) -> None:
    """Compare bytes of momentum, selection and writing with those that torch's operations move."""
    work = work_of(shape, ahead=ahead, fraction=fraction)
    streams = {n.rsplit("/", 1)[-1]: w for n, w in work.work().items() if isinstance(w, Stream)}
    weights, gradients = ([*torch.randn(4, *shape)] for _ in range(2))
    kept, one = torch.zeros(4, *shape), torch.tensor(1.0)
    rule = MuonRule(nesterov=ahead, fraction=fraction)
    with Traffic() as momentum:
        directions = direction_(gradients, kept, 0.9 * one, one, rule)
    assert momentum.bytes == streams["momentum"].bytes
    with Traffic() as selected:
        part = longest(directions, fraction, torch.float32)
        taken = part.of(directions)
        updates = part.alone(taken)
        count_touched(updates)
    # The counter takes all of what a gather reads from, and an index that is a view as long as its
    # numbers.
    extra = 12 * directions.numel() + 4 * taken.numel()
    assert selected.bytes - extra == streams["selected"].bytes
    updates = polar_(directions, None, one, None, rule, WHOLE)
    with Traffic() as written:
        change_(weights, updates, kept, one, None, one, rule)
    assert written.bytes == streams["written"].bytes


@pytest.mark.parametrize("cut", [WHOLE, MatrixCut(2, ((1, 36, 1), (2, 12, 1)))], ids=str)
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.1])
def test_matmuls_of_a_part_are_foreseen(fraction: float, cut: MatrixCut) -> None:
    """Compare with torch's counter; a tenth leaves a hundredth or so of the squares."""
    work = work_of((120, 64), fraction=fraction, cut=cut).work()
    directions, rule = torch.randn(4, 120, 64), MuonRule(fraction=fraction)
    with FlopCounterMode(display=False) as counter:
        polar_(directions, None, torch.tensor(1.0), None, rule, cut)
    matmuls = [w for w in work.values() if isinstance(w, Matmul)]
    assert counter.get_total_flops() == sum(2 * prod(w.sizes) * w.count for w in matmuls)


@pytest.mark.parametrize(
    ("shape", "flops", "bytes"), [((2048, 8192), 0.0406, 1.11), ((2048, 2048), 0.0312, 1.28)]
)
def test_a_quarter_takes_what_the_card_says(
    shape: tuple[int, int], flops: float, bytes: float
) -> None:
    amounts = {}
    for fraction in (1.0, 0.25):
        given: dict[str, Any] = {"compiled": True, "on_gpu": True}
        work = work_of(shape, fraction=fraction, **given).work().values()
        amounts[fraction] = (
            sum(w.flops * w.count for w in work if isinstance(w, Matmul)),
            sum(w.bytes * w.count for w in work if isinstance(w, Stream)),
        )
    shares = [part / whole for part, whole in zip(amounts[0.25], amounts[1.0], strict=True)]
    assert shares == pytest.approx([flops, bytes], rel=0.01)
