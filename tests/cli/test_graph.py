"""Check what `explain PLAN --graph` tells: graphs, breaks and recompiles, each with its cause."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import utils

from headrace.assemble import build as building
from headrace.assemble.sockets import Build
from headrace.plan.technique import Stage
from headrace.techniques.compile import torch_compile

COMPILED = ("--with", "torch_compile", "techniques.torch_compile.backend=eager")


class Breaking(torch.nn.Identity):
    """A module that no graph can hold."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` after a graph break."""
        torch._dynamo.graph_break()  # the planted line
        return input


class Counting(torch.nn.Identity):
    """A module that makes the compiler run again, because its number of calls changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, input: Tensor) -> Tensor:
        """`input`; a compiler guards on how often it was called."""
        self.calls += 1
        return input + 0.0 * self.calls


def plant(patch: pytest.MonkeyPatch, module: type[torch.nn.Module]) -> None:
    """Have every norm followed by `module`."""

    def parts(build: Build) -> None:
        build.parts = building.baseline_parts(build.config)
        norm = build.parts.norm
        build.parts.norm = lambda config: torch.nn.Sequential(norm(config), module())

    patch.setitem(building.BEGIN, Stage.PARTS, parts)  # type: ignore[arg-type]


def test_a_clean_plan_has_graphs_and_no_break(
    call: Callable[..., Any], tiny_demo: list[str], workshop: Path
) -> None:
    runs = set((workshop / "runs").iterdir())
    told = call("explain", *tiny_demo, *COMPILED, "--graph")
    first = [g for g in told["graphs"] if g["when"] == "step 1"]
    assert {g["function"] for g in first} == {"states", "loss"}
    assert all(g["file"].endswith("headrace/model/decoder.py") and g["line"] > 1 for g in first)
    assert all(g["operations"] > 0 and g["seconds"] > 0 for g in first)
    assert told["breaks"] == told["uncompiled"] == []
    assert 0 < max(g["seconds"] for g in told["graphs"]) < told["seconds"]
    assert set((workshop / "runs").iterdir()) == runs, "it makes no run"
    assert {r["when"] for r in told["recompiles"]} == {"evaluation"}, "without gradients"
    causes = [(r["cause"], r["fix"]) for r in told["recompiles"]]
    assert all("grad_mode" in cause and fix.startswith("none:") for cause, fix in causes)
    records, usual = utils._compilation_metrics, utils.DEFAULT_COMPILATION_METRICS_LIMIT
    assert records.maxlen == usual, "torch keeps as many records as before"


def test_a_planted_break_is_named(
    call: Callable[..., Any], tiny_demo: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that each break has its file, line, cause and torch's hint."""
    plant(monkeypatch, Breaking)
    knob = "techniques.torch_compile.fullgraph=false"
    told = call("explain", *tiny_demo, *COMPILED, knob, "--graph")
    (found,) = told["breaks"]
    lines = Path(__file__).read_text().splitlines()
    assert found["file"] == __file__
    assert "# the planted line" in lines[found["line"] - 1]
    assert "graph_break" in found["cause"] and "Remove the" in found["fix"]
    assert found["count"] > 1 and found["seconds"] > 0
    assert told["fullgraph"] is False


def test_a_planted_recompile_is_told_to_a_person(
    say: Callable[..., tuple[str, str]],
    tiny_demo: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, Counting)
    with torch._dynamo.config.patch(recompile_limit=2):
        out, _ = say("explain", *tiny_demo, *COMPILED, "--graph")
    _, found, again = out.partition("recompiles:")
    assert found and "step 2" in again and ".calls" in again and "tensor" in again


def test_later_lengths_are_tried_and_buckets_spare_them(
    call: Callable[..., Any], tiny_demo: list[str]
) -> None:
    """Check that lengths 8 and 16 compile again at steps 7 and 13, and buckets of 8 spare one."""
    lengths = ("--with", "sequence_length_schedule", "techniques.sequence_length_schedule.start=4")
    asked = ("explain", *tiny_demo, *COMPILED, *lengths, "--graph")
    told = call(*asked)
    assert told["steps"] == [1, 2, 7, 13]
    sizes = [r for r in told["recompiles"] if "size mismatch" in r["cause"]]
    assert {r["when"] for r in sizes} == {"step 7", "step 13"}
    assert all("shape_buckets" in r["fix"] for r in sizes)
    fewer = call(*asked, "--with", "shape_buckets", "techniques.shape_buckets.multiple=8")
    assert "step 7" not in {r["when"] for r in fewer["recompiles"]}


def test_what_torch_gives_up_is_told(
    call: Callable[..., Any], tiny_demo: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_compile, "_shapes", lambda plan: 1)  # it would allow for them
    lengths = ("--with", "sequence_length_schedule", "techniques.sequence_length_schedule.start=4")
    with torch._dynamo.config.patch(recompile_limit=1):
        told = call("explain", *tiny_demo, *COMPILED, *lengths, "--graph")
    assert {u["function"] for u in told["uncompiled"]} == {"states", "loss"}
    assert {u["when"] for u in told["uncompiled"]} >= {"step 7"}
    assert all("limit" in u["cause"] and u["line"] > 1 for u in told["uncompiled"])
    first = told["uncompiled"][0]
    assert "size mismatch" in first["cause"] and "shape_buckets" in first["fix"]
    assert {g["when"] for g in told["graphs"]} == {"step 1"}


def test_a_break_of_a_full_graph_is_said_to_a_person(
    say: Callable[..., tuple[str, str]], tiny_demo: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Breaking)
    out, _ = say("explain", *tiny_demo, *COMPILED, "--graph")
    assert "1 graph break," in out and f"{__file__}:" in out
    assert "techniques.torch_compile.fullgraph=false" in out


def test_without_compilation_it_says_what_to_type(
    call: Callable[..., Any], tiny_demo: list[str]
) -> None:
    told = call("explain", *tiny_demo, "--graph", code=2)
    assert "is compiled" in told["error"] and told["remedy"] == "--with torch_compile"


def test_it_looks_at_plans_of_one_process(call: Callable[..., Any], tiny_demo: list[str]) -> None:
    assert "technique" in call("explain", "torch_compile", "--graph", code=2)["error"]
    told = call("explain", *tiny_demo, *COMPILED, "mesh.data=2", "--graph", code=3)
    assert told["remedy"] == "mesh.data=1"
