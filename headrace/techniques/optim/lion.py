"""Move every weight by the sign of its momentum: one state where AdamW has two.

The update (optim/lion) was found by a search over programs. A step has one length for all numbers,
so that the rate is smaller than AdamW's and the decay larger; `rate_share` sets both, and
lr x decay stays the plan's. The state is one momentum for each weight, half of AdamW's.
Source: arXiv 2302.06675.
"""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import nn

from headrace.assemble.sockets import Build, Route
from headrace.costs.ledger import Ledger
from headrace.optim.elementwise import predict_rest, updated_in_lists
from headrace.optim.lion import LionOptimizer
from headrace.parallel.layout import local_of
from headrace.plan.technique import Card, Context, Evidence, Stage, Supported, Technique


class Lion(Technique[Build]):
    """Move every weight by the sign of its momentum: one state where AdamW has two."""

    rate_share: float = Field(default=0.2, gt=0, le=1)
    """Share of optimizer.lr that is its rate; optimizer.weight_decay is divided by it. The paper
    has 0.1 to 0.33, which is the tuner's range."""
    near: float = Field(default=0.9, ge=0, lt=1)
    """Share of the momentum in the direction of a step; the paper's beta1, 0.95 for its language
    models."""
    far: float = Field(default=0.99, ge=0, lt=1)
    """Share of the old momentum that is kept; the paper's beta2, 0.98 for its language models."""

    rest: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    room: ClassVar[str] = "optim"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    images: ClassVar[bool] = True
    composes: ClassVar[tuple[str, ...]] = ("routes",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:optimizer", "recipe")
    card: ClassVar[Card] = Card(
        buys="half of AdamW's optimizer state: 4 of 8 bytes a weight (derived)",
        costs="a rate and a decay of its own; eight passes over the weights where fused AdamW has "
        "one: 76 bytes a number instead of 28 (derived)",
        helps="large batches, where its paper's gain is largest, and memory that states fill",
        hurts="batches under 64 examples, by its paper; with both tuned, language models end about "
        "where AdamW's do (arXiv 2407.07972)",
        source="arXiv 2302.06675",
    )

    def supports(self, context: Context) -> Supported:
        """Run everywhere: its work is by element."""
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Count one state, and the passes of its operations over lists."""
        ledger = predict_rest(ledger, self.name(), states=1, traffic=76, kernels=8, each=0)
        return updated_in_lists(ledger, self.name())

    def apply(self, build: Build) -> None:
        """Route all parameters that no other technique takes."""
        config = build.plan.optimizer

        def make(named: Mapping[str, nn.Parameter]) -> LionOptimizer:
            return LionOptimizer(
                named,
                lr=config.lr * self.rate_share,
                betas=(self.near, self.far),
                weight_decay=config.weight_decay / self.rate_share,
            )

        build.routes.append(Route(self.name(), lambda name, p: True, make, rest=self.rest))

    def active(self, build: Build) -> Evidence:
        """Report the bytes of state for each weight, and the weights that have a momentum."""
        optimizer = build.optimizers.get(self.name())
        states = optimizer.state.values() if optimizer is not None else ()
        momenta = [local_of(t) for state in states for t in state.values()]
        weights = sum(local_of(p).numel() for p in build.routed.get(self.name(), {}).values())
        state_bytes = sum(t.nbytes for t in momenta)
        moved = sum(int(t.count_nonzero()) for t in momenta)
        return Evidence(
            active=getattr(optimizer, "updates", 0) > 0
            and moved > 0
            and state_bytes <= 4 * weights,
            detail=f"{moved} of {weights} weights have a momentum, in {state_bytes} bytes of state",
            numbers={"weights": weights, "moved": moved, "state_bytes": state_bytes},
        )
