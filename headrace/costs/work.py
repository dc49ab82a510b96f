"""The time model's lines: pieces of a step that a machine's rates price.

A technique edits these lines as it edits those of memory, so that combinations come out of which
lines remain. A piece is one kind of kernel: matrix products and attention by their sizes, streams
by the bytes that they read and write. A stream has two costs: what eager torch does operation by
operation, and what one fused kernel needs; a compiler takes the second. A collective goes by the
bytes that a rank sends, and a step is longer by what no kernel beside it hides.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.core.errors import UnsupportedError
from headrace.core.remedy import mend
from headrace.costs import links
from headrace.costs.links import Operation
from headrace.costs.machine import Machine
from headrace.costs.rates import BACKWARD, SOFTMAX, START

Phase = Literal["forward", "recompute", "backward", "optimizer"]
Kind = Literal["product", "attention", "stream", "host link", "host", "collective", "wait"]
Beside = Literal["", "attention", "blocks"]
AROUND = ("head", "loss", "embedding")
"""How pieces of work begin that are not the blocks'."""
TRUNKS = ("cudnn", "flash", "efficient", "math")
"""Attention as torch chooses it: the first of these that the machine has."""
BESIDE = 1.18
"""How many times as long products take in a step as the formula says that they take alone. It is
from steps, as the next two: of 160m, 1b and 7b (techniques.jsonl, limits.jsonl), and of sixteen
workloads of 30M to 8B parameters by the rates of their own six GPUs (plans.jsonl). A GPU's clock
under load is in it: a step of more products does not lower it further."""
BESIDE_FP32 = 0.945
"""Likewise of fp32's own, which no matrix unit multiplies: of 160m and 1b, trunks and recipes, less
what the same plans take with `tf32` (techniques.jsonl)."""
IN_STEP = 1.04
"""Likewise attention."""
WIDE = ("fp32", "tf32")
"""Precisions of products whose operands are fp32."""
EFFICIENT_FP32 = 3.4
"""Times as long as in bf16 that torch's efficient attention takes in fp32: it makes each product of
three in TF32 (160m with `tf32`, techniques.jsonl)."""
UNHURRIED = ("flash", "flex", "efficient", "math")
"""Its kernels that are too slow to reach the limit of power: a step does not slow them."""
UNFUSED, HALVES = 1.38, 1.6
"""How many times as long eager streams take as their bytes, since many read parts of rows or repeat
what is small: eager steps of the same shapes, less products and attention. The second is of a gated
activation's, which read and write halves of rows: what `fused_swiglu` saved of trunks (1.53 at 1b,
1.67 at 160m, techniques.jsonl)."""
SKIPPING: Mapping[str, str] = {"flex": "flex", "varlen": "flash"}
"""Kernels that compute no scores that a mask forbids -> whose rates they have. Others are given the
mask as a tensor: every score, and of it a number for each, read at the memory's rate both ways
(sliding_window, prefix_lm and sparse_attention over cuDNN in techniques.jsonl)."""
SCORE = 2
"""bytes of a mask's number"""
TILE = 128
"""Tokens of a block of scores that flex attention computes whole or not at all."""
LOOKED_UP = 3.0
"""Blocks that the one on the diagonal takes longer where its mask asks a table for each score:
sparse_attention over flex, 2.8 at 160m, 3.3 at 1b, 2.8 to 5 in rows of 32,768."""
COLUMN = 0.5
"""Of the backward pass, the gradients of keys and values. One processor makes those of a block of
keys, and the longest such column ends last: sparse_attention of 1b in rows of 32,768, 0.45."""
CAP = 137.0
"""Features of a head that a soft cap of a score takes as long as: its tanh and that one's gradient
(logit_soft_cap over flex in techniques.jsonl: 126 to 147, trunks and recipes of 160m and 1b)."""
LINKED = 1.06
"""Likewise copies over the host's link (activation_offload in techniques.jsonl)."""
HOST_S = 5e-3
"""Of the host in each step, beside launching: steps of 16 rows took 16.5 ms, two thirds of them
launches, where their kernels take 11 (time_to_quality.jsonl)."""
EAGER, COMPILED = 3.0, 4.7
"""Times as long as the launch of an empty kernel that the host takes for one of a step: 20 us by
eager torch, which picks it, makes its result and notes its gradient; 32 us in compiled code, whose
kernels are fewer, with products and attention among them (kernels.jsonl, 160m by single rows)."""
CUSTOM, CUSTOM_COMPILED = 35.0, 13.0
"""Likewise for one of this project's kernels, a custom operation that Python launches. In compiled
code 88 and 110 us, forward and backward (the same rows). In eager code autograd's part is Python's
too, 0.24 ms: 160m with one fused technique in rows of two (techniques.jsonl), beside its trunk."""
REGION = 70.0
"""Likewise for a call of compiled code and its way back, 0.5 ms: 13 of them in a micro-batch
against two (the same rows)."""
RERUN, CHOSEN = 150.0, 600.0
"""Likewise for an eager block that runs again, 1 and 4 ms: Python sees each tensor that is saved,
and, where a policy chooses, each operation. From a CPU's steps (LOG.md); within the spread of a
GPU's (160m in rows of two, techniques.jsonl)."""
SLOW_HOST = 2.1
"""Times as long as by these that a host may take for the same launches: eager steps that wait for
them took 1.25 to 1.7 times as long within two minutes (the same rows), and 2.1 times on another
host (400m naive, forecasts.jsonl)."""
EDGE_S = 2.5e-3
"""Of each step on a GPU, in which nothing runs: 2.4, 2.6 and 3.9 ms (idle in kernels.jsonl)."""
CONTENTION = 0.15
"""Of the time in which a collective runs beside kernels, what these take longer: it holds some 20
of a GPU's 132 processors, and reads and writes the same memory. Assumed; nothing was measured."""
IDLE = "idle"
"""The size of a ledger that says what share of both passes a rank has nothing to do."""
TURNS: tuple[tuple[Phase, ...], ...] = (("forward",), ("recompute", "backward"), ("optimizer",))
"""Phases that run as one: a collective of theirs runs beside kernels of any of them."""


