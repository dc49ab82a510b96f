"""Clip the gradients where their norm stands out among the run's own recent norms (ZClip).

A fixed limit is too high late in a run, when norms have fallen, or too low early. Here the limit
follows the run: an exponential mean and variance of the norm are kept, and only a norm whose
z-score is above `threshold` is clipped, the further out the harder: to mean + threshold^2 / z x
deviation. The mean then takes in the clipped norm. The plan's `optimizer.clip_norm` stays in force
as an upper limit, and is the only one in the first `warmup` steps, which give the statistics. That
is ZClip's code; 0 leaves only the adaptive limit.

The four numbers live on the device, so the host never waits. They are in every checkpoint, and the
same on every rank, because the norm is. A norm that is not finite is not taken in: the step is
masked. Left out: ZClip's percentile mode. Source: arXiv 2504.02507; github.com/bluorion-com/ZClip.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.clipping import norm_over_ranks, scale
from headrace.assemble.sockets import Build
from headrace.costs.ledger import Ledger
from headrace.costs.work import Stream
from headrace.optim.adamw import clip_factor
from headrace.optim.stability import NormTracker
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

SMALL_KERNELS = 24
"""Kernels on single numbers that a step adds, counted in `NormTracker.limit`."""


class Clipper:
    """Fill the `clip` socket: the tracker with what it saw, as state of the run."""

    def __init__(self, tracker: NormTracker) -> None:
        self.tracker = tracker
        self.seen = -1.0
        """the step whose norm was taken in last; a second pass of it is only measured"""
        self.steps = 0

    def __call__(self, build: Build, max_norm: float) -> Tensor:
        """Clip this step's gradients, and return their norm before; later passes only measure."""
        norm, step = norm_over_ranks(build), build.now["step"]
        if step == self.seen:
            scale(build, clip_factor(norm, max_norm) if max_norm > 0 else None)
            return norm
        self.seen, self.steps = step, self.steps + 1
        limit = self.tracker.limit(norm)
        limit = limit.clamp(max=max_norm) if max_norm > 0 else limit
        scale(build, torch.where(limit < norm, limit / (norm + 1e-6), 1.0))
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Return what is saved, and filled in place."""
        return self.tracker.tensors()

    def values(self) -> dict[str, Any]:
        """Return nothing: all is on the device."""
        return {}

    def load_values(self, values: Any) -> None:
        """Do nothing."""


class AdaptiveClipping(Technique[Build]):
    """Clip the gradients where their norm stands out among the run's own recent norms (ZClip)."""

    threshold: float = Field(default=2.5, gt=0, le=100)
    """z-score above which a norm is clipped; the paper's 2.5; tuner range 2 to 4."""
    alpha: float = Field(default=0.97, gt=0, lt=1)
    """Share of the old mean and variance that a step keeps; the paper's 0.97."""
    warmup: int = Field(default=25, ge=2, le=10**6)
    """Steps whose norms give the first mean and variance; the paper's 25."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "stability"
    stage: ClassVar[Stage] = Stage.STEP
    images: ClassVar[bool] = True
    claims: ClassVar[tuple[str, ...]] = ("clip",)
    composes: ClassVar[tuple[str, ...]] = ("state",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("instability",)
    card: ClassVar[Card] = Card(
        buys="fewer loss spikes than a fixed limit at the same learning rate, and a larger rate "
        "that stays stable (arXiv 2504.02507, LLaMA 1B)",
        costs="about two dozen kernels on single numbers per step (derived)",
        helps="pretraining at large learning rates, whose norms fall as it goes",
        hurts="runs shorter than a few times its warmup of 25 steps; norms that jump by design, as "
        "where the data changes",
        source="arXiv 2504.02507; github.com/bluorion-com/ZClip",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run everywhere: the norm is summed over all ranks."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Add kernels on single numbers; memory stays as it is."""
        small = Stream("optimizer", 1, 0.0, SMALL_KERNELS)
        return replace(ledger, work={**ledger.work, "clip/adaptive": small})

    def apply(self, build: Build) -> None:
        """Put the tracker in the place of the baseline's clipping, and in the checkpoint."""
        knobs = {"alpha": self.alpha, "threshold": self.threshold, "warmup": self.warmup}
        clipper = Clipper(NormTracker(build.device, **knobs))
        build.clip = build.state[self.name()] = build.notes[self.name()] = clipper

    def active(self, build: Build) -> Evidence:
        """Report the norms that were taken in, and the statistics that they gave."""
        clipper: Clipper = build.notes[self.name()]
        kept = {name: float(value) for name, value in clipper.tensors().items()}
        return Evidence(
            active=build.clip is clipper and clipper.steps > 0 and kept["mean"] > 0,
            detail=f"took in {kept['count']:g} norms, mean {kept['mean']:.3g}, deviation "
            f"{kept['variance'] ** 0.5:.2g}; {kept['clipped']:g} stood out",
            numbers=kept,
        )
