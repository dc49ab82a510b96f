"""Updates inside of the backward pass are AdamW's bit for bit, and gradients are gone after it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import in_order
from tiny import assert_same_run

from headrace.assemble.context import check_supported, make_context
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.progress import Progress
from headrace.data.loader import Micro
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.memory.optimizer_in_backward import OptimizerInBackward
from headrace.train import train
from headrace.train.train import step

NAME = "optimizer_in_backward"
WITH = (f"techniques.{NAME}={{}}", "optimizer.clip_norm=0")


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("model.tied_embeddings=true", "schedule.warmup_steps=2"),
        ("techniques.chunked_cross_entropy.chunk_tokens=7", "techniques.selective_checkpoint={}"),
        ("techniques.muon={}",),
        ("techniques.adamw_8bit.smallest=512",),
        ("techniques.adamw_8bit.smallest=512", "techniques.muon={}"),
    ],
    ids=["plain", "tied", "chunked", "muon", "8 bits", "8 bits and muon"],
)
def test_weights_norms_and_states_are_the_baselines(
    more: tuple[str, ...], make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    baseline, mine = make_tiny("optimizer.clip_norm=0", *more), make_tiny(*WITH, *more)
    for index in range(4):
        right, found = (step(build, batch(build), index) for build in (baseline, mine))
        torch.testing.assert_close(found, right, rtol=1e-6, atol=0)
    for name, p in baseline.model.named_parameters():
        own = mine.model.get_parameter(name)
        assert torch.equal(own, p), name
        route = next(r for r, taken in mine.routed.items() if name in taken)
        assert (own.grad is None) == (route in (NAME, "adamw_8bit"))
        before = "adamw" if route == NAME else route
        states = (baseline.optimizers[before].state[p], mine.optimizers[route].state[own])
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert "adamw" not in mine.optimizers
    evidence = check_active(mine)[NAME]
    freed = [p for route in (NAME, "adamw_8bit") for p in mine.routed.get(route, {}).values()]
    assert evidence.numbers["freed_bytes"] == 4 * sum(p.nbytes for p in freed)
    assert ("adamw_8bit" in mine.routed) == any("8bit" in word for word in more)


def test_a_norm_is_that_of_its_own_step(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    """Where blocks are left out, of what had a gradient in this step and not in one before."""
    deep = ("model.layers=3", "techniques.stochastic_depth.rate=0.6")
    baseline, mine = make_tiny("optimizer.clip_norm=0", *deep), make_tiny(*WITH, *deep)
    for index in range(4):
        right, found = (step(build, batch(build), index) for build in (baseline, mine))
        torch.testing.assert_close(found, right, rtol=1e-6, atol=0)
    assert baseline.notes["stochastic_depth"]["left_out"] > 0


def test_one_gradient_is_held_at_a_time(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    build = make_tiny(*WITH)
    most, parameters = [0], list(build.model.parameters())

    def count(_: Any) -> None:
        most[0] = max(most[0], sum(p.grad is not None for p in parameters))

    for p in parameters:
        p.register_post_accumulate_grad_hook(count)
    step(build, batch(build), 0)
    assert most[0] == 0, "freed before a hook behind its own sees it"


@pytest.mark.parametrize("beside", ["lora.rank=2", "muon={}"])
def test_gradients_that_others_read_are_predicted_to_stay(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]], beside: str
) -> None:
    """To their update; and the largest of its own is there for a moment beside them."""
    build = make_tiny(*WITH, f"techniques.{beside}")
    step(build, batch(build), 0)
    held = sum(p.grad.nbytes for p in build.model.parameters() if p.grad is not None)
    largest = max(p.nbytes for p in build.routed[NAME].values())
    lines = build.predicted(build.plan).memory
    assert lines["gradients"].bytes == held + largest
    assert ("kept_gradients" in lines) == (held > 0)
    assert held == 0 or lines["kept_gradients"].bytes == held


def test_a_gradient_that_is_not_finite_masks_its_parameter(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    build = make_tiny(*WITH)
    step(build, batch(build), 0)
    bad = build.model.get_parameter("blocks.0.mlp.down.weight")
    bad.register_hook(lambda grad: grad * torch.nan)
    before = {n: p.detach().clone() for n, p in build.model.named_parameters()}
    numbers = step(build, batch(build), 1)
    assert numbers[2] == 0 and torch.isfinite(numbers[0])
    for name, p in build.model.named_parameters():
        assert torch.equal(p, before[name]) == (p is bad), name
    moments = build.optimizers[NAME].state[bad]
    assert all(torch.isfinite(t).all() for t in moments.values()) and moments["step"] == 1


@pytest.mark.parametrize("more", [(), ("techniques.adamw_8bit.smallest=512",)], ids=str)
def test_a_resumed_run_is_the_same_run(
    more: tuple[str, ...], tiny_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    ends = []
    for name in ("whole", "cut"):
        plan = tiny_plan(*WITH, *more, f"directory='{tmp_path / name}'")
        ends.append(train.run(plan).folder)
    assert ends[1] is not None and ends[0] is not None
    ends[1] = train.run(plan, resume=True, checkpoint="step-8").folder
    assert_same_run(*ends)


def answer(plan: Plan) -> Supported | Unsupported:
    return OptimizerInBackward().supports(make_context(plan, torch.device("cpu")))


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"optimizer": {"clip_norm": 1.0}}, "optimizer.clip_norm=0"),
        ({"batch": {"tokens": 128, "micro_sequences": 2}}, "batch.micro_sequences=8"),
        ({"mesh": MeshConfig(tensor=2)}, "mesh.tensor=1"),
        ({"mesh": MeshConfig(pipeline=2)}, "mesh.pipeline=1"),
        ({"mesh": MeshConfig(data=2)}, "--with fsdp"),
        ({"mesh": MeshConfig(context=2)}, "--with fsdp"),
    ],
)
def test_refuses_what_needs_all_gradients(
    change: dict[str, Any], remedy: str, tiny_plan: Callable[..., Plan]
) -> None:
    plan = tiny_plan("optimizer.clip_norm=0")
    assert isinstance(answer(plan), Supported)
    values = {k: type(getattr(plan, k)).model_validate(dict(v)) for k, v in change.items()}
    refused = answer(plan.model_copy(update=values))
    assert isinstance(refused, Unsupported) and refused.remedy.text.startswith(remedy)


def test_the_command_line_says_how(tiny_plan: Callable[..., Plan]) -> None:
    with pytest.raises(UnsupportedError, match=r"optimizer\.clip_norm=0"):
        train.run(tiny_plan(f"techniques.{NAME}={{}}"), progress=Progress())


def test_states_of_8_bits_are_predicted_beside_one_gradient(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    """No gradient stays to the update, whose temporaries are there in the backward pass."""
    states = "techniques.adamw_8bit.smallest=512"
    build, alone = make_tiny(*WITH, states), make_tiny("optimizer.clip_norm=0", states)
    step(build, batch(build), 0)
    held = [p for p in build.model.parameters() if p.grad is not None]
    lines, without = (one.predicted(one.plan).memory for one in (build, alone))
    assert not held and "kept_gradients" not in lines
    assert lines["gradients"].bytes == max(p.nbytes for p in build.model.parameters())
    assert lines["optimizer"].bytes == without["optimizer"].bytes
    assert lines["update"].bytes == without["update"].bytes
    assert "backward" in lines["update"].instants and "backward" not in without["update"].instants


def test_two_that_update_the_rest_are_refused_before_anything_is_built(
    tiny_plan: Callable[..., Plan],
) -> None:
    plan = tiny_plan("techniques.sophia={}", "techniques.adamw_8bit={}")
    context = make_context(plan, torch.device("cpu"))
    with pytest.raises(ConfigError, match=in_order("adamw_8bit", "sophia", "AdamW")) as told:
        check_supported(list(plan.techniques.values()), context)
    assert told.value.remedy.changes == (("-adamw_8bit",), ("-sophia",))
