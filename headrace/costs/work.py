"""The pieces of a step are priced by a machine's rates: they are the lines of the time model.

A technique edits these lines as it edits those of memory, so that combinations come out of which
lines remain. Each piece is one kind of kernel, or what the host does:

- `Matmul` and `Attention` are priced by their sizes;
- `Stream` and `HostCopy` by the bytes that they read and write. A stream has two costs: what eager
  torch does operation by operation, and what one fused kernel needs; a compiler takes the second;
- `Collective` by the bytes that a rank sends: a step is longer by what no kernel beside it hides;
- `HostWork` by launches of an empty kernel.

The numbers by which a kernel is slower in a step than alone are fitted to measured steps
(`constants.toml`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from headrace.core.errors import UnsupportedError
from headrace.core.remedy import mend
from headrace.costs import links
from headrace.costs.constants import number
from headrace.costs.links import CollectiveOperation
from headrace.costs.machine import Machine
from headrace.costs.rates import BACKWARD, SOFTMAX, START, Shape

Phase = Literal["forward", "recompute", "backward", "optimizer"]
WorkKind = Literal[
    "product", "attention", "stream", "host link", "host", "collective", "network", "wait"
]
"""The kinds of work that a step's seconds are summed by. The words are keys of JSON output."""
Beside = Literal["", "attention", "blocks"]
AROUND = ("head", "loss", "embedding")
"""How the names of pieces begin that do not belong to the blocks."""
TORCHS = ("cudnn", "flash", "efficient", "math")
"""Attention as torch chooses it: the first of these kernels that the machine has."""
MATMUL_IN_STEP, FP32_MATMUL_IN_STEP = number("matmul_in_step"), number("fp32_matmul_in_step")
ATTENTION_IN_STEP, HOST_COPY_IN_STEP = number("attention_in_step"), number("host_copy_in_step")
WIDE = ("fp32", "tf32")
"""Precisions of matmuls whose operands are fp32."""
EFFICIENT_FP32 = number("efficient_attention_fp32")
UNHURRIED = ("flash", "flex", "efficient", "math")
"""Attention kernels that are too slow to reach the limit of power: a step does not slow them."""
UNFUSED, HALVES = number("eager_stream"), number("eager_gated_stream")
SKIPPING: Mapping[str, str] = {"flex": "flex", "varlen": "flash"}
"""Kernels that compute no scores that a mask forbids, and whose rates they have. Other kernels take
the mask as a tensor: they compute every score, and read a number for each at the memory's rate both
ways (sliding_window, prefix_lm and sparse_attention over cuDNN in techniques.jsonl)."""
SCORE_BYTES = 2
"""Bytes of a mask's number in half precision."""
TILE = 128
"""Tokens of a block of scores that flex attention computes whole or not at all."""
LOOKED_UP, COLUMN, CAP = number("flex_table"), number("flex_key_column"), number("score_cap")
HOST_S, EDGE_S = number("host_per_step"), number("step_edge")
EAGER, COMPILED = number("launch_eager"), number("launch_compiled")
CUSTOM, CUSTOM_COMPILED = number("launch_custom"), number("launch_custom_compiled")
REGION, RERUN, CHOSEN = number("call_compiled"), number("rerun_block"), number("rerun_chosen")
SLOW_HOST, CONTENTION = number("slow_host"), number("contention")
IDLE = "idle"
"""Name of the size of a ledger that is the share of both passes in which a rank has nothing to
do."""
OVERLAPPING: tuple[tuple[Phase, ...], ...] = (
    ("forward",),
    ("recompute", "backward"),
    ("optimizer",),
)
"""Phases that run as one: a collective of theirs runs beside kernels of any of them."""


