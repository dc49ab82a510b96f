"""Set weights to zero while a model trains, and let the others recover what that costs.

Pruning single weights of a finished model moves its predictions; training on with the zeros held
gets a part back. After a share of the schedule (`start`) the linears of blocks lose their least
needed numbers, by magnitude or by Wanda (compress/sparsity), at once or rising to `share` by a
cubic ramp until `end` (arXiv 1710.01878). After every update what is pruned is set to zero again,
whatever optimizer, decay or momentum moved it, and the bits that bf16 weights leave to their
optimizer with it. What is pruned stays pruned, so that `headrace compress RUN --to 2:4` stores the
very weights of the last step. Learning from the whole model is `distillation` beside it.

Masks are made of whole matrices, which ranks that hold parts gather for it, so every layout prunes
the same numbers; they lie as the weights lie, are saved in each checkpoint, and cost a byte a
number. Wanda reads the batch of the step before the weights are pruned: one forward pass more,
uncompiled, in those steps alone.

Left out: weights that grow again (arXiv 1911.11134), embeddings and heads, and experts.
Source: arXiv 1710.01878; arXiv 2306.11695 (Wanda); arXiv 2104.08378 (2:4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from headrace.assemble.sockets import Build, MicroBatch
from headrace.compress.sparsity import input_squares, pruned_of, scores_of, share_after
from headrace.compress.spec import GROUP, HALF, SparsitySpec
from headrace.core.errors import ConfigError, RefusalKind
from headrace.core.limits import MOST
from headrace.core.remedy import Remedy, mend
from headrace.costs.count import block_linears
from headrace.costs.ledger import Ledger, Line
from headrace.costs.work import Stream
from headrace.model.head import cross_entropy
from headrace.parallel.layout import local_of
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
from headrace.plan.until import end_step

SHARE = "pruned_share"
"""The name in `values` of the share that is pruned after a step."""
REST = "rest"
"""The key of an optimizer's state for the bits that a bf16 weight leaves out (bf16_parameters)."""
MASKED = 9.0
"""Bytes that setting one pruned number to zero moves: its mask, and fp32 both ways (derived)."""
AVERAGED = "an evaluation reads an average of weights from before they were pruned"
ADAPTED = "an adapter that is merged into a weight fills its zeros"


