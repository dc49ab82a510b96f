"""Keep the final logits within a cap by a tanh.

A logit z becomes cap x tanh(z / cap). No token can have more than a share of the probability that
the cap decides, and the gradient of a logit that is far out fades: an outlier in the data moves the
model less. Gemma 2 caps at 30, nanochat and modded-nanogpt at 15. Scores of attention are another
matter: `logit_soft_cap` caps those.

The baseline caps where `model.logit_cap` says so, in all heads, fused ones too; this rewrites the
key. Source: arXiv 2408.00118, section 2.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.plan.technique import Card, Evidence


class LogitCap(Keyed):
    """Keep the final logits within a cap by a tanh."""

    cap: float = Field(default=15.0, gt=0, lt=1e6)
    """Size that no logit exceeds; tuner range 10 to 50."""

    claims: ClassVar[tuple[str, ...]] = ("config.logit_cap",)
    symptoms: ClassVar[tuple[str, ...]] = ("instability",)
    card: ClassVar[Card] = Card(
        buys="logits that cannot grow beyond the cap (arXiv 2408.00118, section 2); 3.40 minutes "
        "in place of 3.57 to one loss by 15 in place of 30 (modded-nanogpt's record 18)",
        costs="a tanh of every logit, and memory for it where no fused loss computes it (derived)",
        helps="long runs whose logits drift, and text with outliers",
        hurts="export: no architecture here has it; caps below the logarithm of the vocabulary",
        source="arXiv 2408.00118, section 2; github.com/karpathy/nanochat",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.logit_cap`."""
        return {"model.logit_cap": self.cap}

    def active(self, build: Build) -> Evidence:
        """Read the cap of the head."""
        head = build.model.head
        if head is None:
            return Evidence(None, "the head is on another rank")
        return Evidence(
            active=head.cap == self.cap,
            detail=f"{type(head).__name__} caps logits at {head.cap:g}",
            numbers={"cap": head.cap},
        )
