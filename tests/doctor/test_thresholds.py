"""Rules speak exactly at each threshold, and are silent one step to the other side of it.

Every number here is a sum of powers of two, so that a share is the threshold itself and not nearly.
"""

import math
from dataclasses import replace
from typing import Any

import pytest

from headrace.doctor import across_ranks, physics, rules
from headrace.doctor.observation import Observation
from headrace.doctor.physics import binding
from headrace.doctor.rules import faults
from headrace.doctor.stages import StageTimes
from headrace.doctor.use import Use

STEPS, STEP_S, WHOLE = 64, 0.125, 2.0**37
EVEN = Observation(
    step_s=(STEP_S,) * STEPS,
    loss=(4.0,) * STEPS,
    grad_norm=(1.0,) * STEPS,
    useful_share=1.0,
    reserved_bytes=WHOLE / 2,
    allocated_bytes=WHOLE / 2,
    capacity_bytes=WHOLE,
    device="cuda",
    use=Use(computes_s=0.75 * STEP_S, moves_s=0.1875 * STEP_S, host_s=STEP_S / 4),
)
"""Nothing is wrong in it, and nothing varies."""
MORE, LESS = 1 + 2**-20, 1 - 2**-20


def lost(count: int, of: int = STEPS) -> dict[str, Any]:
    """Return losses of which `count` are no numbers."""
    return {"loss": (*(math.nan,) * count, *(4.0,) * (of - count))}


def of_a_step(key: str, share: float) -> dict[str, Any]:
    """Return a phase that takes `share` of every step."""
    return {key: (share * STEP_S,) * STEPS}


def recompiled(steps: int, share: float) -> dict[str, Any]:
    """Return steps that compile again, for `share` of all the time."""
    again_s = share / (1 - share) * STEP_S * STEPS
    return {"recompile_s": (again_s / steps,) * steps}


def saving(share: float) -> dict[str, Any]:
    """Return a technique without which `share` of the memory would be in use."""
    more = share * WHOLE - WHOLE / 2
    return {"savings": {"ckpt": {"bytes": more, "again": 0.25, "moved": 0.0}}}


def held(share: float, loose: float = 0.0) -> dict[str, Any]:
    """Return reserved memory, `loose` of it in pieces, where the allocator began anew."""
    return {
        "reserved_bytes": share * WHOLE,
        "allocated_bytes": (share - loose) * WHOLE,
        "alloc_retries": 1,
    }


def staged(times: float) -> dict[str, Any]:
    """Return two stages of which one loses `times` the threshold; half of a difference is lost."""
    more_s = 2 * across_ranks.IMBALANCE_SHARE * STEP_S * times
    own_s = (STEP_S / 4 + more_s, STEP_S / 4)
    return {"stages": StageTimes(own_s, (2, 2), 1e9, 0.1, 1)}


AT: dict[str, tuple[dict[str, Any], str | None]] = {
    "lost steps, as many as allowed": (lost(rules.LOST), None),
    "lost steps, one more": (lost(rules.LOST + 1), "instability"),
    "lost steps, the share that is allowed": (lost(8, 160), None),
    "lost steps, one more than the share": (lost(9, 160), "instability"),
    "input, at the share": (of_a_step("input_s", physics.INPUT_SHARE * MORE), "input"),
    "input, below": (of_a_step("input_s", physics.INPUT_SHARE * LESS), None),
    "communication, at the share": (
        of_a_step("communication_s", rules.COMMUNICATION_SHARE * MORE),
        "interconnect",
    ),
    "communication, below": (of_a_step("communication_s", rules.COMMUNICATION_SHARE * LESS), None),
    "a late rank": (
        {"straggler_s": across_ranks.STRAGGLER_SHARE * STEP_S * MORE, "last": 1},
        "straggler",
    ),
    "a rank that is hardly late": (
        {"straggler_s": across_ranks.STRAGGLER_SHARE * STEP_S * LESS, "last": 1},
        None,
    ),
    "host, ahead by just enough": (of_a_step("slack_s", physics.SLACK_SHARE * MORE), None),
    "host, not ahead": (of_a_step("slack_s", physics.SLACK_SHARE * LESS), "launch"),
    "device dry in half of the steps": (
        {**of_a_step("slack_s", 0.0), "dry": (1.0, 0.0) * (STEPS // 2)},
        "launch",
    ),
    "device dry in one step less": (
        {**of_a_step("slack_s", 0.0), "dry": (0.0, 0.0, *(1.0, 0.0) * (STEPS // 2 - 1))},
        None,
    ),
    "recompiles, as many as allowed": (recompiled(rules.RECOMPILES, 0.5), None),
    "recompiles, one more": (recompiled(rules.RECOMPILES + 1, 0.5), "launch"),
    "recompiles, below the share": (recompiled(9, rules.RECOMPILED_SHARE * LESS), None),
    "recompiles, above the share": (recompiled(9, rules.RECOMPILED_SHARE * MORE), "launch"),
    "small operations, at the share": (
        {"tiny": 9, "host_s": rules.TINY_SHARE * STEP_S * MORE},
        "launch",
    ),
    "small operations, below": ({"tiny": 9, "host_s": rules.TINY_SHARE * STEP_S * LESS}, None),
    "no graph break": ({"graph_breaks": 0}, None),
    "one graph break": ({"graph_breaks": 1}, "launch"),
    "waste, at the share": ({"useful_share": 1 - rules.WASTE_SHARE * MORE}, "wasted tokens"),
    "waste, below": ({"useful_share": 1 - rules.WASTE_SHARE * LESS}, None),
    "untrained, at the share": ({"untrained": rules.UNTRAINED_SHARE}, "silent no-op"),
    "untrained, below": ({"untrained": rules.UNTRAINED_SHARE * LESS}, None),
    "memory, at the pressure": (held(rules.PRESSURE), None),
    "memory, above": (held(rules.PRESSURE * MORE), "memory capacity"),
    "pieces, at the share": (held(0.5, 0.125), "fragmentation"),
    "pieces, below": (held(0.5, rules.FRAGMENTS * LESS), None),
    "memory unused without the saving": (saving(rules.UNUSED * LESS), "unused memory"),
    "memory used without the saving": (saving(rules.UNUSED), None),
}
"""What a window has beyond `EVEN` -> the bottleneck that is named, None where nothing is."""


@pytest.mark.parametrize("case", AT)
def test_at_its_threshold_a_rule_speaks_or_is_silent(case: str) -> None:
    changes, named = AT[case]
    seen = replace(EVEN, **changes)
    found = (faults(seen) or [binding(seen)])[0]
    assert found.bottleneck == (named or "computation"), found


@pytest.mark.parametrize(("times", "same"), [(1.0, True), (LESS, False)])
def test_a_rank_is_named_from_the_share_on(times: float, same: bool) -> None:
    late: dict[str, Any] = {
        "straggler_s": STEP_S / 2,
        "last": 3,
        "last_share": across_ranks.SAME_RANK * times,
    }
    assert faults(replace(EVEN, **late))[0].facts["same_rank"] is same
