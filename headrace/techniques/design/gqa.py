"""Let several query heads share one head of keys and values (grouped-query attention).

Keys and values shrink by `queries_per_key`: fewer parameters, smaller products, less to keep for
the backward pass, and a sampling cache that is smaller by the same factor. The baseline's attention
is grouped already; this rewrites `model.kv_heads`, so everything else follows from the config, the
prediction too. Source: arXiv 2305.13245.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.core.units import divisors
from headrace.costs.ledger import Ledger
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)


class Gqa(Technique[Build]):
    """Let several query heads share one head of keys and values."""

    queries_per_key: int = Field(default=2, ge=2, le=100_000)
    """Query heads that share a key-value head; tuner range 2 to 8."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "design"
    stage: ClassVar[Stage] = Stage.DESIGN
    claims: ClassVar[tuple[str, ...]] = ("config.kv_heads",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory capacity:activations",
        "memory capacity:parameters",
    )
    card: ClassVar[Card] = Card(
        buys="keys and values, their matrices and the sampling cache divided by queries_per_key "
        "(derived)",
        costs="quality per token, little at 4 to 8 query heads per key (arXiv 2305.13245, fig. 3)",
        helps="long contexts and models that are sampled from",
        hurts="small models with few heads",
        source="arXiv 2305.13245",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.kv_heads`; nothing where it cannot be, so that `supports` says why."""
        groups, rest = divmod(plan.model.heads, self.queries_per_key)
        return {} if rest else {"model.kv_heads": groups}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require that the query heads divide into groups, and that the weights are not given."""
        model = context.plan.model
        if model.heads % self.queries_per_key:
            fits = divisors(model.heads)[1:]
            if not fits:
                return Unsupported("one head cannot be shared by several", mend("model.heads=2"))
            near = min(fits, key=lambda n: abs(n - self.queries_per_key))
            return Unsupported(
                f"model.heads = {model.heads} is not a multiple of queries_per_key = "
                f"{self.queries_per_key}",
                mend(f"techniques.gqa.queries_per_key={near}"),
            )
        if model.pretrained:
            return Unsupported("the weights of model.pretrained have their heads", "leave it out")
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Return the ledger of the rewritten config, which it already is."""
        return ledger

    def apply(self, build: Build) -> None:
        """Check that the plan's key is in force."""
        assert build.config.heads == self.queries_per_key * build.config.resolved_kv_heads

    def active(self, build: Build) -> Evidence:
        """Count key-value heads from the rows of every block's fused matrix."""
        config, blocks = build.config, build.model.blocks
        if not len(blocks):
            return Evidence(None, "this rank holds no block")
        mixers: list[Any] = [block.mixer for block in blocks.values()]
        rows = {
            m.qkv.weight.shape[0] * build.world.size("tensor") for m in mixers if hasattr(m, "qkv")
        }
        if not rows:
            return Evidence(None, "no block of this rank has keys")
        groups = {(r // config.resolved_head_dim - config.heads) / 2 for r in rows}
        return Evidence(
            active={g * self.queries_per_key for g in groups} == {config.heads},
            detail=f"{config.heads} query heads over {max(groups):g} heads of keys and values",
            numbers={"heads": config.heads, "kv_heads": max(groups)},
        )
