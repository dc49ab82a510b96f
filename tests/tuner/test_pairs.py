"""Two plans in turn: what their steps tell, and what a verdict is worth."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from numpy.random import default_rng

from headrace.assemble.kept_states import exchange, keep_alike, live, take_over
from headrace.core.errors import RefusalKind
from headrace.core.statistics import order_abba
from headrace.plan.plan import Plan
from headrace.train.guard import First, inspects
from headrace.train.train import step
from headrace.tuner import pairs
from headrace.tuner.effects import effect_of
from headrace.tuner.equality import STRETCH, STRETCHES
from headrace.tuner.judge import Compared, Rules, WorthMoreSteps, judge
from headrace.tuner.paired_blocks import FITS, STEADY, Limit, SampleSize
from headrace.tuner.pairs import SAME, measure_with, time_pair, visit
from headrace.tuner.readings import Reading, StepClock, opened, read
from headrace.tuner.worker import Worker

Change = Callable[..., Plan]
SMALL = SampleSize(warm=1, steps=1, rounds=1)
CUDA = Rules(device="cuda", precision="bf16")


def judged(after: Reading, before: Reading, kind: Any = "exact", rules: Rules = CUDA) -> Compared:
    """Return the verdict on a reading beside the one before it."""
    return judge(replace(after, beside=before), kind, rules)


def reading(step_s: float = 1.0, off: float = 0.0, seed: int = 0, **more: Any) -> Reading:
    """Return a reading of four blocks and of 40 losses that fall and scatter."""
    draw = default_rng(seed)
    losses = [6 - 0.02 * i + off + 0.05 * draw.standard_normal() for i in range(40)]
    return Reading(
        seconds=[step_s * (1 + 0.001 * i) for i in range(4)],
        losses=losses,
        norms=[1.0] * 40,
        **more,
    )


def test_two_plans_in_one_process_compute_the_same(plan: Plan, change: Change) -> None:
    """Real steps of both, here: bit-equal losses where only memory is saved, others where not."""
    found = time_pair(plan, change(plan, "+full_checkpoint"), size=SMALL)
    assert not found.refused and found.beside is not None
    n = len(found.losses)  # those at the first weights, the first that learns, 3 and 2 of a run
    assert n == SAME + 4 and found.losses == found.beside.losses[:n]
    assert found.firsts == found.beside.firsts and len(found.firsts) == SAME
    assert len({first.loss for first in found.firsts}) == SAME, "each is of another batch"
    assert found.norms == found.beside.norms[:n] and len(found.seconds) == found.steps == 2
    assert list(found.evidence) == ["full_checkpoint"]
    other = time_pair(plan, change(plan, "+z_loss", "techniques.z_loss.weight=0.1"), size=SMALL)
    assert other.beside is not None and other.losses != other.beside.losses
    alone = visit(plan, blocks=2, size=SMALL, share=1.0)
    assert alone.losses == found.beside.losses[: SAME + 4] and alone.steps == 2
    assert len(alone.seconds) == 2 and alone.firsts == found.firsts


class Trains:
    """Has both train to so many steps."""

    aim = "time"

    def __call__(self, reading: Reading) -> bool:
        return True

    asks_stretches = False

    def by_stretches(self, reading: Reading) -> bool:
        return False

    def train_to(self, reading: Reading) -> int:
        return 60


def test_two_plans_train_on_where_that_is_to_show_something(plan: Plan, change: Change) -> None:
    """Real steps of both, here: untimed, of the same batches, and none where there is no time."""
    size = replace(SMALL, worth=Trains())
    found = time_pair(plan, change(plan, "+full_checkpoint"), size=size)
    assert found.beside is not None and not found.refused and found.untrained_s == 0
    assert found.losses == found.beside.losses and len(found.losses) == 60
    timed, steps = len(found.seconds), found.steps
    found = time_pair(plan, change(plan, "+full_checkpoint"), size=size, limit=Limit(1e-6))
    assert found.beside is not None and 0 < len(found.losses) < 60 and found.untrained_s > 0
    assert (timed, steps) > (len(found.seconds), found.steps)


def test_a_plan_takes_over_what_another_has_come_to(plan: Plan, change: Change) -> None:
    """Its next step is the other's to the bit; one that keeps other states cannot."""
    for words in ((), ("+muon", "+weight_averaging"), ("+bf16_parameters",)):
        own = change(plan, *words) if words else plan
        with opened(own, text=True) as (one, micros), opened(own, text=True) as (two, _):
            for index in range(3):
                step(one, micros(index), index)
            step(two, micros(5), 0)
            assert keep_alike(two, one)
            take_over(two, one)
            given = {name: tensor.clone() for name, tensor in live(one)}
            assert given and all(torch.equal(t, given[name]) for name, t in live(two))
            losses = [step(build, micros(3), 3)[:2].tolist() for build in (one, two)]
            assert losses[0] == losses[1]
            assert all(torch.equal(t, dict(live(one))[name]) for name, t in live(two))
            step(two, micros(4), 4)
            each = [{name: t.clone() for name, t in live(build)} for build in (two, one)]
            values = [{who: k.values() for who, k in b.state.items()} for b in (one, two)]
            exchange(one, two)
            for build, before in zip((one, two), each, strict=True):
                assert all(torch.equal(t, before[name]) for name, t in live(build))
            kept = [{who: k.values() for who, k in build.state.items()} for build in (one, two)]
            assert kept == values[::-1] and (kept[0] != kept[1] or not kept[0])
    for words in (("+bf16_parameters",), ("+muon",), ("+dynamic_batch",)):  # keeps no tensor
        other = change(plan, *words)
        with opened(plan, text=True) as (one, micros), opened(other, text=True) as (two, _):
            step(one, micros(0), 0)
            step(two, micros(1), 0)
            assert not keep_alike(two, one)


