"""One planted fault of an observation is named, and nothing in healthy ones."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from headrace.core.errors import RunError
from headrace.doctor.findings import KIND_OF, Finding, Kind
from headrace.doctor.observation import Observation, observe, read_rows, series, steady
from headrace.doctor.physics import binding
from headrace.doctor.rules import BACK_STEPS, JUMPS, LOSS_JUMP, busy_in, faults
from headrace.doctor.series import deviation, jumps, relapsed, rises
from headrace.doctor.use import Use

STEPS, GIB = 64, 2**30


def judge(seen: Observation, trace: Sequence[Finding] = ()) -> list[Finding]:
    """Return what rules say of steps whose work fills them, by the device's rates."""
    usual_s = median(seen.step_s or (1.0,))
    waits = (seen.share(seen.input_s) or 0.0) + (seen.share(seen.communication_s) or 0.0)
    work_s = (1 - min(0.9, waits)) * usual_s
    use = Use(0.7 * work_s, 0.26 * work_s, 0.2 * work_s)
    seen = replace(seen, use=use, traced=tuple(trace))
    return faults(seen) or [binding(seen, busy_in(trace))]


def healthy(seed: int = 0, device: str = "cuda") -> Observation:
    """Return a steady run: little waits, a falling loss, most of the memory in use."""
    draw = random.Random(seed)
    step_s = tuple(0.1 * draw.uniform(0.98, 1.03) for _ in range(STEPS))
    loss = tuple(6 * (n + 20) ** -0.2 + draw.gauss(0, 0.05) for n in range(STEPS))
    return Observation(
        step_s=step_s,
        input_s=tuple(0.01 * s for s in step_s),
        forward_s=tuple(0.3 * s for s in step_s),
        backward_s=tuple(0.6 * s for s in step_s),
        communication_s=(0.0,) * STEPS,
        slack_s=tuple(0.6 * s for s in step_s) if device == "cuda" else None,
        loss=loss,
        grad_norm=tuple(0.5 + draw.gauss(0, 0.05) for _ in range(STEPS)),
        useful_share=0.99,
        graph_breaks=0,
        tiny=900,
        host_s=0.002,
        wide_flops=0.02,
        wider=2.0,
        untrained=0.02,
        straggler_s=0.002,
        waited_s=0.001,
        last=1,
        last_share=0.5,
        allocated_bytes=110.0 * GIB,
        reserved_bytes=118.0 * GIB,
        capacity_bytes=140.0 * GIB,
        alloc_retries=0,
        device=device,
    )


def saved(gib: float, **costs: float) -> dict[str, float]:
    """Return what a technique takes off the peak, and what that costs."""
    return {"bytes": gib * GIB, "again": 0.25, "moved": 1e9} | costs


def slowed(window: Observation, share: float, key: str) -> Observation:
    """Return steps of which `share` is `key`."""
    more = tuple(s * share / (1 - share) for s in window.step_s)
    held = getattr(window, key) or (0.0,) * STEPS
    whole = tuple(a + b for a, b in zip(window.step_s, more, strict=True))
    return replace(
        window, step_s=whole, **{key: tuple(a + b for a, b in zip(held, more, strict=True))}
    )


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_nothing_is_found_where_nothing_is_wrong(seed: int, device: str) -> None:
    (found,) = judge(healthy(seed, device))
    assert found.bottleneck == "computation" and found.kind is Kind.COMPUTES


def test_too_few_steps_are_not_judged() -> None:
    few = healthy()
    (found,) = judge(replace(few, step_s=few.step_s[:5]))
    assert found.bottleneck == "not measured"


@pytest.mark.parametrize("steps", [2, STEPS])
def test_a_run_that_ended_of_a_number_that_is_not_finite(steps: int) -> None:
    window = replace(healthy(), step_s=healthy().step_s[: steps - 2])
    for key, error, named in (
        ("grad_norm", "Diverged", True),
        ("loss", "ValueError", True),
        ("grad_norm", "KeyError", False),
        ("grad_norm", "", False),
        ("loss", "", False),
    ):
        values = (*getattr(window, key)[: steps - 1], math.nan)
        ended = replace(window, **{key: values}, ended_by=error, message="why")
        found = judge(ended)[0]
        assert (found.bottleneck == "instability") is named, (key, error)
        assert not named or (found.share, found.facts["message"]) == (1.0, "why")


