"""Say what a change of a plan does, and what it costs, for a reader."""

from typing import Any

from headrace.doctor.plan_keys import KEY_COSTS
from headrace.plan.changes import flat, word
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue
from headrace.predict.candidates import MICRO, Asking, Words

BOUGHT = "what it bought: "
"""How the text of the costs begins where a technique is taken out."""


def sentence_of(asking: Asking, change: Words, first: str) -> str:
    """Return what the change does, in one sentence."""
    out = [w[1:] for w in change if w[0] == "-" and w != first]
    place = f" In the place of {' and '.join(out)}." if out and first[0] == "+" else ""
    if first[0] == "+":
        return asking.catalogue.find(first[1:]).line() + place
    if first[0] == "-":
        return f"Leaves out {first[1:]}, which is in the plan."
    key, _, value = first.partition("=")
    if key == MICRO:
        value = value if int(value) else "all"
        return f"Reads {value} rows at a time instead of {asking.start.micro_rows}."
    values = dict(one.split("=", 1) for one in (first, *change) if "=" in one)
    old = _values(asking.start)
    sets = [
        f"{key} to {value} instead of {word(old[key]) if key in old else 'none'}"
        for key, value in values.items()
    ]
    return f"Sets {', '.join(sets)}."


def _values(plan: Plan) -> dict[str, Any]:
    """Return every key that has a value, the knobs of techniques too."""
    values = flat(plan)
    for name, technique in plan.techniques.items():
        knobs = technique.model_dump(mode="json", exclude_none=True)
        values |= {f"techniques.{name}.{knob}": given for knob, given in knobs.items()}
    return values


def costs_of(catalogue: Catalogue, first: str) -> str:
    """Return what it costs, in the words of its card, or of the table of keys."""
    if first[0] == "+":
        return catalogue.find(first[1:]).card.shown("costs")
    if first[0] == "-":
        return BOUGHT + catalogue.find(first[1:]).card.shown("buys")
    return KEY_COSTS.get(first.partition("=")[0], "")


def cost_of(catalogue: Catalogue, first: str) -> str:
    """Return the first part of what it costs that was not measured elsewhere."""
    if first[0] == "+":
        return catalogue.find(first[1:]).card.parts("costs")[0]
    if first[0] == "-":
        return BOUGHT + catalogue.find(first[1:]).card.parts("buys")[0]
    return KEY_COSTS.get(first.partition("=")[0], "")
