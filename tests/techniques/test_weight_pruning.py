"""Weights that are pruned stay zero whatever moves them, and the masks are those of the spec."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import metrics, tensors
from torch import Tensor

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.compress.sparsity import input_squares, pruned_of, scores_of
from headrace.compress.spec import SparsitySpec
from headrace.core.errors import ConfigError
from headrace.inference.load import open_model
from headrace.plan.plan import Plan
from headrace.plan.technique import Unsupported
from headrace.techniques.precision.weight_pruning import PrunedWeights, WeightPruning
from headrace.train.checkpoint import Saved
from headrace.train.train import step

NAME = "weight_pruning"
DOWN = "blocks.0.mlp.down.weight"
ON = (f"techniques.{NAME}.pattern=2:4",)
ANY = (f"techniques.{NAME}.pattern=unstructured",)


def take(build: Build, index: int = 0) -> None:
    """Take a step on the run's own text."""
    step(build, build.loader.step(index).micros, index)


def weights(build: Build) -> dict[str, Tensor]:
    """Return copies of the pruned weights, fp32."""
    state: Any = build.notes[NAME]
    return {n: build.model.get_parameter(n).detach().float().clone() for n in state.masks}


def zeros(build: Build) -> float:
    """Return the share of the numbers of the linears that are zero."""
    every = torch.cat([one.flatten() for one in weights(build).values()])
    return float((every == 0).float().mean())


def test_two_of_four_are_the_smallest_and_stay_zero(make_tiny: Callable[..., Build]) -> None:
    """What the first update leaves is pruned; decay and momentum move the others alone."""
    build, plain = (
        make_tiny(*ON, "optimizer.weight_decay=0.5"),
        make_tiny("optimizer.weight_decay=0.5"),
    )
    take(build)
    take(plain)
    for name, weight in weights(build).items():
        whole = plain.model.get_parameter(name).detach()
        pruned = pruned_of(scores_of(whole), build.plan.techniques[NAME].spec)  # type: ignore[attr-defined]
        assert torch.equal(weight, whole.masked_fill(pruned, 0.0)), name
    before = weights(build)
    for index in (1, 2):
        take(build, index)
    for name, weight in weights(build).items():
        assert torch.equal(weight == 0, before[name] == 0)
        assert bool(((weight == 0).view(-1, 4).sum(1) == 2).all())
        assert not torch.equal(weight, before[name]), "the others learn"
    evidence = build.plan.techniques[NAME].active(build)
    assert evidence.active and evidence.numbers["pruned"] == evidence.numbers["zeros"]
    assert evidence.numbers["zeros"] == evidence.numbers["numbers"] / 2


