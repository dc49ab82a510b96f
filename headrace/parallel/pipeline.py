"""A pipeline of ranks: schedules, and the engine that runs one with point-to-point messages.

Each rank holds some of a model's layers and passes activations on, so a model that fits on no
device trains on several, and only the border between two ranks costs communication. The price is
the bubble: ranks wait while the pipeline fills and drains, `bubble` says for how long. 1F1B
(arXiv 2006.09503) alternates forward and backward passes, so that rank r of P holds the activations
of at most P - r micro-batches however many there are. Interleaved 1F1B (arXiv 2104.04473, section
2.2) gives each rank several smaller stages, `chunks`: chunk c of rank r is stage c x P + r. The
bubble shrinks by `chunks`, messages grow by it.

A schedule is a list of actions, made anew for each call; nothing about shapes, objective or the
number of micro-batches is fixed before. Each direction of each border is a process group of two
(a communicator of its own, and a stream of its own on a GPU), whose two ends use it in one order:
that of the sender's actions, which is the receiver's too. So no message waits behind another that
its receiver does not want yet, and there is nothing to pair up or to tag. Sending never waits, but
for the message `ranks` before it. A message is asked for when its action begins: asking sooner hid
transfers behind work, and hung on GPUs (see `run`).

Between a forward and its backward a rank keeps the graph of its output and not the output itself.
Left out: zero-bubble schedules (arXiv 2401.10241), which split a backward pass in two and so need
every layer's gradient of weights apart from that of inputs.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend

Direction = Literal["forward", "backward"]


class Action(NamedTuple):
    """An action is one pass of one micro-batch through one of the rank's stages."""

    kind: Direction
    chunk: int
    micro: int


# --- schedules -------------------------------------------------------------------------------


def one_forward_one_backward(ranks: int, rank: int, micros: int) -> list[Action]:
    """Order 1F1B: after ranks - rank - 1 forwards, each forward is followed by a backward."""
    forwards = [Action("forward", 0, m) for m in range(micros)]
    backwards = [Action("backward", 0, m) for m in range(micros)]
    return _alternate(forwards, backwards, ranks - rank - 1)


def interleaved(ranks: int, rank: int, micros: int, chunks: int) -> list[Action]:
    """Order 1F1B over `chunks` stages a rank, which take groups of `ranks` micro-batches by turns.

    Raises:
        ConfigError: the micro-batches are no whole number of groups.
    """
    if micros % ranks:
        near = max(1, round(micros / ranks)) * ranks
        raise ConfigError(
            f"an interleaved pipeline of {ranks} ranks takes its micro-batches in groups of "
            f"{ranks}, and there are {micros}; the nearest is {near}",
            mend(
                "techniques.pipeline_parallel.schedule=1f1b",
                "techniques.pipeline_parallel.chunks=1",
            ),
        )
    forwards = forward_only(ranks, micros, chunks)
    backwards = [Action("backward", chunks - 1 - a.chunk, a.micro) for a in forwards]
    return _alternate(forwards, backwards, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)


def forward_only(ranks: int, micros: int, chunks: int = 1) -> list[Action]:
    """Order forward passes alone, for evaluation; any number of micro-batches."""
    return [
        Action("forward", chunk, micro)
        for start in range(0, micros, ranks)
        for chunk in range(chunks)
        for micro in range(start, min(start + ranks, micros))
    ]


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Order `ahead` forwards, then pairs of forward and backward, then the other backwards."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [action for pair in pairs for action in pair]
    return forwards[:ahead] + steady + backwards[len(forwards) - ahead :]


def bubble(ranks: int, micros: int, chunks: int = 1) -> float:
    """Return the share of a step in which a rank waits, all stages being equally slow."""
    return (ranks - 1) / (micros * chunks + ranks - 1)


# --- messages --------------------------------------------------------------------------------


class Message(NamedTuple):
    """A message that was asked for."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        """Return the tensor once it is here; on a GPU the stream waits and the host goes on."""
        self.work.wait()
        return self.tensor


class PipelineRank:
    """A line is this rank's place in its pipeline, and the channels to both neighbours."""

    def __init__(self, grid: Tensor, device: torch.device, *, chunks: int = 1) -> None:
        """Make the groups; every rank of the world calls this at the same point.

        Args:
            grid: global ranks [pipeline, lines]; a column is one pipeline, first rank first.
            device: where messages lie.
            chunks: stages per rank; more than one closes the line to a ring.
        """
        self.device, self.chunks, self.ranks = device, chunks, len(grid)
        self.messages, self.bytes = 0, 0
        me = dist.get_rank()
        self.rank = int((grid == me).nonzero()[0, 0])
        self._inward: dict[Direction, tuple[int, dist.ProcessGroup]] = {}
        self._outward: dict[Direction, tuple[int, dist.ProcessGroup]] = {}
        self._sent: dict[Direction, deque[Message]] = {"forward": deque(), "backward": deque()}
        for line in grid.T.tolist():
            for here in range(self.ranks if chunks > 1 else self.ranks - 1):
                before, after = line[here], line[(here + 1) % self.ranks]
                self._open("forward", before, after, me)
                self._open("backward", after, before, me)

    def _open(self, kind: Direction, source: int, target: int, me: int) -> None:
        """Connect one direction of one border now, in one order over the whole world.

        A communicator is made at its first message, and both ends wait for each other there. Later
        that would be a wait in the middle of a schedule, where the other end may want a different
        one first.
        """
        group: Any = dist.new_group([source, target])
        hello = torch.zeros(1, device=self.device)
        if me == source:
            self._outward[kind] = (target, group)
            dist.send(hello, target, group)
        elif me == target:
            self._inward[kind] = (source, group)
            dist.recv(hello, source, group)

    def first(self, chunk: int) -> bool:
        """Return whether `chunk` is the model's first stage."""
        return self.rank == 0 and chunk == 0

    def last(self, chunk: int) -> bool:
        """Return whether `chunk` is the model's last stage."""
        return self.rank == self.ranks - 1 and chunk == self.chunks - 1

    def receive(self, kind: Direction, shape: Sequence[int], dtype: torch.dtype) -> Message:
        """Ask for the next message of one kind."""
        source, group = self._inward[kind]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return Message(_started(dist.irecv(tensor, source, group)), tensor)

    def send(self, kind: Direction, tensor: Tensor) -> None:
        """Send without waiting, but for the message that is `ranks` before this one."""
        target, group = self._outward[kind]
        sent = self._sent[kind]
        if len(sent) == self.ranks:
            sent.popleft().wait()
        tensor = tensor.contiguous()
        sent.append(Message(_started(dist.isend(tensor, target, group)), tensor))
        self.messages += 1
        self.bytes += tensor.nbytes

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        for sent in self._sent.values():
            while sent:
                sent.popleft().wait()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


