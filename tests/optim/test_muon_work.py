"""Work of Muon's update is foreseen as its kernels do it."""

from typing import Any

import pytest

from headrace.optim.muon import WHOLE
from headrace.optim.muon_work import MuonWork


@pytest.mark.parametrize(
    ("shape", "halves"), [((768, 768), True), ((768, 2048), True), ((512, 2048), False)]
)
def test_half_of_a_product_is_foreseen_where_the_kernel_serves(
    shape: tuple[int, int], halves: bool
) -> None:
    def of(symmetric: bool) -> dict[str, Any]:
        batch = MuonWork(
            shape=shape,
            cut=WHOLE,
            count=4,
            compiled=True,
            on_gpu=True,
            rows=False,
            symmetric=symmetric,
            ahead=True,
            slices=1.0,
            axis="shard",
            ranks=1,
            sizes={},
        )
        return {name.rsplit("/", 1)[-1]: piece for name, piece in batch.work().items()}

    whole, half = of(False), of(True)
    assert "sums" in whole and ("sums" not in half) == halves
    assert (half == whole) != halves and half["product"] == whole["product"]
    for name in ("gram", "squared"):
        assert half[name].flops == (0.75 if halves else 1) * whole[name].flops
