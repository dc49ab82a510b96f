"""Update each parameter as soon as its gradient is complete, and free the gradient at once.

The baseline holds all gradients from the end of the backward pass to the update: as much memory as
the weights. Here every parameter has an AdamW of its own, which steps in torch's hook behind the
accumulation of its gradient; then the gradient is freed, so that one is held at a time. FSDP2 calls
the same hook on the sharded parameter, behind its reduction. The arithmetic is AdamW's to the bit.
Beside `adamw_8bit` the matrices that it takes are updated here by its rule.

Cost: what needs all gradients first cannot be: clipping by the global norm (it is still measured, a
sum of squares per parameter on the way), several micro-batches, a second sweep, and gradients that
are added up after the backward pass. A gradient that is not finite masks its own parameter's update
on this rank; others of that step may have been updated before the run ends. One launch of the fused
kernel per parameter. Parameters that another technique routes keep their gradients and their
optimizer. Source: arXiv 2306.09782 (LOMO, there with SGD); torchtune's optimizer_in_bwd.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headrace.assemble.sockets import Build, Pass, Route
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import Stream
from headrace.optim.adamw import make_adamw
from headrace.parallel.layout import local_of
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

Make = Callable[[Mapping[str, nn.Parameter]], Any]
"""(parameters by name) -> their optimizer, which leaves all as it is where `found_inf` is 1."""


class BackwardOptimizer(torch.optim.Optimizer):
    """Step one optimizer per parameter by the backward pass, with one state and list of groups.

    Args:
        make: makes the optimizer of one parameter.
        named: the parameters.
    """

    frees_gradients = True
    """Whoever reads gradients after the backward pass finds none of these."""

    def __init__(self, make: Make, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__(list(named.values()), {})
        self.each = {name: make({name: p}) for name, p in named.items()}
        self.param_groups = [g for one in self.each.values() for g in one.param_groups]
        for one in self.each.values():
            one.state = self.state
        self.squares: dict[str, Tensor] = {}
        """of this step's gradients, this rank's part, by name"""
        self.updates = self.freed_bytes = 0
        for name, p in named.items():
            p.register_post_accumulate_grad_hook(partial(self._update, name))

    def step(self, closure: Any = None) -> None:
        """Do nothing: every parameter was updated when its gradient came."""

    @torch.no_grad()
    def _update(self, name: str, p: Tensor) -> None:
        """Update `p`, whose gradient is complete; torch's hook calls this."""
        assert p.grad is not None
        grad = local_of(p.grad)
        square = torch.linalg.vector_norm(grad, dtype=torch.float32).square()
        one = self.each[name]
        one.found_inf = 1.0 - torch.isfinite(square).float()  # type: ignore[attr-defined]
        one.step()
        p.grad = None
        self.squares[name] = square
        self.updates += 1
        self.freed_bytes += grad.nbytes


