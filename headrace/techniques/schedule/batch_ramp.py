"""Begin with a small global batch and let it grow: more updates from the first tokens.

Early on gradients of different rows agree, so that a large batch says little more than a small one;
late ones scatter, and only a large batch averages them out. The critical batch grows as the loss
falls. So the first steps take `batch.tokens` / `divide` tokens, then twice as many until that is
all, in equal numbers of steps until `until`. The stages are a pure
function of the step: rows keep their order and their numbers, each row comes once, the loss of a
step is divided by the targets of that step, and a goal in tokens counts what was read.

The learning rate stays as the schedule says. Micro-batches keep `batch.micro_sequences` where a
stage has as many rows, so that a larger batch is more of them; with `micro_sequences` = 0 each
stage is another shape to a compiler. A pipeline orders its passes anew in each step, and waits
longer in one of few micro-batches. Where it takes these in groups, stages are whole groups.
Source: arXiv 1812.06162; arXiv 1711.00489; GPT-3 (arXiv 2005.14165, section 2.3).
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.core.remedy import Remedy, mend
from headrace.core.units import divisors
from headrace.costs.ledger import Ledger
from headrace.plan.batches import BatchStages
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
from headrace.plan.until import end_step, unknown_end, unreached_end


class BatchRamp(Technique[Build]):
    """Begin with a small global batch and let it grow: more updates from the first tokens."""

    divide: Literal[2, 4, 8, 16, 32, 64] = 4
    """By what batch.tokens is divided in the first steps; tuner range 2 to 16."""
    until: float = Field(default=0.3, gt=0, le=10**15)
    """When the batch is whole: at most 1 is a share of schedule.steps or goal.steps, above it is a
    step. Tuner range 0.1 to 0.5."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "schedule"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    follows_horizon: ClassVar[bool] = True
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    excludes: ClassVar = {
        "cuda_graphs": "a recorded step has one number of micro-batches of one shape "
        "(docs.pytorch.org, torch.cuda.graph)",
        "dynamic_batch": "both say how many rows a micro-batch has (arXiv 1812.06162 grows the "
        "batch, dynamic_batch what fits)",
    }
    card: ClassVar[Card] = Card(
        buys="as many tokens in more updates while the critical batch is small (arXiv 1812.06162, "
        "section 2.4)",
        costs=(
            "a lower speed of the first steps, whose batch fills the device less",
            "one more compiled shape per stage where micro_sequences = 0",
            "a larger bubble of a pipeline in the first steps (derived)",
        ),
        helps="batches that are large for the first losses, as of runs on many devices",
        hurts="batches below the critical size, and goals in steps, which see fewer tokens",
        source="arXiv 1812.06162; arXiv 1711.00489; arXiv 2005.14165",
    )

    def batch_stages(self, plan: Any) -> Sequence[tuple[int, int]]:
        """Return (first step, tokens) of each stage; none where `supports` says why not."""
        tokens, ends = self._tokens(plan), self._ends(plan)
        if tokens is None or ends is None:
            return ()
        return [
            (number * ends // max(1, len(tokens) - 1), each) for number, each in enumerate(tokens)
        ]

    def _ends(self, plan: Any) -> int | None:
        """Return the first step whose batch is whole; None where the plan's end is not known.

        Which step a goal in tokens ends at depends on the batches themselves.
        """
        return end_step(self.until, plan.schedule.steps or plan.goal.steps)

    def _fits(self, plan: Any) -> list[int]:
        """Return by what the batch can be divided, so that micro-batches and ranks stay whole."""
        rows, micro = plan.rows_per_step // plan.mesh.data, plan.micro_rows
        parts = get_args(type(self).model_fields["divide"].annotation)
        whole = [n for n in parts if rows % n == 0]
        alone = [n for n in whole if rows // n <= micro and plan.micro_group == 1]
        return [n for n in whole if n in alone or rows // n % (micro * plan.micro_group) == 0]

    def _tokens(self, plan: Any) -> list[int] | None:
        """Return the batch of each stage, or None where the first is not whole."""
        fits = self._fits(plan)
        if self.divide not in fits:
            return None
        return [
            *(plan.batch.tokens // n for n in fits[::-1] if n <= self.divide),
            plan.batch.tokens,
        ]

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a ramp by which no step of the run has the whole batch."""
        so = f"no step has the {plan.batch.tokens:,} tokens of batch.tokens"
        return unreached_end(self, plan, self._ends(plan), "makes the batch whole", so)

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a first batch of whole micro-batches that divides the whole one, and an end."""
        plan, name = context.plan, self.name()
        if plan is None:
            return Supported()
        fits, group = self._fits(plan), plan.micro_group
        rows, micro = plan.rows_per_step // plan.mesh.data, plan.micro_rows
        groups = f", {group} or a multiple of {group} in each step" if group > 1 else ""
        if not fits:
            return Unsupported(
                f"the {rows} rows of a rank cannot be halved into whole micro-batches of {micro}"
                f"{groups}",
                self._nearest(plan),
            )
        if self.divide not in fits:
            near = min(fits, key=lambda n: abs(n - self.divide))
            return Unsupported(
                f"divide = {self.divide} does not divide the {rows} rows of a rank into whole "
                f"micro-batches of {micro}{groups}",
                mend(f"techniques.{name}.divide={near}"),
            )
        if self._ends(plan) is None:
            return unknown_end(f"techniques.{name}.until", self.until)
        return Supported()

    def _nearest(self, plan: Any) -> Remedy:
        """Return the nearest micro-batches or the next larger batch that this ramp divides."""
        ranks, group = plan.mesh.data, plan.micro_group
        rows, asked = plan.rows_per_step // ranks, plan.batch.micro_sequences
        if group > 1 and rows % (self.divide * group) == 0:
            fits = divisors(rows // (self.divide * group))
            return mend(
                f"batch.micro_sequences={min(fits, key=lambda n: abs(n - plan.micro_rows))}"
            )
        unit = self.divide * group * (asked or 1)
        near = -(-rows // unit) * unit * ranks * plan.data.sequence_length
        more = [] if asked or group == 1 else ["batch.micro_sequences=1"]
        return mend(f"batch.tokens={near}", *more)

    def predict(self, ledger: Ledger) -> Ledger:
        """Return what the whole batch costs, which comes: the run's peak, and most of its steps."""
        return ledger

    def apply(self, build: Build) -> None:
        """Check that the plan counts by these stages, which the loader reads."""
        assert build.plan.batches.stages == tuple(self.batch_stages(build.plan))

    def active(self, build: Build) -> Evidence:
        """Compare the rows that the loader reads in the first and the newest step with the ramp."""
        plan, newest = build.plan, int(build.now.get("step", 0))
        wanted = BatchStages(tuple(self.batch_stages(plan)) or ((0, 0),))
        length, read = plan.data.sequence_length, build.loader.rows
        same = all(read.at(step) * length == wanted.at(step) for step in (0, newest))
        numbers: dict[str, Any] = {
            "first_tokens": read.at(0) * length,
            "newest_tokens": read.at(newest) * length,
        }
        return Evidence(
            active=same and len(read.stages) > 1,
            detail=f"the first step read {numbers['first_tokens']} tokens and step {newest + 1} "
            f"{numbers['newest_tokens']}, in {len(read.stages)} stages",
            numbers=numbers,
        )
