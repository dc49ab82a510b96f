"""Tell how long steps waited for their data, as a run, a watched loop and pages do."""

from collections.abc import Sequence
from statistics import quantiles

STALL_SHARE = 0.05
"""A step is stalled when it waits for its data longer than this share of a median step."""
NAMES = ("p50_s", "p99_s", "stalled_steps")
"""What `waits_of` returns, by name."""


def waits_of(waits_s: Sequence[float], step_s: float | None) -> dict[str, float | None]:
    """Return percentiles of how long steps waited for their data, and the number of stalled ones.

    All are None of fewer than two steps; `stalled_steps` also where no median step is known.

    Args:
        waits_s: seconds of each step.
        step_s: seconds of the median step.
    """
    if len(waits_s) < 2:
        return dict.fromkeys(NAMES)
    cuts = quantiles(waits_s, n=100, method="inclusive")
    stalled = sum(wait_s > STALL_SHARE * step_s for wait_s in waits_s) if step_s else None
    return dict(zip(NAMES, (cuts[49], cuts[98], stalled), strict=True))