def test_losses_that_are_not_finite_are_lost_where_no_norm_is_read() -> None:
    window = replace(healthy(), loss=(6.0, *(math.nan,) * (STEPS - 1)), grad_norm=None)
    found = judge(window)[0]
    assert found.kind is Kind.LOST_STEPS
    assert found.facts == {"lost": STEPS - 1, "steps": STEPS}


@pytest.mark.parametrize("steps", [0, STEPS])
def test_a_run_that_ended_of_a_full_memory(steps: int) -> None:
    window = replace(healthy(), alloc_retries=3)
    window = replace(window, step_s=window.step_s[:steps], ended_by="MemoryFull", message="why")
    (found,) = judge(window)
    assert (found.bottleneck, found.share) == ("memory capacity", 1.0)
    assert found.facts["message"] == "why"


def test_a_run_that_ended_of_something_else_is_judged_by_its_steps() -> None:
    assert judge(replace(healthy(), ended_by="RunError"))[0].bottleneck == "computation"


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
        ({"slack_s": (0.0012,) * STEPS}, "launch"),
        ({"recompile_s": (0.5,) * 4}, "launch"),
        ({"graph_breaks": 9}, "launch"),
        ({"host_s": 0.008}, "launch"),
        ({"wide_flops": 0.2, "wider": 2.0}, "kernel efficiency"),
        ({"straggler_s": 0.008}, "straggler"),
        ({"untrained": 0.1}, "silent no-op"),
        ({"useful_share": 0.8}, "wasted tokens"),
        ({"alloc_retries": 3, "allocated_bytes": 80.0 * GIB}, "fragmentation"),
        (
            {"reserved_bytes": 135.0 * GIB, "allocated_bytes": 130.0 * GIB, "alloc_retries": 2},
            "memory capacity",
        ),
        (
            {
                "reserved_bytes": 60.0 * GIB,
                "savings": {"ckpt": {"bytes": 30.0 * GIB, "again": 0.25}},
            },
            "unused memory",
        ),
        ({"inactive": ("flash_attention",)}, "silent no-op"),
        ({"grad_norm": (math.nan,) * 9 + (0.5,) * (STEPS - 9)}, "instability"),
        (
            {"grad_norm": tuple(0.5 + 0.01 * (n % 3) + 9 * (n % 10 == 9) for n in range(STEPS))},
            "instability",
        ),
        ({"loss": tuple(3 + 0.05 * n for n in range(STEPS))}, "instability"),
        ({"loss": (6.0, 5.8, 7.1, 7.4, 6.8, 6.2) + (5.5,) * (STEPS - 6)}, "instability"),
    ],
)
def test_one_fault_is_named_first_and_alone(changes: dict[str, Any], name: str) -> None:
    (found,) = judge(replace(healthy(), **changes))
    assert found.bottleneck == name


@pytest.mark.parametrize(("wider", "share"), [(2.0, 0.2 / 1.2), (4.0, 0.6 / 1.6)])
def test_wide_products_cost_what_the_plans_own_would_not(wider: float, share: float) -> None:
    """The share is one of the time of matmuls; both passes are 0.9 of a step here."""
    (found,) = judge(replace(healthy(), wide_flops=0.2, wider=wider))
    assert found.share == pytest.approx(0.9 * share)


def test_time_beside_the_steps_is_a_share_of_both() -> None:
    steps_s = sum(healthy().step_s)
    (again,) = judge(replace(healthy(), recompile_s=(steps_s / 12,) * 4))
    assert again.share == pytest.approx(0.25)  # a third of the steps' time came to it
    disturbed = tuple(s if n % 2 else 9 * s for n, s in enumerate(healthy().step_s))
    (tiny,) = judge(Observation(step_s=disturbed, tiny=900, host_s=0.01))
    assert tiny.share == pytest.approx(0.1, rel=0.02), "of a step that nothing disturbed"
    assert judge(Observation(step_s=disturbed, tiny=9, host_s=0.006))[0].bottleneck == "computation"


@pytest.mark.parametrize(("lost", "of", "name"), [(4, 64, "instability"), (6, 128, "computation")])
def test_a_share_of_the_steps_may_be_lost(lost: int, of: int, name: str) -> None:
    norms = (math.nan,) * lost + (0.5,) * (of - lost)
    assert judge(replace(healthy(), grad_norm=norms))[0].bottleneck == name


