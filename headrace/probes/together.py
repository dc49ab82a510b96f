"""Measure, by several ranks together, how long collectives between them take by bytes.

`torchrun --nproc-per-node N -m headrace probe` starts it. The first rank's device is measured while
the others wait, unless its rates are kept already. Then every kind of collective is run over all
ranks, a few calls at a time, with sizes from some KiB on. A time is the median of the slowest rank,
by the host's clock around a few calls in a row. The times are kept beside the device's other rates,
under the number of ranks that took part.

Left out: collectives beside kernels, and links between some of the ranks.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.core.progress import Progress
from headrace.costs.links import OPERATIONS, CollectiveOperation, Link, sent
from headrace.costs.machine import Machine
from headrace.costs.rates import StreamPoint, StreamRates
from headrace.parallel.world import World, open_world
from headrace.plan.mesh_config import MeshConfig
from headrace.probes import cached, measure, path

KIB, MIB = 2**10, 2**20
SIZES = {
    "cpu": (4 * KIB, 256 * KIB, 4 * MIB),
    "cuda": (4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB, 256 * MIB),
}
"""Bytes of the whole tensors, by type of device; a rank sends its share of them."""
WARM, TIMED_GROUPS, CALLS = 2, 5, 4
"""Calls that are not timed; timed groups of calls, of which the median counts; calls in a group."""
NUMBER = 4
"""Bytes of a number in fp32."""


def measure_together(
    device: torch.device, *, budget_s: float = 180.0, progress: Progress | None = None
) -> Machine | None:
    """Measure the rates of a device and of the links between all ranks, and keep them.

    Args:
        device: a CPU or a CUDA device.
        budget_s: seconds for the probes of the device alone.
        progress: shows how far the probes are.

    Returns:
        The rates on the first rank; None on all others.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return measure(device, budget_s=budget_s, progress=progress)
    with open_world(MeshConfig(data=ranks), device) as world:
        if device.type == "cuda":
            device = torch.device("cuda", world.local_rank)
        machine = None
        if world.rank == 0:
            machine = cached(device) or measure(device, budget_s=budget_s, progress=progress)
        world.any(False)  # the others wait without a kernel
        links = measure_links(device, world)
    if machine is None:
        return None
    before = tuple(link for link in machine.links if link.ranks != ranks)
    machine = replace(machine, links=(*before, *links))
    machine.write(path(device))
    return machine


def measure_links(
    device: torch.device, world: World, sizes: Sequence[int] = ()
) -> tuple[Link, ...]:
    """Measure every kind of collective over all ranks; all ranks call this together.

    Args:
        device: this rank's own.
        world: the ranks.
        sizes: bytes of the whole tensors, rising; without them those of `SIZES`.
    """
    sizes = sizes or SIZES[device.type]
    return tuple(_link(operation, device, world, sizes) for operation in OPERATIONS)


def _link(
    operation: CollectiveOperation, device: torch.device, world: World, sizes: Sequence[int]
) -> Link:
    points = []
    for size in sizes:
        numbers = size // NUMBER // world.ranks * world.ranks
        seconds = _seconds(_call(operation, numbers, device, world), device, world)
        points.append(StreamPoint(int(sent(operation, NUMBER * numbers, world.ranks)), seconds))
    largest, least_s = points[-1], min(point.seconds for point in points)
    return Link(
        operation, world.ranks, StreamRates(least_s, largest.bytes / largest.seconds, tuple(points))
    )


def _call(
    operation: CollectiveOperation, numbers: int, device: torch.device, world: World
) -> Callable[[], object]:
    """Return a call that runs one collective on a whole tensor of `numbers` numbers."""
    whole, part = (torch.zeros(n, device=device) for n in (numbers, numbers // world.ranks))
    calls: dict[CollectiveOperation, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "send": lambda: _pass_on(whole, world),
    }
    return calls[operation]


def _pass_on(x: Tensor, world: World) -> None:
    """Send `x` to the next rank and receive a tensor of its size from the one before."""
    after, before = ((world.rank + step) % world.ranks for step in (1, -1))
    for one in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, torch.empty_like(x), before)]
    ):
        one.wait()


def _seconds(call: Callable[[], object], device: torch.device, world: World) -> float:
    """Return the seconds of one call on the slowest rank."""
    spent = []
    for trial in range(WARM + TIMED_GROUPS):
        world.any(False)
        begin_s = time.perf_counter()
        for _ in range(CALLS if trial >= WARM else 1):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if trial >= WARM:
            spent.append((time.perf_counter() - begin_s) / CALLS)
    return max(world.gather(median(spent)))
