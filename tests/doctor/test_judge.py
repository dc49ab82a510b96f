"""What the judge makes of windows with one planted fault, and of healthy ones."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import RunError
from headrace.doctor.judge import judge, spiked
from headrace.doctor.window import Window, of_run, read_rows, series, steady

STEPS, GIB = 64, 2**30


def healthy(seed: int = 0, device: str = "cuda") -> Window:
    """A steady run: little waits, a falling loss, most of the memory in use."""
    draw = random.Random(seed)
    step_s = tuple(0.1 * draw.uniform(0.98, 1.03) for _ in range(STEPS))
    loss = tuple(6 * (n + 20) ** -0.2 + draw.gauss(0, 0.05) for n in range(STEPS))
    return Window(
        step_s=step_s, input_s=tuple(0.01 * s for s in step_s),
        forward_s=tuple(0.3 * s for s in step_s), backward_s=tuple(0.6 * s for s in step_s),
        communication_s=(0.0,) * STEPS,
        slack_s=tuple(0.6 * s for s in step_s) if device == "cuda" else None, loss=loss,
        grad_norm=tuple(0.5 + draw.gauss(0, 0.05) for _ in range(STEPS)),
        useful_share=0.99, late_graphs=0,
        allocated_bytes=110.0 * GIB, reserved_bytes=118.0 * GIB, capacity_bytes=140.0 * GIB,
        alloc_retries=0, device=device,
    )  # fmt: skip


def slowed(window: Window, share: float, key: str) -> Window:
    """Of every step `share` is `key`."""
    more = tuple(s * share / (1 - share) for s in window.step_s)
    held = getattr(window, key) or (0.0,) * STEPS
    whole = tuple(a + b for a, b in zip(window.step_s, more, strict=True))
    return replace(window, step_s=whole, **{key: tuple(
        a + b for a, b in zip(held, more, strict=True))})  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_nothing_is_found_where_nothing_is_wrong(seed: int, device: str) -> None:
    (found,) = judge(healthy(seed, device))
    assert found.bottleneck == "computation" and "a trace" in found.not_measured


def test_too_few_steps_are_not_judged() -> None:
    few = healthy()
    (found,) = judge(replace(few, step_s=few.step_s[:5]))
    assert found.bottleneck == "not measured"


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
@pytest.mark.parametrize(
    ("key", "name"), [("input_s", "input"), ("communication_s", "interconnect")]
)
def test_a_phase_that_waits_is_named_with_its_share(key: str, name: str, share: float) -> None:
    first, *rest = judge(slowed(healthy(), share, key))
    assert first.bottleneck == name and first.share == pytest.approx(share, abs=0.02)
    assert not rest


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"slack_s": (0.0,) * STEPS}, "launch"),
        ({"late_graphs": 12}, "launch"),
        ({"useful_share": 0.8}, "wasted tokens"),
        ({"alloc_retries": 3, "allocated_bytes": 80.0 * GIB}, "fragmentation"),
        (
            {"reserved_bytes": 135.0 * GIB, "allocated_bytes": 130.0 * GIB, "alloc_retries": 2},
            "memory capacity",
        ),
        ({"reserved_bytes": 60.0 * GIB, "saves_memory": ("full_checkpoint",)}, "unused memory"),
        ({"inactive": ("flash_attention",)}, "silent no-op"),
        ({"grad_norm": (math.nan,) * 9 + (0.5,) * (STEPS - 9)}, "instability"),
        ({"loss": tuple(3 + 0.05 * n for n in range(STEPS))}, "instability"),
    ],
)
def test_one_fault_is_named_first_and_alone(changes: dict[str, Any], name: str) -> None:
    (found,) = judge(replace(healthy(), **changes))
    assert found.bottleneck == name and found.sentence and found.evidence


def test_what_nobody_read_is_not_judged() -> None:
    bare = Window(step_s=healthy().step_s)
    assert [f.bottleneck for f in judge(bare)] == ["computation"]
    late = replace(healthy(device="cpu"), slack_s=(0.0,) * STEPS)
    assert judge(late)[0].bottleneck == "computation", "a CPU's host cannot be ahead of itself"


def test_the_larger_share_stands_first() -> None:
    both = slowed(slowed(healthy(), 0.1, "communication_s"), 0.3, "input_s")
    assert [f.bottleneck for f in judge(both)] == ["input", "interconnect"]


def test_a_spike_is_far_above_its_own_window() -> None:
    draw = random.Random(1)
    values = [3 + draw.gauss(0, 0.05) for _ in range(60)]
    assert spiked(values) == 0
    assert spiked([*values, 4.0, *values]) == 1
    assert spiked([3.0] * 5 + [9.0] + [3.0] * 90) == 0, "too few before it"


def test_what_is_usual_is_no_fault() -> None:
    """A full GPU, a loss that creeps, clipping, a scale that is being found."""
    usual = replace(
        healthy(), reserved_bytes=131.0 * GIB, allocated_bytes=129.0 * GIB,
        loss=tuple(2 + 1e-5 * n for n in range(STEPS)),
        grad_norm=(math.nan,) * 2 + (3.0,) * (STEPS - 2),
    )  # fmt: skip
    assert [f.bottleneck for f in judge(usual)] == ["computation"]


def test_what_takes_time_stands_before_memory() -> None:
    both = replace(
        slowed(healthy(), 0.3, "input_s"), reserved_bytes=20.0 * GIB, saves_memory=("offload",)
    )  # fmt: skip
    assert [f.bottleneck for f in judge(both)] == ["input", "unused memory"]


def test_a_window_is_the_steady_rows_of_a_run(tmp_path: Path) -> None:
    rows = [{"step": n, "step_s": 0.1, "input_s": 0.01, "compile_s": 0.0} for n in range(1, 12)]
    rows[0]["compile_s"] = rows[5]["compile_s"] = 2.0
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 12, "st')
    found = read_rows(file)
    assert found == rows and len(steady(found)) == 8
    report = {
        "peak_memory_bytes": {"allocated": 7, "reserved": 9, "method": "tracker"},
        "wasted_token_fraction": 0.25, "signals": None,
    }  # fmt: skip
    window = of_run(report, found)
    assert window.steps == 8 and window.late_graphs == 1
    assert window.allocated_bytes is None and window.useful_share == 0.75
    assert window.share(window.input_s) == pytest.approx(0.1) and window.slack_s is None
    assert series(rows, "loss") is None
    lost = [{**row, "loss": None if n == 4 else 2.0} for n, row in enumerate(rows)]
    read = series(lost, "loss")
    assert read and math.isnan(read[4]) and read.count(2.0) == len(rows) - 1
    again = [{**row, "session": n // 6} for n, row in enumerate(rows)]
    assert len(steady(again)) == 6, "each session has first steps"
    file.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(RunError, match="line 1 is damaged"):
        read_rows(file)
    assert read_rows(tmp_path / "nothing.jsonl") == []
