"""Shorten warmups that a run which ends sooner would not outlast."""

from typing import Any

from headrace.plan.plan import Plan

LONGEST, USUAL = 0.25, 0.1
"""Share of the steps that a warmup may take, and the share that it gets where it takes more."""
ENDING = "warmup_steps"
"""How the names of knobs end that count a warmup's steps."""


def shortened(plan: Plan, steps: int) -> dict[str, int]:
    """Return key -> value of each warmup that takes too much of a run of so many steps.

    Args:
        plan: whose warmups are those of a longer run.
        steps: of the run.
    """
    changed: dict[str, int] = {}
    usual = max(1, round(USUAL * steps))
    made = plan.made()
    if plan.schedule.warmup_steps > LONGEST * steps:
        rewritten = any(f"schedule.{ENDING}" in keys for keys in made.values())
        changed |= {} if rewritten else {f"schedule.{ENDING}": usual}
    for name, keys in made.items():
        for knob, value in plan.techniques[name].model_dump().items():
            warms = knob.endswith(ENDING) or (knob == "steps" and f"schedule.{ENDING}" in keys)
            if warms and isinstance(value, int) and value > LONGEST * steps:
                changed[f"techniques.{name}.{knob}"] = usual
    return changed


def with_warmups(plan: Plan, steps: int) -> dict[str, Any]:
    """Return the plan's techniques, with warmups that a run of so many steps outlasts."""
    techniques = dict(plan.techniques)
    for key, value in shortened(plan, steps).items():
        table, _, rest = key.partition(".")
        if table == "techniques":
            name, knob = rest.split(".")
            techniques[name] = techniques[name].model_copy(update={knob: value})
    return techniques