@dataclass(frozen=True)
class Work:
    """Equal kernels of a step.

    Args:
        phase: when they run; "optimizer" once a step, the others in each micro-batch.
        kind: what prices them; "host" is no kernel, but what the host does as long as `launch`;
            "wait" is only of a step's time.
        count: how many.
        bytes: that one reads and writes; of a product none; of attention those of each score, where
            plain products make them; of a collective those that a rank sends.
        kernels: of which one consists in eager torch.
        fused: bytes where a compiler makes it; None is no different.
        loose: how many times as long as its bytes a stream takes until a compiler makes it.
        sizes: of a product m, n, k; of attention rows, heads, key-value heads, length, features.
        precision: of a product; of attention where it is fp32's.
        kernel: of attention; "" is torch's choice.
        causal: of attention.
        masked: of attention, the share of its kernels whose mask is more than causal.
        seen: of causal scores, the share that such a mask leaves; None where nothing tells.
        column: of a pattern of blocks, the most blocks of queries that see one of keys; else 0.
        extra: of kernels that make masks themselves, what more is computed for each score, in
            features of a head that would take as long.
        capped: scores have a soft cap.
        launch: of one kernel by the host, in launches of an empty one.
        recorded: it is replayed with all others of its phase by one launch.
        unknown: why no rates tell its time, if so.
        operation: of a collective.
        reach: of a collective, from the first rank that takes part to the last, both counted; of
            attention, ranks that have its keys.
        beside: of a collective, kernels that go on meanwhile; "" is none, "blocks" is all but those
            that stand `AROUND` them.
        last: of a collective, it runs in the step's last micro-batch and in no other.
    """

    phase: Phase
    kind: Kind
    count: float = 1.0
    bytes: float = 0.0
    kernels: float = 1.0
    fused: float | None = None
    loose: float = UNFUSED
    sizes: tuple[int, ...] = ()
    precision: str = "bf16"
    kernel: str = ""
    causal: bool = True
    masked: float = 0.0
    seen: float | None = 1.0
    column: int = 0
    extra: float = 0.0
    capped: bool = False
    launch: float = EAGER
    recorded: bool = False
    unknown: str = ""
    operation: Operation = "all_reduce"
    reach: int = 1
    beside: Beside = ""
    last: bool = False

    def compiled(self) -> "Work":
        """The same as a compiler makes it."""
        if self.kind == "host":  # what Python does between operations
            return replace(self, count=0.0)
        launch = self.launch
        if self.phase != "optimizer":  # no compiler sees it
            if launch >= CUSTOM:
                launch *= CUSTOM_COMPILED / CUSTOM
            elif 0 < launch < CUSTOM_COMPILED:
                launch = COMPILED
        if self.fused is None:
            return replace(self, launch=launch)
        return replace(self, bytes=self.fused, kernels=1.0, fused=None, launch=launch, unknown="")

    def whole(self, bytes: float, launch: float = EAGER) -> "Work":
        """The same as one kernel of `bytes`, which a compiler leaves as it is."""
        return replace(self, bytes=bytes, kernels=1.0, fused=None, launch=launch)

    def seconds(self, machine: Machine) -> float:
        """On the device, in one micro-batch or update.

        Raises:
            UnsupportedError: the machine's rates do not tell.
        """
        if not self.count or self.kind == "host":
            return 0.0
        if self.unknown:
            raise UnsupportedError(self.unknown, "")
        if self.kind == "product":
            beside = BESIDE_FP32 if self.precision == "fp32" else BESIDE
            one = beside * machine.product_s(self.precision, *self.sizes, plain=True)
        elif self.kind == "attention":
            one = self._mixing_s(machine)
        elif self.kind == "collective":
            each = self.bytes / self.kernels
            one = self.kernels * links.collective_s(
                machine.links, machine.name, self.operation, each, self.reach
            )
        elif self.kind == "stream":
            loose = 1.0 if self.fused is None else self.loose
            one = loose * self.kernels * machine.traffic_s(self.bytes / self.kernels)
        else:
            one = LINKED * machine.link_s(self.bytes, to_host=self.phase == "forward")
        return self.count * one

    def _mixing_s(self, machine: Machine) -> float:
        """One kernel of attention, the mean of those with and without a mask."""
        if self.masked and self.reach > 1:
            raise UnsupportedError(
                "a mask over rows of which ranks hold parts was not timed",
                mend("mesh.context=1", "-context_parallel"),
            )
        kernel = self.kernel or self._trunks(machine)
        if self.capped and kernel not in SKIPPING:
            raise UnsupportedError(
                "a soft cap over plain products was not timed", mend("+flex_attention")
            )
        plain_s = self._scores_s(machine, SKIPPING.get(kernel, kernel), self.causal)
        rows, heads, _, length, features = self.sizes
        if self.precision in WIDE and kernel in SKIPPING:
            raise UnsupportedError(
                f"{kernel} attention was not timed in fp32", mend("model.precision=bf16")
            )
        if kernel in SKIPPING:
            masked_s = self._skipping_s(machine, kernel, plain_s) if self.masked else plain_s
            more = 1 + (self.extra + CAP * self.capped) / (features + SOFTMAX)
            return more * (plain_s + self.masked * (masked_s - plain_s))
        if not self.masked:
            return plain_s
        each = SCORE * (1 + (self.precision in WIDE))
        bias_s = machine.traffic_s(each * rows * heads * length**2)
        masked_s = self._scores_s(machine, kernel, causal=False) + bias_s
        return plain_s + self.masked * (masked_s - plain_s)

    def _skipping_s(self, machine: Machine, kernel: str, plain_s: float) -> float:
        """One kernel that computes the blocks that a mask leaves, by the seconds of all causal."""
        if self.seen is None:
            raise UnsupportedError(
                f"what {kernel} attention skips under this mask is not known before it runs",
                mend(f"-{kernel}_attention"),
            )
        rows, heads, kv_heads, length, features = self.sizes
        count, starts = math.ceil(length / TILE), START / (features + SOFTMAX)
        mean = (count + 1) / 2
        looked_up = LOOKED_UP if self.column else 0.0
        share = (self.seen * mean + starts + looked_up) / (mean + starts)
        column_s = 0.0
        if self.phase == "backward":
            block_s = machine.processors * plain_s / (rows * heads * count * mean)
            column_s = COLUMN * block_s * self.column * heads / kv_heads
        return share * plain_s + column_s

    def _scores_s(self, machine: Machine, kernel: str, causal: bool) -> float:
        """All scores of one kernel, in a step."""
        rows, heads, kv_heads, length, features = self.sizes
        slower = 1.0 if kernel in UNHURRIED else IN_STEP
        if self.precision in WIDE:
            if kernel == "math":
                return self._plain_products_s(machine)
            slower = EFFICIENT_FP32
        return slower * machine.attention_s(
            kernel, rows=rows, heads=heads, kv_heads=kv_heads, length=length, features=features,
            causal=causal, backward=self.phase == "backward",
        )  # fmt: skip

    def _plain_products_s(self, machine: Machine) -> float:
        """All scores of fp32 by torch's plain products, which keep them in memory."""
        rows, heads, _, length, features = self.sizes
        scores, n = rows * heads * length**2, 8192
        flops = 4 * (BACKWARD if self.phase == "backward" else 1) * features * scores
        beside = BESIDE_FP32 if self.precision == "fp32" else BESIDE
        rate = 2 * n**3 / machine.product_s(self.precision, n, n, n, plain=True)
        return beside * flops / rate + machine.traffic_s(self.bytes * scores)

    def _trunks(self, machine: Machine) -> str:
        """Of torch's kernels that which it takes: none of fp32's knows groups of keys."""
        known = machine.kernels(self.phase == "backward")
        if self.precision in WIDE:
            _, heads, kv_heads, *_ = self.sizes
            return "efficient" if heads == kv_heads and "efficient" in known else "math"
        return next(kernel for kernel in TRUNKS if kernel in known)


