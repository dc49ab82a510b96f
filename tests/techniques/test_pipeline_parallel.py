"""Pipelines of 2 and 4 ranks against one process, and what is said where there can be none."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import in_order

from headrace.assemble.build import make_ledger
from headrace.assemble.context import elsewhere, make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.costs.ledger import Ledger
from headrace.costs.stage_work import FIRST_LINES
from headrace.costs.work import Collective
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.memory.selective_checkpoint import SelectiveCheckpoint
from headrace.techniques.parallel.pipeline_parallel import (
    HEAD_LAYERS,
    PipelineParallel,
    keep_only,
    make_parts,
    split,
)

FUNCTIONS = Path(__file__).with_name("pipeline_parallel_ranks.py")
CPU = torch.device("cpu")


@pytest.fixture
def folders(corpus: Path, prepared_folder: Path) -> dict[str, str]:
    return {"corpus": str(corpus), "prepared": str(prepared_folder)}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 2)])
def test_stages_equal_one_process(
    zygote: Any, tmp_path: Path, folders: dict[str, str], ranks: int, chunks: int
) -> None:
    zygote.call(ranks, tmp_path, FUNCTIONS, "check", cases="CASES", chunks=chunks, **folders)


@pytest.mark.slow  # and quick ones are the compositions pp-interleaved-fsdp-gpt2 and replicas
@pytest.mark.parametrize("chunks", [1, 2])
def test_pipelines_beside_replicas_and_shards(
    zygote: Any, tmp_path: Path, folders: dict[str, str], chunks: int
) -> None:
    zygote.call(4, tmp_path, FUNCTIONS, "check", cases="REPLICAS", chunks=chunks, **folders)


# --- who holds what --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (6, 4, [1, 2, 2, 1]), (7, 4, [2, 2, 2, 1]), (3, 3, [1, 1, 1])],
)
def test_the_last_stage_has_the_head_and_no_more_layers(
    layers: int, stages: int, counts: list[int]
) -> None:
    assert split(layers, stages) == counts
    parts = make_parts([str(n) for n in range(layers)], stages)
    assert [n for p in parts for n in p.blocks or ()] == [str(n) for n in range(layers)]
    assert [p.first for p in parts] == [True] + [False] * (stages - 1)
    assert [p.last for p in parts] == [False] * (stages - 1) + [True]


@pytest.mark.parametrize(
    ("layers", "stages", "head", "counts"),
    [
        (16, 4, 3.4, [5, 5, 5, 1]),
        (16, 2, 3.4, [10, 6]),
        (16, 2, 1.0, [8, 8]),
        (16, 2, 2.6, [9, 7]),
        (4, 2, 90.0, [3, 1]),
        (4, 4, 2.0, [1, 1, 1, 1]),
    ],
)
def test_the_head_counts_as_layers(
    layers: int, stages: int, head: float, counts: list[int]
) -> None:
    assert split(layers, stages, head) == counts


def test_layers_of_each_stage_are_those_that_are_asked_for() -> None:
    parts = make_parts(tuple("0123"), 2, 90.0, (1, 3))
    assert [part.blocks for part in parts] == [("0",), ("1", "2", "3")]
    with pytest.raises(ConfigError, match=in_order("3 layers in 2 stages", "4 are")):
        make_parts(tuple("0123"), 2, 0.0, (1, 2))


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=in_order("3 layers", "4 stages")) as told:
        split(3, 4)
    assert "mesh.pipeline=3" in told.value.remedy.changes[0]


# --- where there can be none -----------------------------------------------------------------


def on_mesh(plan: Plan, pipe: PipelineParallel, ranks: int, **tables: Any) -> Plan:
    """Return the plan with a pipeline of `ranks`."""
    mesh = MeshConfig(pipeline=ranks)
    return plan.replaced(mesh=mesh, techniques={pipe.name(): pipe}, **tables)


INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
REFUSED = [
    ({}, 1, (), "several ranks", "mesh.pipeline=2"),
    ({"chunks": 2}, 2, (), "contradict", "techniques.pipeline_parallel.chunks=1"),
    ({"schedule": "interleaved"}, 2, (), "contradict", "techniques.pipeline_parallel.chunks=2"),
    (
        {"layers": (1, 2)},
        2,
        (),
        "3 layers in 2 stages, and the model's 4",
        "techniques.pipeline_parallel.layers=[2,2]",
    ),
    ({}, 5, (), "4 layers are too few for 5 ranks", "model.layers=5"),
    (INTERLEAVED, 4, (), "4 layers are too few for 4 ranks x 2 = 8", "model.layers=8"),
    (INTERLEAVED, 2, (), "8 rows in micro-batches of 8 has 1", "batch.micro_sequences=4"),
    (
        INTERLEAVED,
        2,
        ("batch.tokens=48",),
        "3 rows in micro-batches of 3 has 1",
        "schedule=1f1b techniques.pipeline_parallel.chunks=1",
    ),
]


@pytest.mark.parametrize(("knobs", "ranks", "overrides", "reason", "remedy"), REFUSED)
def test_refusals_say_what_would_work(
    tiny_plan: Callable[..., Plan],
    knobs: dict[str, Any],
    ranks: int,
    overrides: tuple[str, ...],
    reason: str,
    remedy: str,
) -> None:
    pipe = PipelineParallel.model_validate(knobs)
    plan = on_mesh(tiny_plan("model.layers=4", *overrides), pipe, ranks)
    answer = pipe.supports(make_context(plan, CPU))
    assert isinstance(answer, Unsupported)
    assert reason in answer.reason and remedy in answer.remedy.text


def test_what_the_remedies_say_works(tiny_plan: Callable[..., Plan]) -> None:
    pipe = PipelineParallel.model_validate(INTERLEAVED)
    plan = on_mesh(tiny_plan("model.layers=4", "batch.micro_sequences=4"), pipe, 2)
    assert pipe.supports(make_context(plan, CPU)) == Supported()


# --- prediction ------------------------------------------------------------------------------


def ledger_of(plan: Plan, ranks: int, micros: int) -> Ledger:
    """The baseline's, with what the technique asks of it."""
    ledger = make_ledger(plan, make_context(plan, CPU))
    return replace(ledger, sizes={**ledger.sizes, "pipeline_ranks": ranks, "micro_batches": micros})


