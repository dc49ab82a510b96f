"""The order of plans that wait: what is promised, what was lost, what is only guessed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.assemble.context import choose_device, make_context
from headrace.cli.catalogue import catalogue
from headrace.costs.machine import Machine as Rates
from headrace.plan.changes import difference
from headrace.plan.plan import Plan
from headrace.tuner.effects import changes_architecture
from headrace.tuner.pool import NEAR, Pool
from headrace.tuner.proposals import learning_order, sources, with_batches

KNOWN = catalogue()
Change = Callable[..., Plan]
A, B, C = "+fused_rope", "+fused_swiglu", "+fused_rms_norm"


class Made:
    """A pool of the plan, whose steps are predicted to take a second."""

    def __init__(self, machine: Any, plan: Plan, change: Change, **how: Any) -> None:
        self.machine, self.plan, self.change = machine, plan, change
        self.pool = Pool(plan, machine.proposal(plan, how.pop("first_s", 1.0)), **how)

    def proposal(self, words: str, step_s: float | None = None) -> Any:
        """The plan with changes, and what is predicted of it."""
        return self.machine.proposal(self.change(self.plan, *words.split()), step_s)

    def add(self, *, whole: bool = False, **plans: float | None) -> list[Any]:
        """Letters of changes -> seconds; the proposals, which wait now."""
        words = {"A": A, "B": B, "C": C}
        found = [
            self.proposal(" ".join(words[letter] for letter in name), step_s)
            for name, step_s in plans.items()
        ]
        self.pool.add(found, whole=whole)
        return found

    def order(self) -> list[Any]:
        """As they are taken."""
        found = []
        while (one := self.pool.take()) is not None:
            found.append(one)
        return found


@pytest.fixture
def made(Machine: Any, plan: Plan, change: Change) -> Callable[..., Made]:
    return lambda **how: Made(how.pop("machine", None) or Machine({}), plan, change, **how)


def test_what_learns_otherwise_and_what_was_seen_does_not_wait(made: Callable[..., Made]) -> None:
    at = made()
    at.pool.add([at.proposal("+muon", 0.5), at.proposal("optimizer.lr=0.5", 0.5)], whole=True)
    at.pool.add([at.machine.proposal(at.plan, 0.5)], whole=True)
    assert not at.pool.waiting
    at.add(A=0.9)
    at.add(A=0.8)
    assert len(at.pool.waiting) == 1


def test_a_small_gain_is_measured_and_none_is_not(made: Callable[..., Made]) -> None:
    at = made()
    a, b, _, _, _ = at.add(A=0.99, B=0.9, C=1.05, AB=1.02, BC=0.998)
    assert at.order() == [b, a] and len(at.pool.waiting) == 3 and not at.pool.worth()
    at = made(memory=True, machine=None)
    at.machine.bytes = {"fused_rope": 0.999, "fused_swiglu": 0.9}
    _, b = at.add(A=0.5, B=1.0)
    assert at.order() == [b], "a faster step is not what is asked for"


def test_of_equals_what_changes_less_comes_first(made: Callable[..., Made]) -> None:
    at = made()
    two, one = at.add(AB=0.9, C=0.9)
    assert at.order() == [one, two]


def test_single_changes_of_the_plan_before_may_come_again(made: Callable[..., Made]) -> None:
    """Check that single changes and whole plans without a time return after a plan is kept."""
    at = made()
    (kept,) = at.add(A=0.5)
    at.add(B=0.6)
    at.add(whole=True, C=0.7)
    at.add(whole=True, BC=None)
    assert at.pool.take() is kept
    at.pool.keep(kept, 0.5)
    assert len(at.pool.waiting) == 1
    at.add(B=0.4, BC=None)
    assert len(at.pool.waiting) == 3


def test_what_lost_beside_another_plan_promises_less(made: Callable[..., Made]) -> None:
    at = made()
    at.pool.lose(at.proposal(A))
    a, b = at.add(A=0.9, B=0.905)
    assert at.order() == [b, a]
    at = made(first_s=None, guess_s=lambda plan: 0.5 if "fused_rope" in plan.techniques else 1.0)
    at.pool.lose(at.proposal(A))
    a, b = at.add(A=None, B=None)
    assert at.order() == [b, a], "of unknown time, and foreseen by the ledger to be much faster"


def test_what_shares_a_word_with_what_was_cut_comes_last(made: Callable[..., Made]) -> None:
    """Check that after AB was cut off beside the best plan A, proposals with B come last."""
    at = made()
    (best,) = at.add(A=0.8)
    at.pool.take()
    at.pool.keep(best, 0.8)
    ab, ac, abc = at.add(AB=0.5, AC=0.7, ABC=0.4)
    at.pool.note_cut_off(ab)
    assert at.pool.cut == {B}
    assert at.order()[0] is ac
    assert at.pool.take() is None and abc.prediction.time.step_s == 0.4


def test_a_guess_counts_less_for_what_compiles_and_for_what_rounds(
    made: Callable[..., Made],
) -> None:
    def guess_s(plan: Plan) -> float:
        times = {"torch_compile": 0.5, "bf16_autocast": 0.6, "fused_rope": 0.8}
        found = 1.0
        for name in plan.techniques:
            found *= times.get(name, 1.0)
        return found

    at = made(first_s=None, guess_s=guess_s)
    both = [at.proposal("+torch_compile"), at.proposal("+bf16_autocast")]
    (plain,) = at.add(A=None)
    at.pool.add(both, whole=False)
    assert at.order() == [plain, *both]


@pytest.mark.parametrize(
    ("words", "fits", "waits"),
    [
        ("+full_checkpoint", "yes", False),
        ("+compile_cache", "yes", False),
        ("+full_checkpoint", "tight", True),
        ("+bf16_autocast", "yes", True),  # for memory, and for time
        (f"+full_checkpoint {A}", "yes", True),
        ("+torch_compile", "yes", True),  # launches, not compilation alone
        ("batch.micro_sequences=1", "yes", True),
    ],
)
def test_what_buys_memory_alone_is_left_out_where_there_is_plenty(
    made: Callable[..., Made], words: str, fits: str, waits: bool
) -> None:
    at = made()
    at.pool.best.prediction.memory.fits = fits  # type: ignore[misc]
    one = at.proposal(words, 0.9)
    at.pool.add([one], whole=True)
    assert at.order() == [one] * waits


def test_what_takes_something_out_may_buy_time(made: Callable[..., Made]) -> None:
    at = made()
    best = at.proposal(A, 1.0)
    at.pool.keep(best, 1.0)
    one = at.proposal("+full_checkpoint", 0.9)
    at.pool.add([one], whole=True)
    assert at.order() == [one]


def test_memory_is_worth_no_more_for_a_faster_step(made: Callable[..., Made]) -> None:
    at = made(memory=True)
    at.machine.bytes = {"fused_rope": 0.5, "fused_swiglu": 0.4}
    a, b = at.add(A=0.5, B=1.0)
    assert at.pool.promise(a) == pytest.approx(2.0) and at.pool.promise(b) == pytest.approx(2.5)
    slow = at.proposal(C + " " + A, 4.0)
    assert at.pool.promise(slow) == pytest.approx(0.5)
    assert at.order() == [b, a]


def test_a_prediction_is_corrected_by_the_measured_plan_that_is_nearest(
    made: Callable[..., Made],
) -> None:
    """In words of either that the other has not; of several that are as near by the median."""
    at = made()
    at.pool.best_s = 1.0
    a, b, c, abc = at.add(A=1.0, B=1.0, C=1.0, ABC=1.0)
    for proposal, measured_s in ((abc, 4.0), (a, 2.0)):
        at.pool.correct(proposal, measured_s)
    two = at.proposal(f"{A} {B}", 1.0)
    assert at.pool.promise(two) == pytest.approx(1 / 3), "one word from both"
    assert at.pool.promise(a) == pytest.approx(1 / 2)
    assert at.pool.promise(b) == pytest.approx(1 / 3), "two words from both"
    at.pool.correct(b, 1.0)
    at.pool.correct(c, 8.0)
    start = at.machine.proposal(at.plan, 1.0)
    assert at.pool.promise(start) == pytest.approx(1 / 2), "the median of 2, 1 and 8"


def ordered(plan: Plan, change: Change, machine: Any, every: list[str], step_s: Any) -> list[str]:
    """Changes of learning as they are tried."""

    def candidate(words: str) -> Any:
        changes = tuple(words.split())
        made = machine.proposal(change(plan, *changes), None)
        return SimpleNamespace(changes=changes, plan=made.plan, prediction=made.prediction)

    start = machine.proposal(plan, None)
    found = sorted(map(candidate, every), key=lambda one: learning_order(start, one, step_s))
    return [" ".join(one.changes) for one in found]


def test_what_promises_the_target_soonest_comes_first_of_what_learns_otherwise(
    Machine: Any, plan: Plan, change: Change
) -> None:
    """Then keys of the recipe, what comes to a loss in fewer tokens, and what changes less."""
    half, twice = f"batch.tokens={plan.batch.tokens // 2}", f"batch.tokens={plan.batch.tokens * 2}"
    rate = "optimizer.lr=0.5"
    every = ["+gqa", "+z_loss", rate, twice, half, "+muon", f"+muon {half}", f"+muon {twice}"]

    def bound_by_products(run: Plan) -> float:
        return run.batch.tokens * (1.1 if "muon" in run.techniques else 1.0)

    def bound_by_launches(run: Plan) -> float:
        return 1.5 if "muon" in run.techniques else 1.0

    found = ordered(plan, change, Machine({}), every, bound_by_products)
    assert found[:5] == [f"+muon {half}", "+muon", half, f"+muon {twice}", rate]
    assert found[-1] == twice
    found = ordered(plan, change, Machine({}), every, bound_by_launches)
    assert found[:2] == [twice, f"+muon {twice}"] and found[-1] == f"+muon {half}"
    assert found.index(rate) < found.index("+gqa")
    high, low = (f"optimizer.lr={plan.optimizer.lr * factor}" for factor in (2, 0.5))
    every = [f"+muon {low}", "+muon", f"+muon {high}", f"+muon {half} {high}", high]
    found = ordered(plan, change, Machine({}), every, bound_by_products)
    assert found == [f"+muon {half} {high}", f"+muon {high}", "+muon", f"+muon {low}", high]
    plan = plan.replaced(schedule={"steps": 400})
    long = f"+muon {half} schedule.steps=800"
    found = ordered(plan, change, Machine({}), [long, "+muon", rate], bound_by_products)
    assert found == ["+muon", rate, long]


def test_other_architectures_are_tried_where_they_are_asked_for(plan: Plan) -> None:
    """What keeps the model's parts (the optimizer, rates, batches, the schedule) always is."""
    context = make_context(plan, choose_device(plan))
    parts = (context, Rates.assumed("cpu"), KNOWN)
    plans = [sources("quality", *parts, asked).learning(plan) for asked in (False, True)]
    same, every = ({w for one in found for w in difference(plan, one.plan)} for found in plans)
    others = {"+stochastic_depth", "+short_convolution", "+sliding_window", "+gqa"}
    assert others <= every and not others & same
    kept = {"+muon", "+z_loss", "+document_packing", "+sequence_length_schedule"}
    assert kept | {f"batch.tokens={plan.batch.tokens // 2}"} <= same
    assert len(plans[0]) == sum(not changes_architecture(plan, one.plan) for one in plans[1])


