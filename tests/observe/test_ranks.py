"""Ranks are compared by what they take for their own work."""

from types import SimpleNamespace
from typing import Any

from headrace.observe.ranks import OwnTimes, between_ranks, between_stages


def test_ranks_are_compared_by_the_steps_that_all_have() -> None:
    even, late = dict.fromkeys(range(9), 1.0), dict.fromkeys(range(2, 12), 1.5)
    found = between_ranks([even, late, even])
    assert found is not None and found["steps"] == 7 and found["own_s"] == [1.0, 1.5, 1.0]
    assert (found["late_s"], found["waited_s"], found["last"]) == (0.5, [0.5, 0.0, 0.5], 1)
    assert found["last_share"] == 1.0
    apart = between_ranks([even, {0: 2.0, 1: 2.0}, {0: 5.0, 1: 5.0}])
    assert apart is not None and apart["late_s"] == 3.5, "behind the median of the others"
    assert apart["waited_s"] == [4.0, 3.0, 0.0]
    once = between_ranks([even, {**even, 4: 9.0}])
    assert once is not None and once["late_s"] == 0.0, "a rank that was disturbed once is not late"
    assert between_ranks([even]) is None and between_ranks([even, {20: 1.0}]) is None


class Two:
    """Be the second of two ranks of a pipeline, whose neighbour answers in its place too."""

    ranks = 2

    def __init__(self, other: list[Any]) -> None:
        self.other = other

    def size(self, axis: str) -> int:
        return 2 if axis == "pipeline" else 1

    def place(self, axis: str) -> int:
        return 1

    def gather(self, value: Any) -> list[Any]:
        return [self.other, value]


def test_stages_are_compared_by_their_passes_alone() -> None:
    own = OwnTimes()
    for step, more in ((1, {}), (2, {}), (3, {"traced": 1})):
        row = {"step": step, "compile_s": 0.0, "input_s": 9.0, "forward_s": 1.0, "backward_s": 2.0}
        own.saw(row | more)
    own.saw({"step": 4, "compile_s": 1.0, "input_s": 0.0, "forward_s": 1.0, "backward_s": 1.0})
    model = SimpleNamespace(blocks={"3": None}, head=object())
    found = own.compared(Two([[], 0, False, 3, [[1, 6.0], [2, 8.0], [3, 1.0]]]), model, 4.0, 0.2)
    assert found == {
        "ranks": None,
        "stages": {
            "steps": 2,
            "own_s": [7.0, 3.0],
            "layers": [3, 1],
            "micro_batches": 4.0,
            "idle_share": 0.2,
            "head": 1,
        },
    }


def test_replicas_of_a_stage_are_one() -> None:
    each = [(0, 2, {1: 1.0}), (0, 2, {1: 3.0}), (1, 2, {1: 4.0})]
    found = between_stages(each)
    assert found == {"steps": 1, "own_s": [2.0, 4.0], "layers": [2, 2]}
    assert between_stages([(0, 2, {1: 1.0}), (1, 2, {2: 1.0})]) is None