@pytest.mark.parametrize(("of", "name"), [(180, "instability"), (360, "computation")])
def test_a_share_of_the_steps_may_jump(of: int, name: str) -> None:
    """Five norms of gradients are far above the others."""
    norms = tuple(0.5 + 0.01 * (n % 3) + 9 * (n in range(30, 180, 30)) for n in range(of))
    assert judge(replace(healthy(), grad_norm=norms))[0].bottleneck == name


@pytest.mark.parametrize(
    ("places", "name"),
    [((16, 20, 25, 120), "computation"), ((16, 20, 100, 120), "instability")],
)
def test_norms_that_jump_after_the_warmup_alone_are_no_fault(
    places: tuple[int, ...], name: str
) -> None:
    norms = tuple(0.5 + 0.01 * (n % 3) + 9 * (n in places) for n in range(150))
    assert judge(replace(healthy(), grad_norm=norms))[0].bottleneck == name
    losses = tuple(3 + 0.01 * (n % 3) + 9 * (n in places) for n in range(150))
    assert judge(replace(healthy(), loss=losses))[0].bottleneck == "instability"


def test_what_nobody_read_is_not_judged() -> None:
    bare = Observation(step_s=healthy().step_s)
    assert [f.bottleneck for f in judge(bare)] == ["computation"]
    late = replace(healthy(device="cpu"), slack_s=(0.0,) * STEPS)
    assert judge(late)[0].bottleneck == "computation", "a CPU's host cannot be ahead of itself"


def test_the_larger_share_stands_first() -> None:
    both = slowed(slowed(healthy(), 0.1, "communication_s"), 0.3, "input_s")
    assert [f.bottleneck for f in judge(both)] == ["input", "interconnect"]


def falling() -> list[float]:
    """Return a loss with its trend and its scatter."""
    draw = random.Random(1)
    return [3 + 3 * math.exp(-n / 30) + draw.gauss(0, 0.05) for n in range(120)]


def test_jumps_hide_neither_in_a_trend_nor_in_each_other() -> None:
    values = falling()
    assert jumps(values, JUMPS, LOSS_JUMP) == 0
    for every in (2, 5, 10):
        bad = range(40, 120, every)
        spiked = [v + 3 * (n in bad) for n, v in enumerate(values)]
        assert jumps(spiked, JUMPS, LOSS_JUMP) == len(bad)
    assert jumps([3.0] * 5 + [9.0] + [3.0] * 90, JUMPS, LOSS_JUMP) == 0, "too few before it"
    shifted = values[:60] + [v + 3 for v in values[60:]]
    assert jumps(shifted, JUMPS, LOSS_JUMP) == 0, "a new level is no jump"
    small = [v + 0.1 * (n == 90) for n, v in enumerate([3.0] * 120)]
    assert jumps(small, JUMPS, LOSS_JUMP) == 0, "visible, but of no account"


def test_deviation_knows_no_trend() -> None:
    draw = random.Random(0)
    noise = [draw.gauss(0, 0.05) for _ in range(400)]
    assert deviation(noise) == pytest.approx(0.05, rel=0.15)
    assert deviation([n + v for n, v in enumerate(noise)]) > 0.5, "a step of 1 is a deviation"
    steep = [3 * math.exp(-n / 100) + v for n, v in enumerate(noise)]
    assert deviation(steep) == pytest.approx(0.05, rel=0.2)


def test_a_loss_that_goes_back_for_a_while_is_a_relapse() -> None:
    values = falling()

    def back(run: int) -> int:
        up = [v + 2 * (20 <= n < 20 + run) for n, v in enumerate(values)]
        return relapsed(up, JUMPS.sigmas, LOSS_JUMP, BACK_STEPS)

    assert back(0) == 0 and back(BACK_STEPS - 1) == 0 and back(BACK_STEPS) == BACK_STEPS
    diverged = [6.0] + [9.0] * 30
    assert relapsed(diverged, JUMPS.sigmas, LOSS_JUMP, BACK_STEPS) == 30, "above its first"
    assert rises([*values, *(v + 2 for v in values)], 3, 0.02) and not rises(values, 3, 0.02)


