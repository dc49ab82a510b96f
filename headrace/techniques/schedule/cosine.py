"""Let the learning rate fall along half a cosine from the warmup to the horizon.

It falls slowly at both ends and fastest in the middle. The whole curve depends on where it ends:
weights from its middle are not those of a shorter run, and a run that goes on past the horizon
stays at the last rate. `warmup_stable_decay` is for runs whose end is not known, and for several
lengths from one run. It rewrites `schedule.kind`, which is `cosine` by default.
Source: arXiv 1608.03983 (without restarts); that the horizon must be the run's length: arXiv
2203.15556, appendix B.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

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


class Cosine(Technique[Build]):
    """Let the learning rate fall along half a cosine from the warmup to the horizon."""

    final_fraction: Fraction | None = None
    """Share of the rate at the horizon; without it schedule.final_fraction stays. Tuner range 0 to
    0.1."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "schedule"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="a lower loss at the horizon than a constant rate (arXiv 2405.18392, fig. 3)",
        costs="one run serves one length: its middle is no finished model (arXiv 2203.15556, "
        "appendix B)",
        helps="runs whose number of steps is known",
        hurts="runs that may go on, or whose horizon is not their length",
        source="arXiv 1608.03983; arXiv 2203.15556",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `schedule.kind`, and the last share where one is asked for."""
        return {f"schedule.{key}": value for key, value in self._schedule().items()}

    def _schedule(self) -> dict[str, Any]:
        last = {} if self.final_fraction is None else {"final_fraction": self.final_fraction}
        return {"kind": "cosine", **last}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support every plan: the plan itself refuses a curve whose end it does not know."""
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
        assert build.plan.schedule.kind == "cosine"

    def active(self, build: Build) -> Evidence:
        """Compare the optimizers' rates with the curve."""
        rate, step, optimizers = build.values["lr"], build.now["step"], build.optimizers.values()
        return follows_schedule(build.plan, self._schedule(), rate, step, optimizers)
