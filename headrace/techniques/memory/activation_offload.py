"""Send what blocks keep for their backward pass to the host, and fetch it in time.

A block's saved tensors lie idle from its forward until its backward. Here torch's saved-tensor
hooks stand around every block but the last `keep_last`: a tensor that autograd saves is copied to
page-locked memory on a stream of its own while the block goes on computing, and leaves the device
when the next block has run. When a block's backward begins, the tensors of the block before it are
fetched. So two blocks' tensors are on the device at any time, however deep the model: the one that
computes, and the one that comes or goes. Copies change no bit. The hooks stand outside of compiled
code, which saves fewer tensors, and outside of a checkpointed block, of which the input is sent.

What is sent is a storage, once for all views of it in a block. Parameters, their half-precision
copies (autocast holds those until the forward ends) and what layers share stay where they are;
sending them would free nothing. Device memory is taken and given back in the order of the computing
stream, so a copy that is late makes it wait and never lets memory grow.

Cost: page-locked memory of the host, which torch rounds up to a power of two per tensor and which
is kept for the next step; and the wire, both ways. A block is hidden if its copy is shorter than
its computation: long rows and wide models compute more per byte. Left out: choosing tensors by
computation per byte, and results that selective checkpointing keeps, which no hook sees.
Source: torch.autograd.graph.saved_tensors_hooks; torchtune's OffloadActivations; arXiv 1602.08124.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from headrace.assemble.sockets import Build, Forward
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.decoder_work import offloaded
from headrace.costs.ledger import Ledger, Line
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

STAYING_LINES = ("weight_cast", "mask_copy")
"""Lines of a block that somebody else holds anyway, or that no hook sees."""
VIEWS = frozenset(
    {
        "ToCopyBackward0",
        "TBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "AliasBackward0",
        "SliceBackward0",
    }
)
"""Nodes that make another view or precision of a weight."""


class HostTransfer:
    """Copies beside the computation, and the host's buffers for them.

    All copies go through one stream, in turn: a buffer is read before it is written again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[int, list[Tensor]] = {}

    def buffer(self, count: int) -> Tensor:
        """Return a buffer of `count` bytes of the host, page-locked for a GPU."""
        if free := self._free.get(count):
            return free.pop()
        return torch.empty(count, dtype=torch.uint8, pin_memory=self.stream is not None)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back, to be used again."""
        self._free.setdefault(buffer.nbytes, []).append(buffer)

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy after all that is computed so far; returns the event of its end."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: Any) -> None:
        """Let what is computed from now on come after `event`."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


@dataclass
class Counts:
    """Bytes of the newest step, and tensors that were saved in it."""

    step: float = -1.0
    sent_bytes: int = 0
    fetched_bytes: int = 0
    never_left_bytes: int = 0
    """needed again before they had left the device"""
    sent: int = 0
    kept: int = 0


class SavedStorage:
    """A part is one storage of a block's saved tensors: on the device, on the host, or on both.

    It lives as long as autograd holds a tensor in it, and then gives its buffer back.
    """

    def __init__(self, transfer: HostTransfer, counts: Counts, device: Tensor) -> None:
        self.transfer, self.counts = transfer, counts
        self.device: Tensor | None = device
        self.host = transfer.buffer(device.nbytes)
        self._sent = transfer.copy(self.host, device)
        self._came: Any = None
        self._coming = self._fetched = False
        counts.sent_bytes += device.nbytes
        counts.sent += 1

    def leave(self) -> None:
        """Drop the device's copy as soon as the host has one."""
        if self.device is not None and not self._fetched:
            self.transfer.wait(self._sent)
            self.device = None

    def fetch(self) -> None:
        """Begin to bring it back, into memory that the computing stream takes and gives back."""
        if self._fetched:
            return
        self._fetched = True
        if self.device is not None:
            self.counts.never_left_bytes += self.host.nbytes
            return
        self.device = torch.empty(self.host.nbytes, dtype=torch.uint8, device=self.transfer.device)
        self._came, self._coming = self.transfer.copy(self.device, self.host), True
        self.counts.fetched_bytes += self.host.nbytes

    def arrive(self) -> Tensor | None:
        """Return its bytes on the device, for what is computed from now on."""
        if self._coming:
            self.transfer.wait(self._came)
            self._coming = False
        return self.device

    def __del__(self) -> None:
        self.arrive()  # its memory must not be taken while the copy is writing
        self.transfer.give_back(self.host)


