"""Collect the plans that may be tried: those of a sweep, single changes, and changes of learning.

Changes of learning come in the order of what they promise for the time to the target: tokens by
what a technique states (`token_share`) and by the batch, times what a token takes. Their order is
the order of this module; that of all other plans is made by pool.py.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import log2, prod
from typing import Any, Protocol

from pydantic import ValidationError

from headrace.assemble.context import check_supported
from headrace.core.errors import HeadraceError
from headrace.core.limits import TuneAim
from headrace.costs.machine import Machine
from headrace.doctor.plan_keys import KEYS
from headrace.plan.changes import difference
from headrace.plan.plan import Plan
from headrace.plan.symptoms import parse
from headrace.plan.technique import (
    Catalogue,
    Context,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.predict.candidates import Asking, Candidate, Words, singles
from headrace.predict.prediction import Prediction, at
from headrace.predict.sweep import sweep
from headrace.tuner.effects import (
    changes_architecture,
    effect_of,
    rounding_words,
    state_words,
)
from headrace.tuner.mup_check import narrowed

TOP = 12
"""Whole plans of the sweep that may be measured; the rest differ from them in trifles."""
HALF_BATCH = 0.8
"""Share of the tokens to a loss that half of the batch should need: between 1, far below the
critical batch, and 0.5, far above it (arXiv 1812.06162). Assumed, for the order alone."""
HIGHER_RATE = 0.9
"""Share of the tokens that twice AdamW's rate should leave where another rule takes the matrices:
embeddings and head bear a higher one. Assumed, for the order alone; the demo with Muon and half of
the batch came to 2.3 bits per byte in 0.78 of the tokens (one seed, two CPU cores)."""
LEARNS = ("recipe", "instability", "wasted tokens", "computation")
"""Symptoms of changes of learning, those first that come to a loss in fewer tokens."""


class Proposal(Protocol):
    """Hold a candidate: headrace.predict.candidates.Candidate is one."""

    @property
    def plan(self) -> Plan:
        """Return the plan with its changes."""
        ...

    @property
    def prediction(self) -> Prediction:
        """Return what is predicted of it."""
        ...


@dataclass(frozen=True)
class Sources:
    """Hold where candidates come from.

    Args:
        whole: of the first plan: itself, and others, the best first.
        single: of the best so far: its single changes.
        learning: likewise, those that change what is learned.
        guess_s: seconds of a plan's step where no time is predicted, for the order.
        failed: changes whose prediction failed -> why; filled as plans are asked for.
        lacking: of a plan: changes that nothing but a missing compiler forbids -> what to do.
        parts: of the best so far and another plan: the best with those of the other's changes that
            compute the same, and the best without those whose rounding stays from step to step; the
            first is the quickest to judge.
        narrowed: a plan's model so many times as narrow, under muP; None where that cannot be.
    """

    whole: Callable[[Plan], tuple[Proposal, Sequence[Proposal]]]
    single: Callable[[Plan], Sequence[Proposal]]
    learning: Callable[[Plan], Sequence[Proposal]]
    guess_s: Callable[[Plan], float | None] = lambda plan: None
    failed: dict[Words, str] = field(default_factory=dict)
    lacking: Callable[[Plan], dict[Words, str]] = lambda plan: {}
    parts: Callable[[Plan, Plan], Sequence[Proposal]] = lambda best, plan: ()
    narrowed: Callable[[Plan, int], Plan | None] = lambda plan, divide: None


def sources(
    aim: TuneAim,
    context: Context,
    machine: Machine,
    catalogue: Catalogue,
    architecture: bool = False,
) -> Sources:
    """Return the sweep's plans, and every single change that the planner knows.

    Args:
        aim: what is to become less.
        context: where the plan runs.
        machine: the rates of that device.
        catalogue: techniques that may be tried.
        architecture: changes of learning may change the model itself.
    """
    failed: dict[Words, str] = {}

    def whole(plan: Plan) -> tuple[Proposal, Sequence[Proposal]]:
        swept = sweep(plan, context, machine, catalogue, "time" if aim == "quality" else aim)
        best = [c for c in swept.ranked if c.changes][:TOP]
        return swept.start, [*best, *swept.unknown, *swept.idle]

    def single(plan: Plan) -> Sequence[Proposal]:
        return singles(Asking(plan, context, machine, catalogue), failed.__setitem__)

    def learning(plan: Plan) -> Sequence[Candidate]:
        asking = Asking(plan, context, machine, catalogue, learning=True)
        every = [
            c
            for c in singles(asking, failed.__setitem__)
            if architecture or not changes_architecture(plan, c.plan)
        ]
        rates, fewer = KEYS["recipe"](plan), [c.changes for c in every if _tokens(plan, c.plan) < 1]
        rated = [(*words, *rate) for words in fewer for rate in rates]
        for words in (*rates, *rated, *with_batches(plan, [*fewer, *rated])):
            with suppress(HeadraceError):
                every.append(asking.answer(plan, words))
        candidates = [c for c in every if effect_of(plan, c.plan) == "learning"]
        start = asking.answer(plan)
        return sorted(candidates, key=lambda c: learning_order(start, c, guess_s))

    def guess_s(plan: Plan) -> float | None:
        return Asking(plan, context, machine, catalogue).guess_s(plan)

    def lacking(plan: Plan) -> dict[Words, str]:
        return without_compiler(plan, context, catalogue)

    def parts(best: Plan, plan: Plan) -> Sequence[Proposal]:
        simpler = list[Proposal]()
        words = difference(best, plan)
        left_out = (rounding_words(best, plan), "exact"), (state_words(best, plan), "approximate")
        for rounds, effect in left_out:
            kept = tuple(word for word in words if word not in rounds)
            with suppress(HeadraceError):
                if rounds and kept:
                    part = Asking(best, context, machine, catalogue).answer(best, kept)
                    simpler += [part] if effect_of(best, part.plan) == effect else []
        return simpler

    narrower = partial(_narrower, context, catalogue)
    return Sources(whole, single, learning, guess_s, failed, lacking, parts, narrower)


def _narrower(context: Context, catalogue: Catalogue, plan: Plan, divide: int) -> Plan | None:
    """Return the plan's model so many times as narrow, under muP; None where that cannot run."""
    with suppress(HeadraceError):
        narrow = narrowed(plan, divide, catalogue)
        if narrow is not None:
            narrow.with_keys(narrow.model_dump(exclude_unset=True, exclude={"techniques"}))
            check_supported(list(narrow.techniques.values()), at(context, narrow))
        return narrow
    return None


