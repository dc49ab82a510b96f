"""The processes of a run: who am I, how many are we, and the few things that we tell each other.

Started alone, a run is a world of one and touches no process group. Started by `torchrun`, it joins
through gloo for host tensors and NCCL for GPU tensors. Ranks are laid out along four axes, the
outermost first, so that the axis that talks most has neighbours on one node:

    pipeline   stages of the model          data     replicas that read other rows
    context    parts of every row           tensor   parts of every matrix

`shard` is data x context, the axis over which tokens are split: gradients are summed along it.
FSDP cuts parameters along `slices`, which is all of `shard` unless `mesh.replicate` divides it:
then `replicate` joins the ranks of all groups that hold the same slice, the outermost part of
`data`. `expert` is the innermost part of `slices`: its ranks divide the experts of a mixture, and
`expert_copies` joins all ranks of `shard` that hold the same ones, `expert_slices` those of
`slices`. `ends` joins the first and the last stage, which share a tied embedding.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from headrace.core.command import rerun
from headrace.core.errors import ConfigError
from headrace.costs.links import BUCKET_BYTES
from headrace.plan.mesh_config import MeshConfig

AXES = ("pipeline", "data", "context", "tensor")
OF_EXPERTS: Mapping[str, str] = {"expert_copies": "shard", "expert_slices": "slices"}
"""Axes of the ranks that hold the same experts -> the axis of which "expert" is the inner part."""
WITHIN = ("replicate", "expert")
"""Sizes of a mesh that divide `shard` and add no ranks."""
FIXED: Mapping[str, tuple[str, ...]] = {
    "data": ("pipeline", "context", "tensor"),
    "context": ("pipeline", "data", "tensor"),
    "shard": ("pipeline", "tensor"),
    "ends": ("data", "context", "tensor"),
    "expert": ("pipeline", "expert_copies", "tensor"),
    "expert_copies": ("pipeline", "expert", "tensor"),
    "expert_slices": ("pipeline", "replicate", "expert", "tensor"),
}
"""Axes whose groups are made one by one -> along what the ranks of a group have one place."""
_JOINED = count()
"""Numbers of the worlds that this process has joined, which keep their words apart."""


@dataclass(frozen=True)
class World:
    """The world is one process's place among all."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    """ranks along each of `AXES`, "replicate" and "expert"; 1 where nothing is said"""
    groups: Mapping[str, Any] = field(default_factory=dict)
    """process groups of the axes that have several ranks"""
    mesh: DeviceMesh | None = None
    """pipeline x slices x tensor, for torch's own sharding, with replicate before slices where
    there are several; None alone"""
    experts: DeviceMesh | None = None
    """expert_slices, with replicate before it where there are several, for the slices of experts;
    None where one rank of each group holds them"""
    store: Store | None = None
    """where ranks leave words for each other that nobody waits for together; None alone"""
    made: Iterator[int] = field(default_factory=count, compare=False)
    """numbers of what the first rank has made for all, the same on every rank"""
    name: str = ""
    """what the words of this world begin with in a store that several worlds share"""

    def size(self, axis: str) -> int:
        """Return how many ranks an axis has."""
        if axis == "world":
            return self.ranks
        if axis == "shard":
            return self.size("data") * self.size("context")
        if axis == "slices":
            return self.size("shard") // self.size("replicate")
        if axis in OF_EXPERTS:
            return self.size(OF_EXPERTS[axis]) // self.size("expert")
        if axis == "ends":
            return min(2, self.size("pipeline"))
        return self.sizes.get(axis, 1)

    def place(self, axis: str) -> int:
        """Return this rank's coordinate on an axis."""
        if axis == "world":
            return self.rank
        if axis == "shard":
            return self.place("data") * self.size("context") + self.place("context")
        if axis == "replicate":
            return self.place("shard") // self.size("slices")
        if axis == "slices":
            return self.place("shard") % self.size("slices")
        if axis == "expert":
            return self.place("shard") % self.size("expert")
        if axis in OF_EXPERTS:
            return self.place(OF_EXPERTS[axis]) // self.size("expert")
        inner = AXES[AXES.index(axis) + 1 :]
        return self.rank // prod(self.size(a) for a in inner) % self.size(axis)

    def group(self, axis: str) -> Any:
        """Return the process group along an axis through this rank; None is an axis of one rank.

        A rank between the first and the last stage is in no group of the axis "ends".
        """
        return self.groups.get(axis)

    def sum_(self, tensor: Tensor, axis: str = "world") -> Tensor:
        """Sum `tensor` along an axis in place; an axis of one rank leaves it alone."""
        if axis in self.groups:
            dist.all_reduce(tensor, group=self.groups[axis])
        return tensor

    def sum_gradients_(self, tensors: list[Tensor], axis: str = "shard") -> None:
        """Sum many tensors along an axis in place, in buckets of one dtype."""
        if axis not in self.groups:
            return
        bucket: list[Tensor] = []
        filled = 0
        for tensor in tensors:
            if bucket and (tensor.dtype != bucket[0].dtype or filled > BUCKET_BYTES):
                self._reduce_bucket(bucket, axis)
                bucket, filled = [], 0
            bucket.append(tensor)
            filled += tensor.nbytes
        if bucket:
            self._reduce_bucket(bucket, axis)

    def _reduce_bucket(self, bucket: list[Tensor], axis: str) -> None:
        flat = torch.cat([t.flatten() for t in bucket])
        dist.all_reduce(flat, group=self.groups[axis])
        pieces = flat.split([t.numel() for t in bucket])
        for tensor, piece in zip(bucket, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Return whether any rank says True; every rank gets the same answer."""
        if self.ranks == 1:
            return flag
        flags = torch.tensor([int(flag)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` in rank order, sent as JSON: its tuples come as lists."""
        if self.ranks == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.ranks)]
        dist.all_gather(sizes, torch.tensor([own.numel()]))
        longest = int(max(sizes))
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(texts, F.pad(own, (0, longest - own.numel())))
        return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, sizes, strict=True)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.ranks > 1:
            dist.barrier()


