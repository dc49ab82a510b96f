"""A step never reads a number from the device: the host would wait for every kernel before it."""

import traceback
from typing import Any

import house
import pytest
from house import Variant
from tiny_rows import make_micros, make_rows
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.train.train import step

WAITS = {"optimizer_offload"}
"""Techniques whose update is the host's arithmetic: it waits for the gradients by design, once."""


class Reads(TorchDispatchMode):
    """Note which line of ours made the host read a number out of a tensor."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_local_scalar_dense" in str(op):
            ours = [f for f in traceback.extract_stack() if "/headrace/" in f.filename]
            self.found.add(f"{ours[-1].filename}:{ours[-1].lineno}")
        return op(*args, **(kwargs or {}))


@pytest.mark.knobs_slow
def test_a_step_never_waits_for_the_device(device: str, variant: Variant) -> None:
    technique = variant.technique()
    if house.compiles(variant, device):
        return  # a graph that read a number would break there, which `fullgraph` forbids
    once = technique.name() == "optimizer_in_backward"  # it updates in the one backward pass
    plan = house.plan_of(
        variant,
        device=device,
        micro_rows=0 if once else 3,
        optimizer={"clip_norm": 0.0 if once else 1.0},
    )
    build = house.build_of(plan)
    micros = make_micros(
        make_rows(build.config.vocab - 7, ignored=True),
        micro_rows=build.plan.micro_rows,
        segments=build.mask.document,
    )
    with house.flags_of(build):
        step(build, micros, 0)
        with Reads() as reads:
            step(build, micros, 1)
    assert len(reads.found) == (technique.name() in WAITS)