def collective(
    sizes: Mapping[str, float], axis: str, phase: Phase, operation: Operation, bytes: float,
    count: float = 1.0, **how: Any,
) -> Work:  # fmt: skip
    """Equal collectives of a step.

    Args:
        sizes: of a ledger, which tell the ranks of each axis.
        axis: of the mesh, "shard" or "world".
        phase: when they run.
        operation: which.
        bytes: of one's whole tensor, as `links.sent` takes them.
        count: how many.
        how: other fields of `Work`.
    """
    ranks = int(sizes[f"{axis}_ranks"])
    each, reach = links.sent(operation, bytes, ranks), int(sizes.get(f"{axis}_reach", ranks))
    return Work(phase, "collective", count, each, operation=operation, reach=reach, **how)


@dataclass(frozen=True)
class StepTime:
    """Where a step's time would go, seconds.

    Args:
        device_s: by phase and kind of work, on the device, over all micro-batches; of collectives
            what no kernel hides, and what they make kernels slower.
        host_s: what the host takes to launch it, and does besides; 0 where the host is the device.
        edge_s: between two steps, in which nothing runs.
    """

    device_s: Mapping[tuple[Phase, Kind], float]
    host_s: float
    edge_s: float = EDGE_S

    @property
    def by_host(self) -> bool:
        """Whether the device waits for launches."""
        return self.host_s >= sum(self.device_s.values())

    @property
    def step_s(self) -> float:
        """The slower of both, and the edge between two steps."""
        return max(sum(self.device_s.values()), self.host_s) + self.edge_s

    @property
    def work_s(self) -> dict[str, float]:
        """On the device by kind, both passes as one; what is done again, and the update, apart."""
        found = dict[str, float]()
        for (phase, kind), spent_s in self.device_s.items():
            name = f"{kind}, {phase}" if phase in ("recompute", "optimizer") else kind
            found[name] = found.get(name, 0.0) + spent_s
        return found

    def of(self, what: str) -> float:
        """Of a phase or a kind."""
        return sum(spent_s for key, spent_s in self.device_s.items() if what in key)


