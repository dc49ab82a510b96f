"""What the judge says exactly at each threshold, and one step to either side of it.

Every number here is a sum of powers of two, so that a share is the threshold itself and not nearly.
"""

import math
from dataclasses import replace
from typing import Any

import pytest

from headrace.doctor import judge as rules
from headrace.doctor import physics
from headrace.doctor.judge import judge
from headrace.doctor.physics import Use
from headrace.doctor.window import Window

STEPS, STEP_S, WHOLE = 64, 0.125, 2.0**37
EVEN = Window(
    step_s=(STEP_S,) * STEPS, loss=(4.0,) * STEPS, grad_norm=(1.0,) * STEPS, useful_share=1.0,
    reserved_bytes=WHOLE / 2, allocated_bytes=WHOLE / 2, capacity_bytes=WHOLE, device="cuda",
)  # fmt: skip
"""Nothing is wrong in it, and nothing varies."""
BUSY = Use(computes_s=0.75 * STEP_S, moves_s=0.1875 * STEP_S, host_s=STEP_S / 4)
"""What its work takes of the device."""
MORE, LESS = 1 + 2**-20, 1 - 2**-20


def lost(count: int, of: int = STEPS) -> dict[str, Any]:
    """Losses of which `count` are no numbers."""
    return {"loss": (*(math.nan,) * count, *(4.0,) * (of - count))}


def of_a_step(key: str, share: float) -> dict[str, Any]:
    """A phase that takes `share` of every step."""
    return {key: (share * STEP_S,) * STEPS}


def recompiled(steps: int, share: float) -> dict[str, Any]:
    """So many steps that compile again, for `share` of all the time."""
    again_s = share / (1 - share) * STEP_S * STEPS
    return {"recompile_s": (again_s / steps,) * steps}


def saving(share: float) -> dict[str, Any]:
    """A technique without which `share` of the memory would be held."""
    more = share * WHOLE - WHOLE / 2
    return {"savings": {"ckpt": {"bytes": more, "again": 0.25, "moved": 0.0}}}


def held(share: float, loose: float = 0.0) -> dict[str, Any]:
    """So much of the memory reserved, `loose` of it in pieces, where the allocator began anew."""
    return {
        "reserved_bytes": share * WHOLE, "allocated_bytes": (share - loose) * WHOLE,
        "alloc_retries": 1,
    }  # fmt: skip


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
    "a late rank": ({"late_s": rules.LATE_SHARE * STEP_S * MORE, "last": 1}, "straggler"),
    "a rank that is hardly late": ({"late_s": rules.LATE_SHARE * STEP_S * LESS, "last": 1}, None),
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
    found = judge(replace(EVEN, **changes), use=BUSY)[0]
    assert found.bottleneck == (named or "computation"), found


@pytest.mark.parametrize(("times", "who"), [(1.0, "rank 3"), (LESS, "changing ranks")])
def test_a_rank_is_named_from_the_share_on(times: float, who: str) -> None:
    late = {"late_s": STEP_S / 2, "last": 3, "last_share": rules.SAME_RANK * times}
    assert who in judge(replace(EVEN, **late), use=BUSY)[0].sentence
