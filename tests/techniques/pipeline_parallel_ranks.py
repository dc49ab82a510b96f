"""What each rank of the pipeline technique's tests does: the run's own step, against one process.

Every rank computes the reference too, so each compares its own gradients.
"""

import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

import house
import pytest
from house import CATALOGUE, Result, assert_equal, make_plan, make_rows

from headrace.assemble.build import make_build
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.data.ingest import prepare
from headrace.parallel.layout import local_of
from headrace.parallel.world import join
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.train.evaluate import evaluate
from headrace.train.train import step

CPU = torch.device("cpu")
LAYERS = 5
Knobs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """A plan, and what stands beside the pipeline in it."""

    shape: str = "grouped"
    micro_rows: int = 1
    ignored: bool = False
    precision: str = "fp32"
    beside: Knobs = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, mesh: Mapping[str, int], pipeline: Knobs, beside: Knobs) -> Plan:
        """Return the plan on a mesh."""
        names = {**pipeline, **beside}
        techniques = [CATALOGUE.find(n).model_validate(dict(k)) for n, k in names.items()]
        plan = make_plan(
            shape=self.shape,
            precision=self.precision,
            micro_rows=self.micro_rows,
            **{"model": {"layers": LAYERS}, **self.more},
        )
        # A mesh and what splits along it come together.
        return plan.replaced(mesh=MeshConfig(**mesh), techniques={t.name(): t for t in techniques})


def moved(build: Build) -> Build:
    """Move every parameter off its starting value, as the reference's."""
    with torch.no_grad():
        for name, parameter in build.model.named_parameters():
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = 0.1 * torch.randn(tuple(build.layouts[name].shape), generator=draw)
            local_of(parameter).add_(build.part(name, noise))
    return build


