"""List what in a plan can run and may not be what its user means.

A plan that contradicts itself is refused where it is read. This module checks what comes after:
keys that have no effect within the goal, rates that no run learns with, and techniques that mean
nothing beside the rest of the plan, as adapters of random weights. A doubt is shown in one line,
and kept in the report. What cannot mean anything is refused when a run begins.
"""

import math
from collections.abc import Callable, Iterable, Iterator

from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.plan.plan import OptimizerConfig, Plan
from headrace.plan.schedule import ENDLESS
from headrace.plan.technique import Doubt

WIDE_RATE = 0.4
"""optimizer.lr x model.dim above which a first step at the full rate hurts. It was measured on
models of 64 features after 100 steps, with two seeds and batches of 512 and 4,096 tokens. At 0.26 a
warmup of a tenth moved the validation loss by -0.06 to 0.01 nats, at 0.64 by -0.17 to -0.74, at 1.9
by -0.60 to 0.05. The best rate falls as a model widens (arXiv 2203.03466), so rate x width is
compared."""
WARMUP_SHARE = 0.1
"""Share of a run's steps that an advised warmup takes."""
FAR = 30
"""Ratio to the default rate above which a rate is taken for a mistake. Chosen, not measured."""
FADES = 0.05
"""optimizer.lr x optimizer.weight_decay above which weights fade sooner than they learn. It is the
share of a weight that a step takes away: at this value half is gone after 14 steps. Chosen, not
measured."""
LONG_MEMORY = 0.99
"""Decay of the first moment from which on the moment follows a gradient of 100 steps ago. Chosen;
every recipe known to us has 0.8 to 0.95."""
LITTLE = 1e-3
"""Share of the size of initial weights by which a run must be able to move them. Adam moves a
weight by about the rate at most in a step (arXiv 1412.6980, section 2.1), so a smaller rate x steps
changes nothing that can be seen. Chosen, not measured."""
HEAVY_EPS = 1e-4
"""optimizer.eps above which it outweighs the roots of most second moments, so that an update is the
gradient again. Recipes known to us have 1e-5 at most."""
WILD_LOGITS = 3.0
"""Standard deviation of the first logits above which a run begins far above a uniform guess. It is
model.init_std x the root of model.dim. At 3 the run begins 4.5 nats above (half the variance, as
the mean of e^x of a normal)."""
INTERRUPT = ("eval", "checkpoint")
"""Names of the tables whose `every_steps` end a trace."""
TRIAL = 8
"""Most steps of a run that is a trial of something else. No doubt about intervals is raised for
it."""
BYTE_BITS = 8.0
"""Bits per byte of a guess that knows nothing of text, not even which bytes are frequent."""


def doubts_of(plan: Plan) -> list[Doubt]:
    """Return the doubts about a plan, those that make it meaningless first."""
    asked = (technique.doubt(plan) for technique in plan.techniques.values())
    all_doubts = [doubt for doubt in asked if doubt is not None]
    all_doubts += [doubt for rule in RULES for doubt in rule(plan)]
    return sorted(all_doubts, key=lambda doubt: not doubt.meaningless)


def check_meant(doubts: Iterable[Doubt]) -> None:
    """Refuse a plan that means nothing.

    Raises:
        ConfigError: the first doubt that makes the plan meaningless.
    """
    for doubt in doubts:
        if doubt.meaningless:
            raise ConfigError(doubt.reason, doubt.remedy)


def usual_warmup(plan: Plan) -> int:
    """Return the number of steps of a warmup that fits into the run."""
    lasts = min((n for n in (plan.goal_steps, plan.horizon_steps) if n), default=1000)
    return max(1, round(WARMUP_SHARE * lasts))


def forgets(lr: float, weight_decay: float) -> bool:
    """Return whether the decay takes more of the weights away than they learn."""
    return lr * weight_decay > FADES and weight_decay > OptimizerConfig().weight_decay


def misfits(betas: tuple[float, float]) -> bool:
    """Return whether Adam's moments do not fit each other, or follow gradients of long ago.

    Adam requires the first decay to be below the root of the second (arXiv 1412.6980, section 4).
    """
    return betas[0] >= LONG_MEMORY or betas[1] < betas[0] ** 2


def _rate(plan: Plan) -> Iterator[Doubt]:
    """Yield doubts about a learning rate that is too high or too low, and about the warmup."""
    rate, usual, warm = plan.optimizer.lr, OptimizerConfig().lr, plan.schedule.warmup_steps
    lasts, most = plan.goal_steps, WIDE_RATE / plan.model.dim
    own = any("routes" in t.composes and t.equality == "learning" for t in plan.techniques.values())
    if rate > FAR * usual and not own:
        yield Doubt(
            f"optimizer.lr = {rate:g} is {rate / usual:,.6g} times the default, and "
            "hardly any model learns with it",
            mend(f"optimizer.lr={usual:g}"),
        )
    elif not warm and rate > most and not (own or plan.model.pretrained or plan.vision):
        yield Doubt(
            f"the first step has the full rate: schedule.warmup_steps = 0, and optimizer.lr = "
            f"{rate:g} is high for {plan.model.dim} features (over {most:.2g} a rise from zero "
            "ends at a lower loss)",
            mend(f"schedule.warmup_steps={usual_warmup(plan)}"),
        )
    reach = rate * min((n for n in (lasts, plan.horizon_steps) if n), default=1000)
    if not own and reach < LITTLE * ModelConfig().init_std:
        yield Doubt(
            f"the run's steps move a weight by {reach:.2g} at most (optimizer.lr = {rate:g}), and "
            f"weights begin with {ModelConfig().init_std:g}: it learns nothing",
            mend(f"optimizer.lr={usual:g}"),
        )
    if lasts and 2 * warm > lasts:
        top = min(1.0, lasts / (warm + 1))
        yield Doubt(
            f"schedule.warmup_steps = {warm} takes {min(1.0, warm / lasts):.0%} of the run's "
            f"{lasts} steps, and the rate comes to {top:.0%} of optimizer.lr at most",
            mend(f"schedule.warmup_steps={usual_warmup(plan)}"),
        )