@dataclass
class _Meeting:
    """A meeting is where the processes of a world find each other, for as long as they live.

    A process that trains twice opens two worlds. With a store for each, the second rank may reach
    the first store while it closes, and then both wait for ever. So one store serves all worlds,
    and each world writes under a number of its own. Where torchrun starts all processes again, its
    store may still hold what the dead ones have written, so the attempt is in the name too.
    """

    store: Store
    rank: int
    ranks: int
    opened: int = 0

    def next_store(self) -> Store:
        """Return the store of one more world; every rank asks in the same order."""
        self.opened += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"headrace/{attempt}/{self.opened}", self.store)


@cache
def _meeting() -> _Meeting:
    """Return the meeting that torchrun's variables name, made once."""
    return _Meeting(*next(rendezvous("env://")))


@contextmanager
def open_world(mesh: MeshConfig, device: torch.device) -> Iterator[World]:
    """Join the other processes, or be alone; leave at the end.

    Args:
        mesh: how many ranks the plan wants along each axis.
        device: where gradients live.

    Raises:
        ConfigError: started with another number of processes than the plan's mesh.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != mesh.ranks:
        other = f"{'mesh.auto=false ' * mesh.auto}mesh.data={started}"
        raise ConfigError(
            f"the plan's mesh wants {mesh.ranks} processes and {started} were started",
            rerun(verb="train PLAN", ranks=mesh.ranks)
            + (f" (or {other})" if mesh.ranks == mesh.data else ""),
        )
    if mesh.ranks == 1 or dist.is_initialized():
        yield join(mesh, device)
        return
    met = _meeting()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=met.next_store(),
        rank=met.rank,
        world_size=met.ranks,
    )
    try:
        yield join(mesh, device)
    finally:
        dist.destroy_process_group()


def join(mesh: MeshConfig, device: torch.device) -> World:
    """Return this process's world, with a group for every axis; all ranks call it together."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if mesh.ranks == 1:
        return World(local_rank=local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(local_rank)
    rank, sizes = dist.get_rank(), {axis: getattr(mesh, axis) for axis in (*AXES, *WITHIN)}
    alone = World(rank, mesh.ranks, local_rank, sizes)
    groups_of_slices = ("replicate",) if alone.size("replicate") > 1 else ()
    names = ("pipeline", *groups_of_slices, "slices", "tensor")
    torch_mesh = init_device_mesh(
        device.type, tuple(alone.size(a) for a in names), mesh_dim_names=names
    )
    groups: dict[str, Any] = {"world": dist.group.WORLD}
    groups |= {a: torch_mesh.get_group(a) for a in names if alone.size(a) > 1}
    worlds = [World(r, mesh.ranks, 0, sizes) for r in range(mesh.ranks)]
    divided = ("expert", *OF_EXPERTS) if alone.size("expert") > 1 else ()
    for axis in ("data", "context", "ends", *(("shard",) if groups_of_slices else ()), *divided):
        if alone.size(axis) > 1:
            groups |= _new_groups(axis, worlds, rank)
    if alone.size("slices") == alone.size("shard") > 1:
        groups["shard"] = groups["slices"]
    experts = None
    if "expert_slices" in groups:
        inside = [*groups_of_slices, "expert_slices"]
        experts = _mesh_of([groups[axis] for axis in inside], alone, inside, device)
    name = f"headrace/words/{next(_JOINED)}"
    store = PrefixStore(name, _get_default_store())
    return World(rank, mesh.ranks, local_rank, sizes, groups, torch_mesh, experts, store, name=name)


def _mesh_of(groups: list[Any], here: World, names: list[str], device: torch.device) -> DeviceMesh:
    """Return a mesh of this rank's groups along the axes `names`, the outermost first."""
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=(names[0],))
    columns = dist.get_process_group_ranks(groups[1])
    step = here.size("slices") * here.size("tensor")
    first = here.place("replicate") * step
    ranks = [[r - first + n * step for r in columns] for n in range(here.size("replicate"))]
    return DeviceMesh.from_group(
        groups, device.type, mesh=torch.tensor(ranks), mesh_dim_names=tuple(names)
    )


def _new_groups(axis: str, worlds: list[World], rank: int) -> dict[str, Any]:
    """Return the group of `axis` through `rank`. Every rank makes all of them, in one order."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for world in worlds:
        last = world.size("pipeline") - 1
        if axis != "ends" or world.place("pipeline") in (0, last):
            lines.setdefault(tuple(world.place(a) for a in FIXED[axis]), []).append(world.rank)
    mine = {}
    for line in lines.values():
        group = dist.new_group(line)
        if rank in line:
            mine[axis] = group
    return mine
