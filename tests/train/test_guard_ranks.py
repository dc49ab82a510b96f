"""The guard of several processes: replicas add up, and none waits for one that cannot."""

import json
from pathlib import Path
from typing import Any

import house
import pytest
import torch
import torch.distributed as dist
from facts import tells
from torch.distributed.fsdp import FSDPModule

import headrace.train.guard
from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import RunError
from headrace.data.ingest import prepare
from headrace.parallel.layout import local_of
from headrace.parallel.world import World, join
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.technique import Stage
from headrace.train.train import step


def first_step(world: World, *techniques: Any) -> dict[str, Any]:
    """Return what the guard noted of the first step of replicas, or of ranks that hold parts."""
    mesh, clipped = {"data": world.ranks, **world.sizes}, {"clip_norm": 0.1}
    learns = house.toy("uneven", Stage.STEP, uneven, composes=("enrich",))
    type(learns).equality = "learning"
    rows = {"tokens": -(-house.ROWS // world.ranks) * world.ranks * house.LENGTH}
    keys = {"mesh": mesh, "optimizer": clipped, "batch": {**rows, "micro_sequences": 1}}
    plan = house.make_plan(*techniques, learns, **keys)
    build = make_build(plan, prepare(plan), world, torch.device("cpu"))
    inspect = headrace.train.guard.guard(build, step)
    micros = build.loader.step(0).micros
    build.loader.close()
    step(build, micros, 0, inspect)
    return build.run_notes.guard


def uneven(build: Build) -> None:
    """Hide targets so that ranks count unlike numbers, in both steps that the guard compares."""

    def fewer(build: Build, works: Any) -> Any:
        hidden = torch.arange(house.LENGTH) >= 3 + 9 * build.world.rank
        return [w._replace(targets_BT=w.targets_BT.masked_fill(hidden, -100)) for w in works]

    build.enrich.append(fewer)


def unreduced(build: Build) -> None:
    """Each replica keeps its own gradients."""
    build.reduce = lambda build: None


def only_the_first_has_room(world: World, *techniques: Any) -> None:
    """For the plain model: then none compares."""
    whole = headrace.train.guard.make_build

    def full(*given: Any, **named: Any) -> Build:
        if world.rank:
            raise MemoryError
        return whole(*given, **named)

    headrace.train.guard.make_build = full
    why = first_step(world, *techniques)["why"]
    assert ("does not fit" if world.rank else "another process") in why, why
    headrace.train.guard.make_build = whole


def two_replicas(corpus: str, prepared: str) -> None:
    """Each process: a right combination, a wrong one, and one whose plain model fails on one."""
    house.put_data_in(corpus, prepared)
    dist.init_process_group("gloo")
    world = join(MeshConfig(data=2), torch.device("cpu"))
    right = house.Variant("full_checkpoint").technique()
    told = first_step(world, right)
    assert told["compared"] and told["gradients"] > 4, told
    assert told["off"] < 1e-4 and told["loss_off"] < 1e-5, told
    bad = house.toy("bad", Stage.STEP, unreduced, claims=("reduce",))
    with pytest.raises(RunError, match="has norm"):
        first_step(world, bad)
    only_the_first_has_room(world, right)
    dist.destroy_process_group()


def halved(build: Build) -> None:
    """One rank's slices of a gradient are lost to half."""
    reduce = build.reduce

    def less(build: Build) -> None:
        reduce(build)
        if build.world.rank == build.world.ranks - 1:
            local_of(dict(build.model.named_parameters())["embed.weight"].grad).mul_(0.5)

    build.reduce = less


def averaged(build: Build) -> None:
    """Slices hold the mean of the ranks' gradients, where a sum is meant."""

    def shard(module: Any) -> None:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(float(build.world.ranks))

    build.shard.append(shard)


FAULTS = {halved: (Stage.STEP, "reduce"), averaged: (Stage.MATERIALIZE, "shard")}


def slices(corpus: str, prepared: str) -> None:
    """Check, in each process, what the guard tells of ranks that hold slices of the weights."""
    house.put_data_in(corpus, prepared)
    dist.init_process_group("gloo")
    world = join(MeshConfig(data=dist.get_world_size()), torch.device("cpu"))
    fsdp, right = (house.Variant(n).technique() for n in ("fsdp", "full_checkpoint"))
    told = first_step(world, fsdp, right)
    assert told["compared"] and told["without"] == ["fsdp", "full_checkpoint"], told
    assert told["gradients"] > 4 and told["off"] < 1e-4 and told["loss_off"] < 1e-5, told
    for fault, (stage, socket) in FAULTS.items():
        claims = {"claims" if socket == "reduce" else "composes": (socket,)}
        with pytest.raises(RunError, match="has norm") as ended:
            first_step(world, fsdp, right, house.toy("wrong", stage, fault, **claims))
        assert len({str(e) for e in world.gather(str(ended.value))}) == 1
        assert "without fsdp, full_checkpoint, wrong" in str(ended.value)
    only_the_first_has_room(world, fsdp, right)
    headrace.train.guard.host_memory_bytes = lambda: 100_000
    assert "does not fit" in first_step(world, fsdp, right)["why"]
    dist.destroy_process_group()


def doubled(build: Build) -> None:
    """The last experts have a gradient twice as large."""
    reduce = build.reduce

    def more(build: Build) -> None:
        reduce(build)
        if build.world.place("expert") == build.world.size("expert") - 1:
            local_of(dict(build.model.named_parameters())["blocks.1.mlp.down"].grad).mul_(2.0)

    build.reduce = more


def experts(corpus: str, prepared: str, sizes: dict[str, int], names: list[str]) -> None:
    """Check, in each process, what the guard tells of ranks that divide the experts of a mixture.

    Five experts do not divide evenly, so that parts of different sizes are gathered.
    """
    house.put_data_in(corpus, prepared)
    dist.init_process_group("gloo")
    world = join(MeshConfig(**sizes), torch.device("cpu"))
    count = 5 if world.size("expert_slices") == 1 else 4
    mixture = catalogue().techniques["mixture_of_experts"](experts=count, top_k=2)
    divided = house.Variant("expert_parallel").technique()
    beside = [house.Variant(name).technique() for name in names]
    told = first_step(world, mixture, divided, *beside)
    assert told["compared"] and told["kept"] == ["mixture_of_experts", "uneven"], told
    assert told["without"] == ["expert_parallel", *names]
    assert told["gradients"] > 4 and told["off"] < 1e-4 and told["loss_off"] < 1e-5, told
    bad = house.toy("bad", Stage.STEP, doubled, claims=("reduce",))
    with pytest.raises(RunError, match=r"blocks\.1\.mlp\.down has norm") as ended:
        first_step(world, mixture, divided, *beside, bad)
    assert len({str(e) for e in world.gather(str(ended.value))}) == 1
    only_the_first_has_room(world, mixture, divided, *beside)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ({"data": 2, "expert": 2}, []),
        pytest.param({"data": 3, "expert": 3}, ["full_checkpoint"], marks=pytest.mark.slow),
        pytest.param({"data": 4, "expert": 2}, [], marks=pytest.mark.slow),
        pytest.param({"data": 4, "expert": 2}, ["fsdp"], marks=pytest.mark.slow),
        pytest.param({"data": 4, "expert": 4}, ["fsdp"], marks=pytest.mark.slow),
        pytest.param({"data": 4, "replicate": 2, "expert": 2}, ["fsdp"], marks=pytest.mark.slow),
    ],
)
def test_divided_experts_are_compared(
    zygote: Any,
    tmp_path: Path,
    corpus: Path,
    prepared_folder: Path,
    sizes: dict[str, int],
    names: list[str],
) -> None:
    house.put_data_in(str(corpus), str(prepared_folder))
    prepare(house.make_plan())
    given = {"corpus": str(corpus), "prepared": str(prepared_folder)}
    given |= {"sizes": sizes, "names": names}
    zygote.call(sizes["data"], tmp_path, Path(__file__), "experts", **given)


