"""Predict several ranks: the slowest rank's time, and where the numbers are from.

A collective is priced by a link that was measured or assumed (costs/links.py). A step is priced by
the rank that takes longest. No step of several GPUs was measured here, so their times carry no
interval.
"""

from collections.abc import Sequence

from headrace.core.command import headrace
from headrace.core.units import format_bytes
from headrace.costs.ledger import Ledger
from headrace.costs.links import COMMUNICATOR_BYTES, COMMUNICATORS, NODE, says
from headrace.costs.machine import Machine
from headrace.costs.step import StepTime, step_time
from headrace.costs.work import CONTENTION, IDLE
from headrace.plan.plan import Plan
from headrace.predict import on_cpu


def slowest(ledgers: Sequence[Ledger], machine: Machine) -> StepTime:
    """Return the time of a step of the rank that takes longest.

    Raises:
        UnsupportedError: the machine's rates do not cover the step.
    """
    return max((_time(ledger, machine) for ledger in ledgers), key=lambda time: time.step_s)


def _time(ledger: Ledger, machine: Machine) -> StepTime:
    sizes = ledger.sizes
    if machine.kind == "cpu":
        return on_cpu.step_time(ledger, machine)
    return step_time(ledger.work, machine, sizes["micro_batches"], sizes.get(IDLE, 0.0))


def buffers_bytes(ledger: Ledger) -> int:
    """Return the bytes of a GPU's memory that communicators hold beside torch's allocator."""
    return COMMUNICATOR_BYTES * int(ledger.sizes.get(COMMUNICATORS, 0))


def start_words(plan: Plan) -> str:
    """Return the words that start Headrace with as many processes as a plan has ranks.

    A host is taken to have `NODE` GPUs, and to run any number of processes on its CPU.
    """
    return headrace(plan.mesh.ranks, None if plan.device == "cpu" else NODE)


def format_sources(ranks: int, machine: Machine, buffers: float) -> str:
    """Return for a reader where numbers of several ranks are from; "" for one rank.

    Args:
        ranks: number of ranks.
        machine: the rates of each rank's device.
        buffers: bytes that communicators hold on each device.
    """
    if ranks == 1:
        return ""
    count = round(buffers / COMMUNICATOR_BYTES)
    between = says(machine.links, machine.name, ranks, machine.network_bytes_per_s or 0.0)
    return (
        f"  beside it: communication buffers {format_bytes(buffers)}, assumed: {count} "
        f"communicators x {format_bytes(COMMUNICATOR_BYTES)}, NCCL's default of 4 MiB both ways in "
        f"24 channels\nbetween {ranks} ranks: {between}; kernels beside it are assumed to be "
        f"{CONTENTION:.0%} slower"
    )
