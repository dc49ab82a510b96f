"""The time of a step on a CPU: its pieces, set right by the whole steps that the probe measured.

Pieces are timed alone and sum up to a little less than a step: caches that other operations have
filled, memory that the system hands out anew. How much less, the probe's own small steps tell: each
stands for plans of like width, tokens and vocabulary, compiled or not.
"""

import math
from dataclasses import replace

from headrace.core import host
from headrace.core.ledger import Ledger
from headrace.core.machine import Machine
from headrace.core.model_config import ModelConfig
from headrace.core.rates import Ratio, Step, between, place
from headrace.core.work import StepTime
from headrace.model.work import trunk_work

COMPILED = "compiled/calls"
"""The piece of work that a compiler adds."""


def step_time(ledger: Ledger, machine: Machine) -> StepTime:
    """The time of a step.

    Raises:
        UnsupportedError: the machine's rates do not tell.
    """
    sizes = ledger.sizes
    found = host.step_time(ledger.work, machine, sizes["micro_batches"])
    known = _ratios(machine, compiled=COMPILED in ledger.work)
    ratio = between(known, place(sizes["tokens"], sizes["dim"], sizes["vocab"]))
    return replace(found, device_s={key: ratio * s for key, s in found.device_s.items()})


def is_timed(machine: Machine, compiled: bool) -> bool:
    """Whether the probe measured a whole step of this kind."""
    return any(step.compiled == compiled for step in machine.steps)


def _ratios(machine: Machine, compiled: bool) -> list[Ratio]:
    """Of the measured steps of a kind, or where there is none of all: measured over summed up."""
    kept = machine.steps
    alike = [step for step in kept if step.compiled == compiled] or kept
    return [
        (
            place(step.rows * step.length, step.dim, step.vocab),
            math.log(step.seconds / _summed_s(step, machine)),
        )
        for step in alike
    ]


def _summed_s(step: Step, machine: Machine) -> float:
    """The pieces of one of the probe's own steps."""
    config = ModelConfig(
        dim=step.dim, layers=step.layers, heads=step.heads, vocab=step.vocab, qk_norm=True
    )
    work = trunk_work(config, rows=step.rows, length=step.length, precision="fp32")
    if step.compiled:
        work = {name: piece.compiled() for name, piece in work.items()}
    return host.step_time(work, machine, 1.0).step_s
