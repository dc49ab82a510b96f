"""Judge a run that began from given weights: what of it learns, what it forgets, and its rate.

A run from random weights is compared with nothing. Given weights know something, so that a loss
above the one that they began with says that the run took away more than it gave.
"""

from headrace.doctor.findings import Finding, Kind
from headrace.doctor.observation import Observation

RISE_SHARE = 0.02
"""Share of the first loss by which every later one lies above it where a rate is too high. A seed
or a batch moves a validation by less (the same share as of a loss that rises)."""
WIDE_SHARE = 0.05
"""Share of the device's memory that frozen weights in fp32 take, from which it is named. Chosen."""
FORGOT_SHARE = 0.02
"""Share of the loss on a general text by which training may raise it. Chosen, not measured."""


def unreached(seen: Observation) -> Finding | None:
    """Look for adapters whose second matrix, which begins at zero, no gradient moved."""
    for technique, one in seen.unreached.items():
        parts, others = (tuple(one[key]) for key in ("parts", "others"))
        facts = {"technique": technique, "parts": parts, "others": others}
        return Finding(Kind.UNREACHED, len(parts) / (len(parts) + len(others)), facts)
    return None


def above_the_start(seen: Observation) -> Finding | None:
    """Look for given weights whose loss no evaluation found as low as before the first step.

    A loss that fell first and rose then is one of rows that were seen too often, and not of a rate.
    """
    before, usual = seen.before_nats, seen.given.get("usual_lr")
    if before is None or usual is None or not seen.val_nats:
        return None
    if (lowest := min(seen.val_nats)) <= (1 + RISE_SHARE) * before:
        return None
    facts = {"before_nats": before, "lowest_nats": lowest, **seen.given}
    return Finding(Kind.ABOVE_THE_START, 1.0, facts)


def forgot(seen: Observation) -> Finding | None:
    """Look for a loss on a general text that training raised."""
    before, after = (seen.general.get(f"{when}_nats") for when in ("before", "after"))
    if before is None or after is None or after <= (1 + FORGOT_SHARE) * before:
        return None
    return Finding(Kind.FORGOT, min(1.0, after / before - 1), {**seen.general, **seen.given})


def other_template(seen: Observation) -> Finding | None:
    """Look for conversations that were written by another template than the tokenizer's.

    What it costs is not read, so its share is 0.
    """
    if seen.templates is None:
        return None
    run, own = seen.templates
    return Finding(Kind.OTHER_TEMPLATE, 0.0, {"run_sha256": run, "own_sha256": own})


def wide_base(seen: Observation) -> Finding | None:
    """Look for frozen weights that are held in fp32 where every step reads them as bf16."""
    wide_bytes, whole = seen.given.get("fp32_bytes") or 0, seen.capacity_bytes
    if seen.device != "cuda" or not whole or wide_bytes < WIDE_SHARE * whole:
        return None
    return Finding(
        Kind.WIDE_BASE, 0.0, {"fp32_bytes": wide_bytes, "capacity_bytes": whole}, "inferred"
    )


UNPRICED = other_template, wide_base
"""What is known to be there, and not what it costs."""