def piped(case: Case, chunks: int, data: int = 1) -> Build:
    """Return this rank's build."""
    mesh = {"pipeline": dist.get_world_size() // data, "data": data}
    knobs = {"schedule": "1f1b" if chunks == 1 else "interleaved", "chunks": chunks}
    plan = case.plan(mesh, {"pipeline_parallel": knobs}, case.beside)
    return moved(make_build(plan, prepare(plan), join(plan.mesh, CPU), CPU))


def alone(case: Case) -> Build:
    """The baseline in this process, without what stands beside."""
    return house.random_build(case.plan({}, {}, {}))


def mine_of(whole: Result, build: Build) -> Result:
    """The reference's part that this rank holds."""
    names = [name for name, _ in build.model.named_parameters()]
    return Result(whole.loss, {name: whole.gradients[name] for name in names})


def one_step(case: Case, chunks: int) -> None:
    """Compare loss and every gradient; check that the ranks together hold every parameter."""
    build, baseline = piped(case, chunks), alone(case)
    rows = make_rows(build.config.vocab, ignored=case.ignored)
    packed = "document_packing" in case.beside
    wanted = house.reference(baseline, rows, documents=packed)
    found = house.take_step(build, rows)
    assert_equal(found, mine_of(wanted, build))
    held = build.world.gather(sorted(found.gradients))
    assert {n for names in held for n in names} == set(wanted.gradients)
    ends = {"embed.weight"} if build.config.tied_embeddings else set()
    for name in wanted.gradients:
        assert sum(name in names for names in held) == 1 + (name in ends)
    blocks = build.world.gather(len(build.model.blocks))
    assert sum(blocks) == LAYERS
    (pipe,) = (t for t in build.techniques if t.name() == "pipeline_parallel")
    evidence = pipe.active(build)  # before another technique's proof runs the model
    assert check_active(build)["pipeline_parallel"].active
    micros = len(rows) // case.micro_rows
    assert evidence.numbers["actions"] == 2 * micros * chunks
    borders = 2 * chunks - (build.world.place("pipeline") in (0, build.world.ranks - 1))
    assert evidence.numbers["messages"] == borders * micros
    assert evidence.numbers["bytes"] == borders * len(rows) * house.LENGTH * build.config.dim * 4


def train_on(build: Build, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and norms of some steps with the optimizer and clipping, then the weights."""
    told = []
    for index in range(steps):
        rows = make_rows(build.config.vocab, ignored=False, seed=index)
        micros = house.make_micros(
            rows, micro_rows=build.plan.batch.micro_sequences, segments=build.mask.document
        )
        told += step(build, micros, index)[:2].tolist()
    return told, {n: p.detach().clone() for n, p in build.model.named_parameters()}


def several_steps(case: Case, chunks: int) -> None:
    """Clipping counts each number once, and both copies of a tied embedding stay the same."""
    build, baseline = piped(case, chunks), alone(case)
    found, weights = train_on(build, 3)
    wanted, reference = train_on(baseline, 3)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=0)
    assert min(wanted[1::2]) > baseline.plan.optimizer.clip_norm > 0, "nothing was clipped"
    for name, weight in weights.items():
        torch.testing.assert_close(weight, reference[name], rtol=0, atol=2e-5)
    if build.config.tied_embeddings:
        copies = build.world.gather(weights.get("embed.weight", torch.empty(0)).tolist())
        assert copies[0] == copies[-1] != []


def evaluates(case: Case, chunks: int) -> None:
    """Validation through the pipeline is the baseline's."""
    build, baseline = piped(case, chunks), alone(case)
    found, wanted = evaluate(build), evaluate(baseline)
    assert found.loss_nats == pytest.approx(wanted.loss_nats, rel=1e-6)
    assert (found.tokens, found.bytes) == (wanted.tokens, wanted.bytes)
    assert all(p.grad is None for p in build.model.parameters())


def with_replicas(case: Case, chunks: int) -> None:
    """Run two pipelines, each with half of the rows."""
    build, baseline = piped(case, chunks, data=2), alone(case)
    rows = make_rows(build.config.vocab, ignored=case.ignored)[: build.plan.rows_per_step]
    wanted = house.reference(baseline, rows)
    half = len(rows) // 2
    place = build.world.place("data")
    found = house.take_step(build, rows[place * half : (place + 1) * half])
    for name, parameter in build.model.named_parameters():
        assert parameter.grad is not None
        found.gradients[name] = build.whole(name, local_of(parameter.grad))
    assert_equal(found, mine_of(wanted, build))


def low_precision(case: Case, chunks: int) -> None:
    """Activations cross borders in their own dtype, so that nothing is rounded on the way."""
    build, baseline = piped(case, chunks), alone(case)
    rows = make_rows(build.config.vocab, ignored=case.ignored)
    wanted = house.take_step(baseline, rows)
    assert_equal(house.take_step(build, rows), mine_of(wanted, build))
    (pipe,) = (t for t in build.techniques if t.name() == "pipeline_parallel")
    numbers = pipe.active(build).numbers
    values = house.LENGTH * build.config.dim * case.micro_rows
    assert numbers["bytes"] == numbers["messages"] * values * 2


def with_auxiliary(case: Case, chunks: int) -> None:
    """Losses that layers keep in a forward pass, as routers do, on every stage."""
    results = []
    build, baseline = piped(case, chunks), alone(case)
    for each in (build, baseline):
        kept: list[torch.Tensor] = []

        def take(build: Build, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            total = torch.stack(kept).sum()
            kept.clear()
            return total

        for block in each.model.blocks.values():
            keep = lambda m, x, y, kept=kept: kept.append(y.float().pow(2).sum())  # noqa: E731
            block.mlp.register_forward_hook(keep)
        each.auxiliary.append(take)
        rows = make_rows(each.config.vocab, ignored=case.ignored)
        results.append(house.take_step(each, rows))
    assert_equal(results[0], mine_of(results[1], build))


CASES: dict[str, tuple[Any, Case]] = {
    "plain": (one_step, Case()),
    "ignored targets": (one_step, Case(ignored=True)),
    "odd micro-batches": (one_step, Case(micro_rows=2)),
    "one micro-batch": (one_step, Case(micro_rows=6)),
    "packed": (one_step, Case(beside={"document_packing": {}}, ignored=True)),
    "tied": (one_step, Case(shape="tied", ignored=True)),
    "learned positions": (one_step, Case(shape="gpt2")),
    "checkpoint": (one_step, Case(beside={"selective_checkpoint": {}})),
    "chunked loss": (one_step, Case(beside={"chunked_cross_entropy": {"chunk_tokens": 7}})),
    "compiled blocks": (
        one_step,
        Case(beside={"torch_compile": {"backend": "aot_eager", "scope": "block"}}),
    ),
    "compiled model": (
        one_step,
        Case(beside={"torch_compile": {"backend": "aot_eager"}}, ignored=True),
    ),
    "everything": (
        one_step,
        Case(
            shape="tied",
            ignored=True,
            beside={
                "torch_compile": {"backend": "aot_eager", "scope": "block"},
                "selective_checkpoint": {},
                "document_packing": {},
                "chunked_cross_entropy": {"chunk_tokens": 7},
            },
        ),
    ),
    "steps": (several_steps, Case(more={"optimizer": {"clip_norm": 0.1}})),
    "tied steps": (several_steps, Case(shape="tied", more={"optimizer": {"clip_norm": 0.1}})),
    "auxiliary": (with_auxiliary, Case(ignored=True)),
    "evaluation": (evaluates, Case()),
    "bf16": (low_precision, Case(precision="bf16")),
    "bf16 tied": (low_precision, Case(precision="bf16", shape="tied")),
}
FOUR_ROWS = {"batch": {"tokens": 4 * house.LENGTH}}
REPLICAS: dict[str, tuple[Any, Case]] = {
    "replicas": (with_replicas, Case()),
    "tied replicas": (with_replicas, Case(shape="tied", ignored=True)),
    "fsdp": (with_replicas, Case(beside={"fsdp": {}}, ignored=True)),
    "tied fsdp": (with_replicas, Case(shape="tied", beside={"fsdp": {}})),
    "fsdp in chunks": (with_replicas, Case(beside={"fsdp": {}}, more=FOUR_ROWS)),
    "kept fsdp in chunks": (
        with_replicas,
        Case(shape="tied", beside={"fsdp": {"reshard": False}}, more=FOUR_ROWS),
    ),
}


def check(cases: str, chunks: int, corpus: str, prepared: str) -> None:
    """All of `cases` that the schedule takes, in one process group."""
    house.put_data_in(corpus, prepared)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        prepare(make_plan())
    dist.barrier()
    data = 2 if cases == "REPLICAS" else 1
    for function, case in {"CASES": CASES, "REPLICAS": REPLICAS}[cases].values():
        micros = case.plan({}, {}, {}).rows_per_step // data // case.micro_rows
        if chunks == 1 or micros % (dist.get_world_size() // data) == 0:
            function(case, chunks)
    dist.destroy_process_group()
