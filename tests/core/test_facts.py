"""The facts of a message are found as words of their own, and in their order."""

import pytest
from facts import begins, in_order, tells

SEED = "cannot resume: seed was 3 and is now 4.\n  try: seed=5 (it took 1,003 B, or 2.5)"


def test_facts_are_found_in_any_wording() -> None:
    assert tells(SEED, "seed", 3, 4) and tells(SEED, "1,003 B", 2.5) and tells(SEED, "(it")


@pytest.mark.parametrize(
    "facts",
    [(4, 3), ("see",), ("eed",), ("003",), ("1",), ("2",), (4, 5), ("seed", 5, "seed")],
)
def test_a_part_of_a_word_another_order_or_another_line_is_no_fact(facts: tuple[object]) -> None:
    assert not tells(SEED, *facts)


def test_a_pattern_has_a_fact_at_least() -> None:
    with pytest.raises(AssertionError):
        in_order()


def test_a_command_begins_with_its_words() -> None:
    assert begins("rm -r /a && x", "rm", "-r", "/a", "&&")
    assert not begins("rm -r /ab && headrace", "rm", "-r", "/a", "&&")
    assert not begins("then rm -r /a", "rm") and not begins("rm", "rm", "-r")