def test_steps_whose_time_is_known_may_take_more_of_a_limit(
    plan: Plan, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_s: list[float] = []
    for name in ("take_blocks", "train_on"):
        monkeypatch.setattr(pairs, name, lambda *given: left_s.append(given[3]()))
    time_pair(plan, change(plan, "+full_checkpoint"), size=SMALL, limit=Limit(1000.0))
    assert left_s[1] - left_s[0] == pytest.approx(1000 * (STEADY - FITS), abs=10)


class Stretches(Trains):
    """Has both train in stretches from one state."""

    asks_stretches = True

    def by_stretches(self, reading: Reading) -> bool:
        return reading.shares_state

    def train_to(self, reading: Reading) -> int:
        return 0 if reading.lags else len(reading.losses) + STRETCH * STRETCHES


def test_an_exact_change_is_behind_by_nothing_in_stretches(plan: Plan, change: Change) -> None:
    size = replace(SMALL, worth=Stretches())
    found = time_pair(plan, change(plan, "+full_checkpoint"), size=size)
    assert found.beside is not None and not found.refused
    assert found.lags == [0.0] * STRETCHES and found.losses == found.beside.losses[:-1]
    apart = time_pair(plan, change(plan, "+z_loss", "techniques.z_loss.weight=0.1"), size=size)
    assert apart.beside is not None and len(apart.lags) == STRETCHES and all(apart.lags)
    other = time_pair(plan, change(plan, "+muon"), size=size)
    assert not other.refused and not other.lags and len(other.losses) >= STRETCH * STRETCHES


def test_what_shows_itself_only_once_weights_have_moved_is_in_force(
    plan: Plan, change: Change
) -> None:
    """The first batches have a learning rate of 0, so no weight has bits beyond bf16 by then."""
    found = visit(change(plan, "+bf16_parameters"), blocks=1, size=SMALL, share=1.0)
    assert not found.refused and "weights have bits beyond" in found.evidence["bf16_parameters"]


def test_a_plan_has_the_threads_that_a_technique_of_it_sets(plan: Plan, change: Change) -> None:
    other = 2 if torch.get_num_threads() == 1 else 1
    changed = change(plan, "+cpu_threads", f"techniques.cpu_threads.threads={other}")
    found = time_pair(plan, changed, size=SMALL)
    assert not found.refused and f"{other} threads" in found.evidence["cpu_threads"]


def test_the_first_batches_are_read_at_the_first_weights(plan: Plan) -> None:
    """Without an update each comes to what it comes to as the first of all."""
    found = visit(plan, blocks=1, size=SMALL, share=1.0)
    with opened(plan, text=True) as (build, micros):
        for index, first in enumerate(found.firsts):
            seen: list[First] = []
            step(build, micros(index), 0, inspects(seen.append, update=False))
            assert seen == [first]


def test_a_clock_says_how_long_the_device_was_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(0.02))
    clock = StepClock(torch.device("cuda"))
    assert clock.seconds() == [] and 0.02 <= clock.behind_s < 5


