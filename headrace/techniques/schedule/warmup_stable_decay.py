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

from headrace.assemble.scheduled import Falling
from headrace.plan.schedule import Fraction
from headrace.plan.technique import Card


class WarmupStableDecay(Falling):
    """Hold the learning rate, and let it fall in the last share of the steps alone."""

    decay_fraction: Fraction | None = None
    """Share of the horizon in which the rate falls; without it schedule.decay_fraction stays. Tuner
    range 0.1 to 0.5."""
    shape: Literal["linear", "sqrt"] = "linear"
    """How the rate falls: evenly, or by 1 - sqrt(share of the decay)."""

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

    def curve(self) -> Mapping[str, Any]:
        """Return the kind and the shape of the decay, and the shares that are asked for."""
        shares = {"decay_fraction": self.decay_fraction, "final_fraction": self.final_fraction}
        given = {key: value for key, value in shares.items() if value is not None}
        return {"kind": "warmup_stable_decay", "decay_shape": self.shape, **given}
