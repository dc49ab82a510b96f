"""Muon that updates a part of each matrix proves it, refuses what makes no sense, and is priced."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import UnsupportedError
from headrace.optim.muon import MuonOptimizer
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported
from headrace.train.train import step

PART = "techniques.muon.fraction=0.25"


def test_evidence_counts_the_rows_that_are_updated(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    """Each of two blocks has 16 rows of queries, keys, values and outputs, and 3 times 16 of the
    feed-forward: its hidden features are 32, so gate and up are tall."""
    build = make_tiny(PART)
    technique = build.plan.techniques["muon"]
    assert not technique.active(build).active
    for index in range(2):
        step(build, batch(build), index)
    evidence = technique.active(build)
    assert evidence.active
    rows = 2 * 2 * (4 + 3) * 16
    assert (evidence.numbers["rows"], evidence.numbers["rows_updated"]) == (rows, rows / 4)
    assert f"{rows // 4} of {rows} rows were updated" in evidence.detail


def test_evidence_fails_where_all_rows_are_updated(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    """An update that ignores the knob, and one whose selection takes everything, are found."""
    rules = [(PART, {"fraction": wrong}) for wrong in (1.0, 0.99, 0.5)]
    for knob, rule in (*rules, ("", {})):
        build = make_tiny(knob or "techniques.muon={}")
        technique, optimizer = build.plan.techniques["muon"], build.optimizers["muon"]
        assert isinstance(optimizer, MuonOptimizer)
        optimizer.rule = replace(optimizer.rule, **rule)
        step(build, batch(build), 0)
        assert technique.active(build).active is (not knob)
    optimizer.touched = torch.tensor(1)
    assert not technique.active(build).active


def test_a_fraction_that_takes_every_row_is_refused(make_tiny: Callable[..., Build]) -> None:
    with pytest.raises(UnsupportedError, match="takes all rows of every matrix") as caught:
        make_tiny("techniques.muon.fraction=0.95")
    assert "techniques.muon.fraction=1.0" in caught.value.remedy.text
    assert "muon" in make_tiny("techniques.muon.fraction=0.93").optimizers
    with pytest.raises(UnsupportedError, match=r"at most techniques.lora.rank = 8 of them"):
        make_tiny("techniques.muon.fraction=0.9", "techniques.lora.rank=8")


def test_momenta_that_nesterov_would_forget_are_refused(make_tiny: Callable[..., Build]) -> None:
    """A momentum of 0 leaves the gradient alone, and rows that wait would lose theirs."""
    for knobs in (("momentum=0",), ("momentum_start=0", "momentum_warmup_steps=2")):
        words = (PART, *(f"techniques.muon.{knob}" for knob in knobs))
        with pytest.raises(UnsupportedError, match="what fraction leaves out would be lost"):
            make_tiny(*words)
        assert "muon" in make_tiny(*words, "techniques.muon.nesterov=false").optimizers


@pytest.mark.parametrize(("fraction", "dim", "served"), [(0.25, 4096, True), (0.25, 2048, False)])
def test_half_of_a_product_needs_rows_that_are_taken(
    tiny_plan: Callable[..., Plan], fraction: float, dim: int, served: bool
) -> None:
    """A quarter of 2048 rows is below the 768 from which the kernel serves."""
    plan = tiny_plan(f"model.dim={dim}", f"techniques.muon.fraction={fraction}", "device=cuda")
    technique = plan.techniques["muon"].model_copy(update={"symmetric_matmuls": True})
    context = replace(
        make_context(plan, torch.device("cpu")), device="cuda", capability=(9, 0), has_triton=True
    )
    answer = technique.supports(context)
    assert isinstance(answer, Supported) is served
    assert served or "of which fraction = 0.25 takes 512" in answer.reason  # type: ignore[union-attr]


def test_no_state_is_added_and_fewer_flops_are_predicted(tiny_plan: Callable[..., Plan]) -> None:
    ledgers = {}
    for fraction in (1.0, 0.25):
        plan = tiny_plan(f"techniques.muon.fraction={fraction}")
        ledgers[fraction] = make_ledger(plan, make_context(plan, torch.device("cpu")))
    whole, part = ledgers[1.0], ledgers[0.25]
    assert part.memory["optimizer"] == whole.memory["optimizer"]

    def flops(ledger: Any) -> float:
        work = {n: w for n, w in ledger.work.items() if n.startswith("update/muon_")}
        return sum(w.flops * w.count for w in work.values() if w.kind == "product")

    assert 0 < flops(part) < 0.3 * flops(whole)
