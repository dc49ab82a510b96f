"""Find overrides that make a plan that diverged learn, for all keys that are far off at once.

Neither half the rate nor a longer warmup mends a rate that is a thousand times too high. So each
key that is far from what models learn with gets a value that they do learn with: the rate what is
usual for the width, warmup a tenth of the run, and decay, moments and clipping their defaults.
Where nothing is far off, a tenth of the rate is tried.
"""

from collections.abc import Iterator

from headrace.plan.doubts import forgets, misfits, usual_warmup
from headrace.plan.plan import OptimizerConfig, Plan

WIDE, MOST = 0.256, 4e-3
"""optimizer.lr x model.dim with which models of random weights learn, and the highest learning
rate. The first is the default of one key times that of the other. The second is the highest rate
that needed no warmup in the measurements of doubts.WIDE_RATE."""
GIVEN = 0.1
"""Share of the usual rate for weights that were trained before."""
LOWER = 0.1
"""Factor for a learning rate that is not far off."""
CLIPS = 10.0
"""Norm of the gradient above which clipping has no effect."""
WILD_STD = 10.0
"""Ratio to the default standard deviation of initial weights above which theirs is far off."""


def usual_rate(plan: Plan) -> float:
    """Return the learning rate that is usual for the plan's width and initial weights.

    Where a technique trains something else than the weights, it is that technique's.
    """
    for technique in plan.techniques.values():
        if technique.usual_rate is not None:
            return technique.usual_rate
    rate = min(MOST, WIDE / plan.model.dim)
    return float(f"{rate * (GIVEN if plan.model.pretrained else 1):.2g}")


def gentler(plan: Plan) -> tuple[str, ...]:
    """Return overrides with which a run that diverged learns. They are to be given together."""
    return tuple(f"{key}={value}" for key, value in _far_off(plan))


def _far_off(plan: Plan) -> Iterator[tuple[str, str]]:
    given, usual = plan.optimizer, OptimizerConfig()
    rate, known, other = given.lr, usual_rate(plan), False
    if plan.model.init_std > WILD_STD * (std := type(plan.model)().init_std):
        yield "model.init_std", f"{std:g}"
        other = True
    if misfits(given.betas):
        yield "optimizer.betas", f"[{usual.betas[0]:g},{usual.betas[1]:g}]"
        other = True
    if given.clip_norm == 0 or given.clip_norm > CLIPS:
        yield "optimizer.clip_norm", f"{usual.clip_norm:g}"
    fades = forgets(min(rate, known), given.weight_decay)
    for key, value in _of_techniques(plan):
        yield key, value
        other = True
    if rate > known:
        yield "optimizer.lr", f"{known:g}"
    elif not (other or fades):
        yield "optimizer.lr", f"{float(f'{rate * LOWER:.2g}'):g}"
    if fades:
        yield "optimizer.weight_decay", f"{usual.weight_decay:g}"
    lasts, warm = plan.goal_steps or plan.horizon_steps, plan.schedule.warmup_steps
    if not warm or (lasts and 2 * warm > lasts):
        yield "schedule.warmup_steps", f"{usual_warmup(plan)}"


def _of_techniques(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield keys and values of techniques' knobs that make a run learn.

    They are the changes of the techniques' doubts, and the default for a rate above it.
    """
    for name, technique in plan.techniques.items():
        doubt = technique.doubt(plan)
        for change in doubt.changes if doubt is not None else ():
            key, _, value = change.partition("=")
            yield key, value
        rate, field = getattr(technique, "lr", None), type(technique).model_fields.get("lr")
        if rate is not None and field is not None and rate > field.default:
            yield f"techniques.{name}.lr", f"{field.default:g}"