def blocks_of(ledger: Ledger) -> int:
    """Blocks whose activations are held."""
    return len({line.layer for line in ledger.memory.values() if line.layer is not None})


def test_every_rank_and_the_bubble_are_predicted(tiny_plan: Callable[..., Plan]) -> None:
    plan, pipe = tiny_plan("model.layers=4"), PipelineParallel(balance="layers")
    baseline = ledger_of(plan, 2, 8)
    each = [pipe._on(baseline, rank, 2, 8) for rank in (0, 1)]
    assert [blocks_of(one) for one in each] == [4, 2]  # two micro-batches in flight, and one
    assert ["logits" in one.memory for one in each] == [False, True]
    for name in ("parameters", "gradients", "optimizer"):
        whole = sum(one.memory[name].bytes for one in each)
        assert whole == pytest.approx(baseline.memory[name].bytes)
    found = pipe.predict(baseline)
    assert found.memory == each[0].memory and found.peak()[1] < baseline.peak()[1]
    total = found.flops_per_token()
    assert found.flops["bubble"] / total == pytest.approx(1 / 9)
    more = PipelineParallel.model_validate({**INTERLEAVED, "balance": "layers"}).predict(baseline)
    assert more.flops["bubble"] / more.flops_per_token() == pytest.approx(1 / 17)
    # What acts later reads the rank's own layers.
    saved = SelectiveCheckpoint(save="attention").predict(found)
    assert blocks_of(saved) == blocks_of(found) and saved.peak()[1] < found.peak()[1]
    assert found.sizes["layers"] == 2
    assert pipe.predict(ledger_of(plan, 1, 8)) == ledger_of(plan, 1, 8)