# --- running a schedule ----------------------------------------------------------------------


class Stages(Protocol):
    """What a rank computes, as `run` asks for it."""

    dtype: torch.dtype
    """Data type of the activations between stages."""

    def shape(self, micro: int) -> Sequence[int]:
        """Return the shape of a micro-batch's activations between stages."""
        ...

    def forward(self, chunk: int, micro: int, x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run the forward pass of one stage.

        Args:
            chunk: which stage of this rank.
            micro: which micro-batch.
            x: the activations that came in; None at the model's first stage.

        Returns:
            activations, or at the model's last stage the loss, a scalar; and the stage's auxiliary
            losses, a scalar, or None.
        """
        ...

    def before_backward(self, chunk: int, last: bool) -> None:
        """Prepare for a backward pass, before each; `last` is the last one of this chunk."""
        ...

    def waiting(self) -> None:
        """Do what is to be done before the rank waits for a message."""
        ...


@dataclass
class ForwardState:
    """What is kept of a forward pass for its backward pass."""

    x: Tensor | None
    output: GradientEdge | None
    losses: list[Tensor]


def run(actions: Sequence[Action], line: PipelineRank, stages: Stages) -> Tensor:
    """Run one rank's schedule; gradients land in the parameters.

    Under `torch.no_grad` give it `forward_only`; the messages are the same.

    Args:
        actions: this rank's part of the schedule.
        line: its neighbours.
        stages: its computation.

    Returns:
        the sum of all losses of this rank, detached; 0 where it has none.
    """
    total = torch.zeros((), device=line.device)
    states: dict[tuple[int, int], ForwardState] = {}
    left = Counter(a.chunk for a in actions if a.kind == "backward")
    for kind, chunk, micro in actions:
        message = None
        if not (line.first(chunk) if kind == "forward" else line.last(chunk)):
            # Not sooner: a kernel that is loaded for the first time waits for the whole device, a
            # receive in flight included, and two ranks that load wait for each other for ever.
            stages.waiting()
            message = line.receive(kind, stages.shape(micro), stages.dtype).wait()
        if kind == "forward":
            output, kept = _forward(stages, line, chunk, micro, message)
            for loss in kept.losses:
                total += loss.detach()
            if torch.is_grad_enabled():
                states[chunk, micro] = kept
            if not line.last(chunk):
                line.send("forward", output)
        else:
            left[chunk] -= 1
            stages.before_backward(chunk, left[chunk] == 0)
            gradient = _backward(states.pop((chunk, micro)), message)
            if gradient is not None:
                line.send("backward", gradient)
    line.flush()
    return total


def _forward(
    stages: Stages, line: PipelineRank, chunk: int, micro: int, x: Tensor | None
) -> tuple[Tensor, ForwardState]:
    """Run one forward pass; return what to send, and what to keep."""
    if x is not None:
        x.requires_grad_(torch.is_grad_enabled())
    output, auxiliary = stages.forward(chunk, micro, x)
    losses = [] if auxiliary is None else [auxiliary]
    if line.last(chunk):
        return output, ForwardState(x, None, [output, *losses])
    made, wanted = (output.dtype, *output.shape), (stages.dtype, *stages.shape(micro))
    assert made == wanted, f"a stage made activations {made} where {wanted} were agreed"
    edge = get_gradient_edge(output) if output.requires_grad else None
    return output.detach(), ForwardState(x, edge, losses)


def _backward(state: ForwardState, gradient: Tensor | None) -> Tensor | None:
    """Run one backward pass; return the gradient of what had come in, None at the first stage."""
    roots: list[Tensor | GradientEdge] = [loss for loss in state.losses if loss.requires_grad]
    gradients: list[Tensor | None] = [None] * len(roots)
    if state.output is not None:
        roots.append(state.output)
        gradients.append(gradient)
    if roots:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
    return None if state.x is None else state.x.grad