class BlockActivations:
    """A group is what one block saved in one forward pass."""

    def __init__(
        self, layer: int, before: "BlockActivations | None", foreign: frozenset[int]
    ) -> None:
        self.layer, self.before, self.foreign = layer, before, foreign
        self.parts: dict[int, weakref.ref[SavedStorage]] = {}
        """by the address of their storage on the device"""

    def live_parts(self) -> Iterator[SavedStorage]:
        """Yield the parts that autograd still holds, the last saved first."""
        for reference in reversed(list(self.parts.values())):
            if (part := reference()) is not None:
                yield part

    def fetch(self) -> None:
        """Begin to bring everything back, in the order of the backward pass."""
        for part in self.live_parts():
            part.fetch()

    def leave(self) -> None:
        """Leave nothing of it on the device."""
        for part in self.live_parts():
            part.leave()


class Packed(NamedTuple):
    """What autograd holds in place of a tensor: the tensor, or where its numbers are."""

    group: BlockActivations
    tensor: Tensor | None
    part: SavedStorage | None = None
    dtype: torch.dtype = torch.uint8
    place: tuple[Any, ...] = ()
    """offset, size and stride in the storage"""


class Offload:
    """The hooks around blocks, and which block's tensors are where.

    Args:
        transfer: what copies.
        min_bytes: smaller storages stay.
        sends: layers whose tensors are sent.
        last: the last layer of this rank.
        step: the step that runs.
    """

    def __init__(
        self,
        transfer: HostTransfer,
        *,
        min_bytes: int,
        sends: frozenset[int],
        last: int,
        step: Callable[[], float],
    ) -> None:
        self.transfer, self.min_bytes, self.sends, self.last = transfer, min_bytes, sends, last
        self.counts = Counts()
        self._step = step
        self._newest: BlockActivations | None = None
        self._at: BlockActivations | None = None

    def wrap(self, forward: Forward, layer: int) -> Forward:
        """Return the block's forward between the hooks."""

        def offloaded(x_BTD: Tensor, shared: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(x_BTD, shared)
            group = self._enter(layer, shared)
            with saved_tensors_hooks(partial(self.pack, group), self.unpack):
                y_BTD = forward(x_BTD, shared)
            self._exit(group)
            return y_BTD

        return offloaded

    def _enter(self, layer: int, shared: Any) -> BlockActivations:
        if (step := self._step()) != self.counts.step:
            self.counts = Counts(step)
        before, self._at = self._newest, None
        if before is not None and before.layer >= layer:  # of another micro-batch
            before = None
        return BlockActivations(layer, before, frozenset(_addresses(shared)))

    def _exit(self, group: BlockActivations) -> None:
        """Let the block before this one leave; the last one leaves at once."""
        if self._newest is not None:
            self._newest.leave()
        if group.layer == self.last:
            group.leave()
        self._newest = group

    def pack(self, group: BlockActivations, tensor: Tensor) -> Packed:
        """Send the storage of a tensor that autograd saves, unless that is on its way."""
        if group.layer not in self.sends or not self._worth_sending(group, tensor):
            self.counts.kept += 1
            return Packed(group, tensor)
        storage = tensor.untyped_storage()
        known = group.parts.get(storage.data_ptr())
        part = known() if known is not None else None
        if part is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            part = SavedStorage(self.transfer, self.counts, flat.set_(storage))
            group.parts[storage.data_ptr()] = weakref.ref(part)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return Packed(group, None, part, tensor.dtype, place)

    def unpack(self, packed: Packed) -> Tensor:
        """Return the tensor that autograd needs; a block's first fetches the block before, too."""
        group = packed.group
        if group is not self._at:
            self._at = group
            group.fetch()
            if group.before is not None:
                group.before.fetch()
        if packed.part is None:
            assert packed.tensor is not None
            return packed.tensor
        flat = packed.part.arrive()
        assert flat is not None
        empty = torch.empty(0, dtype=packed.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), *packed.place)

    def _worth_sending(self, group: BlockActivations, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.device.type != self.transfer.device.type or _of_a_weight(tensor):
            return False
        storage = tensor.untyped_storage()
        large = storage.nbytes() >= max(1, self.min_bytes)
        return large and storage.data_ptr() not in group.foreign


def _of_a_weight(tensor: Tensor) -> bool:
    """Return whether it is a view of a parameter, or a copy of one in another precision."""
    if isinstance(tensor._base, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name().endswith("AccumulateGrad")


def _addresses(shared: Any) -> Iterator[int]:
    """Yield the storages of all tensors that `shared` holds."""
    if type(shared) in (Tensor, nn.Parameter):
        yield shared.untyped_storage().data_ptr()
    elif isinstance(shared, tuple | list):
        for each in shared:
            yield from _addresses(each)
    elif hasattr(shared, "__dict__"):
        for each in vars(shared).values():
            if isinstance(each, Tensor | tuple):
                yield from _addresses(each)


class ActivationOffload(Technique[Build]):
    """Send what blocks keep for their backward pass to the host, and fetch it in time."""

    min_bytes: int = Field(default=2**20, ge=0, le=1 << 50)
    """Bytes of the smallest storage that is sent; tuner range 65536 to 16777216."""
    keep_last: int = Field(default=1, ge=0, le=100_000)
    """Last blocks whose tensors stay, since their backward comes at once; tuner range 1 to 4."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "memory"
    # Outside of compiled code, which would otherwise have to trace the hooks.
    stage: ClassVar[Stage] = Stage.GATE
    composes: ClassVar[tuple[str, ...]] = ("block_forward",)
    excludes: ClassVar[Mapping[str, str]] = {
        "cuda_graphs": "the hooks are the host's work, which is elided when a graph is replayed "
        "(docs.pytorch.org, torch.cuda.graph)",
    }
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:activations",)
    card: ClassVar[Card] = Card(
        buys=(
            "the activations of all blocks but two",
            "torchtune measured 5% less memory at the same speed, on top of checkpointing "
            "(Llama-3.2-3B, A100)",
        ),
        costs=(
            "as much page-locked host memory",
            "the wire both ways, hidden where blocks compute for longer",
        ),
        helps="rows and models that do not fit, above all with checkpointing: only inputs travel",
        hurts="runs that fit; narrow models and slow links, where the step waits for copies",
        source="torchtune's memory ladder; arXiv 1602.08124",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a GPU, blocks that are called one by one, and one of them to send."""
        if context.device != "cuda":
            return Unsupported(
                f"on {context.device} activations are in the host's memory already",
                mend("device=cuda"),
                RefusalKind.DEVICE,
            )
        if (plan := context.plan) is None:
            return Supported()
        for name, other in plan.techniques.items():
            if "compiled" in other.composes and getattr(other, "scope", "block") != "block":
                return Unsupported(
                    f"{name} makes one graph of all blocks, in which no hook stands between two",
                    mend(f"techniques.{name}.scope=block"),
                    RefusalKind.COMBINATION,
                )
        if self.keep_last >= (here := plan.model.layers // plan.mesh.pipeline):
            return Unsupported(
                f"keep_last = {self.keep_last} keeps all {here} blocks of a rank",
                mend(f"techniques.{self.name()}.keep_last={max(0, here - 1)}"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Drop sent blocks, but for the one that travels and, at the end, the first."""
        layers = sorted({v.layer for v in ledger.memory.values() if v.layer is not None})
        sent = [0.0]
        for layer in layers[: max(0, len(layers) - self.keep_last)]:
            going = self._going(ledger, layer)
            sent.append(sum(line.bytes for line in going.values()))
            ledger = ledger.without(going)
            for name in (n for n, v in going.items() if "backward" in v.instants):
                ledger = ledger.with_line(name, replace(going[name], instants=("backward",)))
        # The head goes backward when all that was sent has left; blocks have one on its way.
        ledger = ledger.with_line("offload_buffer", Line(max(sent), ("turn", "backward")))
        return offloaded(ledger, sum(sent))

    def _going(self, ledger: Ledger, layer: int) -> dict[str, Line]:
        """Return the lines of a block that leave: its input, of one that is checkpointed."""
        lines = {n: v for n, v in ledger.memory.items() if v.layer == layer}
        stream = lines.get(f"{layer}/residual")
        if "recompute" in ledger.memory and stream and stream.bytes <= ledger.sizes["residual"]:
            lines = {f"{layer}/residual": stream}
        return {
            n: v
            for n, v in lines.items()
            if v.bytes >= self.min_bytes and n.split("/")[1] not in STAYING_LINES
        }

    def apply(self, build: Build) -> None:
        """Put the hooks around this rank's blocks."""
        layers = [int(name) for name in build.model.blocks]
        offload = Offload(
            HostTransfer(build.device),
            min_bytes=self.min_bytes,
            sends=frozenset(layers[: max(0, len(layers) - self.keep_last)]),
            last=layers[-1] if layers else -1,
            step=lambda: build.now.get("step", 0.0),
        )
        build.notes[self.name()] = offload
        build.wrap_blocks(self.name(), offload.wrap)

    def active(self, build: Build) -> Evidence:
        """Report bytes that went to the host in the last step, and that came back in it."""
        counts: Counts = build.notes[self.name()].counts
        back = counts.fetched_bytes + counts.never_left_bytes
        return Evidence(
            active=counts.fetched_bytes > 0 and back == counts.sent_bytes,
            detail=f"sent {counts.sent_bytes} bytes in {counts.sent} tensors to the host and "
            f"fetched {counts.fetched_bytes}; {counts.kept} tensors stayed",
            numbers={k: float(v) for k, v in vars(counts).items() if k != "step"},
        )
