"""Doubt a run that would read its text so often that the model learns it by heart."""

from headrace.assemble.sockets import Build
from headrace.core.remedy import mend
from headrace.core.units import format_count
from headrace.costs.count import total_parameters
from headrace.costs.passes import most_passes
from headrace.plan.technique import Doubt
from headrace.plan.warmups import shortened

FAR = 1.5
"""Times the passes after which a text is learned by heart from which a run is doubted: they were
measured on small models, to a third or so."""
FEWEST_PASSES = 2.0
"""Passes up to which no run is doubted: the second one helped every model that was measured."""


def doubt_of_repeats(build: Build) -> Doubt | None:
    """Return the doubt about a run's length beside its text; None where there is none.

    Weights that are given, or of which adapters alone learn, are none of which passes were
    measured, and a run that time ends alone has no passes before it is run.
    """
    plan, steps = build.plan, build.plan.goal_steps or build.plan.horizon_steps
    fresh = sum(shards.tokens for shards in build.prepared.train)
    if plan.vision is not None or not (plan.learns_from_nothing and steps and fresh):
        return None
    learned, passes = total_parameters(build.config), plan.batches.before(steps) / fresh
    most = most_passes(learned, fresh)
    if passes < max(FEWEST_PASSES, FAR * most):
        return None
    ends = plan.batches.steps_to(round(most * fresh))
    warmups = (f"{key}={value}" for key, value in shortened(plan, ends).items())
    return Doubt(
        f"the run reads its text of {format_count(fresh)} tokens {passes:.2g} times, and a model "
        f"of {format_count(learned)} parameters learns such a text by heart after about "
        f"{most:.2g}: its loss on other text rises from there on",
        mend(f"goal.steps={ends}", f"schedule.steps={ends}", *warmups),
        numbers={"passes": passes, "most_passes": most},
    )
