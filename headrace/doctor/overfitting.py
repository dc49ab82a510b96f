"""Judge whether a run learned its text by heart, and say what keeps one from it.

More training makes such a run worse: its loss on the training text falls, and on any other text it
rises (arXiv 2509.14786). After how many passes, benchmarks/repeated_text.py measures.
"""

from collections.abc import Iterator
from math import inf, isfinite
from statistics import median

from headrace.doctor.findings import Finding, Kind
from headrace.doctor.observation import Observation
from headrace.doctor.series import finite
from headrace.plan.plan import Plan
from headrace.predict.candidates import Words

FEWEST_LOOKS = 3
"""Fewest validations of which the lowest may be one before the last."""
ROSE = 0.01
"""Share of the lowest validation loss by which the last lies above it where a model overfits. The
same tokens are validated each time, so that a healthy run's last is its lowest or near it."""
DECAY = 0.3
"""Weight decay that is worth a try: of 7 parameters a token, after 7.4 passes, the loss was 0.04
bits per byte lower with it (learning.jsonl, kind repeated_text)."""
NEAR = 0.1
"""Share of the steps whose training losses are compared: the last ones, and those until the lowest
validation."""


def overfits(seen: Observation) -> Finding | None:
    """Look for a validation loss that rose while the training text's fell.

    Where no text was read twice, it was not learned by heart.
    """
    losses, val = finite(seen.loss), seen.val_nats
    if len(val) < FEWEST_LOOKS or not all(map(isfinite, val)) or not losses:
        return None
    lowest = min(range(len(val)), key=val.__getitem__)
    rose, step, steps = val[-1] / val[lowest] - 1, seen.val_steps[lowest], seen.val_steps[-1]
    if rose < ROSE or (seen.epochs or inf) <= 1:
        return None
    near = max(1, round(NEAR * len(losses)))
    at = max(near, round(len(losses) * step / steps))
    if median(losses[-near:]) > median(losses[at - near : at]):
        return None
    facts = {
        "lowest_nats": val[lowest],
        "last_nats": val[-1],
        "step": step,
        "steps": steps,
        "epochs": seen.epochs,
    }
    return Finding(Kind.OVERFITS, min(1.0, rose), facts)


def sooner(plan: Plan, step: int) -> Iterator[Words]:
    """Yield changes that end a run and its schedule where its validation loss was lowest.

    Tables of which a token reads a row are learned by heart first, and are left out. Weights that
    decay more learn a text by heart later (arXiv 2509.14786 takes 30 times the usual decay).

    Args:
        plan: the run's.
        step: after which the validation loss was lowest; 0 where that is not known.
    """
    if step:
        yield (f"goal.steps={step}", f"schedule.steps={step}")
    yield from ((f"-{name}",) for name in plan.table_techniques)
    decays = {"optimizer.weight_decay": plan.optimizer.weight_decay}
    for name, technique in plan.techniques.items():
        if "weight_decay" in (knobs := technique.model_dump()):
            decays[f"techniques.{name}.weight_decay"] = knobs["weight_decay"]
    if more := tuple(f"{key}={DECAY}" for key, decay in decays.items() if decay < DECAY):
        yield more