def test_compiled_code_is_shared_but_for_the_host_s_threads() -> None:
    """Check that torch compiles again for another number of threads, as `more_threads` needs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    seen, threads = torch._dynamo.utils.counters["stats"], torch.get_num_threads()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    try:
        for more, graphs in ((0, 1), (0, 1), (1, 2), (0, 2)):
            torch.set_num_threads(threads + more)
            torch.compile(step, backend="eager")(torch.ones(3))
            assert seen["unique_graphs"] == graphs
    finally:
        torch.set_num_threads(threads)
        torch._dynamo.reset()


def test_who_cannot_run_is_blamed(plan: Plan, change: Change) -> None:
    wrong = change(plan, "+cudnn_attention")
    found = time_pair(plan, wrong, size=SMALL)
    assert "NVIDIA" in found.refused and found.beside is not None and not found.beside.refused
    found = time_pair(wrong, plan, size=SMALL)
    assert found.beside is not None and "NVIDIA" in found.beside.refused


def test_plans_that_do_not_fit_together_take_turns_in_visits(plan: Plan, change: Change) -> None:
    """A B A; and the next pair begins where the last one ended."""
    asked: list[tuple[Any, Plan]] = []

    class Small(Worker):
        """Has no room for two."""

        def ask(self, what: Any, *plans: Plan, **how: Any) -> Reading:
            asked.append((what, plans[-1]))
            if what is time_pair:
                return Reading(
                    refused="out of memory: tried", refusal=RefusalKind.MEMORY, beside=Reading()
                )
            blocks = how["blocks"]
            step_s = 0.5 if plans[0] == fast else 1.0 if plans[0] == plan else 1.5
            return Reading([step_s] * blocks, losses=[6.0], steps=blocks * how["size"].steps)

    measure, fast = measure_with(Small(here=True)), change(plan, "+full_checkpoint")
    slow = change(plan, "+chunked_mlp")
    found = measure(plan, fast, size=SampleSize(), together=True, limit_s=60)
    assert [p for what, p in asked if what is visit] == [plan, fast, plan]
    assert found.seconds == [0.5] * 4 and found.beside is not None and found.steps == 56
    assert found.beside.seconds == [1.0] * 4
    measure(plan, slow, size=SampleSize(), together=False, limit_s=60)
    assert [p for _, p in asked[4:]] == [slow, plan]
    screened = SampleSize(worth=WorthMoreSteps("exact", CUDA))
    found = measure(plan, slow, size=screened, together=False, limit_s=60)
    assert [p for _, p in asked[6:]] == [plan, slow] and found.screened


@pytest.mark.slow
def test_a_pair_is_read_in_a_process_of_its_own(plan: Plan, change: Change) -> None:
    size = replace(SMALL, worth=WorthMoreSteps("exact", Rules()))  # which is sent there
    with Worker() as worker:
        measure = measure_with(worker)
        for together in (True, False):
            found = measure(
                plan, change(plan, "+full_checkpoint"), size=size, together=together, limit_s=120
            )
            assert not found.refused and found.beside is not None
            n = min(len(found.losses), len(found.beside.losses))
            assert n > 2 and found.losses[:n] == found.beside.losses[:n]


# --- verdicts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_s", "verdict"), [(0.9, "better"), (0.998, "undecided"), (1.1, "worse")]
)
def test_time_decides(step_s: float, verdict: str) -> None:
    found = judged(reading(step_s), reading())
    assert found.verdict == verdict and found.loss == 0.0
    assert found.ratio is not None and found.ratio.value == pytest.approx(1 / step_s)


def abba(gain: float, drift: float, noise: float = 0.0, seed: int = 0) -> tuple[Reading, Reading]:
    """Ten blocks of both on a device that gets slower by `drift` from end to end."""
    draw, sides = default_rng(seed), (reading(), reading())
    sides[0].seconds, sides[1].seconds = [], []
    for place, side in enumerate(order_abba(5)):
        pace = (1 + drift * place / 19) * (1 + noise * draw.standard_normal())
        sides[side == "B"].seconds.append(pace / (gain if side == "B" else 1))
    return sides


@pytest.mark.parametrize("drift", [0.05, -0.05, 0.3])
@pytest.mark.parametrize(
    ("gain", "verdict"), [(1.05, "better"), (1.0, "undecided"), (0.95, "worse")]
)
def test_a_drift_is_told_only_where_the_interval_cannot_decide(
    gain: float, verdict: str, drift: float
) -> None:
    """Pairs of neighbours A B B A cancel it, however large it is beside the gain that counts."""
    before, after = abba(gain, drift, noise=0.003)
    found = judged(after, before)
    assert found.verdict == verdict and found.ratio is not None
    assert found.ratio.value == pytest.approx(gain, abs=0.005)
    assert found.drifted == (verdict == "undecided") == ("not as fast" in found.reason)


def test_what_gains_nothing_is_rarely_kept_on_a_device_that_drifts() -> None:
    """Check that at most 9 of 300 pairs without gain win at 95%, with a drift of a tenth."""
    pairs = (abba(1.0, 0.1, 0.01, seed) for seed in range(300))
    kept = sum(judged(after, before).verdict == "better" for before, after in pairs)
    assert kept <= 9


@pytest.mark.parametrize(
    ("peak", "step_s", "verdict"),
    [
        (0.9, 1.0, "better"),
        (0.997, 1.0, "undecided"),
        (1.003, 1.0, "undecided"),
        (1.01, 1.0, "worse"),
        (0.9, 1.08, "better"),
        (0.9, 1.2, "worse"),
    ],
)
@pytest.mark.parametrize("counted", [True, False], ids=["measured", "foreseen"])
def test_less_memory_decides_where_it_costs_no_larger_share_of_time(
    peak: float, step_s: float, verdict: str, counted: bool
) -> None:
    """Half a percent counts; where a device counts nothing the predicted peaks tell."""
    before, after = reading(), reading(step_s)
    if counted:
        before.peak_bytes, after.peak_bytes = 1_000_000, round(1_000_000 * peak)
    after.beside = before
    peaks = (1e6, 2e6) if counted else (1e6, 1e6 * peak)
    found = judge(after, "exact", Rules(aim="memory", device="cuda", peaks=peaks))
    assert (found.verdict, found.memory) == (verdict, pytest.approx(peak))


@pytest.mark.parametrize(
    ("step_s", "slower", "capacity", "verdict", "says"),
    [
        (1.9, 1.0, 2e6, "better", "the peak is 0.200 times what it was (predicted 0.300)"),
        (2.1, 1.0, 2e6, "worse", "but a step takes 2.1 times as long as the first plan's, and 2"),
        (1.5, 1.5, 2e6, "worse", "takes 2.2 times as long"),  # with what was kept before
        (0.9, 3.0, 2e6, "better", "(predicted 0.300)"),
        (2.1, 1.0, 1.01e6, "better", "and the plan before leaves a long run no room: "),
    ],
)
def test_less_memory_is_not_worth_any_time(
    step_s: float, slower: float, capacity: float, verdict: str, says: str
) -> None:
    """However much smaller the peak is, a step stays within twice the first plan's."""
    before, after = reading(), reading(step_s)
    before.peak_bytes, after.peak_bytes, after.beside = 1e6, 2e5, before
    rules = Rules(
        aim="memory", device="cuda", peaks=(1e6, 3e5), slower=slower, capacity_bytes=capacity
    )
    found = judge(after, "exact", rules)
    assert found.verdict == verdict and says in found.reason


