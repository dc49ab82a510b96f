"""Choose the model, tokens, batch and learning rate that a budget buys, as a plan.

A budget is money, GPU hours or FLOPs. Each shape of a ladder is given the tokens that the budget
leaves it: money and hours by the speed that is predicted of its plan, FLOPs by what a token takes.
Where the text is short, none is trained for so long that it learns it by heart, and the rest of the
budget stays. The scaling law then says which shape and length would have the lowest loss, and Step
Law gives their batch and learning rate (predict/scaling.py); a plan whose matrices have an
optimizer of their own keeps its rates, and its batch where that is larger. Shapes that do not fit
into the device's memory are left out. All else is as the plan says that the budget is given to.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headrace.assemble.build import make_ledger
from headrace.core.errors import ConfigError, HeadraceError, UnsupportedError
from headrace.core.limits import LARGEST_BATCH
from headrace.core.model_config import ModelConfig
from headrace.core.units import format_count
from headrace.costs.count import (
    further_tables,
    model_flops_per_token,
    parameters_in_blocks,
    total_parameters,
)
from headrace.costs.machine import Machine
from headrace.costs.passes import most_passes
from headrace.data.tokenizer import entries
from headrace.plan.plan import Plan
from headrace.plan.technique import Context
from headrace.plan.warmups import with_warmups
from headrace.predict.amounts import Budget
from headrace.predict.failures import Failures, failures_of
from headrace.predict.ladder import ladder
from headrace.predict.prediction import Prediction, at, predict
from headrace.predict.scaling import (
    CHINCHILLA,
    ExpectedLoss,
    expected_loss,
    is_fitted,
    is_swept,
    step_law_batch,
    step_law_rate,
)

MICRO_TOKENS = 32_768
"""Most tokens of a rank's micro-batch. Longer ones were hardly faster on H200s (limits.jsonl)."""
FEWEST_STEPS = 200
"""Fewest steps that the batch of a plan leaves that keeps its rates: about as many as the recipe
took to 1.54 bits per byte at 45M parameters (learning.jsonl)."""
LARGEST_BESIDE_TEXT = 16
"""Most parameters a token of a text that is learned by heart: models of up to 15 learned more than
smaller ones, and one of 31 no more than that (benchmarks/repeated_text.py)."""
WARMUP_SHARE, WARMUP_STEPS = 0.05, 2000
"""Warmup of the recipes here as a share of the steps, and Step Law's own, which is the longest."""
EVALUATIONS, CHECKPOINTS = 20, 10
"""How often a run is evaluated and saved on its way."""
UNTOLD_STEPS = 10**6
"""Length of a plan of which only a step is predicted: longer than what a technique warms up."""
ROUNDS = 4
"""How often speed, tokens and batch are computed from each other; two suffice for most shapes."""


