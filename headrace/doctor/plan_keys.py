"""List the keys of a plan that are worth a try against a finding, beside techniques."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from headrace.plan.changes import parse, word
from headrace.plan.gentler import gentler, usual_rate
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue
from headrace.predict.candidates import MICRO, Words

STEP = 3
"""Factor by which a rate that may be too high is divided, where it is tried alone."""
HALVES = ("bf16", "fp16")
"""Values of a key that name a precision which a processor may only emulate, many times slower."""


def _more_reading(plan: Plan) -> list[Words]:
    workers, ahead = plan.data.workers, plan.data.prefetch
    return [(f"data.workers={max(2, 2 * workers)}",), (f"data.prefetch={2 * ahead}",)]


def _gentler(plan: Plan) -> list[Words]:
    """Return all that is far off at once, which learns; then a lower rate alone, and clipping."""
    if rate_is_far_off(plan):
        return [gentler(plan)]
    changes = [gentler(plan), *_lower(plan)]
    if not plan.optimizer.clip_norm:
        changes.append(("optimizer.clip_norm=1.0",))
    return changes


def _lower(plan: Plan) -> list[Words]:
    return [(f"optimizer.lr={word(float(f'{plan.optimizer.lr / STEP:.2g}'))}",)]


def rate_is_far_off(plan: Plan) -> bool:
    """Return whether no single step makes the rate one that learns: nothing else alone helps."""
    return plan.optimizer.lr > STEP**2 * usual_rate(plan)


def _other_rates(plan: Plan) -> list[Words]:
    return [(f"optimizer.lr={word(plan.optimizer.lr * factor)}",) for factor in (2, 0.5)]


def _half(plan: Plan) -> list[Words]:
    return [("model.precision=bf16",)] if plan.model.precision == "fp32" else []


KEYS: Mapping[str, Callable[[Plan], list[Words]]] = {
    "input": _more_reading,
    "instability": _gentler,
    "forgetting": _lower,
    "chat template": lambda plan: [("data.chat.template=",)],
    "recipe": _other_rates,
    "computation": _half,
    "kernel efficiency": _half,
    "memory bandwidth": _half,
    "memory capacity": _half,
}
"""Bottleneck -> keys of the plan that are worth a try, together where they stand together."""
OTHER_RUN = "another run: what was learned so far was learned at the old rate"
KEY_COSTS: Mapping[str, str] = {
    "data.workers": "cores of the host",
    "data.prefetch": "memory of the host",
    "optimizer.lr": OTHER_RUN,
    "optimizer.betas": OTHER_RUN,
    "optimizer.weight_decay": "another run: what was learned so far had the old decay",
    "model.init_std": "another run, from other weights",
    "optimizer.clip_norm": "nothing in time (the norm is measured anyway); large gradients shrink",
    "schedule.warmup_steps": "steps at a low rate",
    "goal.steps": "a shorter run",
    "data.chat.template": "another run: what was learned so far was learned by the other",
    "model.precision": "products of numbers of 8 significant bits",
    MICRO: "nothing in the gradients; rounding of their sum",
}
KEY_EQUALITY: Mapping[str, str] = {
    "optimizer.lr": "learning",
    "optimizer.clip_norm": "learning",
    "optimizer.betas": "learning",
    "optimizer.weight_decay": "learning",
    "schedule.warmup_steps": "learning",
    "goal.steps": "learning",
    "schedule.steps": "learning",
    "model.init_std": "learning",
    "data.chat.template": "learning",
    "model.precision": "approximate",
}
"""What a key does to the gradients, where it does not keep them."""


def key_equality(key: str, catalogue: Catalogue) -> str:
    """Return what a key does to the gradients; a knob of what changes learning changes it too."""
    table, _, rest = key.partition(".")
    if table != "techniques":
        return KEY_EQUALITY.get(key, "exact")
    owner = catalogue.techniques.get(rest.partition(".")[0])
    return "learning" if owner is not None and owner.equality == "learning" else "exact"


def in_force_alone(
    plan: Plan, inactive: Iterable[str], unreached: Mapping[str, Mapping[str, Sequence[str]]]
) -> Iterator[Words]:
    """Yield changes that leave out what does nothing.

    Of adapters it is those that no gradient reached, and then all. They are chosen by the ends of
    their names, so that an end is left out in every block.

    Args:
        plan: the run's.
        inactive: techniques that were asked for and do nothing.
        unreached: of each technique, its "parts" that learned nothing, and the "others".
    """
    yield from ((f"-{name}",) for name in inactive if name in plan.techniques)
    for name, one in unreached.items():
        ends = {key: {part.split(".", 2)[-1] for part in names} for key, names in one.items()}
        kept = sorted(ends["others"] - ends["parts"])
        if name in plan.techniques:
            yield from [(f"techniques.{name}.targets={json.dumps(kept)}",)] if kept else []
            yield (f"-{name}",)


def concerns_halves(words: Iterable[str], catalogue: Catalogue) -> bool:
    """Return whether a change is of a technique that multiplies halves, or sets a key to one.

    A change of a technique adds it, removes it or sets one of its knobs.
    """
    change = parse(words)
    names, settings = {*change.with_, *change.without}, change.settings()
    names |= {key.split(".")[1] for key in settings if key.startswith("techniques.")}
    if any(catalogue.find(name).halves for name in names):
        return True
    return any(value in HALVES for value in settings.values())
