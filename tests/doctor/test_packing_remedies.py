"""Remedies for wasted tokens are forecast by the lengths of the run's own documents."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.statistics import Interval
from headrace.costs.machine import Machine
from headrace.data.packing.ledger import PackingLedger, Policy, PolicyCount
from headrace.data.shards import ShardWriter
from headrace.doctor.findings import Finding, Kind
from headrace.doctor.forecast import Forecast, MeasuredRun
from headrace.doctor.packing import by_packing, packing_of, with_packing
from headrace.doctor.remedies import PlanRemedy, remedies
from headrace.doctor.words import describe
from headrace.plan.changes import parse
from headrace.plan.plan import Plan
from headrace.train.run_folder import RunFolder

SHAPE = Path(__file__).parents[2] / "benchmarks" / "plans" / "160m.toml"


def plan_of(words: str) -> Plan:
    return parse(words.split()).plan(SHAPE.read_text(), catalogue())


def asked(words: str, packing: PackingLedger) -> dict[str, PlanRemedy]:
    """Return the remedies of wasted tokens on an H200, by their words."""
    plan: Any = plan_of(words)
    there = elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200")
    found = remedies(
        Finding(Kind.WASTED_TOKENS, 0.3),
        plan,
        there,
        Machine.assumed("NVIDIA H200"),
        catalogue(),
        MeasuredRun(packing=packing),
    )
    return {" ".join(remedy.change): remedy for remedy in found}


def test_the_packing_ledger_forecasts_wasted_tokens() -> None:
    """A change of how rows are made gains what its padding is less than theirs, and no share."""
    counts = {
        Policy.CUT: PolicyCount(rows=100),
        Policy.DOCUMENT_PACKING: PolicyCount(rows=100),
        Policy.BEST_FIT_PACKING: PolicyCount(rows=200, padding_tokens=100_000),
        Policy.PAD: PolicyCount(rows=400),
    }
    packing = PackingLedger(1024, 1000, 100_000, 0, 900, (), counts)
    names = ([], ["best_fit_packing"])
    gain = by_packing(packing, *names, Forecast(None, "none", "unpriced")).gain
    assert gain is not None
    assert gain.value == pytest.approx(packing.useful_share(Policy.BEST_FIT_PACKING) - 1)
    back = by_packing(packing, *names[::-1], Forecast(Interval(-0.1, 0.0, 0.1, 7), "ledger"))
    assert back.source == "ledger" and back.gain is not None and back.gain.n == 7
    useful = packing.useful_share(Policy.BEST_FIT_PACKING)
    assert back.gain.value == pytest.approx(1 / useful - 1)
    assert back.gain.low == pytest.approx(0.9 / useful - 1)
    swapped = asked("-cudnn_attention +best_fit_packing", packing)
    assert list(swapped) == ["-best_fit_packing"], "no other change lessens the padding"
    (remedy,) = swapped.values()
    assert remedy.gain is not None and remedy.gain.value > 0.9 * (1 / useful - 1)


def test_wasted_tokens_are_told_beside_what_the_runs_text_would_pad(tmp_path: Path) -> None:
    """The run's shards are counted where they are there; without them the share alone speaks."""
    writer = ShardWriter(tmp_path / "shards" / "train-00", 300, document_token=0)
    for _ in range(30):
        writer.add(np.arange(1, 41))
    writer.close()
    plan = plan_of("data.sequence_length=64 +best_fit_packing")
    run = RunFolder(tmp_path)
    place = str(tmp_path / "shards")
    record = {"directory": place, "absolute": place, "fingerprint": {"data": "0"}}
    (tmp_path / "data.json").write_text(json.dumps(record))
    finding = Finding(Kind.WASTED_TOKENS, 0.3)
    counted = packing_of(run, plan, [finding], 0.02)
    assert counted is not None and counted.tokens == 30 * 41
    evidence = describe(with_packing(finding, counted, plan)).evidence
    assert "rows of best_fit_packing are 35.94% padding, those of document_packing 0" in evidence
    assert packing_of(run, plan, [Finding(Kind.WASTED_TOKENS, 0.01)], 0.02) is None
    (tmp_path / "shards" / "train-00" / "offsets.bin").unlink()
    assert packing_of(run, plan, [finding], 0.02) is None
    assert with_packing(finding, None, plan) == finding