def test_wanda_weighs_by_what_the_step_before_reads(make_tiny: Callable[..., Build]) -> None:
    """Count all micro-batches of the step, and run them eagerly where blocks are compiled."""
    keys = (*ANY, f"techniques.{NAME}.metric=wanda", "batch.micro_sequences=2")
    build = make_tiny(*keys, "techniques.torch_compile.backend=eager")
    plain = make_tiny("batch.micro_sequences=2")
    micros = build.loader.step(0).micros
    assert len(micros) > 1
    down = DOWN.removesuffix(".weight")
    with torch.no_grad(), input_squares({DOWN: plain.model.get_submodule(down)}) as squares:
        for micro in micros:
            work = plain.place(plain, micro)
            plain.model.logits(work.ids_BT, work.rows)
    take(build)
    take(plain)
    spec: SparsitySpec = build.plan.techniques[NAME].spec  # type: ignore[attr-defined]
    whole = plain.model.get_parameter(DOWN).detach()
    pruned = pruned_of(scores_of(whole, squares[DOWN].sqrt()), spec)
    assert torch.equal(weights(build)[DOWN] == 0, pruned)
    assert bool((pruned.sum(1) == pruned.size(1) // 2).all()), "each row loses as many"
    assert not torch.equal(pruned, pruned_of(scores_of(whole), spec))
    state: PrunedWeights = build.notes[NAME]
    assert not state.squares, "no step after it reads what linears read"


def test_the_share_rises_until_its_end(make_tiny: Callable[..., Build]) -> None:
    knobs = ("share=0.8", "start=0.25", "end=0.75", "every=2")
    build = make_tiny(*ANY, *(f"techniques.{NAME}.{knob}" for knob in knobs), "schedule.steps=8")
    technique, found, gone = build.plan.techniques[NAME], [], torch.tensor(False)
    for index in range(7):
        take(build, index)
        found.append(zeros(build))
        evidence = technique.active(build)
        assert evidence.active and (evidence.numbers["pruned"] > 0) == (index >= 3)
        now = weights(build)[DOWN] == 0
        assert bool((now | ~gone).all()), "what is pruned stays so"
        gone = now
    assert found == pytest.approx([0, 0, 0, 0.7, 0.7, 0.8, 0.8], abs=0.01)
    assert not build.plan.checkpoint.keep_best


@pytest.mark.parametrize(
    "words",
    [
        ("techniques.bf16_parameters.rounding=master",),
        ("techniques.bf16_parameters.rounding=stochastic",),
        ("techniques.muon.lr=0.02",),
        ("techniques.lion.rate_share=0.5",),
    ],
    ids=lambda words: words[0].split(".")[1] + words[0].rpartition("=")[2],
)
def test_whatever_optimizer_moves_them(
    make_tiny: Callable[..., Build], words: tuple[str, ...]
) -> None:
    build = make_tiny(*ON, *words, "optimizer.weight_decay=0.5")
    for index in range(3):
        take(build, index)
    for weight in weights(build).values():
        assert bool(weight.isfinite().all())
        assert bool(((weight == 0).view(-1, 4).sum(1) >= 2).all())
    held = [s for optimizer in build.optimizers.values() for s in optimizer.state.items()]
    named = {id(p): name for name, p in build.model.named_parameters()}
    state: PrunedWeights = build.notes[NAME]
    rests = [(named[id(p)], s["rest"]) for p, s in held if "rest" in s]
    assert bool(rests) == ("master" in words[0])
    for name, rest in rests:
        if name in state.masks:
            assert not bool(rest[state.masks[name]].any())


def test_a_run_resumes_to_the_bit_and_keeps_its_masks(train: Callable[..., Path]) -> None:
    knobs = ("metric=wanda", "end=0.6", "every=1")
    words = [*ANY, *(f"techniques.{NAME}.{knob}" for knob in knobs), "schedule.steps=8"]
    whole = train("name=whole", "goal.steps=8", *words)
    train("name=parts", "goal.steps=4", *words)
    parts = train("name=parts", "goal.steps=8", *words, resume=True)
    one, two = (tensors(run / "checkpoints" / "latest") for run in (whole, parts))
    assert one.keys() == two.keys() and f"technique/{NAME}/{DOWN}" in one
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert [r["loss"] for r in metrics(whole)] == [r["loss"] for r in metrics(parts)]
    saved = Saved(whole / "checkpoints" / "step-8")
    opened = open_model(whole, catalogue(), checkpoint="step-8")
    weight = opened.model.get_parameter(DOWN).detach()
    mask = torch.empty_like(weight, dtype=torch.bool)
    saved.fill_(f"technique/{NAME}/{DOWN}", mask)
    assert torch.equal(weight == 0, mask) and float(mask.float().mean()) == 0.5


def test_it_learns_from_the_whole_model_beside_it(
    make_tiny: Callable[..., Build], given: Callable[..., str]
) -> None:
    """The teacher is what the run starts from, whole, while the student's zeros are held."""
    start = given("model.layers=2", "model.init_std=0.2")
    build = make_tiny(*ON, start, "techniques.distillation.weight=1", "optimizer.lr=1e-30")
    apart = []
    for index in range(2):
        take(build, index)
        evidence = build.plan.techniques["distillation"].active(build)
        apart.append(evidence.numbers["divergence_nats"])
    assert apart[0] < 1e-5 < apart[1], "until it is pruned the student is its teacher"
    assert zeros(build) == 0.5 and build.plan.techniques[NAME].active(build).active


def test_a_weight_that_is_no_zero_any_more_is_noticed(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(*ON)
    take(build)
    technique = build.plan.techniques[NAME]
    assert technique.active(build).active
    with torch.no_grad():
        build.model.get_parameter(DOWN).add_(1.0)
    evidence = technique.active(build)
    assert not evidence.active and evidence.numbers["intact"] < evidence.numbers["pruned"]


def test_refuses_knobs_that_contradict_each_other(
    tiny_plan: Callable[..., Plan], make_tiny: Callable[..., Build], given: Callable[..., str]
) -> None:
    plan = tiny_plan()

    def refused(plan: Plan = plan, **knobs: Any) -> str:
        technique = WeightPruning(**knobs)
        own = plan.replaced(techniques={NAME: technique})
        answer = technique.supports(make_context(own, torch.device("cpu")))
        return answer.remedy.text if isinstance(answer, Unsupported) else ""

    some: dict[str, Any] = {"pattern": "unstructured"}
    assert not refused() and not refused(**some, share=0.3, start=0.2, end=0.4)
    assert f"{NAME}.share=0.5" in refused(share=0.4)
    assert f"{NAME}.end=0" in refused(end=0.5)
    assert f"{NAME}.end=0.75" in refused(**some, start=0.5, end=0.5)
    endless = plan.replaced(schedule={"kind": "constant"}, goal={"minutes": 1})
    assert "schedule.steps=1000" in refused(endless, **some, end=0.5) and not refused(endless)
    short = tiny_plan("goal.steps=4", "schedule.steps=8")
    assert WeightPruning(end=0.5, pattern="unstructured").doubt(short) is None
    doubt = WeightPruning(start=0.6).doubt(short)
    assert doubt is not None and "after 5 steps, and the run has 4" in doubt.reason
    narrow = tiny_plan("model.ffn=30")
    assert f"{NAME}.pattern=unstructured" in refused(narrow) and not refused(narrow, **some)
    with pytest.raises(ConfigError, match="has 30 columns"):
        make_tiny(*ON, given("model.layers=2", "model.ffn=30"))
    for other in ("lora.rank=2", "weight_averaging.decay=0.9", "schedule_free.beta=0.9"):
        with pytest.raises(ConfigError, match=NAME):
            make_tiny(*ON, f"techniques.{other}")
