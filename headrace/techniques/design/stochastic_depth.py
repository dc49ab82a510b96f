"""Leave out whole blocks at random while training, the deeper the likelier.

A block that is dropped in a step is not run: its forward and backward passes cost nothing, and the
residual stream passes by. What a kept block adds is divided by its chance of being kept, so the
expected stream is the whole model's, which evaluation runs. Block l of L is dropped with
rate x l / (L - 1): the first never is. The choice is a pure function of (seed, step, block), one
for all micro-batches and ranks, so a resumed run repeats it and collectives agree. The gate stands
outside of compiled and checkpointed blocks, so no choice is traced and nothing compiles again. One
graph of all blocks has no such place: it would be one graph for each set of blocks that run, and
is refused. Source: arXiv 1603.09382.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build, Forward
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.model.mask import Rows
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

OUTSIDE = (
    "embedding",
    "head",
    "loss",
    "gradients",
    "clip",
    "update",
    "reduce",
    "count",
    "border",
)
"""How pieces of work begin that are not the blocks'."""


def is_kept(seed: int, step: int, layer: int, rate: float) -> bool:
    """Return whether block `layer` runs in `step`; true with chance 1 - `rate`."""
    digest = hashlib.sha256(f"{seed}:depth:{step}:{layer}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >= rate * 2**64


class StochasticDepth(Technique[Build]):
    """Leave out whole blocks at random while training, the deeper the likelier."""

    rate: float = Field(default=0.1, gt=0, lt=1)
    """Chance of the last block to be left out; tuner range 0.05 to 0.5."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "design"
    stage: ClassVar[Stage] = Stage.GATE
    composes: ClassVar[tuple[str, ...]] = ("block_forward", "values")
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe", "overfitting", "computation:blocks")
    card: ClassVar[Card] = Card(
        buys="about rate / 2 of the blocks' work (derived), and less overfitting "
        "(arXiv 1603.09382)",
        costs="progress per step where data is not repeated: the blocks left out learn nothing",
        helps="deep models over few tokens, repeated often",
        hurts="one pass over much data; shallow models",
        source="arXiv 1603.09382",
    )

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a rate at which the last block runs in fewer than half of the steps."""
        if self.rate <= 0.5:
            return None
        usual = f"techniques.{self.name()}.rate=0.1"
        return Doubt(
            f"techniques.{self.name()}.rate = {self.rate:g} leaves out the last block in "
            f"{self.rate:.0%} of the steps: it learns from the others alone",
            mend(usual),
            changes=(usual,),
        )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require blocks beside the first, which always runs, that are called one by one."""
        layers = context.plan.model.layers
        if layers == 1:
            return Unsupported(
                "the first block is never left out, and it is alone", mend("model.layers=2")
            )
        for name, other in context.plan.techniques.items():
            if "compiled" in other.composes and getattr(other, "scope", "block") != "block":
                return Unsupported(
                    f"{name} makes one graph of all blocks, and would make it anew for each set of "
                    f"them that a step runs: {layers} blocks have 2^{layers - 1} sets",
                    mend(f"techniques.{name}.scope=block"),
                    RefusalKind.COMBINATION,
                )
        return Supported()

    def rate_of(self, layer: int, layers: int) -> float:
        """Return the chance of block `layer` of `layers` to be left out."""
        return self.rate * layer / max(1, layers - 1)

    def is_noisy(self) -> bool:
        """Leave layers out while training alone."""
        return True

    def predict(self, ledger: Ledger) -> Ledger:
        """Expect less work of blocks, and the memory of a step that leaves none out, as some do."""
        sizes = ledger.sizes
        layers = int(sizes["layers"])
        left_out = sum(self.rate_of(n, layers) for n in range(layers)) / layers
        blocks = sizes["block_flops"] + sizes["attention_flops"]
        shares = {"forward": blocks, "backward": 2 * blocks}
        shares["recompute"] = ledger.flops.get("recompute", 0.0)
        flops = {n: f - left_out * shares.get(n, 0.0) for n, f in ledger.flops.items()}
        return replace(ledger, flops=flops).reworked(
            lambda name, piece: (
                piece
                if name.startswith(OUTSIDE)
                else replace(piece, count=piece.count * (1 - left_out))
            )
        )

    def apply(self, build: Build) -> None:
        """Wrap every block but the first, and say for each step which of them run."""
        counts = {"left_out": 0, "run": 0}
        build.notes[self.name()] = counts
        seed, layers = build.plan.seed, build.config.layers
        for layer in range(1, layers):
            build.values[_key(layer)] = _keep(seed, layer, self.rate_of(layer, layers))

        def wrap(forward: Forward, layer: int) -> Forward:
            if layer == 0:
                return forward
            chance = 1.0 - self.rate_of(layer, layers)

            def gated(x_BTD: Tensor, shared: Any) -> Tensor:
                if not torch.is_grad_enabled():
                    return forward(x_BTD, shared)
                if not build.now.get(_key(layer), 1.0):
                    counts["left_out"] += 1
                    return x_BTD
                counts["run"] += 1
                return torch.lerp(x_BTD, forward(x_BTD, shared), 1.0 / chance)

            return gated

        build.wrap_blocks(self.name(), wrap)

    def active(self, build: Build) -> Evidence:
        """Report passes that were left out, and a block that returns its input when it should."""
        gated = [b for n, b in build.model.blocks.items() if int(n) > 0]
        if not gated:
            return Evidence(None, "this rank holds no block that could be left out")
        counts, now = dict(build.notes.get(self.name(), {})), build.now
        x_1TD = torch.ones(1, 2, build.config.dim, device=build.device)
        shared = build.model.share(Rows(torch.arange(2, device=build.device)[None]), 2)
        try:
            build.now = {**now, **{_key(n): 0.0 for n in range(build.config.layers)}}
            with torch.enable_grad():
                untouched = gated[0].forward(x_1TD, shared) is x_1TD
        finally:
            build.now = now
            build.notes[self.name()].update(counts)
        return Evidence(
            active=untouched,
            detail=f"left out {counts['left_out']} forward passes of blocks, ran {counts['run']}",
            numbers=counts,
        )


def _key(layer: int) -> str:
    return f"keep/{layer}"


def _keep(seed: int, layer: int, rate: float) -> Callable[[int], float]:
    return lambda step: float(is_kept(seed, step, layer, rate))
