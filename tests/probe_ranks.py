"""What each rank of the test of probed links does."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from headrace.costs.links import OPERATIONS, sent
from headrace.costs.machine import Machine
from headrace.parallel.world import open_world
from headrace.plan.mesh_config import MeshConfig
from headrace.probes import path
from headrace.probes.together import measure_links, measure_together

CPU = torch.device("cpu")


def measured(home: str) -> None:
    """The links of these ranks are kept beside what was measured before, and read back."""
    os.environ["HOME"] = home
    first = os.environ["RANK"] == "0"
    if first:
        Machine.assumed("cpu").write(path(CPU))  # measured already
    machine = measure_together(CPU)
    assert (machine is not None) == first
    if machine is None:
        return
    assert Machine.read(path(CPU)) == machine and machine.matmuls == Machine.assumed("cpu").matmuls
    ranks = int(os.environ["WORLD_SIZE"])
    assert [link.operation for link in machine.links] == list(OPERATIONS)
    for link in machine.links:
        assert link.ranks == ranks and len(link.stream.points) == 3
        for point in link.stream.points:
            assert point.seconds > 1e-7
        whole = 4 * 2**20
        assert link.stream.points[-1].bytes == sent(link.operation, whole, ranks)
        assert not list(Path(home).rglob("*.pkl"))


def slower(home: str) -> None:
    """More bytes take longer, and a rank that sleeps makes all of them slow."""
    import time

    plain = dist.all_reduce
    with open_world(MeshConfig(data=int(os.environ["WORLD_SIZE"])), CPU) as world:
        fast = {link.operation: link.stream for link in measure_links(CPU, world)}
        if world.rank == 1:
            dist.all_reduce = lambda *a, **k: (time.sleep(0.02), plain(*a, **k))[1]
        slow = {link.operation: link.stream for link in measure_links(CPU, world)}
        dist.all_reduce = plain
    assert fast["all_reduce"].seconds(2**24) > fast["all_reduce"].seconds(2**12)
    for at in (2**12, 2**20):
        assert slow["all_reduce"].seconds(at) > 0.02 > fast["all_reduce"].seconds(at)
