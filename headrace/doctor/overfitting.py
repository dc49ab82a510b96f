"""Judge whether a run learned its text by heart, and say what keeps one from it.

More training makes such a run worse: its loss on the training text falls, and on any other text it
rises (arXiv 2509.14786). After how many passes, benchmarks/repeated_text.py measures.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite
from statistics import median

from headrace.doctor.findings import Finding, Kind
from headrace.doctor.observation import Observation
from headrace.doctor.series import finite
from headrace.plan.plan import Plan
from headrace.plan.warmups import shortened
from headrace.predict.candidates import Words

FEWEST_LOOKS = 3
"""Fewest validations of which the lowest may be one before the last."""
ROSE, SURELY = 0.01, 0.05
"""Share of the lowest validation loss by which the last is above it where a model overfits: where
enough looks tell how they scatter, and where too few do. Each validates the same tokens, so that a
seed or a batch moves a look by less than a percent."""
SCATTERS = 3
"""How many times the usual step from one look to the next the loss must have risen by."""
READ_TWICE = 1.5
"""Passes over the text until the last look, from which its loss may rise for having been read."""
DECAY = 0.3
"""Weight decay that is worth a try: of 7 parameters a token, after 7.4 passes, the loss was 0.04
bits per byte lower with it (learning.jsonl, kind repeated_text)."""
NEAR = 0.1
"""Share of the steps whose training losses are compared: the last ones, and those until the lowest
validation."""


def overfits(seen: Observation) -> Finding | None:
    """Look for a validation loss that rose while the training text's fell.

    Where the text was not read again, it was not learned by heart. Where given weights began lower,
    the rate is too high (given.py).
    """
    losses, val = finite(seen.loss), seen.val_nats
    if len(val) < FEWEST_LOOKS or not all(map(isfinite, val)) or not losses:
        return None
    if not (seen.val_passes and all(seen.val_steps)):  # an older report may not have them
        return None
    place = min(range(len(val)), key=val.__getitem__)
    lowest, last = val[place], val[-1]
    if seen.val_passes[-1] < READ_TWICE or not _rose(val[place:]):
        return None
    if seen.before_nats is not None and lowest > seen.before_nats:
        return None
    near = max(1, round(NEAR * len(losses)))
    at = max(near, round(len(losses) * seen.val_steps[place] / seen.val_steps[-1]))
    if median(losses[at - near : at]) < (1 + ROSE) * median(losses[-near:]):
        return None
    facts = {
        "lowest_nats": lowest,
        "last_nats": last,
        "step": seen.val_steps[place],
        "steps": seen.val_steps[-1],
        "best_epochs": seen.val_passes[place],
        "epochs": seen.val_passes[-1],
    }
    return Finding(Kind.OVERFITS, min(1.0, last / lowest - 1), facts)


def _rose(since: Sequence[float]) -> bool:
    """Return whether losses since the lowest one rose by more than they scatter."""
    rise, steps = since[-1] - since[0], [abs(b - a) for a, b in pairwise(since)]
    if rise >= SURELY * since[0]:
        return True
    enough = len(steps) >= FEWEST_LOOKS and rise >= SCATTERS * median(steps)
    return enough and rise >= ROSE * since[0]


def sooner(plan: Plan, step: int) -> Iterator[Words]:
    """Yield changes that end a run and its schedule where its validation loss was lowest.

    Tables of which a token reads a row are learned by heart first, and are left out. Weights that
    decay more learn a text by heart later (arXiv 2509.14786 takes 30 times the usual decay).

    Args:
        plan: the run's.
        step: after which the validation loss was lowest; 0 where that is not known.
    """
    if step:
        warmups = (f"{key}={value}" for key, value in shortened(plan, step).items())
        yield (f"goal.steps={step}", f"schedule.steps={step}", *warmups)
    yield from ((f"-{name}",) for name in plan.table_techniques)
    decays = {"optimizer.weight_decay": plan.optimizer.weight_decay}
    for name, technique in plan.techniques.items():
        own = technique.model_dump().get("weight_decay")  # None is the plan's
        if own is not None:
            decays[f"techniques.{name}.weight_decay"] = own
    if more := tuple(f"{key}={DECAY}" for key, decay in decays.items() if decay < DECAY):
        yield more
