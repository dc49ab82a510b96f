"""What linear attention moves, beside the sizes that it goes by."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.assemble.build import make_ledger
from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import UnsupportedError
from headrace.costs.ledger import DERIVED, Ledger
from headrace.costs.machine import Machine
from headrace.costs.step import step_time
from headrace.costs.work import Work
from headrace.plan.plan import Plan

ROOT = Path(__file__).parents[2]
H200 = Machine.assumed("NVIDIA H200")
LAYERS, LENGTH = 12, 2048


def ledger_of(*words: str, **how: Any) -> Ledger:
    """Return the ledger of the plan 160m with linear attention on an H200."""
    text = (ROOT / "benchmarks" / "plans" / "160m.toml").read_text()
    how = {"with_": ["linear_attention"], "without": ["cudnn_attention"]} | how
    knobs = [f"techniques.linear_attention.{w}" if "." not in w else w for w in words]
    plan = Plan.read(text, catalogue(), overrides=knobs, **how)
    return make_ledger(plan, elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200"))


def mixing(ledger: Ledger) -> dict[str, Work]:
    """Return the ledger's pieces of attention by their names after the slash."""
    return {n.partition("/")[2]: p for n, p in ledger.work.items() if n.startswith("attention/")}


@pytest.mark.parametrize("rule", ["sum", "gated_delta"])
def test_chunks_stand_in_the_place_of_scores(rule: str) -> None:
    ledger = ledger_of(f"rule={rule}")
    assert not any(piece.kind == "attention" for piece in ledger.work.values())
    assert ledger.sizes[DERIVED] and not any(n.startswith("queries/") for n in ledger.work)
    pieces = mixing(ledger)
    assert {piece.count for piece in pieces.values()} == {LAYERS}
    gates = pieces["gates_result"].sizes
    assert gates == (ledger.sizes["tokens"], 12 * (1 + (rule == "gated_delta")), 768)
    chunks = LENGTH // 64
    steps = [n for n in pieces if n.startswith("steps")]
    assert bool(steps) == (rule == "gated_delta")
    assert [pieces[n].kernels for n in steps] == [2 * chunks, 3 * chunks][: len(steps)]


def test_work_is_that_of_tokens_and_not_of_pairs() -> None:
    short, long = ledger_of(), ledger_of("data.sequence_length=4096")
    assert mixing(long) == mixing(short)
    wide = ledger_of("chunk_tokens=128")
    for phase in ("forward", "backward"):
        more = mixing(wide)[f"chunks_{phase}"].bytes / mixing(short)[f"chunks_{phase}"].bytes
        assert 1 < more < 2


def test_a_compiler_leaves_less_of_a_sum_than_of_what_it_cannot_fuse() -> None:
    def seconds(*words: str, **how: Any) -> float:
        names = ("chunks_forward", "chunks_backward")
        pieces = mixing(ledger_of(*words, **how))
        return sum(pieces[name].seconds(H200) for name in names)

    eager = {"without": ["torch_compile", "cudnn_attention"]}
    left = {r: seconds(f"rule={r}") / seconds(f"rule={r}", **eager) for r in ("sum", "gated_delta")}
    assert 0.2 < left["sum"] < 0.7 * left["gated_delta"] < 0.4


def test_a_sum_by_kernels_that_nobody_timed_has_no_time() -> None:
    words = ("kernels=fla", "techniques.torch_compile.fullgraph=false")
    known = ledger_of(*words, "rule=gated_delta")
    assert step_time(known.work, H200, 1).step_s > 0
    with pytest.raises(UnsupportedError, match="was never timed"):
        step_time(ledger_of(*words).work, H200, 1)