def test_a_v_has_both_ends_on_its_first_rank(tiny_plan: Callable[..., Plan]) -> None:
    pipe = PipelineParallel.model_validate({"schedule": "zbv", "chunks": 2})
    baseline = ledger_of(tiny_plan("model.layers=4", "model.tied_embeddings=true"), 2, 8)
    each = [pipe._on(baseline, rank, 2, 8) for rank in (0, 1)]
    assert ["logits" in one.memory for one in each] == [True, False]
    for name in ("parameters", "gradients", "optimizer"):
        whole = sum(one.memory[name].bytes for one in each)
        assert whole == pytest.approx(baseline.memory[name].bytes)  # the tied table once
    assert not any("ends" in name for one in each for name in one.work)
    found = pipe.predict(baseline)
    assert found.flops["bubble"] / found.flops_per_token() == pytest.approx(1 / 49)
    assert [blocks_of(one) for one in each] == [4, 4]  # both ranks hold what 1F1B's first does


def test_few_micro_batches_hold_few_activations(tiny_plan: Callable[..., Plan]) -> None:
    baseline = ledger_of(tiny_plan("model.layers=8"), 4, 2)
    each = [PipelineParallel()._on(baseline, rank, 4, 2) for rank in range(4)]
    assert [blocks_of(one) for one in each] == [4, 4, 4, 2]
    interleaved = PipelineParallel.model_validate(INTERLEAVED)
    each = [interleaved._on(baseline, rank, 4, 8) for rank in range(4)]
    assert [blocks_of(one) for one in each] == [11, 9, 7, 5]  # pairs of one layer each


def test_a_tied_embedding_is_counted_at_both_ends(tiny_plan: Callable[..., Plan]) -> None:
    baseline = ledger_of(tiny_plan("model.layers=4", "model.tied_embeddings=true"), 2, 2)
    each = [PipelineParallel()._on(baseline, rank, 2, 2) for rank in (0, 1)]
    whole = sum(one.memory["parameters"].bytes for one in each)
    assert whole == pytest.approx(
        baseline.memory["parameters"].bytes + 4 * baseline.sizes["embedding"]
    )


@pytest.mark.parametrize("saves", ["full_checkpoint", "selective_checkpoint"])
def test_the_rank_that_needs_most_is_found_when_all_techniques_have_edited(
    tiny_plan: Callable[..., Plan], saves: str
) -> None:
    """With whole activations the first rank of four does; without, the last, which has logits."""
    given = [
        "mesh.pipeline=4",
        "techniques.pipeline_parallel={}",
        "model.layers=4",
        "batch.micro_sequences=1",
        "data.sequence_length=128",
        "batch.tokens=1024",
        "model.ffn=64",
    ]
    plans = [tiny_plan(*given, *more) for more in ([], [f"techniques.{saves}={{}}"])]
    plain, saved = (make_ledger(plan, make_context(plan, CPU)) for plan in plans)
    assert "logits" not in plain.memory and "embed.weight" in plain.matrices
    assert "logits" in saved.memory and "head.weight" in saved.matrices
    assert saved.peak()[1] < plain.peak()[1]


UNEVEN = {
    "learned": ["model.position=learned"],
    "tied": ["model.tied_embeddings=true", "model.position=learned"],
    "convolutions": ["techniques.short_convolution.between=2", "model.kv_heads=1"],
    "experts": ["techniques.mixture_of_experts.experts=4"],
    "reading": [
        *("model.embedding_residual=true", "model.value_embeddings=2"),
        *("model.bigram_multiple=2", "model.embedding_smear=true"),
    ],
    "adapters": ["techniques.short_convolution.between=2", "techniques.lora.rank=4"],
}