@dataclass(frozen=True)
class Work:
    """Work is a number of equal pieces of a step.

    Args:
        phase: when they run; "optimizer" once a step, the others in each micro-batch.
        count: how many there are.
        launch: what the host takes to launch one kernel, in launches of an empty one.
        recorded: all pieces of the phase that are recorded are replayed by one launch.
        unknown: why their time is unavailable; "" where it is predicted.
    """

    kind: ClassVar[WorkKind]

    phase: Phase
    count: float = 1.0
    launch: float = field(default=EAGER, kw_only=True)
    recorded: bool = field(default=False, kw_only=True)
    unknown: str = field(default="", kw_only=True)

    def compiled(self) -> Self:
        """Return the same as a compiler makes it."""
        return replace(self, launch=self._compiled_launch())

    def with_bytes(self, edit: Callable[[float], float]) -> Self:
        """Return the same with edited bytes, where a piece goes by bytes; else the piece itself."""
        return self

    def divided(self, parts: float) -> Self:
        """Return the same with the bytes of one of so many parts, a compiler's bytes too."""
        return self.with_bytes(lambda bytes: bytes / parts)

    def seconds(self, machine: Machine) -> float:
        """Return the seconds on the device in one micro-batch or update.

        Raises:
            UnsupportedError: the machine's rates do not cover it.
        """
        if not self.count:
            return 0.0
        if self.unknown:
            raise UnsupportedError(self.unknown, "")
        return self.count * self.one_s(machine)

    def one_s(self, machine: Machine) -> float:
        """Return the seconds of one piece on the device."""
        raise NotImplementedError

    def times(self, micro_batches: float) -> float:
        """Return how often the pieces run in a step of so many micro-batches."""
        return 1.0 if self.phase == "optimizer" else micro_batches

    def launches(self, micro_batches: float) -> float:
        """Return what the host takes in a step, in launches of an empty kernel."""
        return self.times(micro_batches) * self.count * self.launch

    @property
    def launched_by(self) -> Literal["eager", "compiled", "other"]:
        """Return which code launches its kernels; custom operations are other code."""
        return (
            "compiled" if self.launch == COMPILED else "other" if self.launch > EAGER else "eager"
        )

    def _compiled_launch(self) -> float:
        """Return what a compiler makes of the launch of one kernel."""
        if self.phase == "optimizer":  # no compiler sees it
            return self.launch
        if self.launch >= CUSTOM:
            return self.launch * (CUSTOM_COMPILED / CUSTOM)
        return COMPILED if 0 < self.launch < CUSTOM_COMPILED else self.launch


@dataclass(frozen=True)
class Matmul(Work):
    """A matmul here is a number of equal matrix multiplications.

    Args:
        sizes: m, n, k of [m, k] x [k, n].
        precision: the precision of the operands.
    """

    kind = "product"

    sizes: tuple[int, ...] = ()
    precision: str = "bf16"

    @property
    def flops(self) -> float:
        """Return the multiplications and additions of one matmul."""
        return 2.0 * math.prod(self.sizes)

    def one_s(self, machine: Machine) -> float:
        """Return the seconds of one matmul in a step."""
        slower = FP32_MATMUL_IN_STEP if self.precision == "fp32" else MATMUL_IN_STEP
        m, n, k = self.sizes
        return slower * machine.matmul_s(self.precision, m, n, k, plain=True)


@dataclass(frozen=True)
class Stream(Work):
    """A stream is a number of equal operations that go by the bytes that they read and write.

    Args:
        bytes: bytes that one operation reads and writes.
        kernels: kernels of which one consists in eager torch.
        fused: bytes where a compiler makes it; None where a compiler leaves it as it is.
        loose: how many times as long as its bytes it takes until a compiler makes it.
    """

    kind = "stream"

    bytes: float = 0.0
    kernels: float = 1.0
    fused: float | None = None
    loose: float = UNFUSED

    def compiled(self) -> Self:
        """Return the same as a compiler makes it."""
        launch = self._compiled_launch()
        if self.fused is None:
            return replace(self, launch=launch)
        return replace(self, bytes=self.fused, kernels=1.0, fused=None, launch=launch, unknown="")

    def whole(self, bytes: float, launch: float = EAGER) -> Self:
        """Return the same as one kernel of `bytes`, which a compiler leaves as it is."""
        return replace(self, bytes=bytes, kernels=1.0, fused=None, launch=launch)

    def with_bytes(self, edit: Callable[[float], float]) -> Self:
        """Return the same with edited bytes; a compiler's bytes stay."""
        return replace(self, bytes=edit(self.bytes))

    def divided(self, parts: float) -> Self:
        """Return the same with the bytes of one of so many parts, a compiler's bytes too."""
        fused = None if self.fused is None else self.fused / parts
        return replace(self, bytes=self.bytes / parts, fused=fused)

    def one_s(self, machine: Machine) -> float:
        """Return the seconds of one operation in a step."""
        loose = 1.0 if self.fused is None else self.loose
        return loose * self.kernels * machine.traffic_s(self.bytes / self.kernels)

    def launches(self, micro_batches: float) -> float:
        """Return what the host takes in a step, in launches of an empty kernel."""
        return self.times(micro_batches) * self.count * self.kernels * self.launch


