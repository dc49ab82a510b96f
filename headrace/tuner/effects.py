"""Classify what a change of a plan does to learning, by the techniques and keys that differ.

The classes are "exact", only how it is executed; "approximate", within a band of rounding; and
"learning", another model, other data or another rule. A technique states its own (`equality`). Of
the plan's own keys those of `EXECUTION` are exact, those of `APPROXIMATE` round otherwise, and
every other one is learning.
"""

from typing import Any

from headrace.plan.changes import difference, flat, rewritten
from headrace.plan.plan import Plan
from headrace.plan.technique import EFFECTS, Effect, Rounds, Technique

EXECUTION = {
    "name",
    "directory",
    "device",
    "guard",
    "attention",
    "batch.micro_sequences",
    "data.workers",
    "data.prefetch",
    "data.directory",
    "mesh",
    "eval",
    "checkpoint",
    "hardware",
    "track",
    "trace",
}
"""Tables and keys of a plan that decide how it is executed and not what it learns."""
APPROXIMATE = {"model.precision"}
"""Keys that round otherwise."""
TIMELESS = {"name", "directory", "seed", "goal", "schedule", "optimizer", "hardware", "track"}
"""Tables and keys of a plan that change neither the time of a step nor what is done beside it."""
ARCHITECTURE_ROOMS = {"adapt", "attention", "design"}
"""Rooms of techniques that make another model: other blocks, attention, shapes or adapters. Only
those of them count whose `equality` is "learning": kernels compute the same model."""
SAME_ARCHITECTURE = {
    "model.init_std",
    "model.output_init",
    "model.matrix_init",
    "model.head_init",
}
"""Keys of the plan's table `model` that change what is learned and leave the model's parts."""


def effect_of(before: Plan, after: Plan) -> Effect:
    """Return the strongest effect among the differences of two plans."""
    effects: set[Effect] = {"exact"}
    effects |= {t.equality for t in _differing_techniques(before, after).values()}
    by_techniques = rewritten(before) | rewritten(
        after
    )  # by techniques, whose equality counts for them
    for key in _differing(before, after):
        if key in by_techniques:
            continue
        effects.add(_effect_of_key(key))
    return max(effects, key=EFFECTS.index)


def rounding_words(before: Plan, after: Plan) -> set[str]:
    """Return the words of a change that round otherwise, with the knobs of what they add."""
    differing = _differing_techniques(before, after).items()
    keys = {word for word in difference(before, after) if word.partition("=")[0] in APPROXIMATE}
    rounds = {name for name, t in differing if t.equality == "approximate"}
    return keys | _words_of(rounds, before, after)


def state_words(before: Plan, after: Plan) -> set[str]:
    """Return those of the rounding words whose rounding stays from step to step."""
    differing = _differing_techniques(before, after).items()
    return _words_of({name for name, t in differing if t.rounds == "state"}, before, after)


def _words_of(techniques: set[str], before: Plan, after: Plan) -> set[str]:
    """Return the words of a change that switch or set some techniques."""
    return {
        word
        for word in difference(before, after)
        if word[1:] in techniques
        or (word.startswith("techniques.") and word.split(".")[1] in techniques)
    }


def rounding_of(before: Plan, after: Plan) -> Rounds:
    """Return what two plans round otherwise: the kind that takes the longest to show.

    Keys of `APPROXIMATE` round the operands of products.
    """
    differing = _differing_techniques(before, after).values()
    rounded = {t.rounds for t in differing if t.equality == "approximate"}
    return "state" if "state" in rounded else "other" if "other" in rounded else "operands"


def changes_architecture(before: Plan, after: Plan) -> bool:
    """Return whether two plans differ in the model itself, by a technique or by a key."""
    learning = [
        t for t in _differing_techniques(before, after).values() if t.equality == "learning"
    ]
    return any(t.room in ARCHITECTURE_ROOMS for t in learning) or any(
        key.startswith("model.")
        and _effect_of_key(key) == "learning"
        and key not in SAME_ARCHITECTURE
        for key in _differing(before, after)
    )


def _effect_of_key(key: str) -> Effect:
    if key in EXECUTION or key.partition(".")[0] in EXECUTION:
        return "exact"
    return "approximate" if key in APPROXIMATE else "learning"


def _differing_techniques(before: Plan, after: Plan) -> dict[str, Technique[Any]]:
    """Return the techniques that one plan has and the other has not, or with other knobs."""
    both = {**before.techniques, **after.techniques}
    return {
        name: t
        for name, t in both.items()
        if before.techniques.get(name) != after.techniques.get(name)
    }


def _differing(before: Plan, after: Plan) -> list[str]:
    """Return the keys of the plan itself, without techniques, whose values differ."""
    one, two = flat(before), flat(after)
    return [key for key in one.keys() | two.keys() if one.get(key) != two.get(key)]


def learns_otherwise(run: Plan, plan: Plan) -> str:
    """Return why a run's loss curve is no evidence for a plan, as a verb's end; "" where it is.

    Goals may differ, if the schedule ends at the same step, and a run writes down the size of the
    vocabulary that a plan may leave open.
    """
    alike = _written(plan, run)
    if plan.horizon_steps != run.horizon_steps:
        return f"has a schedule of {run.horizon_steps} steps, this one of {plan.horizon_steps}"
    if effect_of(run, alike) != "learning":
        return ""
    keys = [key for key in _differing(run, alike) if _effect_of_key(key) == "learning"]
    return f"learned otherwise ({', '.join(sorted(keys)[:3]) or 'other techniques'})"


def runs_otherwise(run: Plan, plan: Plan) -> str:
    """Return why a run's clock is no evidence for a plan, as a verb's end; "" where it is."""
    alike = _written(plan, run)
    if run.techniques != alike.techniques:
        return "ran otherwise (other techniques)"
    keys = {key for key in _differing(run, alike) if key.partition(".")[0] not in TIMELESS}
    return f"ran otherwise ({', '.join(sorted(keys)[:3])})" if keys else ""


def _written(plan: Plan, run: Plan) -> Plan:
    """Return the plan with the run's goal and with what a run writes down where a plan is open."""
    return plan.replaced(
        goal=run.goal,
        model=plan.model.model_copy(update={"vocab": run.model.vocab}),
        schedule=plan.schedule.model_copy(update={"steps": run.schedule.steps}),
    )
