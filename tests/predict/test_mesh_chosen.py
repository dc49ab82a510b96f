"""A plan of `mesh.auto = true` gets the fastest layout that fits, and is told what it lost."""

import pytest
import torch
from facts import in_order
from test_ranks_predicted import ALONE, linked, plan_of

from headrace.assemble.context import elsewhere, make_context
from headrace.cli import plans
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.parallel.world import open_world
from headrace.plan.changes import changed
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.predict.mesh import ChosenMesh, choose_mesh

H200 = "NVIDIA H200"


def chosen(plan: Plan, ranks: int) -> ChosenMesh:
    place = elsewhere(make_context(plan, torch.device("cpu")), H200)
    return choose_mesh(plan, ranks, place, linked(ranks=ranks), catalogue())


def test_slices_are_taken_where_a_model_fits_and_what_cannot_follow_is_told() -> None:
    """Check that of layouts which hide what they send one is chosen that updates slices."""
    graphs = ("torch_compile", "cuda_graphs")
    plan = plan_of("160m", "mesh.auto=true", with_=graphs, without=())
    found = chosen(plan, 2)
    (layout,) = (n for n, t in found.plan.techniques.items() if "shard" in t.composes)
    assert found.plan.mesh == MeshConfig(data=2)
    assert "cuda_graphs" not in found.plan.techniques and "torch_compile" in found.plan.techniques
    assert in_order(found.lines[0], "2 ranks", "data=2", layout, "GiB")
    assert any("-cuda_graphs" in line for line in found.lines[1:])


def test_a_model_that_does_not_fit_whole_is_divided() -> None:
    found = chosen(plan_of("7b", "mesh.auto=true"), 8)
    names = {n for n, t in found.plan.techniques.items() if t.room == "parallel"}
    assert found.plan.mesh.ranks == 8 and names & {"fsdp", "zero", "tensor_parallel"}


def test_one_process_keeps_its_plan_and_several_of_nobody_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, lines = plan_of("160m", 'mesh="auto"', without=ALONE), list[str]()
    assert plan.mesh.auto
    monkeypatch.setenv("WORLD_SIZE", "1")
    alone = plans.laid_out(plan.replaced(device="cpu"), lines.append)
    assert not alone.mesh.auto and alone.mesh.ranks == 1 and not lines
    assert plans.laid_out(alone, lines.append) is alone
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as caught, open_world(plan.mesh, torch.device("cpu")):
        pass
    assert caught.value.remedy.text.endswith("(or mesh.auto=false mesh.data=2)")
    for given in ("mesh.auto=true", "mesh=auto"):
        two = plan_of("160m", given, "mesh.auto=false", "mesh.data=2", without=ALONE)
        assert two.mesh == MeshConfig(data=2)


def test_no_layout_fits_and_sizes_beside_auto_are_refused() -> None:
    huge = plan_of("7b", "mesh.auto=true", "model.layers=400", "model.dim=8192", "model.heads=64")
    with pytest.raises(ConfigError) as caught:
        chosen(huge, 2)
    assert in_order(caught.value.message, "2 ranks", "GiB")
    with pytest.raises(ConfigError) as caught:
        plan_of("160m", "mesh.auto=true", "mesh.tensor=2")
    assert "mesh.tensor=2" in caught.value.message


def test_other_layouts_run_where_rows_do_not_divide() -> None:
    """Check that a refusal of `mesh.data` alone ends nothing unless every layout is refused."""

    def rows(count: int) -> Plan:
        length = plan_of("160m").data.sequence_length
        tokens = f"batch.tokens={count * length}"
        return plan_of("160m", "mesh.auto=true", tokens, "batch.micro_sequences=1")

    two = chosen(rows(2), 4).plan
    assert two.mesh.ranks == 4 and two.mesh.data < 4 and not two.mesh.auto
    assert chosen(rows(4), 3).plan.mesh == MeshConfig(pipeline=3)
    with pytest.raises(ConfigError, match=r"mesh\.data = \d+ x 13 tokens") as caught:
        chosen(rows(4), 13)
    (change,) = caught.value.remedy.changes
    assert chosen(changed(rows(4), change, catalogue()), 13).plan.mesh.ranks == 13
