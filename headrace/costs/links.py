"""Say what ranks send each other and how fast: ring formulas, links measured, and links assumed.

A collective is counted by the bytes that each rank sends, as a ring sends them: that is the least
there is, and what NCCL's and gloo's large calls come to. How long so many bytes take is a link's
answer, and is only known for as many neighbouring ranks as it was measured over. Assumed rates are
those of one host, and between hosts nothing is assumed. They are a datasheet's, one direction, and
a share of them that is a guess: no collective of GPUs was measured here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from headrace.core.command import headrace
from headrace.core.errors import UnsupportedError
from headrace.costs.constants import number
from headrace.costs.rates import StreamRates

CollectiveOperation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
OPERATIONS: tuple[CollectiveOperation, ...] = get_args(CollectiveOperation)
GB, MIB = 10**9, 2**20
NODE = 8
"""GPUs of one host, between which a datasheet's rates are assumed."""
REACHED, REACHED_PCIE = number("nvlink_share"), number("pcie_share")
CALL_S = number("collective_call") * 1e-6
NETWORK_SHARE, HOP_S = 0.8, 1e-5
"""Assumed of a network: the share of its ports' rate that large calls reach, and the seconds from
one host to the next, of which a call takes as many as a tree of hosts is deep, up and down."""
COMMUNICATOR_BYTES = 2 * 24 * 4 * MIB
"""Assumed of each communicator of NCCL's on a GPU: a buffer of 4 MiB, its documented default
(NCCL_BUFFSIZE), for each direction of 24 channels. It lies outside of torch's allocator."""
BUCKET_BYTES = 25 * MIB
"""Gradients are reduced in buckets of about this size (DDP's default, arXiv 2006.15704)."""
COMMUNICATORS = "communicators"
"""Name of the size of a ledger that counts communicators."""

DATASHEETS: Sequence[tuple[str, float, str]] = (
    # (in the device's name, bytes/s in one direction, source); the first that occurs counts
    ("H100 PCIe", 64 * GB, "PCIe 5.0, 16 lanes"),
    ("V100-PCIe", 16 * GB, "PCIe 3.0, 16 lanes"),
    ("PCIe", 32 * GB, "PCIe 4.0, 16 lanes"),
    ("NVL", 64 * GB, "PCIe 5.0, 16 lanes; bridges join but two or four"),
    ("H200", 450 * GB, "NVLink 4, NVIDIA H200 SXM datasheet"),
    ("H100", 450 * GB, "NVLink 4, NVIDIA H100 SXM datasheet"),
    ("B200", 900 * GB, "NVLink 5, NVIDIA DGX B200 datasheet"),
    ("A100", 300 * GB, "NVLink 3, NVIDIA A100 SXM datasheet"),
    ("V100", 150 * GB, "NVLink 2, NVIDIA V100 SXM2 datasheet"),
    ("T4", 16 * GB, "PCIe 3.0, 16 lanes"),
    ("RTX 50", 64 * GB, "PCIe 5.0, 16 lanes"),
    ("", 32 * GB, "PCIe 4.0, 16 lanes"),
)
SHARES: Mapping[CollectiveOperation, float] = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
}
"""Share of a tensor that (n - 1) / n is multiplied with: a sum goes round twice."""


@dataclass(frozen=True)
class Link:
    """Hold how long one kind of collective takes.

    Args:
        operation: the kind of collective.
        ranks: the number of neighbouring ranks over which it was measured, or is assumed.
        stream: the seconds by the bytes that each rank sends; the smallest call takes its floor.
    """

    operation: CollectiveOperation
    ranks: int
    stream: StreamRates


