"""Keep AdamW's states in the host's memory and compute the update there.

AdamW's two states are 8 of the 16 bytes that a weight costs, and are touched once a step. Here they
live on the host, beside a copy of the weights; gradients come down, torch's fused CPU AdamW
updates, and weights go up again. Work goes in pieces of `chunk_mib` through page-locked buffers,
two each way, so that copies run while the host computes. A weight is the same fp32 number on both
sides: the copy is read again only when somebody else wrote the weight (a resume), which torch's
version counters tell. Everything is by element, so a sharded parameter updates its local part.

Cost: the host's memory (12 bytes a weight), and a step that waits for the host. Whether the
gradient was finite must be known before the host may update: one wait for the device. The update
ends when the last piece is computed. It pays when a step's computation is long beside it: many
micro-batches, long rows. Left out: ZeRO-Offload's update that lags one step behind, which is not
the same run. Source: arXiv 2101.06840.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim.adamw import adamw

from headrace.assemble.sockets import Build, Route
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import DERIVED, Ledger
from headrace.costs.work import HostCopy, Stream
from headrace.optim.adamw import make_adamw
from headrace.parallel.layout import local_of
from headrace.plan.plan import OptimizerConfig
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

FP32 = 4
HOSTED = 28.0
"""Bytes over the host's link that take as long as the update of one number, 0.54 ns.

The host does that arithmetic, and copies go on under it. Steps predicted by it are 0.95 to 1.06 of
the four measured ones (160m and 1b, baselines and recipes, techniques.jsonl).
"""
LAUNCHED = 8e-5
"""Launches of an empty kernel that take as long as the update of one number, since the host
launches nothing meanwhile."""


def lying_as(like: Tensor, local: Tensor) -> Tensor:
    """Return a host tensor as the local part of what `like` is: checkpoints know its place."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, like._spec, requires_grad=False) if isinstance(like, DTensor) else local


class HostState(dict[str, Tensor]):
    """One parameter's states: whatever is put in goes to the host, also on a resume."""

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, lying_as(value, local_of(value.detach()).cpu()))


class NumberRange(NamedTuple):
    """A range of one parameter's numbers, and where it lies in the buffers."""

    group: dict[str, Any]
    parameter: nn.Parameter
    numbers: slice
    at: slice


