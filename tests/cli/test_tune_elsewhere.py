"""A tuning of a folder in which another process measures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.tuner.command import locked


def test_a_tuning_that_goes_on_elsewhere_leads_to_a_new_one_with_every_word(
    call: Callable[..., Any], tiny_demo: list[str]
) -> None:
    other = locked(Path("runs/demo-tune"), "", "")
    try:
        told = call("tune", *tiny_demo, "--minutes", "2", code=2)
    finally:
        other.unlock()
    assert told["error"].endswith("measures for runs/demo-tune")
    words = told["remedy"].partition(" (or ")[0].split()
    assert words[:2] == ["headrace", "tune"] and words[-1] == "name=NEW"
    assert {*tiny_demo, "--minutes", "2"} <= {*words}