@dataclass(frozen=True)
class HostCopy(Work):
    """A copy goes over the host's link: to the host in the forward pass, else from it.

    Args:
        bytes: bytes of one copy.
    """

    kind = "host link"

    bytes: float = 0.0

    def with_bytes(self, edit: Callable[[float], float]) -> Self:
        """Return the same with edited bytes."""
        return replace(self, bytes=edit(self.bytes))

    def one_s(self, machine: Machine) -> float:
        """Return the seconds of one copy in a step."""
        return HOST_COPY_IN_STEP * machine.link_s(self.bytes, to_host=self.phase == "forward")


@dataclass(frozen=True)
class HostWork(Work):
    """The host does this between operations, as long as `launch` each."""

    kind = "host"

    @property
    def launched_by(self) -> Literal["eager", "compiled", "other"]:
        """Return whether it is a call of compiled code; else it is other code of the host."""
        return "compiled" if self.launch == REGION else "other"

    def compiled(self) -> Self:
        """Return nothing of it: a compiler leaves no Python between operations."""
        return replace(self, count=0.0)

    def seconds(self, machine: Machine) -> float:
        """Return 0: it takes no time of the device."""
        return 0.0


@dataclass(frozen=True)
class Collective(Work):
    """A collective is a number of equal messages between ranks.

    Args:
        bytes: bytes that a rank sends in one.
        kernels: calls of which one consists.
        operation: what ranks do together.
        reach: ranks from the first that takes part to the last, both counted.
        ranks: how many take part; 0 where all between them do.
        beside: kernels that go on meanwhile; "" is none, "blocks" is all but those `AROUND` them.
        last: they run in the step's last micro-batch and in no other.
    """

    kind = "collective"

    bytes: float = 0.0
    kernels: float = 1.0
    operation: CollectiveOperation = "all_reduce"
    reach: int = 1
    ranks: int = 0
    beside: Beside = ""
    last: bool = False

    def with_bytes(self, edit: Callable[[float], float]) -> Self:
        """Return the same with edited bytes."""
        return replace(self, bytes=edit(self.bytes))

    def one_s(self, machine: Machine) -> float:
        """Return the seconds of one message, alone."""
        each = self.bytes / self.kernels
        return self.kernels * links.collective_s(
            machine.links,
            machine.name,
            self.operation,
            each,
            self.reach,
            ranks=self.ranks,
            network=machine.network_bytes_per_s or 0.0,
        )

    def times(self, micro_batches: float) -> float:
        """Return how often the messages are sent in a step of so many micro-batches."""
        return 1.0 if self.last else super().times(micro_batches)

    def launches(self, micro_batches: float) -> float:
        """Return what the host takes in a step, in launches of an empty kernel."""
        return self.times(micro_batches) * self.count * self.kernels * self.launch


@dataclass(frozen=True)
class ScoreMask:
    """A mask that is more than causal says what it does to attention's scores.

    Args:
        layers: share of the kernels that have the mask.
        seen: share of causal scores that it leaves; None where it is unavailable before a run.
        column: most blocks of queries that see one block of keys, of a pattern of blocks; else 0.
        extra: what a kernel that makes the mask itself computes more for each score, in features of
            a head that would take as long.
    """

    layers: float = 0.0
    seen: float | None = 1.0
    column: int = 0
    extra: float = 0.0


