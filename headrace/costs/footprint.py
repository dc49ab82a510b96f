"""Predict what a plan holds of a device's memory beside its ledger's lines.

These are workspaces of libraries, the rests of the allocator's blocks, copies of earlier states,
and scores that torch's own attention keeps.
"""

import math
from dataclasses import dataclass, replace

from headrace.costs.ledger import Ledger, Line
from headrace.costs.reserved import MIB, WORKSPACES, Reserved, reserve
from headrace.costs.work import Attention

WORKSPACE = "library workspaces"
"""Name of the libraries' workspaces as an owner of memory."""
KEPT_STATES = "kept states"
"""Name of the copies of earlier states in the host's memory as an owner of memory, and of the size
of the ledger that is their bytes; 0 where the device has a memory of its own."""
RESTS = "rests of blocks"
"""How the bytes of the allocator's blocks beyond their tensors are called as an owner of memory: a
rest of up to 1 MiB is not cut off. Of a 14M decoder on an H100 they are 11 of 940 MiB."""
REPLAYED = 256
"""Layers of the deepest model whose tensors are replayed through the allocator, which takes three
milliseconds a layer. Llama 3.1 405B has 126. For a deeper one nothing is predicted."""
EXPANDABLE = "expandable_segments"
"""Name of a size of the ledger that is not 0 where the allocator's segments grow."""


def workspace_bytes(capability: tuple[int, int] | None) -> int:
    """Return the bytes that cuBLAS takes of the allocator in a run.

    They are 32 MiB a thread on Hopper and newer, else 8.125.

    The peaks of runs in a process of their own are 62 to 64 MiB over the ledger's lines (the 7b and
    1b rows of limits.jsonl; a first reading in techniques.jsonl); torch's documentation of
    CUBLAS_WORKSPACE_CONFIG gives both sizes.
    """
    each = 32 * MIB if capability is not None and capability >= (9, 0) else 8 * MIB + 128 * 1024
    return WORKSPACES * each


def _with_scores(ledger: Ledger, device: str, precision: str) -> Ledger:
    """Add the scores that torch's own attention keeps where no kernel of it can run.

    In fp32 none knows groups of keys: two plans that were to fit were out of memory, asking for a
    block's scores (rows 80 and 115 of techniques.jsonl).
    """
    sizes = ledger.sizes
    chosen = any(isinstance(w, Attention) and not w.kernel for w in ledger.work.values())
    grouped = sizes["heads"] != sizes["kv_heads"]
    if device != "cuda" or precision != "fp32" or not (chosen and grouped):
        return ledger
    each = 4 * sizes["rows"] * sizes["heads"] * sizes["length"] ** 2
    for layer in range(int(sizes["layers"])):
        ledger = ledger.with_line(f"{layer}/scores", Line(each, ("loss", "turn"), layer))
    return ledger


@dataclass(frozen=True)
class Footprint:
    """What a plan holds of a device's memory beside its ledger's lines.

    Args:
        ledger: with what torch itself keeps there.
        workspace: of libraries, for good.
        free: its tensors, replayed where there is no end of memory; None where that takes too long,
            and on no GPU.
    """

    ledger: Ledger
    workspace: int
    free: Reserved | None

    @property
    def beside(self) -> dict[str, float]:
        """Return the bytes by owner that count as allocated, and that no line of the ledger has."""
        rests = self.free.spare if self.free else 0.0
        copies = self.ledger.sizes.get(KEPT_STATES, 0.0)
        owners = (WORKSPACE, self.workspace), (RESTS, rests), (KEPT_STATES, copies)
        return {name: float(bytes) for name, bytes in owners if bytes}

    def replayed(self, capacity: float) -> Reserved:
        """Return what the allocator does with the tensors in so much memory."""
        grows = bool(self.ledger.sizes.get(EXPANDABLE))
        return reserve(self.ledger, capacity=capacity, workspace=self.workspace, expandable=grows)


def make_footprint(
    ledger: Ledger, device: str, precision: str, capability: tuple[int, int] | None
) -> Footprint:
    """Return what a plan holds where it runs.

    Args:
        ledger: the plan's tensors.
        device: the type of the device, as "cuda".
        precision: the data type of its operations, as "bf16".
        capability: the compute capability of a GPU.
    """
    ledger = _with_scores(ledger, device, precision)
    if device != "cuda":
        return Footprint(ledger, 0, None)
    footprint = Footprint(ledger, workspace_bytes(capability), None)
    if ledger.sizes["layers"] > REPLAYED:
        return footprint
    return replace(footprint, free=footprint.replayed(math.inf))
