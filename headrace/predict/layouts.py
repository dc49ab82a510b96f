"""Propose other layouts of a plan's ranks: the same number along other axes of the mesh.

An axis that splits the model belongs to a technique, which says so in its `axes`. The technique is
added with its axis and removed with it. From the start of a sweep every layout is predicted. Later
only those layouts are that move one prime factor from one axis to another, so that a sweep of many
ranks stays brief.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.core.units import divisors
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Technique

EXPERTS = "expert"
"""Ranks of `FREE` that divide the experts of a mixture."""
FREE = "data"
"""The axis that no technique owns: its replicas read different sequences."""


def layouts(
    plan: Plan, catalogue: Catalogue, *, near: bool, ranks: int | None = None
) -> Iterator[tuple[tuple[str, ...], tuple[type[Technique[Any]], ...]]]:
    """Yield the words of each other layout, and the techniques that it adds.

    Args:
        plan: any plan.
        catalogue: the techniques that exist.
        near: whether to yield only layouts that differ by one prime factor.
        ranks: the ranks to lay out; None means as many as the plan has.
    """
    now = plan.mesh.sizes
    for sizes in _shared_out(ranks or plan.mesh.ranks, len(now)):
        wanted = dict(zip(now, sizes, strict=True))
        if wanted == now or (near and not _is_near(now, wanted)):
            continue
        owners = {a: _owner(plan, catalogue, a) for a, n in wanted.items() if n > 1 and a != FREE}
        more = tuple(o for o in owners.values() if o and o.name() not in plan.techniques)
        if None in owners.values():
            continue  # no technique splits the model along it
        words = [f"mesh.{axis}={n}" for axis, n in wanted.items() if n != now[axis]]
        words += [f"+{kind.name()}" for kind in more]
        words += [
            f"-{name}"
            for name, technique in plan.techniques.items()
            if technique.axes and all(wanted.get(axis, 0) == 1 for axis in technique.axes)
        ]
        yield tuple(words), more


def groups(plan: Plan, catalogue: Catalogue, *, near: bool) -> Iterator[tuple[str, ...]]:
    """Yield the words of other groups of the ranks of `data` x `context`, which add no rank.

    They are copies of the model in slices (`mesh.replicate`) where a technique slices it, and
    shares of experts (`mesh.expert`) where the plan has some.

    Args:
        plan: a plan of several ranks.
        catalogue: the techniques that exist.
        near: whether to yield only sizes that differ by one prime factor.
    """
    mesh = plan.mesh
    shared = mesh.data * mesh.context
    slicing = any("shard" in technique.composes for technique in plan.techniques.values())
    if slicing or mesh.replicate > 1:
        fits = [n for n in divisors(mesh.data) if n < shared and shared // n % mesh.expert == 0]
        for size in _others(mesh.replicate, fits, near):
            yield (f"mesh.replicate={size}",)
    owner = _owner(plan, catalogue, EXPERTS)
    experts = max((getattr(t, "experts", 0) for t in plan.techniques.values()), default=0)
    if owner is None or not experts:
        return
    fits = [n for n in divisors(shared // mesh.replicate) if n <= experts]
    for size in _others(mesh.expert, fits, near):
        on = owner.name() in plan.techniques
        change = ("+" * (not on) if size > 1 else "-" * on) + owner.name()
        yield (f"mesh.{EXPERTS}={size}", *([change] if change[0] in "+-" else []))


def _others(now: int, sizes: list[int], near: bool) -> list[int]:
    """Return the sizes but the present one, or of these those that differ by one prime factor."""
    ratios = {n: max(n / now, now / n) for n in sizes if n != now}
    return [n for n, ratio in ratios.items() if not near or _is_prime(ratio)]


def _owner(plan: Plan, catalogue: Catalogue, axis: str) -> type[Technique[Any]] | None:
    """Return the technique that splits the model along an axis; None where there is none.

    A technique of the plan goes before others of the catalogue.
    """
    own = [type(t) for t in plan.techniques.values() if axis in t.axes]
    return next((k for k in (*own, *catalogue.techniques.values()) if axis in k.axes), None)


def _is_near(now: Mapping[str, int], wanted: Mapping[str, int]) -> bool:
    """Return whether two layouts differ only by one prime factor that moved to another axis."""
    ratios = [max(n / wanted[a], wanted[a] / n) for a, n in now.items() if n != wanted[a]]
    return len(ratios) == 2 and ratios[0] == ratios[1] and _is_prime(ratios[0])


def _is_prime(number: float) -> bool:
    return number % 1 == 0 and len(divisors(int(number))) == 2


def _shared_out(ranks: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of `axes` whole numbers whose product is `ranks`."""
    if axes == 1:
        yield (ranks,)
        return
    for first in divisors(ranks):
        for rest in _shared_out(ranks // first, axes - 1):
            yield (first, *rest)
