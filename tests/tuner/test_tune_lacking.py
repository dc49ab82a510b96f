"""What the tuner says where nothing gains, where noise hides it, where a compiler is missing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headrace.assemble.context import choose_device, make_context
from headrace.cli.catalogue import catalogue
from headrace.plan.plan import Plan
from headrace.tuner.judge import Rules
from headrace.tuner.proposals import without_compiler
from headrace.tuner.tune import tune

FAST, SLOW = "fused_rope", "fused_swiglu"
KNOWN = catalogue()
CUDA = Rules(device="cuda", precision="bf16")


def test_what_only_a_missing_compiler_forbids_is_told_with_what_installs_one(
    Machine: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context(plan, choose_device(plan))
    for there, refused in ((True, []), (False, ["+torch_compile"])):
        here = replace(context, device="cpu", has_compiler=there, has_triton=False)
        lacks = without_compiler(plan, here, KNOWN)
        assert [names[0] for names in lacks] == refused
    found = replace(Machine({}).sources([]), lacking=lambda run: lacks)
    tuned = tune(plan, "time", 60, found, Machine({}).measure, CUDA)
    (row,) = tuned.path
    assert row.verdict == "refused" and "install g++ or clang++" in row.line()
    assert "No plan could be measured" in tuned.sentence()


def test_what_noise_may_have_hidden_is_tried_once_more_after_all_else(
    Machine: Any, plan: Plan, change: Callable[..., Plan]
) -> None:
    """Others used the device in the first trial; it is quiet in the last."""
    machine = Machine({FAST: 0.98}, shaken=1)
    tuned = tune(
        plan,
        "time",
        60,
        machine.sources([], names=(FAST, SLOW)),
        machine.measure,
        CUDA,
        clock=machine.clock,
    )
    assert [(row.changes, row.verdict) for row in tuned.path[:3]] == [
        ((f"+{FAST}",), "reverted"),
        ((f"+{SLOW}",), "reverted"),
        ((f"+{FAST}",), "kept"),
    ]


def test_where_nothing_gains_the_end_says_what_came_nearest(Machine: Any, plan: Plan) -> None:
    machine = Machine({FAST: 0.999, SLOW: 1.2})
    tuned = tune(
        plan,
        "time",
        60,
        machine.sources([], names=(FAST, SLOW)),
        machine.measure,
        CUDA,
        clock=machine.clock,
    )
    said = tuned.sentence()
    assert f"0 kept; the fastest of them, +{FAST}, is 1.001 (" in said
    assert said.endswith("times as fast, and nothing else is predicted to make a step shorter.")