def test_what_is_usual_is_no_fault() -> None:
    """Healthy runs have a full GPU, a loss that creeps, clipping, a scale that is being found,
    two more shapes, and savings of memory that would not do without them.
    """
    usual = replace(
        healthy(),
        reserved_bytes=131.0 * GIB,
        allocated_bytes=129.0 * GIB,
        loss=tuple(2 + 1e-5 * n for n in range(STEPS)),
        grad_norm=(math.nan,) * 2 + (3.0,) * (STEPS - 2),
        recompile_s=(9.0, 9.0),
        savings={"ckpt": saved(60.0)},
    )
    assert [f.bottleneck for f in judge(usual)] == ["computation"]
    long = replace(usual, recompile_s=(0.01,) * 5)
    assert [f.bottleneck for f in judge(long)] == ["computation"], "they take no time to speak of"
    tight = replace(usual, reserved_bytes=60.0 * GIB)
    assert [f.bottleneck for f in judge(tight)] == ["computation"], "120 of 140 without it"
    again = replace(tight, alloc_retries=2, allocated_bytes=55.0 * GIB)
    assert [f.bottleneck for f in judge(again)] == ["computation"], "it had begun anew, and fits"
    bump = replace(usual, loss=(6.0, 5.8, 7.1, 7.4) + (5.5,) * (STEPS - 4))
    assert [f.bottleneck for f in judge(bump)] == ["computation"], "two steps"
    lean = replace(tight, savings={"8bit": saved(6.0, again=0.0, moved=0.0)})
    assert [f.bottleneck for f in judge(lean)] == ["computation"], "it costs no time"


def test_a_wait_for_a_late_rank_is_no_transfer() -> None:
    late = slowed(healthy(), 0.2, "communication_s")
    first, second = judge(replace(late, straggler_s=0.024, waited_s=0.012))
    assert (first.bottleneck, second.bottleneck) == ("straggler", "interconnect")
    assert second.share == pytest.approx(0.1, abs=0.01)
    assert not first.facts["same_rank"]
    (only,) = judge(replace(late, straggler_s=0.024, waited_s=0.024, last_share=0.9))
    assert only.facts["same_rank"] and only.facts["rank"] == 1


def test_what_takes_time_stands_before_memory_and_what_is_not_known_to() -> None:
    both = replace(
        slowed(healthy(), 0.3, "input_s"),
        alloc_retries=3,
        allocated_bytes=80.0 * GIB,
        graph_breaks=4,
        useful_share=0.6,
    )
    names = [f.bottleneck for f in judge(both)]
    assert names == ["wasted tokens", "input", "fragmentation", "launch"]
    (once,) = judge(replace(healthy(), recompile_s=(0.5,) * 4, graph_breaks=9))
    assert once.bottleneck == "launch" and once.share > 0, "breaks cost what is known already"


def test_a_trace_tells_more_than_signals() -> None:
    def traced(name: str, share: float) -> Finding:
        return Finding(KIND_OF[name], share, {"traced": True})

    late = replace(healthy(), slack_s=(0.0,) * STEPS)
    assert judge(late)[0].confidence == "inferred"
    assert [f.bottleneck for f in judge(late, [traced("computation", 0.9)])] == ["computation"]
    (found,) = judge(late, [traced("launch", 0.3)])
    assert (found.share, found.facts.get("traced")) == (0.3, True)
    slow = slowed(healthy(), 0.2, "input_s")
    found, other = judge(slow, [traced("kernel efficiency", 0.4), traced("not measured", 0.1)])
    assert (found.bottleneck, other.bottleneck) == ("kernel efficiency", "input")
    assert judge(late, [traced("not measured", 0.1)])[0].bottleneck == "launch"
    (found,) = judge(Observation(step_s=(0.1, 0.1)), [traced("kernel efficiency", 0.4)])
    assert found.facts["traced"], "few steady steps are enough where some were traced"
    pieces = replace(slow, alloc_retries=3, allocated_bytes=80.0 * GIB)
    first, second = judge(pieces, [traced("memory capacity", 0.3)])
    assert (first.bottleneck, first.share) == ("fragmentation", 0.3), "its time, by its name"
    assert second.bottleneck == "input"


def measured_on_a_gpu(name: str) -> Observation:
    """Return healthy runs of an H200, by their step, slack and wait for data: measured means."""
    step_s, slack, waits = {
        "160m": (0.0597, 0.342, 0.0008),
        "400m": (0.2326, 0.0202, 0.0004),
        "600m, many launches": (0.2326, 0.0, 0.0004),
    }[name]
    steps = (step_s,) * 24
    return replace(
        healthy(),
        step_s=steps,
        slack_s=(slack * step_s,) * 24,
        input_s=(waits * step_s,) * 24,
        forward_s=(0.3 * step_s,) * 24,
        backward_s=(0.65 * step_s,) * 24,
        communication_s=None,
        tiny=None,
        host_s=None,
        wide_flops=None,
        straggler_s=None,
        waited_s=None,
        last=None,
        allocated_bytes=33.0 * GIB,
        reserved_bytes=38.0 * GIB,
    )


