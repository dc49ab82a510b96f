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
A zero-bubble V (parallel/zero_bubble) lays two stages a rank out along a V, each border of which is
a channel of its own, and does some backward passes in two parts.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.parallel.actions import Action, Direction
from headrace.parallel.zero_bubble import (
    PutOff,
    backward_inputs,
    backward_weights,
    stage_of,
)

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

    def __init__(
        self, grid: Tensor, device: torch.device, *, chunks: int = 1, v: bool = False
    ) -> None:
        """Make the groups; every rank of the world calls this at the same point.

        Args:
            grid: global ranks [pipeline, lines]; a column is one pipeline, first rank first.
            device: where messages lie.
            chunks: stages per rank; more than one closes the line to a ring.
            v: two stages per rank lie along a V, and no ring.
        """
        self.device, self.chunks, self.ranks, self.v = device, chunks, len(grid), v
        self.messages, self.bytes = 0, 0
        me = dist.get_rank()
        self.rank = int((grid == me).nonzero()[0, 0])
        self._inward: dict[tuple[Direction, int], tuple[int, dist.ProcessGroup]] = {}
        self._outward: dict[tuple[Direction, int], tuple[int, dist.ProcessGroup]] = {}
        self._sent: dict[tuple[Direction, int], deque[Message]] = {}
        self._own: dict[Direction, deque[Tensor]] = {"forward": deque(), "backward": deque()}
        for line in grid.T.tolist():
            for before, after, here, there in self._borders():
                source, target = (line[before], here), (line[after], there)
                self._open("forward", source, target, me)
                self._open("backward", target, source, me)

    def _borders(self) -> list[tuple[int, int, int, int]]:
        """Return (rank before, rank after, channel there, channel here) of each border."""
        if not self.v:
            count = self.ranks if self.chunks > 1 else self.ranks - 1
            return [(here, (here + 1) % self.ranks, 0, 0) for here in range(count)]
        down = [(rank, rank + 1, 0, 0) for rank in range(self.ranks - 1)]
        return [*down, *((rank + 1, rank, 1, 1) for rank in reversed(range(self.ranks - 1)))]

    def _open(
        self, kind: Direction, source: tuple[int, int], target: tuple[int, int], me: int
    ) -> None:
        """Connect one direction of one border now, in one order over the whole world.

        A communicator is made at its first message, and both ends wait for each other there. Later
        that would be a wait in the middle of a schedule, where the other end may want a different
        one first.
        """
        group: Any = dist.new_group([source[0], target[0]])
        hello = torch.zeros(1, device=self.device)
        if me == source[0]:
            self._outward[kind, source[1]] = (target[0], group)
            self._sent[kind, source[1]] = deque()
            dist.send(hello, target[0], group)
        elif me == target[0]:
            self._inward[kind, target[1]] = (source[0], group)
            dist.recv(hello, source[0], group)

    def stage(self, chunk: int) -> int:
        """Return which of the model's stages a chunk is."""
        return stage_of(self.ranks, self.rank, chunk) if self.v else chunk * self.ranks + self.rank

    def first(self, chunk: int) -> bool:
        """Return whether `chunk` is the model's first stage."""
        return self.stage(chunk) == 0

    def last(self, chunk: int) -> bool:
        """Return whether `chunk` is the model's last stage."""
        return self.stage(chunk) == self.ranks * self.chunks - 1

    def _is_own(self, kind: Direction, chunk: int, *, sends: bool) -> bool:
        """Return whether a message stays on this rank, at the foot of the V."""
        at_foot = self.v and self.rank == self.ranks - 1
        return at_foot and chunk == (0 if (kind == "forward") == sends else 1)

    def receive(
        self, kind: Direction, chunk: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Return the next message of one kind once it is here; a GPU's host goes on meanwhile."""
        if self._is_own(kind, chunk, sends=False):
            return self._own[kind].popleft()
        source, group = self._inward[kind, chunk * self.v]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return Message(_started(dist.irecv(tensor, source, group)), tensor).wait()

    def send(self, kind: Direction, chunk: int, tensor: Tensor) -> None:
        """Send without waiting, but for the message that is `ranks` before this one."""
        if self._is_own(kind, chunk, sends=True):
            self._own[kind].append(tensor)
            return
        target, group = self._outward[kind, chunk * self.v]
        sent = self._sent[kind, chunk * self.v]
        if len(sent) == self.ranks * (1 + self.v):
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

    def weights(self) -> Iterable[nn.Parameter]:
        """Return what learns on this rank, for backward passes in two parts."""
        ...


@dataclass
class ForwardState:
    """What is kept of a forward pass for its backward pass."""

    x: Tensor | None
    output: GradientEdge | None
    losses: list[Tensor]
    put_off: PutOff | None = None
    """of a backward pass whose second part is to come"""
    gradient: Tensor | None = None
    """that of the output, where all of the backward pass is to come"""


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
    left = Counter(a.chunk for a in actions if a.kind in ("backward", "inputs"))
    for kind, chunk, micro in actions:
        if kind == "weights":
            _weights(states.pop((chunk, micro)), stages)
            continue
        direction: Direction = "forward" if kind == "forward" else "backward"
        message = None
        if not (line.first(chunk) if kind == "forward" else line.last(chunk)):
            # Not sooner: a kernel that is loaded for the first time waits for the whole device, a
            # receive in flight included, and two ranks that load wait for each other for ever.
            stages.waiting()
            message = line.receive(direction, chunk, stages.shape(micro), stages.dtype)
        if kind == "forward":
            output, kept = _forward(stages, line, chunk, micro, message)
            for loss in kept.losses:
                total += loss.detach()
            if torch.is_grad_enabled():
                states[chunk, micro] = kept
            if not line.last(chunk):
                line.send(direction, chunk, output)
        else:
            left[chunk] -= 1
            stages.before_backward(chunk, left[chunk] == 0)
            if kind == "inputs":
                gradient = _inputs(states[chunk, micro], message, stages)
            else:
                gradient = _backward(states.pop((chunk, micro)), message)
            if gradient is not None:
                line.send(direction, chunk, gradient)
    stages.waiting()
    line.flush()
    return total


def _inputs(state: ForwardState, gradient: Tensor | None, stages: Stages) -> Tensor | None:
    """Run the first part of a backward pass; the first stage, which sends none, puts all off."""
    if state.x is None:
        state.gradient = gradient
        return None
    sent, state.put_off = backward_inputs(*_roots(state, gradient), state.x, stages.weights())
    state.losses, state.output = [], None
    return sent


def _weights(state: ForwardState, stages: Stages) -> None:
    """Run the second part of a backward pass."""
    if state.put_off is None:
        _backward(state, state.gradient)
    else:
        backward_weights(state.put_off, stages.weights())


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
    roots, gradients = _roots(state, gradient)
    if roots:
        torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
    return None if state.x is None else state.x.grad


def _roots(
    state: ForwardState, gradient: Tensor | None
) -> tuple[list[Tensor | GradientEdge], list[Tensor | None]]:
    """Return where a backward pass begins, and the gradient of each; that of a loss is 1."""
    roots: list[Tensor | GradientEdge] = [loss for loss in state.losses if loss.requires_grad]
    gradients: list[Tensor | None] = [None] * len(roots)
    if state.output is not None:
        roots.append(state.output)
        gradients.append(gradient)
    return roots, gradients
