"""Multiply the loss by a large power of two during the backward pass, so that fp16 can hold it.

fp16 ends at 6e-8, and most gradients of a language model are smaller: they would round to zero. The
backward pass is linear, so a loss that is 2^16 times larger gives gradients that are, and the step
divides them again in fp32. The scale finds itself: a gradient that is not finite halves it and the
update is masked, `growth_steps` good ones double it. A power of two changes no digit of an fp32
number. The scale lives on the device, so the host never waits for it. The run counts every skipped
step in every checkpoint (`Counters.skipped_steps`, in the report too); those in a row, which end a
run that no scale helps, are counted and kept here.

Cost: one pass over the gradients. bf16 has the range of fp32 and needs none of this. Source: arXiv
1710.03740 (section 3.2); torch.amp.GradScaler.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import Diverged
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

LARGEST = 2.0**24
"""Largest loss scale, Apex's and Megatron's bound: above it fp16's own largest number, 65,504, is
what ends growth."""


class Scale:
    """The scale and its history: on the device what the step needs, on the host what ends a run."""

    def __init__(self, start: float, device: torch.device) -> None:
        self.scale = torch.full((), start, device=device)
        self.good = torch.zeros((), device=device)
        """good steps since the scale last changed"""
        self.used = self.updates = 0
        self.skipped, self.last_skipped = 0, -1
        """skipped steps in a row, and the last of them"""

    def use(self, build: Build) -> Tensor:
        """Return what the loss is multiplied by."""
        self.used += 1
        return self.scale.clone()  # the step divides by the very number that it multiplied with

    def update(self, finite: Tensor, growth_steps: int) -> None:
        """Halve after a gradient that was not finite, double after enough good ones."""
        self.updates += 1
        good = (self.good + 1) * finite
        grow = good >= growth_steps
        scale = torch.where(grow, self.scale * 2, self.scale)
        scale = torch.where(finite > 0, scale, self.scale / 2)
        self.scale.copy_(scale.clamp(1.0, LARGEST))
        self.good.copy_(good.masked_fill(grow, 0.0))

    def skip(self, step: int) -> int:
        """Note a skipped step; returns how many have been in a row."""
        self.skipped = self.skipped + 1 if step == self.last_skipped + 1 else 1
        self.last_skipped = step
        return self.skipped

    def tensors(self) -> dict[str, Tensor]:
        """Return what is saved, and filled in place."""
        return {"scale": self.scale, "good": self.good}

    def values(self) -> dict[str, Any]:
        """Return what is saved as JSON."""
        return {"skipped": self.skipped, "last_skipped": self.last_skipped}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take back what `values` gave."""
        self.skipped, self.last_skipped = values["skipped"], values["last_skipped"]


class Fp16LossScaling(Technique[Build]):
    """Multiply the loss by a power of two in the backward pass, so that fp16 can hold gradients."""

    exponent: int = Field(default=16, ge=0, le=24)
    """The scale begins at two to this power."""
    growth_steps: int = Field(default=2000, ge=1, le=10**15)
    """Good steps after which the scale doubles."""
    patience: int = Field(default=25, ge=1, le=10**15)
    """Skipped steps in a row that end the run: the scale is not what is wrong."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "precision"
    halves: ClassVar[bool] = True
    stage: ClassVar[Stage] = Stage.STEP
    claims: ClassVar[tuple[str, ...]] = ("loss_scale", "recover")
    composes: ClassVar[tuple[str, ...]] = ("state", "after_update")
    symptoms: ClassVar[tuple[str, ...]] = ("instability",)
    card: ClassVar[Card] = Card(
        buys="fp16 arithmetic on GPUs without bf16, whose matrix units are fast in fp16 alone",
        costs="one pass over the gradients, and now and then a skipped step",
        helps="Volta and Turing GPUs (V100, T4, RTX 20)",
        hurts="Ampere and later, where bf16 is as fast or faster and needs no scale",
        source="arXiv 1710.03740",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Refuse bf16, which has the range of fp32."""
        if context.precision == "bf16":
            return Unsupported(
                "bf16 has the range of fp32, so that no gradient is too small for it",
                mend("model.precision=fp16"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Change nothing: the scale is two numbers."""
        return ledger

    def apply(self, build: Build) -> None:
        """Scale the loss, adapt the scale, and keep it in the checkpoint."""
        state = Scale(2.0**self.exponent, build.device)
        build.notes[self.name()] = build.state[self.name()] = state
        build.loss_scale = state.use
        build.after_update.append(lambda build, finite: state.update(finite, self.growth_steps))
        build.recover = self._recover

    def _recover(self, build: Build, step: int, metrics: Mapping[str, float]) -> None:
        """Let a skipped step pass, as the scale finds itself so; fail after many in a row."""
        state = build.notes[self.name()]
        if state.skip(step) >= self.patience:
            raise Diverged(
                f"the gradients of {self.patience} steps in a row, up to step {step}, are not "
                f"finite (loss {metrics['loss']}), at a loss scale of {float(state.scale):g}",
                mend(
                    "model.precision=fp32",
                    f"-{self.name()}",
                    text=f"model.precision=fp32 --without {self.name()} for a new run",
                ),
            )

    def active(self, build: Build) -> Evidence:
        """Report steps whose loss was scaled, and the scale that stands now."""
        state = build.notes[self.name()]
        scale, good = float(state.scale), float(state.good)
        return Evidence(
            active=state.used > 0 and state.updates > 0,
            detail=f"scaled the loss of {state.used} passes; the scale is {scale:g} after "
            f"{good:g} good steps",
            numbers={"scale": scale, "good_steps": good, "passes": state.used},
        )
