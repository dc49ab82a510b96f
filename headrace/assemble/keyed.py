"""Share what all techniques do that only rewrite keys of `model.*` when a plan is read.

The baseline already knows such a key. So a technique of this kind has a name, a card and evidence,
and everything else follows from the config: the model, its prediction, its export.
"""

from typing import ClassVar

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.model.adapter import shape_of
from headrace.plan.technique import Context, Stage, Supported, Technique, Unsupported


class Keyed(Technique[Build]):
    """A keyed technique only rewrites keys of `model.*`; a subclass says which in `keys`."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "design"
    stage: ClassVar[Stage] = Stage.DESIGN
    equality: ClassVar = "learning"

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require random weights, or those that have learned with these keys."""
        model = context.plan.model
        for key, value in self.keys(context.plan).items() if model.pretrained else ():
            have = getattr(shape_of(model), key.removeprefix("model."))
            if have != value:
                return Unsupported(
                    f"the weights of model.pretrained have {key} = {have!r}, and {self.name()} "
                    f"makes it {value!r}",
                    mend(f"-{self.name()}"),
                )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return the ledger of the rewritten config, which it already is."""
        return ledger

    def apply(self, build: Build) -> None:
        """Check that the plan's keys are in force."""
        for key, value in self.keys(build.plan).items():
            assert getattr(build.config, key.removeprefix("model.")) == value, key
