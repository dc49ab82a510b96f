"""Two plans in turn: what their steps tell, and what a verdict is worth."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
from numpy.random import default_rng

from headrace.core.plan import Plan
from headrace.trials.judge import Compared, Rules, judge, seed_noise
from headrace.trials.kinds import kind_of
from headrace.trials.pairs import SCREEN, Size, measure_with, time_alone, time_pair
from headrace.trials.readings import Reading, Worker

Change = Callable[..., Plan]
SMALL = Size(warm=1, steps=1, rounds=1)
CUDA = Rules(device="cuda", precision="bf16")


def judged(after: Reading, before: Reading, kind: Any = "exact", rules: Rules = CUDA) -> Compared:
    """Of two readings."""
    return judge(replace(after, beside=before), kind, rules, SCREEN)


def reading(step_s: float = 1.0, off: float = 0.0, seed: int = 0, **more: Any) -> Reading:
    """Four blocks, and losses that fall and scatter."""
    draw = default_rng(seed)
    losses = [6 - 0.02 * i + off + 0.05 * draw.standard_normal() for i in range(40)]
    return Reading(seconds=[step_s * (1 + 0.001 * i) for i in range(4)], losses=losses,
                   norms=[1.0] * 40, **more)  # fmt: skip


def test_two_plans_in_one_process_compute_the_same(plan: Plan, change: Change) -> None:
    """Real steps of both, here: bit-equal losses where only memory is saved, others where not."""
    found = time_pair(plan, change(plan, "+full_checkpoint"), size=SMALL)
    assert not found.refused and found.beside is not None
    assert found.losses == found.beside.losses and len(found.losses) == 5
    assert found.norms == found.beside.norms and len(found.seconds) == 2
    assert list(found.evidence) == ["full_checkpoint"]
    other = time_pair(plan, change(plan, "+z_loss", "techniques.z_loss.weight=0.1"), size=SMALL)
    assert other.beside is not None and other.losses != other.beside.losses
    alone = time_alone(plan, size=SMALL)
    assert alone.losses == found.beside.losses[:3] and len(alone.seconds) == 1


def test_who_cannot_run_is_blamed(plan: Plan, change: Change) -> None:
    wrong = change(plan, "+cudnn_attention")
    found = time_pair(plan, wrong, size=SMALL)
    assert "NVIDIA" in found.refused and found.beside is not None and not found.beside.refused
    found = time_pair(wrong, plan, size=SMALL)
    assert found.beside is not None and "NVIDIA" in found.beside.refused


def test_plans_that_do_not_fit_together_are_timed_apart(plan: Plan, change: Change) -> None:
    asked: list[tuple[Any, Plan]] = []

    class Small(Worker):
        """Has no room for two."""

        def ask(self, what: Any, *plans: Plan, **how: Any) -> Reading:
            asked.append((what, plans[-1]))
            if what is time_pair:
                return Reading(refused="out of memory: tried to allocate", beside=Reading())
            return Reading(seconds=[1.0 if plans[0] == plan else 0.5], losses=[6.0])

    measure, fast = measure_with(Small()), change(plan, "+full_checkpoint")
    found = measure(plan, fast, size=SCREEN, together=True, limit_s=60)
    assert [p == plan for what, p in asked if what is time_alone] == [True, False, False, True]
    assert found.seconds == [0.5, 0.5] and found.beside is not None
    assert found.beside.seconds == [1.0, 1.0]


@pytest.mark.slow
def test_a_pair_is_read_in_a_process_of_its_own(plan: Plan, change: Change) -> None:
    with Worker() as worker:
        measure = measure_with(worker)
        for together in (True, False):
            found = measure(
                plan, change(plan, "+full_checkpoint"), size=SMALL, together=together, limit_s=120
            )
            assert not found.refused and found.beside is not None
            assert found.losses == found.beside.losses


# --- verdicts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_s", "verdict"), [(0.9, "better"), (0.998, "undecided"), (1.1, "worse")]
)
def test_time_decides(step_s: float, verdict: str) -> None:
    found = judged(reading(step_s), reading())
    assert found.verdict == verdict and found.loss == 0.0
    assert found.ratio is not None and found.ratio.value == pytest.approx(1 / step_s)


def test_losses_may_move_within_what_another_seed_moves_them() -> None:
    before = reading()
    noise = seed_noise(before.losses)
    assert noise == pytest.approx(0.05 * sqrt(2 / 40), rel=0.5)
    near, far = reading(0.5, off=noise), reading(0.5, off=5 * noise)
    assert judged(near, before, "approximate").verdict == "better"
    assert judged(far, before, "approximate").verdict == "different"
    late = reading(0.5, off=0.0)  # the first step is right, and the others are not
    late.losses = [late.losses[0], *(v + 5 * noise for v in late.losses[1:])]
    assert judged(late, before).verdict == "different"


def test_an_exact_change_keeps_the_first_step() -> None:
    before, wrong = reading(), reading(0.5)
    wrong.norms = [1.2, *wrong.norms[1:]]
    wrong.losses = [v + 1e-6 for v in wrong.losses]
    assert "first gradient" in judged(wrong, before).reason
    assert judged(wrong, before, "approximate").verdict == "better"
    wrong.losses = [float("nan"), *wrong.losses[1:]]
    assert judged(wrong, before, "approximate").verdict == "different"


def test_drift_counts_only_where_it_could_be_why() -> None:
    before = reading()
    before.seconds[-1] *= 1.03
    assert judged(reading(0.99), before).drifted
    assert judged(reading(0.3), before).verdict == "better"
    assert judged(reading(3.0), before).verdict == "worse"


def test_a_plan_that_runs_is_better_than_one_that_does_not() -> None:
    failed = Reading(refused="out of memory: tried to allocate 3 GiB")
    found = judged(reading(), failed)
    assert found.verdict == "better" and "out of memory" in found.reason
    assert judged(failed, reading()).verdict == "refused"
    assert judged(Reading(refused="not done within 3 s"), reading()).verdict == "cut"


def test_kinds_are_read_from_techniques_and_keys(plan: Plan, change: Change) -> None:
    assert kind_of(plan, change(plan, "+full_checkpoint", "batch.micro_sequences=2")) == "exact"
    assert kind_of(plan, change(plan, "+full_checkpoint", "+bf16_autocast")) == "approximate"
    assert kind_of(plan, change(plan, "+z_loss")) == "learning"
    assert kind_of(change(plan, "+tied_embeddings"), plan) == "learning"
    assert kind_of(plan, change(plan, "optimizer.lr=0.1", "+full_checkpoint")) == "learning"
    assert kind_of(plan, change(plan, "name=another", "eval.tokens=128")) == "exact"
