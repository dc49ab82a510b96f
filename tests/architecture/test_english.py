"""The lint of docstrings and names refuses what it is there for, and knows no key twice."""

from pathlib import Path

import pytest
from english import KNOWN, of_docstring, of_name, of_text, problems

SOURCE = Path("headrace/core/x.py")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('def f():\n    """Of a step."""', 'begins with "Of"'),
        ('def f():\n    """The same of ranks."""', 'begins with "The same"'),
        ('def f():\n    """Seconds of a step."""', "begins with a verb"),
        ('class A:\n    """Parts of a model."""', "has no verb"),
        ('A = 1\n"""Likewise."""', 'begins with "Likewise"'),
        ("def told(): ...", "told: say"),
        ("narrowest_phase = 1", "say bottleneck"),
        ("def f(trunk_s): ...", "say baseline"),
        ('raise ValueError("the narrowest station")', "in a text"),
        ('PROGRAM = "python benchmarks/trunks.py"', "in a text"),
    ],
)
def test_each_kind_is_refused_when_it_is_put_back(source: str, problem: str) -> None:
    assert any(problem in words for _, words in problems(source, SOURCE))


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Return the step time in seconds."""',
        'class A:\n    """A plan holds what is asked."""',
        'PROGRAM = "python benchmarks/foresight.py"',
        'STEP_S = 1\n"""Seconds of a step at most."""',
    ],
)
def test_plain_english_passes(source: str) -> None:
    assert not list(problems(source, SOURCE))


def test_a_name_that_may_stay_has_a_reason() -> None:
    assert all(isinstance(reason, str) and reason for reason in KNOWN["allowed"].values())
    for name in KNOWN["allowed"]:
        assert not [*of_name(name), *of_text(name)]


def test_tests_may_begin_with_their_subject() -> None:
    assert not list(of_docstring("A rank that waits is told.", imperative=False))