@dataclass(frozen=True)
class Attention(Work):
    """Attention is a number of equal kernels.

    Args:
        sizes: rows, heads, key-value heads, tokens of a row, features of a head.
        kernel: its name; "" is torch's choice.
        causal: a token sees only those before it.
        precision: "fp32" or "tf32" where operands are fp32; any other is half precision.
        score_bytes: bytes that each score moves where plain matmuls make it, in fp32.
        fused: the same where a compiler makes it; None where that is no different.
        mask: a mask that is more than causal.
        capped: scores have a soft cap.
        reach: ranks that have its keys.
    """

    kind = "attention"

    sizes: Shape = (0, 0, 0, 0, 0)
    kernel: str = ""
    causal: bool = True
    precision: str = "bf16"
    score_bytes: float = 0.0
    fused: float | None = None
    mask: ScoreMask = ScoreMask()
    capped: bool = False
    reach: int = 1

    def compiled(self) -> Self:
        """Return the same as a compiler makes it."""
        launch = self._compiled_launch()
        if self.fused is None:
            return replace(self, launch=launch)
        return replace(self, score_bytes=self.fused, fused=None, launch=launch, unknown="")

    def one_s(self, machine: Machine) -> float:
        """Return the seconds of one kernel, the mean of those with the mask and without it."""
        mask = self.mask
        if mask.layers and self.reach > 1:
            raise UnsupportedError(
                "a mask over rows of which ranks hold parts was not timed",
                mend("mesh.context=1", "-context_parallel"),
            )
        kernel = self.kernel or self._torchs(machine)
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
            masked_s = self._skipping_s(machine, kernel, plain_s) if mask.layers else plain_s
            more = 1 + (mask.extra + CAP * self.capped) / (features + SOFTMAX)
            return more * (plain_s + mask.layers * (masked_s - plain_s))
        if not mask.layers:
            return plain_s
        each = SCORE_BYTES * (1 + (self.precision in WIDE))
        bias_s = machine.traffic_s(each * rows * heads * length**2)
        masked_s = self._scores_s(machine, kernel, causal=False) + bias_s
        return plain_s + mask.layers * (masked_s - plain_s)

    def _skipping_s(self, machine: Machine, kernel: str, plain_s: float) -> float:
        """Return the seconds of one kernel that computes only the blocks that the mask leaves.

        Args:
            machine: the rates.
            kernel: the kernel's name.
            plain_s: its seconds of all causal scores.
        """
        if self.mask.seen is None:
            raise UnsupportedError(
                f"what {kernel} attention skips under this mask is not known before it runs",
                mend(f"-{kernel}_attention"),
            )
        rows, heads, kv_heads, length, features = self.sizes
        count, starts = math.ceil(length / TILE), START / (features + SOFTMAX)
        mean = (count + 1) / 2
        looked_up = LOOKED_UP if self.mask.column else 0.0
        share = (self.mask.seen * mean + starts + looked_up) / (mean + starts)
        column_s = 0.0
        if self.phase == "backward":
            block_s = machine.processors * plain_s / (rows * heads * count * mean)
            column_s = COLUMN * block_s * self.mask.column * heads / kv_heads
        return share * plain_s + column_s

    def _scores_s(self, machine: Machine, kernel: str, causal: bool) -> float:
        """Return the seconds of all scores of one kernel in a step."""
        rows, heads, kv_heads, length, features = self.sizes
        slower = 1.0 if kernel in UNHURRIED else ATTENTION_IN_STEP
        if self.precision in WIDE:
            if kernel == "math":
                return self._plain_matmuls_s(machine)
            slower = EFFICIENT_FP32
        return slower * machine.attention_s(
            kernel,
            rows=rows,
            heads=heads,
            kv_heads=kv_heads,
            length=length,
            features=features,
            causal=causal,
            backward=self.phase == "backward",
        )

    def _plain_matmuls_s(self, machine: Machine) -> float:
        """Return the seconds of fp32 scores by torch's plain matmuls, which keep them in memory."""
        rows, heads, _, length, features = self.sizes
        scores, n = rows * heads * length**2, 8192
        flops = 4 * (BACKWARD if self.phase == "backward" else 1) * features * scores
        slower = FP32_MATMUL_IN_STEP if self.precision == "fp32" else MATMUL_IN_STEP
        rate = 2 * n**3 / machine.matmul_s(self.precision, n, n, n, plain=True)
        return slower * flops / rate + machine.traffic_s(self.score_bytes * scores)

    def _torchs(self, machine: Machine) -> str:
        """Return the kernel that torch takes: in fp32 none knows groups of keys."""
        known = machine.kernels(self.phase == "backward")
        if self.precision in WIDE:
            _, heads, kv_heads, *_ = self.sizes
            return "efficient" if heads == kv_heads and "efficient" in known else "math"
        return next(kernel for kernel in TORCHS if kernel in known)


def collective(
    sizes: Mapping[str, float],
    axis: str,
    phase: Phase,
    operation: CollectiveOperation,
    bytes: float,
    count: float = 1.0,
    **how: Any,
) -> Collective:
    """Return equal collectives of a step.

    Args:
        sizes: the sizes of a ledger, which hold the ranks of each axis.
        axis: the axis of the mesh, "shard" or "world".
        phase: when they run.
        operation: what ranks do together.
        bytes: bytes of one's whole tensor, as `links.sent` takes them.
        count: how many there are.
        how: other fields of `Collective`.
    """
    ranks = int(sizes[f"{axis}_ranks"])
    each, reach = links.sent(operation, bytes, ranks), int(sizes.get(f"{axis}_reach", ranks))
    how = {"ranks": ranks if operation != "send" else 0, **how}
    return Collective(phase, count, each, operation=operation, reach=reach, **how)