def test_a_gpu_whose_queue_is_full_is_not_waiting_for_its_host() -> None:
    for name in ("160m", "400m"):
        assert [f.bottleneck for f in judge(measured_on_a_gpu(name))] == ["computation"], name
    full = measured_on_a_gpu("600m, many launches")
    assert judge(full)[0].bottleneck == "launch"  # without more, it might be late
    ahead = replace(full, dry=(0.0,) * 20 + (1.0,) * 4)
    assert judge(ahead)[0].bottleneck == "computation"
    (late,) = judge(replace(full, dry=(1.0,) * 24))
    assert late.bottleneck == "launch" and late.facts["dry_share"] == 1.0
    calm = Finding(Kind.TRACE_COMPUTATION, 0.97)
    assert judge(full, [calm])[0].bottleneck == "computation"  # a trace saw it busy


def test_a_gpus_planted_memory_and_compilations_are_named() -> None:
    """Shares are as fault_doses and the planted pieces leave them on a device of 140 GiB."""
    run, calm = measured_on_a_gpu("160m"), [Finding(Kind.TRACE_COMPUTATION, 0.97)]
    pieces = replace(run, alloc_retries=1, allocated_bytes=45 * GIB, reserved_bytes=61 * GIB)
    assert judge(pieces, calm)[0].bottleneck == "fragmentation"
    full = replace(run, alloc_retries=1, allocated_bytes=128 * GIB, reserved_bytes=132 * GIB)
    assert judge(full, calm)[0].bottleneck == "memory capacity"
    again = replace(run, recompile_s=(0.04,) * 6)
    assert judge(again, calm)[0].bottleneck == "launch"
    spared = replace(run, savings={"full_checkpoint": saved(19.0, again=0.18)})
    assert judge(spared, calm)[0].bottleneck == "unused memory"


def test_a_window_is_the_steady_rows_of_a_run(tmp_path: Path) -> None:
    rows = [{"step": n, "step_s": 0.1, "input_s": 0.01, "compile_s": 0.0} for n in range(1, 12)]
    rows[0]["compile_s"] = rows[5]["compile_s"] = 2.0
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 12, "st')
    found = read_rows(file)
    assert found == rows and len(steady(found)) == 8
    report = {
        "peak_memory_bytes": {"allocated": 7, "reserved": 9, "method": "tracker"},
        "wasted_token_fraction": 0.25,
        "signals": None,
    }
    window = observe(report, found)
    assert window.steps == 8 and window.recompile_s == (0.0,) and not window.tiny
    assert window.allocated_bytes is None and window.useful_share == 0.75
    assert window.share(window.input_s) == pytest.approx(0.1) and window.slack_s is None
    assert series(rows, "loss") is None
    report["signals"] = {
        "precision": "fp32",
        "device": "cpu",
        "operations": {
            "views": 3,
            "tiny": 4,
            "host_s": 0.01,
            "product_flops": {"float32": 60, "float64": 20, "bfloat16": 20},
        },
        "ranks": {"late_s": 0.2, "last": 1, "last_share": 0.5, "waited_s": [0.1, 0.0]},
        "savings": {"ckpt": saved(5)},
    }
    told = observe(report, [{**row, "loss": 1.0} for row in rows])
    assert (told.tiny, told.wide_flops, told.wider) == (7, 0.2, 2.0)
    assert (told.straggler_s, told.waited_s, told.savings["ckpt"]) == (0.2, 0.1, saved(5))
    assert told.loss is not None and len(told.loss) == len(rows), "every step's"
    lost = [{**row, "loss": None if n == 4 else 2.0} for n, row in enumerate(rows)]
    read = series(lost, "loss")
    assert read and math.isnan(read[4]) and read.count(2.0) == len(rows) - 1
    idle = [{**row, "other_s": 0.04} for row in rows]
    left = observe(report, idle)
    assert left.step_s == pytest.approx((0.06,) * 8), "what a loop does between is no step"
    assert left.recompile_s == (0.0,)
    again = [{**row, "session": n // 6} for n, row in enumerate(rows)]
    assert len(steady(again)) == 6, "each session has first steps"
    file.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(RunError, match="line 1 is damaged"):
        read_rows(file)
    assert read_rows(tmp_path / "nothing.jsonl") == []
