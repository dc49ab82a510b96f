"""Keep copies of a run's state in the host's memory, return to one, or take another build's.

A state is what a checkpoint saves of tensors: the weights that are trained, the optimizers' states,
and what techniques keep. Each rank copies its own parts, so nothing is communicated. From a GPU the
copies go to page-locked memory behind the work that was issued before, and the host waits for
nothing; a return is ordered behind them in the same way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.parallel.layout import local_of


@dataclass
class KeptState:
    """A kept state is what a run was after a number of steps.

    Args:
        step: how many steps had been taken.
        tensors: copies on the host by global name.
        values: the JSON values of techniques by name.
    """

    step: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the copies."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class KeptStates:
    """Hold the newest states of a run, the earliest first.

    Args:
        most: how many are kept.
        owner: the technique that holds them, whose own state is left out.
    """

    def __init__(self, most: int, owner: str) -> None:
        self.most, self.owner = most, owner
        self.states: list[KeptState] = []

    def take(self, build: Build, step: int, sound: int) -> None:
        """Copy the state after `step` steps; where there is no room, one state makes way.

        The newest state that is known to be sound stays: the earliest other one makes way.

        Args:
            build: the run.
            step: how many steps were taken.
            sound: the newest step whose state is known to be sound.
        """
        self.states = [kept for kept in self.states if kept.step != step]
        spare: dict[str, Tensor] = {}
        if len(self.states) >= self.most:
            stays = max((kept.step for kept in self.states if kept.step <= sound), default=-1)
            loses = next((kept for kept in self.states if kept.step != stays), self.states[0])
            self.states.remove(loses)
            spare = loses.tensors
        cuda = build.device.type == "cuda"
        tensors = {}
        with torch.no_grad():
            for name, tensor in self._live(build):
                copy = spare.get(name)
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=cuda)
                tensors[name] = copy.copy_(tensor, non_blocking=cuda)
        values = {who: keeper.values() for who, keeper in build.state.items() if who != self.owner}
        self.states.append(KeptState(step, tensors, values))

    def restore(self, build: Build, kept: KeptState) -> None:
        """Make the run's state what `kept` is, and forget the states after it.

        States that an optimizer did not have by then are removed, so that it begins them anew.
        """
        with torch.no_grad():
            for name, tensor in self._live(build):
                if name in kept.tensors:
                    tensor.copy_(kept.tensors[name], non_blocking=True)
        for route, optimizer in build.optimizers.items():
            for name, parameter in build.routed[route].items():
                state = optimizer.state.get(parameter, {})
                for key in [key for key, value in state.items() if isinstance(value, Tensor)]:
                    if f"optimizer/{name}/{key}" not in kept.tensors:
                        del state[key]
        for who, values in kept.values.items():
            build.state[who].load_values(values)
        self.states = [other for other in self.states if other.step <= kept.step]

    def _live(self, build: Build) -> Iterator[tuple[str, Tensor]]:
        """Yield what is copied of a build."""
        own = f"technique/{self.owner}/"
        return ((name, tensor) for name, tensor in live(build) if not name.startswith(own))


def live(build: Build) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's part of every tensor of the state, by global name."""
    for name, parameter in build.model.named_parameters():
        if parameter.requires_grad:
            yield f"model/{name}", local_of(parameter.detach())
    for route, optimizer in build.optimizers.items():
        for name, parameter in build.routed[route].items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"optimizer/{name}/{key}", local_of(value.detach())
    for who, keeper in build.state.items():
        for name, tensor in keeper.tensors().items():
            yield f"technique/{who}/{name}", local_of(tensor.detach())


def keep_alike(build: Build, other: Build) -> bool:
    """Return whether two builds keep the same tensors, so that one can take over the other's."""
    own, given = ({n: (t.shape, t.dtype) for n, t in live(b)} for b in (build, other))
    return own == given and build.state.keys() == other.state.keys()


def take_over(build: Build, other: Build) -> None:
    """Make the state of a build what another's is, in place; see `keep_alike`."""
    given = dict(live(other))
    with torch.no_grad():
        for name, tensor in live(build):
            tensor.copy_(given[name])
    for who, keeper in build.state.items():
        keeper.load_values(other.state[who].values())


def exchange(build: Build, other: Build) -> None:
    """Give each of two builds the other's state, in place; see `keep_alike`."""
    given = dict(live(other))
    with torch.no_grad():
        for name, tensor in live(build):
            own = tensor.clone()
            tensor.copy_(given[name])
            given[name].copy_(own)
    for who, keeper in build.state.items():
        values = keeper.values()
        keeper.load_values(other.state[who].values())
        other.state[who].load_values(values)
