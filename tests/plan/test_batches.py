"""Count what is read per step where the batch grows: compare with the steps one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan.batches import BatchStages

COUNTS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(lengths=COUNTS)
def test_stages_count_as_their_steps_do(lengths: list[tuple[int, int]]) -> None:
    """Some stages have no steps, as of a ramp that is shorter than its stages."""
    firsts = [sum(steps for steps, _ in lengths[:n]) for n in range(len(lengths))]
    stages = BatchStages(tuple(zip(firsts, (count for _, count in lengths), strict=True)))
    steps = [count for many, count in lengths[:-1] for _ in range(many)] + [lengths[-1][1]] * 6
    assert [stages.at(step) for step in range(len(steps))] == steps
    assert [stages.before(step) for step in range(len(steps))] == [
        sum(steps[:step]) for step in range(len(steps))
    ]
    places = [step for step, count in enumerate(steps) for _ in range(count)]
    assert [stages.step_of(place) for place in range(len(places))] == places
    assert [stages.steps_to(total) for total in range(len(places))] == [
        0,
        *(place + 1 for place in places[: len(places) - 1]),
    ]
    assert stages.whole(5) * lengths[-1][1] == (
        stages.before(5) if len(lengths) > 1 else sum(steps[:5])
    )
    assert stages.each(lambda count: 2 * count).before(5) == 2 * stages.before(5)
