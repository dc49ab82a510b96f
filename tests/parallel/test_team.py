"""Updates that send something are staggered, each a stage behind the one that began before it."""

from collections.abc import Iterator

from headrace.parallel.team import stagger


def test_what_is_sent_travels_while_another_is_worked_on() -> None:
    done: list[str] = []

    def update(name: str) -> Iterator[None]:
        done.append(f"{name} is sent")
        yield
        done.append(f"{name} is made")
        yield
        done.append(f"{name} is taken")

    stagger(update(name) for name in "abc")
    assert done == [
        "a is sent",
        *("b is sent", "a is made"),
        *("c is sent", "b is made", "a is taken"),
        *("c is made", "b is taken"),
        "c is taken",
    ]


def test_updates_that_send_nothing_are_done_one_by_one() -> None:
    done: list[int] = []

    def update(number: int) -> Iterator[None]:
        done.append(number)
        yield from ()

    stagger(map(update, range(3)))
    assert done == [0, 1, 2]
