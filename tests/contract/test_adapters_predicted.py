"""Blocks that run again and hold adapters: predicted as they are counted and traced."""

from typing import Any

import pytest
from house import Variant
from test_predicts import counted_flops, plan_of, traced

EVERY = ("mixer.qkv", "mixer.out", "mlp.gate_up", "mlp.down")
SELECTIVE = "selective_checkpoint"
PIECES = Variant("chunked_mlp", {"chunk_tokens": 7})


def adapters(targets: tuple[str, ...]) -> Variant:
    return Variant("lora", {"rank": 2, "alpha": 4.0, "targets": targets})


@pytest.mark.parametrize(
    "targets",
    [
        EVERY,
        *(
            pytest.param(some, marks=pytest.mark.slow)
            for some in (EVERY[:1], EVERY[1:2], EVERY[2:3], EVERY[:3])
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("full_checkpoint", {}),
        ("full_checkpoint", {"every": 2}),
        (SELECTIVE, {}),
        (SELECTIVE, {"save": "attention"}),
        (SELECTIVE, {"save": "matmul"}),
        (SELECTIVE, {"every_matmul": 2}),
        (PIECES.name, PIECES.knobs),
    ],
    ids=str,
)
def test_what_runs_again_is_predicted(
    name: str, knobs: dict[str, Any], targets: tuple[str, ...]
) -> None:
    counted, ledger = counted_flops(plan_of(adapters(targets), Variant(name, knobs), layers=2))
    assert ledger.flops["recompute"] > 0
    assert ledger.flops_per_token() == pytest.approx(counted, rel=1e-6)


@pytest.mark.parametrize(
    ("also", "targets", "tied"),
    [
        (("embedding",), EVERY[3:], False),
        (("head",), EVERY[2:3], False),
        (("embedding", "head"), EVERY, False),
        (("head",), EVERY[1:2], True),
    ],
)
def test_what_learns_whole_beside_adapters_is_predicted(
    also: tuple[str, ...], targets: tuple[str, ...], tied: bool
) -> None:
    variant = Variant("lora", {**adapters(targets).knobs, "train_also": also})
    counted, ledger = counted_flops(plan_of(variant, layers=2, tied_embeddings=tied))
    assert ledger.flops_per_token() == pytest.approx(counted, rel=1e-6)


@pytest.mark.parametrize("targets", [EVERY[:1], EVERY[3:]], ids=str)
def test_pieces_keep_what_enters_them_whatever_is_adapted(targets: tuple[str, ...]) -> None:
    trace = traced(plan_of(adapters(targets), PIECES, layers=3))
    assert trace.ledger.peak()[1] == pytest.approx(trace.peak, rel=0.02)
