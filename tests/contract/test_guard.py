"""The first step beside the plain trainer's: right combinations pass, faults end the run."""

import json
from pathlib import Path
from typing import Any

import house
import pytest
import torch
from house import Variant, toy

from headrace.core.errors import RunError
from headrace.core.technique import Stage
from headrace.guard import NOTE, guard
from headrace.sockets import Build
from headrace.train import step


def first_step(*techniques: Any, **keys: Any) -> Build:
    """A build that has taken its first guarded step."""
    build = house.build_of(house.make_plan(*techniques, **keys))
    guard(build, step)
    micros = build.loader.step(0).micros
    build.loader.close()
    step(build, micros, 0)
    return build


@pytest.mark.parametrize("micro_rows", [0, 2])
@pytest.mark.parametrize(
    "names",
    [
        ("selective_checkpoint", "chunked_cross_entropy", "document_packing"),
        ("torch_compile", "selective_checkpoint", "muon"),
        ("lora", "selective_checkpoint"),
        ("torch_compile", "chunked_cross_entropy", "z_loss"),
        ("fp16_loss_scaling", "chunked_cross_entropy"),
        ("float8_linear", "chunked_cross_entropy"),
        ("mixture_of_experts", "selective_checkpoint", "sophia"),
    ],
    ids="+".join,
)
def test_a_right_combination_passes(names: tuple[str, ...], micro_rows: int) -> None:
    techniques = [Variant(n, house.tiny_knobs(n, "cpu")).technique() for n in names]
    build = first_step(*techniques, micro_rows=micro_rows)
    told = build.notes[NOTE]
    assert told["compared"] and told["gradients"] > 4
    assert told["off"] < 1e-3 and told["loss_off"] < 1e-4


def test_gradients_that_an_update_has_freed_are_not_missed() -> None:
    build = first_step(Variant("optimizer_in_backward").technique())
    assert build.notes[NOTE]["compared"] and build.notes[NOTE]["gradients"] == 0


def frozen(build: Build) -> None:
    build.frozen.append(lambda name: name == "embed.weight")


def blind(build: Build) -> None:
    build.wrap_blocks("blind", lambda f, layer: lambda x, s: f(x.detach() if layer else x, s))


def louder(build: Build) -> None:
    build.terms.append(lambda logits, targets, extras, vocabulary: 0.01 * logits.square().sum())


def doubled(build: Build) -> None:
    reduce = build.reduce

    def twice(build: Build) -> None:
        reduce(build)
        for parameter in build.model.parameters():
            parameter.grad.mul_(2)  # type: ignore[union-attr]

    build.reduce = twice


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
@pytest.mark.parametrize(
    ("fault", "stage", "says"),
    [
        (frozen, Stage.FREEZE, "embed.weight has norm 0"),
        (blind, Stage.MODEL, "has norm"),
        (louder, Stage.STEP, "first loss"),
        (doubled, Stage.STEP, "has norm"),
    ],
)
def test_a_fault_ends_the_run_before_its_first_update(
    fault: Any, stage: Stage, says: str, clip_norm: float
) -> None:
    sockets = {frozen: ("frozen",), blind: ("block_forward",), louder: ("terms",)}
    claims = ("reduce",) if fault is doubled else ()
    bad = toy("bad", stage, fault, composes=sockets.get(fault, ()), claims=claims)
    build = house.build_of(house.make_plan(bad, optimizer={"clip_norm": clip_norm}))
    before = {n: p.detach().clone() for n, p in build.model.named_parameters()}
    guard(build, step)
    micros = build.loader.step(0).micros
    build.loader.close()
    with pytest.raises(RunError, match=says) as told:
        step(build, micros, 0)
    assert "without bad" in str(told.value) and "--without bad" in told.value.remedy
    for name, parameter in build.model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_says_why_nothing_was_compared() -> None:
    plain = first_step()
    assert plain.notes[NOTE]["compared"] is False and "left out" in plain.notes[NOTE]["why"]
    off = first_step(Variant("selective_checkpoint").technique(), guard=False)
    assert NOTE not in off.notes


def test_the_weights_are_those_of_an_unguarded_run() -> None:
    technique = Variant("selective_checkpoint").technique()
    builds = [first_step(technique, guard=asked) for asked in (True, False)]
    ours, theirs = (dict(b.model.named_parameters()) for b in builds)
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_the_report_keeps_it_over_a_resume(tmp_path: Path, plan_file: Path, zygote: Any) -> None:
    short = ["--with", "full_checkpoint", "goal.steps=2", "schedule.steps=9", "name=g"]
    assert zygote.run(tmp_path, "train", str(plan_file), *short).code == 0
    plan = str(tmp_path / "runs" / "g" / "plan.toml")
    assert zygote.run(tmp_path, "train", plan, "--resume", "goal.steps=3").code == 0
    report = json.loads((tmp_path / "runs" / "g" / "report.json").read_text())
    assert report["steps"] == 3 and report["guard"]["compared"] is True