def test_half_a_batch_comes_with_the_schedule_and_with_its_tokens(plan: Plan) -> None:
    plan = plan.replaced(
        goal={"minutes": 3},
        schedule={"steps": 400, "warmup_steps": 20},
        batch={"tokens": 64, "micro_sequences": plan.rows_per_step},
    )
    few = " batch.micro_sequences=0"
    long = "schedule.steps=800 schedule.warmup_steps=40"
    found = [" ".join(words) for words in with_batches(plan, [("+muon",)])]
    assert found == [
        f"+muon batch.tokens=32{few}",
        f"batch.tokens=32{few}",
        f"+muon batch.tokens=32{few} {long}",
        f"batch.tokens=32{few} {long}",
        "+muon batch.tokens=128 schedule.steps=200 schedule.warmup_steps=10",
        "batch.tokens=128 schedule.steps=200 schedule.warmup_steps=10",
    ]
    plan = plan.replaced(goal={"tokens": 6400}, schedule={"steps": None}, batch={"tokens": 64})
    assert with_batches(plan, []) == [("batch.tokens=32",), ("batch.tokens=128",)]


def test_of_nearly_equal_promises_the_fewest_changes_come_first(made: Callable[..., Made]) -> None:
    at = made()
    two, one, _ = at.add(AB=0.5, A=0.504, C=0.52)
    assert at.order()[:2] == [one, two]
    at = made(near=NEAR["cpu"])
    two, one, other = at.add(AB=0.5, A=0.55, C=0.9)
    assert at.order() == [one, other, two], "a CPU's predictions are less sure"


def test_what_matters_little_waits_for_what_nothing_is_known_of(
    made: Callable[..., Made],
) -> None:
    at = made()
    little, unknown, gains = at.add(A=0.99, B=None, C=0.9)
    assert at.pool.take(small=False) is gains and at.pool.take(small=False) is unknown
    assert at.pool.take(small=False) is None and at.pool.take() is little


def test_what_has_all_that_could_not_run_comes_last(made: Callable[..., Made]) -> None:
    at = made()
    ab, abc, a = at.add(AB=0.5, ABC=0.4, A=0.9)
    at.pool.refuse(ab)
    assert at.order() == [a, ab, abc]
