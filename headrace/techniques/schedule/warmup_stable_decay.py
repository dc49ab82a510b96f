"""Hold the learning rate, and let it fall in the last share of the steps alone.

Until the decay begins nothing depends on where the run ends. So one stable run serves many lengths:
`headrace train --branch RUN@STEP` cools a checkpoint down, or goes on from it. The loss stands
high while the rate does, and most of the gain comes in the decay. Two shapes of it: `linear`, and
`sqrt`, which falls by 1 - sqrt(share of the decay), steeply first; for decays of up to a fifth of
the steps it was the better one in its source. It rewrites `schedule.kind` and what belongs to it.
Source: arXiv 2404.06395, section 4; arXiv 2405.18392, section 3.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.optim.rates import follows_schedule
from headrace.plan.schedule import Fraction
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)


class WarmupStableDecay(Technique[Build]):
    """Hold the learning rate, and let it fall in the last share of the steps alone."""

    decay_fraction: Fraction | None = None
    """Share of the horizon in which the rate falls; without it schedule.decay_fraction stays. Tuner
    range 0.1 to 0.5."""
    shape: Literal["linear", "sqrt"] = "linear"
    """How the rate falls: evenly, or by 1 - sqrt(share of the decay)."""
    final_fraction: Fraction | None = None
    """Share of the rate at the horizon; without it schedule.final_fraction stays. Tuner range 0 to
    0.1."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "schedule"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys=(
            "runs of many lengths from one: a branch pays for its decay alone (derived)",
            "the loss of a cosine of the same length, with a decay of a fifth of the steps (arXiv "
            "2405.18392, fig. 3)",
        ),
        costs="a higher loss than a cosine's until the decay",
        helps="runs whose length is not known, sweeps over lengths, and models that go on later",
        hurts="validations before the decay, which tell little of the end",
        source="arXiv 2404.06395; arXiv 2405.18392",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `schedule.kind` and `schedule.decay_shape`, and the shares that are asked for."""
        return {f"schedule.{key}": value for key, value in self._schedule().items()}

    def _schedule(self) -> dict[str, Any]:
        shares = {"decay_fraction": self.decay_fraction, "final_fraction": self.final_fraction}
        given = {key: value for key, value in shares.items() if value is not None}
        return {"kind": "warmup_stable_decay", "decay_shape": self.shape, **given}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a rate that falls: the plan itself refuses a curve without an end."""
        if self.final_fraction == 1:
            return Unsupported(
                "final_fraction = 1 is a rate that does not fall",
                mend(f"techniques.{self.name()}.final_fraction=0.1"),
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return the ledger as it is: a rate costs nothing."""
        return ledger

    def apply(self, build: Build) -> None:
        """Check that the plan's key is in force."""
        assert build.plan.schedule.kind == "warmup_stable_decay"

    def active(self, build: Build) -> Evidence:
        """Compare the optimizers' rates with the curve."""
        rate, step, optimizers = build.values["lr"], build.now["step"], build.optimizers.values()
        return follows_schedule(build.plan, self._schedule(), rate, step, optimizers)
