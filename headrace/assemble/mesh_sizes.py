"""Count a mesh for the ledger: ranks of each axis, how far they reach, and communicators."""

from math import prod

from headrace.costs.links import COMMUNICATORS
from headrace.parallel.world import AXES
from headrace.plan.plan import MeshConfig


def ranks_of(mesh: MeshConfig) -> dict[str, float]:
    """Return by name the ranks of each axis, its reach, and the number of communicators.

    The reach counts the world's ranks from the first of an axis's group to its last.
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    sizes |= {"shard": mesh.data * mesh.context, "world": mesh.ranks}
    reach = {a: prod(getattr(mesh, b) for b in AXES[AXES.index(a) :]) for a in AXES}
    reach |= {"shard": reach["data"], "world": mesh.ranks}
    counts = {f"{axis}_ranks": float(count) for axis, count in sizes.items()}
    counts |= {f"{axis}_reach": float(count) for axis, count in reach.items()}
    mine = ("shard", "pipeline", "world")
    counts[COMMUNICATORS] = float(sum(sizes[axis] > 1 for axis in mine))
    return counts
