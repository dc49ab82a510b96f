"""Predict several ranks: the slowest rank's time, and where the numbers are from.

A collective is priced by a link that was measured or assumed (costs/links.py). A step is priced by
the rank that takes longest. No step of several GPUs was measured here, so their times carry no
interval.
"""

from collections.abc import Sequence

from headrace.core.units import format_bytes
from headrace.costs.ledger import Ledger
from headrace.costs.links import COMMUNICATOR_BYTES, COMMUNICATORS, says
from headrace.costs.machine import Machine
from headrace.costs.step import StepTime, step_time
from headrace.costs.work import CONTENTION, IDLE
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
    return (
        f"  beside it: communication buffers {format_bytes(buffers)}, assumed: {count} "
        f"communicators x {format_bytes(COMMUNICATOR_BYTES)}, NCCL's default of 4 MiB both ways in "
        f"24 channels\nbetween {ranks} ranks: {says(machine.links, machine.name)}; kernels beside "
        f"it are assumed to be {CONTENTION:.0%} slower"
    )
