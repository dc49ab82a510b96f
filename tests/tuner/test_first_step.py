"""Trials whose first steps have no target: what is asked of a technique waits for one that has."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace.assemble.filled import PATIENT_STEPS
from headrace.data.loader import Loader, StepBatch
from headrace.model.head import IGNORED
from headrace.plan.plan import Plan
from headrace.tuner.brief_training import train_steps
from headrace.tuner.paired_blocks import SampleSize
from headrace.tuner.pairs import time_pair, visit
from headrace.tuner.readings import Reading, time_steps

Change = Callable[..., Plan]
Trial = Callable[[Plan, Plan], Reading]
SMALL = SampleSize(warm=1, steps=1, rounds=1)
TRIALS: dict[str, Trial] = {
    "pair": lambda first, second: time_pair(first, second, size=SMALL),
    "visit": lambda first, second: visit(second, blocks=1, size=SMALL, share=1.0),
    "steps": lambda first, second: time_steps(second, text=True, warm=1, timed=2),
    "short": lambda first, second: train_steps(second, steps=4),
}


def blank(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Take the targets of the first steps away."""
    whole = Loader.step

    def step(loader: Loader, index: int) -> StepBatch:
        batch = whole(loader, index)
        if index >= steps:
            return batch
        none = [replace(m, targets_BT=m.targets_BT.fill_(IGNORED)) for m in batch.micros]
        return replace(batch, micros=none)

    monkeypatch.setattr(Loader, "step", step)


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_evidence_waits_for_a_step_with_targets(
    plan: Plan, change: Change, monkeypatch: pytest.MonkeyPatch, trial: Trial
) -> None:
    """A gradient has reached every adapter by then, and all that is timed is timed."""
    blank(monkeypatch, 2)
    found = trial(plan, change(plan, "+lora", "techniques.lora.rank=2"))
    assert not found.refused and list(found.evidence) == ["lora"]
    assert found.evidence["lora"].startswith("a gradient reached 8 of 8 adapters")
    assert found.losses


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_evidence_has_what_was_counted_until_the_last_step(
    plan: Plan, change: Change, trial: Trial
) -> None:
    """The first step shows no recording of a graph, no shrunk batch and no second length."""
    found = trial(plan, change(plan, "+fp16_loss_scaling", "batch.micro_sequences=0"))
    told = found.evidence["fp16_loss_scaling"]
    passes = int(told.partition("scaled the loss of ")[2].split()[0])
    assert passes >= len(found.losses) + (trial is TRIALS["steps"]) > 1


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_without_any_target_nothing_is_proven(
    plan: Plan, change: Change, monkeypatch: pytest.MonkeyPatch, trial: Trial
) -> None:
    """It ends and says why; a plan without techniques has nothing to prove."""
    blank(monkeypatch, 10 * PATIENT_STEPS)
    found = trial(plan, change(plan, "+lora", "techniques.lora.rank=2"))
    assert found.refused.startswith("no step counted a target so far") and "lora" in found.refused
    assert not found.evidence and not found.poisoned
    assert not trial(plan, plan).refused
