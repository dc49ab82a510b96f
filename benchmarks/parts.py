"""Decide what each of several processes measures, each on a GPU of its own.

The split follows from names and costs alone. These must be those of the whole list and not of what
is left: then every process computes the same split, and the same again after an interruption.
"""

import argparse
from collections.abc import Mapping


def part(text: str) -> tuple[int, int]:
    """Return the part that "2/4" names: the second of four."""
    which, slash, of = text.partition("/")
    if not (slash and which.isdigit() and of.isdigit() and 1 <= int(which) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part, as 2/4 is")
    return int(which), int(of)


def share(costs: Mapping[str, float], which: tuple[int, int]) -> set[str]:
    """Return the names of a part: each name goes to the part that has the least so far."""
    loads, taken = [0.0] * which[1], set()
    for name, cost in costs.items():
        at = loads.index(min(loads))
        loads[at] += cost
        if at == which[0] - 1:
            taken.add(name)
    return taken