def sent(operation: CollectiveOperation, bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a collective.

    Args:
        operation: the kind of collective.
        bytes: the size of the whole tensor that is summed, gathered or scattered, or of a message.
        ranks: how many ranks take part.
    """
    if operation == "send":
        return bytes
    return SHARES[operation] * (ranks - 1) / ranks * bytes


def assumed(device_name: str) -> tuple[Link, ...]:
    """Return the links that are assumed inside a host of such devices, by a datasheet."""
    _, rate, _ = _datasheet(device_name)
    share = REACHED_PCIE if "PCIe" in _datasheet(device_name)[2] else REACHED
    stream = StreamRates(CALL_S, share * rate)
    return tuple(Link(operation, NODE, stream) for operation in OPERATIONS)


def known_between(links: Sequence[Link], device_name: str) -> int:
    """Return the largest number of neighbouring ranks whose links are measured or assumed.

    Args:
        links: the links that were measured; without any, the datasheet's rates are assumed.
        device_name: the device of every rank.
    """
    return max(link.ranks for link in links or assumed(device_name))


def probe_command(ranks: int) -> str:
    """Return the command that measures the links between so many GPUs, `NODE` of them in a host."""
    return f"{headrace(ranks, NODE)} probe"


def says(links: Sequence[Link], device_name: str, ranks: int, network: float = 0.0) -> str:
    """Return a sentence on the rate of sums between ranks, and how far it reaches.

    Args:
        links: the links that were measured; without any, the datasheet's rates are assumed.
        device_name: the device of every rank.
        ranks: the ranks of the plan.
        network: bytes/s that each GPU sends to other hosts; 0 where nothing is known of it.
    """
    beyond = "nothing is assumed"
    if network:
        beyond = (
            f"{network / GB:.3g} GB/s a GPU are the plan's (hardware.network_gb_per_s), "
            f"{NETWORK_SHARE:.0%} of them assumed to be reached"
        )
    sums = [x for x in links or assumed(device_name) if x.operation == "all_reduce"]
    most = max(sums, key=lambda x: x.ranks)
    link = min((x for x in sums if x.ranks >= ranks), key=lambda x: x.ranks, default=most)
    rate = f"{link.stream.bytes_per_s / GB:.3g} GB/s a rank"
    if links:
        line = f"{rate} in sums, measured over {link.ranks} ranks"
        return line if ranks <= link.ranks else f"{line}; between more of them {beyond}"
    _, peak, source = _datasheet(device_name)
    share = link.stream.bytes_per_s / peak
    line = f"assumed: {share:.0%} of {peak / GB:.3g} GB/s ({source})"
    if ranks <= NODE:
        return f"{rate}, {line}"
    return f"{rate} inside a host of {NODE}, {line}; of the network between hosts {beyond}"


def collective_s(
    links: Sequence[Link],
    device_name: str,
    operation: CollectiveOperation,
    bytes: float,
    reach: int,
    *,
    ranks: int = 0,
    network: float = 0.0,
) -> float:
    """Return the seconds of one call in which each rank sends `bytes`.

    Args:
        links: the links that were measured; without any, the datasheet's rates are assumed.
        device_name: the device of every rank.
        operation: which collective it is.
        bytes: how many bytes each rank sends.
        reach: the number of ranks from the first that takes part to the last, both counted.
        ranks: how many take part; 0 where all between the first and the last do.
        network: bytes/s that each GPU sends to other hosts; 0 where nothing is known of it.

    Raises:
        UnsupportedError: nothing is known of ranks that far apart.
    """
    known = [x for x in links or assumed(device_name) if x.operation == operation]
    near = [x for x in known if x.ranks >= reach]
    if not near and network and known:
        inside = max(known, key=lambda x: x.ranks).stream
        return _over_network_s(operation, bytes, reach, ranks or reach, network, inside)
    if not near:
        most = max((x.ranks for x in known), default=1)
        known_for = f"measured for {most}, and between more of them"
        if not links:
            known_for = f"assumed for {most} inside a host, and of the network between hosts"
        raise UnsupportedError(
            f"how fast {reach} ranks of {device_name} are joined is not known: it is {known_for} "
            "nothing is assumed",
            f"hardware.network_gb_per_s=RATE, of each GPU; or {probe_command(reach)} "
            "(on those machines)",
        )
    return min(near, key=lambda x: x.ranks).stream.seconds(bytes)


def _over_network_s(
    operation: CollectiveOperation,
    bytes: float,
    reach: int,
    ranks: int,
    network: float,
    inside: StreamRates,
) -> float:
    """Return the seconds of one call over several hosts.

    A ring enters and leaves a host once, through the ports of all its GPUs that take part. What
    ranks send to each one, or to the next one, leaves through their own ports.
    """
    apart = max(1, (reach - 1) // max(1, ranks - 1))
    here = max(1, NODE // apart)
    rate, crosses = network, 1.0
    if operation == "all_to_all":
        crosses = (ranks - here) / max(1, ranks - 1)
    elif operation != "send":
        rate = here * network
    hops_s = 2 * HOP_S * math.log2(max(2, reach / NODE))
    return max(inside.seconds(bytes), crosses * bytes / (NETWORK_SHARE * rate)) + hops_s


def _datasheet(device_name: str) -> tuple[str, float, str]:
    return next(one for one in DATASHEETS if one[0].lower() in device_name.lower())
