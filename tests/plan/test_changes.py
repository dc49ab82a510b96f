"""Changes of a plan in words: what they say makes the plan again."""

from pathlib import Path

import pytest
from facts import in_order

from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.plan.changes import changed, difference
from headrace.plan.plan import Plan

TEXT = (Path(__file__).parents[2] / "benchmarks" / "plans" / "160m.toml").read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("model.position=learned", ("+alibi", "model.position=none")),
        ("model.position=learned", ("+rope", "model.position=rope")),
        ("model.kv_heads=4", ("+gqa", "model.kv_heads=6")),
        ("model.dim=768", ("+gqa",)),
        ("model.position=none", ("+alibi",)),
    ],
)
def test_a_key_that_a_technique_rewrites_is_said_where_the_plan_says_otherwise(
    given: str, words: tuple[str, ...]
) -> None:
    """Check that a key that a technique rewrites is in the difference, and leads there and back."""
    before = Plan.read(TEXT, catalogue(), overrides=[given])
    after = changed(before, words, catalogue())
    assert difference(before, after) == words
    assert changed(before, difference(before, after), catalogue()) == after
    back = difference(after, before)
    assert back[0] == f"-{words[0][1:]}"
    assert changed(after, back, catalogue()).model == before.model


def test_words_that_ask_for_a_technique_and_leave_it_out_are_refused() -> None:
    before = Plan.read(TEXT, catalogue())
    with pytest.raises(ConfigError, match=in_order("torch_compile", "left out")):
        changed(before, ["-torch_compile", "+torch_compile"], catalogue())
