"""Train low-rank adapters of a frozen model instead of the model.

Finetuning a whole model holds a gradient and two moments for every weight. LoRA freezes them all
and trains a correction B A of rank `rank` beside each chosen linear (model/lora), so gradients and
optimizer state shrink from all weights to rank x (in + out) a linear. Activations stay: the
adapters' gradients need the same inputs. The backward pass skips the frozen weights' gradients,
a third of its products. B starts at zero, so the first step starts at the model that was given;
`export --to hf` adds B A into the weights. Left out: other scalings (rsLoRA), DoRA, dropout.
Source: arXiv 2106.09685.
"""

from typing import Any, ClassVar

from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.costs.ledger import Ledger
from headrace.model.lora import (
    adapt_linears,
    adapter_evidence,
    over_random_weights,
    with_adapters_alone,
)
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


class Lora(Technique[Build]):
    """Train low-rank adapters of a frozen model instead of the model."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rows of an adapter; tuner range 8 to 256."""
    alpha: float = Field(default=32.0, gt=0, le=4096)
    """The correction is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Ends of names of the linears that are adapted, as in "mixer.qkv" or "mlp.down"; empty is all
    linears of the blocks, which learns best at a given size (arXiv 2305.14314, section 4)."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "adapt"
    stage: ClassVar[Stage] = Stage.LINEAR
    composes: ClassVar[tuple[str, ...]] = ("linear", "frozen")
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:optimizer", "memory capacity:gradients")
    card: ClassVar[Card] = Card(
        buys="the gradients and optimizer state of all frozen weights: 12 bytes each (derived)",
        costs=(
            "two thin products beside every adapted linear",
            "a correction of rank `rank` may not reach what training all weights reaches",
        ),
        helps="finetuning a pretrained model on little data or little memory",
        hurts="pretraining, and finetuning that must learn much that is new",
        source="arXiv 2106.09685",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run everywhere but under tensor parallelism."""
        if context.plan.mesh.tensor > 1:
            return Unsupported(
                "adapters do not say yet how they are split over tensor ranks",
                context.whole("tensor"),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def doubt(self, plan: Any) -> Doubt | None:
        """Refuse adapters of random weights, which stay random: there is nothing to adapt."""
        return over_random_weights(self.name(), plan.model)

    def predict(self, ledger: Ledger) -> Ledger:
        """Count gradients and state of the adapters alone; drop the matmuls of frozen gradients."""
        return with_adapters_alone(ledger, self.name(), self.targets, self.rank)

    def apply(self, build: Build) -> None:
        """Replace the chosen linears, and freeze all but the adapters."""
        adapt_linears(build, self.name(), self.targets, rank=self.rank, alpha=self.alpha)

    def active(self, build: Build) -> Evidence:
        """Report adapters that got a gradient, and frozen weights that got none."""
        active, detail, numbers = adapter_evidence(build.model, build.optimizers.values())
        return Evidence(active, detail, numbers)
