"""Every kind of finding is rendered from its facts, and nothing else renders one."""

from typing import Any

import pytest

from headrace.doctor.findings import ABSTAINED, BOTTLENECK_OF, KIND_OF, PHASES, Finding, Kind
from headrace.doctor.words import DESCRIBE, describe
from headrace.plan.symptoms import BOTTLENECKS

NAMED = (Kind.PHASE, Kind.PLAN_STEP)
"""Kinds whose facts name the bottleneck."""
SHARES = (
    "blocking",
    "collective",
    "copied",
    "exposed",
    "flops",
    "last",
    "limited",
    "noise",
    "owner",
    "padded",
    "padding",
    "peak",
    "reached",
    "short",
    "brief",
    "slow",
    "spent",
    "sync",
    "waited",
    "work",
    "between",
    "profiler",
    "best",
    "busy",
    "computes",
    "moves",
    "slack",
    "dry",
    "idle",
    "over",
)
SECONDS = (
    "bf16",
    "best",
    "delay",
    "forward",
    "backward",
    "fp32",
    "host",
    "launches",
    "median",
    "more",
    "other",
    "predicted",
    "spent",
    "step",
    "total",
    "watched",
    "work",
)
SIZES = ("capacity", "fp32", "measured", "more", "peak", "predicted", "reserved")
NATS = ("first", "last", "guess", "highest", "lowest", "before", "after")
FACTS: dict[str, Any] = {
    **{f"{name}_share": 0.25 for name in SHARES},
    **{f"{name}_s": 2.5 for name in SECONDS},
    **{f"{name}_bytes": 2**31 for name in SIZES},
    **{f"{name}_nats": 5.5 for name in NATS},
    "steps": 12,
    "step": 5,
    "epochs": 4.0,
    "best_epochs": 1.5,
    "fewest": 8,
    "lost": 5,
    "back": 4,
    "in_a_row": 3,
    "loss_jumps": 2,
    "norm_jumps": 7,
    "sigmas": 6.0,
    "graph_breaks": 3,
    "operations": 900,
    "times_as_wide": 2.0,
    "retries": 3,
    "tokens": 4096,
    "its_tokens": 2048,
    "bits_per_byte": 2.5,
    "repeats": 2,
    "samples": 50,
    "clock_hz": 1.2e9,
    "highest_clock_hz": 1.98e9,
    "temperature_c": 91,
    "times": 3.0,
    "rows": 4,
    "micro_batches": 8,
    "events": 7,
    "marks": 2,
    "launches": 102.0,
    "ranks": 2,
    "victim": 0,
    "rank": 1,
    "place": 0,
    "layout": "tensor=2",
    "own_layout": "data=2",
    "own_s": (2.0, 1.0),
    "layers": (3, 1),
    "collectives": 9,
    "missing_ranks": 1,
    "world": 4,
    "names": ("a_technique",),
    "syncs": ("aten::item",),
    "left_out": (5,),
    "without_steps": (),
    "families": {"products": 0.75, "attention": 0.25},
    "shares": {"matmuls": 0.5},
    "slower_in": ("kernels", 0.25),
    "missing": ("kernels", "checkpoints"),
    "message": "the memory is full",
    "sentence": "diverged",
    "why": "no rates",
    "owner": "logits",
    "method": "allocator",
    "device": "cuda",
    "rates": "rates of a device",
    "run": "better",
    "differences": "+muon",
    "path": "trace.json",
    "parts": ("blocks.0.mlp.down",),
    "others": ("blocks.0.mlp.up",),
    "technique": "lora",
    "trains": "lora",
    "lr": 0.01,
    "usual_lr": 2e-4,
    "source": "books",
    "run_sha256": "1" * 64,
    "own_sha256": "2" * 64,
    "fits": "no",
    "part": "matmuls",
    "same_rank": True,
    "waits_apart": False,
    "enough_steps": False,
    "profiler_known": False,
    "frames": True,
    "no_loader": True,
    "host_away": True,
    "one_rank_alone": True,
}
"""One fact of every name that any kind has."""


def sample(kind: Kind) -> Finding:
    """Return a finding of a kind with a fact of every name."""
    facts = dict(FACTS)
    if kind in NAMED:
        facts["bottleneck"] = "input"
    if kind is Kind.TRACE_COMPUTATION:
        facts["families"] = tuple(FACTS["families"].items())
    return Finding(kind, 0.5, facts)


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_is_a_sentence_with_evidence(kind: Kind) -> None:
    words = describe(sample(kind))
    parts = words.sentence, words.evidence, words.not_measured
    assert not any(sign in part for part in parts for sign in ("{", "  ", ";;"))
    if kind is not Kind.HOST_SPLIT:  # which stands in the evidence of a phase alone
        assert words.sentence.endswith(".") and words.evidence


def test_no_two_kinds_say_the_same() -> None:
    sentences = [describe(sample(kind)).sentence for kind in Kind]
    alike = {s for s in sentences if sentences.count(s) > 1}
    assert alike == {describe(sample(Kind.NEEDLESS_SAVINGS)).sentence}, "of a run, and of a plan"


def test_each_kind_names_a_bottleneck() -> None:
    assert {*DESCRIBE} == {*Kind} == {*BOTTLENECK_OF, *NAMED}
    assert {*BOTTLENECKS} <= {*KIND_OF} <= {*BOTTLENECKS, ABSTAINED, "memory"}
    assert all(
        Finding(Kind.PHASE, facts={"bottleneck": name}).bottleneck == name for name in PHASES
    )


def test_evidence_of_what_stands_beside_comes_last() -> None:
    beside = Finding(Kind.INPUT_WAIT, 0.2, {"spent_s": 2.0, "step_s": 10.0})
    facts = {"bottleneck": "input", "spent_s": 1.0, "total_s": 4.0, "graph_breaks": 3}
    parts = describe(Finding(Kind.PHASE, 0.25, facts, beside=(beside,))).evidence.split("; ")
    assert parts[1:] == ["3 graph breaks", describe(beside).evidence]
