"""Scale initial weights and learning rates with width, so that both carry over from a small model.

In the usual scheme the best learning rate falls as a model widens, and is searched again at each
size. Here it is found once at `base_dim` and holds at every `model.dim`: this is the maximal update
parametrization for Adam in the form without forward multipliers (arXiv 2203.03466, Table 3), with
m = dim / base_dim:

    embeddings, vectors    initial std as it is       learning rate as it is
    matrices of blocks     std / sqrt(m)              lr / m
    output matrix, router  std / m                    lr / m

Weight decay is multiplied by m where the rate is divided, since AdamW multiplies the two. The
forward pass is the baseline's: attention divides by sqrt(head_dim), which is right while wider
models have more heads and not wider ones. So the base has the same head_dim, and `base_dim` must be
a multiple of it. A tied output matrix would need a multiplier and is refused; other optimizers have
other rules and are refused too.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from headrace.assemble.sockets import Build, Optimizer, Route
from headrace.core.errors import RefusalKind
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.model.init import is_drawn_as_matrix
from headrace.model.zoo import families
from headrace.optim.adamw import make_adamw
from headrace.optim.roles import role_of
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

FINITE_OUTPUTS = ("head.weight", ".router.weight")
"""Matrices whose output does not widen with the model."""


class Mup(Technique[Build]):
    """Scale initial weights and learning rates with width, so that both carry over."""

    base_dim: int = Field(default=256, ge=1, le=1 << 24)
    """`model.dim` at which `optimizer.lr` and `model.init_std` were chosen."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "design"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("source",)
    composes: ClassVar[tuple[str, ...]] = ("routes",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="a learning rate and an initial std that hold at every width: searched once, small "
        "(arXiv 2203.03466, fig. 1)",
        costs="nothing in time or memory",
        helps="a family of widths, or one that is too wide to search at",
        hurts="changes of depth, batch or length, which it does not carry over",
        source="arXiv 2203.03466, Table 3",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require random, untied weights, AdamW, and a base of the same head_dim."""
        model, name = context.plan.model, self.name()
        if model.pretrained:
            return Unsupported("the weights of model.pretrained have their scale", "leave it out")
        if model.tied_embeddings:
            return Unsupported(
                "a tied output matrix needs a forward multiplier",
                mend("model.tied_embeddings=false"),
            )
        width = model.resolved_head_dim
        if self.base_dim % width:
            near = max(width, round(self.base_dim / width) * width)
            return Unsupported(
                f"head_dim must be the base's, and no base of {self.base_dim} features has heads "
                f"of {width}",
                mend(f"techniques.mup.base_dim={near}"),
            )
        for other, technique in context.plan.techniques.items():
            if other != name and "routes" in technique.composes:
                return Unsupported(
                    f"its learning rates are Adam's, and {other} has another rule",
                    mend(f"-{other}"),
                    RefusalKind.COMBINATION,
                )
        return Supported()

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn that the base has heads of another width, or that the plan does not say how wide.

        The base is the family's own model where its width is `base_dim`. Where it is another model,
        a plan that sets model.head_dim states that both widths are equal.
        """
        model, name = plan.model, self.name()
        own, width = ModelConfig(**families()[model.family]), model.resolved_head_dim
        if model.dim == self.base_dim:
            return None
        carries = f"{name} carries rates over between models whose heads are equally wide"
        if own.dim == self.base_dim:
            base, heads = own.resolved_head_dim, model.dim // own.resolved_head_dim
            if base == width:
                return None
            same = f"model.heads={heads}" if heads * base == model.dim else f"model.head_dim={base}"
            return Doubt(
                f"{carries}: the base, {model.family} with {self.base_dim} features, has heads of "
                f"{base}, and this model of {width}",
                mend(same),
            )
        if model.head_dim:
            return None
        return Doubt(
            f"{carries}, and nothing says that the base of {self.base_dim} features has heads of "
            f"{width} (so {self.base_dim // width} of them) as this model does",
            mend(
                f"model.head_dim={width}",
                text=f"model.head_dim={width} where it has, or the base's number",
            ),
        )

    def predict(self, ledger: Ledger) -> Ledger:
        """Name the matrices that it updates; memory and work stay as they are."""
        return ledger.updated_by(self.name(), lambda name, m: is_slow(name, len(m.shape)))

    def apply(self, build: Build) -> None:
        """Wrap the source, and route what has another learning rate to an AdamW of its own."""
        widening = build.config.dim / self.base_dim
        source, config = build.source, build.plan.optimizer
        slow = config.model_copy(
            update={"lr": config.lr / widening, "weight_decay": config.weight_decay * widening}
        )

        def scaled(name: str, shape: torch.Size) -> Tensor:
            value = source(name, shape)
            if not is_slow(name, len(shape)):
                return value
            power = 1.0 if name.endswith(FINITE_OUTPUTS) else 0.5
            if build.config.matrix_init != "normal" and is_drawn_as_matrix(name, shape):
                power -= 0.5  # He's rule and orthonormal matrices fall with the root already
            return value / widening**power

        def make(named: Mapping[str, nn.Parameter]) -> Optimizer:
            return make_adamw(slow, named)  # type: ignore[return-value]

        build.source = scaled
        build.routes.append(Route(self.name(), lambda name, p: is_slow(name, p.ndim), make))

    def active(self, build: Build) -> Evidence:
        """Report the learning rate of every parameter, by the optimizer that holds it."""
        config, narrower = build.plan.optimizer, self.base_dim / build.config.dim
        rates = {name: rate for name, rate in _rates(build).items() if is_slow(*name)}
        factors = {name: getattr(config.lr_factors, role_of(*name)) for name in rates}
        wanted = {name: config.lr * narrower * factor for name, factor in factors.items()}
        right = [n for n, rate in rates.items() if abs(rate / wanted[n] - 1) < 1e-9]
        routed = build.routed.get(self.name(), {})
        if not rates:
            return Evidence(None, "this rank holds no matrix")
        return Evidence(
            active=len(right) == len(rates) == len(routed),
            detail=f"{len(right)} of {len(rates)} matrices learn at "
            f"{' and '.join(f'{rate:g}' for rate in sorted({*wanted.values()}))}, the rest by "
            f"{config.lr:g}",
            numbers={"matrices": len(right), "lr": min(wanted.values())},
        )


def is_slow(name: str, dimensions: int) -> bool:
    """Return whether a parameter's input widens with the model."""
    return dimensions >= 2 and name.startswith(("blocks.", "head."))


def _rates(build: Build) -> dict[tuple[str, int], float]:
    """Map (name, dimensions) of every trained parameter to its highest learning rate."""
    by_parameter: dict[Any, float] = {}
    for optimizer in build.optimizers.values():
        for group in optimizer.param_groups:
            rate = group["initial_lr"] * group["lr_factor"]
            by_parameter |= dict.fromkeys(group["params"], rate)
    named = build.model.named_parameters()
    return {(n, p.ndim): by_parameter[p] for n, p in named if p in by_parameter}
