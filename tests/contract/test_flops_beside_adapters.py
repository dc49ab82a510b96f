"""FLOPs of blocks that run again and hold adapters: predicted as they are counted."""

from typing import Any

import pytest
from house import Variant
from test_predicts import counted_flops, plan_of

EVERY = ("mixer.qkv", "mixer.out", "mlp.gate_up", "mlp.down")
SELECTIVE = "selective_checkpoint"


@pytest.mark.parametrize("targets", [EVERY, EVERY[:1], EVERY[1:2], EVERY[2:3], EVERY[:3]], ids=str)
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("full_checkpoint", {}),
        ("full_checkpoint", {"every": 2}),
        (SELECTIVE, {}),
        (SELECTIVE, {"save": "attention"}),
        (SELECTIVE, {"save": "matmul"}),
        (SELECTIVE, {"every_matmul": 2}),
    ],
    ids=str,
)
def test_what_runs_again_is_predicted(
    name: str, knobs: dict[str, Any], targets: tuple[str, ...]
) -> None:
    lora = Variant("lora", {"rank": 2, "alpha": 4.0, "targets": targets})
    counted, ledger = counted_flops(plan_of(lora, Variant(name, knobs), layers=2))
    assert ledger.flops["recompute"] > 0
    assert ledger.flops_per_token() == pytest.approx(counted, rel=1e-6)