@dataclass(frozen=True)
class Bought:
    """Hold the plan that a budget buys, and what is expected of it.

    Args:
        budget: what may be spent.
        plan: the plan.
        parameters: those of its model that the scaling law counts: all but `tables`.
        tables: numbers of tables beside the embedding, of which a token reads a row each.
        in_blocks: those without the embedding and the output matrix, which Step Law counts.
        flops: FLOPs of its model over the whole run.
        tokens: tokens that it is trained on.
        fresh_tokens: how many of them are different; None where that was not said.
        loss: the loss that the scaling law expects.
        prediction: memory, time and money of the plan.
        spent: share of the budget that the plan takes, up to its last whole step.
        text_ends: whether the rest stays since the model would learn the text by heart with it.
        too_large: parameters of the shape that the law would take if it fitted into the memory;
            None where it does.
    """

    budget: Budget
    plan: Plan
    parameters: int
    tables: int
    in_blocks: int
    flops: float
    tokens: int
    fresh_tokens: float | None
    loss: ExpectedLoss
    prediction: Prediction
    spent: float
    text_ends: bool = False
    too_large: int | None = None

    @property
    def keeps_rates(self) -> bool:
        """Return whether the plan's own learning rates stand, for its optimizer is not AdamW."""
        return _keeps_rates(self.plan)

    @property
    def tokens_per_parameter(self) -> float:
        """Return the tokens of the run for each parameter."""
        return self.tokens / self.parameters

    @property
    def steps(self) -> int:
        """Return the optimizer steps of the run."""
        assert self.plan.goal.steps is not None
        return self.plan.goal.steps

    def to_dict(self) -> dict[str, Any]:
        """Return every number, the prediction and the plan as JSON values, in one table."""
        own = {
            "budget": str(self.budget),
            "parameters": self.parameters,
            "parameters_in_tables": self.tables,
            "parameters_in_blocks": self.in_blocks,
            "tokens": self.tokens,
            "tokens_per_parameter": self.tokens_per_parameter,
            "fresh_tokens": self.fresh_tokens,
            "flops": self.flops,
            "steps": self.steps,
            "batch_tokens": self.plan.batch.tokens,
            "lr": self.plan.optimizer.lr,
            "keeps_rates": self.keeps_rates,
            "spent": self.spent,
            "text_ends": self.text_ends,
            "expected_loss": asdict(self.loss),
            "extrapolates_loss": not is_fitted(self.parameters, self.tokens),
            "extrapolates_step_law": not is_swept(self.in_blocks, self.tokens),
            "too_large": self.too_large,
        }
        return {**own, "prediction": self.prediction.to_dict(), "plan": self.plan.dump()}


def buy(
    budget: Budget,
    base: Plan,
    context: Context,
    machine: Machine,
    *,
    fresh_tokens: float | None = None,
    open_vocab: bool = False,
) -> Bought:
    """Return the plan of lowest expected loss that a budget buys.

    Args:
        budget: what may be spent.
        base: the plan whose data, techniques, mesh and prices are kept.
        context: where it would run.
        machine: the rates of the device there.
        fresh_tokens: different tokens that there are; None takes as many as the run reads.
        open_vocab: choose the vocabulary too.

    Raises:
        ConfigError: the budget buys no step, or money has no price.
        UnsupportedError: no shape of the ladder can run there, or no time is predicted.
    """
    offers = _Offers(budget, budget.seconds(base), base, context, machine, fresh_tokens, open_vocab)
    high = offers.largest()
    low = offers.smallest(high)
    while low < high:  # the loss falls along the ladder, and then rises
        middle = (low + high) // 2
        rises = offers.nats(middle + 1) >= offers.nats(middle)
        low, high = (low, middle) if rises else (middle + 1, high)
    if offers.nats(low) == math.inf:
        raise offers.nothing()
    best = offers.at(low)
    assert isinstance(best, Bought)
    prediction = predict(best.plan, at(context, best.plan), machine)
    return replace(best, prediction=prediction, too_large=offers.too_large(best))