def without_compiler(plan: Plan, context: Context, catalogue: Catalogue) -> dict[Words, str]:
    """Return techniques that would run here if a compiler were installed, by why they cannot."""
    here = at(context, plan)
    there = replace(here, has_compiler=True, has_triton=True)
    missing: defaultdict[str, list[str]] = defaultdict(list)
    for name, kind in catalogue.techniques.items():
        if name in plan.techniques or kind.stage is not Stage.COMPILE:
            continue
        with suppress(ValidationError):  # knobs that have no default
            answer, able = kind().supports(here), kind().supports(there)
            if isinstance(answer, Unsupported) and isinstance(able, Supported):
                missing[f"{answer.reason}: {answer.remedy}"].append(f"+{name}")
    return {tuple(names): why for why, names in missing.items()}


def with_batches(plan: Plan, changes: Sequence[Words]) -> list[Words]:
    """Return half and twice the batch, alone and beside each change that needs fewer tokens.

    Half a batch keeps the schedule's steps at first, in half the tokens: a run that needs as many
    tokens as before has them in the second variant. Twice the batch keeps the tokens.
    """
    changes_with = []
    for factor in (0.5, 2.0):
        tokens, schedule = int(plan.batch.tokens * factor), plan.schedule
        words = [f"batch.tokens={tokens}"]
        if plan.batch.micro_sequences > tokens // plan.data.sequence_length:
            words.append("batch.micro_sequences=0")
        steps = {
            "schedule.steps": schedule.steps,
            "schedule.warmup_steps": schedule.warmup_steps,
            "goal.steps": plan.goal.steps,
        }
        as_long = [f"{key}={max(1, round(n / factor))}" for key, n in steps.items() if n]
        variants = [words, [*words, *as_long]] if factor < 1 and as_long else [[*words, *as_long]]
        changes_with += [(*change, *more) for more in variants for change in (*changes, ())]
    return changes_with


def learning_order(
    before: Proposal, after: Candidate, guess_s: Callable[[Plan], float | None]
) -> tuple[float, int, int, Words]:
    """Return the place of a change of learning: what promises the target soonest comes first.

    What promises nothing follows: keys of the recipe, what is said to help learning, few words.
    """
    promise, words = sooner(before, after, guess_s), after.changes
    bottlenecks = {
        parse(word)[0] for t in added_techniques(before.plan, after.plan) for word in t.symptoms
    }
    rank = min((i for i, name in enumerate(LEARNS) if name in bottlenecks), default=len(LEARNS))
    if not any(word[0] in "+-" for word in words):
        rank = -1
    return (-promise if promise != 1 else -1.0, rank, len(words), words)


def sooner(before: Proposal, after: Proposal, guess_s: Callable[[Plan], float | None]) -> float:
    """Return how many times as soon the target should come: 1 where nothing is known of its tokens.

    That is the tokens that it should need, by what techniques state and by the batch, times what a
    token takes, by predicted steps or else by the ledger alone. Half a batch with all of the
    schedule's tokens promises nothing: it is for a target that its sibling with half missed.
    """
    tokens, one, two = _tokens(before.plan, after.plan), before.plan, after.plan
    long = (two.horizon_steps or 0) > (one.horizon_steps or 0)
    if tokens == 1 or (two.batch.tokens < one.batch.tokens and long):
        return 1.0
    one_s, two_s = before.prediction.time.step_s, after.prediction.time.step_s
    if not (one_s and two_s):
        one_s, two_s = guess_s(before.plan), guess_s(after.plan)
    faster = one_s / two_s if one_s and two_s else 1.0
    return faster * (after.plan.batch.tokens / before.plan.batch.tokens) / tokens


def _tokens(before: Plan, after: Plan) -> float:
    """Return the share of the tokens to a loss that the second plan should need."""
    halved = log2(before.batch.tokens / after.batch.tokens)
    share = prod(t.token_share for t in added_techniques(before, after))
    if share < 1 and after.optimizer.lr > before.optimizer.lr:
        share *= HIGHER_RATE
    return share * HALF_BATCH**halved


def added_techniques(before: Plan, after: Plan) -> list[Technique[Any]]:
    """Return the techniques of the second plan that the first has not."""
    return [t for name, t in after.techniques.items() if name not in before.techniques]
