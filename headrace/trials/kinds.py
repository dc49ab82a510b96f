"""What a change of a plan does to learning, read from the techniques and keys that differ.

"exact": only how it is executed; "approximate": within a band of rounding; "learning": another
model, other data, another rule. A technique says so itself (`equality`); of the plan's own keys
those of `EXECUTION` are told here, and every other one is learning.
"""

from typing import Literal

from headrace.changes import flat, rewritten
from headrace.core.plan import Plan

Kind = Literal["exact", "approximate", "learning"]
EXECUTION = {
    "name", "directory", "device", "guard", "attention", "batch.micro_sequences", "data.workers",
    "data.prefetch", "data.directory", "mesh", "eval", "checkpoint", "hardware", "track", "trace",
}  # fmt: skip
"""Tables and keys of a plan that decide how it runs and not what it learns."""
APPROXIMATE = {"model.precision"}
"""Keys that round otherwise."""
RANKS: dict[str, int] = {"exact": 0, "approximate": 1, "learning": 2}


def kind_of(before: Plan, after: Plan) -> Kind:
    """The strongest of what differs between two plans."""
    found: set[Kind] = {"exact"}
    for name in before.techniques.keys() | after.techniques.keys():
        one, two = before.techniques.get(name), after.techniques.get(name)
        if one != two:
            technique = two or one
            assert technique is not None, "it is in one of them"
            found.add(technique.equality)
    said = rewritten(before) | rewritten(after)  # by techniques, whose equality counts for them
    for key in _differing(before, after):
        if key in said:
            continue
        if key not in EXECUTION and key.partition(".")[0] not in EXECUTION:
            found.add("approximate" if key in APPROXIMATE else "learning")
    return max(found, key=RANKS.__getitem__)


def _differing(before: Plan, after: Plan) -> list[str]:
    """Keys of the plan itself, techniques left out, whose values are not the same."""
    one, two = flat(before), flat(after)
    return [key for key in one.keys() | two.keys() if one.get(key) != two.get(key)]
