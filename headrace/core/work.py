"""The time model's lines: pieces of a step that a machine's rates price.

A technique edits these lines as it edits those of memory, so that combinations come out of which
lines remain. A piece is one kind of kernel: matrix products and attention by their sizes, streams
by the bytes that they read and write. A stream has two costs: what eager torch does operation by
operation, and what one fused kernel needs; a compiler takes the second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from headrace.core.machine import Machine

Phase = Literal["forward", "recompute", "backward", "optimizer"]
Kind = Literal["product", "attention", "stream", "host link"]
TRUNKS = ("cudnn", "flash", "efficient", "math")
"""Attention as torch chooses it: the first of these that the machine has."""
IN_STEP = 1.15
"""How many times as long attention takes in a step as alone: 1.13 and 1.17 (kernels.jsonl)."""
UNFUSED = 1.35
"""How many times as long eager streams take as their bytes, since many read parts of rows or repeat
what is small: eager steps of 160m and 1b, less products and attention (techniques.jsonl)."""
EDGE_S = 2.5e-3
"""Of each step on a GPU, in which nothing runs: 2.4, 2.6 and 3.9 ms (idle in kernels.jsonl)."""


@dataclass(frozen=True)
class Work:
    """Equal kernels of a step.

    Args:
        phase: when they run; "optimizer" once a step, the others in each micro-batch.
        kind: what prices them.
        count: how many.
        bytes: that one reads and writes; of a product or attention none.
        kernels: of which one consists in eager torch.
        fused: bytes where a compiler makes it; None is no different.
        sizes: of a product m, n, k; of attention rows, heads, key-value heads, length, features.
        precision: of a product.
        kernel: of attention; "" is torch's choice.
        causal: of attention.
    """

    phase: Phase
    kind: Kind
    count: float = 1.0
    bytes: float = 0.0
    kernels: float = 1.0
    fused: float | None = None
    sizes: tuple[int, ...] = ()
    precision: str = "bf16"
    kernel: str = ""
    causal: bool = True

    def compiled(self) -> "Work":
        """The same as a compiler makes it."""
        if self.fused is None:
            return self
        return replace(self, bytes=self.fused, kernels=1.0, fused=None)

    def whole(self, bytes: float) -> "Work":
        """The same as one kernel of `bytes`, which a compiler leaves as it is."""
        return replace(self, bytes=bytes, kernels=1.0, fused=None)

    def seconds(self, machine: Machine) -> float:
        """On the device, in one micro-batch or update.

        Raises:
            UnsupportedError: the machine's rates do not tell.
        """
        if not self.count:
            return 0.0
        if self.kind == "product":
            m, n, k = self.sizes
            one = machine.product_s(self.precision, m, n, k) * machine.sustained
        elif self.kind == "attention":
            rows, heads, kv_heads, length, features = self.sizes
            one = IN_STEP * machine.attention_s(
                self.kernel or self._trunks(machine), rows=rows, heads=heads, kv_heads=kv_heads,
                length=length, features=features, causal=self.causal,
                backward=self.phase == "backward",
            )  # fmt: skip
        elif self.kind == "stream":
            loose = 1.0 if self.fused is None else UNFUSED
            one = loose * self.kernels * machine.traffic_s(self.bytes / self.kernels)
        else:
            one = machine.link_s(self.bytes, to_host=self.phase == "forward")
        return self.count * one

    def _trunks(self, machine: Machine) -> str:
        known = machine.kernels(self.phase == "backward")
        return next(kernel for kernel in TRUNKS if kernel in known)


@dataclass(frozen=True)
class StepTime:
    """Where a step's time would go, seconds.

    Args:
        device_s: by phase and kind of work, on the device, over all micro-batches.
        host_s: what the host takes to launch it.
    """

    device_s: Mapping[tuple[Phase, Kind], float]
    host_s: float

    @property
    def step_s(self) -> float:
        """The slower of both, and the edge between two steps."""
        return max(sum(self.device_s.values()), self.host_s) + EDGE_S

    def of(self, what: str) -> float:
        """Of a phase or a kind."""
        return sum(spent_s for key, spent_s in self.device_s.items() if what in key)


def step_time(work: Mapping[str, Work], machine: Machine, micro_batches: float) -> StepTime:
    """The time of a step from its pieces; nothing overlaps on one device but host and device."""
    device_s: dict[tuple[Phase, Kind], float] = {}
    launches = 0.0
    for piece in work.values():
        times = 1.0 if piece.phase == "optimizer" else micro_batches
        key = (piece.phase, piece.kind)
        device_s[key] = device_s.get(key, 0.0) + times * piece.seconds(machine)
        launches += times * piece.count * piece.kernels
    return StepTime(device_s, launches * machine.launch_s)