def test_a_first_look_that_may_hide_a_gain_is_worth_more_steps() -> None:
    worth, before = WorthMoreSteps("exact", CUDA), reading()
    before.seconds = [1.0] * 4
    for seconds, more in (
        ([0.99, 0.995, 1.0, 1.003], True),  # 1.003, and perhaps 1.013
        ([0.997] * 4, False),  # 1.003 for sure, which is less than counts
        ([0.98, 1.0, 1.01, 1.03], False),  # no gain in the middle
    ):
        after = reading()
        after.seconds = seconds
        assert worth(replace(after, beside=before)) == more, seconds


def test_a_plan_that_runs_is_better_than_one_that_does_not() -> None:
    failed = Reading(refused="out of memory: tried to allocate 3 GiB", refusal=RefusalKind.MEMORY)
    found = judged(reading(), failed)
    assert found.verdict == "better" and "out of memory" in found.reason
    assert judged(failed, reading()).verdict == "refused"
    late = Reading(refused="not done within 3 s", refusal=RefusalKind.TIME)
    assert judged(late, reading()).verdict == "cut"


def test_kinds_are_read_from_techniques_and_keys(plan: Plan, change: Change) -> None:
    assert effect_of(plan, change(plan, "+full_checkpoint", "batch.micro_sequences=2")) == "exact"
    assert effect_of(plan, change(plan, "+full_checkpoint", "+bf16_autocast")) == "approximate"
    assert effect_of(plan, change(plan, "+z_loss")) == "learning"
    assert effect_of(change(plan, "+tied_embeddings"), plan) == "learning"
    assert effect_of(plan, change(plan, "optimizer.lr=0.1", "+full_checkpoint")) == "learning"
    assert effect_of(plan, change(plan, "name=another", "eval.tokens=128")) == "exact"


@pytest.mark.parametrize(
    ("error", "poisoned"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
    ],
)
def test_a_full_memory_is_told_and_a_hosts_ends_its_process(
    error: Exception, poisoned: bool
) -> None:
    def what(found: Reading) -> None:
        raise error

    found = read(what)
    assert found.refusal is RefusalKind.MEMORY and found.poisoned is poisoned