def step_time(
    work: Mapping[str, Work], machine: Machine, micro_batches: float, idle: float = 0.0
) -> StepTime:
    """The time of a step from its pieces.

    On one device nothing overlaps but the host, which launches, and copies over its link, which a
    phase hides as far as its other work reaches: what is left of them counts. So it does of what
    ranks send each other while they compute.

    Args:
        work: pieces by name.
        machine: the rates.
        micro_batches: of a step.
        idle: share of both passes in which a rank has nothing to do.
    """
    device_s: dict[tuple[Phase, Kind], float] = {}
    launches, replayed = 0.0, dict[Phase, float]()
    for piece in work.values():
        times = 1.0 if piece.phase == "optimizer" or piece.last else micro_batches
        if piece.kind not in ("host", "collective"):
            key = (piece.phase, piece.kind)
            device_s[key] = device_s.get(key, 0.0) + times * piece.seconds(machine)
        if piece.recorded:
            replayed[piece.phase] = times
        else:
            launches += times * piece.count * piece.kernels * piece.launch
    for phase, kind in list(device_s):
        if kind == "host link":
            others = sum(s for (p, k), s in device_s.items() if p == phase and k != kind)
            device_s[phase, kind] = max(0.0, device_s[phase, kind] - others)
    for turn in TURNS:
        pieces = {n: piece for n, piece in work.items() if piece.phase in turn}
        if any(piece.kind == "collective" for piece in pieces.values()):
            times = 1.0 if "optimizer" in turn else micro_batches
            device_s[turn[-1], "collective"] = _exposed_s(pieces, machine, times)
    if idle:
        passes_s = sum(s for (phase, _), s in device_s.items() if phase != "optimizer")
        device_s["backward", "wait"] = passes_s * idle / (1 - idle)
    graphs = sum(replayed.values())
    host_s = HOST_S + launches * machine.launch_s + graphs * machine.graph_launch_s
    return StepTime(device_s, host_s)


