"""Evaluate, keep and hand out an average of the weights of many steps.

A step's weights scatter around the bottom of the valley that they move along, by more the higher
the learning rate is. Their average lies deeper, so that it is worth about as much as letting the
rate fall. Training goes on from the weights themselves; validation, the best checkpoint, `eval`,
`sample` and `export` read the average.

- `ema`: an exponential average, average += (1 - d) x (weights - average) after every update. The
  decay d at step n is min(`decay`, (1 + n) / (10 + n)), so that the first weights are soon
  forgotten. It begins with the weights after its first step.
- `lawa`: the plain mean of the weights at the last `keep` of every `every` steps (LAWA). Before the
  first of them it is the weights themselves.

The average is in fp32, lies as the weights lie on the ranks, and is saved in every checkpoint, so
that a resumed run repeats it bit for bit. A step whose gradient was not finite is not averaged.
Source: EMA: arXiv 2411.18704, Polyak & Juditsky 1992; LAWA: arXiv 2306.03241, arXiv 2209.14981.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.limits import MOST
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import Stream
from headrace.parallel.layout import local_of
from headrace.plan.technique import (
    Card,
    Context,
    Doubt,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

FP32 = 4
"""Bytes of a number of an average."""
WARM = 10
"""The decay at step n is at most (1 + n) / (WARM + n); TensorFlow's ExponentialMovingAverage."""


@runtime_checkable
class Sharded(Protocol):
    """A module whose weights FSDP gathers, and may keep gathered after a forward pass."""

    def reshard(self) -> None:
        """Drop the gathered weights."""
        ...


