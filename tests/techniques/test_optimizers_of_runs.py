"""Run Lion, Schedule-Free AdamW, AdEMAMix and the explicit AdamW: state, evaluation, evidence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pieces import left
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.costs.work import Stream
from headrace.data.loader import Micro
from headrace.optim.elementwise import TEMPORARIES, UPDATE
from headrace.plan.plan import Plan
from headrace.plan.technique import installed
from headrace.techniques.optim.adamw import Adamw
from headrace.techniques.optim.ademamix import Ademamix
from headrace.techniques.optim.lion import Lion
from headrace.techniques.optim.schedule_free import ScheduleFree
from headrace.train.evaluate import evaluate
from headrace.train.train import step

States = Callable[[Build], tuple[dict[str, float], dict[str, float]]]
STATES = {"lion": 1, "schedule_free": 2, "ademamix": 3}
"""Numbers of state that each keeps for a weight; AdamW keeps two."""


@pytest.mark.parametrize("name", STATES)
def test_state_and_update_are_predicted(
    name: str, make_tiny: Callable[..., Build], states: States
) -> None:
    """One count for each tensor is no line of the ledger."""
    build = make_tiny(f"techniques.{name}={{}}")
    found, predicted = states(build)
    weights = sum(p.numel() for p in build.model.parameters())
    counts = 4 * len([*build.model.parameters()])
    assert found["parameters"] == predicted["parameters"] == 4 * weights
    assert predicted["optimizer"] == 4 * STATES[name] * weights
    assert 0 <= found["optimizer"] - predicted["optimizer"] <= counts
    ledger = build.predicted(build.plan)
    matrices = sum(p.numel() for p in build.model.parameters() if p.ndim > 1)
    assert ledger.memory["update"].bytes == TEMPORARIES * 4 * matrices
    piece = ledger.work[f"update/{name}"]
    assert UPDATE not in ledger.work and isinstance(piece, Stream)
    assert piece.bytes > 28 * weights, "operations over lists move more than a fused kernel"


def test_beside_muon_it_takes_and_predicts_the_rest(
    make_tiny: Callable[..., Build], states: States
) -> None:
    build = make_tiny("techniques.muon={}", "techniques.lion={}")
    found, predicted = states(build)
    assert build.routed.keys() == {"muon", "lion"} and "embed.weight" in build.routed["lion"]
    assert found["optimizer"] == predicted["optimizer"]


def test_lions_rate_and_decay_keep_their_product(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny("techniques.lion.rate_share=0.1", "optimizer.weight_decay=0.2")
    for group in build.optimizers["lion"].param_groups:
        assert group["initial_lr"] == pytest.approx(0.1 * build.plan.optimizer.lr)
        assert group["weight_decay"] in (0.0, pytest.approx(2.0))


# --- what Schedule-Free evaluates ------------------------------------------------------------


def weights(build: Build) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in build.model.named_parameters()}


def test_an_evaluation_reads_the_average_and_training_never_notices(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    """Compute the average from the optimizer's state, and evaluate a twin that has it."""
    words = ("techniques.schedule_free.beta=0.7", "schedule.warmup_steps=2")
    looked, blind, twin = (make_tiny(*words) for _ in range(3))
    micros = batch(looked)
    for index in range(4):
        for build in (looked, blind):
            step(build, micros, index)
        if index == 2:
            evaluate(looked, 64)
    assert all(torch.equal(p, weights(blind)[n]) for n, p in weights(looked).items())
    states = looked.optimizers["schedule_free"].state
    with torch.no_grad():
        for name, parameter in looked.model.named_parameters():
            average = (parameter - 0.3 * states[parameter]["z"]) / 0.7
            twin.model.get_parameter(name).copy_(average)
    before = weights(looked)
    found, wanted, trained = (evaluate(build, 64) for build in (looked, twin, blind))
    assert found.loss_nats == pytest.approx(wanted.loss_nats, rel=1e-6)
    assert trained.loss_nats == found.loss_nats, "both evaluate their average"
    looked.weights_for_eval.clear()
    assert evaluate(looked, 64).loss_nats != found.loss_nats
    assert all(torch.equal(p, before[n]) for n, p in weights(looked).items())


