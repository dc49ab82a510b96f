"""Sets of techniques that stand in one plan: a few plans try every technique beside others.

What a technique does alone is tried alone where a case is cheap. Where one takes seconds, as a run
and its resume or a compiled graph do, a set shares them, and each alone is a slow test.
"""

import itertools
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import house
from house import Plan, Variant

from headrace.assemble.context import check_supported
from headrace.catalogue.matrix import read_matrix
from headrace.core.errors import HeadraceError
from headrace.plan.doubts import doubts_of

MOST = 8
"""Techniques in a set at most: whose fault a failure is, few runs alone then tell."""
ALONE = ("kept_memory",)
"""Techniques whose evidence is read from all memory of the process, which others take too."""
LONG_GRAPHS = {
    "dynamic_batch",
    "embedding_residual",
    "full_checkpoint",
    "linear_attention",
    "mixture_of_experts",
    "quantization_aware_training",
    "selective_checkpoint",
    "sparse_attention",
}
"""Techniques that make a graph much longer, trace a part of it again, or need two of a block: what
two of them take together is a product."""


def plan_of(variants: Sequence[Variant], **keys: Any) -> Plan | None:
    """Return the plan of several, each with its companions; None where they cannot stand together.

    Args:
        variants: the techniques.
        keys: of the plan, as `house.plan_of` takes them.
    """
    if len(variants) > 1 and any(variant.name in ALONE for variant in variants):
        return None
    brought = [{variant.name, *house.beside(variant.name, "cpu")} for variant in variants]
    for one, two in itertools.combinations(brought, 2):
        if one & two:  # both would turn the knobs of one technique
            return None
        if any(tuple(sorted(pair)) not in may_meet() for pair in itertools.product(one, two)):
            return None
    try:
        plan = house.plan_of(*variants, **keys)
        check_supported([*plan.techniques.values()], house.context_on("cpu", plan))
    except HeadraceError:
        return None
    starts = {needs_weights(house.plan_of(variant)) for variant in variants}
    return plan if len(starts) == 1 else None  # not every model has weights that others write


@cache
def may_meet() -> set[tuple[str, ...]]:
    """Return the pairs of techniques, by name, of which the matrix knows no refusal of a build.

    A technique that the matrix does not know yet stands alone, and so does one that needs another.
    """
    pairs = read_matrix()["pairs"]
    return {
        tuple(pair.split())
        for pair, said in pairs.items()
        if said["outcome"] != "refuses" and "needs" not in said
    }


def needs_weights(plan: Plan) -> bool:
    """Whether a technique of it would mean nothing over random weights."""
    return any(doubt.meaningless for doubt in doubts_of(plan))


def sets_of(
    variants: Sequence[Variant], *, apart: Collection[str] = (), **keys: Any
) -> list[tuple[Variant, ...]]:
    """Return sets of at most MOST that can stand together; each technique is in the first it fits.

    Args:
        variants: the techniques to divide.
        apart: names of which a set has one at most.
        keys: of every plan.
    """
    found: list[list[Variant]] = []
    for variant in variants:
        if plan_of([variant], **keys) is None:
            continue
        for one in found:
            if variant.name in apart and any(other.name in apart for other in one):
                continue
            if len(one) < MOST and plan_of([*one, variant], **keys) is not None:
                one.append(variant)
                break
        else:
            found.append([variant])
    return [tuple(one) for one in found]


def leading(device: str = "cpu") -> list[Variant]:
    """Return each technique that is not dear, but those that another brings to its plan."""
    plain = [house.variants(name, device)[0] for name in house.names_on(device)]
    brought = {name for v in plain if not v.dear for name in house.beside(v.name, device)}
    return [v for v in plain if not v.dear and v.name not in brought]


def name_of(variants: Sequence[Variant]) -> str:
    """Return the name of a case."""
    return "+".join(variant.name for variant in variants)