class Lane:
    """Copies in one direction, beside the computation: a stream and two page-locked buffers."""

    def __init__(self, device: torch.device, numbers: int) -> None:
        cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if cuda else None
        self.buffers = [torch.empty(numbers, pin_memory=cuda) for _ in range(2)]
        self._copied: list[Any] = [None, None]

    def begin(self) -> AbstractContextManager[Any]:
        """Let copies that are issued inside come after all that is issued so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def issued(self, batch: int) -> None:
        """Note that all copies of a batch are on their way."""
        if self.stream is not None:
            self._copied[batch % 2] = self.stream.record_event()

    def wait(self, batch: int) -> None:
        """Wait until the copies that last used the batch's buffer are done."""
        if (event := self._copied[batch % 2]) is not None:
            event.synchronize()

    def join(self) -> None:
        """Let what is issued from now on come after the copies."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class HostAdamW(torch.optim.Optimizer):
    """Run AdamW with states and arithmetic on the host.

    Args:
        config: the baseline's optimizer.
        named: parameters on any device.
        chunk_numbers: numbers of a buffer.
    """

    def __init__(
        self, config: OptimizerConfig, named: Mapping[str, nn.Parameter], chunk_numbers: int
    ) -> None:
        groups = make_adamw(config, named).param_groups
        keys = ("params", "weight_decay", "lr", "betas", "eps")
        super().__init__([{k: g[k] for k in keys} for g in groups], {})
        self.state = defaultdict(HostState)
        self.found_inf: Tensor | None = None
        self.updates = self.moved_bytes = 0
        self.size = chunk_numbers
        self._weights: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._lanes: tuple[Lane, Lane] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter, or none where `found_inf` is 1: the one wait for the device."""
        if self.found_inf is not None and bool(self.found_inf):
            return
        batches = list(self._batches())
        if not batches:
            return
        if self._lanes is None:
            device = batches[0][0].parameter.device
            self._lanes = Lane(device, self.size), Lane(device, self.size)
        down, up = self._lanes
        self._down(batches[0], 0, down)
        for number, batch in enumerate(batches):
            if number + 1 < len(batches):
                self._down(batches[number + 1], number + 1, down)
            down.wait(number)
            up.wait(number)
            for piece in batch:
                self._update(piece, down.buffers[number % 2][piece.at])
                weight, _ = self._weights[piece.parameter]
                up.buffers[number % 2][piece.at].copy_(weight[piece.numbers])
            with up.begin():
                for piece in batch:
                    there = up.buffers[number % 2][piece.at]
                    _flat(piece.parameter)[piece.numbers].copy_(there, non_blocking=True)
                    self.moved_bytes += 2 * there.nbytes
                up.issued(number)
        up.join()
        for p in {piece.parameter: None for batch in batches for piece in batch}:
            self.state[p]["step"] += 1
            self._weights[p] = self._weights[p][0], local_of(p)._version
        self.updates += 1

    def _batches(self) -> Iterator[list[NumberRange]]:
        """Yield all numbers that have a gradient, as many at a time as a buffer holds."""
        batch: list[NumberRange] = []
        filled = 0
        for group in self.param_groups:
            for p in group["params"]:
                start, end = 0, local_of(p).numel() if p.grad is not None else 0
                while start < end:
                    count = min(end - start, self.size - filled)
                    at = slice(filled, filled + count)
                    batch.append(NumberRange(group, p, slice(start, start + count), at))
                    start, filled = start + count, filled + count
                    if filled == self.size:
                        yield batch
                        batch, filled = [], 0
        if batch:
            yield batch

    def _down(self, batch: list[NumberRange], number: int, lane: Lane) -> None:
        """Send a batch's gradients to the host, and read weights that somebody else wrote."""
        with lane.begin():
            for piece in batch:
                grad = local_of(piece.parameter.grad).reshape(-1)  # type: ignore[arg-type]
                lane.buffers[number % 2][piece.at].copy_(grad[piece.numbers], non_blocking=True)
            lane.issued(number)
        for piece in batch:
            p, version = piece.parameter, local_of(piece.parameter)._version
            if piece.numbers.start == 0 and self._weights.get(p, (None, -1))[1] != version:
                self._weights[p] = _flat(p).to("cpu", torch.float32, copy=True), version

    def _update(self, piece: NumberRange, grad: Tensor) -> None:
        """Update one piece on the host; the parameter's step is counted when all are done."""
        state = self.state[piece.parameter]
        if "step" not in state:
            state["step"] = torch.zeros(())
            for key in ("exp_avg", "exp_avg_sq"):
                local = torch.zeros(local_of(piece.parameter).shape)
                state[key] = lying_as(piece.parameter, local)
        weight, _ = self._weights[piece.parameter]
        first, second = (_flat(state[key])[piece.numbers] for key in ("exp_avg", "exp_avg_sq"))
        group = piece.group
        adamw(
            [weight[piece.numbers]],
            [grad],
            [first],
            [second],
            [],
            [state["step"].clone()],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _flat(tensor: Tensor) -> Tensor:
    """Return the local part as one dimension, in the same memory."""
    return local_of(tensor).detach().view(-1)


class OptimizerOffload(Technique[Build]):
    """Keep AdamW's states in the host's memory and compute the update there."""

    chunk_mib: int = Field(default=64, ge=1, le=4096)
    """MiB of each of the four page-locked buffers; tuner range 16 to 256."""

    rest: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    room: ClassVar[str] = "memory"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    composes: ClassVar[tuple[str, ...]] = ("routes",)
    excludes: ClassVar[Mapping[str, str]] = {
        "optimizer_in_backward": "both take the parameters of the baseline's AdamW; an update in "
        "the backward pass would wait for the host at every parameter (arXiv 2101.06840, "
        "section 4)",
    }
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:optimizer",)
    card: ClassVar[Card] = Card(
        buys="the memory of AdamW's states: 8 bytes per weight (derived)",
        costs=(
            "12 bytes per weight on the host, and a step that waits for the host: 20% in "
            "torchao's measurement (ViT-g, 4070 Ti), 1.9 to 4.2 times the step in Megatron "
            "Bridge's"
        ),
        helps="models that do not fit, with many micro-batches per step and many CPU cores",
        hurts="whatever fits: sharding over GPUs or fewer bytes of state are faster",
        source="arXiv 2101.06840; torchao.optim.CPUOffloadOptimizer",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a device beside the host."""
        if context.device != "cuda":
            return Unsupported(
                f"on {context.device} the optimizer's state is in the host's memory already",
                mend("device=cuda"),
                RefusalKind.DEVICE,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep only other optimizers' states on the device; the buffers are the host's."""
        ledger = ledger.updated_by(self.name(), lambda name, matrix: True)
        mine, learns = ledger.updates(self.name()), ledger.updates()
        slices, line = ledger.sizes.get("slices", 1.0), ledger.memory["optimizer"]
        others = sum(m.numbers / slices for n, m in learns.items() if n not in mine)
        moved = 2 * (ledger.memory["gradients"].bytes - 4 * others)  # two states for a gradient
        left = max(0.0, line.bytes - moved) if others else 0.0
        ledger = ledger.with_line("optimizer", replace(line, bytes=left))
        return self._worked(ledger, max(0.0, moved / 8))

    def _worked(self, ledger: Ledger, numbers: float) -> Ledger:
        """Add the host's update of so many numbers, which device and host wait for.

        The first piece's way down and the last one's way up stand alone; other copies go on while
        the host computes, and so does what else the update does on the device.
        """
        alone = 2 * min(self.chunk_mib * 2**20, FP32 * numbers)
        work = dict(ledger.work)
        work["update/host"] = HostCopy(
            "optimizer", 1, HOSTED * numbers + alone, launch=LAUNCHED * numbers
        )
        if isinstance(piece := work.pop("update/optimizer", None), Stream):
            left = piece.bytes - 7 * FP32 * numbers
            if left > 1:  # others' on the device
                work["update/optimizer"] = replace(piece, bytes=left)
        return replace(ledger, work=work, sizes={**ledger.sizes, DERIVED: 1.0})

    def apply(self, build: Build) -> None:
        """Route what the baseline's AdamW would have."""
        config, numbers = build.plan.optimizer, self.chunk_mib * 2**20 // 4

        def make(named: Mapping[str, nn.Parameter]) -> HostAdamW:
            return HostAdamW(config, named, numbers)

        build.routes.append(Route(self.name(), lambda name, p: True, make, rest=self.rest))

    def active(self, build: Build) -> Evidence:
        """Report bytes of state by where they lie, and bytes that went to the host and back."""
        optimizer = build.optimizers.get(self.name())
        state_bytes = {"host": 0, "device": 0}
        for state in optimizer.state.values() if optimizer is not None else ():
            for value in state.values():
                local = local_of(value)
                state_bytes["host" if local.device.type == "cpu" else "device"] += local.nbytes
        moved = getattr(optimizer, "moved_bytes", 0)
        return Evidence(
            active=moved > 0
            and state_bytes["host"] > 0
            and not state_bytes["device"]
            and build.device.type != "cpu",
            detail=f"holds {state_bytes['host']} bytes of state on the host and "
            f"{state_bytes['device']} on the device; moved {moved} bytes",
            numbers={f"{where}_bytes": count for where, count in state_bytes.items()}
            | {"moved_bytes": moved},
        )