@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize("layers", [4, 5])
def test_a_rank_holds_the_weights_that_are_predicted(
    make_tiny: Callable[..., Build], uneven: str, layers: int
) -> None:
    """But for vectors, of which all layers are said to have as many."""
    for rank in (0, 1):
        build = make_tiny(*UNEVEN[uneven], f"model.layers={layers}")
        ledger = replace(
            predicted := make_ledger(build.plan, build.context),
            sizes={**predicted.sizes, "pipeline_ranks": 2.0, "pipeline_rank": float(rank)},
        )
        one = PipelineParallel().predict(ledger)
        head = one.sizes[HEAD_LAYERS]
        parts = make_parts(tuple(build.model.blocks), 2, head)[rank::2]
        keep_only(build.model, parts, tied=build.config.tied_embeddings)
        held = dict(build.model.named_parameters())
        learns = [p for p in held.values() if p.requires_grad]
        vectors = 4.0 * build.config.dim * layers
        for name, bytes in {
            "parameters": sum(p.nbytes for p in held.values()),
            "gradients": sum(p.nbytes for p in learns),
            "optimizer": 2 * sum(p.nbytes for p in learns),
        }.items():
            assert one.memory[name].bytes == pytest.approx(bytes, abs=vectors), name
        assert one.matrices.keys() == {n for n, p in held.items() if p.ndim >= 2}


@pytest.mark.parametrize("pipe", [{}, INTERLEAVED, {"schedule": "zbv", "chunks": 2}])
def test_what_blocks_read_of_the_embedding_is_kept_with_every_message(
    make_tiny: Callable[..., Build], pipe: dict[str, Any]
) -> None:
    build = make_tiny("model.layers=4", *UNEVEN["reading"], "model.embedding_norm=true")
    baseline, technique = ledger_of(build.plan, 2, 8), PipelineParallel.model_validate(pipe)
    sizes = baseline.sizes
    message = 4.0 * prod(build.model.border_shape(int(sizes["rows"]), int(sizes["length"])))
    values = baseline.memory["values"].bytes
    assert message == 2 * sizes["residual"] + values
    begun = {name: baseline.memory[name].bytes for name in FIRST_LINES}
    for rank in (0, 1):
        one = technique._on(baseline, rank, 2, 8)
        visits = one.memory["values"].bytes / values
        assert visits == blocks_of(one) / (4 / 2 / technique.chunks) >= 1
        first = -(-visits // technique.chunks) if rank == 0 else 0
        kept = one.memory["embedded"].bytes if "embedded" in one.memory else 0
        assert kept == (visits - first) * sizes["residual"]
        for name, bytes in begun.items():
            assert name in one.memory if first else name not in one.memory
            assert not first or one.memory[name].bytes == bytes * first
        sent = one.work["border/forward"], one.work["border/joined_forward"]
        assert isinstance(sent[0], Collective) and sent[0].bytes == message
        assert sent[0].count == sent[1].count
        layers = {n.split("/")[0] for n in baseline.memory if n.endswith("/value")}
        assert "value/forward" in one.work and len(layers) == 4


def test_a_rank_keeps_the_activations_of_its_own_blocks(tiny_plan: Callable[..., Plan]) -> None:
    baseline = ledger_of(tiny_plan("model.layers=4"), 2, 1)
    third = baseline.with_line("2/qkv", replace(baseline.memory["2/qkv"], bytes=7.0))
    first, second = (PipelineParallel()._on(third, rank, 2, 1).memory for rank in (0, 1))
    assert first["0/qkv"] == baseline.memory["0/qkv"]
    assert second["0/qkv"].bytes == 7.0 and second["1/qkv"].bytes == baseline.memory["3/qkv"].bytes


@pytest.mark.parametrize("beside", ["distillation={}", "memory_budget.fraction=0.5"])
def test_stages_without_a_loss_and_without_times_are_predicted(
    tiny_plan: Callable[..., Plan], beside: str
) -> None:
    given = [f"techniques.{beside}", "techniques.torch_compile={}", "mesh.pipeline=2"]
    plan = tiny_plan(*given, "techniques.pipeline_parallel={}", "model.layers=4")
    gpu = elsewhere(make_context(plan, CPU), "NVIDIA H200")
    ends = make_ledger(plan.replaced(model=plan.model.model_copy(update={"layers": 40})), gpu)
    assert ends.peak()[1] > make_ledger(plan, gpu).peak()[1] > 0