def mixtures(corpus: str, prepared: str) -> None:
    """Check, in each process, a mixture whose balance counts tokens that ranks hide targets of."""
    house.put_data_in(corpus, prepared)
    dist.init_process_group("gloo")
    world = join(MeshConfig(data=2), torch.device("cpu"))
    mixture = catalogue().techniques["mixture_of_experts"](experts=4, balance=1.0)
    for names in (["full_checkpoint"], ["fsdp"]):
        beside = [house.Variant(name).technique() for name in names]
        told = first_step(world, mixture, *beside)
        assert told["compared"] and told["off"] < 1e-4 and told["loss_off"] < 1e-5, told
    dist.destroy_process_group()


def test_the_balance_of_replicas_is_that_of_all_tokens(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    house.put_data_in(str(corpus), str(prepared_folder))
    prepare(house.make_plan())
    folders = {"corpus": str(corpus), "prepared": str(prepared_folder)}
    zygote.call(2, tmp_path, Path(__file__), "mixtures", **folders)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_slices_are_compared(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path, ranks: int
) -> None:
    house.put_data_in(str(corpus), str(prepared_folder))
    prepare(house.make_plan())
    folders = {"corpus": str(corpus), "prepared": str(prepared_folder)}
    zygote.call(ranks, tmp_path, Path(__file__), "slices", **folders)


def test_replicas_are_compared(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    house.put_data_in(str(corpus), str(prepared_folder))
    prepare(house.make_plan())
    folders = {"corpus": str(corpus), "prepared": str(prepared_folder)}
    zygote.call(2, tmp_path, Path(__file__), "two_replicas", **folders)


def test_two_processes_are_told(zygote: Any, tmp_path: Path, plan_file: Path) -> None:
    """Check that replicas are compared, and a model cut over processes is told not to be."""
    short = ["goal.steps=2", "schedule.steps=9", "mesh.data=2"]
    cases = {"full_checkpoint": True, "fsdp": True, "tensor_parallel": False}
    for name, compared in cases.items():
        cut = [] if compared else ["mesh.data=1", "mesh.tensor=2"]
        asked = ["train", str(plan_file), "--with", name, f"name={name}", *short, *cut]
        for ended in zygote.ranks(2, tmp_path, *asked):
            assert ended.code == 0, ended.err
        told = json.loads((tmp_path / "runs" / name / "report.json").read_text())["guard"]
        assert told["compared"] is compared, told
    assert tells(told["why"], "model", "2 processes")
    page = (tmp_path / "runs/tensor_parallel/report.html").read_text()
    assert told["why"] in page


def test_what_both_have_is_told(zygote: Any, tmp_path: Path, plan_file: Path) -> None:
    short = ["goal.steps=2", "schedule.steps=9", "name=g"]
    asked = ["--with", "full_checkpoint", "--with", "z_loss", *short]
    ended = zygote.run(tmp_path, "train", str(plan_file), *asked)
    assert ended.code == 0, ended.err
    assert tells(ended.err, "not compared", "z_loss")
    page = (tmp_path / "runs" / "g" / "report.html").read_text()
    assert "without full_checkpoint" in page and "both had it: z_loss" in page
    ended = zygote.run(tmp_path, "train", str(plan_file), "--with", "z_loss", *short)
    why = "not compared with the plain trainer's: no technique of this plan could be left out"
    assert f"the first step is {why}" in ended.err
    pages = [page.read_text() for page in (tmp_path / "runs").glob("*/report.html")]
    assert any(f"The first step was {why}" in page.replace("&#x27;", "'") for page in pages)