class OptimizerInBackward(Technique[Build]):
    """Update each parameter as soon as its gradient is complete, and free the gradient at once."""

    rest: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    room: ClassVar[str] = "memory"
    stage: ClassVar[Stage] = Stage.OPTIMIZER
    claims: ClassVar[tuple[str, ...]] = ("clip", "passes")
    composes: ClassVar[tuple[str, ...]] = ("routes",)
    runs_rest: ClassVar[tuple[str, ...]] = ("adamw_8bit",)
    excludes: ClassVar[Mapping[str, str]] = {
        "fp16_loss_scaling": "gradients are divided by the scale after the backward pass (arXiv "
        "1710.03740, section 3.2), and are gone by then",
    }
    symptoms: ClassVar[tuple[str, ...]] = ("memory capacity:gradients",)
    card: ClassVar[Card] = Card(
        buys=(
            "the memory of all gradients but the largest: 4 bytes per weight (derived); beside "
            "adamw_8bit a weight costs 6 bytes in the place of 16",
            "torchtune measured 7% less in all, at the same speed",
        ),
        costs=(
            "clipping and accumulation",
            "one launch per parameter",
        ),
        helps="large models and few rows, where weights and gradients fill the memory",
        hurts="training from scratch, which wants clipping; many small parameters",
        source="arXiv 2306.09782; torchtune's memory ladder",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Refuse what needs all gradients before the first update."""
        plan = context.plan
        if plan is None:
            return Supported()
        mesh = plan.mesh
        if plan.optimizer.clip_norm > 0:
            return Unsupported(
                f"optimizer.clip_norm = {plan.optimizer.clip_norm:g} needs the norm of all "
                "gradients before the first update",
                mend("optimizer.clip_norm=0"),
            )
        rows = plan.rows_per_step // mesh.data
        if plan.micro_rows < rows:
            return Unsupported(
                f"{rows // plan.micro_rows} micro-batches add up their gradients, which are freed "
                "after the first",
                mend(f"batch.micro_sequences={rows}"),
            )
        for axis in ("tensor", "pipeline"):
            if getattr(mesh, axis) > 1:
                return Unsupported(
                    f"under mesh.{axis} = {getattr(mesh, axis)} gradients are complete only after "
                    "the backward pass",
                    context.whole(axis),
                    RefusalKind.COMBINATION,
                )
        ranks = mesh.data * mesh.context
        if ranks > 1 and not any("shard" in t.composes for t in plan.techniques.values()):
            return Unsupported(
                f"{ranks} ranks add up their gradients after the backward pass",
                mend("+fsdp", text="--with fsdp, which does it before"),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Hold one gradient at a time, and until the update those of other optimizers' matrices."""
        ledger = ledger.updated_by(self.name(), lambda name, matrix: True)
        mine, learns = ledger.updates(self.name(), *self.runs_rest), ledger.updates()
        slices = ledger.sizes.get("slices", 1.0)
        kept = sum(4 * m.numbers / slices for n, m in learns.items() if n not in mine)
        largest = max((4 * m.numbers for m in mine.values()), default=0.0)
        lines = {"gradients": Line(kept + largest, ("backward",))}
        if kept:
            lines["kept_gradients"] = Line(kept, ("optimizer",))
        if (update := ledger.memory.get("update")) is not None and mine:
            lines["update"] = replace(update, instants=(*update.instants, "backward"))
        ledger = replace(ledger, memory={**ledger.memory, **lines})
        return ledger.without(["head_weight_gradient"]).reworked(
            # Squares of each gradient are added up when it comes; none is scaled.
            lambda name, piece: (
                piece.whole(piece.bytes / 3)
                if name == "clip/optimizer" and isinstance(piece, Stream)
                else piece
            )
        )

    def apply(self, build: Build) -> None:
        """Route what AdamW would have, run others' updates, measure the norm of what is freed."""
        adamw: Make = partial(make_adamw, build.plan.optimizer)
        build.routes = [
            replace(route, make=partial(BackwardOptimizer, route.make))
            if route.name in self.runs_rest
            else route
            for route in build.routes
        ]
        make = partial(BackwardOptimizer, adamw)
        build.routes.append(Route(self.name(), lambda name, p: True, make, rest=self.rest))
        baseline, measured = build.passes, build.clip

        def passes(build: Build, step: int) -> Sequence[Pass]:
            """Return the baseline's passes, which run the other optimizers after backward."""
            for mine in _mine(build).values():
                mine.squares.clear()
            return baseline(build, step)

        def norm(build: Build, max_norm: float) -> Tensor:
            """Return the norm of freed gradients and of those that other optimizers hold."""
            return (_squares(build) + measured(build, 0.0).square()).sqrt()

        build.passes, build.clip = passes, norm

    def active(self, build: Build) -> Evidence:
        """Report gradients that were freed in the backward pass, and none that is still there."""
        mine = _mine(build)
        left = [n for route in mine for n, p in build.routed[route].items() if p.grad is not None]
        updates = sum(one.updates for one in mine.values())
        freed = sum(one.freed_bytes for one in mine.values())
        return Evidence(
            active=updates > 0 and not left,
            detail=f"{updates} updates in the backward pass freed {freed} bytes of gradients; "
            f"{len(left)} are still held",
            numbers={"updates": updates, "freed_bytes": freed, "held": len(left)},
        )


def _mine(build: Build) -> dict[str, BackwardOptimizer]:
    """Return the optimizers that step in the backward pass, by their routes."""
    every = build.optimizers.items()
    return {route: one for route, one in every if isinstance(one, BackwardOptimizer)}


def _squares(build: Build) -> Tensor:
    """Return the sum of squares of all freed gradients, over all ranks."""
    squares = [
        square / build.layouts[name].copies(build.world, build.model.get_parameter(name))
        for one in _mine(build).values()
        for name, square in one.squares.items()
    ]
    none = torch.zeros((), device=build.device)
    return build.world.sum_(torch.stack(squares).sum() if squares else none)
