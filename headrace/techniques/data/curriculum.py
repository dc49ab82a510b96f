"""Read easy text first, and open harder text as the run goes.

Every document gets a score, once: how far zlib compresses it, its length, its loss under a trained
run, or a number of the user's. Rows are sorted by it, and a pacing function says which share of the
easiest may come at a place of the run, until all may; from there every epoch has every row once.
The order stays a pure function of the seed and the row (`data/paced_order.py`), so ranks, threads
and micro-batches read the same stream, and a resume needs the step alone.

Rows that are open early come again before the rest opens, if more is read than is open: the report
counts the passes. Lengths of rows (`sequence_length_schedule`) and the batch (`batch_ramp`) vary on
their own, since the pacing counts in steps.

The plan's table `data.curriculum` has the same keys; this technique writes it. Sources: Bengio et
al. (2009); arXiv 1904.03626; arXiv 1903.09848. Of language models the reports differ: 18 to 45%
fewer steps to the baseline's result, and up to 3.5% better ones as a warmup (arXiv 2506.11300), or
no compelling evidence for any of its scores of sentences (arXiv 2108.02170).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from headrace.assemble.sockets import Build
from headrace.costs.ledger import Ledger
from headrace.data.paced_order import PacedOrder
from headrace.plan.curriculum import CurriculumKnobs
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
from headrace.plan.until import unknown_end, unreached_end


class Curriculum(CurriculumKnobs, Technique[Build]):
    """Read easy text first, and open harder text as the run goes."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "data"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    settled: ClassVar[tuple[str, ...]] = ("score", "first", "stages")
    card: ClassVar[Card] = Card(
        buys="fewer steps to a result: arXiv 2506.11300 reports 18 to 45% for language models, "
        "arXiv 2108.02170 no compelling evidence",
        costs=(
            "one pass over the text that scores it, once, kept beside the shards",
            "12 bytes of host memory a row (derived), and early repetition of what is open",
        ),
        helps="text of very unequal difficulty, and few tokens for it",
        hurts="many passes over little text: the open rows are repeated while the rest waits",
        source="Bengio et al. (2009); arXiv 1904.03626; arXiv 1903.09848",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `data.curriculum`."""
        return {"data.curriculum": self.model_dump(mode="json", exclude_none=True)}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require that the schedule knows its end, where the pacing is a share of it."""
        plan = context.plan
        if plan is not None and self.ends(plan.horizon_steps) is None:
            return unknown_end(f"techniques.{self.name()}.until", self.until)
        return Supported()

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a pacing by which the run ends before all rows are open."""
        ends = self.ends(plan.horizon_steps)
        return unreached_end(
            self, plan, ends, "opens all rows", "part of the text may never be read"
        )

    def predict(self, ledger: Ledger) -> Ledger:
        """Change nothing: which row comes next costs a step no time and the device no memory."""
        return ledger

    def apply(self, build: Build) -> None:
        """Check that the plan's key is in force, by which the baseline orders rows."""
        curriculum = build.plan.data.curriculum
        assert curriculum is not None
        assert curriculum.model_dump() == self.model_dump()

    def active(self, build: Build) -> Evidence:
        """Look for rows of the newest step beyond what is open, and at mean scores by tenth.

        The order is asked that the loader reads by; the stream's hash says that it was read so.
        """
        order, rows = build.loader.order, build.loader.rows
        if not isinstance(order, PacedOrder):
            return Evidence(False, "another order says which rows come")
        step = max(0, int(build.now.get("step", 0)) - 1)  # the newest that is complete
        first, count = rows.before(step), rows.at(step)
        closed, end = order.closed(first, count), first + count
        means = {
            f"mean_score_tenth_{tenth}": mean
            for tenth, mean in enumerate(order.mean_scores(end), 1)
        }
        numbers: dict[str, Any] = {
            "open_share": order.open_share(first),
            "passes": order.passes(end),
            "mean_score": order.mean_score,
            **means,
        }
        listed = ", ".join(f"{mean:.4g}" for mean in means.values())
        return Evidence(
            active=closed == 0,
            detail=f"{closed} of {count} rows of step {step + 1} lie beyond the open "
            f"{numbers['open_share']:.0%}; mean score by tenth of the run so far: {listed}; of "
            f"all rows {order.mean_score:.4g}; the most read rows came {numbers['passes']} times",
            numbers=numbers,
        )