def _end_of_schedule(plan: Plan) -> Iterator[Doubt]:
    """Yield a doubt about steps after the schedule's end that have a rate of 0."""
    schedule, lasts = plan.schedule, plan.goal_steps
    ends = schedule.steps
    if schedule.kind in ENDLESS or not ends or not lasts or ends >= lasts:
        return
    if schedule.final_fraction == 0:
        yield Doubt(
            f"the {lasts - ends} steps after schedule.steps = {ends} have a rate of 0, as "
            "schedule.final_fraction = 0 says: they learn nothing",
            mend(f"schedule.steps={lasts}"),
        )


def _updates(plan: Plan) -> Iterator[Doubt]:
    """Yield doubts about weight decay, eps, clipping and moments of the optimizer."""
    given, usual = plan.optimizer, OptimizerConfig()
    if forgets(given.lr, given.weight_decay):
        fades = given.lr * given.weight_decay
        yield Doubt(
            f"each step takes away {min(1.0, fades):.0%} of every weight (optimizer.lr x "
            f"optimizer.weight_decay = {fades:.2g}): they fade sooner than they learn",
            mend(f"optimizer.weight_decay={usual.weight_decay:g}"),
        )
    if given.eps > HEAVY_EPS:
        yield Doubt(
            f"optimizer.eps = {given.eps:g} outweighs the size of gradients, which AdamW divides "
            "by: its steps are far shorter than the rate",
            mend(f"optimizer.eps={usual.eps:g}"),
        )
    if 0 < given.clip_norm < HEAVY_EPS:
        yield Doubt(
            f"optimizer.clip_norm = {given.clip_norm:g} makes gradients so small that "
            f"optimizer.eps = {given.eps:g} outweighs them: nothing is learned",
            mend(f"optimizer.clip_norm={usual.clip_norm:g}"),
        )
    first, second = given.betas
    if misfits(given.betas):
        yield Doubt(
            f"optimizer.betas = [{first:g}, {second:g}] follow gradients of "
            f"{1 / (1 - first):,.0f} steps, divided by the size of those of "
            f"{1 / (1 - second):,.0f}",
            mend(f"optimizer.betas={[*usual.betas]}".replace(" ", "")),
        )


def _goal(plan: Plan) -> Iterator[Doubt]:
    """Yield doubts about a goal that is reached at once, and about intervals beyond the goal."""
    target, lasts = plan.goal.bits_per_byte, plan.goal_steps
    if target is not None and target > BYTE_BITS:
        yield Doubt(
            f"goal.bits_per_byte = {target:g} is reached before anything is learned: a uniform "
            f"guess of bytes has {BYTE_BITS:g}",
            mend("goal.bits_per_byte=2"),
        )
    for table, seen in (("eval", "validated"), ("checkpoint", "saved")):
        every = getattr(plan, table).every_steps
        asked = "every_steps" in getattr(plan, table).model_fields_set
        if lasts and TRIAL < lasts < every and (asked or (target and table == "eval")):
            yield Doubt(
                f"{table}.every_steps = {every} is more than the run's {lasts} steps: it is {seen} "
                "once, at its end",
                mend(f"{table}.every_steps={max(1, lasts // 4)}"),
            )


def _first_logits(plan: Plan) -> Iterator[Doubt]:
    """Yield doubts about initial weights that are far too large, and about a cap on logits."""
    model, usual = plan.model, ModelConfig()
    wild = model.init_std * math.sqrt(model.dim)
    if wild > WILD_LOGITS and not model.pretrained:
        yield Doubt(
            f"model.init_std = {model.init_std:g} lets the first logits of {model.dim} features "
            f"scatter by {wild:.3g}: the run begins far above a uniform guess, and unlearns that "
            "first",
            mend(f"model.init_std={usual.init_std:g}"),
        )
    entries = model.vocab or plan.data.vocab
    best = 1 / (1 + (entries - 1) * math.exp(-2 * model.logit_cap))
    if model.logit_cap and best < 0.5:
        yield Doubt(
            f"model.logit_cap = {model.logit_cap:g} leaves no token more than {best:.2g} of the "
            f"probability among {entries:,} entries",
            mend(f"model.logit_cap={max(15, math.ceil(math.log(entries))):g}"),
        )


def _traces(plan: Plan) -> Iterator[Doubt]:
    """Yield a doubt about profiler windows that evaluations and checkpoints leave no room for."""
    need = plan.trace.steps + 2  # as the key says
    often = {f"{name}.every_steps": getattr(plan, name).every_steps for name in INTERRUPT}
    intervals = {key: every for key, every in often.items() if 0 < every < need}
    if plan.trace.every_steps and intervals:
        listing = " and ".join(f"{key} = {every}" for key, every in intervals.items())
        yield Doubt(
            f"trace.every_steps asks for traces, and none is recorded: one needs {need} steps in a "
            f"row, and {listing} leaves fewer",
            mend(*(f"{key}={need}" for key in intervals)),
        )


RULES: tuple[Callable[[Plan], Iterator[Doubt]], ...] = (
    _rate,
    _end_of_schedule,
    _updates,
    _first_logits,
    _goal,
    _traces,
)
"""Functions that yield doubts about the plan's own keys."""
