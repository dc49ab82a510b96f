"""Lay a pipeline's stages along a V, and do backward passes in two parts, so that no rank waits.

A backward pass computes the gradient of what came in, for which the rank before waits, and that of
the weights, for which nobody does. Where a rank would wait, it computes the gradients of weights
that it has put off (arXiv 2401.10241, section 6, ZB-V). torch.distributed.pipelining's
ScheduleZBVZeroBubble has the same order and joins two parts that follow each other, so that the
rank before waits for both; here the first is sent at once. Rank r of P holds stages r and
2P - 1 - r, so rank 0 has the first and the last: the loss is where the embedding is, and a
micro-batch's backward pass begins on the rank that began its forward pass. Activations are at most
those of 1F1B's first rank, on every rank.

DualPipeV (DeepSeek's DualPipe, arXiv 2412.19437, section 3.2.1, cut in half; torch's
ScheduleDualPipeV) lies along the same V. In its middle each rank has a forward pass beside a whole
backward pass, whose messages may travel while the other computes, and only its ends do backward
passes in two parts: fewer graphs are cut, the bubble is larger, and as many activations are kept.

`zero_bubble` and `dual_pipe_v` give one rank's actions, `bubble_of_v` simulates all of them for the
share of a step in which they wait, a forward pass and each part of a backward pass being equally
long.

The cut through the graph of a stage is torch's (torch.distributed.pipelining): of each weight it
finds the nodes where the way to it leaves the way to the input, keeps what arrives there, and goes
on from there later. A node that has both behind it computes both again, so that compiled blocks
and recomputed ones gain nothing and are refused.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from headrace.parallel.actions import Action, Direction

CHUNKS = 2
"""Stages of a rank."""
PARTS: Mapping[Direction, tuple[Direction, ...]] = {"backward": ("inputs", "weights")}
"""The parts of a whole backward pass, each as long as a forward pass."""


def stage_of(ranks: int, rank: int, chunk: int) -> int:
    """Return which of the 2 x ranks stages a rank's chunk is."""
    return rank if chunk == 0 else 2 * ranks - 1 - rank


def zero_bubble(ranks: int, rank: int, micros: int) -> list[Action]:
    """Order ZB-V: warm up along the V, then forward and backward of both stages by turns.

    Gradients of weights are put off where the pipeline drains, and fill it.
    """
    enough = max(2 * ranks - 1, micros)
    order = _Order()
    for _ in range(2 * (ranks - rank) - 1):
        order.add("forward", 0)
    for _ in range(rank):
        order.add("forward", 1)
        order.add("forward", 0)
    for _ in range(ranks - rank):
        order.add("forward", 1)
        order.add_both(1)
    while order.count("forward", 1) < order.count("forward", 0) or (
        order.count("forward", 0) < enough
    ):
        if order.count("forward", 0) < enough:
            order.add("forward", 0)
        order.add_both(0)
        order.add("forward", 1)
        order.add_both(1)
    for _ in range(rank):
        order.add("inputs", 0)
        order.add("inputs", 1)
    for _ in range(ranks - rank):
        order.add_both(0)
    for chunk in (1, 0):
        while order.count("weights", chunk) < order.count("inputs", chunk):
            order.add("weights", chunk)
    return [action for action in order.actions if action.micro < micros]


def dual_pipe_v(ranks: int, rank: int, micros: int) -> list[Action]:
    """Order DualPipeV: warm up along the V, then a forward beside a whole backward by turns.

    Pairs of passes run one after the other. With fewer than 2 x ranks micro-batches it is the order
    of so many, without those that are not there.
    """
    behind, enough = ranks - rank - 1, max(2 * ranks, micros)
    order, put_off = _Order(), deque[int]()

    def inputs(chunk: int, *, split: bool) -> None:
        if not split:
            order.add("backward", chunk)
            return
        order.add("inputs", chunk)
        put_off.append(chunk)

    def weights() -> None:
        if put_off:
            order.add("weights", put_off.popleft())

    for _ in range(2 * behind):
        order.add("forward", 0)
    for _ in range(rank + 1):
        order.add("forward", 0)
        order.add("forward", 1)
    for _ in range(behind):
        inputs(1, split=True)
        weights()
        order.add("forward", 1)
    for _ in range(enough - 2 * ranks + rank + 1):
        for ahead in (0, 1):
            order.add("forward", ahead)
            order.add("backward", 1 - ahead)
    for _ in range(behind):
        order.add("backward", 1)
        order.add("forward", 1)
        order.add("backward", 0)
    half, split = (rank + 1) // 2, False
    for number in range(rank + 1):
        split = split or (number == half and rank % 2 == 1)
        inputs(1, split=split)
        split = split or (number == half and rank % 2 == 0)
        inputs(0, split=split)
    for _ in range(behind):
        weights()
        inputs(0, split=split)
    while put_off:
        weights()
    return [action for action in order.actions if action.micro < micros]


