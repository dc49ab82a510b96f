"""Share what all techniques do that only rewrite keys of `schedule.*` when a plan is read.

The baseline already knows such a key, and a learning rate costs nothing. So a technique of this
kind has a name, a card and its keys; its evidence compares the optimizers' rates with the curve.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.optim.rates import follows_schedule
from headrace.plan.schedule import Fraction
from headrace.plan.technique import Context, Evidence, Stage, Supported, Technique, Unsupported


class Scheduled(Technique[Build]):
    """A scheduled technique only rewrites keys of `schedule.*`; a subclass says which."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "schedule"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    images: ClassVar[bool] = True
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)

    def curve(self) -> Mapping[str, Any]:
        """Return the keys of the table `schedule` with the values that are asked for."""
        raise NotImplementedError

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return the keys of `schedule.*` that the technique rewrites."""
        return {f"schedule.{key}": value for key, value in self.curve().items()}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support every plan: the plan itself refuses a curve whose end it does not know."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return the ledger as it is: a rate costs nothing."""
        return ledger

    def apply(self, build: Build) -> None:
        """Check that the plan's keys are in force."""
        for key, value in self.curve().items():
            assert getattr(build.plan.schedule, key) == value, key

    def active(self, build: Build) -> Evidence:
        """Compare the optimizers' rates with the curve."""
        rate, step, optimizers = build.values["lr"], build.now["step"], build.optimizers.values()
        return follows_schedule(build.plan, self.curve(), rate, step, optimizers)


class Falling(Scheduled):
    """A falling curve ends at a share of the rate, which may be asked for."""

    final_fraction: Fraction | None = None
    """Share of the rate at the horizon; without it schedule.final_fraction stays. Tuner range 0 to
    0.1."""

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a rate that falls: the plan itself refuses a curve without an end."""
        if self.final_fraction == 1:
            return Unsupported(
                "final_fraction = 1 is a rate that does not fall",
                mend(f"techniques.{self.name()}.final_fraction=0.1"),
            )
        return Supported()
