"""Count a mesh for the ledger: ranks of each axis, how far they reach, and communicators."""

from math import prod

from headrace.costs.links import COMMUNICATORS
from headrace.parallel.world import AXES, OF_EXPERTS
from headrace.plan.mesh_config import MeshConfig


def ranks_of(mesh: MeshConfig) -> dict[str, float]:
    """Return by name the ranks of each axis, its reach, and the number of communicators.

    The reach counts the world's ranks from the first of an axis's group to its last.
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    shard = mesh.data * mesh.context
    sizes |= {"shard": shard, "world": mesh.ranks}
    sizes |= {"replicate": mesh.replicate, "slices": shard // mesh.replicate}
    reach = {a: prod(getattr(mesh, b) for b in AXES[AXES.index(a) :]) for a in AXES}
    reach |= {"shard": reach["data"], "world": mesh.ranks}
    reach |= {"replicate": reach["data"], "slices": reach["data"] // mesh.replicate}
    sizes |= {axis: sizes[whole] // mesh.expert for axis, whole in OF_EXPERTS.items()}
    reach |= {axis: reach[whole] for axis, whole in OF_EXPERTS.items()}
    sizes["expert"] = mesh.expert
    reach["expert"] = reach["shard"] * mesh.expert // shard
    counts = {f"{axis}_ranks": float(count) for axis, count in sizes.items()}
    counts |= {f"{axis}_reach": float(count) for axis, count in reach.items()}
    divided = ("expert", *OF_EXPERTS) if mesh.expert > 1 else ()
    mine = (
        "shard",
        "pipeline",
        "world",
        *(("replicate", "slices") * (mesh.replicate > 1)),
        *divided,
    )
    counts[COMMUNICATORS] = float(sum(sizes[axis] > 1 for axis in mine))
    return counts
