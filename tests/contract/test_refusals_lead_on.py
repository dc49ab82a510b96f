"""Each refusal of a technique is called for, and each way out that it prints is taken."""

import re

import pytest
from places import MOVES, Asked
from refusal_cases import CASES, EXCUSED
from remedies import REFUSAL, alternatives, recording, sites

INSTALLS = re.compile(r"(pip install|git clone|install g\+\+|chmod) ?\S")
USAGE = ("no key", "is not an override", "nput should be", "is not one of", "no technique")


def refusals() -> set[str]:
    """Every place where a technique refuses."""
    return {name for name, call in sites().items() if getattr(call.func, "id", "") == REFUSAL}


def test_every_refusal_is_called_for_or_excused() -> None:
    assert {*CASES} | {*EXCUSED} == refusals()
    assert not {*CASES} & {*EXCUSED}


@pytest.mark.parametrize("site", CASES)
def test_the_ways_out_of_a_refusal_lead_on(site: str) -> None:
    asked = CASES[site]
    with recording() as made:
        message, remedy = asked.refusal()
    assert site in [name for name, _ in made], [name for name, _ in made]
    technique = message.split()[0]
    assert alternatives(remedy), message
    taken = [lead_on(asked, message, way, technique) for way in alternatives(remedy)]
    assert any(taken), f"nothing of {remedy!r} can be done"


def lead_on(asked: Asked, message: str, way: str, technique: str) -> bool:
    """Take one way; whether it could be taken here."""
    after = asked.after(way, technique)
    if after is None:
        assert INSTALLS.match(way), f"{way!r} is neither typed nor installed"
        return False
    then = after.answer()
    assert then != message, f"{way!r} leads nowhere"
    assert not any(word in then for word in USAGE), f"{way!r} is answered: {then}"
    return True


def test_a_way_that_leads_nowhere_is_seen() -> None:
    """Check that `lead_on` fails for a remedy that is refused again, and for a key that is none."""
    asked = CASES["techniques/optim/sophia:Sophia.supports#1"]
    message, _ = asked.refusal()
    for wrong in ("model.layers=4", "techniques.sophia.shore=1.0"):
        with pytest.raises(AssertionError):
            lead_on(asked, message, wrong, "sophia")


def test_places_are_known() -> None:
    assert {*MOVES.values()} <= {"H200", "cpu", "tools"}