class Average:
    """The averages of a run's trained weights, or what they are made of.

    Args:
        build: the run, whose weights are real.
        kind: "ema" or "lawa".
        every: steps from one kept copy of the weights to the next, of lawa.
        keep: copies of the weights that are averaged, of lawa.
    """

    def __init__(self, build: Build, kind: str, every: int, keep: int) -> None:
        self.every, self.keep, self.updates, self.taken = every, keep, 0, 0
        self.weights = {n: p for n, p in build.model.named_parameters() if p.requires_grad}
        copies = 1 if kind == "ema" else keep
        with torch.no_grad():
            self.copies = [
                {n: p.detach().float().clone() for n, p in self.weights.items()}
                for _ in range(copies)
            ]

    @torch.no_grad()
    def blend(self, decay: float, finite: Tensor) -> None:
        """Move the average toward the weights by 1 - `decay`, where `finite` is 1.

        The first time it becomes the weights.
        """
        share = (1 - decay) * finite if self.updates else torch.ones_like(finite)
        self.updates += 1
        for name, weight in self.weights.items():
            local_of(self.copies[0][name]).lerp_(local_of(weight).detach().float(), share)

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Copy the weights in the place of the oldest copy, where the step (from 0) is due."""
        self.updates += 1
        if (step + 1) % self.every:
            return
        place = self.copies[self.taken % self.keep]
        for name, weight in self.weights.items():
            local_of(place[name]).copy_(local_of(weight))
        self.taken += 1

    def mean(self, name: str) -> Tensor:
        """Return this rank's part of the average of one weight, in fp32."""
        count = min(self.taken, self.keep) if len(self.copies) > 1 else min(self.updates, 1)
        if not count:
            return local_of(self.weights[name]).detach().float()
        return torch.stack([local_of(copy[name]) for copy in self.copies[:count]]).mean(0)

    @contextmanager
    def standing(self, build: Build) -> Iterator[None]:
        """Let the average stand in the model's place of the weights for a while."""
        own = {name: local_of(p).detach().clone() for name, p in self.weights.items()}
        self._put(build, self.mean)
        try:
            yield
        finally:
            self._put(build, own.__getitem__)

    @torch.no_grad()
    def _put(self, build: Build, value: Callable[[str], Tensor]) -> None:
        """Copy values into the weights, and drop what FSDP gathered of the ones before."""
        for name, weight in self.weights.items():
            local_of(weight).copy_(value(name))
        for module in build.model.modules():
            if isinstance(module, Sharded):
                module.reshard()

    def tensors(self) -> dict[str, Tensor]:
        """Return the copies by the names of their weights, with their numbers behind `#`."""
        return {
            f"{name}#{number}" if number else name: tensor
            for number, copy in enumerate(self.copies)
            for name, tensor in copy.items()
        }

    def values(self) -> dict[str, Any]:
        """Return how often the weights were averaged, and how many copies were made."""
        return {"updates": self.updates, "taken": self.taken}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore the JSON values that `values` returned."""
        self.updates, self.taken = values["updates"], values["taken"]


class WeightAveraging(Technique[Build]):
    """Evaluate, keep and hand out an average of the weights of many steps."""

    kind: Literal["ema", "lawa"] = "ema"
    """An exponential average of all steps, or the mean of the last copies."""
    decay: float = Field(default=0.999, ge=0, lt=1)
    """Decay of `ema` per step, which averages about 1 / (1 - decay) steps; tuner range 0.99 to
    0.9999."""
    every: int = Field(default=100, ge=1, le=MOST)
    """Steps from one copy of the weights to the next, of `lawa`; tuner range 10 to 1000."""
    keep: int = Field(default=5, ge=2, le=64)
    """Copies of the weights that `lawa` averages; tuner range 3 to 10."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "schedule"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    composes: ClassVar[tuple[str, ...]] = ("values", "state", "weights_for_eval", "after_update")
    excludes: ClassVar[Mapping[str, str]] = {
        "schedule_free": "both say which average of the weights an evaluation reads (arXiv "
        "2405.15682)"
    }
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys=(
            "a lower validation loss at a high learning rate, about as a decay of the rate gives "
            "(arXiv 2306.03241, fig. 1; arXiv 2405.18392, section 4.2)",
        ),
        costs=(
            "4 bytes a weight; of lawa 4 x keep (derived)",
            "of ema a pass over weights and average in each step (derived)",
        ),
        helps="high or constant rates, and runs that are evaluated before their rate falls",
        hurts="the end of a rate that falls to zero, where all of the averaged weights lie close",
        source="arXiv 2306.03241; arXiv 2411.18704",
    )

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of copies that a run does not live to see."""
        lasts, name = plan.goal_steps, self.name()
        if self.kind != "lawa" or lasts is None or lasts >= 2 * self.every:
            return None
        return Doubt(
            f"{name} copies the weights every {self.every} steps, and the run has {lasts}: it "
            "averages one copy at most",
            mend(f"techniques.{name}.every={max(1, lasts // (2 * self.keep))}"),
        )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support every plan whose knobs average something."""
        if self.kind == "ema" and self.decay == 0:
            return Unsupported(
                "decay = 0 averages nothing: it is the weights of the last step",
                mend(f"techniques.{self.name()}.decay=0.999"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add the averages, and of ema a pass over them and over the weights."""
        slices = ledger.sizes.get("slices", 1.0)
        numbers = sum(matrix.numbers for matrix in ledger.updates().values()) / slices
        copies = 1 if self.kind == "ema" else self.keep
        ledger = ledger.with_line("average", Line(FP32 * numbers * copies, ("always",)))
        if self.kind != "ema":
            return ledger
        blended = Stream("optimizer", 1, 3 * FP32 * numbers)
        return replace(ledger, work={**ledger.work, "average/optimizer": blended})

    def decay_at(self, step: int) -> float:
        """Return the decay of `ema` at a step (0 is the first)."""
        return min(self.decay, (1 + step) / (WARM + step))

    def apply(self, build: Build) -> None:
        """Make the average, move it after each update, and let it stand in evaluations."""
        average = Average(build, self.kind, self.every, self.keep)
        build.notes[self.name()] = build.state[self.name()] = average
        build.weights_for_eval.append(average.standing)
        build.values["average_decay"] = self.decay_at
        if self.kind == "ema":
            build.after_update.append(
                lambda build, finite: average.blend(build.now["average_decay"], finite)
            )
        else:
            build.after_update.append(lambda build, finite: average.take(int(build.now["step"])))

    def active(self, build: Build) -> Evidence:
        """Report how far the average is from the weights, with which it stands in evaluations."""
        average = build.notes[self.name()]
        if not average.weights:
            return Evidence(None, "this rank trains no weights")
        stands = build.state.get(self.name()) is average and bool(build.weights_for_eval)
        return Evidence(
            active=stands and average.updates > 0,
            detail=f"averaged the weights of {average.updates} steps"
            if self.kind == "ema"
            else f"averages {min(average.taken, average.keep)} copies of the weights",
            numbers={"updates": average.updates, "copies": average.taken},
        )