def _exposed_s(pieces: Mapping[str, Work], machine: Machine, micro_batches: float) -> float:
    """What collectives of phases that run as one add to a step.

    They share one link, so they run in turn. Of those that run beside kernels, what is longer than
    these waits; what is not makes them slower by `CONTENTION`.
    """
    sent_s: dict[tuple[Beside, bool], float] = {}
    attention_s = blocks_s = 0.0
    for name, piece in pieces.items():
        if piece.kind == "collective":
            key = (piece.beside, piece.last)
            sent_s[key] = sent_s.get(key, 0.0) + piece.seconds(machine)
        elif piece.kind != "host link" and not name.startswith(AROUND):
            blocks_s += piece.seconds(machine)
            attention_s += piece.seconds(machine) * (piece.kind == "attention")
    whole_s = 0.0
    for last, times in ((False, micro_batches - 1), (True, 1.0)):
        taken_s = {
            beside: sent_s.get((beside, False), 0.0) + last * sent_s.get((beside, True), 0.0)
            for beside in ("", "attention", "blocks")
        }
        under_s = min(taken_s["attention"], attention_s)
        under_s += min(taken_s["blocks"], blocks_s - under_s)
        whole_s += times * (sum(taken_s.values()) - (1 - CONTENTION) * under_s)
    return whole_s
