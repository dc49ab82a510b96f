"""The program that measures several GPUs pairs its readings and keeps a row of every loser."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import receipts
import scaling
import scaling_ranks
import scaling_sides
import torch
from programs import rows

from headrace.assemble.context import elsewhere, make_context
from headrace.core.errors import RefusalKind
from headrace.costs.machine import Machine
from headrace.predict.prediction import predict
from headrace.tuner.readings import Reading

SIDES = {side.name: side for side in scaling_sides.SIDES}


class StandIn:
    """A team without processes: steps of one GPU take 1 s, and every later round is slower."""

    asked = 0

    def __init__(self, ranks: int, logs: Path) -> None:
        self.ranks = ranks

    def ask(self, what: Any, *given: Any, limit_s: float, **how: Any) -> Any:
        """Return links, or a reading; muon has no memory for a step."""
        if what is scaling_ranks.read_links:
            return ()
        (plan,) = given
        if "muon" in plan.techniques:
            return Reading(refused="out of memory", refusal=RefusalKind.MEMORY)
        type(self).asked += 1
        step_s = (1.0 if self.ranks == 1 else 1.25) * self.asked
        return Reading([step_s] * 2, losses=[2.0], evidence={"fsdp": "slices"}, steps=3)

    def close(self) -> None:
        """Do nothing: the stand-in holds no process."""


def measure(patch: pytest.MonkeyPatch, folder: Path, *words: Any) -> list[dict[str, Any]]:
    """Run the program as a dry run, and return its rows."""
    patch.setattr(
        sys, "argv", ["scaling", "measure", "--tiny", "--results", str(folder), *map(str, words)]
    )
    scaling.main()
    return rows(folder, "scaling")


def test_ratios_are_between_readings_of_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "Team", StandIn)
    sides = ["one", "fsdp", "muon_fsdp", "titan_fsdp", "long_512k"]
    found = measure(monkeypatch, tmp_path, "--ranks", 2, "--rounds", 2, "--sides", *sides)
    kinds = [(row["side"], row["kind"], row["n"]) for row in found]
    assert kinds == [
        ("titan_fsdp", "side", 0),
        ("one", "reading", 1),
        ("fsdp", "reading", 1),
        ("muon_fsdp", "side", 0),
        ("long_512k", "reading", 1),
        ("one", "reading", 1),
        ("fsdp", "reading", 1),
        ("one", "side", 2),
        ("fsdp", "side", 2),
        ("long_512k", "side", 1),
    ]
    assert "not installed" in found[0]["refused"] and found[3]["refused"] == "out of memory"
    fsdp = found[8]
    assert fsdp["mesh"] == {"data": 2} and fsdp["techniques"] == {"fsdp": {}}
    assert fsdp["tokens"] == 2 * found[7]["tokens"] and fsdp["evidence"]
    # round 0: 1 x 1 against 1.25 x 2; round 1: 1 x 4 against 1.25 x 5
    assert fsdp["metrics"]["ratio_to_one"]["low"] == pytest.approx(1 / 2.5)
    assert fsdp["metrics"]["ratio_to_one"]["high"] == pytest.approx(4 / 6.25)


def test_every_gpu_has_the_tokens_of_one() -> None:
    args = scaling.parsed(["predict", "--ranks", "4", "--device-name", "NVIDIA H100 80GB HBM3"])
    machine = scaling.machine_of(args)
    for name in ("fsdp", "context_8k", "tensor", "8b"):
        entry = scaling.entry_of(SIDES[name], args, machine)
        assert entry.plan is not None and not entry.refused
        each = 8192 if name == "8b" else 32768
        assert (entry.tokens, entry.ranks, entry.plan.mesh.ranks) == (4 * each, 4, 4)
        assert entry.facts["predicted"]["links"] == "assumed"
        assert entry.facts["predicted"]["step_s"] > 0
    assert set(scaling_sides.FEW) | set(scaling_sides.MANY) <= set(SIDES)
    assert all(set(side.against) <= set(SIDES) for side in scaling_sides.SIDES)


def test_a_peer_has_the_layout_of_the_side_that_faces_it() -> None:
    args = scaling.parsed(["predict", "--ranks", "2", "--device-name", "NVIDIA H100 80GB HBM3"])
    machine = scaling.machine_of(args)
    for peer, name in {
        "titan_fsdp": "fsdp",
        "titan_fsdp_float8": "fsdp_float8_gathered",
        "titan_tensor": "tensor",
        "titan_tensor_async": "tensor_async",
    }.items():
        theirs, ours = (scaling.entry_of(SIDES[n], args, machine).plan for n in (peer, name))
        assert theirs is not None and ours is not None and SIDES[peer].peer == "torchtitan"
        assert (theirs.mesh, theirs.batch) == (ours.mesh, ours.batch)
        assert theirs.techniques == ours.techniques


def _fail_on(rank: int) -> Reading:
    """Fail on one rank, while the others wait for ever."""
    while os.environ["RANK"] != str(rank):
        time.sleep(1)
    raise MemoryError("no room on this rank")


@pytest.mark.slow
def test_ranks_that_talk_through_gloo_take_a_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--ranks", 2, "--rounds", 1, "--warm", 1, "--timed", 1, "--blocks", 1]
    found = measure(monkeypatch, tmp_path, *words, "--sides", "one", "fsdp")
    assert [row["kind"] for row in found] == ["reading"] * 2 + ["side"] * 2
    assert all(row["links_gb_per_s"]["all_reduce"] > 0 for row in found)
    assert "2" in found[1]["evidence"]["fsdp"]
    team = scaling_ranks.Team(2, tmp_path)
    reading = team.ask(_fail_on, 1, limit_s=120)
    assert "no room on this rank" in reading.refused
    assert not any(process.is_alive() for process in team.processes)


KEPT_FROM = "5fe32060"
"""The commit from which gathered weights are kept where they are little."""


@pytest.mark.parametrize(
    "name", ["fsdp", "fsdp_float8", "muon_fsdp", "fsdp_8k", "context_8k", "zero1"]
)
def test_peaks_of_two_h200s_are_foreseen(name: str) -> None:
    """Predict what was measured: weights that are gathered in bf16 have no other copy in bf16."""
    (row,) = (
        row
        for row in rows(receipts.ROOT / "results", "scaling")
        if row.get("kind") == "reading"
        and (row["side"], row["ranks"], row["commit"])
        == (name, 2, "ec793cf9" if name == "zero1" else KEPT_FROM)
    )
    (side,) = (side for side in scaling_sides.SIDES if side.name == name)
    plan = side.plan(2, [], tiny=False)
    context = elsewhere(make_context(plan, torch.device("cpu")), row["hardware"])
    found = predict(plan, context, Machine.assumed(row["hardware"]))
    assert found.memory.peak_bytes == pytest.approx(max(row["peak_bytes_by_rank"]), rel=0.002)
