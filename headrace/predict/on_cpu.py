"""Predict the time of a step on a CPU: its pieces, corrected by whole steps of the probe.

Pieces are timed alone, and their sum is a little less than a step: other operations fill the
caches, and the system hands out memory anew. The probe's own small steps show how much less. Each
stands for plans of similar width, tokens and vocabulary, compiled or not. The effect of another
count of threads comes from steps that were measured at both. Memory that the process keeps saves
time by the bytes that the C library would have given back to the system, which are those of large
tensors; a step that was measured with and without it tells the time of a byte.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from headrace.core.errors import UnsupportedError
from headrace.costs import host
from headrace.costs.count import FP32
from headrace.costs.decoder_work import NARROW, baseline_work, stored_in_bf16
from headrace.costs.host import KEEPS, PROBE_CPU, THREADS
from headrace.costs.ledger import Ledger
from headrace.costs.machine import Machine
from headrace.costs.rates import Half, MeasuredStep, PlacedRatio, between, place
from headrace.costs.step import StepTime
from headrace.costs.work import Matmul, Work

COMPILED = "compiled/calls"
"""Name of the piece of work that a compiler adds."""
RETURNED_BYTES = 32 << 20
"""Bytes of the smallest block that glibc always takes from the system and gives back (man mallopt,
M_MMAP_THRESHOLD)."""
TENSORS = {"residual": 2, "norm": 4, "activation": 2, "attention_input": 2, "qk_norm": 2}
"""Line of a block -> the tensors of one size that it sums; other lines are one (costs/count)."""
LOGITS = 3
"""Tensors of the logits' size in a loss that is not compiled: they, their log-probabilities and
their gradient."""
MOST_SAVED = 0.5
"""Largest share of a step that kept memory can save: what is left computes."""
CAST = "weight_cast/forward"
"""Name of the piece of work that weights stored in fp32 need where bf16 is multiplied."""


def step_time(ledger: Ledger, machine: Machine) -> StepTime:
    """Return the time of a step.

    Raises:
        UnsupportedError: the machine's rates do not cover the step.
    """
    sizes = ledger.sizes
    base_time = host.step_time(_named(ledger), machine, sizes["micro_batches"])
    spot = place(sizes["tokens"], sizes["dim"], sizes["vocab"])
    times = between(_beside(machine, COMPILED in ledger.work, _half_of(ledger)), spot)
    threads = int(sizes.get(THREADS, machine.processors))
    if threads != machine.processors:
        where = f"at {threads} threads (at {_counts(machine)} they were)"
        times *= between(_against(machine, lambda s: s.threads == threads, where), spot)
    if sizes.get(KEEPS):
        whole_s = times * base_time.step_s
        saved_s = sizes["micro_batches"] * _returned_bytes(ledger) * _handed_out_s(machine)
        times *= 1 - min(saved_s / whole_s, MOST_SAVED)
    return replace(base_time, device_s={key: times * s for key, s in base_time.device_s.items()})


def _named(ledger: Ledger) -> Mapping[str, Work]:
    """Return the work under the names of the operations that were timed.

    `norms` become `layer_norms` and `activation` becomes `plain_activation` where the decoder has
    those instead.
    """
    sizes = ledger.sizes
    names = {} if sizes["composed_norms"] else {"norms": "layer_norms"}
    names |= {} if "mlp.gate_up/in" in sizes else {"activation": "plain_activation"}
    parts = ((name.partition("/"), piece) for name, piece in ledger.work.items())
    return {f"{names.get(what, what)}/{rest}": piece for (what, _, rest), piece in parts}


def _returned_bytes(ledger: Ledger) -> float:
    """Return the bytes of a micro-batch's tensors that go back to the system when they are freed.

    Left out: gradients of large tables, and the top of the heap, of which more than 64 MiB that are
    free go back, too.
    """
    sizes, logits, returned = ledger.sizes, ledger.memory.get("logits"), 0.0
    for name, line in ledger.memory.items():
        kind = name.partition("/")[2]
        if line.layer is not None and line.bytes / TENSORS.get(kind, 1) >= RETURNED_BYTES:
            returned += line.bytes
    if logits is not None:  # fewer than three tensors of them where the loss is taken in chunks
        own = min(FP32 * sizes["tokens"] * sizes["vocab"], logits.bytes)
        returned += logits.bytes if own >= RETURNED_BYTES else 0.0
    return returned


def _handed_out_s(machine: Machine) -> float:
    """Return the seconds in which the system hands out a byte that was given back.

    Raises:
        UnsupportedError: no step that gives memory back was timed with and without it.
    """
    usual = {step.shape: step.seconds for step in _usual(machine) if not step.compiled}
    saved_s = returned = 0.0
    for step in machine.steps:
        logits = FP32 * step.tokens * step.vocab
        if step.keeps and step.shape in usual and logits >= RETURNED_BYTES:
            saved_s += usual[step.shape] - step.seconds
            returned += LOGITS * logits
    if not returned:
        words = "that keep their memory"
        raise UnsupportedError(f"no steps {words} were timed on this CPU", PROBE_CPU)
    return max(0.0, saved_s) / returned


def _counts(machine: Machine) -> str:
    """Return the counts of threads that steps were timed at, as text."""
    return ", ".join(map(str, sorted({step.threads for step in machine.steps})))


def _half_of(ledger: Ledger) -> Half:
    """Return how a plan multiplies bf16; "" where it multiplies fp32."""
    if not any(isinstance(p, Matmul) and p.precision in NARROW for p in ledger.work.values()):
        return ""
    return "autocast" if CAST in ledger.work else "parameters"


def _usual(machine: Machine, half: Half = "") -> list[MeasuredStep]:
    """Return the usual steps of the probe that multiply bf16 as `half` says.

    They ran at the machine's own count of threads, and the system took their memory back.
    """
    own = [s for s in machine.steps if not s.keeps and s.threads == machine.processors]
    return [step for step in own if step.half == half]


def _beside(machine: Machine, compiled: bool, half: Half) -> list[PlacedRatio]:
    """Return the ratios of the probe's whole steps to the sum of their pieces.

    Compiled steps in bf16 are derived where none was timed: compiling makes a step in bf16 as much
    faster as one in fp32. On two cores of a Xeon it did, by 0.9 to 1.2 times (natural.jsonl). Where
    no step in bf16 was timed, steps in fp32 are used. Where none is compiled as asked, the others
    are.
    """
    kept = _usual(machine, half) or _usual(machine)
    alike = [step for step in kept if step.compiled == compiled]
    if half and compiled and not alike:
        alike = _compiled(kept, machine)
    return [(_spot(s), math.log(s.seconds / _summed_s(s, machine))) for s in alike or kept]


def _compiled(steps: Sequence[MeasuredStep], machine: Machine) -> list[MeasuredStep]:
    """Return eager steps with the time that they would take compiled.

    The time comes from compiled and eager steps in fp32 of the same decoder.
    """
    plain = {step.shape: step for step in _usual(machine) if not step.compiled}
    beside, compiled_steps = _beside(machine, True, ""), list[MeasuredStep]()
    for step in steps:
        if (eager := plain.get(step.shape)) is not None and not step.compiled:
            same = replace(eager, compiled=True)
            fused_s = _summed_s(same, machine) * between(beside, _spot(same))
            seconds = step.seconds * fused_s / eager.seconds
            compiled_steps.append(replace(step, compiled=True, seconds=seconds))
    return compiled_steps


def _against(
    machine: Machine, which: Callable[[MeasuredStep], bool], words: str
) -> list[PlacedRatio]:
    """Return the ratios of steps of some kind to the usual steps of the same decoder.

    Args:
        machine: the rates, with the steps that were timed.
        which: whether a step is of that kind.
        words: what the steps are, for the error.

    Raises:
        UnsupportedError: no such step was timed.
    """
    usual = {step.shape: step.seconds for step in _usual(machine) if not step.compiled}
    ratios = [
        (_spot(step), math.log(step.seconds / usual[step.shape]))
        for step in machine.steps
        if which(step) and not step.compiled and step.shape in usual
    ]
    if not ratios:
        raise UnsupportedError(f"no steps {words} were timed on this CPU", PROBE_CPU)
    return ratios


def _spot(step: MeasuredStep) -> tuple[float, ...]:
    return place(step.tokens, step.dim, step.vocab)


def _summed_s(step: MeasuredStep, machine: Machine) -> float:
    """Return the seconds of one of the probe's own steps as the sum of its pieces."""
    precision = "bf16" if step.half else "fp32"
    work = baseline_work(step.config(), rows=step.rows, length=step.length, precision=precision)
    if step.half == "parameters":
        kept = {n: stored_in_bf16(n, w, adds_up=False, master=True) for n, w in work.items()}
        work = {name: piece for name, piece in kept.items() if piece is not None}
    if step.compiled:
        work = {name: piece.compiled() for name, piece in work.items()}
    return host.step_time(work, machine, 1.0).step_s
