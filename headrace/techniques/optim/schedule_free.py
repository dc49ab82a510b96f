"""Average all steps instead of letting the learning rate decay: no schedule has to know its end.

The model trains at a point between the steps and their average (optim/schedule_free), and is
evaluated at the average: every validation is that of a run whose rate had come down. The rate is
constant behind `schedule.warmup_steps`, whose small rates count little in the average. The plan's
`optimizer.betas` give the second moment's decay, and the first is `beta`. A checkpoint holds the
point at which the run trains and the state from which the average is computed.
Source: arXiv 2405.15682; facebookresearch/schedule_free.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from headrace.assemble.sockets import Build, Route
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.optim.elementwise import predict_rest, updated_in_lists
from headrace.optim.schedule_free import ScheduleFreeOptimizer
from headrace.parallel.layout import local_of
from headrace.plan.doubts import usual_warmup
from headrace.plan.technique import (
    Card,
    Context,
    Doubt,
    Evidence,
    Stage,
    Supported,
    Technique,
)


class ScheduleFree(Technique[Build]):
    """Average all steps instead of letting the learning rate decay: no schedule has an end."""

    beta: float = Field(default=0.9, gt=0, lt=1)
    """Place between the last step (0) and the average (1) at which gradients are taken; long runs
    need 0.95 to 0.98. Tuner range 0.9 to 0.98."""

    rest: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    room: ClassVar[str] = "optim"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    composes: ClassVar[tuple[str, ...]] = ("routes", "weights_for_eval")
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="a model that is as good as after a decay at every step, for runs whose end nobody "
        "knows; its authors won AlgoPerf's self-tuning track of 2024 with it",
        costs="15 passes over the weights where fused AdamW has one: 148 bytes a number instead of "
        "28 (derived); a copy of the weights during an evaluation",
        helps="runs that are ended by a loss or a clock; comparing checkpoints of one run",
        hurts="a known horizon, for which a tuned decay costs nothing; rates 1 to 10 times "
        "AdamW's and the decay want to be tuned for it (its README)",
        source="arXiv 2405.15682; github.com/facebookresearch/schedule_free",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `schedule.kind`: the average replaces a decay of the rate."""
        return {"schedule.kind": "constant"}

    def supports(self, context: Context) -> Supported:
        """Run everywhere: its work is by element."""
        return Supported()

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a run without a warmup, whose first steps count as much as later ones."""
        if plan.schedule.warmup_steps:
            return None
        return Doubt(
            f"{self.name()} averages all steps, and with schedule.warmup_steps = 0 the first ones "
            "count as much as later ones; its authors recommend a warmup",
            mend(f"schedule.warmup_steps={usual_warmup(plan)}"),
        )

    def predict(self, ledger: Ledger) -> Ledger:
        """Count two states, as AdamW's, and the passes of its operations over lists."""
        ledger = predict_rest(ledger, self.name(), states=2, traffic=148, kernels=15, each=3)
        return updated_in_lists(ledger, self.name())

    def apply(self, build: Build) -> None:
        """Route all parameters that no other technique takes; evaluate their average."""
        config = build.plan.optimizer

        def make(named: Mapping[str, nn.Parameter]) -> ScheduleFreeOptimizer:
            return ScheduleFreeOptimizer(
                named,
                lr=config.lr,
                beta=self.beta,
                memory=config.betas[1],
                eps=config.eps,
                weight_decay=config.weight_decay,
            )

        @contextmanager
        def averaged(build: Build) -> Iterator[None]:
            optimizer = build.optimizers.get(self.name())
            if not isinstance(optimizer, ScheduleFreeOptimizer):  # all are frozen on this rank
                yield
                return
            with optimizer.averaged():
                yield

        build.routes.append(Route(self.name(), lambda name, p: True, make, rest=self.rest))
        build.weights_for_eval.append(averaged)

    def active(self, build: Build) -> Evidence:
        """Report the weights that have a step beside their average, and evaluations of that."""
        optimizer = build.optimizers.get(self.name())
        states = [*optimizer.state.values()] if optimizer is not None else []
        moved = sum(int(local_of(s["exp_avg_sq"]).count_nonzero()) for s in states if "z" in s)
        weights = sum(local_of(p).numel() for p in build.routed.get(self.name(), {}).values())
        evaluations = getattr(optimizer, "evaluations", 0)
        return Evidence(
            active=getattr(optimizer, "updates", 0) > 0
            and moved > 0
            and bool(build.weights_for_eval),
            detail=f"{moved} of {weights} weights have a step beside their average, which "
            f"{evaluations} evaluations read",
            numbers={"weights": weights, "moved": moved, "evaluations": evaluations},
        )
