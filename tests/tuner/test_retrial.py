"""What a run of the tuner knows, and what it measures again at the end, by hand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.statistics import Interval
from headrace.plan.plan import Plan
from headrace.tuner import retrial
from headrace.tuner.judge import Compared, Rules
from headrace.tuner.paired_blocks import ACCEPT, LOOK
from headrace.tuner.path import Target
from headrace.tuner.pool import Pool
from headrace.tuner.proposals import Sources
from headrace.tuner.running import Tuning, TurnedDown
from headrace.tuner.store import Store
from headrace.tuner.trial_row import TrialRow
from headrace.tuner.tune import _TuningLoop

GAIN, LOSS = Interval(1.2, 1.25, 1.3, 12), Interval(0.7, 0.8, 0.9, 12)
NAMES = ("fused_rope", "fused_swiglu", "fused_rms_norm")


def kept(number: int, value: float, **how: Any) -> TrialRow:
    """A row of the path that stays, on few steps."""
    ratio = Interval(value - 0.01, value, value + 0.01, 12)
    given = {
        "stage": "accept",
        "ratio": ratio,
        "steps": 12,
        "before_s": 1.0,
        "after_s": 0.9,
        "provisional": True,
        "memory": 1.0,
    } | how
    return TrialRow(number, (f"+{NAMES[number - 1]}",), "kept", "better", **given)


@pytest.fixture
def made(Machine: Any, plan: Plan, change: Callable[..., Plan]) -> Callable[..., Any]:
    """Return a function that makes a run of stacked plans with rows kept and pairs faked."""

    def make(
        *steps: TrialRow, minutes: float = 100.0, aim: str = "time", kind: type[Tuning] = Tuning
    ) -> Any:
        machine = Machine({})
        run: Any = kind(
            plan,
            Rules(device="cuda", aim=aim),
            minutes,
            machine.measure,  # type: ignore[arg-type]
            Store(None, {}, machine.clock),
            lambda line: None,
            machine.clock,
        )
        plans = [plan]
        for name in NAMES:
            plans.append(change(plans[-1], f"+{name}"))
        run.proposals = [machine.proposal(one, None) for one in plans]
        run.start, run.path, run.first_s = run.proposals[0], list(steps), 1.0
        run.pool = Pool(plan, run.proposals[len(steps)])
        run.kept_of = {n + 1: (run.proposals[n], run.proposals[n + 1]) for n in range(len(steps))}
        run.asked, run.found = [], Compared("better", "won", ratio=GAIN, steps=ACCEPT.timed)

        def pair(before: Any, after: Any, **how: Any) -> Compared:
            run.asked.append((run.proposals.index(before), run.proposals.index(after)))
            return run.found

        run.pair = pair
        return run

    return make


def test_the_largest_gain_is_timed_again_first(made: Callable[..., Any]) -> None:
    run = made(kept(1, 1.1), kept(2, 1.3), kept(3, 1.2))
    retrial.provisional(run)
    assert run.asked == [(1, 2), (2, 3), (0, 1)]
    assert not any(step.provisional for step in run.kept)
    run = made(kept(1, 1.1, memory=0.7), kept(2, 1.3, memory=0.9), aim="memory")
    retrial.provisional(run)
    assert run.asked == [(0, 1), (1, 2)]


def test_what_does_not_win_again_is_undone_unless_others_stand_on_it(
    made: Callable[..., Any],
) -> None:
    """What was measured of it is of the plan with it; what lies behind is the best again."""
    run = made(kept(1, 1.1), kept(2, 1.3, before_s=0.8))
    run.found = Compared("worse", "lost", ratio=LOSS, steps=ACCEPT.timed, before_s=0.7)
    run.target = run.total = Target(GAIN, True, 1.0, 0.8)
    retrial.provisional(run)
    assert [step.number for step in run.kept] == [] and run.asked == [(1, 2), (0, 1)]
    assert run.pool.best is run.proposals[0] and run.target is None and run.total is None
    assert run.pool.best_s == 0.7
    run = made(kept(1, 1.3), kept(2, 1.1, provisional=False))
    run.found = Compared("worse", "lost", ratio=LOSS, steps=ACCEPT.timed)
    retrial.provisional(run)
    (first, _) = run.kept
    assert first.provisional and "later changes stand on it" in first.reason
    assert first.ratio == LOSS and run.pool.best is run.proposals[2]


def test_what_was_undone_meanwhile_is_not_timed(made: Callable[..., Any]) -> None:
    run = made(kept(1, 1.1), kept(2, 1.3))
    whole = run.pair

    def pair(before: Any, after: Any) -> Compared:
        run.undo(run.path, "it was no gain")
        return whole(before, after)

    run.pair, run.found = pair, Compared("cut", "late")
    retrial.provisional(run)
    assert run.asked == [(1, 2)]


@pytest.mark.parametrize("how", [{"drifted": True}, {"steps": ACCEPT.timed - 1}, {"ratio": None}])
def test_what_says_too_little_leaves_it_as_it_was(
    made: Callable[..., Any], how: dict[str, Any]
) -> None:
    run = made(kept(1, 1.1))
    run.found = Compared("worse", "lost", **{"ratio": LOSS, "steps": ACCEPT.timed} | how)
    retrial.provisional(run)
    assert run.path == [kept(1, 1.1)] and run.asked


@pytest.mark.parametrize(("steps", "known"), [(LOOK, True), (LOOK - 1, False)])
def test_the_whole_way_is_known_by_a_look_at_least(
    made: Callable[..., Any], steps: int, known: bool
) -> None:
    run = made(kept(1, 1.1), kept(2, 1.3))
    run.found = Compared("better", "won", ratio=GAIN, steps=steps)
    retrial.time_first_beside_best(run)
    assert run.asked == [(0, 2)] and run.total == (GAIN if known else None)


def test_the_whole_way_is_left_out_where_it_says_nothing_or_does_not_fit(
    made: Callable[..., Any],
) -> None:
    for change in ({"minutes_s": 0.0}, {"first_s": None}, {"path": [kept(1, 1.1)]}):
        run = made(kept(1, 1.1), kept(2, 1.3))
        vars(run).update(change)
        retrial.time_first_beside_best(run)
        assert not run.asked
    run = made(kept(1, 1.1), kept(2, 1.3), minutes=1.0)
    run.ready_s = [30.0, 61.0]
    retrial.time_first_beside_best(run)
    assert not run.asked


# --- what a run knows -------------------------------------------------------------------------


def test_two_plans_share_a_process_where_both_fit(made: Callable[..., Any]) -> None:
    run = made()

    def needs(peak_bytes: float) -> Any:
        memory = SimpleNamespace(peak_bytes=peak_bytes, capacity_bytes=100.0)
        return SimpleNamespace(prediction=SimpleNamespace(memory=memory))

    assert run.together(needs(50.0), needs(40.0)) and not run.together(needs(50.0), needs(41.0))


def test_minutes_that_would_do_are_more_than_there_are(made: Callable[..., Any]) -> None:
    run = made(minutes=5.0)
    assert run.minutes_for(90.0, 210.0, 0.5) == 10
    assert run.minutes_for(30.0, 0.0, 1.0) == 6
    assert run.minutes_for(540.0, 0.0, 1.0) == 12, "three quarters are the most for one"


def test_one_change_that_stayed_was_the_whole_way(made: Callable[..., Any]) -> None:
    one, two = made(kept(1, 1.1)), made(kept(1, 1.1), kept(2, 1.3))
    assert one.tuned(interrupted=False).whole and not two.tuned(interrupted=False).whole
    two.total = GAIN
    found = two.tuned(interrupted=False)
    assert found.whole and found.ratio == GAIN


def test_the_target_is_what_went_to_it_or_else_a_product(made: Callable[..., Any]) -> None:
    learned = kept(2, 1.3, stage="learning", provisional=False, after_s=50.0)
    run = made(kept(1, 1.1), learned, aim="quality")
    found = run.to_target()
    assert found is not None and not found.whole and found.ratio.value == pytest.approx(1.43)
    assert found.after_s == 50.0 and found.before_s == pytest.approx(71.5)
    run.went_whole = True  # and gave no ratio
    run.missed = "the target was missed"
    assert run.to_target() is None
    one, two = run.tuned(interrupted=False).path
    assert one.provisional and "the target was missed" in one.reason
    assert two == learned, "it was measured by its own runs"


def test_the_best_plan_is_as_fast_as_it_was_last_measured(made: Callable[..., Any]) -> None:
    run = made(kind=_TuningLoop)
    run.pool.best_s, one = 1.0, run.proposals[1]
    run.follow(one, Compared("worse", "", ratio=LOSS, before_s=0.5, after_s=0.6))
    assert run.pool.best_s == 0.5 and run.first_s == 1.0
    assert run.pool.lost == {(f"+{NAMES[0]}",)} and not run.pool.cut
    run.follow(one, Compared("worse", "", before_s=9.0, drifted=True))
    assert run.pool.best_s == 0.5


def test_what_was_cut_off_is_late_and_has_not_lost(made: Callable[..., Any]) -> None:
    run = made(kind=_TuningLoop)
    run.follow(run.proposals[2], Compared("cut", ""))
    assert run.pool.cut == {f"+{name}" for name in NAMES[:2]} and not run.pool.lost


def test_a_prediction_that_fails_is_told_once(made: Callable[..., Any]) -> None:
    run = made(kind=_TuningLoop)
    failed = {("+fused_rope",): "it broke"}
    run.sources = Sources(lambda p: (run.start, []), lambda p: [], lambda p: [], failed=failed)
    run.ask()
    failed["+fused_swiglu",] = "so did it"
    run.ask()
    assert [(step.verdict, step.reason) for step in run.path] == [
        ("refused", "it broke"),
        ("refused", "so did it"),
    ]


@pytest.mark.parametrize(
    ("ratio", "beside", "minutes", "aim", "tried"),
    [
        (1.5, 0, 100.0, "time", True),
        (1.5, 0, 100.0, "memory", False),
        (1.5, 0, 0.0, "time", False),
        (1.2, 0, 100.0, "time", False),  # as fast as the best, which gained as much
        (1.5, 1, 100.0, "time", False),  # the best itself turned it down
    ],
    ids=["faster", "for memory", "no time", "no faster", "beside the same"],
)
def test_the_fastest_that_was_turned_down_is_tried_beside_the_best(
    made: Callable[..., Any], ratio: float, beside: int, minutes: float, aim: str, tried: bool
) -> None:
    """Check that what was kept is not slower and worse than what was turned down."""
    run = made(kept(1, 1.2), minutes=minutes, aim=aim)
    slow, fast = run.proposals[2], run.proposals[3]
    run.turned_down = [
        TurnedDown(slow, run.proposals[beside], 1.1),
        TurnedDown(fast, run.proposals[beside], ratio),
    ]
    retrial.fastest_turned_down(run)
    assert run.asked == ([(1, 3)] if tried else [])
    assert (run.pool.best is fast) == tried
    assert [row.verdict for row in run.path] == (["kept", "kept"] if tried else ["kept"])


def test_what_is_turned_down_again_changes_nothing(made: Callable[..., Any]) -> None:
    run = made(kept(1, 1.2))
    run.turned_down = [TurnedDown(run.proposals[3], run.proposals[0], 1.5)]
    run.found = Compared("different", "it learns less", ratio=GAIN, steps=ACCEPT.timed)
    retrial.fastest_turned_down(run)
    assert run.pool.best is run.proposals[1]
    assert [row.verdict for row in run.path] == ["kept", "reverted"]