@dataclass
class _Offers:
    """Hold what a budget buys of each shape of the ladder, found when it is asked for."""

    budget: Budget
    seconds: float
    base: Plan
    context: Context
    machine: Machine
    fresh_tokens: float | None
    open_vocab: bool
    known: dict[int, "Bought | HeadraceError | None"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """List the shapes that the plan can have; all of them where it can have none."""
        self.shapes = [*ladder(self.base, self.open_vocab)]
        self.shapes = [*filter(self._is_possible, self.shapes)] or self.shapes

    def _is_possible(self, shape: tuple[dict[str, Any], int]) -> bool:
        """Return whether the plan can have a shape, as far as the plan alone says."""
        try:
            self.shaped(*shape)
        except (ConfigError, UnsupportedError):
            return False
        return True

    def shaped(self, model: dict[str, Any], vocab: int) -> Plan:
        """Return the plan with a shape of the ladder."""
        data = {**self.base.data.model_dump(exclude_unset=True), "vocab": vocab}
        return self.base.replaced(model=model, data=data).with_keys({})

    def search(self, index: int) -> "_BudgetSearch":
        """Return the search over a shape's tokens and batch."""
        shape, places = self.shaped(*self.shapes[index]), (self.context, self.machine)
        return _BudgetSearch(self.budget, self.seconds, shape, *places, self.fresh_tokens)

    def at(self, index: int) -> "Bought | HeadraceError | None":
        """Return what is bought of a shape, why it cannot run, or None where that is no step."""
        if index not in self.known:
            try:
                self.known[index] = self.search(index).offer()
            except (ConfigError, UnsupportedError) as error:
                self.known[index] = error
        return self.known[index]

    def nats(self, index: int) -> float:
        """Return a shape's expected loss; endless where it does not fit or nothing is bought."""
        offer = self.at(index)
        fits = isinstance(offer, Bought) and offer.prediction.memory.fits != "no"
        return offer.loss.nats if isinstance(offer, Bought) and fits else math.inf

    def largest(self) -> int:
        """Return the largest shape that the text can teach: the first one, if none is so small."""
        if self.fresh_tokens is None or not self.base.learns_from_nothing:
            return len(self.shapes) - 1
        most = LARGEST_BESIDE_TEXT * self.fresh_tokens
        small = [n for n in range(len(self.shapes)) if self.search(n).numbers <= most]
        return max(small, default=0)

    def smallest(self, largest: int) -> int:
        """Return the smallest shape that may be best, of those up to `largest`.

        Smaller ones would learn the text by heart before the budget is spent, as it does, and of
        two such models the larger one has the lower loss.
        """
        index = 0
        for place in range(largest + 1) if self.fresh_tokens is not None else ():
            offer = self.at(place)
            if not isinstance(offer, Bought) or self.nats(place) == math.inf:
                continue
            if not offer.text_ends:
                break
            index = place
        return index

    def too_large(self, best: Bought) -> int | None:
        """Return the parameters of a shape of lower loss that does not fit; None without one."""
        each = [offer for offer in self.known.values() if isinstance(offer, Bought)]
        better = [o.parameters for o in each if o.loss.nats < best.loss.nats]
        return min((n for n in better if n > best.parameters), default=None)

    def nothing(self) -> HeadraceError:
        """Return the error of a budget that buys no plan, with the nearest that buys one."""
        first = self.at(0)
        if isinstance(first, HeadraceError):
            return first
        search, length = self.search(0), self.base.data.sequence_length
        size = format_count(total_parameters(search.model))
        if first is not None:
            return UnsupportedError(
                f"not even the smallest model, of {size} parameters, fits into the memory of "
                f"{self.machine.name} with sequences of {length} tokens",
                f"data.sequence_length={max(2, length // 16)}",
            )
        plan, prediction = search.planned(search.least)
        needs = plan.batch.tokens * model_flops_per_token(search.model, length)
        if self.budget.unit != "flops":
            needs = (prediction.time.step_s or 0.0) / search.budget.seconds(plan)
            needs *= self.budget.amount
        nearest = Budget(float(f"{1.05 * needs:.2g}"), self.budget.unit)
        return ConfigError(
            f"{self.budget} buy no step: one of {plan.batch.tokens} tokens of the smallest model, "
            f"of {size} parameters, takes {needs:.3g} {self.budget.unit}",
            f"--budget {nearest}",
        )


def _keeps_rates(plan: Plan) -> bool:
    """Return whether matrices have an optimizer of their own, as Muon.

    The rate of what AdamW still updates, embeddings and vectors, was chosen beside it. Step Law is
    of AdamW alone.
    """
    return any("routes" in t.composes for t in plan.techniques.values())


@dataclass(frozen=True)
class _BudgetSearch:
    """Find the tokens, batch and micro-batch of one shape."""

    budget: Budget
    seconds: float
    shape: Plan
    context: Context
    machine: Machine
    fresh_tokens: float | None
    tried: dict[int, tuple[Plan, Prediction]] = field(default_factory=dict)
    """Sequences of a batch and rank -> the plan with it, and its prediction for one step."""

    @property
    def least(self) -> int:
        """Return the tokens of the smallest batch: one sequence a rank that reads data."""
        return self.shape.data.sequence_length * self.shape.mesh.data

    @property
    def model(self) -> ModelConfig:
        """Return the model with its vocabulary and positions filled in."""
        model, length = self.shape.model, self.shape.data.sequence_length
        words = -(-entries(self.shape.data) // model.vocab_multiple) * model.vocab_multiple
        known = {"vocab": model.vocab or words, "context": model.context or length}
        return model.model_copy(update=known)

    @property
    def numbers(self) -> int:
        """Return the parameters of the model, further tables among them."""
        return total_parameters(self.model)

    def offer(self) -> Bought | None:
        """Return what the budget buys of this shape; None where that is no step."""
        model, length = self.model, self.shape.data.sequence_length
        a_token, tables = model_flops_per_token(model, length), further_tables(model)
        parameters = self.numbers - tables
        in_blocks = parameters_in_blocks(model)
        plan, prediction, tokens = None, None, 0.0
        if self.budget.unit == "flops":
            tokens = self.budget.amount / a_token
        else:
            plan, prediction = self.planned(CHINCHILLA * parameters)
            tokens = self.bought(plan, prediction)
        most = self.most_tokens()
        for _ in range(ROUNDS):
            if tokens < self.least:
                return None
            before = None if plan is None else plan.batch.tokens
            plan, prediction = self.planned(min(tokens, most))
            if self.budget.unit == "flops":
                break
            tokens = self.bought(plan, prediction)
            if plan.batch.tokens == before:
                break
        enough = tokens
        tokens = min(tokens, most)
        assert plan is not None and prediction is not None
        batch = plan.batch.tokens
        if tokens < batch:
            return None
        apart = lost.best_every_steps if (lost := self.failing(plan, prediction)) else None
        plan = self.finished(plan, self.most_steps(plan, tokens), in_blocks, apart)
        whole = plan.batches.before(plan.goal.steps or 0)
        return Bought(
            budget=self.budget,
            plan=plan,
            parameters=parameters,
            tables=tables,
            in_blocks=in_blocks,
            flops=whole * a_token,
            tokens=whole,
            fresh_tokens=self.fresh_tokens,
            loss=expected_loss(parameters, whole, self.fresh_tokens),
            prediction=prediction,
            spent=whole / enough,
            text_ends=enough > most,
        )

    def most_steps(self, plan: Plan, tokens: float) -> int:
        """Return the most steps of the plan that read at most so many tokens.

        Where the batch grows, its stages may end at shares of the steps.
        """
        low = int(tokens // plan.batch.tokens)
        high = int(tokens // plan.batches.at(0))
        while low < high:  # more steps read more
            middle = (low + high + 1) // 2
            fits = self.ending(plan, middle).batches.before(middle) <= tokens
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def most_tokens(self) -> float:
        """Return the tokens from which on the model learns the text by heart.

        Weights that are given, or of which adapters alone learn, are none of which that was
        measured.

        Raises:
            ConfigError: the text is not as long as a step.
        """
        fresh = self.fresh_tokens
        if fresh is None:
            return math.inf
        if fresh < self.least:
            each = fresh / self.shape.mesh.data
            length = 2 ** int(math.log2(each)) if each >= 2 else 0
            raise ConfigError(
                f"a text of {format_count(fresh)} tokens is shorter than a step's {self.least}: "
                f"{self.shape.mesh.data} x data.sequence_length = "
                f"{self.shape.data.sequence_length}",
                f"data.sequence_length={length}" if length else f"--data {self.least}",
            )
        known = self.shape.learns_from_nothing
        return fresh * most_passes(self.numbers, fresh) if known else math.inf

    def bought(self, plan: Plan, prediction: Prediction) -> float:
        """Return the tokens that the seconds suffice for.

        Raises:
            UnsupportedError: no time is predicted.
        """
        rate = prediction.time.tokens_per_s
        if rate is None:
            raise UnsupportedError(
                f"what {self.budget} buy is told by the time of a step, and that is not predicted: "
                f"{prediction.time.unknown}",
                "--budget 1e18flops",
            )
        lost = self.failing(plan, prediction)
        return self.seconds * rate * (1.0 if lost is None else lost.best_goodput)

    def failing(self, plan: Plan, prediction: Prediction) -> Failures | None:
        """Return what failures take of the seconds; None where none is expected in them."""
        step_s, on_gpu = prediction.time.step_s, self.context.device == "cuda"
        if step_s is None or math.isinf(self.seconds):
            return None
        return failures_of(plan, step_s, self.seconds, on_gpu=on_gpu)

    def planned(self, tokens: float) -> tuple[Plan, Prediction]:
        """Return the plan with the batch of so many tokens, and its micro-batch that fits."""
        batch = step_law_batch(tokens)
        if _keeps_rates(self.shape):
            batch = max(batch, min(self.shape.batch.tokens, tokens / FEWEST_STEPS))
        wanted = min(batch, tokens) / self.least
        rows = 2 ** max(0, round(math.log2(max(1.0, wanted))))
        if rows * self.least > tokens:
            rows = max(1, rows // 2)
        rows = min(rows, 2 ** int(math.log2(max(1, LARGEST_BATCH // self.least))))
        if rows not in self.tried:
            self.tried[rows] = self.fitting(rows)
        return self.tried[rows]

    def fitting(self, rows: int) -> tuple[Plan, Prediction]:
        """Return the plan with so many sequences a rank, in the largest micro-batch that fits."""
        left = self.machine.memory_bytes - self.machine.context_bytes
        micro = rows
        while micro > 1 and micro * self.shape.data.sequence_length > MICRO_TOKENS:
            micro //= 2
        while True:
            batch = {"tokens": rows * self.least, "micro_sequences": micro}
            ends = {"goal": {"steps": UNTOLD_STEPS}, "schedule": self.schedule(UNTOLD_STEPS)}
            ends["checkpoint"] = self.checkpoint(UNTOLD_STEPS)
            plan = self.shape.replaced(batch=batch, **ends).with_keys({})
            context = at(self.context, plan)
            if micro > 1 and make_ledger(plan, context).peak()[1] > left:  # sooner than a replay
                micro //= 2
                continue
            prediction = predict(plan, context, self.machine)
            if micro == 1 or prediction.memory.fits == "yes":
                return plan, prediction
            micro //= 2

    def schedule(self, steps: int) -> dict[str, Any]:
        """Return the plan's own curve, with its end and warmup at `steps`."""
        own = self.shape.schedule.model_dump(exclude_unset=True)
        warmup = min(WARMUP_STEPS, round(WARMUP_SHARE * steps))
        return {**own, "steps": steps, "warmup_steps": warmup}

    def checkpoint(self, steps: int, apart: int | None = None) -> dict[str, Any]:
        """Return the plan's own saving, at steps of so many that all its techniques can save at."""
        own, often = self.shape.checkpoint, -(-steps // CHECKPOINTS)
        often = min(often, apart or often)
        unit = math.lcm(*(t.saves_by(often) for t in self.shape.techniques.values()))
        table = own.model_dump(exclude_unset=True)
        return {**table, "every_steps": -(-often // unit) * unit} if own.every_steps else table

    def ending(self, plan: Plan, steps: int, **tables: Any) -> Plan:
        """Return the plan of so many steps, whose warmups they outlast, with other tables."""
        ends = {"goal": {"steps": steps}, "schedule": self.schedule(steps), **tables}
        return plan.replaced(**ends, techniques=with_warmups(plan, steps)).with_keys({})

    def finished(self, plan: Plan, steps: int, in_blocks: int, apart: int | None) -> Plan:
        """Return the plan with its length, rate, evaluations, and saves at most `apart` apart."""
        rate = step_law_rate(in_blocks, self.ending(plan, steps).batches.before(steps))
        if _keeps_rates(plan):
            rate = plan.optimizer.lr
        evaluation = plan.eval.model_dump(exclude_unset=True)
        optimizer = {**plan.optimizer.model_dump(exclude_unset=True), "lr": float(f"{rate:.3g}")}
        return self.ending(
            plan,
            steps,
            name=f"budget-{self.budget}",
            optimizer=optimizer,
            eval={**evaluation, "every_steps": -(-steps // EVALUATIONS)},
            checkpoint=self.checkpoint(steps, apart),
        )
