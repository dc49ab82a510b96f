"""Price a step on a CPU: the same pieces of work are priced as on a GPU (costs/work.py).

There the host is the device: operations run one after another, and what it costs to begin one is
part of its time. So each piece is priced by what was measured of the very operations that it stands
for, in the layout and precision that a step has, by the bytes or sizes that the ledger counts
(`Machine.linears`, `Machine.pieces`). What a compiler fuses has no such operation any more: it goes
by the bytes that it moves, at the rate of a copy. Nothing is priced by guessed rates.
"""

from collections.abc import Mapping

from headrace.core.errors import UnsupportedError
from headrace.costs.constants import number
from headrace.costs.machine import PROBE, Machine
from headrace.costs.rates import LinearMatmul
from headrace.costs.step import StepTime
from headrace.costs.work import (
    Attention,
    Collective,
    HostCopy,
    HostWork,
    Matmul,
    Phase,
    Stream,
    Work,
    WorkKind,
)

HALF = ("bf16", "fp16")
LAUNCH_S = number("empty_launch")
KEEPS, THREADS = "keeps_memory", "threads"
"""Sizes of a ledger: 1 where the process keeps what a step frees, and the threads that compute."""
PROBE_CPU = f"{PROBE} --device cpu --seconds 20"
"""The command that measures all rates that this module needs."""
UNPROBED = f"this CPU's rates are not known; `{PROBE_CPU}` measures them, once"
"""The message where a CPU was not probed, so that no time is predicted."""


def step_time(work: Mapping[str, Work], machine: Machine, micro_batches: float) -> StepTime:
    """Return the time of a step on a CPU from its pieces.

    Args:
        work: pieces by name.
        machine: the CPU's rates.
        micro_batches: how many a step has.

    Raises:
        UnsupportedError: the machine's rates do not cover a piece.
    """
    if machine.source != "probes":
        raise UnsupportedError(UNPROBED, PROBE_CPU)
    device_s: dict[tuple[Phase, WorkKind], float] = {}
    for name, piece in work.items():
        key = (piece.phase, piece.kind)
        spent_s = piece.times(micro_batches) * _seconds(name, piece, machine)
        device_s[key] = device_s.get(key, 0.0) + spent_s
    return StepTime(device_s, host_s=0.0, edge_s=0.0)


def _seconds(name: str, piece: Work, machine: Machine) -> float:
    """Return the seconds of all kernels of one piece in a micro-batch or an update."""
    if not piece.count:
        return 0.0
    if piece.unknown:
        raise UnsupportedError(piece.unknown, "")
    if isinstance(piece, HostWork):
        return piece.count * piece.launch * LAUNCH_S
    if isinstance(piece, Matmul):
        m, n, k = piece.sizes
        return piece.count * machine.linear_s(_linear_matmul(name), piece.precision, m, n, k)
    if isinstance(piece, Attention):
        return piece.count * _attention_s(piece, machine)
    if isinstance(piece, Stream):
        return piece.count * _stream_s(name, piece, machine)
    if isinstance(piece, HostCopy):
        return piece.count * machine.link_s(piece.bytes, to_host=piece.phase == "forward")
    assert isinstance(piece, Collective)
    raise UnsupportedError("what ranks on one processor send each other was not timed", "")


def _linear_matmul(name: str) -> LinearMatmul:
    """Return which matmul of its linear a piece is, by the end of its name."""
    end = name.removesuffix("/again").rpartition("/")[2].rpartition("_")[2]
    return "input" if end == "input" else "weight" if end == "weight" else "result"


def _stream_s(name: str, piece: Stream, machine: Machine) -> float:
    """Return the seconds of one stream: as it was measured, or where it is fused by its bytes."""
    known = machine.piece(name.removesuffix("/again"))
    if known is not None and (piece.fused is not None or known.whole):
        return known.stream.seconds(piece.bytes)
    loose = 1.0 if piece.fused is None else piece.loose
    return loose * piece.kernels * machine.traffic_s(piece.bytes / piece.kernels)


def _attention_s(piece: Attention, machine: Machine) -> float:
    """Return the seconds of one kernel of attention.

    Torch's for a CPU computes all that a mask forbids.
    """
    if piece.capped:
        raise UnsupportedError("a soft cap over plain products was not timed", "")
    if piece.kernel not in ("", "flash", "math"):
        raise UnsupportedError(f"{piece.kernel} attention was not timed on a CPU", "")

    def scores_s(causal: bool) -> float:
        rows, heads, kv_heads, length, features = piece.sizes
        return machine.attention_s(
            piece.kernel or "flash",
            rows=rows,
            heads=heads,
            kv_heads=kv_heads,
            length=length,
            features=features,
            causal=causal,
            backward=piece.phase == "backward",
        )

    seconds = scores_s(piece.causal)
    if piece.mask.layers:
        seconds += piece.mask.layers * (scores_s(False) - seconds)
    if piece.precision in HALF:  # it was timed in fp32: slower as products are
        seconds *= machine.linear_s("result", piece.precision, *SIZES) / machine.linear_s(
            "result", "fp32", *SIZES
        )
    return seconds


SIZES = (512, 256, 256)
"""The sizes of the matmul at which two precisions are compared."""