def test_its_schedule_is_constant_and_another_is_refused(tiny_plan: Callable[..., Plan]) -> None:
    asked = "techniques.schedule_free={}"
    assert tiny_plan(asked).schedule.kind == "constant"
    with pytest.raises(ConfigError, match="schedule_free makes it 'constant'") as caught:
        tiny_plan(asked, "schedule.kind=cosine")
    assert "leave out schedule.kind" in caught.value.remedy.text


# --- the explicit AdamW ----------------------------------------------------------------------


def test_adamw_rewrites_its_keys_and_refuses_what_takes_its_place(
    tiny_plan: Callable[..., Plan], make_tiny: Callable[..., Build]
) -> None:
    plan = tiny_plan("techniques.adamw={betas = [0.8, 0.9], weight_decay = 0.3}")
    assert plan.optimizer.betas == (0.8, 0.9) and plan.optimizer.weight_decay == 0.3
    assert plan.optimizer.eps == tiny_plan().optimizer.eps, "what is left open is the plan's"
    assert Plan.read(plan.to_toml(), installed()) == plan
    with pytest.raises(ConfigError, match="and adamw makes it 1e-06"):
        tiny_plan("techniques.adamw.eps=1e-6", "optimizer.eps=1e-5")
    for other in ("lion", "sophia", "adamw_8bit", "optimizer_in_backward"):
        with pytest.raises(ConfigError, match="both take the place of the baseline's AdamW"):
            make_tiny("techniques.adamw={}", f"techniques.{other}={{}}", "optimizer.clip_norm=0")


def test_adamw_stands_beside_what_takes_some_matrices(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    for beside in ("techniques.muon={}", "techniques.mup.base_dim=8"):
        build = make_tiny("techniques.adamw={}", beside)
        step(build, batch(build), 0)
        assert build.plan.techniques["adamw"].active(build).active


# --- evidence --------------------------------------------------------------------------------


def run_of(name: str, state: dict[str, Tensor], **has: Any) -> Any:
    """Return what a run would have left of one tensor of four weights."""
    weight = torch.ones(4)
    optimizer = left(state={weight: state} if state else {}, updates=1, **has)
    return left(
        optimizers={name: optimizer}, routed={name: {"w": weight}}, weights_for_eval=[print]
    )


@pytest.mark.parametrize(
    ("technique", "state"),
    [
        (Lion(), {"exp_avg": torch.ones(4)}),
        (ScheduleFree(), {"exp_avg_sq": torch.ones(4), "z": torch.ones(4)}),
        (Ademamix(), {"slow": torch.ones(4), "exp_avg": torch.ones(4)}),
    ],
    ids=str,
)
def test_evidence_wants_updates_and_a_state_that_has_moved(
    technique: Any, state: dict[str, Tensor]
) -> None:
    name, still = technique.name(), {key: torch.zeros(4) for key in state}
    assert technique.active(run_of(name, state)).active
    assert not technique.active(run_of(name, still)).active
    assert not technique.active(run_of(name, {})).active
    resumed = run_of(name, state)
    resumed.optimizers[name].updates = 0
    assert not technique.active(resumed).active, "the states are another run's"


def test_evidence_of_lion_wants_one_state_and_of_schedule_free_its_evaluations() -> None:
    two = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    assert not Lion().active(run_of("lion", two)).active
    run = run_of("schedule_free", {"exp_avg_sq": torch.ones(4), "z": torch.ones(4)})
    run.weights_for_eval = []
    assert not ScheduleFree().active(run).active


def test_evidence_of_adamw_wants_the_fused_kernel_and_its_settings(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    build = make_tiny("techniques.adamw.eps=1e-6")
    technique = build.plan.techniques["adamw"]
    assert not technique.active(build).active, "before a step"
    step(build, batch(build), 0)
    assert technique.active(build).active
    assert not Adamw(weight_decay=0.7).active(build).active
    for key, value in (("fused", False), ("eps", 1e-8)):
        group = build.optimizers["adamw"].param_groups[0]
        kept, group[key] = group[key], value
        assert not technique.active(build).active, key
        group[key] = kept