class PrunedWeights:
    """The masks of a run's linears, and what makes them; this is the technique's state.

    Args:
        build: the run, whose weights are real.
        spec: what is pruned.
    """

    def __init__(self, build: Build, spec: SparsitySpec) -> None:
        self.spec, self.share, self.steps = spec, 0.0, 0
        self.linears = {
            f"{name}.weight": module
            for name, module in build.model.named_modules()
            if isinstance(module, nn.Linear) and name.startswith("blocks.")
        }
        self.weights = {name: build.model.get_parameter(name) for name in self.linears}
        self.masks = {
            name: torch.zeros_like(p.detach(), dtype=torch.bool) for name, p in self.weights.items()
        }
        """name -> true where a number is pruned; lies on the ranks as the weight does"""
        self.squares: dict[str, Tensor] = {}
        """sums of squares of what each linear read of this step's text, where Wanda asks for it"""

    def read(self, build: Build, micros: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Sum what the linears read of a step's text, in a step that is to prune."""
        if self.share < build.now.get(SHARE, 0.0) and not self.squares:
            one = torch.ones((), device=build.device)
            eager = torch.compiler.set_stance("force_eager")
            with torch.no_grad(), eager, input_squares(self.linears) as squares:
                build.engine(build, micros, cross_entropy, one)
            self.squares = squares
        return micros

    @torch.no_grad()
    def hold(self, build: Build, _: Tensor) -> None:
        """Prune more where the step is due, and set everything that is pruned to zero again."""
        if self.share < (share := build.now[SHARE]):
            self._prune(build, share)
        self.steps += 1
        for name, weight in self.weights.items():
            local_of(weight.detach()).masked_fill_(local_of(self.masks[name]), 0)
        for optimizer in build.optimizers.values():
            for name, weight in self.weights.items():
                rest = optimizer.state.get(weight, {}).get(REST)
                if rest is not None:
                    local_of(rest).masked_fill_(local_of(self.masks[name]), 0)

    def _prune(self, build: Build, share: float) -> None:
        """Add the numbers that are needed least to the masks, of whole matrices."""
        for name, weight in self.weights.items():
            whole_RC = build.whole(name, local_of(weight.detach()))
            before_RC = build.whole(name, local_of(self.masks[name]))
            norms_C = None
            if self.spec.metric == "wanda":
                norms_C = build.world.sum_(self.squares[name], "shard").sqrt()
            scores_RC = scores_of(whole_RC, norms_C)
            pruned_RC = pruned_of(scores_RC, self.spec, share, before_RC)
            local_of(self.masks[name]).copy_(build.part(name, pruned_RC))
        self.share, self.squares = share, {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the masks by the names of their weights."""
        return self.masks

    def values(self) -> dict[str, Any]:
        """Return the share that is pruned."""
        return {"share": self.share}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Restore the JSON values that `values` returned."""
        self.share = values["share"]


class WeightPruning(Technique[Build]):
    """Set weights to zero while a model trains, and let the others recover what that costs."""

    pattern: Literal["2:4", "unstructured"] = "2:4"
    """Two of every four neighbours of a row, or any numbers of a matrix."""
    share: float = Field(default=HALF, gt=0, lt=1)
    """Share of the numbers of each linear that is pruned at last; 2:4 has 0.5."""
    metric: Literal["magnitude", "wanda"] = "magnitude"
    """What is pruned first: the smallest magnitudes, or these times the norm of what they read."""
    start: float = Field(default=0.0, ge=0, lt=1)
    """Share of the schedule's steps after which weights are pruned; 0 is after the first step."""
    end: float = Field(default=0.0, ge=0, le=1)
    """Share of the schedule's steps after which all of `share` is pruned; 0 is all at once."""
    every: int = Field(default=100, ge=1, le=MOST)
    """Steps from one rise of the share to the next, between `start` and `end`."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "precision"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    composes: ClassVar[tuple[str, ...]] = ("values", "enrich", "state", "after_update")
    excludes: ClassVar[Mapping[str, str]] = {
        "dora": ADAPTED,
        "lora": ADAPTED,
        "mixture_of_experts": "experts are no linears, and would stay whole",
        "qlora": ADAPTED,
        "schedule_free": AVERAGED,
        "weight_averaging": AVERAGED,
    }
    equality: ClassVar = "learning"
    follows_horizon: ClassVar[bool] = True
    settled: ClassVar[tuple[str, ...]] = ("pattern", "share", "metric", "start", "end", "every")
    card: ClassVar[Card] = Card(
        buys=(
            "a file with half of the weights, 17/32 of fp32's bytes in the linears (derived)",
            "2:4 matmuls on sparse units of NVIDIA GPUs, up to twice as fast (arXiv 2104.08378)",
        ),
        costs=(
            "a byte a number for masks, and a pass over the weights in each step (derived)",
            "with wanda, one forward pass more in steps that prune",
        ),
        helps="a short training of a finished model, best beside distillation from itself",
        hurts="small models without spare weights; runs that nothing sparse will execute",
        source="arXiv 1710.01878; arXiv 2306.11695; arXiv 2104.08378",
    )

    @property
    def spec(self) -> SparsitySpec:
        """Return what is pruned at the end."""
        return SparsitySpec(pattern=self.pattern, share=self.share, metric=self.metric)

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Keep no best checkpoint where it might be one of a step that has not pruned all."""
        return {"checkpoint.keep_best": False} if self.start or self.end else {}

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of a run that ends before all of the share is pruned."""
        lasts, (_, end) = plan.goal_steps, self._span(plan.horizon_steps)
        if lasts is None or end <= lasts:
            return None
        return Doubt(
            f"{self.name()} has pruned all of its share after {end:,} steps, and the run has "
            f"{lasts:,}: what is saved has fewer zeros",
            mend(self._key("start=0"), self._key("end=0")),
        )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require knobs that agree, rows of whole fours, and a schedule that ends."""
        plan = context.plan
        if refused := self._refuse_knobs():
            return refused
        if plan is None:
            return Supported()
        if (self.start or self.end) and plan.horizon_steps is None:
            key = "start" if self.start else "end"
            return Unsupported(
                f"{self._key(key)} = {getattr(self, key):g} is a share of schedule.steps or "
                "goal.steps, and the plan has neither",
                mend("schedule.steps=1000") | mend(self._key("start=0"), self._key("end=0")),
            )
        if self.metric == "wanda" and plan.mesh.tensor > 1:
            return Unsupported(
                f"what a linear reads is cut over mesh.tensor = {plan.mesh.tensor} ranks, and "
                "wanda needs the norm of each feature",
                mend(self._key("metric=magnitude")) | context.whole("tensor"),
                RefusalKind.COMBINATION,
            )
        if self.pattern == "2:4" and not plan.model.pretrained:
            for linear, (columns, _) in block_linears(plan.model).items():
                if columns % GROUP:
                    return Unsupported(_not_of_fours(linear, columns), self._any())
        return Supported()

    def _refuse_knobs(self) -> Unsupported | None:
        """Return which knobs contradict each other; None where they agree."""
        if self.pattern == "2:4" and self.share != HALF:
            return Unsupported(
                f"pattern = '2:4' prunes two of four, and share = {self.share:g} is not {HALF:g}",
                mend(self._key(f"share={HALF:g}")) | self._any(),
            )
        if self.pattern == "2:4" and self.end:
            return Unsupported(
                f"pattern = '2:4' prunes two of four at once, and end = {self.end:g} asks for a "
                "share that rises",
                mend(self._key("end=0")) | self._any(),
            )
        if 0 < self.end <= self.start:
            return Unsupported(
                f"end = {self.end:g} is not after start = {self.start:g}",
                mend(self._key(f"end={(1 + self.start) / 2:g}")),
            )
        return None

    def _span(self, horizon: int | None) -> tuple[int, int]:
        """Return the steps after which pruning begins, and after which it is whole."""
        begin = (end_step(self.start, horizon) if self.start else None) or 1
        return begin, (end_step(self.end, horizon) if self.end else None) or begin

    def _key(self, knob: str) -> str:
        return f"techniques.{self.name()}.{knob}"

    def _any(self) -> Remedy:
        return mend(self._key("pattern=unstructured"))

    def predict(self, ledger: Ledger) -> Ledger:
        """Add a mask of each linear of a block, and a pass over both in each step."""
        matrices = [m for n, m in ledger.updates().items() if n.startswith("blocks.")]
        numbers = sum(matrix.numbers for matrix in matrices) / ledger.sizes.get("slices", 1.0)
        ledger = ledger.with_line("pruning_masks", Line(numbers, ("always",)))
        masked = Stream("optimizer", 1.0, MASKED * numbers, len(matrices))
        return replace(ledger, work={**ledger.work, "pruning/optimizer": masked})

    def apply(self, build: Build) -> None:
        """Make masks that prune nothing yet, and hold what they prune after each update.

        Raises:
            ConfigError: 2:4 is asked for, and rows of the given weights have no whole fours.
        """
        state = PrunedWeights(build, self.spec)
        for name, linear in state.linears.items():
            if self.pattern == "2:4" and linear.in_features % GROUP:
                raise ConfigError(_not_of_fours(name, linear.in_features), self._any())
        begin, end = self._span(build.plan.horizon_steps)
        build.notes[self.name()] = build.state[self.name()] = state
        build.values[SHARE] = lambda step: share_after(
            int(step) + 1, begin, end, self.every, self.share
        )
        if self.metric == "wanda":
            build.enrich.append(state.read)
        build.after_update.append(state.hold)

    def active(self, build: Build) -> Evidence:
        """Count the zeros in the weights as they are now, and of what is pruned."""
        state: PrunedWeights = build.notes[self.name()]
        numbers = zeros = pruned = intact = 0
        for name, mask in state.masks.items():
            is_pruned = local_of(mask)
            is_zero = local_of(build.model.get_parameter(name).detach()) == 0
            numbers += is_zero.numel()
            zeros += int(is_zero.sum())
            pruned += int(is_pruned.sum())
            intact += int((is_zero & is_pruned).sum())
        if not numbers:
            return Evidence(None, "this rank holds no linear of a block")
        prunes = pruned > 0 if state.share else not pruned
        still = "" if state.share else ", as nothing is pruned yet"
        return Evidence(
            active=state.steps > 0 and intact == pruned and prunes,
            detail=f"{zeros} of {numbers} numbers of {len(state.masks)} linears are zero{still}; "
            f"{intact} of {pruned} that are pruned are among them",
            numbers={"numbers": numbers, "zeros": zeros, "pruned": pruned, "intact": intact},
        )


def _not_of_fours(linear: str, columns: int) -> str:
    return f"2:4 prunes two of every {GROUP} numbers of a row, and {linear} has {columns} columns"
