"""Ranks of several hosts, by the rate that a plan gives the network between them."""

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.errors import UnsupportedError
from headrace.costs.links import GB, HOP_S, NETWORK_SHARE, collective_s

H200, MESSAGE, PORT = "NVIDIA H200", 8 * GB, 50 * GB
WORDS = ("plan", "7b", "mesh.data=64", "batch.tokens=524288", "--with", "fsdp", "--gpu", H200)
NETWORK = "hardware.network_gb_per_s=50"


def said(*words: str) -> dict[str, Any]:
    """Return what a command prints as JSON."""
    ended = CliRunner().invoke(app, [*words, "--json"])
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


def test_nothing_is_assumed_of_a_network_that_no_plan_names() -> None:
    with pytest.raises(UnsupportedError, match="nothing is assumed") as error:
        collective_s((), H200, "all_reduce", MESSAGE, 16)
    assert "hardware.network_gb_per_s" in error.value.remedy.text
    assert said(*WORDS)["step_s"] is None


@pytest.mark.parametrize(
    ("operation", "reach", "ranks", "rate"),
    [
        ("all_gather", 64, 64, 8 * PORT),
        ("all_gather", 57, 8, PORT),  # one GPU of each host
        ("all_reduce", 61, 16, 2 * PORT),  # each fourth
        ("send", 64, 0, PORT),
    ],
)
def test_a_ring_goes_through_the_ports_of_all_that_take_part(
    operation: Any, reach: int, ranks: int, rate: float
) -> None:
    found = collective_s((), H200, operation, MESSAGE, reach, ranks=ranks, network=PORT)
    inside = collective_s((), H200, operation, MESSAGE, 8)
    hops = 2 * HOP_S * math.log2(reach / 8)
    least = MESSAGE / (NETWORK_SHARE * rate)
    assert found == pytest.approx(max(inside, least) + hops, rel=1e-6)


def test_what_goes_to_each_leaves_through_its_own_port() -> None:
    """Eight of 16 ranks are in other hosts, so 8 of 15 parts leave."""
    found = collective_s((), H200, "all_to_all", MESSAGE, 16, ranks=16, network=PORT)
    assert found == pytest.approx(8 / 15 * MESSAGE / (NETWORK_SHARE * PORT) + 2 * HOP_S, rel=1e-6)


def test_inside_a_host_a_network_changes_nothing() -> None:
    assert collective_s((), H200, "send", MESSAGE, 8, network=1.0) == collective_s(
        (), H200, "send", MESSAGE, 8
    )


def test_a_plan_of_several_hosts_tells_what_the_network_costs() -> None:
    fast, slow = said(*WORDS, NETWORK), said(*WORDS, "hardware.network_gb_per_s=5")
    between = "exposed communication between hosts"
    assert slow["parts_s"][between] > fast["parts_s"][between] > 0
    assert slow["step_s"] > fast["step_s"]
    assert sum(fast["parts_s"].values()) == pytest.approx(fast["step_s"])
    page = CliRunner().invoke(app, [*WORDS, NETWORK]).output
    assert "50 GB/s a GPU are the plan's" in page


def test_a_pipeline_tells_the_memory_of_each_stage() -> None:
    words = ("mesh.data=16", "mesh.pipeline=4", "--with", "pipeline_parallel", "--without", "fsdp")
    plan = said("plan", "7b", *words, "batch.tokens=524288", "--gpu", H200, NETWORK)
    assert len(plan["stages_bytes"]) == 4 and len(set(plan["stages_bytes"])) > 1


THOUSAND = ("plan", "7b", "mesh.data=1024", "batch.tokens=8388608", "--with", "fsdp", "--sweep")


def test_time_ends_a_sweep_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.predict.SWEEP_S", 0.0)
    swept = said(*THOUSAND, "--gpu", H200, NETWORK)
    assert swept["stopped"] and swept["asked"] == 0 and swept["ranks"] == 1


def test_layouts_of_a_thousand_gpus_are_ranked_or_named_with_why() -> None:
    swept = said(*THOUSAND, "--gpu", H200, NETWORK)
    assert swept["ranks"] > 1
    refused = swept["layouts_refused"]
    assert refused and all(one["reason"] and one["changes"] for one in refused)
    assert not any("Error" in one["reason"] for one in refused)