class _Order:
    """An order grows by one action at a time, whose micro-batch is the next of its kind."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._counts: dict[tuple[Direction, int], int] = {}

    def count(self, kind: Direction, chunk: int) -> int:
        """Return how many actions of a kind there are."""
        return self._counts.get((kind, chunk), 0)

    def add(self, kind: Direction, chunk: int) -> None:
        """Add the next action of a kind."""
        number = self.count("inputs" if kind == "backward" else kind, chunk)
        for part in PARTS.get(kind, (kind,)):
            self._counts[part, chunk] = self.count(part, chunk) + 1
        self.actions.append(Action(kind, chunk, number))

    def add_both(self, chunk: int) -> None:
        """Add both parts of a backward pass; the gradient of what came in is sent between them."""
        self.add("inputs", chunk)
        self.add("weights", chunk)


ORDERS: Mapping[str, Callable[[int, int, int], list[Action]]] = {
    "zbv": zero_bubble,
    "dualpipev": dual_pipe_v,
}
"""Schedules along a V -> (ranks, rank, micro-batches) -> the actions of that rank."""


@cache
def bubble_of_v(ranks: int, micros: int, schedule: str = "zbv") -> float:
    """Return the share of a step in which a rank waits, all stages being equally slow."""
    plans = [ORDERS[schedule](ranks, rank, micros) for rank in range(ranks)]
    done: dict[tuple[str, int, int], int] = {}
    at, clock = [0] * ranks, [0] * ranks
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            while at[rank] < len(plan):
                action = plan[at[rank]]
                ready = _ready(done, ranks, stage_of(ranks, rank, action.chunk), action)
                if ready is None:
                    break
                clock[rank] = max(clock[rank], ready) + len(PARTS.get(action.kind, "1"))
                direction = "forward" if action.kind == "forward" else "backward"
                if action.kind != "weights":
                    key = (direction, stage_of(ranks, rank, action.chunk), action.micro)
                    done[key] = clock[rank]
                at[rank], moved = at[rank] + 1, True
    assert all(at[rank] == len(plan) for rank, plan in enumerate(plans)), "a rank waits for ever"
    return 1 - 3 * CHUNKS * micros / max(clock)


def _ready(
    done: dict[tuple[str, int, int], int], ranks: int, stage: int, action: Action
) -> int | None:
    """Return when what an action takes is there; None while it is not."""
    if action.kind == "weights":
        return 0
    if action.kind == "forward":
        return 0 if stage == 0 else done.get(("forward", stage - 1, action.micro))
    if stage == CHUNKS * ranks - 1:
        return done.get(("forward", stage, action.micro))
    return done.get(("backward", stage + 1, action.micro))


def most_of_v(ranks: int, rank: int, micros: int, schedule: str = "zbv") -> int:
    """Return the most (stage, micro-batch) pairs whose activations a rank keeps at once."""
    now = most = 0
    for action in ORDERS[schedule](ranks, rank, micros):
        now += (action.kind == "forward") - (action.kind in ("weights", "backward"))
        most = max(most, now)
    return most


# --- a backward pass in two parts ------------------------------------------------------------


class PutOff(NamedTuple):
    """What is kept of a backward pass until the gradients of its weights are computed."""

    groups: list[dict[str, Any]]
    """for nodes of the graph: the weights behind them, and what has arrived there"""


def backward_inputs(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor | None],
    x: Tensor,
    weights: Iterable[nn.Parameter],
) -> tuple[Tensor | None, PutOff]:
    """Compute the gradient of a stage's input, and keep what the weights' gradients begin from.

    Args:
        roots: the losses and the output of the stage.
        gradients: of each; None is 1.
        x: what came in.
        weights: what learns in the stage.
    """
    from torch.distributed.pipelining import _backward as cut

    roots, gradients = _joined(roots, gradients, x)
    nodes: Any = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    behind: Any = [cut._get_grad_fn_or_grad_acc(weight) for weight in weights]
    edges = cut.construct_reverse_graph(nodes)
    begins: Any = [cut._get_grad_fn_or_grad_acc(x)]
    groups = cut.get_param_groups(begins, behind, edges)
    if not roots:
        return None, PutOff([])
    handles = []
    for group in groups:
        group["intermediates"] = list(group["intermediates"])
        group["grads"] = [None] * len(group["intermediates"])
        for index, node in enumerate(group["intermediates"]):
            handles.append(node.register_prehook(_keeping(group, index)))
    try:
        (gradient,) = torch.autograd.grad(
            roots,  # type: ignore[arg-type]
            [x],
            grad_outputs=gradients,  # type: ignore[arg-type]
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    return gradient, PutOff(groups)


def _joined(
    roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None], x: Tensor
) -> tuple[list[Tensor | GradientEdge], list[Tensor | None]]:
    """Return the roots that depend on `x`, and run the backward pass of the others.

    A loss of weights alone is not on the way to the input, where the graph is cut.
    """
    from torch.distributed.pipelining import _backward as cut

    nodes: Any = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    begins: Any = [cut._get_grad_fn_or_grad_acc(x)]
    behind, _ = cut.reverse_closure(begins, set(), cut.construct_reverse_graph(nodes))
    pairs = list(zip(roots, gradients, nodes, strict=True))
    apart = [(root, gradient) for root, gradient, node in pairs if node not in behind]
    if apart:
        own, factors = zip(*apart, strict=True)
        torch.autograd.backward(own, factors, retain_graph=True)  # type: ignore[arg-type]
    joined = [(root, gradient) for root, gradient, node in pairs if node in behind]
    return [root for root, _ in joined], [gradient for _, gradient in joined]


def _keeping(group: dict[str, Any], index: int) -> Any:
    def keep(arrived: Any) -> None:
        group["grads"][index] = arrived

    return keep


def backward_weights(kept: PutOff, weights: Iterable[nn.Parameter]) -> None:
    """Compute the gradients of weights that were put off, and add them up in `grad`."""
    from torch.distributed.pipelining import _backward as cut

    by_node = {cut._get_grad_fn_or_grad_acc(weight): weight for weight in weights}
    for group in kept.groups:
        starts: list[GradientEdge] = []
        arrived: list[Tensor] = []
        for node, gradients in zip(group["intermediates"], group["grads"], strict=True):
            for output, gradient in enumerate(gradients or ()):
                if gradient is not None:
                    starts.append(GradientEdge(node, output))
                    arrived.append(gradient)
        if not starts:
            continue
        clamps = [
            # What arrives there from another start of the group was counted when it was kept.
            node.register_prehook(lambda _, kept=gradients: kept)
            for node, gradients in zip(group["intermediates"], group["grads"], strict=True)
            if len(group["intermediates"]) > 1
        ]
        try:
            ends = [*group["params"]]
            sums = torch.autograd.grad(
                starts, [GradientEdge(node, 0) for node in ends], grad_outputs=arrived
            )
        finally:
            for clamp in clamps:
                clamp.remove()
        for node, gradient in zip(ends, sums, strict=True):
            _add(by_node[node], gradient)
    kept.groups.clear()


def _add(weight: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient up as a backward pass does, in the dtype that the weight asks for."""
    if weight.grad is None:
        kept = getattr(weight, "grad_dtype", weight.dtype)
        weight.grad = gradient.to(kept or torch.float32)  # None is of sums that are widened
    else:
        weight.grad += gradient
