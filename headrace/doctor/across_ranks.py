"""Judge how evenly ranks work: replicas of which one is late, and stages that are not alike."""

from statistics import fmean

from headrace.doctor.findings import Finding, Kind
from headrace.doctor.observation import Observation

STRAGGLER_SHARE = 0.05
"""Share of a step for which ranks wait for the last one, from which it is named (TraceML: 0.1)."""
SAME_RANK = 0.8
"""Share of the steps in which one rank is last, from which that rank is named (TraceML's cover)."""
IMBALANCE_SHARE = 0.05
"""Share of a step for which ranks of a pipeline wait for the slowest one's passes, from which it is
named. Chosen as a straggler's is, not measured."""


def straggler(seen: Observation) -> Finding | None:
    """Look for a rank that all others wait for."""
    if seen.straggler_s is None or not seen.steps:
        return None
    delay_s, mean_s = seen.straggler_s, fmean(seen.step_s)
    if (share := min(1.0, delay_s / mean_s)) < STRAGGLER_SHARE:
        return None
    facts = {
        "delay_s": delay_s,
        "step_s": mean_s,
        "rank": seen.last,
        "last_share": seen.last_share,
        "same_rank": seen.last_share >= SAME_RANK,
        "host": seen.host,
    }
    return Finding(Kind.STRAGGLER, share, facts)


def pipeline_imbalance(seen: Observation) -> Finding | None:
    """Look for a rank of a pipeline whose passes take longer than the others'.

    What the schedule lets ranks wait where all are alike is no part of it.
    """
    if (stages := seen.stages) is None or not seen.steps:
        return None
    mean_s = fmean(seen.step_s)
    if (share := min(1.0, stages.lost_s / mean_s)) < IMBALANCE_SHARE:
        return None
    place = stages.slowest
    facts = {
        "place": place,
        "own_s": stages.own_s,
        "layers": stages.layers,
        "over_share": stages.own_s[place] / stages.mean_s - 1,
        "delay_s": stages.lost_s,
        "step_s": mean_s,
        "idle_share": stages.idle_share,
        "micro_batches": stages.micro_batches,
    }
    return Finding(Kind.PIPELINE_IMBALANCE, share, facts)


UNEVEN = straggler, pipeline_imbalance
"""What makes ranks wait that is no transfer."""
